"""The distinct rows of a batch, and which of them each lookup wants.

The first rows of every table may be pinned: each has a pinned place, which an addition finds.

Legend: B examples, F features, L ids, U distinct rows, T tables, H pinned rows of a table, P places (all H together).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.ops.codegen.threads import kernel_threads, team
from stoker.ops.reference import addresses
from stoker.ops.select import offsets_fit
from stoker.ops.space import HAVE_NUMBA, AddressSpace, Bags

_PART = 2**15  # ids that are worth a thread
Int64 = npt.NDArray[np.int64]


class PinnedRows:
    """The pinned rows: id i of table t is in place ``first_place[t] + i``, if ``i < rows[t]``.

    Args:
        space: of the tables.
        rows: [T] H of each table; () means none.
    """

    def __init__(self, space: AddressSpace, rows: Sequence[int] = ()) -> None:
        self.rows: Int64 = np.array(rows or (0,) * len(space.rows), np.int64)
        self.first_place: Int64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows)])
        self._space = space
        self._local = threading.local()

    def __len__(self) -> int:
        """Return P."""
        return int(self.first_place[-1])

    def addresses(self) -> Int64:
        """Return the row in each place [P]."""
        table = np.repeat(np.arange(len(self.rows)), self.rows)
        return np.arange(len(self), dtype=np.int64) + (self._space.first_row[:-1] - self.first_place[:-1])[table]

    def places(self, addresses: Int64) -> Int64:
        """Return the place of each row [n]; -1 if it is not pinned."""
        table, local = self._space.locate(addresses)
        return np.where(local < self.rows[table], self.first_place[table] + local, -1)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of the addresses ``start..stop``: (first, end, place of the first; -1 if they are not pinned)."""
        for table, count in enumerate(self.rows.tolist()):
            begin, end = int(self._space.first_row[table]), int(self._space.first_row[table + 1])
            middle = begin + count
            for first, last, place in ((begin, middle, int(self.first_place[table])), (middle, end, -1)):
                low, high = max(first, start), min(last, stop)
                if low < high:
                    yield low, high, place if place < 0 else place + low - first

    def marks(self) -> npt.NDArray[np.uint64]:
        """Return a bit for each place and one more, all 0, to count distinct rows: of this thread."""
        if not hasattr(self._local, "marks"):
            self._local.marks = np.zeros(len(self) // 64 + 1, np.uint64)
        found: npt.NDArray[np.uint64] = self._local.marks
        return found


_local = threading.local()


class Distinct(NamedTuple):
    """What a batch looks up."""

    rows: npt.NDArray[np.int64]  # [U] addresses of the distinct rows that are not pinned
    which: Tensor  # int32, shaped like the ids: the number of each id's row in ``rows``, or -1 - place
    placed: int  # how many distinct rows are pinned


def distinct_rows(bags: Bags, space: AddressSpace) -> tuple[npt.NDArray[np.int64], Tensor]:
    """Return the addresses [U] of the distinct rows, and for each id (same shape) the number of its row, int32.

    The order of the rows is unspecified. ``bags`` must be on the CPU.
    """
    return split_rows(bags, space, PinnedRows(space))[:2]


def split_rows(bags: Bags, space: AddressSpace, pinned: PinnedRows) -> Distinct:
    """Return the same as :func:`distinct_rows` if some rows are pinned, which need no search."""
    if not HAVE_NUMBA:
        return _split_rows(bags, space, pinned)
    from stoker.ops.cpu import kernels

    count = bags.ids.numel()
    ids = bags.ids.contiguous().reshape(-1).numpy()
    jagged = bags.offsets is not None
    offsets = bags.offsets.contiguous().numpy() if bags.offsets is not None else np.zeros(1, np.int64)
    if bags.offsets is not None and not offsets_fit(bags.offsets, count):
        raise ValueError(f"offsets must rise from 0 to the number of ids, {count}; they do not.")
    table_of, _, _, first, sizes, _ = space.by_table
    inverse_ids, rows = np.empty(count, np.int32), np.empty(count + 1, np.int64)
    wanted = space.occurrences(offsets if jagged else None, count)
    begins = wanted.cumsum() - wanted
    ends = begins.copy()
    placed = kernels.place_rows(
        ids, offsets, jagged, table_of, sizes, pinned.rows, pinned.first_place, pinned.marks(), inverse_ids, ends, rows
    )
    if placed < 0:
        space.check(bags.ids, bags.offsets)
    keys, numbers = _scratch(1 << max(4, (2 * int((ends - begins).max())).bit_length()))
    found = kernels.number_rows(ids, begins, ends, first, sizes, keys, numbers, rows, inverse_ids)
    return Distinct(rows[:found].copy(), torch.from_numpy(inverse_ids).view(bags.ids.shape), placed)


def _split_rows(bags: Bags, space: AddressSpace, pinned: PinnedRows) -> Distinct:
    """Do the same in plain PyTorch: the definition."""
    space.check(bags.ids, bags.offsets)
    wanted = addresses(bags.ids, space.bases, bags.offsets).reshape(-1)
    places = torch.from_numpy(pinned.places(wanted.numpy()))
    own = places >= 0
    found, inverse = torch.unique(wanted[~own], return_inverse=True)
    which = -1 - places
    which[~own] = inverse
    return Distinct(found.numpy(), which.to(torch.int32).view(bags.ids.shape), len(torch.unique(places[own])))


def to_slots(which: Tensor, slots: npt.NDArray[np.int64], pinned: int) -> Tensor:
    """Replace the number of each id's row by its slot, in place: see :class:`Distinct`.

    ``slots`` [U] are those of the rows, after the ``pinned`` ones, whose places are their slots.
    """
    if not len(slots):  # a batch may have no rows
        slots = np.zeros(1, np.int64)
    if HAVE_NUMBA:
        from stoker.ops.cpu import kernels

        all_ids = which.view(-1).numpy()
        size = min(max(1, kernel_threads() // 4), 1 + len(all_ids) // _PART)  # training uses cores, too
        team(size).run(kernels.take_slots, [(part, slots, pinned) for part in np.array_split(all_ids, size)])
        return which
    places = torch.from_numpy((slots + pinned).astype(np.int32))
    return which.copy_(torch.where(which < 0, -1 - which, places[which.clamp(min=0).long()]))


def _scratch(size: int) -> tuple[Any, Any]:
    """Return a hash table of this thread, all -1, and an array for the values of its places."""
    buffers: tuple[Any, Any] | None = getattr(_local, "buffers", None)
    if buffers is None or len(buffers[0]) < size:
        buffers = _local.buffers = (np.full(size, -1, np.int64), np.empty(size, np.int32))
    return buffers
