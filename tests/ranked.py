"""Ranks for tests: threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from stoker.tables import Ranks, RanksError

__all__ = ["Ids", "alone_on_a_thread", "draw", "gradient_of", "on_threads", "share_of"]

_PATIENCE = 60  # seconds until a rank that waits for another gives up
Ids = tuple[Tensor, Tensor | None, Tensor | None]  # with offsets and weights


class _Thread:
    """A rank of threads that meet at a barrier."""

    def __init__(self, rank: int, box: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(box)
        self._box, self._barrier = box, barrier

    def _meet(self, given: Any) -> list[Any]:
        try:
            self._barrier.wait(_PATIENCE)
            self._box[self.rank] = given
            self._barrier.wait(_PATIENCE)
        except threading.BrokenBarrierError:
            raise RanksError("a thread has ended") from None
        return list(self._box)

    def gather(self, value: Tensor) -> Tensor:
        found: list[Tensor] = self._meet(value)
        return torch.stack(found)

    def swap(self, sent: Tensor, sizes: Sequence[int], got: Sequence[int]) -> Tensor:
        found = self._meet(sent.split(list(sizes)))
        mine = [each[self.rank] for each in found]
        assert [len(each) for each in mine] == list(got)
        return torch.cat(mine)

    def end(self, why: str) -> RanksError:
        self._barrier.abort()
        return RanksError(why)


def on_threads(count: int, work: Callable[[Ranks], Any], kind: type[Ranks] = Ranks) -> list[Any]:
    """Return what ``work(ranks)`` returns for each of ``count`` ranks; raise the first error of one."""
    box: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(rank: int) -> Any:
        try:
            return work(kind(_Thread(rank, box, barrier)))
        except BaseException as error:
            barrier.abort()
            return error

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(run, range(count)))
    for each in sorted(
        (each for each in found if isinstance(each, BaseException)), key=lambda e: "has ended" in str(e)
    ):
        raise each
    return found


def alone_on_a_thread() -> Ranks:
    """A single rank, in the calling thread."""
    return Ranks(_Thread(0, [None], threading.Barrier(1)))


LIMITS = (40, 13, 40)  # rows that the features f, h and g look up


def draw(seed: int, batch: int, bags: str) -> Ids:
    """Ids of a batch for the features f, h and g: ``bags`` are "single", "jagged" or "weighted"."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (
        torch.ones(3 * batch).long() if bags == "single" else torch.randint(0, 4, (3 * batch,), generator=generator)
    )
    limits = torch.tensor(LIMITS).repeat(batch).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) ** 3 * limits).long()
    if bags == "single":
        return ids.view(batch, 3), None, None
    weights = torch.randn(len(ids), generator=generator) if bags == "weighted" else None
    return ids, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]), weights


def gradient_of(seed: int, batch: int, width: int) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def share_of(call: Ids, begin: int, end: int) -> Ids:
    """The examples ``begin`` to ``end`` of a batch of :func:`draw`."""
    ids, offsets, weights = call
    if offsets is None:
        return ids[begin:end], None, None
    own = offsets[3 * begin : 3 * end + 1]
    part = slice(int(own[0]), int(own[-1]))
    return ids[part], own - own[0], None if weights is None else weights[part]
