"""Vocabularies: every distinct value of a table with its training count, numbered by falling count.

Ids are sorted by (count falling, value rising), so they do not depend on the order of rows, blocks or threads. Blocks
bring only their distinct values. Memory: about 90 bytes per distinct number of a table in work, or 220 per distinct
text and its bytes, one table per thread; and 4 bytes per distinct value of each block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from stoker.base.errors import DataError
from stoker.prep.parse.dictionaries import hashes_of
from stoker.prep.stages.parts import Arrays

Array = npt.NDArray[Any]
_MAX_ENTRIES = 2**31 - 2
_BATCH = 2**20  # at least this many values are numbered together
_VIEWS: dict[str, Any] = {"hex": np.uint64, "float": np.float64}  # types of the 64 bits of a value


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A finished vocabulary. Row i of ``frame`` (value, count) is id i + 1."""

    frame: pl.DataFrame  # value, count; a null value means an empty field
    ids: npt.NDArray[np.int64]  # [entries] id of each entry of the builder; 0 below the minimum count
    missing_id: int  # id of an empty field if that is a category, else 0
    unknown: int = 0  # training occurrences of values without id

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the table, row 0 included."""
        return int(self.frame.height) + 1

    def counts(self) -> npt.NDArray[np.int64]:
        """Return [num_embeddings]: training occurrences by id."""
        return np.concatenate([[self.unknown], self.frame["count"].to_numpy()]).astype(np.int64)


class TableBuilder:
    """Numbers the distinct values of all blocks of one table: texts by first occurrence, others by value.

    Hash tables of numbers would take three times the memory of sorted ones.

    Args:
        kind: int, hex, float or string.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.refs: list[npt.NDArray[np.int32]] = []  # per dictionary, the entry of each value; :meth:`merge` fills it
        self._values: Any = pa.array([], pa.large_string()) if kind == "string" else np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._waiting: list[tuple[pa.Array, Array]] = []
        self._size = 0  # values that wait

    @property
    def entries(self) -> int:
        """Number of distinct values so far."""
        return len(self._values)

    def add(self, values: pa.Array, counts: Array | None = None) -> None:
        """Add a dictionary, distinct values as int64 or large strings, with its training counts (None: zeros)."""
        self._size += len(values)
        if self._size > max(_BATCH, self.entries) or self.entries + self._size > _MAX_ENTRIES:
            self.merge()
            self._size = len(values)
        if self.entries + len(values) > _MAX_ENTRIES:
            raise DataError(
                f"a table has more than {_MAX_ENTRIES:,} distinct values. Give its columns hash_buckets or modulo."
            )
        self._waiting.append((values, np.zeros(len(values), np.int64) if counts is None else counts))

    def merge(self) -> None:
        """Assign numbers to the added values, which completes ``refs`` and ``entries``."""
        merge = self._merge_texts if self.kind == "string" else self._merge_numbers
        merge()
        self._waiting = []

    def _merge_texts(self) -> None:
        pool = pa.system_memory_pool()  # Arrow's own pool does not return freed memory: 100 MB more at the peak
        arrays = pa.concat_arrays([self._values, *(values for values, _ in self._waiting)], memory_pool=pool)
        found = pc.dictionary_encode(arrays, memory_pool=pool)
        refs, at = found.indices.to_numpy(), self.entries
        self._values = found.dictionary
        self._counts = np.append(self._counts, np.zeros(self.entries - at, np.int64))
        for values, counts in self._waiting:
            self.refs.append(refs[at : at + len(values)].copy())
            self._counts[self.refs[-1]] += counts
            at += len(values)

    def _merge_numbers(self) -> None:
        added = [(values.to_numpy(), counts) for values, counts in self._waiting]
        every = np.concatenate([self._values, *(values for values, _ in added)])
        every.sort()
        new = np.ones(len(every), np.bool_)
        np.not_equal(every[1:], every[:-1], out=new[1:])
        every = every[new]
        moved = np.searchsorted(every, self._values).astype(np.int32)  # the new numbers of earlier entries
        self.refs = [moved[refs] for refs in self.refs]
        counts = np.zeros(len(every), np.int64)
        counts[moved] = self._counts
        self._values, self._counts = every, counts
        for values, more in added:
            order = np.argsort(values)  # sorted values are found quickly, as they are near each other
            self.refs.append(np.empty(len(values), np.int32))
            self.refs[-1][order] = np.searchsorted(every, values[order])
            counts[self.refs[-1]] += more

    def finish(self, *, min_count: int, missing: int | None, total: int) -> Vocabulary:
        """Return the vocabulary.

        Args:
            min_count: training occurrences that an id needs.
            missing: training occurrences of empty fields where they are a category, else None.
            total: all training occurrences, for the count of id 0.
        """
        self.merge()
        order = self._by_count(np.flatnonzero(self._counts >= max(min_count, 1)))
        frame = self._entries(order)
        if missing is not None and missing >= min_count:
            place = int(np.searchsorted(-frame["count"].to_numpy(), -missing))  # of equal counts, it comes first
            own = pl.DataFrame({"value": [None], "count": [missing]}, schema=frame.schema)
            frame = pl.concat([frame[:place], own, frame[place:]]).rechunk()
            order = np.insert(order, place, -1)
        ids = np.zeros(self.entries + 1, np.int64)  # the last is that of entry -1
        ids[order] = np.arange(1, len(order) + 1)
        unknown = total - int(frame["count"].sum())
        return Vocabulary(frame=frame, ids=ids[:-1], missing_id=int(ids[-1]), unknown=unknown)

    def _entries(self, numbers: npt.NDArray[np.int64]) -> pl.DataFrame:
        """Return the value and the training count of some entries."""
        return pl.DataFrame({"value": self._series().gather(numbers), "count": self._counts[numbers]})

    def _by_count(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of some entries by falling count, and those of equal counts by value."""
        by_value: npt.NDArray[np.int64] = numbers[self._series().gather(numbers).arg_sort().to_numpy()]
        return by_value[np.argsort(-self._counts[by_value], kind="stable")]

    def _series(self) -> pl.Series:
        if self.kind == "string":
            return pl.Series(pl.from_arrow(self._values))
        return pl.Series(self._values.view(_VIEWS.get(self.kind, np.int64)))

    def raw_ids(self) -> npt.NDArray[np.int64]:
        """Return a raw id for each entry, for a table that grows: 64 bits of a hash, never 0."""
        self.merge()
        return as_raw_ids(hashes_of(self._series() if self.kind == "string" else pl.Series(self._values)))

    def find(self, known: pl.DataFrame) -> Vocabulary:
        """Look up the added values in an earlier vocabulary (value, count); return it with their ids."""
        missing = known["value"].is_null().to_numpy()
        values = known["value"].drop_nulls()
        if self.kind in _VIEWS:
            values = pl.Series(values.to_numpy().view(np.int64))
        self.add(values.to_arrow(compat_level=pl.CompatLevel.oldest()))
        self.merge()
        ids = np.zeros(self.entries, np.int64)
        ids[self.refs.pop()] = np.flatnonzero(~missing) + 1
        return Vocabulary(frame=known, ids=ids, missing_id=int(missing.argmax()) + 1 if missing.any() else 0)

    def extend(self, known: pl.DataFrame, *, min_count: int) -> Vocabulary:
        """Look up the added values in an earlier vocabulary; number others that occur ``min_count`` times after it.

        Among new values ids follow by falling count.
        """
        found = self.find(known)
        entries = self._by_count(np.flatnonzero((self._counts >= max(min_count, 1)) & (found.ids == 0)))
        found.ids[entries] = np.arange(len(entries)) + found.num_embeddings
        frame = self._entries(entries)
        frame = frame.select(pl.col(name).cast(kind) for name, kind in known.schema.items())
        return replace(found, frame=pl.concat([known, frame]).rechunk())


def as_raw_ids(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return hashes as raw ids of a table that grows, in which 0 means no id."""
    return np.where(hashes == 0, np.uint64(1), hashes).view(np.int64)


def read_dictionary(arrays: Arrays, name: object, kind: str) -> pa.Array:
    """Return the distinct values of a column of a part, in the order of their codes, which start at 1."""
    if kind != "string":
        return pa.array(np.array(arrays[f"values.{name}"]))
    ends, data = np.array(arrays[f"ends.{name}"]), np.array(arrays[f"bytes.{name}"])  # copies, for parts are closed
    return pa.Array.from_buffers(pa.large_string(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])
