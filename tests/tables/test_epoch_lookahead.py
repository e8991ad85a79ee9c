"""Next uses of a whole epoch: recorded exactly, as good as Belady's rule, and no number depends on them."""

from __future__ import annotations

import errno
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import numbers, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import draw, placed_run, resident_run, same
from programs import Rereadable

import stoker
from benchmarks.naive_replay import replay_reference
from stoker.base import spool
from stoker.base.errors import ConfigError, HomeError
from stoker.base.spool import Spool
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import NumpyGather
from stoker.placement.replay import CacheStrategy, dataset_space, dataset_steps, record, simulate
from stoker.tables.slots import epoch_lookahead as module
from stoker.tables.slots.epoch_lookahead import EpochLookahead, Recording
from stoker.tables.slots.slotted import SlottedRows, make_residency
from stoker.testing import make_dataset

ROWS = (300, 150, 10)


@pytest.fixture(scope="module", params=[None, {1: 4}], ids=["one-hot", "sequence"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("data") / "d"
    return make_dataset(path, rows=2000, num_embeddings=ROWS, sequence=request.param or {})


@settings(max_examples=scaled(200), deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 30), max_size=8, unique=True), min_size=1, max_size=20),
    chunk=st.sampled_from([1, 5, 2**20]),
    wide=st.booleans(),
)
def test_next_uses_are_exact(batches: list[list[int]], chunk: int, wide: bool) -> None:
    """``wide``: addresses that take 64 bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "CHUNK", chunk)
        if wide:
            patch.setattr(module, "_NARROW", 8)
        recording = Recording(31)
        for rows in batches:
            recording.add(np.array(rows, np.int64))
        recording.link()
        for number, rows in enumerate(batches):
            later = [next((s for s in range(number + 1, len(batches)) if row in batches[s]), number) for row in rows]
            found = recording.take(number)
            assert found.dtype == np.int32
            assert found.tolist() == [s - number for s in later]
        recording.close()


def slotted(model: stoker.RecModel) -> SlottedRows:
    (storage,) = [group.storage for group in model.embeddings.groups]
    assert isinstance(storage, SlottedRows)
    return storage


def train(model: stoker.RecModel, batches: Iterator[stoker.Batch]) -> None:
    for batch in batches:
        model.loss(batch).backward()


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("seed", [None, 5])
def test_training_fetches_no_more_than_belady(
    data: Dataset, seed: int | None, lookahead: int, background: bool
) -> None:
    space = dataset_space(data)
    trace, _ = record(dataset_steps(data, space, batch_size=64, seed=seed, steps=None)[1])
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), placement=stoker.Cached(slots=190))
    storage = slotted(model)
    assert storage.space.names == space.names, "ties go by the table's position"
    stream = data.train.batches(64, seed=seed)
    staged = stoker.stage(stream, model, lookahead=lookahead, in_flight=1, background=background, epoch_lookahead=True)
    train(model, staged)
    best = simulate(trace, CacheStrategy.parse("belady"), 190, 1)
    assert storage.stats.fetched == best.misses
    assert storage.stats.written == best.written_back
    if lookahead == 0:
        assert best.misses < simulate(trace, CacheStrategy.parse("lookahead-1"), 190, 1).misses


@pytest.mark.slow
def test_the_same_without_numba(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code finds and orders the distinct rows, reads the ids and plans."""
    monkeypatch.setattr("stoker.ops.distinct.HAVE_NUMBA", False)
    monkeypatch.setattr(
        "stoker.dataset.split.make_gather", lambda *shards, threads=1, **only: NumpyGather(*shards, **only)
    )
    monkeypatch.setattr("stoker.tables.slots.slotted.make_residency", partial(make_residency, fast=False))
    test_training_fetches_no_more_than_belady(data, 5, 3, False)


