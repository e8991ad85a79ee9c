"""Where rows lie. A storage holds the weights and optimizer state of one group and knows nothing of features.

Contract (tests/tables/test_storage_contract.py): rows read back as written; weight and state travel together; the
canonical numbering of rows (that of the group's address space) is all that files and other ranks ever see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.device import device_memory
from stoker.base.errors import ConfigError
from stoker.base.units import format_size
from stoker.ops import AddressSpace, Bags
from stoker.tables.lease import Lease

__all__ = ["DeviceRows", "Rows", "Storage", "allocate"]

_NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16}


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, fill: float | None) -> Tensor:
    """A tensor for rows; on the CPU from NumPy, which asks the kernel for huge pages.

    Random row access is bound by address translation; with 4 KiB pages nearly every row costs a page walk.
    """
    if device.type != "cpu":
        return (
            torch.empty(shape, dtype=dtype, device=device)
            if fill is None
            else torch.full(shape, fill, dtype=dtype, device=device)
        )
    array = np.empty(shape, dtype=_NUMPY[dtype]) if fill else np.zeros(shape, dtype=_NUMPY[dtype])
    tensor = torch.from_numpy(array)
    tensor = tensor.view(dtype) if tensor.dtype != dtype else tensor
    if fill:
        tensor.fill_(fill)
    return tensor


class Rows:
    """Weights [n, D] and optimizer state of some rows, moved together."""

    __slots__ = ("state", "weight")

    def __init__(self, weight: Tensor, state: dict[str, Tensor]) -> None:
        self.weight = weight
        self.state = state


class Storage(ABC):
    """Rows at home, slots in fast memory. Here N is the rows at home and C the slots."""

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
            IndexError: an id lies outside its table.
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
        """Copies of the rows at the addresses ``rows`` [n], wherever they lie now; none moves or counts as used."""

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
    def fast_bytes(self) -> int:
        """Bytes in fast memory: weights and state."""
        return self.weight.nbytes + sum(tensor.nbytes for tensor in self.state.values())


class DeviceRows(Storage):
    """Every row on the device: C = N, slot = row, nobody leaves."""

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: torch.dtype,
        state: dict[str, str],
        device: torch.device,
        *,
        state_fill: float = 0.0,
    ) -> None:
        self.state: dict[str, Tensor] = {}
        self._fill = state_fill
        try:
            self.weight = allocate((num_rows, dim), dtype, device, fill=None)
            self.reset_state(state)
        except (MemoryError, torch.OutOfMemoryError) as error:
            values = dim * dtype.itemsize + sum(4 * (dim if kind == "row" else 1) for kind in state.values())
            free = device_memory(device)[0]
            raise ConfigError(
                f"{num_rows:,} rows of {dim} columns need {format_size(num_rows * values)} with their optimizer state, "
                f"which {device} does not give{f' ({format_size(free)} free)' if free else ''}. Keep a part of them "
                "there: placement=stoker.Cached(fraction=0.1), with the others in host memory or, by home='file', in a "
                "file (docs/placement.md).",
                settings=("embedding_dim", "device_memory"),
            ) from error

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        return Lease(bags, space)

    def reset_state(self, state: dict[str, str]) -> None:
        rows, dim = self.weight.shape
        self.state = {
            name: allocate(
                (rows, dim) if kind == "row" else (rows,), torch.float32, self.weight.device, fill=self._fill
            )
            for name, kind in state.items()
        }

    def read(self, start: int, stop: int) -> Rows:
        return Rows(self.weight[start:stop], {name: tensor[start:stop] for name, tensor in self.state.items()})

    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        at = torch.from_numpy(rows).to(self.weight.device)
        return Rows(self.weight[at], {name: tensor[at] for name, tensor in self.state.items()})

    def write(self, start: int, rows: Rows) -> None:
        stop = start + len(rows.weight)
        self.weight[start:stop] = rows.weight
        for name, tensor in self.state.items():
            tensor[start:stop] = rows.state[name]

    def to(self, device: torch.device) -> None:
        self.weight = self.weight.to(device)
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
