"""Keys of one or several columns, numbered by first occurrence and found again: exact, in memory per distinct key.

A value of a column gets a number, and a pair of numbers another one, column by column. A missing value is a value of
its own; NaN and -0.0 are missing and 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.data.frames import text_column
from stoker.data.layout import block_dictionary_of_texts
from stoker.data.vocabulary import TableBuilder
from stoker.errors import DataError

__all__ = ["KeyTable", "batches"]

Entries = npt.NDArray[np.int64]
_CHUNK = 2**17  # rows numbered at a time; bounds the room that is made for new keys
_BITS, _LOW = np.int64(32), np.int64(2**32 - 1)


def batches(rows: pl.LazyFrame, engine: str = "streaming") -> Iterator[pl.DataFrame]:
    """The rows in order, some at a time."""
    from stoker.features.engine import collect

    # Polars before 1.34 cannot hand out batches; the GPU engine works on all rows at once.
    if engine != "streaming" or not hasattr(rows, "collect_batches"):
        yield collect(rows, engine)
    else:
        yield from rows.collect_batches(engine="streaming", maintain_order=True)


class _Column:
    """The values of one key column, from 1; 0 is missing."""

    def __init__(self, name: str, dtype: pl.DataType) -> None:
        self.dtype = dtype
        if dtype == pl.String:
            self.kind = "string"
        elif dtype.is_float():
            self.kind = "float"
        elif dtype.is_integer() or dtype.is_temporal() or dtype == pl.Boolean:
            self.kind = "int"
        else:
            raise DataError(
                f"column {name!r} holds {dtype}, which is no key. Keys are text, numbers, moments or 0 and 1."
            )
        self._builder = TableBuilder(self.kind)

    def codes(self, series: pl.Series, *, add: bool) -> Entries:
        """[n] number of each value; -1 for one that is not known and not to be added."""
        foreign = None
        if series.dtype != self.dtype:
            absent = series.is_null()
            series = series.cast(self.dtype, strict=False)
            foreign = (series.is_null() & ~absent).to_numpy()  # no value of this type, so it is not known
        found = self._texts(series, add=add) if self.kind == "string" else self._numbers(series, add=add)
        if foreign is not None:
            found[foreign] = -1
        return found

    def _texts(self, series: pl.Series, *, add: bool) -> Entries:
        column = text_column(series)
        codes, found = np.empty(len(series), np.uint32), dict[str, Any]()
        block_dictionary_of_texts(column, codes, found, "x")
        data, ends = found["bytes.x"], found["ends.x"]
        if add:
            entries = self._builder.add_texts(data, ends, np.zeros(len(ends) - 1, np.int64)).astype(np.int64)
        else:
            entries = self._builder.find_texts(data, ends)
        # What is not known (-1) stays so; the others count from 1.
        of_code = np.concatenate([[0], np.where(entries < 0, -1, entries + 1)])
        return np.asarray(of_code[codes], np.int64)

    def _numbers(self, series: pl.Series, *, add: bool) -> Entries:
        if self.kind == "float":
            bits = (series.cast(pl.Float64).fill_nan(None).fill_null(0.0).to_numpy() + 0.0).view(np.int64)
            missing = series.is_null() | series.is_nan().fill_null(False)
        else:
            whole = series.to_physical()
            whole = whole if whole.dtype == pl.UInt64 else whole.cast(pl.Int64)
            bits = np.ascontiguousarray(whole.fill_null(0).to_numpy()).view(np.int64)
            missing = series.is_null()
        if add:
            entries = self._builder.add_ints(bits, np.zeros(len(bits), np.int64)).astype(np.int64)
        else:
            entries = self._builder.find_ints(bits)
        found = np.where(entries < 0, np.int64(-1), entries + 1)
        absent = missing.to_numpy()
        return np.where(absent, np.int64(0), found) if absent.any() else found

    def values(self, codes: Entries) -> pl.Series:
        """The values behind some codes, in the column's own type."""
        if not self._builder.entries:
            return pl.Series([None], dtype=self.dtype).gather(np.zeros(len(codes), np.int64))
        series: pl.Series = self._builder.series(np.maximum(codes - 1, 0))
        if self.dtype == pl.UInt64:
            series = pl.Series(series.to_numpy().view(np.uint64))
        if (codes == 0).any():
            series = series.set(pl.Series(codes == 0), None)
        return series.cast(self.dtype)


class KeyTable:
    """Distinct keys, numbered from 0 by first occurrence.

    Args:
        schema: columns of the key and their types.
    """

    def __init__(self, schema: dict[str, pl.DataType]) -> None:
        self.names = list(schema)
        self._columns = [_Column(name, dtype) for name, dtype in schema.items()]
        self._levels = [TableBuilder("int") for _ in schema]

    @classmethod
    def of(cls, table: pl.DataFrame, names: Sequence[str]) -> KeyTable:
        """The keys of a table that has each once, numbered as its rows are.

        Raises:
            DataError: a key is there twice.
        """
        keys = cls({name: table.schema[name] for name in names})
        for part in table.iter_slices(_CHUNK):
            keys.add([part.get_column(name) for name in names])
        if len(keys) != table.height:
            raise DataError(
                f"a learned table has {table.height:,} rows but {len(keys):,} keys. Fit the features again."
            )
        return keys

    def __len__(self) -> int:
        return self._levels[-1].entries

    def add(self, columns: Sequence[pl.Series]) -> Entries:
        """[n] number of each row's key; new keys get the next ones."""
        pieces = []
        for start in range(0, len(columns[0]), _CHUNK):
            pieces.append(self._numbered([series.slice(start, _CHUNK) for series in columns], add=True))
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def find(self, columns: Sequence[pl.Series]) -> Entries:
        """[n] number of each row's key, -1 for one that is not known. Any number of threads may look at once."""
        return self._numbered(columns, add=False)

    def _numbered(self, columns: Sequence[pl.Series], *, add: bool) -> Entries:
        entries: Entries = np.zeros(0, np.int64)
        unknown: Any = None
        for level, (column, series) in enumerate(zip(self._columns, columns, strict=True)):
            codes = column.codes(series, add=add)
            if not add:
                unknown = codes < 0 if unknown is None else unknown | (codes < 0)
                codes = np.maximum(codes, 0)
            packed = codes if level == 0 else entries << _BITS | codes
            if add:
                entries = self._levels[level].add_ints(packed, np.zeros(len(packed), np.int64)).astype(np.int64)
            else:
                entries = self._levels[level].find_ints(packed)
                unknown |= entries < 0
                entries = np.maximum(entries, 0)
        return entries if add else np.where(unknown, np.int64(-1), entries)

    def frame(self) -> pl.DataFrame:
        """The keys in the order of their numbers."""
        packed = self._levels[-1].values()
        series = []
        for level in range(len(self._columns) - 1, -1, -1):
            codes = packed & _LOW if level else packed
            series.append(self._columns[level].values(codes).alias(self.names[level]))
            if level:
                packed = self._levels[level - 1].values()[packed >> _BITS]
        return pl.DataFrame(series[::-1])
