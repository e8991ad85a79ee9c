"""The residency in Numba: a few tens of nanoseconds for each distinct row, whatever the size of the tables.

**Directory** [P, 4] int64, a hash table with linear probing: address + 1 (0: free), slot (>= 0; -1: none; -2 - p:
evicted by plan p, whose writeback may be in flight), step of the first announced use and entry of the last (-1: none).
It holds resident rows, announced rows and rows being written back: bounded by the slots and the window, not by the
tables.

**Window** [E], a ring with an entry for each announced use: the step of its row's next use, announced or else hinted
(-1: none). The entries of a batch follow each other, in the order of its rows.

**Slots** [C, 4] int64: address (-1: empty), step of the next use, announced or hinted (-1: none known), flags and above
them the batches in flight that use it, rank of its row.

**Order**, (tree, begin of each level, heap): which slot is given up first, by farthest next use, then the rarest row.
Slots that may be given up are *parked*. Those without a known use, farther than all others, are in a bit tree over the
rows' ranks, which finds the rarest in a few words. The others are in a max-heap of (next step, rank) in one integer.
The heap is lazy: a slot that is used again, or whose next use changes, leaves an outdated key, which is skipped later.
The heap exists only while plans need it: if the window needs more rows than there are slots, or with hints. If rows are
transient, all parked slots are given up, and instead of a heap there is a list of them.

Legend: C slots, E entries of the window, T tables, G segments (:func:`_ranks`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stoker.base.errors import ConfigError
from stoker.ops.codegen.jit import INNER, PLAIN, jit
from stoker.ops.codegen.llvm_memory import prefetch
from stoker.tables.slots.residency import FARTHEST, NEVER, Hints, Ints, Residency, SlotPlan
from stoker.tables.stores.kernels import segment_of

_AHEAD = 24  # lines to prefetch ahead
_RANK_BITS = 36
_STEPS = 2**26  # steps that heap keys can count before a rebuild from a later base
_NO_ROWS = np.zeros(0, np.int64)
_NO_HINTS = np.zeros(0, np.int32)
ADDRESS, SLOT, USE, LAST = 0, 1, 2, 3  # columns of the directory
ROW, NEXT, FLAGS, RANK = 0, 1, 2, 3  # columns of a slot
CHANGED, PARKED_FLAG = 1, 2  # flags: must be stored when it leaves; may be given up
USER = 4  # unit of the count of batches in flight, above the flags
# Counters: empty slots, parked slots, records of the directory; keys in the heap, whether it exists, keys taken since
# it was rebuilt, the first step of keys; whether rows are transient.
FREE, PARKED, RECORDS, HEAP, KEPT, POPPED, BASE, TRANSIENT = range(8)


@jit(**INNER)
def _hash(key):
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(32))


@jit(**INNER)
def _prefetch_record(directory, row):
    at = np.int64(_hash(row + 1) & np.uint64(directory.shape[0] - 1))
    for line in range(3):  # where the search ends in most cases
        prefetch(directory, at * 4 + line * 8)


@jit(**INNER)
def _find(directory, row):
    """Return the place of the record of ``row``, or of the free record where it belongs."""
    mask = np.uint64(directory.shape[0] - 1)
    key = row + 1
    at = _hash(key) & mask
    while directory[at, ADDRESS] != key and directory[at, ADDRESS] != 0:
        at = (at + np.uint64(1)) & mask
    return np.int64(at)


@jit(**INNER)
def _insert(directory, row, counters):
    """Return the place of the record of ``row``; create it if it is missing."""
    at = _find(directory, row)
    if directory[at, ADDRESS] == 0:
        directory[at, ADDRESS] = row + 1
        directory[at, SLOT] = -1
        directory[at, USE] = -1
        directory[at, LAST] = -1
        counters[RECORDS] += 1
    return at


@jit(**INNER)
def _remove(directory, at, counters):
    """Remove a record, and move up records that would no longer be found."""
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


@jit(**INNER)
def _forget_idle(directory, row, counters):
    """Drop the record of a row that is neither resident nor announced nor being written back."""
    _forget_at(directory, _find(directory, row), counters)


@jit(**INNER)
def _forget_at(directory, at, counters):
    if directory[at, ADDRESS] != 0 and directory[at, SLOT] == -1 and directory[at, USE] < 0:
        _remove(directory, at, counters)


@jit(**PLAIN)
def _rehash(old, new):
    """Move all records into the empty, larger ``new``."""
    for i in range(old.shape[0]):
        if old[i, ADDRESS] != 0:
            at = _find(new, old[i, ADDRESS] - 1)
            for column in range(4):
                new[at, column] = old[i, column]


@intrinsic
def _highest_bit(typingctx, word):
    """Return the position of the highest set bit of a word that is not 0."""
    signature = types.int64(types.uint64)

    def codegen(context, b, signature, args):
        zeros = b.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return b.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return signature, codegen


@jit(**INNER)
def _rank_of(row, ranks):
    """Return the place of a row among all when ordered by (row within its table, table): the higher, the rarer."""
    first_row, start, base, alive, position = ranks[0], ranks[1], ranks[2], ranks[3], ranks[4]
    table = segment_of(first_row, row)
    local = row - first_row[table]
    segment = segment_of(start, local)
    return base[segment] + (local - start[segment]) * alive[segment] + position[segment * (first_row.size - 1) + table]


@jit(**INNER)
def _row_of_rank(rank, ranks):
    first_row, start, base, alive, owner = ranks[0], ranks[1], ranks[2], ranks[3], ranks[5]
    segment = segment_of(base, rank)
    local = start[segment] + (rank - base[segment]) // alive[segment]
    table = owner[segment * (first_row.size - 1) + (rank - base[segment]) % alive[segment]]
    return first_row[table] + local


@jit(**INNER)
def _mark(tree, levels, rank):
    for level in range(levels.size):
        word, bit = rank >> 6, np.uint64(1) << np.uint64(rank & 63)
        before = tree[levels[level] + word]
        tree[levels[level] + word] = before | bit
        if before != 0:
            return
        rank = word


@jit(**INNER)
def _unmark(tree, levels, rank):
    for level in range(levels.size):
        word, bit = rank >> 6, np.uint64(1) << np.uint64(rank & 63)
        after = tree[levels[level] + word] & ~bit
        tree[levels[level] + word] = after
        if after != 0:
            return
        rank = word


@jit(**INNER)
def _take_highest(tree, levels, ranks, words):
    """Remove the highest ranks from the tree, as many as ``ranks`` holds; write them, falling; return their number.

    ``words`` is as large, for the positions of words.
    """
    found = np.int64(ranks.size > 0)
    for i in range(found):
        words[i] = 0
    # Level by level from the top: a word has a rank or more, so the first words of a level are enough, and the cache
    # misses of a level overlap.
    for level in range(levels.size - 1, -1, -1):
        count, found = found, np.int64(0)
        for i in range(count):
            if i + _AHEAD < count:
                prefetch(tree, levels[level] + words[i + _AHEAD])
            bits = tree[levels[level] + words[i]]
            while bits != 0 and found < ranks.size:
                bit = _highest_bit(bits)
                bits ^= np.uint64(1) << np.uint64(bit)
                ranks[found] = (words[i] << 6) + bit
                found += 1
        for i in range(found):
            words[i] = ranks[i]
    for i in range(found):
        _unmark(tree, levels, ranks[i])
    return found


@jit(**INNER)
def _key(slot, slots, counters):
    step = slots[slot, NEXT] - counters[BASE]
    return (step << _RANK_BITS) | slots[slot, RANK]


@jit(**INNER)
def _sink(heap, size, at):
    """Move the key at ``at`` down to its place."""
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


@jit(**INNER)
def _rebuild(slots, order, counters):
    """Build the heap of all parked slots with a known use."""
    heap, size = order[2], 0
    lowest = np.int64(2**62)
    for slot in range(slots.shape[0]):
        if slots[slot, FLAGS] & PARKED_FLAG and slots[slot, NEXT] >= 0:
            lowest = min(lowest, slots[slot, NEXT])
    # Steps before the lowest one now may come: half of the range is for them.
    counters[BASE] = 0 if lowest == 2**62 else lowest - _STEPS // 2
    for slot in range(slots.shape[0]):
        if slots[slot, FLAGS] & PARKED_FLAG and slots[slot, NEXT] >= 0:
            heap[size] = _key(slot, slots, counters)
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, size, at)
    counters[HEAP], counters[KEPT], counters[POPPED] = size, 1, 0


@jit(**INNER)
def _push(slot, slots, order, counters):
    """Enter a parked slot that has a known use, if the heap exists."""
    heap = order[2]
    if counters[KEPT] == 0:
        return
    full = counters[HEAP] == heap.size
    if full or slots[slot, NEXT] < counters[BASE] or slots[slot, NEXT] - counters[BASE] >= _STEPS:
        if full and counters[POPPED] == 0:  # no plan needed the heap since it doubled
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


@jit(**INNER)
def _pop(directory, slots, order, ranks, counters):
    """Take the parked slot with the farthest known use, then the rarest row; there must be one."""
    heap = order[2]
    while True:
        key = heap[0]
        counters[HEAP] -= 1
        counters[POPPED] += 1
        if counters[HEAP] > 0:
            heap[0] = heap[counters[HEAP]]
            _sink(heap, counters[HEAP], np.int64(0))
        row = _row_of_rank(key & ((1 << _RANK_BITS) - 1), ranks)
        at = _find(directory, row)
        slot = directory[at, SLOT] if directory[at, ADDRESS] != 0 else np.int64(-1)
        if slot >= 0 and slots[slot, FLAGS] & PARKED_FLAG and slots[slot, NEXT] == (key >> _RANK_BITS) + counters[BASE]:
            return slot


@jit(**INNER)
def _park(slot, slots, order, counters):
    """Allow plans to give the slot up."""
    slots[slot, FLAGS] |= PARKED_FLAG
    if counters[TRANSIENT]:
        order[2][counters[PARKED]] = slot
    elif slots[slot, NEXT] < 0:
        _mark(order[0], order[1], slots[slot, RANK])
    else:
        _push(slot, slots, order, counters)
    counters[PARKED] += 1


@jit(**INNER)
def _unpark(slot, slots, order, counters):
    """Forbid plans to give the slot up."""
    slots[slot, FLAGS] &= ~PARKED_FLAG
    counters[PARKED] -= 1
    if slots[slot, NEXT] < 0 and not counters[TRANSIENT]:
        _unmark(order[0], order[1], slots[slot, RANK])


@jit(**INNER)
def _set_next(slot, step, slots, order, counters):
    """Record the next use of the row in ``slot``: at ``step``; -1: none is known."""
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


@jit(**INNER)
def _take_all(victims, slots, parked, counters):
    """Take all slots that are still parked, in the order of their release."""
    at, found = 0, 0
    while found < victims.size:
        slot = parked[at]
        at += 1
        if slots[slot, FLAGS] & PARKED_FLAG:
            slots[slot, FLAGS] &= ~PARKED_FLAG
            victims[found] = slot
            found += 1
    counters[PARKED] = 0


@jit(**INNER)
def _take_farthest(needed, victims, words, directory, slots, order, ranks, counters):
    """Take ``needed`` of the parked slots, farthest next use first, then rarest; there must be enough."""
    if counters[TRANSIENT]:
        _take_all(victims[:needed], slots, order[2], counters)
        return
    found = _take_highest(order[0], order[1], victims[:needed], words[:needed])
    for i in range(found + _AHEAD):
        if i < found:
            victims[i] = _row_of_rank(victims[i], ranks)
            _prefetch_record(directory, victims[i])
        if i >= _AHEAD:
            slot = directory[_find(directory, victims[i - _AHEAD]), SLOT]
            prefetch(slots, slot * 4)
            victims[i - _AHEAD] = slot
    for i in range(found):
        slots[victims[i], FLAGS] &= ~PARKED_FLAG
    if found < needed and counters[KEPT] == 0:
        _rebuild(slots, order, counters)
    while found < needed:
        slot = _pop(directory, slots, order, ranks, counters)
        slots[slot, FLAGS] &= ~PARKED_FLAG
        victims[found] = slot
        found += 1
    counters[PARKED] -= needed


@jit(**PLAIN)
def _announce(rows, hints, places, begin, step, directory, window, slots, order, counters):
    """Enter rows of a batch in the window from ``begin`` on; ``hints`` [U or 0]: batches until their next uses."""
    ring, total = window.size - 1, rows.size
    hinted = hints.size > 0
    for i in range(-2 * _AHEAD, total):
        if i + 2 * _AHEAD < total:
            _prefetch_record(directory, rows[i + 2 * _AHEAD])
        if 0 <= i + _AHEAD < total:
            at = _find(directory, rows[i + _AHEAD])
            places[i + _AHEAD] = at
            if directory[at, ADDRESS] != 0:
                if directory[at, LAST] >= 0:
                    prefetch(window, directory[at, LAST] & ring)
                elif directory[at, SLOT] >= 0:
                    prefetch(slots, directory[at, SLOT] * 4)
        if i < 0:
            continue
        at = places[i]
        if directory[at, ADDRESS] != rows[i] + 1:
            at = _insert(directory, rows[i], counters)  # its place may have been taken since
        window[(begin + i) & ring] = step + min(np.int64(hints[i]), FARTHEST) if hinted and hints[i] > 0 else -1
        last = directory[at, LAST]
        directory[at, LAST] = begin + i
        if last >= 0:
            window[last & ring] = step
            continue
        directory[at, USE] = step
        slot = directory[at, SLOT]
        if slot >= 0:
            _set_next(slot, step, slots, order, counters)


@jit(**PLAIN)
def _plan(
    rows, begin, number, fenced, places, following, taken, fetch_rows, fetch_slots, victims, evict_rows, evict_slots,
    landed_rows, landed, ranks, directory, window, empty, slots, order, counters,
):  # fmt: skip
    """Give every row of a batch a slot (``taken``); its entries in the window begin at ``begin`` (-1: it has none).

    ``fenced``: writebacks may land after the fetches of this plan. Plan ``landed`` evicted ``landed_rows``; its
    writebacks have landed. ``evict_rows`` gets all evicted rows, rows to write first; ``places`` and ``following`` are
    scratch. Returns (fence, fetched, to write); if fetched is -1, nothing has changed.
    """
    total, staged = rows.size, begin >= 0
    missing, kept, fence = 0, 0, np.int64(-1)
    for i in range(total):
        if i + _AHEAD < total:
            _prefetch_record(directory, rows[i + _AHEAD])
        at = _find(directory, rows[i]) if staged else _insert(directory, rows[i], counters)
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
            kept += (slots[taken[i], FLAGS] & PARKED_FLAG) != 0
    candidates = counters[PARKED] - kept
    if missing > counters[FREE] + candidates:
        if not staged:
            for i in range(total):
                _forget_idle(directory, rows[i], counters)
        return fence, -1, 0
    ring = window.size - 1
    for i in range(total):
        at, slot = places[i], taken[i]
        if slot >= 0 and slots[slot, FLAGS] & PARKED_FLAG:
            _unpark(slot, slots, order, counters)
        if staged:
            following[i] = window[(begin + i) & ring]
            if directory[at, LAST] == begin + i:  # the use after it is only hinted
                directory[at, USE] = directory[at, LAST] = -1
            else:
                directory[at, USE] = following[i]
            if slot >= 0:
                slots[slot, NEXT] = following[i]
        else:  # a row in its slot keeps its known next use
            following[i] = directory[at, USE]
    transient = counters[TRANSIENT] != 0
    needed = candidates if transient else max(0, missing - counters[FREE])
    _take_farthest(needed, victims, evict_rows, directory, slots, order, ranks, counters)
    # Changed rows first, each with its slot; then the others, which are not written.
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
            if not transient:
                slots[slot, RANK] = _rank_of(rows[i], ranks)
            slots[slot, NEXT] = following[i]
            fetch_rows[fetched] = rows[i]
            fetch_slots[fetched] = slot
            fetched += 1
            taken[i] = slot
        slots[slot, FLAGS] += USER
    for i in range(needed - 1, used - 1, -1):
        empty[counters[FREE]] = victims[i]
        counters[FREE] += 1
    # From here on records of the directory move: places are no longer valid.
    for i in range(evicted):
        if i + _AHEAD < evicted:
            _prefetch_record(directory, evict_rows[i + _AHEAD])
        at = _find(directory, evict_rows[i])
        directory[at, SLOT] = -1
        if fenced and i < written:
            directory[at, SLOT] = -2 - number
        else:
            _forget_at(directory, at, counters)
    for i in range(landed_rows.size):
        if i + _AHEAD < landed_rows.size:
            _prefetch_record(directory, landed_rows[i + _AHEAD])
        at = _find(directory, landed_rows[i])
        if directory[at, ADDRESS] != 0 and directory[at, SLOT] == -2 - landed:
            directory[at, SLOT] = -1
            _forget_at(directory, at, counters)
    return fence, fetched, written


@jit(**PLAIN)
def _missing(rows, directory, slots):
    """Return how many of the rows need another slot, and how many have one that may be given up."""
    missing = parked = 0
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            _prefetch_record(directory, rows[i + _AHEAD])
        at = _find(directory, rows[i])
        slot = directory[at, SLOT] if directory[at, ADDRESS] != 0 else np.int64(-1)
        missing += slot < 0
        parked += slot >= 0 and (slots[slot, FLAGS] & PARKED_FLAG) != 0
    return missing, parked


@jit(**PLAIN)
def _release(given, mark, slots, order, counters):
    """Release the slots of a batch; those of no other batch in flight may be given up."""
    for i in range(given.size):
        if i + _AHEAD < given.size:
            prefetch(slots, given[i + _AHEAD] * 4)
        if i + _AHEAD // 2 < given.size:
            prefetch(order[0], slots[given[i + _AHEAD // 2], RANK] >> 6)
        slot = given[i]
        slots[slot, FLAGS] -= USER
        if mark:
            slots[slot, FLAGS] |= CHANGED
        if slots[slot, FLAGS] < USER:
            _park(slot, slots, order, counters)


@jit(**PLAIN)
def _cancel(rows, directory, slots, order, counters):
    """Drop every announced use of ``rows``."""
    for i in range(rows.size):
        at = _find(directory, rows[i])
        if directory[at, ADDRESS] == 0 or directory[at, USE] < 0:
            continue
        directory[at, USE] = directory[at, LAST] = -1
        slot = directory[at, SLOT]
        if slot >= 0:
            _set_next(slot, np.int64(-1), slots, order, counters)
        else:
            _forget_idle(directory, rows[i], counters)


@jit(**PLAIN)
def _forget_hints(step, slots, order, counters):
    """Drop hints of next uses before ``step``; announced uses are not before it."""
    for slot in range(slots.shape[0]):
        if 0 <= slots[slot, NEXT] < step and slots[slot, ROW] >= 0:
            _set_next(slot, np.int64(-1), slots, order, counters)


@jit(**PLAIN)
def _skip(rows, begin, directory, window, slots, order, counters):
    """Drop the first announced use of ``rows``, at the entries from ``begin`` on."""
    for i in range(rows.size):
        at = _find(directory, rows[i])
        following = window[(begin + i) & (window.size - 1)]
        if directory[at, LAST] == begin + i:
            directory[at, USE] = directory[at, LAST] = -1
        else:
            directory[at, USE] = following
        slot = directory[at, SLOT]
        if slot >= 0:
            _set_next(slot, following, slots, order, counters)
        else:
            _forget_idle(directory, rows[i], counters)


def _ranks(first_row: Ints) -> tuple[Ints, ...]:
    """Return arrays that number all rows by (row within the table, table): see :func:`_rank_of`.

    Up to the size of the smallest table every table has a row of each number, up to the next size all other tables, and
    so on: G segments. (first_row, start [G + 1], base [G + 1], alive [G], position [G * T], owner [G * T]).
    """
    rows = np.diff(first_row)
    bounds = np.unique(np.append(rows, 0))
    members = rows > bounds[:-1, None]
    alive = members.sum(1)
    base = np.concatenate([[0], np.cumsum(np.diff(bounds) * alive)])
    position = np.cumsum(members, 1) - 1
    owner = np.argsort(~members, axis=1, kind="stable")  # tables with rows there come first, in order
    return first_row, bounds, base, alive, position.reshape(-1), owner.reshape(-1)


def _tree(bits: int) -> tuple[npt.NDArray[np.uint64], Ints]:
    """Return an empty bit tree over ``bits`` ranks, and where its levels begin; untouched pages take no memory."""
    words = [max(1, -(-bits // 64))]
    while words[-1] > 1:
        words.append(-(-words[-1] // 64))
    begins = np.cumsum([0, *words])
    return np.zeros(begins[-1], np.uint64), begins[:-1]


class FastResidency(Residency):
    """The residency in Numba: its plans equal :class:`stoker.tables.slots.residency.Residency`'s.

    Memory: 40 bytes a slot (56 if the window wants more rows than there are slots, or with hints), 43 to 86 bytes a
    resident or announced row (64 to 128 if the directory is roomy), 8 bytes an announced use, N bits.
    """

    def _prepare(self) -> None:
        slots = self.slots
        if self.first_row[-1] > 1 << _RANK_BITS:
            raise ConfigError(
                f"a group of tables has {self.first_row[-1]:,} rows; a cache plans at most {1 << _RANK_BITS:,}. Divide "
                "them among tables of other widths, or among ranks."
            )
        self._ranks = _ranks(self.first_row)
        self._tree, self._levels = _tree(int(self.first_row[-1]))
        self._directory = np.zeros((1 << 12, 4), np.int64)
        self._ring = np.zeros(1 << 12, np.int64)  # entries of the window
        self._slots = np.zeros((slots, 4), np.int64)
        self._slots[:, [ROW, NEXT]] = -1
        self.row_in_slot = self._slots[:, ROW]
        self._empty = np.arange(slots - 1, -1, -1, dtype=np.int64)
        self._heap = np.zeros(2 * slots, np.int64)  # untouched pages take no memory; few runs use it
        self._counters = np.zeros(8, np.int64)
        self._counters[TRANSIENT] = self.transient
        self._counters[FREE] = slots

    @property
    def _structures(self) -> tuple[Any, ...]:
        order = (self._tree, self._levels, self._heap)
        return self._slots, order, self._counters

    def _enter(self, rows: Ints, upcoming: Hints | None) -> None:
        hints = _NO_HINTS if upcoming is None else np.ascontiguousarray(upcoming, np.int32)
        self._make_room(len(rows), window=True)
        _announce(
            rows, hints, np.empty_like(rows), self._entries, self._step, self._directory, self._ring, *self._structures
        )

    def _make_room(self, more: int, *, window: bool) -> None:
        needed = int(self._counters[RECORDS]) + more
        if needed > self.load * len(self._directory):
            size = len(self._directory)
            while needed > self.load * size:
                size *= 2
            larger = np.zeros((size, 4), np.int64)
            _rehash(self._directory, larger)
            self._directory = larger
        if not window:
            return
        oldest = self._window[0][1] if self._window else self._entries
        if self._entries + more - oldest > len(self._ring):
            size = 1 << (self._entries + more - oldest).bit_length()
            live = np.arange(oldest, self._entries)
            ring = np.zeros(size, np.int64)
            ring[live & (size - 1)] = self._ring[live & (len(self._ring) - 1)]
            self._ring = ring

    def _plan(self, rows: Ints, begin: int) -> SlotPlan | None:
        if begin < 0:
            self._make_room(len(rows), window=False)
        parked = int(self._counters[PARKED])
        most = parked if self.transient else min(parked, len(rows))
        places, following, taken, fetch_rows, fetch_slots = np.empty((5, len(rows)), np.int64)
        victims, evict_rows, evict_slots = np.empty((3, most), np.int64)
        landed, gone = -1, _NO_ROWS
        if self._leaving and self._leaving[0][0] <= self.plans - self.landing:
            landed, gone = self._leaving[0]
        fence, fetched, written = _plan(
            rows, begin, self.plans, self.landing > 0, places, following, taken, fetch_rows, fetch_slots, victims,
            evict_rows, evict_slots, gone, landed, self._ranks, self._directory, self._ring, self._empty,
            *self._structures,
        )  # fmt: skip
        if fetched < 0:
            return None
        if landed >= 0:
            self._leaving.popleft()
        made = SlotPlan(
            number=self.plans, slots=taken, fetch_rows=fetch_rows[:fetched], fetch_slots=fetch_slots[:fetched],
            evict_rows=evict_rows[:written], evict_slots=evict_slots[:written], fence=int(fence),
        )  # fmt: skip
        if self.landing:
            self._leaving.append((self.plans, made.evict_rows))
        self.plans += 1
        return made

    def fits(self, rows: Ints) -> bool:
        missing, parked = _missing(np.ascontiguousarray(rows, np.int64), self._directory, self._slots)
        return bool(missing <= self.free - parked)

    def release(self, slots: Ints, *, changed: bool) -> None:
        _release(np.ascontiguousarray(slots, np.int64), changed, *self._structures)

    def _skip(self, rows: Ints, begin: int) -> None:
        _skip(rows, begin, self._directory, self._ring, *self._structures)

    def _forget_all(self) -> None:
        for _, _, rows in self._window:
            _cancel(rows, self._directory, *self._structures)
        if self._hinted:
            _forget_hints(NEVER, *self._structures)

    def _forget_before(self, step: int) -> None:
        _forget_hints(step, *self._structures)

    def take_changed(self) -> Ints:
        slots = np.flatnonzero(self._slots[:, FLAGS] & CHANGED)
        self._slots[:, FLAGS] &= ~CHANGED
        return slots

    def mark_changed(self, slots: Ints) -> None:
        self._slots[slots, FLAGS] |= CHANGED

    @property
    def free(self) -> int:
        return int(self._counters[FREE] + self._counters[PARKED])

    @property
    def guesses(self) -> bool:
        return bool(self._counters[FREE] == 0 and self._tree[self._levels[-1]] != 0)
