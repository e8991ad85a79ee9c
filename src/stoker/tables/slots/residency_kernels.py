"""Numba kernels of the residency: what announcing, planning and releasing a batch do to the page table.

An entry [E, 3] of the window: the next entry of its row (-1: none), the step of that one or else the hinted step (-1:
none), its own step. The hash directory is described in :mod:`stoker.tables.slots.row_directory`, slots and the order
in which
they are given up in :mod:`stoker.tables.slots.eviction_order`.

Legend: C slots, E entries of the window (ring), T tables, G segments.
"""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import prefetch
from stoker.tables.slots.eviction_order import (
    CHANGED,
    FLAGS,
    NEXT,
    PARKED,
    PARKED_FLAG,
    RANK,
    ROW,
    USER,
    park,
    rank_of,
    set_next,
    take_farthest,
    unpark,
)
from stoker.tables.slots.residency import FARTHEST
from stoker.tables.slots.row_directory import (
    ADDRESS,
    AHEAD,
    FIRST,
    LAST,
    RECORDS,
    SLOT,
    ask,
    find,
    forget_idle,
    insert,
    rehash,
)

__all__ = [
    "CHANGED",
    "FLAGS",
    "FREE",
    "NEXT",
    "PARKED",
    "RECORDS",
    "ROW",
    "WANTED",
    "announce",
    "cancel",
    "forget_hints",
    "plan",
    "rehash",
    "release",
    "skip",
]


FREE, WANTED = 0, 3  # counters: empty slots, rows with an announced use


@jit
def announce(rows, hints, start, step, directory, entries, slots, order, counters):
    """Enter a batch's rows as entries ``start`` on of the window; ``hints`` [U or 0]: batches until their next uses."""
    ring = entries.shape[0] - 1
    hinted = hints.size > 0
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            ask(directory, rows[i + AHEAD])
        at = insert(directory, rows[i], counters)
        entry = start + i
        entries[entry & ring, 0] = -1
        entries[entry & ring, 1] = step + min(np.int64(hints[i]), FARTHEST) if hinted and hints[i] > 0 else -1
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
            set_next(slot, step, slots, order, counters)


@jit
def plan(
    rows, staged, number, transient, taken, fetch_rows, fetch_slots, victims, evict_rows, evict_slots, landed_rows,
    landed, first_row, ranks, directory, entries, empty, slots, order, counters,
):  # fmt: skip
    """Give every row of a batch a slot (``taken``).

    ``landed_rows`` are what plan ``landed`` evicted; its writebacks are home. ``evict_rows`` receives all evicted rows,
    those that must be written first. Returns (status, fence, fetched, to write); status -1 changes nothing.
    """
    total = rows.size
    places, following = np.empty(total, np.int64), np.empty(total, np.int64)
    missing, kept, fence = 0, 0, np.int64(-1)
    for i in range(total):
        if i + AHEAD < total:
            ask(directory, rows[i + AHEAD])
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
            kept += (slots[taken[i], FLAGS] & PARKED_FLAG) != 0
    candidates = counters[PARKED] - kept
    if missing > counters[FREE] + candidates:
        if not staged:
            for i in range(total):
                forget_idle(directory, rows[i], counters)
        return -1, fence, 0, 0
    ring = entries.shape[0] - 1
    for i in range(total):
        at, slot = places[i], taken[i]
        if slot >= 0 and slots[slot, FLAGS] & PARKED_FLAG:
            unpark(slot, slots, order, counters)
        if staged:
            first = directory[at, FIRST] & ring
            directory[at, FIRST] = entries[first, 0]
            if entries[first, 0] < 0:
                directory[at, LAST] = -1
                counters[WANTED] -= 1
            following[i] = entries[first, 1]
            if slot >= 0:
                slots[slot, NEXT] = following[i]
        else:  # a row that is in its slot keeps what is known of it
            first = directory[at, FIRST]
            following[i] = entries[first & ring, 2] if first >= 0 else -1
    needed = candidates if transient else max(0, missing - counters[FREE])
    take_farthest(needed, victims, directory, slots, order, first_row, ranks, counters)
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
            slots[slot, RANK] = rank_of(rows[i], first_row, ranks)
            slots[slot, NEXT] = following[i]
            fetch_rows[fetched] = rows[i]
            fetch_slots[fetched] = slot
            fetched += 1
            taken[i] = slot
        slots[slot, FLAGS] += USER
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
            forget_idle(directory, landed_rows[i], counters)
    for i in range(written, evicted):
        forget_idle(directory, evict_rows[i], counters)
    return 0, fence, fetched, written


@jit
def release(given, mark, slots, order, counters):
    """Let go of a batch's slots; those of no other batch in flight may be given up."""
    for i in range(given.size):
        if i + AHEAD < given.size:
            prefetch(slots, given[i + AHEAD] * 4)
        slot = given[i]
        slots[slot, FLAGS] -= USER
        if mark:
            slots[slot, FLAGS] |= CHANGED
        if slots[slot, FLAGS] < USER:
            park(slot, slots, order, counters)


@jit
def cancel(rows, directory, slots, order, counters):
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
            set_next(slot, np.int64(-1), slots, order, counters)
        else:
            forget_idle(directory, rows[i], counters)


@jit
def forget_hints(step, slots, order, counters):
    """Forget next uses before ``step``, which none of those announced is."""
    for slot in range(slots.shape[0]):
        if 0 <= slots[slot, NEXT] < step and slots[slot, ROW] >= 0:
            set_next(slot, np.int64(-1), slots, order, counters)


@jit
def skip(rows, directory, entries, slots, order, counters):
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
            set_next(slot, entries[first, 1], slots, order, counters)
        elif following < 0:
            forget_idle(directory, rows[i], counters)
