"""Tensor-train tables: rows that are products of small cores (Oseledets 2011; TT-Rec 2021; EL-Rec, SC 2022).

A table of ``num_embeddings`` rows and D columns has d cores. Row ``i`` has digits i_1..i_d in mixed radix, the last one
fastest, and is ``G_1[i_1] G_2[i_2] ... G_d[i_d]``, where ``G_k[i_k]`` maps r_{k-1} values to m_k * r_k, with r_0 =
r_d = 1 and m_1 * ... * m_d = D. Rows that begin with the same digits share the product of these digits' slices, so the
distinct rows of a batch form a trie: each distinct prefix is a node, and each level is one grouped matrix product with
its parents' values. That is EL-Rec's reuse buffer (Algorithm 1) at every level. The gradient goes back the same way.

Legend: U distinct rows, P nodes of a level, M columns so far (m_1 * ... * m_{k-1}), n_k rows and r_k ranks of core k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.base.errors import ConfigError
from stoker.ops.reference import derive_key, init_rows
from stoker.ops.tt.shape import TTShape
from stoker.ops.tt.trie import NodeBlocks, SumOrder, Trie, cpu_kernels

_FILL = 2**22  # values of a fresh core: one chunk


class Values(NamedTuple):
    """The rows of a trie, and what their gradient needs."""

    rows: Tensor  # [places, D], see :attr:`Trie.places`; padding is arbitrary
    kept: list[Any]  # by kernels: the values of each level; by blocks: the operands of each product


def expand(cores: Sequence[Tensor], trie: Trie) -> Values:
    """Return the rows of a trie: for each level but the first one product of its parents' values with the core.

    Args:
        cores: [n_k, r_{k-1}, m_k * r_k] each.
        trie: of the rows; on the device of the cores.
    """
    shape = trie.shape
    above = cores[0].reshape(shape.rows[0], shape.cols[0], shape.ranks[0])  # not copied
    kept: list[Any] = [] if trie.blocks else [above]
    for place, core in enumerate(cores[1:], 1):
        columns = above.shape[1] * shape.cols[place]
        if trie.blocks:
            block = trie.blocks[place - 1]
            inputs = above.index_select(0, block.parents).view(-1, block.size * above.shape[1], above.shape[2])
            slices = core if block.digits is None else core.index_select(0, block.digits)
            made = torch.bmm(inputs, slices)
            kept.append((inputs, slices))
            above = made.view(len(block.parents), columns, core.shape[2] // shape.cols[place])
        else:
            made = cpu_kernels(core).node_values(above, core, trie.levels[place])
            above = made.view(len(trie.levels[place].digit), columns, core.shape[2] // shape.cols[place])
            kept.append(above)
    return Values(above.view(trie.count, shape.dim), kept)


def gradients(cores: Sequence[Tensor], trie: Trie, values: Values, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each core its used digits [n], ascending, and the gradient of their slices [n, r_{k-1}, m_k * r_k].

    Deterministic: the nodes of a digit and the children of a node are summed in a fixed order.

    Args:
        cores: as for :func:`expand`.
        trie: of the rows.
        values: from :func:`expand`.
        grad: [places, D] of the cores' type, of the rows; 0 in padding.
    """
    found: list[Tensor] = []
    for place in range(len(cores) - 1, 0, -1):
        core = cores[place]
        if trie.blocks:
            slices, grad = _back_through(trie.blocks[place - 1], values.kept[place - 1], grad)
        else:
            slices, grad = cpu_kernels(core).back_through(
                values.kept[place - 1], core, trie.levels[place], trie.levels[place - 1],
                grad.reshape(-1, core.shape[2]),
            )  # fmt: skip
        found.append(slices)
    found.append(grad.view(len(grad), *cores[0].shape[1:]))
    return list(zip(trie.digits, found[::-1], strict=True))