@pytest.mark.slow
@settings(max_examples=scaled(30), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 4))
def test_and_so_on_random_traces(seed: int, spare: int, lookahead: int) -> None:
    random = np.random.default_rng(seed)
    ids = [np.minimum(random.zipf(1.2, 9) - 1, 39) for _ in range(30)]
    batches = [
        stoker.Batch(dense=torch.zeros(9, 0), ids=torch.from_numpy(one).view(9, 1), step=step)
        for step, one in enumerate(ids)
    ]
    slots = max(len(set(one.tolist())) for one in ids) + spare
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=40, embedding_dim=4)], optimizer=stoker.SGD(lr=0.1),
        placement=stoker.Cached(slots=slots),
    )  # fmt: skip
    stream = Rereadable(batches)
    stream.rest_of_epoch = lambda step, *, ids_only: batches[step:]
    for batch in stoker.stage(stream, tables, lookahead=lookahead, in_flight=1, epoch_lookahead=True):
        tables(batch.ids).sum().backward()
    counts = [Counter((row, 0) for row in one.tolist()) for one in ids]
    best = replay_reference(counts, min(slots, 40), CacheStrategy.parse("belady"))
    assert tables.groups[0].storage.stats.fetched == best.misses


@pytest.mark.slow
@pytest.mark.parametrize("seed", numbers(40))
def test_wrong_hints_change_no_number(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)

    def lie(self: EpochLookahead, batch: stoker.Batch) -> list[Any]:
        return [
            None if hints is None else random.integers(-3, 30, len(hints)).astype(np.int32)
            for hints in honest(self, batch)
        ]

    honest = EpochLookahead.upcoming
    monkeypatch.setattr(EpochLookahead, "upcoming", lie)
    case = draw(seed, backend="auto" if seed % 20 == 0 else "reference")  # rules of the compiled one take seconds
    case.epoch_lookahead = case.staged = True
    assert same(resident_run(case), placed_run(case))


class Counted(Rereadable):
    """Notes which epochs were read beforehand, and how many batches of them."""

    def __init__(self, batches: list[stoker.Batch]) -> None:
        super().__init__(batches)
        self.read: list[tuple[int, int]] = []

    def rest_of_epoch(self, step: int, *, ids_only: bool) -> Any:
        assert ids_only
        self.read.append((step, 0))
        outer = self

        class Epoch(list[stoker.Batch]):
            def __iter__(self) -> Iterator[stoker.Batch]:
                for number in range(len(self)):
                    outer.read[-1] = (step, number + 1)
                    yield self[number]

        return Epoch(super().rest_of_epoch(step, ids_only=ids_only))


def one_table(slots: int = 12, **options: Any) -> stoker.EmbeddingTables:
    return stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=40, embedding_dim=4)], optimizer=stoker.SGD(lr=0.1),
        placement=stoker.Cached(slots=slots, **options),
    )  # fmt: skip


def some_batches(count: int) -> list[stoker.Batch]:
    random = np.random.default_rng(0)
    return [
        stoker.Batch(dense=torch.zeros(5, 0), ids=torch.from_numpy(random.integers(0, 40, (5, 1))), step=step)
        for step in range(count)
    ]


@pytest.mark.parametrize("background", [False, True])
def test_each_epoch_is_recorded_once_and_its_file_goes(background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Spool] = []
    make = Spool.__init__

    def count(self: Spool, *given: Any) -> None:
        make(self, *given)
        opened.append(self)

    monkeypatch.setattr(Spool, "__init__", count)
    stream, tables = Counted(some_batches(10)), one_table()
    seen: list[tuple[str, int, int]] = []
    staged = stoker.stage(
        stream,
        tables,
        lookahead=2,
        background=background,
        epoch_lookahead=True,
        progress=lambda *what: seen.append(what),
    )
    for batch in staged:
        tables(batch.ids).sum().backward()
        assert sum(not one._file.closed for one in opened) <= 2
    assert stream.read == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert all(one._file.closed for one in opened)
    assert ("reading ids of the epoch", 3, 3) in seen
    assert ("linking next uses", 1, 1) in seen


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.usefixtures("no_cycle_is_found")
def test_rows_go_with_the_last_reference_to_their_tables(background: bool) -> None:
    """A notebook that trains again and again would have the rows of all its runs otherwise."""
    stream, tables = Counted(some_batches(4)), one_table()
    storage = weakref.ref(tables.groups[0].storage)
    for batch in stoker.stage(stream, tables, background=background, epoch_lookahead=True):
        tables(batch.ids).sum().backward()
    del tables
    assert storage() is None


