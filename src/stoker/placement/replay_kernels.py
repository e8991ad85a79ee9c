"""Numba kernels that replay cache strategies over a trace, some steps at a time. Import only where Numba is.

Rows are numbered such that of two rows the greater leaves first when all else is equal; a step lists its rows in
rising order. So a place p in the trace orders victims: a later next use is a greater place, and within a step the
greater row is. The next victim is the smallest entry of a heap.

Legend: T steps, L distinct rows of all steps one after the other, K rows of the trace, C slots, k batches in flight.

Each kernel works on steps [first, last) and keeps what it needs in arrays, so that the caller can stop in between:
``last_use`` [K] step of the last use (-1: none), ``resident`` [K], ``state`` its own scalars, ``totals`` [5]: hits,
lookups hit, misses, compulsory misses, rows written back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LRU, LFU, AHEAD = 0, 1, 2  # who leaves: last use longest ago, fewest batches, farthest next use


@jit
def link(rows: Int32, begin: int, end: int, nearest: Int64, following: Int64) -> None:
    """Fill ``following`` [L] for places [begin, end) from the back: the place of the row's next use, or L + row.

    ``nearest`` [K] holds each row's first place behind ``end``, at first L + row.
    """
    for place in range(end - 1, begin - 1, -1):
        row = rows[place]
        following[place] = nearest[row]
        nearest[row] = place


@jit
def count_uses(rows: Int32, begin: int, end: int, uses: Int64) -> None:
    """Add the places [begin, end) to ``uses`` [K]: in how many steps each row is."""
    for place in range(begin, end):
        uses[rows[place]] += 1


@jit
def _use(
    rows: Int32, counts: Int32, begin: int, end: int, step: int, last_use: Int32, resident: Flags, totals: Int64
) -> int:
    """Count hits and misses of a step and note the use; returns the misses."""
    missing = 0
    for place in range(begin, end):
        row = rows[place]
        if resident[row]:
            totals[0] += 1
            totals[1] += counts[place]
        else:
            missing += 1
            totals[3] += last_use[row] < 0
        last_use[row] = step
    totals[2] += missing
    return missing


@jit
def pipelined(
    rows: Int32, counts: Int32, offsets: Int64, first: int, last: int, in_flight: int, slots: int, hot: Flags,
    last_use: Int32, resident: Flags, state: Int64, totals: Int64,
) -> None:  # fmt: skip
    """No cache: a row leaves when no batch in flight uses it, unless it is ``hot`` [K].

    ``state`` [4]: rows in flight that are not hot, the most so far, and the first step with more than ``slots`` (-1)
    and its rows.
    """
    for step in range(first, last):
        _use(rows, counts, offsets[step], offsets[step + 1], step, last_use, resident, totals)
        for place in range(offsets[step], offsets[step + 1]):
            row = rows[place]
            state[0] += not resident[row] and not hot[row]
            resident[row] = True
        gone = step - in_flight
        if gone >= 0:
            for place in range(offsets[gone], offsets[gone + 1]):
                row = rows[place]
                if last_use[row] == gone and not hot[row]:
                    resident[row] = False
                    state[0] -= 1
                    totals[4] += 1
        state[1] = max(state[1], state[0])
        if state[0] > slots and state[2] < 0:
            state[2] = step
            state[3] = state[0]


@jit
def _sift_down(heap: Int64, size: int, at: int) -> None:
    key = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key


@jit
def _row_of(key: int, kind: int, rows: Int32, num_rows: int) -> int:
    """The row of an entry of the heap."""
    if kind != AHEAD:
        return num_rows - 1 - key % num_rows
    place = rows.size + num_rows - 1 - key
    return int(rows[place]) if place < rows.size else place - rows.size


@jit
def _drop_stale(heap: Int64, size: int, entry: Int64, kind: int, rows: Int32) -> int:
    """Keep one entry of each row that may leave; returns how many there are."""
    kept = 0
    for at in range(size):
        key = heap[at]
        row = _row_of(key, kind, rows, entry.size)
        if entry[row] == key:
            entry[row] = -2  # seen
            heap[kept] = key
            kept += 1
    for at in range(kept):
        entry[_row_of(heap[at], kind, rows, entry.size)] = heap[at]
    for at in range(kept // 2 - 1, -1, -1):
        _sift_down(heap, kept, at)
    return kept


@jit
def _push(heap: Int64, size: int, key: int, entry: Int64, kind: int, rows: Int32) -> int:
    """Let the row of ``key`` leave when its turn comes; returns the entries of the heap."""
    if size == heap.size:
        size = _drop_stale(heap, size, entry, kind, rows)
    entry[_row_of(key, kind, rows, entry.size)] = key
    at = size
    while at > 0 and heap[(at - 1) >> 1] > key:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = key
    return size + 1


@jit
def cached(
    kind: int, rows: Int32, counts: Int32, following: Int64, offsets: Int64, first: int, last: int, window: int,
    in_flight: int, slots: int, last_use: Int32, resident: Flags, rank: Int64, entry: Int64, heap: Int64, state: Int64,
    totals: Int64,
) -> None:  # fmt: skip
    """A row leaves when its slot is needed; ``kind`` and ``window`` say which: batches known ahead (T or more: all).

    ``state`` [2]: rows resident, entries of the heap. ``rank`` [K]: the step of the last use (``LRU``), the uses
    (``LFU``), or ``following`` at the last use (``AHEAD``). ``heap`` [more than 2 C] has an entry for every row that
    may leave, smallest first: ``rank * K + (K - 1 - row)``, or how far before the end of the places L + K the row's
    next use is, L + row where it is not known. ``entry`` [K] is the one that counts (-1: none); others are stale.
    """
    used, size, num_rows, steps = state[0], state[1], entry.size, offsets.size - 1
    end = rows.size + num_rows - 1
    for step in range(first, last):
        horizon = offsets[min(step + window + 1, steps)]
        if kind == AHEAD and step + window < steps:  # one more batch has become known
            for place in range(offsets[step + window], horizon):
                if entry[rows[place]] == num_rows - 1 - rows[place]:
                    size = _push(heap, size, end - place, entry, kind, rows)
        missing = _use(rows, counts, offsets[step], offsets[step + 1], step, last_use, resident, totals)
        for place in range(offsets[step], offsets[step + 1]):
            row = rows[place]
            entry[row] = -1
            rank[row] = step if kind == LRU else rank[row] + 1 if kind == LFU else following[place]
        gone = step - in_flight
        if gone >= 0:
            for place in range(offsets[gone], offsets[gone + 1]):
                row = rows[place]
                if last_use[row] == gone:
                    key = rank[row] * num_rows + (num_rows - 1 - row)
                    if kind == AHEAD:
                        key = end - rank[row] if rank[row] < horizon else num_rows - 1 - row
                    size = _push(heap, size, key, entry, kind, rows)
        leaving = max(0, missing - (slots - used))
        used += missing - leaving
        totals[4] += leaving
        while leaving > 0:
            key = heap[0]
            size -= 1
            heap[0] = heap[size]
            _sift_down(heap, size, 0)
            row = _row_of(key, kind, rows, num_rows)
            if entry[row] == key:
                entry[row] = -1
                resident[row] = False
                leaving -= 1
        for place in range(offsets[step], offsets[step + 1]):
            resident[rows[place]] = True
    state[0], state[1] = used, size
