"""Datasets in the memory of this process: prepared to be trained on at once, and gone with it unless they are saved.

Rows are plain arrays in memory, shard by shard, as they would be in files. What is small (vocabularies, counts, groups,
the manifest) is in a temporary directory, so that all that reads a dataset by its path does so here, too. Nothing of it
need reach a disk, and no checksum is taken before somebody asks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.base.files import PASSING
from stoker.dataset.shards import Shard

__all__ = ["Home", "home_of"]

_PREFIX, _LOCK = "stoker-dataset-", ".lock"
_homes: weakref.WeakValueDictionary[Path, Home] = weakref.WeakValueDictionary()


class Home:
    """Where a dataset lives in this process: as long as it, or something that refers to it, does.

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
        self.shards: dict[str, list[Shard]] = {}  # by split, those that the manifest lists
        _homes[self.path] = self
        PASSING.add(self.path)
        weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def keep(self, split: str, file: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Take the tensors of the next shard of a split, which would be ``file`` in a dataset on disk."""
        for array in arrays.values():
            array.flags.writeable = False
        self.shards.setdefault(split, []).append(Shard(path=self.path / file, rows=len(arrays["labels"]), **arrays))


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
