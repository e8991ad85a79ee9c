"""What every storage promises. A new storage adds one line to STORAGES and inherits these tests."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from placed import Pairs

from stoker import TableConfig
from stoker.base.errors import ConfigError, HomeError
from stoker.ops import Bags
from stoker.ops.space import make_space
from stoker.tables.links.transfer import DirectLink, QueuedLink
from stoker.tables.slots.sharded import ShardedResidency
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.storage import DeviceRows, MappedRows, Rows, Storage
from stoker.tables.stores.file_home import FileHome
from stoker.tables.stores.home import Initial, MemoryHome
from stoker.tables.stores.log_home import LogHome
from stoker.tables.stores.ram_tier import RamTier

STATE = {"exp_avg": "row", "sum": "scalar"}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def slotted(kind, link, *, transient=False, hot=0.0, shards=1):
    def build(rows, dim, dtype):
        table = TableConfig(name="t", num_embeddings=rows, embedding_dim=dim, dtype=NAMES[dtype])
        home = kind(Initial.of([table], 0), STATE)
        space = make_space(["t"], [rows], [["t"]], ["t"])
        made = SlottedRows(
            home, space, slots=max(1, rows // 3), device=torch.device("cpu"), transient=transient, link=link,
            hot=[int(hot * rows)],
        )  # fmt: skip
        if shards > 1 and rows > 40:
            slots = len(made.transit.weight)
            made.residency = ShardedResidency(space.first_row, slots, transient=transient, shards=shards)
            made.move_by(made._link)
        return made

    return build


STORAGES = {
    "DeviceRows": lambda rows, dim, dtype: DeviceRows(rows, dim, dtype, STATE, torch.device("cpu")),
    "MappedRows": lambda rows, dim, dtype: MappedRows(rows, dim, dtype, STATE, torch.device("cpu")),
    "SlottedRows, memory": slotted(MemoryHome, DirectLink),
    "SlottedRows, file": slotted(FileHome, QueuedLink),
    "SlottedRows, log": slotted(LogHome, QueuedLink),
    "SlottedRows, RAM tier, file": slotted(lambda *of: RamTier(FileHome(*of), memory=3 * 4096), QueuedLink),
    "SlottedRows, RAM tier, log": slotted(lambda *of: RamTier(LogHome(*of), memory=5500), QueuedLink),
    "SlottedRows, RAM tier, blocks": slotted(lambda *of: RamTier(Pairs(*of), memory=2500), QueuedLink),
    "SlottedRows, transient": slotted(MemoryHome, QueuedLink, transient=True),
    "SlottedRows, hot and cold": slotted(MemoryHome, QueuedLink, transient=True, hot=0.15),
    "SlottedRows, in shards": slotted(MemoryHome, QueuedLink, hot=0.05, shards=4),
    "SlottedRows, hot, file": slotted(FileHome, DirectLink, hot=0.1),
}


def random_rows(count: int, dim: int, dtype: torch.dtype, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        torch.randn(count, dim, generator=generator).to(dtype),
        {
            "exp_avg": torch.randn(count, dim, generator=generator),
            "sum": torch.rand(count, generator=generator),
        },
    )


@pytest.fixture(params=sorted(STORAGES))
def make(request):
    return STORAGES[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (7, 3), (1000, 16)])
def test_rows_read_back_as_written_with_their_state(make, count, dim, dtype):
    storage: Storage = make(count, dim, dtype)
    assert storage.num_rows == count
    rows = random_rows(count, dim, dtype, 1)
    storage.write(0, rows)
    for start, stop in [(0, count), (count // 2, count), (count - 1, count), (0, 0)]:
        got = storage.read(start, stop)
        assert torch.equal(got.weight, rows.weight[start:stop])
        for name in STATE:
            assert torch.equal(got.state[name], rows.state[name][start:stop])


def test_partial_writes_leave_other_rows_alone(make):
    storage: Storage = make(50, 4, torch.float32)
    everything = random_rows(50, 4, torch.float32, 1)
    storage.write(0, everything)
    storage.write(20, random_rows(5, 4, torch.float32, 2))
    assert torch.equal(storage.read(0, 20).weight, everything.weight[:20])
    assert torch.equal(storage.read(25, 50).weight, everything.weight[25:])
    assert torch.equal(storage.read(20, 25).weight, random_rows(5, 4, torch.float32, 2).weight)


def test_rows_that_are_written_while_they_are_in_use_are_seen_at_once(make):
    storage: Storage = make(50, 4, torch.float32)
    space = make_space(["t"], [50], [["t"]], ["t"])
    bags = Bags(torch.tensor([[3], [20], [21]]))
    storage.acquire(bags, space).release(changed=False)
    new = random_rows(5, 4, torch.float32, 2)
    storage.write(18, new)
    lease = storage.acquire(bags, space)
    assert torch.equal(storage.slots[lease.bags.ids[1:, 0].long()].weight, new.weight[2:4])
    lease.release(changed=False)
    storage.scatter(np.array([3, 19, 21]), new[:3])
    lease = storage.acquire(bags, space)
    assert torch.equal(storage.slots[lease.bags.ids[:, 0].long()].weight, new.weight[[0, 2, 2]])
    lease.release(changed=False)


def test_state_starts_at_zero_and_bytes_are_counted(make):
    storage: Storage = make(10, 4, torch.float32)
    assert all(not tensor.any() for tensor in storage.read(0, 10).state.values())
    assert storage.fast_bytes >= storage.weight.nbytes > 0


def test_written_values_are_copied(make):
    storage: Storage = make(3, 2, torch.float32)
    rows = random_rows(3, 2, torch.float32, 1)
    storage.write(0, rows)
    before = rows.weight.clone()
    rows.weight.fill_(99.0)
    assert torch.equal(storage.read(0, 3).weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_worked_on_under_a_lease_read_back_wherever_they_lie(make, dtype):
    """Weight and state that a kernel left in a row are what the next reader finds, after any number of moves."""
    count, dim = 40, 3
    storage: Storage = make(count, dim, dtype)
    space = make_space(["t"], [count], [["t"]], ["t"])
    expected = random_rows(count, dim, dtype, 5)
    storage.write(0, expected)
    expected = Rows(expected.weight.clone(), {name: tensor.clone() for name, tensor in expected.state.items()})
    generator = torch.Generator().manual_seed(3)
    for step in range(30):
        ids = torch.randperm(count, generator=generator)[:7].view(-1, 1)
        lease = storage.acquire(Bags(ids), space)
        at = lease.bags.ids.reshape(-1).long()
        if isinstance(storage, DeviceRows):
            assert torch.equal(at, ids.reshape(-1))
        assert torch.equal(storage.weight[at], expected.weight[ids.reshape(-1)])
        storage.weight[at] += step
        storage.state["sum"][at] += 1
        expected.weight[ids.reshape(-1)] += step
        expected.state["sum"][ids.reshape(-1)] += 1
        lease.release(changed=True)
        lease.release(changed=True)  # once is enough, twice does no harm
    got = storage.read(0, count)
    assert torch.equal(got.weight, expected.weight)
    assert torch.equal(got.state["sum"], expected.state["sum"])
    assert torch.equal(got.state["exp_avg"], expected.state["exp_avg"])
    storage.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_the_current_ones_wherever_they_lie_and_none_moves(make, dtype):
    count = 40
    storage: Storage = make(count, 3, dtype)
    space = make_space(["t"], [count], [["t"]], ["t"])
    expected = random_rows(count, 3, dtype, 5)
    storage.write(0, expected)
    generator = torch.Generator().manual_seed(3)
    for step in range(20):
        ids = torch.randperm(count, generator=generator)[:7]
        lease = storage.acquire(Bags(ids.view(-1, 1)), space)
        at = lease.bags.ids.reshape(-1).long()
        storage.weight[at] += step
        storage.state["sum"][at] += 1
        expected.weight[ids] += step
        expected.state["sum"][ids] += 1
        asked = torch.randint(count, (25,), generator=generator)  # some twice, while the batch is under way
        for released in (False, True):
            before = storage.residency.row_in_slot.copy() if isinstance(storage, SlottedRows) else None
            got = storage.gather(asked.numpy())
            assert torch.equal(got.weight, expected.weight[asked])
            for name in STATE:
                assert torch.equal(got.state[name], expected.state[name][asked])
            got.weight.fill_(99.0)  # a copy
            if isinstance(storage, SlottedRows):
                assert (storage.residency.row_in_slot == before).all()
            if not released:
                lease.release(changed=True)
    assert len(storage.gather(torch.arange(0).numpy()).weight) == 0
    assert torch.equal(storage.read(0, count).weight, expected.weight)
    storage.close()


def test_an_id_outside_its_table_is_refused_before_anything_moves(make):
    storage: Storage = make(10, 2, torch.float32)
    space = make_space(["t"], [10], [["t"]], ["t"])
    if isinstance(storage, SlottedRows):
        with pytest.raises(IndexError, match="id 10"):
            storage.acquire(Bags(torch.tensor([[3], [10]])), space)
        lease = storage.acquire(Bags(torch.tensor([[3], [9]])), space)
        lease.release(changed=False)


def test_rows_that_do_not_fit_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table above 2**31 elements, on a machine without the memory."""

    def none_left(*shape: Any, **settings: Any) -> None:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr("stoker.tables.storage.np.zeros", none_left)
    with pytest.raises(ConfigError, match=r"2,147,483,653 rows of 4 columns need 64.0 GiB.*Cached\(fraction=0.1\)"):
        DeviceRows(2**31 + 5, 4, torch.float32, {"sum": "row"}, torch.device("cpu"))


def test_mapped_rows_are_in_files_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cpu = str(tmp_path / "new"), torch.device("cpu")
    storage = MappedRows(10, 4, torch.float32, {"sum": "row"}, cpu, folder)
    assert os.listdir(folder) == []
    maps = Path("/proc/self/maps")
    assert not maps.exists() or maps.read_text().count(folder) == 2
    storage.weight.fill_(7.0)
    storage.reset_state({"sum": "scalar"})
    assert (storage.read(9, 10).weight == 7.0).all()
    assert storage.state["sum"].shape == (10,)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(HomeError, match=r"160 B for rows cannot be made in .* \(No space left on device\)\. Name"):
        MappedRows(10, 4, torch.float32, {}, cpu, folder)
    with pytest.raises(ConfigError, match=r"stoker\.Mapped is for training on a CPU, not on cuda"):
        MappedRows(10, 4, torch.float32, {}, torch.device("cuda"), folder)
