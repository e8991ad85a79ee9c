"""LAMB's two passes on the CPU, by kernels; arguments and results as in :mod:`stoker.ops.lamb`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stoker.ops.bags import Rounding
from stoker.ops.codegen.llvm_rows import CLIP_NORM, CLIP_VALUE, COW, DECAY, L2, MOVE
from stoker.ops.cpu import lamb_kernels as kernels
from stoker.ops.lamb import combined
from stoker.ops.rule import RowRule
from stoker.ops.space import AddressSpace

_NO_COUNTS = np.zeros(0, dtype=np.int64)
_BLOCK = 512  # rows handed out at a time


def _flat(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor; bfloat16 as uint16."""
    array: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).reshape(-1).numpy()
    return array


def direct(
    weight: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    table: Tensor,
    tables: int,
    grad: Tensor | None,
    rule: RowRule,
    counts: Tensor | None,
) -> tuple[Tensor, list[int]]:
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
        kernels.direct_kernel(dim, flags).run(
            _flat(weight),
            _flat(state["exp_avg"]),
            _flat(state["exp_avg_sq"]),
            _flat(out),
            rows.numpy(),
            table.numpy(),
            _NO_COUNTS if counts is None else counts.numpy(),
            np.array(limits, dtype=np.float32),
            np.array(constants, dtype=np.float32),
            limbs,
            np.zeros(1, dtype=np.int64),
            _BLOCK,
            threads=threads,
        )
    return out, combined(limbs)


def move(
    weight: Tensor,
    rows: Tensor,
    table: Tensor,
    directions: Tensor,
    ratios: list[float],
    rule: RowRule,
    rounding: Rounding,
    space: AddressSpace,
) -> list[int]:
    """Step along the directions; by how much the sum of squares of each table has grown."""
    dim, threads = weight.shape[1], torch.get_num_threads()
    limbs = np.zeros((threads, len(ratios), 3), dtype=np.int64)
    if len(rows):
        kernels.move_kernel(dim).run(
            _flat(weight),
            _flat(directions),
            rows.numpy(),
            table.numpy(),
            np.array([rule.lr * ratio for ratio in ratios], dtype=np.float32),
            space.first_row,
            _NO_COUNTS if rounding.rows is None else rounding.rows.numpy(),
            np.array(rounding.keys or (0,) * len(ratios), dtype=np.int64),
            limbs,
            np.zeros(1, dtype=np.int64),
            _BLOCK,
            threads=threads,
        )
    return combined(limbs)
