"""stoker.replay: the fast simulation equals the plain one, the plain one is right, and figures mean what they say."""

from __future__ import annotations

import itertools
import json
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from benchmarks.naive_replay import Row, replay_reference
from stoker.base import spool
from stoker.base.errors import ConfigError, DataError, DependencyError
from stoker.base.progress import quiet
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_manifest
from stoker.placement.replay import CacheStrategy, HitCounts, IdTrace, _most_used, _pinned, record, row_size, simulate
from stoker.tables.slots.slotted import make_residency
from stoker.testing import make_dataset

TABLES = 3
NAMES = ("lru", "lfu", "lookahead-1", "lookahead-2", "lookahead-5", "adaptive", "hot-cold", "host-pipelined", "belady")

Lookups = list[Row]  # (id, table) of each lookup of a batch


def counted(batches: Sequence[Lookups]) -> list[Counter[Row]]:
    return [Counter(batch) for batch in batches]


def traced(batches: Sequence[Lookups]) -> IdTrace:
    keys = [np.array([row * TABLES + table for row, table in batch], np.int64) for batch in batches]
    return record(keys)[0]


def rows_in_flight(batches: Sequence[Lookups], in_flight: int) -> int:
    return max(len(set(itertools.chain(*batches[max(0, t - in_flight + 1) : t + 1]))) for t in range(len(batches)))


traces = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, TABLES - 1)), max_size=8), min_size=1, max_size=14
).filter(any)


@pytest.mark.slow
@settings(max_examples=scaled(400), deadline=None)
@given(
    batches=traces,
    name=st.sampled_from(NAMES),
    in_flight=st.integers(1, 4),
    spare=st.integers(0, 5),
    chunk=st.sampled_from([1, 7, 2**20]),
)
def test_the_fast_simulation_equals_the_plain_one(
    batches: list[Lookups], name: str, in_flight: int, spare: int, chunk: int
) -> None:
    strategy = CacheStrategy.parse(name)
    slots = rows_in_flight(batches, in_flight) + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "CHUNK", chunk)
        fast = simulate(traced(batches), strategy, slots, in_flight)
    assert fast == replay_reference(counted(batches), slots, strategy, in_flight=in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_on_a_longer_skewed_trace(name: str, in_flight: int) -> None:
    """Enough rows and steps for the heap to shed stale entries."""
    rng = np.random.default_rng(1)
    batches = [
        list(zip((rng.zipf(1.2, 150) % 900).tolist(), rng.integers(0, TABLES, 150).tolist(), strict=True))
        for _ in range(120)
    ]
    strategy = CacheStrategy.parse(name)
    slots = rows_in_flight(batches, in_flight) + 40
    trace = traced(batches)
    expected = replay_reference(counted(batches), slots, strategy, in_flight=in_flight)
    assert expected.written_back > slots
    assert simulate(trace, strategy, slots, in_flight) == expected


def test_hot_rows_of_the_tables_move_what_replay_says() -> None:
    """One table, ids by falling use, and the storage behind HotCold with as many hot rows: but for their first use,
    hot rows never come, as they are there before the first step."""
    rng = np.random.default_rng(2)
    batches = [[(int(row), 0) for row in np.minimum(rng.zipf(1.3, 60) - 1, 399)] for _ in range(50)]
    uses = Counter(row for batch in batches for row in set(batch))
    rank = {row: number for number, row in enumerate(sorted(uses, key=lambda row: (-uses[row], row)))}
    batches = [[(rank[row], 0) for row in batch] for batch in batches]
    slots = 120
    found = simulate(traced(batches), CacheStrategy(kind="hot-cold"), slots, 1)
    cold = [{row for row, _ in batch} for batch in batches]
    hot = next(
        count
        for count in range(len(rank), 0, -1)
        if count + max(len({r for r in b if r >= count}) for b in cold) <= slots
    )
    table = stoker.TableConfig(name="t", num_embeddings=400, embedding_dim=2)
    tables = stoker.EmbeddingTables(
        [table], optimizer=stoker.SGD(lr=0.1), placement=stoker.HotCold(hot={"t": hot}, slots=slots)
    )
    for batch in batches:
        tables(torch.tensor([[row] for row, _ in batch])).sum().backward()
    stats = tables.groups[0].storage.stats  # type: ignore[attr-defined]
    assert hot > 50
    assert found.misses == stats.fetched + hot
    assert found.hits == stats.hits - hot
    left = {row for row, _ in batches[-1] if row >= hot}
    assert found.written_back == stats.written == stats.fetched - len(left)
    tables.close()


@pytest.mark.parametrize("fast", [False, True])
@settings(max_examples=scaled(60), deadline=None)
@given(
    batches=traces,
    window=st.integers(1, 5),
    transient=st.booleans(),
    in_flight=st.integers(1, 4),
    spare=st.integers(0, 5),
)
def test_replay_says_what_the_tables_plan(
    batches: list[Lookups], window: int, transient: bool, in_flight: int, spare: int, fast: bool
) -> None:
    """The residency behind Cached and HostPipelined, driven as a trainer drives it, fetches and evicts as foretold."""
    slots = rows_in_flight(batches, in_flight) + spare
    residency = make_residency([0, 7, 14, 21], slots, transient=transient, fast=fast)
    addresses = [np.array(sorted({table * 7 + row for row, table in batch}), np.int64) for batch in batches]
    held: deque[np.ndarray] = deque()
    fetched = evicted = 0
    for step in range(len(batches)):
        for rows in addresses[0 if step == 0 else step + window : step + window + 1]:
            residency.announce(rows)
        if len(held) == in_flight:
            residency.release(held.popleft(), changed=True)
        plan = residency.plan()
        assert plan is not None
        held.append(plan.slots)
        fetched += len(plan.fetch_rows)
        evicted += len(plan.evict_rows)
    strategy = CacheStrategy(kind="host-pipelined") if transient else CacheStrategy(kind="lookahead", window=window)
    found = simulate(traced(batches), strategy, slots, in_flight)
    assert (found.misses, found.written_back) == (fetched, evicted)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 6_000, 2**20])
