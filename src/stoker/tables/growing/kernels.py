"""Which raw id has which row: hash maps, free rows, and evictions. Plain loops, which Numba compiles if it can.

A table has two pools of entries: its rows, and raw ids that wait for admission. An entry of a live raw id has its
count, the step of its last use and the time of that use. What a step does depends on the entries alone. The maps, the
heaps of free rows and the heaps of victims are indexes, which save a search through all entries. They are made again
when the entries change in another way (:func:`swap`).

Legend: P pools, N entries of all pools, L lookups of a batch, M places of the hash maps.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import numpy as np

from stoker.ops.reference import GOLDEN, MIX1, MIX2
from stoker.ops.space import HAVE_NUMBA
from stoker.tables.growing.state import (
    ADMIT,
    ASIDE,
    BASE,
    BORN,
    CHANGED,
    COUNT,
    FIRST,
    FREE,
    HEAP,
    KEY,
    LFU,
    LIVE,
    MAP,
    MASK,
    POLICY,
    REFUSED,
    SIZE,
    SWEEPS,
    TIME,
    TOP,
    TOUCHED,
    TTL,
    UNKNOWN,
    USED,
    Pools,
    Work,
)

if HAVE_NUMBA:
    from stoker.ops.codegen.jit import INNER, PLAIN, jit
    from stoker.ops.codegen.llvm_memory import fetch_add, prefetch
    from stoker.ops.codegen.native import Kernel, arguments
else:
    INNER = PLAIN = {}

    def jit(function=None, **options):  # type: ignore[misc]
        """Run the loops as they are."""
        return function or (lambda each: each)

    def prefetch(array, place):
        """Do nothing."""


_BLOCK = 64  # lookups whose first places in the map are read together, so that the processor fetches them at once
_GOLDEN, _MIX1, _MIX2 = np.int64(GOLDEN), np.int64(MIX1), np.int64(MIX2)


@jit(**INNER)
def _ideal(key, mask):
    """Return the place of a key in an empty map."""
    z = (key ^ ((key >> np.int64(32)) & np.int64(0xFFFFFFFF))) * _GOLDEN
    z = (z ^ ((z >> np.int64(29)) & np.int64(0x7FFFFFFFF))) * _MIX1
    return (z >> np.int64(20)) & mask


@jit(**INNER)
def _find(s, m, key):
    """Return the entry of a key in a pool; -1 if it has none."""
    base, first, mask = s.pools[m, BASE], s.pools[m, MAP], s.pools[m, MASK]
    at = _ideal(key, mask)
    while True:
        r = np.int64(s.slots[first + at]) - 1
        if r < 0 or s.entries[base + r, KEY] == key:
            return r
        at = (at + 1) & mask


@jit(**INNER)
def _map(s, m, r, key):
    """Enter a key, which is not in the map."""
    first, mask = s.pools[m, MAP], s.pools[m, MASK]
    at = _ideal(key, mask)
    while s.slots[first + at] != 0:
        at = (at + 1) & mask
    s.slots[first + at] = r + 1
    s.pools[m, LIVE] += 1


@jit(**INNER)
def _unmap(s, m, r, key):
    """Delete a key, and close the gap: a search ends at the first empty place."""
    base, first, mask = s.pools[m, BASE], s.pools[m, MAP], s.pools[m, MASK]
    hole = _ideal(key, mask)
    while s.slots[first + hole] != r + 1:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        other = np.int64(s.slots[first + at]) - 1
        if other < 0:
            break
        ideal = _ideal(s.entries[base + other, KEY], mask)
        if (at - ideal) & mask >= (at - hole) & mask:
            s.slots[first + hole] = other + 1
            hole = at
    s.slots[first + hole] = 0
    s.pools[m, LIVE] -= 1


@jit(**INNER)
def _free_one(s, m, r):
    """Add an entry to the heap of free ones."""
    base, at = s.pools[m, BASE], s.pools[m, FREE]
    while at > 0:
        above = (at - 1) >> 1
        if s.free[base + above] <= r:
            break
        s.free[base + at] = s.free[base + above]
        at = above
    s.free[base + at] = r
    s.pools[m, FREE] += 1


@jit(**INNER)
def _take_free(s, m):
    """Remove the smallest free entry from the heap and return it."""
    base, count = s.pools[m, BASE], s.pools[m, FREE] - 1
    found, moved, at = np.int64(s.free[base]), s.free[base + count], np.int64(0)
    s.pools[m, FREE] = count
    while 2 * at + 1 < count:
        below = 2 * at + 1
        if below + 1 < count and s.free[base + below + 1] < s.free[base + below]:
            below += 1
        if moved <= s.free[base + below]:
            break
        s.free[base + at] = s.free[base + below]
        at = below
    s.free[base + at] = moved
    return found


@jit(**INNER)
def _before(s, base, a, b):
    """Whether entry ``a`` leaves before entry ``b``."""
    x, y = base + a, base + b
    if s.rank[x, 0] != s.rank[y, 0]:
        return s.rank[x, 0] < s.rank[y, 0]
    if s.rank[x, 1] != s.rank[y, 1]:
        return s.rank[x, 1] < s.rank[y, 1]
    return a < b


@jit(**INNER)
def _rise(s, base, at):
    r = s.heap[base + at]
    while at > 0:
        above = (at - 1) >> 1
        other = s.heap[base + above]
        if not _before(s, base, r, other):
            break
        s.heap[base + at] = other
        s.place[base + other] = at
        at = above
    s.heap[base + at] = r
    s.place[base + r] = at


@jit(**INNER)
def _sink(s, base, at, count):
    r = s.heap[base + at]
    while 2 * at + 1 < count:
        below = 2 * at + 1
        if below + 1 < count and _before(s, base, s.heap[base + below + 1], s.heap[base + below]):
            below += 1
        other = s.heap[base + below]
        if not _before(s, base, other, r):
            break
        s.heap[base + at] = other
        s.place[base + other] = at
        at = below
    s.heap[base + at] = r
    s.place[base + r] = at


@jit(**INNER)
def _rank(s, m, r):
    """Set the rank of an entry; return whether it was another."""
    g, lfu = s.pools[m, BASE] + r, s.pools[m, POLICY] == LFU
    one, two = (s.entries[g, COUNT], s.entries[g, USED]) if lfu else (s.entries[g, USED], np.int64(0))
    same = s.rank[g, 0] == one and s.rank[g, 1] == two
    s.rank[g, 0], s.rank[g, 1] = one, two
    return not same


@jit(**INNER)
def _push(s, m, r):
    """Add a live entry to the heap of victims; none may be set aside at its end."""
    base, count = s.pools[m, BASE], s.pools[m, HEAP]
    _rank(s, m, r)
    s.heap[base + count] = r
    s.pools[m, HEAP] = count + 1
    _rise(s, base, count)


@jit(**INNER)
def _drop(s, m, r):
    """Remove an entry from the heap of victims."""
    base, at = s.pools[m, BASE], np.int64(s.place[s.pools[m, BASE] + r])
    if at < 0:
        return
    count, aside = s.pools[m, HEAP] - 1, s.pools[m, ASIDE]
    s.pools[m, HEAP] = count
    s.place[base + r] = -1
    moved = s.heap[base + count]
    if aside > 0:
        s.heap[base + count] = s.heap[base + count + aside]
    if at < count:
        s.heap[base + at] = moved
        s.place[base + moved] = at
        _sink(s, base, at, count)
        _rise(s, base, np.int64(s.place[base + moved]))


@jit(**INNER)
def _victim(s, m, step):
    """Return the live entry that is evicted first, of those that this step has not used; -1 if there is none."""
    base = s.pools[m, BASE]
    if s.pools[m, HEAP] == UNKNOWN:
        count = np.int64(0)
        for r in range(s.pools[m, FIRST], s.pools[m, TOP]):
            s.place[base + r] = -1
            if s.entries[base + r, COUNT] > 0:
                _rank(s, m, r)
                s.heap[base + count] = r
                s.place[base + r] = count
                count += 1
        s.pools[m, HEAP], s.pools[m, ASIDE] = count, 0
        for at in range((count - 2) >> 1, -1, -1):
            _sink(s, base, np.int64(at), count)
    while s.pools[m, HEAP] > 0:
        r = np.int64(s.heap[base])
        if s.entries[base + r, USED] == step:  # set it aside, behind the heap
            _drop(s, m, r)
            s.heap[base + s.pools[m, HEAP] + s.pools[m, ASIDE]] = r
            s.pools[m, ASIDE] += 1
        elif _rank(s, m, r):
            _sink(s, base, np.int64(0), s.pools[m, HEAP])
        else:
            return r
    return np.int64(-1)


@jit(**INNER)
def _end(s, m, made, start, stop):
    """Add what was set aside, and the entries made in this step, to the heap of victims."""
    base = s.pools[m, BASE]
    if s.pools[m, HEAP] == UNKNOWN:
        return
    begin, aside = s.pools[m, HEAP], s.pools[m, ASIDE]
    s.pools[m, ASIDE] = 0
    for i in range(begin, begin + aside):
        r = np.int64(s.heap[base + i])
        if s.entries[base + r, COUNT] > 0 and s.place[base + r] < 0:
            _push(s, m, r)
    for i in range(start, stop):
        r = made[i]
        if s.entries[base + r, COUNT] > 0 and s.place[base + r] < 0:
            _push(s, m, r)


@jit(**INNER)
def _record(s, m, r, w):
    """Keep what an entry holds."""
    table = m >> 1
    if w.keeps:
        at = w.firsts[table, 0] + w.counts[table, CHANGED]
        w.changes[at, 0], w.changes[at, 1] = m, r
        for i in range(4):
            w.changes[at, 2 + i] = s.entries[s.pools[m, BASE] + r, i]
    w.counts[table, CHANGED] += 1


@jit(**INNER)
def _remove(s, m, r, w):
    """Free a live entry."""
    g = s.pools[m, BASE] + r
    _record(s, m, r, w)
    _unmap(s, m, r, s.entries[g, KEY])
    for i in range(4):
        s.entries[g, i] = 0
    s.entries[g, USED] = w.clock[1]  # which tells a segment of a checkpoint that it changed
    if s.pools[m, HEAP] != UNKNOWN:
        _drop(s, m, r)
    if s.pools[m, FREE] != UNKNOWN:
        _free_one(s, m, r)


@jit(**INNER)
def _obtain(s, m, w):
    """Return a free entry, the smallest, or that of a victim; -1 if none may be evicted."""
    base = s.pools[m, BASE]
    if s.pools[m, FREE] == UNKNOWN:
        count = 0
        for r in range(s.pools[m, FIRST], s.pools[m, TOP]):
            if s.entries[base + r, COUNT] == 0:
                s.free[base + count] = r  # rising numbers are a heap
                count += 1
        s.pools[m, FREE] = count
    if s.pools[m, FREE] == 0:
        top = s.pools[m, TOP]
        if top < s.pools[m, SIZE]:
            s.pools[m, TOP] = top + 1
            if s.pools[m, POLICY]:
                s.place[base + top] = -1
            return top
        r = _victim(s, m, w.clock[1]) if s.pools[m, POLICY] else np.int64(-1)
        if r < 0:
            return r
        _remove(s, m, r, w)
    return _take_free(s, m)


@jit(**INNER)
def _insert(s, m, r, key, count, w):
    g = s.pools[m, BASE] + r
    _record(s, m, r, w)
    s.entries[g, KEY], s.entries[g, COUNT], s.entries[g, USED], s.entries[g, TIME] = key, count, w.clock[1], w.clock[0]
    _map(s, m, r, key)


@jit(**INNER)
def _touch(s, m, r, w):
    """Count a use."""
    g = s.pools[m, BASE] + r
    if s.entries[g, USED] != w.clock[1]:
        table = m >> 1
        if w.keeps:
            at = w.firsts[table, 1] + w.counts[table, TOUCHED]
            w.touches[at, 0], w.touches[at, 1] = m, r
            for i in range(1, 4):
                w.touches[at, 1 + i] = s.entries[g, i]
        w.counts[table, TOUCHED] += 1
        s.entries[g, USED], s.entries[g, TIME] = w.clock[1], w.clock[0]
    s.entries[g, COUNT] += 1


@jit(**INNER)
def _expired(s, m, r, now):
    ttl = s.pools[m, TTL]
    return ttl >= 0 and now - s.entries[s.pools[m, BASE] + r, TIME] > ttl


@jit(**INNER)
def _sweep(s, m, w):
    """Free the expired entries among the next of a pool; all are looked at once in so many steps."""
    size, base, now = s.pools[m, SIZE], s.pools[m, BASE], w.clock[0]
    if s.pools[m, TTL] < 0 or size == 0:
        return
    quota = (size + SWEEPS - 1) // SWEEPS
    for i in range(quota):
        r = (w.clock[1] * quota + i) % size
        if r < s.pools[m, TOP] and s.entries[base + r, COUNT] > 0 and _expired(s, m, r, now):
            _remove(s, m, r, w)


@jit(**INNER)
def _probe(s, w, m, begin, end):
    """Put into ``w.made`` the entries in the ideal places of some lookups, or -1; fetch their cache lines."""
    base, first, mask = s.pools[m, BASE], s.pools[m, MAP], s.pools[m, MASK]
    for i in range(begin, end):
        w.made[i] = first + _ideal(w.ids[w.where[i]], mask)
        prefetch(s.slots, w.made[i])
    for i in range(begin, end):
        w.made[i] = np.int64(s.slots[w.made[i]]) - 1
        prefetch(s.entries, 4 * (base + w.made[i]))


@jit(**INNER)
def _look_up(s, w, table):
    """Look up the raw ids of a table that have a row; return where the list of the others ends."""
    m, now = 2 * table, w.clock[0]
    base = s.pools[m, BASE]
    counted = s.pools[m, TTL] >= 0 or s.pools[m, POLICY] > 0
    unknown, stop = w.starts[table], w.starts[table + 1]
    for block in range(w.starts[table], stop, _BLOCK):
        end = min(block + _BLOCK, stop)
        _probe(s, w, m, block, end)
        for i in range(block, end):
            at = np.int64(w.where[i])
            key, r = w.ids[at], w.made[i]
            if key == 0:
                w.out[at] = 0
                continue
            if r >= 0 and s.entries[base + r, KEY] != key:
                r = _find(s, m, key)
            if r >= 0 and _expired(s, m, r, now):
                _remove(s, m, r, w)
                r = np.int64(-1)
            if r < 0:
                w.unknown[unknown] = at
                unknown += 1
                continue
            w.out[at] = r
            if counted:
                _touch(s, m, r, w)
    return unknown


@jit(**INNER)
def _await(s, m, key, made, w):
    """Count a lookup of a raw id that waits for admission; return its entry, or -1; note a new one in ``made``."""
    c = _find(s, m, key)
    if c >= 0 and _expired(s, m, c, w.clock[0]):
        _remove(s, m, c, w)
        c = np.int64(-1)
    if c >= 0:
        _touch(s, m, c, w)
        return c
    c = _obtain(s, m, w)
    if c >= 0:
        _insert(s, m, c, key, np.int64(1), w)
        w.made[made] = c
    return c


@jit(**PLAIN)
def step_table(s, w, table):
    """Look up the raw ids of a table, and let it grow.

    Those that have a row come first: such rows cannot be given to others in this step. Then the others, in order.
    """
    m, waiting = 2 * table, 2 * table + 1
    base, begin = s.pools[m, BASE], w.starts[table]
    _sweep(s, m, w)
    _sweep(s, waiting, w)
    stop, made, least = _look_up(s, w, table), begin, s.pools[m, ADMIT]
    for i in range(begin, stop):
        at = w.unknown[i]
        key = w.ids[at]
        r = _find(s, m, key)
        if r >= 0:  # born in this step
            w.out[at] = r
            s.entries[base + r, COUNT] += 1
            continue
        w.out[at] = 0
        c, count = np.int64(-1), np.int64(1)
        if least > 1:
            c = _await(s, waiting, key, made, w)
            count = s.entries[s.pools[waiting, BASE] + c, COUNT] if c >= 0 else np.int64(0)
            made += count == 1
            if 0 < count < least:
                continue
        r = _obtain(s, m, w) if count > 0 else np.int64(-1)
        if r < 0:
            w.counts[table, REFUSED] += 1
            continue
        if c >= 0:
            _remove(s, waiting, c, w)
        _insert(s, m, r, key, count, w)
        w.births[begin + w.counts[table, BORN]] = r
        w.counts[table, BORN] += 1
        w.out[at] = r
    _end(s, waiting, w.made, begin, made)
    _end(s, m, w.births, begin, begin + w.counts[table, BORN])


@jit(**PLAIN)
def find_table(s, w, table):
    """Look up the raw ids of a table, and change nothing; those without a row get row 0."""
    m, stop = 2 * table, w.starts[table + 1]
    for block in range(w.starts[table], stop, _BLOCK):
        end = min(block + _BLOCK, stop)
        _probe(s, w, m, block, end)
        for i in range(block, end):
            at = np.int64(w.where[i])
            key, r = w.ids[at], w.made[i]
            if key == 0:
                r = np.int64(-1)
            elif r >= 0 and s.entries[s.pools[m, BASE] + r, KEY] != key:
                r = _find(s, m, key)
            w.out[at] = 0 if r < 0 or _expired(s, m, r, w.clock[0]) else r


@jit(**PLAIN)
def swap(s, changes, touches, undo):
    """Exchange entries for what a journal holds: undo a step, or do it again. Heaps must be made again."""
    if not undo:
        _swap_touches(s, touches)
    for i in range(len(changes)):
        each = changes[len(changes) - 1 - i if undo else i]
        m, r = each[0], each[1]
        g = s.pools[m, BASE] + r
        if s.entries[g, COUNT] > 0:
            _unmap(s, m, r, s.entries[g, KEY])
        for k in range(4):
            each[2 + k], s.entries[g, k] = s.entries[g, k], each[2 + k]
        if s.entries[g, COUNT] > 0:
            _map(s, m, r, s.entries[g, KEY])
    if undo:
        _swap_touches(s, touches)


@jit(**INNER)
def _swap_touches(s, touches):
    for i in range(len(touches)):
        g = s.pools[touches[i, 0], BASE] + touches[i, 1]
        for k in range(1, 4):
            touches[i, 1 + k], s.entries[g, k] = s.entries[g, k], touches[i, 1 + k]


@jit(**INNER)
def _bits(key, counter):
    """Do :func:`stoker.ops.reference.counter_bits` for one counter."""
    z = (counter + np.int64(1)) * _GOLDEN + key
    z = (z ^ ((z >> np.int64(30)) & np.int64(0x3FFFFFFFF))) * _MIX1
    z = (z ^ ((z >> np.int64(27)) & np.int64(0x1FFFFFFFFF))) * _MIX2
    return z ^ ((z >> np.int64(31)) & np.int64(0x1FFFFFFFF))


@jit(**PLAIN)
def born(keys, scales, tables, ids, out):
    """Fill the rows ``out`` [n, D] of new raw ids [n] of some tables [n]."""
    for i in range(len(ids)):
        each, scale = _bits(keys[tables[i]], ids[i]), scales[tables[i]]
        for k in range(out.shape[1]):
            top = (_bits(each, np.int64(k)) >> np.int64(40)) & np.int64(0xFFFFFF)
            out[i, k] = (np.float32(top) * np.float32(2.0**-23) - np.float32(1.0)) * scale


@jit(**PLAIN)
def make_maps(s):
    """Enter all live entries into empty maps."""
    for m in range(len(s.pools)):
        s.pools[m, LIVE] = 0
        for r in range(s.pools[m, FIRST], s.pools[m, TOP]):
            g = s.pools[m, BASE] + r
            if s.entries[g, COUNT] > 0:
                _map(s, m, r, s.entries[g, KEY])


if HAVE_NUMBA:

    def _run(p):
        """Do a step of some tables, or only find their rows; threads take tables from the cursor."""
        (
            ids, where, starts, out, clock, births, made, unknown, changes, touches, firsts, keeps, counts,
            pools, entries, slots, free, heap, place, rank, tables, grows, cursor,
        ) = arguments(p)  # fmt: skip
        s = Pools(pools, entries, slots, free, heap, place, rank)
        w = Work(ids, where, starts, out, clock, births, made, unknown, changes, touches, firsts, keeps, counts)
        while True:
            i = fetch_add(cursor, 1)
            if i >= len(tables):
                return
            if grows:
                step_table(s, w, tables[i])
            else:
                find_table(s, w, tables[i])

    RUN = Kernel(_run)
