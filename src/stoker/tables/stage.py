"""Looks ahead in the data and brings the rows of coming batches into fast memory. Leaving it out changes no number.

``lookahead`` counts batches whose ids are known, which makes eviction good; ``in_flight`` counts batches whose rows
are in fast memory, which hides latency and costs slots (cDLRM section 4; BagPipe section 3). ``foresight`` tells when
rows are used after that window too (:mod:`stoker.tables.foresight`).

Legend: C slots.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from stoker.data.batch import Batch
from stoker.errors import ConfigError
from stoker.ops import Bags
from stoker.tables.embedding import EmbeddingTables
from stoker.tables.file_home import FileHome
from stoker.tables.foresight import Foresight, Progress, Rereadable
from stoker.tables.lease import Lease
from stoker.tables.residency import ENOUGH, Hints, Ints
from stoker.tables.slotted import SlottedRows
from stoker.timeline import span

__all__ = ["Stage", "stage"]

_DEEPEST = 8  # batches in flight at most, where the depth adapts
_STALL = 0.02  # share of the time spent waiting for rows above which one more batch is staged ahead
_JUDGED = 16  # batches between two looks at the stalls

Staged = tuple[Batch, list[Lease | None]]


class Stage:
    """Batches of ``stream`` whose rows are in place; made by :func:`stage`. A context manager; ``for`` goes through it.

    Each loop goes through ``stream`` once. Leaving a loop early forgets what was staged: those batches were read from
    the stream, but :meth:`state_dict` tells where the batches handed out end.
    """

    def __init__(
        self,
        stream: Iterable[Batch],
        tables: EmbeddingTables,
        lookahead: int,
        in_flight: int | None,
        background: bool,
        *,
        foresight: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.stream, self.tables = stream, tables
        self.lookahead = lookahead
        self.in_flight = in_flight or (2 if background else 1)  # batches in fast memory now
        self.background = background
        self.window = 0  # batches looked ahead now
        self.stall_seconds = 0.0  # spent waiting for rows
        self.step = getattr(stream, "step", 0)  # batches handed out; the next one carries this number
        self.hurry: Callable[[], bool] = lambda: False  # asked while next uses are recorded: yes gives that up
        self._fixed = in_flight is not None
        self._groups = [
            (index, group.storage, group.mean)
            for index, group in enumerate(tables.groups)
            if isinstance(group.storage, SlottedRows)
        ]
        self._waiting: deque[Batch] = deque()
        self._begun: dict[int, Lease | None] = {}  # of the first that waits: what its groups, by index, were given
        self._changed = threading.Condition()
        self._outstanding = 0  # batches staged and not done
        self._stop = False
        self._foresight = self._watch(stream, progress) if foresight else None

    def _watch(self, stream: Iterable[Batch], progress: Progress | None) -> Foresight:
        if not isinstance(stream, Rereadable):
            raise ConfigError(
                f"foresight=True reads the ids of an epoch before its first step, but a {type(stream).__name__} "
                "cannot be read twice (it has no rest_of_epoch). Give dataset.train.batches(...), or leave foresight "
                "out."
            )

        def rows(index: int, storage: SlottedRows, mean: bool) -> Callable[[Batch], Ints]:
            return lambda batch: storage.distinct(self._bags(batch, index, mean)).rows

        watched = [group for group in self._groups if _keeps(group[1])]
        sources = [
            (rows(*group), home.num_rows, home.path.parent if isinstance(home, FileHome) else None)
            for group in watched
            for home in [group[1].home]
        ]
        return Foresight(stream, sources, progress, lambda: self._stop or self.hurry())

    def __iter__(self) -> Iterator[Batch]:
        if not self._groups:
            for batch in self.stream:
                self.step = batch.step + 1
                yield batch
            return
        source = iter(self.stream)
        staged = self._threaded(source) if self.background else self._inline(source)
        try:
            for batch, leases in staged:
                moved = batch.to(self.tables.device, non_blocking=True)
                self.tables.hand_over(moved.ids, leases)
                self.step = batch.step + 1
                try:
                    yield moved
                finally:
                    self.tables.withdraw(moved.ids)
        finally:
            staged.close()  # type: ignore[attr-defined]
            self._waiting.clear()
            self._begun.clear()
            if self._foresight is not None:
                self._foresight.close()
            if not sys.is_finalizing():  # a script that ends within its loop; nothing is left to forget for
                for _, storage, _ in self._groups:
                    storage.forget()

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream behind the batch handed out last."""
        state: dict[str, Any] = self.stream.state_dict(self.step)  # type: ignore[attr-defined]
        return state

    @property
    def _recorded(self) -> float:
        """Seconds that recording next uses has taken so far."""
        return 0.0 if self._foresight is None else self._foresight.seconds

    def _look_ahead(self, source: Iterator[Batch]) -> None:
        """Announce further batches: as many as asked for, or as want enough rows for all slots."""
        while len(self._waiting) <= self.lookahead:
            full = all(
                not _keeps(storage) or storage.residency.wanted >= ENOUGH * storage.num_slots
                for _, storage, _ in self._groups
            )
            if full and len(self._waiting) > self.in_flight:
                break
            with span("read"):
                batch = next(source, None)
            if batch is None:
                break
            for (index, storage, mean), upcoming in zip(self._groups, self._upcoming(batch), strict=True):
                storage.announce(self._bags(batch, index, mean), upcoming)
            self._waiting.append(batch)
        self.window = len(self._waiting)

    def _bags(self, batch: Batch, index: int, mean: bool) -> Bags:
        """What group ``index`` looks up."""
        weights = None if batch.weights is None else batch.weights.reshape(-1)
        return Bags(*self.tables.lookups(index, batch.ids, batch.offsets, weights), mean)

    def _upcoming(self, batch: Batch) -> list[Hints | None]:
        """For each group what is known of the next uses of the batch's rows."""
        if self._foresight is None:
            return [None] * len(self._groups)
        with span("foresight"):
            found = iter(self._foresight.upcoming(batch))
        return [next(found) if _keeps(storage) else None for _, storage, _ in self._groups]

    def _next(self, *, busy: bool) -> Staged | None:
        """Make the next waiting batch resident.

        Args:
            busy: batches are in flight, whose rows may leave too few slots. The batch keeps its turn then, and the
                result is None. Otherwise a group whose rows do not fit is left to fetch on demand.
        """
        for index, storage, _ in self._groups:
            if index in self._begun:
                continue
            lease = storage.stage()
            if lease is None:
                if busy:
                    return None
                storage.skip()
            self._begun[index] = lease
        leases = [self._begun.get(index) for index in range(len(self.tables.groups))]
        self._begun = {}
        return self._waiting.popleft(), leases

    def _next_in_turn(self) -> Staged | None:
        """As :meth:`_next`, waiting for batches in flight to be done; None if the loop was left meanwhile."""
        while not self._stop:
            with self._changed:
                before = self._outstanding
            if (staged := self._next(busy=before > 0)) is not None:
                return staged
            with self._changed:
                self._changed.wait_for(lambda before=before: self._outstanding < before or self._stop)  # type: ignore[misc]
        return None

    def _inline(self, source: Iterator[Batch]) -> Iterator[Staged]:
        ready: deque[Staged] = deque()
        while True:
            begin = time.perf_counter()
            with span("stall"):
                while len(ready) < self.in_flight:
                    self._look_ahead(source)
                    if not self._waiting:
                        break
                    if (staged := self._next(busy=bool(ready))) is None:
                        break
                    ready.append(staged)
            self.stall_seconds += time.perf_counter() - begin
            if not ready:
                return
            yield ready.popleft()

    def _threaded(self, source: Iterator[Batch]) -> Iterator[Staged]:
        ready: SimpleQueue[Staged | BaseException | None] = SimpleQueue()
        self._stop, self._outstanding = False, 0

        def work() -> None:
            try:
                while True:
                    self._look_ahead(source)
                    if not self._waiting:
                        break
                    with self._changed:
                        self._changed.wait_for(lambda: self._outstanding < self.in_flight or self._stop)
                    if (staged := self._next_in_turn()) is None:
                        return
                    with self._changed:
                        self._outstanding += 1
                    ready.put(staged)
                ready.put(None)
            except BaseException as error:
                ready.put(error)

        thread = threading.Thread(target=work, name="stoker-stage", daemon=True)
        thread.start()
        start, stalled, count = time.perf_counter(), 0.0, 0
        try:
            while True:
                begin, recorded = time.perf_counter(), self._recorded
                with span("stall"):
                    staged = ready.get()
                waited = time.perf_counter() - begin
                if staged is None:
                    return
                if isinstance(staged, BaseException):
                    raise staged
                count += 1
                if count > 1:  # the first has nothing to hide behind
                    self.stall_seconds += waited
                    stalled += max(0.0, waited - (self._recorded - recorded))  # which no depth would hide
                yield staged
                with self._changed:
                    self._outstanding -= 1
                    if count % _JUDGED == 0:
                        if not self._fixed and stalled > _STALL * (time.perf_counter() - start):
                            self.in_flight = min(self.in_flight + 1, _DEEPEST)
                        start, stalled = time.perf_counter(), 0.0
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._stop = True
                self._changed.notify_all()
            thread.join()


