"""Hot rows in the planner: which are chosen, what is expected of them, and when they are preferred."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker import Cached, Device, HotCold, RowWiseAdagrad, TableConfig
from stoker.base.errors import ConfigError
from stoker.placement.expected import HotBatches, choose_hot, expect_pinned, phases, split_hot, uses_of, with_margin
from stoker.placement.planner import least_cost
from stoker.placement.profile import Profile

ROW = 16 * 4 + 4
PROFILE = Profile(row_bytes=ROW, fetch=1e7, store=2e7, plan_row=1e-7, plan_miss=2e-7, plan_lookup=1e-8)
SIZES = (30_000, 200, 10_000)
LOOKUPS, STEPS = 256, 300
TABLES = [TableConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=16) for i, rows in enumerate(SIZES)]


def drawn(seed: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Ids [steps, B] of each table by falling frequency, from 1 on (id 0 is kept for unknown values), and counts."""
    random = np.random.default_rng(seed)
    ids, counts = [], {}
    for number, rows in enumerate(SIZES):
        weights = np.arange(1, rows, dtype=np.float64) ** -1.05
        found = random.choice(rows - 1, (STEPS, LOOKUPS), p=weights / weights.sum())
        rank = np.empty(rows - 1, np.int64)
        rank[np.argsort(-np.bincount(found.reshape(-1), minlength=rows - 1), kind="stable")] = np.arange(rows - 1)
        ids.append(rank[found] + 1)
        counts[f"t{number}"] = np.bincount(ids[-1].reshape(-1), minlength=rows)
    return ids, counts


IDS, COUNTS = drawn(1)
USES = [uses_of(rows, count, LOOKUPS) for rows, count in zip(SIZES, COUNTS.values(), strict=True)]


def planned(memory: int | str, counts: Any = COUNTS, **given: Any) -> stoker.Placement:
    given = {"batch_size": LOOKUPS, "device": "cpu", "profile": PROFILE, "optimizer": RowWiseAdagrad(lr=0.1), **given}
    return stoker.plan(TABLES, counts, device_memory=memory, **given)


def in_transit(hot: list[int], in_flight: int) -> tuple[int, int]:
    """Rows that come in all steps, and the most there are at a time, if those below ``hot`` stay."""
    steps = [
        {
            (t, int(i))
            for t, (ids, low) in enumerate(zip(IDS, hot, strict=True))
            for i in set(ids[s].tolist())
            if i >= low
        }
        for s in range(STEPS)
    ]
    flights = [set().union(*steps[max(0, s - in_flight + 1) : s + 1]) for s in range(STEPS)]
    come = sum(len(steps[s] - (flights[s - 1] if s else set())) for s in range(STEPS))
    return come, max(map(len, flights))


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("slots", [900, 2000, 6000, 20_000])
def test_the_most_used_rows_are_hot_with_room_for_the_others(slots: int, in_flight: int) -> None:
    hot = choose_hot(USES, slots, in_flight)
    come, most = in_transit(hot, in_flight)
    assert sum(hot) == 0 or slots - 0.2 * most - 200 < sum(hot) + most <= slots
    found = expect_pinned(USES, hot, slots, lookahead=0, in_flight=in_flight, transient=True)
    assert found.fetched * STEPS == pytest.approx(come, rel=0.03)
    if not any(hot):
        return
    # No other table has a row that is used more than the rarest hot one of any.
    last = [count[rows - 1] for count, rows in zip(COUNTS.values(), hot, strict=True) if rows > 1]
    following = [count[rows] for count, rows in zip(COUNTS.values(), hot, strict=True) if rows < len(count) and rows]
    assert max(following, default=0) <= 1.3 * min(last) + 2


def test_too_few_slots_leave_none_hot() -> None:
    assert choose_hot(USES, int(with_margin(sum(use.distinct for use in USES)) * 0.8), 1) == [0, 0, 0]


def test_a_rare_first_row_is_hot_with_the_rows_after_it() -> None:
    """Id 0 is kept for unknown values, which may be rare."""
    counts = np.append([1], np.arange(5000, 0, -1))
    for slots, most in ((1500, 1500), (6000, 5001)):
        (hot,) = choose_hot([uses_of(len(counts), counts, LOOKUPS)], slots, 1)
        assert 0.7 * most < hot <= most


