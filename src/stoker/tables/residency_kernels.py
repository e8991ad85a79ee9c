"""Numba kernels of the residency: a hash directory of rows, a bit tree of idle ones, lists by next use.

The directory [P, 4] int64 is an open-addressing hash with linear probing: address + 1 (0: free), slot (>= 0; -1: none;
-2 - p: evicted by plan p, whose writeback may be under way), first and last announced entry (-1: none). It holds
resident rows, announced rows and rows on their way home: bounded by the slots and the window, not by the tables.
Rows in slots that may be given up are in the bit tree (no announced use), where the rarest is found in a few
words, or in the list of their next step.

Legend: C slots, E entries of the window (ring), W steps of the window (ring), T tables, G segments.
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
    "ADDRESS",
    "FREE",
    "PARKED",
    "RECORDS",
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
# Counters: empty slots, parked ones, records of the directory, newest step of the window, rows with an announced use.
FREE, PARKED, RECORDS, NEWEST, WANTED = 0, 1, 2, 3, 4
_IDLE, _FLIGHT = -2, -1  # slot_key: in the bit tree; in no structure. Else: the step whose list it is in
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
def _link(lists, slot_key, before, after, slot, step):
    at = step & (lists.size - 1)
    first = lists[at]
    after[slot], before[slot] = first, -1
    if first >= 0:
        before[first] = slot
    lists[at] = slot
    slot_key[slot] = step


@_jit
def _unlink(lists, slot_key, before, after, slot):
    a, b = before[slot], after[slot]
    if a >= 0:
        after[a] = b
    else:
        lists[slot_key[slot] & (lists.size - 1)] = b
    if b >= 0:
        before[b] = a


@_jit
def _park(slot, row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks, counters):
    if next_step[slot] < 0:
        _mark(tree, levels, _rank(row_in_slot[slot], first_row, ranks))
        slot_key[slot] = _IDLE
    else:
        _link(lists, slot_key, before, after, slot, next_step[slot])
    counters[PARKED] += 1


@_jit
def _unpark(slot, row_in_slot, slot_key, before, after, lists, tree, levels, first_row, ranks, counters):
    if slot_key[slot] == _IDLE:
        _unmark(tree, levels, _rank(row_in_slot[slot], first_row, ranks))
    else:
        _unlink(lists, slot_key, before, after, slot)
    slot_key[slot] = _FLIGHT
    counters[PARKED] -= 1


@_jit
def announce(
    rows, start, step, directory, entry_next, entry_step,
    row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks, counters,
):  # fmt: skip
    """Enter a batch's rows as entries ``start`` on of the window."""
    ring = entry_next.size - 1
    counters[NEWEST] = step
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            _ask(directory, rows[i + _AHEAD])
        at = insert(directory, rows[i], counters)
        entry = start + i
        entry_next[entry & ring] = -1
        entry_step[entry & ring] = step
        last = directory[at, LAST]
        directory[at, LAST] = entry
        if last >= 0:
            entry_next[last & ring] = entry
            continue
        directory[at, FIRST] = entry
        counters[WANTED] += 1
        slot = directory[at, SLOT]
        if slot >= 0:
            if slot_key[slot] == _IDLE:
                _unmark(tree, levels, _rank(rows[i], first_row, ranks))
                _link(lists, slot_key, before, after, slot, step)
            next_step[slot] = step


@_jit
def _choose(needed, victims, directory, row_in_slot, slot_key, before, after, lists, tree, levels, first_row, ranks,
            counters):  # fmt: skip
    """Take ``needed`` parked slots, farthest next use first, then rarest."""
    found = 0
    while found < needed:
        rank = _highest(tree, levels)
        if rank < 0:
            break
        _unmark(tree, levels, rank)
        slot = directory[find(directory, _row_of_rank(rank, first_row, ranks)), SLOT]
        slot_key[slot] = _FLIGHT
        victims[found] = slot
        found += 1
    step = counters[NEWEST]
    while found < needed:
        slot = lists[step & (lists.size - 1)]
        count = 0
        here = slot
        while here >= 0:
            count += 1
            here = after[here]
        if count > 0:
            members = np.empty(count, np.int64)
            keys = np.empty(count, np.int64)
            here = slot
            for i in range(count):
                members[i] = here
                keys[i] = -_rank(row_in_slot[here], first_row, ranks)
                here = after[here]
            order = np.argsort(keys)
            for i in range(min(count, needed - found)):
                chosen = members[order[i]]
                _unlink(lists, slot_key, before, after, chosen)
                slot_key[chosen] = _FLIGHT
                victims[found] = chosen
                found += 1
        step -= 1
    counters[PARKED] -= needed


