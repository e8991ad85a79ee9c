"""Which logical shards of a batch one thread computes together: few calls of large operations, and the same bits.

A library of matrix products may add in another order for another number of rows. So a node of the tree is computed at
once only if a trial has found that all numbers are those of its shards, one after the other: random examples of the
model's shapes, computed both ways. The order of a sum depends on shapes and threads, not on values. The model must
compute each example alone, and the sums for its parameters with :mod:`stoker.ops.by_shard`.

Legend: B examples, V shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stoker.models import RecModel
from stoker.ops.by_shard import Apart, Known, Moved, recorded, sums_by_shard, together
from stoker.ops.codegen.threads import kernel_threads
from stoker.ops.tree import Node, Shards, nodes_of, tree_sum
from stoker.tables.ranks.transport import checksum
from stoker.tables.shards import one_thread

_ALIGNED = 32  # examples of a shard: slices of tensors begin where whole ones do, and elementwise operations alike
_MOST = 4096  # examples at once: what they leave behind for backward has its place in the caches


class ThreadResult(NamedTuple):
    """What a thread has computed."""

    moved: list[Moved]
    loss: Tensor
    inputs: Sequence[Tensor | None]  # gradients of those that need one
    parameters: Sequence[Tensor | None]  # gradients


Compute = Callable[[Sequence[Tensor], Tensor, int], ThreadResult]


def compute_part(
    model: RecModel,
    parameters: Sequence[Tensor],
    count: int,
    known: Known,
    around: Callable[[], AbstractContextManager[None]],
    inputs: Sequence[Tensor],
    labels: Tensor,
    shards: int,
) -> ThreadResult:
    """Compute the loss over ``count`` of a node of the tree, and its gradients.

    Args:
        model: whose dense part is computed.
        parameters: its parameters.
        count: examples of the whole batch.
        known: of the step.
        around: enters the caller's autocast.
        inputs: of the examples of the node.
        labels: [B] of them.
        shards: of the node.

    Raises:
        Apart: the shards cannot be computed at once.
    """
    with recorded(known) as moved, together(shards), torch.enable_grad(), around():
        logits = model._logits(model.dense_part, tuple(inputs))
        wanted = [each for each in inputs if each.requires_grad]
        # As in stoker.ops.loss.
        x = logits.detach()
        losses = functional.softplus(x).addcmul_(x, labels, value=-1.0)
        [loss] = sums_by_shard(lambda each: [(each.sum() / count).float()], shards, losses)
        slopes = torch.sigmoid(x).sub_(labels).div_(count)
        found = torch.autograd.grad(logits, [*wanted, *parameters], slopes, allow_unused=True)
    return ThreadResult(moved, loss, found[: len(wanted)], found[len(wanted) :])


@cache
def bits_of_products() -> int:
    """Return a checksum of products: one kind of processor may have other bits by its maker or MKL_CBWR."""
    random = torch.Generator().manual_seed(0)
    with one_thread(), torch.autocast("cpu", enabled=False):
        x, y = torch.randn(2, 256, 100, generator=random, dtype=torch.float32, device="cpu")
        return checksum([x @ y.T, x.T @ y, x.bfloat16() @ y.bfloat16().T, x.sigmoid(), functional.softplus(x)])


class Together:
    """The nodes that threads compute at once.

    Args:
        model: of the shards.
    """

    def __init__(self, model: RecModel) -> None:
        kind = type(model)
        self._able = kind.__module__.startswith("stoker.models.") and kind.shards_at_once and model.device.type == "cpu"
        self._parameters = model.dense_parameters()
        self._same: dict[tuple[object, ...], bool] = {}  # what trials found

    def nodes(self, shards: Shards, inputs: Sequence[Tensor], part: Compute) -> list[Node]:
        """Return nodes that cover the shards: such as keep all threads busy, and have been found equal to their shards.

        Args:
            shards: consecutive ones.
            inputs: of their examples.
            part: computes a node.
        """
        rows, *others = {stop - start for start, stop in zip(shards.bounds, shards.bounds[1:], strict=False)}
        size = len(shards.numbers) // kernel_threads()
        if others or rows % _ALIGNED or not rows or not self._able:
            size = 1
        size = 1 << (max(1, min(size, _MOST // max(1, rows))).bit_length() - 1)
        while size > 1 and not self._fits(size, rows, inputs, part):
            size //= 2
        return [
            Node(start, min(size, node.size))
            for node in nodes_of(shards.numbers)
            for start in range(node.start, node.start + node.size, min(size, node.size))
        ]

    def _fits(self, size: int, rows: int, inputs: Sequence[Tensor], part: Compute) -> bool:
        """Return True if ``size`` shards of ``rows`` examples have the same numbers at once."""
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        shapes = tuple((each.dtype, each.shape[1:], each.requires_grad) for each in inputs)
        types = frozenset(each.dtype for each in self._parameters)
        key = size, rows, shapes, autocast, torch.get_float32_matmul_precision(), types
        if key not in self._same:
            with one_thread():
                self._same[key] = all(each.is_floating_point() for each in inputs) and _try(size, rows, inputs, part)
        return self._same[key]


def _try(size: int, rows: int, inputs: Sequence[Tensor], part: Compute) -> bool:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (size * rows,), generator=random).float()
    drawn = [torch.randn((size * rows, *each.shape[1:]), generator=random).to(each.dtype) for each in inputs]

    def found(start: int, stop: int, shards: int) -> list[Tensor | None]:
        own = [
            each[start:stop].clone().requires_grad_(like.requires_grad)
            for each, like in zip(drawn, inputs, strict=True)
        ]
        made = part(own, labels[start:stop], shards)
        return [*made.inputs, made.loss, *made.parameters]

    try:
        whole = found(0, size * rows, size)
    except Apart:
        return False
    alone = [found(at * rows, (at + 1) * rows, 1) for at in range(size)]
    count = sum(each.requires_grad for each in inputs)
    columns = list(zip(*alone, strict=True))
    wanted = [*map(_joined, columns[:count]), *(_added(each, size) for each in columns[count:])]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(whole, wanted, strict=True))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([each for each in parts if each is not None])


def _added(parts: Sequence[Tensor | None], size: int) -> Tensor | None:
    return tree_sum({Node(at, 1): each for at, each in enumerate(parts) if each is not None}, Node(0, size))
