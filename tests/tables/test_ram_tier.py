"""A RAM tier over another store: what it holds, what it writes and when, and what a failure leaves."""

from __future__ import annotations

import inspect
import sys
import threading

import numpy as np
import pytest
import torch
from campaigns import numbers, scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import Cached, TableConfig
from stoker.base.errors import ConfigError, HomeError
from stoker.tables.storage import Rows
from stoker.tables.stores.file_home import FileHome
from stoker.tables.stores.home import Home, Initial, MemoryHome
from stoker.tables.stores.log_home import LogHome
from stoker.tables.stores.ram_tier import RamTier, make_home

STATE = {"sum": "scalar"}
STORES = {"memory": MemoryHome, "file": FileHome, "log": LogHome}


def tier_of(rows: int, *, frames: int, block: int, dim: int = 4, store: str = "memory") -> RamTier:
    """A tier of ``frames`` blocks of ``block`` rows."""
    inner = STORES[store](Initial.of([TableConfig(name="t", num_embeddings=rows, embedding_dim=dim)], 7), STATE)
    inner.block_rows = block
    return RamTier(inner, memory=4 * -(-rows // block) + frames * (block * inner.row_bytes + 11))


def numbered(home: Home, rows: np.ndarray, version: int) -> Rows:
    """Rows that tell which they are, and how often they were stored."""
    weight = torch.from_numpy(rows).float()[:, None] + torch.arange(home.dim) / 1024
    return Rows(weight, {"sum": torch.full((len(rows),), float(version))})


def check(home: Home, versions: np.ndarray, got: Rows, rows: np.ndarray) -> None:
    """``got`` is what was stored last of ``rows``, or their initial values."""
    stored = torch.from_numpy(versions[rows] > 0)
    weight = torch.where(stored[:, None], numbered(home, rows, 0).weight, home.initial.rows(rows))
    assert torch.equal(got.weight, weight)
    assert torch.equal(got.state["sum"], torch.from_numpy(versions[rows]).float())


def fetched(home: Home, rows: np.ndarray) -> Rows:
    got = home.empty(len(rows))
    home.fetch(rows, got)
    return got


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["fetch", "fetch", "store", "store", "read", "write", "flush"]), st.integers(0, 12),
        st.integers(0, 2**32 - 1),
    ),
    max_size=40,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=scaled(200), deadline=None)
