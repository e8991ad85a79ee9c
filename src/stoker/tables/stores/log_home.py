"""Rows in a log-structured spill file: every stored row is appended.

In fixed places, storing a row of 264 bytes reads a page of 4 KiB, unless the system has it cached, and writes it again.
Appending writes only the bytes of the row, at the speed of a sequential write, and wears the disk less. A log costs an
index in main memory, 4 bytes a row, and a quarter more disk; and reading all rows in canonical order is random access.

The file is cut into *segments*, written one after the other. A row that is stored again leaves its old record dead.
When segments have too many dead records, the one with the fewest live rows is cleaned: it is read as a whole, its live
rows are appended again, and the segment is free (Rosenblum and Ousterhout, "The Design and Implementation of a
Log-Structured File System", SOSP 1991, section 3). Each record ends with its row; it is live if the index has this
position for the row.

Legend: N rows, P positions, S segments, n rows of one call.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from stoker.base.device import total_memory
from stoker.base.errors import ConfigError, HomeError
from stoker.base.units import format_size
from stoker.tables.config import Slotted
from stoker.tables.storage import Rows
from stoker.tables.stores.file_home import FileHome, PageLayout, page_aligned
from stoker.tables.stores.home import Home, Initial, StoredRows

_SEGMENT = 2**20  # bytes; a file of fewer than _SEGMENTS such segments is cut into _SEGMENTS
_SEGMENTS = 32
_ROOM = 1.25  # most segments in use, relative to those that live rows fill
_LEAST = 2  # segments in use that are never cleaned: the current one and one more
_SPARE = 4  # segments for rows of a cleaned segment, and for segments that a fetch still reads
_INDEX_SHARE = 64  # the index takes at most 1 / _INDEX_SHARE of memory, unless the user chose a log
_OWNER = 8  # bytes at the end of a record: its row


def _index_type(num_rows: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if num_rows < 2**31 else np.int64)


class LogHome(FileHome):
    """Like :class:`FileHome`, with its arguments, warnings and errors, but rows are appended, not written in place."""

    def __init__(self, initial: Initial, state: Mapping[str, str], **options: Any) -> None:
        num_rows = initial.num_rows
        try:
            self.index = np.zeros(num_rows, _index_type(num_rows))  # position + 1; 0: never stored
        except MemoryError as error:
            raise ConfigError(
                f"the index of a log of {num_rows:,} rows needs {format_size(self.index_bytes(num_rows))} of memory, "
                "which this machine does not give. Choose writes='in-place'."
            ) from error
        super().__init__(initial, state, **options)
        self.block_rows = 1
        self.stored = _Indexed(self.index)
        self._live = np.zeros(self.layout.num_records // self._per_segment, np.int64)  # rows of each segment
        self._stored = 0  # rows in the file
        self._used = 0  # segments that were ever written
        self._free: list[int] = []
        self._next = self._end = 0  # position of the next write, and the end of its segment
        self._tail = (-1, np.zeros(self.layout.block, np.uint8))  # the block that was written last, and its content
        self._append_lock = threading.Lock()
        self._writer, self._cleaner = page_aligned((self._chunk() + 1) * self.layout.block), page_aligned(self._span)
        # A fetch reads at positions that it looked up before. So a cleaned segment is not written again before every
        # fetch that began earlier has ended.
        self._mutex = threading.RLock()  # entered itself: Ctrl-C within methods of a Condition would leave it locked
        self._changed = threading.Condition(self._mutex)
        self._epoch = 0  # segments cleaned
        self._readers: Counter[int] = Counter()  # running fetches, by the epoch in which they began
        self._cleaned: deque[tuple[int, int]] = deque()  # epochs, and the segments cleaned in them

    @classmethod
    def choose(cls, strategy: Slotted, num_rows: int) -> type[Home]:
        fits = cls.index_bytes(num_rows) <= (total_memory() or 0) // _INDEX_SHARE
        return cls if strategy.writes == "append" or (strategy.writes is None and fits) else FileHome

    @staticmethod
    def index_bytes(num_rows: int) -> int:
        return num_rows * _index_type(num_rows).itemsize

    def _lay_out(self) -> PageLayout:
        record = self.row_bytes + -self.row_bytes % 4 + _OWNER
        one = PageLayout.of(1, record)
        blocks = -(-self.num_rows // one.per_block)
        self._per_segment = one.per_block * max(1, min(_SEGMENT // one.block, blocks // _SEGMENTS))
        return PageLayout.of((self._allowed(self.num_rows) + _SPARE) * self._per_segment, record)

    def _allowed(self, rows: int) -> int:
        """Return the number of segments that ``rows`` live rows may use."""
        return math.ceil(_ROOM * rows / self._per_segment) + _LEAST

    def _where(self, rows: np.ndarray) -> np.ndarray:
        at: np.ndarray = self.index[rows].astype(np.int64) - 1
        at[at < 0] = self._nowhere
        return at

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._mutex:
            epoch = self._epoch
            self._readers[epoch] += 1
        try:
            yield
        finally:
            with self._mutex:
                self._readers[epoch] -= 1
                self._readers += Counter()  # drop zeros
                self._changed.notify_all()

    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        self._check_length("writing")
        places = np.arange(len(rows), dtype=np.int64) if places is None else places
        step = self._chunk() * self.layout.per_block
        with self._append_lock:
            for begin in range(0, len(rows), step):
                some = rows[begin : begin + step]
                records = self._records(source, places[begin : begin + step])
                records[:, -_OWNER:] = some.view(np.uint8).reshape(-1, _OWNER)
                self._append(some, records, clean=True)

    def _chunk(self) -> int:
        """Return the number of blocks that one system call reads or writes."""
        return max(1, self._span // self.layout.block)

    def _append(self, rows: np.ndarray, records: np.ndarray, *, clean: bool) -> None:
        done = 0
        while done < len(rows):
            if self._next == self._end and clean:
                self._make_room()
            if self._next == self._end:  # cleaning may have begun a segment
                first = self._take() * self._per_segment
                self._next, self._end = first, first + self._per_segment
            count = min(len(rows) - done, self._end - self._next, self._chunk() * self.layout.per_block)
            self._put(rows[done : done + count], records[done : done + count])
            done += count

    def _put(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Write records at the next positions, which are in one segment.

        It writes whole blocks, so the system need not read them first. After an error or an interrupt at any line,
        every row is where the index says: no position is used twice, and rows are entered last.
        """
        layout, first, count = self.layout, self._next, len(rows)
        block = first // layout.per_block
        at = np.arange(first, first + count)
        blocks = int(at[-1]) // layout.per_block - block + 1
        buffer = self._writer
        if self._tail[0] == block:
            buffer[: layout.block] = self._tail[1]
        _as_records(buffer, blocks, layout)[at // layout.per_block - block, at % layout.per_block] = records
        self._next = first + count
        try:
            self._transfer(buffer, block * layout.block, (block + blocks) * layout.block, rows, at, writing=True)
            self._check_length("writing")  # truncated meanwhile: these rows may be lost
        except BaseException:
            self._next = first
            raise
        self._tail = (block + blocks - 1, buffer[(blocks - 1) * layout.block : blocks * layout.block].copy())
        old = self.index[rows].astype(np.int64)
        old = old[old > 0]
        np.subtract.at(self._live, (old - 1) // self._per_segment, 1)
        self._live[first // self._per_segment] += count
        self._stored += count - len(old)
        self.index[rows] = at + 1

    def _make_room(self) -> None:
        """Clean segments until no more are in use than the live rows may take."""
        while self._used - len(self._free) - len(self._cleaned) >= self._allowed(self._stored):
            live = self._live[: self._used].copy()
            unfit = [*self._free, *(segment for _, segment in self._cleaned), self._end // self._per_segment - 1]
            live[unfit] = self._per_segment
            victim = int(live.argmin())
            if live[victim] >= self._per_segment:
                break
            self._clean(victim)

    def _clean(self, segment: int) -> None:
        """Append the live rows of a segment again, so that it is free."""
        layout = self.layout
        nothing = np.empty(0, np.int64)
        stop = (segment + 1) * self._per_segment
        for first in range(segment * self._per_segment, stop, self._chunk() * layout.per_block):
            at = np.arange(first, min(stop, first + self._chunk() * layout.per_block))
            blocks = len(at) // layout.per_block
            base = first // layout.per_block * layout.block
            self._transfer(self._cleaner, base, base + blocks * layout.block, nothing, nothing, writing=False)
            records = _as_records(self._cleaner, blocks, layout)
            rows = np.ascontiguousarray(records[:, :, -_OWNER:]).view(np.int64).reshape(-1)
            known = np.flatnonzero((rows >= 0) & (rows < self.num_rows))  # the end of a block may have any bytes
            live = known[self.index[rows[known]].astype(np.int64) == at[known] + 1]
            kept = records[live // layout.per_block, live % layout.per_block]
            self._append(rows[live], kept, clean=False)
        with self._mutex:
            self._cleaned.append((self._epoch, segment))
            self._epoch += 1

    def _take(self) -> int:
        """Return a segment to write: a cleaned one that no fetch can be reading, or a new one."""
        with self._mutex:
            while True:
                oldest = min(self._readers, default=self._epoch)
                while self._cleaned and self._cleaned[0][0] < oldest:
                    self._free.append(self._cleaned.popleft()[1])
                if self._free:
                    return self._free.pop()
                if self._used < len(self._live):
                    self._used += 1
                    return self._used - 1
                if not self._cleaned:
                    raise HomeError(f"spill file {self.path} has no room left. Resume from the last checkpoint.")
                self._changed.wait()

    def _place_of(self, row: int, action: str) -> str:
        if action == "writing":
            return f"{self.layout.record} B"
        return f"{self.layout.record} B at byte {self.layout.offset(int(self._where(np.array([row]))[0])):,}"

    def _lost(self, length: int) -> str:
        lost = np.count_nonzero(self.index > length // self.layout.block * self.layout.per_block)
        return f" {lost:,} rows are lost."


class _Indexed(StoredRows):
    """Rows in the index; entering a row marks it."""

    def __init__(self, index: np.ndarray) -> None:
        self._index = index

    def contains(self, rows: np.ndarray) -> np.ndarray:
        known: np.ndarray = self._index[rows] > 0
        return known


def _as_records(buffer: np.ndarray, blocks: int, layout: PageLayout) -> np.ndarray:
    """View the records in ``buffer`` as [blocks, records of a block, bytes]."""
    shape, strides = (blocks, layout.per_block, layout.record), (layout.block, layout.record, 1)
    return np.lib.stride_tricks.as_strided(buffer, shape, strides)
