"""Scattered rows of a split's shards, copied into the contiguous tensors of one batch.

Two forms with equal results: plain NumPy (the definition), and Numba kernels where Numba is installed. Rows in files
and rows in memory are read alike.

Legend: B rows of the batch, S shards, F features, L ids in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import DataError
from stoker.dataset.shards import Shard

__all__ = ["Allocate", "Gather", "NumbaGather", "NumpyGather", "make_gather"]

Int64 = npt.NDArray[np.int64]
_STEPS = 8  # shards that a row may be away from where it is looked for first
Allocate = Callable[[str, tuple[int, ...], torch.dtype], Tensor]  # (name, shape, dtype) -> memory to fill


class Gather(Protocol):
    """Rows in, the tensors of a batch out: dense, ids, labels and, with sequences, offsets."""

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """Copy ``rows`` ([B] int64, rows of the split) into tensors from ``allocate``.

        Raises:
            DataError: a shard whose lengths and offsets disagree.
        """
        ...


def _one_per_row(shard: Shard, *, ids_only: bool) -> tuple[str, ...]:
    """Tensors with a fixed number of values in every row."""
    names = ("dense", "labels") if shard.lengths is not None else ("dense", "ids", "labels")
    return tuple(name for name in names if name == "ids" or not ids_only)


def _disagree(shards: Sequence[Shard], starts: list[int], row: int) -> DataError:
    shard = int(np.searchsorted(starts, row, side="right")) - 1
    return DataError(
        f"{shards[shard].path}, row {row - starts[shard]:,}: lengths and row_offsets disagree; the file was "
        "damaged. Run stoker inspect --verify on the dataset."
    )


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    """The type of a batch's tensor."""
    return {"f4": torch.float32, "i4": torch.int32, "i8": torch.int64}[dtype.str[1:]]


class NumpyGather:
    """The definition, in NumPy: one fancy index per shard."""

    def __init__(self, shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False) -> None:
        self._shards, self._starts = shards, np.asarray(starts, np.int64)
        self._names = _one_per_row(shards[0], ids_only=ids_only)

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """See :class:`Gather`."""
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        picks = [(s, np.flatnonzero(shard_of == s)) for s in np.unique(shard_of)]
        first = self._shards[0]
        tensors = {}
        for name in self._names:
            array = getattr(first, name)
            tensors[name] = allocate(name, (len(rows), *array.shape[1:]), _torch_type(array.dtype))
            out = tensors[name].numpy()
            for shard, where in picks:
                out[where] = getattr(self._shards[shard], name)[rows[where] - self._starts[shard]]
        if first.lengths is not None:
            tensors |= self._bags(rows, picks, allocate)
        return tensors

    def _bags(self, rows: Int64, picks: list[tuple[int, Int64]], allocate: Allocate) -> dict[str, Tensor]:
        lengths = self._shards[0].lengths
        assert lengths is not None
        features = lengths.shape[1]
        lengths = np.zeros((len(rows), features), np.int32)
        spans = np.zeros((len(rows), 2), np.int64)  # where each row's ids begin and end in their shard
        for number, where in picks:
            shard, local = self._shards[number], rows[where] - self._starts[number]
            assert shard.lengths is not None
            assert shard.row_offsets is not None
            lengths[where] = shard.lengths[local]
            spans[where] = np.stack((shard.row_offsets[local], shard.row_offsets[local + 1]), axis=1)
            good = (lengths[where] >= 0).all(axis=1) & (spans[where, 0] >= 0) & (spans[where, 1] <= len(shard.ids))
            good &= spans[where, 1] - spans[where, 0] == lengths[where].sum(axis=1)
            if not good.all():
                raise _disagree(self._shards, self._starts.tolist(), int(rows[where][np.argmin(good)]))
        offsets = allocate("offsets", (len(rows) * features + 1,), torch.int64)
        offsets[0] = 0
        np.cumsum(lengths.reshape(-1), dtype=np.int64, out=offsets.numpy()[1:])
        ids = allocate("ids", (int(offsets[-1]),), _torch_type(self._shards[0].ids.dtype))
        out, targets = ids.numpy(), offsets.numpy()[::features]
        for number, where in picks:
            for i in where:
                out[targets[i] : targets[i + 1]] = self._shards[number].ids[spans[i, 0] : spans[i, 1]]
        return {"ids": ids, "offsets": offsets}


