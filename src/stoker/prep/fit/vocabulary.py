"""Vocabularies: every distinct value of a table with its training count, numbered by falling count.

Ids follow (count falling, value rising), so they depend on the rows only, not on their order, the blocks
they came in or the number of threads. Memory: 16 bytes per slot at a load of at most 0.6 and 20 bytes per
distinct value, for the tables in work, one per thread; texts add their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from stoker.base.errors import DataError
from stoker.ops.memory import zeros
from stoker.prep.fit import table_kernels as kernels
from stoker.rewrite.reorder import write_vocabulary

__all__ = ["TableBuilder", "Vocabulary"]

Array = npt.NDArray[Any]
_LOAD = 0.6
_MAX_ENTRIES = 2**31 - 2
_VIEWS: dict[str, Any] = {"hex": np.uint64, "float": np.float64}  # what the 64 bits of a value mean


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A finished vocabulary. Row i of ``frame`` (value, count) is id i + 1."""

    frame: pl.DataFrame  # value, count; a null value is the missing one
    ids: npt.NDArray[np.int64]  # [entries] id of each entry in order of insertion; 0 below the minimum count
    missing_id: int  # of an empty field where it is a category of its own, else 0
    unknown: int  # training occurrences of values without id

    @property
    def num_embeddings(self) -> int:
        """Rows of the table, row 0 included."""
        return int(self.frame.height) + 1

    def counts(self) -> npt.NDArray[np.int64]:
        """Return [num_embeddings] training occurrences by id."""
        return np.concatenate([[self.unknown], self.frame["count"].to_numpy()]).astype(np.int64)

    def write(self, path: Path) -> None:
        """Write ``frame`` by :func:`write_vocabulary`."""
        write_vocabulary(self.frame, path)


class TableBuilder:
    """Collects the dictionaries of all blocks of one table.

    Args:
        kind: int, hex, float or string.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entries = 0
        self._slots = np.zeros((1024, 2), np.int64)
        self._counts = np.zeros(1024, np.int64)
        self._values = np.zeros(1024 if kind != "string" else 0, np.int64)
        self._arena = np.zeros(4096, np.uint8)
        self._ends = np.zeros(1025, np.int64)

    def add_ints(self, values: Array, counts: Array) -> npt.NDArray[np.int32]:
        """Add a dictionary of numbers with their training counts; return the entry of each value."""
        self._make_room(len(values))
        refs = np.empty(len(values), np.int32)
        self.entries = kernels.insert_ints(self._slots, values, counts, self._values, self._counts, self.entries, refs)
        return refs

    def add_texts(self, data: Array, ends: Array, counts: Array) -> npt.NDArray[np.int32]:
        """Add a dictionary of texts with their training counts; return the entry of each."""
        self._make_room(len(ends) - 1)
        needed = int(self._ends[self.entries]) + len(data)
        if needed > len(self._arena):
            self._arena = _grown(self._arena, max(needed, 2 * len(self._arena)))
        refs = np.empty(len(ends) - 1, np.int32)
        self.entries = kernels.insert_texts(
            self._slots, data, ends, counts, self._arena, self._ends, self._counts, self.entries, refs
        )
        return refs

    def find_ints(self, values: Array) -> npt.NDArray[np.int64]:
        """Return the entry of each number, -1 where it has none; several threads may call this at once."""
        out = np.empty(len(values), np.int64)
        kernels.find_ints(self._slots, values, out)
        return out

    def find_texts(self, data: Array, ends: Array) -> npt.NDArray[np.int64]:
        """As :meth:`find_ints` for texts."""
        out = np.empty(len(ends) - 1, np.int64)
        kernels.find_texts(self._slots, data, ends, self._arena, self._ends, out)
        return out

    def values(self) -> npt.NDArray[np.int64]:
        """Return [entries] numbers in the order in which they came."""
        return self._values[: self.entries]

    def occurrences(self) -> npt.NDArray[np.int64]:
        """Return [entries] the counts given with each value."""
        return self._counts[: self.entries]

    def _make_room(self, more: int) -> None:
        needed = self.entries + more
        if needed > _MAX_ENTRIES:
            raise DataError(
                f"a table has more than {_MAX_ENTRIES:,} distinct values. Give its columns hash_buckets or modulo."
            )
        if needed > len(self._counts):
            size = max(needed, len(self._counts) * 3 // 2)
            self._counts = _grown(self._counts, size)
            if self.kind == "string":
                self._ends = _grown(self._ends, size + 1)
            else:
                self._values = _grown(self._values, size)
        if needed > _LOAD * len(self._slots):
            old, self._slots = self._slots, zeros((1 << int(np.ceil(np.log2(needed / _LOAD))), 2), np.int64)
            kernels.rehash(self._slots, old)

    def finish(self, *, min_count: int, missing: int | None, total: int) -> Vocabulary:
        """Number the entries. The builder is empty afterwards.

        Args:
            min_count: training occurrences that an id needs.
            missing: training occurrences of empty fields where they are a category, else None.
            total: all training occurrences, for the count of id 0.
        """
        self._slots = np.zeros((0, 2), np.int64)  # the hash is not needed for sorting, which needs room
        counts = self.occurrences()
        entries = np.flatnonzero(counts >= max(min_count, 1))
        frame = pl.DataFrame({"value": self.series(entries), "count": counts[entries], "entry": entries})
        if missing is not None and missing >= min_count:
            own = pl.DataFrame({"value": [None], "count": [missing], "entry": [-1]}, schema=frame.schema)
            frame = pl.concat([own, frame])
        # Among equal counts an empty field comes first.
        frame = frame.sort("count", "value", descending=[True, False], nulls_last=False).rechunk()
        order = frame.drop_in_place("entry").to_numpy()
        ids = np.zeros(self.entries + 1, np.int64)  # the last is that of entry -1
        ids[order] = np.arange(1, len(order) + 1)
        unknown = total - int(frame["count"].sum())
        return Vocabulary(frame=frame, ids=ids[:-1], missing_id=int(ids[-1]), unknown=unknown)

    def series(self, entries: npt.NDArray[np.int64]) -> pl.Series:
        """Return the values of some entries."""
        if self.kind != "string":
            return pl.Series(self._values[entries].view(_VIEWS.get(self.kind, np.int64)))
        ends = self._ends[: self.entries + 1]
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(self._arena[: int(ends[-1])])]
        texts = pa.Array.from_buffers(pa.large_string(), self.entries, buffers)
        return pl.Series(pl.from_arrow(texts)).gather(entries)


def _grown(array: Array, size: int) -> Array:
    larger = zeros(size, array.dtype)
    larger[: len(array)] = array
    return larger
