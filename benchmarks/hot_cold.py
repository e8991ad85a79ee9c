"""Hot rows that stay and cold ones in transit: what moves, beside a cache and a pipeline, and how fast pure hot and
cold batches train beside the hybrid of host tables and a device.

Everything runs in this process. Bytes are counted by the storage that carries them.

Legend: B examples, F features, D columns.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import stoker
from benchmarks.harness import CACHE, Bar, NotRun, Outcome, Run, Table, WrongResult
from benchmarks.hybrid import GPU_FLOPS, PCIE, Hybrid, PacedLink, Wire, dense_flops, like_a_gpu
from benchmarks.lookahead import globo
from benchmarks.workload import SKEW, kaggle_like
from stoker import synthetic
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.optim import Constant
from stoker.placement.replay import row_size
from stoker.tables import stage
from stoker.tables.config import Slotted
from stoker.training.config import TrainConfig
from stoker.training.placing import place_run, slotted
from stoker.training.scheduled import Feed, HotColdStream
from stoker.training.shuffle import ShuffleScheduler

__all__ = ["bars", "zipf_log"]

BATCH = 2048
FRACTION = 0.1  # of the bytes of all rows are fast memory
HOT = 0.7  # of fast memory is for hot rows
RATE = 50.0  # of the schedule, as published
MLPS = {"bottom": (512, 256, 64), "top": (512, 512, 256)}  # of DLRM on Criteo Terabyte
MIB = 2**20
STRATEGIES = ("cached", "hot-cold", "host-pipelined")
WIDE = 64  # columns
SPEEDS = (0.5, 1.0, 2.0, 4.0)  # of the link, in PCIe 3.0


@dataclass(frozen=True, kw_only=True)
class Log:
    """A dataset, whole and classified."""

    title: str
    data: Dataset
    classified: Dataset
    budget: int  # bytes of fast memory
    dim: int

    @property
    def hot_share(self) -> float:
        """Of the training rows."""
        return len(self.classified.hot) / len(self.data.train)


def zipf_log(run: Run) -> Dataset:
    """Kaggle's 26 tables scaled to a million rows; synthetic."""
    rows = 400_000 if run.quick else 2_000_000
    out = CACHE / f"zipf_{rows}"
    if not (out / "manifest.json").exists():
        run.log(f"writing {rows:,} synthetic rows")
        synthetic.dataset(out, rows=rows, sizes=kaggle_like(1_000_000), num_dense=13, alpha=SKEW)
    return Dataset(out)


def _log(title: str, data: Dataset, dim: int, run: Run) -> Log:
    """Profile and classify for a tenth of the rows' bytes."""
    size = sum(data.schema.num_embeddings.values()) * row_size(dim)
    budget = int(FRACTION * size)
    run.log(f"classifying {title}")
    found = stoker.profile(data, device_memory=int(HOT * budget), embedding_dim=dim, sample=None)
    out = CACHE / f"{data.path.name}_hot_{found.hash[:12]}"
    return Log(title=title, data=data, classified=stoker.classify(data, found, out), budget=budget, dim=dim)


def _logs(run: Run) -> Iterator[Log]:
    yield _log(f"Zipf {SKEW} (synthetic)", zipf_log(run), WIDE, run)
    if not run.quick:
        try:
            yield _log("Globo", globo(run), WIDE, run)
        except NotRun as missing:
            run.log(str(missing))


def _config(log: Log, strategy: str, order: str) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "embedding_dim": log.dim, "batch_size": BATCH, "device_memory": str(log.budget), "strategy": strategy,
            "batch_order": order, "row_optimizer": "rowwise_adagrad", "model_options": MLPS,
        }
    )  # fmt: skip