def _mean_rows(starts: Int64) -> int:
    """Rows of a shard, about, by which to guess where a row is; 0 where the shards differ too much for that."""
    shards = np.flatnonzero(np.diff(starts))  # that have rows
    mean = max(1, int(starts[-1]) // (len(starts) - 1))
    ends = np.stack((starts[shards], starts[shards + 1] - 1))
    wrong = np.abs(np.minimum(ends // mean, len(starts) - 2) - shards)
    return 0 if wrong.max(initial=0) > _STEPS else mean


class NumbaGather:
    """The same through Numba, with software prefetch; releases the interpreter lock while it copies."""

    def __init__(self, shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False, threads: int = 1) -> None:
        from stoker.dataset.reading import gather_cpu

        self._kernels: Any = gather_cpu
        self._threads = threads
        self._shards = shards
        self._starts = np.asarray(starts, np.int64)
        self._mean = _mean_rows(self._starts)
        first = next((shard for shard in shards if shard.rows), shards[0])  # empty arrays have no strides
        self._features = 0 if first.lengths is None else first.lengths.shape[1]
        fixed = _one_per_row(first, ids_only=ids_only)
        arrays = {name: getattr(first, name) for name in fixed}
        self._columns = {name: array.shape[1:] for name, array in arrays.items()}
        self._types = {name: _torch_type(array.dtype) for name, array in arrays.items()}
        sources = [self._addresses(name) for name in fixed]
        self._sources = np.array(sources, np.int64).reshape(len(fixed), len(shards))  # [K, S]
        self._strides = np.array([array.strides[0] for array in arrays.values()], np.int64)
        self._widths = np.array([a.itemsize * int(np.prod(a.shape[1:])) for a in arrays.values()], np.int64)
        if self._features:
            self._id_type, self._id_width = _torch_type(first.ids.dtype), first.ids.itemsize
            self._bags = [self._addresses(name) for name in ("lengths", "row_offsets", "ids")]
            self._ids_in = np.array([len(shard.ids) for shard in shards], np.int64)

    def _addresses(self, name: str) -> Int64:
        return np.array([getattr(shard, name).ctypes.data for shard in self._shards], np.int64)

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """See :class:`Gather`."""
        count = len(rows)
        tensors = {
            name: allocate(name, (count, *columns), self._types[name]) for name, columns in self._columns.items()
        }
        targets = np.array([tensor.data_ptr() for tensor in tensors.values()], np.int64)
        self._kernels.copy_rows(
            rows, self._starts, self._mean, self._sources, self._widths, self._strides, targets, self._threads
        )
        if self._features:
            offsets = allocate("offsets", (count * self._features + 1,), torch.int64)
            scratch = np.empty((2, count), np.int64)
            bad = self._kernels.bag_offsets(
                rows,
                self._starts,
                self._mean,
                *self._bags,
                self._ids_in,
                self._id_width,
                self._features,
                offsets.numpy(),
                scratch,
            )
            if bad >= 0:
                raise _disagree(self._shards, self._starts.tolist(), int(rows[bad]))
            ids = allocate("ids", (int(offsets[-1]),), self._id_type)
            self._kernels.copy_bags(scratch, self._id_width, ids.data_ptr())
            tensors |= {"ids": ids, "offsets": offsets}
        return tensors


def make_gather(shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False, threads: int = 1) -> Gather:
    """Return the fastest form that this machine can run.

    Args:
        shards: S of them, with the same columns.
        starts: [S + 1] first row of each.
        ids_only: leave out dense columns and labels.
        threads: torch's, where they are more than one.
    """
    try:
        import stoker.dataset.reading.gather_cpu  # noqa: F401
    except ImportError:
        return NumpyGather(shards, starts, ids_only=ids_only)
    return NumbaGather(shards, starts, ids_only=ids_only, threads=threads)
