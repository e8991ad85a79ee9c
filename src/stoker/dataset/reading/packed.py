"""Rows of a dataset in memory, packed: one record each, in which every value takes the bits that its column needs.

Most dense columns are whole numbers of few bits, and most tables are small. Such a column's raw value lies in the
record, as a code, and a table has what the model sees of it; ids take the bits of their table, labels a byte. This
module says what a record holds, in plain NumPy; :mod:`stoker.dataset.reading.gather_packed` reads batches as fast as
rows that
are not packed. Records are made by :mod:`stoker.prep.write.pack`.

Legend: n rows, R bytes of a record, D' dense columns with their flags, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.dataset.shards import Shard

__all__ = ["TENSORS", "Field", "PackedShard", "PackedTensor", "Packing", "padded"]

Array = npt.NDArray[Any]
Records = npt.NDArray[np.uint8]  # [n, R]
TENSORS = ("dense", "ids", "labels")
_ALIGN = 32  # bytes; records, and rows held together, begin at multiples of it


def padded(size: int) -> int:
    """Bytes that a row takes with others, of which it needs ``size``."""
    return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True, kw_only=True)
class Field:
    """A number of a record, and what becomes of it."""

    tensor: str  # "dense", "ids" or "labels"
    column: int  # of the tensor
    dtype: np.dtype[Any]  # in the record
    at: int = 0  # bytes before it in the record
    table: npt.NDArray[np.float32] | None = None  # what its values stand for; None: themselves
    flag: int = -1  # the column of ``dense`` that is 1 where its value is 0, else 0; -1: none

    @property
    def place(self) -> int:
        """Numbers of its type before it in the record."""
        return self.at // self.dtype.itemsize


class Packing:
    """What a record holds.

    Args:
        fields: in any order, without their places.
        dense: D'.
        features: F.
        wide: whether ids are int64, else int32.
    """

    def __init__(self, fields: Sequence[Field], *, dense: int, features: int, wide: bool) -> None:
        self.fields: list[Field] = []
        at = 0
        for field in sorted(fields, key=lambda field: -field.dtype.itemsize):  # so that each is aligned
            self.fields.append(replace(field, at=at))
            at += field.dtype.itemsize
        self.size = padded(at)  # R
        self._kinds: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "dense": ((dense,), np.dtype(np.float32)), "labels": ((), np.dtype(np.float32)),
            "ids": ((features,), np.dtype(np.int64 if wide else np.int32)),
        }  # fmt: skip

    def kind(self, tensor: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape of a row of a tensor, and the type."""
        return self._kinds[tensor]

    def of(self, tensor: str) -> list[Field]:
        """The fields of a tensor."""
        return [field for field in self.fields if field.tensor == tensor]

    def unpack(self, records: Records, tensor: str) -> Array:
        """A tensor [n, ...] of some records."""
        row, dtype = self._kinds[tensor]
        out = np.empty((len(records), prod(row)), dtype)
        for field in self.of(tensor):
            found = records[:, field.at : field.at + field.dtype.itemsize].view(field.dtype)[:, 0]
            out[:, field.column] = found if field.table is None else field.table[found]
            if field.flag >= 0:
                out[:, field.flag] = found == 0
        return out.reshape(len(records), *row)


class PackedTensor:
    """A tensor of packed rows: an array that is made of some of its rows when these are asked for.

    Args:
        packing: of the records.
        records: [n, R].
        name: "dense", "ids" or "labels".
    """

    def __init__(self, packing: Packing, records: Records, name: str) -> None:
        self.packing, self.records, self.name = packing, records, name
        row, self.dtype = packing.kind(name)
        self.shape = (len(records), *row)
        self.size = prod(self.shape)
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Array) -> Array:
        return self.packing.unpack(self.records[rows], self.name)


class PackedShard(Shard):
    """Packed rows in memory.

    ``dense``, ``labels`` and ``ids`` are copies, made anew each time; :meth:`tensor` gives what makes some rows of one.

    Args:
        path: as of a shard.
        packing: of the records.
        records: [n, R].
    """

    def __init__(self, *, path: Path, packing: Packing, records: Records) -> None:
        for name, value in (("path", path), ("packing", packing), ("records", records), ("rows", len(records))):
            object.__setattr__(self, name, value)

    packing: Packing
    records: Records

    @property
    def dense(self) -> npt.NDArray[np.float32]:
        """[n, D'], a copy."""
        return self.packing.unpack(self.records, "dense")

    @property
    def labels(self) -> npt.NDArray[np.float32]:
        """[n], a copy."""
        return self.packing.unpack(self.records, "labels")

    @property
    def ids(self) -> npt.NDArray[np.integer]:
        """[n, F], a copy."""
        return self.packing.unpack(self.records, "ids")

    def tensor(self, name: str) -> Any:
        """A tensor by name, of which nothing is made yet."""
        return PackedTensor(self.packing, self.records, name)
