"""A home whose file is appended to: segments, their cleaning, and fetches that read meanwhile."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from campaigns import numbers, scaled
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker import Cached, EmbeddingTables, RowWiseAdagrad, TableConfig
from stoker.base.errors import HomeError
from stoker.tables.storage import Rows
from stoker.tables.stores.file_home import FileHome
from stoker.tables.stores.home import Initial
from stoker.tables.stores.log_home import LogHome

STATE = {"sum": "scalar"}


def log_of(rows: int, dim: int = 16, directory: Path | None = None) -> LogHome:
    table = TableConfig(name="t", num_embeddings=rows, embedding_dim=dim)
    return LogHome(Initial.of([table], seed=7), STATE, directory=directory)


def numbered(home: LogHome, rows: np.ndarray, version: int) -> Rows:
    """Rows that tell which they are, and how often they were stored."""
    weight = torch.from_numpy(rows).float()[:, None] + torch.arange(home.dim) / 1024
    return Rows(weight, {"sum": torch.full((len(rows),), float(version))})


def check(home: LogHome, versions: np.ndarray, rows: np.ndarray) -> None:
    """``rows`` hold what was stored last, or their initial values."""
    got = home.empty(len(rows))
    home.fetch(rows, got)
    wanted = numbered(home, rows, 0)
    stored = torch.from_numpy(versions[rows] > 0)
    weight = torch.where(stored[:, None], wanted.weight, home.initial.rows(rows))
    assert torch.equal(got.weight, weight)
    assert torch.equal(got.state["sum"], torch.from_numpy(versions[rows]).float())


def in_use(home: LogHome) -> int:
    """Segments that hold something, or cannot be written yet."""
    return home._used - len(home._free) - len(home._cleaned)


@pytest.mark.slow
@settings(max_examples=scaled(100))
@example(rows=283, dim=300, seed=0, calls=[(1.0, False)] * 3)  # segments that a cleaned one fills to the last row
@given(
    rows=st.integers(1, 3000),
    dim=st.sampled_from([1, 16, 300]),
    seed=st.integers(0, 2**32 - 1),
    calls=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30),
)
def test_a_log_holds_what_was_stored_last_in_bounded_space(rows, dim, seed, calls):
    rng = np.random.default_rng(seed)
    home = log_of(rows, dim)
    versions = np.zeros(rows, np.int64)
    try:
        for number, (share, popular) in enumerate(calls, 1):
            among = max(1, rows // 8) if popular else rows
            some = rng.permutation(among)[: max(1, round(share * among))]
            home.store(some, numbered(home, some, number))
            versions[some] = number
            check(home, versions, rng.integers(0, rows, 50))
            assert home._stored == (versions > 0).sum() == home._live.sum()
            assert in_use(home) <= home._allowed(home._stored) + 1
        check(home, versions, np.arange(rows))
    finally:
        home.close()


@pytest.mark.slow
def test_cleaning_happens_and_the_file_stays_within_a_quarter_of_the_rows():
    home = log_of(20_000)
    rng = np.random.default_rng(0)
    versions = np.zeros(20_000, np.int64)
    for number in range(1, 200):
        some = rng.permutation(20_000)[:1000]
        home.store(some, numbered(home, some, number))
        versions[some] = number
    assert home._epoch > 20  # segments cleaned
    assert home._used * home._per_segment <= 1.25 * 20_000 + 7 * home._per_segment
    check(home, versions, np.arange(20_000))
    home.close()


def test_a_fetch_reads_what_it_looked_up_though_its_segment_is_cleaned_meanwhile(monkeypatch):
    """Without the wait for fetches under way, the segment would be written afresh under the reader's eyes."""
    home = log_of(2000)
    home.store(np.arange(2000), numbered(home, np.arange(2000), 1))
    looked, go_on, real = threading.Event(), threading.Event(), home._where
    wanted = np.arange(0, 2000, 7)

    def slow(rows):
        at = real(rows)
        if threading.current_thread() is reader:
            looked.set()
            assert go_on.wait(20)
        return at

    got = home.empty(len(wanted))
    reader = threading.Thread(target=lambda: home.fetch(wanted, got))
    monkeypatch.setattr(home, "_where", slow)
    reader.start()
    assert looked.wait(20)
    rest = np.setdiff1d(np.arange(2000), wanted)

    def churn():
        for number in range(2, 30):
            home.store(rest, numbered(home, rest, number))

    writer = threading.Thread(target=churn)
    writer.start()
    while writer.is_alive() and not home._epoch:
        writer.join(0.01)
    writer.join(0.5)  # without the wait it would go on to the end
    assert home._epoch > 0, "segments that the reader looked up were cleaned"
    go_on.set()
    reader.join(20)
    writer.join(20)
    assert torch.equal(got.weight, numbered(home, wanted, 1).weight)
    assert (got.state["sum"] == 1).all()
    home.close()


