"""Takes what each group looks up from a batch, and puts what they found side by side, in the order of the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["columns_of", "side_by_side"]


def columns_of(table: Tensor, which: Tensor) -> Tensor:
    """``table[:, which]`` [B, K], contiguous. Indexing takes two to twenty times as long as the copies that do."""
    places = which.tolist()
    if places == list(range(places[0], places[-1] + 1)):
        return table[:, places[0] : places[-1] + 1].contiguous()
    if len(places) <= 8 and table.device.type == "cpu":
        return torch.stack([table[:, place] for place in places], dim=1)
    return table[:, which.to(table.device)]


def side_by_side(runs: Sequence[tuple[int, int, int]], pooled: Sequence[Tensor]) -> Tensor:
    """Stretches of ``pooled`` joined along the second dimension.

    Args:
        runs: (which of ``pooled``, first, stop) of each stretch; those of one tensor cover it, in its own order.
        pooled: [B, P, ...] each, with a P of its own.

    Returns:
        [B, sum of P, ...].
    """
    joined: Tensor = _Join.apply(runs, *pooled)  # type: ignore[no-untyped-call]
    return joined


class _Join(torch.autograd.Function):
    """Stretches of several tensors side by side along the second dimension.

    Cut and joined by autograd, every stretch would have a gradient as large as its whole tensor, to be added up.
    """

    @staticmethod
    def forward(ctx: Any, runs: list[tuple[int, int, int]], *pooled: Tensor) -> Tensor:
        ctx.runs = runs
        return torch.cat([pooled[group][:, first:stop] for group, first, stop in runs], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts: list[list[Tensor]] = [[] for _ in ctx.needs_input_grad[1:]]
        widths = [stop - first for _, first, stop in ctx.runs]
        for (group, _, _), part in zip(ctx.runs, gradient.split(widths, dim=1), strict=True):
            parts[group].append(part)  # the stretches of a group are in its own order
        needed = ctx.needs_input_grad[1:]
        # One stretch needs no copy: what follows takes any strides.
        joined = [each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in parts]
        return None, *(each if want else None for each, want in zip(joined, needed, strict=True))
