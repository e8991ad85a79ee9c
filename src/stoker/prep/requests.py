"""Encode rows in memory as ``prepare(like=dataset)`` encodes rows of files, to the bit and without a file.

A request has the raw columns and needs no label. Window features continue from the stored state and see the earlier
rows of the same request, as those of a file do. Rows are never dropped: one that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import torch

from stoker.base.checks import near
from stoker.base.engine import reason_of
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import atomic_file
from stoker.base.units import listed
from stoker.dataset.batch import Batch
from stoker.prep.features.base import ROW, RowSteps, leading
from stoker.prep.features.execute import Executor, derive, runs_of
from stoker.prep.features.fitted import FittedTable
from stoker.prep.features.past import Past
from stoker.prep.features.pipeline import FrameBlocks
from stoker.prep.fit.dense import DenseFit, dense_values
from stoker.prep.fit.vocabulary import as_raw_ids
from stoker.prep.inputs import arrow_of
from stoker.prep.like import Like, check_unit
from stoker.prep.parse.dictionaries import find_texts, hashes_of, spans_of, values_of
from stoker.prep.parse.frames import Block, Field, frame_block
from stoker.prep.parse.json_lines import json_frame
from stoker.prep.parse.layout import Layout, bucket_ids, keys_of
from stoker.prep.parse.notation import BY_VALUE, NUMBERS, written
from stoker.prep.rows.featured import RowsSink, raw_fields
from stoker.prep.schema import CategoricalColumn, Schema
from stoker.prep.stages.task import all_test, schema_after_features

Array = npt.NDArray[Any]
_SHOWN = 3  # bad rows in a message


class Ids:
    """A vocabulary for lookups: keys in rising order, and the id of each. All arrays may be mapped files.

    The key of a text is its hash, so a text that is found is compared with the one that has the id.
    """

    def __init__(self, table: pa.Table) -> None:
        """Take a table with the columns key and id and, of texts, text."""
        self.table = table
        self.missing = int(table.schema.metadata[b"missing"])
        columns = {name: table[name].chunk(0) if table[name].num_chunks == 1 else table[name].combine_chunks()
                   for name in table.column_names}  # fmt: skip
        kind = np.int64 if "text" not in columns else np.uint64
        self._keys, self._ids = values_of(columns["key"], kind), values_of(columns["id"], np.int64)
        self._texts = columns.get("text")
        self._known = (self._keys, self._ids, *spans_of(self._texts)) if "text" in columns else None

    @classmethod
    def of(cls, vocabulary: pl.DataFrame) -> Ids:
        """Make it from a vocabulary (value, count), whose row i is id i + 1; a null is the empty field."""
        values = vocabulary.get_column("value")
        absent = [place + 1 for place in values.is_null().arg_true().to_list()]
        ids = np.flatnonzero(values.is_not_null().to_numpy()) + 1
        values = values.drop_nulls()
        keys = hashes_of(values) if values.dtype == pl.String else values.to_numpy().view(np.int64)
        order = np.argsort(keys, kind="stable")
        columns = {"key": keys[order], "id": ids[order].astype(np.int64)}
        if values.dtype == pl.String:
            columns["text"] = values.gather(order).rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
        facts = {"missing": str(absent[0] if absent else 0)}
        return cls(pa.table(columns).replace_schema_metadata(facts))

    @classmethod
    def mapped(cls, path: Path) -> Ids:
        """Map what :meth:`write` wrote."""
        return cls(map_table(path))

    def write(self, path: Path) -> None:
        """Write a file that can be mapped."""
        write_mapped(path, self.table)

    def find(self, column: pl.Series) -> Array:
        """Return the id of each value [n], int64; 0 for a null and for a value that is not in the vocabulary."""
        if not len(self._keys):
            return np.zeros(len(column), np.int64)
        if self._texts is None:
            if not (absent := nulls(column)).any():
                return self._ids_of(column.to_numpy())
            return np.where(absent, 0, self._ids_of(column.fill_null(0).to_numpy()))
        texts = column.to_arrow(compat_level=pl.CompatLevel.oldest())
        bits = np.frombuffer(texts.buffers()[0] if texts.null_count else b"", np.uint8)
        found = np.empty(len(column), np.int64)
        find_texts(*spans_of(texts), bits, texts.offset, self._known, found)
        return found

    def values(self, ids: Array) -> pa.Array:
        """Return the value of each id [n]: texts or whole numbers; null for the empty field."""
        order = np.argsort(self._ids, kind="stable")
        places = np.searchsorted(self._ids[order], ids)
        absent = ids == self.missing
        places = order[np.where(absent, 0, places)] if len(order) else places
        if self._texts is not None:
            return self._texts.take(pa.array(places, mask=absent))
        return pa.array(np.asarray(self._keys[places]), mask=absent)

    def _ids_of(self, keys: Array) -> Array:
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[places] == keys, self._ids[places], 0)


def write_mapped(path: Path, table: pa.Table) -> None:
    """Write an Arrow file that can be mapped."""
    with atomic_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=max(1, len(table)))


def map_table(path: Path) -> pa.Table:
    """Map what :func:`write_mapped` wrote."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def nulls(column: pl.Series) -> npt.NDArray[np.bool_]:
    """Return where a value is missing [n]; quickly if none is."""
    return column.is_null().to_numpy() if column.null_count() else np.zeros(len(column), np.bool_)