def _batches(log: Log, order: str, model: RecModel, config: TrainConfig) -> Iterable[Batch]:
    """An epoch."""
    if order == "shuffled":
        return stage(log.data.train.batches(BATCH, seed=0), model)
    cold, hot = (part.batches(BATCH, seed=0) for part in (log.classified.cold, log.classified.hot))
    stream = HotColdStream(cold, hot, ShuffleScheduler(RATE))
    return Feed(stream, len(stream), model, config)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What one strategy moved in an epoch."""

    strategy: str
    order: str
    picked: bool  # by the planner
    predicted: float  # bytes a step
    steps: int
    first: int  # bytes of hot rows, which come before the first step
    fetched: int  # bytes
    written: int
    hit_rate: float
    slots: int
    hot: int
    plan_ms: float  # a step
    rows: str  # digest of all rows at the end

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.first + self.fetched + self.written


def _digest(model: RecModel) -> str:
    found = hashlib.sha256()
    for table in model.tables:
        for _, rows in model.embeddings.read(table.name):
            for tensor in (rows.weight, *(rows.state[name] for name in sorted(rows.state))):
                found.update(tensor.contiguous().numpy())
    return found.hexdigest()


def _epoch(log: Log, order: str, strategy: str, run: Run) -> Moved:
    """Look up and update the rows of every batch; the dense part moves nothing."""
    run.log(f"{log.title}, {order}: {strategy}")
    config = _config(log, strategy, order)
    data = log.classified if order == "hot-cold" else log.data
    optimizer = config.make_row_optimizer(Constant())
    placement = place_run(config, data, optimizer)
    picked = place_run(config.replace(strategy="auto"), data, optimizer)
    assert placement is not None
    assert picked is not None
    (kind,) = {type(one) for one in placement.values() if isinstance(one, Slotted)}
    (choice,) = {type(one) for one in picked.values() if isinstance(one, Slotted)}
    model = config.make_model(data.schema, optimizer, placement)
    steps = 0
    for batch in _batches(log, order, model, config):
        pooled = model.embeddings(batch.ids, batch.offsets, batch.weights)
        pooled.backward(torch.full_like(pooled, 1e-3))
        steps += 1
    stats = [storage.stats for storage in slotted(model)]
    storages = slotted(model)
    moved = Moved(
        strategy=kind.__name__, order=order, picked=kind is choice, predicted=placement.moved[strategy],
        steps=steps, first=sum(one.num_hot * one.home.row_bytes for one in storages),
        fetched=sum(one.fetched_bytes for one in stats), written=sum(one.written_bytes for one in stats),
        hit_rate=sum(one.hits for one in stats) / sum(one.rows for one in stats),
        slots=sum(one.num_slots for one in storages), hot=sum(one.num_hot for one in storages),
        plan_ms=1e3 * sum(one.plan_seconds for one in stats) / steps, rows=_digest(model),
    )  # fmt: skip
    model.embeddings.close()
    return moved


def traffic(run: Run) -> Outcome:
    """What the planner's choice moved, over the least that any strategy moved in the same order; the worst case."""
    tables, worst, data = [], [], []
    for log in _logs(run):
        for order in ("shuffled", "hot-cold"):
            found = [_epoch(log, order, strategy, run) for strategy in STRATEGIES]
            if len({one.rows for one in found}) != 1:
                raise WrongResult(f"{log.title}, {order}: the strategies end with different rows")
            least = min(one.total for one in found)
            worst += [one.total / least for one in found if one.picked]
            swap = 2 * HOT * log.budget / MIB
            tables.append(_traffic_table(log, order, found))
            data += [{"log": log.title, "swap_mib": swap, "hot_share": log.hot_share, **vars(one)} for one in found]
    notes = [
        f"{FRACTION:.0%} of all rows' bytes in fast memory, planning included; profile for {HOT:.0%} of it",
        "bytes: rows with optimizer state between fast memory and home during an epoch, from the storage's own counts",
        "checked: all rows and states at the end of the epoch are equal to the bit between the strategies",
        "the published design copies all hot rows at each swap, both ways; here they have one copy, and none is copied",
    ]
    return Outcome(value=max(worst), tables=tables, notes=notes, data={"moved": data})


