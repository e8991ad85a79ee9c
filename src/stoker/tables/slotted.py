"""N rows at home, C slots in fast memory: the storage behind ``Cached``, ``HotCold`` and ``HostPipelined``.

The first slots belong to hot rows, each to one for ever: their slot is found by an addition, no plan knows of them, and
they have no other copy. The others, in transit, are given and taken by plans.

Legend: N rows at home, C slots, H of them for hot rows, U distinct rows of a batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.device import available_memory, total_memory
from stoker.errors import ConfigError, StokerError
from stoker.ops import AddressSpace, Bags
from stoker.ops.distinct import Distinct, split_rows
from stoker.ops.fixed_rows import FixedRows
from stoker.ops.space import slot_space
from stoker.tables.config import HostPipelined, HotCold, Slotted, TableConfig
from stoker.tables.cuda_link import CudaLink
from stoker.tables.file_home import FileHome
from stoker.tables.home import Home, Initial, MemoryHome
from stoker.tables.lease import Lease
from stoker.tables.log_home import LogHome, index_bytes
from stoker.tables.residency import Hints, Ints, SlotPlan, make_residency
from stoker.tables.storage import Rows, Storage, allocate
from stoker.tables.transfer import DirectLink, Link, QueuedLink, TransferStats
from stoker.timeline import span, spanned

__all__ = ["SlottedRows", "TooFewSlots", "appends", "make_slotted"]

_STORED = 2**20  # rows written home together when all changed ones are
_INDEX_SHARE = 64  # a log's index takes at most so small a part of the machine's memory, unless it was asked for


class TooFewSlots(StokerError):
    """A batch needs more rows at once than there are slots to give."""

    def __init__(self, needed: int, slots: int, hot: int = 0) -> None:
        beside = f" beside the {hot:,} hot rows" if hot else ""
        fewer = ", make fewer rows hot" if hot else ""
        super().__init__(
            f"a batch needs {needed:,} distinct rows in fast memory at once{beside}, but {slots:,} slots are there for "
            f"them. Give more memory (--device-memory){fewer}, make the batch smaller, or choose spill='parts'."
        )
        self.needed, self.slots = needed, slots


@dataclass(frozen=True, slots=True)
class _Request:
    """An announced batch."""

    bags: Bags
    wanted: Distinct


class SlottedRows(Storage):
    """Rows at home, some of them in slots.

    Threads may call it: plans are made and carried out one at a time, releases wait for nobody.

    Args:
        home: all rows.
        space: of the group's tables.
        slots: C.
        device: where the slots lie.
        hot: [T] rows of each table that stay in slots of their own; () means none.
        transient: every other row leaves after its last use in flight.
        link: makes what carries out plans; None means the fastest for ``device`` and ``home``.
        fast: plan with Numba or in plain Python; None means what is installed.

    Raises:
        ConfigError: hot rows take every slot, and other rows are left.
    """

    def __init__(
        self,
        home: Home,
        space: AddressSpace,
        *,
        slots: int,
        device: torch.device,
        hot: Sequence[int] = (),
        transient: bool = False,
        link: Callable[[Home, Rows, TransferStats], Link] | None = None,
        fast: bool | None = None,
    ) -> None:
        self.home, self.space = home, space
        self.num_slots = slots = max(1, min(slots, space.num_rows))
        self.hot = FixedRows(space, hot)
        self.num_hot = held = len(self.hot)
        if held > slots or held == slots < space.num_rows:
            raise ConfigError(
                f"{held:,} hot rows leave none of {slots:,} slots for the other rows of a batch, in transit. Give more "
                "memory (slots=, fraction= or memory= count hot rows and transit together), or make fewer rows hot."
            )
        self.weight = allocate((slots, home.dim), home.dtype, device, fill=None)
        self.state = {
            name: allocate((slots, home.dim) if kind == "row" else (slots,), torch.float32, device, fill=None)
            for name, kind in home.state.items()
        }
        # Slots in transit, as plans and links know them: counted from 0 behind the hot ones.
        self.transit = Rows(self.weight[held:], {name: tensor[held:] for name, tensor in self.state.items()})
        self.residency = make_residency(space.first_row, slots - held, transient=transient, fast=fast)
        self.stats = TransferStats()
        self._slot_space = slot_space(space, slots)
        self._lock = threading.RLock()
        self._broken: BaseException | None = None
        self._returned: deque[tuple[Ints, bool, Any]] = deque()  # slots given back, not yet entered, and their mark
        self._requests: deque[_Request] = deque()
        self._ahead: dict[Lease, Any] = {}  # staged and not yet handed out, with their tickets, in order
        rounded = home.dtype == torch.bfloat16
        self._table_in_slot = torch.zeros(slots, dtype=torch.int64, device=device) if rounded else None
        self._row_in_slot = torch.zeros(slots, dtype=torch.int64, device=device) if rounded else None
        self._labels = [labels for labels in (self._table_in_slot, self._row_in_slot) if labels is not None]
        self._fill_hot()
        self._link = (link or DirectLink)(home, self.transit, self.stats)

    def _fill_hot(self) -> None:
        """Bring the hot rows into their slots."""
        addresses = self.hot.addresses()
        for begin in range(0, self.num_hot, _STORED):
            rows = addresses[begin : begin + _STORED]
            self.home.fetch(rows, _part(Rows(self.weight, self.state), begin, begin + len(rows)))
            for labels, values in zip(self._labels, self._names(rows), strict=False):
                labels[begin : begin + len(rows)] = torch.from_numpy(values)

    def _names(self, addresses: Ints) -> tuple[Ints, Ints]:
        """Table and row within it of each of the addresses [n]."""
        table = np.searchsorted(self.space.first_row, addresses, side="right") - 1
        return table, addresses - self.space.first_row[table]

    @property
    def num_rows(self) -> int:
        return self.space.num_rows

    @property
    def available(self) -> int:
        """Slots that a batch could have now."""
        with self._lock:
            self._enter_returned()
            return self.residency.free

    @spanned("stall")
    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        begin = time.perf_counter()
        with span("plan"):
            wanted = self.distinct(bags)
        with self._lock:
            with span("plan"):
                self._enter_returned()
                plan = self.residency.plan_now(wanted.rows)
            while plan is None and self._ahead:
                # Staging is an optimisation: its rows give way, and come again when they are wanted.
                self._ahead.popitem()[0].release(changed=False)
                self._enter_returned()
                plan = self.residency.plan_now(wanted.rows)
            if plan is None:
                raise TooFewSlots(len(wanted.rows), self.residency.free, self.num_hot)
            self.stats.plan_seconds += time.perf_counter() - begin
            lease, ticket = self._carry_out(plan, bags, wanted)
            self._link.ready(ticket)
            self.stats.stall_seconds += time.perf_counter() - begin
            return lease

    def distinct(self, bags: Bags) -> Distinct:
        """The distinct rows that are not hot, in an order that is the same for the same bags."""
        return split_rows(_on_cpu(bags), self.space, self.hot)

    @spanned("plan")
    def announce(self, bags: Bags, upcoming: Hints | None = None) -> None:
        """A further batch of the window; :meth:`stage` takes them in this order.

        Args:
            bags: its lookups.
            upcoming: [U] batches until the next uses of its :meth:`distinct` rows, see :meth:`Residency.announce`.
        """
        begin = time.perf_counter()
        wanted = self.distinct(bags)
        with self._lock:
            self.residency.announce(wanted.rows, upcoming)
            self._requests.append(_Request(bags, wanted))
            self.stats.plan_seconds += time.perf_counter() - begin

    def stage(self) -> Lease | None:
        """Make the batch announced first resident; None if rows in flight leave too few slots for now."""
        begin = time.perf_counter()
        with self._lock:
            with span("plan"):
                self._enter_returned()
                plan = self.residency.plan()
            self.stats.plan_seconds += time.perf_counter() - begin
            if plan is None:
                return None
            request = self._requests.popleft()
            lease, ticket = self._carry_out(plan, request.bags, request.wanted)
            self._ahead[lease] = ticket
            return lease

    def skip(self) -> None:
        """Leave the batch announced first to :meth:`acquire`: it does not fit while others are in flight."""
        with self._lock:
            self.residency.skip()
            self._requests.popleft()

    def hand_out(self, lease: Lease) -> None:
        """The batch of a staged lease is about to be used."""
        # Without the lock: a batch whose rows are in place must not wait while those of later ones are brought.
        ticket = self._ahead.pop(lease, lease)
        if ticket is not lease:
            self._link.ready(ticket)
            return
        with self._lock:
            return  # another batch took its slots, and may be about to end the lease; now it has

    def forget(self) -> None:
        """Drop every batch announced or staged and not handed out."""
        with self._lock:
            while self._ahead:
                self._ahead.popitem()[0].release(changed=False)
            self.residency.cancel()
            self._requests.clear()
            if self._broken is None:
                self._enter_returned()

    def _enter_returned(self) -> None:
        """Let the residency know which slots were given back.

        Raises:
            StokerError: rows could not be moved earlier.
        """
        if self._broken is not None:
            raise StokerError(
                f"rows could not be moved earlier ({self._broken}), so these tables no longer hold a whole state. "
                "Remove the cause and resume from the last checkpoint."
            ) from self._broken
        while self._returned:
            slots, changed, mark = self._returned.popleft()
            self.residency.release(slots, changed=changed)
            self._link.released(mark)

    @spanned("plan")
    def _carry_out(self, plan: SlotPlan, bags: Bags, wanted: Distinct) -> tuple[Lease, Any]:
        """The lease of a batch, and the link's ticket for what it needs."""
        link = self._link
        try:
            link.run(plan)
            self.stats.rows += wanted.placed
            self.stats.hits += wanted.placed
            if self._labels and len(plan.fetch_rows):
                labels = [each[self.num_hot :] for each in self._labels]
                link.label(list(zip(labels, self._names(plan.fetch_rows), strict=True)), plan.fetch_slots)
            ids = link.send(self._slots(plan, wanted))
            offsets = None if bags.offsets is None else link.send(bags.offsets)
            weights = None if bags.weights is None else link.send(bags.weights)
            ticket = link.ticket()
        except BaseException as error:
            # The rows of this plan may not be in their slots: nothing may be computed from them, or written home.
            self._broken = error
            raise
        lease = Lease(
            Bags(ids, offsets, weights, bags.mean),
            self._slot_space,
            tables=self._table_in_slot,
            rows=self._row_in_slot,
            give_back=self._take_back,
            token=plan.slots,
        )
        return lease, ticket

    def _slots(self, plan: SlotPlan, wanted: Distinct) -> Tensor:
        """The slot of each id, int32."""
        which = wanted.which.numpy()
        if not len(plan.slots):
            return torch.from_numpy(np.invert(which))  # -1 - place
        slots = (plan.slots + self.num_hot).astype(np.int32)
        if not wanted.placed:
            return torch.from_numpy(slots.take(which))
        return torch.from_numpy(np.where(which < 0, np.invert(which), slots.take(which, mode="clip")))

    def _take_back(self, slots: Ints, changed: bool) -> None:
        self._returned.append((slots, changed, self._link.mark()))

    def reset_state(self, state: dict[str, str]) -> None:
        raise StokerError(
            "the optimizer of rows behind a cache cannot be exchanged for one of another kind; "
            "build the model with it, or place the tables on the device first."
        )

    def flush(self) -> None:
        """Bring home every changed row that is not hot; they stay in their slots."""
        with self._lock:
            self._enter_returned()
            self._link.drain()
            slots = self.residency.take_changed()
            for begin in range(0, len(slots), _STORED):  # sorting takes memory
                some = slots[begin : begin + _STORED]
                try:
                    self._link.store(self.residency.row_in_slot[some], some)
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
                part = _part(found, begin - start, end - start)
                if slot < 0:
                    self.home.fetch(np.arange(begin, end), part)
                else:
                    _copy(part, _part(Rows(self.weight, self.state), slot, slot + end - begin))
            return found

    def gather(self, rows: Ints) -> Rows:
        with self._lock:
            self._enter_returned()
            self._link.ready()
            slots = self._slots_of(rows)
            away = np.flatnonzero(slots < 0)
            at = torch.from_numpy(np.maximum(slots, 0)).to(self.weight.device)
            found = Rows(self.weight[at], {name: tensor[at] for name, tensor in self.state.items()})
            self._link.released(self._link.mark())  # nothing may come into those slots before they are read
            if len(away):
                self._link.drain()
                self.home.fetch(rows[away], found, away)
            return found

    def _slots_of(self, rows: Ints) -> Ints:
        """The slot of each of the addresses ``rows`` [n]; -1 where it lies in none."""
        own = self.hot.places(rows)
        unique, which = np.unique(rows, return_inverse=True)
        slots = np.full(len(unique), -1, np.int64)
        if len(unique):
            held = self.residency.row_in_slot
            at = np.minimum(np.searchsorted(unique, held), len(unique) - 1)
            found = np.flatnonzero(unique[at] == held)
            slots[at[found]] = found + self.num_hot
        return np.where(own >= 0, own, slots[which])

    def write(self, start: int, rows: Rows) -> None:
        with self._lock:
            self.flush()
            self._link.finish()
            for begin, end, slot in self.hot.runs(start, start + len(rows.weight)):
                part = _part(rows, begin - start, end - start)
                if slot < 0:
                    self.home.write(begin, part)
                else:
                    _copy(_part(Rows(self.weight, self.state), slot, slot + end - begin), part)
            slots = self.residency.resident(start, start + len(rows.weight))
            if len(slots):
                self._link.released(self._link.mark())  # also those under a lease: as if all were done at once
                self._link.fetch(self.residency.row_in_slot[slots], slots)
                self._link.ready()

    def to(self, device: torch.device) -> None:
        if device != self.weight.device:
            raise StokerError(
                "rows placed behind a cache stay on the device they were placed for; build the model on the new one."
            )

    def close(self) -> None:
        """Write everything home and let go of threads and files."""
        with self._lock:
            self.forget()
            try:
                if self._broken is None:
                    self.flush()
                    self._link.close()
            finally:
                self.home.close()


