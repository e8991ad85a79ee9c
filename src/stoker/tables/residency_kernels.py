"""Numba kernels of the residency: a hash directory of rows, a record for each slot, a bit tree of idle rows.

The directory [P, 4] int64 is an open-addressing hash with linear probing: address + 1 (0: free), slot (>= 0; -1: none;
-2 - p: evicted by plan p, whose writeback may be under way), first and last announced entry (-1: none). It holds
resident rows, announced rows and rows on their way home: bounded by the slots and the window, not by the tables.

An entry [E, 3] of the window: the next entry of its row and the step of that one (-1: none), its own step.

The record of a slot [C, 4] int64: address (-1: empty), next announced step (-1: none), batches in
flight that use it, flags. Of the slots that may be given up (parked), those without an announced use are in the bit
tree, where the rarest is found in a few words. The others are looked for one by one, which happens only if the window
wants more rows than there are slots: as long as it does not, the wanted rows that are missing are at most as many as
the idle ones that are resident.

Legend: C slots, E entries of the window (ring), T tables, G segments.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stoker.ops.llvm_rows import prefetch

__all__ = [
    "CHANGED",
    "FLAGS",
    "FREE",
    "PARKED",
    "RECORDS",
    "ROW",
    "WANTED",
    "announce",
    "cancel",
    "find",
    "insert",
    "plan",
    "rehash",
    "release",
    "skip",
]

_jit: Any = nb.njit(nogil=True, cache=True)

ADDRESS, SLOT, FIRST, LAST = 0, 1, 2, 3  # columns of the directory
# Counters: empty slots, parked ones, records of the directory, rows with an announced use.
FREE, PARKED, RECORDS, WANTED = 0, 1, 2, 3
ROW, NEXT, USERS, FLAGS = 0, 1, 2, 3  # columns of a slot's record
CHANGED, _PARKED_FLAG = 1, 2  # flags: must go home when it leaves; may be given up
_AHEAD = 12  # directory lines asked for before they are needed


@intrinsic
def _highest_bit(typingctx, word):
    """Position of the highest set bit of a word that is not 0."""
    signature = types.int64(types.uint64)

    def codegen(context, b, signature, args):
        zeros = b.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return b.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return signature, codegen


@_jit
def _hash(key):
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(32))


@_jit
def _ask(directory, row):
    at = np.int64(_hash(row + 1) & np.uint64(directory.shape[0] - 1))
    prefetch(directory, at * 4)


@_jit
def find(directory, row):
    """Place of the record of ``row``, or of the free record where it belongs."""
    mask = np.uint64(directory.shape[0] - 1)
    key = row + 1
    at = _hash(key) & mask
    while directory[at, ADDRESS] != key and directory[at, ADDRESS] != 0:
        at = (at + np.uint64(1)) & mask
    return np.int64(at)


@_jit
def insert(directory, row, counters):
    """Place of the record of ``row``, made if missing."""
    at = find(directory, row)
    if directory[at, ADDRESS] == 0:
        directory[at, ADDRESS] = row + 1
        directory[at, SLOT] = -1
        directory[at, FIRST] = -1
        directory[at, LAST] = -1
        counters[RECORDS] += 1
    return at


@_jit
def _remove(directory, at, counters):
    """Take a record out and move up what would no longer be found."""
    mask = np.uint64(directory.shape[0] - 1)
    hole = np.uint64(at)
    here = (hole + np.uint64(1)) & mask
    while directory[here, ADDRESS] != 0:
        home = _hash(directory[here, ADDRESS]) & mask
        if ((here - home) & mask) >= ((here - hole) & mask):
            for column in range(4):
                directory[hole, column] = directory[here, column]
            hole = here
        here = (here + np.uint64(1)) & mask
    directory[hole, ADDRESS] = 0
    counters[RECORDS] -= 1


@_jit
def _forget_idle(directory, row, counters):
    """Drop the record of a row that is neither resident nor announced nor on its way home."""
    at = find(directory, row)
    if directory[at, ADDRESS] != 0 and directory[at, SLOT] == -1 and directory[at, FIRST] < 0:
        _remove(directory, at, counters)


@_jit
def rehash(old, new):
    """Move all records into the empty, larger ``new``."""
    for i in range(old.shape[0]):
        if old[i, ADDRESS] != 0:
            at = find(new, old[i, ADDRESS] - 1)
            for column in range(4):
                new[at, column] = old[i, column]


@_jit
def _table_of(first_row, row):
    low, high = 0, first_row.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first_row[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@_jit
def _rank(row, first_row, ranks):
    """Place of a row among all when ordered by (row within its table, table): the higher, the rarer."""
    table = _table_of(first_row, row)
    local = row - first_row[table]
    start, base, alive, position = ranks[0], ranks[1], ranks[2], ranks[3]
    segment = _table_of(start, local)
    return base[segment] + (local - start[segment]) * alive[segment] + position[segment * (first_row.size - 1) + table]


@_jit
def _row_of_rank(rank, first_row, ranks):
    start, base, alive, owner = ranks[0], ranks[1], ranks[2], ranks[4]
    segment = _table_of(base, rank)
    local = start[segment] + (rank - base[segment]) // alive[segment]
    table = owner[segment * (first_row.size - 1) + (rank - base[segment]) % alive[segment]]
    return first_row[table] + local


@_jit
def _mark(tree, levels, rank):
    for level in range(levels.size):
        word, bit = rank >> 6, np.uint64(1) << np.uint64(rank & 63)
        before = tree[levels[level] + word]
        tree[levels[level] + word] = before | bit
        if before != 0:
            return
        rank = word


@_jit
def _unmark(tree, levels, rank):
    for level in range(levels.size):
        word, bit = rank >> 6, np.uint64(1) << np.uint64(rank & 63)
        after = tree[levels[level] + word] & ~bit
        tree[levels[level] + word] = after
        if after != 0:
            return
        rank = word


@_jit
def _highest(tree, levels):
    """The highest rank in the tree, or -1."""
    top = levels.size - 1
    if tree[levels[top]] == 0:
        return np.int64(-1)
    word = np.int64(0)
    for level in range(top, -1, -1):
        word = (word << 6) + _highest_bit(tree[levels[level] + word])
    return word


@_jit
def _park(slot, slots, tree, levels, first_row, ranks, counters):
    slots[slot, FLAGS] |= _PARKED_FLAG
    counters[PARKED] += 1
    if slots[slot, NEXT] < 0:
        _mark(tree, levels, _rank(slots[slot, ROW], first_row, ranks))


@_jit
def _unpark(slot, slots, tree, levels, first_row, ranks, counters):
    slots[slot, FLAGS] &= ~_PARKED_FLAG
    counters[PARKED] -= 1
    if slots[slot, NEXT] < 0:
        _unmark(tree, levels, _rank(slots[slot, ROW], first_row, ranks))


@_jit
def _set_next(slot, step, slots, tree, levels, first_row, ranks):
    """The next announced use of the row in ``slot`` is ``step``, or -1."""
    if slots[slot, FLAGS] & _PARKED_FLAG and (slots[slot, NEXT] < 0) != (step < 0):
        rank = _rank(slots[slot, ROW], first_row, ranks)
        if step < 0:
            _mark(tree, levels, rank)
        else:
            _unmark(tree, levels, rank)
    slots[slot, NEXT] = step


@_jit
def announce(
    rows, start, step, directory, entries, slots, tree, levels, first_row, ranks, counters
):  # fmt: skip
    """Enter a batch's rows as entries ``start`` on of the window."""
    ring = entries.shape[0] - 1
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            _ask(directory, rows[i + _AHEAD])
        at = insert(directory, rows[i], counters)
        entry = start + i
        entries[entry & ring, 0] = -1
        entries[entry & ring, 1] = -1
        entries[entry & ring, 2] = step
        last = directory[at, LAST]
        directory[at, LAST] = entry
        if last >= 0:
            # The step of the next use lies with the use before it: plans then read it in order.
            entries[last & ring, 0] = entry
            entries[last & ring, 1] = step
            continue
        directory[at, FIRST] = entry
        counters[WANTED] += 1
        slot = directory[at, SLOT]
        if slot >= 0:
            _set_next(slot, step, slots, tree, levels, first_row, ranks)


