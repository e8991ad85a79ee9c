"""Sums over logical shards do not depend on who adds which of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.ops.tree import Node, RowSums, check_shards, nodes_of, shard_bounds, shards_of, sum_rows, tree_sum

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(POWERS, st.integers(1, 40))
def test_shards_cover_a_batch_once(shards: int, batch: int) -> None:
    bounds = shard_bounds(batch, shards)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, batch)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert max(sizes) - min(sizes) <= 1


@given(POWERS, st.integers(1, 20))
def test_ranks_and_nodes_cover_the_shards_once(shards: int, ranks: int) -> None:
    found = [shard for rank in range(ranks) for shard in shards_of(rank, ranks, shards)]
    assert found == list(range(shards))
    for rank in range(ranks):
        nodes = nodes_of(shards_of(rank, ranks, shards))
        assert [s for node in nodes for s in range(node.start, node.start + node.size)] == list(
            shards_of(rank, ranks, shards)
        )
        assert all(node.start % node.size == 0 and node.size & (node.size - 1) == 0 for node in nodes)


def recursive(values: dict[int, torch.Tensor], start: int, size: int) -> torch.Tensor | None:
    if size == 1:
        return values.get(start)
    found = [recursive(values, at, size // 2) for at in (start, start + size // 2)]
    there = [each for each in found if each is not None]
    return there[0] + there[1] if len(there) == 2 else (there[0] if there else None)


@given(POWERS, st.integers(1, 5), st.integers(0, 2**31), st.floats(0.1, 1.0))
def test_any_number_of_ranks_gives_the_sums_of_one(shards: int, ranks: int, seed: int, share: float) -> None:
    drawn = torch.Generator().manual_seed(seed)
    there = torch.rand(6, shards, generator=drawn) < share
    rows, start = there.nonzero().unbind(1)
    mixed = torch.randperm(len(rows), generator=drawn)
    rows, start = rows[mixed], start[mixed]
    values = torch.randn(len(rows), 3, generator=drawn) * 10.0 ** torch.randint(-4, 5, (len(rows), 1), generator=drawn)
    expected = {
        row: recursive({int(s): v for r, s, v in zip(rows, start, values, strict=True) if r == row}, 0, shards)
        for row in sorted(set(rows.tolist()))
    }
    sent = []
    for rank in range(ranks):
        mine = shards_of(rank, ranks, shards)
        own = (start >= mine.start) & (start < mine.stop)
        sent.append(sum_rows(RowSums(rows[own], start[own], torch.ones_like(start[own]), values[own]), mine))
        # Nothing is sent that the rank could have added.
        assert {Node(*pair) for pair in zip(sent[-1].start.tolist(), sent[-1].size.tolist(), strict=True)} <= set(
            nodes_of(mine)
        )
    found = sum_rows(RowSums(*(torch.cat(each) for each in zip(*sent, strict=True))), range(shards))
    assert found.rows.tolist() == list(expected)
    assert set(found.size.tolist()) <= {shards}
    assert all(torch.equal(one, other) for one, other in zip(found.values, expected.values(), strict=True))
    parts = {Node(int(s), 1): v for r, s, v in zip(rows, start, values, strict=True) if r == 0}
    whole = tree_sum(parts, Node(0, shards))
    assert (whole is None) == (0 not in expected)
    assert whole is None or torch.equal(whole, expected[0])


@pytest.mark.parametrize("shards", [0, 3, -8, 2048])
def test_shards_are_a_power_of_two(shards: int) -> None:
    with pytest.raises(ConfigError, match=f"shards is {shards}; it must be a power of two"):
        check_shards(shards)
