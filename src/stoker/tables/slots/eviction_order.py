"""Which slot is given up first, in Numba: farthest next use, then the rarest row.

The record of a slot [C, 4] int64: address (-1: empty), step of the next use, announced or hinted (-1: none known),
flags and above them the batches in flight that use it, rank of its row. Slots that may be given up are *parked*. Those
of them without a known use, farther than all others, are in a bit tree over the rows' ranks, where the rarest is found
in a few words. The others are in a max-heap of (next step, rank) in one integer. The heap is lazy: a slot that is used
again, or whose next use changes, leaves its key behind, and a key that no longer tells the truth is passed over. It is
kept only while plans need it: if the window wants more rows than there are slots, or with hints.

``order`` is (tree, begin of each level, heap); ``ranks`` see :func:`rank_of`. Legend: C slots, T tables, G segments.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stoker.ops.codegen.jit import jit
from stoker.tables.slots.row_directory import ADDRESS, SLOT, find

__all__ = [
    "BASE", "CHANGED", "FLAGS", "HEAP", "KEPT", "NEXT", "PARKED", "PARKED_FLAG", "POPPED", "RANK", "ROW", "USER",
    "park", "rank_of", "set_next", "take_farthest", "unpark",
]  # fmt: skip


ROW, NEXT, FLAGS, RANK = 0, 1, 2, 3  # columns of a slot's record
CHANGED, PARKED_FLAG = 1, 2  # flags: must go home when it leaves; may be given up
USER = 4  # one batch in flight that uses it, among the flags
# Counters: parked slots; keys in the heap, whether it is kept, keys taken since it was rebuilt, step keys count from.
PARKED, HEAP, KEPT, POPPED, BASE = 1, 4, 5, 6, 7
_RANK_BITS = 40
_STEPS = 2**22  # that keys can count before the heap is rebuilt from a later base


@intrinsic
def _highest_bit(typingctx, word):
    """Position of the highest set bit of a word that is not 0."""
    signature = types.int64(types.uint64)

    def codegen(context, b, signature, args):
        zeros = b.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return b.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return signature, codegen


@jit
def _table_of(first_row, row):
    low, high = 0, first_row.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first_row[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@jit
def rank_of(row, first_row, ranks):
    """Place of a row among all when ordered by (row within its table, table): the higher, the rarer."""
    table = _table_of(first_row, row)
    local = row - first_row[table]
    start, base, alive, position = ranks[0], ranks[1], ranks[2], ranks[3]
    segment = _table_of(start, local)
    return base[segment] + (local - start[segment]) * alive[segment] + position[segment * (first_row.size - 1) + table]


@jit
def _row_of_rank(rank, first_row, ranks):
    start, base, alive, owner = ranks[0], ranks[1], ranks[2], ranks[4]
    segment = _table_of(base, rank)
    local = start[segment] + (rank - base[segment]) // alive[segment]
    table = owner[segment * (first_row.size - 1) + (rank - base[segment]) % alive[segment]]
    return first_row[table] + local


@jit
def _mark(tree, levels, rank):
    for level in range(levels.size):
        word, bit = rank >> 6, np.uint64(1) << np.uint64(rank & 63)
        before = tree[levels[level] + word]
        tree[levels[level] + word] = before | bit
        if before != 0:
            return
        rank = word


@jit
def _unmark(tree, levels, rank):
    for level in range(levels.size):
        word, bit = rank >> 6, np.uint64(1) << np.uint64(rank & 63)
        after = tree[levels[level] + word] & ~bit
        tree[levels[level] + word] = after
        if after != 0:
            return
        rank = word


@jit
def _highest(tree, levels):
    """The highest rank in the tree, or -1."""
    top = levels.size - 1
    if tree[levels[top]] == 0:
        return np.int64(-1)
    word = np.int64(0)
    for level in range(top, -1, -1):
        word = (word << 6) + _highest_bit(tree[levels[level] + word])
    return word


@jit
def _key(slot, slots, counters):
    step = slots[slot, NEXT] - counters[BASE]
    return (step << _RANK_BITS) | slots[slot, RANK]


@jit
def _sink(heap, size, at):
    """Let the key at ``at`` down to where it belongs."""
    key = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key


@jit
def _rebuild(slots, order, counters):
    """The heap of all parked slots with a known use."""
    heap, size = order[2], 0
    lowest = np.int64(2**62)
    for slot in range(slots.shape[0]):
        if slots[slot, FLAGS] & PARKED_FLAG and slots[slot, NEXT] >= 0:
            lowest = min(lowest, slots[slot, NEXT])
    # Earlier steps than the lowest of now may come: half of what can be counted is kept for them.
    counters[BASE] = 0 if lowest == 2**62 else lowest - _STEPS // 2
    for slot in range(slots.shape[0]):
        if slots[slot, FLAGS] & PARKED_FLAG and slots[slot, NEXT] >= 0:
            heap[size] = _key(slot, slots, counters)
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, size, at)
    counters[HEAP], counters[KEPT], counters[POPPED] = size, 1, 0


@jit
def _push(slot, slots, order, counters):
    """Enter a parked slot that has a known use, if the heap is kept."""
    heap = order[2]
    if counters[KEPT] == 0:
        return
    full = counters[HEAP] == heap.size
    if full or slots[slot, NEXT] < counters[BASE] or slots[slot, NEXT] - counters[BASE] >= _STEPS:
        if full and counters[POPPED] == 0:  # nobody needed it for as many keys as it holds
            counters[HEAP], counters[KEPT] = 0, 0
        else:
            _rebuild(slots, order, counters)  # with this slot
        return
    key = _key(slot, slots, counters)
    at = counters[HEAP]
    counters[HEAP] += 1
    while at > 0 and heap[(at - 1) // 2] < key:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = key


@jit
def _pop(directory, slots, order, first_row, ranks, counters):
    """The parked slot with the farthest known use, the rarest of those; there must be one."""
    heap = order[2]
    while True:
        key = heap[0]
        counters[HEAP] -= 1
        counters[POPPED] += 1
        if counters[HEAP] > 0:
            heap[0] = heap[counters[HEAP]]
            _sink(heap, counters[HEAP], np.int64(0))
        row = _row_of_rank(key & ((1 << _RANK_BITS) - 1), first_row, ranks)
        at = find(directory, row)
        slot = directory[at, SLOT] if directory[at, ADDRESS] != 0 else np.int64(-1)
        if slot >= 0 and slots[slot, FLAGS] & PARKED_FLAG and slots[slot, NEXT] == (key >> _RANK_BITS) + counters[BASE]:
            return slot


@jit
def park(slot, slots, order, counters):
    """The slot may be given up."""
    slots[slot, FLAGS] |= PARKED_FLAG
    counters[PARKED] += 1
    if slots[slot, NEXT] < 0:
        _mark(order[0], order[1], slots[slot, RANK])
    else:
        _push(slot, slots, order, counters)


@jit
def unpark(slot, slots, order, counters):
    """The slot may no longer be given up."""
    slots[slot, FLAGS] &= ~PARKED_FLAG
    counters[PARKED] -= 1
    if slots[slot, NEXT] < 0:
        _unmark(order[0], order[1], slots[slot, RANK])


@jit
def set_next(slot, step, slots, order, counters):
    """The next use of the row in ``slot`` is at ``step``; -1: none is known."""
    before, parked = slots[slot, NEXT], slots[slot, FLAGS] & PARKED_FLAG
    slots[slot, NEXT] = step
    if not parked:
        return
    if (before < 0) != (step < 0):
        rank = slots[slot, RANK]
        if step < 0:
            _mark(order[0], order[1], rank)
        else:
            _unmark(order[0], order[1], rank)
    if step >= 0:
        _push(slot, slots, order, counters)


@jit
def take_farthest(needed, victims, directory, slots, order, first_row, ranks, counters):
    """Take ``needed`` of the parked slots, farthest next use first, then rarest; there must be so many."""
    found = 0
    while found < needed:
        rank = _highest(order[0], order[1])
        if rank < 0:
            break
        _unmark(order[0], order[1], rank)
        slot = directory[find(directory, _row_of_rank(rank, first_row, ranks)), SLOT]
        slots[slot, FLAGS] &= ~PARKED_FLAG
        victims[found] = slot
        found += 1
    if found < needed and counters[KEPT] == 0:
        _rebuild(slots, order, counters)
    while found < needed:
        slot = _pop(directory, slots, order, first_row, ranks, counters)
        slots[slot, FLAGS] &= ~PARKED_FLAG
        victims[found] = slot
        found += 1
    counters[PARKED] -= needed
