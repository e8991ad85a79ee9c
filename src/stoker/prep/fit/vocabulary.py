"""Vocabularies: every distinct value of a table with its training count, numbered by falling count.

Ids follow (count falling, value rising), so they depend on the rows only, not on their order, the blocks they came in
or the number of threads. Only the distinct values of each block meet the large table, which keeps random memory
traffic low. Memory: 16 bytes per slot at a load of at most 0.6 and 20 bytes per distinct value, for the tables in work,
one per thread; the bytes of texts, and 8 of each number, come on top.

A dictionary holds distinct values: ``(values,)`` [n] int64 of numbers, or ``(bytes, ends)`` of texts, where text i is
bytes [ends[i], ends[i + 1]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from stoker.base.errors import DataError
from stoker.ops.codegen.jit import jit
from stoker.ops.memory import zeros
from stoker.prep.parse.dictionaries import number_texts

__all__ = ["KnownValues", "TableBuilder", "Vocabulary"]

Array = npt.NDArray[Any]
_LOAD = 0.6
_MAX_ENTRIES = 2**31 - 2
_VIEWS: dict[str, Any] = {"hex": np.uint64, "float": np.float64}  # what the 64 bits of a value mean


@jit
def _place(slots, hashes, unique, data, ends, counts, arena, arena_ends, totals, entries, refs):  # type: ignore[no-untyped-def]
    """Write the entry of each value to ``refs``, -1 if it has none; return the number of entries.

    With ``counts``, they join ``totals``, and values without entry get the next ones: their bytes go to the end of
    ``arena``, for which the caller has made room. ``slots`` [power of two, 2] hold the hash and entry + 1 (0: free);
    open addressing, linear probing. ``unique``: different values have different hashes.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(hashes.size):
        begin, length = np.uint64(ends[i]), np.uint64(ends[i + 1] - ends[i])
        tag = np.int64(hashes[i])
        at = hashes[i] & mask
        entry = slots[at, 1] - 1
        while entry >= 0:
            if slots[at, 0] == tag and (
                unique or _same(data, begin, length, arena, arena_ends[entry], arena_ends[entry + 1])
            ):
                break
            at = (at + np.uint64(1)) & mask
            entry = slots[at, 1] - 1
        if counts.size:
            if entry < 0:
                entry = entries
                entries += 1
                slots[at, 0] = tag
                slots[at, 1] = entries
                start = np.uint64(arena_ends[entry])
                for p in range(length):
                    arena[start + p] = data[begin + p]
                arena_ends[entry + 1] = start + length
            totals[entry] += counts[i]
        refs[i] = entry
    return entries


@jit
def _same(data, begin, length, arena, start, stop):  # type: ignore[no-untyped-def]
    if np.uint64(stop - start) != length:
        return False
    for p in range(length):  # noqa: SIM110 (for the compiler)
        if data[begin + p] != arena[np.uint64(start) + p]:
            return False
    return True


