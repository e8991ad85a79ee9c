"""N rows in a backing store, C slots in fast memory: the storage behind ``Cached``, ``HotCold`` and ``HostPipelined``.

The first slots are for pinned hot rows: an addition finds their slot, plans do not contain them, and they have no other
copy. Plans assign the other slots, for rows in flight.

Legend: N rows, C slots, H of them for hot rows, U distinct rows of a batch.
"""

from __future__ import annotations

import importlib.util
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import ConfigError, StokerError
from stoker.base.timeline import span, spanned
from stoker.ops import AddressSpace, Bags
from stoker.ops.distinct import Distinct, PinnedRows, split_rows, to_slots
from stoker.ops.space import slot_space
from stoker.tables.config import HostPipelined, HotCold, Slotted, TableConfig
from stoker.tables.links.cuda_link import CudaLink
from stoker.tables.links.transfer import DirectLink, QueuedLink, TransferStats
from stoker.tables.slots.residency import Hints, Ints, Residency, SlotPlan
from stoker.tables.slots.sharded import ShardedResidency, count_shards
from stoker.tables.storage import Lease, ProcessLock, Rows, Storage, allocate
from stoker.tables.stores.home import Home, Initial
from stoker.tables.stores.ram_tier import make_home

_CHUNK_ROWS = 2**20  # rows of a chunk when all changed rows are written back


class TooFewSlots(StokerError):
    """A batch needs more distinct rows at once than there are slots free of other work and of hot rows.

    ``spill``: such batches are chunked already, and a single example does not fit.
    """

    def __init__(self, needed: int, slots: int, hot: int = 0, *, spill: bool = False) -> None:
        more = f" in addition to the {hot:,} hot rows" if hot else ""
        remedies = ["Give more memory (--device-memory)"]
        if hot:
            remedies.append("make fewer rows hot")
        if not spill:
            remedies += ["make the batch smaller", "choose spill='parts'"]
        super().__init__(
            f"{'one example' if spill else 'a batch'} needs {needed:,} distinct rows in fast memory at once{more}, "
            f"but {slots:,} slots are there for them. {', '.join(remedies[:-1])}"
            f"{', or ' if len(remedies) > 1 else ''}{remedies[-1]}."
        )
        self.needed, self.slots, self.hot = needed, slots, hot


@dataclass(frozen=True, slots=True)
class _Request:
    """A batch that waits for slots."""

    bags: Bags
    space: AddressSpace
    wanted: Distinct
    upcoming: Hints | None


