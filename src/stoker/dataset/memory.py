"""Datasets in memory: in temporary files, which the system caches as far as it has memory.

They are deleted with the last reference to the dataset, unless it is saved.

The directory is in the system's temporary one, or in /dev/shm if that one lacks the room. It need not survive a power
loss, so nothing is flushed to disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from stoker.base.errors import DataError, errors_as
from stoker.base.files import PASSING, lock_file

_PREFIX, _LOCK = "stoker-dataset-", ".lock"
_SHARED = Path("/dev/shm")
_folders: weakref.WeakValueDictionary[Path, TemporaryFolder] = weakref.WeakValueDictionary()


class TemporaryFolder:
    """A temporary directory for a dataset, deleted with the last reference to this object.

    Args:
        room: bytes that it will take, about.

    Raises:
        DataError: no temporary directory can be made.
    """

    def __init__(self, room: int = 0) -> None:
        remedy = "Let TMPDIR name a directory that you may write to, or pass out=DIRECTORY."
        with errors_as(DataError, "a dataset in memory needs a temporary directory, and none can be made", remedy):
            _sweep()
            self.path, self._lock = _make(room)
        _folders[self.path] = self
        PASSING.add(self.path)
        weakref.finalize(self, _remove, self.path, self._lock, os.getpid())


def _places() -> list[Path]:
    """Return the directories for temporary files that this process may write to."""
    return [Path(tempfile.gettempdir()), *([_SHARED] if os.access(_SHARED, os.W_OK | os.X_OK) else [])]


def _make(room: int) -> tuple[Path, IO[bytes]]:
    """Return a temporary directory, and a file next to it, locked until it is closed or the process ends."""
    free = {place: shutil.disk_usage(place).free for place in _places()}
    place = next((place for place in free if free[place] >= room), max(free, key=lambda place: free[place]))
    number, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_LOCK, dir=place)
    lock = os.fdopen(number, "wb")
    lock_file(lock)
    path = Path(name).resolve().with_suffix("")
    path.mkdir(mode=0o700)
    return path, lock


def _sweep() -> None:
    """Remove the directories that killed processes left: nothing holds their locks."""
    for path in (path for place in _places() for path in place.glob(f"{_PREFIX}*{_LOCK}")):
        with suppress(OSError), path.open("r+b") as lock:
            if lock_file(lock):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()


def _remove(path: Path, lock: IO[bytes], process: int) -> None:
    PASSING.discard(path)
    lock.close()
    if os.getpid() == process:  # a forked process has this object, too, but must not delete the directory
        shutil.rmtree(path, ignore_errors=True)
        path.with_name(path.name + _LOCK).unlink(missing_ok=True)


def temporary_folder_of(path: str | Path) -> TemporaryFolder | None:
    """Return the temporary directory of the dataset at a path, if it is in memory."""
    return _folders.get(Path(path).resolve()) if _folders else None
