"""Hot rows: found without a plan, kept in one copy, and the same bits under any other placement."""

from __future__ import annotations

import pickle
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import Batch, Cached, Device, EmbeddingTables, HostPipelined, HotCold, TableConfig, optim, stage
from stoker.base.errors import ConfigError
from stoker.ops import Bags, distinct
from stoker.ops.distinct import PinnedRows, distinct_rows, split_rows
from stoker.ops.space import make_space
from stoker.tables.slots.residency import SlotPlan
from stoker.tables.slots.slotted import SlottedRows, TooFewSlots
from stoker.tables.storage import Rows

SIZES = {"a": 100, "b": 30, "c": 5}
TABLES = [TableConfig(name=name, num_embeddings=rows, embedding_dim=4) for name, rows in SIZES.items()]
HOT = {"a": 20, "c": 5}


def made(placement: Any, **options: Any) -> EmbeddingTables:
    return EmbeddingTables(TABLES, **{"optimizer": optim.Adam(lr=0.1), "placement": placement, **options})


def storage_of(tables: EmbeddingTables) -> SlottedRows:
    (group,) = tables.groups
    assert isinstance(group.storage, SlottedRows)
    return group.storage


def hot_ids(examples: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([random.integers(0, max(1, HOT.get(n, 0)), examples) for n in SIZES], 1))


def any_ids(examples: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([random.integers(0, rows, examples) for rows in SIZES.values()], 1))


