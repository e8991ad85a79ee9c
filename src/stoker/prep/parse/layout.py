"""Turn a block of typed columns into the arrays of a part: labels, dense values, codes, dictionaries."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.dataset.rebuild import UnusableInput
from stoker.prep.fit.dense import compact, ordered_floats, ordered_int
from stoker.prep.parse.dictionaries import hashes_of, number_ints, number_texts, text_hashes
from stoker.prep.parse.frames import Block, Field
from stoker.prep.parse.moments import UNKNOWN, read_moments
from stoker.prep.parse.notation import AS_TYPED, PLAIN, TYPED, VALUE, notation_of_operand, with_point, written
from stoker.prep.schema import RULE_KEYS, CategoricalColumn, Schema, SequenceColumn
from stoker.prep.stages.parts import Arrays

Array = npt.NDArray[Any]
SPLIT_CODES = {"train": 0, "valid": 1, "test": 2, "drop": 255}
COMPARE: dict[str, Any] = {
    ">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


class Layout:
    """The fields to read for a schema, and the arrays of a part.

    * ``labels`` [n] float32, NaN where an optional label is missing.
    * ``raw.<c>`` [n]: dense column c, in the type that :func:`stoker.prep.fit.dense.compact` chooses.
    * ``codes.<i>`` [n] uint8, uint16 or uint32: feature i. For a sequence [L] uint32, with ``counts.<i>`` [n].
    * ``values.<i>``, or ``bytes.<i>`` and ``ends.<i>``: its dictionary. Code c is entry c - 1, code 0 is missing.
      Columns with hash buckets have ids instead of codes, and no dictionary.
    * ``time`` [n] int64, ``split`` [n] uint8, ``codes.user`` [n] with its dictionary: for the split rule.
    * ``codes.group`` [n] with its dictionary: for groups; code 0 means no group.
    * ``keep``: the bytes of an Arrow file with the kept columns.
    """

    def __init__(self, schema: Schema, *, keys_only: bool = False) -> None:
        self.schema = schema
        # Labels, times and splits are read before features are computed, the rest after.
        self.columns = () if keys_only else schema.dense
        self.features = () if keys_only else schema.features
        self.one_hot = [i for i, column in enumerate(self.features) if not isinstance(column, SequenceColumn)]
        self.sequences = [i for i, column in enumerate(self.features) if isinstance(column, SequenceColumn)]
        rule = schema.label.parsed()
        operand = 0.0 if rule is None else rule[1]
        needed, notation = schema.label.required, schema.notation_of(schema.label.column)
        if isinstance(operand, str) and notation != AS_TYPED:  # so that True of a table meets its text, and 2.5 2.50
            notation, operand = notation_of_operand(operand)
        self._operand = operand
        self.label = Field(
            column=schema.label.column, kind="string" if isinstance(operand, str) else "float", required=needed,
            optional=not needed, decimal=schema.source.decimal, notation=notation,
            compared="" if notation == AS_TYPED else str(operand),
        )  # fmt: skip
        decimal = schema.source.decimal
        self.dense = [Field(column=column.raw, kind="float", decimal=decimal, notation=schema.notation_of(column.raw))
                      for column in self.columns]  # fmt: skip
        self.feature_fields = [*map(self._ids_field, self.features)]
        self.time: Field | None = None
        if schema.timestamp is not None:
            name = schema.timestamp.column
            self.time = Field(column=name, kind=schema.timestamp.type, required=True, notation=schema.notation_of(name))
        self.split: Field | None = None
        if schema.split.column is not None and "column" in RULE_KEYS[schema.split.rule]:
            notation = schema.notation_of(schema.split.column)
            self.split = Field(column=schema.split.column, kind="string", required=True, notation=notation)
        self.group: Field | None = None
        if schema.group is not None and not keys_only:
            # Rows that only window features see belong to no split, and need no group.
            notation = schema.notation_of(schema.group)
            self.group = Field(column=schema.group, kind="string", required=not schema.feature, notation=notation)
        optional = [item for item in (self.time, self.split, self.group) if item is not None]
        self.kept = [] if keys_only else [self._kept_field(name) for name in schema.keep]
        label = [self.label] * bool(schema.label.column)
        everything = [*label, *self.dense, *self.feature_fields, *optional, *self.kept]
        self.fields: list[Field] = list(dict.fromkeys(everything))

    def _ids_field(self, column: CategoricalColumn) -> Field:
        notation = self.schema.notation_of(column.raw)
        item = Field(column=column.raw, kind=column.type, ids=column.type == "float", notation=notation)
        if isinstance(column, SequenceColumn):
            item = replace(item, separator=column.separator, max_length=column.max_length, keep=column.keep)
        return item

    def _kept_field(self, name: str) -> Field:
        """Return the field of a kept column in files without types: of the schema's type, else text."""
        kinds = {item.kind for item in (self.label, *self.dense, *self.feature_fields)
                 if item.column == name and item.separator is None}  # fmt: skip
        kind = next((kind for kind in ("string", "int", "float") if kind in kinds), "string")
        if self.time is not None and self.time.column == name:
            kind = self.time.kind
        return Field(column=name, kind=kind, optional=self.label.optional and name == self.label.column, kept=True)

    @property
    def raw_columns(self) -> list[str]:
        """Raw columns that a file must have."""
        return list(dict.fromkeys(item.column for item in self.fields))

    def arrays(self, block: Block, file: str) -> dict[str, Array]:
        """Return the arrays of a block.

        Rows whose label is neither 0 nor 1, or whose time cannot be read, become bad lines of the block.

        Raises:
            DataError: the schema lists no such value of the split column, or a label is its rule's number otherwise.
        """
        if self.schema.label.rule is None and self.schema.label.column:
            block.drop_labels(self.label)
        time = self.times(block)
        out: dict[str, Array] = {"labels": self._labels(block, file)}
        if time is not None:
            out["time"] = time
        for index, item in enumerate(self.dense):
            out[f"raw.{index}"] = compact(block.columns[item].to_numpy())
        for index, item in enumerate(self.feature_fields):
            column = block.columns[item]
            if item.separator is not None:
                out[f"counts.{index}"] = column.list.len().to_numpy().astype(np.int32)
                column = column.explode(empty_as_null=False)
            codes, most = self._encode(index, column, out)
            out[f"codes.{index}"] = codes if item.separator is not None else codes.astype(code_type(most))
        self._split_arrays(block, file, out)
        if self.group is not None:
            groups, texts, ends = number_texts(block.columns[self.group])
            out |= {"codes.group": groups.astype(code_type(len(ends) - 1)), "bytes.group": texts, "ends.group": ends}
        if self.kept:
            stream = BytesIO()
            kept_frame(block, self.kept, time).write_ipc(stream, compression="lz4")
            out["keep"] = np.frombuffer(stream.getvalue(), np.uint8)
        return out

    def _labels(self, block: Block, file: str) -> npt.NDArray[np.float32]:
        if not self.schema.label.column:
            return np.full(block.rows, np.nan if self.label.optional else 1, np.float32)
        column = block.columns[self.label]
        if (rule := self.schema.label.parsed()) is not None:
            if self.label.notation == VALUE or self.label.notation.startswith(TYPED):
                self._check_digits(column, rule[0], file)
            column = COMPARE[rule[0]](column, self._operand)
        return column.cast(pl.Float32).to_numpy()  # NaN where it is null

    def _check_digits(self, column: pl.Series, operator: str, file: str) -> None:
        """Raise :class:`UnusableInput` if a text is the number of the rule, but another text."""
        number = str(written(pl.Series([self._operand]), VALUE)[0])
        commas = column.str.contains(",", literal=True) & (self.label.decimal != ".")
        texts = column.zip_with(~commas, with_point(column)) if commas.any() else column
        if len(other := column.filter((written(texts, VALUE) == number) & (column != self._operand))):
            raise UnusableInput(
                f"{file}: column {self.label.column} holds {other[0]!r}, the number of the rule "
                f"{self.schema.label.rule!r} in other digits. To compare numbers, write {operator} {number} without "
                "quotes; to compare texts such as versions, take a feature of kind match as the label."
            )

    def times(self, block: Block) -> npt.NDArray[np.int64] | None:
        """Return times [n] as ordered integers, dates in microseconds; rows without a time become bad lines."""
        if self.time is None or self.schema.timestamp is None:
            return None
        column = block.columns[self.time]
        if column.dtype != pl.String:
            return ordered_int(column.to_numpy())
        pattern = self.schema.timestamp.format
        moments = read_moments(column, pattern)
        if (wrong := moments == UNKNOWN).any():
            name, kind = self.time.column, "in ISO 8601" if pattern is None else f"in the format {pattern!r}"
            block.drop(wrong, lambda row: f"column {name}: {column[row][:40]!r} is not a date and time {kind}")
        found: npt.NDArray[np.int64] = moments[~wrong]
        return found

    def _encode(self, index: int, column: pl.Series, out: dict[str, Array]) -> tuple[Array, int]:
        """Return the codes of a feature, uint32, and the greatest possible code; put its dictionary into ``out``."""
        feature = self.features[index]
        column = keys_of(column, feature, self.schema)
        if feature.hash_buckets is not None:
            return bucket_ids(hashes_of(column), column.is_null().to_numpy(), feature), feature.hash_buckets
        if column.dtype == pl.String:
            codes, out[f"bytes.{index}"], ends = number_texts(column)
            out[f"ends.{index}"] = ends
            return codes, len(ends) - 1
        codes, out[f"values.{index}"] = number_ints(column)
        return codes, len(out[f"values.{index}"])

    def _split_arrays(self, block: Block, file: str, out: dict[str, Array]) -> None:
        if self.split is None:
            return
        column, rule = block.columns[self.split], self.schema.split
        if rule.rule == "hash":
            out["split"] = share_of_hash(text_hashes(column, rule.seed), (rule.train, rule.valid))
            return
        if rule.rule != "column":
            out["codes.user"], out["bytes.user"], out["ends.user"] = number_texts(column)
            return
        if unknown := [name for name in column.unique(maintain_order=True).to_list() if name not in rule.values]:
            raise UnusableInput(
                f"{file}: column {self.split.column} holds {unknown[0]!r}, which the split rule "
                f"does not list: {', '.join(map(repr, rule.values))}. Add it; 'drop' leaves such rows out."
            )
        codes = {name: SPLIT_CODES[target] for name, target in rule.values.items()}
        out["split"] = column.replace_strict(codes, return_dtype=pl.UInt8).to_numpy()


