"""Lookups for autograd, in a call and under ``torch.compile``.

The compiler sees two torch operators with known output shapes, and calls them unchanged, so graphs need not break. A
lookup in a compiled graph does the same as a call, but keeps no lease for its backward, which acquires the rows again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from stoker.base.errors import ConfigError
from stoker.ops import AddressSpace, Bags
from stoker.ops.cpu.arena import is_foreign
from stoker.ops.tree import Shards
from stoker.tables.lookups import Lookups
from stoker.tables.storage import Lease

_tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_traced = itertools.count()  # numbers of backwards in compiled graphs, which would else be merged if they are equal


class Gradient(NamedTuple):
    """The gradient that one backward of one lookup found."""

    group: int
    lookups: Lookups
    grad: Tensor  # [B, P, D]
    lease: Lease | None
    version: int = -1  # of ``grad``, if it is kept longer than its backward
    shards: Shards | None = None  # of the examples, if other ranks have more of them
    born: int = 0  # step of tables that grow at the lookup, whose rows may have been reset since

    def scaled(self, factor: float) -> Gradient:
        """Return the gradient times ``factor``."""
        return self._replace(grad=self.grad * factor, version=-1)

    def kept(self) -> Gradient:
        """Copy what a loop may change later: ids in its buffers, or its weights."""
        bags, space = self.lookups
        offsets, weights = (None if each is None else each.clone() for each in (bags.offsets, bags.weights))
        own = Lookups(Bags(bags.ids.clone(), offsets, weights, bags.mean), space)
        if self.lease is not None:
            self.lease.use(own.bags)
        return self._replace(lookups=own, version=self.grad._version)


class Forward(NamedTuple):
    """What a backward needs from its forward."""

    versions: Sequence[int]  # of the rows of each group
    trains: bool  # whether rows were in train mode
    enclosing: int = -1  # the backward that it ran in (:meth:`RowStepper.enclosing`)
    born: int = 0  # see :class:`Gradient`
    shards: Shards | None = None  # of the examples, if a model has said so


class _Call(NamedTuple):
    """The lookups of a call, for its backward; autograd keeps the tensors, and notices changes in place."""

    tables: Any
    spaces: list[AddressSpace]
    means: list[bool]
    leases: Sequence[Lease | None]
    forward: Forward


class Lookup(torch.autograd.Function):
    """Pooled lookups of all groups. The backward passes the gradient to the rows and returns none for them."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        tables: Any,
        many: Sequence[Lookups],
        leases: list[Lease | None],
        given: tuple[Tensor, Tensor | None] | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        own = None if tables.share is None else tables.share.shards
        forward = Forward(tables.versions, tables.training, tables._stepper.enclosing(), tables.born, own)
        found = tuple(tables.look_up(many, leases, given))
        bags = tables.kept(many)
        ctx.save_for_backward(*[getattr(each, name) for name in ("ids", "offsets", "weights") for each in bags])
        ctx.set_materialize_grads(False)  # for outputs that no loss depends on
        ctx.call = _Call(tables, [each.space for each in many], [each.mean for each in bags], leases, forward)
        return found

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
            # It waits until the rows step; kernels see memory, not that it is negated, as behind conj().
            grad = grad.to_dense() if grad.is_sparse else grad.clone() if is_foreign(grad) else grad.resolve_neg()
            found[5 + index] = call.tables.backward_of(
                index, Lookups(bags, call.spaces[index]), grad, call.leases[index], call.forward,
                rows=wanted[0], weights=wanted[5 + index],
            )  # fmt: skip
    return tuple(found)


# Tell autograd that the result cannot be differentiated again, under backward(create_graph=True).
_refused_twice = once_differentiable(_backward)


def check_modes(weights: Tensor | None = None) -> None:
    """Raise an error inside torch.func or torch.jit.trace, which see no rows, and for forward-mode ``weights``."""
    if weights is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(weights).tangent is not None:
        raise ConfigError(
            "per-sample weights have a tangent (torch.autograd.forward_ad), which a lookup would drop: it has a "
            "gradient only backward. Look rows up without weights, and multiply them outside."
        )
    if torch._C._are_functorch_transforms_active():
        raise ConfigError(
            "EmbeddingTables and TTEmbeddingBag were called inside a transform of torch.func (vmap, grad, jacrev, "
            "jvp), which sees parameters, but no rows that step inside backward. Look the rows up first, "
            "embedded = tables(ids), and transform the function of embedded."
        )
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(
            "torch.jit.trace records operations of PyTorch, but rows are looked up by other kernels. Trace the dense "
            "part with embedded rows as its input, or use torch.export: model.export_dense(batch)."
        )


def check_export() -> None:
    """Raise an error inside torch.export, whose programs leave this process."""
    if torch.compiler.is_exporting():
        raise ConfigError(
            "torch.export of a model with EmbeddingTables or TTEmbeddingBag would hold no rows. Export the dense part, "
            "which takes looked-up rows as its input: model.export_dense(batch) of a stoker model, or "
            "torch.export.export(dense_part, (tables(ids),)). TTEmbeddingBag.dense() gives the rows of a bag."
        )


def register(tables: Any) -> None:
    """Let operators find ``tables`` by their number."""
    _tables[tables.number] = tables


def compiled_lookup(tables: Any, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
    """Call :meth:`EmbeddingTables.forward` as an operator."""
    trains = tables.training and tables.handle.requires_grad
    found: Tensor = torch.ops.stoker.look_up(tables.handle, ids, offsets, weights, tables.number, trains)[0]
    return found


@torch.library.custom_op("stoker::look_up", mutates_args=())
def _lookup(
    handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, number: int, trains: bool
) -> tuple[Tensor, Tensor]:
    tables = _tables[number]
    if tables.divided:
        raise ConfigError("tables whose rows are divided among ranks cannot be compiled by torch.compile yet.")
    if tables.raw is not None:
        raise ConfigError("tables that grow cannot be compiled by torch.compile yet. Compile the dense part alone.")
    if trains:
        tables._stepper.check()
    versions = torch.tensor(tables.versions, device="cpu")
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
    return out, torch.empty(len(tables.groups), dtype=torch.int64, device="cpu")


@torch.library.custom_op("stoker::look_up_backward", mutates_args=())
def _lookup_backward(
    grad: Tensor, handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, versions: Tensor,
    number: int, trains: bool, rows: bool, weighted: bool, traced: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tables = _tables[number]
    tables._stepper.expect_gradient()
    # Rows step when the backward ends. By then the compiler has used the memory of the arguments for something else.
    bags = [None if each is None else each.clone() for each in (offsets, weights)]
    call = tables.splitter.check(ids.clone(), *bags, tables.groups[0].backend)
    wanted = tables.backward_of_call(
        grad.clone(), call, Forward(versions.tolist(), trains), rows=rows, weights=weighted
    )
    none = grad.new_zeros(0)
    return torch.zeros_like(handle), none if wanted is None else wanted


@_lookup_backward.register_fake
def _(
    grad: Tensor, handle: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, versions: Tensor,
    number: int, trains: bool, rows: bool, weighted: bool, traced: int,
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
    marked, wanted = torch.ops.stoker.look_up_backward(
        grad, handle, ids, offsets, weights, versions, ctx.number, ctx.trains, rows, weighted, next(_traced)
    )
    return marked if rows else None, None, None, wanted if weighted else None, None, None


_lookup.register_autograd(_gradients, setup_context=_setup)