def train(tables: EmbeddingTables, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    for batch in stage(
        [Batch(dense=torch.zeros(len(ids), 0), ids=ids, step=n) for n, ids in enumerate(batches)], tables
    ):
        tables(batch.ids).square().sum().backward()
    return {key: value.clone() for key, value in tables.state_dict().items()}


def test_tables_with_different_hot_rows_are_one_group() -> None:
    tables = made(HotCold(hot=HOT, slots=60))
    storage = storage_of(tables)
    assert (storage.num_slots, storage.num_hot, storage.hot.rows.tolist()) == (60, 25, [20, 0, 5])
    tables.close()


@pytest.mark.slow
def test_batches_of_hot_rows_move_nothing_and_need_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = made(HotCold(hot={**HOT, "b": 1}, slots=60))
    storage = storage_of(tables)
    plans: list[SlotPlan] = []
    run = storage._link.run
    monkeypatch.setattr(storage._link, "run", lambda plan: (plans.append(plan), run(plan)))
    train(tables, [hot_ids(40, seed) for seed in range(5)])
    assert len(plans) == 5
    assert all(len(plan.slots) == len(plan.fetch_rows) == len(plan.evict_rows) == 0 for plan in plans)
    assert (storage.stats.fetched, storage.stats.written, storage.stats.hit_rate) == (0, 0, 1.0)
    distinct_ids = [len(torch.unique(hot_ids(40, seed) + 1000 * torch.arange(3))) for seed in range(5)]
    assert storage.stats.rows == sum(distinct_ids)
    tables.close()


def test_a_hot_row_has_one_copy() -> None:
    """Neither checkpoints nor reading bring it home."""
    tables = made(HotCold(hot=HOT, slots=60))
    storage = storage_of(tables)
    train(tables, [any_ids(10, seed) for seed in range(6)])
    storage.flush()
    tables.state_dict()
    addresses = storage.hot.addresses()
    assert not storage.home.stored.contains(addresses).any()
    assert storage.home.stored.contains(np.setdiff1d(np.arange(storage.num_rows), addresses)).any()
    tables.close()


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, Cached(slots=40), HostPipelined(slots=70), HotCold(hot={"b": 9}, slots=50)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_saved_go_on_under_another_placement(other: Any, dtype: str) -> None:
    configs = [TableConfig(name=n, num_embeddings=rows, embedding_dim=4, dtype=dtype) for n, rows in SIZES.items()]  # type: ignore[arg-type]
    first, second = [any_ids(12, seed) for seed in range(4)], [any_ids(12, seed) for seed in range(4, 8)]

    def tables_of(placement: Any) -> EmbeddingTables:
        return EmbeddingTables(configs, optimizer=optim.RowWiseAdagrad(lr=0.1), placement=placement)

    expected = train(tables_of(None), first + second)
    for before, after in ((HotCold(hot=HOT, slots=60), other), (other, HotCold(hot=HOT, slots=60))):
        tables = tables_of(before)
        kept = train(tables, first)
        resumed = tables_of(after)
        resumed.load_state_dict(kept)
        found = train(resumed, second)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_copies_and_pickles_keep_hot_rows() -> None:
    tables = made(HotCold(hot=HOT, slots=60))
    train(tables, [any_ids(12, 1)])
    for other in (deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert storage_of(other).num_hot == 25
        assert all(torch.equal(other.rows(name), tables.rows(name)) for name in SIZES)


def test_rows_are_written_and_read_across_the_border() -> None:
    tables = made(HotCold(hot=HOT, slots=60), optimizer=optim.SGD(lr=0.1))
    rows = torch.arange(400.0).view(100, 4)
    tables.write("a", 0, Rows(rows, {}))
    tables.write("a", 15, Rows(-rows[:10], {}))
    expected = rows.clone()
    expected[15:25] = -rows[:10]
    assert torch.equal(tables.rows("a"), expected)
    looked = tables(torch.tensor([[19, 0, 0], [20, 0, 0]]))[:, 0]
    assert torch.equal(looked, expected[[19, 20]])
    tables.close()


def test_batches_that_do_not_fit_come_in_parts_or_are_refused() -> None:
    batches = [any_ids(60, seed) for seed in range(3)]
    expected = train(made(None), batches)
    found = train(made(HotCold(hot=HOT, slots=25 + 4)), batches)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    refusing = made(HotCold(hot=HOT, slots=25 + 4, spill="refuse"))
    with pytest.raises(
        TooFewSlots, match=r"at once in addition to the 25 hot rows, but 4 slots are there .*fewer rows hot"
    ):
        refusing(batches[0])
    refusing(hot_ids(60, 0).clamp(max=0))  # hot rows need no room
    refusing.close()


def test_everything_may_be_hot() -> None:
    batches = [any_ids(30, seed) for seed in range(3)]
    expected = train(made(None), batches)
    found = train(made(HotCold(hot=SIZES, slots=200)), batches)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hot": {}, "slots": 9}, "needs hot rows"),
        ({"hot": {"a": 0}, "slots": 9}, "needs hot rows"),
        ({"hot": {"a": -1}, "slots": 9}, "table 'a' has -1 hot rows"),
        ({"hot": HOT}, "HotCold needs one size"),
        ({"hot": {"z": 3}, "slots": 9}, r"HotCold names hot rows of \['z'\], but the tables are a, b, c"),
        ({"hot": {"c": 6}, "slots": 9}, "6 rows of table 'c' are to be hot, but it has 5"),
        ({"hot": HOT, "slots": 25}, "25 hot rows leave none of 25 slots"),
        ({"hot": HOT, "slots": 20}, "25 hot rows leave none of 20 slots"),
    ],
)
def test_mistakes_are_explained(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(HotCold(**options))


def test_values_are_equal_whatever_the_order_and_come_from_profiles() -> None:
    profile = SimpleNamespace(hot_rows={"c": 5, "a": 20})
    found = HotCold.from_profile(profile, memory="1MiB", home="file")
    assert found == HotCold(hot=(("a", 20), ("c", 5)), memory=2**20, home="file")
    assert hash(found) == hash(HotCold(hot=HOT, memory=2**20, home="file"))
    assert found.hot_rows == HOT
    names = {"a": HotCold(hot=HOT, slots=60), "b": Device(), "c": HotCold(hot=HOT, slots=60)}
    tables = made(names)
    assert [group.space.names for group in tables.groups] == [("a", "c"), ("b",)]
    tables.close()


@settings(max_examples=scaled(150), deadline=None)
@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.integers(0, 2**32), plain=st.booleans(),
    jagged=st.booleans(),
)  # fmt: skip
def test_looking_up_hot_rows_is_an_addition(rows: list[int], seed: int, plain: bool, jagged: bool) -> None:
    random = np.random.default_rng(seed)
    names = [f"t{i}" for i in range(len(rows))]
    space = make_space(names, rows, [[n] for n in names], names)
    fixed = PinnedRows(space, [int(random.integers(0, count + 1)) for count in rows])
    examples = int(random.integers(0, 9))
    lengths = random.integers(0, 4, examples * len(rows)) if jagged else np.ones(examples * len(rows), np.int64)
    bound = np.repeat(np.tile(rows, examples), lengths)
    ids = torch.from_numpy((random.random(int(lengths.sum())) * bound).astype(np.int64))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])) if jagged else None
    bags = Bags(ids if jagged else ids.view(examples, len(rows)), offsets)
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(distinct, "HAVE_NUMBA", False)
        found = split_rows(bags, space, fixed)
        every, which = distinct_rows(bags, space)
        if len(ids):
            at = int(random.integers(len(ids)))
            wrong = ids.index_fill(0, torch.tensor([at]), int(random.choice([-1, bound[at]])))
            with pytest.raises(IndexError, match=f"has id {wrong[at]} in feature"):
                split_rows(bags._replace(ids=wrong.view(bags.ids.shape)), space, fixed)
    wanted = every[which.reshape(-1).numpy()]
    if offsets is not None and not plain:
        for least, most in ((1, 0), (0, 1)):  # they begin after 0, or end after the ids
            with pytest.raises(ValueError, match="offsets must rise from 0"):
                split_rows(bags._replace(offsets=offsets.clamp(min=least) + most), space, fixed)
    places = fixed.places(wanted)
    own = places >= 0
    assert np.array_equal(-1 - found.which.reshape(-1).numpy()[own], places[own])
    assert np.array_equal(fixed.addresses()[places[own]], wanted[own])
    assert np.array_equal(found.rows[found.which.reshape(-1).numpy()[~own]], wanted[~own])
    assert len(set(found.rows.tolist())) == len(found.rows) == len(set(wanted[~own].tolist()))
    assert found.placed == len(set(wanted[own].tolist()))
    low, high = sorted(random.integers(0, space.num_rows + 1, 2).tolist())
    spans = [
        (a, p if p < 0 else p + i) for begin, end, p in fixed.runs(low, high) for i, a in enumerate(range(begin, end))
    ]
    assert spans == [(a, int(fixed.places(np.array([a]))[0])) for a in range(low, high)]
