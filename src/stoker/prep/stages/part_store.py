"""Where parts lie between the passes over them: in memory while there is room.

Most logs are small, and are in shards before a disk would have them. What only shards need of a part is made in one
stretch of memory (:class:`Arena`), which goes as a whole when the rows of the part are in shards.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.prep.stages.parts import ALIGN, HELD, Journal, Part, PartFile, write_part

__all__ = ["Arena", "PartStore"]

Array = npt.NDArray[Any]


class Arena:
    """A stretch of memory in which arrays are made one after the other.

    Args:
        block: [bytes] uint8, the stretch.
    """

    def __init__(self, block: Array) -> None:
        self.block, self._at = block, 0

    def take(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array, not cleared."""
        sizes = (shape,) if isinstance(shape, int) else shape
        size = prod(sizes) * np.dtype(dtype).itemsize
        piece = self.block[self._at : self._at + size]
        self._at += padded(size)
        return piece.view(dtype).reshape(sizes)

    def give_back(self, array: Array) -> None:
        """Take back the array that was taken last."""
        self._at -= padded(array.nbytes)

    def holds(self, array: Array) -> bool:
        """Whether an array was made here."""
        return array.base is not None and np.may_share_memory(array, self.block)


def padded(size: int) -> int:
    """Bytes that an array of ``size`` bytes takes of an arena."""
    return -(-size // ALIGN) * ALIGN


def _small_pages(size: int) -> Array:
    """Return so many bytes, not cleared, in pages of the usual size.

    Fresh huge pages are what a virtual machine has to get back from its host, five times as expensive as the small ones
    that it still has.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(size, np.uint8)
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)[:size]


class _HeldPart(Part):
    """A part in memory."""

    def __init__(self, arrays: Mapping[str, Array], arena: Arena) -> None:
        self._arena = arena
        # A view of something else would keep the whole of what it looks at.
        self.arrays = {
            name: array if array.base is None or arena.holds(array) else array.copy() for name, array in arrays.items()
        }
        for array in self.arrays.values():  # as those of a map: kernels are compiled for one of the two
            array.flags.writeable = False

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def size(self, name: str) -> int:
        return self.arrays[name].size

    def __exit__(self, *error: object) -> None:
        """Nothing: the arrays stay where they are."""

    def release(self) -> None:
        """Give up what only shards need, and the memory that it was in."""
        arena, self._arena = self._arena, Arena(np.empty(0, np.uint8))
        self.arrays = {name: array for name, array in self.arrays.items() if not arena.holds(array)}


class PartStore:
    """Where finished parts lie until their rows are in shards: in memory while there is room, on disk after that.

    A kill loses what is held, which is seconds of work; :meth:`save` keeps it for a run that is stopped otherwise.

    Args:
        room: bytes to hold at most.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[str, _HeldPart] = {}  # by path
        self._arenas: list[Array] = []  # of parts that went to disk
        self._lock = threading.Lock()

    def arena(self, size: int) -> Arena:
        """Memory of at most ``size`` bytes, for what only shards need of a part. To be given to :meth:`write`."""
        with self._lock:
            for place, block in enumerate(self._arenas):
                if len(block) >= size:
                    return Arena(self._arenas.pop(place))
            self._arenas.clear()  # too small: no more memory than there are threads
        return Arena(_small_pages(size))

    def write(self, path: Path, arrays: Mapping[str, Array], arena: Arena) -> dict[str, Any]:
        """Keep arrays as the part ``path``; returns what its step's record must say of it."""
        size = sum(array.nbytes for array in arrays.values())
        with self._lock:
            fits = size <= self._room
            self._room -= size * fits
        if not fits:
            record = write_part(path, arrays)
            with self._lock:
                self._arenas.append(arena.block)
            return record
        part = _HeldPart(arrays, arena)
        with self._lock:
            self._held[str(path)] = part
        return {HELD: str(path)}

    def open(self, path: Path) -> Part:
        """The arrays of a finished part."""
        return self._held.get(str(path)) or PartFile(path)

    def release(self, path: Path) -> None:
        """Give up what only shards need of a part, as its rows are in them."""
        part = self._held.get(str(path))
        if part is not None:
            part.release()

    def clear(self) -> None:
        """Forget the parts in memory."""
        self._held.clear()
        self._arenas.clear()

    def save(self, journal: Journal) -> None:
        """Write held parts to disk, and their steps to the journal, which then forgets any it could not have."""
        waiting = {step: entry for step, entry in journal.done.items() if HELD in entry}
        for step in waiting:
            del journal.done[step]
        for step, entry in waiting.items():
            path = entry.pop(HELD)
            journal.add(step, {**entry, **write_part(Path(path), self._held[path].arrays)})
