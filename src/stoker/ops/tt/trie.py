"""Tries: the distinct prefixes of a batch's rows, level by level. They are built on the host.

Kernels of the CPU take the nodes of a level in the order of their digits. Batched products, for a GPU and for other
types, take them in blocks: the nodes of a block share a digit, so a block is one matrix product with a slice. All
blocks of a level have equally many places, and places without a node are padding. Where each digit has one block and no
digit of the core is missing, the core itself is the other operand.

Legend: U distinct rows, P nodes of a level, n its distinct digits, G blocks of B places; int64 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.ops.reference import CHUNK
from stoker.ops.space import HAVE_NUMBA
from stoker.ops.tt.shape import Level, TTShape

_MOST = 4  # places of all blocks for each node, and
_SPARE = 1024  # more, before a digit with many nodes gets several blocks


def cpu_kernels(*tensors: Tensor) -> Any:
    """Return the module of CPU kernels if they take these tensors, else None."""
    types = (torch.float32, torch.int64)
    if not HAVE_NUMBA or any(tensor.device.type != "cpu" or tensor.dtype not in types for tensor in tensors):
        return None
    from stoker.ops.tt import cpu

    return cpu


class SumOrder(NamedTuple):
    """Which values are summed into each place, and in which order: CHUNK of them first, then these sums."""

    order: Tensor  # [n] the values, by place
    starts: Tensor  # [chunks + 1] where each chunk begins among them
    chunks: Tensor | None  # [places + 1] the first chunk of each place; None: each has one


class NodeBlocks(NamedTuple):
    """The nodes of a level in blocks."""

    size: int  # B
    parents: Tensor  # [G * B] place of the parent among the values before; padding repeats another one of its block
    digits: Tensor | None  # [G] digit of each block; None: block g has digit g, and there are as many as slices
    first: Tensor | None  # [n + 1] first block of each distinct digit, and G; None: each has one
    children: SumOrder  # of the nodes' places, into those of their parents, in order of their prefix


@dataclass(frozen=True)
class Trie:
    """The distinct prefixes of distinct rows."""

    shape: TTShape
    levels: tuple[Level, ...]
    blocks: tuple[NodeBlocks, ...]  # of the levels behind the first; none where CPU kernels compute
    digits: tuple[Tensor, ...]  # the distinct digits of each level, ascending; with ``blocks``, on the cores' device
    places: Tensor  # [U] place of each row, in ascending order, among the values of the last level; on the host
    count: int  # of these places

    @classmethod
    def make(cls, shape: TTShape, levels: Sequence[Level], like: Tensor) -> Trie:
        """Make a trie of ``levels`` for cores like ``like``."""
        places, count, blocks = levels[-1].by_prefix, len(levels[-1].digit), []
        if cpu_kernels(like) is None:
            count = len(levels[0].digit)
            above = torch.arange(count, device="cpu")  # place of each node
            for (before, level), rows in zip(pairwise(levels), shape.rows[1:], strict=True):
                made, above = _in_blocks(before, above, count, level, rows)
                blocks.append(made)
                count = len(made.parents)
            places = above[places]
        return cls(shape, tuple(levels), tuple(blocks), tuple(level.digits for level in levels), places, count)

    def on(self, device: torch.device, more: tuple[Any, ...] = ()) -> tuple[Trie, tuple[Any, ...]]:
        """Return the trie for cores on ``device``, and ``more``, tensors in nested tuples, there: by one copy."""
        given = self.blocks, self.digits, more
        blocks, digits, more = _replaced(given, send(list(_tensors(given)), device))
        return replace(self, blocks=blocks, digits=digits), more

    def in_order(self, values: Tensor) -> Tensor:
        """Return the values of the last level in the ascending order of the rows."""
        return values[self.places.to(values.device)]

    def from_order(self, values: Tensor) -> Tensor:
        """Undo :meth:`in_order`; padding becomes 0."""
        placed = values.new_zeros(self.count, *values.shape[1:])
        placed[self.places.to(values.device)] = values
        return placed


def _tensors(of: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples."""
    for each in of:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors(each)


def _replaced(of: Any, tensors: Iterator[Tensor]) -> Any:
    """Return nested tuples with other tensors."""
    found = (
        next(tensors) if isinstance(each, Tensor) else _replaced(each, tensors) if isinstance(each, tuple) else each
        for each in of
    )  # fmt: skip
    return tuple(found) if type(of) is tuple else type(of)._make(found)