@_jit
def _choose(needed, victims, directory, slots, tree, levels, first_row, ranks, counters):
    """Take ``needed`` parked slots, farthest next use first, then rarest."""
    found = 0
    while found < needed:
        rank = _highest(tree, levels)
        if rank < 0:
            break
        _unmark(tree, levels, rank)
        slot = directory[find(directory, _row_of_rank(rank, first_row, ranks)), SLOT]
        slots[slot, FLAGS] &= ~_PARKED_FLAG
        victims[found] = slot
        found += 1
    counters[PARKED] -= needed
    if found == needed:
        return
    count = 0
    for slot in range(slots.shape[0]):
        count += (slots[slot, FLAGS] & _PARKED_FLAG) != 0
    members, steps, keys = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    count = 0
    for slot in range(slots.shape[0]):
        if slots[slot, FLAGS] & _PARKED_FLAG:
            members[count] = slot
            steps[count] = -slots[slot, NEXT]
            keys[count] = -_rank(slots[slot, ROW], first_row, ranks)
            count += 1
    order = np.argsort(keys)
    order = order[np.argsort(steps[order], kind="mergesort")]
    for i in range(needed - found):
        slot = members[order[i]]
        slots[slot, FLAGS] &= ~_PARKED_FLAG
        victims[found + i] = slot


