"""What a cache takes in memory beside the rows in its slots, counted from the code that takes it.

Legend: N rows at home, C slots, U distinct rows of a batch, L its lookups, W batches whose ids are known.

* The page table (``fast_residency``): 40 bytes a slot, and 16 more for the order of eviction where the window
  wants more rows than there are slots, or next uses are foreseen; a hash of 32 bytes a record, a power of two of them
  at most 3/4 full, for rows that lie in slots, are announced or are on their way home; one bit a row, for idle ones.
* The window: 8 bytes an announced use, in a ring of a power of two; and what waits for its turn (``slotted``):
  8 bytes a distinct row, 12 bytes a lookup (its id, and the row that it wants).
* On the way: writebacks that have not landed (``transfer``), those of two plans: more pile up only where a disk
  cannot keep up, at most :data:`stoker.tables.slots.residency.LANDED` plans'. A plan writes about as many rows as a
  batch has beyond the
  C most frequent ones.
* Behind a GPU, buffers on the device and as many of page-locked memory (``cuda_link``): eight of a batch's rows,
  8 MiB each at most.
* The home's index: a bit a row. A file that is appended to has another, of 4 bytes a row, which the planner takes off
  the budget before it comes here.
* For moments: sorted lists of all changed rows while they are written home for a checkpoint, or the old hash beside the
  new one, twice as large, when it is full.

Where pages of a file lie in the system's page cache they are no part of this: the system takes them back when asked.
So it is with the next uses of an epoch (``tables/slots/foresight``), of which memory holds 8 bytes a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from stoker.placement.budget import MemoryBudget
from stoker.placement.expected import Uses
from stoker.tables.links.cuda_link import staging_bytes
from stoker.tables.slots.residency import ENOUGH

_SLOT, _ORDERED_SLOT = 40, 56  # bytes: its record and its place in the list of empty ones; two keys in a heap
_ROUNDED_SLOT = 16  # bytes on the device where weights are bfloat16: table and row, for the random bits
_RECORD, _LEAST_RECORDS, _LOAD = 32, 2**12, 0.75
_ENTRY = 8
_PER_ROW, _PER_LOOKUP = 8, 12
HOT_MARK = 8  # bytes a hot row, in the threads that look rows up
_PLANS = 2  # whose writebacks are on the way
_MOMENTS = 16  # bytes a slot
_KEPT = 1.1  # times what is asked for: what allocator and threads keep in hand (2 to 9 % were measured)
_SMALL = 16 * 2**20  # bytes that a cache of any size may take uncounted, as the interpreter does


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Bytes of main memory that a cache takes beside its rows."""

    page_table: int
    window: int
    on_the_way: int
    staging: int  # page-locked buffers, behind a GPU
    index: int  # of the home
    moments: int  # while a checkpoint begins, or the hash grows

    @property
    def total(self) -> int:
        """All of it, at its peak."""
        return int(sum(astuple(self)))


class Window:
    """How far a stage looks ahead: until the batches that it knows want :data:`ENOUGH` times as many rows as there are
    slots.

    Args:
        uses: of each table.
        lookahead: batches at most.
    """

    def __init__(self, uses: Sequence[Uses], lookahead: int) -> None:
        # Rows that the first so many batches want, and what lies between by interpolation.
        widths = [0, 1, *(2**i for i in range(1, 24) if 2**i <= lookahead), lookahead + 1]
        self._widths = np.array(sorted(set(widths)), np.float64)
        self._wanted = np.array([sum(use.distinct_of(int(width)) for use in uses) for width in self._widths])

    def batches(self, slots: int) -> float:
        """Batches known in front of C slots, the one to be planned included."""
        return float(np.interp(ENOUGH * slots, self._wanted, self._widths))

    def wanted(self, batches: float) -> float:
        """Distinct rows of so many batches."""
        return float(np.interp(batches, self._widths, self._wanted))