def code_type(most: int) -> np.dtype[Any]:
    """Return the narrowest type of codes up to ``most``."""
    return np.dtype(next(dtype for dtype in (np.uint8, np.uint16, np.uint32) if most <= np.iinfo(dtype).max))


def kept_frame(block: Block, fields: Sequence[Field], time: Array | pl.Series | None) -> pl.DataFrame:
    """Return the kept columns of a block; a timestamp that is text becomes ``time`` [n], from :meth:`Layout.times`."""
    found = {item.column: block.columns[item] for item in fields}
    for item in fields:
        if item.kind == "datetime" and found[item.column].dtype == pl.String:
            found[item.column] = pl.Series(time).cast(pl.Datetime("us"))
    return pl.DataFrame(found)


def share_of_hash(hashes: npt.NDArray[np.uint64], shares: Sequence[float]) -> npt.NDArray[np.uint8]:
    """Return the split (0, 1, ...) of each hash, read as a fraction of 2**64; the last split takes the rest."""
    fractions = (hashes >> np.uint64(11)) * 2.0**-53
    return np.searchsorted(np.cumsum(shares), fractions, side="right").astype(np.uint8)


def time_value(number: int, kind: str) -> int | float | str:
    """Return a time of a part in its timestamp type: a number, or for a datetime the UTC time as text."""
    if kind == "int":
        return number
    if kind == "float":
        return float(ordered_floats(np.array([number]))[0])
    unit: Any = "us" if number % 1_000_000 else "s"
    return f"{np.datetime_as_string(np.datetime64(number, 'us'), unit=unit)}Z"