def _traffic_table(log: Log, order: str, found: Sequence[Moved]) -> Table:
    words = f"hot batches apart (R({RATE:g}))" if order == "hot-cold" else "shuffled"
    return Table(
        title=f"{log.title}, {words}: {log.hot_share:.1%} of the inputs hot, {found[0].steps} batches of {BATCH}",
        columns=[
            "strategy",
            "MiB at first",
            "MiB in",
            "MiB out",
            "MiB a step",
            "planned",
            "hit rate",
            "slots",
            "hot",
            "planning ms",
        ],
        rows=[
            [
                one.strategy + (" (the planner's)" if one.picked else ""),
                f"{one.first / MIB:.1f}",
                f"{one.fetched / MIB:.1f}",
                f"{one.written / MIB:.1f}",
                f"{one.total / one.steps / MIB:.3f}",
                f"{one.predicted / MIB:.3f}",
                f"{one.hit_rate:.2%}",
                f"{one.slots:,}",
                f"{one.hot:,}",
                f"{one.plan_ms:.2f}",
            ]
            for one in found
        ],
    )


class _Placed:
    """A model behind slots, whose rows come over a wire while it trains."""

    def __init__(self, log: Log, strategy: str) -> None:
        config = _config(log, strategy, "hot-cold")
        optimizer = config.make_row_optimizer(Constant())
        placement = place_run(config, log.classified, optimizer)
        self.model = config.make_model(log.classified.schema, optimizer, placement)
        self.dense = _dense(self.model)
        self.wires = Wire(math.inf), Wire(math.inf)
        for storage in slotted(self.model):
            storage.move_by(
                PacedLink(storage.home, storage.transit, storage.stats, incoming=self.wires[0], outgoing=self.wires[1])
            )

    def train(self, batches: Sequence[Batch]) -> Iterator[float]:
        """The losses of one batch after the other.

        Rows are staged in line: a thread beside training would take the cores that stand for the device. So nothing of
        what the host does here is hidden behind the device, nor is the time on the wire.
        """
        for batch in stage(batches, self.model, background=False):
            loss = self.model.loss(batch)
            loss.backward()
            self.dense.step()
            self.dense.zero_grad()
            yield loss.item()

    def close(self) -> None:
        self.model.embeddings.close()


class _Hybrid:
    """The baseline."""

    def __init__(self, log: Log) -> None:
        config = _config(log, "auto", "hot-cold")
        self.model = config.make_model(log.classified.schema, config.make_row_optimizer(Constant()))
        self.wires = Wire(math.inf), Wire(math.inf)
        self.hybrid = Hybrid(self.model, _dense(self.model), *self.wires)

    def train(self, batches: Sequence[Batch]) -> Iterator[float]:
        yield from map(self.hybrid.step, batches)

    def close(self) -> None:
        self.model.embeddings.close()


def _dense(model: RecModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.dense_parameters(), lr=0.1, fused=True)


def throughput(run: Run) -> Outcome:
    """Samples/s of hot and cold batches, as often as the data has them, over the hybrid's, behind PCIe 3.0 x16."""
    log = _log(f"Zipf {SKEW} (synthetic)", zipf_log(run), WIDE, run)
    timed, warm = (8, 3) if run.quick else (24, 6)
    streams = {
        kind: iter(_endless(part)) for kind, part in (("cold", log.classified.cold), ("hot", log.classified.hot))
    }
    contestants: dict[str, Any] = {
        "hot-cold": _Placed(log, "hot-cold"), "cached": _Placed(log, "cached"), "hybrid": _Hybrid(log)
    }  # fmt: skip
    # Everybody trains the same batches; the first ones, without a link, tell how long the dense part takes here.
    probe = list(itertools.islice(streams["hot"], warm + timed))
    losses = {name: list(one.train(probe)) for name, one in contestants.items()}
    dense = statistics.median(contestants["hybrid"].hybrid.seconds[warm:])
    flops = dense_flops(contestants["hybrid"].model, BATCH)
    rate = like_a_gpu(dense, flops)
    seconds: dict[tuple[float, str, str], list[float]] = {}
    moved: dict[tuple[float, str, str], list[float]] = {}
    for number in range(run.rounds):
        for speed in SPEEDS:
            run.log(f"round {number + 1}/{run.rounds}: link at {speed:g} of PCIe 3.0 x16")
            for kind, stream in streams.items():
                batches = list(itertools.islice(stream, warm + timed))
                for name, one in contestants.items():
                    for wire in one.wires:
                        wire.rate = speed * rate
                    start = before = 0.0
                    for done, loss in enumerate(one.train(batches)):
                        losses[name].append(loss)
                        if done == warm - 1:
                            start, before = time.perf_counter(), sum(wire.bytes for wire in one.wires)
                    key = (speed, kind, name)
                    seconds.setdefault(key, []).append((time.perf_counter() - start) / timed)
                    moved.setdefault(key, []).append((sum(wire.bytes for wire in one.wires) - before) / timed)
    for name, values in losses.items():
        if values != losses["hybrid"]:
            raise WrongResult(f"{name}: losses differ from the hybrid's")
    for one in contestants.values():
        one.close()
    return _compared(log, contestants, seconds, moved, rate, dense, flops)


