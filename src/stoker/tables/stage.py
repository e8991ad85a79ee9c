"""Read ahead, and bring the rows of coming batches into fast memory. It changes no result.

``lookahead`` counts batches whose ids are known, which lowers misses; ``in_flight`` counts batches whose rows
are in fast memory, which hides latency and costs slots (cDLRM section 4; BagPipe section 3).
``epoch_lookahead`` also has the uses of rows after that window (:mod:`stoker.tables.slots.epoch_lookahead`).

Both adapt. A longer window lowers misses only while a plan has to guess which row to evict, because rows without a
known use remain in slots (:attr:`Residency.guesses`). So it grows then, within its memory, and shrinks while plans do
not guess (:mod:`stoker.tables.slots.window`). This depends on the ids alone: :func:`stoker.replay` does the same.

If rows are divided among ranks, these tell each other which rows a batch wants when it enters the window, on the
caller's thread, before the step's own messages, and how far each would look ahead: all take the largest. So the order
of messages depends on no clock. Who plans and moves rows, and when, remains each rank's own choice. Ranks that all have
every row tell each other too, if they train: each will step the rows of all.

Legend: C slots.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from stoker.base.checks import checked
from stoker.base.errors import ConfigError
from stoker.base.ordered import start_thread
from stoker.base.progress import Progress
from stoker.base.settings import checked_arguments
from stoker.base.timeline import span
from stoker.dataset.batch import Batch
from stoker.ops import Bags
from stoker.ops.distinct import Distinct
from stoker.tables.embedding import EmbeddingTables
from stoker.tables.group import TableGroup
from stoker.tables.growing.ids import Grown
from stoker.tables.lookups import Lookups, copy_ids, equal_ids, version_of
from stoker.tables.ranks.divided import Asked, DividedGroup
from stoker.tables.ranks.share import Share
from stoker.tables.slots.epoch_lookahead import EpochLookahead, Rereadable
from stoker.tables.slots.residency import Hints, Ints
from stoker.tables.slots.slotted import Queue, SlottedRows
from stoker.tables.slots.window import IN_MEMORY, Ahead, default_memory
from stoker.tables.storage import Lease, release_all

_DEEPEST = 8  # most batches in flight, if the depth adapts
_STALL = 0.02  # if more of the time than this is spent waiting for rows, one more batch is staged
_NO_STALL = 0.002  # if it is less for some time, one batch less
_JUDGED = 16  # batches between two checks of the stalls
_MOST_FINDERS = 4  # threads that find distinct rows: of four threads of torch, one
_PATIENCE = 8  # checks without stalls before the first shrink; twice as many before each later one

Item = TypeVar("Item")
LookupInput = Tensor | tuple[Any, ...]  # ids, with offsets and weights if there are any, and a time


@dataclass(frozen=True, slots=True)
class _Upcoming:
    """A batch that was read and waits for its turn."""

    item: Any
    ids: Tensor
    version: int  # of their contents
    copies: tuple[Tensor, Tensor | None] | None  # of ids and checked offsets, if others could change them
    parts: list[Lookups]  # of all groups; of divided ones, the own rows that ranks look up
    asked: dict[int, Asked]  # of divided groups, by index
    grown: Grown | None = None  # the step of tables that grow
    shared: dict[int, Distinct] = field(default_factory=dict)  # of replicated groups: the rows that ranks look up


@dataclass(frozen=True, slots=True)
class _Read:
    """A batch that was read and is not announced yet."""

    upcoming: _Upcoming
    wanted: list[Future[Distinct] | None]  # of each queue, if a thread finds them


class Stage(Generic[Item]):
    """Batches of ``stream`` with resident rows; made by :func:`stage`.

    Each loop reads ``stream`` once. Leaving a loop early drops the staged batches: they were read from the stream, but
    :meth:`state_dict` is the position after the last yielded batch. Several stages may be open over the same tables;
    eviction follows the stage that was opened last.
    """

    def __init__(
        self, stream: Iterable[Item], tables: EmbeddingTables, lookahead: int | None, in_flight: int | None,
        background: bool, *, epoch_lookahead: bool = False, progress: Progress | None = None,
        lookups: Callable[[Item], LookupInput] | None = None,
    ) -> None:  # fmt: skip
        self.stream, self.tables = stream, tables
        self.in_flight = in_flight or (2 if background else 1)  # batches in fast memory now
        self.background = background
        self.window = 0  # batches read ahead now
        self.stall_seconds = 0.0  # spent waiting for rows
        self.step = getattr(stream, "step", 0)  # batches yielded; the number of the next one
        self.hurry: Callable[[], bool] = lambda: False  # called while next uses are recorded: True stops the recording
        self._fixed, self._in_flight = in_flight is not None, in_flight
        self._calm, self._patience = 0, _PATIENCE  # checks of the stalls: without any in a row, and before a shrink
        self._lookups = lookups or _lookups_of_batch
        # Batches of our own reader have their own memory: only torch can change them.
        self._private = bool(getattr(stream, "fresh", False))
        storages = [group.storage for group in tables.groups]
        self._groups = [(index, each) for index, each in enumerate(storages) if isinstance(each, SlottedRows)]
        self._readers = [(index, each) for index, each in enumerate(storages) if each.reads_ids]
        divided = [(index, group) for index, group in enumerate(tables.groups) if isinstance(group, DividedGroup)]
        self._divided = [(index, group) for index, group in divided if isinstance(group.storage, SlottedRows)]
        self._memory = _window_memory([storage for _, storage in self._groups])
        blocking = any(storage.home.is_blocking for _, storage in self._groups if _keeps(storage))
        self.ahead = Ahead(lookahead, None if blocking else IN_MEMORY)
        self._replicated = [] if tables.divided or tables.ranks is None else [
            (index, storage) for index, storage in self._groups if type(tables.groups[index]) is TableGroup
        ]  # fmt: skip
        self._reach = self.ahead.batches + (in_flight or 2)  # batches that ranks have asked for before a step
        self._leaving = False  # the loop was left: stop recording
        self._epoch_lookahead = self._watch(stream, progress) if epoch_lookahead else None

    def _watch(self, stream: Iterable[Any], progress: Progress | None) -> EpochLookahead:
        if (raw := self.tables.raw) is not None:
            raise ConfigError(
                f"epoch_lookahead=True needs the rows of an epoch before its first step, but tables that grow "
                f"({', '.join(raw.names[:3])}) give them during the epoch. Leave epoch_lookahead out."
            )
        if self._divided:
            raise ConfigError(
                "epoch_lookahead=True needs the ids of all ranks, but each reads those of its own examples. Leave "
                "epoch_lookahead out: rows that are divided among ranks are brought by lookahead."
            )
        if not isinstance(stream, Rereadable):
            raise ConfigError(
                f"epoch_lookahead=True reads the ids of an epoch before its first step, but a {type(stream).__name__} "
                "cannot be read twice (it has no rest_of_epoch). Give dataset.train.batches(...), or leave "
                "epoch_lookahead out."
            )

        own = weakref.proxy(self)  # a cycle would keep the tables until Python looks for cycles

        def rows(index: int, storage: SlottedRows) -> Callable[[Batch], Ints]:
            return lambda batch: storage.distinct(*own._split(batch)[index]).rows

        kept = [(index, storage) for index, storage in self._groups if _keeps(storage)]
        sources = [(rows(index, storage), storage.num_rows, storage.home.directory) for index, storage in kept]
        return EpochLookahead(stream, sources, progress, lambda: own._leaving or own.hurry())

    def _split(self, item: Any) -> list[Lookups]:
        """Return the lookups of each group in a batch."""
        return self.tables.splitter.split(self.tables.splitter.check(*self._lookups_of(item)))

    def _lookups_of(self, item: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = self._lookups(item)
        given = found if isinstance(found, tuple | list) else (found,)
        ids, offsets, weights = (*given, None, None)[:3]
        if not isinstance(ids, Tensor):
            raise ConfigError(f"lookups gave {type(ids).__name__} where ids [B, F] or [L] are expected, as a tensor.")
        return ids, offsets, None if weights is None else weights.detach()

    def _time_of(self, item: Any) -> int | None:
        """Return the time of a batch, for tables that grow: the fourth of its lookups, or an attribute."""
        found: Any = self._lookups(item)
        given = found[3] if isinstance(found, tuple | list) and len(found) > 3 else getattr(item, "time", None)
        return None if given is None else int(given)

    def __iter__(self) -> Iterator[Item]:
        self.tables.open_stages += 1
        try:
            yield from self._loop()
        finally:
            self.tables.open_stages -= 1

    def _loop(self) -> Iterator[Item]:
        raw, ranks = self.tables.raw, self.tables.ranks
        if not (ranks and self.tables.training):
            self._replicated = []
        # Of replicas only some may have slots, so they meet at the lookup.
        alone = raw and ranks and not self.tables.divided
        if alone or not (self._groups or self._readers or (self.background and raw)):
            for item in self.stream:
                self.step = getattr(item, "step", self.step) + 1
                yield item
            return
        run = _StageLoop(self)
        try:
            with ranks.guard() if ranks and run._meets else nullcontext():
                yield from self._yielded(run)
        finally:
            run.close()

    def _yielded(self, run: _StageLoop) -> Iterator[Item]:
        for upcoming, leases in run.staged():
            item, ids, offsets = self._hand_out(upcoming)
            copies = upcoming.copies
            if self.tables.device.type != "cpu":
                copies = None  # only torch can change them, which counts versions
            elif copies is None:
                copies = _copied(self.tables.splitter.check(ids, offsets))
            self.tables.hand_over(ids, offsets, leases, copies, upcoming.grown)
            self.step = getattr(item, "step", self.step) + 1
            try:
                yield item
            finally:
                self.tables.withdraw(ids)

    def _hand_out(self, upcoming: _Upcoming) -> tuple[Any, Tensor, Tensor | None]:
        """Return the batch on the tables' device, its ids and offsets; raise ConfigError if the stream overwrote it."""
        ids, copies = upcoming.ids, upcoming.copies
        if version_of(ids) != upcoming.version or not (self._private or copies is None or equal_ids(ids, copies[0])):
            raise ConfigError(
                f"the stream overwrote the ids of batch {self.step} after giving it out: it uses its buffers again, "
                "but batches wait here while later ones are read. Give batches in tensors of their own "
                "(dataset.train.batches(...) without reuse, or ids.clone() in the stream)."
            )
        item = _moved(upcoming.item, self.tables.device)
        ids, offsets, _ = self._lookups_of(item)
        return item, ids, offsets

    def __repr__(self) -> str:
        return f"Stage({self.window} batches ahead, {self.in_flight} in flight, at step {self.step:,})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream after the last batch that was yielded."""
        state: dict[str, Any] = self.stream.state_dict(self.step)  # type: ignore[attr-defined]
        return state

    def _judge_stalls(self, share: float) -> None:
        """Adapt the batches in flight to the share of the time in which training waited for rows."""
        if self._fixed:
            return
        self._calm = self._calm + 1 if share < _NO_STALL else 0
        if share > _STALL:
            self.in_flight = min(self.in_flight + 1, _DEEPEST)
        elif self._calm >= self._patience and self.in_flight > 2:
            # Slots of fewer batches in flight hold other rows. If stalls come back, the next try is much later.
            self._calm, self._patience, self.in_flight = 0, 2 * self._patience, self.in_flight - 1

    @property
    def _recorded(self) -> float:
        """Seconds spent on recording next uses so far."""
        return 0.0 if self._epoch_lookahead is None else self._epoch_lookahead.seconds


