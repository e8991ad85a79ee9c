"""Puts what several groups found side by side, in the order of the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["apart", "side_by_side"]

Runs = Sequence[tuple[int, int, int]]


def side_by_side(runs: Runs, pooled: Sequence[Tensor]) -> Tensor:
    """Runs of ``pooled`` joined along the second dimension.

    Args:
        runs: (which of ``pooled``, first, stop) of each run; those of one tensor cover it, in its own order.
        pooled: [B, P, ...] each, with a P of its own.

    Returns:
        [B, sum of P, ...].
    """
    joined: Tensor = _Join.apply(runs, *pooled)  # type: ignore[no-untyped-call]
    return joined


def apart(runs: Runs, joined: Tensor) -> list[Tensor]:
    """The inverse of :func:`side_by_side`: [B, P, ...] of each tensor."""
    parts: list[list[Tensor]] = [[] for _ in range(1 + max(group for group, _, _ in runs))]
    widths = [stop - first for _, first, stop in runs]
    for (group, _, _), part in zip(runs, joined.split(widths, dim=1), strict=True):
        parts[group].append(part)  # the runs of a group are in its own order
    # One run needs no copy: what follows takes any strides.
    return [each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in parts]


class _Join(torch.autograd.Function):
    """Runs of several tensors side by side along the second dimension.

    Cut and joined by autograd, every run would have a gradient as large as its whole tensor, to be added up.
    """

    @staticmethod
    def forward(ctx: Any, runs: Runs, *pooled: Tensor) -> Tensor:
        ctx.runs = runs
        return torch.cat([pooled[group][:, first:stop] for group, first, stop in runs], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        joined = apart(ctx.runs, gradient)
        return None, *(each if want else None for each, want in zip(joined, needed, strict=True))
