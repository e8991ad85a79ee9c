"""The promises of every backing store, and the errors of a spill file whose disk breaks its own."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import Pairs
from processes import run_python

import stoker.tables.stores.home as home_module
from stoker import EmbeddingTables, RowWiseAdagrad, TableConfig
from stoker.base.device import resident_memory
from stoker.base.errors import ConfigError, HomeError
from stoker.tables.storage import Rows
from stoker.tables.stores.file_home import PAGE, FileHome, PageLayout, _sweep
from stoker.tables.stores.home import Home, Initial, MemoryHome, tier_bytes
from stoker.tables.stores.log_home import LogHome
from stoker.tables.stores.ram_tier import RamTier
from stoker.tables.stores.remote_home import RemoteHome

KINDS = ["memory", "file", "direct", "log", "direct log", "plain memory", "plain file", "plain direct", "plain log"]
FILES = [kind for kind in KINDS if "memory" not in kind]
KINDS += [
    "blocks", "remote", "ram, memory", "ram, file", "ram, log", "ram, blocks", "ram, remote", "ram, ram, direct",
    "plain ram, file", "plain ram, blocks",
]  # fmt: skip
ADAGRAD = {"sum": "scalar"}
BOTH = {"exp_avg": "row", "sum": "scalar"}
ADAM = {"exp_avg": "row", "exp_avg_sq": "row"}
# Every test takes one of these, for each is compiled anew: records of 4 bytes, of odd length, of several to a page,
# across pages, over a page.
SHAPES = [
    (1, "float32", {}),
    (5, "bfloat16", ADAGRAD),
    (16, "float32", BOTH),
    (16, "bfloat16", ADAM),
    (300, "float32", ADAGRAD),
    (1030, "float32", ADAGRAD),
]


@contextmanager
def home_of(kind: str, initial: Initial, state: dict[str, str], directory: Path | None = None) -> Iterator[Home]:
    """A home of one of KINDS; "plain" ones as if Numba were not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if "plain" in kind:
            patch.setattr(home_module, "HAVE_NUMBA", False)
        if "ram" in kind:
            with home_of(kind.replace("ram, ", "", 1), initial, state, directory) as inner:
                yield (home := ram_over(inner, frames=7 if "ram, ram" in kind else 3))
                home.close()
            return
        if "memory" in kind:
            home: Home = MemoryHome(initial, state)
        elif "blocks" in kind:
            home = Pairs(initial, state)
        elif "remote" in kind:
            pytest.importorskip("fsspec", reason="stores at URLs need fsspec")
            patch.setattr(RemoteHome, "block_bytes", 3000)
            home = RemoteHome(initial, state, url="memory://bucket/rows")
        else:
            try:
                make = LogHome if "log" in kind else FileHome
                home = make(initial, state, directory=directory, direct="direct" in kind)
            except ConfigError as error:
                if "direct" not in kind:
                    raise
                pytest.skip(str(error))  # the disk of the temporary directory has no direct access
    assert home.native != ("plain" in kind)
    try:
        yield home
    finally:
        home.close()


def ram_over(inner: Home, frames: int, block_rows: int | None = None) -> RamTier:
    """A RAM tier of so many frames at most."""
    inner.block_rows = block_rows or inner.block_rows
    return RamTier(inner, memory=tier_bytes(inner.num_rows, inner.row_bytes, inner.block_rows, frames))


def tables_of(rows: list[int], dim: int, dtype: str) -> list[TableConfig]:
    return [
        TableConfig(name=f"t{i}", num_embeddings=count, embedding_dim=dim, dtype=dtype, init_scale=0.1 * (i + 1))
        for i, count in enumerate(rows)
    ]


def one_table(rows: int, dim: int, dtype: str = "float32") -> Initial:
    return Initial.of(tables_of([rows], dim, dtype), seed=7)


@cache
def resident_rows(dim: int, dtype: str, backend: str = "reference") -> torch.Tensor:
    """What a resident run of these tables starts from."""
    tables = tables_of([300, 1, 57, 1000], dim, dtype)
    resident = EmbeddingTables(tables, optimizer=RowWiseAdagrad(lr=0.1), seed=3, backend=backend)
    return torch.cat([resident.rows(table.name) for table in tables])


