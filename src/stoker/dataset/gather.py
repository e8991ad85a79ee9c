"""Scattered rows of a split, copied into the tensors of one batch: from mapped shards, or from a resident copy.

Plain NumPy copies rows of mapped shards (the definition), or a Numba kernel if Numba is installed. Resident rows are
packed into one matrix of 32-bit words: so a batch is a single gather, and on a GPU no row crosses the link again. The
order of an epoch is a formula (:mod:`stoker.dataset.order`): shuffling moves no row.

Legend: B rows of the batch, S shards, n resident rows, F features, L ids in all, W words of a packed row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import DataError
from stoker.dataset.shards import Shard

Int64 = npt.NDArray[np.int64]
Allocate = Callable[[str, tuple[int, ...], torch.dtype], Tensor]  # (name, shape, dtype) -> memory to fill
# From rows of the split [B] to the tensors of a batch: dense, ids, labels and, with sequences, offsets.
Gather = Callable[[Int64, Allocate], dict[str, Tensor]]
_WORD = 4  # bytes
_SLICED = 2**14  # rows: several threads copy more of them faster, into memory that is new


def new_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return new memory for each tensor of a batch: an ``Allocate``."""
    return torch.empty(shape, dtype=dtype)


def _torch_type(kind: np.dtype[Any]) -> torch.dtype:
    return {"f4": torch.float32, "i4": torch.int32, "i8": torch.int64}[kind.str[1:]]


def sound_bags(lengths: npt.NDArray[np.int32], begin: Int64, end: Int64, ids: Int64 | int) -> npt.NDArray[np.bool_]:
    """Return bool [n]: rows whose bags, of ``lengths`` [n, F], fill ids [begin, end) [n] of a shard of ``ids``."""
    good = (lengths >= 0).all(axis=1) & (begin >= 0) & (end <= ids)
    return np.asarray(good & (lengths.sum(axis=1, dtype=np.int64) == end - begin))


