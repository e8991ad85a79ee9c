"""Sums over the shards of all ranks, by the tree: of losses and gradients, in the message of a step.

Legend: R ranks, P parameters, n elements of the loss and all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops.by_shard import Moved
from stoker.ops.tree import Node, nodes_of, tree_sum
from stoker.tables.ranks.heartbeat import RanksError
from stoker.tables.ranks.transport import Ranks, bytes_of, check_same

_WORD = 4  # bytes of an element; headers are whole words


class Alike(NamedTuple):
    """What all ranks must have alike in a step, as numbers."""

    step: int
    batch: int
    parameters: int
    modes: int


_DIFFERENT = {
    "step": "has another batch than rank 0, by its step. Give all of them the same batches, in the same order.",
    "batch": "has another batch than rank 0: other data, or another seed of their order? Give all of them the same "
    "batches, in the same order.",
    "parameters": "has other parameters in its dense part than rank 0. Start all of them with the same ones, "
    "torch.manual_seed(0) before the model is made or the same checkpoint, and let the optimizers of all do the same: "
    "the same settings, schedule and steps.",
    "modes": "computes in another way than rank 0: model.train() or eval(), torch.autocast, or "
    "torch.set_float32_matmul_precision, the processor, or MKL_CBWR. Set them alike on all ranks.",
}


class Sums(NamedTuple):
    """The sums of a node of the tree."""

    loss: Tensor
    grads: list[Tensor | None]  # of the parameters


class StepSums(NamedTuple):
    """What all ranks found in a step."""

    sums: Sums | None  # of all shards; None: the batch is empty
    reached: list[bool]  # of each input: whether the loss of some shard depends on it
    notes: list[int]  # what each rank says with its message


def add_over_ranks(
    ranks: Ranks, shards: int, batch: int, own: Mapping[Node, Sums | None], parameters: Sequence[Tensor],
    reached: Sequence[bool], note: int, alike: Alike,
) -> StepSums:  # fmt: skip
    """Return the sums over all shards on every rank. Each rank adds a slice; then the slices are gathered.

    Args:
        ranks: all call this.
        shards: V.
        batch: examples of all ranks.
        own: the sums of the nodes of this rank's shards; None: without examples.
        parameters: of the gradients.
        reached: of each input: whether the loss of an own shard depends on it.
        note: what this rank says, an int64.
        alike: what all ranks must have alike.

    Raises:
        RanksError: the ranks have other batches or other models.
    """
    nodes = [nodes_of(ranks.numbers_of(rank, shards)) for rank in range(ranks.size)]
    sizes = [1, *(each.numel() for each in parameters)]
    flat = torch.stack([_flat(own[node], parameters) for node in nodes[ranks.rank]])
    there = torch.tensor([_there(own[node], len(sizes)) for node in nodes[ranks.rank]], dtype=torch.uint8)
    head = torch.cat([torch.tensor(reached, dtype=torch.uint8), there.view(-1)])
    head = torch.cat([head, head.new_zeros(-len(head) % _WORD)])
    slices = ranks.slices(flat)
    messages = [torch.cat([head, bytes_of(each)]) for each in slices]
    sent, said = ranks.exchange_noted("add gradients of parameters", messages, [batch, flat.shape[1], note, *alike])
    batches, lengths, notes, *others = (list(each) for each in zip(*said, strict=True))
    if len(set(batches)) > 1:
        raise RanksError(
            f"the ranks have batches of {', '.join(map(str, batches))} examples. Give all of them the same batch: each "
            "takes the examples of its shards."
        )
    check_same(lengths)
    for name, known in zip(Alike._fields, others, strict=True):
        if different := [rank for rank, each in enumerate(known) if each != known[0]]:
            raise RanksError(f"rank {different[0]} {_DIFFERENT[name]}")
    seen = list(reached)
    width = slices[ranks.rank].shape[1]
    found, present = dict[Node, Tensor](), dict[Node, list[int]]()
    for mine, message in zip(nodes, sent, strict=True):
        inputs, flags = message[: len(seen) + len(mine) * len(sizes)].split([len(seen), len(mine) * len(sizes)])
        seen = [one or bool(other) for one, other in zip(seen, inputs.tolist(), strict=True)]
        flags = flags.view(len(mine), len(sizes)).tolist()
        values = message[len(message) - _WORD * len(mine) * width :].view(torch.float32).view(len(mine), width)
        found.update(zip(mine, values, strict=True))
        present.update(zip(mine, flags, strict=True))
    root, begin = Node(0, shards), sum(each.shape[1] for each in slices[: ranks.rank])

    def added() -> Tensor:
        if all(map(all, present.values())):
            total = tree_sum(found, root)
        else:
            total = _by_parameter(found, present, sizes, range(begin, begin + width), root)
        assert total is not None
        return total

    whole = ranks.joined("add gradients of parameters", added, [each[0].nbytes for each in slices])
    loss, *grads = whole.split(sizes)
    some = [any(flags[place] for flags in present.values()) for place in range(len(sizes))]
    shaped = [
        grad.view_as(each) if any_ else None for grad, each, any_ in zip(grads, parameters, some[1:], strict=True)
    ]
    return StepSums(Sums(loss.view(()), shaped) if some[0] else None, seen, notes)


def _flat(sums: Sums | None, parameters: Sequence[Tensor]) -> Tensor:
    """Return the loss and all gradients [n]; 0 where there is none."""
    if sums is None:
        return torch.zeros(1 + sum(each.numel() for each in parameters))
    grads = (
        each.new_zeros(each.numel()) if g is None else g.reshape(-1)
        for g, each in zip(sums.grads, parameters, strict=True)
    )
    return torch.cat([sums.loss.view(1), *grads])


def _there(sums: Sums | None, count: int) -> list[bool]:
    return [False] * count if sums is None else [True, *(each is not None for each in sums.grads)]


def _by_parameter(
    found: Mapping[Node, Tensor], present: Mapping[Node, list[int]], sizes: Sequence[int], own: range, root: Node
) -> Tensor:
    """Return the sums of a slice, in which a node is left out of those gradients that it does not have."""
    parts, begin = [], 0
    for place, size in enumerate(sizes):
        first, last = max(begin, own.start) - own.start, min(begin + size, own.stop) - own.start
        begin += size
        if first < last:
            some = {node: values[first:last] for node, values in found.items() if present[node][place]}
            total = tree_sum(some, root)
            parts.append(torch.zeros(last - first) if total is None else total)
    return torch.cat(parts) if parts else torch.empty(0)


def moves_of_ranks(ranks: Ranks, buffers: Sequence[Tensor], own: Sequence[Moved]) -> list[Moved]:
    """Return what moves running averages among ``buffers`` on all ranks, in the order of their shards."""
    places = {id(each): place for place, each in enumerate(buffers)}
    sent = []
    for average, value, weight in own:
        if id(average) not in places:
            raise ConfigError(
                "a running average of the dense part is not a buffer of the model, so other ranks cannot move it. Make "
                "it one (register_buffer), or train in one process.", settings=("model",),
            )  # fmt: skip
        # Each value is a float32 or a small count: float64 has both.
        sent += [torch.tensor([places[id(average)], weight], dtype=torch.float64), value.double().view(-1)]
    moves = []
    for rest in ranks.gather("move averages", torch.cat(sent) if sent else torch.empty(0, dtype=torch.float64)):
        while len(rest):
            average, weight = buffers[int(rest[0])], float(rest[1])
            value, rest = rest[2:].split([average.numel(), len(rest) - 2 - average.numel()])
            moves.append(Moved(average, value.view_as(average).to(average.dtype), weight))
    return moves