class SlottedRows(Storage):
    """Rows of a backing store, some of them in slots; ``hot`` [T] of each table are pinned.

    Threads may call it: plans are made and run one at a time, and releases never wait. ``transient``: every other row
    leaves after its last use in flight. ``link`` creates what runs plans; None means the fastest. ``fast``: plan with
    Numba or in plain Python; None means Numba if it is installed.
    """

    def __init__(
        self, home: Home, space: AddressSpace, *, slots: int, device: torch.device, hot: Sequence[int] = (),
        transient: bool = False, link: Callable[[Home, Rows, TransferStats], DirectLink] | None = None,
        fast: bool | None = None,
    ) -> None:  # fmt: skip
        self.home, self.space = home, space
        self.num_slots = slots = max(1, min(slots, space.num_rows))
        self.hot = PinnedRows(space, hot)
        self.num_hot = num_hot = len(self.hot)
        if num_hot > slots or num_hot == slots < space.num_rows:
            raise ConfigError(
                f"{num_hot:,} hot rows leave none of {slots:,} slots for the other rows of a batch. Give more memory "
                "(slots=, fraction= or memory= count hot and other rows together), or make fewer rows hot."
            )
        made = home.empty(slots, lambda shape, dtype: allocate(shape, dtype, device))
        self.weight, self.state = made.weight, made.state
        # Slots of plans and links: counted from 0 after the hot ones.
        self.transit = made[num_hot:]
        self.residency = make_residency(space.first_row, slots - num_hot, transient=transient, fast=fast)
        self.stats = TransferStats()
        self._process, self._closed = ProcessLock(), False
        self._broken: BaseException | None = None
        self.window: int | None = None  # bytes for batches that wait, see :class:`Slotted`
        # Released slots that are unknown to the residency yet, with the number of their plan.
        self._returned: deque[tuple[int, Ints, bool, Any]] = deque()
        self._queues: list[Queue] = []  # of open stages; the residency knows the batches of the last
        self._leases: dict[int, weakref.ref[Lease]] = {}  # leases that have not ended, by number of their plan
        self._leased: set[int] = set()  # numbers of plans whose slots are not released
        rounded = home.dtype == torch.bfloat16
        # Table and row in each slot, for the random bits of bfloat16.
        self._rows_in_slots = [torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2 * rounded)]
        self._fill_hot()
        self.move_by((link or DirectLink)(home, self.transit, self.stats))

    def move_by(self, link: DirectLink) -> None:
        """Run plans by ``link`` from now on, before the first one."""
        self._link = link
        self.residency.set_up(link.landing, roomy=link.roomy)

    def _fill_hot(self) -> None:
        """Fetch the hot rows into their slots."""
        addresses = self.hot.addresses()
        for begin in range(0, self.num_hot, _CHUNK_ROWS):
            rows = addresses[begin : begin + _CHUNK_ROWS]
            self.home.fetch(rows, self.slots[begin : begin + len(rows)])
            for labels, values in zip(self._rows_in_slots, self.home.initial.label(rows), strict=False):
                labels[begin : begin + len(rows)] = torch.from_numpy(values)

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        return self._process.lock

    @property
    def num_rows(self) -> int:
        """N."""
        return self.space.num_rows

    @property
    def available(self) -> int:
        """Slots that a batch could get now."""
        with self._lock:
            self._release_returned()
            return self.residency.free

    def queue(self) -> Queue:
        """Open a queue of upcoming batches for one stage."""
        return Queue(self)

    @spanned("stall")
    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        begin = time.perf_counter()
        with span("plan"):
            wanted = self.distinct(bags, space)
        with self._lock:
            try:
                with span("plan"):
                    self._release_returned()
                    while (plan := self.residency.plan_now(wanted.rows)) is None and self._revoke_one():
                        self._release_returned()
                if plan is None:
                    raise TooFewSlots(len(wanted.rows), self.residency.free, self.num_hot)
                self.stats.plan_seconds += time.perf_counter() - begin
                self.stats.on_demand += len(plan.fetch_rows)
                lease = self._carry_out(plan, bags, space, wanted)
            except KeyboardInterrupt as error:  # of a plan whose rows have not moved
                self._broken = error
                raise
            self._link.ready(lease.ticket)
            self.stats.stall_seconds += time.perf_counter() - begin
            return lease

    def _revoke_one(self) -> bool:
        """Take the slots of one batch that is not in use: of kept graphs first, then of the batches staged last.

        The owner of the lease fetches the rows again when it needs them.
        """
        leases = [lease for found in list(self._leases.values()) if (lease := found()) is not None]
        graphs = [lease for lease in leases if not lease.staged]
        staged = [lease for lease in reversed(leases) if lease.staged]
        return any(lease.revoke() for lease in (*graphs, *staged))

    def distinct(self, bags: Bags, space: AddressSpace | None = None) -> Distinct:
        """Return the distinct rows that are not hot, in the same order for the same bags."""
        return split_rows(bags.cpu(), space or self.space, self.hot)

    def hand_out(self, lease: Lease) -> None:
        """Make the calling thread's work on a staged lease wait for its rows, unless the lease was revoked."""
        # Without the lock of the storage: a resident batch must not wait for the rows of later ones.
        ticket, staged = lease.ticket, lease.staged
        lease.ticket, lease.staged = None, False
        if staged and not lease.over:
            self._link.ready(ticket)

    def forget(self) -> None:
        """Drop every batch that is announced, or resident and not in use."""
        with self._lock:
            for queue in list(self._queues):
                queue.close()
            while self._revoke_one():
                pass
            if self._broken is None:
                self._release_returned()

    def _release_returned(self) -> None:
        """Tell the residency which slots were released; raise StokerError if a move of rows failed earlier."""
        if self._broken is not None:
            cause = str(self._broken) or type(self._broken).__name__
            raise StokerError(
                f"rows could not be moved earlier ({cause}), so these tables no longer hold a whole state. "
                "Remove the cause and resume from the last checkpoint."
            ) from self._broken
        try:
            while self._returned:
                number, slots, changed, mark = self._returned.popleft()
                if number in self._leased:  # else Ctrl-C came, and they were returned twice
                    self._leased.remove(number)
                    self.residency.release(slots, changed=changed)
                    self._link.released(mark)
        except KeyboardInterrupt as error:  # of slots that the residency does not get back
            self._broken = error
            raise

    @spanned("plan")
    def _carry_out(self, plan: SlotPlan, bags: Bags, space: AddressSpace, wanted: Distinct) -> Lease:
        """Move the rows of a plan, and return the lease of its batch with the link's ticket."""
        link = self._link
        try:
            link.run(plan)
            self.stats.rows += wanted.placed
            self.stats.hits += wanted.placed
            if self._rows_in_slots and len(plan.fetch_rows):
                labels = [each[self.num_hot :] for each in self._rows_in_slots]
                link.label(list(zip(labels, self.home.initial.label(plan.fetch_rows), strict=True)), plan.fetch_slots)
            ids = link.send(to_slots(wanted.which, plan.slots, self.num_hot))
            offsets = None if bags.offsets is None else link.send(bags.offsets)
            weights = None if bags.weights is None else link.send(bags.weights)
            ticket = link.ticket()
        except BaseException as error:
            # The rows of this plan may not be in their slots: they must not be used or written back.
            self._broken = error
            raise
        tables, rows = self._rows_in_slots or (None, None)
        lease = Lease(
            bags._replace(ids=ids, offsets=offsets, weights=weights), slot_space(space, self.num_slots),
            tables=tables, rows=rows, give_back=self._take_back, token=(plan.number, plan.slots), ticket=ticket,
        )  # fmt: skip
        self._leased.add(plan.number)
        self._leases[plan.number] = weakref.ref(lease)
        return lease

    def _take_back(self, token: tuple[int, Ints], changed: bool) -> None:
        number, slots = token
        self._leases.pop(number, None)
        self._returned.append((number, slots, changed, self._link.mark()))

    def reset_state(self, state: dict[str, str]) -> None:
        raise StokerError(
            "the optimizer of rows behind a cache cannot be replaced by one of another kind; "
            "build the model with it, or place the tables on the device first."
        )

    def flush(self) -> None:
        """Write back every changed row that is not hot; rows remain in their slots."""
        with self._lock:
            self._release_returned()
            self._link.drain()
            slots = self.residency.take_changed()
            for begin in range(0, len(slots), _CHUNK_ROWS):  # sorting takes memory
                some = slots[begin : begin + _CHUNK_ROWS]
                try:
                    self._link.store(self.residency.rows_in(some), some)
                except BaseException:
                    self.residency.mark_changed(slots[begin:])
                    raise

    def read(self, start: int, stop: int) -> Rows:
        with self._lock:
            self.flush()
            if not self.num_hot:
                return self.home.read(start, stop)
            self._link.finish()
            found = self.home.empty(stop - start)
            for begin, end, slot in self.hot.runs(start, stop):
                part = slice(begin - start, end - start)
                if slot < 0:
                    self.home.fetch(np.arange(begin, end), found[part])
                else:
                    found[part] = self.slots[slot : slot + end - begin]
            return found

    def gather(self, rows: Ints) -> Rows:
        with self._lock:
            self._release_returned()
            self._link.ready()
            slots = self._slots_of(rows)
            away = np.flatnonzero(slots < 0)
            at = torch.from_numpy(np.maximum(slots, 0)).to(self.weight.device)
            found = self.slots[at]
            self._link.released(self._link.mark())  # nothing may enter those slots before they are read
            if len(away):
                self._link.drain()
                self.home.fetch(rows[away], found, away)
            return found

    def _slots_of(self, rows: Ints) -> Ints:
        """Return the slot of each of the addresses ``rows`` [n]; -1 if it has none."""
        own = self.hot.places(rows)
        unique, which = np.unique(rows, return_inverse=True)
        slots = np.full(len(unique), -1, np.int64)
        if len(unique):
            resident = self.residency.row_in_slot
            at = np.minimum(np.searchsorted(unique, resident), len(unique) - 1)
            found = np.flatnonzero(unique[at] == resident)
            slots[at[found]] = found + self.num_hot
        return np.where(own >= 0, own, slots[which])

    def write(self, start: int, rows: Rows) -> None:
        with self._lock:
            self.flush()
            self._link.finish()
            for begin, end, slot in self.hot.runs(start, start + len(rows.weight)):
                part = rows[begin - start : end - start]
                if slot < 0:
                    self.home.write(begin, part)
                else:
                    self.slots[slot : slot + end - begin] = part.map(Tensor.detach)
            resident = self.residency.row_in_slot
            self._refresh(np.flatnonzero((resident >= start) & (resident < start + len(rows.weight))))

    def _refresh(self, slots: Ints) -> None:
        """Fetch the rows in some slots again."""
        if len(slots):
            self._link.released(self._link.mark())  # also rows under a lease, as if it had ended
            self._link.fetch(self.residency.rows_in(slots), slots)
            self._link.ready()

    def scatter(self, rows: Ints, values: Rows) -> None:
        with self._lock:
            self.flush()
            self._link.finish()
            hot = self.hot.places(rows)
            own, away = np.flatnonzero(hot >= 0), np.flatnonzero(hot < 0)
            device = self.weight.device
            if len(own):
                at = torch.from_numpy(own).to(values.weight.device)
                self.slots[torch.from_numpy(hot[own]).to(device)] = values[at].map(lambda tensor: tensor.to(device))
            if len(away):
                self.home.store(rows[away], values, away)
            slots = self._slots_of(rows)
            self._refresh(slots[(slots >= 0) & (hot < 0)] - self.num_hot)

    def to(self, device: torch.device) -> None:
        if device != self.weight.device:
            raise StokerError(
                "rows behind a cache remain on the device that they were placed for; build the model on the new one."
            )

    def close(self) -> None:
        """Write back all changed rows, end threads and close files."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.forget()
            with ExitStack() as last:
                last.callback(self.home.close)
                last.callback(self._link.close, drain=self._broken is None)  # no writeback may run into the store's end
                if self._broken is None:
                    self.flush()


class Queue:
    """The upcoming batches of one stage, in order.

    Several queues may be open over one storage. The residency knows the batches of the queue that was opened last;
    batches of the others also get slots, but with less knowledge of the next uses. When a queue is closed, the one
    before it takes its place.
    """

    def __init__(self, storage: SlottedRows) -> None:
        self._storage = storage
        self._waiting: deque[_Request] = deque()
        self.guesses = False  # whether the last plan was a guess (:attr:`Residency.guesses`), so that more ids help
        self.bytes = 0.0  # of the waiting batches
        with storage._lock:
            storage.residency.cancel()
            storage._queues.append(self)

    @property
    def is_followed(self) -> bool:
        """Whether the residency knows the batches of this queue."""
        return bool(self._storage._queues) and self._storage._queues[-1] is self

    @spanned("plan")
    def announce(
        self, bags: Bags, space: AddressSpace | None = None, upcoming: Hints | None = None,
        wanted: Distinct | None = None,
    ) -> None:  # fmt: skip
        """Append a batch: its lookups in ``space`` (None: the storage's own). :meth:`stage` takes them in order.

        ``upcoming`` [U]: see :meth:`Residency.announce`; ``wanted``: the :meth:`SlottedRows.distinct` rows, if known.
        """
        storage, begin = self._storage, time.perf_counter()
        space = space or storage.space
        wanted = wanted or storage.distinct(bags, space)
        with storage._lock:
            self._waiting.append(_Request(bags, space, wanted, upcoming))
            self.bytes += storage.residency.batch_bytes(len(wanted.rows), wanted.which.numel())
            self._tell()
            storage.stats.plan_seconds += time.perf_counter() - begin

    def _tell(self) -> bool:
        """Announce new batches to the residency; return True if it follows this queue."""
        if not self.is_followed:
            return False
        residency = self._storage.residency
        for request in islice(self._waiting, residency.announced, None):
            residency.announce(request.wanted.rows, request.upcoming)
        return True

    def stage(self) -> Lease | None:
        """Make the first batch resident; return None if rows in flight leave too few slots now."""
        storage, begin = self._storage, time.perf_counter()
        with storage._lock:
            try:
                with span("plan"):
                    storage._release_returned()
                    request, residency = self._waiting[0], storage.residency
                    plan = residency.plan() if self._tell() else residency.plan_now(request.wanted.rows)
                storage.stats.plan_seconds += time.perf_counter() - begin
                if plan is None:
                    return None
                self.guesses = self.is_followed and residency.guesses and storage.num_slots < storage.num_rows
                self._drop_first()
                # The lookup will bring offsets and weights.
                lease = storage._carry_out(plan, Bags(request.bags.ids), request.space, request.wanted)
            except KeyboardInterrupt as error:  # of a plan whose rows have not moved
                storage._broken = error
                raise
            lease.staged = True
            return lease

    def skip(self) -> None:
        """Drop the first batch: it does not fit while others are in flight, and will be fetched on demand."""
        with self._storage._lock:
            if self._tell():
                self._storage.residency.skip()
            self._drop_first()

    def _drop_first(self) -> None:
        wanted = self._waiting.popleft().wanted
        self.bytes -= self._storage.residency.batch_bytes(len(wanted.rows), wanted.which.numel())

    def close(self) -> None:
        """Drop the waiting batches. Further calls do nothing."""
        storage = self._storage
        with storage._lock:
            if self not in storage._queues:
                return
            if self.is_followed:
                storage.residency.cancel()
            storage._queues.remove(self)
            self._waiting.clear()


def make_residency(
    first_row: Sequence[int] | Ints, slots: int, *, transient: bool = False, fast: bool | None = None
) -> Residency | ShardedResidency:
    """Return the fastest residency that is installed; ``fast``: True for Numba, False for plain Python."""
    first_row = np.ascontiguousarray(first_row, np.int64)
    if not (importlib.util.find_spec("numba") is not None if fast is None else fast):
        return Residency(first_row, slots, transient=transient)
    from stoker.tables.slots.fast_residency import FastResidency

    shards = count_shards(slots, int(first_row[-1]))
    if shards == 1:
        return FastResidency(first_row, slots, transient=transient)
    return ShardedResidency(first_row, slots, transient=transient, shards=shards)


def make_slotted(
    strategy: Slotted, tables: Sequence[TableConfig], space: AddressSpace, seed: int, state: dict[str, str],
    device: torch.device, part: tuple[int, int] = (0, 1),
) -> SlottedRows:  # fmt: skip
    """Return the storage of a group under ``strategy``; ``seed`` and ``part`` are those of :meth:`Initial.of`."""
    initial = Initial.of(tables, seed, part)
    gpu = device.type == "cuda"
    home = make_home(strategy, initial, state, gpu=gpu)
    made = SlottedRows(
        home,
        space,
        slots=strategy.count_slots(space.num_rows, home.row_bytes),
        device=device,
        hot=strategy.count_hot(tables),
        transient=isinstance(strategy, HostPipelined | HotCold),
        link=CudaLink if gpu else QueuedLink if home.is_blocking else DirectLink,
    )
    made.window = None if strategy.window is None else int(strategy.window)
    return made