def _endless(part: Any) -> Iterator[Batch]:
    while True:
        yield from part.batches(BATCH, seed=1)


def _compared(
    log: Log, names: Iterable[str], seconds: dict[tuple[float, str, str], list[float]],
    moved: dict[tuple[float, str, str], list[float]], rate: float, dense: float, flops: float,
) -> Outcome:  # fmt: skip
    share = log.hot_share

    def mean(speed: float, name: str) -> list[float]:
        pairs = zip(seconds[speed, "hot", name], seconds[speed, "cold", name], strict=True)
        return [share * hot + (1 - share) * cold for hot, cold in pairs]

    rows, ratios = [], {}
    for speed in SPEEDS:
        for name in names:
            pairs = [a / b for a, b in zip(mean(speed, "hybrid"), mean(speed, name), strict=True)]
            ratios[speed, name] = statistics.median(pairs)
            hot, cold = (statistics.median(seconds[speed, kind, name]) for kind in ("hot", "cold"))
            link_hot, link_cold = (statistics.median(moved[speed, kind, name]) / MIB for kind in ("hot", "cold"))
            rows.append(
                [
                    f"{name}, link at {speed:g}x",
                    f"{hot * 1e3:.1f}",
                    f"{cold * 1e3:.1f}",
                    f"{link_hot:.2f}",
                    f"{link_cold:.2f}",
                    f"{BATCH / statistics.median(mean(speed, name)) / 1e3:.1f}",
                    f"{ratios[speed, name]:.2f} ({min(pairs):.2f}-{max(pairs):.2f})",
                ]
            )
    table = Table(
        title=f"{log.title}, D {log.dim}, {FRACTION:.0%} of the bytes fast, {share:.1%} of inputs hot, batch {BATCH}",
        columns=["", "ms, hot batch", "ms, cold", "MiB on the wire, hot", "cold", "k samples/s", "over the hybrid"],
        rows=rows,
    )
    notes = [
        "checked: all losses are equal to the bit",
        f"the link is simulated: transfers wait for {rate / 1e6:.0f} MB/s each way at 1x, which is to this processor's "
        f"dense step ({dense * 1e3:.1f} ms for {flops / 1e9:.1f} GFLOP) as PCIe 3.0 x16 ({PCIE / 1e9:.0f} GB/s) is to "
        f"a V100 at {GPU_FLOPS / 1e12:.0f} TFLOP/s; 2x and 4x stand for PCIe 4.0 and 5.0",
        "what the host does for the hybrid (gather, update) is not slowed down in that proportion, which favours it; "
        "it uses the same kernels",
        "samples/s: hot and cold batches in the proportion of the data; in blocks of one kind, as by the schedule",
    ]
    data = {
        "rate": rate, "dense_seconds": dense, "flops": flops, "hot_share": share,
        "ratios": {f"{speed:g}x {name}": value for (speed, name), value in ratios.items()},
        "seconds": {" ".join(map(str, key)): value for key, value in seconds.items()},
    }  # fmt: skip
    return Outcome(value=ratios[1.0, "hot-cold"], tables=[table], notes=notes, data=data)


def bars() -> list[Bar]:
    """The promises of hot rows."""
    return [
        Bar(
            name="hot-cold-traffic",
            group="hot-cold",
            title="bytes that the planner's choice moves in an epoch over the least of all strategies",
            must=1.02,
            at_most=True,
            digits=3,
            run=traffic,
        ),
        Bar(
            name="hot-cold-step",
            group="hot-cold",
            title="hot and cold batches, 10 % of the bytes in fast memory, over the hybrid of host tables and a device",
            must=1.8,
            run=throughput,
        ),
    ]