@pytest.mark.slow
def test_fetches_and_stores_of_other_rows_run_at_once():
    home = log_of(6000)
    home.store(np.arange(6000), numbered(home, np.arange(6000), 1))
    mine, theirs = np.arange(0, 6000, 2), np.arange(1, 6000, 2)
    stop, wrong = threading.Event(), []

    def read():
        rng = np.random.default_rng(1)
        got = home.empty(64)
        while not stop.is_set():
            rows = rng.choice(mine, 64)
            home.fetch(rows, got)
            if not torch.equal(got.weight, numbered(home, rows, 1).weight):
                wrong.append(rows)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for each in readers:
        each.start()
    for number in range(2, 60):
        home.store(theirs, numbered(home, theirs, number))
    stop.set()
    for each in readers:
        each.join()
    assert not wrong
    assert home._epoch > 10
    home.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", numbers(30))
def test_an_interrupt_at_any_line_loses_no_row(seed):
    """Ctrl-C between two lines of a store or of cleaning: what was stored stays, and storing again works."""
    rng = np.random.default_rng(seed)
    home = log_of(3000)
    versions = np.zeros(3000, np.int64)
    home.store(np.arange(3000), numbered(home, np.arange(3000), 1))
    versions[:] = 1
    for number in range(2, 12):
        some = rng.permutation(3000)[:700]
        left = int(rng.integers(1, 900))

        def lines(frame, event, arg):
            nonlocal left
            if not frame.f_code.co_filename.endswith("log_home.py"):
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return lines

        sys.settrace(lines)
        try:
            home.store(some, numbered(home, some, number))
        except KeyboardInterrupt:
            sys.settrace(None)
            untouched = np.setdiff1d(np.arange(3000), some)
            check(home, versions, untouched)
            home.store(some, numbered(home, some, number))
        finally:
            sys.settrace(None)
        versions[some] = number
        check(home, versions, np.arange(3000))
    home.close()


def test_a_disk_that_fails_while_a_segment_is_cleaned_loses_nothing(monkeypatch):
    home = log_of(2000)
    everything = np.arange(2000)
    home.store(everything, numbered(home, everything, 1))
    versions = np.ones(2000, np.int64)
    real = home._transfer

    def failing(*given, writing):
        if not writing:
            raise home._error(5, None, "reading")
        real(*given, writing=True)

    monkeypatch.setattr(home, "_transfer", failing)
    rest = everything[everything % 3 > 0]

    def churn():
        for number in range(2, 20):
            home.store(rest, numbered(home, rest, number))

    with pytest.raises(HomeError, match="Input/output error"):
        churn()
    check(home, versions, everything[everything % 3 == 0])
    monkeypatch.setattr(home, "_transfer", real)
    home.store(rest, numbered(home, rest, 50))
    versions[rest] = 50
    check(home, versions, everything)
    home.close()


def test_tables_append_unless_the_index_would_be_large_or_it_is_forbidden(monkeypatch):
    def home(**options):
        table = TableConfig(name="t", num_embeddings=1000, embedding_dim=4)
        tables = EmbeddingTables(
            [table], optimizer=RowWiseAdagrad(lr=0.1), placement=Cached(slots=10, home="file", **options)
        )
        storage = tables.groups[0].storage
        tables.close()
        return type(storage.home)

    assert home() is LogHome
    assert home(writes="in-place") is FileHome
    monkeypatch.setattr("stoker.tables.stores.log_home.total_memory", lambda: 64 * LogHome.index_bytes(1000) - 1)
    assert home() is FileHome
    assert home(writes="append") is LogHome


def test_more_rows_than_31_bits_number_have_a_wider_index():
    assert LogHome.index_bytes(2**31 - 1) == 4 * (2**31 - 1)
    assert LogHome.index_bytes(2**31) == 8 * 2**31