@given(
    rows=st.integers(1, 60), frames=st.integers(1, 9), block=st.integers(1, 9), store=st.sampled_from(sorted(STORES)),
    nested=st.booleans(), calls=CALLS,
)  # fmt: skip
def test_any_trace_equals_a_plain_table(rows, frames, block, store, nested, calls):
    home = inner = tier_of(rows, frames=frames, block=block, store=store)
    if nested:
        home = RamTier(inner, memory=4 * -(-rows // block) + 2 * (block * inner.row_bytes + 11))
    versions, whole = np.zeros(rows, np.int64), np.arange(rows)
    try:
        for number, (call, count, seed) in enumerate(calls, 1):
            some = np.random.default_rng(seed).permutation(rows)[:count]
            start = int(some[0]) if len(some) else 0
            stop = min(rows, start + count)
            if call == "fetch":
                check(home, versions, fetched(home, some), some)
            elif call == "store":
                home.store(some, numbered(home, some, number))
                versions[some] = number
            elif call == "read":
                check(home, versions, home.read(start, stop), whole[start:stop])
            elif call == "write":
                home.write(start, numbered(home, whole[start:stop], number))
                versions[start:stop] = number
            else:
                home.flush()
                check(home, versions, inner.inner.read(0, rows), whole)
            assert np.array_equal(home.stored.contains(whole), versions > 0)
            owned = home._owned(np.arange(home.num_frames))
            assert np.array_equal(home._block_in >= 0, owned)
            assert len(set(home._block_in[owned].tolist())) == owned.sum() == (home._frame_of > 0).sum()
            assert not home._busy.any()
        check(home, versions, home.read(0, rows), whole)
    finally:
        home.close()


class Spy:
    """Notes the calls of a store, and fails where told."""

    def __init__(self, home: RamTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[int] = []
        self.written: list[int] = []
        self.failing = ""
        for name, rows in (("fetch", self.read), ("store", self.written)):
            monkeypatch.setattr(home.inner, name, self.noting(name, getattr(home.inner, name), rows))

    def noting(self, name, real, noted):
        def call(rows, side, places=None):
            if self.failing == name:
                raise HomeError(f"spill file x: {name} failed")
            noted.extend(rows.tolist())
            real(rows, side, places)

        return call


def test_rows_in_a_frame_are_served_from_memory_and_changed_blocks_are_written_once(monkeypatch):
    home = tier_of(40, frames=3, block=4)
    spy = Spy(home, monkeypatch)
    some = np.array([0, 1, 5, 9])
    for number in (1, 2, 3):
        home.store(some, numbered(home, some, number))
        assert fetched(home, some).state["sum"].tolist() == [number] * 4
    assert spy.written == []
    assert spy.read == [2, 3, 4, 6, 7, 8, 10, 11], "the rows of the blocks that were not stored"
    other = np.array([39])
    home.store(other, numbered(home, other, 4))
    assert spy.written == [0, 1, 2, 3], "the block that left, whole"
    home.flush()
    assert sorted(spy.written[4:]) == [4, 5, 6, 7, 8, 9, 10, 11, 36, 37, 38, 39]
    home.flush()
    assert len(spy.written) == 16, "a block is written once a change"
    home.close()


def test_a_block_that_is_used_outlives_those_that_are_not(monkeypatch):
    home = tier_of(400, frames=4, block=1)
    home.write(0, numbered(home, np.arange(400), 1))
    spy = Spy(home, monkeypatch)
    popular = np.array([7])
    for row in range(100, 300):
        fetched(home, popular)
        fetched(home, np.array([row]))
    assert spy.read.count(7) <= 2
    home.close()


def test_a_checkpoint_does_not_empty_the_cache(monkeypatch):
    home = tier_of(400, frames=4, block=10)
    some = np.arange(40)
    home.store(some, numbered(home, some, 1))
    spy = Spy(home, monkeypatch)
    home.read(0, 400)
    home.write(300, numbered(home, np.arange(300, 400), 2))
    assert spy.written == list(range(300, 400))
    spy.read.clear()
    assert fetched(home, some).state["sum"].tolist() == [1.0] * 40
    assert spy.read == []
    home.close()


def test_a_store_that_fails_is_named_and_loses_no_row(monkeypatch):
    home = tier_of(40, frames=2, block=4)
    versions = np.zeros(40, np.int64)
    spy = Spy(home, monkeypatch)
    some, other = np.array([0, 4]), np.array([20, 30])
    home.store(some, numbered(home, some, 1))
    versions[some] = 1
    spy.failing = "store"
    for _ in range(2):
        with pytest.raises(HomeError, match="spill file x: store failed"):
            home.store(other, numbered(home, other, 2))
        check(home, versions, fetched(home, some), some)
    with pytest.raises(HomeError, match="store failed"):
        home.flush()
    assert not home.stored.contains(other).any()
    spy.failing = ""
    home.store(other, numbered(home, other, 2))
    versions[other] = 2
    spy.failing = "fetch"
    with pytest.raises(HomeError, match="fetch failed"):
        fetched(home, some)
    spy.failing = ""
    check(home, versions, home.read(0, 40), np.arange(40))
    home.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", numbers(30))
def test_an_interrupt_at_any_line_loses_no_row(seed):
    """Ctrl-C between two lines of a fetch or a store: what was stored stays, and storing again works."""
    rng = np.random.default_rng(seed)
    home = tier_of(20, frames=int(rng.integers(2, 9)), block=int(rng.integers(1, 3)))
    versions = np.zeros(20, np.int64)
    for number in range(1, 80):
        some = rng.permutation(20)[: rng.integers(1, 5)]
        left = int(rng.integers(1, 60))

        def lines(frame, event, arg):
            nonlocal left
            if not frame.f_code.co_filename.endswith("ram_tier.py"):
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return lines

        sys.settrace(lines)
        try:
            fetched(home, some)
            home.store(some, numbered(home, some, number))
        except KeyboardInterrupt:
            sys.settrace(None)
            untouched = np.setdiff1d(np.arange(20), some)
            check(home, versions, home.read(0, 20)[untouched], untouched)
            home.store(some, numbered(home, some, number))
        finally:
            sys.settrace(None)
        versions[some] = number
        check(home, versions, home.read(0, 20), np.arange(20))
    home.close()


@pytest.mark.parametrize("taken", [0, 1, 2])  # frames before the one that is left behind
def test_a_frame_that_an_interrupt_left_behind_does_not_take_the_block_from_its_frame(taken):
    home = tier_of(8, frames=3, block=1)
    some, other = np.array([0]), np.array([1])
    for row in range(taken):
        home.store(np.array([7 - row]), numbered(home, np.array([7 - row]), 9))
    source, first = inspect.getsourcelines(RamTier._move)
    line = first + next(at for at, text in enumerate(source) if "self._frame_of[new] =" in text)

    def interrupt(frame, event, arg):
        if frame.f_lineno == line and frame.f_code.co_name == "_move":
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            home.store(some, numbered(home, some, 1))
    finally:
        sys.settrace(None)
    home._used[:] = False
    home.store(some, numbered(home, some, 2))  # in another frame
    home.store(some, numbered(home, some, 3))
    home.flush()
    assert home.inner.read(0, 1).state["sum"].tolist() == [3.0]
    home.store(other, numbered(home, other, 4))  # in the first
    assert home.read(0, 1).state["sum"].tolist() == [3.0]
    home.close()


@pytest.mark.slow
def test_threads_may_move_different_rows_of_one_block_at_once():
    home = tier_of(90, frames=5, block=9)
    failed = []

    def work(part: int) -> None:
        rng, own, versions = np.random.default_rng(part), np.arange(part, 90, 3), np.zeros(90, np.int64)
        try:
            for number in range(1, 150):
                some = rng.choice(own, 4, replace=False)
                home.store(some, numbered(home, some, number))
                versions[some] = number
                some = rng.choice(own, 4, replace=False)
                check(home, versions, fetched(home, some), some)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    home.close()


def test_a_tier_closes_what_it_is_over_and_its_frames(monkeypatch):
    home = tier_of(8, frames=2, block=1, store="file")
    home.close()
    for each in (home.inner, home.frames):
        with pytest.raises(HomeError, match="closed"):
            fetched(each, np.array([0]))
    closed = []
    monkeypatch.setattr(FileHome, "close", lambda self: closed.append(self))
    with pytest.raises(ConfigError, match="too little"):
        make_home(Cached(slots=1, home="file", host_memory=10, writes="in-place"), home.initial, STATE, gpu=False)
    assert len(closed) == 1


def test_the_memory_is_a_bound_and_too_little_is_refused():
    table = TableConfig(name="t", num_embeddings=100_000, embedding_dim=16)
    inner = FileHome(Initial.of([table], 7), STATE)
    home = RamTier(inner, memory=2**20)
    taken = sum(t.nbytes for t in home.frames.arrays.tensors) + home._frame_of.nbytes
    assert 0.98 * 2**20 < taken + 11 * home.num_frames <= 2**20
    with pytest.raises(ConfigError, match=r"host_memory 1000 B is too little.*one block of 60 rows take 10\.\d KiB"):
        RamTier(inner, memory=1000)
    home.close()