@_jit
def plan(
    rows, staged, number, transient, slots, fetch_rows, fetch_slots, victims, evict_rows, evict_slots, landed_rows,
    landed, directory, entry_next, entry_step, empty, users, changed,
    row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks, counters,
):  # fmt: skip
    """Give every row of a batch a slot.

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
        if slot >= 0:
            kept += slot_key[slot] != _FLIGHT
        else:
            missing += 1
            fence = max(fence, -2 - slot)
    candidates = counters[PARKED] - kept
    if missing > counters[FREE] + candidates:
        if not staged:
            for i in range(total):
                _forget_idle(directory, rows[i], counters)
        return -1, fence, 0, 0
    ring = entry_next.size - 1
    for i in range(total):
        at = places[i]
        slot = directory[at, SLOT]
        if slot >= 0 and slot_key[slot] != _FLIGHT:
            _unpark(slot, row_in_slot, slot_key, before, after, lists, tree, levels, first_row, ranks, counters)
        if staged:
            following = entry_next[directory[at, FIRST] & ring]
            directory[at, FIRST] = following
            if following < 0:
                directory[at, LAST] = -1
                counters[WANTED] -= 1
            if slot >= 0:
                next_step[slot] = entry_step[following & ring] if following >= 0 else -1
    needed = candidates if transient else max(0, missing - counters[FREE])
    _choose(
        needed, victims, directory, row_in_slot, slot_key, before, after, lists, tree, levels, first_row, ranks,
        counters,
    )  # fmt: skip
    # Changed rows first, each with its slot; then the others, which need no writing.
    written = 0
    for i in range(needed):
        if changed[victims[i]]:
            evict_rows[written] = row_in_slot[victims[i]]
            evict_slots[written] = victims[i]
            written += 1
    evicted = written
    for i in range(needed):
        if not changed[victims[i]]:
            evict_rows[evicted] = row_in_slot[victims[i]]
            evicted += 1
        row_in_slot[victims[i]] = -1
    fetched, used = 0, 0
    for i in range(total):
        at = places[i]
        slot = directory[at, SLOT]
        if slot < 0:
            if counters[FREE] > 0:
                counters[FREE] -= 1
                slot = empty[counters[FREE]]
            else:
                slot = victims[used]
                used += 1
            directory[at, SLOT] = slot
            row_in_slot[slot] = rows[i]
            slot_key[slot] = _FLIGHT
            first = directory[at, FIRST]
            next_step[slot] = entry_step[first & ring] if first >= 0 else -1
            fetch_rows[fetched] = rows[i]
            fetch_slots[fetched] = slot
            fetched += 1
        users[slot] += 1
        slots[i] = slot
    for i in range(needed - 1, used - 1, -1):
        empty[counters[FREE]] = victims[i]
        counters[FREE] += 1
    # Records move from here on: no place is used any more.
    for i in range(evicted):
        at = find(directory, evict_rows[i])
        directory[at, SLOT] = -2 - number if i < written else -1
        if i < written:
            changed[evict_slots[i]] = False
    for i in range(landed_rows.size):
        at = find(directory, landed_rows[i])
        if directory[at, ADDRESS] != 0 and directory[at, SLOT] == -2 - landed:
            directory[at, SLOT] = -1
            _forget_idle(directory, landed_rows[i], counters)
    for i in range(written, evicted):
        _forget_idle(directory, evict_rows[i], counters)
    return 0, fence, fetched, written


@_jit
def release(
    slots, mark, pinned, users, changed,
    row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks, counters,
):  # fmt: skip
    """Let go of a batch's slots; those of no other batch in flight may be given up."""
    for i in range(slots.size):
        slot = slots[i]
        users[slot] -= 1
        if mark:
            changed[slot] = True
        if users[slot] == 0:
            row = row_in_slot[slot]
            table = _table_of(first_row, row)
            if row - first_row[table] >= pinned[table]:
                _park(
                    slot, row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks,
                    counters,
                )  # fmt: skip


@_jit
def cancel(
    rows, directory, row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks, counters,
):  # fmt: skip
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
            if slot_key[slot] >= 0:
                _unlink(lists, slot_key, before, after, slot)
                _mark(tree, levels, _rank(rows[i], first_row, ranks))
                slot_key[slot] = _IDLE
            next_step[slot] = -1
        else:
            _forget_idle(directory, rows[i], counters)


@_jit
def skip(
    rows, directory, entry_next, entry_step,
    row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks, counters,
):  # fmt: skip
    """Forget the first announced use of ``rows``."""
    ring = entry_next.size - 1
    for i in range(rows.size):
        at = find(directory, rows[i])
        following = entry_next[directory[at, FIRST] & ring]
        directory[at, FIRST] = following
        slot = directory[at, SLOT]
        if following < 0:
            directory[at, LAST] = -1
            counters[WANTED] -= 1
        if slot >= 0:
            parked = slot_key[slot] != _FLIGHT
            if parked:
                _unpark(slot, row_in_slot, slot_key, before, after, lists, tree, levels, first_row, ranks, counters)
            next_step[slot] = entry_step[following & ring] if following >= 0 else -1
            if parked:
                _park(
                    slot, row_in_slot, next_step, slot_key, before, after, lists, tree, levels, first_row, ranks,
                    counters,
                )  # fmt: skip
        elif following < 0:
            _forget_idle(directory, rows[i], counters)
