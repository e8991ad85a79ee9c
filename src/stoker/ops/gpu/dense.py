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
    grad, output, weight, into, sums, totals, counter, rows, columns: tl.constexpr, OUTER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``grad`` [rows, columns] where ``output`` is above 0, else 0, and the sums of its columns to ``totals``.

    OUTER: ``grad`` [rows] times ``weight`` [columns] takes its place; ``totals`` [2 * columns + 1] gets the sums of
    ``grad * output``, too, and that of ``grad``. ``counter`` [blocks of columns] is 0 before and after.
    """
    tile, tiles = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within, WIDTH = column < columns, 2 * columns + 1 if OUTER else columns
    total, product, alone = (
        tl.zeros([8, BLOCK], tl.float32),
        tl.zeros([8, BLOCK], tl.float32),
        tl.zeros([8], tl.float32),
    )
    if OUTER:
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
    for first in range(0, ROWS, 8):
        row = tile * ROWS + first + tl.arange(0, 8)
        at = row[:, None] * columns + column[None, :]
        live = (row < rows)[:, None] & within[None, :]
        value = tl.load(output + at, mask=live, other=0.0).to(tl.float32)
        if OUTER:
            slope = tl.load(grad + row, mask=row < rows, other=0.0).to(tl.float32)
            product += slope[:, None] * value
            alone += slope
            given = slope[:, None] * factor
        else:
            given = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
        given = tl.where(value <= 0.0, 0.0, given)  # not-a-numbers pass, as in torch
        tl.store(into + at, given.to(into.dtype.element_ty), mask=live)
        total += given
    own = sums + tile * WIDTH
    tl.store(own + column, tl.sum(total, axis=0), mask=within)
    if OUTER:
        tl.store(own + columns + column, tl.sum(product, axis=0), mask=within)
        tl.store(own + 2 * columns, tl.sum(alone, axis=0))
    # The last program of these columns adds the sums of all tiles, in their order whichever program is last.
    tl.debug_barrier()
    done = tl.atomic_add(counter + tl.program_id(1), 1, sem="acq_rel")
    if done == tiles - 1:
        tl.store(counter + tl.program_id(1), 0)
        for part in tl.static_range(3 if OUTER else 1):
            place = part * columns + (column if part < 2 else tl.zeros([BLOCK], tl.int32))
            total = tl.zeros([8, BLOCK], tl.float32)
            for first in range(0, tiles, 8):
                other = first + tl.arange(0, 8)
                live = (other < tiles)[:, None] & within[None, :]
                total += tl.load(
                    sums + other[:, None] * WIDTH + place[None, :], mask=live, other=0.0, cache_modifier=".cg"
                )
            tl.store(totals + place, tl.sum(total, axis=0), mask=within)


_counters: dict[object, Tensor] = {}


def _counter(device: torch.device, blocks: int) -> Tensor:
    """Return at least ``blocks`` zeros; every stream has its own, because kernels of two may run at once."""
    stream = None
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # each graph has its own, whichever graph runs first
            return torch.zeros(blocks, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device)
    if (device, stream) not in _counters or len(_counters[device, stream]) < blocks:
        _counters[device, stream] = torch.zeros(max(64, blocks), dtype=torch.int32, device=device)
    return _counters[device, stream]


def relu_gradient(grad: Tensor, output: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the gradient through a ReLU [B, n], and the sums of its columns [n] float32, in a fixed order.

    Args:
        grad: [B, n], of the ReLU's ``output`` [B, n]; both contiguous and of one type. With ``weight`` [1, n], of a
            layer with one output, ``grad`` [B, 1] is that layer's, and the gradients of its weight [1, n] and bias [1]
            float32 follow.
        output: [B, n].
        weight: [1, n] of the same type, contiguous.
    """
    rows, columns = output.shape
    tiles, block = triton.cdiv(rows, _ROWS), min(128, triton.next_power_of_2(columns))
    outer, blocks = weight is not None, triton.cdiv(columns, block)
    into = torch.empty(output.shape, dtype=grad.dtype, device=grad.device)
    width = 2 * columns + 1 if outer else columns
    sums, totals = (torch.empty(size * width, dtype=torch.float32, device=grad.device) for size in (tiles, 1))
    with on(grad.device):
        relu_gradient_kernel[tiles, blocks](
            grad, output, output if weight is None else weight, into, sums, totals, _counter(grad.device, blocks),
            rows, columns=columns, OUTER=outer, ROWS=_ROWS, BLOCK=block, num_warps=max(1, block // 32),
        )  # fmt: skip
    if not outer:
        return into, totals
    return into, totals[:columns], totals[columns:-1].view(1, columns), totals[-1:]


@triton.jit(do_not_specialize=["count"])
def loss_kernel(logits, labels, slopes, loss, count, SIZE: tl.constexpr):
    """Write the mean binary cross entropy and its gradient ``slopes`` [count]: one program, which adds in order."""
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
        loss_kernel[1,](logits, labels, slopes, mean, count, SIZE=8192, num_warps=16)
    return mean, slopes
