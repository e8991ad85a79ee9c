"""Carries out plans: changed rows go home, wanted rows come into their slots, in an order that cannot lose either.

The fence: a fetch must not overtake the writeback of the same row. A plan names the last plan whose evictions it
wants back; a link waits for that one's writebacks, and for nothing else. Writebacks older than
:data:`stoker.tables.residency.LANDED` plans have always landed.

Legend: C slots, E rows that go home, F rows that come.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, fields
from queue import SimpleQueue

import numpy as np
import torch

from stoker.tables.home import Home
from stoker.tables.residency import LANDED, Ints, SlotPlan
from stoker.tables.storage import Rows
from stoker.timeline import span

__all__ = ["DirectLink", "Link", "QueuedLink", "TransferStats"]


@dataclass
class TransferStats:
    """What was moved, since the start or the last reset."""

    plans: int = 0
    rows: int = 0  # distinct rows that batches wanted
    hits: int = 0  # of them in their slots already
    fetched: int = 0  # rows
    written: int = 0  # rows
    fetched_bytes: int = 0
    written_bytes: int = 0
    plan_seconds: float = 0.0
    fetch_seconds: float = 0.0
    write_seconds: float = 0.0  # of the thread that issues writebacks
    fence_seconds: float = 0.0  # waiting for a writeback that a fetch needs
    stall_seconds: float = 0.0  # the training step waiting for rows

    @property
    def hit_rate(self) -> float:
        """Share of distinct rows found in fast memory."""
        return self.hits / self.rows if self.rows else 1.0

    def reset(self) -> None:
        """Count from zero."""
        for item in fields(self):
            setattr(self, item.name, item.default)


class Link(ABC):
    """Between the slots of a storage and its home. Rows brought by :meth:`run` are in place after :meth:`ready`.

    Args:
        home: all rows.
        slots: the slots; each tensor is [C, ...].
        stats: what to count in.
    """

    def __init__(self, home: Home, slots: Rows, stats: TransferStats) -> None:
        self.home, self.slots, self.stats = home, slots, stats

    def run(self, plan: SlotPlan) -> None:
        """Evict, then fetch."""
        begin = time.perf_counter()
        if len(plan.evict_rows):
            with span("writeback"):
                self.write_back(plan.number, plan.evict_rows, plan.evict_slots)
        mark = time.perf_counter()
        self.stats.write_seconds += mark - begin
        with span("fence"):
            self.settle(plan)
        begin = time.perf_counter()
        self.stats.fence_seconds += begin - mark
        if len(plan.fetch_rows):
            with span("fetch"):
                self.fetch(plan.fetch_rows, plan.fetch_slots)
        stats = self.stats
        stats.fetch_seconds += time.perf_counter() - begin
        stats.plans += 1
        stats.rows += len(plan.slots)
        stats.hits += plan.hits
        stats.fetched += len(plan.fetch_rows)
        stats.written += len(plan.evict_rows)
        stats.fetched_bytes += len(plan.fetch_rows) * self.home.row_bytes
        stats.written_bytes += len(plan.evict_rows) * self.home.row_bytes

    @abstractmethod
    def write_back(self, number: int, rows: Ints, slots: Ints) -> None:
        """Send changed rows home; they may arrive later. The slots may be written on return."""

    @abstractmethod
    def settle(self, plan: SlotPlan) -> None:
        """Return when the writebacks that ``plan`` must not overtake have landed."""

    def fetch(self, rows: Ints, slots: Ints) -> None:
        """Bring rows into slots."""
        self.home.fetch(rows, self.slots, slots)

    def ready(self) -> None:
        """Work queued from now on finds all rows that were fetched in their slots."""
        return

    @abstractmethod
    def drain(self) -> None:
        """Return when every writeback has landed."""

    def close(self) -> None:
        """Let go of threads; all writebacks land first."""
        self.drain()


class DirectLink(Link):
    """Slots and home in memory of one processor: a writeback is a copy, and has landed when it returns."""

    def write_back(self, number: int, rows: Ints, slots: Ints) -> None:
        self.home.store(rows, self.slots, slots)

    def settle(self, plan: SlotPlan) -> None:
        return

    def drain(self) -> None:
        return


class QueuedLink(Link):
    """Writebacks land from a thread of their own, so that training waits for none it does not need.

    An error in that thread is raised by the next call, with its cause; the rows it could not write are kept, so that
    a later :meth:`drain` tries them again and nothing is lost while the process lives.
    """

    def __init__(self, home: Home, slots: Rows, stats: TransferStats) -> None:
        super().__init__(home, slots, stats)
        self._jobs: SimpleQueue[tuple[int, Ints, Rows] | None] = SimpleQueue()
        self._pending: deque[int] = deque()  # plans whose writebacks have not landed, in order
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failed: list[tuple[int, Ints, Rows]] = []
        self._thread: threading.Thread | None = None

    def write_back(self, number: int, rows: Ints, slots: Ints) -> None:
        job = (number, rows, self._copy(slots))  # also after an error: these rows have left their slots
        with self._changed:
            self._pending.append(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stoker-writeback", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        self._raise()

    def _copy(self, slots: Ints) -> Rows:
        """The rows in ``slots`` [E], copied off the slots, which may then be written."""
        at = torch.from_numpy(np.ascontiguousarray(slots, np.int64)).to(self.slots.weight.device)
        return Rows(
            self.slots.weight.index_select(0, at),
            {name: tensor.index_select(0, at) for name, tensor in self.slots.state.items()},
        )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, rows, values = job
            try:
                # After one failure later jobs wait too: an older value must never overwrite a newer one.
                if self._failed:
                    raise _Behind
                with span("writeback"):
                    self.home.store(rows, values, None)
            except _Behind:
                with self._changed:
                    self._failed.append(job)
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    self._failed.append(job)
                    self._error = error
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._pending.remove(number)
                    self._changed.notify_all()

    def settle(self, plan: SlotPlan) -> None:
        self._wait(max(plan.fence, plan.number - LANDED))

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._pending or self._pending[0] > number)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        if self._error is not None:
            # Whatever was wrong (a full disk) may be right by now.
            with self._changed:
                self._changed.wait_for(lambda: len(self._failed) == len(self._pending))
                jobs, self._failed, self._error = self._failed, [], None
            for job in jobs:
                self._jobs.put(job)
        self._wait(2**62)

    def close(self) -> None:
        try:
            self.drain()
        finally:
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None


class _Behind(Exception):
    """A writeback behind one that failed."""
