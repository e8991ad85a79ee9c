"""Rows step by sums over logical shards: one shard is an ordinary update, several are summed by a tree."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import EFFORT, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import on_threads
from torch import Tensor

from stoker import Cached, Device, EmbeddingTables, HostPipelined, HotCold, TableConfig, TensorTrain, optim
from stoker.base.errors import ConfigError
from stoker.ops import Bags
from stoker.ops.tree import Shards, nodes_of, shard_bounds, shards_of
from stoker.tables import Ranks
from stoker.tables.lookups import Lookups
from stoker.tables.shards import ShardSums, joined_sums, shard_sums

RULES = [
    optim.SGD(lr=0.5), optim.SGD(lr=0.5, cow_clip=(0.5, 1e-3)), optim.MomentumSGD(lr=0.2, nesterov=True),
    optim.Adagrad(lr=0.1, clip_norm=0.5), optim.RowWiseAdagrad(lr=0.1, weight_decay=0.1), optim.Adam(lr=0.05),
    optim.Adam(lr=0.05, cow_clip=(0.1, 1e-3)), optim.AdamW(lr=0.05, weight_decay=0.1), optim.FTRL(lr=0.1, l1=0.01),
    optim.LAMB(lr=0.05, weight_decay=0.01), optim.LAMB(lr=0.05, cow_clip=(0.5, 1e-3)),
]  # fmt: skip
PLACES = {
    "device": Device(), "cached": Cached(slots=90), "few slots": Cached(slots=9), "pipelined": HostPipelined(slots=9),
    "hot": HotCold(hot={"a": 9, "b": 3}, slots=21),
}  # fmt: skip


def make(optimizer: optim.RowOptimizer, **given: Any) -> EmbeddingTables:
    kinds: dict[str, Any] = {"embedding_dim": 4, "pooling": given.pop("pooling", "sum")}
    kinds["dtype"] = given.pop("dtype", "float32")
    tables = [
        TableConfig(name="a", num_embeddings=40, features=("f", "g"), **kinds),
        TableConfig(name="b", num_embeddings=13, features=("h",), **kinds),
    ]
    return EmbeddingTables(tables, optimizer=optimizer, features=("f", "h", "g"), **given)


def draw(seed: int, batch: int, bags: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Ids, offsets and weights of a batch for the features f, h and g."""
    random, limits = np.random.default_rng(seed), np.tile([40, 13, 40], batch)
    lengths = np.ones(3 * batch, np.int64) if bags == "single" else random.integers(0, 4, 3 * batch)
    most = np.repeat(limits, lengths)
    ids = torch.from_numpy(np.minimum(random.zipf(1.3, len(most)) - 1, most - 1))
    if bags == "single":
        return ids.view(batch, 3), None, None
    weights = torch.from_numpy(random.standard_normal(len(ids)).astype(np.float32)) if bags == "weighted" else None
    return ids, torch.from_numpy(np.concatenate([[0], lengths.cumsum()])), weights


def drawn_gradient(seed: int, batch: int) -> Tensor:
    return torch.randn(batch, 3, 4, generator=torch.Generator().manual_seed(seed))


def contents(tables: EmbeddingTables) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tables.state_dict().items() if name != "handle"}


def check_same(one: EmbeddingTables, other: EmbeddingTables) -> None:
    for (name, first), second in zip(contents(one).items(), contents(other).values(), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(400))