class NumpyGather:
    """The definition, in NumPy: one slice per shard and tensor for consecutive rows, one fancy index for others.

    Args:
        shards: S of them, with the same columns.
        starts: [S + 1] first row of each.
        ids_only: leave out dense columns and labels.
    """

    def __init__(self, shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False) -> None:
        self._shards, self._firsts, self._starts = shards, starts, np.asarray(starts, np.int64)
        # Rows of a shard if all but the last have the same number: then a division, not a search, finds a row's shard.
        sizes = np.diff(self._starts)
        self._even = int(sizes[0]) if (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0] else 0
        self._line = self._ones = np.empty(0, np.int64)  # 0, 1, 2, ... and ones, for as many rows as a batch has had
        self._features = 0 if shards[0].lengths is None else shards[0].lengths.shape[1]
        self._ids = np.array([len(shard.ids) for shard in shards], np.int64)  # [S]
        names = [*([] if ids_only else ["dense", "labels"]), *([] if self._features else ["ids"])]
        arrays = {name: getattr(shards[0], name) for name in names}
        self._tensors = {name: (array.shape[1:], _torch_type(array.dtype)) for name, array in arrays.items()}

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """Copy rows of the split [B] into tensors from ``allocate``.

        Raises:
            DataError: a shard whose lengths and offsets disagree.
        """
        tensors = {name: allocate(name, (len(rows), *rest), kind) for name, (rest, kind) in self._tensors.items()}
        count = len(rows)
        short = not self._features and 0 < count <= _SLICED
        if short and rows[-1] - rows[0] == count - 1 and (np.diff(rows) == 1).all():
            self._copy_part(int(rows[0]), count, tensors)
            return tensors
        shard = rows // self._even if self._even else np.searchsorted(self._starts, rows, side="right") - 1
        self._copy_rows(shard, rows, tensors)
        return tensors | self._bags(shard, rows, allocate) if self._features else tensors

    def _copy_part(self, first: int, count: int, out: dict[str, Tensor]) -> None:
        """Copy consecutive rows of the split, shard by shard."""
        arrays, done = {name: tensor.numpy() for name, tensor in out.items()}, 0
        while done < count:
            number = bisect_right(self._firsts, first + done) - 1
            begin = first + done - self._firsts[number]
            until = min(count, self._firsts[number + 1] - first)
            for name, array in arrays.items():
                array[done:until] = self._shards[number].arrays[name][begin : begin + until - done]
            done = until

    def _bags(self, shard: Int64, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """Return the ids of sequences and their offsets, after a check that lengths and offsets of the rows agree."""
        found = (
            torch.empty((len(rows), self._features), dtype=torch.int32),
            *torch.empty((2, len(rows)), dtype=torch.int64),
        )
        self._copy_rows(shard, rows, {"lengths": found[0], "row_offsets": found[1]})
        self._copy_rows(shard, rows + 1, {"row_offsets": found[2]})
        lengths, begin, end = (tensor.numpy() for tensor in found)
        sizes = end - begin
        good = sound_bags(lengths, begin, end, self._ids[shard])
        if not good.all():
            bad = int(np.argmin(good))
            number = int(shard[bad])
            raise DataError(
                f"{self._shards[number].path}, row {rows[bad] - self._starts[number]:,}: lengths and row_offsets "
                "disagree; the file was damaged. Run stoker inspect --verify on the dataset."
            )
        offsets = allocate("offsets", (lengths.size + 1,), torch.int64)
        offsets[0] = 0
        np.cumsum(lengths.reshape(-1), dtype=np.int64, out=offsets.numpy()[1:])
        ids = allocate("ids", (int(offsets[-1]),), _torch_type(self._shards[0].ids.dtype))
        self._copy(
            shard, begin, sizes, offsets.numpy()[: -1 : self._features], {"ids": ids}, np.zeros_like(self._starts)
        )
        return {"ids": ids, "offsets": offsets}

    def _copy_rows(self, shard: Int64, rows: Int64, out: dict[str, Tensor]) -> None:
        """Copy rows of the split [B], which are in shards [B]."""
        if len(self._line) < len(rows):
            self._line, self._ones = np.arange(len(rows)), np.ones(len(rows), np.int64)
        self._copy(shard, rows, self._ones[: len(rows)], self._line[: len(rows)], out, self._starts)

    def _copy(
        self, shard: Int64, first: Int64, sizes: Int64, places: Int64, out: dict[str, Tensor], starts: Int64
    ) -> None:
        """Copy ``sizes`` [B] rows of the tensors of shards [B], from ``first`` [B] on, to ``places`` [B] of ``out``.

        ``starts`` [S]: the number of the first row of each shard.
        """
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        source, target = (np.repeat(begin, sizes) + within for begin in (first, places))
        shard = np.repeat(shard, sizes)
        for number in np.unique(shard):
            where = np.flatnonzero(shard == number)
            for name, tensor in out.items():
                tensor.numpy()[target[where]] = getattr(self._shards[number], name)[source[where] - starts[number]]


class NumbaGather(NumpyGather):
    """The same in Numba, with software prefetch; it releases the interpreter lock while it copies."""

    def __init__(self, shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False, threads: int = 1) -> None:
        from stoker.dataset.kernels import copy_rows

        super().__init__(shards, starts, ids_only=ids_only)
        self._kernel, self._threads = copy_rows, threads
        # By the names of the tensors to copy: address of row 0 by the numbers of each shard, and bytes of a row.
        # The rows of a tensor always have the same numbers.
        self._sources: dict[tuple[str, ...], tuple[Int64, Int64]] = {}

    def _copy(
        self, shard: Int64, first: Int64, sizes: Int64, places: Int64, out: dict[str, Tensor], starts: Int64
    ) -> None:
        names = tuple(out)
        if (found := self._sources.get(names)) is None:
            arrays = [[each.arrays[name] for each in self._shards] for name in names]
            widths = np.array([row[0].itemsize * prod(row[0].shape[1:]) for row in arrays], np.int64)
            addresses = np.array([array.ctypes.data for row in arrays for array in row], np.int64)
            origin = addresses.reshape(len(names), len(self._shards)) - widths[:, None] * starts[: len(self._shards)]
            found = self._sources[names] = origin, widths
        slices = (shard, first, sizes, places if places.flags.c_contiguous else places.copy())
        targets = np.array([tensor.data_ptr() for tensor in out.values()], np.int64)
        self._kernel(slices, *found, targets, threads=self._threads)


def make_gather(shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False, threads: int = 1) -> Gather:
    """Return the fastest gather from mapped shards that this machine can run.

    Args:
        shards: see :class:`NumpyGather`.
        starts: see :class:`NumpyGather`.
        ids_only: see :class:`NumpyGather`.
        threads: number of torch's threads to use.
    """
    try:
        return NumbaGather(shards, starts, ids_only=ids_only, threads=threads)
    except ImportError:
        return NumpyGather(shards, starts, ids_only=ids_only)


class ResidentRows:
    """A copy of the first rows of a split in the memory of a device, and batches gathered there.

    Values of the same size in every row are packed as [n, W] int32. In main memory a Numba kernel copies them to the
    tensors of a batch; on a GPU these are views of its rows.

    Args:
        shards: their rows are copied in this order.
        rows: n.
        device: they are copied to it, shard by shard.
        threads: number of torch's threads that gather a batch in main memory.
    """

    def __init__(self, shards: Sequence[Shard], rows: int, device: torch.device, *, threads: int = 1) -> None:
        self._device, self._row = device, _packed_row(shards[0])
        fields: Mapping[str, Any] = self._row.fields or {}
        # Of each tensor of a row: its name, its type, its first element, and its shape.
        self._columns = [
            (name, _torch_type(kind.base), offset // kind.base.itemsize, kind.shape)
            for name, (kind, offset, *_) in fields.items()
        ]
        self._types = {kind for _, kind, *_ in self._columns}
        self._copy: Callable[[Int64, list[int]], None] | None = None
        shape = rows, self._row.itemsize // _WORD
        if device.type == "cpu":  # NumPy asks for huge pages, as torch does not: a random row takes a third less time
            self._matrix = torch.from_numpy(np.empty(shape, np.int32))
            with suppress(ImportError):
                from stoker.dataset.kernels import copy_packed

                widths = [kind.itemsize for kind, *_ in fields.values()]
                memory = self._matrix.numpy().reshape(-1).view(np.uint8)
                self._copy = partial(copy_packed, memory, self._row.itemsize, widths, threads=threads)
        else:
            self._matrix = torch.empty(shape, dtype=torch.int32, device=device)
        self._ids: Tensor | None = None
        left = np.maximum(rows - np.cumsum([0, *(shard.rows for shard in shards[:-1])]), 0).tolist()
        taken = [
            (shard, min(shard.rows, most)) for shard, most in zip(shards, left, strict=True) if most and shard.rows
        ]
        if shards[0].lengths is not None:
            sizes = [np.diff(shard.row_offsets[: count + 1]) for shard, count in taken if shard.row_offsets is not None]
            self._sizes = np.concatenate(sizes)  # [n] ids of each row; on the host, so that no batch waits for a device
            ends = np.cumsum(self._sizes)
            self._starts = torch.from_numpy(ends - self._sizes).to(device)  # [n] where each row's ids begin
            self._ids = torch.empty(int(ends[-1]), dtype=_torch_type(shards[0].ids.dtype), device=device)
        done = ids = 0
        for shard, count in taken:
            packed = np.zeros(count, self._row)
            for name in self._row.names or ():
                packed[name] = getattr(shard, name)[:count]
            self._matrix[done : done + count].copy_(torch.from_numpy(packed.view(np.int32).reshape(count, -1)))
            done += count
            if self._ids is not None and shard.row_offsets is not None:
                part = torch.from_numpy(shard.ids[: shard.row_offsets[count]].copy())
                self._ids[ids : ids + len(part)].copy_(part)
                ids += len(part)
            shard.release()

    @staticmethod
    def bytes(shards: Sequence[Shard], rows: int) -> int:
        """Return the bytes of a copy of the first ``rows`` rows; approximate for sequences."""
        size = rows * _packed_row(shards[0]).itemsize
        if shards[0].lengths is not None:
            ids = sum(shard.ids.nbytes for shard in shards) / max(1, sum(shard.rows for shard in shards))
            size += round(rows * (ids + 16))
        return size

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """Return the tensors of rows [B]; on a GPU or without Numba in memory of torch, not of ``allocate``."""
        chosen = torch.from_numpy(rows)
        if self._copy is not None:
            found = {name: allocate(name, (len(rows), *shape), kind) for name, kind, _, shape in self._columns}
            self._copy(rows, [tensor.data_ptr() for tensor in found.values()])
        else:
            if self._device.type != "cpu":
                chosen = chosen.pin_memory().to(self._device, non_blocking=True)
            packed = self._matrix.index_select(0, chosen)
            views = {kind: packed.view(kind) for kind in self._types}
            found = {
                name: views[kind].narrow(1, place, *shape) if shape else views[kind].select(1, place)
                for name, kind, place, shape in self._columns
            }
            # Sums over strided memory may be in another order than over that of a batch from files.
            found |= {name: each.contiguous() for name, each in found.items() if each.is_floating_point()}
        if self._ids is None:
            return found
        lengths = found.pop("lengths").to(torch.int64)  # [B, F]
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=self._device)
        torch.cumsum(lengths.reshape(-1), 0, out=offsets[1:])
        total = int(self._sizes[rows].sum())
        # From the places of a row's ids in the batch to their places here, repeated for each of its ids.
        shift = self._starts.index_select(0, chosen) - offsets[: -1 : lengths.shape[1]]
        places = torch.repeat_interleave(shift, lengths.sum(1), output_size=total)
        places += torch.arange(total, device=self._device)
        return found | {"ids": self._ids.index_select(0, places), "offsets": offsets}


def _packed_row(shard: Shard) -> np.dtype[Any]:
    """Return the layout of a packed row: the widest type first, padded so that every row is aligned."""
    names = ("ids" if shard.lengths is None else "lengths", "dense", "labels")
    arrays = {name: getattr(shard, name) for name in names}
    return np.dtype([(name, array.dtype, array.shape[1:]) for name, array in arrays.items()], align=True)