def _on_cpu(bags: Bags) -> Bags:
    """The ids and offsets where plans are made."""
    if bags.ids.device.type == "cpu":
        return bags
    return Bags(bags.ids.cpu(), None if bags.offsets is None else bags.offsets.cpu(), None, bags.mean)


def _part(rows: Rows, start: int, stop: int) -> Rows:
    return Rows(rows.weight[start:stop], {name: tensor[start:stop] for name, tensor in rows.state.items()})


def _copy(target: Rows, source: Rows) -> None:
    target.weight.copy_(source.weight.detach())
    for name, tensor in target.state.items():
        tensor.copy_(source.state[name].detach())


def make_slotted(
    strategy: Slotted,
    tables: Sequence[TableConfig],
    space: AddressSpace,
    seed: int,
    state: dict[str, str],
    device: torch.device,
) -> SlottedRows:
    """The storage of a group under ``strategy``.

    Args:
        seed: of the initial rows.
        state: optimizer state, name -> "row" or "scalar".

    Raises:
        ConfigError: hot rows that a table does not have, or that leave no slot for others.
    """
    initial = Initial.of(tables, seed)
    gpu = device.type == "cuda"
    if strategy.home == "file":
        make = LogHome if appends(strategy, initial.num_rows) else FileHome
        home: Home = make(initial, state, directory=strategy.path, direct=strategy.direct)
    elif strategy.pin is None:
        home = _maybe_pinned(initial, state) if gpu else MemoryHome(initial, state)
    else:
        home = MemoryHome(initial, state, pin=strategy.pin)
    return SlottedRows(
        home,
        space,
        slots=strategy.count_slots(space.num_rows, home.row_bytes),
        device=device,
        hot=strategy.count_hot(tables) if isinstance(strategy, HotCold) else (),
        transient=isinstance(strategy, HostPipelined | HotCold),
        link=CudaLink if gpu else QueuedLink if strategy.home == "file" else DirectLink,
    )


def appends(strategy: Slotted, num_rows: int) -> bool:
    """Whether the home of N rows is a file that is appended to (:class:`stoker.tables.log_home.LogHome`)."""
    if strategy.home != "file":
        return False
    if strategy.writes is None:
        return index_bytes(num_rows) <= (total_memory() or 0) // _INDEX_SHARE
    return strategy.writes == "append"


def _maybe_pinned(initial: Initial, state: dict[str, str]) -> MemoryHome:
    """A home behind a GPU: page-locked where memory is plentiful and the system agrees."""
    home = MemoryHome(initial, state)  # takes no memory yet
    if home.num_rows * home.row_bytes > (available_memory() or 0) // 2:
        return home
    home.close()
    try:
        return MemoryHome(initial, state, pin=True)
    except ConfigError:
        return MemoryHome(initial, state)
