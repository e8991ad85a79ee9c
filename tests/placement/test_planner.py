"""The planner: what it decides, what it refuses, and whether its predictions come true."""

from __future__ import annotations

import re
import tracemalloc
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker import Cached, Device, EmbeddingTables, HostPipelined, Mapped, RowWiseAdagrad, TableConfig
from stoker.base.errors import ConfigError
from stoker.base.units import parse_size
from stoker.placement.expected import Traffic, expect, uses_of
from stoker.placement.planner import _at_least
from stoker.placement.profile import Profile, measure_profile
from stoker.tables.config import Slotted
from stoker.tables.slots.slotted import make_residency

ROW = 16 * 4 + 4  # bytes: 16 float32 columns and row-wise Adagrad's scalar
PROFILE = Profile(
    row_bytes=ROW, fetch=1e7, store=2e7, plan_row=1e-7, plan_miss=2e-7, plan_lookup=1e-8, file_cold=1e5,
    file_warm=1e6, file_store=1e6,
)  # fmt: skip
OPTIMIZER = RowWiseAdagrad(lr=0.1)


def tables_of(**rows: int) -> list[TableConfig]:
    return [TableConfig(name=name, num_embeddings=count, embedding_dim=16) for name, count in rows.items()]


def planned(tables: list[TableConfig], memory: int | str, counts: object = None, **given: object) -> stoker.Placement:
    given = {"optimizer": OPTIMIZER, "device": "cpu", "profile": PROFILE, **given}
    return stoker.plan(tables, counts, device_memory=memory, **given)


BIG, SMALL = 200_000, 100
TABLES = tables_of(big=BIG, small=SMALL, other=50_000)
TOTAL = (BIG + SMALL + 50_000) * ROW


def test_what_fits_lies_on_the_device():
    placement = planned(TABLES, TOTAL)
    assert dict(placement) == {"big": Device(), "small": Device(), "other": Device()}
    assert placement.resident
    (group,) = placement.groups
    assert (group.tables, group.rows, group.bytes) == (("big", "small", "other"), TOTAL // ROW, TOTAL)
    assert (group.hit_rate, group.fetched_mib, group.seconds, group.home) == (1.0, 0.0, 0.0, None)
    assert not planned(TABLES, TOTAL - 1).resident


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [(stoker.SGD(lr=0.1), 0), (stoker.Adagrad(lr=0.1), 64), (stoker.Adam(lr=0.1), 128), (OPTIMIZER, 4)],
)
def test_optimizer_state_counts(optimizer: stoker.optim.RowOptimizer, state: int):
    tables = tables_of(a=10_000)
    assert planned(tables, 10_000 * (64 + state), optimizer=optimizer).resident
    assert not planned(tables, 10_000 * (64 + state) - 1, optimizer=optimizer).resident


