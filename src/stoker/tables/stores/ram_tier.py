"""A RAM tier: main memory that caches blocks of rows of another store, such as a file.

A *block* is as many consecutive rows as the inner store moves at the cost of one (:attr:`Home.block_rows`). A *frame*
is the memory of one block. The tier takes any inner store, so tiers nest: slots on a GPU over a RAM tier over a file.

Legend: F frames, R rows of a block, n rows of one call, m blocks of one call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from stoker.base.errors import ConfigError
from stoker.base.units import format_size
from stoker.tables.config import Slotted
from stoker.tables.storage import Rows
from stoker.tables.stores.home import Home, Initial, MemoryHome, tier_bytes
from stoker.tables.stores.registry import store_of

_STEP = 64  # frames that the hand of the clock checks first
_MOVED = 2**20  # rows of a chunk moved from or to the inner store


def make_home(strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> Home:
    """Make the backing store of a group under ``strategy``, with any RAM tier; ``gpu``: its slots are on a GPU."""
    home: Home = store_of(strategy, initial.num_rows).of(strategy, initial, state, gpu=gpu)
    memory = home.cache_bytes if strategy.host_memory is None else int(strategy.host_memory)
    if memory is None:
        return home
    try:
        return RamTier(home, memory=memory)
    except BaseException:
        home.close()
        raise


class RamTier(Home):
    """Blocks of rows of ``inner`` in at most ``memory`` bytes of main memory, page table included.

    A stored row remains here until another block needs the frame; then the block is written to ``inner`` first. The
    clock algorithm (Corbato 1968) chooses the frame: the next one that was not used since the hand last passed. A call
    with more blocks than frames, and a :meth:`read` or :meth:`write` of a whole range, move the rows of other blocks
    directly to and from ``inner``.

    >>> from stoker.tables.stores.file_home import FileHome
    >>> from stoker.tables.stores.home import Initial
    >>> table = stoker.TableConfig(name="t", num_embeddings=1_000_000, embedding_dim=16)
    >>> home = RamTier(FileHome(Initial.of([table], seed=0), {"sum": "scalar"}), memory=2**20)
    >>> home.kind, home.block_rows, home.num_frames
    ('memory over file', 60, 240)
    >>> home.close()
    """

    def __init__(self, inner: Home, *, memory: int) -> None:
        super().__init__(inner.initial, inner.state)
        self.inner, self.block_rows = inner, inner.block_rows
        self.kind = f"memory over {inner.kind}"
        self.is_blocking, self.directory = inner.is_blocking, inner.directory
        blocks = -(-self.num_rows // self.block_rows)
        table, least = (tier_bytes(self.num_rows, self.row_bytes, self.block_rows, frames) for frames in (0, 1))
        self.num_frames = min(blocks, (memory - table) // (least - table))
        if self.num_frames < 1:
            raise ConfigError(
                f"host_memory {format_size(memory)} is too little for a RAM tier over {inner!r}: its page table and "
                f"one block of {self.block_rows:,} rows take {format_size(least)}. Give at least "
                "that much, or leave host_memory out."
            )
        rows = self.num_frames * self.block_rows
        self.frames = MemoryHome(
            Initial(
                keys=np.zeros(1, np.int64), scales=np.zeros(1, np.float32), first_row=np.array([0, rows]),
                dim=self.dim, dtype=self.dtype,
            ),
            self.state,
        )  # fmt: skip
        self.frames.stored.words[:] = -1
        # A frame belongs to a block if each names the other. So after an interrupt at any line no frame belongs to two
        # blocks.
        self._frame_of = np.zeros(blocks, np.int32)  # frame + 1 of each block; 0: in none
        self._block_in = np.full(self.num_frames, -1, np.int64)
        self._dirty = np.zeros(self.num_frames, bool)  # newer than the inner store
        self._used = np.zeros(self.num_frames, bool)  # since the hand passed
        self._busy = np.zeros(self.num_frames, bool)  # in the running call
        self._hand = 0
        self._scanning = False
        self._lock = threading.RLock()

    def read(self, start: int, stop: int) -> Rows:
        with self._scan():
            return super().read(start, stop)

    def write(self, start: int, rows: Rows) -> None:
        with self._scan():
            super().write(start, rows)

    def flush(self) -> None:
        """Write every changed block to the inner store, and flush that."""
        with self._lock:
            self._write_back(np.flatnonzero(self._dirty))
            self.inner.flush()

    def close(self) -> None:
        super().close()
        self.frames.close()
        self.inner.close()

    @contextmanager
    def _scan(self) -> Iterator[None]:
        """Admit no blocks: a checkpoint must not empty the cache."""
        with self._lock:
            self._scanning = True
            try:
                yield
            finally:
                self._scanning = False

    def _fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None) -> None:
        places = np.arange(len(rows)) if places is None else places
        stored = self.stored.contains(rows)
        if not stored.all():  # rows that were never stored need no frame
            self._compute(rows[~stored], target, places[~stored])
            rows, places = rows[stored], places[stored]
        with self._lock:
            self._move(rows, target, places, storing=False)

    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        places = np.arange(len(rows)) if places is None else places
        with self._lock:
            self._move(rows, source, places, storing=True)
        self.stored.mark(rows)

    def _move(self, rows: np.ndarray, side: Rows, places: np.ndarray, *, storing: bool) -> None:
        """Copy rows from their frames to ``side`` or back; admit the blocks that have no frame."""
        blocks, which = np.unique(rows // self.block_rows, return_inverse=True)
        frames = self._frame_of[blocks].astype(np.int64) - 1
        missing = frames < 0
        if missing.any() and (self._scanning or len(blocks) > self.num_frames):
            away = missing[which]
            move = self.inner.store if storing else self.inner.fetch
            move(rows[away], side, places[away])
            rows, places, which, missing = rows[~away], places[~away], which[~away], missing & False
        new = blocks[missing]
        try:
            self._busy[frames[frames >= 0]] = True
            if len(new):
                frames[missing] = self._free(len(new))
                for some in self._chunks(len(new)):
                    wanted, at = self._rows_of(new[some], frames[missing][some])
                    if storing:
                        rest = ~np.isin(wanted, rows)  # the others are overwritten
                        wanted, at = wanted[rest], at[rest]
                    self.inner.fetch(wanted, self.frames.arrays, at)
            at = frames[which] * self.block_rows + rows % self.block_rows
            if storing:
                self._dirty[frames[frames >= 0]] = True  # before the rows change, in case of an interrupt
                self.frames.store(at, side, places)
            else:
                self.frames.fetch(at, side, places)
            self._block_in[frames[missing]] = new
            self._frame_of[new] = frames[missing] + 1
            self._used[frames[frames >= 0]] = True
        finally:
            self._busy[:] = False

    def _free(self, count: int) -> np.ndarray:
        """Return frames [count] for other blocks; changed blocks in them were written to the inner store."""
        found, size = np.empty(0, np.int64), max(_STEP, count)
        while len(found) < count:
            passed = (self._hand + np.arange(min(size, self.num_frames))) % self.num_frames
            idle = passed[~(self._used[passed] | self._busy[passed])][: count - len(found)]
            if len(found) + len(idle) == count:
                passed = passed[: np.flatnonzero(passed == idle[-1])[0] + 1]
            self._used[passed] = False
            self._hand = int(passed[-1] + 1) % self.num_frames
            self._busy[idle] = True
            found, size = np.concatenate([found, idle]), 2 * size
        self._write_back(found[self._dirty[found]])
        own = found[self._owned(found)]
        self._frame_of[self._block_in[own]] = 0
        self._block_in[found] = -1
        return found

    def _owned(self, frames: np.ndarray) -> np.ndarray:
        """Return whether each of ``frames`` belongs to the block that it names."""
        blocks = self._block_in[frames]
        owned: np.ndarray = (blocks >= 0) & (self._frame_of[blocks] == frames + 1)
        return owned

    def _write_back(self, frames: np.ndarray) -> None:
        """Store the blocks of changed ``frames`` in the inner store."""
        for chunk in self._chunks(len(frames)):
            some = frames[chunk]
            own = some[self._owned(some)]
            rows, at = self._rows_of(self._block_in[own], own)
            self.inner.store(rows, self.frames.arrays, at)
            self._dirty[some] = False

    def _chunks(self, blocks: int) -> Iterator[slice]:
        """Yield slices of a number of blocks: rows that move at once have indices in main memory."""
        step = max(1, _MOVED // self.block_rows)
        return (slice(begin, begin + step) for begin in range(0, blocks, step))

    def _rows_of(self, blocks: np.ndarray, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of ``blocks`` [m], and the rows of the frames where they are."""
        inside = np.arange(self.block_rows)
        rows = (blocks[:, None] * self.block_rows + inside).reshape(-1)
        at = (frames[:, None] * self.block_rows + inside).reshape(-1)
        there = rows < self.num_rows  # the last block may be short
        return rows[there], at[there]

    def _details(self) -> str:
        cached = format_size(self.num_frames * self.block_rows * self.row_bytes)
        return f", {cached} in memory over {self.inner!r}"
