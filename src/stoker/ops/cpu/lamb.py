"""LAMB's two passes on the CPU, by kernels; arguments and results as in :mod:`stoker.ops.lamb`, equal to the bit.

Legend: U distinct rows of a batch, D (``dim``) columns, T tables.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from stoker.ops.codegen.llvm_memory import fetch_add, prefetch_row
from stoker.ops.codegen.llvm_rows import (
    CLIP_NORM,
    CLIP_VALUE,
    COW,
    DECAY,
    L2,
    MOVE,
    row_condition,
    row_lamb,
    row_sgd,
    row_squares,
)
from stoker.ops.codegen.native import Kernel, arguments, thread_index
from stoker.ops.cpu.arena import flat
from stoker.ops.lamb import combined
from stoker.ops.rule import RowRule
from stoker.ops.space import AddressSpace, Rounding

_NO_COUNTS = np.zeros(0, dtype=np.int64)
_BLOCK = 512  # rows handed out at a time


def direct(
    weight: Tensor, state: dict[str, Tensor], rows: Tensor, table: Tensor, tables: int, grad: Tensor | None,
    rule: RowRule, counts: Tensor | None,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """The directions, in the place of ``grad``, and the sum of squares of those of each table."""
    dim, threads = weight.shape[1], torch.get_num_threads()
    flags = DECAY if rule.weight_decay else 0
    if grad is not None:
        flags |= MOVE
        flags |= CLIP_VALUE if rule.clip_value != math.inf else 0
        flags |= CLIP_NORM if rule.clip_norm != math.inf else 0
        flags |= COW if rule.cow_ratio != math.inf else 0
        flags |= L2 if rule.l2 else 0
    out = torch.empty(len(rows), dim, dtype=torch.float32) if grad is None else grad
    limbs = np.zeros((threads, tables, 3), dtype=np.int64)
    if len(rows):
        constants = (
            rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, 1.0 / rule.bias1, 1.0 / math.sqrt(rule.bias2),
            rule.eps, rule.weight_decay,
        )  # fmt: skip
        limits = (rule.clip_value, rule.clip_norm, rule.cow_ratio, rule.cow_floor, rule.l2)
        direct_kernel(dim, flags).run(
            flat(weight), flat(state["exp_avg"]), flat(state["exp_avg_sq"]), flat(out), rows.numpy(), table.numpy(),
            _NO_COUNTS if counts is None else counts.numpy(), np.array(limits, dtype=np.float32),
            np.array(constants, dtype=np.float32), limbs, np.zeros(1, dtype=np.int64), _BLOCK, threads=threads,
        )  # fmt: skip
    return out, combined(limbs)


def move(
    weight: Tensor, rows: Tensor, table: Tensor, directions: Tensor, ratios: list[float], rule: RowRule,
    rounding: Rounding, space: AddressSpace,
) -> list[int]:  # fmt: skip
    """Step along the directions; by how much the sum of squares of each table has grown."""
    dim, threads = weight.shape[1], torch.get_num_threads()
    limbs = np.zeros((threads, len(ratios), 3), dtype=np.int64)
    if len(rows):
        move_kernel(dim).run(
            flat(weight), flat(directions), rows.numpy(), table.numpy(),
            np.array([rule.lr * ratio for ratio in ratios], dtype=np.float32), space.first_row,
            _NO_COUNTS if rounding.rows is None else rounding.rows.numpy(),
            np.array(rounding.keys or (0,) * len(ratios), dtype=np.int64), limbs, np.zeros(1, dtype=np.int64), _BLOCK,
            threads=threads,
        )  # fmt: skip
    return combined(limbs)


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
                    prefetch_row(dim, mean, rows[u + _AHEAD] * dim)
                    prefetch_row(dim, square, rows[u + _AHEAD] * dim)
                at = rows[u] * dim
                if clipping:
                    occurs = np.int64(0)
                    if clipping & COW:
                        occurs = counts[u]
                    row_condition(
                        dim, clipping, out, u * dim, weight, at, limits[0], limits[1], limits[4], occurs, limits[2],
                        limits[3],
                    )  # fmt: skip
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
                    prefetch_row(dim, weight, rows[u + _AHEAD] * dim)
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