def test_the_rest_shares_slots_and_most_used_rows_stay():
    placement = planned(TABLES, "3MiB")
    assert placement["small"] == Device()
    assert placement["big"] == placement["other"]
    assert replace(placement["big"], window=None) == Cached(memory=(3 * 2**20 - SMALL * ROW) // ROW * ROW)
    direct, cached = sorted(placement.groups, key=lambda group: group.strategy, reverse=True)
    assert direct.tables == ("small",)
    assert cached.tables == ("big", "other")
    assert cached.slots * ROW + SMALL * ROW <= 3 * 2**20
    assert 0 < cached.hit_rate < 1
    assert cached.lookup_hit_rate > cached.hit_rate
    assert cached.fetched_mib == pytest.approx(cached.distinct_rows * (1 - cached.hit_rate) * ROW / 2**20)
    assert cached.seconds > 0


def test_it_is_what_the_tables_become():
    placement = planned(TABLES, "3MiB")
    embeddings = EmbeddingTables(TABLES, optimizer=OPTIMIZER, placement=placement)
    found = {
        tuple(t.name for t in group.tables): (group.storage.weight.shape[0], group.storage.fast_bytes)
        for group in embeddings.groups
    }
    assert found == {group.tables: (group.slots, group.slot_bytes) for group in placement.groups}
    assert sum(size for _, size in found.values()) <= 3 * 2**20
    embeddings.close()


def test_tables_that_pool_differently_are_groups_of_their_own():
    tables = [replace(table, pooling=pooling) for table, pooling in zip(TABLES, ("sum", "mean", "sum"), strict=True)]
    placement = planned(tables, TOTAL)
    embeddings = EmbeddingTables(tables, optimizer=OPTIMIZER, placement=placement)
    expected = [tuple(table.name for table in group.tables) for group in embeddings.groups]
    assert [group.tables for group in placement.groups] == expected == [("big", "other"), ("small",)]


@pytest.mark.parametrize("memory", ["1GiB", 0], ids=["memory", "file"])
def test_traffic_is_that_of_the_batches_in_flight_with_which_a_stage_begins(memory: str | int):
    placement = planned(TABLES, "3MiB", host_memory=memory, strategy="cached")
    embeddings = EmbeddingTables(TABLES, optimizer=OPTIMIZER, placement=placement)
    assert placement.workload.depth(placement["big"].home) == stoker.stage([], embeddings).in_flight
    embeddings.close()


def test_every_decision_can_be_replaced():
    placement = planned(TABLES, "3MiB")
    before = placement.groups
    placement["other"] = HostPipelined(slots=5000)
    assert {group.strategy: group.tables for group in placement.groups} == {
        "cached": ("big",), "device": ("small",), "host-pipelined": ("other",)
    }  # fmt: skip
    assert next(g for g in placement.groups if g.strategy == "host-pipelined").slots == 5000
    placement["other"] = placement["big"]
    assert placement.groups == before
    del placement["big"], placement["other"]
    assert placement.resident
    assert len(placement.groups) == 1
    with pytest.raises(ConfigError, match="no table 'C3', only big, small, other"):
        placement["C3"] = Device()
    with pytest.raises(ConfigError, match="is not a strategy"):
        placement["big"] = "cached"  # type: ignore[assignment]


def test_homes_that_do_not_fit_become_files(tmp_path):
    assert planned(TABLES, "3MiB", host_memory="20MiB")["big"].home == "memory"
    placement = planned(TABLES, "3MiB", host_memory="10MiB", path=tmp_path, strategy="cached")
    assert (placement["big"].home, placement["big"].path) == ("file", str(tmp_path))
    assert "more than host_memory 10.0 MiB" in placement.note
    assert str(tmp_path) in placement.note
    assert f"all rows in a file in {tmp_path}" in placement.summary()
    (group,) = [group for group in placement.groups if group.home]
    assert group.home == "file"


def test_slots_and_rows_share_the_available_memory(monkeypatch):
    rest = TOTAL - SMALL * ROW
    for available, home in ((rest / 0.8 + 3.01 * 2**20, "memory"), (rest / 0.8 + 2.9 * 2**20, "file")):
        monkeypatch.setattr("stoker.placement.planner.available_memory", lambda found=available: int(found))
        assert planned(TABLES, "3MiB", strategy="cached")["big"].home == home


def test_a_file_is_mapped_where_the_page_cache_can_hold_it(tmp_path, monkeypatch):
    given = {"host_memory": "10MiB", "path": tmp_path}
    placement = planned(TABLES, "4MiB", **given)
    assert dict(placement) == {"big": Mapped(path=str(tmp_path)), "small": Device(), "other": Device()}
    assert placement.choice.startswith("mapped: the page cache can hold the file of 13.0 MiB")
    assert "more than host_memory 10.0 MiB" in placement.note
    assert f"1 table mapped, all rows in a file in {tmp_path} (13.0 MiB)" in placement.summary()
    assert not placement.resident
    assert [group.home for group in placement.groups] == ["file", None]
    assert placement.seconds == 0.0
    assert planned(TABLES, "4MiB", strategy="mapped")["big"] == Mapped()
    size = BIG * ROW
    free = round((TOTAL - size + 5 * size / 4) * 1.0001)  # 80 % of what is left of it next to the other tables
    for patched, value, reason in (
        ("available_memory", lambda: free // 2, "80 % of the available memory, .* do not hold a file of 13.0 MiB"),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=size - 1), "takes 13.0 MiB at once, and its disk has"),
        ("resolve_device", lambda _: torch.device("cuda"), "a GPU does not train rows in a mapped file"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("stoker.placement.planner.available_memory", lambda: free)
            assert planned(TABLES, "4MiB", **given)["big"] == Mapped(path=str(tmp_path))
            patch.setattr(f"stoker.placement.planner.{patched}", value)
            if patched != "resolve_device":
                left = planned(TABLES, "4MiB", **given)
                assert isinstance(left["big"], Slotted)
                assert re.search(f"; not mapped: .*{reason}", left.choice)
            with pytest.raises(ConfigError, match=reason):
                planned(TABLES, "4MiB", **given, strategy="mapped")
    with pytest.raises(ConfigError, match="s3://bucket cannot be mapped"):
        planned(TABLES, "4MiB", path="s3://bucket", strategy="mapped")


def test_rows_in_a_file_are_appended_and_the_budget_pays_for_the_index():
    """4 bytes a row; where that is more than an eighth of the budget, rows are written in place."""
    tables = [TableConfig(name="t", num_embeddings=1_000_000, embedding_dim=16)]
    given = {
        "optimizer": OPTIMIZER, "host_memory": "1MiB", "batch_size": 256, "device": "cpu", "profile": PROFILE,
        "strategy": "cached",
    }  # fmt: skip
    wide, tight = (stoker.plan(tables, device_memory=size, **given) for size in (32_000_000, 31_999_999))
    assert (wide["t"].home, wide["t"].writes, tight["t"].writes) == ("file", "append", "in-place")
    without = stoker.plan(tables, device_memory=28_000_000, **given)
    assert without["t"].writes == "in-place"
    assert wide.groups[0].slots == without.groups[0].slots
    assert wide.groups[0].bookkeeping_bytes == without.groups[0].bookkeeping_bytes + 4_000_000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cached", "hot-cold"])
def test_several_tables_in_a_file_keep_the_budget_with_their_index(strategy: str):
    sizes = {"a": 2_000_000, "b": 400_000, "c": 100_000, "d": 1000}
    tables = [TableConfig(name=name, num_embeddings=rows, embedding_dim=16) for name, rows in sizes.items()]
    for budget in (90_000_000, 120_000_000, 150_000_000):
        found = stoker.plan(
            tables, optimizer=OPTIMIZER, device_memory=budget, host_memory=0, batch_size=256, device="cpu",
            profile=PROFILE, strategy=strategy,
        )  # fmt: skip
        behind = [group for group in found.groups if group.home == "file"]
        assert behind
        assert found["a"].writes == "append"
        taken = sum(group.slot_bytes for group in found.groups) + sum(group.bookkeeping_bytes for group in behind)
        assert taken <= budget + len(behind) * 16 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_cache_fetches_no_more_than_a_pipeline_however_few_slots_there_are(in_flight: int):
    """Measured in the real residency, and so predicted: that is why the planner plans caches alone."""
    sizes, lookups = [30_000, 200, 10_000], 256
    batches, counts = trace(np.random.default_rng(5), sizes, 1.05, lookups, 300, ranked=True)
    uses = [uses_of(size, count, lookups) for size, count in zip(sizes, counts, strict=True)]
    least = max(
        len(np.unique(np.concatenate(batches[step : step + in_flight]))) for step in range(len(batches) - in_flight)
    )
    for slots in (least, int(1.05 * least), int(1.3 * least)):
        given = {"lookahead": 16, "in_flight": in_flight}
        cached, passed = (measured(batches, sizes, slots, transient=kind, **given)[1] for kind in (False, True))
        assert cached <= passed
        expected, without = (expect(uses, slots, transient=kind, **given).fetched for kind in (False, True))
        assert expected <= without
    assert cached < 0.9 * passed


def test_few_slots_are_a_cache_too():
    distinct = sum(uses_of(table.num_embeddings, None, 2048).distinct for table in TABLES)
    for share in (0.5, 1.05, 1.5):
        assert isinstance(planned(TABLES, int(share * distinct) * ROW)["big"], Cached)
    placement = planned(TABLES, int(0.5 * distinct) * ROW)
    (group,) = placement.groups
    assert group.in_parts
    assert group.hit_rate == 0.0
    embeddings = EmbeddingTables(TABLES, optimizer=OPTIMIZER, placement=placement)
    ids = torch.arange(2048).view(-1, 1) % torch.tensor([table.num_embeddings for table in TABLES])
    embeddings(ids).sum().backward()
    # Each distinct row comes for the lookup, and again for the update.
    assert embeddings.groups[0].storage.stats.fetched == pytest.approx(2 * (2048 + SMALL + 2048), rel=0.05)
    assert group.fetched_mib == pytest.approx(2 * distinct * ROW / 2**20)
    embeddings.close()


@pytest.mark.parametrize("in_flight", [None, 1, 3])
def test_the_smallest_budget_named_works_and_less_does_not(in_flight: int | None):
    given = {"spill": "refuse", "in_flight": in_flight}
    with pytest.raises(ConfigError) as caught:
        planned(TABLES, "100KiB", **given)
    message = str(caught.value)
    assert "device_memory 100.0 KiB is too little" in message
    assert "2,048 examples" in message
    least = re.search(r"smallest budget that works is (\S+)\. Give that much \(--device-memory\)", message)
    assert least is not None
    assert not planned(TABLES, least[1], **given).resident
    rows = sum(uses_of(table.num_embeddings, None, 2048).distinct_of(in_flight or 1) for table in TABLES)
    assert rows * ROW < parse_size(least[1]) < 1.2 * rows * ROW
    with pytest.raises(ConfigError, match="smallest budget"):
        planned(TABLES, int(0.75 * parse_size(least[1])), **given)


def test_a_budget_is_named_rounded_up():
    for size in (1, 2**20 - 1, 2**20, 3 * 2**20 + 1, 2**30 - 1, 5 * 2**30 + 1):
        assert size <= parse_size(_at_least(size)) <= 1.1 * size + 2**10


def test_the_smallest_budget_in_parts_is_the_largest_example():
    tables = [
        TableConfig(name="items", num_embeddings=10_000, embedding_dim=16, features=("target", "history")),
        TableConfig(name="user", num_embeddings=10_000, embedding_dim=16),
    ]
    given = {"ids_per_feature": {"history": 8.5}, "max_ids": {"history": 50}}
    assert planned(tables, 52 * ROW, **given).groups[0].slots == 52
    with pytest.raises(ConfigError, match=r"the largest example alone has 3\.5 KiB"):
        planned(tables, 52 * ROW - 1, **given)
    more = planned(tables, "100KiB", **given)
    assert sum(group.distinct_rows for group in more.groups) > sum(
        group.distinct_rows for group in planned(tables, "100KiB").groups
    )


def test_settings_out_of_range_are_refused():
    for wrong in ({"batch_size": 0}, {"lookahead": -1}, {"in_flight": 0}):
        with pytest.raises(ConfigError, match=r"must (be at least 1|not be negative)"):
            planned(TABLES, "1GiB", **wrong)
    with pytest.raises(ConfigError, match="'small' has 100 rows, but 3 counts"):
        planned(TABLES, "1GiB", {"small": torch.ones(3)})
    wide = [TableConfig(name="huge", num_embeddings=10**12, embedding_dim=64)]
    with pytest.raises(ConfigError, match="the rows on cpu would take"):
        planned(wide, "1000TiB")


def test_tables_of_several_widths_divide_the_memory():
    tables = [
        TableConfig(name="narrow", num_embeddings=100_000, embedding_dim=8),
        TableConfig(name="wide", num_embeddings=100_000, embedding_dim=64),
        TableConfig(name="half", num_embeddings=100_000, embedding_dim=64, dtype="bfloat16"),
    ]
    placement = planned(tables, "8MiB")
    assert len(placement.groups) == 3
    assert sum(group.slot_bytes for group in placement.groups) <= 8 * 2**20
    assert all(group.hit_rate > 0.4 for group in placement.groups)
    embeddings = EmbeddingTables(tables, optimizer=OPTIMIZER, placement=placement)
    assert [group.storage.weight.shape[0] for group in embeddings.groups] == [g.slots for g in placement.groups]
    embeddings.close()


@pytest.mark.slow
@settings(max_examples=scaled(60), deadline=None)
@given(
    rows=st.lists(st.integers(1, 30_000), min_size=1, max_size=6),
    share=st.floats(0.02, 1.2),
    counted=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_budget_is_kept_and_more_memory_moves_less(rows: list[int], share: float, counted: bool, seed: int):
    tables = tables_of(**{f"t{i}": count for i, count in enumerate(rows)})
    random = np.random.default_rng(seed)
    counts = {
        table.name: -np.sort(-random.integers(0, 50, table.num_embeddings)) for table in tables if counted
    }  # fmt: skip
    budget = max(len(rows) * ROW, int(share * sum(rows) * ROW))
    moved = []
    for memory in (budget, 2 * budget):
        placement = planned(tables, memory, counts, batch_size=256)
        assert set(placement) == {table.name for table in tables}
        assert sum(group.slot_bytes for group in placement.groups) <= memory
        assert sum(group.rows for group in placement.groups) == sum(rows)
        for group in placement.groups:
            assert 0 <= group.hit_rate <= 1
            assert 0 <= group.lookup_hit_rate <= 1
            assert group.written_mib <= group.fetched_mib + 1e-9
        moved.append(sum(group.fetched_mib for group in placement.groups))
    assert moved[1] <= moved[0] * 1.02 + 1e-6


def trace(
    random: np.random.Generator, sizes: list[int], alpha: float, lookups: int, steps: int, *, ranked: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Distinct addresses of each batch, and the counts of each table; ``ranked``: ids fall in their counts."""
    parts, counts, base = [], [], 0
    for size in sizes:
        mass = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -alpha)
        ids = np.searchsorted(mass, random.random(lookups * steps) * mass[-1])
        count = np.bincount(ids, minlength=size)
        if ranked:
            order = np.argsort(-count, kind="stable")
            new = np.empty(size, np.int64)
            new[order] = np.arange(size)
            ids, count = new[ids], count[order]
        parts.append(ids.reshape(steps, lookups) + base)
        counts.append(count)
        base += size
    return [np.concatenate([np.unique(part[step]) for part in parts]) for step in range(steps)], counts


def measured(batches: list[np.ndarray], sizes: list[int], slots: int, *, lookahead: int, in_flight: int, skip: int = 0,
             transient: bool = False) -> tuple[float, float]:  # fmt: skip
    """(share of distinct rows found, rows fetched a step) by the real residency."""
    residency = make_residency(np.concatenate([[0], np.cumsum(sizes)]), slots, transient=transient)
    misses = total = ahead = 0
    held: deque[np.ndarray] = deque()
    for step in range(len(batches)):
        while ahead < len(batches) and ahead <= step + lookahead:
            residency.announce(batches[ahead])
            ahead += 1
        while len(held) >= in_flight:
            residency.release(held.popleft(), changed=True)
        plan = residency.plan()
        assert plan is not None
        held.append(plan.slots)
        if step >= skip:
            misses, total = misses + len(plan.fetch_rows), total + len(plan.slots)
    return 1 - misses / total, misses / (len(batches) - skip)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.7, 1.05, 1.3])
@pytest.mark.parametrize("sizes", [[40_000], [30_000, 200, 10_000]], ids=["one table", "three tables"])
def test_hit_rates_come_true_within_two_points(alpha: float, sizes: list[int]):
    lookups, steps = 256, 500
    batches, counts = trace(np.random.default_rng(3), sizes, alpha, lookups, steps, ranked=True)
    uses = [uses_of(size, count, lookups) for size, count in zip(sizes, counts, strict=True)]
    distinct = float(np.mean([len(batch) for batch in batches]))
    for share in (0.05, 0.2):
        slots = int(share * sum(sizes))
        for lookahead, in_flight in ((0, 1), (4, 2), (16, 1), (64, 1), (64, 3), (None, 1)):  # None: the whole epoch
            window = steps if lookahead is None else lookahead
            seen, fetched = measured(batches, sizes, slots, lookahead=window, in_flight=in_flight)
            traffic = expect(uses, slots, lookahead=lookahead, in_flight=in_flight)
            case = f"share {share}, lookahead {lookahead}, in_flight {in_flight}"
            assert traffic.distinct == pytest.approx(distinct, rel=0.01)
            assert traffic.hit_rate == pytest.approx(seen, abs=0.02), case
            assert traffic.fetched == pytest.approx(fetched, rel=0.1), case
    seen, _ = measured(batches, sizes, slots, lookahead=0, in_flight=2, transient=True)
    assert expect(uses, slots, lookahead=0, in_flight=2, transient=True).hit_rate == pytest.approx(seen, abs=0.02)


def test_without_counts_a_warm_cache_is_predicted():
    sizes, lookups = [40_000], 256
    batches, _ = trace(np.random.default_rng(4), sizes, 1.05, lookups, 1000, ranked=False)
    uses = [uses_of(sizes[0], None, lookups)]
    for lookahead in (2, 64):
        seen, _ = measured(batches, sizes, 4000, lookahead=lookahead, in_flight=1, skip=400)
        assert expect(uses, 4000, lookahead=lookahead, in_flight=1).hit_rate == pytest.approx(seen, abs=0.02)


@pytest.mark.slow
def test_lookups_and_traffic_agree_with_a_replay(tmp_path):
    data, _ = stoker.synthetic.dataset(tmp_path / "d", rows=200_000, sizes=[30_000, 10_000, 100, 5], num_dense=1)
    found = stoker.replay(data, fraction=0.05, batch_size=512, strategies=["lookahead-64"], in_flight=2)
    (figures,) = found.strategies
    uses = [uses_of(len(count), count, 512) for count in data.counts.values()]
    traffic = expect(uses, found.slots, lookahead=64, in_flight=2)
    assert traffic.hit_rate == pytest.approx(figures.hit_rate, abs=0.02)
    assert traffic.lookup_hit_rate == pytest.approx(figures.lookup_hit_rate, abs=0.02)
    mib = found.row_bytes / 2**20
    assert traffic.fetched * mib == pytest.approx(figures.mib_in_per_step, rel=0.1)
    assert traffic.written * mib == pytest.approx(figures.mib_out_per_step, rel=0.1)
    assert traffic.first * found.steps == pytest.approx(figures.compulsory, rel=0.01)
    roomy = expect(uses, sum(len(count) for count in data.counts.values()), lookahead=64, in_flight=2)
    assert roomy.written < 0.05 * roomy.fetched  # rows that are in slots at the end of the epoch


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
def test_a_table_of_400_million_rows_is_planned_in_little_memory(counted: bool):
    rows = 400_000_000
    table = [TableConfig(name="items", num_embeddings=rows, embedding_dim=64)]
    # Counts that take no memory themselves: one number, repeated.
    counts = {"items": torch.tensor([3], dtype=torch.int32).expand(rows)} if counted else None
    tracemalloc.start()
    placement = planned(table, "4GiB", counts, batch_size=8192, host_memory="8GiB")
    (group,) = placement.groups
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * 2**20
    assert group.home == "file"
    assert 3.8 * 2**30 < group.slot_bytes + group.bookkeeping_bytes <= 4 * 2**30 + 16 * 2**20
    assert group.slots > 2.2 * 2**30 // 260


def test_a_report_shows_every_group():
    placement = planned(TABLES, "3MiB")
    assert "1 table on the device" in placement._repr_html_()
    assert placement._judged is None, "a notebook shows a placement without measuring the machine"
    text = placement.report()
    for word in ("big, other", "small", "cached", "memory", "device", "hit rate of lookups", "MiB fetched a step"):
        assert word in text
    assert "1 table on the device, 2 tables cached in" in placement.summary()
    assert placement.to_dict()["groups"][0]["tables"]


def test_a_row_of_a_file_takes_the_time_of_where_it_is():
    traffic = Traffic(distinct=100.0, hits=40.0, lookups=200.0, lookups_hit=100.0, first=10.0, written=20.0)
    fetched, written = 60 / PROFILE.fetch, 20 / PROFILE.store
    assert PROFILE.move_seconds(traffic, ROW, in_memory=True, cold=0.0) == pytest.approx(fetched + written)
    # 10 rows are computed, and of the 50 others that are in the file a fifth is not in the page cache.
    first, warm, stored, cold = 10 / 1e7, 40 / 1e6, 20 / 1e6, 10 / 1e5
    for size in (1, 2):
        given = {"row_bytes": size * ROW, "cold": 0.2}
        moving = PROFILE.move_seconds(traffic, in_memory=False, **given)
        assert moving == pytest.approx(size * (first + warm + stored))
        assert PROFILE.disk_seconds(traffic, **given) == pytest.approx(size * cold)
    assert PROFILE.disk_seconds(traffic, ROW, cold=0.0) == 0.0
    assert replace(PROFILE, file_cold=None).disk_seconds(traffic, ROW, cold=0.2) == 0.0


@pytest.mark.slow
def test_this_machine_is_measured_once(tmp_path):
    first = measure_profile(dim=8, state={"sum": "scalar"}, directory=str(tmp_path), file=True)
    assert first.row_bytes == 36
    for name in ("fetch", "store", "plan_lookup", "file_cold", "file_warm", "file_store"):
        assert getattr(first, name) > 0, name
    assert first.plan_row + first.plan_miss > 0
    assert measure_profile(dim=8, state={"sum": "scalar"}, directory=str(tmp_path), file=True) is first
    assert not list(tmp_path.iterdir()), "the home is gone"


def test_tables_or_the_module_that_holds_them_can_be_planned() -> None:
    tables = EmbeddingTables(tables_of(big=1000, small=10), optimizer=OPTIMIZER)
    asked = {"device_memory": 500 * ROW, "profile": PROFILE, "device": "cpu"}
    expected = stoker.plan(tables.tables, optimizer=OPTIMIZER, **asked)
    assert dict(stoker.plan(tables, **asked)) == dict(expected)
    assert dict(stoker.plan(torch.nn.ModuleDict({"embeddings": tables}), **asked)) == dict(expected)
    EmbeddingTables(tables.tables, optimizer=OPTIMIZER, placement=stoker.plan(tables, **asked))
    for wrong, words in (
        (torch.nn.Linear(1, 1), "Linear contains 0 EmbeddingTables"), ([], "plan needs tables"),
        ("big", "plan needs tables"), (tables.tables, "Pass optimizer="),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            stoker.plan(wrong, **asked)
