"""Numba kernels of LAMB's two passes, specialised by row width. They equal :mod:`stoker.ops.lamb` to the bit.

Legend: U distinct rows of a batch, D (``dim``) columns, T tables.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stoker.ops.codegen.llvm_memory import fetch_add, prefetch
from stoker.ops.codegen.llvm_rows import (
    CLIP_NORM,
    CLIP_VALUE,
    COW,
    DECAY,
    L2,
    row_condition,
    row_lamb,
    row_sgd,
    row_squares,
)
from stoker.ops.codegen.native import Kernel, arguments, thread_index

_LINE = 16  # float32 elements in a cache line
_AHEAD = 12  # rows to ask for before they are needed
_MOST = 2.0**40  # stoker.ops.lamb
_LIMB = 2.0**40


@lru_cache(maxsize=64)
def direct_kernel(dim: int, flags: int) -> Kernel:
    """Kernel that turns gradients [U, D] into directions, and adds up their squares."""
    clipping = flags & (CLIP_VALUE | CLIP_NORM | COW) | (DECAY if flags & L2 else 0)

    def direct(p):
        weight, mean, square, out, rows, table, counts, limits, constants, limbs, cursor, block = arguments(p)
        mine = limbs[thread_index(p)]
        while True:
            start = fetch_add(cursor, block)
            if start >= len(rows):
                return
            for u in range(start, min(start + block, len(rows))):
                if u + _AHEAD < len(rows):
                    ahead = rows[u + _AHEAD] * dim
                    for line in range(0, dim, _LINE):
                        prefetch(mean, ahead + line)
                        prefetch(square, ahead + line)
                at = rows[u] * dim
                if clipping:
                    occurs = np.int64(0)
                    if clipping & COW:
                        occurs = counts[u]
                    row_condition(
                        dim,
                        clipping,
                        out,
                        u * dim,
                        weight,
                        at,
                        limits[0],
                        limits[1],
                        limits[4],
                        occurs,
                        limits[2],
                        limits[3],
                    )
                row_lamb(dim, flags, weight, at, mean, square, out, u * dim, constants)
                rest = row_squares(dim, out, u * dim)
                if not rest <= _MOST:
                    rest = _MOST
                for limb in range(3):
                    whole = np.floor(rest)
                    mine[table[u], limb] += np.int64(whole)
                    rest = (rest - whole) * _LIMB

    return Kernel(direct)


@lru_cache(maxsize=64)
def move_kernel(dim: int) -> Kernel:
    """Kernel that steps along directions [U, D], and adds up by how much the rows' squares grow."""

    def move(p):
        weight, directions, rows, table, scales, first_row, row_in_slot, keys, limbs, cursor, block = arguments(p)
        mine = limbs[thread_index(p)]
        while True:
            start = fetch_add(cursor, block)
            if start >= len(rows):
                return
            for u in range(start, min(start + block, len(rows))):
                if u + _AHEAD < len(rows):
                    for line in range(0, dim, _LINE):
                        prefetch(weight, rows[u + _AHEAD] * dim + line)
                row = rows[u]
                of = table[u]
                at = row * dim
                local = row - first_row[of]
                if row_in_slot.size > 0:  # the random bits of bfloat16 belong to the row, not to its slot
                    local = row_in_slot[row]
                for sign in (-1, 1):
                    if sign > 0:
                        row_sgd(dim, weight, at, directions, u * dim, scales[of], keys[of], local * dim)
                    rest = row_squares(dim, weight, at)
                    if not rest <= _MOST:
                        rest = _MOST
                    for limb in range(3):
                        whole = np.floor(rest)
                        mine[of, limb] += sign * np.int64(whole)
                        rest = (rest - whole) * _LIMB

    return Kernel(move)
