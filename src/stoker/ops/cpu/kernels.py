"""Numba kernels for one group of tables, specialised by row width and made once per process.

Every kernel is called by several threads at once with the same arguments; a shared cursor hands out disjoint work, so
no result depends on the number of threads. Arrays of rows are flat; addresses are int64.

Legend: B examples, F features, L ids, T tables, D (``dim``) columns.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stoker.ops.codegen.llvm_memory import fetch_add, prefetch_lines, prefetch_row
from stoker.ops.codegen.llvm_rows import (
    COW,
    row_accumulate,
    row_condition,
    row_copy,
    row_dot,
    row_init,
    row_rowwise_adagrad,
    row_scale,
    row_sgd,
    row_step,
)
from stoker.ops.codegen.native import Kernel, arguments, call, thread_index
from stoker.ops.rule import CODES, Constants

_SGD, _ROWWISE_ADAGRAD = CODES["sgd"], CODES["rowwise_adagrad"]
_LR, _EPS, _SHARE, _CLIP_VALUE, _CLIP_NORM, _DECAY, _COW_RATIO, _COW_FLOOR = map(
    Constants._fields.index, ("lr", "eps", "share", "clip_value", "clip_norm", "decay", "cow_ratio", "cow_floor")
)

_FIBONACCI = np.uint64(11400714819323198485)  # 2**64 / golden ratio (Knuth, TAOCP 3, 6.4)
_POSITIVE = np.int64(2**63 - 1)  # makes a negative id a huge one, so that none is taken for the mark of a free place
_AHEAD = 24  # rows to ask for before they are needed: about a DRAM latency's worth of work


def _init(p):
    """Fill the elements of fresh rows of one table, of any width: an element's counter is its place in the table."""
    out, key, first, scale, cursor, block = arguments(p)
    while True:
        start = fetch_add(cursor, block)
        if start >= len(out):
            return
        row_init(min(block, len(out) - start), out, start, key, first + start, scale)


init_kernel = Kernel(_init)


@lru_cache(maxsize=64)
def lookup_kernel(dim: int, jagged: bool, weighted: bool, mean: bool) -> Kernel:
    """Kernel of the pooled lookup; sets ``error[0]`` if an id lies outside its table."""
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
                        # The feature of that id is not known cheaply; most often it is this one.
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
    """Kernel of the per-sample-weight gradient: one dot product for each id; sets ``error[0]`` for a bad id or bag."""

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
    """First half of the fused backward: sum the gradients of each distinct row; then the other half updates the rows.

    A work item is one table, or one part of a table's rows. Its thread walks the batch in order of occurrence and adds
    each gradient to the row's place in a compact buffer, found by a hash table that fits the first-level cache; then it
    has the rows updated, which were asked for from memory when they were first met. ``counted``: also counts how often
    each row occurs. Ids and offsets are those of the lookup, but memory may have been written since: a bad one sets
    ``error[0]``, and the rows of that table and of others not yet done stay as they are.
    """
    scaled = 1 if weighted or mean else 0
    examples_ahead = max(4, min(32, 1024 // dim))
    whole_row = 4 * dim

    def sums(p):
        (
            ids,
            offsets,
            scale,
            grad,
            example_stride,
            feature_stride,
            table_start,
            table_features,
            first_row,
            table_rows,
            items,
            parts,
            occurrences,
            weight_at,
            itemsize,
            state_at,
            state_row,
            all_keys,
            all_slots,
            all_places,
            all_buffers,
            all_counts,
            error,
            cursor,
            apply,
        ) = arguments(p)
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
            direct = rows <= mask  # every row has a place of its own: no hashing
            one = np.float32(1.0)
            most = occurrences[table]
            count = np.int64(0)
            bad = False  # checked where a row is first met: to ask for every id would cost a twentieth
            for b in range(batch):
                for owned in range(table_start[table], table_start[table + 1]):
                    bag = b * features + table_features[owned]
                    source = b * example_stride + table_features[owned] * feature_stride
                    if b + ahead < batch:
                        # One table's gradients may lie a whole example apart: too far for the processor to guess.
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
    """Second half: update the ``count`` rows of ``table`` that thread ``me`` has found, and forget them."""

    def apply(p, me, table, count):
        (
            weight,
            state,
            state2,
            first_row,
            constants,
            rounding,
            row_in_slot,
            all_keys,
            all_places,
            all_buffers,
            all_counts,
        ) = arguments(p)
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
                row_condition(
                    dim,
                    flags,
                    buffer,
                    g,
                    weight,
                    at,
                    constants[_CLIP_VALUE],
                    constants[_CLIP_NORM],
                    constants[_DECAY],
                    occurs,
                    constants[_COW_RATIO],
                    constants[_COW_FLOOR],
                )
            if rule == _SGD:
                row_sgd(dim, weight, at, buffer, g, constants[_LR], salt, local * dim)
            elif rule == _ROWWISE_ADAGRAD:
                lr, eps, share = constants[_LR], constants[_EPS], constants[_SHARE]
                row_rowwise_adagrad(dim, weight, at, state, row, buffer, g, lr, eps, share, salt, local * dim)
            else:
                row_step(dim, rule, weight, at, state, state2, buffer, g, constants, salt, local * dim)

    return Kernel(apply, called=True)
