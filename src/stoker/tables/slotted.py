"""N rows at home, C slots in fast memory: the storage behind ``Cached`` and ``HostPipelined``.

Legend: N rows at home, C slots, U distinct rows of a batch.
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

from stoker.device import available_memory
from stoker.errors import ConfigError, StokerError
from stoker.ops import AddressSpace, Bags
from stoker.ops.distinct import distinct_rows
from stoker.ops.space import slot_space
from stoker.tables.config import HostPipelined, Slotted, TableConfig
from stoker.tables.cuda_link import CudaLink
from stoker.tables.file_home import FileHome
from stoker.tables.home import Home, Initial, MemoryHome
from stoker.tables.lease import Lease
from stoker.tables.residency import Ints, SlotPlan, make_residency
from stoker.tables.storage import Rows, Storage, allocate
from stoker.tables.transfer import DirectLink, Link, QueuedLink, TransferStats
from stoker.timeline import span, spanned

__all__ = ["SlottedRows", "TooFewSlots", "make_slotted"]

_STORED = 2**20  # rows written home together when all changed ones are


class TooFewSlots(StokerError):
    """A batch needs more rows at once than there are slots to give."""

    def __init__(self, needed: int, slots: int) -> None:
        super().__init__(
            f"a batch needs {needed:,} distinct rows in fast memory at once, but {slots:,} slots are there. "
            "Give more memory (--device-memory), make the batch smaller, or choose spill='parts'."
        )
        self.needed, self.slots = needed, slots


@dataclass(frozen=True, slots=True)
class _Request:
    """An announced batch."""

    bags: Bags
    rows: Ints  # [U]
    which: Tensor  # the distinct row of each id, int32


class SlottedRows(Storage):
    """Rows at home, some of them in slots.

    Threads may call it: plans are made and carried out one at a time, releases wait for nobody.

    Args:
        home: all rows.
        space: of the group's tables.
        slots: C.
        device: where the slots lie.
        pinned: [T] rows of each table that never leave once they came.
        transient: every row leaves after its last use in flight.
        link: makes what carries out plans; None means the fastest for ``device`` and ``home``.
        fast: plan with Numba or in plain Python; None means what is installed.
    """

    def __init__(
        self,
        home: Home,
        space: AddressSpace,
        *,
        slots: int,
        device: torch.device,
        pinned: Sequence[int] = (),
        transient: bool = False,
        link: Callable[[Home, Rows, TransferStats], Link] | None = None,
        fast: bool | None = None,
    ) -> None:
        self.home, self.space = home, space
        self.num_slots = slots = max(1, min(slots, space.num_rows))
        self.weight = allocate((slots, home.dim), home.dtype, device, fill=None)
        self.state = {
            name: allocate((slots, home.dim) if kind == "row" else (slots,), torch.float32, device, fill=None)
            for name, kind in home.state.items()
        }
        self.residency = make_residency(space.first_row, slots, pinned=pinned, transient=transient, fast=fast)
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
        self._link = (link or DirectLink)(home, Rows(self.weight, self.state), self.stats)

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
            rows, which = distinct_rows(_on_cpu(bags), self.space)
        with self._lock:
            with span("plan"):
                self._enter_returned()
                plan = self.residency.plan_now(rows)
            while plan is None and self._ahead:
                # Staging is an optimisation: its rows give way, and come again when they are wanted.
                self._ahead.popitem()[0].release(changed=False)
                self._enter_returned()
                plan = self.residency.plan_now(rows)
            if plan is None:
                raise TooFewSlots(len(rows), self.residency.free)
            self.stats.plan_seconds += time.perf_counter() - begin
            lease, ticket = self._carry_out(plan, bags, which)
            self._link.ready(ticket)
            self.stats.stall_seconds += time.perf_counter() - begin
            return lease

    @spanned("plan")
    def announce(self, bags: Bags) -> None:
        """A further batch of the window; :meth:`stage` takes them in this order."""
        begin = time.perf_counter()
        rows, which = distinct_rows(_on_cpu(bags), self.space)
        with self._lock:
            self.residency.announce(rows)
            self._requests.append(_Request(bags, rows, which))
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
            lease, ticket = self._carry_out(plan, request.bags, request.which)
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
    def _carry_out(self, plan: SlotPlan, bags: Bags, which: Tensor) -> tuple[Lease, Any]:
        """The lease of a batch, and the link's ticket for what it needs."""
        link = self._link
        try:
            link.run(plan)
            if self._table_in_slot is not None and self._row_in_slot is not None and len(plan.fetch_rows):
                table = np.searchsorted(self.space.first_row, plan.fetch_rows, side="right") - 1
                local = plan.fetch_rows - self.space.first_row[table]
                link.label([(self._table_in_slot, table), (self._row_in_slot, local)], plan.fetch_slots)
            ids = link.send(torch.from_numpy(plan.slots.astype(np.int32)[which.numpy()]))
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

    def _take_back(self, slots: Ints, changed: bool) -> None:
        self._returned.append((slots, changed, self._link.mark()))

    def reset_state(self, state: dict[str, str]) -> None:
        raise StokerError(
            "the optimizer of rows behind a cache cannot be exchanged for one of another kind; "
            "build the model with it, or place the tables on the device first."
        )

    def flush(self) -> None:
        """Bring home every changed row; they stay in their slots."""
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
            return self.home.read(start, stop)

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
        unique, which = np.unique(rows, return_inverse=True)
        slots = np.full(len(unique), -1, np.int64)
        if len(unique):
            held = self.residency.row_in_slot
            at = np.minimum(np.searchsorted(unique, held), len(unique) - 1)
            found = np.flatnonzero(unique[at] == held)
            slots[at[found]] = found
        return slots[which]

    def write(self, start: int, rows: Rows) -> None:
        with self._lock:
            self.flush()
            self.home.write(start, rows)
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
    """
    initial = Initial.of(tables, seed)
    gpu = device.type == "cuda"
    if strategy.home == "file":
        home: Home = FileHome(initial, state, directory=strategy.path, direct=strategy.direct)
    elif strategy.pin is None:
        home = _maybe_pinned(initial, state) if gpu else MemoryHome(initial, state)
    else:
        home = MemoryHome(initial, state, pin=strategy.pin)
    return SlottedRows(
        home,
        space,
        slots=strategy.count_slots(space.num_rows, home.row_bytes),
        device=device,
        transient=isinstance(strategy, HostPipelined),
        link=CudaLink if gpu else QueuedLink if strategy.home == "file" else DirectLink,
    )


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
