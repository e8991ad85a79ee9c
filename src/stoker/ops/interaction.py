"""DLRM's pairwise interaction, with the fastest implementation for the device.

Legend: B examples, F features, D columns, P = (F + 1) * F / 2 pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.ops import reference
from stoker.ops.cpu.arena import Arena, flat
from stoker.ops.space import HAVE_NUMBA, HAVE_TRITON

_MOST = 64  # vectors of an example for the kernels of a GPU
_BLOCK = 32  # examples handed out at a time
_arena = Arena()


def _width(embedded: Tensor, align: int) -> int:
    _, features, dim = embedded.shape
    return -(-(dim + (features + 1) * features // 2) // align) * align


def _forward(dense: Tensor, embedded: Tensor, align: int) -> Tensor:
    if dense.device.type != "cpu":
        from stoker.ops.gpu.dense import interaction

        return interaction(dense, embedded, _width(embedded, align))
    from stoker.ops.cpu.kernels import interaction_kernel

    batch, features, dim = embedded.shape
    width = _width(embedded, align)
    out = _arena.empty(batch, width)
    threads = torch.get_num_threads()
    stride = -(-(features + 1) // 16) * 16
    rows, columns = np.zeros((2, threads, stride * dim), np.float32)
    cursor = np.zeros(1, dtype=np.int64)
    interaction_kernel(dim).run(
        flat(dense), flat(embedded), flat(out), width, features, batch, cursor, _BLOCK, rows, columns, threads=threads
    )
    return out


def _backward(dense: Tensor, embedded: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if dense.device.type != "cpu":
        from stoker.ops.gpu.dense import interaction_gradient

        return interaction_gradient(dense, embedded, grad if grad.stride(1) == 1 else grad.contiguous())
    from stoker.ops.cpu.kernels import interaction_gradient_kernel

    batch, features, dim = embedded.shape
    # Feature by feature: the row update walks one table at a time, and so reads in order. The odd line keeps the
    # features of one example from evicting each other from the cache.
    stride = batch * dim + 16
    grad_dense, grad_embedded = _arena.empty(batch, dim), _arena.empty(features, stride)
    threads = torch.get_num_threads()
    interaction_gradient_kernel(dim).run(
        flat(dense), flat(embedded), flat(grad.to(torch.float32).contiguous()), grad.shape[1], flat(grad_dense),
        flat(grad_embedded), stride, features, batch, np.zeros(1, dtype=np.int64), _BLOCK,
        np.empty((threads, (features + 1) * dim), np.float32), threads=threads,
    )  # fmt: skip
    return grad_dense, grad_embedded.as_strided((batch, features, dim), (dim, stride, 1))


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, embedded: Tensor, align: int) -> Tensor:
        dense = dense.contiguous()
        if embedded.device.type == "cpu" or embedded.stride(2) != 1:
            embedded = embedded.contiguous()
        ctx.save_for_backward(dense, embedded)
        return _forward(dense, embedded, align)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dense, embedded = ctx.saved_tensors
        return *_backward(dense, embedded, grad), None


def _fast(embedded: Tensor) -> bool:
    if torch.compiler.is_exporting():  # an exported program runs where Stoker is not installed
        return False
    if embedded.dtype != torch.float32 or not len(embedded):
        return False
    if embedded.device.type == "cpu":
        return HAVE_NUMBA
    if not HAVE_TRITON or embedded.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return embedded.shape[1] < _MOST


@torch.library.custom_op("stoker::dot_interaction", mutates_args=())
def _opaque(dense: Tensor, embedded: Tensor) -> Tensor:
    """Compute the same for ``torch.compile``, which must not look inside."""
    return _forward(dense.contiguous(), embedded.contiguous(), 1).clone()


@torch.library.custom_op("stoker::dot_interaction_backward", mutates_args=())
def _opaque_backward(dense: Tensor, embedded: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_dense, grad_embedded = _backward(dense.contiguous(), embedded.contiguous(), grad)
    return grad_dense.clone(), grad_embedded.clone(memory_format=torch.contiguous_format)


@_opaque.register_fake
def _(dense: Tensor, embedded: Tensor) -> Tensor:
    return dense.new_empty(len(embedded), _width(embedded, 1))


@_opaque_backward.register_fake
def _(dense: Tensor, embedded: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dense), torch.empty_like(embedded)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_opaque.register_autograd(lambda ctx, grad: _opaque_backward(*ctx.saved_tensors, grad), setup_context=_save)


def dot_interaction(dense: Tensor, embedded: Tensor, *, align: int = 1) -> Tensor:
    """Return the dense vector, then the dot products of all pairs (Naumov et al. 2019, section 2.1): [B, D + P].

    ``dense`` is [B, D], ``embedded`` [B, F, D]. Equals :func:`stoker.ops.reference.dot_interaction` within rounding;
    the fast path takes float32 rows (on the CPU a bfloat16 dense vector is widened), and may append columns of zeros up
    to a multiple of ``align``: the next matrix product is faster on aligned rows.
    """
    if not _fast(embedded):
        return reference.dot_interaction(dense, embedded)
    if embedded.device.type == "cpu" or dense.dtype != torch.bfloat16:
        dense = dense.to(torch.float32)
    if torch.compiler.is_compiling():
        opaque: Tensor = _opaque(dense, embedded)
        return opaque
    result: Tensor = _Interaction.apply(dense, embedded, align)  # type: ignore[no-untyped-call]
    return result
