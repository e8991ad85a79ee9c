"""Numba kernels that number the distinct values of a table over all blocks.

Only the distinct values of each block meet the large table, which keeps random memory traffic low. Open addressing,
linear probing, power-of-two sizes.
"""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit

__all__ = [
    "find_ints", "find_texts", "insert_ints", "insert_texts", "rehash",
]  # fmt: skip


@jit
def _mix(value):  # type: ignore[no-untyped-def]
    h = np.uint64(value) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(32))


@jit
def _word(data, at):  # type: ignore[no-untyped-def]
    """Eight bytes as one number: a single load, for unsigned places need no look at whether they are negative."""
    at = np.uint64(at)
    return (
        np.uint64(data[at])
        | np.uint64(data[at + np.uint64(1)]) << np.uint64(8)
        | np.uint64(data[at + np.uint64(2)]) << np.uint64(16)
        | np.uint64(data[at + np.uint64(3)]) << np.uint64(24)
        | np.uint64(data[at + np.uint64(4)]) << np.uint64(32)
        | np.uint64(data[at + np.uint64(5)]) << np.uint64(40)
        | np.uint64(data[at + np.uint64(6)]) << np.uint64(48)
        | np.uint64(data[at + np.uint64(7)]) << np.uint64(56)
    )


@jit
def _text_hash(data, start, length):  # type: ignore[no-untyped-def]
    h = np.uint64(length)
    at, stop = start, start + length
    while at + 8 <= stop:
        h = _mix(h ^ _word(data, at))
        at += 8
    rest, shift = np.uint64(0), np.uint64(0)
    while at < stop:
        rest |= np.uint64(data[np.uint64(at)]) << shift
        shift += np.uint64(8)
        at += 1
    return _mix(h ^ rest)


@jit
def _same_text(a, at, b, bt, length):  # type: ignore[no-untyped-def]
    stop = at + length
    while at + 8 <= stop:
        if _word(a, at) != _word(b, bt):
            return False
        at += 8
        bt += 8
    while at < stop:
        if a[np.uint64(at)] != b[np.uint64(bt)]:
            return False
        at += 1
        bt += 1
    return True


@jit
def _copy(data, at, length, out, to):  # type: ignore[no-untyped-def]
    for p in range(np.uint64(length)):
        out[np.uint64(to) + p] = data[np.uint64(at) + p]


@jit
def insert_ints(slots, values, counts, entry_values, entry_counts, entries, refs):  # type: ignore[no-untyped-def]
    """Add a block's dictionary to a table's. ``slots`` [size, 2] int64 holds the hash and entry + 1 (0: free);
    different numbers have different hashes.

    ``refs`` receives each value's entry. Returns the new number of entries; the caller has made room.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(values.size):
        h = _mix(values[i])
        tag = np.int64(h)
        at = h & mask
        while True:
            entry = slots[at, 1] - 1
            if entry < 0:
                slots[at, 0] = tag
                slots[at, 1] = entries + 1
                entry = entries
                entry_values[entry] = values[i]
                entry_counts[entry] = 0
                entries += 1
                break
            if slots[at, 0] == tag:
                break
            at = (at + np.uint64(1)) & mask
        entry_counts[entry] += counts[i]
        refs[i] = entry
    return entries


@jit
def find_ints(slots, values, out):  # type: ignore[no-untyped-def]
    """Entry of each value in a table's ``slots``, -1 where it has none."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(values.size):
        h = _mix(values[i])
        tag = np.int64(h)
        at = h & mask
        while slots[at, 1] != 0 and slots[at, 0] != tag:
            at = (at + np.uint64(1)) & mask
        out[i] = slots[at, 1] - 1


@jit
def find_texts(slots, data, ends, arena, entry_ends, out):  # type: ignore[no-untyped-def]
    """As :func:`find_ints` for texts."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ends.size - 1):
        start, length = ends[i], ends[i + 1] - ends[i]
        h = _text_hash(data, start, length)
        tag = np.int64(h)
        at = h & mask
        out[i] = -1
        while slots[at, 1] != 0:
            entry = slots[at, 1] - 1
            begin = entry_ends[entry]
            if (
                slots[at, 0] == tag
                and entry_ends[entry + 1] - begin == length
                and _same_text(data, start, arena, begin, length)
            ):
                out[i] = entry
                break
            at = (at + np.uint64(1)) & mask


@jit
def insert_texts(slots, data, ends, counts, arena, entry_ends, entry_counts, entries, refs):  # type: ignore[no-untyped-def]
    """As :func:`insert_ints` for texts, whose bytes are kept one after the other in ``arena``.

    ``slots`` [size, 2] holds the hash (to compare before the bytes are) and entry + 1.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ends.size - 1):
        start, length = ends[i], ends[i + 1] - ends[i]
        h = _text_hash(data, start, length)
        tag = np.int64(h)
        at = h & mask
        while True:
            entry = slots[at, 1] - 1
            if entry < 0:
                slots[at, 0] = tag
                slots[at, 1] = entries + 1
                entry = entries
                begin = entry_ends[entry]
                _copy(data, start, length, arena, begin)
                entry_ends[entry + 1] = begin + length
                entry_counts[entry] = 0
                entries += 1
                break
            begin = entry_ends[entry]
            if (
                slots[at, 0] == tag
                and entry_ends[entry + 1] - begin == length
                and _same_text(data, start, arena, begin, length)
            ):
                break
            at = (at + np.uint64(1)) & mask
        entry_counts[entry] += counts[i]
        refs[i] = entry
    return entries


@jit
def rehash(slots, old):  # type: ignore[no-untyped-def]
    """Move the filled slots of ``old`` into empty ``slots``."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(old.shape[0]):
        if old[i, 1] == 0:
            continue
        at = np.uint64(old[i, 0]) & mask
        while slots[at, 1] != 0:
            at = (at + np.uint64(1)) & mask
        slots[at, 0] = old[i, 0]
        slots[at, 1] = old[i, 1]
