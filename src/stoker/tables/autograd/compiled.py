"""Tables under ``torch.compile``: lookup and update as operators of torch's, so that graphs need not break.

The compiler sees two operators with known output shapes, and calls them as they are. A lookup in a compiled graph does
what a call does, but keeps no lease for its backward: rows are acquired again there.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["lookup", "register"]

_tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(tables: Any) -> None:
    """Let operators find ``tables`` by their number."""
    _tables[tables.number] = tables


def lookup(tables: Any, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
    """:meth:`EmbeddingTables.forward` as an operator."""
    trains = tables.training and tables.handle.requires_grad
    found: Tensor = torch.ops.stoker.lookup(tables.handle, ids, offsets, weights, tables.number, trains)[0]
    return found


@torch.library.custom_op("stoker::lookup", mutates_args=())
def _lookup(
    handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, number: int, trains: bool
) -> tuple[Tensor, Tensor]:
    tables = _tables[number]
    if trains:
        tables.check_loop()
    versions = torch.tensor([group.version for group in tables.groups])
    with torch.no_grad():
        return tables(ids, offsets, weights), versions


@_lookup.register_fake
def _(
    handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, number: int, trains: bool
) -> tuple[Tensor, Tensor]:
    tables = _tables[number]
    count = len(tables.features)
    batch = ids.shape[0]
    if offsets is not None:
        batch = (offsets.shape[0] - int(tables.include_last_offset)) // count
    out = handle.new_empty(tables.splitter.output_shape(batch), dtype=torch.float32)
    return out, torch.empty(len(tables.groups), dtype=torch.int64)


@torch.library.custom_op("stoker::lookup_backward", mutates_args=())
def _backward(
    grad: Tensor, handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, versions: Tensor,
    number: int, trains: bool, rows: bool, weighted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tables = _tables[number]
    tables.expect_gradient()
    wanted = tables.backward_of_call(
        grad, ids, offsets, weights, versions.tolist(), rows=rows, weights_wanted=weighted, trains=trains
    )
    none = grad.new_zeros(0)
    return torch.zeros_like(handle), none if wanted is None else wanted


@_backward.register_fake
def _(
    grad: Tensor, handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, versions: Tensor,
    number: int, trains: bool, rows: bool, weighted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wanted = torch.empty_like(weights) if weighted and weights is not None else grad.new_empty(0)
    return torch.empty_like(handle), wanted


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    handle, ids, offsets, weights, ctx.number, ctx.trains = inputs
    ctx.save_for_backward(handle, ids, offsets, weights, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    handle, ids, offsets, weights, versions = ctx.saved_tensors
    rows, weighted = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    marked, wanted = torch.ops.stoker.lookup_backward(
        grad, handle, ids, offsets, weights, versions, ctx.number, ctx.trains, rows, weighted
    )
    return marked if rows else None, None, None, wanted if weighted else None, None, None


_lookup.register_autograd(_gradients, setup_context=_setup)