@jit
def _rehash(slots, old):  # type: ignore[no-untyped-def]
    """Move the filled slots of ``old`` to empty ``slots``."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(old.shape[0]):
        if old[i, 1] != 0:
            at = np.uint64(old[i, 0]) & mask
            while slots[at, 1] != 0:
                at = (at + np.uint64(1)) & mask
            slots[at, 0] = old[i, 0]
            slots[at, 1] = old[i, 1]


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
        self._arena = np.zeros(8 * 1024, np.uint8)  # the bytes of all values, one after the other
        self._ends = np.zeros(1025, np.int64)

    def add(self, dictionary: Sequence[Array], counts: Array | None = None) -> npt.NDArray[np.int32]:
        """Add a dictionary with its training counts (None: ones); return the entry of each value."""
        data, ends = _texts(dictionary)
        size = self.entries + len(ends) - 1
        if size > _MAX_ENTRIES:
            raise DataError(
                f"a table has more than {_MAX_ENTRIES:,} distinct values. Give its columns hash_buckets or modulo."
            )
        self._counts = _grown(self._counts, size)
        self._ends = _grown(self._ends, size + 1)
        self._arena = _grown(self._arena, int(self._ends[self.entries]) + len(data))
        if size > _LOAD * len(self._slots):
            old, self._slots = self._slots, zeros((1 << int(np.ceil(np.log2(size / _LOAD))), 2), np.int64)
            _rehash(self._slots, old)
        refs = np.empty(len(ends) - 1, np.int32)
        self.entries = self._place(data, ends, np.ones(len(refs), np.int64) if counts is None else counts, refs)
        return refs

    def find(self, dictionary: Sequence[Array]) -> npt.NDArray[np.int32]:
        """Return the entry of each value, -1 where it has none; several threads may call this at once."""
        data, ends = _texts(dictionary)
        refs = np.empty(len(ends) - 1, np.int32)
        self._place(data, ends, np.empty(0, np.int64), refs)
        return refs

    def _place(self, data: Array, ends: Array, counts: Array, refs: Array) -> int:
        if self.kind == "string":
            hashes = _series(data, ends).hash().to_numpy()
        else:
            hashes = data.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(32)
        hashes, data, ends = (_read_only(array) for array in (hashes, data, ends))  # the kernel is compiled once
        unique = self.kind != "string"
        place: Any = _place
        return int(place(
            self._slots, hashes, unique, data, ends, counts, self._arena, self._ends, self._counts, self.entries, refs
        ))  # fmt: skip

    def finish(self, *, min_count: int, missing: int | None, total: int) -> Vocabulary:
        """Number the entries. The builder is empty afterwards.

        Args:
            min_count: training occurrences that an id needs.
            missing: training occurrences of empty fields where they are a category, else None.
            total: all training occurrences, for the count of id 0.
        """
        self._slots = np.zeros((0, 2), np.int64)  # the hash is not needed for sorting, which needs room
        counts = self._counts[: self.entries]
        entries = np.flatnonzero(counts >= max(min_count, 1))
        frame = pl.DataFrame({"value": self._values(entries), "count": counts[entries], "entry": entries})
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

    def _values(self, entries: npt.NDArray[np.int64]) -> pl.Series:
        if self.kind == "string":
            return _series(self._arena, self._ends[: self.entries + 1]).gather(entries)
        return pl.Series(self._arena[: 8 * self.entries].view(_VIEWS.get(self.kind, np.int64))[entries])


class KnownValues:
    """Finds the ids of values of a finished vocabulary.

    Args:
        frame: value and count, row i is id i + 1; a missing value is that of empty fields.
        kind: int, hex, float or string.
    """

    def __init__(self, frame: pl.DataFrame, kind: str) -> None:
        known = frame["value"].is_not_null().to_numpy()
        values = frame["value"].drop_nulls()
        self.rows = frame.height + 1
        self.missing_id = int(np.flatnonzero(~known)[0]) + 1 if not known.all() else 0
        self._ids = np.append(np.flatnonzero(known) + 1, 0)  # the last is that of entry -1
        self._builder = TableBuilder(kind)
        self._builder.add(number_texts(values)[1:] if kind == "string" else (values.to_numpy(),))

    def ids(self, dictionary: Sequence[Array]) -> npt.NDArray[np.int64]:
        """Return the ids [n] of the values of a dictionary; 0 for unknown ones."""
        ids: npt.NDArray[np.int64] = self._ids[self._builder.find(dictionary)]
        return ids


def _texts(dictionary: Sequence[Array]) -> tuple[Array, Array]:
    """Return the bytes of a dictionary's values and their ends."""
    if len(dictionary) == 2:
        return dictionary[0], dictionary[1]
    return dictionary[0].view(np.uint8), np.arange(0, 8 * len(dictionary[0]) + 1, 8)


def _series(data: Array, ends: Array) -> pl.Series:
    texts = pa.Array.from_buffers(pa.large_string(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return pl.Series(pl.from_arrow(texts))


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _grown(array: Array, size: int) -> Array:
    """Return an array with room for ``size`` elements."""
    if size <= len(array):
        return array
    larger = zeros(max(size, len(array) * 3 // 2), array.dtype)
    larger[: len(array)] = array
    return larger
