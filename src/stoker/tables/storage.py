"""Storage of the weights and optimizer state of one group, without knowledge of features.

Contract (tests/tables/test_storage_contract.py): rows read back as written; weight and state move together; files and
other ranks see only the canonical numbers of rows, those of the group's address space.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.device import device_memory
from stoker.base.errors import ConfigError, HomeError, errors_as
from stoker.base.units import format_size
from stoker.ops import AddressSpace, Bags, Rounding
from stoker.tables.lookups import equal_ids, version_of


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a tensor of zeros for rows; on the CPU from NumPy, which asks the kernel for huge pages.

    Address translation bounds random access to rows: with 4 KiB pages nearly every row needs a page walk.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.zeros(shape, np.uint16)).view(dtype)
    return torch.from_numpy(np.zeros(shape, np.float32))


def shapes_of(state: Mapping[str, str], count: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each state tensor of ``count`` rows; ``state``: name -> "row" ([n, D]) or "scalar" ([n])."""
    return {name: (count, dim) if kind == "row" else (count,) for name, kind in state.items()}


def row_bytes(dim: int, dtype: torch.dtype, state: Mapping[str, str]) -> int:
    """Return the bytes of a row with its optimizer state."""
    return dim * dtype.itemsize + 4 * sum(math.prod(shape) for shape in shapes_of(state, 1, dim).values())