@dataclass(frozen=True, kw_only=True)
class FittedSchema:
    """What preparing rows like those of a dataset takes, in memory or in mapped files."""

    schema: Schema
    dense: Sequence[DenseFit]
    ids: Mapping[str, Ids]  # table -> its vocabulary, where it has one
    fitted_tables: Mapping[str, FittedTable] = field(default_factory=dict)
    state: Mapping[str, pl.DataFrame] = field(default_factory=dict)  # of window features
    times: Sequence[Any] = ()  # first and last, of the dataset's rows

    @classmethod
    def of(cls, like: Like) -> FittedSchema:
        """Read it from a dataset.

        Raises:
            ConfigError: a recipe makes the rows from several files.
        """
        if like.recipe.derive is not None:
            raise ConfigError(
                f"the recipe {like.recipe.name} makes rows from whole files, so single rows cannot be scored. "
                "Score files: stoker predict RUN --data FILES, or prepare rows of your own with a schema."
            )
        named = {one.table_name for one in like.schema.features if one.hash_buckets is None and one.oov != "grow"}
        ids = {name: Ids.of(like.vocabulary(name)) for name in sorted(named)}
        return cls(
            schema=like.schema, dense=like.dense, ids=ids, fitted_tables=like.fitted_tables, state=like.state,
            times=like.times,
        )  # fmt: skip


