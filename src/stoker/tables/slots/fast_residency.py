"""The residency in Numba: a few tens of nanoseconds for each distinct row, whatever the size of the tables."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.tables.slots import residency_kernels as kernels
from stoker.tables.slots.residency import LANDED, NEVER, Hints, Ints, Residency, Shape, SlotPlan

__all__ = ["FastResidency"]

_LOAD = 0.75  # of the directory, at most
_NO_ROWS = np.zeros(0, np.int64)
_NO_HINTS = np.zeros(0, np.int32)


def _ranks(first_row: Ints) -> tuple[Ints, ...]:
    """Tables to number all rows by (row within the table, table): see ``eviction_order.rank_of``.

    Up to the size of the smallest table every table has a row of each number, up to the next one all but that, and so
    on: G segments. (start [G + 1], base [G + 1], alive [G], position [G * T], owner [G * T]).
    """
    rows = np.diff(first_row)
    tables = len(rows)
    bounds = np.unique(np.concatenate([[0], rows]))
    start = bounds[:-1]
    alive = np.array([(rows > begin).sum() for begin in start], np.int64)
    base = np.concatenate([[0], np.cumsum(np.diff(bounds) * alive)]).astype(np.int64)
    position = np.zeros((len(start), tables), np.int64)
    owner = np.zeros((len(start), tables), np.int64)
    for segment, begin in enumerate(start):
        members = np.flatnonzero(rows > begin)
        position[segment, members] = np.arange(len(members))
        owner[segment, : len(members)] = members
    return bounds.astype(np.int64), base, alive, position.reshape(-1), owner.reshape(-1)


def _tree(bits: int) -> tuple[npt.NDArray[np.uint64], Ints]:
    """An empty bit tree over ``bits`` ranks, and where its levels begin; memory comes when it is touched."""
    begins, total, words = [], 0, bits
    while True:
        words = -(-words // 64)
        begins.append(total)
        total += words
        if words <= 1:
            return np.zeros(max(total, 1), np.uint64), np.array(begins, np.int64)


class FastResidency(Residency):
    """Equal to :class:`stoker.tables.slots.residency.ReferenceResidency`, plan for plan.

    Memory: 40 bytes a slot (56 if the window wants more rows than there are slots, or with hints), 43 to 86 bytes a
    resident or announced row, 24 bytes an announced use, N bits.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        slots = shape.slots
        self._first_row = np.ascontiguousarray(shape.first_row)
        self._ranks = _ranks(self._first_row)
        self._tree, self._levels = _tree(int(self._first_row[-1]))
        self._directory = np.zeros((1 << 12, 4), np.int64)
        self._ring = np.zeros((1 << 12, 3), np.int64)  # entries of the window
        self._slots = np.zeros((slots, 4), np.int64)
        self._slots[:, [kernels.ROW, kernels.NEXT]] = -1
        self.row_in_slot = self._slots[:, kernels.ROW]
        self._empty = np.arange(slots - 1, -1, -1, dtype=np.int64)
        self._heap = np.zeros(2 * slots, np.int64)  # memory comes when it is touched, which few runs do
        self._counters = np.zeros(8, np.int64)
        self._counters[kernels.FREE] = slots
        self._window: deque[tuple[int, int, Ints]] = deque()  # step, first entry, rows
        self._step, self._entries = 0, 0
        self._leaving: deque[tuple[int, Ints]] = deque()  # plan, rows it evicted

    @property
    def _structures(self) -> tuple[Any, ...]:
        order = (self._tree, self._levels, self._heap)
        return self._slots, order, self._counters

    def _announce(self, rows: Ints, upcoming: Hints | None) -> None:
        rows = np.ascontiguousarray(rows, np.int64)
        hints = _NO_HINTS if upcoming is None else np.ascontiguousarray(upcoming, np.int32)
        self._make_room(len(rows), window=True)
        kernels.announce(rows, hints, self._entries, self._step, self._directory, self._ring, *self._structures)
        self._window.append((self._step, self._entries, rows))
        self._step += 1
        self._entries += len(rows)

    def _make_room(self, more: int, *, window: bool) -> None:
        needed = int(self._counters[kernels.RECORDS]) + more
        if needed > _LOAD * len(self._directory):
            size = len(self._directory)
            while needed > _LOAD * size:
                size *= 2
            larger = np.zeros((size, 4), np.int64)
            kernels.rehash(self._directory, larger)
            self._directory = larger
        if not window:
            return
        oldest = self._window[0][1] if self._window else self._entries
        if self._entries + more - oldest > len(self._ring):
            size = 1 << (self._entries + more - oldest).bit_length()
            live = np.arange(oldest, self._entries)
            larger = np.zeros((size, 3), np.int64)
            larger[live & (size - 1)] = self._ring[live & (len(self._ring) - 1)]
            self._ring = larger

    def plan(self) -> SlotPlan | None:
        made = self._plan(self._window[0][2], staged=True)
        if made is not None:
            self._window.popleft()
        return made

    def plan_now(self, rows: Ints) -> SlotPlan | None:
        rows = np.ascontiguousarray(rows, np.int64)
        self._make_room(len(rows), window=False)
        return self._plan(rows, staged=False)

    def _plan(self, rows: Ints, *, staged: bool) -> SlotPlan | None:
        parked = int(self._counters[kernels.PARKED])
        most = parked if self.shape.transient else min(parked, len(rows))
        taken, fetch_rows, fetch_slots = np.empty((3, len(rows)), np.int64)
        victims, evict_rows, evict_slots = np.empty((3, most), np.int64)
        landed, gone = -1, _NO_ROWS
        if self._leaving and self._leaving[0][0] <= self.plans - LANDED:
            landed, gone = self._leaving[0]
        status, fence, fetched, written = kernels.plan(
            rows, staged, self.plans, self.shape.transient, taken, fetch_rows, fetch_slots, victims, evict_rows,
            evict_slots, gone, landed, self._first_row, self._ranks, self._directory, self._ring, self._empty,
            *self._structures,
        )  # fmt: skip
        if status < 0:
            return None
        if landed >= 0:
            self._leaving.popleft()
        made = SlotPlan(
            number=self.plans, slots=taken, fetch_rows=fetch_rows[:fetched], fetch_slots=fetch_slots[:fetched],
            evict_rows=evict_rows[:written], evict_slots=evict_slots[:written], fence=int(fence),
        )  # fmt: skip
        self._leaving.append((self.plans, made.evict_rows))
        self.plans += 1
        return made

    def release(self, slots: Ints, *, changed: bool) -> None:
        kernels.release(np.ascontiguousarray(slots, np.int64), changed, *self._structures)

    def skip(self) -> None:
        rows = self._window.popleft()[2]
        kernels.skip(rows, self._directory, self._ring, *self._structures)

    def cancel(self) -> None:
        for _, _, rows in self._window:
            kernels.cancel(rows, self._directory, *self._structures)
        self._window.clear()
        if self._hinted:
            kernels.forget_hints(NEVER, *self._structures)
            self._hinted = False

    def _forget_outdated(self) -> None:
        kernels.forget_hints(self._window[0][0] if self._window else self._step, *self._structures)

    def take_changed(self) -> Ints:
        slots = np.flatnonzero(self._slots[:, kernels.FLAGS] & kernels.CHANGED)
        self._slots[:, kernels.FLAGS] &= ~kernels.CHANGED
        return slots

    def mark_changed(self, slots: Ints) -> None:
        self._slots[slots, kernels.FLAGS] |= kernels.CHANGED

    @property
    def free(self) -> int:
        return int(self._counters[kernels.FREE] + self._counters[kernels.PARKED])

    @property
    def wanted(self) -> int:
        return int(self._counters[kernels.WANTED])

    @property
    def announced(self) -> int:
        return len(self._window)
