"""Sums of the gradients of rows: within each logical shard in order of occurrence, over shards by a tree.

:mod:`stoker.ops.tree` says what shards are. The process that has some shards of a batch sums as much of the tree as
they cover; the owner of a row adds the rest, and takes one step (:meth:`stoker.tables.group.TableGroup.step`).

Legend: B examples, P positions of a group's features, L ids, U distinct rows, D columns, V shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.ops import AddressSpace, Backend, Bags, Rounding, RowRule
from stoker.ops.distinct import distinct_rows
from stoker.ops.reference import addresses, bag_of
from stoker.ops.space import make_space, slot_space
from stoker.ops.tree import Node, RowSums, Shards, nodes_of, sum_counted
from stoker.tables.lookups import Lookups, examples_of

_SUM = RowRule(kind="sgd", lr=1.0)  # rows of zeros become minus the sums of their gradients


class ShardSums(NamedTuple):
    """Sums of rows over the shards of a node each, and how often each row occurs there."""

    sums: RowSums
    counts: Tensor  # [n] int64


def row_gradients(backend: Backend, count: int, space: AddressSpace, bags: Bags, which: Tensor, grad: Tensor) -> Tensor:
    """Sum the gradient of each distinct row [U, D] float32, in order of occurrence, by the back end's own kernel.

    ``which``, in the shape of the ids: the place of each among the ``count`` distinct rows; ``grad`` is [B, P, D].
    """
    sums = torch.zeros(count, grad.shape[2], dtype=torch.float32, device=grad.device)
    backend.update(sums, {}, slot_space(space, count), bags._replace(ids=which), grad, _SUM, Rounding(()))
    return torch.sub(0.0, sums, out=sums)  # not negated: a sum of 0 is +0


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operations in the block run on one thread: their sums then do not depend on the number of threads."""
    threads = torch.get_num_threads()
    try:
        if threads > 1:
            torch.set_num_threads(1)
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def square_sum(values: Tensor, shards: Shards | None) -> float:
    """Return the sum of squares; with ``shards``, it does not depend on the number of threads."""
    with nullcontext() if shards is None else one_thread():
        return float(values.double().square().sum())


def in_shards(lookups: Lookups, shards: Shards | None) -> Lookups:
    """Return the lookups with the shards of their examples."""
    return lookups if shards is None else lookups._replace(bags=lookups.bags._replace(shards=shards))


def by_shard(
    many: Sequence[tuple[Lookups, Tensor]], shards: Sequence[Shards]
) -> tuple[list[tuple[Lookups, Tensor]], Shards]:
    """Cut several lookups with their gradients [B, P, D] at the bounds of their shards.

    Return the slices shard by shard, those of a shard in order, and the shards of their examples together.
    """
    slices, bounds = [], [0]
    for shard in range(len(shards[0].bounds) - 1):
        total = bounds[-1]
        for ((bags, space), grad), own in zip(many, shards, strict=True):
            start, stop = own.bounds[shard : shard + 2]
            if start < stop:
                slices.append((Lookups(examples_of(bags, len(space.features), start, stop), space), grad[start:stop]))
            total += stop - start
        bounds.append(total)
    return slices or list(many[:1]), Shards(tuple(bounds), shards[0].first)


def shard_sums(backend: Backend, lookups: Lookups, grad: Tensor, shards: Shards | None) -> ShardSums:
    """Sum the gradients of each row over consecutive shards, as far as these hold whole nodes of the tree.

    Return sums of addresses in the space of the lookups, sorted by row, then by first shard. ``shards`` None: one.
    """
    bags, space = lookups
    nodes, device = [Node(0, 1)] if shards is None else nodes_of(shards.numbers), bags.ids.device
    starts, sizes = (torch.tensor(each, device=device) for each in zip(*nodes, strict=True))
    keys = addresses(bags.ids, space.on(device).bases, bags.offsets)
    if shards is not None and len(nodes) > 1:
        node = torch.repeat_interleave(sizes)[shards.of_bags(grad.flatten(0, 1)) - shards.first]
        node = node if bags.offsets is None else node[bag_of(bags.offsets, bags.ids.numel())]
        keys = keys * len(nodes) + node
    if device.type == "cpu":
        found, which = distinct_rows(Bags(keys.view(-1, 1)), _pairs(space.num_rows * len(nodes)))
        distinct = torch.from_numpy(found)
    else:
        distinct, which = torch.unique(keys, return_inverse=True)
    which = which.to(torch.int32).view(bags.ids.shape)
    values = row_gradients(backend, len(distinct), space, bags._replace(shards=shards), which, grad)
    counts = torch.bincount(which.view(-1), minlength=len(distinct))
    distinct, order = distinct.sort()
    rows, node = (distinct, distinct * 0) if len(nodes) == 1 else (distinct // len(nodes), distinct % len(nodes))
    return ShardSums(RowSums(rows, starts[node], sizes[node], values[order]), counts[order])


@lru_cache(maxsize=64)
def _pairs(count: int) -> AddressSpace:
    """Return a space in which each of ``count`` pairs of row and node is a row."""
    return make_space(["pairs"], [count], [["pair"]], ["pair"])


def joined_sums(parts: ShardSums, shards: range) -> ShardSums:
    """Sum the parts of each row, as far as ``shards`` hold whole nodes; sorted by row, then by first shard.

    With all shards, one sum remains of each row, and the count of the whole batch.
    """
    return ShardSums(*sum_counted(*parts, shards))
