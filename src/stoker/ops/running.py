"""Running averages of batch norm, and the logical shards of a batch, which several threads compute at once.

In a shard an average does not move: what it would move to is recorded, for whoever moves it in the order of shards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

_local = threading.local()


class Moved(NamedTuple):
    """A running average, a new value, and the value's weight; or a number of batches, which grows by the value."""

    average: Tensor
    value: Tensor
    weight: float


def move(average: Tensor, value: Tensor, weight: float) -> None:
    """Move a running average towards ``value``, or record it."""
    found = Moved(average, value.detach(), weight)
    records: list[Moved] | None = getattr(_local, "records", None)
    if records is None:
        move_all([found])
    else:
        records.append(found)


def count_batch(batches: Tensor) -> None:
    """Add 1 to a number of batches, or record it."""
    if getattr(_local, "records", None) is None:
        batches.add_(1)  # on a GPU one kernel
    else:
        move(batches, torch.ones_like(batches), 1.0)


def averages(
    mean: Tensor | None, var: Tensor | None, weight: float, moves: bool
) -> tuple[Tensor | None, Tensor | None, float]:
    """Return which averages batch norm moves, and by which weight: where it is recorded, fresh ones by 1."""
    if not moves or mean is None or var is None or getattr(_local, "records", None) is None:
        return mean, var, weight
    moments = torch.zeros_like(mean), torch.zeros_like(var)
    for average, value in zip((mean, var), moments, strict=True):
        move(average, value, weight)  # batch norm writes the value later
    return *moments, 1.0


def move_all(found: Iterable[Moved]) -> None:
    """Move the averages, in this order."""
    with torch.no_grad():
        for average, value, weight in found:
            if average.is_floating_point():
                average.lerp_(value.to(average.dtype), weight)
            else:
                average.add_(value)


@contextmanager
def recorded() -> Iterator[list[Moved]]:
    """Record the averages of this thread in the block."""
    _local.records = []
    try:
        yield _local.records
    finally:
        _local.records = None
