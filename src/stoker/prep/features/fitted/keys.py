"""Keys of one or several columns, numbered by first occurrence and found again: exact, in memory per distinct key.

A :class:`Coder` numbers the values of each column once, whatever many features have it in a key: 0 is missing, values
count from 1, NaN and -0.0 are missing and 0. A :class:`KeyTable` numbers the combinations of these codes. Of rows in
memory each combination is numbered once, too, and serves all longer ones that begin with it (:meth:`Coder.number`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.ops.memory import zeros
from stoker.prep.features.fitted.learned_kernels import (
    find_pairs,
    first_of_pairs,
    insert_pairs,
    number_codes,
    number_firsts,
    refill_pairs,
    take_numbers,
)
from stoker.prep.fit.vocabulary import TableBuilder
from stoker.prep.parse.dictionaries import number_texts

__all__ = ["Coder", "KeyTable", "batches", "code_column"]

Entries = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
_CHUNK = 2**16  # rows numbered at a time: what is made for them stays in cache
_MOST = 2**31 - 2
_BITS = np.int64(32)
_LOW = np.int64(2**32 - 1)
_serial = itertools.count()


def code_column(name: str) -> str:
    """Where the codes of a column lie in a frame: Int32, -1 for a value that is not known."""
    return f"__key:{name}"


def batches(rows: pl.DataFrame | pl.LazyFrame, engine: str = "streaming") -> Iterator[pl.DataFrame]:
    """The rows in order, some at a time."""
    from stoker.base.engine import collect

    if isinstance(rows, pl.DataFrame):
        yield from rows.iter_slices(_CHUNK)
    # Polars before 1.34 cannot hand out batches; the GPU engine works on all rows at once.
    elif engine != "streaming" or not hasattr(rows, "collect_batches"):
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
        self.lock = threading.Lock()
        self._builder = TableBuilder(self.kind)

    def codes(self, series: pl.Series, *, add: bool) -> Codes:
        """[n] number of each value; -1 for one that is not known and not to be added."""
        foreign = None
        if series.dtype != self.dtype:
            given, absent = series, series.is_null()
            series = series.cast(self.dtype, strict=False)
            wrong = series.is_null() & ~absent
            if given.dtype.is_numeric() and series.dtype != pl.String:  # 1.5 is not 1, nor 2 true
                back = series.cast(given.dtype, strict=False)
                wrong |= back.is_null() & ~absent | (back != given).fill_null(False)
            foreign = wrong.to_numpy()  # no value of this type, so it is not known
        found = np.empty(len(series), np.int32)
        for start in range(0, len(series), _CHUNK):
            part = series.slice(start, _CHUNK)
            code = self._texts if self.kind == "string" else self._numbers
            found[start : start + len(part)] = code(part, add=add)
        if foreign is not None:
            found[foreign] = -1
        return found

    def _texts(self, series: pl.Series, *, add: bool) -> Codes:
        codes, data, ends = number_texts(series)
        if add:
            entries: Any = self._builder.add_texts(data, ends, np.zeros(len(ends) - 1, np.int64))
        else:
            entries = self._builder.find_texts(data, ends)
        # What is not known (-1) stays so; the others count from 1.
        of_code = np.concatenate([[0], np.where(entries < 0, -1, entries + 1)]).astype(np.int32)
        return np.asarray(of_code[codes])

    def _numbers(self, series: pl.Series, *, add: bool) -> Codes:
        if self.kind == "float":
            bits = (series.cast(pl.Float64).fill_nan(None).fill_null(0.0).to_numpy() + 0.0).view(np.int64)
            missing: Any = (series.is_null() | series.is_nan().fill_null(False)).to_numpy()
        else:
            whole = series.to_physical()
            whole = whole if whole.dtype == pl.UInt64 else whole.cast(pl.Int64)
            missing = series.is_null().to_numpy() if series.null_count() else None
            whole = whole if missing is None else whole.fill_null(0)
            bits = np.ascontiguousarray(whole.to_numpy()).view(np.int64)
        if add:
            entries: Any = self._builder.add_ints(bits, np.zeros(len(bits), np.int64))
        else:
            entries = self._builder.find_ints(bits)
        found: Codes = (entries + 1).astype(np.int32)
        if not add:
            found[entries < 0] = -1
        if missing is not None:
            found[missing] = 0
        return found

    def values(self, codes: Any) -> pl.Series:
        """The values behind some codes, in the column's own type."""
        if not self._builder.entries:
            return pl.Series([None], dtype=self.dtype).gather(np.zeros(len(codes), np.int64))
        series: pl.Series = self._builder.series(np.maximum(codes.astype(np.int64) - 1, 0))
        if self.dtype == pl.UInt64:
            series = pl.Series(series.to_numpy().view(np.uint64))
        if (codes == 0).any():
            series = series.set(pl.Series(codes == 0), None)
        return series.cast(self.dtype)


