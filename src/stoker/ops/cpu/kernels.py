"""Numba kernels for tables and for the pairwise interaction; most are specialised by row width, once a process.

Several threads call a :class:`Kernel` at once with the same arguments. A shared cursor gives each disjoint work, so no
result depends on the number of threads. Arrays of rows are flat; addresses are int64.

Functions under ``@jit`` run on the calling thread. They number the distinct rows of a batch, table by table, because
the hash table of one table fits a small cache; and they choose bags.

LAMB takes two passes, equal to :mod:`stoker.ops.lamb` to the bit.

Legend: B examples, F features, L ids, T tables, U distinct rows, D (``dim``) columns.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from stoker.ops.codegen.jit import PLAIN, jit
from stoker.ops.codegen.llvm import LANES
from stoker.ops.codegen.llvm_memory import fetch_add, prefetch_row
from stoker.ops.codegen.llvm_rows import (
    bag_sum,
    chain_sum,
    row_accumulate,
    row_condition,
    row_copy,
    row_dot,
    row_init,
    row_lamb,
    row_scale,
    row_sgd,
    row_squares,
    row_step,
)
from stoker.ops.codegen.llvm_tiles import dots, transpose, weighted_rows
from stoker.ops.codegen.native import Kernel, arguments, call, shared, thread_index
from stoker.ops.reference import CHUNK
from stoker.ops.rule import COW, RULES

_FIBONACCI = np.uint64(11400714819323198485)  # 2**64 / golden ratio (Knuth, TAOCP 3, 6.4)
_POSITIVE = np.int64(2**63 - 1)  # makes a negative id a huge one, so that none equals the mark of a free place
_AHEAD = 24  # rows to prefetch ahead: the work of about one DRAM latency
_LOW = np.int64(2**32 - 1)
_PLACE_BITS = 48  # of the place of a gradient; the number of its shard is above
_PLACE = np.int64(2**_PLACE_BITS - 1)
_LEVEL_BITS = 4  # of the level of a sum in the tree over shards
_LEVEL = np.int64(2**_LEVEL_BITS - 1)
EXAMPLES = 16  # whose lookups in one feature follow each other
_CONDITION = 15  # the flags of stoker.ops.rule.condition; row_lamb has more
LAMB_BLOCK = 512  # rows of a work item of LAMB
_LAMB_AHEAD = 12  # rows that LAMB prefetches ahead
_LIMB = _MOST_SQUARE = 2.0**40  # stoker.ops.lamb


def _init(p):
    """Fill fresh rows of one table of any width; the counter of an element is its place in the table."""
    out, key, first, scale, cursor, block = arguments(p)
    while True:
        start = fetch_add(cursor, block)
        if start >= len(out):
            return
        row_init(min(block, len(out) - start), out, start, key, first + start, scale)


init_kernel = Kernel(_init)


def _items(p):
    """Give items [I, 2] to kernels, ``run`` to a thread at once.

    The first number of an item is that of its kernel, which gets the number of the thread and the item.
    """
    entries, items, cursor, run = arguments(p)
    me = thread_index(p)
    for item in shared(cursor, run, len(items)):
        call(p, entries[items[item, 0]], me, items[item, 0], items[item, 1])


items_kernel = Kernel(_items)


@lru_cache(maxsize=64)
def lookup_kernel(dim: int, jagged: bool, weighted: bool, mean: bool) -> Kernel:
    """Make the kernel of the pooled lookup; it sets ``error[0]`` if an id is outside its table.

    An item is EXAMPLES examples of the features ``start[group]..start[group + 1]``; a thread does ``block`` examples.
    ``known`` has four numbers of each feature: its column in the batch, where its output begins in the ``width``
    elements of an example, the element where its table begins, and the table's rows.
    """
    scaled = 1 if weighted else 0

    def one_hot(p, me, group, first):
        weight, ids, _, scale, start, known, width, features, out, block, error = arguments(p)
        begin, end, batch = 4 * start[group], 4 * start[group + 1], len(ids) // features
        ahead, last = np.uint64(EXAMPLES * features), min(first - first % block + block, batch)
        if first % block == 0:
            for f in range(begin, end, 4):
                for b in range(first, min(first + EXAMPLES, batch)):
                    prefetch_row(dim, weight, known[f + 2] + np.int64(ids[b * features + known[f]]) * dim)
        for f in range(begin, end, 4):
            column, place, base, limit = known[f], known[f + 1], known[f + 2], known[f + 3]
            for b in range(first, min(first + EXAMPLES, batch)):
                k = np.uint64(b * features + column)
                if b + EXAMPLES < last:
                    prefetch_row(dim, weight, base + np.int64(ids[k + ahead]) * dim)
                i = np.int64(ids[k])
                if i < 0 or i >= limit:
                    error[0] = 1
                    return
                if weighted:
                    row_accumulate(dim, scaled, 1, out, b * width + place, weight, base + i * dim, scale[k])
                else:
                    row_copy(dim, out, b * width + place, weight, base + i * dim)

    def bags(p, me, group, first):
        weight, ids, offsets, scale, start, known, width, features, out, _, error = arguments(p)
        last, stop = len(ids), min(first + EXAMPLES, (len(offsets) - 1) // features)
        for b in range(first - 1, stop):
            for f in range(4 * start[group], 4 * start[group + 1], 4):
                bag, base, limit = b * features + known[f], known[f + 2], known[f + 3]
                if b + 1 < stop:
                    for k in range(max(offsets[bag + features], 0), min(offsets[bag + features + 1], last)):
                        prefetch_row(dim, weight, base + np.int64(ids[np.uint64(k)]) * dim)
                if b < first:
                    continue
                begin, end = offsets[bag], offsets[bag + 1]
                if begin < 0 or end < begin or end > last:
                    error[0] = 1
                    return
                to = b * width + known[f + 1]
                if bag_sum(dim, scaled, out, to, weight, base, limit, ids, begin, end, scale):
                    error[0] = 1
                    return
                if mean and end > begin:
                    row_scale(dim, out, to, np.float32(1.0) / np.float32(end - begin))

    return Kernel(bags if jagged else one_hot, called=True)


@lru_cache(maxsize=64)
def weight_gradient_kernel(dim: int) -> Kernel:
    """Make the kernel of the per-sample-weight gradient: a dot product an id; ``error[0]`` for a bad id or bag."""

    def dots(p):
        weight, ids, offsets, bases, limits, grad, out, error, cursor, block = arguments(p)
        features = len(bases)
        count = len(offsets) - 1
        for bag in shared(cursor, block, count):
            f = bag % features
            begin, end = offsets[bag], offsets[bag + 1]
            if begin < 0 or end < begin or end > len(ids):
                error[0] = 1
                return
            for k in range(begin, end):
                i = np.int64(ids[k])
                if i < 0 or i >= limits[f]:
                    error[0] = 1
                    return
                out[k] = row_dot(dim, grad, bag * dim, weight, (bases[f] + i) * dim)

    return Kernel(dots)


@lru_cache(maxsize=64)
def find_kernel(jagged: bool, weighted: bool, mean: bool, sharded: bool = False) -> Kernel:
    """Make the first half of the fused backward, which finds the distinct rows of a table and calls the second half.

    An item is one table, or one partition of its rows. Its thread walks the batch and numbers the lookups n in order.
    ``rows[2 * u]`` is a distinct row, found by a hash table; after it come its last and first lookup, of 32 bits each.
    ``following[n]`` is the next lookup of the same row; the gradient of lookup n begins at ``sources[n]``. Ids and
    offsets are those of the lookup, but memory may have been written since: a bad one sets ``error[0]``, and the rows
    of that item and of others not yet done do not change.

    ``limits`` has the number of the first logical shard, then the example after the last of each. If ``sharded``, the
    number of its shard is added to the place of each gradient, from bit 48 on.
    """

    def find(p, me, table, part):
        (
            ids, offsets, scale, features, example_stride, table_start, columns, places, table_rows, parts, lookups,
            means, limits, all_slots, all_rows, all_following, all_sources, all_scales, error, entries,
        ) = arguments(p)  # fmt: skip
        slots, rows, following = all_slots[me], all_rows[me], all_following[me]
        sources, scales = all_sources[me], all_scales[me]
        batch = (len(offsets) - 1 if jagged else len(ids)) // features
        others, limit, most = parts[table] - 1, table_rows[table], lookups[table]
        bits = np.int64(4)
        while (np.int64(1) << bits) < 2 * most:
            bits += 1
        mask = (np.int64(1) << bits) - 1
        shift = np.uint64(64 - bits)
        direct = limit <= mask  # every row is its own place: no hashing
        slots[: mask + 1] = most
        begin_f, end_f = table_start[table], table_start[table + 1]
        one = np.float32(1.0)
        count, n = np.int64(0), np.int64(0)
        bad = False
        mark, ended = np.int64(0), np.int64(0)
        if sharded:
            mark = limits[0] << _PLACE_BITS
        for b in range(batch):
            if sharded:
                while b >= limits[np.uint64(ended + 1)]:
                    ended, mark = ended + 1, mark + (1 << _PLACE_BITS)
            for f in range(begin_f, end_f):
                bag = b * features + columns[np.uint64(f)]
                source = b * example_stride + places[np.uint64(f)]
                begin, end = bag, bag + 1
                if jagged:
                    begin, end = offsets[np.uint64(bag)], offsets[np.uint64(bag + 1)]
                    if begin < 0 or end < begin or end > len(ids):
                        bad = True
                        end = begin
                    if mean and means[table] and end > begin:
                        one = np.float32(1.0) / np.float32(end - begin)
                for k in range(begin, end):
                    row = np.int64(ids[np.uint64(k)]) & _POSITIVE
                    if others and (row >> 4) & others != part:
                        continue
                    h = row & mask if direct else np.int64((np.uint64(row) * _FIBONACCI) >> shift)
                    rows[np.uint64(2 * most)] = row  # a free place leads there, so that one test ends the search
                    u = np.int64(slots[np.uint64(h)])
                    while rows[np.uint64(2 * u)] != row:
                        h = (h + 1) & mask
                        u = np.int64(slots[np.uint64(h)])
                    if n >= most or row >= limit:
                        bad = True
                        continue
                    # Without branches: which rows are new cannot be predicted.
                    known = (u - most) >> 63
                    u = (u & known) | (count & ~known)
                    count += 1 + known
                    slots[np.uint64(h)] = u
                    ends = rows[np.uint64(2 * u + 1)]
                    rows[np.uint64(2 * u)] = row
                    rows[np.uint64(2 * u + 1)] = n << 32 | (ends & _LOW & known) | (n & ~known)
                    following[np.uint64((ends >> 32 & known) | (n & ~known))] = n
                    sources[np.uint64(n)] = source + mark
                    if weighted:
                        scales[np.uint64(n)] = scale[np.uint64(k)]
                    elif mean:
                        scales[np.uint64(n)] = one
                    n += 1
        if bad:
            error[0] = 1
        if error[0] == 0:
            call(p, entries[table], me, table, count)

    return Kernel(find, called=True)


@lru_cache(maxsize=64)
def apply_kernel(dim: int, rule: int, flags: int, scaled: bool, sharded: bool = False) -> Kernel:
    """Make the second half: sum the gradients of each of ``count`` rows in order of occurrence, and update the row.

    ``all_sums`` has room for two rows a thread: the sum, and that of a chunk after the first (reference.add_in_chunks).
    If ``sharded``, sums of shards that wait for others follow. Each has a level in the tree: it is the left half of a
    node with 2^level shards. When the next shard is known, the sum of this one is added to those of lower levels.
    """
    times = 1 if scaled else 0
    definition = next(each for each in RULES.values() if each.code == rule)
    states, state_dim = len(definition.state), 1 if definition.scalar else dim
    ahead, shard_bits = max(4, min(_AHEAD, 1024 // dim)), _PLACE_BITS if sharded else 0

    def apply(p, me, table, count):
        (
            weight, state, state2, grad, begins, constants, group_of, rounding, row_in_slot, all_rows, all_following,
            all_sources, all_scales, all_sums,
        ) = arguments(p)  # fmt: skip
        rows, following, sources, scales = all_rows[me], all_following[me], all_sources[me], all_scales[me]
        total, own, salt = all_sums[me], constants[group_of[table]], rounding[table]
        first, first_state, first_state2 = begins[0, table], begins[1, table], begins[2, table]
        for u in range(-ahead, count):
            if u + ahead < count:
                v = np.uint64(2 * (u + ahead))
                prefetch_row(dim, weight, first + rows[v] * dim)
                source = sources[np.uint64(rows[v + np.uint64(1)] & _LOW)]
                prefetch_row(dim, grad, source & _PLACE if sharded else source)
                if states > 0:
                    prefetch_row(state_dim, state, first_state + rows[v] * state_dim)
                if states > 1:
                    prefetch_row(state_dim, state2, first_state2 + rows[v] * state_dim)
            if u < 0:
                continue
            local, ends = rows[np.uint64(2 * u)], rows[np.uint64(2 * u + 1)]
            n, last = np.uint64(ends & _LOW), np.uint64(ends >> 32)
            shard, waiting, levels = sources[n] >> _PLACE_BITS, np.int64(2 * dim), np.int64(0)
            occurs, to = np.int64(0), np.int64(0)
            while True:
                summed = chain_sum(
                    dim, times, CHUNK, shard_bits, total, to, grad, following, sources, scales, np.int64(n),
                    np.int64(last),
                )  # fmt: skip
                occurs += summed >> 32
                if to:
                    row_accumulate(dim, 0, 0, total, 0, total, dim, np.float32(1.0))
                n, to = np.uint64(summed & _LOW), np.int64(dim)
                if n == last:
                    break
                n = np.uint64(following[n])
                if sharded:
                    other = sources[n] >> _PLACE_BITS
                    if other != shard:
                        level, done = np.int64(1), np.int64(0)
                        while (shard ^ other) >> level:
                            level += 1
                        while levels and levels & _LEVEL < level:
                            waiting, levels = waiting - dim, levels >> _LEVEL_BITS
                            row_accumulate(dim, 0, 0, total, waiting, total, done, np.float32(1.0))
                            done = waiting
                        if not done:
                            row_copy(dim, total, waiting, total, 0)
                        waiting, levels = waiting + dim, levels << _LEVEL_BITS | level
                        shard, to = other, np.int64(0)
            done = np.int64(0)
            if sharded:
                while waiting > 2 * dim:
                    waiting -= dim
                    row_accumulate(dim, 0, 0, total, waiting, total, done, np.float32(1.0))
                    done = waiting
            at, counter = first + local * dim, local * dim
            if row_in_slot.size > 0:  # the random bits of bfloat16 belong to the row, not to its slot
                counter = row_in_slot[local] * dim
            if flags:
                row_condition(dim, flags, total, done, weight, at, occurs, own)
            row_step(
                dim, rule, weight, at, state, first_state + local * state_dim, state2,
                first_state2 + local * state_dim, total, done, own, salt, counter,
            )  # fmt: skip

    return Kernel(apply, called=True)


def _step(p):
    """Step blocks of ``size`` distinct rows, whose gradients need no sum."""
    count, size, apply, cursor = arguments(p)
    for block in shared(cursor, 1, (count + size - 1) // size):
        call(p, apply, block, np.int64(0), min(size, count - block * size))


step_kernel = Kernel(_step)


_BLOCK = 64  # examples whose ids fit the first cache


@jit(**PLAIN)
def place_rows(ids, offsets, jagged, table_of, table_rows, pinned, first_place, seen, inverse, ends, others):
    """Place the pinned rows: id k below ``pinned`` [T] gets ``inverse`` -1 - place.

    Places count from ``first_place`` [T] on. ``seen`` has a bit for each and one more, all 0 before and after. The
    other lookups of table t are written to ``others`` from ``ends[t]`` on, which rises by their number. Returns how
    many distinct places there were, or -1 for a bad id.
    """
    features = table_of.size
    batch = (offsets.size - 1 if jagged else ids.size) // features
    placed, wrong, some = 0, False, first_place[-1] > 0
    for block in range(0, batch, _BLOCK):
        stop = min(block + _BLOCK, batch)
        for f in range(features):
            table = table_of[f]
            limit, low, places, end = table_rows[table], pinned[table], first_place[table], ends[table]
            for b in range(block, stop):
                bag = b * features + f
                first, last = bag, bag + 1
                if jagged:
                    first, last = offsets[bag], offsets[bag + 1]
                for k in range(first, last):
                    # Without branches: which rows are pinned cannot be predicted.
                    row = np.int64(ids[k])
                    wrong |= (row < 0) | (row >= limit)
                    others[end] = k
                    if not some:
                        end += 1
                        continue
                    own = np.int64((row >= 0) & (row < low))
                    place = (places + row) * own
                    inverse[k] = (-1 - place) * own
                    word, bit = np.uint64(place >> 6), np.uint64(place & 63)
                    placed += own & ~np.int64(seen[word] >> bit)
                    seen[word] |= np.uint64(own) << bit
                    end += 1 - own
            ends[table] = end
    for k in range((offsets[batch * features] if jagged else batch * features) * some):
        seen[np.uint64(max(-1 - np.int64(inverse[k]), 0) >> 6)] = np.uint64(0)
    return -1 if wrong else placed


@jit(**PLAIN)
def take_slots(which, slots, first):
    """Replace row numbers by slots, in place: row ``which`` is in ``first + slots[which]``, place p < 0 in ``-1 - p``.

    ``slots`` has an element at least.
    """
    for k in range(which.size):
        row = which[k]
        slot = first + slots[np.uint64(max(row, 0))]
        which[k] = -1 - row if row < 0 else slot


@jit(**PLAIN)
def number_rows(ids, begins, ends, first_row, table_rows, keys, numbers, rows, inverse):
    """Write distinct addresses to ``rows``, and the number of each lookup's row to ``inverse``; return how many.

    ``rows`` holds the lookups of table t at ``begins[t]:ends[t]``, whose ids are in the table. ``keys`` is all -1 on
    entry and on return.
    """
    found = 0
    for table in range(table_rows.size):
        bits = np.int64(4)
        while (np.int64(1) << bits) < 2 * (ends[table] - begins[table]):
            bits += 1
        mask = (np.int64(1) << bits) - 1
        shift = np.uint64(64 - bits)
        direct = table_rows[table] <= mask
        begin_found = found
        for i in range(begins[table], ends[table]):
            k = rows[i]
            row = np.int64(ids[k])
            h = row if direct else np.int64((np.uint64(row) * np.uint64(11400714819323198485)) >> shift)
            while keys[h] != row and keys[h] >= 0:
                h = (h + 1) & mask
            if keys[h] < 0:
                keys[h] = row
                numbers[h] = found
                rows[found] = h  # until the table is done: which places of the hash table to clear
                found += 1
            inverse[k] = numbers[h]
        for i in range(begin_found, found):
            h = rows[i]
            rows[i] = first_row[table] + keys[h]
            keys[h] = -1
    return found


@jit
def rises(offsets, count):
    """Return True if offsets rise from 0 to ``count``."""
    if offsets.size == 0 or offsets[0] != 0 or offsets[offsets.size - 1] != count:
        return False
    falls = False
    for k in range(1, offsets.size):
        falls |= offsets[k] < offsets[k - 1]
    return not falls


@jit
def chosen_ends(offsets, columns, features, ends):
    """Write where the chosen bags begin and end [B * C + 1]; return how many ids they have."""
    at, bag = 0, 0
    ends[0] = 0
    for first in range(0, offsets.size - 1, features):
        for c in range(columns.size):
            place = np.uint64(first + columns[c])
            at += offsets[place + np.uint64(1)] - offsets[place]
            bag += 1
            ends[bag] = at
    return at


@jit
def chosen_values(offsets, columns, features, values, out):
    """Write the values [L] of the chosen bags, one bag after the other."""
    at = np.uint64(0)
    for first in range(0, offsets.size - 1, features):
        for c in range(columns.size):
            place = np.uint64(first + columns[c])
            for k in range(offsets[place], offsets[place + np.uint64(1)]):
                out[at] = values[np.uint64(k)]
                at += np.uint64(1)


@lru_cache(maxsize=64)
def interaction_kernel(dim: int) -> Kernel:
    """Make the kernel of [B, D] and [B, F, D] to [B, width]. It transposes vectors: one row meets 16 at once."""

    def forward(p):
        dense, embedded, out, width, features, batch, cursor, block, all_rows, all_columns = arguments(p)
        me = thread_index(p)
        rows, columns = all_rows[me], all_columns[me]
        vectors = features + 1
        stride = (vectors + LANES - 1) // LANES * LANES
        products = np.empty(LANES, np.float32)
        for b in shared(cursor, block, batch):
            row_copy(dim, rows, 0, dense, b * dim)
            row_copy(dim, out, b * width, dense, b * dim)
            for f in range(features):
                row_copy(dim, rows, (f + 1) * dim, embedded, (b * features + f) * dim)
            for v in range(0, stride, LANES):
                for d in range(0, dim - LANES + 1, LANES):
                    transpose(rows, v * dim + d, dim, columns, d * stride + v, stride)
            for d in range(dim // LANES * LANES, dim):
                for v in range(vectors):
                    columns[d * stride + v] = rows[v * dim + d]
            at = b * width + dim
            for v in range(1, vectors):
                for begin in range(0, v, LANES):
                    if begin + LANES <= v:
                        dots(dim, rows, v * dim, columns, begin, stride, out, at + begin)
                    else:
                        dots(dim, rows, v * dim, columns, begin, stride, products, 0)
                        for k in range(v - begin):
                            out[at + begin + k] = products[k]
                at += v
            out[at : (b + 1) * width] = 0.0

    return Kernel(forward, allocates=True)


@lru_cache(maxsize=64)
def interaction_gradient_kernel(dim: int) -> Kernel:
    """Make the kernel of the gradients: of a vector, the sum of the others, weighted by their pairs' gradients."""

    def backward(p):
        dense, embedded, grad, width, grad_dense, grad_embedded, stride, features, batch, cursor, block, all_rows = (
            arguments(p)
        )
        rows = all_rows[thread_index(p)]
        vectors = features + 1
        for b in shared(cursor, block, batch):
            row_copy(dim, rows, 0, dense, b * dim)
            for f in range(features):
                row_copy(dim, rows, (f + 1) * dim, embedded, (b * features + f) * dim)
            triangle = b * width + dim
            row_copy(dim, grad_dense, b * dim, grad, b * width)
            weighted_rows(dim, 0, grad_dense, b * dim, rows, dim, features, grad, triangle, 1, 1)
            for v in range(1, vectors):
                to = (v - 1) * stride + b * dim
                across = triangle + v * (v - 1) // 2
                down = triangle + v * (v + 1) // 2 + v
                weighted_rows(dim, 1, grad_embedded, to, rows, 0, v, grad, across, 1, 0)
                weighted_rows(dim, 0, grad_embedded, to, rows, (v + 1) * dim, vectors - 1 - v, grad, down, v + 1, 1)

    return Kernel(backward)


