"""Tensor-train cores of a dense table by successive truncated SVDs (Oseledets 2011, Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops.tt.shape import TTShape

_LARGEST = 2**14  # rows of an unfolding
_COLUMNS = 2**20  # of an unfolding that are multiplied in float64 at a time, over its rows


def decompose(weight: Tensor, shape: TTShape) -> list[Tensor]:
    """Cores [n_k, r_{k-1}, m_k * r_k] whose rows are near ``weight`` [N, D]; exact where the ranks allow it.

    The error is at most sqrt(d - 1) times that of the best cores of this shape. Needs memory for two copies of the
    table. Rows behind the last one count as zeros.

    Raises:
        ConfigError: the shape is not that of the table, or a cut has too many rows for the eigenvectors.
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
        basis = _leading(unfolded, rank)  # [left * rows * cols, rank]; a rank that says nothing more has zeros
        rest = basis.t() @ unfolded
        cores.append(basis.view(left, rows, cols, rank).permute(1, 0, 2, 3).reshape(rows, left, cols * rank))
        left = rank
    last = rest.reshape(left, shape.rows[-1], shape.cols[-1]).permute(1, 0, 2)
    return [core.contiguous() for core in (*cores, last)]


def _common(weight: Tensor, shape: TTShape) -> list[Tensor]:
    """The same for rows with numbers of their own, from the right singular vectors: the columns are the small side.

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
    """The ``rank`` left singular vectors of the largest singular values.

    From the eigenvectors of the matrix times its transpose, in float64: the left side is the small one.
    """
    size = len(matrix)
    if size > _LARGEST:
        raise ConfigError(
            f"this tensor train cuts the table into {size:,} rows, and the eigenvectors of such a square would take "
            f"{8 * size * size / 2**30:.0f} GiB and hours; at most {_LARGEST:,} are done. Take one more core."
        )
    gram = torch.zeros(size, size, dtype=torch.float64, device=matrix.device)
    for part in matrix.split(max(1, _COLUMNS // size * 64), dim=1):
        wide = part.to(torch.float64)
        gram.addmm_(wide, wide.t())
    vectors: Tensor = torch.linalg.eigh(gram)[1]
    leading = vectors[:, -rank:].flip(1).to(matrix.dtype)
    return torch.nn.functional.pad(leading, (0, rank - leading.shape[1]))