class Footprint:
    """The memory of tables that share slots.

    Args:
        uses: of each table.
        row_bytes: of a row with its optimizer state.
        budget: ``lookahead``, ``in_flight`` and ``foresight``.
        on_cpu: the slots lie in main memory, as everything beside them does.
        rounded: the weights are bfloat16.
    """

    def __init__(
        self,
        uses: Sequence[Uses],
        row_bytes: int,
        budget: MemoryBudget,
        *,
        on_cpu: bool,
        rounded: bool,
    ) -> None:
        self.rows = sum(use.num_rows for use in uses)  # N
        self.distinct = math.ceil(sum(use.distinct for use in uses))  # U
        self.lookups = math.ceil(sum(float(use.lookups @ use.rows) for use in uses))  # L
        self.row_bytes = row_bytes
        self.in_flight = budget.in_flight or 2
        self.on_cpu = on_cpu
        self.foresight = budget.foresight
        self.slot_bytes = row_bytes + (_ROUNDED_SLOT if rounded else 0)
        self.hot_bytes = self.slot_bytes + (HOT_MARK if on_cpu else 0)  # of fast memory that a hot row takes
        self._window = Window(uses, budget.lookahead)
        self._most = budget.lookahead + 1
        # Rows from the most frequent on, and how many of them a batch has.
        rows, q = (np.concatenate([getattr(use, name) for use in uses]) for name in ("rows", "q"))
        order = np.argsort(-q, kind="stable")
        self._first = np.concatenate([[0.0], np.cumsum(rows[order])])
        self._held = np.concatenate([[0.0], np.cumsum((rows * q)[order])])

    def beside(self, slots: int) -> Beside:
        """What C slots take beside their rows."""
        window = min(self._most, max(math.ceil(self._window.batches(slots)), self.in_flight + 1))
        wanted = self._window.wanted(window)
        records = min(self.rows, slots + wanted) + self.distinct
        directory = max(_LEAST_RECORDS, 1 << math.ceil(math.log2(max(1.0, records / _LOAD))))
        ring = max(_LEAST_RECORDS, 1 << ((window + 1) * self.distinct).bit_length())
        waiting = window * (_PER_ROW * self.distinct + _PER_LOOKUP * self.lookups)
        leaving = float(self._held[-1] - np.interp(slots, self._first, self._held))
        slot = _ORDERED_SLOT if self.foresight or wanted > slots else _SLOT
        return Beside(
            page_table=slot * slots + _RECORD * directory + self.rows // 8,
            window=_ENTRY * ring + waiting,
            on_the_way=_PLANS * min(slots, math.ceil(leaving)) * self.row_bytes,
            staging=0 if self.on_cpu else self._staging(slots),
            index=self.rows // 8,
            moments=_MOMENTS * slots,
        )

    def counted(self, slots: int) -> int:
        """Bytes of main memory beside the rows that a budget has to cover."""
        return _worth(self.beside(slots).total)

    def fast(self, slots: int) -> int:
        """Bytes of fast memory, the device's or main memory, that C slots take with everything beside them there."""
        return self.slot_bytes * slots + self._fast_beside(slots)

    def _fast_beside(self, slots: int) -> int:
        return self.counted(slots) if self.on_cpu else _worth(self._staging(slots))

    def _staging(self, slots: int) -> int:
        return staging_bytes(self.row_bytes, min(slots, self.distinct))

    def hot_slots_within(self, memory: int, transit: int) -> int:
        """C where only ``transit`` of the slots are planned, and the others belong to hot rows."""
        return min(self.rows, max(0, memory - self._fast_beside(transit)) // self.hot_bytes)

    def slots_within(self, memory: int) -> int:
        """C, as many as ``memory`` bytes of fast memory hold; 0 if not even one."""
        low, high = 0, min(self.rows, memory // self.slot_bytes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fast(middle) <= memory else (low, middle - 1)
        return low


def _worth(size: int) -> int:
    """What a budget has to cover of so many bytes beside the rows; :data:`_SMALL` of them are not worth counting."""
    return max(0, math.ceil(_KEPT * (size - _SMALL)))