class RowEncoder:
    """Encodes the rows of requests.

    Args:
        fitted: what the rows are encoded by.

    Raises:
        ConfigError: a feature changes the number of rows.
    """

    def __init__(self, fitted: FittedSchema) -> None:
        self.fitted = fitted
        known = Layout(fitted.schema)
        schema = replace(all_test(fitted.schema), keep=(), group=None)
        if schema.split.column is not None:
            schema = replace(schema, split=replace(schema.split, rule="hash", column=None, values={}))
        if steps := [one for one in schema.feature if isinstance(one, RowSteps)]:
            raise ConfigError(
                f"{steps[0].where} changes the number of rows, so rows cannot be scored one by one. Score files: "
                "stoker predict RUN --data FILES."
            )
        self._own = leading(schema.feature)
        self._sink = RowsSink(schema=schema, kept={})
        self._layout = Layout(schema_after_features(schema) if schema.feature else schema)
        read = {column for feature in schema.feature for column in feature.inputs}
        exact = {one.raw for one in self._layout.features if one.hash_buckets is not None or one.oov == "grow"} | read
        self._feature_fields = [_as_given(item, exact) for item in self._layout.feature_fields]
        self._needed = [*self._layout.dense, *self._feature_fields]
        wanted = {item.column for item in self._needed} | read
        # Decimals and times are never looked up as they are given: 5.00 has other texts in other scales.
        self._written_fields = [item for item in raw_fields(schema) if item.column in wanted]
        #: fields that are read of a request
        self.fields = [_as_given(item, exact) for item in self._written_fields]
        #: raw columns that a request must have
        self.columns = list(dict.fromkeys(item.column for item in self.fields))
        #: raw columns of training that scoring does not need
        self.others = sorted({item.column for item in known.fields} - set(self.columns))
        self._nulls = schema.source.null_values
        self._time = "" if schema.timestamp is None else schema.timestamp.column
        self._window = [one for one in schema.feature if isinstance(one, Past)]

    def columns_of(self, names: Collection[str]) -> set[str]:
        """Return the raw columns that only these columns of the model read, themselves or by derived features."""
        own, others = set[str](), set[str]()
        pairs = [*self._items(), *zip(self._layout.columns, self._layout.dense, strict=True)]
        for column, item in pairs:
            (own if column.name in names else others).add(item.column)
        for one in reversed(self.fitted.schema.feature):  # none reads a later one
            read = {*one.outputs} & {*own, *others}
            (own if read and not read & others else others).update(one.inputs)
        return own - others

    @property
    def independent(self) -> bool:
        """Whether rows of several requests may be encoded together: no feature of a row reads others."""
        return not self._window

    def check_objects(self, rows: Sequence[Mapping[str, Any]], filled: Collection[str] = ()) -> None:
        """Raise :class:`DataError` if a column is unknown, or in none of the objects and not ``filled``."""
        self._check_names(list(dict.fromkeys(chain.from_iterable(rows))), filled)

    def from_objects(self, rows: Sequence[Mapping[str, Any]], filled: Mapping[str, Any] = {}) -> Batch:
        """Encode objects of JSON, whose numbers are still texts (:func:`~stoker.prep.parse.json_lines.parsed`).

        Raises:
            DataError: as for :meth:`encode`, which says what ``filled`` is.
        """
        self.check_objects(rows, filled)
        rows = [{**filled, **row} for row in rows] if filled else rows
        return self._encode(frame_block(json_frame(rows, self.fields), self.fields, nulls=self._nulls))

    def encode(self, table: Any, *, unknown: bool = False, filled: Mapping[str, Any] = {}) -> Batch:
        """Encode a table: Polars, pandas, Arrow, or anything with ``__arrow_c_stream__``.

        Args:
            table: with the raw columns, in any order.
            unknown: leave out columns that the schema does not have, instead of refusing them.
            filled: values of columns that the table need not have.

        Raises:
            DataError: a column is missing or unknown, or a value does not fit; the message names the row.
        """
        frame = as_frame(table)
        self._check_names(frame.columns, filled, unknown=unknown)
        if more := [pl.lit(value).alias(name) for name, value in filled.items() if name not in frame.columns]:
            frame = frame.with_columns(more)
        kinds = " ".join(str(kind) for name, kind in frame.schema.items() if name != self._time)
        as_log = any(kind in kinds for kind in ("Decimal", "Date", "Duration"))
        fields = self._written_fields if as_log else self.fields
        return self._encode(frame_block(frame, fields, typed=True, nulls=self._nulls))

    def _check_names(self, names: Sequence[str], filled: Collection[str], *, unknown: bool = False) -> None:
        needed = [name for name in self.columns if name not in filled]
        if missing := [name for name in needed if name not in names]:
            raise DataError(
                f"the rows lack {listed([repr(name) for name in missing])}. They have: {listed(names) or 'no columns'}"
                f"; they need: {listed(needed)}. Add the column, or rename the one that is meant."
            )
        known = {*self.columns, *self.others}
        strange = [name for name in names if name not in known]
        if strange and not unknown:
            raise DataError(
                f"the rows have columns that the model does not know: {listed([repr(name) for name in strange])}."
                f"{near(strange[0], sorted(known))} Leave them out. The model reads: {listed(self.columns)}."
            )

    def _encode(self, block: Block) -> Batch:
        if self._sink.schema.feature:
            _refuse(block)
            frame = self._sink.typed(block)
            _refuse(block)  # times that cannot be read
            if self._time in frame.columns:
                given = frame.get_column(self._time)
                check_unit(self.fitted.times, [given.min(), given.max()])
            block = frame_block(self._with_features(frame), self._needed, typed=True)
        _refuse(block)
        raw = [block.columns[item].to_numpy() for item in self._layout.dense]
        fits = self.fitted.dense
        dense = dense_values(self._layout.columns, raw, fits) if raw else np.zeros((block.rows, 0), np.float32)
        return _batch(dense, [self._ids(column, block.columns[item]) for column, item in self._items()])

    def _items(self) -> list[tuple[CategoricalColumn, Field]]:
        return list(zip(self._layout.features, self._feature_fields, strict=True))

    def _with_features(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the rows with all features."""
        schema, fitted = self._sink.schema, self.fitted
        frame = derive(frame, schema.feature[: self._own]).with_columns(
            pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)
        )
        states = {one.name: _of_groups(one, fitted.state[one.name], frame) for one in self._window
                  if one.name in fitted.state and set(one.by) <= set(frame.columns)}  # fmt: skip
        for run in runs_of(schema.feature):
            more = {one.name: fitted.state[one.name] for one in run if one.name in fitted.state}
            executor = Executor(
                rows=FrameBlocks(frame), threads=1, given=fitted.fitted_tables, states={**more, **states},
                source="the model's data",  # not where they are: who sends requests may not see paths
            )  # fmt: skip
            [made] = executor.run(run)
            frame = frame.hstack(made)
        return frame

    def _ids(self, feature: CategoricalColumn, column: pl.Series) -> tuple[Array, Array | None]:
        """Return the ids of a feature, and how many each row has if it is a sequence."""
        lengths = column.list.len().to_numpy().astype(np.int64) if isinstance(column.dtype, pl.List) else None
        if lengths is not None:
            column = column.explode(empty_as_null=False)
        given, column = column, keys_of(column, feature, self.fitted.schema)
        if feature.hash_buckets is not None or feature.oov == "grow":
            absent, hashes = nulls(column), hashes_of(column)
            if feature.hash_buckets is not None:
                return bucket_ids(hashes, absent, feature).astype(np.int64), lengths
            own = as_raw_ids(hashes_of(pl.Series([""])))[0] if feature.missing == "category" else 0
            return np.where(absent, own, as_raw_ids(hashes)), lengths
        known = self.fitted.ids[feature.table_name]
        ids = known.find(column)
        if column.dtype == pl.String and not ids.all():  # only then look at how texts are written: it takes time
            again = written(given, self.fitted.schema.notation_of(feature.raw))
            ids = ids if again is given else known.find(keys_of(again, feature, self.fitted.schema))
        if feature.oov in ("drop", "error") and (odd := (ids == 0) & ~nulls(column)).any():
            place = odd.argmax()
            row = place if lengths is None else np.searchsorted(np.cumsum(lengths), place, side="right")
            raise DataError(
                f"row {row}: column {feature.name} has a value that training did not have, and its oov "
                f"policy is {feature.oov!r}. Leave the row out."
            )
        if feature.missing == "category":
            ids[nulls(column)] = known.missing
        return ids, lengths


def _as_given(item: Field, exact: Collection[str]) -> Field:
    """Return a field whose texts stay as they are given, if it is looked up in a vocabulary only."""
    given = item.column not in exact and item.notation.partition("|")[0] in (*NUMBERS, *BY_VALUE)
    return replace(item, notation="") if given else item


def as_frame(table: Any) -> pl.DataFrame:
    """Return a table in memory as a Polars frame, whose columns have one type each.

    Raises:
        DataError: it is not a table, or its columns cannot be read.
    """
    try:
        if isinstance(table, pl.LazyFrame):
            return table.collect()
        table = arrow_of(table)
        if not isinstance(table, pl.DataFrame) and not hasattr(table, "__arrow_c_stream__"):
            raise DataError(
                f"a {type(table).__name__} is not a table. Pass Polars, pandas, PyArrow, or anything with "
                "__arrow_c_stream__."
            )
        if isinstance(table, pa.Table):
            table = table.combine_chunks().to_reader()  # Polars reads a table on all threads, which must first wake
        frame = table if isinstance(table, pl.DataFrame) else pl.DataFrame(table)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the rows cannot be read: {reason_of(error)}. Give each column one plain type.") from error
    return frame.rechunk()


def as_arrow(table: Any) -> pa.Table:
    """Return a table in memory as one of Arrow, which has no integers of 128 bits: they become texts.

    Raises:
        DataError: it is not a table, or a column cannot be sent to a server.
    """
    frame = as_frame(table)
    wide = [name for name, kind in frame.schema.items() if str(kind) in ("Int128", "UInt128")]
    for name, kind in frame.schema.items():
        if "Object" in str(kind) or (name not in wide and "Int128" in str(kind)):
            raise DataError(f"column {name} holds {kind}, which cannot be sent. Give numbers, texts, times or lists "
                            "of these.")  # fmt: skip
    return frame.with_columns(pl.col(wide).cast(pl.String)).to_arrow()


def _refuse(block: Block) -> None:
    """Raise an error for the rows that do not fit."""
    if block.bad:
        some = "; ".join(f"row {one.line}: {one.reason}" for one in block.bad[:_SHOWN])
        more = f" and {len(block.bad) - _SHOWN:,} more rows" if len(block.bad) > _SHOWN else ""
        raise DataError(f"{some}{more}. Rows count from 0; nothing was scored.")


def _of_groups(feature: Past, state: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the state of the groups that the rows have; all of it if their keys have other types."""
    if any(state.schema[name] != rows.schema[name] for name in feature.by) or not rows.height:
        return state
    return state.join(
        rows.select(feature.by).unique(), on=list(feature.by), how="semi", nulls_equal=True, maintain_order="left"
    )


def _batch(dense: Array, columns: Sequence[tuple[Array, Array | None]]) -> Batch:
    """Join the ids of features: [B, F], or bags in the order of examples."""
    rows = len(dense)
    if all(lengths is None for _, lengths in columns):
        ids = np.stack([each for each, _ in columns], axis=1) if columns else np.zeros((rows, 0), np.int64)
        return Batch(dense=torch.from_numpy(dense), ids=torch.from_numpy(ids))
    lengths = np.stack([np.ones(rows, np.int64) if each is None else each for _, each in columns], axis=1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    begins = offsets[:-1].reshape(lengths.shape)
    flat = np.empty(offsets[-1], np.int64)
    for place, (each, _) in enumerate(columns):
        count = lengths[:, place]
        within = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
        flat[np.repeat(begins[:, place], count) + within] = each
    return Batch(dense=torch.from_numpy(dense), ids=torch.from_numpy(flat), offsets=torch.from_numpy(offsets))
