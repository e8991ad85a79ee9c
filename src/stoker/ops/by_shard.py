"""Operations on the rows of several logical shards at once, with the bits of one shard after the other.

The examples of a shard, and so the shards, do not depend on each other: only the gradients of parameters are sums over
examples. These operations make such a sum for each shard alone, and add the sums by the tree of :mod:`stoker.ops.tree`.

A shard does not change a running average of batch norm while several threads compute shards. Its new value is recorded,
and applied later in the order of shards. Tensors that depend on weights alone are computed once a step.

Legend: B examples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_local = threading.local()


class Apart(Exception):  # no error: the shards are then computed one by one
    """The shards at hand need operations that differ among them."""


@contextmanager
def together(shards: int) -> Iterator[None]:
    """Let this thread compute ``shards`` of equal size, a power of two, from the same tensors."""
    _local.shards = shards
    try:
        yield
    finally:
        _local.shards = 1


def shards_here() -> int:
    """Return how many shards this thread computes from the same tensors."""
    return 1 if torch.compiler.is_compiling() else getattr(_local, "shards", 1)


def sums_by_shard(sums: Callable[..., Sequence[Tensor]], shards: int, *rows: Tensor) -> Sequence[Tensor]:
    """Return ``sums(*rows)`` over the first dimension; over several shards, in float32 and added by the tree.

    >>> [found] = sums_by_shard(lambda part: [part.sum(0)], 4, torch.arange(8.0))
    >>> found
    tensor(28.)
    """
    if shards == 1:
        return sums(*rows)
    first, second = (
        [each.float() for each in sums_by_shard(sums, shards // 2, *half)]
        for half in zip(*(each.chunk(2) for each in rows), strict=True)
    )
    return [a.add_(b) for a, b in zip(first, second, strict=True)]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.shards, ctx.has_bias = shards_here(), bias is not None
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors

        def sums(grad: Tensor, x: Tensor) -> list[Tensor]:
            return [grad.t() @ x, *([grad.sum(0)] if ctx.has_bias else [])]

        found = sums_by_shard(sums, ctx.shards, grad.contiguous(), x)
        return grad @ weight if ctx.needs_input_grad[0] else None, *found, *(() if ctx.has_bias else (None,))


def through(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``layer(x)`` for x [B, in]; of several shards, from its parameters."""
    return layer(x) if shards_here() == 1 else linear(x, layer.weight, layer.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)`` for x [B, in].

    Raises:
        Apart: several shards under autocast.
    """
    if shards_here() == 1:
        return functional.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        raise Apart
    found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _EachRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, rows: int) -> Tensor:
        ctx.shards = shards_here()
        return parameter.expand(rows, *parameter.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        [found] = sums_by_shard(lambda part: [part.sum(0)], ctx.shards, grad)
        return found, None


def each_row(parameter: Tensor, like: Tensor) -> Tensor:
    """Return a parameter [...] for elementwise operations with tensors [B, ...], such as ``like``."""
    if shards_here() == 1:
        return parameter
    found: Tensor = _EachRow.apply(parameter, len(like))  # type: ignore[no-untyped-call]
    return found


#: what shards of a step have made of weights
Known = dict[tuple[int, Callable[..., Tensor], tuple[object, ...]], tuple[Tensor, Tensor]]


class Moved(NamedTuple):
    """A running average, a new value, and the value's weight; or a number of batches, which grows by the value."""

    average: Tensor
    value: Tensor
    weight: float


def move(average: Tensor, value: Tensor, weight: float) -> None:
    """Move a running average towards ``value``, or record it."""
    found = Moved(average, value.detach(), weight)
    records: list[Moved] | None = getattr(_local, "records", None)
    if records is None:
        move_all([found])
    else:
        records.append(found)


def count_batch(batches: Tensor) -> None:
    """Add 1 to a number of batches, or record it."""
    if getattr(_local, "records", None) is None:
        batches.add_(1)  # on a GPU one kernel
    else:
        move(batches, torch.ones_like(batches), 1.0)


def averages(
    mean: Tensor | None, var: Tensor | None, weight: float, moves: bool
) -> tuple[Tensor | None, Tensor | None, float]:
    """Return which averages batch norm moves, and by which weight: where it is recorded, fresh ones by 1."""
    if not moves or mean is None or var is None or getattr(_local, "records", None) is None:
        return mean, var, weight
    moments = torch.zeros_like(mean), torch.zeros_like(var)
    for average, value in zip((mean, var), moments, strict=True):
        move(average, value, weight)  # batch norm writes the value later
    return *moments, 1.0


def move_all(found: Iterable[Moved]) -> None:
    """Move the averages, in this order."""
    with torch.no_grad():
        for average, value, weight in found:
            if average.is_floating_point():
                average.lerp_(value.to(average.dtype), weight)
            else:
                average.add_(value)


def once(weight: Tensor, make: Callable[..., Tensor], *given: object) -> Tensor:
    """Return ``make(weight, *given)``, which another shard of this step may have made."""
    known: Known | None = getattr(_local, "known", None)
    if known is None:
        return make(weight, *given)
    key = weight.data_ptr(), make, given
    if (found := known.get(key)) is None:
        found = known[key] = weight, make(weight, *given)  # keeps the weight, so that no other gets its address
    return found[1]


@contextmanager
def recorded(known: Known | None = None) -> Iterator[list[Moved]]:
    """Record the averages of this thread in the block; ``known``: of the step."""
    _local.records, _local.known = [], known
    try:
        yield _local.records
    finally:
        _local.records = _local.known = None
