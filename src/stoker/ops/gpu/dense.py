"""Triton kernels of the dense part: pairwise interaction, the loss, and what a ReLU and a bias need in the backward.

Each reads its operands once and writes its results once: unfused, DLRM's interaction moves four times the bytes. They
equal :mod:`stoker.ops.reference` within rounding. Products have the precision of torch's matrix products.

Legend: B examples, F features, D columns, P = (F + 1) * F / 2 pairs. A program has VECTORS >= F + 1 vectors of one
example and BLOCK columns, or ROWS rows and BLOCK columns.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.gpu.kernels import on

_ROWS = 128  # of a tile whose columns are summed


@triton.jit
def _vectors(
    dense, embedded, vector, column, F: tl.constexpr, D: tl.constexpr, FEATURE: tl.constexpr, HALF: tl.constexpr
):
    """Load the dense vector and those of the features: [VECTORS, BLOCK] float32, rounded to bfloat16 if HALF."""
    within = column < D
    first = tl.load(dense + column, mask=within, other=0.0).to(tl.float32)[None, :]
    place = (vector - 1)[:, None] * FEATURE + column[None, :]
    mask = ((vector > 0) & (vector <= F))[:, None] & within[None, :]
    z = tl.where((vector == 0)[:, None], first, tl.load(embedded + place, mask=mask, other=0.0))
    if HALF:  # products of such numbers are exact in TF32
        z = z.to(tl.bfloat16).to(tl.float32)
    return z


@triton.jit
def interaction_kernel(
    dense, embedded, out, F: tl.constexpr, D: tl.constexpr, DENSE: tl.constexpr, EXAMPLE: tl.constexpr,
    FEATURE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, VECTORS: tl.constexpr,
    BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Write the dense vector, the products of all pairs, and zeros up to WIDTH."""
    example = tl.program_id(0).to(tl.int64)
    dense += example * DENSE
    embedded += example * EXAMPLE
    out += example * WIDTH
    vector = tl.arange(0, VECTORS)
    total = tl.zeros([VECTORS, VECTORS], tl.float32)
    for first in tl.static_range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = _vectors(dense, embedded, vector, column, F, D, FEATURE, HALF)
        total = tl.dot(z, tl.trans(z), total, input_precision=PRECISION)
        tl.store(out + column, tl.load(dense + column, mask=column < D).to(out.dtype.element_ty), mask=column < D)
    high, low = vector[:, None], vector[None, :]
    place = D + high * (high - 1) // 2 + low
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(low < high) & (high <= F))
    last = D + (F + 1) * F // 2 + tl.arange(0, PAD)
    tl.store(out + last, tl.zeros([PAD], out.dtype.element_ty), mask=last < WIDTH)


