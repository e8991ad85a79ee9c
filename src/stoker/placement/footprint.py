"""The memory of a cache besides its slots, counted from the code that allocates it.

Legend: N rows of the tables, C slots, U distinct rows of a batch, W batches whose ids are known.

* The page table (``fast_residency``): 40 bytes per slot. 16 more for the order of eviction if the window wants more
  rows than there are slots, or with an epoch lookahead. A hash of 32 bytes per record, with a power of two of records
  that is at most 3/4 full (half with a GPU), for rows that are in slots, announced or being written back. One bit per
  row for idle rows.
* The window: for batches that wait (``slotted``), 8 bytes per distinct row (20 where a residency in shards plans) and
  12 bytes per lookup (its id, and its row); and 8 bytes per announced use, in a ring of a power of two, so at most 16.
* In flight: the writebacks of two plans that are not complete (``transfer``). If a disk is slow, there are more, but
  at most those of :data:`stoker.tables.slots.residency.LANDED` plans. A plan writes about as many rows as a batch has
  beyond the C most frequent ones.
* With a GPU: buffers on the device, and as many in page-locked memory (``cuda_link``), for eight times the rows of a
  batch, at most 8 MiB each.
* The index of the backing store: one bit per row. A log-structured spill file has 4 more bytes per row; the planner
  subtracts them from the budget before.
* Temporary: sorted lists of all changed rows while a checkpoint is written, or the old hash next to the new one of
  twice the size.

The page cache of the system is not counted, because the system frees it when memory is needed. The same is true of the
next uses of an epoch (``tables/slots/epoch_lookahead``), which take 8 bytes of memory per batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from stoker.base.units import parse_size
from stoker.placement.budget import MemoryBudget
from stoker.placement.expected import Uses
from stoker.tables.links.cuda_link import staging_bytes
from stoker.tables.slots.residency import FULL, ROOMY, known_bytes
from stoker.tables.slots.sharded import PART_BYTES, count_shards
from stoker.tables.slots.window import IN_MEMORY, SHARE, default_memory

_SLOT, _ORDERED_SLOT = 40, 56  # bytes: record and entry in the list of empty slots; and two keys in a heap
_ROUNDED_SLOT = 16  # bytes on the device for bfloat16 weights: table and row, for the random bits
_RECORD, _LEAST_RECORDS = 32, 2**12
# Rows in the window for each slot: more have no use; where they share the slots' memory, more cost too many slots.
_ENOUGH, _ENOUGH_ON_CPU = 4, 2
_PLANS = 2  # with writebacks in flight
_MOMENTS = 16  # bytes per slot
_KEPT = 1.1  # factor for memory that allocator and threads keep (2 to 9 % were measured)
_SMALL = 16 * 2**20  # bytes that are not counted


@dataclass(frozen=True, kw_only=True)
class Bookkeeping:
    """Bytes of main memory that a cache takes besides its rows."""

    page_table: int
    window: int
    in_flight: int
    staging: int  # page-locked buffers, with a GPU
    index: int  # of the backing store
    moments: int  # when a checkpoint begins, or the hash grows

    @property
    def total(self) -> int:
        """The sum, at its peak."""
        return int(sum(astuple(self)))


class Window:
    """How far a stage looks ahead; ``on_cpu``: the window shares the memory of the slots.

    The planner counts on ids until the known batches use some times as many rows as there are slots.
    """

    def __init__(self, uses: Sequence[Uses], budget: MemoryBudget, *, on_cpu: bool) -> None:
        lookups = sum(float(use.lookups @ use.rows) for use in uses)
        self.batch_bytes = known_bytes(sum(use.distinct for use in uses), lookups)
        lookahead = budget.lookahead
        if lookahead is None:
            given = budget.host_memory
            memory = 0 if on_cpu else default_memory() if given is None else parse_size(given) // SHARE
            lookahead = max(IN_MEMORY, min(2**16, int(memory / max(self.batch_bytes, 1))))
        self.lookahead, self._enough = lookahead, _ENOUGH_ON_CPU if on_cpu else _ENOUGH
        # Rows of the first batches, at some widths; values between are interpolated.
        widths = [0, 1, *(2**i for i in range(1, 24) if 2**i <= lookahead), lookahead + 1]
        self._widths = np.array(sorted(set(widths)), np.float64)
        self._wanted = np.array([sum(use.distinct_of(int(width)) for use in uses) for width in self._widths])

    def batches(self, slots: int) -> float:
        """Return the number of known batches with C slots, including the next one to plan."""
        return float(np.interp(self._enough * slots, self._wanted, self._widths))

    def wanted(self, batches: float) -> float:
        """Return the distinct rows of this many batches."""
        return float(np.interp(batches, self._widths, self._wanted))


class Footprint:
    """The memory of tables that share slots."""

    def __init__(
        self, uses: Sequence[Uses], row_bytes: int, budget: MemoryBudget, *, on_cpu: bool, rounded: bool
    ) -> None:
        self.rows = sum(use.num_rows for use in uses)  # N
        self.distinct = math.ceil(sum(use.distinct for use in uses))  # U
        self.row_bytes = row_bytes  # with optimizer state
        self.in_flight = budget.in_flight or 2
        self.on_cpu = on_cpu
        self.epoch_lookahead = budget.epoch_lookahead
        self.slot_bytes = row_bytes + (_ROUNDED_SLOT if rounded else 0)
        self._window = Window(uses, budget, on_cpu=on_cpu)
        # Rows by falling frequency, and how many of them a batch uses.
        rows, q = (np.concatenate([getattr(use, name) for use in uses]) for name in ("rows", "q"))
        order = np.argsort(-q, kind="stable")
        self._first = np.concatenate([[0.0], np.cumsum(rows[order])])
        self._used = np.concatenate([[0.0], np.cumsum((rows * q)[order])])

    def known(self, slots: int) -> int:
        """Return the number of known batches with C slots, including the next one to plan."""
        return min(self._window.lookahead + 1, max(math.ceil(self._window.batches(slots)), self.in_flight + 1))

    def window(self, slots: int) -> int:
        """Return the bytes of those batches, which :func:`stoker.stage` may take."""
        return math.ceil(self.known(slots) * self._batch_bytes(slots))

    def _batch_bytes(self, slots: int) -> float:
        parts = count_shards(slots, self.rows) > 1
        return self._window.batch_bytes + (PART_BYTES * self.distinct if parts else 0)

    def bookkeeping(self, slots: int) -> Bookkeeping:
        """Return the memory of C slots besides their rows."""
        window = self.known(slots)
        wanted = self._window.wanted(window)
        records = min(self.rows, slots + wanted) + self.distinct
        load = FULL if self.on_cpu else ROOMY
        directory = max(_LEAST_RECORDS, 1 << math.ceil(math.log2(max(1.0, records / load))))
        leaving = float(self._used[-1] - np.interp(slots, self._first, self._used))
        slot = _ORDERED_SLOT if self.epoch_lookahead or wanted > slots else _SLOT
        return Bookkeeping(
            page_table=slot * slots + _RECORD * directory + self.rows // 8,
            window=self.window(slots) + math.ceil(self._batch_bytes(slots)),
            in_flight=_PLANS * min(slots, math.ceil(leaving)) * self.row_bytes,
            staging=0 if self.on_cpu else self._staging(slots),
            index=self.rows // 8,
            moments=_MOMENTS * slots,
        )

    def counted(self, slots: int) -> int:
        """Return the main memory besides the rows that a budget must cover."""
        return _chargeable(self.bookkeeping(slots).total)

    def fast(self, slots: int) -> int:
        """Return the fast memory of C slots with their bookkeeping, on the device or in main memory."""
        return self.slot_bytes * slots + self._fast_beside(slots)

    def _fast_beside(self, slots: int) -> int:
        return self.counted(slots) if self.on_cpu else _chargeable(self._staging(slots))

    def _staging(self, slots: int) -> int:
        return staging_bytes(self.row_bytes, min(slots, self.distinct))

    def hot_slots_within(self, memory: int, transit: int) -> int:
        """Return C if ``transit`` of the slots are cached and the others are pinned."""
        return min(self.rows, max(0, memory - self._fast_beside(transit)) // self.slot_bytes)

    def slots_within(self, memory: int) -> int:
        """Return C, the slots that fit ``memory`` bytes of fast memory; 0 if not one fits."""
        low, high = 0, min(self.rows, memory // self.slot_bytes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fast(middle) <= memory else (low, middle - 1)
        return low


def _chargeable(size: int) -> int:
    """Return the bytes that a budget must cover, without the first :data:`_SMALL` ones."""
    return max(0, math.ceil(_KEPT * (size - _SMALL)))
