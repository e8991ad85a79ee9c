"""State that the logical shards of a batch share, while several threads compute them.

A shard does not change a running average of batch norm. Its new value is recorded, and applied later in the order of
shards. Tensors that depend on weights alone are computed once a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

#: what shards of a step have made of weights
Known = dict[tuple[int, Callable[..., Tensor], tuple[object, ...]], tuple[Tensor, Tensor]]
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


def once(weight: Tensor, make: Callable[..., Tensor], *given: object) -> Tensor:
    """Return ``make(weight, *given)``, which another shard of this step may have made."""
    known: Known | None = getattr(_local, "known", None)
    if known is None:
        return make(weight, *given)
    key = weight.data_ptr(), make, given
    if (found := known.get(key)) is None:
        found = known[key] = weight, make(weight, *given)  # keeps the weight, so that no other gets its address
    return found[1]


@contextmanager
def recorded(known: Known | None = None) -> Iterator[list[Moved]]:
    """Record the averages of this thread in the block; ``known``: of the step."""
    _local.records, _local.known = [], known
    try:
        yield _local.records
    finally:
        _local.records = _local.known = None