def random_rows(home: Home, count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = home.empty(count)
    rows.weight.copy_(torch.randn(rows.weight.shape, generator=generator))
    for tensor in rows.state.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return rows


def equal(left: Rows, right: Rows) -> bool:
    """Whether two sets of rows hold the same bits."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    pairs = [(left.weight, right.weight), *((left.state[name], right.state[name]) for name in right.state)]
    return set(left.state) == set(right.state) and all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(bits[a.dtype]), b.contiguous().view(bits[b.dtype]))
        for a, b in pairs
    )


def pick(rows: Rows, index: slice | torch.Tensor) -> Rows:
    return Rows(rows.weight[index], {name: tensor[index] for name, tensor in rows.state.items()})


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 700])
@pytest.mark.parametrize(("dim", "dtype", "state"), SHAPES)
def test_rows_read_back_as_written_with_their_state(kind, count, dim, dtype, state):
    with home_of(kind, one_table(count, dim, dtype), state) as home:
        rows = random_rows(home, count, 1)
        home.write(0, rows)
        for start, stop in [(0, count), (count // 2, count), (count - 1, count), (0, 0)]:
            assert equal(home.read(start, stop), pick(rows, slice(start, stop)))
        assert home.row_bytes == dim * rows.weight.itemsize + sum(4 * t.numel() // count for t in rows.state.values())


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "dtype", "state"), SHAPES)
def test_rows_nobody_stored_are_those_a_resident_run_starts_from(kind, dim, dtype, state):
    tables = tables_of([300, 1, 57, 1000], dim, dtype)
    wanted = resident_rows(dim, dtype)
    initial = Initial.of(tables, seed=3)
    assert torch.equal(initial.rows(np.arange(len(wanted))), wanted)
    with home_of(kind, initial, state) as home:
        rows = np.random.default_rng(0).permutation(len(wanted))
        got = home.empty(len(rows))
        for tensor in got.state.values():
            tensor.fill_(5.0)  # what was there before must not shine through
        home.fetch(rows, got)
        assert torch.equal(got.weight, wanted[torch.from_numpy(rows)])
        assert not any(tensor.any() for tensor in got.state.values())
        assert torch.equal(home.read(200, 900).weight, wanted[200:900])
        assert not home.stored.contains(np.arange(home.num_rows)).any()


@pytest.mark.parametrize(("dim", "dtype"), [(5, "bfloat16"), (16, "bfloat16"), (16, "float32")])
def test_resident_runs_start_from_the_same_rows_on_either_back_end(dim, dtype):
    pytest.importorskip("numba", reason="the cpu back end needs numba")
    assert torch.equal(resident_rows(dim, dtype, "cpu"), resident_rows(dim, dtype))


def test_another_seed_or_name_gives_other_rows():
    table = tables_of([50], 4, "float32")
    other = [TableConfig(name="other", num_embeddings=50, embedding_dim=4, init_scale=0.1)]
    everything = np.arange(50)
    rows = Initial.of(table, seed=1).rows(everything)
    assert not torch.equal(rows, Initial.of(table, seed=2).rows(everything))
    assert not torch.equal(rows, Initial.of(other, seed=1).rows(everything))


@pytest.mark.slow
def test_rows_go_to_their_places_and_leave_the_others_alone(kind):
    with home_of(kind, one_table(5000, 16), BOTH) as home:
        everything = random_rows(home, 5000, 1)
        home.write(0, everything)
        generator = np.random.default_rng(0)
        target = random_rows(home, 3000, 2)
        wanted = pick(target, slice(None))
        wanted = Rows(wanted.weight.clone(), {name: tensor.clone() for name, tensor in wanted.state.items()})
        for _ in range(3):  # rows that were fetched before are fetched again, elsewhere
            rows, places = generator.permutation(5000)[:1000], generator.permutation(3000)[:1000]
            home.fetch(rows, target, places)
            into, out = torch.from_numpy(places), torch.from_numpy(rows)
            wanted.weight[into] = everything.weight[out]
            for name in BOTH:
                wanted.state[name][into] = everything.state[name][out]
            assert equal(target, wanted)


@pytest.mark.slow
def test_stored_rows_come_from_their_places(kind):
    initial = one_table(5000, 16)
    with home_of(kind, initial, BOTH) as home:
        slots = random_rows(home, 3000, 1)
        generator = np.random.default_rng(0)
        rows, places = generator.permutation(5000)[:1000], generator.permutation(3000)[:1000]
        home.store(rows, slots, places)
        assert home.stored.contains(rows).all()
        assert int(home.stored.contains(np.arange(5000)).sum()) == 1000
        got = home.read(0, 5000)
        assert equal(pick(got, torch.from_numpy(rows)), pick(slots, torch.from_numpy(places)))
        others = np.setdiff1d(np.arange(5000), rows)
        assert torch.equal(got.weight[torch.from_numpy(others)], initial.rows(others))
        assert not got.state["exp_avg"][torch.from_numpy(others)].any()


def test_partial_writes_leave_other_rows_alone(kind):
    with home_of(kind, one_table(50, 16), BOTH) as home:
        everything = random_rows(home, 50, 1)
        home.write(0, everything)
        part = random_rows(home, 5, 2)
        home.write(20, part)
        part_then = Rows(part.weight.clone(), {name: tensor.clone() for name, tensor in part.state.items()})
        part.weight.fill_(99.0)  # what was written is a copy
        assert equal(home.read(0, 20), pick(everything, slice(0, 20)))
        assert equal(home.read(25, 50), pick(everything, slice(25, 50)))
        assert equal(home.read(20, 25), part_then)
        home.read(0, 50).weight.fill_(99.0)  # and so is what was read
        assert equal(home.read(20, 25), part_then)


def test_writes_convert_the_type_of_the_weights(kind):
    with home_of(kind, one_table(3, 5, "bfloat16"), ADAGRAD) as home:
        values = torch.tensor(
            [[1.0, 2.0, 3.0, 4.0, -0.0], [1 / 3, 1e-40, 1e30, -1.0, 0.1], [0.0, 7.0, 8.0, 9.0, 257.0]]
        )
        home.write(0, Rows(values, {"sum": torch.zeros(3)}))
        assert torch.equal(home.read(0, 3).weight, values.to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "state"), [("float32", BOTH), ("bfloat16", ADAM)])
def test_every_bit_pattern_survives(kind, dtype, state):
    """Not-a-numbers keep their payload: a move is no arithmetic."""
    with home_of(kind, one_table(4096, 16, dtype), state) as home:
        whole = torch.int32 if dtype == "float32" else torch.int16
        info = torch.iinfo(whole)
        bits = torch.linspace(info.min, info.max, 65536, dtype=torch.float64).round().to(whole)
        floats = torch.linspace(-(2**31), 2**31 - 1, 65536, dtype=torch.float64).round().to(torch.int32)
        floats = floats.view(torch.float32).view(4096, 16)
        moments = {name: floats if kind == "row" else floats[:, 3].contiguous() for name, kind in state.items()}
        rows = Rows(bits.view(home.dtype).view(4096, 16), moments)
        home.store(np.random.default_rng(0).permutation(4096), rows, np.random.default_rng(0).permutation(4096))
        assert equal(home.read(0, 4096), rows)


def test_slots_that_are_no_plain_memory_are_served_through_a_copy(kind):
    """As on a GPU: here the slots are every other column of something wider."""
    with home_of(kind, one_table(40, 16), BOTH) as home:
        everything = random_rows(home, 40, 1)
        home.write(0, everything)
        slots = Rows(torch.zeros(10, 32)[:, ::2], {"exp_avg": torch.zeros(10, 32)[:, ::2], "sum": torch.zeros(20)[::2]})
        home.fetch(int64(30, 2, 17), slots, int64(9, 0, 4))
        assert equal(pick(slots, torch.tensor([9, 0, 4])), pick(everything, torch.tensor([30, 2, 17])))
        home.fetch(int64(5, 6), slots)
        assert equal(pick(slots, slice(0, 2)), pick(everything, slice(5, 7)))
        home.store(int64(0, 1), slots, int64(9, 4))
        assert equal(home.read(0, 2), pick(everything, torch.tensor([30, 17])))
        home.store(int64(3), slots)
        assert equal(home.read(3, 4), pick(everything, slice(5, 6)))


def test_what_does_not_fit_is_refused(kind):
    with home_of(kind, one_table(10, 4), ADAGRAD) as home:
        fine = random_rows(home, 3, 1)
        for rows in (int64(10), int64(-1), int64(0, 2**62)):
            with pytest.raises(IndexError, match="its rows are 0 to 9"):
                home.fetch(rows, fine)
            with pytest.raises(IndexError, match="its rows are 0 to 9"):
                home.store(rows, fine)
        for places in (int64(3), int64(-1)):
            with pytest.raises(IndexError, match="are not in the 3 rows"):
                home.fetch(int64(1), fine, places)
        with pytest.raises(IndexError, match="are not in the 3 rows"):
            home.fetch(np.arange(4), fine)
        with pytest.raises(IndexError):
            home.read(8, 11)
        with pytest.raises(IndexError):
            home.write(9, fine)
        with pytest.raises(ValueError, match="one place a row"):
            home.fetch(int64(1, 2), fine, int64(1))
        for bad in (
            Rows(torch.zeros(3, 5), fine.state),
            Rows(fine.weight.to(torch.bfloat16), fine.state),
            Rows(fine.weight, {}),
            Rows(fine.weight, {"sum": torch.zeros(2)}),
            Rows(fine.weight, {"sum": torch.zeros(3, 4)}),
        ):
            with pytest.raises(ValueError, match="do not fit"):
                home.store(int64(1), bad)
        with pytest.raises(ValueError, match="must be float32"):
            home.store(int64(1), Rows(fine.weight, {"sum": torch.zeros(3, dtype=torch.float64)}))
        assert not home.stored.contains(np.arange(home.num_rows)).any()


def test_no_rows_is_fine(kind):
    with home_of(kind, one_table(10, 4), ADAGRAD) as home:
        home.fetch(int64(), home.empty(0))
        home.store(int64(), home.empty(5), int64())
        home.flush()
        assert not home.stored.contains(np.arange(home.num_rows)).any()


def test_a_closed_home_says_so(kind):
    with home_of(kind, one_table(10, 4), ADAGRAD) as home:
        home.close()
        with pytest.raises(HomeError, match="is closed"):
            home.read(0, 1)
        home.close()


def test_a_home_shows_its_size(kind):
    with home_of(kind, one_table(1_000_000, 64), ADAGRAD) as home:
        assert "1,000,000 rows x 64 float32 + sum, 248.0 MiB" in repr(home)
        names = {"ram": "memory", "memory": "memory", "blocks": "pairs", "remote": "remote"}
        kinds = [names.get(part.removeprefix("plain "), "file") for part in kind.split(", ")]
        assert home.kind == " over ".join(kinds)


def test_unknown_state_and_missing_gpu_are_config_errors():
    with pytest.raises(ConfigError, match="'row' or 'scalar'"):
        MemoryHome(one_table(3, 2), {"sum": "matrix"})
    with pytest.raises(ConfigError, match="at least 1"):
        FileHome(one_table(3, 2), {}, concurrent_reads=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            MemoryHome(one_table(3, 2), {}, pin=True)


def test_more_state_than_kernels_carry_takes_the_plain_path():
    state = {"a": "row", "b": "scalar", "c": "row"}
    for home in (MemoryHome(one_table(30, 5), state), FileHome(one_table(30, 5), state)):
        rows = random_rows(home, 30, 1)
        home.write(0, rows)
        assert equal(home.read(3, 20), pick(rows, slice(3, 20)))
        home.close()


def test_a_huge_file_home_costs_nothing_until_rows_come_home(tmp_path):
    count = 2**32 + 5
    before = resident_memory() or 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the disk of a test machine could not hold all rows
        home = FileHome(one_table(count, 5, "bfloat16"), ADAGRAD, directory=tmp_path)
    rows = int64(count - 1, 2**31 - 1, 2**31, 0, 2**32, 2**31 + 12_345)
    fresh = home.empty(len(rows))
    home.fetch(rows, fresh)
    assert torch.equal(fresh.weight, home.initial.rows(rows))
    values = random_rows(home, len(rows), 1)
    home.store(rows, values)
    got = home.empty(len(rows))
    home.fetch(rows, got)
    assert equal(got, values)
    assert equal(home.read(count - 2, count), Rows(
        torch.cat([home.initial.rows(int64(count - 2)), values.weight[:1]]),
        {"sum": torch.cat([torch.zeros(1), values.state["sum"][:1]])},
    ))  # fmt: skip
    assert home.path.stat().st_size > 4 * count
    assert home.path.stat().st_blocks * 512 < 2**20
    assert (resident_memory() or 0) - before < 64 * 2**20
    home.close()


def test_a_huge_memory_home_reaches_beyond_two_to_the_31_elements():
    count, dim = 2**31 // 5 + 7, 5
    before = resident_memory() or 0
    home = MemoryHome(one_table(count, dim, "bfloat16"), ADAGRAD)
    rows = int64(count - 1, 2**31 // dim, 2**31 // dim + 1, 0)
    fresh = home.empty(len(rows))
    home.fetch(rows, fresh)
    assert torch.equal(fresh.weight, home.initial.rows(rows))
    values = random_rows(home, len(rows), 1)
    home.store(rows, values)
    assert equal(home.read(count - 1, count), pick(values, slice(0, 1)))
    assert equal(home.read(2**31 // dim, 2**31 // dim + 2), pick(values, slice(1, 3)))
    assert (resident_memory() or 0) - before < 128 * 2**20
    home.close()


def test_memory_that_cannot_be_had_is_a_config_error():
    with pytest.raises(ConfigError, match=r"needs .* TiB; this machine has .* Keep the rows in a file"):
        MemoryHome(one_table(2**30, 16384), ADAGRAD)
    with pytest.raises(ConfigError, match=r"a bit for each of 1,125,899,906,842,624 rows"):
        MemoryHome(one_table(2**50, 4), ADAGRAD)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_threads_may_fetch_and_store_different_rows_at_once(kind):
    """Odd and even rows share pages of the file, and words of the bitmap."""
    with home_of(kind, one_table(4000, 16), BOTH) as home:
        values = random_rows(home, 4000, 1)
        even, odd = np.arange(0, 4000, 2), np.arange(1, 4000, 2)
        home.store(odd, values, odd)
        got, failed = home.empty(4000), []

        def work(part: int) -> None:
            try:
                for _ in range(3):
                    home.store(even[part::3], values, even[part::3])
                    home.fetch(odd[part::3], got, odd[part::3])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert torch.equal(got.weight[1::2], values.weight[1::2])
        assert equal(home.read(0, 4000), values)


def test_rows_of_one_block_that_two_threads_store_directly_are_both_kept(tmp_path, monkeypatch):
    """A direct store reads a block, changes it and writes it."""
    with home_of("plain direct", one_table(4000, 16), BOTH, tmp_path) as home:
        values, call, others = random_rows(home, 2, 1), home._call, []

        def interrupted(view, offset, writing):
            if writing and not others:  # the block was read
                others.append(threading.Thread(target=home.store, args=(int64(1), values, int64(1))))
                others[0].start()
                others[0].join(0.5)
            return call(view, offset, writing)

        monkeypatch.setattr(home, "_call", interrupted)
        home.store(int64(0), values, int64(0))
        others[0].join()
        assert equal(home.read(0, 2), values)


@st.composite
def histories(draw):
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    total = sum(rows)
    some = st.lists(st.integers(0, total - 1), unique=True, max_size=total)
    spans = st.tuples(st.integers(0, total), st.integers(0, total)).map(sorted)
    operation = st.one_of(
        st.tuples(st.sampled_from(["fetch", "store"]), some, st.booleans()),
        st.tuples(st.sampled_from(["read", "write"]), spans, st.booleans()),
    )
    dim, dtype, state = draw(st.sampled_from(SHAPES))
    return rows, dim, dtype, state, draw(st.lists(operation, max_size=8)), draw(st.integers(0, 2**31))


@pytest.mark.slow
@given(history=histories())
@settings(max_examples=scaled(60), deadline=None)
@pytest.mark.parametrize("kind", KINDS)
def test_any_history_equals_a_plain_tensor(kind, history):
    counts, dim, dtype, state, operations, seed = history
    tables = tables_of(counts, dim, dtype)
    total = sum(counts)
    generator = np.random.default_rng(seed)
    with home_of(kind, Initial.of(tables, seed=seed), state) as home:
        model = Rows(
            home.initial.rows(np.arange(total)),
            {name: torch.zeros((total, dim) if k == "row" else (total,)) for name, k in state.items()},
        )
        for step, (name, which, placed) in enumerate(operations):
            if name in ("read", "write"):
                start, stop = which
                if name == "read":
                    assert equal(home.read(start, stop), pick(model, slice(start, stop)))
                    continue
                values = random_rows(home, stop - start, seed + step)
                home.write(start, values)
                index, source = torch.arange(start, stop), values
            else:
                rows = np.array(which, dtype=np.int64)
                slots = random_rows(home, len(rows) + 3, seed + step)
                places = generator.permutation(len(rows) + 3)[: len(rows)] if placed else None
                at = torch.arange(len(rows)) if places is None else torch.from_numpy(places)
                index = torch.from_numpy(rows)
                if name == "fetch":
                    home.fetch(rows, slots, places)
                    assert equal(pick(slots, at), pick(model, index))
                    continue
                home.store(rows, slots, places)
                source = pick(slots, at)
            model.weight[index] = source.weight
            for key in state:
                model.state[key][index] = source.state[key]
        assert equal(home.read(0, total), model)


@given(rows=st.integers(1, 10**6), row_bytes=st.one_of(st.integers(1, 600), st.integers(1, 70_000)), data=st.data())
@settings(max_examples=scaled(300), deadline=None)
def test_records_are_apart_inside_the_file_and_waste_little(rows, row_bytes, data):
    layout = PageLayout.of(rows, row_bytes)
    assert layout.record - 4 < row_bytes <= layout.record
    assert layout.block % PAGE == 0
    assert layout.per_block * layout.record >= layout.block * 7 // 8
    if row_bytes <= 512:
        assert layout.block == PAGE
    row = data.draw(st.integers(0, rows - 1))
    at = layout.offset(row)
    assert at + layout.record <= layout.file_bytes - PAGE
    assert at // layout.block == (at + layout.record - 1) // layout.block  # never straddles two blocks
    if row:
        assert layout.offset(row - 1) + layout.record <= at


@pytest.fixture(params=FILES)
def file_kind(request):
    return request.param


@pytest.fixture
def held(file_kind, tmp_path) -> Iterator[tuple[FileHome, Rows]]:
    """A home of 4,000 rows, all held, in a file that can be reached."""
    with home_of(file_kind, one_table(4000, 16), BOTH, tmp_path) as home:
        assert isinstance(home, FileHome)
        rows = random_rows(home, 4000, 1)
        home.write(0, rows)
        yield home, rows


def test_a_file_that_shrank_is_an_error_and_never_zeros(held):
    home, rows = held
    length = home.path.stat().st_size
    os.truncate(home.path, length // 2)
    for rows_wanted in (np.arange(3000, 3100), int64(3)):  # also of rows that are still there
        with pytest.raises(HomeError, match=rf"{home.path.name}.*{length // 2:,} B long and was made {length:,} B"):
            home.fetch(rows_wanted, home.empty(len(rows_wanted)))
    with pytest.raises(HomeError, match=r"(Rows from [0-9,]+ on|[0-9,]+ rows) are lost"):
        home.store(int64(3999), rows)
    assert home.path.stat().st_size < length  # a store to the end does not grow it back


def test_a_file_cut_short_does_not_grow_back_unnoticed(held, monkeypatch):
    """A store to the end, between two looks at the length, must not turn the lost rows into zeros."""
    home, rows = held
    os.truncate(home.path, home.path.stat().st_size // 2)
    with monkeypatch.context() as patch:
        patch.setattr(home, "_check_length", lambda action: None)
        with suppress(HomeError):  # where it read a page before it wrote it, the store has noticed
            home.store(np.arange(3900, 4000), rows)
    with pytest.raises(HomeError, match="something has changed its length"):
        home.fetch(int64(3000), home.empty(1))


def test_a_file_cut_short_during_a_store_is_an_error_and_the_rows_stay_unmarked(file_kind, tmp_path, monkeypatch):
    with home_of(file_kind, one_table(4000, 16), BOTH, tmp_path) as home:
        step = "_transfer" if "log" in file_kind else "_run"
        real = getattr(home, step)

        def cut(*given, **options):
            real(*given, **options)
            os.truncate(home.path, home.layout.file_bytes // 2)

        monkeypatch.setattr(home, step, cut)
        with pytest.raises(HomeError, match="something has changed its length"):
            home.store(int64(3900), random_rows(home, 1, 1))
        assert not home.stored.contains(int64(3900)).any()


def test_a_file_that_shrinks_during_a_fetch_is_an_error_that_names_the_row(held, monkeypatch):
    home, _ = held
    monkeypatch.setattr(home, "_check_length", lambda action: None)
    os.truncate(home.path, home.layout.offset(2000) + 10)
    first = 2000 if not home.direct else home.layout.offset(2000) // PAGE * home.layout.per_block
    with pytest.raises(HomeError, match=r"reading row ([0-9,]+) .*something has changed its length") as caught:
        home.fetch(np.arange(1500, 2500), home.empty(1000))
    named = int(str(caught.value).split("reading row ")[1].split(" ")[0].replace(",", ""))
    assert first <= named < 2500
    got = home.empty(100)
    home.fetch(np.arange(100), got)  # what lies before the cut can still be saved


def test_a_full_disk_is_an_error_with_numbers_and_the_rows_stay_unmarked(file_kind, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full, which this system lacks")
    with home_of(file_kind, one_table(4000, 16), BOTH, tmp_path) as home:
        if home.direct:
            # Whole blocks are written, so nothing is read from the device that is always full.
            rows = np.arange(home.layout.per_block)
        else:
            rows = int64(5, 1000, 2000)
        values = random_rows(home, len(rows), 1)
        fd = os.open(full, os.O_RDWR)
        mine = os.dup(home._fd)
        os.dup2(fd, home._fd)
        home._check_length = lambda action: None
        try:
            with pytest.raises(HomeError, match=r"writing row [0-9,]+ .*No space left.*free on its disk.*larger one"):
                home.store(rows, values)
        finally:
            os.dup2(mine, home._fd)
            os.close(fd)
            os.close(mine)
            del home._check_length
        assert not home.stored.contains(rows).any()
        assert torch.equal(home.read(0, 10).weight, home.initial.rows(np.arange(10)))
        home.store(rows, values)  # once there is space again, the same store works
        got = home.empty(len(rows))
        home.fetch(rows, got)
        assert equal(got, values)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX resource limits, which Windows lacks")
def test_a_limit_on_file_size_is_an_error_with_its_remedy(file_kind, tmp_path):
    import resource

    with home_of(file_kind, one_table(40_000, 16), BOTH, tmp_path) as home:
        values = random_rows(home, 1, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        try:
            home.store(int64(1), values)
            many = np.arange(2, 39_001) if "log" in file_kind else int64(39_000)
            with pytest.raises(HomeError, match=r"writing row [0-9,]+ .*File too large.*ulimit -f"):
                home.store(many, random_rows(home, len(many), 2))
            with pytest.raises(HomeError, match=r"setting its length to .*ulimit -f"):
                FileHome(one_table(40_000, 16), BOTH, directory=tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert home.stored.contains(int64(1, 39_000)).tolist() == [True, False]
        assert len(list(tmp_path.iterdir())) == 1  # the home that could not be made left nothing


def test_a_closed_descriptor_is_an_error(held):
    home, _ = held
    keep = os.dup(home._fd)
    os.close(home._fd)
    try:
        for action in (
            lambda: home.fetch(int64(1), home.empty(1)),
            lambda: home.store(int64(1), home.empty(1)),
            home.flush,
        ):
            with pytest.raises(HomeError, match=r"Bad file descriptor.*closed by other code"):
                action()
    finally:
        os.dup2(keep, home._fd)
        os.close(keep)


class FakeDisk:
    """Stands for pread and pwrite of a home: moves at most ``most`` bytes a call, and fails where told."""

    def __init__(self, home: FileHome, monkeypatch, *, most: int = 2**30, fail_at: int = -1, fail: str = "") -> None:
        self.home, self.most, self.fail_at = home, most, fail_at
        self.calls = 0
        kind = ctypes.CFUNCTYPE(
            ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
        )
        self._read, self._write = os.preadv, os.pwritev  # the real ones
        self._failing = {"reading": self._read, "writing": self._write}.get(fail)
        if home._calls is None or isinstance(home, LogHome):  # a log is written without compiled code
            monkeypatch.setattr(os, "preadv", lambda fd, views, at: self.move(self._read, fd, views[0], at))
            monkeypatch.setattr(os, "pwritev", lambda fd, views, at: self.move(self._write, fd, views[0], at))
        if home._calls is None:
            return

        def native(real):
            def call(fd, address, size, at):
                view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
                try:
                    return self.move(real, fd, view, at)
                except OSError as error:
                    ctypes.set_errno(error.errno)
                    return -1

            return call

        home.callbacks = [kind(native(self._read)), kind(native(self._write))]  # which must live as long as the home
        for place, callback in enumerate(home.callbacks):
            home._calls[place] = ctypes.cast(callback, ctypes.c_void_p).value

    def move(self, real, fd: int, view: memoryview, at: int) -> int:
        self.calls += 1
        size = min(len(view), self.most)
        if real is self._failing and at <= self.fail_at < at + len(view):
            if self.fail_at == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            size = min(size, self.fail_at - at)
        return real(fd, [view[:size]], at)


@pytest.mark.slow
def test_a_disk_that_moves_a_little_at_a_time_is_waited_for(held, monkeypatch):
    home, rows = held
    disk = FakeDisk(home, monkeypatch, most=PAGE if home.direct else 100)
    order = np.random.default_rng(0).permutation(4000)[:200]
    home.store(order, rows, order[::-1])
    got = home.empty(200)
    home.fetch(order, got)
    assert equal(got, pick(rows, torch.from_numpy(order[::-1].copy())))
    assert equal(home.read(0, 300), pick(home.read(0, 4000), slice(0, 300)))
    assert disk.calls > (150 if isinstance(home, LogHome) else 400)


@pytest.mark.parametrize("action", ["reading", "writing"])
def test_a_failing_device_is_an_error_that_names_file_row_and_cause(held, monkeypatch, action):
    home, rows = held
    at = home.layout.offset(home.layout.per_block * 20)  # where a block begins: also direct transfers start there
    if action == "writing" and isinstance(home, LogHome):
        at = home.layout.offset(home._used * home._per_segment)  # the segment after those that were written
    FakeDisk(home, monkeypatch, fail_at=at, fail=action)
    everything = np.arange(4000)
    target = home.empty(4000)
    for _ in range(2):  # the second time nothing hangs either
        with pytest.raises(
            HomeError, match=rf"{home.path.name}: {action} row [0-9,]+ .*Input/output error.*system log"
        ):
            home.fetch(everything, target) if action == "reading" else home.store(everything, rows)


@pytest.mark.parametrize("kind", [kind for kind in FILES if "log" not in kind])
def test_an_interrupt_stops_the_other_threads_before_it_leaves(kind, tmp_path, monkeypatch):
    with home_of(kind, one_table(4000, 16), BOTH, tmp_path) as home:
        rows = random_rows(home, 4000, 1)
        main, real, at_work = threading.current_thread(), home._with_buffer, []

        def interrupted(task):
            if threading.current_thread() is main:
                raise KeyboardInterrupt
            at_work.append(task)
            real(task)
            time.sleep(0.05)
            at_work.pop()

        monkeypatch.setattr(home, "_with_buffer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            home.store(np.arange(0, 4000, 2), rows)
        assert not at_work
        monkeypatch.undo()
        assert not home.stored.contains(np.arange(home.num_rows)).any()
        home.write(0, rows)
        assert equal(home.read(0, 4000), rows)


def test_the_file_goes_with_the_home(tmp_path):
    home = FileHome(one_table(10, 4), {}, directory=tmp_path / "made" / "here")
    path = home.path
    assert path.parent == tmp_path / "made" / "here"
    assert path.exists()
    home.close()
    assert not path.exists()
    home = FileHome(one_table(10, 1), {}, directory=tmp_path)
    path = home.path
    home.write(0, random_rows(home, 10, 1))
    del home
    gc.collect()
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let an open file lose its name")
def test_a_file_without_a_directory_has_no_name():
    home = FileHome(one_table(10, 1), {})
    assert home.path.parent == Path(tempfile.gettempdir())
    assert not home.path.exists()
    rows = random_rows(home, 10, 1)
    home.write(0, rows)
    assert equal(home.read(0, 10), rows)
    home.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file locks, which Windows lacks")
def test_files_left_by_a_kill_are_swept_and_live_ones_are_not(tmp_path, monkeypatch):
    code = """
        import os, signal, sys
        from stoker import TableConfig
        from stoker.tables.stores.file_home import FileHome
        from stoker.tables.stores.home import Initial
        initial = Initial.of([TableConfig(name="t", num_embeddings=10, embedding_dim=4)], 0)
        mine = FileHome(initial, {}, directory=sys.argv[1])
        child = os.fork()
        if not child:
            killed = FileHome(initial, {}, directory=sys.argv[1])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        child = os.fork()
        if not child:
            mine.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(len(os.listdir(sys.argv[1])), mine.path.exists())
    """
    assert run_python("-c", textwrap.dedent(code), tmp_path).stdout == "2 True\n"
    assert len(list(tmp_path.iterdir())) == 1, "that of the exit is gone, that of the kill is left"
    (tmp_path / "mine.rows").write_text("not ours")
    first = FileHome(one_table(10, 4), {}, directory=tmp_path)
    second = FileHome(one_table(10, 4), {}, directory=tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path, tmp_path / "mine.rows"])
    make, swept = tempfile.mkstemp, []

    def overtaken(*given):  # another process sweeps before the file is locked
        made = make(*given)
        if not swept:
            _sweep(tmp_path)
            swept.append(made[1])
        return made

    monkeypatch.setattr(tempfile, "mkstemp", overtaken)
    third = FileHome(one_table(10, 4), {}, directory=tmp_path)
    assert not Path(swept[0]).exists()
    assert third.path.exists()
    for home in (first, second, third):
        home.close()


def test_a_disk_too_small_for_all_rows_is_a_warning_with_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.statvfs(path) and type("Usage", (), {"free": 1000})())
    with pytest.warns(UserWarning, match=r"may grow to .* MiB for 10,000 rows, but its disk has 1000 B free"):
        FileHome(one_table(10_000, 32), {}, directory=tmp_path).close()


def test_a_directory_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match=r"cannot be made in .*file/below"):
        FileHome(one_table(10, 4), {}, directory=tmp_path / "file" / "below")
