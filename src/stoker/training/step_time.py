"""The time of a training step: measure the model, and add the time of its placement.

The batch size that trains fastest is found by doubling it until throughput stops growing or memory is too small.

Legend: B examples, F features, L ids in all.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stoker.base.device import device_memory, peak_memory, resolve_device
from stoker.base.errors import ConfigError, StokerError
from stoker.base.progress import Counted
from stoker.base.units import format_count, format_size
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS
from stoker.ops.reference import bag_lengths
from stoker.optim import Constant
from stoker.placement.placement import Placement, row_bytes
from stoker.tables import Mapped, Strategy
from stoker.tables.config import Slotted
from stoker.training.config import TrainConfig
from stoker.training.placing import slotted
from stoker.training.replica import Replica, throwaway

_ROWS = 128 * 2**20  # bytes of the rows of the measured model
_IDS = 2**22  # ids in all measured batches, about
_BATCHES = 32  # most batches; fewer could keep their rows in the processor's caches
_FEWEST = 4  # batches
_UNTIMED = 2  # first steps, not measured
_SECONDS = 1.5  # to measure a model


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step."""

    read: float  # read the batch
    train: float  # forward, backward and both optimizers, with all rows on the device
    slotted: float  # the same with the groups of a placement, without planning and moving rows
    parameters: int = 0  # of the dense part

    @property
    def resident(self) -> float:
        """The whole step with all rows on the device."""
        return self.read + self.train

    def placed(self, placement: Placement) -> float:
        """Return the whole step under a placement.

        On a GPU, training hides reading, planning and moving. On a CPU they share the cores with training, which hides
        only the waiting for the disk.
        """
        other = self.read + placement.seconds
        if placement.workload.device.type == "cuda":
            return max(self.slotted, other)
        return max(self.slotted + other - placement.disk_seconds, other)

    def parts(self, placement: Placement) -> dict[str, float]:
        """Return the seconds of each part of a step under a placement."""
        planning = placement.plan_seconds
        return {
            "the model": self.slotted, "reading": self.read, "planning": planning,
            "moving rows": placement.seconds - planning,
        }  # fmt: skip

    def bound(self, placement: Placement) -> str:
        """Return the part that bounds a step: the longest one, or the model if it hides the others."""
        parts = self.parts(placement)
        if placement.workload.device.type == "cuda":  # it trains meanwhile
            others = {name: seconds for name, seconds in parts.items() if name != "the model"}
            parts = {"the model": parts["the model"]} if parts["the model"] >= sum(others.values()) else others
        return max(parts, key=lambda name: parts[name])


def measure_step(config: TrainConfig, data: Dataset, placement: Placement | None = None) -> StepTime:
    """Measure a few steps on real batches with tables cut to 128 MiB: 2 seconds, and 2 more for a model with slots.

    Ids beyond the end of a cut table are taken modulo its rows.
    """
    tables = config.tables(data.schema)
    state = config.make_row_optimizer(Constant()).state
    widest = max(row_bytes(table, state) for table in tables)
    spec = _cut(data.schema, widest, frozenset(config.tensor_trains(data.schema)))
    whole = replace(config, device_memory=None)
    if MODELS[config.model].mixed_dims:  # a cut table keeps its columns
        dims = {table.name: table.embedding_dim for table in tables}
        whole = replace(whole, model_options={**config.model_options, "dims": dims})
    trained = [_Trained(whole, spec, None)]
    if placement is not None and not placement.resident:
        trained.append(_Trained(whole, spec, _roomy(placement, spec)))
    device = trained[0].model.device
    stream = data.train.batches(config.batch_size, seed=config.seed, shuffle_memory=config.shuffle_memory)
    limits = torch.tensor([spec.num_embeddings[feature.table] for feature in spec.features])
    batches: list[Batch] = []
    reads: list[float] = []
    begin, ids = time.perf_counter(), 0
    for batch in itertools.islice(stream, _BATCHES):
        reads.append(time.perf_counter() - begin)
        batches.append(_inside(batch, limits).to(device))
        ids += batch.ids.numel()
        if ids >= _IDS and len(batches) >= _FEWEST:
            break
        begin = time.perf_counter()
    # The first reads also check shards and compile kernels, once.
    read = float(np.median(reads[_UNTIMED:] or reads))
    started, most = time.perf_counter(), _SECONDS * len(trained)
    with Counted("measuring steps", int(1000 * most), "ms") as counted:
        for number, batch in enumerate(itertools.cycle(batches)):
            for each in trained:  # in turns, so that other load on the machine slows both
                each.step(batch)
            counted.add(int(1000 * sum(each.seconds[-1] for each in trained)))
            if number >= _UNTIMED and time.perf_counter() - started > most:
                break
    seconds = [float(np.median(each.seconds[_UNTIMED:])) for each in trained]
    parameters = sum(each.numel() for each in trained[0].model.dense_parameters())
    for each in trained:
        each.close()
    return StepTime(read=read, train=seconds[0], slotted=seconds[-1], parameters=parameters)


class _Trained(Replica):
    """A model with the seconds of its steps, without planning and moving rows."""

    def __init__(self, config: TrainConfig, spec: FeatureSpec, strategies: Mapping[str, Strategy] | None) -> None:
        super().__init__(config, spec, Constant(), strategies)
        self.seconds: list[float] = []

    def step(self, batch: Batch) -> Tensor:
        moved, begin = self._moved(), time.perf_counter()
        loss = super().step(batch)
        loss.item()  # waits for the GPU
        self.seconds.append(time.perf_counter() - begin - (self._moved() - moved))
        return loss

    def _moved(self) -> float:
        """Return the seconds of planning and moving so far."""
        stats = [storage.stats for storage in slotted(self.model)]
        return sum(each.plan_seconds + each.fetch_seconds + each.write_seconds for each in stats)


