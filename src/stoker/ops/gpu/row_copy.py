"""A Triton kernel that copies rows by number, also out of page-locked memory of the host.

The GPU then reads rows over the link itself, without a processor gathering them first (zero-copy access, as in EMOGI,
VLDB 2020). Rows move as integers, so not-a-numbers keep their bits.

Legend: n rows of one call, D elements a row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements of a tile: each thread has several reads on their way, for the link is slow to answer
_INTEGERS = {2: torch.int16, 4: torch.int32}


@triton.jit
def copy_rows_kernel(source, rows, target, places, count, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Row ``rows[i]`` of ``source`` to row ``places[i]`` of ``target``."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    row = tl.load(rows + at, mask=live, other=0)
    place = tl.load(places + at, mask=live, other=0)
    mask = live[:, None] & (column < D)[None, :]
    values = tl.load(source + row[:, None] * D + column[None, :], mask=mask, other=0)
    tl.store(target + place[:, None] * D + column[None, :], values, mask=mask)


def copy_rows(source: Tensor, rows: Tensor, target: Tensor, places: Tensor) -> None:
    """Row ``rows[i]`` of ``source`` goes to row ``places[i]`` of ``target``, queued on the current stream.

    Args:
        source: [N, D] or [N], contiguous, of 2 or 4 bytes an element; on the device, or page-locked on the host.
        rows: [n] int64 on the device.
        target: [C, D] or [C], contiguous, on the device, of the same type.
        places: [n] int64 on the device; distinct.
    """
    assert (source.dtype, source.shape[1:]) == (target.dtype, target.shape[1:])
    assert all(tensor.is_contiguous() for tensor in (source, target)), "the kernel addresses rows by row * D"
    count, dim = len(rows), source[:1].numel()
    if count == 0:
        return
    whole = _INTEGERS[source.element_size()]
    block = min(256, 1 << max(0, dim - 1).bit_length())
    tile = max(1, _TILE // block)
    grid = (triton.cdiv(count, tile), triton.cdiv(dim, block))
    copy_rows_kernel[grid](
        source.view(whole),
        rows,
        target.view(whole),
        places,
        count,
        D=dim,
        ROWS=tile,
        BLOCK=block,
        enable_fp_fusion=False,
    )
