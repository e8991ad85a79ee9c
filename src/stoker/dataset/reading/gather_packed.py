"""Scattered packed rows (:mod:`stoker.dataset.reading.packed`), unpacked into the contiguous tensors of one batch by
Numba.

The definition is :class:`stoker.dataset.reading.gather.NumpyGather`. Import this module only where Numba is installed.

Legend: B rows of the batch, S shards, R bytes of a record, D' dense columns with their flags, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.dataset.reading.gather import Allocate, Int64, mean_rows, torch_type
from stoker.dataset.reading.gather_packed_cpu import BLOCK, STRIPE, unpack_rows
from stoker.dataset.reading.packed import TENSORS, Array, Field, PackedTensor, Packing, Records

__all__ = ["PackedGather", "QuickTensor"]

_TYPES = (np.uint8, np.uint16, np.int32, np.int64)


class PackedGather:
    """A :class:`stoker.dataset.reading.gather.Gather` of packed rows; releases the interpreter lock while it unpacks.

    Args:
        packing: of the records.
        shards: the records [n, R] of each.
        starts: [S + 1] first row of each.
        names: of the tensors that are wanted.
        threads: torch's, where they are more than one.
    """

    def __init__(
        self, packing: Packing, shards: Sequence[Records], starts: Sequence[int], *, names: Sequence[str] = TENSORS,
        threads: int = 1,
    ) -> None:  # fmt: skip
        self._packing, self._shards, self._names, self._threads = packing, shards, names, threads
        self._starts = np.asarray(starts, np.int64)
        self._mean = mean_rows(self._starts)
        self._sources = np.array([records.ctypes.data for records in shards], np.int64)
        fields = [field for field in packing.fields if field.tensor in self._names]
        tables = [field.table for field in fields if field.table is not None]
        begins = dict(zip(map(id, tables), accumulate(map(len, tables), initial=0), strict=False))
        self._tables = np.concatenate([np.empty(0, np.float32), *tables])
        dense, ids, labels = (
            [field for field in fields if field.tensor == name] for name in ("dense", "ids", "labels")
        )
        coded = [
            _numbers([
                (field.place, begins[id(field.table)], field.column, field.flag)
                for field in dense if field.dtype == dtype and field.table is not None
            ], 4) for dtype in _TYPES[:2]
        ]  # fmt: skip
        as_they_are = [_places(dense, dtype) for dtype in (np.float32, np.uint8)]
        self._fields = (
            *coded, *as_they_are, *(_places(ids, dtype) for dtype in _TYPES),
            *(_places(labels, dtype) for dtype in (np.float32, np.uint8)),
        )  # fmt: skip

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """See :class:`stoker.dataset.reading.gather.Gather`."""
        count, tensors = len(rows), {}
        for name in self._names:
            row, dtype = self._packing.kind(name)
            tensors[name] = allocate(name, (count, *row), torch_type(dtype))
        # Of a tensor that is not wanted, no field is either.
        dense, ids, labels = (
            tensors[name].numpy() if name in tensors else np.empty([0] * axes, self._packing.kind(name)[1])
            for name, axes in (("dense", 2), ("ids", 2), ("labels", 1))
        )
        scratch = np.empty((max(1, self._threads), STRIPE, self._packing.size), np.uint8)
        views = [scratch.view(dtype) for dtype in (np.uint8, np.uint16, np.int32, np.int64, np.float32)]
        unpack_rows.run(
            np.ascontiguousarray(rows), self._starts, self._mean, self._sources, self._packing.size, self._tables,
            *self._fields, dense, ids, labels, *views, np.empty(count, np.int64),
            np.zeros(1, np.int64), BLOCK, threads=max(1, min(self._threads, count // BLOCK)),
        )  # fmt: skip
        return tensors


class QuickTensor(PackedTensor):
    """A :class:`stoker.dataset.reading.packed.PackedTensor` that unpacks rows which follow each other by Numba."""

    def __getitem__(self, rows: slice | Array) -> Array:
        if not isinstance(rows, slice):
            return super().__getitem__(rows)
        gather = PackedGather(self.packing, [self.records], [0, len(self)], names=[self.name])
        found: Array = gather(np.arange(*rows.indices(len(self))), _fresh)[self.name].numpy()
        return found


def _fresh(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _numbers(found: Sequence[tuple[int, ...]], width: int) -> Int64:
    return np.array(found, np.int64).reshape(-1, width)


def _places(fields: Sequence[Field], dtype: npt.DTypeLike) -> Int64:
    """[K, 2] the place and the column of the fields of a type."""
    return _numbers([(f.place, f.column) for f in fields if f.dtype == dtype and f.table is None], 2)
