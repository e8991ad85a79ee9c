"""Numba kernels that replay cache strategies over a trace, some steps at a time. Import only where Numba is.

Rows are numbered such that of two rows the greater leaves first when all else is equal; a step lists its rows in
rising order. So a place p in the trace orders victims as it stands: a later next use is a greater place, and within
a step the greater row is. The farthest next use is then the largest member of a set of places, and the set is a bitmap
with bitmaps over its words (a 64-ary tree): an insertion, a deletion or a search for the largest touches four words for
sixteen million places, and most of them stay in the cache.

Legend: T steps, L distinct rows of all steps one after the other, K rows of the trace, C slots, k batches in flight.

Each kernel works on steps [first, last) and keeps what it needs in arrays, so that the caller can stop in between:
``last_use`` [K] step of the last use (-1: none), ``resident`` [K], ``state`` its own scalars, ``totals`` [5]: hits,
lookups hit, misses, compulsory misses, rows written back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

__all__ = ["belady", "bitmap", "count_uses", "lfu", "link", "lru", "pipelined"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_ONE, _NONE = np.uint64(1), np.uint64(0)


def bitmap(size: int) -> tuple[Words, Int64]:
    """An empty set of places below ``size``: words of all levels, and where each level starts."""
    levels = [-(-size // 64)]
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // 64))
    starts = np.concatenate([[0], np.cumsum(levels[:-1])]).astype(np.int64)
    return np.zeros(sum(levels), np.uint64), starts


@jit
def _insert(words: Words, starts: Int64, place: int) -> None:
    for level in range(starts.size):
        at = starts[level] + (place >> 6)
        before = words[at]
        words[at] = before | (_ONE << np.uint64(place & 63))
        if before != _NONE:
            return
        place >>= 6


@jit
def _remove(words: Words, starts: Int64, place: int) -> None:
    for level in range(starts.size):
        at = starts[level] + (place >> 6)
        words[at] &= ~(_ONE << np.uint64(place & 63))
        if words[at] != _NONE:
            return
        place >>= 6


@jit
def _holds(words: Words, place: int) -> bool:
    return bool((words[place >> 6] >> np.uint64(place & 63)) & _ONE != _NONE)


@jit
def _top_bit(word: np.uint64) -> int:
    place = 0
    for half in (32, 16, 8, 4, 2, 1):
        upper = word >> np.uint64(half)
        if upper != _NONE:
            word = upper
            place += half
    return place


@jit
def _largest(words: Words, starts: Int64) -> int:
    place = 0
    for level in range(starts.size - 1, -1, -1):
        place = (place << 6) + _top_bit(words[starts[level] + place])
    return place


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
    rows: Int32,
    counts: Int32,
    begin: int,
    end: int,
    step: int,
    last_use: Int32,
    resident: Flags,
    totals: Int64,
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
    rows: Int32,
    counts: Int32,
    offsets: Int64,
    first: int,
    last: int,
    in_flight: int,
    slots: int,
    hot: Flags,
    last_use: Int32,
    resident: Flags,
    state: Int64,
    totals: Int64,
) -> None:
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
def lru(
    rows: Int32,
    counts: Int32,
    offsets: Int64,
    first: int,
    last: int,
    slots: int,
    last_use: Int32,
    resident: Flags,
    state: Int64,
    totals: Int64,
) -> None:
    """The last use longest ago leaves. ``state`` [3]: rows resident, and the step and place of the oldest use.

    Uses grow old in the order of the trace, so one walk along it meets all victims: step by step, each step from its
    greatest row. It stays behind the batches in flight because their rows fit the slots.
    """
    used, oldest, at = state[0], state[1], state[2]
    for step in range(first, last):
        missing = _use(rows, counts, offsets[step], offsets[step + 1], step, last_use, resident, totals)
        leaving = max(0, missing - (slots - used))
        used += missing - leaving
        totals[4] += leaving
        while leaving > 0:
            if at < offsets[oldest]:
                oldest += 1
                at = offsets[oldest + 1] - 1
                continue
            row = rows[at]
            if resident[row] and last_use[row] == oldest:
                resident[row] = False
                leaving -= 1
            at -= 1
        for place in range(offsets[step], offsets[step + 1]):
            resident[rows[place]] = True
    state[0], state[1], state[2] = used, oldest, at


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
def _drop_stale(heap: Int64, size: int, uses: Int32) -> int:
    """Keep the entries of rows not used since; returns how many there are."""
    kept = 0
    for entry in range(size):
        key = heap[entry]
        if uses[uses.size - 1 - key % uses.size] == key // uses.size:
            heap[kept] = key
            kept += 1
    for at in range(kept // 2 - 1, -1, -1):
        _sift_down(heap, kept, at)
    return kept


@jit
def lfu(
    rows: Int32,
    counts: Int32,
    offsets: Int64,
    first: int,
    last: int,
    in_flight: int,
    slots: int,
    last_use: Int32,
    resident: Flags,
    uses: Int32,
    heap: Int64,
    state: Int64,
    totals: Int64,
) -> None:
    """The row that the fewest batches used leaves. ``state`` [2]: rows resident, entries of the heap.

    ``uses`` [K]; ``heap`` [more than 2 C] holds ``uses * K + (K - 1 - row)``, smallest first. A row enters when it is
    no longer in flight; a later use makes the entry stale, as its count is no longer the row's.
    """
    used, size, num_rows = state[0], state[1], uses.size
    for step in range(first, last):
        missing = _use(rows, counts, offsets[step], offsets[step + 1], step, last_use, resident, totals)
        for place in range(offsets[step], offsets[step + 1]):
            uses[rows[place]] += 1
        gone = step - in_flight
        if gone >= 0:
            for place in range(offsets[gone], offsets[gone + 1]):
                row = rows[place]
                if last_use[row] != gone:
                    continue
                if size == heap.size:
                    size = _drop_stale(heap, size, uses)
                key = np.int64(uses[row]) * num_rows + (num_rows - 1 - row)
                at = size
                size += 1
                while at > 0 and heap[(at - 1) >> 1] > key:
                    heap[at] = heap[(at - 1) >> 1]
                    at = (at - 1) >> 1
                heap[at] = key
        leaving = max(0, missing - (slots - used))
        used += missing - leaving
        totals[4] += leaving
        while leaving > 0:
            key = heap[0]
            size -= 1
            heap[0] = heap[size]
            _sift_down(heap, size, 0)
            row = num_rows - 1 - key % num_rows
            if uses[row] == key // num_rows:
                resident[row] = False
                leaving -= 1
        for place in range(offsets[step], offsets[step + 1]):
            resident[rows[place]] = True
    state[0], state[1] = used, size


@jit
def belady(
    rows: Int32,
    counts: Int32,
    following: Int64,
    offsets: Int64,
    first: int,
    last: int,
    window: int,
    in_flight: int,
    slots: int,
    last_use: Int32,
    resident: Flags,
    upcoming: Int64,
    words: Words,
    starts: Int64,
    state: Int64,
    totals: Int64,
) -> None:
    """The farthest next use leaves, with ``window`` batches known ahead (T or more: all). ``state`` [1]: rows resident.

    ``upcoming`` [K] is ``following`` at each row's last use. ``words`` and ``starts`` are a :func:`bitmap` of L + K
    places: a row that may leave stands at its next use if that is known, else at L + row.
    """
    used, steps, end = state[0], offsets.size - 1, rows.size
    for step in range(first, last):
        horizon = offsets[min(step + window + 1, steps)]
        if step + window < steps:  # one more batch has become known
            for place in range(offsets[step + window], horizon):
                unknown = end + rows[place]
                if _holds(words, unknown):
                    _remove(words, starts, unknown)
                    _insert(words, starts, place)
        missing = _use(rows, counts, offsets[step], offsets[step + 1], step, last_use, resident, totals)
        for place in range(offsets[step], offsets[step + 1]):
            if _holds(words, place):
                _remove(words, starts, place)
            upcoming[rows[place]] = following[place]
        gone = step - in_flight
        if gone >= 0:
            for place in range(offsets[gone], offsets[gone + 1]):
                row = rows[place]
                if last_use[row] == gone:
                    _insert(words, starts, upcoming[row] if upcoming[row] < horizon else end + row)
        leaving = max(0, missing - (slots - used))
        used += missing - leaving
        totals[4] += leaving
        for _ in range(leaving):
            place = _largest(words, starts)
            _remove(words, starts, place)
            resident[rows[place] if place < end else place - end] = False
        for place in range(offsets[step], offsets[step + 1]):
            resident[rows[place]] = True
    state[0] = used
