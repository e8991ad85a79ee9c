"""Carries out plans: changed rows are written back, wanted rows fetched, in an order that cannot lose either.

The fence: a fetch must not overtake the writeback of the same row. A plan names the last plan whose evictions it
wants back; a link waits for that one's writebacks, and for nothing else. Writebacks older than
:data:`stoker.tables.slots.residency.LANDED` plans have always landed.

Legend: C slots, E rows that are written back, F rows that come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.timeline import span
from stoker.tables.slots.residency import LANDED, Ints, SlotPlan
from stoker.tables.storage import Rows
from stoker.tables.stores.home import Home

__all__ = ["DirectLink", "QueuedLink", "TransferStats", "Writeback"]


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


class DirectLink:
    """Between the slots of a storage and its backing store, both in memory of one processor.

    Rows brought by :meth:`run` are in place after :meth:`ready`. Links to a GPU queue work, from a thread that runs
    ahead of the device. So whoever worked on slots leaves a :meth:`mark` when it gives them back, and :meth:`released`
    makes what is queued from then on follow that work; whoever will work on slots takes the :meth:`ticket` of what was
    queued for it to :meth:`ready`. Here all work is done when a call returns, and none of this costs anything.

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

    def write_back(self, number: int, rows: Ints, slots: Ints) -> None:
        """Store changed rows; they may arrive later. The slots may be written on return."""
        self.home.store(rows, self.slots, slots)

    def settle(self, plan: SlotPlan) -> None:
        """Return when the writebacks that ``plan`` must not overtake have landed."""

    def fetch(self, rows: Ints, slots: Ints) -> None:
        """Bring rows into slots."""
        self.home.fetch(rows, self.slots, slots)

    def store(self, rows: Ints, slots: Ints) -> None:
        """Take the rows in ``slots`` home now; they have arrived on return. They stay in their slots.

        Raises:
            HomeError: as :meth:`stoker.tables.stores.home.Home.store`; some rows may have arrived.
        """
        self.home.store(rows, self.slots, slots)

    def label(self, labels: Sequence[tuple[Tensor, Ints]], slots: Ints) -> None:
        """Note what came into ``slots`` [F]: for each (tensor [C], values [F]); there when the rows are."""
        at = torch.from_numpy(slots)
        for tensor, values in labels:
            tensor[at] = torch.from_numpy(values)

    def send(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to the device of the slots; it is there when the rows are."""
        return tensor.to(self.slots.weight.device)

    def ticket(self) -> Any:
        """Return what stands for everything queued so far, for :meth:`ready`."""
        return None

    def ready(self, ticket: Any = None) -> None:
        """Let work that the calling thread queues from now on follow what was queued before ``ticket`` (None: now)."""

    def mark(self) -> Any:
        """Return what stands for the work on slots queued so far, for :meth:`released`; any thread may call it."""
        return None

    def released(self, mark: Any) -> None:
        """Let what is done from now on to slots that were given back at ``mark`` follow the work before it."""

    def finish(self) -> None:
        """Return when all work on slots that was queued so far is done."""

    def drain(self) -> None:
        """Return when every writeback has landed."""

    def close(self) -> None:
        """Let go of threads; all writebacks land first."""
        self.drain()


class Writeback:
    """Rows of a plan that are being written back."""

    def __init__(self, number: int, rows: Ints, values: Rows) -> None:
        self.number, self.rows, self.values = number, rows, values

    def arrive(self) -> Rows:
        """Return the rows in main memory, as soon as they are there."""
        return self.values

    def keep(self) -> None:
        """Give up memory that others need: the rows wait for a second attempt to store them. Never fails."""

    def done(self) -> None:
        """Note that the rows are stored."""


class QueuedLink(DirectLink):
    """Writebacks land from a thread of their own, so that training waits for none it does not need.

    An error in that thread is raised by the next call, with its cause; the rows it could not write are kept, so that
    a later :meth:`drain` tries them again and nothing is lost while the process lives.
    """

    def __init__(self, home: Home, slots: Rows, stats: TransferStats) -> None:
        super().__init__(home, slots, stats)
        self._jobs: SimpleQueue[Writeback | None] = SimpleQueue()
        self._pending: deque[int] = deque()  # plans whose writebacks have not landed, in order
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failed: list[Writeback] = []
        self._thread: threading.Thread | None = None

    def write_back(self, number: int, rows: Ints, slots: Ints) -> None:
        # Also after an error: these rows have left their slots.
        self._post(Writeback(number, rows, self._copy(slots)))
        self._raise()

    def _copy(self, slots: Ints) -> Rows:
        """Copy the rows in ``slots`` [E], which may then be written."""
        at = torch.from_numpy(np.ascontiguousarray(slots, np.int64))
        return self.slots.map(lambda tensor: tensor.index_select(0, at))

    def _post(self, job: Writeback) -> None:
        """Have the thread land a new job."""
        with self._changed:
            self._pending.append(job.number)
        self._enqueue(job)

    def _enqueue(self, job: Writeback) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stoker-writeback", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._land(job)

    def _land(self, job: Writeback) -> None:
        try:
            values = job.arrive()
            # After one failure later jobs wait too: an older value must never overwrite a newer one.
            if self._failed:
                raise _Behind
            with span("writeback"):
                self.home.store(job.rows, values, None)
        except BaseException as error:
            job.keep()
            with self._changed:
                self._failed.append(job)
                if not isinstance(error, _Behind):
                    self._error = error
                self._changed.notify_all()
        else:
            job.done()
            with self._changed:
                self._pending.remove(job.number)
                self._changed.notify_all()

    def settle(self, plan: SlotPlan) -> None:
        self._wait(max(plan.fence, plan.number - LANDED))

    def _wait(self, number: int) -> None:
        self._until(lambda: self._error is not None or not self._pending or self._pending[0] > number)
        self._raise()

    def _until(self, done: Callable[[], bool]) -> None:
        """Return when the landing of writebacks has made ``done`` true."""
        with self._changed:
            self._changed.wait_for(done)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        if self._error is not None:
            # Whatever was wrong (a full disk) may be right by now.
            self._until(lambda: len(self._failed) == len(self._pending))
            with self._changed:
                jobs, self._failed, self._error = self._failed, [], None
            for job in jobs:
                self._enqueue(job)
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
