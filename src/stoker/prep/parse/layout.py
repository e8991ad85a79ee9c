"""From a block of typed columns to the arrays of a part: labels, dense values, codes, dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.dataset.rebuild import UnusableInput
from stoker.prep.fit.dense import compact, dense_values, ordered_floats, ordered_int
from stoker.prep.parse.columns import Block, Field, RawColumn
from stoker.prep.parse.dictionaries import number_ints, number_texts, splitmix, text_hashes
from stoker.prep.parse.frames import kept_series
from stoker.prep.parse.moments import UNKNOWN, read_moments
from stoker.prep.schema import CategoricalColumn, Schema, SequenceColumn
from stoker.prep.stages.parts import PartFile

__all__ = ["Layout", "code_type", "feature_codes", "kept_frame", "raw_columns", "share_of_hash", "time_value"]

Array = npt.NDArray[Any]
SPLIT_CODES = {"train": 0, "valid": 1, "test": 2, "drop": 255}
_COMPARE = {
    ">=": np.greater_equal, ">": np.greater, "<=": np.less_equal, "<": np.less,
    "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


class Layout:
    """What to read for a schema and where it goes in a part.

    Arrays of a part: ``labels`` [n] float32, NaN where an optional one is missing; ``dense`` [n, D] float32, or when
    something is fitted ``raw.<c>`` [n], as :func:`stoker.prep.fit.dense.compact` narrows it; ``codes.<i>`` [n] of
    feature i, uint8, uint16 or uint32, or [L] uint32 and ``counts.<i>`` [n] if that is a sequence; ``values.<i>``, or
    ``bytes.<i>`` and ``ends.<i>``, its dictionary (code 0 is missing, code c is entry c - 1; columns with hash buckets
    hold ids and have none); for the split ``time`` [n] int64, ``split`` [n] uint8, and ``codes.user`` [n] with its
    dictionary; for groups ``codes.group`` [n] with its dictionary (0: none); and ``keep``, the bytes of an Arrow
    file that holds the kept columns.
    """

    def __init__(self, schema: Schema, *, keys_only: bool = False) -> None:
        self.schema = schema
        # What labels, times and splits need is read before features are worked out, the rest after.
        self.columns = () if keys_only else schema.dense
        self.features = () if keys_only else schema.features
        self.one_hot = [i for i, column in enumerate(self.features) if not isinstance(column, SequenceColumn)]
        self.sequences = [i for i, column in enumerate(self.features) if isinstance(column, SequenceColumn)]
        self.dense_width = sum(len(column.names) for column in self.columns)
        self.fitted = any(column.fitted for column in self.columns)
        rule = schema.label.parsed()
        textual = rule is not None and isinstance(rule[1], str)
        needed = schema.label.required
        self.label = Field(
            column=schema.label.column, kind="string" if textual else "float", required=needed, optional=not needed
        )
        self.dense = [Field(column=column.raw, kind="float") for column in self.columns]
        self.feature_fields = [_feature_field(column) for column in self.features]
        self.time: Field | None = None
        if schema.timestamp is not None:
            self.time = Field(column=schema.timestamp.column, kind=schema.timestamp.type, required=True)
        self.split: Field | None = None
        by_column = ("hash", "column", "leave_last_out", "last_touch")
        if schema.split.column is not None and schema.split.rule in by_column:
            self.split = Field(column=schema.split.column, kind="string", required=True)
        self.group: Field | None = None
        if schema.group is not None and not keys_only:
            # Rows that features look back at belong to no split, and need no group.
            self.group = Field(column=schema.group, kind="string", required=not schema.feature)
        optional = [item for item in (self.time, self.split, self.group) if item is not None]
        self.kept = [] if keys_only else [self._kept_field(name) for name in schema.keep]
        everything = [self.label, *self.dense, *self.feature_fields, *optional, *self.kept]
        self.fields: list[Field] = list(dict.fromkeys(everything))

    def _kept_field(self, name: str) -> Field:
        """Return how a kept column is read from files without types: as the schema types it, else as text."""
        kinds = {item.kind for item in (self.label, *self.dense, *self.feature_fields)
                 if item.column == name and item.separator is None}  # fmt: skip
        kind = next((kind for kind in ("string", "int", "float") if kind in kinds), "string")
        if self.time is not None and self.time.column == name:
            kind = self.time.kind
        return Field(column=name, kind=kind, optional=self.label.optional and name == self.label.column, kept=True)

    @property
    def raw_columns(self) -> list[str]:
        """Raw columns that must be there."""
        return list(dict.fromkeys(item.column for item in self.fields))

    def arrays(self, block: Block, file: str) -> dict[str, Array]:
        """The part of a block.

        Rows whose label is neither 0 nor 1 or whose time cannot be read join the block's bad lines.

        Raises:
            DataError: a split value the schema does not list.
        """
        if self.schema.label.rule is None:
            block.drop_labels(self.label)
        time = self.times(block)
        out: dict[str, Array] = {"labels": self._labels(block)}
        if time is not None:
            out["time"] = time
        columns = [block.columns[item] for item in self.dense]
        if self.fitted:
            out |= {f"raw.{i}": compact(column.pieces or [column.numbers()]) for i, column in enumerate(columns)}
        else:
            values = [column.numbers() for column in columns]
            dense = np.empty((block.rows, self.dense_width), np.float32)
            out["dense"] = dense_values(self.columns, values, out=dense)
        for index in self.one_hot:
            codes, most = self._encode(index, block.columns[self.feature_fields[index]], out)
            out[f"codes.{index}"] = codes.astype(code_type(most))
        for index in self.sequences:
            column = block.columns[self.feature_fields[index]]
            assert column.counts is not None
            flat, _ = self._encode(index, column, out)
            out[f"codes.{index}"], out[f"counts.{index}"] = flat, column.counts
        self._split_arrays(block, file, out)
        if self.group is not None:
            groups, texts, ends = number_texts(_texts(block.columns[self.group]))
            out |= {"codes.group": groups.astype(code_type(len(ends) - 1)), "bytes.group": texts, "ends.group": ends}
        if self.kept:
            stream = BytesIO()
            kept_frame(block, self.kept, time).write_ipc(stream, compression="lz4")
            out["keep"] = np.frombuffer(stream.getvalue(), np.uint8)
        return out

    def _labels(self, block: Block) -> npt.NDArray[np.float32]:
        column = block.columns[self.label]
        rule = self.schema.label.parsed()
        if rule is None:
            return column.numbers().astype(np.float32)
        operator, operand = rule
        result: npt.NDArray[np.float32]
        if isinstance(operand, str):
            same = (_texts(column) == operand).fill_null(False).to_numpy()
            result = (same if operator == "==" else ~same).astype(np.float32)
        else:
            result = _COMPARE[operator](column.numbers(), operand).astype(np.float32)
        if self.label.optional:
            result[column.absent()] = np.nan
        return result

    def times(self, block: Block) -> npt.NDArray[np.int64] | None:
        """[n] moments as whole numbers in their order, of dates microseconds; rows without one join the bad lines."""
        if self.time is None or self.schema.timestamp is None:
            return None
        column = block.columns[self.time]
        if column.texts is None:
            return ordered_int(column.numbers())
        pattern = self.schema.timestamp.format
        moments = read_moments(column.texts, pattern)
        wrong = moments == UNKNOWN
        if wrong.any():
            name, kind = self.time.column, "in ISO 8601" if pattern is None else f"in the format {pattern!r}"
            texts = column.texts
            block.drop(wrong, lambda row: f"column {name}: {texts[row][:40]!r} is not a date and time {kind}")
        return moments[~wrong] if wrong.any() else moments

    def _encode(self, index: int, column: RawColumn, out: dict[str, Array]) -> tuple[Array, int]:
        """Return the codes of a feature, uint32, and the greatest possible one; put its dictionary into ``out``."""
        feature = self.features[index]
        if column.texts is not None and feature.fill is not None:
            column = replace(column, texts=column.texts.fill_null(str(feature.fill)))
        if feature.hash_buckets is not None:
            return _bucket_ids(column, feature), feature.hash_buckets
        if column.texts is not None:
            codes, out[f"bytes.{index}"], ends = number_texts(column.texts)
            out[f"ends.{index}"] = ends
            return codes, len(ends) - 1
        codes, distinct = number_ints(*_category_values(column, feature))
        out[f"values.{index}"] = distinct
        return codes, len(distinct)

    def _split_arrays(self, block: Block, file: str, out: dict[str, Array]) -> None:
        if self.split is None:
            return
        column, rule = block.columns[self.split], self.schema.split
        if rule.rule == "hash":
            out["split"] = share_of_hash(text_hashes(_texts(column), rule.seed), (rule.train, rule.valid))
            return
        codes, texts, ends = number_texts(_texts(column))
        if rule.rule != "column":
            out |= {"codes.user": codes, "bytes.user": texts, "ends.user": ends}
            return
        raw = texts.tobytes()
        names = [raw[begin:end].decode() for begin, end in pairwise(ends.tolist())]
        unknown = [name for name in names if name not in rule.values]
        if unknown:
            raise UnusableInput(
                f"{file}: column {self.split.column} holds {unknown[0]!r}, which the split rule "
                f"does not list: {', '.join(map(repr, rule.values))}. Add it; 'drop' leaves such rows out."
            )
        lookup = np.array([255, *(SPLIT_CODES[rule.values[name]] for name in names)], np.uint8)
        out["split"] = lookup[codes]


def code_type(most: int) -> np.dtype[Any]:
    """Return the narrowest type of codes up to ``most``."""
    return np.dtype(next(dtype for dtype in (np.uint8, np.uint16, np.uint32) if most <= np.iinfo(dtype).max))


def kept_frame(block: Block, fields: Sequence[Field], time: Array | pl.Series | None) -> pl.DataFrame:
    """Return kept columns of a block; of a text that is the timestamp the moment, ``time`` [n] as of :meth:`times`.

    Raises:
        DataError: a column that cannot be kept.
    """
    found = [kept_series(block, item) for item in fields]
    for place, item in enumerate(fields):
        if item.kind == "datetime" and found[place].dtype == pl.String:
            found[place] = pl.Series(time).cast(pl.Datetime("us"))
    return pl.DataFrame([series.alias(item.column) for item, series in zip(fields, found, strict=True)])


def share_of_hash(hashes: npt.NDArray[np.uint64], shares: Sequence[float]) -> npt.NDArray[np.uint8]:
    """Split number (0, 1, ...) of each hash, read as a fraction of 2**64; the last takes the rest."""
    fractions = (hashes >> np.uint64(11)) * 2.0**-53
    return np.searchsorted(np.cumsum(shares), fractions, side="right").astype(np.uint8)


def time_value(number: int, kind: str) -> int | float | str:
    """Return a time of a part as its timestamp type has it: the number, or the UTC moment of microseconds as text."""
    if kind == "int":
        return number
    if kind == "float":
        return float(ordered_floats(np.array([number]))[0])
    unit: Any = "us" if number % 1_000_000 else "s"
    return f"{np.datetime_as_string(np.datetime64(number, 'us'), unit=unit)}Z"


def _texts(column: RawColumn) -> pl.Series:
    assert column.texts is not None
    return column.texts


def _feature_field(column: CategoricalColumn) -> Field:
    if isinstance(column, SequenceColumn):
        return Field(
            column=column.raw, kind=column.type, separator=column.separator, max_length=column.max_length,
            keep=column.keep,
        )  # fmt: skip
    return Field(column=column.raw, kind=column.type)


def _category_values(column: RawColumn, feature: CategoricalColumn) -> tuple[Array, Array]:
    """int64 keys and where they are missing, after fill and modulo."""
    values, missing = column.numbers(), column.absent()
    assert values is not None
    if feature.fill is not None:
        fill: Any = feature.fill
        if feature.type == "hex":
            fill = np.uint64(int(fill, 16) if isinstance(fill, str) else fill).astype(np.int64)
        if missing.any():
            values = np.where(missing, values.dtype.type(fill), values)
        missing = np.zeros(len(values), np.bool_)
    if feature.type == "float":
        return (values + 0.0).view(np.int64), missing
    if feature.modulo is not None:
        bits = values.view(np.uint64) if feature.type == "hex" else values
        values = (bits % bits.dtype.type(feature.modulo)).view(np.int64)
    return values, missing


def _bucket_ids(column: RawColumn, feature: CategoricalColumn) -> npt.NDArray[np.uint32]:
    """1 + hash % buckets; missing is 0, or the bucket of the empty text where it is a category of its own."""
    buckets = feature.hash_buckets
    assert buckets is not None
    if column.texts is not None:
        hashes, missing = text_hashes(column.texts, 0), column.absent()
    else:
        values, missing = _category_values(column, feature)
        hashes = splitmix(values.view(np.uint64))
    ids = (hashes % np.uint64(buckets)).astype(np.uint32) + np.uint32(1)
    own = hash_of_missing(buckets) if feature.missing == "category" else 0
    return np.where(missing, np.uint32(own), ids)


def hash_of_missing(buckets: int) -> int:
    """Id of the missing value's own bucket."""
    return int(text_hashes(pl.Series([""]), 0)[0] % np.uint64(buckets)) + 1


def raw_columns(arrays: PartFile, layout: Layout) -> list[Array]:
    """The dense columns of a part, as read."""
    return [arrays[f"raw.{index}"] for index in range(len(layout.dense))]


def feature_codes(arrays: PartFile, layout: Layout, index: int) -> tuple[Array, Array | None]:
    """Codes of a feature and, for a sequence, how many belong to each row."""
    return arrays[f"codes.{index}"], None if index in layout.one_hot else arrays[f"counts.{index}"]