class Rows:
    """Weights [n, D] and optimizer state of some rows, moved together. An index applies to all of them."""

    __slots__ = ("state", "weight")

    def __init__(self, weight: Tensor, state: dict[str, Tensor]) -> None:
        self.weight = weight
        self.state = state

    @classmethod
    def make(
        cls, count: int, dim: int, dtype: torch.dtype, state: Mapping[str, str],
        make: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> Rows:  # fmt: skip
        """Create ``count`` rows by ``make(shape, dtype)``; ``state`` as for :func:`shapes_of`."""
        shapes = shapes_of(state, count, dim).items()
        return cls(make((count, dim), dtype), {name: make(shape, torch.float32) for name, shape in shapes})

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights, then each state."""
        return self.weight, *self.state.values()

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Apply ``change`` to the weights and each state."""
        return Rows(change(self.weight), {name: change(tensor) for name, tensor in self.state.items()})

    def __getitem__(self, index: Any) -> Rows:
        return self.map(lambda tensor: tensor[index])

    def __setitem__(self, index: Any, values: Rows) -> None:
        self.weight[index] = values.weight
        for name, tensor in self.state.items():
            tensor[index] = values.state[name]


class Lease:
    """The right to work on the rows of a batch: its lookups for the kernels, and the promise that rows remain resident.

    A lease that is not in use can be revoked when its slots are needed; its owner then acquires the rows again. So work
    goes between :meth:`begin` and :meth:`end`, and ``begin`` returns whether the rows are still resident.

    Args:
        bags: lookups in ``space``.
        space: the address space of the resident rows (the group's own, or its slots).
        tables: the table of the row in each slot, for the random bits of bfloat16; None where addresses are rows.
        rows: that row's number in its table.
        give_back: called with ``token`` and whether the rows were changed, twice if Ctrl-C interrupts the first call;
            None if no row is ever evicted.
        token: for ``give_back``.
        ticket: for rows that may still be in flight; None if they have arrived.
    """

    __slots__ = (
        "__weakref__", "_give_back", "_lock", "_workers", "bags", "ids", "over", "rows", "space", "staged",
        "tables", "ticket", "token", "touched",
    )  # fmt: skip

    def __init__(
        self, bags: Bags, space: AddressSpace, *, tables: Tensor | None = None, rows: Tensor | None = None,
        give_back: Callable[[Any, bool], None] | None = None, token: Any = None, ticket: Any = None,
    ) -> None:  # fmt: skip
        self.bags, self.space, self.tables, self.rows = bags, space, tables, rows
        self._give_back, self.token, self.ticket = give_back, token, ticket
        self.ids: Tensor | None = None  # a copy of the ids of these rows, if the caller's may change unnoticed
        self._lock = None if give_back is None else threading.Lock()
        self._workers = 0
        self.staged = False  # for a batch that is not yielded yet
        self.touched = False  # whether an update has begun: it may have been interrupted
        self.over = False  # whether the rows may have left: then the lease must not be used

    def use(self, bags: Bags) -> None:
        """Look up with the offsets and weights of ``bags``, which has the ids of this lease."""
        self.bags = bags if self._lock is None else bags._replace(ids=self.bags.ids)

    def serves(self, ids: Tensor) -> bool:
        """Return True if the rows are those of ``ids``, which NumPy can change unnoticed."""
        own = self.ids  # another thread may revoke the lease meanwhile
        return own is None or equal_ids(ids.reshape(-1), own.reshape(-1))

    @property
    def can_end(self) -> bool:
        """Whether rows may leave their slots."""
        return self._lock is not None

    def rounding(self, keys: tuple[int, ...]) -> Rounding:
        """Return the keys of the random bits, with the table and row of each slot."""
        return Rounding(keys, self.tables, self.rows)

    def begin(self) -> bool:
        """Keep the rows resident until :meth:`end`; return False if they may have left."""
        if self._lock is None:
            return True
        with self._lock:
            if self.over:
                return False
            self._workers += 1
            return True

    def end(self) -> None:
        """End the work after :meth:`begin`."""
        if self._lock is not None:
            with self._lock:
                self._workers -= 1

    def revoke(self) -> bool:
        """Take the rows back; return False if they are in use or the lease is over."""
        return self._finish(changed=False, force=False)

    def release(self, *, changed: bool) -> None:
        """End the lease; ``changed``: its rows were updated. Further calls do nothing."""
        self._finish(changed=changed, force=True)

    def _finish(self, *, changed: bool, force: bool) -> bool:
        if self._lock is None:
            return False
        with self._lock:
            if self.over or (self._workers and not force):
                return False
            give_back, what = self._give_back, (self.token, changed or self.touched)
            assert give_back is not None
            self.over = True
            try:
                give_back(*what)
            except KeyboardInterrupt:
                give_back(*what)
                raise
            self._give_back = self.token = self.ticket = self.ids = None
        return True

    def __del__(self) -> None:
        if not getattr(self, "over", True):  # a failed constructor has nothing to release
            self.release(changed=False)


def release_all(leases: Iterable[Lease | None]) -> None:
    """Release leases whose rows were not changed."""
    for lease in leases:
        if lease is not None:
            lease.release(changed=False)


class Staged(NamedTuple):
    """A batch whose rows a stage has made resident."""

    ids: Tensor  # the same tensor that was yielded
    version: int  # of its contents
    offsets: Tensor | None
    copies: tuple[Tensor, Tensor | None] | None  # ids and offsets when they were announced; None on a GPU
    leases: tuple[Lease | None, ...]
    grown: Any = None  # the step of tables that grow (:class:`stoker.tables.growing.ids.Grown`), done ahead

    def fits(self, ids: Tensor, offsets: Tensor | None) -> bool:
        """Return True if these lookups, as checked, are still those that were announced."""
        if self.copies is None:
            return offsets is self.offsets and version_of(ids) == self.version
        known, where = self.copies
        if offsets is None or where is None:
            return offsets is where and equal_ids(ids, known)
        return equal_ids(ids, known) and equal_ids(offsets, where)


class Storage(ABC):
    """N rows, all or some of them in C slots of fast memory."""

    weight: Tensor  # [C, D] the slots that kernels work on
    state: dict[str, Tensor]  # name -> [C, D] or [C] float32, in the same slots

    @property
    def reads_ids(self) -> bool:
        """Whether :meth:`acquire` reads ids on the host, so that a stage acquires before they move to a GPU."""
        return False

    @abstractmethod
    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        """Make the rows of a batch resident; return the right to look them up and to update them.

        Raises:
            IndexError: an id is outside its table.
            TooFewSlots: the batch has more distinct rows than there are free slots.
        """

    @abstractmethod
    def reset_state(self, state: dict[str, str]) -> None:
        """Replace the optimizer state by zeros of another kind: name -> "row" ([N, D]) or "scalar" ([N])."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Rows:
        """Return the current rows ``start..stop`` in canonical order. They may be views: copy before a change."""

    @abstractmethod
    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Copy the rows at the addresses ``rows`` [n] from wherever they are; none moves or counts as used."""

    @abstractmethod
    def write(self, start: int, rows: Rows) -> None:
        """Replace the rows from ``start`` on."""

    @abstractmethod
    def scatter(self, rows: npt.NDArray[np.int64], values: Rows) -> None:
        """Replace the rows at the distinct addresses ``rows`` [n], ascending."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the fast tier to ``device``."""

    def check_process(self) -> None:
        """Raise an error in a fork that would share the rows."""
        return

    def close(self) -> None:
        """Close files and end threads; the storage cannot be used afterwards."""
        return

    @property
    def slots(self) -> Rows:
        """The slots in fast memory."""
        return Rows(self.weight, self.state)

    @property
    def fast_bytes(self) -> int:
        """Bytes of weights and state in fast memory."""
        return sum(tensor.nbytes for tensor in self.slots.tensors)


class ProcessLock:
    """A lock of the process that made it. A fork is refused: it has the files of the rows, but not the threads."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.RLock(), os.getpid()

    def check(self) -> None:
        """Raise an error in a fork."""
        if os.getpid() != self._owner:
            raise ConfigError(
                f"these tables were made in process {self._owner}, of which this is a fork: it has their files, but "
                "not their threads. Look rows up in that process (workers of a DataLoader return ids), or make the "
                "tables in this one."
            )

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock, for ``with``: Ctrl-C within methods of our own that lock and unlock would leave it locked."""
        self.check()
        return self._lock


class DeviceRows(Storage):
    """Every row on the device: C = N, slot = row, no row is evicted."""

    labels: tuple[Tensor | None, Tensor | None] = (None, None)  # table and row of each address, if they are not its own

    def __init__(
        self, num_rows: int, dim: int, dtype: torch.dtype, state: dict[str, str], device: torch.device
    ) -> None:
        try:
            made = Rows.make(num_rows, dim, dtype, state, lambda shape, dtype: self._allocate(shape, dtype, device))
        except (MemoryError, torch.OutOfMemoryError) as error:
            size, free = num_rows * row_bytes(dim, dtype, state), device_memory(device)[0]
            raise ConfigError(
                f"{num_rows:,} rows of {dim} columns need {format_size(size)} with their optimizer state, "
                f"which {device} does not give{f' ({format_size(free)} free)' if free else ''}. Keep some of them "
                "there: placement=stoker.Cached(fraction=0.1), with the others in host memory or, by home='file', in a "
                "file (docs/placement.md).",
                settings=("embedding_dim", "device_memory"),
            ) from error
        self.weight, self.state = made.weight, made.state

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return allocate(shape, dtype, device)

    @property
    def num_rows(self) -> int:
        """N."""
        return self.weight.shape[0]

    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        tables, rows = self.labels
        return Lease(bags, space, tables=tables, rows=rows)

    def reset_state(self, state: dict[str, str]) -> None:
        shapes = shapes_of(state, *self.weight.shape).items()
        self.state = {name: self._allocate(shape, torch.float32, self.weight.device) for name, shape in shapes}

    def read(self, start: int, stop: int) -> Rows:
        return self.slots[start:stop]

    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        return self.slots[torch.from_numpy(rows).to(self.weight.device)]

    def write(self, start: int, rows: Rows) -> None:
        self.slots[start : start + len(rows.weight)] = rows

    def scatter(self, rows: npt.NDArray[np.int64], values: Rows) -> None:
        device = self.weight.device
        self.slots[torch.from_numpy(rows).to(device)] = values.map(lambda tensor: tensor.to(device))

    def to(self, device: torch.device) -> None:
        moved = self.slots.map(lambda tensor: tensor.to(device))
        self.weight, self.state = moved.weight, moved.state


class MappedRows(DeviceRows):
    """Every row in files that are mapped into memory: the page cache of the system has them, and takes pages back.

    The files have no name, so no other program can change or shorten them, and they are deleted with the process.
    """

    def __init__(
        self, num_rows: int, dim: int, dtype: torch.dtype, state: dict[str, str], device: torch.device,
        folder: str | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._process = folder or tempfile.gettempdir(), ProcessLock()
        self.to(device)
        super().__init__(num_rows, dim, dtype, state, device)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        what = f"a file of {format_size(size)} for rows cannot be made in {self._folder}"
        remedy = "Name a directory on a disk with room for all rows, or choose stoker.Cached(home='file')."
        with errors_as(HomeError, what, remedy):
            os.makedirs(self._folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                if hasattr(os, "posix_fallocate"):  # writing to a map of a full disk would kill the process
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
        if hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)  # a missing page brings no others
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def check_process(self) -> None:
        self._process.check()

    def to(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"stoker.Mapped is for training on a CPU, not on {device}. Take stoker.Cached(memory=..., home='file')."
            )
