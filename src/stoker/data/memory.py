"""Datasets in the memory of this process: prepared to be trained on at once, and gone with it unless they are saved.

Rows lie in shards in memory; what is small (vocabularies, counts, groups, the manifest) in a temporary directory, so
that all that reads a dataset by its path does so here, too. Nothing of it need reach a disk, and no checksum is taken
before somebody asks.

Legend: n rows of a shard, F features.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.files import PASSING
from stoker.data.shards import Shard, file_bytes

__all__ = ["Home", "empty_rows", "home_of", "row_bytes"]

_ALIGN = 32  # bytes; rows held together begin at multiples of it
_homes: weakref.WeakValueDictionary[Path, Home] = weakref.WeakValueDictionary()


class Home:
    """Where a dataset lives in this process: as long as it, or something that refers to it, does.

    The rows of a split are in pieces, one for each part of the preparation that has some. How they are cut into files,
    should they ever be, is for the manifest to say.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="stoker-dataset-")).resolve()
        self.pieces: dict[str, list[Shard]] = {}  # by split, in order
        _homes[self.path] = self
        PASSING.add(self.path)
        weakref.finalize(self, _remove, self.path)

    def keep(self, split: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Take the tensors of the next rows of a split."""
        for array in arrays.values():
            array.flags.writeable = False
        self.pieces.setdefault(split, []).append(Shard(path=self.path / split, rows=len(arrays["labels"]), **arrays))

    def file_bytes(self, split: str, first: int, rows: int) -> int:
        """Bytes of the file of such a shard."""
        piece, start, ids = self.pieces[split][0], 0, 0
        if piece.lengths is None:
            shapes = {name: (rows, *array.shape[1:]) for name, array in piece.arrays.items()}
        else:
            for piece in self.pieces[split]:
                begin, end = (min(max(place - start, 0), piece.rows) for place in (first, first + rows))
                assert piece.row_offsets is not None
                ids += int(piece.row_offsets[end] - piece.row_offsets[begin])
                start += piece.rows
            shapes = {name: (rows, *array.shape[1:]) for name, array in piece.arrays.items()}
            shapes |= {"ids": (ids,), "row_offsets": (rows + 1,)}
        # Arrays of these shapes that take no memory.
        return file_bytes(
            {name: np.broadcast_to(piece.arrays[name].dtype.type(0), shape) for name, shape in shapes.items()}
        )

    def shard(self, split: str, first: int, rows: int) -> Shard:
        """The rows [first, first + rows) of a split as one shard, whose memory is its own."""
        found: list[dict[str, npt.NDArray[Any]]] = []
        start = 0
        for piece in self.pieces[split]:
            begin, end = max(first - start, 0), min(first + rows - start, piece.rows)
            if begin < end:
                found.append(_cut(piece, begin, end))
            start += piece.rows
        joined = {name: np.concatenate([arrays[name] for arrays in found]) for name in found[0]}
        if "lengths" in joined:
            ends = np.cumsum(joined["lengths"].sum(axis=1, dtype=np.int64))
            joined["row_offsets"] = np.concatenate([[0], ends]).astype(np.int64)
        return Shard(path=self.path / split, rows=rows, **joined)


def _cut(piece: Shard, begin: int, end: int) -> dict[str, npt.NDArray[Any]]:
    """The tensors of the rows [begin, end) of a piece, without its ``row_offsets``."""
    found = {name: array[begin:end] for name, array in piece.arrays.items()}
    if piece.row_offsets is not None:
        del found["row_offsets"]
        found["ids"] = piece.ids[piece.row_offsets[begin] : piece.row_offsets[end]]
    return found


def _remove(path: Path) -> None:
    PASSING.discard(path)
    shutil.rmtree(path, ignore_errors=True)


def home_of(path: str | Path) -> Home | None:
    """The home of the dataset at a path, if it is in memory."""
    return _homes.get(Path(path).resolve()) if _homes else None


def row_bytes(*arrays: npt.NDArray[Any]) -> tuple[list[int], int]:
    """Bytes of what a row has in each array [n, ...], and of all of it with its padding."""
    widths = [array.itemsize * prod(array.shape[1:]) for array in arrays]
    return widths, -(-sum(widths) // _ALIGN) * _ALIGN


def empty_rows(
    rows: int, *like: npt.NDArray[Any], memory: Callable[[int], npt.NDArray[np.uint8]] | None = None
) -> list[npt.NDArray[Any]]:
    """Arrays [rows, ...] of the types and widths of others, in which all that a row has lies together.

    Scattered rows then touch half as many cache lines. Give the widest type first. ``memory`` gives bytes.
    """
    widths, size = row_bytes(*like)
    block = np.empty(rows * size, np.uint8) if memory is None else memory(rows * size)
    records, at = block.reshape(rows, size), 0
    made = []
    for array, width in zip(like, widths, strict=True):
        column = records[:, at : at + width].view(array.dtype)
        made.append(column if array.ndim == 2 else column[:, 0])
        at += width
    return made