@triton.jit
def interaction_gradient_kernel(
    dense, embedded, grad, grad_dense, grad_embedded, F: tl.constexpr, D: tl.constexpr, DENSE: tl.constexpr,
    EXAMPLE: tl.constexpr, FEATURE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the dense vector [B, D] and of the features [B, F, D]; WIDTH: from row to row of grad."""
    example = tl.program_id(0).to(tl.int64)
    dense += example * DENSE
    embedded += example * EXAMPLE
    grad += example * WIDTH
    vector = tl.arange(0, VECTORS)
    high = tl.maximum(vector[:, None], vector[None, :])
    low = tl.minimum(vector[:, None], vector[None, :])
    place = D + high * (high - 1) // 2 + low
    pairs = tl.load(grad + place, mask=(low < high) & (high <= F), other=0.0).to(tl.float32)
    for first in tl.static_range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = _vectors(dense, embedded, vector, column, F, D, FEATURE, HALF)
        found = tl.dot(pairs, z, input_precision=PRECISION)
        within = (column < D)[None, :]
        to = (example * F + vector - 1)[:, None] * D + column[None, :]
        tl.store(grad_embedded + to, found, mask=((vector > 0) & (vector <= F))[:, None] & within)
        found += tl.load(grad + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        to = example * D + vector[:, None] + column[None, :]
        tl.store(grad_dense + to, found.to(grad_dense.dtype.element_ty), mask=(vector == 0)[:, None] & within)


def _layout(dense: Tensor, embedded: Tensor) -> dict[str, object]:
    _, features, dim = embedded.shape
    half = dense.dtype == torch.bfloat16
    exact = torch.get_float32_matmul_precision() == "highest" and not half
    vectors = max(16, triton.next_power_of_2(features + 1))
    return {
        "F": features, "D": dim, "DENSE": dense.stride(0), "EXAMPLE": embedded.stride(0), "FEATURE": embedded.stride(1),
        "HALF": half, "PRECISION": "ieee" if exact else "tf32", "VECTORS": vectors,
        "BLOCK": min(64, max(16, triton.next_power_of_2(dim))), "num_warps": 4 if features < 32 else 8,
    }  # fmt: skip


def interaction(dense: Tensor, embedded: Tensor, width: int) -> Tensor:
    """Return [B, width] in the type of ``dense`` [B, D]; ``embedded`` is [B, F, D] float32. Columns are contiguous."""
    out = torch.empty(len(dense), width, dtype=dense.dtype, device=dense.device)
    with on(dense.device):
        interaction_kernel[len(dense),](dense, embedded, out, WIDTH=width, PAD=16, **_layout(dense, embedded))
    return out


def interaction_gradient(dense: Tensor, embedded: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`interaction`'s operands, from ``grad`` [B, width] with contiguous columns."""
    grad_dense = torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
    grad_embedded = torch.empty(embedded.shape, dtype=torch.float32, device=dense.device)
    with on(dense.device):
        interaction_gradient_kernel[len(dense),](
            dense, embedded, grad, grad_dense, grad_embedded, WIDTH=grad.stride(0), **_layout(dense, embedded)
        )
    return grad_dense, grad_embedded


@triton.jit(do_not_specialize=["rows"])
def relu_gradient_kernel(
    grad, output, into, sums, rows, columns: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write ``grad`` [rows, columns] where ``output`` is above 0, else 0, and the sums of each tile's columns."""
    tile = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([8, BLOCK], tl.float32)
    for first in range(0, ROWS, 8):
        row = tile * ROWS + first + tl.arange(0, 8)
        at = row[:, None] * columns + column[None, :]
        live = (row < rows)[:, None] & (column < columns)[None, :]
        stopped = tl.load(output + at, mask=live, other=0.0).to(tl.float32) <= 0.0  # not-a-numbers pass, as in torch
        value = tl.where(stopped, 0.0, tl.load(grad + at, mask=live, other=0.0).to(tl.float32))
        tl.store(into + at, value.to(into.dtype.element_ty), mask=live)
        total += value
    tl.store(sums + tile * columns + column, tl.sum(total, axis=0), mask=column < columns)


def relu_gradient(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient through a ReLU, and its sums by tile of rows [tiles, n] float32, in a fixed order.

    Args:
        grad: [B, n], of the ReLU's ``output`` [B, n]; both contiguous and of one type.
        output: [B, n].
    """
    rows, columns = grad.shape
    tiles, block = triton.cdiv(rows, _ROWS), min(128, triton.next_power_of_2(columns))
    into = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    sums = torch.empty(tiles, columns, dtype=torch.float32, device=grad.device)
    with on(grad.device):
        relu_gradient_kernel[tiles, triton.cdiv(columns, block)](
            grad, output, into, sums, rows, columns=columns, ROWS=_ROWS, BLOCK=block, num_warps=max(1, block // 32)
        )
    return into, sums


@triton.jit(do_not_specialize=["count"])
def loss_kernel(logits, labels, slopes, loss, count, SIZE: tl.constexpr):
    """Write the mean binary cross entropy and its gradient ``slopes`` [count]. One program: it adds in a fixed order."""
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, count, SIZE):
        at = first + tl.arange(0, SIZE)
        live = at < count
        x = tl.load(logits + at, mask=live, other=0.0)
        y = tl.load(labels + at, mask=live, other=0.0)
        small = tl.exp(-tl.abs(x))
        whole = 1.0 + small
        rest = whole - 1.0  # log(1 + small) without the loss of digits (Kahan)
        softplus = tl.where(rest == 0.0, small, tl.log(whole) * (small / tl.where(rest == 0.0, 1.0, rest)))
        total += tl.where(live, tl.maximum(x, 0.0) + softplus - x * y, 0.0)
        tl.store(slopes + at, (tl.where(x < 0.0, small, 1.0) / whole - y) / count, mask=live)
    tl.store(loss, tl.sum(total, axis=0) / count)


def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean binary cross entropy of ``logits`` and ``labels``, [B] float32 each, and its gradient [B]."""
    logits, labels, count = logits.contiguous(), labels.contiguous(), len(logits)
    slopes, mean = torch.empty_like(logits), torch.empty((), device=logits.device)
    with on(logits.device):
        loss_kernel[1,](
            logits, labels, slopes, mean, count, SIZE=min(8192, triton.next_power_of_2(count)), num_warps=16
        )
    return mean, slopes