@given(
    seed=st.integers(0, 2**20), rule=st.sampled_from(RULES), place=st.sampled_from(sorted(PLACES)),
    backend=st.sampled_from(["reference", "auto"]), dtype=st.sampled_from(["float32", "bfloat16"]),
    bags=st.sampled_from(["single", "jagged", "weighted", "mean"]), batch=st.sampled_from([0, 1, 5, 300]),
)  # fmt: skip
def test_a_step_from_sums_of_one_shard_is_an_update(seed, rule, place, backend, dtype, bags, batch):
    if backend == "auto" and EFFORT < 1:  # each rule, type, and whether lookups have weights is a kernel to compile
        number = next(n for n, each in enumerate(RULES) if each is rule)
        dtype = ("float32", "bfloat16")[number % 2]
        bags = {"jagged": "weighted", "single": "mean"}.get(bags, bags) if number % 4 > 1 else bags
        bags = {"weighted": "jagged", "mean": "single"}.get(bags, bags) if number % 4 < 2 else bags
    pooling = "mean" if bags == "mean" else "sum"
    given: dict[str, Any] = {"backend": backend, "dtype": dtype, "pooling": pooling, "placement": PLACES[place]}
    updated, stepped = make(rule, **given), make(rule, **given)
    for step in range(2):
        ids, offsets, weights = draw(seed + step, batch, bags)
        grad = drawn_gradient(seed + step, batch)
        [group], [other] = updated.groups, stepped.groups
        lookups = Lookups(Bags(ids, offsets, weights, bags == "mean"), group.space)
        group.update(lookups, grad, group.acquire(lookups))
        sums, counts = shard_sums(other.backend, lookups._replace(space=other.space), grad, Shards((0, batch)))
        other.step(sums.rows, sums.values, counts)
    check_same(updated, stepped)
    assert updated.groups[0].tick == stepped.groups[0].tick == 2


@pytest.mark.slow
@pytest.mark.parametrize("rule", [optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.1), optim.LAMB(lr=0.1)])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_tensor_train_steps_from_sums_of_rows(rule, backend):
    def one() -> EmbeddingTables:
        table = TableConfig(name="t", num_embeddings=60, embedding_dim=8)
        return EmbeddingTables([table], optimizer=rule, backend=backend, placement=TensorTrain(rank=4))

    updated, stepped = one(), one()
    for seed in range(3):
        ids = torch.randint(0, 60, (20, 1), generator=torch.Generator().manual_seed(seed))
        grad = torch.randn(20, 1, 8, generator=torch.Generator().manual_seed(seed))
        [group], [other] = updated.groups, stepped.groups
        lookups = Lookups(Bags(ids), group.space)
        group.update(lookups, grad, group.acquire(lookups))
        sums, counts = shard_sums(other.backend, lookups, grad, Shards((0, 20)))
        other.step(sums.rows, sums.values, counts)
    check_same(updated, stepped)