def keys_of(column: pl.Series, feature: CategoricalColumn, schema: Schema) -> pl.Series:
    """Return texts, and numbers as int64 of the same bits, after fill and modulo; null where missing."""
    if column.dtype == pl.String:
        column = column if feature.fill is None else column.fill_null(str(feature.fill))
        same = schema.notation_of(feature.raw) == PLAIN or schema.notation_of("") == AS_TYPED
        return column if feature.hash_buckets is None or same else written(column, PLAIN)  # a vocabulary has 2.50 so
    if feature.fill is not None:
        fill: Any = feature.fill
        value = int(fill, 16) if feature.type == "hex" and isinstance(fill, str) else fill
        column = column.fill_null(pl.lit(value, column.dtype))
    if feature.type == "float":  # -0.0 and 0.0 are one key
        return column.set((column == 0).fill_null(False), 0.0).reinterpret(dtype=pl.Int64)
    if feature.modulo is not None:
        column = column % feature.modulo
    return column.reinterpret(signed=True) if feature.type == "hex" else column


def bucket_ids(hashes: Array, missing: Array, feature: CategoricalColumn) -> npt.NDArray[np.uint32]:
    """Return 1 + hash % buckets; a missing value is 0, or the bucket of the empty text if it is a category."""
    assert feature.hash_buckets is not None
    buckets = np.uint64(feature.hash_buckets)
    ids = (hashes % buckets).astype(np.uint32) + np.uint32(1)
    own = int(text_hashes(pl.Series([""]), 0)[0] % buckets) + 1 if feature.missing == "category" else 0
    return np.where(missing, np.uint32(own), ids)


def raw_columns(arrays: Arrays, layout: Layout) -> list[Array]:
    """Return the dense columns of a part, as read."""
    return [arrays[f"raw.{index}"] for index in range(len(layout.dense))]


def feature_codes(arrays: Arrays, index: int) -> tuple[Array, Array | None]:
    """Return the codes of a feature and, for a sequence, the number of codes of each row."""
    return arrays[f"codes.{index}"], arrays.get(f"counts.{index}")
