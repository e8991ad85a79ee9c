"""Sums over the logical shards of a batch, in an order that no number of processes changes.

A batch of B examples has V logical shards, a power of two: shard v is the examples ``v * B // V`` up to
``(v + 1) * B // V``. A float sum over a batch is summed within each shard, then by a binary tree over the shards:
node (start, size) covers the shards ``start`` to ``start + size`` and is the sum of its two halves. A half that is
absent, because a row does not occur there, is left out. So one process may compute some nodes and another add
them, and the result is the same.

EasyScale (Li et al. 2023) keeps results of training equal over numbers of workers in this way, by logical workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import ConfigError

_STARTS = 2**20  # more than the shards of a batch


class Node(NamedTuple):
    """A node of the tree over shards: ``size`` shards from ``start`` on; ``start`` is a multiple of ``size``."""

    start: int
    size: int


class Shards(NamedTuple):
    """Consecutive shards, and their examples.

    >>> shards = Shards.of(10, 4)
    >>> shards
    Shards(bounds=(0, 2, 5, 7, 10), first=0)
    >>> shards.of_bags(torch.zeros(10, 3)).tolist()
    [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    """

    bounds: tuple[int, ...]  # where each shard begins among the examples, and the end of the last
    first: int = 0  # number of the first shard

    @classmethod
    def of(cls, batch: int, shards: int) -> Shards:
        """Return all shards of a batch."""
        return cls(tuple(shard_bounds(batch, shards)))

    @property
    def numbers(self) -> range:
        """The numbers of the shards."""
        return range(self.first, self.first + len(self.bounds) - 1)

    def of_bags(self, grad: Tensor) -> Tensor:
        """Return the shard of each bag [bags] int64; ``grad`` [bags, ...] has equally many bags an example."""
        sizes = torch.tensor(self.bounds, device=grad.device).diff() * (len(grad) // max(1, self.bounds[-1]))
        numbers = torch.arange(self.first, self.numbers.stop, device=grad.device)
        return torch.repeat_interleave(numbers, sizes, output_size=len(grad))


class RowSums(NamedTuple):
    """Sums of the gradients of rows, over the shards of a node each."""

    rows: Tensor  # [n] int64
    start: Tensor  # [n] int64, first shard of the node
    size: Tensor  # [n] int64, its shards
    values: Tensor  # [n, D] float32


def check_shards(shards: int) -> None:
    """Raise ConfigError unless ``shards`` is a power of two from 1 to 1024."""
    if not 1 <= shards <= 1024 or shards & (shards - 1):
        raise ConfigError(
            f"shards is {shards}; it must be a power of two from 1 to 1024, such as 8.", settings=("shards",)
        )


def shard_bounds(batch: int, shards: int) -> list[int]:
    """Return where each shard of ``batch`` examples begins, and the end of the last: V + 1 numbers.

    >>> shard_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [shard * batch // shards for shard in range(shards + 1)]


def shards_of(rank: int, ranks: int, shards: int) -> range:
    """Return the shards of a rank; each has as many as the others, or one more.

    >>> [list(shards_of(rank, 3, 8)) for rank in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    return range(rank * shards // ranks, (rank + 1) * shards // ranks)


def nodes_of(shards: range) -> list[Node]:
    """Return the fewest nodes that cover consecutive shards, in order.

    >>> nodes_of(range(1, 6))
    [Node(start=1, size=1), Node(start=2, size=2), Node(start=4, size=2)]
    """
    found, start = [], shards.start
    while start < shards.stop:
        size = start & -start or 1 << (shards.stop - 1).bit_length()  # the largest that may begin here
        while start + size > shards.stop:
            size //= 2
        found.append(Node(start, size))
        start += size
    return found


def tree_sum(parts: Mapping[Node, Tensor], root: Node) -> Tensor | None:
    """Return the sum of node ``root`` from sums of nodes below it, or of itself; None if there is none.

    >>> parts = {Node(0, 1): torch.tensor(1.0), Node(2, 2): torch.tensor(2.0)}
    >>> tree_sum(parts, Node(0, 4))
    tensor(3.)
    """
    if root in parts or root.size == 1:
        return parts.get(root)
    half = root.size // 2
    first = tree_sum(parts, Node(root.start, half))
    second = tree_sum(parts, Node(root.start + half, half))
    if first is None or second is None:
        return second if first is None else first
    return first + second


def sum_rows(parts: RowSums, shards: range) -> RowSums:
    """Sum the parts of each row, as far as ``shards`` hold whole nodes; sorted by row, then by first shard.

    With all shards, one sum remains of each row: that of the root.

    >>> one = torch.ones(3, 1)
    >>> found = sum_rows(RowSums(torch.tensor([7, 5, 7]), torch.tensor([0, 1, 1]), torch.ones(3).long(), one), range(2))
    >>> found.rows.tolist(), found.size.tolist(), found.values.flatten().tolist()
    ([5, 7], [2, 2], [1.0, 2.0])
    """
    return sum_counted(parts, torch.zeros_like(parts.rows), shards)[0]


def sum_counted(parts: RowSums, counts: Tensor, shards: range) -> tuple[RowSums, Tensor]:
    """Do :func:`sum_rows`, and add ``counts`` [n] int64 in the same way."""
    order = _order(parts.rows * _STARTS + parts.start)
    rows, start, size, values = (each[order] for each in parts)
    counts = counts[order]
    for node in sorted({node for node in nodes_of(shards)}, key=lambda node: node.size):
        level = 1
        while level < node.size:
            inside = (size == level) & (start >= node.start) & (start < node.start + node.size)
            if not bool(inside.any()):
                level *= 2
                continue
            parent = start // (2 * level)
            second = torch.zeros_like(inside)
            second[1:] = inside[1:] & inside[:-1] & (rows[1:] == rows[:-1]) & (parent[1:] == parent[:-1])
            at = second.nonzero().flatten()
            values.index_add_(0, at - 1, values[at])  # one addend each, so the order does not matter
            counts.index_add_(0, at - 1, counts[at])
            start, size = torch.where(inside, parent * (2 * level), start), torch.where(inside, 2 * level, size)
            rows, start, size, values, counts = (each[~second] for each in (rows, start, size, values, counts))
            level *= 2
    return RowSums(rows, start, size, values), counts


def _order(keys: Tensor) -> Tensor:
    """Return the order in which ``keys`` [n] int64 ascend; parts of several ranks are runs, which NumPy merges."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))
    return torch.argsort(keys, stable=True)