def send(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Any]:
    """Bring int64 tensors of the host to ``device`` in one copy, without waiting for it."""
    if device.type == "cpu":
        return iter(tensors)
    packed = torch.cat([each.reshape(-1) for each in tensors]).pin_memory().to(device, non_blocking=True)
    parts = packed.split([each.numel() for each in tensors])
    return iter([part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])


def build_trie(rows: Tensor, shape: TTShape, like: Tensor) -> Trie:
    """Build the trie of ``rows`` [U] int64, on the host, distinct and ascending, for cores like ``like``."""
    keys, found = rows, []
    for count in reversed(shape.rows[1:]):
        digit, inverse, above, children = _split(keys, count)
        found.append((digit, inverse, children))
        keys = above
    levels, places = [_level(keys, shape.rows[0], None, None, None)], keys
    for radix, (digit, inverse, children) in zip(shape.rows[1:], reversed(found), strict=True):
        level = _level(digit, radix, inverse, children, places)
        levels.append(level)
        places = level.by_prefix
    return Trie.make(shape, levels, like)


def _split(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return digits, numbers of the nodes above, their keys and child counts."""
    if (cpu := cpu_kernels(keys)) is not None:
        split: tuple[Tensor, Tensor, Tensor, Tensor] = cpu.split_keys(keys, count)
        return split
    above, inverse, children = torch.unique_consecutive(keys // count, return_inverse=True, return_counts=True)
    return keys % count, inverse, above, children


def _level(digit: Tensor, radix: int, inverse: Tensor | None, children: Tensor | None, above: Tensor | None) -> Level:
    ordered, order, place, digits, start = _ordered(digit, radix)
    parent = None if inverse is None or above is None else above[inverse[order]]
    return Level(ordered, parent, digits, start, place, children)


def _ordered(digits: Tensor, radix: int) -> tuple[Tensor, ...]:
    """Sort ``digits`` below ``radix``, stably: in order, the order, its inverse, distinct ones, their starts."""
    if (cpu := cpu_kernels(digits)) is not None:
        ordered: tuple[Tensor, ...] = cpu.order_nodes(digits, radix)
        return ordered
    found, order = torch.sort(digits, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device="cpu")
    distinct, counts = torch.unique_consecutive(found, return_counts=True)
    return found, order, place, distinct, _starts(counts)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sums_into(places: Tensor, count: int) -> SumOrder:
    """Return how values are summed into their ``places`` [n], of which there are ``count``."""
    order, counts = _ordered(places, max(1, count))[1], torch.bincount(places, minlength=count)
    starts = _starts(counts)
    if len(places) <= CHUNK or int(counts.max()) <= CHUNK:
        return SumOrder(order, starts, None)
    chunks = _starts(each := -(-counts // CHUNK))
    begins = CHUNK * torch.arange(int(chunks[-1]), device="cpu")
    begins += (starts[:-1] - chunks[:-1] * CHUNK).repeat_interleave(each)
    return SumOrder(order, torch.cat([begins, starts[-1:]]), chunks)


def _in_blocks(before: Level, above: Tensor, count: int, level: Level, rows: int) -> tuple[NodeBlocks, Tensor]:
    """Put the nodes of ``level``, whose core has ``rows`` slices, into blocks.

    ``above`` [nodes of the level before]: the place of each of them, among ``count``.

    Returns the blocks, and the place of each node.
    """
    assert level.parent is not None
    assert level.children is not None
    counts, nodes, distinct = level.start.diff(), len(level.digit), len(level.digits)
    size = int(counts.max()) if nodes else 1
    if size * distinct > _MOST * nodes + _SPARE:  # a few digits have most nodes
        size = -(-2 * nodes // distinct)
    each = -(-counts // size)  # blocks of each digit
    first = _starts(each)
    place = torch.arange(nodes, device="cpu") + (first[:-1] * size - level.start[:-1]).repeat_interleave(counts)
    # The values before the first product are the whole first core, where a node's place is its digit.
    parent = level.parent if before.parent is None else above[level.parent]
    heads = level.start[:-1].repeat_interleave(each)  # for each block a node of its digit
    parents = parent[heads].repeat_interleave(size)
    parents[place] = parent
    sums = sums_into(above[before.by_prefix].repeat_interleave(level.children), count)
    single = len(heads) == distinct
    digits = None if single and distinct == rows else level.digits.repeat_interleave(each)
    children = sums._replace(order=place[level.by_prefix[sums.order]])
    return NodeBlocks(size, parents, digits, None if single else first, children), place