@pytest.mark.parametrize("hot", [0, 15])
def test_an_adaptive_cache_fetches_what_replay_says(memory: int, hot: int) -> None:
    """Rows of three tables come back after about 40 batches; a window of 8 batches does not see that."""
    rng = np.random.default_rng(3)
    drawn = [(rng.integers(0, 20, (12, TABLES)) + 3 * step) % 120 for step in range(400)]
    batches = [[(int(row), table) for row, table in zip(ids.flat, [0, 1, 2] * 12, strict=True)] for ids in drawn]
    pins = frozenset((row, table) for row in range(hot) for table in range(TABLES))
    strategy = CacheStrategy(kind="pinned", memory=memory)
    trace, slots = traced(batches), 150 + TABLES * hot
    found = _pinned(trace, strategy, [hot] * TABLES, slots, 1, quiet)
    assert found.counts == replay_reference(counted(batches), slots, strategy, pinned=pins)
    best = replay_reference(counted(batches), slots, CacheStrategy(kind="belady"), pinned=pins)
    assert (found.counts.misses < 1.01 * best.misses) is (memory == 2**20) is (found.ahead > 20)

    names = [f"t{table}" for table in range(TABLES)]
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name=name, num_embeddings=120, embedding_dim=1) for name in names],
        optimizer=stoker.SGD(lr=0.1),
        placement=stoker.Cached(slots=slots, hot=dict.fromkeys(names, hot), window=memory, home="file"),
    )
    stream = [torch.from_numpy(ids) for ids in drawn]
    for ids in stoker.stage(stream, tables, in_flight=1, background=False, lookups=lambda ids: ids):
        tables(ids).sum().backward()
    assert tables.groups[0].storage.stats.fetched + TABLES * hot == found.counts.misses  # type: ignore[attr-defined]
    tables.close()


def least_misses(batches: Sequence[Counter[Row]], slots: int) -> int:
    """Over every way to choose victims."""
    states: dict[frozenset[Row], int] = {frozenset(): 0}
    for batch in batches:
        later: dict[frozenset[Row], int] = {}
        for resident, misses in states.items():
            missing = batch.keys() - resident
            leaving = max(0, len(missing) - (slots - len(resident)))
            for victims in itertools.combinations(resident - batch.keys(), leaving):
                after = (resident - set(victims)) | missing
                later[after] = min(later.get(after, 10**9), misses + len(missing))
        states = later
    return min(states.values())


small = st.lists(st.lists(st.tuples(st.integers(0, 5), st.just(0)), min_size=1, max_size=3), min_size=1, max_size=8)


@settings(max_examples=scaled(150), deadline=None)
@given(batches=small, spare=st.integers(0, 2))
def test_no_choice_of_victims_misses_less_than_belady(batches: list[Lookups], spare: int) -> None:
    slots = rows_in_flight(batches, 1) + spare
    found = replay_reference(counted(batches), slots, CacheStrategy.parse("belady"))
    assert found.misses == least_misses(counted(batches), slots)


