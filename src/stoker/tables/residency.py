"""Which row lies in which slot, and who leaves: integers only, so that plans can be printed, replayed and tested.

N rows at home share C slots. Batches are announced by their distinct rows before they are planned; a plan makes
one batch resident. The row to leave is the one whose next announced use is farthest; a row without an announced
use is farther than any other, and among equals the rarest leaves first: ids fall in frequency, so that is the
larger row number within its table, then the later table (Belady's rule within the window; cDLRM section 4, BagPipe).

Legend: N rows at home, C slots, U distinct rows of a batch, T tables.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import numpy as np
import numpy.typing as npt

__all__ = ["ENOUGH", "LANDED", "NEVER", "ReferenceResidency", "Residency", "SlotPlan", "make_residency"]

Ints = npt.NDArray[np.int64]
NEVER = 2**62  # step of the next use of a row that has none in the window
#: Plans after which every writeback of a plan has surely landed at home; whoever carries out plans keeps to it.
LANDED = 8
#: Announced rows for each slot from where on looking further ahead is pointless: whoever is not wanted by then left.
ENOUGH = 2


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """What makes one batch resident. Evictions come before fetches; each row is named once."""

    number: int  # plans are carried out in this order
    slots: Ints  # [U] slot of each distinct row of the batch
    fetch_rows: Ints  # [F] rows from home to slots
    fetch_slots: Ints  # [F]
    evict_rows: Ints  # [E] changed rows that go home
    evict_slots: Ints  # [E]
    fence: int  # the fetch must wait until the writebacks of this plan and those before it have landed; -1: of none

    @property
    def hits(self) -> int:
        """Rows that were in their slots already."""
        return len(self.slots) - len(self.fetch_rows)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a residency is made for."""

    first_row: Ints  # [T + 1] first address of each table; the last is N
    slots: int  # C
    pinned: tuple[int, ...] = ()  # [T] rows 0..pinned-1 of each table never leave once they came; () means none
    transient: bool = False  # every row leaves at the first plan after its last use in flight

    @property
    def tables(self) -> int:
        """T."""
        return len(self.first_row) - 1

    def pinned_rows(self) -> Ints:
        """[T]."""
        return np.array(self.pinned or (0,) * self.tables, np.int64)


class Residency(ABC):
    """The page table of one group and its rule of eviction.

    A batch goes through ``announce`` (its rows are known), ``plan`` (they get slots), ``release`` (its update is
    done; rows of no other batch in flight may leave). Batches are planned in the order in which they were announced.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.plans = 0  # made so far
        self.row_in_slot: Ints = np.full(shape.slots, -1, np.int64)

    @abstractmethod
    def announce(self, rows: Ints) -> None:
        """A further batch will use the distinct addresses ``rows`` [U]."""

    @abstractmethod
    def plan(self) -> SlotPlan | None:
        """Slots for the batch announced first of those not planned; None, and no change, if too few may be given up."""

    @abstractmethod
    def plan_now(self, rows: Ints) -> SlotPlan | None:
        """Slots for a batch that was not announced, ahead of those that were."""

    @abstractmethod
    def release(self, slots: Ints, *, changed: bool) -> None:
        """A planned batch no longer needs its ``slots``; ``changed``: its rows must go home when they leave."""

    @abstractmethod
    def skip(self) -> None:
        """The batch announced first is not planned: forget that use of its rows."""

    @abstractmethod
    def cancel(self) -> None:
        """Forget the batches announced but not planned."""

    @abstractmethod
    def take_changed(self) -> Ints:
        """Slots that hold changed rows, all of which count as unchanged from now on; for writing them home."""

    @abstractmethod
    def mark_changed(self, slots: Ints) -> None:
        """The rows in ``slots`` could not be written home after all."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Slots that a plan could use now."""

    @property
    @abstractmethod
    def announced(self) -> int:
        """Batches announced and not planned."""

    @property
    @abstractmethod
    def wanted(self) -> int:
        """Distinct rows that announced batches will use."""

    def resident(self, start: int, stop: int) -> Ints:
        """Slots that hold an address of ``start..stop``."""
        return np.flatnonzero((self.row_in_slot >= start) & (self.row_in_slot < stop))


@dataclass
class _Row:
    """What the reference knows of a row in a slot or in the window."""

    slot: int = -1
    uses: deque[int] = field(default_factory=deque)  # announced steps, rising
    left: int = -1  # the plan that evicted it changed, while the writeback may be under way

    @property
    def next_use(self) -> int:
        return self.uses[0] if self.uses else NEVER