@settings(max_examples=scaled(60), deadline=None)
@given(table=st.integers(0, 2), share=st.floats(0, 1), hot=st.floats(0, 1))
def test_parts_add_up(table: int, share: float, hot: float) -> None:
    uses, low = USES[table], int(hot * SIZES[table])
    warm, cold = split_hot(uses, low)
    for name in ("lookups", "q"):
        total = sum(float(getattr(part, name) @ part.rows) for part in (warm, cold))
        assert total == pytest.approx(float(getattr(uses, name) @ uses.rows))
    assert float(warm.rows.sum()) == pytest.approx((COUNTS[f"t{table}"][:low] > 0).sum(), abs=1)
    parts = phases(uses, low, share)  # also with more hot batches than these counts can have
    assert sum(float(part.n @ part.rows) for part in parts) == pytest.approx(float(uses.n @ uses.rows))


def test_a_cache_moves_least_in_shuffled_batches_and_the_plan_says_so() -> None:
    placement = planned("200KiB", profile=quick(plan_row=0.0, plan_miss=0.0, plan_lookup=0.0))
    assert set(placement.moved) == {"cached", "hot-cold", "host-pipelined"}
    assert placement.moved["cached"] < placement.moved["hot-cold"] < placement.moved["host-pipelined"]
    assert isinstance(placement["t0"], Cached)
    mib = {name: f"{size / 2**20:.2f}" for name, size in placement.moved.items()}
    said = re.sub(r"in \d+\.\d ms", "in T", placement.choice)
    costs = ", ".join(f"{name} {size} MiB in T" for name, size in mib.items())
    assert said == f"rows planned and moved a step: {costs}; chosen: cached"
    (group,) = [group for group in placement.groups if group.strategy == "cached"]
    assert placement.moved["cached"] == pytest.approx((group.fetched_mib + group.written_mib) * 2**20)
    assert "moved_mib" in placement.to_dict()


@pytest.mark.parametrize("strategy", ["cached", "hot-cold", "host-pipelined"])
def test_every_strategy_can_be_asked_for_and_keeps_the_budget(strategy: Any) -> None:
    placement = planned("200KiB", strategy=strategy)
    (kind,) = {type(one).__name__ for one in placement.values() if not isinstance(one, Device)}
    assert kind.lower() == strategy.replace("-", "")
    assert placement.choice.endswith(f": {strategy}, as requested")
    assert sum(group.slot_bytes for group in placement.groups) <= 200 * 2**10
    tables = stoker.EmbeddingTables(TABLES, optimizer=RowWiseAdagrad(lr=0.1), placement=placement)
    assert sum(group.storage.fast_bytes for group in tables.groups) <= 200 * 2**10
    tables.close()


def test_the_profile_of_hot_batches_decides_what_stays_and_more_where_memory_is_left() -> None:
    hot = {"t0": 1500, "t1": 200, "t2": 900}
    placement = planned("400KiB", hot_batches=HotBatches(rows=hot, share=0.5), strategy="hot-cold")
    assert placement["t1"] == Device()  # all of its rows are hot
    strategy = placement["t0"]
    assert isinstance(strategy, HotCold)
    assert all(hot[name] <= rows for name, rows in strategy.hot_rows.items())
    (group,) = [group for group in placement.groups if group.strategy == "hot-cold"]
    assert group.hot == sum(strategy.hot_rows.values()) > 2400
    assert sum(each.slot_bytes for each in placement.groups) <= 400 * 2**10
    assert "of them for hot rows" in placement.summary()


def test_hot_batches_of_their_own_are_taken_into_account() -> None:
    hot = {"t0": 1500, "t1": 200, "t2": 900}
    free = quick(plan_row=0.0, plan_miss=0.0, plan_lookup=0.0)
    shuffled = planned("400KiB", profile=free).moved
    apart = planned("400KiB", hot_batches=HotBatches(rows=hot, share=0.5), profile=free).moved
    assert apart["host-pipelined"] < shuffled["host-pipelined"]  # rows of fewer batches coincide more often
    for name in ("hot-cold", "cached"):
        assert apart[name] == pytest.approx(shuffled[name], rel=0.05)


@pytest.mark.parametrize("apart", [None, HotBatches(rows={"t0": 20_000, "t1": 200, "t2": 8000}, share=0.9)])
def test_a_cache_with_a_slot_for_each_row_fetches_each_used_row_once(apart: HotBatches | None) -> None:
    work = planned("400KiB", hot_batches=apart).workload
    slots = sum(SIZES)
    traffic, _ = work.traffic(TABLES, Cached(slots=slots), slots)
    used = sum(int((count > 0).sum()) for count in COUNTS.values())
    assert traffic.first * STEPS == pytest.approx(used, rel=0.001)
    assert traffic.fetched * STEPS == pytest.approx(used, rel=0.05)


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ({"cached": 100, "hot-cold": 100.5, "host-pipelined": 200}, "cached"),
        ({"cached": 100, "hot-cold": 99.5, "host-pipelined": 200}, "cached"),
        ({"cached": 100, "hot-cold": 90, "host-pipelined": 200}, "hot-cold"),
        ({"cached": 100, "host-pipelined": 100}, "cached"),
        ({"cached": 100, "host-pipelined": 90}, "host-pipelined"),
    ],
)
def test_the_least_cost_wins_and_a_cache_where_it_makes_no_difference(costs: dict[str, float], best: str) -> None:
    assert least_cost(costs) == best