def _keeps(storage: SlottedRows) -> bool:
    """Whether rows stay after their use, so that it matters when the next one is."""
    return not storage.residency.shape.transient


def stage(
    stream: Iterable[Batch],
    tables: EmbeddingTables | Any,
    *,
    lookahead: int = 64,
    in_flight: int | None = None,
    background: bool | None = None,
    foresight: bool = False,
    progress: Progress | None = None,
) -> Stage:
    """Batches of ``stream``, with the rows of each in fast memory when it is handed out.

    Tables whose rows all lie on the device are left alone. A batch that was not staged fetches its rows on demand and
    gives the same numbers.

    Args:
        stream: batches, such as ``dataset.train.batches(...)`` (without ``reuse``: batches wait in the window).
        tables: the tables, or a model with ``embeddings``.
        lookahead: batches whose ids are known beyond those in flight; fewer are taken where they want twice as many
            rows as there are slots.
        in_flight: batches whose rows are in fast memory at a time, the one in training included; it may exceed
            ``lookahead``. With more than the slots hold, batches wait until others are done, and more rows come than
            need to: the slots hold rows in flight alone. None adapts: it grows while training waits for rows.
        background: plan and move rows in a thread beside training. None: where that thread would wait, for a GPU or
            for a file; on a CPU over ordinary memory both would want the same cores.
        foresight: know the next use of every row to the end of the epoch, so that as few rows as possible have to come.
            The ids of each epoch are read once before its first step, and next uses kept in a temporary file, 4 bytes
            for every distinct row of every batch. For streams that can be read twice: ``dataset.train.batches(...)``.
        progress: called with (what is being done, batches done, batches in all) meanwhile, from any thread.

    Raises:
        ConfigError: numbers out of their range, or ``foresight`` on a stream that cannot be read twice.
        HomeError: (while read) the disk of the temporary file is full or fails.
    """
    tables = getattr(tables, "embeddings", tables)
    if lookahead < 0:
        raise ConfigError(f"lookahead is {lookahead} batches; give 0 or more.")
    if in_flight is not None and in_flight < 1:
        raise ConfigError(f"in_flight is {in_flight} batches; give at least 1: the one in training.")
    slotted = [group.storage for group in tables.groups if isinstance(group.storage, SlottedRows)]
    if background is None:
        background = any(storage.home.kind == "file" or tables.device.type == "cuda" for storage in slotted)
    return Stage(stream, tables, lookahead, in_flight, background, foresight=foresight, progress=progress)
