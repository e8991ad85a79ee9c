"""How far a stage goes ahead: ``in_flight`` batches with their rows, and ``lookahead`` beyond them with their ids."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import stoker
from stoker import Batch, Cached, EmbeddingTables, TableConfig
from stoker.tables.slots.residency import known_bytes
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.slots.window import FARTHER, IN_MEMORY, LEAST, Ahead

ROWS, EACH, COUNT = 400, 8, 30
stage_module: Any = sys.modules["stoker.tables.stage"]  # the package has the function of this name


def tables_with(placement: Any = None) -> EmbeddingTables:
    table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=4)
    return EmbeddingTables([table], optimizer=stoker.Adagrad(lr=0.1), placement=placement)


class Source:
    """Batches of rows of their own, and how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Batch]:
        for step in range(COUNT):
            self.taken += 1
            ids = (torch.arange(EACH) + EACH * step).remainder(ROWS).view(-1, 1)
            yield Batch(dense=torch.zeros(EACH, 0), ids=ids, step=step)


def trained(tables: EmbeddingTables, batches: Any) -> torch.Tensor:
    for batch in batches:
        tables(batch.ids).square().sum().backward()
    return tables.rows("t")


@pytest.mark.parametrize(("in_flight", "lookahead"), [(1, 0), (1, 4), (3, 4), (12, 4), (12, 0)])
def test_lookahead_begins_behind_the_batches_in_flight(in_flight: int, lookahead: int) -> None:
    source, tables = Source(), tables_with(Cached(slots=EACH * 12))
    storage = tables.groups[0].storage
    assert isinstance(storage, SlottedRows)
    batches = iter(stoker.stage(source, tables, in_flight=in_flight, lookahead=lookahead, background=False))
    next(batches)
    assert source.taken == in_flight + lookahead
    assert storage.residency.free == storage.num_slots - EACH * in_flight
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("background", [False, True])
def test_more_in_flight_than_lookahead_and_slots_hold_changes_no_number(background: bool) -> None:
    tables = tables_with(Cached(slots=EACH * 5))
    storage = tables.groups[0].storage
    assert isinstance(storage, SlottedRows)
    staged = stoker.stage(Source(), tables, in_flight=100, lookahead=4, background=background)
    most = 0

    def watched() -> Iterator[Batch]:
        nonlocal most
        for batch in staged:
            held = [found() for found in storage._leases.values()]  # this one included, until it is looked up
            most = max(most, sum(lease is not None and lease.staged for lease in held))
            yield batch

    rows = trained(tables, watched())
    assert most == 5 if not background else 1 <= most <= 5  # how far a thread comes is for the clock to say
    assert torch.equal(rows, trained(tables_with(), Source()))


@pytest.mark.slow
def test_batches_that_do_not_fit_yet_keep_their_turn() -> None:
    """With more in flight than the slots hold, no row is fetched for a batch whose slots another one then takes."""
    tables = [TableConfig(name=name, num_embeddings=500, embedding_dim=dim) for name, dim in (("a", 4), ("b", 8))]
    random = torch.Generator().manual_seed(0)
    all_ids = (torch.rand(60, 32, 2, generator=random) ** 3 * 500).long()
    batches = [Batch(dense=torch.zeros(32, 0), ids=ids, step=step) for step, ids in enumerate(all_ids)]
    made = EmbeddingTables(tables, optimizer=stoker.Adagrad(lr=0.1), placement=Cached(slots=80))
    assert len(made.groups) == 2  # one may have room for a batch while the other has none
    for batch in stoker.stage(batches, made, in_flight=8, lookahead=4, background=False):
        sum(rows.square().sum() for rows in made(batch.ids)).backward()  # type: ignore[union-attr]
    for place, group in enumerate(made.groups):
        assert isinstance(group.storage, SlottedRows)
        assert group.storage.stats.rows == sum(len(ids[:, place].unique()) for ids in all_ids)
        assert group.storage.stats.fetched + group.storage.stats.hits == group.storage.stats.rows


def drifting(count: int = 300, rows: int = 60, each: int = 5) -> list[Batch]:
    """Batches whose rows come back after about 40 others, so that short windows do not see the next use."""
    random = torch.Generator().manual_seed(0)
    drawn = [(torch.randint(0, 20, (each, 1), generator=random) + 4 * step).remainder(rows) for step in range(count)]
    return [Batch(dense=torch.zeros(each, 0), ids=ids, step=step) for step, ids in enumerate(drawn)]


def watched(window: int | None, lookahead: int | None = None) -> tuple[int, list[int], int]:
    """The misses of a cache of 20 rows; how far it looked ahead at each batch; the most bytes of waiting batches."""
    tables = tables_with(Cached(slots=20, window=window))
    storage = tables.groups[0].storage
    assert isinstance(storage, SlottedRows)
    staged, ahead, most = stoker.stage(drifting(), tables, lookahead=lookahead, background=False), [], 0.0
    for batch in staged:
        ahead.append(staged.ahead.batches)
        most = max(most, storage._queues[0].bytes)
        tables(batch.ids).sum().backward()
    return storage.stats.fetched, ahead, int(most)


