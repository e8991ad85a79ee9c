"""The examples of a rank in a batch: those of its logical shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stoker.dataset.batch import Batch
from stoker.ops.tree import Shards, shard_bounds
from stoker.tables.ranks.transport import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Batch):
    """The examples of a rank."""

    whole: Batch  # of all ranks
    shards: Shards  # counted from its first example
    place: slice  # of its ids in those of the whole batch


def whole_of(batch: Batch) -> Batch:
    """Return the batch of all ranks."""
    return batch.whole if isinstance(batch, Share) else batch


def share_of(batch: Batch, ranks: Ranks, shards: int) -> Share:
    """Return the examples of a rank.

    >>> from types import SimpleNamespace
    >>> two = SimpleNamespace(rank=1, size=2, numbers_of=lambda rank, shards: range(2, 4))
    >>> share_of(stoker.Batch(dense=torch.zeros(5, 1), ids=torch.arange(5).view(5, 1)), two, 4).ids.flatten().tolist()
    [2, 3, 4]
    """
    if isinstance(batch, Share):
        return batch
    bounds, own = shard_bounds(len(batch), shards), ranks.numbers_of(ranks.rank, shards)
    begin, end = bounds[own.start], bounds[own.stop]
    place, ids, offsets, weights = slice(begin, end), batch.ids[begin:end], batch.offsets, batch.weights
    if offsets is None:
        weights = None if weights is None else weights.view(batch.ids.shape)[begin:end].reshape(-1)
    else:
        bags = (len(offsets) - 1) // max(1, len(batch))  # of an example
        offsets = offsets[bags * begin : bags * end + 1]
        first, last = (int(each) for each in offsets[[0, -1]])
        place, ids, offsets = slice(first, last), batch.ids[first:last], offsets - first
        weights = None if weights is None else weights[first:last]
    return Share(
        dense=batch.dense[begin:end], ids=ids, offsets=offsets, weights=weights,
        labels=None if batch.labels is None else batch.labels[begin:end], step=batch.step, time=batch.time,
        whole=batch, shards=Shards(tuple(each - begin for each in bounds[own.start : own.stop + 1]), own.start),
        place=place,
    )  # fmt: skip


class Shares:
    """The examples of a rank in each batch of ``stream``, whose other attributes this has, too.

    >>> from types import SimpleNamespace
    >>> two = SimpleNamespace(rank=0, size=2, numbers_of=lambda rank, shards: range(2))
    >>> whole = stoker.Batch(dense=torch.zeros(5, 1), ids=torch.arange(5).view(5, 1))
    >>> [batch.ids.flatten().tolist() for batch in Shares([whole], two, 4)]
    [[0, 1]]

    Args:
        stream: the same batches on all ranks.
        ranks: which have the shards of each batch.
        shards: of the tables.
    """

    def __init__(self, stream: Iterable[Batch], ranks: Ranks, shards: int) -> None:
        self._stream, self._ranks, self._shards = stream, ranks, shards

    def __iter__(self) -> Iterator[Share]:
        for batch in self._stream:
            yield share_of(batch, self._ranks, self._shards)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