def _roomy(placement: Placement, spec: FeatureSpec) -> dict[str, Strategy]:
    """Return the same groups with a slot for every row, backed by memory."""
    found: dict[str, Strategy] = {}
    for name, strategy in placement.items():
        if isinstance(strategy, Slotted):
            hot = {table: min(rows, spec.num_embeddings[table]) for table, rows in strategy.hot_rows.items()}
            strategy = replace(
                strategy, hot=tuple(hot.items()), slots=None, memory=None, fraction=1.0, home="memory", path=None,
                host_memory=None, direct=False, writes=None,
            )  # fmt: skip
        found[name] = Mapped() if isinstance(strategy, Mapped) else strategy  # a plan makes no directory
    return found


def _cut(spec: FeatureSpec, size: int, compressed: frozenset[str] = frozenset()) -> FeatureSpec:
    """Return the same columns with the largest tables cut, so that all but the compressed ones fit :data:`_ROWS`."""
    given = spec.num_embeddings
    rows = np.array(sorted(count for name, count in given.items() if name not in compressed), np.int64)
    # For each table: rows of all smaller tables, and the number of tables from this one to the largest.
    before, tables = np.cumsum(rows) - rows, np.arange(len(rows), 0, -1)
    cut_from = np.flatnonzero(before + tables * rows > _ROWS // size)
    most = max(1, int((_ROWS // size - before[cut_from[0]]) // tables[cut_from[0]])) if len(cut_from) else sys.maxsize
    cut = {name: count if name in compressed else min(count, most) for name, count in given.items()}
    return replace(spec, num_embeddings=cut)


def _inside(batch: Batch, limits: torch.Tensor) -> Batch:
    if batch.offsets is None:
        return replace(batch, ids=(batch.ids % limits).to(batch.ids.dtype))
    per_id = torch.repeat_interleave(limits.repeat(len(batch)), bag_lengths(batch.offsets))
    return replace(batch, ids=(batch.ids % per_id).to(batch.ids.dtype))


_GAIN = 1.05  # least factor on throughput for which the batch is doubled
_WARM = 2  # first steps, not measured: kernels compile, memory is allocated
_ENOUGH, _LEAST_STEPS, _MOST_STEPS = 1.5, 5, 40  # seconds to measure, least and most steps
_EPOCH_BATCHES = 10  # least batches of an epoch


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """The chosen batch size, with the measurements."""

    batch_size: int
    reason: str  # why not twice this size
    throughput: dict[int, float]  # batch size -> examples/s of whole training steps

    def __str__(self) -> str:
        measured = ", ".join(f"{size:,}: {format_count(rate)}/s" for size, rate in self.throughput.items())
        return f"batch size {self.batch_size:,} was chosen: {self.reason} (examples a second: {measured})"


def choose_batch_size(data: Dataset, config: TrainConfig) -> BatchChoice:
    """Measure whole training steps of a throwaway model, starting at ``config.base_batch_size``.

    The batch is doubled while this trains at least 5 % more examples a second, memory suffices, and an epoch has at
    least ten batches. The choice depends on the machine: a run stores it and does not choose again.
    """
    size = min(config.base_batch_size, max(1, len(data.train) // _EPOCH_BATCHES))
    rates: dict[int, float] = {}
    rates[size], grown = _measure(data, config.replace(batch_size=size))
    while True:
        double = 2 * size
        if double * _EPOCH_BATCHES > len(data.train):
            reason = f"an epoch of {len(data.train):,} examples would have fewer than {_EPOCH_BATCHES} batches"
            break
        free = device_memory(resolve_device(config.device))[0]
        if free and 2 * grown > free:
            reason = f"twice that would need about {format_size(2 * grown)}, and {format_size(free)} is free"
            break
        try:
            rates[double], more = _measure(data, config.replace(batch_size=double))
        except (StokerError, RuntimeError, MemoryError) as error:
            if not _lacks_memory(error):
                raise
            reason = f"twice that does not fit ({str(error).splitlines()[0].split('. ')[0].rstrip('.')})"
            break
        grown = max(2 * grown, more)
        if rates[double] < _GAIN * rates[size]:
            reason = f"twice that gains {100 * (rates[double] / rates[size] - 1):+.1f} %"
            break
        size = double
    return BatchChoice(batch_size=size, reason=reason, throughput=rates)


def _lacks_memory(error: Exception) -> bool:
    """Return True if a step failed because the device, the machine or the slots have too little memory."""
    words = ("can't allocate memory", "out of memory", "distinct rows in fast memory")
    lacking = isinstance(error, ConfigError | MemoryError | torch.OutOfMemoryError)
    return lacking or any(each in str(error).lower() for each in words)


def _measure(data: Dataset, config: TrainConfig) -> tuple[float, int]:
    """Return the examples a second of the median step, and the peak bytes of the steps beyond the model."""
    with throwaway(data, config, _WARM + _MOST_STEPS) as (replica, batches):
        device = replica.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = _peak(device)
        times: list[float] = []
        while len(times) < _WARM + _LEAST_STEPS or (len(times) < _WARM + _MOST_STEPS and sum(times[_WARM:]) < _ENOUGH):
            begin = time.perf_counter()
            replica.step(next(batches))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        grown = _peak(device) - before
    # The median is the time of a full batch, though the last batch of an epoch may be short.
    return config.batch_size / statistics.median(times[_WARM:]), max(0, grown)


def _peak(device: torch.device) -> int:
    """Return the peak bytes: on a GPU since their reset, on the CPU of the process since its start."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else peak_memory() or 0
