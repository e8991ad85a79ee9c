"""A residency in shards, which several threads plan at once: each shard has its share of the rows and its own slots.

S consecutive addresses are a block, and each of them is in another shard; a hash of the block decides in which, so that
no regular pattern of ids meets one shard only. A shard is a residency over blocks. It evicts by the same rule among its
own rows: with many slots a shard, the misses are those of one residency within a thousandth. The slots and the cores of
the process decide how many shards there are, so plans are the same whatever the number of threads.

A batch fits if it does in every shard, and shards get unequal parts of it, by about the square root of their rows. So a
batch that nearly fills the slots may have to wait where it would fit one residency.

Legend: N rows, C slots, S shards, U distinct rows of a batch, T tables.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stoker.base.device import cpu_count
from stoker.ops.codegen.threads import kernel_threads, team
from stoker.tables.slots.residency import Hints, Ints, Places, Residency, SlotPlan, check_hints, known_bytes

PART_BYTES = 12  # of a row of a batch that waits: its block, and its place
_MOST = 8  # shards
_LEAST_SLOTS = 2**16  # of a shard, so that the parts of a batch differ by a few percent, and are worth a thread
_LEAST_CORES = 4  # below, one thread plans, and small batches would take up to a third longer in 8 shards
_NEARLY_ALL = 0.9  # of the rows: with more slots, hardly any row is evicted
_cores = cache(cpu_count)  # asked for each size that a planner weighs


def count_shards(slots: int, rows: int, cores: int | None = None) -> int:
    """Return S for C slots and N rows: a power of two; ``cores`` None: those that this process may use.

    >>> [count_shards(slots, 10**7, cores) for slots, cores in ((10**5, 16), (10**6, 16), (10**6, 2))]
    [1, 8, 1]
    """
    most = _MOST if slots < _NEARLY_ALL * rows and (cores or _cores()) >= _LEAST_CORES else 1
    return 1 << (min(most, max(1, slots // _LEAST_SLOTS)).bit_length() - 1)


class RowsByShard(NamedTuple):
    """The rows of a batch, shard by shard."""

    blocks: Ints  # [U] their blocks
    order: Places  # [U] their places in the batch
    begins: Ints  # [S + 1] of each shard


def join(blocks: Ints, shard: int, shards: int) -> Ints:
    """Return the addresses of rows of a shard, given their blocks."""
    rows: Ints = (blocks * shards) | ((shard ^ _turn(blocks, shards)) & (shards - 1))
    return rows


def _turn(blocks: Ints, shards: int) -> Ints:
    """Return how the rows of each block are turned among the shards."""
    hashed = blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (hashed >> np.uint64(61)).astype(np.int64) & (shards - 1)


class ShardedResidency:
    """S residencies that plan each batch together, behind the methods of one :class:`Residency`."""

    def __init__(self, first_row: Ints, slots: int, *, transient: bool, shards: int) -> None:
        self.first_row, self.slots, self.transient = first_row, slots, transient
        from stoker.tables.slots import sharded_kernels as kernels
        from stoker.tables.slots.fast_residency import FastResidency

        self._divide, self._merge, self._pick = kernels.divide, kernels.merge, kernels.pick
        edge = first_row // shards
        firsts = [edge + (join(edge, shard, shards) < first_row) for shard in range(shards)]
        rows = np.cumsum([0, *(first[-1] for first in firsts)])
        self._first_slot: Ints = slots * rows // rows[-1]  # [S + 1]
        self.shards: list[Residency] = [
            FastResidency(first, int(count), transient=transient)
            for first, count in zip(firsts, np.diff(self._first_slot), strict=True)
        ]
        self._window: deque[RowsByShard] = deque()

    def _each(self, work: Callable[[int, Residency], Any]) -> list[Any]:
        """Return what ``work`` returns for each shard, on three of four threads: others find distinct rows."""
        found: list[Any] = [None] * len(self.shards)
        left = iter(range(len(self.shards)))

        def some() -> None:
            for number in left:
                found[number] = work(number, self.shards[number])

        size = min(max(1, kernel_threads() * 3 // 4), len(self.shards))
        team(size).run(some, [()] * size)
        return found

    def set_up(self, landing: int, *, roomy: bool = False) -> None:
        """Do as :meth:`Residency.set_up`, in each shard."""
        for shard in self.shards:
            shard.set_up(landing, roomy=roomy)

    def batch_bytes(self, distinct: float, lookups: float) -> float:
        """Return the bytes that an announced batch takes until its plan, with its lookups."""
        return known_bytes(distinct, lookups) + PART_BYTES * distinct

    def announce(self, rows: Ints, upcoming: Hints | None = None) -> None:
        """Record that another batch will use the distinct addresses ``rows`` [U], as :meth:`Residency.announce`."""
        check_hints(rows, upcoming)
        parts = RowsByShard(*self._divide(np.ascontiguousarray(rows, np.int64), len(self.shards)))
        hints = None if upcoming is None else np.ascontiguousarray(upcoming)[parts.order]

        def enter(number: int, shard: Residency) -> None:
            own = slice(*parts.begins[number : number + 2])
            shard.announce(parts.blocks[own], None if hints is None else hints[own])

        self._each(enter)
        self._window.append(parts)

    def plan(self) -> SlotPlan | None:
        """Give slots to the first announced batch without a plan; None, and no change, if it does not fit a shard."""
        made = self._plan(self._window[0], lambda shard, _: shard.plan())
        if made is not None:
            self._window.popleft()
        return made

    def plan_now(self, rows: Ints) -> SlotPlan | None:
        """Give slots to a batch that was not announced, before those that were."""
        parts = RowsByShard(*self._divide(np.ascontiguousarray(rows, np.int64), len(self.shards)))
        return self._plan(parts, Residency.plan_now)

    def _plan(self, parts: RowsByShard, of: Callable[[Residency, Ints], SlotPlan | None]) -> SlotPlan | None:
        total, begins = len(self.shards), parts.begins.tolist()
        own = [parts.blocks[begin:end] for begin, end in pairwise(begins)]
        sure = all(len(blocks) <= shard.free for blocks, shard in zip(own, self.shards, strict=True))
        if not sure and not all(self._each(lambda number, shard: shard.fits(own[number]))):
            return None
        slots = np.empty(len(parts.blocks), np.int64)

        def make(number: int, shard: Residency) -> tuple[SlotPlan, list[Ints]]:
            made = of(shard, own[number])
            assert made is not None
            order = parts.order[begins[number] : begins[number + 1]]
            return made, self._merge(made, order, number, total, int(self._first_slot[number]), slots)

        made = self._each(make)
        moved = [np.concatenate(each) for each in zip(*(moved for _, moved in made), strict=True)]
        return SlotPlan(
            number=made[0][0].number, slots=slots, fetch_rows=moved[0], fetch_slots=moved[1], evict_rows=moved[2],
            evict_slots=moved[3], fence=max(each.fence for each, _ in made),
        )  # fmt: skip

    def release(self, slots: Ints, *, changed: bool) -> None:
        """Take back the ``slots`` of a planned batch, as :meth:`Residency.release`."""
        slots = np.ascontiguousarray(slots, np.int64)
        self._each(lambda number, shard: shard.release(self._own(slots, number), changed=changed))

    def _own(self, slots: Ints, number: int) -> Ints:
        """Return those of ``slots`` that are a shard's, counted within it, in the same order."""
        return self._pick(slots, int(self._first_slot[number]), int(self._first_slot[number + 1]))

    def skip(self) -> None:
        """Drop the first announced batch without a plan, but not its hints."""
        self._window.popleft()
        self._each(lambda _, shard: shard.skip())

    def cancel(self) -> None:
        """Drop the announced batches without a plan, and all hints."""
        self._window.clear()
        self._each(lambda _, shard: shard.cancel())

    @property
    def announced(self) -> int:
        """Announced batches without a plan."""
        return len(self._window)

    @property
    def row_in_slot(self) -> Ints:
        """The address in each slot [C]; -1 in an empty one."""
        return self.rows_in(np.arange(self.slots))

    def rows_in(self, slots: Ints) -> Ints:
        """Return the address in each slot; -1 in an empty one."""
        found = np.empty(len(slots), np.int64)
        shard = np.searchsorted(self._first_slot, slots, side="right") - 1
        for number, each in enumerate(self.shards):
            own = shard == number
            rows = each.rows_in(slots[own] - self._first_slot[number])
            found[own] = np.where(rows < 0, -1, join(rows, number, len(self.shards)))
        return found

    def take_changed(self) -> Ints:
        """Return the slots of changed rows, to store them; all count as unchanged from now on."""
        firsts = self._first_slot[:-1]
        return np.concatenate([shard.take_changed() + at for shard, at in zip(self.shards, firsts, strict=True)])

    def mark_changed(self, slots: Ints) -> None:
        """Mark the rows in ``slots`` as changed again: they could not be stored."""
        for number, shard in enumerate(self.shards):
            shard.mark_changed(self._own(slots, number))

    @property
    def free(self) -> int:
        """Rows that would find slots now: the part of no shard is larger than the mean by four deviations."""
        least = min(shard.free for shard in self.shards)
        return len(self.shards) * max(0, least - 4 * math.isqrt(least))

    @property
    def guesses(self) -> bool:
        """True if the last plan of a shard was a guess (:attr:`Residency.guesses`)."""
        return any(shard.guesses for shard in self.shards)
