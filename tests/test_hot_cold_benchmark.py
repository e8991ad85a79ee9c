"""The tools of benchmarks/hot_cold.py: the hybrid trains what anybody trains, and the wire takes its time."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.hybrid import GPU_FLOPS, PCIE, Hybrid, PacedLink, Wire, dense_flops, like_a_gpu
from stoker import DLRM, SGD, Batch, FeatureSpec, HotCold
from stoker.tables.slots.slotted import SlottedRows

SIZES = [50, 20, 3]


def model(placement: HotCold | None = None) -> DLRM:
    return DLRM(
        FeatureSpec.from_sizes(2, SIZES), embedding_dim=4, bottom=(8,), top=(8,), optimizer=SGD(lr=0.1),
        placement=placement,
    )  # fmt: skip


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            dense=torch.randn(16, 2, generator=generator),
            ids=torch.stack([torch.randint(rows, (16,), generator=generator) for rows in SIZES], 1),
            labels=torch.randint(2, (16,), generator=generator).float(), step=step,
        )
        for step in range(5)
    ]  # fmt: skip


def optimizer(model: DLRM) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.dense_parameters(), lr=0.1)


def test_the_hybrid_trains_the_same_bits_and_sends_pooled_rows_both_ways() -> None:
    host, placed = model(), model(HotCold(hot={"C1": 10, "C2": 20}, slots=60))
    (storage,) = (group.storage for group in placed.embeddings.groups)
    assert isinstance(storage, SlottedRows)
    incoming, outgoing = Wire(math.inf), Wire(math.inf)
    link = PacedLink(storage.home, storage.transit, storage.stats, incoming=incoming, outgoing=outgoing)
    storage.move_by(link)
    hybrid = Hybrid(host, optimizer(host), Wire(math.inf), Wire(math.inf))
    dense = optimizer(placed)
    for batch in batches():
        loss = placed.loss(batch)
        loss.backward()
        dense.step()
        dense.zero_grad()
        assert loss.item() == hybrid.step(batch)
    assert all(torch.equal(host.embeddings.rows(f"C{i}"), placed.embeddings.rows(f"C{i}")) for i in (1, 2, 3))
    assert hybrid.down.bytes == hybrid.up.bytes == 5 * 16 * 3 * 4 * 4
    placed.embeddings.close()
    ids = 5 * 16 * 3 * 4
    assert incoming.bytes == storage.stats.fetched_bytes + ids
    assert outgoing.bytes == storage.stats.written_bytes > 0


def test_a_wire_carries_one_transfer_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, slept = Wire(1e6), []
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(3):
        wire.carry(10_000)
    assert slept == pytest.approx([0.01, 0.02, 0.03])


def test_the_link_keeps_the_proportion_of_a_gpu_s() -> None:
    flops = dense_flops(model(), 16)
    products = 2 * 8 + 8 * 4 + (4 + 6) * 8 + 8 * 1
    assert flops == 6.0 * 16 * (products + 4 * 4 * 4)
    assert like_a_gpu(flops / GPU_FLOPS, flops) == pytest.approx(PCIE)
    assert like_a_gpu(10 * flops / GPU_FLOPS, flops) == pytest.approx(PCIE / 10)