def plain_sums(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, mean: bool, grad: Tensor, bounds: list[int]
) -> dict[int, tuple[np.ndarray, int]]:
    """The sum of each row over all shards, occurrence by occurrence, and how often it occurs."""
    ends = range(3 * len(grad) + 1) if offsets is None else offsets.tolist()
    flat, shards = ids.reshape(-1).tolist(), len(bounds) - 1
    parts: dict[int, list[list[np.ndarray]]] = {}
    for example in range(len(grad)):
        shard = next(v for v in range(shards) if bounds[v] <= example < bounds[v + 1])
        for feature, base in enumerate([0, 40, 0]):
            begin, end = ends[3 * example + feature], ends[3 * example + feature + 1]
            for k in range(begin, end):
                value = grad[example, feature].numpy()
                if weights is not None or mean:
                    value = value * (np.float32(1) / np.float32(end - begin) if weights is None else weights[k].numpy())
                parts.setdefault(base + flat[k], [[] for _ in range(shards)])[shard].append(value)

    def chunked(values: list[np.ndarray]) -> np.ndarray:
        return sum(values, np.zeros(4, np.float32))

    def of(shard: list[np.ndarray]) -> np.ndarray | None:
        chunks = [chunked(shard[at : at + 64]) for at in range(0, len(shard), 64)]
        return sum(chunks[1:], chunks[0]) if chunks else None

    def tree(sums: list[np.ndarray | None]) -> np.ndarray | None:
        if len(sums) == 1:
            return sums[0]
        there = [x for x in (tree(sums[: len(sums) // 2]), tree(sums[len(sums) // 2 :])) if x is not None]
        return there[0] + there[1] if len(there) == 2 else there[0] if there else None

    return {row: (tree([of(each) for each in found]), sum(map(len, found))) for row, found in parts.items()}


@settings(deadline=None, max_examples=scaled(200))
@given(
    seed=st.integers(0, 2**20), shards=st.sampled_from([1, 2, 8, 16]), ranks=st.integers(1, 4),
    batch=st.sampled_from([0, 1, 5, 40, 300]), bags=st.sampled_from(["single", "jagged", "weighted", "mean"]),
    backend=st.sampled_from(["reference", "auto"]),
)  # fmt: skip
def test_sums_over_shards_are_those_of_the_definition_on_any_number_of_ranks(seed, shards, ranks, batch, bags, backend):
    [group] = make(RULES[0], backend=backend).groups
    ids, offsets, weights = draw(seed, batch, bags)
    grad, bounds, mean = drawn_gradient(seed, batch), shard_bounds(batch, shards), bags == "mean"
    parts = []
    for rank in range(min(ranks, shards)):
        mine = shards_of(rank, min(ranks, shards), shards)
        begin, end = bounds[mine.start], bounds[mine.stop]
        own = [bound - begin for bound in bounds[mine.start : mine.stop + 1]]
        local = Bags(ids[begin:end], None, None, mean)
        if offsets is not None:
            first, last = int(offsets[3 * begin]), int(offsets[3 * end])
            some = None if weights is None else weights[first:last]
            local = Bags(ids[first:last], offsets[3 * begin : 3 * end + 1] - first, some, mean)
        parts.append(
            shard_sums(group.backend, Lookups(local, group.space), grad[begin:end], Shards(tuple(own), mine.start))
        )
        nodes = {(node.start, node.size) for node in nodes_of(mine)}
        assert set(zip(parts[-1].sums.start.tolist(), parts[-1].sums.size.tolist(), strict=True)) <= nodes
    sums = type(parts[0].sums)(*(torch.cat(each) for each in zip(*(part.sums for part in parts), strict=True)))
    found = joined_sums(ShardSums(sums, torch.cat([part.counts for part in parts])), range(shards))
    wanted = plain_sums(ids, offsets, weights, mean, grad, bounds)
    assert found.sums.rows.tolist() == sorted(wanted)
    for row, value, count in zip(found.sums.rows.tolist(), found.sums.values, found.counts.tolist(), strict=True):
        assert np.array_equal(value.numpy(), wanted[row][0]), row
        assert count == wanted[row][1]


def train(tables: EmbeddingTables, bags: str, batch: int, micro: int = 1) -> None:
    """Three steps, each of ``micro`` batches."""
    for step in range(3):
        with tables.accumulate():
            for part in range(micro):
                ids, offsets, weights = draw(10 * step + part, batch, bags)
                out = tables(ids, offsets, weights)
                torch.manual_seed(10 * step + part)
                (out * torch.randn(out.shape)).sum().backward()


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(200))
@given(
    rule=st.sampled_from([RULES[4], RULES[6], RULES[9]]), place=st.sampled_from(sorted(PLACES)),
    shards=st.sampled_from([2, 8]),
    backend=st.sampled_from(["reference", "auto"]), dtype=st.sampled_from(["float32", "bfloat16"]),
    bags=st.sampled_from(["single", "jagged", "weighted", "mean", "max"]), batch=st.sampled_from([1, 5, 70]),
    micro=st.sampled_from([1, 3]), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_rows_step_by_shards_wherever_they_are(rule, place, shards, backend, dtype, bags, batch, micro, threads):
    given: dict[str, Any] = {"dtype": dtype, "shards": shards, "pooling": bags if bags in ("mean", "max") else "sum"}
    resident, other = (
        make(rule, backend="reference", **given),
        make(rule, backend=backend, placement=PLACES[place], **given),
    )
    before = torch.get_num_threads()
    train(resident, bags, batch, micro)
    try:
        torch.set_num_threads(threads)
        train(other, bags, batch, micro)
    finally:
        torch.set_num_threads(before)
    check_same(resident, other)


def wide(shards: int, backend: str) -> EmbeddingTables:
    tables = [
        TableConfig(name="a", num_embeddings=40, embedding_dim=8, features=("f", "g")),
        TableConfig(name="b", num_embeddings=13, embedding_dim=4, features=("h",)),
    ]
    return EmbeddingTables(
        tables, optimizer=optim.Adam(lr=0.1), features=("f", "h", "g"), shards=shards, backend=backend  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bags", ["single", "jagged", "weighted"])
@pytest.mark.parametrize("micro", [1, 2])
def test_tables_of_several_widths_step_together(bags, micro):
    one, other = wide(8, "reference"), wide(8, "auto")
    for tables in (one, other):
        train(tables, bags, 200, micro)
    check_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "train"])
def test_shards_change_bits_of_popular_rows_and_ranks_do_not(kind):
    """The sums of three processes, joined, are those of one."""
    table = TableConfig(name="t", num_embeddings=60, embedding_dim=8)
    placement = TensorTrain(rank=4) if kind == "train" else None
    made = [
        EmbeddingTables([table], optimizer=optim.Adagrad(lr=0.1), placement=placement, shards=shards)
        for shards in (1, 8, 8)
    ]
    ids = torch.randint(0, 60, (300, 1), generator=torch.Generator().manual_seed(1))
    grad = torch.randn(300, 1, 8, generator=torch.Generator().manual_seed(2))
    for tables in made[:2]:
        (tables(ids) * grad).sum().backward()
    [group], bounds, found = made[2].groups, shard_bounds(300, 8), []
    for rank in range(3):
        mine = shards_of(rank, 3, 8)
        begin, end = bounds[mine.start], bounds[mine.stop]
        own = Shards(tuple(bound - begin for bound in bounds[mine.start : mine.stop + 1]), mine.start)
        found.append(shard_sums(group.backend, Lookups(Bags(ids[begin:end]), group.space), grad[begin:end], own))
    sums = type(found[0].sums)(*(torch.cat(each) for each in zip(*(part.sums for part in found), strict=True)))
    whole = joined_sums(ShardSums(sums, torch.cat([part.counts for part in found])), range(8))
    group.step(whole.sums.rows, whole.sums.values, whole.counts)
    check_same(made[1], made[2])
    assert not all(
        torch.equal(a, b) for a, b in zip(contents(made[0]).values(), contents(made[1]).values(), strict=True)
    )


def test_copies_and_pickles_keep_their_shards():
    tables = make(optim.SGD(lr=0.1), shards=4)
    assert copy.deepcopy(tables).shards == pickle.loads(pickle.dumps(tables)).shards == 4
    tables.shards = 2
    assert copy.deepcopy(tables).shards == 2


def test_a_number_of_shards_that_is_no_power_of_two_is_refused():
    with pytest.raises(ConfigError, match="shards is 6; it must be a power of two"):
        make(optim.SGD(lr=0.1), shards=6)


def test_lookups_keep_their_shards_on_the_way_to_the_host():
    """Rows that do not fit are trained in blocks, which the host cuts: on a GPU they lost their shards."""
    ids = torch.tensor([[1], [2]])
    far = SimpleNamespace(device=SimpleNamespace(type="cuda"), cpu=lambda: ids)
    found = Bags(far, distinct=True, shards=Shards.of(2, 2)).cpu()  # type: ignore[arg-type]
    assert found == Bags(ids, distinct=True, shards=Shards.of(2, 2))


def test_each_rank_needs_a_shard() -> None:
    def work(ranks: Ranks) -> None:
        table = TableConfig(name="t", num_embeddings=4, embedding_dim=2)
        with pytest.raises(ConfigError, match="3 ranks need as many logical shards"):
            EmbeddingTables([table], optimizer=optim.SGD(lr=0.1), shards=2).replicate(ranks)

    on_threads(3, work)
