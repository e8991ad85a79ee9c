"""EL-Rec's mix behind a slow link: the largest tables as tensor trains on the device, the others on the host.

The device's share of a step is computed here; the link is simulated (:mod:`benchmarks.hybrid`): transfers take the time
they would beside a GPU's step, and no processor. What can be hidden is the link and nothing else.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import stoker
from benchmarks.harness import Bar, Outcome, Run, Table, WrongResult
from benchmarks.hot_cold import BATCH, MLPS, WIDE, zipf_log
from benchmarks.hybrid import PacedLink, Wire, dense_flops, like_a_gpu
from benchmarks.popularity import criteo_rows
from benchmarks.workload import KAGGLE
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.tables import stage
from stoker.training.placing import slotted

__all__ = ["bars"]

RANK, COMPRESSED, SMALL = 32, 3, 1_000
SPEEDS = (0.125, 0.25, 0.5, 1.0)  # of the link, in PCIe 3.0 x16
SLOW = 0.25  # x4, as for a card in a second slot or a box
DEPTHS = (1, 3)  # batches in flight


def kaggle_log(run: Run) -> Dataset:
    """Kaggle's 26 tables in their own sizes, which a scaled log has too few rows for: those on the host are 8 million.

    Synthetic. Quick: scaled to a million.
    """
    return zipf_log(run) if run.quick else criteo_rows(2_000_000, KAGGLE, run)


class _Mixed:
    """A model whose rows on the host come over a wire, so many batches in flight."""

    def __init__(self, data: Dataset, depth: int) -> None:
        sizes = data.schema.num_embeddings
        large = sorted(sizes, key=sizes.__getitem__)[-COMPRESSED:]
        rest = [name for name, rows in sizes.items() if name not in large and rows > SMALL]
        slots = min(sum(sizes[name] for name in rest), 4 * len(rest) * BATCH)
        self.depth = depth
        self.model = stoker.DLRM(
            data.schema, embedding_dim=WIDE, **MLPS, optimizer=stoker.RowWiseAdagrad(lr=0.05),
            tensor_train={name: stoker.TensorTrain(rank=RANK) for name in large},
            placement={name: stoker.HostPipelined(slots=slots) for name in rest},
        )  # fmt: skip
        self.dense = torch.optim.SGD(self.model.dense_parameters(), lr=0.1, fused=True)
        self.wires = Wire(math.inf), Wire(math.inf)
        for storage in slotted(self.model):
            storage.move_by(
                PacedLink(storage.home, storage.transit, storage.stats, incoming=self.wires[0], outgoing=self.wires[1])
            )

    def train(self, batches: Sequence[Batch], warm: int) -> tuple[list[float], float]:
        """Losses, and seconds of a step behind the first ``warm``."""
        losses, start = [], time.perf_counter()
        for batch in stage(batches, self.model, in_flight=self.depth, background=self.depth > 1):
            loss = self.model.loss(batch)
            loss.backward()
            self.dense.step()
            self.dense.zero_grad()
            losses.append(loss.item())
            if len(losses) == warm:
                start = time.perf_counter()
        return losses, (time.perf_counter() - start) / (len(batches) - warm)


def pipeline(run: Run) -> Outcome:
    """Throughput with batches in flight over one at a time, at PCIe 3.0 x4."""
    data = kaggle_log(run)
    warm, timed = (3, 8) if run.quick else (6, 30)
    sides = {depth: _Mixed(data, depth) for depth in DEPTHS}
    stream = itertools.cycle(data.train.batches(BATCH, seed=0))
    probe = list(itertools.islice(stream, warm + timed))
    seconds: dict[tuple[float, int], list[float]] = {}
    losses: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    alone = {depth: side.train(probe, warm) for depth, side in sides.items()}  # without a link
    for depth, (values, _) in alone.items():
        losses[depth] += values
    flops = dense_flops(sides[1].model, BATCH)
    rate = like_a_gpu(alone[1][1], flops)
    for number in range(run.rounds):
        for speed in SPEEDS:
            run.log(f"round {number + 1}/{run.rounds}: link at {speed:g} of PCIe 3.0 x16")
            batches = list(itertools.islice(stream, warm + timed))
            for depth, side in sides.items():
                for wire in side.wires:
                    wire.rate = speed * rate
                values, took = side.train(batches, warm)
                losses[depth] += values
                seconds.setdefault((speed, depth), []).append(took)
    if losses[DEPTHS[0]] != losses[DEPTHS[1]]:
        raise WrongResult("losses differ with the number of batches in flight")
    moved = sum(wire.bytes for wire in sides[1].wires) / len(losses[1])
    for side in sides.values():
        side.model.embeddings.close()
    rows, ratios = [], {}
    for speed in SPEEDS:
        one, many = (seconds[speed, depth] for depth in DEPTHS)
        ratios[speed] = statistics.median(a / b for a, b in zip(one, many, strict=True))
        times = [f"{1e3 * statistics.median(each):.1f}" for each in (one, many)]
        rows.append([f"{speed:g}", *times, f"{ratios[speed]:.2f}x"])
    table = Table(
        title=f"DLRM, D {WIDE}, batch {BATCH}: {COMPRESSED} tensor trains of rank {RANK}, the others on the host",
        columns=["link, of PCIe 3.0 x16", "ms, 1 in flight", f"ms, {DEPTHS[1]} in flight", "throughput"],
        rows=rows,
    )
    notes = [
        f"{moved / 2**20:.2f} MiB a step over the link, both ways; tables of at most {SMALL:,} rows on the device",
        "the link is as slow beside this machine's step as PCIe 3.0 x16 is beside a V100's; waiting takes no processor",
        "checked: all losses are equal to the bit",
    ]
    found = {f"{speed:g}": ratio for speed, ratio in ratios.items()}
    return Outcome(value=ratios[SLOW], tables=[table], notes=notes, data={"ratios": found})


def bars() -> list[Bar]:
    """What the pipeline hides."""
    common: dict[str, Any] = {"group": "tensor-train-mix", "run": pipeline}
    return [
        Bar(
            name="tt-pipeline",
            title="tensor trains with pipelined host tables, batches in flight over one at a time, at PCIe 3.0 x4",
            must=1.3,
            unit="x",
            **common,
        )
    ]