class Coder:
    """The numbering of every column that is part of a key. Any number of threads may add at once, or look."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._tables: dict[tuple[str, ...], KeyTable] = {}
        self._lock = threading.Lock()

    def add(self, name: str, series: pl.Series) -> Codes:
        """[n] code of each value; new values get the next ones.

        Raises:
            DataError: values that are no keys, such as lists.
        """
        with self._lock:
            if name not in self._columns:
                self._columns[name] = _Column(name, series.dtype)
            column = self._columns[name]
        with column.lock:
            return column.codes(series, add=True)

    def find(self, name: str, series: pl.Series) -> Codes:
        """[n] code of each value, -1 for one that is not known."""
        if name not in self._columns:
            return np.where(series.is_null().to_numpy(), np.int32(0), np.int32(-1))
        return self._columns[name].codes(series, add=False)

    def values(self, name: str, codes: Any) -> pl.Series:
        """The values behind some codes."""
        column = self._columns[name]
        with column.lock:  # another feature may add keys of its own
            return column.values(codes).alias(name)

    def table(self, names: tuple[str, ...]) -> KeyTable | None:
        """The keys of these columns, where rows in memory were numbered."""
        return self._tables.get(names)

    def number(
        self,
        rows: pl.DataFrame,
        wanted: Sequence[tuple[str, ...]],
        *,
        add: bool,
        threads: int,
        teaching: int | None = None,
    ) -> pl.DataFrame:
        """Rows in memory, which have codes, with the number of each row's key in the column ``table(names).column``.

        Args:
            wanted: the columns of each key. A key that begins as another one does goes on from its numbers.
            add: new keys get numbers; else they have -1, and only keys that have a table are numbered.
            threads: keys that are numbered at a time.
            teaching: with ``add``, and no keys known before: only the keys of the first so many rows are kept. Other
                rows are numbered beside them, without a look at a table, and have -1 where their key is none of these.
        """
        every = dict.fromkeys(names[:width] for names in wanted for width in range(min(2, len(names)), len(names) + 1))
        if add:
            for names in sorted(every, key=len):
                if names not in self._tables:
                    self._tables[names] = KeyTable(len(names), self._tables.get(names[:-1]))
        open_ = [n for n in every if n in self._tables and self._tables[n].column not in rows.columns]
        for width in sorted({len(names) for names in open_}):
            some = [names for names in open_ if len(names) == width]
            frame = rows

            def work(names: tuple[str, ...], frame: pl.DataFrame = frame) -> pl.Series:
                table, last = self._tables[names], frame.get_column(code_column(names[-1])).to_numpy()
                before = code_column(names[0]) if len(names) <= 2 else self._tables[names[:-1]].column
                ask = table.number_all if add else table.find_all
                return pl.Series(table.column, ask(frame.get_column(before).to_numpy(), last))

            rows = rows.with_columns(list(ordered_map(work, some, threads)))
        if teaching is not None and teaching < rows.height:

            def kept(names: tuple[str, ...]) -> pl.Series:
                table = self._tables[names]
                found = rows.get_column(table.column).to_numpy().copy()
                table.keep(int(found[:teaching].max(initial=-1)) + 1)
                found[found >= len(table)] = -1
                return pl.Series(table.column, found)

            rows = rows.with_columns(list(ordered_map(kept, open_, threads)))
        return rows


class _Pairs:
    """Numbers pairs of codes by first occurrence. Memory: 16 bytes per slot at a load of at most a half, 8 per pair."""

    def __init__(self) -> None:
        self.count = 0
        self._slots: Any = np.zeros((1024, 2), np.int64)  # None: to be filled when a pair is looked up
        self._keys = np.zeros(1024, np.int64)
        self._lock = threading.Lock()

    def add_all(self, left: Codes, right: Codes) -> Codes:
        """The same as :meth:`add` for all rows at once: into an empty table without hashing."""
        if self.count or len(left) > _MOST:
            return np.concatenate([self.add(left[i : i + _CHUNK], right[i : i + _CHUNK])
                                   for i in range(0, len(left), _CHUNK)] or [np.zeros(0, np.int32)])  # fmt: skip
        lefts, rights = int(left.max(initial=-1)) + 1, int(right.max(initial=-1)) + 1
        ends, order = zeros(lefts + 1, np.int32), np.empty(len(left), np.int32)
        stamp, seen, out = np.full(rights, -1, np.int32), np.empty(rights, np.int32), np.empty(len(left), np.int32)
        self.count = first_of_pairs(left, right, ends, order, stamp, seen, out)
        self._keys, self._slots = np.empty(self.count, np.int64), None
        number_firsts(out, left, right, self._keys)
        return out

    def _ready(self) -> Any:
        """The slots, filled."""
        with self._lock:
            if self._slots is None:
                slots = zeros((1 << max(10, (4 * self.count).bit_length() - 1), 2), np.int64)
                refill_pairs(slots, self._keys, self.count)
                self._slots = slots
        return self._slots

    def add(self, left: Any, right: Any) -> Codes:
        self._ready()
        needed = self.count + len(left)
        if needed > _MOST:
            raise DataError(f"a feature has more than {_MOST:,} distinct keys. Take a column with fewer values.")
        if needed > len(self._keys):
            self._keys = np.concatenate([self._keys, zeros(max(len(left), self.count // 2), np.int64)])
        if 2 * needed > len(self._slots):
            self._slots = zeros((1 << (4 * needed).bit_length() - 1, 2), np.int64)
            refill_pairs(self._slots, self._keys, self.count)
        out = np.empty(len(left), np.int32)
        self.count = insert_pairs(self._slots, left, right, self.count, self._keys, out)
        return out

    def find(self, left: Any, right: Any) -> Codes:
        out = np.empty(len(left), np.int32)
        find_pairs(self._ready(), left, right, out)
        return out

    def keep(self, count: int) -> None:
        """Forget the pairs behind the first ``count``."""
        self.count, self._slots = count, None

    def keys(self) -> Entries:
        return self._keys[: self.count]


class KeyTable:
    """Distinct keys, numbered from 0 by first occurrence.

    Args:
        width: columns of the key.
        before: the keys of all columns but the last, shared with others.
    """

    def __init__(self, width: int, before: KeyTable | None = None) -> None:
        self.width = width
        self.column = f"__keys:{next(_serial)}"  # where the numbers of rows by this very table lie in a frame
        self._numbers = np.full(1024, -1, np.int32)  # of a code, where one column is the key
        self._codes = np.zeros(1024, np.int32)  # and back
        self._count = 0
        known: list[_Pairs] = before._levels if before is not None else []
        self._levels: list[_Pairs] = [*known, *(_Pairs() for _ in range(width - 1 - len(known)))]

    @classmethod
    def of(cls, columns: Sequence[Codes]) -> KeyTable:
        """The keys of a table that has each once, numbered as its rows are.

        Raises:
            DataError: a key is there twice.
        """
        keys = cls(len(columns))
        keys.add(columns)
        if len(keys) != len(columns[0]):
            raise DataError(
                f"a learned table has {len(columns[0]):,} rows but {len(keys):,} keys. Fit the features again."
            )
        return keys

    def __len__(self) -> int:
        return self._levels[-1].count if self._levels else self._count

    def keep(self, count: int) -> None:
        """Forget the keys behind the first ``count``."""
        if self._levels:
            self._levels[-1].keep(count)
        else:
            self._numbers[self._codes[count : self._count]] = -1
            self._count = count

    def add(self, columns: Sequence[Codes]) -> Entries:
        """[n] number of each row's key, whose codes are known; new keys get the next ones."""
        found = np.empty(len(columns[0]), np.int64)
        for start in range(0, len(found), _CHUNK):
            part = [codes[start : start + _CHUNK] for codes in columns]
            found[start : start + _CHUNK] = self._added(part)
        return found

    def _added(self, columns: Sequence[Codes]) -> Any:
        if not self._levels:
            codes = columns[0]
            most = int(codes.max(initial=0)) + 1
            if most > len(self._numbers):
                self._numbers = np.concatenate([self._numbers, np.full(2 * most, -1, np.int32)])
            if self._count + len(codes) > len(self._codes):
                self._codes = np.concatenate([self._codes, zeros(2 * len(codes) + self._count, np.int32)])
            out = np.empty(len(codes), np.int32)
            self._count = number_codes(self._numbers, codes, self._codes, self._count, out)
            return out
        entries = columns[0]
        for level, codes in zip(self._levels, columns[1:], strict=True):
            entries = level.add(entries, codes)
        return entries

    def add_all(self, columns: Sequence[Codes]) -> Codes:
        """As :meth:`add`, of all rows there are at once: faster, with room for each code up to the largest."""
        if not self._levels:
            return self.add(columns).astype(np.int32)
        entries = columns[0]
        for level, codes in zip(self._levels, columns[1:], strict=True):
            entries = level.add_all(entries, codes)
        return entries

    def number_all(self, before: Codes, last: Codes) -> Codes:
        """[n] numbers of all rows at once; ``before``: the number of the key without its last column, or the code of
        its first of two."""
        return self._levels[-1].add_all(before, last) if self._levels else self.add_all([last])

    def find_all(self, before: Codes, last: Codes) -> Codes:
        """The same, -1 for a key that is not known."""
        if self._levels:
            return self._levels[-1].find(before, last)
        out: Codes = np.empty(len(last), np.int32)
        take_numbers(self._numbers, last, out)
        return out

    def find(self, columns: Sequence[Codes]) -> Entries:
        """[n] number of each row's key, -1 for one that is not known. Any number of threads may look at once."""
        found = np.empty(len(columns[0]), np.int64)
        for start in range(0, len(found), _CHUNK):
            part = [codes[start : start + _CHUNK] for codes in columns]
            if self._levels:
                entries = part[0]
                for level, codes in zip(self._levels, part[1:], strict=True):
                    entries = level.find(entries, codes)
                found[start : start + _CHUNK] = entries
            else:
                take_numbers(self._numbers, part[0], found[start : start + _CHUNK])
        return found

    def codes(self) -> list[Any]:
        """The codes of each column, of the keys in the order of their numbers."""
        if not self._levels:
            return [self._codes[: self._count]]
        packed, found = self._levels[-1].keys(), []
        for level in range(len(self._levels) - 1, -1, -1):
            found.append(packed & _LOW)
            packed = packed >> _BITS
            if level:
                packed = self._levels[level - 1].keys()[packed]
        return [packed, *found[::-1]]
