"""What a cache takes bookkeeping its rows: as much as the code that takes it, and covered by the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import stoker
from stoker import Batch, Cached, EmbeddingTables, RowWiseAdagrad, TableConfig, stage
from stoker.base.errors import ConfigError
from stoker.ops.space import HAVE_NUMBA
from stoker.placement import footprint as footprint_module
from stoker.placement.budget import MemoryBudget
from stoker.placement.expected import Uses, uses_of
from stoker.placement.footprint import Footprint
from stoker.placement.profile import Profile
from stoker.tables.links.cuda_link import staging_bytes
from stoker.tables.slots.slotted import SlottedRows

BATCH, DIM = 512, 16
ROW = 4 * DIM + 4
OPTIMIZER = RowWiseAdagrad(lr=0.1)
GIB = 2**30


def tables_of(*rows: int) -> list[TableConfig]:
    return [TableConfig(name=f"t{i}", num_embeddings=count, embedding_dim=DIM) for i, count in enumerate(rows)]


def of(
    uses: list[Uses], *, lookahead: int = 64, on_cpu: bool = True, rounded: bool = False, epoch_lookahead: bool = False
) -> Footprint:
    budget = MemoryBudget(lookahead=lookahead, in_flight=2, epoch_lookahead=epoch_lookahead)
    return Footprint(uses, ROW, budget, on_cpu=on_cpu, rounded=rounded)


class Stream(list[Batch]):
    """Batches of one epoch."""

    def rest_of_epoch(self, step: int, *, ids_only: bool) -> list[Batch]:
        return self[step:]


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_NUMBA, reason="counts what Numba's planner holds, and numba is not installed here")
@pytest.mark.parametrize(("lookahead", "epoch_lookahead"), [(4, False), (48, False), (4, True)])
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_it_covers_what_a_running_cache_holds(share: float, lookahead: int, epoch_lookahead: bool):
    sizes, random = (60_000, 20_000), np.random.default_rng(0)
    uses = [uses_of(size, None, BATCH) for size in sizes]
    slots = int(share * sum(sizes))
    planned = of(uses, lookahead=lookahead, epoch_lookahead=epoch_lookahead)
    placement = Cached(slots=slots, window=planned.window(slots))
    tables = EmbeddingTables(tables_of(*sizes), optimizer=OPTIMIZER, placement=placement)
    storage = tables.groups[0].storage
    assert isinstance(storage, SlottedRows)
    residency = storage.residency
    most, ordered = {"page_table": 0, "window": 0}, epoch_lookahead

    def batches():
        for step in range(150):
            tail = [(size + 1.0) ** -0.05 - 1 for size in sizes]
            drawn = [(1 + end * random.random(BATCH)) ** (1 / -0.05) - 1 for end in tail]
            ids = np.stack([np.minimum(d, n - 1) for d, n in zip(drawn, sizes, strict=True)], 1).astype(np.int64)
            yield Batch(dense=torch.zeros(BATCH, 0), ids=torch.from_numpy(ids), step=step)

    for batch in stage(Stream(list(batches())), tables, lookahead=lookahead, epoch_lookahead=epoch_lookahead):
        tables(batch.ids).sum().backward()
        held = (residency._slots, residency._empty, residency._directory, residency._tree)
        waiting = [(r.wanted.rows, r.wanted.which.numpy(), r.bags.ids.numpy()) for r in storage._queues[-1]._waiting]
        announced = {row for rows, *_ in waiting for row in rows.tolist()}
        ordered = ordered or len(announced) > slots  # a heap whose memory is there from when it is touched
        now = {
            "page_table": sum(array.nbytes for array in held) + ordered * residency._heap.nbytes,
            "window": residency._ring.nbytes + sum(array.nbytes for one in waiting for array in one),
        }
        most = {name: max(most[name], size) for name, size in now.items()}
    expected = planned.bookkeeping(slots)
    for name, size in most.items():
        assert size <= 1.02 * getattr(expected, name), name  # batches scatter
        assert getattr(expected, name) <= 2.5 * size, name  # powers of two
    assert expected.index == storage.home.stored.words.nbytes
    tables.close()


def test_a_budget_covers_rows_and_what_is_beside_them():
    uses = [uses_of(400_000_000, None, 8 * 2048)]
    found = of(uses)
    for memory in (GIB // 8, GIB, 4 * GIB):
        slots = found.slots_within(memory)
        assert found.fast(slots) <= memory < found.fast(slots + 1) + 64 * slots  # the hash doubles at once
        counted = footprint_module._KEPT * (found.bookkeeping(slots).total - footprint_module._SMALL)
        assert found.fast(slots) == pytest.approx(slots * ROW + counted)
    behind = of(uses, on_cpu=False)
    assert behind.fast(1000) == 1000 * ROW
    assert behind.counted(10**7) > found.counted(10**7) > 0
    assert of(uses, on_cpu=False, rounded=True).fast(1000) == 1000 * (ROW + 16)


def test_behind_a_gpu_buffers_count_on_both_sides():
    uses = [uses_of(400_000_000, None, 2**18)]
    found, on_cpu = of(uses, on_cpu=False), of(uses)
    assert found.distinct > 60_000
    for slots in (10, 10**5, 10**7):
        buffers = staging_bytes(ROW, min(slots, found.distinct))
        counted = max(0, footprint_module._KEPT * (buffers - footprint_module._SMALL))
        assert found.fast(slots) == pytest.approx(slots * ROW + counted, abs=1)
        assert (found.bookkeeping(slots).staging, on_cpu.bookkeeping(slots).staging) == (buffers, 0)
    assert 64 * 2**20 < buffers < 80 * 2**20  # eight of 8 MiB, with the numbers of their slots
    for memory in (2**27, GIB):
        slots = found.slots_within(memory)
        assert found.fast(slots) <= memory < found.fast(slots + 1)
        bookkeeping = found.fast(100_000) - 100_000 * ROW
        assert bookkeeping > 0
        assert found.hot_slots_within(memory, transit=100_000) == (memory - bookkeeping) // ROW


def test_small_caches_are_all_rows():
    found = of([uses_of(5000, None, 64)], lookahead=4)
    assert found.slots_within(100 * ROW) == 100
    assert found.slots_within(ROW - 1) == 0
    assert found.slots_within(10**9) == 5000


def test_more_slots_take_more():
    found = of([uses_of(10**7, None, 2048), uses_of(300, None, 2048)])
    taken = [found.fast(slots) for slots in range(0, 3 * 10**6, 9999)]
    assert taken == sorted(taken)


def test_behind_a_gpu_it_comes_out_of_the_memory_for_homes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stoker.placement.planner.resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr("stoker.placement.planner.memory_of", lambda _: (80 * GIB, 80 * GIB))
    tables = tables_of(50_000_000)
    given = {"optimizer": OPTIMIZER, "device_memory": "1GiB"}
    total = 50_000_000 * ROW
    placement = stoker.plan(tables, host_memory=2 * total, **given)
    assert replace(placement["t0"], window=None) == Cached(memory=GIB // ROW * ROW)
    close = stoker.plan(tables, host_memory=total + 2**20, **given)
    assert close["t0"].home == "file"
    assert "for bookkeeping" in close.note
    with monkeypatch.context() as patch:
        patch.setattr("stoker.placement.planner.memory_of", lambda _: (GIB // 2, GIB // 2))
        with pytest.raises(ConfigError, match=r"the rows on cuda:0 would take 1024\.0 MiB, but it has 512\.0 MiB"):
            stoker.plan(tables, host_memory=2 * total, **given)
    profile = Profile(row_bytes=ROW, fetch=1e7, store=2e7, plan_row=1e-7, plan_miss=2e-7, plan_lookup=1e-8)
    tier = stoker.plan(tables, host_memory="3GiB", profile=profile, **(given | {"device_memory": "256MiB"}))
    assert tier["t0"].writes == "append"
    (group,) = tier.groups  # its bookkeeping is in main memory with the index of the file
    assert 1.9 * GIB < group.cache_bytes <= 3 * GIB - (group.bookkeeping_bytes - 16 * 2**20)
