"""Numba kernels that replay cache strategies over a trace, some steps at a time. Importing this needs Numba.

Of two equal rows, the one with the greater number is evicted first, and a step lists its rows in rising order. So a
place p in the trace orders victims: a later next use has a greater place, and within a step the greater row has. The
next victim is the smallest entry of a heap.

Legend: T steps, L distinct rows of all steps one after the other, K rows of the trace, C slots, k batches in flight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit
from stoker.tables.slots.window import CALM, FARTHER, LEAST

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Which row is evicted: last use longest ago; fewest batches; farthest next use; any row not in flight.
LRU, LFU, AHEAD, PASSING = 0, 1, 2, 3
# Places in ``State.ahead``: batches known; how many to know beyond the current one; plans since the last guess; rows
# without a known use that may be evicted; bytes of waiting batches; the most batches known ahead, and the most bytes.
KNOWN, TARGET, CALM_PLANS, IDLE, SIZE, WIDEST, LARGEST = range(7)


class Places(NamedTuple):
    """A trace for the kernels."""

    rows: Int32  # [L]
    counts: Int32  # [L] occurrences of the row in its batch
    following: Int64  # [L] place of the next use of the row; L + row if there is none
    offsets: Int64  # [T + 1] first place of each step


class State(NamedTuple):
    """The state of a simulation between two steps."""

    last_use: Int32  # [K] step of the last use; -1: none
    resident: Flags  # [K]
    hot: Flags  # [K] pinned rows
    rank: Int64  # [K] step of the last use (LRU), uses (LFU), or ``following`` at the last use (AHEAD)
    entry: Int64  # [K] the valid entry of the row in the heap, others are stale; -1: none
    heap: Int64  # [more than 2 C] see :func:`advance`; empty if rows pass without a cache
    size: Int64  # [1] entries of the heap
    taken: Int64  # [4] slots of cold rows, their maximum, first step that needs too many (-1: none), how many it needs
    counts: Int64  # [5] hits, lookups hit, misses, compulsory misses, rows written back
    ahead: Int64  # [7] see :data:`KNOWN`

    @classmethod
    def begin(cls, hot: Flags, heap: int, window: int | None) -> State:
        """Return the state before the first step, with a heap of this many entries; ``window`` None: it adapts."""
        return cls(
            last_use=np.full(hot.size, -1, np.int32), resident=np.zeros(hot.size, np.bool_), hot=hot,
            rank=np.zeros(hot.size, np.int64), entry=np.full(hot.size, -1, np.int64), heap=np.empty(heap, np.int64),
            size=np.zeros(1, np.int64), taken=np.array([0, 0, -1, 0]), counts=np.zeros(5, np.int64),
            ahead=np.array([0, LEAST if window is None else window, 0, 0, 0, 0, 0]),
        )  # fmt: skip


@jit
def link(rows: Int32, begin: int, end: int, nearest: Int64, following: Int64) -> None:
    """Fill ``following`` [L] for places [begin, end) from the back: the place of the next use of the row, or L + row.

    ``nearest`` [K] is the first place of each row after ``end``, at first L + row.
    """
    for place in range(end - 1, begin - 1, -1):
        row = rows[place]
        following[place] = nearest[row]
        nearest[row] = place


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
    """Return the row of an entry of the heap."""
    if kind != AHEAD:
        return num_rows - 1 - key % num_rows
    place = rows.size + num_rows - 1 - key
    return int(rows[place]) if place < rows.size else place - rows.size


@jit
def _drop_stale(heap: Int64, size: int, entry: Int64, kind: int, rows: Int32) -> int:
    """Keep one entry of each row that may be evicted; return their number."""
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
    """Add a row, as ``key``, to the heap of rows that may be evicted; return the size of the heap."""
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
def advance(
    kind: int, trace: Places, first: int, last: int, memory: int, in_flight: int, slots: int, state: State
) -> None:
    """Replay steps [first, last) with the strategy of ``kind``; ``memory``: of the window if it adapts, else -1.

    The heap has an entry for each row that may be evicted, the smallest first: ``rank * K + (K - 1 - row)``, or the
    distance of the next use of the row (L + row if it is not known) from the end of the places, L + K.
    """
    rows, following, offsets = trace.rows, trace.following, trace.offsets
    last_use, resident, hot, rank, entry, heap = (
        state.last_use,
        state.resident,
        state.hot,
        state.rank,
        state.entry,
        state.heap,
    )
    used, size, num_rows, steps = state.taken[0], state.size[0], entry.size, offsets.size - 1
    ahead, adapts = state.ahead, memory >= 0
    end = rows.size + num_rows - 1
    for step in range(first, last):
        begin, stop = offsets[step], offsets[step + 1]
        while kind == AHEAD and ahead[KNOWN] < steps and ahead[KNOWN] - step <= ahead[TARGET]:
            if adapts and ahead[KNOWN] - step > in_flight and ahead[SIZE] >= memory:
                break
            for place in range(offsets[ahead[KNOWN]], offsets[ahead[KNOWN] + 1]):
                row = rows[place]
                ahead[SIZE] += 24 * (not hot[row]) + 12 * trace.counts[place]
                if entry[row] == num_rows - 1 - row:
                    size = _push(heap, size, end - place, entry, kind, rows)
                    ahead[IDLE] -= 1
            ahead[KNOWN] += 1
        ahead[WIDEST] = max(ahead[WIDEST], ahead[KNOWN] - step - 1)
        ahead[LARGEST] = max(ahead[LARGEST], ahead[SIZE])
        horizon = offsets[ahead[KNOWN]]
        missing = 0  # slots to fill
        for place in range(begin, stop):
            row = rows[place]
            if resident[row]:
                state.counts[0] += 1
                state.counts[1] += trace.counts[place]
            else:
                state.counts[2] += 1
                state.counts[3] += last_use[row] < 0
                missing += not hot[row]
            last_use[row] = step
            if kind != PASSING:
                entry[row] = -1
                rank[row] = step if kind == LRU else rank[row] + 1 if kind == LFU else following[place]
        leaving = 0 if kind == PASSING else max(0, missing - (slots - used))
        if step >= in_flight:
            for place in range(offsets[step - in_flight], offsets[step - in_flight + 1]):
                row = rows[place]
                if last_use[row] != step - in_flight or hot[row]:
                    continue
                if kind == PASSING:
                    resident[row] = False
                    used -= 1
                    state.counts[4] += 1
                    continue
                key = rank[row] * num_rows + (num_rows - 1 - row)
                if kind == AHEAD:
                    key = end - rank[row] if rank[row] < horizon else num_rows - 1 - row
                    ahead[IDLE] += rank[row] >= horizon
                size = _push(heap, size, key, entry, kind, rows)
        used += missing - leaving
        state.counts[4] += leaving
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
                ahead[IDLE] -= kind == AHEAD and key < num_rows
        for place in range(begin, stop):
            resident[rows[place]] = True
            ahead[SIZE] -= 24 * (not hot[rows[place]]) + 12 * trace.counts[place]
        if adapts:  # as :class:`stoker.tables.slots.window.Ahead` does
            guessed = used == slots and ahead[IDLE] > 0
            ahead[CALM_PLANS] = 0 if guessed else ahead[CALM_PLANS] + 1
            if guessed:
                ahead[TARGET] = ahead[KNOWN] - step - 1 + FARTHER
            elif ahead[CALM_PLANS] == CALM:
                ahead[CALM_PLANS], ahead[TARGET] = 0, max(LEAST, ahead[TARGET] - 1)
        state.taken[1] = max(state.taken[1], used)
        if used > slots and state.taken[2] < 0:
            state.taken[2] = step
            state.taken[3] = used
    state.taken[0], state.size[0] = used, size