def test_a_recording_can_be_given_up() -> None:
    stream, tables = Counted(some_batches(10)), one_table()
    staged = stoker.stage(stream, tables, lookahead=2, epoch_lookahead=True)
    staged.hurry = lambda: True
    steps = []
    for batch in staged:
        tables(batch.ids).sum().backward()
        steps.append(batch.step)
    assert steps == list(range(10))
    assert stream.read == [(0, 1), (3, 1), (6, 1), (9, 1)]


def test_after_a_loop_was_left_the_rest_of_the_epoch_is_recorded_again() -> None:
    batches = some_batches(6)
    stream = Counted(batches)
    ahead = EpochLookahead(stream, [(lambda batch: np.unique(batch.ids.numpy()), 40, None)], None, lambda: False)
    for step in (0, 1):
        (first,) = ahead.upcoming(batches[step])
        assert first is not None
    ahead.close()
    (again,) = ahead.upcoming(batches[1])
    assert again is not None
    assert again.tolist() == first.tolist()
    ahead.close()


def test_leaving_a_loop_does_not_wait_for_a_recording() -> None:
    """The thread that stages is in the middle of a second epoch without end."""
    begun = threading.Event()

    class Endless:
        def __init__(self, batches: list[stoker.Batch]) -> None:
            self.batches = batches

        def __len__(self) -> int:
            return 10**9

        def __iter__(self) -> Iterator[stoker.Batch]:
            begun.set()
            return itertools.cycle(self.batches)

    stream, tables = Rereadable(some_batches(10)), one_table(home="file")
    stream.rest_of_epoch = lambda step, *, ids_only: stream.batches[step:4] if step < 4 else Endless(stream.batches)
    for batch in stoker.stage(stream, tables, lookahead=1, in_flight=1, epoch_lookahead=True):
        tables(batch.ids).sum().backward()
        if batch.step == 2:
            assert begun.wait(10)
            break
    tables.close()


def test_rows_that_leave_anyway_are_not_recorded() -> None:
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=40, embedding_dim=4)], optimizer=stoker.SGD(lr=0.1),
        placement=stoker.HostPipelined(slots=20),
    )  # fmt: skip
    with pytest.warns(FutureWarning, match="stage: 'foresight' is now called 'epoch_lookahead'"):
        staged = stoker.stage(Rereadable(some_batches(4)), tables, foresight=True)  # type: ignore[call-arg]
    assert len(list(staged)) == 4
    assert staged._epoch_lookahead is not None
    assert staged._epoch_lookahead._groups == []


def test_a_stream_that_cannot_be_read_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="a list cannot be read twice"):
        stoker.stage(some_batches(2), one_table(), epoch_lookahead=True)


def test_a_stream_that_is_another_the_second_time_is_found_out() -> None:
    stream, tables = Rereadable(some_batches(3)), one_table()
    stream.rest_of_epoch = lambda step, *, ids_only: (
        [stoker.Batch(dense=torch.zeros(1, 0), ids=torch.zeros(1, 1, dtype=torch.int64), step=step)] * 3
    )
    with pytest.raises(ConfigError, match="did not give the same batches twice"):
        list(stoker.stage(stream, tables, epoch_lookahead=True))


@pytest.mark.parametrize("method", ["add", "reserve", "read", "write"])
def test_a_full_disk_is_explained(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Spool, method, full)
    tables = one_table(home="file", path=str(tmp_path))
    with pytest.raises(HomeError, match=rf"recorded in {tmp_path} \(No space left on device\). Free space"):
        list(stoker.stage(Rereadable(some_batches(3)), tables, epoch_lookahead=True))
    tables.close()
