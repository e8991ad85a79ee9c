"""Arrays in unnamed temporary files: too long for memory, written and read in order, or mapped.

The file takes disk as it is written. It is deleted when it is closed and no map of it is left, also after a kill.
Beware: on some systems the temporary directory is memory.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 2**20  # values of a chunk


def spans(size: int) -> Iterator[tuple[int, int]]:
    """Yield ``range(size)`` in chunks of :data:`CHUNK`."""
    for begin in range(0, size, CHUNK):
        yield begin, min(begin + CHUNK, size)


def stretches(offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of the lists that begin at ``offsets`` [n + 1], about :data:`CHUNK` values each."""
    first, count = 0, len(offsets) - 1
    while first < count:
        last = int(np.searchsorted(offsets, offsets[first] + CHUNK, side="right")) - 1
        last = max(first + 1, last)
        yield first, last
        first = last


class Spool:
    """Values of one type in a temporary file, for any number of threads; a context manager, which closes it."""

    def __init__(self, dtype: npt.DTypeLike, directory: str | Path | None = None) -> None:
        self._dtype = np.dtype(dtype)
        self._lock = threading.Lock()
        self._file: Any = tempfile.TemporaryFile(prefix="stoker-", dir=directory)  # noqa: SIM115  (closed by close)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Maps of it remain valid."""
        self._file.close()

    def add(self, values: npt.NDArray[Any]) -> None:
        """Append values."""
        with self._lock:
            self._file.seek(0, os.SEEK_END)
            self._file.write(_bytes(values, self._dtype))

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Copy the values [begin, end)."""
        values = np.empty(end - begin, self._dtype)
        with self._lock:
            self._file.seek(begin * self._dtype.itemsize)
            if self._file.readinto(_bytes(values, self._dtype)) != values.nbytes:
                raise OSError(errno.EIO, "a temporary file is shorter than what was written to it")
        return values

    def write(self, begin: int, values: npt.NDArray[Any]) -> None:
        """Replace the values from ``begin`` on."""
        with self._lock:
            self._file.seek(begin * self._dtype.itemsize)
            self._file.write(_bytes(values, self._dtype))

    def reserve(self, count: int) -> None:
        """Allocate disk for ``count`` zeros: on a full disk, a store to a mapped page would kill the process."""
        size = count * self._dtype.itemsize
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file.fileno(), 0, max(1, size))
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        self._file.truncate(size)

    def mapped(self) -> npt.NDArray[Any]:
        """Map all values for reading and writing."""
        self._file.flush()
        return np.memmap(self._file, dtype=self._dtype, mode="r+").view(np.ndarray)


def _bytes(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    """Return the bytes of values, also of records, whose own type has no buffer."""
    return np.ascontiguousarray(values, dtype).view(np.uint8).data
