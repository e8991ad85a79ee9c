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
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.files import PASSING
from stoker.data.shards import Shard, ShardInfo, shard_name

__all__ = ["Home", "empty_rows", "home_of", "row_bytes"]

_ALIGN = 32  # bytes; rows held together begin at multiples of it
_homes: weakref.WeakValueDictionary[Path, Home] = weakref.WeakValueDictionary()


class Home:
    """Where a dataset lives in this process: as long as it, or something that refers to it, does."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="stoker-dataset-")).resolve()
        self._shards: dict[str, Shard] = {}  # by the name that the manifest gives them
        _homes[self.path] = self
        PASSING.add(self.path)
        weakref.finalize(self, _remove, self.path)

    def keep(self, path: Path, **arrays: npt.NDArray[Any]) -> ShardInfo:
        """Take a shard's tensors instead of writing them to ``path``; what the manifest must record of it."""
        shard = Shard(path=path, rows=len(arrays["labels"]), **arrays)
        for array in arrays.values():
            array.flags.writeable = False
        name = shard_name(path)
        self._shards[name] = shard
        return ShardInfo(file=name, rows=shard.rows, bytes=shard.bytes, sha256=None)

    def shard(self, file: str) -> Shard | None:
        """A shard by the manifest's name for it, if it is in memory."""
        return self._shards.get(file)


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


def empty_rows(rows: int, *like: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Arrays [rows, ...] of the types and widths of others, in which all that a row has lies together.

    Scattered rows then touch half as many cache lines. Give the widest type first.
    """
    widths, size = row_bytes(*like)
    records = np.empty((rows, size), np.uint8)
    made, at = [], 0
    for array, width in zip(like, widths, strict=True):
        column = records[:, at : at + width].view(array.dtype)
        made.append(column if array.ndim == 2 else column[:, 0])
        at += width
    return made
