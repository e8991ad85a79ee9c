"""When moving rows fails the error reaches the user, with its cause, and nothing wrong is taken for right."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from stoker import Batch, Cached, ConfigError, EmbeddingTables, StokerError, TableConfig, optim, stage
from stoker.base.errors import HomeError
from stoker.tables.links.transfer import Writeback
from stoker.tables.slots.residency import LANDED, SlotPlan
from stoker.tables.slots.slotted import TooFewSlots

ROWS, DIM = 400, 4


def build(placement=None, **options):
    table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM)
    return EmbeddingTables([table], optimizer=optim.Adagrad(lr=0.1), placement=placement, **options)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        ids = (ROWS * torch.rand(16, 1, generator=generator) ** 2).long()
        yield Batch(dense=torch.zeros(16, 1), ids=ids, step=step)


def train(tables, feed):
    for batch in feed:
        tables(batch.ids).square().sum().backward()


def staging_threads():
    gc.collect()  # a loop that another test has left may wait to be collected, with its thread
    return [thread for thread in threading.enumerate() if thread.name == "stoker-stage"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_an_error_in_the_stream_reaches_the_user(background):
    def broken():
        yield from batches(5)
        raise OSError("the disk of the data went away")

    tables = build(Cached(slots=60))
    with pytest.raises(OSError, match="went away"):
        train(tables, stage(broken(), tables, lookahead=2, background=background))
    assert not staging_threads()


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_fetch_stops_training_and_the_tables_refuse_to_go_on(background, monkeypatch):
    tables = build(Cached(slots=60, home="file"))
    home = tables.groups[0].storage.home
    fetch, calls = home.fetch, []

    def failing(*given):
        calls.append(1)
        if len(calls) == 8:
            raise HomeError("row 7 cannot be read: input/output error")
        fetch(*given)

    monkeypatch.setattr(home, "fetch", failing)
    with pytest.raises(HomeError, match="row 7"):
        train(tables, stage(batches(30), tables, lookahead=4, background=background))
    with pytest.raises(StokerError, match="resume from the last checkpoint"):
        tables.rows("t")
    with pytest.raises(StokerError, match="resume from the last checkpoint"):
        tables.groups[0].storage.gather(np.arange(ROWS))
    assert not staging_threads()


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "stored"), [(2**20, 0), (7, 1)])
def test_rows_that_could_not_be_written_back_are_written_by_the_next_try(chunk, stored, monkeypatch):
    """Also the rows of later chunks."""
    monkeypatch.setattr("stoker.tables.slots.slotted._CHUNK_ROWS", chunk)
    tables, expected = build(Cached(slots=60)), build()
    for each in (tables, expected):
        train(each, batches(3))
    storage = tables.groups[0].storage
    store, calls = storage.home.store, []

    def failing(*given):
        calls.append(1)
        if len(calls) > stored:
            raise HomeError("the disk is full")
        store(*given)

    monkeypatch.setattr(storage.home, "store", failing)
    with pytest.raises(HomeError, match="full"):
        tables.rows("t")
    monkeypatch.setattr(storage.home, "store", store)
    assert torch.equal(tables.rows("t"), expected.rows("t"))


@pytest.mark.slow
def test_a_home_file_that_shrank_is_noticed(tmp_path):
    tables = build(Cached(slots=40, home="file", path=str(tmp_path)))
    train(tables, batches(20))
    os.truncate(tables.groups[0].storage.home.path, 100)

    def go_on():
        train(tables, batches(20, seed=1))
        tables.rows("t")

    with pytest.raises(HomeError):
        go_on()


def test_a_writeback_that_failed_is_kept_and_tried_again(monkeypatch):
    """A full disk loses nothing: once there is room, the same rows get home."""
    tables, resident = build(Cached(slots=40, home="file")), build()
    storage = tables.groups[0].storage
    store, full = storage.home.store, threading.Event()

    def maybe(*given):
        if full.is_set():
            raise HomeError("no space left on the device. Free some and resume.")
        store(*given)

    monkeypatch.setattr(storage.home, "store", maybe)
    done = 0
    for step, batch in enumerate(batches(30)):
        if step == 10:
            full.set()
        try:
            out = tables(batch.ids)
        except HomeError:
            break
        out.square().sum().backward()
        resident(batch.ids).square().sum().backward()
        done += 1
    assert 10 <= done < 30
    full.clear()
    storage._broken = None  # the failed plan evicted nothing that was not kept by the link
    assert storage._link._failed
    storage._link.drain()
    kept = {job.number for job in storage._link._failed}
    assert not kept
    held = storage.home.read(0, ROWS).weight
    expected = resident.rows("t")
    inside = set(storage.residency.row_in_slot.tolist())
    outside = [row for row in range(ROWS) if row not in inside]
    assert torch.equal(held[outside], expected[outside])


@pytest.mark.parametrize("late", [False, True])
def test_a_second_try_does_not_overwrite_newer_rows(late, monkeypatch):
    """One writeback fails and the next one, of the same row, would succeed: at once, or after the second try began."""
    storage = build(Cached(slots=40, home="file")).groups[0].storage
    link, store, rows, gate, tries = storage._link, storage.home.store, np.array([7]), threading.Event(), []

    def failing(*given):
        tries.append(1)
        if len(tries) == 1:
            raise HomeError("the disk is full")
        store(*given)

    class Gated(Writeback):
        def arrive(self):
            gate.wait()
            return super().arrive()

    def values(number):
        made = storage.home.empty(1)
        made.weight.fill_(number)
        made.state["sum"].fill_(number)
        return made

    monkeypatch.setattr(storage.home, "store", failing)
    link._post(Writeback(0, rows, values(1.0)))
    link._until(lambda: bool(link._failed))
    link._post(Gated(1, rows, values(2.0)))
    if not late:
        gate.set()
        link._until(lambda: len(link._failed) == 2 or len(link._pending) == 1)
    until = link._until
    monkeypatch.setattr(link, "_until", lambda done: (gate.set(), until(done)))
    link.drain()
    assert storage.home.read(7, 8).weight.unique().tolist() == [2.0]


def test_a_plan_waits_for_writebacks_that_plans_no_longer_name(monkeypatch):
    """After ``LANDED`` plans a residency has forgotten who evicted a row."""
    storage, none, waited = build(Cached(slots=40, home="file")).groups[0].storage, np.zeros(0, np.int64), []
    monkeypatch.setattr(storage._link, "_wait", waited.append)
    for fence in (-1, 19):
        storage._link.settle(SlotPlan(
            number=20, slots=none, fetch_rows=none, fetch_slots=none, evict_rows=none, evict_slots=none, fence=fence
        ))  # fmt: skip
    assert waited == [20 - LANDED, 19]


def test_leaving_a_staged_loop_early_leaves_no_thread_and_no_row_behind():
    tables, resident = build(Cached(slots=60)), build()
    feed = stage(batches(100), tables, lookahead=8, background=True)
    for step, batch in enumerate(feed):
        for each in (tables, resident):
            each(batch.ids).square().sum().backward()
        if step == 9:
            break
    feed = None
    for thread in staging_threads():
        thread.join()
    assert torch.equal(tables.rows("t"), resident.rows("t"))
    assert tables.groups[0].storage.residency.announced == 0


def test_locks_are_entered_where_no_interrupt_comes_between():
    """Within ``__enter__`` of a class in Python, Ctrl-C came behind the lock, and threads of stages waited for ever.

    Python handles signals between instructions of its own code only, so never within the lock's own methods.
    """
    assert isinstance(build(Cached(slots=10)).groups[0].storage._lock, type(threading.RLock()))


def test_an_interrupt_does_not_hang():
    tables = build(Cached(slots=60))

    def interrupted():
        for step, batch in enumerate(stage(batches(100), tables, background=True)):
            tables(batch.ids).square().sum().backward()
            if step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not staging_threads()


def test_a_loop_that_an_error_keeps_is_collected_with_its_thread():
    """The error of a stream leads to the frame that caught it, and this to a loop that was left half-way."""

    def failing():
        yield from batches(2)
        raise OSError("the disk of the data went away")

    def caught():
        first, second = build(Cached(slots=60)), build(Cached(slots=60))
        feed = iter(stage(batches(100), first, background=True))
        next(feed)
        try:
            train(second, stage(failing(), second, background=True))
        except OSError:
            return staging_threads()

    (thread,) = caught()
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def writebacks():
    return [thread for thread in threading.enumerate() if thread.name == "stoker-writeback"]


def test_tables_that_are_dropped_without_close_leave_no_thread_and_no_file(tmp_path):
    before, left = writebacks(), set(os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ())
    for writes in ("append", "in-place"):
        tables = build(Cached(slots=60, home="file", path=str(tmp_path), writes=writes))
        train(tables, stage(batches(10), tables))
        threads = [thread for thread in writebacks() if thread not in before]
        assert len(threads) == 1
        del tables
        gc.collect()
        threads[0].join(10)
        assert not threads[0].is_alive()
    gc.collect()
    assert not left or set(os.listdir("/proc/self/fd")) == left


def test_closing_interrupted_tables_ends_their_writebacks_before_the_store(monkeypatch):
    tables = build(Cached(slots=60, home="file"))
    storage, calls = tables.groups[0].storage, []
    store, close, go_on = storage.home.store, storage.home.close, threading.Event()

    def late(*given):
        go_on.wait(10)
        store(*given)
        calls.append("store")

    def ended():
        calls.append("close")
        close()

    def interrupted(*given):
        raise KeyboardInterrupt

    train(tables, batches(10))
    storage._link.drain()  # else rows of these batches are stored late, too
    before = writebacks()
    monkeypatch.setattr(storage.home, "store", late)
    monkeypatch.setattr(storage.home, "close", ended)
    monkeypatch.setattr("stoker.tables.slots.slotted.to_slots", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tables, batches(1, seed=1))
    threading.Timer(0.05, go_on.set).start()
    tables.close()
    assert calls == ["store", "close"]
    assert len(writebacks()) == len(before) - 1


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_refused_with_the_remedy_or_done_in_parts():
    big = Batch(dense=torch.zeros(50, 1), ids=torch.arange(50).view(-1, 1))
    with pytest.raises(TooFewSlots, match=r"50 distinct rows.*20 slots.*--device-memory"):
        build(Cached(slots=20, spill="refuse"))(big.ids)
    parts, resident = build(Cached(slots=20)), build()
    for tables in (parts, resident):
        tables(big.ids).square().sum().backward()
    assert torch.equal(parts.rows("t"), resident.rows("t"))


def test_a_lookup_that_is_never_trained_gives_its_slots_back():
    tables = build(Cached(slots=10, spill="refuse"))
    for start in range(0, 100, 10):
        tables(torch.arange(start, start + 10).view(-1, 1))  # no backward; the graph is dropped at once
    storage = tables.groups[0].storage
    assert storage.available == 10
    train(tables, (Batch(dense=torch.zeros(5, 1), ids=torch.arange(5).view(-1, 1)) for _ in range(10)))
    assert not storage._leases, "a lease that ended is forgotten, or each step would take memory"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs one size"),
        ({"slots": 3, "fraction": 0.1}, "2 were given"),
        ({"fraction": 1.5}, "fraction is 1.5"),
        ({"slots": 0}, "at least 1"),
        ({"memory": "2B"}, "hold no row"),
        ({"slots": 3, "home": "cloud"}, "'cloud' is unknown"),
        ({"slots": 3, "spill": "zero"}, "'zero' is unknown"),
    ],
)
def test_placements_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(Cached(**settings))
    with pytest.raises(ConfigError, match="'x'"):
        build({"x": Cached(slots=3)})
