"""Numba kernels that move rows between a home in memory and the slots.

Random rows of a large home are bound by the latency of memory, so every kernel asks for rows before it needs them.
Rows are moved as bytes: a row comes back with the very bits it left with, not-a-numbers included.

Legend: n rows of one call, D (``dim``) columns, T tables. ``first`` and ``second`` are the float32 elements a row of
the optimizer's state tensors, 0 for none.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import fetch_add, prefetch, prefetch_bytes, row_move
from stoker.ops.codegen.llvm_rows import row_init
from stoker.ops.codegen.native import Kernel, arguments

__all__ = ["fetch_kernel", "mark", "store_kernel", "table_of"]

_AHEAD = 24  # rows to ask for before they are needed: about a DRAM latency's worth of work


@intrinsic
def _set_bits(typingctx, array, at, bits):
    """Atomically ``array[at] |= bits`` (int64)."""
    signature = types.void(array, types.intp, types.int64)

    def codegen(context, b, signature, args):
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        b.atomic_rmw("or", b.gep(data, [args[1]]), args[2], "monotonic")
        return context.get_dummy_value()

    return signature, codegen


@jit
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


@jit
def _mark_one(words, row):
    word, bit = row >> 6, np.int64(1) << (row & 63)
    if not words[word] & bit:  # nearly always set already: reading keeps the line shared between threads
        _set_bits(words, word, bit)


@jit
def mark(words, rows):
    """Set the bits of ``rows``; other threads may do so at the same time."""
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch(words, rows[i + _AHEAD] >> 6)
        _mark_one(words, rows[i])


@lru_cache(maxsize=64)
def fetch_kernel(dim: int, itemsize: int, first: int, second: int) -> Kernel:
    """Kernel that copies rows of a home to places of a target, or makes them where the home does not hold them.

    ``dim``, ``first`` and ``second`` are arguments of a run as well: those of which the kernel is made, or, if it is
    made with 0, any.
    """
    known, known_size, known_first, known_second = dim > 0, dim * itemsize, 4 * first, 4 * second

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
            given_dim,
            given_first,
            given_second,
            cursor,
            block,
        ) = arguments(p)
        columns = dim if known else given_dim
        width1 = first if known else given_first
        width2 = second if known else given_second
        size = known_size if known else given_dim * itemsize
        size1 = known_first if known else given_first * 4
        size2 = known_second if known else given_second * 4
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
                    prefetch_bytes(size, weight, row * columns)
                    prefetch_bytes(size1, state, row * width1)
                    prefetch_bytes(size2, state2, row * width2)
                    if placed:
                        prefetch_bytes(size, out, places[i + _AHEAD] * columns)
                if i < start:
                    continue
                row = rows[i]
                place = places[i] if placed else i
                if (words[row >> 6] >> (row & 63)) & 1:
                    row_move(size, out, place * columns, weight, row * columns)
                    row_move(size1, out_state, place * width1, state, row * width1)
                    row_move(size2, out_state2, place * width2, state2, row * width2)
                else:
                    table = table_of(first_row, row)
                    row_init(
                        columns, out, place * columns, keys[table], (row - first_row[table]) * columns, scales[table]
                    )
                    for d in range(width1):
                        out_state[place * width1 + d] = 0.0
                    for d in range(width2):
                        out_state2[place * width2 + d] = 0.0

    return Kernel(fetch)


@lru_cache(maxsize=64)
def store_kernel(dim: int, itemsize: int, first: int, second: int) -> Kernel:
    """Kernel that copies rows at places of a source to a home, and marks them held; arguments as above."""
    known, known_size, known_first, known_second = dim > 0, dim * itemsize, 4 * first, 4 * second

    def store(p):
        (
            rows,
            places,
            words,
            weight,
            state,
            state2,
            source,
            source_state,
            source_state2,
            given_dim,
            given_first,
            given_second,
            cursor,
            block,
        ) = arguments(p)
        columns = dim if known else given_dim
        width1 = first if known else given_first
        width2 = second if known else given_second
        size = known_size if known else given_dim * itemsize
        size1 = known_first if known else given_first * 4
        size2 = known_second if known else given_second * 4
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
                    prefetch_bytes(size, weight, row * columns)
                    prefetch_bytes(size1, state, row * width1)
                    prefetch_bytes(size2, state2, row * width2)
                    if placed:
                        prefetch_bytes(size, source, places[i + _AHEAD] * columns)
                if i < start:
                    continue
                row = rows[i]
                place = places[i] if placed else i
                row_move(size, weight, row * columns, source, place * columns)
                row_move(size1, state, row * width1, source_state, place * width1)
                row_move(size2, state2, row * width2, source_state2, place * width2)
                _mark_one(words, row)

    return Kernel(store)