@njit(inline="always")
def _add_square(limbs, table, sign, square):
    """Add a row's sum of squares to the integers of its table, or subtract it, as stoker.ops.lamb.squares."""
    rest = square if square <= _MOST_SQUARE else _MOST_SQUARE
    for limb in range(3):
        whole = np.floor(rest)
        limbs[table, limb] += sign * np.int64(whole)
        rest = (rest - whole) * _LIMB


@lru_cache(maxsize=64)
def direct_kernel(dim: int, flags: int) -> Kernel:
    """Make the kernel that turns gradients [U, D] into directions and sums their squares."""
    clipping = flags & _CONDITION

    def direct(p):
        weight, mean, square, out, rows, table, counts, constants, limbs, cursor, block = arguments(p)
        mine = limbs[thread_index(p)]
        while True:
            start = fetch_add(cursor, block)
            if start >= len(rows):
                return
            for u in range(start, min(start + block, len(rows))):
                if u + _LAMB_AHEAD < len(rows):
                    prefetch_row(dim, mean, rows[u + _LAMB_AHEAD] * dim)
                    prefetch_row(dim, square, rows[u + _LAMB_AHEAD] * dim)
                at = rows[u] * dim
                if clipping:
                    occurs = np.int64(0)
                    if clipping & COW:
                        occurs = counts[u]
                    row_condition(dim, clipping, out, u * dim, weight, at, occurs, constants)
                row_lamb(dim, flags, weight, at, mean, square, out, u * dim, constants)
                _add_square(mine, table[u], 1, row_squares(dim, out, u * dim))

    return Kernel(direct)


@lru_cache(maxsize=64)
def move_kernel(dim: int) -> Kernel:
    """Make the kernel that steps along directions [U, D] and sums the growth of the rows' squares."""

    def move(p):
        weight, directions, rows, table, scales, first_row, row_in_slot, keys, limbs, cursor, block = arguments(p)
        mine = limbs[thread_index(p)]
        while True:
            start = fetch_add(cursor, block)
            if start >= len(rows):
                return
            for u in range(start, min(start + block, len(rows))):
                if u + _LAMB_AHEAD < len(rows):
                    prefetch_row(dim, weight, rows[u + _LAMB_AHEAD] * dim)
                row = rows[u]
                of = table[u]
                at = row * dim
                local = row - first_row[of]
                if row_in_slot.size > 0:  # the random bits of bfloat16 belong to the row, not to its slot
                    local = row_in_slot[row]
                _add_square(mine, of, -1, row_squares(dim, weight, at))
                row_sgd(dim, weight, at, directions, u * dim, scales[of], keys[of], local * dim)
                _add_square(mine, of, 1, row_squares(dim, weight, at))

    return Kernel(move)
