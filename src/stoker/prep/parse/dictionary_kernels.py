"""Numba kernels that number distinct values: within a block, and over all blocks of a table.

Two levels keep the work parallel and the random memory traffic low: a block's own dictionary fits a cache,
and only its distinct values meet the large table. Open addressing, linear probing, power-of-two sizes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

__all__ = [
    "block_ints",
    "block_texts",
    "block_views",
    "copy_spans",
    "find_ints",
    "find_texts",
    "gather_bytes",
    "insert_ints",
    "insert_texts",
    "rehash",
    "splitmix",
    "spread_lists",
]

_INLINE = 12  # bytes of a text that lie in its view


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
def block_ints(values, missing, codes, distinct, table):  # type: ignore[no-untyped-def]
    """Number ``values`` from 1 by first occurrence into ``codes`` (missing: 0); returns how many there are.

    ``table`` is int32, a power of two, filled with -1; -1 is returned when more than half of it would be full.
    """
    mask = np.uint64(table.size - 1)
    found = 0
    for i in range(values.size):
        if missing[i]:
            codes[i] = 0
            continue
        value = values[i]
        at = _mix(value) & mask
        while True:
            entry = table[at]
            if entry < 0:
                table[at] = found
                distinct[found] = value
                entry = found
                found += 1
                if found * 2 > table.size:
                    return -1
                break
            if distinct[entry] == value:
                break
            at = (at + np.uint64(1)) & mask
        codes[i] = entry + 1
    return found


@jit
def block_texts(data, starts, lengths, codes, first, table):  # type: ignore[no-untyped-def]
    """As :func:`block_ints` for texts; ``first`` receives the position of each distinct one."""
    mask = np.uint64(table.size - 1)
    found = 0
    for i in range(starts.size):
        length = lengths[i]
        if length < 0:
            codes[i] = 0
            continue
        # Rows of one session or list often follow each other: comparing costs less than hashing.
        if i > 0 and lengths[i - 1] == length and _same_text(data, starts[i], data, starts[i - 1], length):
            codes[i] = codes[i - 1]
            continue
        at = _text_hash(data, starts[i], length) & mask
        while True:
            entry = table[at]
            if entry < 0:
                table[at] = found
                first[found] = i
                entry = found
                found += 1
                if found * 2 > table.size:
                    return -1
                break
            j = first[entry]
            if lengths[j] == length and _same_text(data, starts[i], data, starts[j], length):
                break
            at = (at + np.uint64(1)) & mask
        codes[i] = entry + 1
    return found


@jit
def block_views(views, base, absent, codes, distinct, table, found):  # type: ignore[no-untyped-def]
    """Number texts by their views of 16 bytes, int64 [n, 2], as :func:`block_ints` does numbers.

    ``found`` values of pieces before are in ``distinct`` [., 2] already; ``base`` is added to the number of the buffer
    that a long text lies in. ``absent`` [n], or empty: none is missing.
    """
    mask = np.uint64(table.size - 1)
    some = absent.size > 0
    before, beside, code = np.int64(0), np.int64(0), np.uint32(0)  # of the row before; 0: nothing to compare with
    for i in range(views.shape[0]):
        if some and absent[i]:
            codes[i] = 0
            continue
        a, b = views[i, 0], views[i, 1]
        if base > 0 and np.uint32(a) > _INLINE:
            b += base
        if code > 0 and a == before and b == beside:
            codes[i] = code
            continue
        at = (_mix(a) ^ _mix(np.uint64(b) ^ np.uint64(0xD6E8FEB86659FD93))) & mask
        while True:
            entry = table[at]
            if entry < 0:
                table[at] = found
                distinct[found, 0], distinct[found, 1] = a, b
                entry = found
                found += 1
                if found * 2 > table.size:
                    return -1
                break
            if distinct[entry, 0] == a and distinct[entry, 1] == b:
                break
            at = (at + np.uint64(1)) & mask
        before, beside, code = a, b, np.uint32(entry + 1)
        codes[i] = code
    return found


@jit
def copy_spans(data, starts, places, ends, out):  # type: ignore[no-untyped-def]
    """Copy text ``places[k]``, which begins at ``data[starts[k]]``, to where ``ends`` says that it goes."""
    for k in range(places.size):
        begin = ends[places[k]]
        _copy(data, starts[k], ends[places[k] + 1] - begin, out, begin)


@jit
def spread_lists(codes, begins, source, out):  # type: ignore[no-untyped-def]
    """Write the list behind each code, ``source[begins[code - 1] : begins[code]]``, one after the other; 0: none."""
    at = np.uint64(0)
    for i in range(codes.size):
        code = np.uint64(codes[i])
        if code > 0:
            for k in range(begins[code - np.uint64(1)], begins[code]):
                out[at] = source[np.uint64(k)]
                at += np.uint64(1)


@jit
def gather_bytes(data, starts, lengths, out, ends):  # type: ignore[no-untyped-def]
    """Copy texts one after the other into ``out``; ``ends`` [n + 1] receives where each begins and ends."""
    at = 0
    ends[0] = 0
    for i in range(starts.size):
        if lengths[i] > 0:
            _copy(data, starts[i], lengths[i], out, at)
            at += lengths[i]
        ends[i + 1] = at


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


def splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of each uint64: the hash behind ``hash_buckets`` of numbers and behind row sampling."""
    with np.errstate(over="ignore"):
        h = values + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = h ^ (h >> np.uint64(31))
        return mixed
