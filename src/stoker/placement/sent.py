"""Predict the bytes that ranks send in a step, if rows are divided among them (:mod:`stoker.tables.ranks`).

A rank names the distinct rows of its examples to their owners, gets these rows, and sends the sums of their gradients
back: one for each node of the tree that its shards cover. If that is one node, owners know the rows in their order.
Each rank adds a slice of the dense part's gradients. What a rank owns itself is not sent.

Legend: R ranks, V shards, P parameters of the dense part, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from stoker.ops.tree import nodes_of, shards_of
from stoker.placement.expected import part_of
from stoker.placement.placement import Placement
from stoker.tables.config import DTYPES, Device, Slotted, TableConfig, TensorTrain
from stoker.tables.ranks.sums import sends_names

_HEAD = 16  # bytes of a sum of gradients before its values: row, node and count
_COUNT = 4  # without row and node
_WIDE = 2**31  # rows from which ids take 8 bytes


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Mean bytes that a rank sends to the others in a step."""

    ids: float  # names of rows
    rows: float
    gradients: float  # of rows
    parameters: float  # gradients of the dense part
    headers: float  # before each message

    @property
    def total(self) -> float:
        """The sum of all of them."""
        return float(sum(asdict(self).values()))


def expect_sent(placement: Placement, ranks: int, shards: int, parameters: int) -> Sent:
    """Return the expected bytes of a step.

    Args:
        placement: of the rows that one rank owns, with their uses in whole batches.
        ranks: R, at most V.
        shards: V.
        parameters: P.
    """
    own = [shards_of(rank, ranks, shards) for rank in range(ranks)]
    nodes = [node.size / shards for each in own for node in nodes_of(each)]
    others = (ranks - 1) / ranks
    groups: dict[Any, list[TableConfig]] = {}
    for table in placement.tables:
        key = placement.get(table.name, Device()), table.embedding_dim, table.pooling, table.dtype
        groups.setdefault(key, []).append(table)
    ids = rows = gradients = 0.0
    for (strategy, dim, _, dtype), tables in groups.items():

        def distinct(shares: Iterable[float], tables: list[TableConfig] = tables) -> float:
            uses = [placement.workload.uses[table.name] for table in tables]
            return others * sum(part_of(use, share).distinct for share in shares for use in uses)

        whole = isinstance(strategy, TensorTrain)  # every rank has the cores, and gets all gradients
        gradients += distinct(nodes) * ((_HEAD if whole or sends_names(ranks, shards) else _COUNT) + 4 * dim)
        if whole:
            continue
        wanted = distinct(len(each) / shards for each in own)
        ids += wanted * (8 if ranks * sum(table.num_embeddings for table in tables) >= _WIDE else 4)
        rows += wanted * dim * DTYPES[dtype].itemsize
    # Rows of slots are asked for ahead. Others, and sums of parameters, follow a message with a word of 8 bytes.
    asked = [not isinstance(strategy, TensorTrain) for strategy, *_ in groups]
    ahead = sum(isinstance(strategy, Slotted) for strategy, *_ in groups)
    messages, words = len(groups) + sum(asked) + ahead + 1, sum(asked) - ahead + 1
    return Sent(
        ids=ids, rows=rows, gradients=gradients, parameters=4 * (parameters + 1) * others * (len(nodes) / ranks + 1),
        headers=(ranks - 1) * (messages * (128 + 8 * ranks) + 8 * words),
    )  # fmt: skip
