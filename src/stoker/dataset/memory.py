"""Datasets in the memory of this process: prepared to be trained on at once, and gone with it unless they are saved.

Rows lie in pieces in memory; what is small (vocabularies, counts, groups, the manifest) in a temporary directory, so
that all that reads a dataset by its path does so here, too. Nothing of it need reach a disk, and no checksum is taken
before somebody asks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.base.files import PASSING
from stoker.dataset.reading.packed import TENSORS, PackedShard, Packing, padded
from stoker.dataset.shards import Shard, ShardFile

__all__ = ["Home", "empty_rows", "home_of", "row_bytes"]

_PREFIX, _LOCK = "stoker-dataset-", ".lock"
_homes: weakref.WeakValueDictionary[Path, Home] = weakref.WeakValueDictionary()


class Home:
    """Where a dataset lives in this process: as long as it, or something that refers to it, does.

    The rows of a split are in pieces, one for each part of the preparation that has some. How they are cut into files,
    should they ever be, is for the manifest to say.

    Raises:
        DataError: no temporary directory can be made.
    """

    def __init__(self) -> None:
        try:
            _sweep()
            self.path, self._lock = _make()
        except OSError as error:
            raise DataError(
                f"what is small of a dataset in memory lies in a temporary directory, and none can be made "
                f"({error.strerror}). Let TMPDIR name a directory that you may write to, or pass out=DIRECTORY."
            ) from error
        self.pieces: dict[str, list[Shard]] = {}  # by split, in order
        _homes[self.path] = self
        PASSING.add(self.path)
        weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def keep(self, split: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Take the tensors of the next rows of a split."""
        for array in arrays.values():
            array.flags.writeable = False
        self.pieces.setdefault(split, []).append(Shard(path=self.path / split, rows=len(arrays["labels"]), **arrays))

    def keep_packed(self, split: str, packing: Packing, records: npt.NDArray[np.uint8]) -> None:
        """Take the next rows of a split, packed."""
        records.flags.writeable = False
        piece = PackedShard(path=self.path / split, packing=packing, records=records)
        self.pieces.setdefault(split, []).append(piece)

    def file(self, split: str, first: int, rows: int) -> ShardFile:
        """The file of a shard with the rows [first, first + rows) of a split."""
        found: dict[str, list[Any]] = {}
        start = 0
        for piece in self.pieces[split]:
            begin, end = max(first - start, 0), min(first + rows - start, piece.rows)
            if begin < end:
                for name, array in _cut(piece, begin, end).items():
                    found.setdefault(name, []).append(array)
            start += piece.rows
        if "lengths" in found:
            ends = np.cumsum(np.concatenate([lengths.sum(axis=1, dtype=np.int64) for lengths in found["lengths"]]))
            found["row_offsets"] = [np.zeros(1, np.int64), ends]
        return ShardFile(found)


def _cut(piece: Shard, begin: int, end: int) -> dict[str, Any]:
    """The tensors of the rows [begin, end) of a piece, without its ``row_offsets``."""
    if isinstance(piece, PackedShard):
        from stoker.dataset.reading.gather_packed import (
            QuickTensor,  # needs Numba, as the preparation that made the rows does
        )

        return {name: QuickTensor(piece.packing, piece.records[begin:end], name) for name in TENSORS}
    found = {name: array[begin:end] for name, array in piece.arrays.items()}
    if piece.row_offsets is not None:
        del found["row_offsets"]
        found["ids"] = piece.ids[piece.row_offsets[begin] : piece.row_offsets[end]]
    return found


def _make() -> tuple[Path, IO[bytes]]:
    """A temporary directory, and the file beside it, locked until it is closed or the process is gone."""
    number, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_LOCK)
    lock = os.fdopen(number, "wb")
    _is_free(lock)
    path = Path(name).resolve().with_suffix("")
    path.mkdir(mode=0o700)
    return path, lock


def _sweep() -> None:
    """Remove the directories that killed processes left, as their locks tell."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_LOCK}"):
        with suppress(OSError), place.open("r+b") as lock:
            if _is_free(lock):
                shutil.rmtree(place.with_suffix(""), ignore_errors=True)
                place.unlink()


def _is_free(lock: IO[bytes]) -> bool:
    """Take a lock; False if another process has it, or where there are no such locks."""
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _remove(path: Path, lock: IO[bytes], process: int) -> None:
    PASSING.discard(path)
    lock.close()
    if os.getpid() == process:  # a forked one has the memory, too, but the directory is not its own
        shutil.rmtree(path, ignore_errors=True)
        path.with_name(path.name + _LOCK).unlink(missing_ok=True)


def home_of(path: str | Path) -> Home | None:
    """The home of the dataset at a path, if it is in memory."""
    return _homes.get(Path(path).resolve()) if _homes else None


def row_bytes(*arrays: npt.NDArray[Any]) -> tuple[list[int], int]:
    """Bytes of what a row has in each array [n, ...], and of all of it with its padding."""
    widths = [array.itemsize * prod(array.shape[1:]) for array in arrays]
    return widths, padded(sum(widths))


def empty_rows(rows: int, *like: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Arrays [rows, ...] of the types and widths of others, in which all that a row has lies together.

    Scattered rows then touch half as many cache lines. Give the widest type first.
    """
    widths, size = row_bytes(*like)
    records, at = np.empty((rows, size), np.uint8), 0
    made = []
    for array, width in zip(like, widths, strict=True):
        column = records[:, at : at + width].view(array.dtype)
        made.append(column if array.ndim == 2 else column[:, 0])
        at += width
    return made
