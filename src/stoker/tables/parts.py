"""Batches with more distinct rows than slots, worked on in parts that give the same bits.

A lookup is cut by examples: every bag stays whole. An update is cut by rows: each row still gets the sum over the whole
batch, in order of occurrence, and one step.

Legend: B examples, F features, L ids, U distinct rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.ops import Bags
from stoker.tables.lookups import Lookups, keep_lookups
from stoker.tables.slots.slotted import SlottedRows, TooFewSlots
from stoker.tables.storage import Lease, Storage

__all__ = ["by_examples", "by_rows"]


def by_examples(work: Callable[..., Tensor], storage: Storage, lookups: Lookups, *each: Tensor) -> Tensor:
    """``work(lease, *tensors of those examples)`` for runs of examples that fit; results one after the other.

    Args:
        each: tensors with a leading dimension of examples.

    Raises:
        TooFewSlots: one example alone has more rows than there are slots to give.
    """
    bags, space = lookups
    features = len(space.features)
    batch = bags.batch_size(features)
    done: list[Tensor] = []
    start, size = 0, batch
    while start < batch:
        stop = min(start + size, batch)
        try:
            lease = storage.acquire(_examples(bags, features, start, stop), space)
        except TooFewSlots as error:
            if size == 1:
                raise error.of_one_example() from None
            size = max(1, (stop - start) // 2)
            continue
        if not lease.begin():
            continue  # another thread took its slots
        done.append(work(lease, *(tensor[start:stop] for tensor in each)).clone())
        lease.release(changed=False)
        start = stop
    return torch.cat(done)


def _examples(bags: Bags, features: int, start: int, stop: int) -> Bags:
    """The lookups of examples ``start..stop``."""
    if bags.offsets is None:
        weights = None if bags.weights is None else bags.weights.view(-1, features)[start:stop].reshape(-1)
        return Bags(bags.ids[start:stop], None, weights, bags.mean)
    offsets = bags.offsets[start * features : stop * features + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    weights = None if bags.weights is None else bags.weights[begin:end]
    return Bags(bags.ids[begin:end], offsets - begin, weights, bags.mean)


def by_rows(work: Callable[[Lease], None], storage: Storage, lookups: Lookups) -> None:
    """``work(lease)`` for runs of distinct rows that fit, each with all its lookups, in order of occurrence."""
    assert isinstance(storage, SlottedRows)
    bags, space = lookups.bags.cpu(), lookups.space
    rows, which, _ = storage.distinct(bags, space)
    number = which.reshape(-1).numpy()
    start, size = 0, max(1, min(len(rows), storage.available))
    while start < len(rows):
        stop = min(start + size, len(rows))
        # Rows with a slot of their own, which have no number, go with the first part.
        keep = torch.from_numpy((number < stop) & (number >= start) if start else number < stop)
        try:
            lease = storage.acquire(keep_lookups(bags, keep), space)
        except TooFewSlots as error:
            if size == 1:
                raise error.of_one_example() from None
            size = max(1, size // 2)
            continue
        if not lease.begin():
            continue  # another thread took its slots
        work(lease)
        lease.release(changed=True)
        start = stop
