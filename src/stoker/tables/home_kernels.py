"""Numba kernels that move rows between a home in memory and the slots, specialised by row width.

Random rows of a large home are bound by the latency of memory, so every kernel asks for rows before it needs them.
Rows are moved as bytes: a row comes back with the very bits it left with, not-a-numbers included.

Legend: n rows of one call, D (``dim``) columns, T tables. ``first`` and ``second`` are the float32 elements a row of
the optimizer's state tensors, 0 for none.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from stoker.ops.llvm_rows import fetch_add, prefetch, row_init
from stoker.ops.native import Kernel, arguments

__all__ = ["fetch_kernel", "mark", "row_move", "store_kernel", "table_of"]

_I64 = ir.IntType(64)
_BYTE = ir.IntType(8).as_pointer()
_LINE = 64  # bytes of a cache line
_STATE_LINE = 16  # float32 elements in a cache line
_AHEAD = 24  # rows to ask for before they are needed: about a DRAM latency's worth of work


@intrinsic(prefer_literal=True)
def row_move(typingctx, size, out, out_at, row, row_at):
    """Copy ``size`` bytes, a compile-time constant, between element offsets of two flat arrays of any types."""
    signature = types.void(size, out, types.intp, row, types.intp)

    def codegen(context, b, signature, args):
        kinds = signature.args
        target = b.gep(context.make_array(kinds[1])(context, b, args[1]).data, [args[2]])
        source = b.gep(context.make_array(kinds[3])(context, b, args[3]).data, [args[4]])
        count = ir.Constant(_I64, kinds[0].literal_value)
        cgutils.raw_memcpy(b, b.bitcast(target, _BYTE), b.bitcast(source, _BYTE), count, 1)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _set_bits(typingctx, array, at, bits):
    """Atomically ``array[at] |= bits`` (int64)."""
    signature = types.void(array, types.intp, types.int64)

    def codegen(context, b, signature, args):
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        b.atomic_rmw("or", b.gep(data, [args[1]]), args[2], "monotonic")
        return context.get_dummy_value()

    return signature, codegen


@njit(nogil=True, cache=True)
def table_of(first_row, row):
    """The table a row belongs to."""
    low, high = 0, len(first_row) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if first_row[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _mark_one(words, row):
    word, bit = row >> 6, np.int64(1) << (row & 63)
    if not words[word] & bit:  # nearly always set already: reading keeps the line shared between threads
        _set_bits(words, word, bit)


@njit(nogil=True, cache=True)
def mark(words, rows):
    """Set the bits of ``rows``; other threads may do so at the same time."""
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch(words, rows[i + _AHEAD] >> 6)
        _mark_one(words, rows[i])


@lru_cache(maxsize=64)
def fetch_kernel(dim: int, itemsize: int, first: int, second: int) -> Kernel:
    """Kernel that copies rows of a home to places of a target, or makes them where the home does not hold them."""
    size, first_size, second_size, line = dim * itemsize, 4 * first, 4 * second, _LINE // itemsize

    def fetch(p):
        (
            rows,
            places,
            words,
            weight,
            state,
            state2,
            out,
            out_state,
            out_state2,
            first_row,
            keys,
            scales,
            cursor,
            block,
        ) = arguments(p)
        count = len(rows)
        placed = len(places) > 0
        while True:
            start = fetch_add(cursor, block)
            if start >= count:
                return
            stop = min(start + block, count)
            for i in range(start, stop):
                prefetch(words, rows[i] >> 6)
            for i in range(start - _AHEAD, stop):
                if i + _AHEAD < stop:
                    row = rows[i + _AHEAD]
                    for at in range(0, dim, line):
                        prefetch(weight, row * dim + at)
                    for at in range(0, first, _STATE_LINE):
                        prefetch(state, row * first + at)
                    for at in range(0, second, _STATE_LINE):
                        prefetch(state2, row * second + at)
                    if placed:
                        for at in range(0, dim, line):
                            prefetch(out, places[i + _AHEAD] * dim + at)
                if i < start:
                    continue
                row = rows[i]
                place = places[i] if placed else i
                if (words[row >> 6] >> (row & 63)) & 1:
                    row_move(size, out, place * dim, weight, row * dim)
                    if first:
                        row_move(first_size, out_state, place * first, state, row * first)
                    if second:
                        row_move(second_size, out_state2, place * second, state2, row * second)
                else:
                    table = table_of(first_row, row)
                    row_init(dim, out, place * dim, keys[table], (row - first_row[table]) * dim, scales[table])
                    for d in range(first):
                        out_state[place * first + d] = 0.0
                    for d in range(second):
                        out_state2[place * second + d] = 0.0

    return Kernel(fetch)


@lru_cache(maxsize=64)
def store_kernel(dim: int, itemsize: int, first: int, second: int) -> Kernel:
    """Kernel that copies rows at places of a source to a home, and marks them held."""
    size, first_size, second_size, line = dim * itemsize, 4 * first, 4 * second, _LINE // itemsize

    def store(p):
        rows, places, words, weight, state, state2, source, source_state, source_state2, cursor, block = arguments(p)
        count = len(rows)
        placed = len(places) > 0
        while True:
            start = fetch_add(cursor, block)
            if start >= count:
                return
            stop = min(start + block, count)
            for i in range(start - _AHEAD, stop):
                if i + _AHEAD < stop:
                    row = rows[i + _AHEAD]
                    prefetch(words, row >> 6)
                    for at in range(0, dim, line):
                        prefetch(weight, row * dim + at)
                    for at in range(0, first, _STATE_LINE):
                        prefetch(state, row * first + at)
                    for at in range(0, second, _STATE_LINE):
                        prefetch(state2, row * second + at)
                    if placed:
                        for at in range(0, dim, line):
                            prefetch(source, places[i + _AHEAD] * dim + at)
                if i < start:
                    continue
                row = rows[i]
                place = places[i] if placed else i
                row_move(size, weight, row * dim, source, place * dim)
                if first:
                    row_move(first_size, state, row * first, source_state, place * first)
                if second:
                    row_move(second_size, state2, row * second, source_state2, place * second)
                _mark_one(words, row)

    return Kernel(store)