class _StageLoop:
    """One loop over a stage: its queues, the batches that wait in them, and those that are resident."""

    def __init__(self, stage: Stage[Any]) -> None:
        self.stage, self.tables = stage, stage.tables
        self._source = iter(stage.stream)
        self._failure: Exception | None = None  # of the stream, raised after the batches before it
        # The distinct rows of a batch depend on nothing else, so where torch has threads some of ours find them while
        # the batch before is announced and planned.
        self._finders = _finders(torch.get_num_threads())
        self._finder = ThreadPoolExecutor(self._finders, "stoker-distinct") if self._finders else None
        self._reads: deque[_Read | Exception] = deque()  # the batches to announce next
        self._queues = [storage.queue() for _, storage in stage._groups]
        self._waiting: deque[_Upcoming] = deque()
        self._begun: dict[int, Lease | None] = {}  # of the first waiting batch: leases by index of the group
        self._ready: deque[_LeasedBatch] = deque()
        self._grown: deque[Grown] = deque()  # steps of tables that grow whose batches may not have trained yet
        self._asked: SimpleQueue[_Upcoming | None] = SimpleQueue()  # batches of ranks; None: the stream has ended
        grows = self.tables.divided and self.tables.raw is not None
        self._meets = bool(stage._divided or stage._replicated or grows)  # whether ranks ask each other
        self._asking = sys.maxsize if self._meets else 0  # batches that ranks may ask for, in all
        self._count = 0  # that they have asked for
        ranks = stage.tables.ranks
        if ranks is not None and self._meets and not stage._divided:  # their questions say how far each looks ahead
            stage._reach = max(reach for [reach] in ranks.numbers("begin a stage", [stage._reach]))

    def staged(self) -> Iterator[_LeasedBatch]:
        """Yield the batches with resident rows."""
        return self._threaded() if self.stage.background else self._inline()

    def _ask(self, done: int) -> None:
        """Read batches and ask the ranks for their rows, as far as the stage reaches beyond the ``done`` ones."""
        stage = self.stage
        while self._count < min(done + stage._reach, self._asking):
            upcoming = self._read_batch()
            if upcoming is not None and upcoming.asked:
                stage._reach = max(next(iter(upcoming.asked.values())).notes)
            self._asked.put(upcoming)
            self._count += 1
            if upcoming is None:
                self._asking = self._count

    def close(self) -> None:
        """Drop the staged batches that were not yielded."""
        self.stage._leaving = True
        if self.stage._epoch_lookahead is not None:
            self.stage._epoch_lookahead.close()
        if self._finder is not None:
            self._finder.shutdown(cancel_futures=True)
        if self.tables.raw is not None:
            self.tables.raw.forget(self._grown)
        if sys.is_finalizing():  # a script that ends within its loop: nothing needs to be dropped
            return
        for queue in self._queues:
            queue.close()
        for leases in (*(leases for _, leases in self._ready), self._begun.values()):
            release_all(leases)
        self._waiting.clear()

    def _look_ahead(self) -> bool:
        """Announce further batches, as far as the stage looks ahead and memory allows; return False if none waits."""
        stage = self.stage
        while len(self._waiting) <= stage.ahead.batches and self._failure is None:
            size = sum(queue.bytes for queue in self._queues) + sum(grown.bytes for grown in self._grown)
            full = not self._deciding or size >= stage._memory
            if full and len(self._waiting) > stage.in_flight:
                break
            try:
                if not self._announce_next():
                    break
            except Exception as error:  # without a stage, the batches before it would come first
                self._failure = error
        stage.window = len(self._waiting)
        return bool(self._waiting)

    @property
    def _deciding(self) -> list[Queue]:
        """The queues whose batches decide which rows leave."""
        pairs = zip(self._queues, self.stage._groups, strict=True)
        return [queue for queue, (_, storage) in pairs if _keeps(storage) and queue.is_followed]

    def _announce_next(self) -> bool:
        """Announce another batch; False if there is none."""
        coming = self._reads.popleft() if self._reads else self._read_next(wait=not self._waiting)
        if coming is None:
            return False
        if isinstance(coming, Exception):
            raise coming
        while self.stage.ahead.batches and len(self._reads) < self._finders:
            if self._reads and isinstance(self._reads[-1], Exception):
                break
            try:
                if (further := self._read_next(wait=False)) is None:
                    break
                self._reads.append(further)
            except Exception as error:  # the batches before it come first
                self._reads.append(error)
        item = coming.upcoming.item
        groups = zip(self._queues, self.stage._groups, self._upcoming(item), coming.wanted, strict=True)
        for queue, (index, _), upcoming, wanted in groups:
            known = coming.upcoming.shared.get(index)
            queue.announce(
                *coming.upcoming.parts[index], upcoming, known or (None if wanted is None else wanted.result())
            )
        self._waiting.append(coming.upcoming)
        return True

    def _read_next(self, *, wait: bool) -> _Read | None:
        """Read a batch, and have its distinct rows found; None if there is none, or if ranks have asked for none yet.

        ``wait``: until they have.
        """
        stage, finder = self.stage, self._finder
        if not self._meets:
            upcoming = self._read_batch()
        else:
            try:
                upcoming = self._asked.get(wait)
            except Empty:
                return None
            if upcoming is None:
                self._asked.put(None)
        if upcoming is None:
            return None
        parts = upcoming.parts
        wanted = [None if finder is None else finder.submit(of.distinct, *parts[index]) for index, of in stage._groups]
        for index, _ in stage._readers:  # here, so that an error follows the batches before
            parts[index].space.check(parts[index].bags.ids, parts[index].bags.offsets)
        return _Read(upcoming, wanted)

    def _read_batch(self) -> _Upcoming | None:
        """Read a batch, and ask the ranks for its rows if these are divided; None if there is none."""
        stage = self.stage
        with span("read"):
            item = next(self._source, None)
        if item is None:
            return None
        call = self.tables.splitter.check(*stage._lookups_of(item))
        ids, copies = call.ids, None if stage._private else _copied(call)
        if copies is not None:  # the announced ids are looked up, unless something changes them meanwhile
            call = Bags(*copies, call.weights)
        share = item if stage._private and isinstance(item, Share) else None  # the whole batch has its own memory, too
        grown = self.tables.ahead(call, stage._time_of(item), share)
        if grown is not None:
            self._grown.append(grown)
            while self._grown[0].taken:
                self._grown.popleft()
        rows = call if grown is None else call.cpu()._replace(ids=grown.call.ids[grown.mine])
        parts = self.tables.splitter.split(rows)
        reach = stage.ahead.batches + (stage._in_flight or 2)
        asked = {index: group.ask(parts[index], reach) for index, group in stage._divided}
        for index, each in asked.items():
            parts[index] = each.owned
        shared = {index: self._with_others(storage, parts[index]) for index, storage in stage._replicated}
        return _Upcoming(item, ids, version_of(ids), copies, parts, asked, grown, shared)

    def _with_others(self, storage: SlottedRows, lookups: Lookups) -> Distinct:
        """Return the rows of a lookup with those of the other ranks, which step here, too."""
        ranks = self.tables.ranks
        assert ranks is not None
        own = storage.distinct(*lookups)
        found = torch.cat(ranks.gather("ask for rows of all ranks", torch.from_numpy(own.rows))).numpy()
        rows = np.unique(found[storage.hot.places(found) < 0])
        which = own.which.long()
        at = torch.from_numpy(np.searchsorted(rows, own.rows))
        if len(at):
            which = torch.where(which < 0, which, at[which.clamp(min=0)])
        return Distinct(rows, which.to(torch.int32), own.placed)

    def _upcoming(self, item: Any) -> list[Hints | None]:
        """Return hints of the next uses of the batch's rows, for each group."""
        groups, epoch_lookahead = self.stage._groups, self.stage._epoch_lookahead
        if epoch_lookahead is None:
            return [None] * len(groups)
        with span("epoch_lookahead"):
            found = iter(epoch_lookahead.upcoming(item))
        return [next(found) if _keeps(storage) else None for _, storage in groups]

    def _next(self, *, busy: bool) -> _LeasedBatch | None:
        """Make the next waiting batch resident.

        ``busy``: batches are in flight, whose rows may leave too few slots. Then the batch waits, and the result is
        None. Otherwise a group whose rows do not fit fetches them on demand.
        """
        for queue, (index, _) in zip(self._queues, self.stage._groups, strict=True):
            if index in self._begun:
                continue
            lease = queue.stage()
            if lease is None:
                if busy:
                    return None
                queue.skip()
            self._begun[index] = lease
        first = self._waiting.popleft()
        begun = self._begun | {index: storage.acquire(*first.parts[index]) for index, storage in self.stage._readers}
        leases, self._begun = [begun.get(index) for index in range(len(self.tables.groups))], {}
        for index, group in self.stage._divided:
            leases[index] = group.lease_of(first.asked[index], leases[index])
        self.stage.ahead.judge(any(queue.guesses for queue in self._deciding), len(self._waiting))
        return first, leases

    def _inline(self) -> Iterator[_LeasedBatch]:
        stage, ready = self.stage, self._ready
        for done in itertools.count():
            self._ask(done)
            begin = time.perf_counter()
            with span("stall"):
                while len(ready) < stage.in_flight and self._look_ahead():
                    if (staged := self._next(busy=bool(ready))) is None:
                        break
                    ready.append(staged)
            stage.stall_seconds += time.perf_counter() - begin
            if not ready:
                if self._failure is not None:
                    raise self._failure
                return
            yield ready.popleft()

    def _threaded(self) -> Iterator[_LeasedBatch]:
        # Entered by its lock: within methods of the condition, which are in Python, Ctrl-C would leave it locked.
        stage, changed = self.stage, threading.Condition(lock := threading.RLock())
        ready: SimpleQueue[_LeasedBatch | BaseException | None] = SimpleQueue()
        outstanding, stop = 0, False  # batches staged and not done; whether the loop was left

        def work() -> None:
            nonlocal outstanding
            least = 0  # batches in flight that leave too few slots for the next one

            def may_go_on() -> bool:
                return stop or outstanding < (least or stage.in_flight)

            try:
                while self._look_ahead():
                    with lock:
                        changed.wait_for(may_go_on)
                        before = outstanding
                    if stop:
                        return
                    if (staged := self._next(busy=before > 0)) is None:
                        least = before
                        continue
                    with lock:
                        least, outstanding = 0, outstanding + 1
                    ready.put(staged)
                ready.put(self._failure)
            except BaseException as error:
                ready.put(error)

        def leave() -> None:
            nonlocal stop
            stage._leaving = True
            self._asked.put(None)
            with lock:
                stop = True
                changed.notify_all()

        thread = start_thread("stoker-stage", work, leave)
        start, stalled, count = time.perf_counter(), 0.0, 0
        try:
            while True:
                self._ask(count)
                begin, recorded = time.perf_counter(), stage._recorded
                with span("stall"):
                    staged = ready.get()
                waited = time.perf_counter() - begin
                if staged is None:
                    return
                if isinstance(staged, BaseException):
                    raise staged
                count += 1
                if count > 1:  # for the first, no work hides the wait
                    stage.stall_seconds += waited
                    stalled += max(0.0, waited - (stage._recorded - recorded))  # which no depth can hide
                yield staged
                with lock:
                    outstanding -= 1
                    if count % _JUDGED == 0:
                        stage._judge_stalls(stalled / (time.perf_counter() - start))
                        start, stalled = time.perf_counter(), 0.0
                    changed.notify_all()
        finally:
            leave()
            thread.join()
            while not ready.empty():
                if isinstance(left := ready.get(), tuple):
                    self._ready.append(left)


