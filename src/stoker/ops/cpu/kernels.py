"""Numba kernels for tables and for the pairwise interaction; most are specialised by row width, once a process.

Several threads call a :class:`Kernel` at once with the same arguments. A shared cursor hands out disjoint work, so no
result depends on the number of threads. Arrays of rows are flat; addresses are int64.

Functions under ``@jit`` run on the calling thread. They number the distinct rows of a batch, table by table, because
the hash table of one table fits a small cache; and they choose bags.

Legend: B examples, F features, L ids, T tables, D (``dim``) columns.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm import LANES
from stoker.ops.codegen.llvm_memory import fetch_add, prefetch_lines, prefetch_row
from stoker.ops.codegen.llvm_rows import (
    row_accumulate,
    row_condition,
    row_copy,
    row_dot,
    row_init,
    row_scale,
    row_step,
)
from stoker.ops.codegen.llvm_tiles import dots, transpose, weighted_rows
from stoker.ops.codegen.native import Kernel, arguments, call, thread_index
from stoker.ops.rule import COW

_FIBONACCI = np.uint64(11400714819323198485)  # 2**64 / golden ratio (Knuth, TAOCP 3, 6.4)
_POSITIVE = np.int64(2**63 - 1)  # makes a negative id a huge one, so that none equals the mark of a free place
_AHEAD = 24  # rows to prefetch ahead: the work of about one DRAM latency


def _init(p):
    """Fill fresh rows of one table of any width; the counter of an element is its place in the table."""
    out, key, first, scale, cursor, block = arguments(p)
    while True:
        start = fetch_add(cursor, block)
        if start >= len(out):
            return
        row_init(min(block, len(out) - start), out, start, key, first + start, scale)


init_kernel = Kernel(_init)


@lru_cache(maxsize=64)
def lookup_kernel(dim: int, jagged: bool, weighted: bool, mean: bool) -> Kernel:
    """Make the kernel of the pooled lookup; it sets ``error[0]`` if an id is outside its table."""
    scaled = 1 if weighted else 0

    def one_hot(p):
        weight, ids, bases, limits, scale, out, error, cursor, block = arguments(p)
        batch, features = ids.shape
        ahead = max(1, _AHEAD // features)
        while True:
            start = fetch_add(cursor, block)
            if start >= batch:
                return
            for b in range(start, min(start + block, batch)):
                if b + ahead < batch:
                    for f in range(features):
                        prefetch_row(dim, weight, (bases[f] + ids[b + ahead, f]) * dim)
                for f in range(features):
                    i = np.int64(ids[b, f])
                    if i < 0 or i >= limits[f]:
                        error[0] = 1
                        return
                    to = (b * features + f) * dim
                    if weighted:
                        row_accumulate(dim, scaled, 1, out, to, weight, (bases[f] + i) * dim, scale[b * features + f])
                    else:
                        row_copy(dim, out, to, weight, (bases[f] + i) * dim)

    def bags(p):
        weight, ids, offsets, bases, limits, scale, out, error, cursor, block = arguments(p)
        features = len(bases)
        count = len(offsets) - 1
        last = len(ids)
        while True:
            start = fetch_add(cursor, block)
            if start >= count:
                return
            for bag in range(start, min(start + block, count)):
                f = bag % features
                base, limit = bases[f], limits[f]
                begin, end = offsets[bag], offsets[bag + 1]
                if begin < 0 or end < begin or end > last:
                    error[0] = 1
                    return
                for d in range(dim):
                    out[bag * dim + d] = 0.0
                for k in range(begin, end):
                    if k + _AHEAD < last:
                        # To find the feature of that id takes long; most often it is this one.
                        prefetch_row(dim, weight, (base + ids[k + _AHEAD]) * dim)
                    i = np.int64(ids[k])
                    if i < 0 or i >= limit:
                        error[0] = 1
                        return
                    row_accumulate(dim, scaled, 0, out, bag * dim, weight, (base + i) * dim, scale[k])
                if mean and end > begin:
                    row_scale(dim, out, bag * dim, np.float32(1.0) / np.float32(end - begin))

    return Kernel(bags if jagged else one_hot)


@lru_cache(maxsize=64)
def weight_gradient_kernel(dim: int) -> Kernel:
    """Make the kernel of the per-sample-weight gradient: a dot product an id; ``error[0]`` for a bad id or bag."""

    def dots(p):
        weight, ids, offsets, bases, limits, grad, out, error, cursor, block = arguments(p)
        features = len(bases)
        count = len(offsets) - 1
        while True:
            start = fetch_add(cursor, block)
            if start >= count:
                return
            for bag in range(start, min(start + block, count)):
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
def sum_kernel(dim: int, jagged: bool, weighted: bool, mean: bool, counted: bool) -> Kernel:
    """Make the first half of the fused backward, which sums the gradients of each distinct row and calls the second.

    A work item is one table, or one partition of its rows. Its thread walks the batch in order of occurrence and adds
    each gradient to the row's place in a compact buffer, found by a hash table that fits the first-level cache. It
    prefetches a row when it first meets it, and updates the rows at the end. ``counted``: also counts how often each
    row occurs. Ids and offsets are those of the lookup, but memory may have been written since: a bad one sets
    ``error[0]``, and the rows of that table and of others not yet done do not change.
    """
    scaled = 1 if weighted or mean else 0
    examples_ahead = max(4, min(32, 1024 // dim))
    whole_row = 4 * dim

    def sums(p):
        (
            ids, offsets, scale, grad, example_stride, feature_stride, table_start, table_features, first_row,
            table_rows, items, parts, occurrences, weight_at, itemsize, state_at, state_row, all_keys, all_slots,
            all_places, all_buffers, all_counts, error, cursor, apply,
        ) = arguments(p)  # fmt: skip
        me = thread_index(p)
        keys, slots, places, buffer = all_keys[me], all_slots[me], all_places[me], all_buffers[me]
        counts = all_counts[me]
        features = len(table_features)
        batch = (len(offsets) - 1 if jagged else len(ids)) // features
        ahead = examples_ahead
        while True:
            item = fetch_add(cursor, 1)
            if item >= len(items):
                return
            table, part = items[item, 0], items[item, 1]
            others = parts[table] - 1
            first = first_row[table]
            rows = table_rows[table]
            bits = np.int64(4)
            while (np.int64(1) << bits) < 2 * occurrences[table]:
                bits += 1
            mask = (np.int64(1) << bits) - 1
            shift = np.uint64(64 - bits)
            direct = rows <= mask  # every row is its own place: no hashing
            one = np.float32(1.0)
            most = occurrences[table]
            count = np.int64(0)
            bad = False  # checked when a row is first met: a check of every id takes a twentieth longer
            for b in range(batch):
                for owned in range(table_start[table], table_start[table + 1]):
                    bag = b * features + table_features[owned]
                    source = b * example_stride + table_features[owned] * feature_stride
                    if b + ahead < batch:
                        # The gradients of one table may be an example apart: the processor does not prefetch so far.
                        prefetch_row(dim, grad, source + ahead * example_stride)
                    begin, end = bag, bag + 1
                    if jagged:
                        begin, end = offsets[bag], offsets[bag + 1]
                        if begin < 0 or end < begin or end > len(ids):
                            bad = True
                            end = begin
                        if mean and end > begin:
                            one = np.float32(1.0) / np.float32(end - begin)
                    for k in range(begin, end):
                        row = np.int64(ids[k]) & _POSITIVE
                        if others and (row >> 4) & others != part:
                            continue
                        if weighted:
                            one = scale[k]
                        h = row & mask if direct else np.int64((np.uint64(row) * _FIBONACCI) >> shift)
                        while keys[h] != row and keys[h] >= 0:
                            h = (h + 1) & mask
                        if keys[h] == row:
                            if counted:
                                counts[slots[h]] += 1
                            row_accumulate(dim, scaled, 0, buffer, np.int64(slots[h]) * dim, grad, source, one)
                        else:
                            if row >= rows or count >= most:
                                bad = True
                                continue
                            keys[h] = row
                            slots[h] = count
                            places[count] = h
                            prefetch_lines(dim, weight_at + (first + row) * dim * itemsize, itemsize)
                            at = state_at + (first + row) * state_row
                            if state_row == whole_row:
                                prefetch_lines(dim, at, 4)
                            elif state_row > 0:
                                prefetch_lines(1, at, 4)
                            row_accumulate(dim, scaled, 1, buffer, count * dim, grad, source, one)
                            if counted:
                                counts[count] = 1
                            count += 1
            if bad:
                for u in range(count):
                    keys[places[u]] = -1
                error[0] = 1
                return
            call(p, apply, me, table, count)

    return Kernel(sums)


@lru_cache(maxsize=64)
def apply_kernel(dim: int, rule: int, flags: int) -> Kernel:
    """Make the second half: update the ``count`` rows of ``table`` that thread ``me`` found, and empty its hash."""

    def apply(p, me, table, count):
        (
            weight, state, state2, first_row, constants, rounding, row_in_slot, all_keys, all_places, all_buffers,
            all_counts,
        ) = arguments(p)  # fmt: skip
        keys, places, buffer, counts = all_keys[me], all_places[me], all_buffers[me], all_counts[me]
        first = first_row[table]
        salt = rounding[table]
        for u in range(count):
            h = places[u]
            local = keys[h]
            keys[h] = -1
            row = first + local
            at, g = row * dim, u * dim
            if row_in_slot.size > 0:  # the random bits of bfloat16 belong to the row, not to its slot
                local = row_in_slot[row]
            if flags:
                occurs = np.int64(0)
                if flags & COW:
                    occurs = np.int64(counts[u])
                row_condition(dim, flags, buffer, g, weight, at, occurs, constants)
            row_step(dim, rule, weight, row, state, state2, buffer, g, constants, salt, local * dim)

    return Kernel(apply, called=True)


def _step(p):
    """Step blocks of ``size`` distinct rows, whose gradients need no sum."""
    count, size, apply, cursor = arguments(p)
    while True:
        block = fetch_add(cursor, 1)
        if block * size >= count:
            return
        call(p, apply, block, np.int64(0), min(size, count - block * size))


step_kernel = Kernel(_step)


@jit
def place_rows(ids, offsets, jagged, table_of, table_rows, pinned, first_place, seen, inverse, others):
    """Place the pinned rows in the order of the batch: id k below ``pinned`` [T] gets ``inverse`` -1 - place.

    Places count from ``first_place`` [T] on. ``seen`` has a bit for each, all 0 before and after. ``others`` [T] counts
    the other ids of each table. Returns how many distinct places there were, or -1 for a bad id.
    """
    features = table_of.size
    batch = (offsets.size - 1 if jagged else ids.size) // features
    # Feature by feature: without a lookup between an id and its place this takes a fifth of the time.
    limits, lows, places = np.empty((3, features), np.int64)
    for f in range(features):
        limits[f], lows[f], places[f] = table_rows[table_of[f]], pinned[table_of[f]], first_place[table_of[f]]
    placed, wrong = 0, False
    for b in range(batch):
        for f in range(features):
            bag = b * features + f
            begin, end = bag, bag + 1
            if jagged:
                begin, end = offsets[bag], offsets[bag + 1]
            for k in range(begin, end):
                row = np.int64(ids[k])
                wrong |= row < 0 or row >= limits[f]
                inverse[k] = 0
                if 0 <= row < lows[f]:
                    place = places[f] + row
                    inverse[k] = -1 - place
                    word, bit = np.uint64(place >> 6), np.uint64(place & 63)
                    placed += 1 - np.int64((seen[word] >> bit) & np.uint64(1))
                    seen[word] |= np.uint64(1) << bit
                else:
                    others[table_of[f]] += 1
    for k in range(ids.size):
        if inverse[k] < 0:
            seen[np.uint64((-1 - inverse[k]) >> 6)] = np.uint64(0)
    return -1 if wrong else placed


@jit
def take_slots(which, slots, first, out):
    """Write the slot of each id to ``out``: row ``which`` is in ``first + slots[which]``, place p < 0 in ``-1 - p``."""
    for k in range(which.size):
        row = which[k]
        out[k] = -1 - row if row < 0 else first + slots[np.uint64(row)]


@jit
def number_rows(
    ids, offsets, jagged, table_start, table_features, first_row, table_rows, pinned, others, keys, numbers, rows,
    inverse,
):  # fmt: skip
    """Write distinct addresses to ``rows``, each id's number to ``inverse``; return how many, or -1 for a bad id.

    It skips the ids below ``pinned`` [T] of each table; ``others`` [T] counts the rest. ``keys`` is all -1 on entry,
    and on return unless an id is bad.
    """
    features = table_features.size
    batch = (offsets.size - 1 if jagged else ids.size) // features
    found = 0
    for table in range(table_rows.size):
        if others[table] == 0:
            continue
        bits = np.int64(4)
        while (np.int64(1) << bits) < 2 * others[table]:
            bits += 1
        mask = (np.int64(1) << bits) - 1
        shift = np.uint64(64 - bits)
        limit, first, low = table_rows[table], first_row[table], pinned[table]
        direct = limit <= mask
        begin_found = found
        for b in range(batch):
            for f in range(table_start[table], table_start[table + 1]):
                bag = b * features + table_features[f]
                begin, end = bag, bag + 1
                if jagged:
                    begin, end = offsets[bag], offsets[bag + 1]
                for k in range(begin, end):
                    row = np.int64(ids[k])
                    if row < 0 or row >= limit:
                        return -1
                    if row < low:
                        continue
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
            rows[i] = first + keys[h]
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
        while True:
            start = fetch_add(cursor, block)
            if start >= batch:
                return
            for b in range(start, min(start + block, batch)):
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
        while True:
            start = fetch_add(cursor, block)
            if start >= batch:
                return
            for b in range(start, min(start + block, batch)):
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
