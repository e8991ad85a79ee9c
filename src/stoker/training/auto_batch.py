"""Find the batch size that trains fastest: double it until throughput stops growing or memory is too small."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from stoker.base.device import device_memory, peak_memory, resolve_device
from stoker.base.errors import ConfigError, StokerError
from stoker.base.units import format_count, format_size
from stoker.dataset.dataset import Dataset
from stoker.training.config import TrainConfig
from stoker.training.replica import throwaway

_GAIN = 1.05  # least factor on throughput for which the batch is doubled
_WARM = 2  # first steps, not measured: kernels compile, memory is allocated
_SECONDS, _FEWEST, _MOST = 1.5, 5, 40  # seconds to measure, least and most steps
_BATCHES = 10  # least batches of an epoch


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

    Args:
        data: the dataset.
        config: the run's settings; ``batch_size`` is ignored.

    Raises:
        ConfigError: even ``base_batch_size`` is too large.
    """
    size = min(config.base_batch_size, max(1, len(data.train) // _BATCHES))
    rates: dict[int, float] = {}
    rates[size], grown = _measure(data, config.replace(batch_size=size))
    while True:
        double = 2 * size
        if double * _BATCHES > len(data.train):
            reason = f"an epoch of {len(data.train):,} examples would have fewer than {_BATCHES} batches"
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
    with throwaway(data, config, _WARM + _MOST) as (replica, batches):
        device = replica.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = _peak(device)
        times: list[float] = []
        while len(times) < _WARM + _FEWEST or (len(times) < _WARM + _MOST and sum(times[_WARM:]) < _SECONDS):
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