def _back_through(block: NodeBlocks, operands: tuple[Tensor, Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the used slices [n, r_{k-1}, m_k * r_k], and of the values before [places, M * r_{k-1}]."""
    inputs, slices = operands
    back = grad.view(*inputs.shape[:2], slices.shape[2])
    used = torch.bmm(inputs.mT, back)
    if block.first is not None:
        used = torch.segment_reduce(used, "sum", offsets=block.first, axis=0, unsafe=True)
    passed = torch.bmm(back, slices.mT).view(len(block.parents), inputs.shape[1] // block.size * inputs.shape[2])
    return used, sum_places(passed, block.children)


def sum_places(values: Tensor, sums: SumOrder, factors: Tensor | None = None) -> Tensor:
    """Return the sum of the ``values`` [n, width] of each place [places, width]; ``factors``: in order of places."""
    found = torch.nn.functional.embedding_bag(
        sums.order, values, sums.starts, mode="sum", per_sample_weights=factors, include_last_offset=True
    )
    if sums.chunks is not None:
        found = torch.segment_reduce(found, "sum", offsets=sums.chunks, axis=0, unsafe=True)
    return found


class _Taken(torch.autograd.Function):
    """Rows at places. The backward sums the gradients of each row in order of occurrence."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.count = len(rows)
        ctx.save_for_backward(places)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return cpu_kernels(grad, places).sum_taken(grad, places, ctx.count), None


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Return ``rows[places]`` [L, D], differentiable; each row is taken at least once."""
    if cpu_kernels(rows, places) is None:
        return torch.nn.functional.embedding_bag(places.unsqueeze(1), rows, mode="sum")
    taken: Tensor = _Taken.apply(rows, places)  # type: ignore[no-untyped-call]
    return taken


def digits_of(rows: Tensor, shape: TTShape) -> list[Tensor]:
    """Return the digits of ``rows`` [U], from the first on: [U] int64 each."""
    found = []
    for count in reversed(shape.rows):
        found.append(rows % count)
        rows = rows // count
    return found[::-1]


def rows_by_definition(cores: Sequence[Tensor], rows: Tensor, shape: TTShape) -> Tensor:
    """Multiply the slices of each row separately: [U, D], differentiable. The definition."""
    digits = digits_of(rows, shape)
    value = cores[0][digits[0]].view(len(rows), shape.cols[0], shape.ranks[0])
    for core, digit, cols in zip(cores[1:], digits[1:], shape.cols[1:], strict=True):
        value = torch.bmm(value, core[digit]).view(len(rows), value.shape[1] * cols, core.shape[2] // cols)
    return value.view(len(rows), shape.dim)


def fill_core(out: Tensor, key_seed: int, name: str, shape: TTShape, place: int, scale: float) -> None:
    """Fill ``out`` with core ``place`` of a fresh table, chunk by chunk.

    Values are uniform around 0, so wide that rows have the variance of a uniform value in [-scale, scale).

    An entry of a row is a sum of r_1 * ... * r_{d-1} products of d independent values, so each core needs the variance
    ``(variance of the row / prod(ranks)) ** (1 / d)``.

    Where rows have slices of their own (:attr:`TTShape.own`), these carry the variance and the common cores have 1: a
    step on a row's own numbers then moves the row as far as a step on an uncompressed row.

    Args:
        out: contiguous, [n_k, r_{k-1}, m_k * r_k] or [n_k, r_{k-1} * m_k * r_k]; of any type, on any device.
        key_seed: the values are a function of this and all arguments below.
        name: of the table.
        shape: of the table.
        place: number of the core.
        scale: half-width of the uniform distribution whose variance rows have.
    """
    rows = out.view(shape.rows[place], -1)
    key, wide = derive_key(key_seed, "init", name, "core", place), scale_of(shape, scale, place)
    step = max(1, _FILL // rows.shape[1])
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        rows[start:stop] = init_rows(key, start, stop, rows.shape[1], wide)


def scale_of(shape: TTShape, scale: float, place: int) -> float:
    """Return the half-width of core ``place``'s uniform values if rows are to vary as in [-scale, scale)."""
    variance = scale**2 / 3 / math.prod(shape.ranks)
    if shape.own:
        variance = 1.0 if place else variance
    else:
        variance **= 1 / len(shape.rows)
    return float((3 * variance) ** 0.5)


_LARGEST = 2**14  # rows of an unfolding
_COLUMNS = 2**20  # of an unfolding, times its rows: one chunk of a float64 product


def decompose(weight: Tensor, shape: TTShape) -> list[Tensor]:
    """Find cores [n_k, r_{k-1}, m_k * r_k] whose rows are near ``weight`` [N, D]; exact where the ranks allow it.

    The error is at most sqrt(d - 1) times that of the best cores of this shape. Needs memory for two copies of the
    table. Rows behind the last one count as zeros.
    """
    count, dim = weight.shape
    if dim != shape.dim or count > shape.capacity:
        raise ConfigError(f"a table of {count:,} x {dim} does not fit a tensor train {shape.rows} x {shape.cols}.")
    if shape.own:
        return _common(weight, shape)
    places = len(shape.rows)
    padded = weight.new_zeros(shape.capacity, dim)
    padded[:count] = weight
    order = [axis for place in range(places) for axis in (place, places + place)]
    rest = padded.view(*shape.rows, *shape.cols).permute(order).reshape(1, -1)
    del padded
    cores, left = [], 1
    for place, rank in enumerate(shape.ranks):
        rows, cols = shape.rows[place], shape.cols[place]
        unfolded = rest.reshape(left * rows * cols, -1)
        basis = _leading(unfolded, rank)  # [left * rows * cols, rank]; zeros for a rank that adds nothing
        rest = basis.t() @ unfolded
        cores.append(basis.view(left, rows, cols, rank).permute(1, 0, 2, 3).reshape(rows, left, cols * rank))
        left = rank
    last = rest.reshape(left, shape.rows[-1], shape.cols[-1]).permute(1, 0, 2)
    return [core.contiguous() for core in (*cores, last)]


def _common(weight: Tensor, shape: TTShape) -> list[Tensor]:
    """Do the same for rows with slices of their own, by right singular vectors: the columns are the small side.

    The common core has the scale of a fresh one.
    """
    (rows, _, rank), dim = shape.core_shapes[0], shape.dim
    gram = torch.zeros(dim, dim, dtype=torch.float64, device=weight.device)
    for part in weight.split(_COLUMNS // dim + 1):
        wide = part.to(torch.float64)
        gram.addmm_(wide.t(), wide)
    basis = torch.linalg.eigh(gram)[1][:, -rank:].flip(1) * dim**0.5
    basis = torch.nn.functional.pad(basis, (0, rank - basis.shape[1]))
    last = basis.t().to(weight.dtype).contiguous()
    first = weight.new_zeros(rows, rank)
    for start, part in zip(range(0, len(weight), _COLUMNS), weight.split(_COLUMNS), strict=True):
        first[start : start + len(part)] = (part.to(torch.float64) @ basis).div_(dim).to(weight.dtype)
    return [first.view(rows, 1, rank), last.view(1, rank, dim)]


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Return the ``rank`` first left singular vectors, as eigenvectors in float64: the left side is the small one."""
    size = len(matrix)
    if size > _LARGEST:
        raise ConfigError(
            f"this tensor train cuts the table into {size:,} rows, and the eigenvectors of such a square would take "
            f"{8 * size * size / 2**30:.0f} GiB and hours; at most {_LARGEST:,} rows are possible. Take one more core."
        )
    gram = torch.zeros(size, size, dtype=torch.float64, device=matrix.device)
    for part in matrix.split(max(1, _COLUMNS // size * 64), dim=1):
        wide = part.to(torch.float64)
        gram.addmm_(wide, wide.t())
    vectors: Tensor = torch.linalg.eigh(gram)[1]
    leading = vectors[:, -rank:].flip(1).to(matrix.dtype)
    return torch.nn.functional.pad(leading, (0, rank - leading.shape[1]))
