"""Lookups as autograd sees them: what a call keeps for its backward, and what its backward finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.ops import Bags
from stoker.tables.autograd.stepping import RowSteps
from stoker.tables.lookups import Lookups
from stoker.tables.storage import Lease

__all__ = ["Gradient", "Lookup"]


class Tables(Protocol):
    """What autograd needs of :class:`stoker.EmbeddingTables`."""

    training: bool
    groups: Any
    _steps: RowSteps

    def lease_for(
        self, index: int, lookups: Lookups, lease: Lease | None, given: tuple[Tensor, Tensor | None] | None = None
    ) -> Lease | None: ...

    def backward_of(
        self, index: int, lookups: Lookups, grad: Tensor, lease: Lease | None, version: int, *, rows: bool,
        weights: bool, trains: bool, enclosing: int = -1,
    ) -> Tensor | None: ...  # fmt: skip


class Gradient(NamedTuple):
    """What one backward of one lookup found."""

    group: int
    lookups: Lookups
    grad: Tensor  # [B, P, D]
    lease: Lease | None
    version: int = -1  # of ``grad``, where it is kept longer than its backward

    def scaled(self, factor: float) -> Gradient:
        return self._replace(grad=self.grad * factor, version=-1)

    def kept(self) -> Gradient:
        """The same for later, when a loop may have filled its buffers with other ids, or stepped its weights."""
        bags, space = self.lookups
        offsets, weights = (None if each is None else each.clone() for each in (bags.offsets, bags.weights))
        own = Lookups(Bags(bags.ids.clone(), offsets, weights, bags.mean), space)
        if self.lease is not None:
            self.lease.use(own.bags)
        return self._replace(lookups=own, version=self.grad._version)


class _Call:
    """What a call looked up, for its backward; tensors are kept by autograd, which notices changes in place."""

    __slots__ = ("enclosing", "leases", "means", "spaces", "tables", "trains", "versions")

    def __init__(self, tables: Tables, many: Sequence[Lookups], leases: Sequence[Lease | None]) -> None:
        self.tables, self.leases = tables, leases
        self.spaces, self.means = [each.space for each in many], [each.bags.mean for each in many]
        self.trains, self.enclosing = tables.training, tables._steps.enclosing()
        self.versions = [group.version for group in tables.groups]


class Lookup(torch.autograd.Function):
    """Pooled lookups of all groups, whose backward gives the rows their gradient, and returns none for them."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        tables: Tables,
        many: Sequence[Lookups],
        leases: list[Lease | None],
        given: tuple[Tensor, Tensor | None],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        bags = [each.bags for each in many]
        ctx.save_for_backward(*[each.ids for each in bags], *[each.offsets for each in bags], *weights)
        ctx.set_materialize_grads(False)  # of outputs that no loss depends on
        ctx.call = _Call(tables, many, leases)
        found = []
        for index, each in enumerate(many):
            leases[index] = lease = tables.lease_for(index, each, leases[index], given)
            found.append(tables.groups[index].lookup(each, lease))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = (_refused_twice if torch.is_grad_enabled() else _backward)(ctx, *grads)
        return found


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    call: _Call = ctx.call
    saved, count, wanted = ctx.saved_tensors, len(grads), ctx.needs_input_grad
    found: list[Tensor | None] = [None] * (5 + count)
    for index, grad in enumerate(grads):
        if grad is not None:
            bags = Bags(saved[index], saved[count + index], saved[2 * count + index], call.means[index])
            found[5 + index] = call.tables.backward_of(
                index, Lookups(bags, call.spaces[index]), grad, call.leases[index], call.versions[index],
                rows=wanted[0], weights=wanted[5 + index], trains=call.trains, enclosing=call.enclosing,
            )  # fmt: skip
    return tuple(found)


# Under backward(create_graph=True): what it returns cannot be differentiated again, and autograd is told so.
_refused_twice = once_differentiable(_backward)