_LeasedBatch = tuple[_Upcoming, list[Lease | None]]


def _finders(threads: int) -> int:
    """Return how many of our threads find distinct rows where torch has ``threads``."""
    return 0 if threads == 1 else max(1, min(_MOST_FINDERS, threads // 4))


def _lookups_of_batch(item: Any) -> LookupInput:
    """Return ids, offsets and weights of a :class:`Batch`, or of an object with these attributes."""
    if not hasattr(item, "ids"):
        kind = type(item).__name__
        raise ConfigError(
            f"the stream gives a {kind}, and stage() cannot tell its ids. Give stoker.Batch objects, or say where they "
            f"are: stage(stream, tables, lookups=lambda item: item[0]) for ids [B, F], or a tuple (ids, offsets) or "
            "(ids, offsets, weights)."
        )
    return item.ids, getattr(item, "offsets", None), getattr(item, "weights", None)


def _copied(call: Bags) -> tuple[Tensor, Tensor | None]:
    """Copy ids and offsets."""
    return copy_ids(call.ids), None if call.offsets is None else copy_ids(call.offsets)


def _moved(item: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to ``device``: a batch, a tensor, or tuples, lists and dicts of them."""
    if hasattr(item, "to"):
        return item.to(device, non_blocking=True)
    if isinstance(item, dict):
        return {key: _moved(value, device) for key, value in item.items()}
    if isinstance(item, tuple | list):
        parts = [_moved(value, device) for value in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def _window_memory(storages: list[SlottedRows]) -> float:
    """Return the bytes for batches that wait: those of the strategies, else a share of main memory."""
    given = [storage.window for storage in storages if _keeps(storage)]
    return (default_memory() if None in given else 0) + sum(size for size in given if size is not None)


def _keeps(storage: SlottedRows) -> bool:
    """Return True if rows may stay after their use, so that the next use matters."""
    return not storage.residency.transient


@checked_arguments
def stage(
    stream: Iterable[Item],
    tables: EmbeddingTables | nn.Module,
    *,
    lookahead: int | None = None,
    in_flight: int | None = None,
    background: bool | None = None,
    epoch_lookahead: bool = False,
    progress: Progress | None = None,
    lookups: Callable[[Item], LookupInput] | None = None,
) -> Stage[Item]:
    """Iterate over the batches of ``stream``, with the rows of each in fast memory.

    It has no effect on tables whose rows are all on the device, but for tensor trains on a GPU: their products are
    prepared from ids that are still on the host. A batch that was not staged fetches its rows on demand and gives the
    same numbers, and so does one whose ids or offsets change before the lookup. Ranks read their batches in step,
    and tell each other which rows these want: all of them stage equally many batches, and do not change their ids. They
    ask as far ahead as the one that looks the farthest.

    Args:
        stream: batches, such as ``dataset.train.batches(...)`` (without ``reuse``: batches wait in the window).
        tables: the tables, or a module that holds them.
        lookahead: batches whose ids are known beyond those in flight. None adapts: it grows while evictions are
            guesses, and shrinks while they are not, up to 64 if all rows are in memory. Either way there are fewer if
            they take more memory than the strategies of the tables allow (``window``). If torch may use several
            threads, one to four more batches are read, whose rows threads find meanwhile.
        in_flight: batches whose rows are in fast memory at a time, with the one in training; it may exceed
            ``lookahead``. If the slots hold fewer, batches wait until others are done, and more rows than necessary are
            fetched: the slots hold only rows in flight. None adapts: it grows while training waits for rows, and
            shrinks when it has not for some time.
        background: plan and move rows in a thread next to training. None: only if that thread would wait, for a GPU or
            for a file; on a CPU over ordinary memory both would compete for the same cores.
        epoch_lookahead: know the next use of every row to the end of the epoch, so that as few rows as possible are
            fetched. The ids of each epoch are read once before its first step, and next uses are in a temporary file, 4
            bytes for every distinct row of every batch. For streams that can be read twice:
            ``dataset.train.batches(...)``.
        progress: called with (name of the work, batches done, batches in all) meanwhile, from any thread.
        lookups: returns the lookups of an item of ``stream``: ids, or (ids, offsets), or (ids, offsets, weights), or
            these and the time that the loop gives to tables that grow. None: the items have these attributes, as
            :class:`stoker.Batch`.

    Raises:
        ConfigError: a number is out of its range, ``epoch_lookahead`` is set but the stream cannot be read twice, the
            stream overwrites its batches, or the module has no tables or several.
        ValueError: (in the loop) the tables refuse a lookup.
        HomeError: (in the loop) the disk of the temporary file is full or fails.

    Example:
        >>> table = stoker.TableConfig(name="user", num_embeddings=1000, embedding_dim=8)
        >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.Cached(slots=100))
        >>> pairs = [(torch.arange(32).view(32, 1) * k, torch.ones(32)) for k in range(10)]
        >>> for ids, target in stoker.stage(pairs, tables, lookups=lambda pair: pair[0]):
        ...     (tables(ids).sum(dim=(1, 2)) - target).square().mean().backward()
        >>> tables.tick
        10
    """
    tables = _tables_of(tables)
    if getattr(stream, "reuse", False):
        raise ConfigError(
            "the stream was made with reuse=True: it overwrites each batch with the next, but batches wait here while "
            "later ones are read. Leave reuse out."
        )
    lookahead, in_flight = (checked(*each, int | None) for each in (("lookahead", lookahead), ("in_flight", in_flight)))
    if lookahead is not None and lookahead < 0:
        raise ConfigError(f"lookahead is {lookahead} batches; give 0 or more.")
    if in_flight is not None and in_flight < 1:
        raise ConfigError(f"in_flight is {in_flight} batches; give at least 1: the one in training.")
    if background is None:
        storages = [group.storage for group in tables.groups]
        slotted = [storage for storage in storages if isinstance(storage, SlottedRows)]
        background = any(storage.home.is_blocking or tables.device.type == "cuda" for storage in slotted)
        background = background or any(storage.reads_ids for storage in storages)
    return Stage(
        stream,
        tables,
        lookahead,
        in_flight,
        background,
        epoch_lookahead=epoch_lookahead,
        progress=progress,
        lookups=lookups,
    )


def _tables_of(given: Any) -> EmbeddingTables:
    """Return the only EmbeddingTables of a module, or the module itself."""
    modules = given.modules() if isinstance(given, nn.Module) else ()
    found = [each for each in modules if isinstance(each, EmbeddingTables)]
    if len(found) != 1:
        raise ConfigError(
            f"stage() needs the EmbeddingTables whose rows to bring, but {type(given).__name__} holds {len(found)}. "
            "Give one: stage(stream, model.embeddings)."
        )
    return found[0]