@_jit
def plan(
    rows, staged, number, transient, taken, fetch_rows, fetch_slots, victims, evict_rows, evict_slots, landed_rows,
    landed, directory, entries, empty, slots, tree, levels, first_row, ranks, counters,
):  # fmt: skip
    """Give every row of a batch a slot (``taken``).

    ``landed_rows`` are what plan ``landed`` evicted; its writebacks are home. ``evict_rows`` receives all evicted rows,
    those that must be written first. Returns (status, fence, fetched, to write); status -1 changes nothing.
    """
    total = rows.size
    places = np.empty(total, np.int64)
    missing, kept, fence = 0, 0, np.int64(-1)
    for i in range(total):
        if i + _AHEAD < total:
            _ask(directory, rows[i + _AHEAD])
        at = find(directory, rows[i]) if staged else insert(directory, rows[i], counters)
        places[i] = at
        slot = directory[at, SLOT]
        taken[i] = slot
        if slot >= 0:
            prefetch(slots, slot * 4)
        else:
            missing += 1
            fence = max(fence, -2 - slot)
    for i in range(total):
        if taken[i] >= 0:
            kept += (slots[taken[i], FLAGS] & _PARKED_FLAG) != 0
    candidates = counters[PARKED] - kept
    if missing > counters[FREE] + candidates:
        if not staged:
            for i in range(total):
                _forget_idle(directory, rows[i], counters)
        return -1, fence, 0, 0
    ring = entries.shape[0] - 1
    for i in range(total):
        at, slot = places[i], taken[i]
        if slot >= 0 and slots[slot, FLAGS] & _PARKED_FLAG:
            _unpark(slot, slots, tree, levels, first_row, ranks, counters)
        if staged:
            first = directory[at, FIRST] & ring
            directory[at, FIRST] = entries[first, 0]
            if entries[first, 0] < 0:
                directory[at, LAST] = -1
                counters[WANTED] -= 1
            if slot >= 0:
                slots[slot, NEXT] = entries[first, 1]
    needed = candidates if transient else max(0, missing - counters[FREE])
    _choose(needed, victims, directory, slots, tree, levels, first_row, ranks, counters)
    # Changed rows first, each with its slot; then the others, which need no writing.
    written = 0
    for i in range(needed):
        if slots[victims[i], FLAGS] & CHANGED:
            evict_rows[written] = slots[victims[i], ROW]
            evict_slots[written] = victims[i]
            written += 1
    evicted = written
    for i in range(needed):
        if not slots[victims[i], FLAGS] & CHANGED:
            evict_rows[evicted] = slots[victims[i], ROW]
            evicted += 1
        slots[victims[i], ROW] = -1
        slots[victims[i], FLAGS] = 0
    fetched, used = 0, 0
    for i in range(total):
        slot = taken[i]
        if slot < 0:
            at = places[i]
            if counters[FREE] > 0:
                counters[FREE] -= 1
                slot = empty[counters[FREE]]
            else:
                slot = victims[used]
                used += 1
            directory[at, SLOT] = slot
            slots[slot, ROW] = rows[i]
            first = directory[at, FIRST]
            slots[slot, NEXT] = entries[first & ring, 2] if first >= 0 else -1
            fetch_rows[fetched] = rows[i]
            fetch_slots[fetched] = slot
            fetched += 1
            taken[i] = slot
        slots[slot, USERS] += 1
    for i in range(needed - 1, used - 1, -1):
        empty[counters[FREE]] = victims[i]
        counters[FREE] += 1
    # Records of the directory move from here on: no place is used any more.
    for i in range(evicted):
        directory[find(directory, evict_rows[i]), SLOT] = -2 - number if i < written else -1
    for i in range(landed_rows.size):
        at = find(directory, landed_rows[i])
        if directory[at, ADDRESS] != 0 and directory[at, SLOT] == -2 - landed:
            directory[at, SLOT] = -1
            _forget_idle(directory, landed_rows[i], counters)
    for i in range(written, evicted):
        _forget_idle(directory, evict_rows[i], counters)
    return 0, fence, fetched, written