@settings(max_examples=scaled(100), deadline=None)
@given(batches=traces, in_flight=st.integers(1, 3), spare=st.integers(0, 5))
def test_what_holds_for_every_strategy(batches: list[Lookups], in_flight: int, spare: int) -> None:
    slots = rows_in_flight(batches, in_flight) + spare
    plain = counted(batches)
    found = {name: replay_reference(plain, slots, CacheStrategy.parse(name), in_flight=in_flight) for name in NAMES}
    for counts in found.values():
        assert counts.hits + counts.misses == sum(map(len, plain))
        assert counts.compulsory == len(set().union(*plain)) <= counts.misses
        assert 0 <= counts.misses - counts.written_back <= slots
        assert counts.misses >= found["belady"].misses
    whole = replay_reference(plain, slots, CacheStrategy.parse(f"lookahead-{len(batches)}"), in_flight=in_flight)
    assert whole == found["belady"]


def test_a_trace_worked_by_hand() -> None:
    """Three slots, one table. After step 1 they hold 1, 2 and 3; step 2 needs 4, and one of the three leaves."""
    batches = [[(1, 0), (2, 0), (1, 0)], [(1, 0), (3, 0)], [(4, 0)], [(2, 0), (2, 0), (2, 0)], [(3, 0)]]

    def run(name: str) -> HitCounts:
        return replay_reference(counted(batches), 3, CacheStrategy.parse(name))

    # lru: 2 leaves for 4 (used at step 0 only), then 3 for 2 (tie of 1 and 3 at step 1: 3 is rarer), then 1 for 3.
    assert run("lru") == HitCounts(hits=1, lookups_hit=1, misses=6, compulsory=4, written_back=3)
    # lfu: 2 and 3 were used once, 1 twice: 3 leaves for 4, 2 is hit three times over; then 4 leaves for 3.
    assert run("lfu") == HitCounts(hits=2, lookups_hit=4, misses=5, compulsory=4, written_back=2)
    # With one batch known: at step 2 only the use of 2 at step 3 is known; 1 and 3 tie, 3 leaves. Then 4 leaves for 3.
    assert run("lookahead-1") == HitCounts(hits=2, lookups_hit=4, misses=5, compulsory=4, written_back=2)
    # With two known, 1 leaves, and all else is a hit.
    assert run("lookahead-2") == run("belady") == HitCounts(3, 5, 4, 4, 1)
    # Only row 1 is in two batches in a row.
    assert run("host-pipelined") == HitCounts(hits=1, lookups_hit=1, misses=6, compulsory=4, written_back=5)


def test_equal_ids_leave_from_the_last_table() -> None:
    """Ids 5 of the tables 0 and 1 and id 4 of table 2 tie; (5, 1) leaves first, then (5, 0), then (4, 2)."""
    start = [(5, 0), (5, 1), (4, 2)]
    for later, misses in (([(5, 0)], 4), ([(4, 2)], 4), ([(5, 1)], 5)):
        for name in ("lru", "lfu", "lookahead-1"):
            batches = [start, [(0, 0)], later]
            if name == "lookahead-1":  # so that the decision at step 1 knows of no use
                batches = [start, [(0, 0)], [(0, 0)], later]
            slots = 3
            expected = replay_reference(counted(batches), slots, CacheStrategy.parse(name))
            assert expected.misses == misses, (name, later)
            assert simulate(traced(batches), CacheStrategy.parse(name), slots) == expected


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(
        tmp_path_factory.mktemp("d"), rows=1000, shard_rows=300, sequence={1: 4}, num_embeddings=(300, 200, 7)
    )


