"""How often rows have each value of columns that 8 or 16 bits hold: all that a fit has to know of them.

A value is counted in less time than its logarithm or an exact sum takes; both are then taken of the distinct ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit
from stoker.ops.memory import zeros
from stoker.prep.fit.dense_kernels import SHORT, Columns, column_at, stretches

__all__ = ["MOST_COUNTERS", "Counters", "ValueCounts"]

Array = npt.NDArray[Any]
MOST_COUNTERS = 2**21  # of all columns, which each thread has for itself: 16 MiB
_TILE = 2**15  # rows that all columns are counted of before the next ones
_LANES = 4  # counters of a value of 8 bits: it often follows itself, and one counter would wait for its own sum


class Counters:
    """int64 counters of ``shape``, which every thread has for itself: to clear and add them for each part took longer
    than to count."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self._local = shape, threading.local()
        self._all: list[Array] = []

    def mine(self) -> Array:
        """Those of this thread."""
        if not hasattr(self._local, "counters"):
            self._local.counters = zeros(self._shape, np.int64)
            self._all.append(self._local.counters)
        found: Array = self._local.counters
        return found

    def sum(self) -> Array:
        """Those of all threads, which must have finished."""
        return sum(self._all, zeros(self._shape, np.int64))


@jit
def _count_bytes(column, rows, first, stop, lanes):  # type: ignore[no-untyped-def]
    if first.size * SHORT > rows.size:
        for i in range(np.uint64(rows.size)):
            lanes[i & np.uint64(_LANES - 1), column[np.uint64(rows[i])]] += 1
        return
    for s in range(first.size):
        for i in range(np.uint64(first[s]), np.uint64(stop[s])):
            lanes[i & np.uint64(_LANES - 1), column[i]] += 1


@jit
def _count_shorts(column, rows, first, stop, counts):  # type: ignore[no-untyped-def]
    if first.size * SHORT > rows.size:
        for i in range(np.uint64(rows.size)):
            counts[column[np.uint64(rows[i])]] += 1
        return
    for s in range(first.size):
        for i in range(np.uint64(first[s]), np.uint64(stop[s])):
            counts[column[i]] += 1


@jit
def _count(addresses, types, n, rows, first, stop, begins, counts):  # type: ignore[no-untyped-def]
    """Add the ``rows`` of K columns to their ``counts[begins[k] : begins[k + 1]]``; the last of these: missing values.

    ``first`` and ``stop``: the stretches of ``rows``.
    """
    for k in range(addresses.size):
        mine = counts[begins[k] : begins[k + 1]]
        if types[k] == 1:
            _count_shorts(column_at(addresses[k], n, np.uint16), rows, first, stop, mine)
            continue
        lanes = np.zeros((_LANES, 256), np.int64)
        _count_bytes(column_at(addresses[k], n, np.uint8), rows, first, stop, lanes)
        for lane in range(_LANES):
            for value in range(255):
                mine[value] += lanes[lane, value]
            mine[mine.size - 1] += lanes[lane, 255]  # a part may be narrower than all of them


class ValueCounts:
    """The counts of K columns over the rows of parts, which several threads may look at.

    Args:
        types: of each column over all parts, uint8 or uint16; a part may have it in the narrower one.
    """

    def __init__(self, types: Sequence[np.dtype[Any]]) -> None:
        self._begins = np.cumsum([0, *(np.iinfo(dtype).max + 1 for dtype in types)])
        self._counters = Counters((int(self._begins[-1]),))

    def look(self, raw: Sequence[Array], rows: npt.NDArray[np.int64]) -> None:
        """Count ``rows`` of the K columns of a part."""
        if not raw:
            return
        columns, mine = Columns(raw), self._counters.mine()
        first, stop = np.empty((2, min(_TILE, rows.size)), np.int64)
        for begin in range(0, rows.size, _TILE):
            some = rows[begin : begin + _TILE]
            found = stretches(some, first, stop)
            _count(
                columns.addresses, columns.types, columns.rows, some, first[:found], stop[:found], self._begins, mine
            )

    def found(self) -> list[tuple[Array, Array, int]]:
        """Of each column the values that are there, float64 and rising, how often, and how many are missing."""
        counts = self._counters.sum()
        each = []
        for begin, end in zip(self._begins[:-1].tolist(), self._begins[1:].tolist(), strict=True):
            values = np.flatnonzero(counts[begin : end - 1])
            each.append((values.astype(np.float64), counts[begin:end][values], int(counts[end - 1])))
        return each
