"""What the parts of ``benchmarks/gpu.py`` share: how much to do, a clock, ids, and device views of host memory.

Legend: B examples, F features (one table each), D columns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

__all__ = ["Clock", "Setting", "device_view", "milliseconds", "synchronize", "zipf_ids"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how thoroughly to measure. On a CPU everything is tiny: a rehearsal, whose times mean nothing."""

    device: torch.device
    effort: Literal["full", "quick", "tiny"]
    all_kernels: bool = False  # check kernels at every width, however long their compilation takes

    def pick(self, *, full: T, quick: T, tiny: T) -> T:
        """The value for this effort."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.effort]


@dataclass(frozen=True)
class Clock:
    """The time a part may take: what is left undone when it is over is said, not forgotten."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    def over(self, share: float = 1.0) -> bool:
        """Whether ``share`` of the time is gone."""
        return self.spent > share * self.seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(step: Callable[[int], Any], rounds: int, steps: int, device: torch.device) -> float:
    """Median over rounds of the time of one step, after a warm-up round; by events on a GPU."""
    times = []
    for turn in range(rounds + 1):
        synchronize(device)
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for index in range(steps):
                step(turn * steps + index)
            end.record()
            synchronize(device)
            taken = begin.elapsed_time(end)
        else:
            mark = time.perf_counter()
            for index in range(steps):
                step(turn * steps + index)
            taken = (time.perf_counter() - mark) * 1e3
        if turn:
            times.append(taken / steps)
    return float(statistics.median(times))


def zipf_ids(sizes: Sequence[int], batch: int, g: torch.Generator, skew: float) -> Tensor:
    """Ids [B, F] int32, id i about proportional to (i + 1) ** -skew, by inverting the continuous law."""
    u = torch.rand(batch, len(sizes), generator=g, dtype=torch.float64)
    top = torch.tensor(sizes, dtype=torch.float64)
    power = 1.0 - skew
    ids = ((1.0 + u * ((top + 1.0) ** power - 1.0)) ** (1.0 / power)).floor() - 1.0
    return torch.minimum(ids.clamp(min=0), top - 1.0).to(torch.int32)


class _Foreign:
    """Memory that is not torch's, in the form in which libraries hand CUDA arrays to each other."""

    def __init__(self, address: int, shape: Sequence[int], owner: Any) -> None:
        self.owner = owner  # torch keeps this object as long as the tensor lives
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": "<f4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_view(address: int, shape: Sequence[int], owner: Any, device: torch.device) -> Tensor:
    """A float32 tensor on ``device`` over memory the GPU can address: page-locked or managed. Nothing is copied."""
    view = torch.as_tensor(_Foreign(address, shape, owner), device=device)
    if view.data_ptr() != address:
        raise RuntimeError(f"torch copied {view.nbytes:,} bytes instead of viewing them in place")
    return view