@_jit
def release(given, mark, pinned, slots, tree, levels, first_row, ranks, counters):
    """Let go of a batch's slots; those of no other batch in flight may be given up."""
    for i in range(given.size):
        if i + _AHEAD < given.size:
            prefetch(slots, given[i + _AHEAD] * 4)
        slot = given[i]
        slots[slot, USERS] -= 1
        if mark:
            slots[slot, FLAGS] |= CHANGED
        if slots[slot, USERS] == 0:
            row = slots[slot, ROW]
            table = _table_of(first_row, row)
            if row - first_row[table] >= pinned[table]:
                _park(slot, slots, tree, levels, first_row, ranks, counters)


@_jit
def cancel(rows, directory, slots, tree, levels, first_row, ranks, counters):
    """Forget every announced use of ``rows``."""
    for i in range(rows.size):
        at = find(directory, rows[i])
        if directory[at, ADDRESS] == 0 or directory[at, FIRST] < 0:
            continue
        directory[at, FIRST] = -1
        directory[at, LAST] = -1
        counters[WANTED] -= 1
        slot = directory[at, SLOT]
        if slot >= 0:
            _set_next(slot, -1, slots, tree, levels, first_row, ranks)
        else:
            _forget_idle(directory, rows[i], counters)


@_jit
def skip(rows, directory, entries, slots, tree, levels, first_row, ranks, counters):
    """Forget the first announced use of ``rows``."""
    ring = entries.shape[0] - 1
    for i in range(rows.size):
        at = find(directory, rows[i])
        first = directory[at, FIRST] & ring
        following = entries[first, 0]
        directory[at, FIRST] = following
        if following < 0:
            directory[at, LAST] = -1
            counters[WANTED] -= 1
        slot = directory[at, SLOT]
        if slot >= 0:
            _set_next(slot, entries[first, 1], slots, tree, levels, first_row, ranks)
        elif following < 0:
            _forget_idle(directory, rows[i], counters)
