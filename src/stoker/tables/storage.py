"""Where rows are. A storage holds the weights and optimizer state of one group and knows nothing of features.

Contract (tests/tables/test_storage_contract.py): rows read back as written; weight and state travel together; the
canonical numbering of rows (that of the group's address space) is all that files and other ranks ever see.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.device import device_memory
from stoker.base.errors import ConfigError
from stoker.base.units import format_size
from stoker.ops import AddressSpace, Bags, Rounding
from stoker.tables.lookups import version_of

__all__ = ["DeviceRows", "Lease", "Rows", "Staged", "Storage", "allocate", "row_bytes", "shapes_of"]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A tensor of zeros for rows; on the CPU from NumPy, which asks the kernel for huge pages.

    Random row access is bound by address translation; with 4 KiB pages nearly every row costs a page walk.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.zeros(shape, np.uint16)).view(dtype)
    return torch.from_numpy(np.zeros(shape, np.float32))


def shapes_of(state: Mapping[str, str], count: int, dim: int) -> dict[str, tuple[int, ...]]:
    """The shape of each state tensor of ``count`` rows; ``state`` names what is "row" ([n, D]) or "scalar" ([n])."""
    return {name: (count, dim) if kind == "row" else (count,) for name, kind in state.items()}


def row_bytes(dim: int, dtype: torch.dtype, state: Mapping[str, str]) -> int:
    """Bytes of a row with its optimizer state."""
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
        """``count`` rows by ``make(shape, dtype)``; ``state`` as for :func:`shapes_of`."""
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
    """The right to work on a batch's rows: its lookups as the kernels take them, and the promise that rows stay.

    A lease that nobody works under can be revoked when its slots are needed: whoever holds it acquires the rows again.
    So work goes between :meth:`begin` and :meth:`end`, and ``begin`` says whether the rows are still there.

    Args:
        bags: lookups in ``space``.
        space: the address space of the rows in place (the group's own, or its slots).
        tables, rows: what is in each slot, for the random bits of bfloat16; None where addresses are rows.
        give_back: called once with ``token`` and whether the rows were changed; None where no row ever leaves.
        token: kept alive for the storage.
        ticket: stands for rows that may still be in flight; None where they have arrived.
    """

    __slots__ = (
        "__weakref__", "_give_back", "_lock", "_workers", "bags", "ids", "over", "rows", "space", "staged",
        "tables", "ticket", "token",
    )  # fmt: skip

    def __init__(
        self, bags: Bags, space: AddressSpace, *, tables: Tensor | None = None, rows: Tensor | None = None,
        give_back: Callable[[Any, bool], None] | None = None, token: Any = None, ticket: Any = None,
    ) -> None:  # fmt: skip
        self.bags, self.space, self.tables, self.rows = bags, space, tables, rows
        self._give_back, self.token, self.ticket = give_back, token, ticket
        self.ids: Tensor | None = None  # a copy of those whose rows these are, where the caller's may change unnoticed
        self._lock = None if give_back is None else threading.Lock()
        self._workers = 0
        self.staged = False  # for a batch that is not handed out yet
        self.over = False  # whether the rows may have left: the lease must not be used any more

    def use(self, bags: Bags) -> None:
        """Look up with the offsets and weights of ``bags``, whose ids are those that the lease was made for."""
        self.bags = bags if self._lock is None else replace(bags, ids=self.bags.ids)

    def serves(self, ids: Tensor) -> bool:
        """Whether the rows are those of ``ids``, which NumPy can change without a trace."""
        own = self.ids  # another thread may revoke the lease meanwhile
        return own is None or torch.equal(ids.reshape(-1), own.reshape(-1))

    @property
    def can_end(self) -> bool:
        """Whether rows may leave, so that it matters whose they are."""
        return self._lock is not None

    def rounding(self, keys: tuple[int, ...]) -> Rounding:
        """Keys of the random bits with what they need to know of the slots."""
        return Rounding(keys, self.tables, self.rows)

    def begin(self) -> bool:
        """Keep the rows in place until :meth:`end`; False if they may have left."""
        if self._lock is None:
            return True
        with self._lock:
            if self.over:
                return False
            self._workers += 1
            return True

    def end(self) -> None:
        """Work that :meth:`begin` announced is done."""
        if self._lock is not None:
            with self._lock:
                self._workers -= 1

    def revoke(self) -> bool:
        """Take the rows back; False if somebody works on them or the lease is over."""
        return self._finish(changed=False, force=False)

    def release(self, *, changed: bool) -> None:
        """The batch is done; ``changed``: its rows were updated. Further calls do nothing."""
        self._finish(changed=changed, force=True)

    def _finish(self, *, changed: bool, force: bool) -> bool:
        if self._lock is None:
            return False
        with self._lock:
            if self.over or (self._workers and not force):
                return False
            self.over = True
        give_back, token = self._give_back, self.token
        self._give_back = self.token = self.ticket = self.ids = None
        assert give_back is not None
        give_back(token, changed)
        return True

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:  # one that was never made has nothing to give back
            self.release(changed=False)


class Staged(NamedTuple):
    """A batch whose rows a stage has brought."""

    ids: Tensor  # the very tensor that was handed out
    version: int  # of its contents
    offsets: Tensor | None
    copies: tuple[Tensor, Tensor | None] | None  # ids and offsets when they were announced; None on a GPU
    leases: tuple[Lease | None, ...]

    def fits(self, ids: Tensor, offsets: Tensor | None) -> bool:
        """Whether these lookups, as checked, are still those that were announced."""
        if self.copies is None:
            return offsets is self.offsets and version_of(ids) == self.version
        known, where = self.copies
        if offsets is None or where is None:
            return offsets is where and torch.equal(ids, known)
        return torch.equal(ids, known) and torch.equal(offsets, where)


class Storage(ABC):
    """N rows, of which C slots in fast memory hold all or some."""

    weight: Tensor  # [C, D] the slots that kernels work on
    state: dict[str, Tensor]  # name -> [C, D] or [C] float32, in the same slots

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """N."""

    @abstractmethod
    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        """Make the rows of a batch resident, fetching what is not: the right to look them up and to update them.

        Raises:
            IndexError: an id is outside its table.
            TooFewSlots: the batch has more distinct rows than there are slots to give.
        """

    @abstractmethod
    def reset_state(self, state: dict[str, str]) -> None:
        """Begin anew with the optimizer state of another kind: name -> "row" ([N, D]) or "scalar" ([N])."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Rows:
        """The current rows ``start..stop`` in canonical order. May be views: copy before changing them."""

    @abstractmethod
    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Copies of the rows at the addresses ``rows`` [n], wherever they are now; none moves or counts as used."""

    @abstractmethod
    def write(self, start: int, rows: Rows) -> None:
        """Replace the rows from ``start`` on."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the fast tier to ``device``."""

    def close(self) -> None:
        """Let go of files and threads; the storage is not used afterwards."""
        return

    @property
    def slots(self) -> Rows:
        """What is in fast memory, in place."""
        return Rows(self.weight, self.state)

    @property
    def fast_bytes(self) -> int:
        """Bytes in fast memory: weights and state."""
        return sum(tensor.nbytes for tensor in self.slots.tensors)


class DeviceRows(Storage):
    """Every row on the device: C = N, slot = row, nobody leaves."""

    def __init__(
        self, num_rows: int, dim: int, dtype: torch.dtype, state: dict[str, str], device: torch.device
    ) -> None:
        try:
            made = Rows.make(num_rows, dim, dtype, state, lambda shape, dtype: allocate(shape, dtype, device))
        except (MemoryError, torch.OutOfMemoryError) as error:
            size, free = num_rows * row_bytes(dim, dtype, state), device_memory(device)[0]
            raise ConfigError(
                f"{num_rows:,} rows of {dim} columns need {format_size(size)} with their optimizer state, "
                f"which {device} does not give{f' ({format_size(free)} free)' if free else ''}. Keep a part of them "
                "there: placement=stoker.Cached(fraction=0.1), with the others in host memory or, by home='file', in a "
                "file (docs/placement.md).",
                settings=("embedding_dim", "device_memory"),
            ) from error
        self.weight, self.state = made.weight, made.state

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        return Lease(bags, space)

    def reset_state(self, state: dict[str, str]) -> None:
        shapes = shapes_of(state, *self.weight.shape).items()
        self.state = {name: allocate(shape, torch.float32, self.weight.device) for name, shape in shapes}

    def read(self, start: int, stop: int) -> Rows:
        return self.slots[start:stop]

    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        return self.slots[torch.from_numpy(rows).to(self.weight.device)]

    def write(self, start: int, rows: Rows) -> None:
        self.slots[start : start + len(rows.weight)] = rows

    def to(self, device: torch.device) -> None:
        moved = self.slots.map(lambda tensor: tensor.to(device))
        self.weight, self.state = moved.weight, moved.state