@pytest.mark.slow
def test_a_window_that_adapts_is_as_good_as_the_whole_future_and_no_longer_than_that_takes() -> None:
    misses, ahead, _ = watched(window=2**20)
    everything, short = watched(2**20, lookahead=1000)[0], watched(2**20, lookahead=1)[0]
    assert everything <= misses <= 1.01 * everything < 0.9 * short
    assert ahead[0] == LEAST
    assert LEAST < max(ahead) < 60, "more batches than a plan needs"
    assert sorted(ahead) != ahead, "it never shrinks"


def test_batches_in_flight_follow_the_stalls() -> None:
    adapts = stoker.stage(Source(), tables_with(Cached(slots=100)), background=True)

    def after(share: float, checks: int) -> int:
        for _ in range(checks):
            adapts._judge_stalls(share)
        return adapts.in_flight

    assert [after(0.1, 1), after(0.1, 2), after(0.1, 20)] == [3, 5, 8]
    assert [after(0.01, 100), after(0.0, 7), after(0.01, 1), after(0.0, 7)] == [8] * 4  # some stalls: as it is
    assert [after(0.0, 1), after(0.0, 15), after(0.0, 1)] == [7, 7, 6]  # the second shrink takes twice as long
    assert after(0.0, 1000) == 2
    fixed = stoker.stage(Source(), tables_with(Cached(slots=100)), background=True, in_flight=3)
    fixed._judge_stalls(0.5)
    assert fixed.in_flight == 3


def test_in_memory_a_window_stops_growing_where_planning_costs_more_than_it_saves() -> None:
    in_memory, in_a_file = Ahead(most=IN_MEMORY), Ahead()
    for ahead in (in_memory, in_a_file):
        for _ in range(100):
            ahead.judge(True, ahead.batches)
    assert (in_memory.batches, in_a_file.batches) == (IN_MEMORY, LEAST + 100 * FARTHER)
    for home, most in (("memory", IN_MEMORY), ("file", None)):
        staged = stoker.stage(Source(), tables_with(Cached(slots=20, home=home)))
        assert staged.ahead._most == most


@pytest.mark.slow
def test_a_window_keeps_to_its_memory() -> None:
    batch = int(known_bytes(EACH, EACH))
    _, _, most = watched(window=3 * batch)
    assert 2 * batch < most <= 4 * batch
    assert watched(0)[2] <= 2 * batch  # the next batch is read in any case


def test_a_thread_that_finds_rows_ahead_changes_nothing() -> None:
    """Also not when the stream fails: the batches before come first, and the thread ends."""

    def broken() -> Iterator[Batch]:
        yield from islice(Source(), 6)
        raise RuntimeError("no more")

    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            tables, steps, helpers = tables_with(Cached(slots=EACH * 3)), [], set()
            storage = tables.groups[0].storage
            assert isinstance(storage, SlottedRows)
            batches = iter(stoker.stage(broken(), tables, lookahead=2, background=False))
            while len(steps) < 6:
                batch = next(batches)
                steps.append(batch.step)
                helpers |= {each.name for each in threading.enumerate() if "distinct" in each.name}
                tables(batch.ids).square().sum().backward()
            with pytest.raises(RuntimeError, match="no more"):
                next(batches)
            assert len(helpers) == number - 1
            assert not [each for each in threading.enumerate() if each.name in helpers]
            found.append((steps, storage.stats.fetched, tables.rows("t")))
    finally:
        torch.set_num_threads(threads)
    (steps, fetched, rows), (same_steps, same_fetched, same_rows) = found
    assert steps == same_steps == list(range(6))
    assert fetched == same_fetched
    assert torch.equal(rows, same_rows)


def test_one_to_four_threads_find_distinct_rows() -> None:
    assert [stage_module._finders(threads) for threads in (1, 2, 4, 8, 16, 64)] == [0, 1, 1, 2, 4, 4]


@pytest.mark.parametrize("count", [1, 3])
def test_threads_find_the_rows_of_the_next_batches_and_errors_come_after_the_batches_before(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(stage_module, "_finders", lambda threads: count)
    read: list[int] = []

    def stream() -> Iterator[torch.Tensor]:
        for number in range(10):
            read.append(number)
            yield torch.arange(4).view(4, 1) + number
        raise ValueError("the log ends here")

    table = TableConfig(name="t", num_embeddings=40, embedding_dim=2)
    tables = EmbeddingTables([table], optimizer=stoker.SGD(lr=1.0), placement=Cached(slots=20))
    batches = iter(stoker.stage(stream(), tables, lookahead=1, in_flight=1, lookups=lambda ids: ids))
    assert int(next(batches)[0]) == 0
    assert len(read) == 2 + count
    assert [int(ids[0]) for ids in islice(batches, 9)] == list(range(1, 10))
    with pytest.raises(ValueError, match="the log ends here"):
        next(batches)
