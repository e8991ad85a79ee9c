"""LAMB on rows: Adam's direction of every touched row, then a step as long as its table is (You et al. 2020).

The trust ratio needs two norms of a whole table: of its rows, and of the directions of the rows that a batch touches.
A float sum would depend on its order, so on where the rows are and how a batch is chunked. So the squared norm of each
row is computed in float64, in one fixed order, and split into integers at 2^-40 and 2^-80. Integers may be added in any
order. The sum of a table is then a function of its rows, to the bit: a sum that adds the changes of touched rows equals
a fresh sum over all rows. A checkpoint does not need it.

Legend: U distinct rows of a batch, D columns, L ids, T tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.ops.distinct import distinct_rows
from stoker.ops.reference import Tensors, addresses, by_id, conditioned, row_norm_squared, stored
from stoker.ops.rule import RowRule, direction, moments
from stoker.ops.space import AddressSpace, Bags

_LIMB = 40  # bits of each fraction
_MOST = 2.0**40  # largest squared norm of a row that counts; not-a-number and infinity count as this
#: rows whose integers are added at a time: the sum stays at or below 2^62
ROWS = 2**22
_CHUNK = 2**16  # elements worked on at a time: they stay in the cache


def squares(rows: Tensor, table: Tensor | None = None, tables: int = 1) -> list[int]:
    """Return the sum of squares of each of T tables in units of 2^-80; only the norm of each row is rounded.

    ``rows`` are [U, D]; ``table`` [U] int64 is that of each row; None: table 0 has them all.
    """
    totals = [0] * tables
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        limbs = torch.zeros(3, tables, dtype=torch.int64, device=rows.device)
        size = max(1, _CHUNK // max(1, rows.shape[1]))
        norms = torch.cat(
            [row_norm_squared(part[at : at + size].to(torch.float64)) for at in range(0, len(part), size)]
        )
        rest = torch.nan_to_num(norms, nan=_MOST, posinf=_MOST).clamp(max=_MOST)
        for limb in limbs:
            whole = rest.floor()
            rest = (rest - whole) * 2.0**_LIMB  # exact: the remaining bits, shifted up
            if table is None:
                limb[0] = whole.to(torch.int64).sum()
            else:
                limb.index_add_(0, table[start : start + ROWS], whole.to(torch.int64))
        totals = [total + more for total, more in zip(totals, combined(limbs.T.cpu().numpy()[None]), strict=True)]
    return totals


def combined(limbs: npt.NDArray[np.int64]) -> list[int]:
    """Sum [n, T, 3] (integers, units of 2^-40, units of 2^-80) over the first axis, in units of 2^-80."""
    totals = [0] * limbs.shape[1]
    for part in limbs.tolist():
        for index, (high, middle, low) in enumerate(part):
            totals[index] += (high << 2 * _LIMB) + (middle << _LIMB) + low
    return totals


def trust_ratios(weights: Sequence[int], directions: Sequence[int], rule: RowRule) -> list[float]:
    """Return each table's ratio of norms, from their squares, within the rule's bounds; 1 if a norm is 0."""
    unit = 1 << 2 * _LIMB
    found = []
    for weight, step in zip(weights, directions, strict=True):
        ratio = 1.0
        if weight > 0 and step > 0:
            # Quotients of integers and roots are correctly rounded everywhere.
            ratio = math.sqrt(weight / unit) / math.sqrt(step / unit)
            ratio = min(max(ratio, rule.min_trust), rule.max_trust)
        found.append(ratio)
    return found


@dataclass(frozen=True)
class Touched:
    """The distinct rows of a batch."""

    rows: Tensor  # [U] int64 addresses
    table: Tensor  # [U] int64, the table of each
    tables: int  # T
    which: Tensor  # as the ids: the number of each lookup's row
    occurs: Tensor | None = None  # [U] int64, how often each occurs, if not as often as here

    @property
    def counts(self) -> Tensor:
        """Return how often each row occurs [U] int64."""
        if self.occurs is not None:
            return self.occurs
        return torch.bincount(self.which.reshape(-1), minlength=len(self.rows))


def touched(bags: Bags, space: AddressSpace) -> Touched:
    """Return the distinct rows of a batch. In slots only the feature determines the table of a row."""
    ids, device = bags.ids, bags.ids.device
    if device.type == "cpu":
        found, which = distinct_rows(bags, space)
        rows, which = torch.from_numpy(found), which.to(torch.int64)
    else:
        rows, which = torch.unique(addresses(ids, space.on(device).bases, bags.offsets), return_inverse=True)
        which = which.view(ids.shape)
    table = torch.zeros(len(rows), dtype=torch.int64, device=device)
    # Every lookup of a row writes the same number.
    table[which.reshape(-1)] = by_id(space.on(device).table_of, ids, bags.offsets).reshape(-1)
    return Touched(rows, table, len(space.names), which)


def direct(weight: Tensor, state: dict[str, Tensor], found: Touched, grad: Tensor, rule: RowRule) -> Tensor:
    """Update the moments of the rows ``found``, and return their directions [U, D] float32; no weight changes.

    ``weight`` and the moments in ``state`` are [C, D], ``grad`` is [U, D] float32.
    """
    dim = weight.shape[1]
    out = torch.empty(len(found.rows), dim, dtype=torch.float32, device=weight.device)
    size = max(1, _CHUNK // dim)
    c = rule.constants(dim)
    counts = found.counts if rule.counts else None
    for start in range(0, len(out), size):
        part = slice(start, start + size)
        some = found.rows[part]
        w, m, v = weight[some].to(torch.float32), state["exp_avg"][some], state["exp_avg_sq"][some]
        g = conditioned(grad[part], rule, w, None if counts is None else counts[part])
        m, v = moments(c, g, m, v)
        state["exp_avg"][some], state["exp_avg_sq"][some] = m, v
        u = direction(Tensors, c, m, v)
        out[part] = u + w * c.l2 if rule.l2 else u
    return out


def scales(ratios: Sequence[float], rule: RowRule) -> npt.NDArray[np.float32]:
    """Return the factor of each table's directions in a step [T], given its trust ratio."""
    return np.array([rule.lr * ratio for ratio in ratios], np.float32)


def move(
    weight: Tensor, found: Touched, directions: Tensor, ratios: Sequence[float], rule: RowRule,
    random: Callable[[Tensor], Tensor],
) -> list[int]:  # fmt: skip
    """Step along the ``directions`` [U, D]; return how much the sum of squares of each of T tables has grown.

    Args:
        weight: [C, D] float32 or bfloat16.
        found: distinct rows.
        directions: [U, D] float32.
        ratios: [T] trust ratio of each table.
        rule: constants.
        random: returns random bits [n, D] int64 for rows [n]; called only if they are bfloat16.
    """
    rows, table = found.rows, found.table
    before = squares(weight[rows], table, found.tables)
    factors = torch.from_numpy(scales(ratios, rule)).to(weight.device)
    size = max(1, _CHUNK // weight.shape[1])
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        some = rows[part]
        new = weight[some].to(torch.float32) - directions[part] * factors[table[part]].unsqueeze(1)
        bits = random(some) if weight.dtype == torch.bfloat16 else None
        weight[some] = stored(new, weight.dtype, bits)
    after = squares(weight[rows], table, found.tables)
    return [now - then for now, then in zip(after, before, strict=True)]
