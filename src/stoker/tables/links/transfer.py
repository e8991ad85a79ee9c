"""Run plans: write changed rows back and fetch others, in an order that loses no update.

The fence: a fetch must not overtake the writeback of the same row. A plan names the last plan whose evictions it
fetches again; a link waits for the writebacks of that plan, and for nothing else. Writebacks older than
:data:`stoker.tables.slots.residency.LANDED` plans have always landed.

Legend: C slots, E rows to write back, F rows to fetch.
"""

from __future__ import annotations

import threading
import time
import weakref
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


@dataclass
class TransferStats:
    """Rows moved and seconds spent, since the start or the last reset."""

    plans: int = 0
    rows: int = 0  # distinct rows of batches
    hits: int = 0  # of these, rows that were in their slots
    fetched: int = 0  # rows
    on_demand: int = 0  # of these, rows that no stage had brought: a lookup or an update waited for them
    written: int = 0  # rows
    fetched_bytes: int = 0
    written_bytes: int = 0
    plan_seconds: float = 0.0
    fetch_seconds: float = 0.0
    write_seconds: float = 0.0  # in the thread that issues writebacks
    fence_seconds: float = 0.0  # waiting for a writeback that a fetch needs
    stall_seconds: float = 0.0  # the training step waiting for rows

    @property
    def hit_rate(self) -> float:
        """Share of distinct rows that were in fast memory."""
        return self.hits / self.rows if self.rows else 1.0

    def reset(self) -> None:
        """Count from zero."""
        for item in fields(self):
            setattr(self, item.name, item.default)


class DirectLink:
    """Move rows between the slots of a storage and its backing store, both in memory of one processor.

    Rows of :meth:`run` are in their slots after :meth:`ready`. Links to a GPU queue work, from a thread that runs ahead
    of the device. So work on slots leaves a :meth:`mark` when it releases them, and :meth:`released` makes later work
    wait for it. Before work on slots, :meth:`ready` waits for the :meth:`ticket` of their rows. Here all work is done
    when a call returns, and none of this takes time.
    """

    landing = 0  # see :class:`stoker.tables.slots.residency.Residency`
    roomy = False  # whether bytes of planning are not those of slots

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
        """Wait until the writebacks that ``plan`` must not overtake have landed."""

    def fetch(self, rows: Ints, slots: Ints) -> None:
        """Fetch rows into slots."""
        self.home.fetch(rows, self.slots, slots)

    def store(self, rows: Ints, slots: Ints) -> None:
        """Store the rows in ``slots`` now; they have arrived on return, and remain in their slots.

        After an error of the store, some of them may have arrived.
        """
        self.home.store(rows, self.slots, slots)

    def label(self, labels: Sequence[tuple[Tensor, Ints]], slots: Ints) -> None:
        """Write values for ``slots`` [F], for each (tensor [C], values [F]); they arrive with the rows."""
        at = torch.from_numpy(slots)
        for tensor, values in labels:
            tensor[at] = torch.from_numpy(values)

    def send(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to the device of the slots; it arrives with the rows."""
        return tensor.to(self.slots.weight.device)

    def ticket(self) -> Any:
        """Return a ticket for all work queued so far, for :meth:`ready`."""
        return None

    def ready(self, ticket: Any = None) -> None:
        """Make later work of the calling thread wait for work queued before ``ticket`` (None: now)."""

    def mark(self) -> Any:
        """Return a mark for the work on slots queued so far, for :meth:`released`; any thread may call it."""
        return None

    def released(self, mark: Any) -> None:
        """Make later work on slots that were released at ``mark`` wait for the work before it."""

    def finish(self) -> None:
        """Wait until all work on slots queued so far is done."""

    def drain(self) -> None:
        """Wait until every writeback has landed."""

    def close(self, *, drain: bool = True) -> None:
        """End threads; ``drain``: wait until all writebacks have landed, or raise an error."""


class Writeback:
    """Rows of a plan during their writeback."""

    def __init__(self, number: int, rows: Ints, values: Rows) -> None:
        self.number, self.rows, self.values = number, rows, values

    def arrive(self) -> Rows:
        """Wait for the rows in main memory, and return them."""
        return self.values

    def keep(self) -> None:
        """Release memory that others need; the rows wait for a second attempt to store them. Never fails."""

    def done(self) -> None:
        """Record that the rows are stored."""


class QueuedLink(DirectLink):
    """Writebacks land in a separate thread, so that training waits only for those it needs.

    The next call raises an error of that thread, with its cause. The rows that could not be written are kept: a later
    :meth:`drain` tries them again, and nothing is lost until the process ends.
    """

    landing = LANDED

    def __init__(self, home: Home, slots: Rows, stats: TransferStats) -> None:
        super().__init__(home, slots, stats)
        self._jobs: SimpleQueue[Writeback | None] = SimpleQueue()
        self._pending: deque[int] = deque()  # plans whose writebacks have not landed, in order
        self._mutex = threading.RLock()  # entered itself: Ctrl-C within methods of a Condition would leave it locked
        self._changed = threading.Condition(self._mutex)
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
        with self._mutex:
            self._pending.append(job.number)
        self._enqueue(job)

    def _enqueue(self, job: Writeback) -> None:
        if self._thread is None:
            given = self._jobs, weakref.ref(self)  # else the thread would keep tables that nothing else refers to
            self._thread = threading.Thread(target=_land_all, args=given, name="stoker-writeback", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def _land(self, job: Writeback) -> None:
        try:
            values = job.arrive()
            # After one failure later jobs wait, too: an older value must never overwrite a newer one.
            if self._failed:
                raise _Behind
            with span("writeback"):
                self.home.store(job.rows, values, None)
        except BaseException as error:
            job.keep()
            with self._mutex:
                self._failed.append(job)
                if not isinstance(error, _Behind):
                    self._error = error
                self._changed.notify_all()
        else:
            job.done()
            with self._mutex:
                self._pending.remove(job.number)
                self._changed.notify_all()

    def settle(self, plan: SlotPlan) -> None:
        self._wait(max(plan.fence, plan.number - LANDED))

    def _wait(self, number: int) -> None:
        self._until(lambda: self._error is not None or not self._pending or self._pending[0] > number)
        self._raise()

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait until landed writebacks have made ``done`` true."""
        with self._mutex:
            self._changed.wait_for(done)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        if self._error is not None:
            # The cause (a full disk) may be gone by now.
            self._until(lambda: len(self._failed) == len(self._pending))
            with self._mutex:
                jobs, self._failed, self._error = self._failed, [], None
            for job in jobs:
                self._enqueue(job)
        self._wait(2**62)

    def close(self, *, drain: bool = True) -> None:
        try:
            if drain:
                self.drain()
        finally:
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None


def _land_all(jobs: SimpleQueue[Writeback | None], known: weakref.ref[QueuedLink]) -> None:
    while (job := jobs.get()) is not None and (link := known()) is not None:
        link._land(job)
        del job, link


class _Behind(Exception):
    """A writeback behind a failed one."""
