"""Sums of rows' gradients on their way between ranks.

Legend: n sums, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.ops.tree import RowSums
from stoker.tables.ranks.transport import Ranks
from stoker.tables.shards import ShardSums, joined_sums

_HEAD = 4  # int32 of a sum before its values: row (2), node, count
_FEW = 8  # ranks whose sums are added in memory for all rows that any of them has looked up
_START = 2**12  # a node as one number: first shard times this, plus its shards


def sends_names(ranks: int, shards: int) -> bool:
    """Return True if ranks name the rows whose gradients they send: many ranks, or several sums of a row from one.

    >>> sends_names(2, 8), sends_names(3, 8)
    (False, True)
    """
    return ranks > _FEW or shards % ranks > 0


def packed(parts: ShardSums) -> Tensor:
    """Return the sums as one tensor [n, 4 + D] int32."""
    rows, start, size, values = parts.sums
    head = torch.stack([start * _START + size, parts.counts], dim=1).to(torch.int32)
    return torch.cat([rows.contiguous().view(-1, 1).view(torch.int32), head, values.contiguous().view(torch.int32)], 1)


def unpacked(data: Tensor) -> ShardSums:
    """Invert :func:`packed`."""
    # A slice of one row is contiguous with any stride, which view(dtype) refuses.
    rows = data[:, :2].clone(memory_format=torch.contiguous_format).view(torch.int64).view(-1)
    node, counts = data[:, 2].long(), data[:, 3].long()
    values = data[:, _HEAD:].contiguous().view(torch.float32)
    return ShardSums(RowSums(rows, node // _START, node % _START, values), counts)


def shared_sums(ranks: Ranks, own: ShardSums, shards: range, name: str, said: Sequence[int]) -> ShardSums:
    """Return the sums of rows over the shards of all ranks, on every rank, which ``said`` the same of their step."""
    parts = torch.cat(ranks.gather(f"share gradients of {name}", packed(own), said))
    return joined_sums(unpacked(parts), shards)