class ReferenceResidency(Residency):
    """Plain Python: the definition, and what runs where Numba is missing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._rows: dict[int, _Row] = {}
        self._empty = list(range(shape.slots - 1, -1, -1))
        self._users = [0] * shape.slots
        self._changed: set[int] = set()
        self._parked: set[int] = set()  # slots that may be given up
        self._window: deque[tuple[int, list[int]]] = deque()
        self._step = 0
        self._leaving: deque[tuple[int, list[int]]] = deque()
        self._pinned = shape.pinned_rows()

    def _local(self, row: int) -> tuple[int, int]:
        table = int(np.searchsorted(self.shape.first_row, row, side="right")) - 1
        return row - int(self.shape.first_row[table]), table

    def announce(self, rows: Ints) -> None:
        listed = rows.tolist()
        for row in listed:
            self._rows.setdefault(row, _Row()).uses.append(self._step)
        self._window.append((self._step, listed))
        self._step += 1

    def plan(self) -> SlotPlan | None:
        rows = self._window[0][1]
        made = self._plan(rows, staged=True)
        if made is not None:
            self._window.popleft()
        return made

    def plan_now(self, rows: Ints) -> SlotPlan | None:
        return self._plan(rows.tolist(), staged=False)

    def _plan(self, rows: list[int], *, staged: bool) -> SlotPlan | None:
        known = [self._rows.get(row, _Row()) for row in rows]
        kept = {item.slot for item in known if item.slot >= 0}
        missing = sum(item.slot < 0 for item in known)
        candidates = self._parked - kept
        if missing > len(self._empty) + len(candidates):
            return None
        number, self.plans = self.plans, self.plans + 1
        self._parked -= kept
        fence = max((item.left for item in known if item.slot < 0), default=-1)

        def far(slot: int) -> tuple[int, int, int]:
            row = int(self.row_in_slot[slot])
            return (self._rows[row].next_use, *self._local(row))

        needed = len(candidates) if self.shape.transient else max(0, missing - len(self._empty))
        victims = nlargest(needed, candidates, key=far)
        evict_rows, evict_slots = [], []
        left = []
        for slot in victims:
            row = int(self.row_in_slot[slot])
            self.row_in_slot[slot] = -1
            self._parked.discard(slot)
            self._rows[row].slot = -1
            left.append(row)
            if slot in self._changed:
                self._changed.discard(slot)
                self._rows[row].left = number
                evict_rows.append(row)
                evict_slots.append(slot)
        given_up = deque(victims)  # used after the empty ones, in order of eviction
        fetch_rows, fetch_slots, slots = [], [], []
        for row, item in zip(rows, known, strict=True):
            self._rows[row] = item
            if staged:
                item.uses.popleft()
            if item.slot < 0:
                item.slot, item.left = self._empty.pop() if self._empty else given_up.popleft(), -1
                self.row_in_slot[item.slot] = row
                fetch_rows.append(row)
                fetch_slots.append(item.slot)
            self._users[item.slot] += 1
            slots.append(item.slot)
        self._empty.extend(reversed(given_up))
        self._leaving.append((number, left))
        while self._leaving[0][0] <= number - LANDED:
            landed, gone = self._leaving.popleft()
            for row in gone:
                gone_row = self._rows.get(row)
                if gone_row is not None and gone_row.left == landed:
                    gone_row.left = -1
                    self._drop(row)
        for row in left:
            self._drop(row)
        return SlotPlan(
            number=number, slots=np.array(slots, np.int64), fetch_rows=np.array(fetch_rows, np.int64),
            fetch_slots=np.array(fetch_slots, np.int64), evict_rows=np.array(evict_rows, np.int64),
            evict_slots=np.array(evict_slots, np.int64), fence=fence,
        )  # fmt: skip

    def _drop(self, row: int) -> None:
        """Forget a row of which nothing need be known."""
        item = self._rows.get(row)
        if item is not None and item.slot < 0 and not item.uses and item.left < 0:
            del self._rows[row]

    def release(self, slots: Ints, *, changed: bool) -> None:
        for slot in slots.tolist():
            self._users[slot] -= 1
            if changed:
                self._changed.add(slot)
            local, table = self._local(int(self.row_in_slot[slot]))
            if self._users[slot] == 0 and local >= self._pinned[table]:
                self._parked.add(slot)

    def skip(self) -> None:
        for row in self._window.popleft()[1]:
            self._rows[row].uses.popleft()
            self._drop(row)

    def cancel(self) -> None:
        for _, rows in self._window:
            for row in rows:
                if row in self._rows:
                    self._rows[row].uses.clear()
                    self._drop(row)
        self._window.clear()

    def take_changed(self) -> Ints:
        slots = np.array(sorted(self._changed), np.int64)
        self._changed.clear()
        return slots

    def mark_changed(self, slots: Ints) -> None:
        self._changed.update(slots.tolist())

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._parked)

    @property
    def announced(self) -> int:
        return len(self._window)

    @property
    def wanted(self) -> int:
        return sum(bool(item.uses) for item in self._rows.values())


def make_residency(first_row: Sequence[int] | Ints, slots: int, *, pinned: Sequence[int] = (), transient: bool = False,
                   fast: bool | None = None) -> Residency:  # fmt: skip
    """The fastest residency that is installed.

    Args:
        first_row: [T + 1] first address of each table.
        slots: C.
        pinned: [T] rows of each table that never leave once they came.
        transient: every row leaves after its last use in flight.
        fast: True or False picks Numba or plain Python.
    """
    shape = Shape(
        first_row=np.asarray(first_row, np.int64), slots=slots, pinned=tuple(int(count) for count in pinned),
        transient=transient,
    )  # fmt: skip
    if fast is None:
        fast = importlib.util.find_spec("numba") is not None
    if not fast:
        return ReferenceResidency(shape)
    from stoker.tables.fast_residency import FastResidency

    return FastResidency(shape)