def batches_of(data: Dataset, batch_size: int, seed: int | None, steps: int) -> list[Lookups]:
    """Read a lookup at a time."""
    found: list[Lookups] = []
    stream = data.train.batches(batch_size, seed=seed)
    while True:
        for batch in stream:
            assert batch.offsets is not None
            ids, ends = batch.ids.tolist(), batch.offsets.tolist()
            found.append(
                [(ids[i], bag % 3) for bag, (a, b) in enumerate(itertools.pairwise(ends)) for i in range(a, b)]
            )
            if len(found) == steps:
                return found


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "steps"), [(None, None), (5, None), (5, 20), (None, 3)])
def test_a_dataset_is_read_as_the_trainer_reads_it(data: Dataset, seed: int | None, steps: int | None) -> None:
    found = stoker.replay(
        data, slots=350, batch_size=100, seed=seed, steps=steps, in_flight=2, strategies=[*NAMES, "lru"]
    )
    batches = batches_of(data, 100, seed, steps or 8)
    assert found.steps == len(batches)
    assert found.num_rows == 507
    assert found.rows_used == len(set(itertools.chain(*batches)))
    assert found.lookups == sum(map(len, batches))
    assert found.least_slots == rows_in_flight(batches, 2)
    assert sorted(f.strategy for f in found.strategies) == sorted(NAMES)
    for name in NAMES:
        counts = replay_reference(counted(batches), 350, CacheStrategy.parse(name), in_flight=2)
        figures = found[name]
        assert (figures.hits, figures.misses, figures.compulsory, figures.written_back) == (
            counts.hits, counts.misses, counts.compulsory, counts.written_back
        )  # fmt: skip
        assert figures.hit_rate == pytest.approx(counts.hits / found.rows_needed)
        assert figures.lookup_hit_rate == pytest.approx(counts.lookups_hit / found.lookups)
        assert figures.mib_in_per_step == pytest.approx(counts.misses * 68 / 2**20 / len(batches))
        assert figures.mib_out_per_step == pytest.approx(counts.written_back * 68 / 2**20 / len(batches))
        assert figures.above_belady == pytest.approx(counts.misses / found["belady"].misses - 1)
    assert [f.hit_rate for f in found.strategies] == sorted((f.hit_rate for f in found.strategies), reverse=True)


def test_tables_without_sequences(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, rows=400, num_embeddings=(90, 30, 5))
    found = stoker.replay(str(tmp_path), slots=70, batch_size=50, strategies=["lookahead-2"])
    batches = [
        [(row, table) for example in batch.ids.tolist() for table, row in enumerate(example)]
        for batch in data.train.batches(50, seed=0)
    ]
    expected = replay_reference(counted(batches), 70, CacheStrategy.parse("lookahead-2"))
    assert found["lookahead-2"].misses == expected.misses
    assert found["lookahead-2"].above_belady is None


def test_an_id_outside_its_table_is_named(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, rows=100, num_embeddings=(90, 30, 5))
    manifest = tmp_path / "manifest.json"
    write_manifest(tmp_path, json.loads(manifest.read_text().replace('"C3": 5', '"C3": 4')))
    assert Dataset(tmp_path).schema.num_embeddings["C3"] == 4
    with pytest.raises(DataError, match="feature C3 holds id 4, table C3 has 4 rows"):
        stoker.replay(data.path, slots=90)


@pytest.mark.slow
def test_the_three_ways_to_say_how_many_slots(data: Dataset) -> None:
    def slots(**settings: Any) -> int:
        return stoker.replay(data, batch_size=4, strategies=["lru"], **settings).slots

    assert slots() == 51
    assert slots(fraction="20%") == slots(fraction=0.2) == 101
    assert slots(slots=33) == 33
    assert slots(slots=10**6) == 507
    assert slots(device_memory="10KiB", embedding_dim=16) == 10_240 // 68
    assert slots(device_memory=10_240, embedding_dim=16, dtype="bfloat16", row_optimizer="adam") == 10_240 // (32 + 128)


def test_bytes_of_a_row() -> None:
    assert row_size(16, "float32", "sgd") == 64
    assert row_size(16, "float32", stoker.RowWiseAdagrad(lr=0.1)) == 68
    assert row_size(16, "float32", "adagrad") == 128
    assert row_size(16, "bfloat16", "adam") == 32 + 128


def test_arrays_of_ids() -> None:
    arrays = [np.array([[1, 2], [1, 3]], np.int32), torch.tensor([4]), [2, 2], np.array([], np.int64), (3,)]
    seen: list[tuple[str, int, int]] = []
    found = stoker.replay(arrays, slots=3, strategies=["lfu"], progress=lambda *what: seen.append(what))
    assert (found.steps, found.num_rows, found.rows_needed, found.lookups) == (5, 5, 6, 8)
    assert found.batch_size is None
    assert found["lfu"].misses == 5  # 1, 2, 3; 4 takes the place of 3; 2 is there; 3 is not
    assert ("reading ids", 5, 5) in seen
    assert ("lfu", 5, 5) in seen
    again = stoker.replay(iter(arrays), slots=3, strategies=["lfu"], steps=3, num_embeddings=100)
    assert (again.steps, again.num_rows) == (3, 100)
    with pytest.raises(KeyError, match="'lru' was not replayed, only lfu"):
        again["lru"]