def quick(**costs: float) -> Profile:
    return replace(PROFILE, **costs)


def test_planning_that_costs_nothing_pins_no_row_and_dear_planning_pins_many() -> None:
    free = planned("200KiB", profile=quick(plan_row=0.0, plan_miss=0.0, plan_lookup=0.0))
    dear = planned("200KiB", profile=quick(plan_row=1e-5))
    for placement in (free, dear):
        assert isinstance(placement["t0"], Cached)
    assert not free["t0"].hot_rows
    assert sum(dear["t0"].hot_rows.values()) > 0.3 * dear["t0"].count_slots(40_200, ROW)
    assert dear.moved["cached"] > free.moved["cached"]
    for seconds in (free.seconds, dear.seconds):  # what the choice says is what the groups add up to, rounded
        assert seconds > 0
    # Pinned rows are held by the tables as planned, and their bytes are within the budget.
    tables = stoker.EmbeddingTables(TABLES, optimizer=RowWiseAdagrad(lr=0.1), placement=dear)
    assert sum(group.storage.fast_bytes for group in tables.groups) <= 200 * 2**10
    tables.close()


@pytest.mark.parametrize("given", [{"epoch_lookahead": True}, {"counts": None}], ids=["epoch lookahead", "no counts"])
def test_no_row_is_pinned_where_a_cache_knows_better(given: dict[str, Any]) -> None:
    placement = planned("200KiB", profile=quick(plan_row=1e-5), **given)
    assert isinstance(placement["t0"], Cached)
    assert not placement["t0"].hot_rows


def test_rows_in_a_file_are_placed_by_the_bytes_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.placement.planner.available_memory", lambda: 0)  # too little to map the file
    placement = planned("200KiB", host_memory=1, profile=quick(plan_row=1e-5))
    assert placement["t0"].home == "file"
    assert " in " not in placement.choice


def test_hot_rows_without_room_are_refused_or_passed_over() -> None:
    apart = HotBatches(rows={"t0": 29_000, "t1": 0, "t2": 0}, share=0.9)
    placement = planned("200KiB", hot_batches=apart)
    assert isinstance(placement["t0"], Cached)
    assert "(no hot-cold: the hot rows of the profile and the rows of one example take" in placement.choice
    with pytest.raises(
        ConfigError,
        match=r"strategy 'hot-cold' does not work: the hot rows of the profile.* take 1\.7 MiB more than 200\.0 KiB\. "
        r"Give more memory \(--device-memory\), or another strategy",
    ):
        planned("200KiB", hot_batches=apart, strategy="hot-cold")
    with pytest.raises(ConfigError, match="take all slots, so none are left for hot rows"):
        planned("20KiB", strategy="hot-cold")
    with pytest.raises(ConfigError, match=r"strategy 'best' is unknown\. Choose one of 'auto', 'cached', 'hot-cold'"):
        planned("200KiB", strategy="best")


def test_unknown_counts_leave_the_choice_to_a_cache() -> None:
    for memory in ("200KiB", "1MiB"):
        assert not any(isinstance(one, HotCold) for one in planned(memory, counts=None).values())


@pytest.mark.slow
@pytest.mark.parametrize("hot", [None, 1], ids=["all hot", "all cold"])
@pytest.mark.parametrize("strategy", ["cached", "host-pipelined"])
def test_batches_that_are_all_of_one_kind_are_planned_like_shuffled_ones(hot: int | None, strategy: str) -> None:
    rows = {table.name: hot or table.num_embeddings for table in TABLES}  # id 0 alone is hot, which no input has
    apart = HotBatches(rows=rows, share=0.0 if hot else 1.0)
    free = quick(plan_row=0.0, plan_miss=0.0, plan_lookup=0.0)  # so that no row is pinned
    found, plain = (
        planned("200KiB", strategy=strategy, hot_batches=known, profile=free).moved for known in (apart, None)
    )
    name = "cached" if strategy == "cached" else "host-pipelined"
    assert found[name] == pytest.approx(plain[name], rel=0.01)
