"""LAMB's two passes on the CPU, equal to :mod:`stoker.ops.lamb` to the bit.

Legend: U distinct rows of a batch, D (``dim``) columns, T tables.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from stoker.ops.codegen.llvm_memory import fetch_add, prefetch_row
from stoker.ops.codegen.llvm_rows import row_condition, row_lamb, row_sgd, row_squares
from stoker.ops.codegen.native import Kernel, arguments, thread_index
from stoker.ops.rule import COW

CONDITION = 15  # the flags of stoker.ops.rule.condition; row_lamb has more
BLOCK = 512  # rows of a work item
_AHEAD = 12  # rows to prefetch ahead
_MOST = 2.0**40  # stoker.ops.lamb
_LIMB = 2.0**40


@njit(inline="always")
def _add(limbs, table, sign, square):
    """Add a row's sum of squares to the integers of its table, or subtract it, as stoker.ops.lamb.squares."""
    rest = square if square <= _MOST else _MOST
    for limb in range(3):
        whole = np.floor(rest)
        limbs[table, limb] += sign * np.int64(whole)
        rest = (rest - whole) * _LIMB


@lru_cache(maxsize=64)
def direct_kernel(dim: int, flags: int) -> Kernel:
    """Make the kernel that turns gradients [U, D] into directions and sums their squares."""
    clipping = flags & CONDITION

    def direct(p):
        weight, mean, square, out, rows, table, counts, constants, limbs, cursor, block = arguments(p)
        mine = limbs[thread_index(p)]
        while True:
            start = fetch_add(cursor, block)
            if start >= len(rows):
                return
            for u in range(start, min(start + block, len(rows))):
                if u + _AHEAD < len(rows):
                    prefetch_row(dim, mean, rows[u + _AHEAD] * dim)
                    prefetch_row(dim, square, rows[u + _AHEAD] * dim)
                at = rows[u] * dim
                if clipping:
                    occurs = np.int64(0)
                    if clipping & COW:
                        occurs = counts[u]
                    row_condition(dim, clipping, out, u * dim, weight, at, occurs, constants)
                row_lamb(dim, flags, weight, at, mean, square, out, u * dim, constants)
                _add(mine, table[u], 1, row_squares(dim, out, u * dim))

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
                if u + _AHEAD < len(rows):
                    prefetch_row(dim, weight, rows[u + _AHEAD] * dim)
                row = rows[u]
                of = table[u]
                at = row * dim
                local = row - first_row[of]
                if row_in_slot.size > 0:  # the random bits of bfloat16 belong to the row, not to its slot
                    local = row_in_slot[row]
                _add(mine, of, -1, row_squares(dim, weight, at))
                row_sgd(dim, weight, at, directions, u * dim, scales[of], keys[of], local * dim)
                _add(mine, of, 1, row_squares(dim, weight, at))

    return Kernel(move)