def test_too_few_slots_are_refused_with_the_number_that_works(data: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"batch 0 needs \d+ rows .* \(in_flight=2\), but there are 40 slots") as e:
        stoker.replay(data, slots=40, batch_size=100, in_flight=2)
    message = str(e.value)
    least = int(message.split("Give at least ")[1].split(" ")[0])
    assert "lower batch_size or in_flight" in message
    with pytest.raises(ConfigError, match=f"Give at least {least} slots"):
        stoker.replay(data, slots=least - 1, batch_size=100, in_flight=2)
    assert stoker.replay(data, slots=least, batch_size=100, in_flight=2).least_slots == least
    with pytest.raises(ConfigError, match="3 rows in flight, but there are 2 slots"):
        replay_reference([Counter([(0, 0)]), Counter([(1, 0), (2, 0)])], 2, CacheStrategy(kind="lru"), in_flight=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategies": ["mru"]}, "'mru' is unknown. Choose among lru"),
        ({"strategies": ["lookahead-0"]}, "at least 1"),
        ({"strategies": []}, "no strategy"),
        ({"slots": 5, "fraction": 0.5}, "Give one of them"),
        ({"slots": 0}, "at least 1"),
        ({"fraction": 0.0}, "above 0"),
        ({"fraction": "0.1%"}, "there are 1 slots"),
        ({"device_memory": "10B"}, "no row of 68 bytes"),
        ({"in_flight": 0}, "in_flight is 0; it must be at least 1"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"embedding_dim": 0}, "at least 1"),
        ({"dtype": "float16"}, "'float16' is unknown"),
        ({"row_optimizer": "lion"}, "'lion' is unknown"),
    ],
)
def test_settings_that_cannot_work(data: Dataset, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stoker.replay(data, **settings)


def test_pinned_rows_leave_the_slots_that_the_others_in_flight_need(data: Dataset) -> None:
    given = {"batch_size": 100, "in_flight": 2}
    least = stoker.replay(data, fraction=1.0, strategies=["lru"], **given).least_slots
    all_of_them, some = (
        stoker.replay(data, slots=least + 5, strategies=["pinned"], pinned=share, **given).strategies[0]
        for share in (1.0, 5 / (least + 5))
    )
    assert all_of_them.misses == some.misses


def test_a_window_knows_as_many_batches_as_its_name_says(data: Dataset) -> None:
    found = stoker.replay(data, fraction=1.0, batch_size=100, strategies=["lookahead-1", "lookahead-3"]).strategies
    assert {each.strategy: each.ahead for each in found} == {"lookahead-1": 1, "lookahead-3": 3}


def test_counts_are_not_copied_to_find_the_most_used_ids() -> None:
    counts = {name: 10**6 // np.arange(1, 2**19 + 1) for name in "ab"}
    tracemalloc.start()
    assert _most_used(counts, 100) == {"a": 50, "b": 50}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < counts["a"].nbytes / 4


def test_of_equally_used_ids_none_is_pinned_where_not_all_can_be() -> None:
    counts = {"a": np.array([9, 3, 3]), "b": np.array([7, 3])}
    two, five = {"a": 1, "b": 1}, {"a": 3, "b": 2}
    for most, expected in enumerate(({}, {"a": 1, "b": 0}, two, two, two, five, five)):
        assert _most_used(counts, most) == expected
    assert _most_used({"a": np.array([2, 0])}, 2) == {"a": 1}, "ids that do not occur need no slot"


def test_a_ranking_of_millions_of_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.placement.replay.FARTHEST", 8)
    assert stoker.replay([[1], [2], [3], [1]], slots=2, strategies=["lru"])["lru"].misses == 4
    with pytest.raises(ConfigError, match=r"lfu ranks at most 4 batches, not 5\. Give fewer steps"):
        stoker.replay([[1]] * 5, slots=2, strategies=["lfu"])
    assert stoker.replay([[1]] * 5, slots=2, strategies=["adaptive"])["adaptive"].misses == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([[1], [0, -3]], "batch 1 has ids from -3 to 0"),
        ([[1.5]], "batch 0 has ids of type float64"),
        ([[7, 12]], "below num_embeddings=10"),
        ([[], []], "has no lookups"),
        ([], "has no lookups"),
    ],
)
def test_ids_that_cannot_be(arrays: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        stoker.replay(arrays, slots=3, num_embeddings=10)


def test_without_numba_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(DependencyError, match="pip install numba"):
        stoker.replay([[1]], slots=1)


def test_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stoker.replay([[1, 2], [3]], slots=2)
    with pytest.raises(DataError):
        stoker.replay([[1, 2], [-3]], slots=2)
    assert list(tmp_path.iterdir()) == []
