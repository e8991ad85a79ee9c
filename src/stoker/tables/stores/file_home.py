"""Rows in a sparse file: tables larger than main memory.

Legend: N rows, n rows of one call. A *record* is a row's weights, then its state tensors. A record has a position in
the file: here position r for row r, in :class:`stoker.tables.stores.log_home.LogHome` any. One system call moves a
*run* of records.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.base.errors import ConfigError, HomeError, errors_as
from stoker.base.files import lock_file
from stoker.base.units import format_size
from stoker.ops.cpu.arena import flat
from stoker.tables.config import Slotted
from stoker.tables.storage import Rows
from stoker.tables.stores.home import Home, Initial

PAGE = 4096  # bytes of a page; direct input and output moves whole pages
_WASTE = 8  # at most 1 / _WASTE of a block is unused
_SPAN = 128 * 1024  # most bytes of a system call
_CHUNK = 16 * 2**20  # bytes of records in memory, next to the rows of a call
_RUNS_PER_THREAD = 4  # fewer are not worth waking a thread for
_PREFIX, _SUFFIX = "stoker-home-", ".rows"
_REMEDY = {
    errno.ENOSPC: "The disk is full: free space on it, or name a directory on a larger one",
    errno.EDQUOT: "Your disk quota is used up: free space, or name a directory on another disk",
    errno.EFBIG: "A limit on the size of files stands in the way: raise it (ulimit -f), or use another file system",
    errno.EIO: "The device failed: look at the system log, and name a directory on another disk",
    errno.EBADF: "The file was closed by other code in this process: keep that away from it",
}


@dataclass(frozen=True)
class PageLayout:
    """Records are in blocks of whole pages, and no record is in two blocks.

    So a record of up to about 500 bytes is within one page: 15 rows of 260 bytes to a page waste 5 %. Padding to a
    power of two would waste half the disk, and packing without gaps would put every sixteenth row into two pages.
    If records do not fit pages well, a block has as many pages as needed to waste at most an eighth.
    """

    num_records: int  # P
    record: int  # bytes
    per_block: int  # records
    block: int  # bytes, whole pages

    @classmethod
    def of(cls, num_records: int, num_bytes: int) -> PageLayout:
        """Choose the layout for P records of ``num_bytes``."""
        record = num_bytes + -num_bytes % 4
        least = -(-record // PAGE)
        pages = least
        for candidate in range(least, least + _WASTE):
            idle, best = candidate * PAGE % record, pages * PAGE % record
            if idle * pages < best * candidate:
                pages = candidate
            if idle * _WASTE <= candidate * PAGE:
                break
        return cls(num_records, record, pages * PAGE // record, pages * PAGE)

    @property
    def file_bytes(self) -> int:
        """Length of the file: all blocks, and one page that is never written.

        Without that page, a truncated file could grow to its old length by a store to its end, and the rows between
        would read as zeros. With it the length remains wrong.
        """
        return -(-self.num_records // self.per_block) * self.block + PAGE

    def offset(self, position: Any) -> Any:
        """Return the byte where a record begins; ``position`` is an int or an array."""
        return position // self.per_block * self.block + position % self.per_block * self.record

    def runs(self, at: np.ndarray, *, writing: bool, direct: bool) -> np.ndarray:
        """Cut ascending positions ``at`` [n] into runs; run r is ``starts[r]:starts[r + 1]``.

        A run is within :data:`_SPAN` bytes of whole blocks. A run to read has records in the same or the next page: it
        is cheaper to read the bytes between them than to skip them. A run to write has consecutive records; with
        ``direct``, all records of adjacent blocks, so that no two runs share a block.
        """
        block, offset = at // self.per_block, self.offset(at)
        if not writing:
            apart = offset[1:] // PAGE > (offset[:-1] + self.record - 1) // PAGE + 1
        else:
            apart = np.diff(block if direct else at) > 1
        window = block // max(1, _SPAN // self.block)
        return np.concatenate([[0], np.flatnonzero(apart | (np.diff(window) > 0)) + 1, [len(at)]])


class FileHome(Home):
    """Rows in one sparse file, read and written at random with many system calls in flight.

    Fetches and stores go through the system's page cache, which may take all free memory and returns it on demand. With
    ``direct`` (O_DIRECT) they bypass it: then memory use is known, and every row that is not in a slot costs a disk
    access. A store reads the rest of a page before it writes the page, unless the whole page is stored.

    No other run can use the file: ``read`` copies rows to a checkpoint. In a named ``directory``, created if missing,
    it is visible while in use. It is deleted by :meth:`close`, at exit, or with the last reference to the store; after
    a kill, by the next store in that directory. In the temporary directory (None; on some systems that is memory) it
    is unnamed from the start. ``concurrent_reads`` system calls are in flight at once, each in a thread.

    Warns:
        UserWarning: the disk lacks room for all rows. Rows take room when they are stored, so it may still suffice.
    """

    kind = "file"
    is_blocking = in_files = True

    def __init__(
        self,
        initial: Initial,
        state: Mapping[str, str],
        *,
        directory: str | Path | None = None,
        direct: bool = False,
        concurrent_reads: int = 16,
    ) -> None:
        super().__init__(initial, state)
        if concurrent_reads < 1:
            raise ConfigError(f"FileHome(concurrent_reads={concurrent_reads}) must be at least 1.")
        self.direct = direct
        self.concurrent_reads = concurrent_reads
        self.layout = self._lay_out()
        self.block_rows = self.layout.per_block
        self._nowhere = self.layout.num_records  # position of rows that were never stored
        self.path, self._fd = _make_file(directory, direct)
        self.directory = self.path.parent
        self._remove = weakref.finalize(self, _dispose, self._fd, self.path, os.getpid())
        if directory is None:
            with contextlib.suppress(OSError):  # Windows keeps the name of an open file until it is closed
                self.path.unlink()
        try:
            os.ftruncate(self._fd, self.layout.file_bytes)
        except OSError as error:
            self._remove()
            raise HomeError(
                f"spill file {self.path}: setting its length to {format_size(self.layout.file_bytes)} failed: {error}. "
                f"{_REMEDY.get(error.errno or 0, 'Name a directory on a file system that allows large sparse files')}."
            ) from error
        free = shutil.disk_usage(self.path.parent).free
        if free < self.layout.file_bytes:
            warnings.warn(
                f"spill file {self.path} may grow to {format_size(self.layout.file_bytes)} for {self.num_rows:,} rows, "
                f"but its disk has {format_size(free)} free. Rows take space when they are first stored; if too many "
                "are, training stops with an error. Name a directory on a larger disk to be safe.",
                stacklevel=2,
            )
        if direct:
            try:  # some file systems accept the flag, but refuse direct reads
                os.preadv(self._fd, [page_aligned(PAGE).data], 0)
            except OSError as error:
                self._remove()
                raise _no_direct(self.path.parent) from error
        self._span = max(_SPAN, self.layout.block)
        self._calls: np.ndarray | None = None  # if compiled code moves records
        if self.native:
            from stoker.tables.stores.kernels import system_calls

            calls = system_calls()
            self._calls = None if calls is None else np.array(calls, dtype=np.int64)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_owner = os.getpid()
        self._local = threading.local()
        # Whole blocks are read, changed and written: two stores must not do so to one block at once.
        self._writing: Any = threading.Lock() if direct else contextlib.nullcontext()
        self._seeking = threading.Lock()

    @classmethod
    def of(cls, strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> FileHome:
        return cls(initial, state, directory=strategy.path, direct=strategy.direct)

    @classmethod
    def place(cls, path: str | None) -> str:
        where = "the system's temporary directory" if path is None else path
        return f"in a file in {where}"

    def flush(self) -> None:
        """Wait until all stored rows are on disk: the system reports some disk failures only here."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._error(error.errno or 0, None, "flushing") from error

    def close(self) -> None:
        super().close()
        if self._pool is not None and self._pool_owner == os.getpid():
            self._pool.shutdown()
        self._pool = None
        self._remove()

    def _lay_out(self) -> PageLayout:
        return PageLayout.of(self.num_rows, self.row_bytes)

    def _where(self, rows: np.ndarray) -> np.ndarray:
        """Return the position of each of ``rows`` [n]."""
        return np.where(self.stored.contains(rows), rows, self._nowhere)

    def _reading(self) -> AbstractContextManager[Any]:
        """Keep the records at their positions within the block."""
        return contextlib.nullcontext()

    def _fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None) -> None:
        self._check_length("reading")
        places = np.arange(len(rows)) if places is None else places
        with self._reading():
            at = self._where(rows)
            order = np.argsort(at)
            stored, fresh = np.split(order, [np.searchsorted(at[order], self._nowhere)])
            step = self._records_at_a_time
            for begin in range(0, len(stored), step):
                some = stored[begin : begin + step]
                records = np.empty((len(some), self.layout.record), dtype=np.uint8)
                self._move(records, at[some], rows[some], writing=False)
                self._unpack(records, target, torch.from_numpy(places[some]))
        if len(fresh):
            self._compute(rows[fresh], target, places[fresh])

    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        self._check_length("writing")
        order = np.argsort(rows)
        at, places = rows[order], order if places is None else places[order]
        with self._writing:
            step = self._records_at_a_time
            for begin in range(0, len(at), step):
                some = slice(begin, begin + step)
                self._move(self._records(source, places[some]), at[some], at[some], writing=True)
        self._check_length("writing")  # truncated meanwhile: these rows may be lost
        self.stored.mark(rows)

    @property
    def _records_at_a_time(self) -> int:
        return max(1, _CHUNK // self.layout.record)

    def _tensors(self, rows: Rows) -> list[torch.Tensor]:
        """Return the tensors of a record, in its order."""
        return [rows.weight, *(rows.state[name] for name in self.state)]

    def _unpack(self, records: np.ndarray, target: Rows, places: torch.Tensor) -> None:
        """Copy records [n, bytes] to ``places`` of ``target``."""
        end = 0
        for tensor in self._tensors(target):
            begin, end = end, end + tensor[:1].nbytes
            values = torch.from_numpy(records[:, begin:end].copy()).view(tensor.dtype)
            tensor.index_copy_(0, places, values.view(-1, *tensor.shape[1:]))

    def _records(self, source: Rows, places: np.ndarray) -> np.ndarray:
        """Return records [n, bytes] of the rows at ``places``."""
        records = np.zeros((len(places), self.layout.record), dtype=np.uint8)
        index, end = torch.from_numpy(places), 0
        for tensor in self._tensors(source):
            values = flat(tensor[index]).view(np.uint8).reshape(len(places), -1)
            records[:, end : end + values.shape[1]] = values
            end += values.shape[1]
        return records

    def _move(self, records: np.ndarray, at: np.ndarray, rows: np.ndarray, *, writing: bool) -> None:
        """Read the records [n, bytes] at ascending positions ``at`` [n], or write them there."""
        layout, fault = self.layout, np.zeros(4, dtype=np.int64)
        starts = layout.runs(at, writing=writing, direct=self.direct)
        if self._calls is None:
            runs = iter(range(len(starts) - 1))
            self._run(
                lambda buffer: self._move_runs(buffer, runs, starts, records, at, rows, fault, writing), starts, fault
            )
        else:
            from stoker.tables.stores.kernels import move_records

            given = (self._calls, self._fd, self.direct, writing, at, starts, layout.num_records)
            shape, cursor = (layout.per_block, layout.block, layout.record), np.zeros(1, dtype=np.int64)
            flattened = records.reshape(-1)
            self._run(lambda buffer: move_records(*given, *shape, flattened, buffer, cursor, fault), starts, fault)
        if fault[0]:
            raise self._error(int(fault[1]), int(rows[fault[2]]), "writing" if fault[3] else "reading")

    def _move_runs(
        self, buffer: np.ndarray, runs: Iterator[int], starts: np.ndarray, records: np.ndarray, at: np.ndarray,
        rows: np.ndarray, fault: np.ndarray, writing: bool,
    ) -> None:  # fmt: skip
        """Do ``kernels.move_records`` without Numba, and raise errors."""
        layout = self.layout
        for run in runs:
            if fault[0]:
                return
            some = slice(starts[run], starts[run + 1])
            offsets = layout.offset(at[some])
            base, end = int(offsets[0]), int(offsets[-1]) + layout.record
            if self.direct:
                unit = layout.block if writing else PAGE
                base, end = base // unit * unit, -(-end // unit) * unit
            if self.direct or not writing:
                self._transfer(buffer, base, end, rows[some], at[some], writing=False)
            inside = (offsets - base)[:, None] + np.arange(layout.record)
            if writing:
                buffer[inside] = records[some]
                self._transfer(buffer, base, end, rows[some], at[some], writing=True)
            else:
                records[some] = buffer[inside]

    def _run(self, task: Callable[[np.ndarray], None], starts: np.ndarray, fault: np.ndarray) -> None:
        """Run ``task`` on several threads, each with its own buffer."""
        helpers = min(self.concurrent_reads, -(-(len(starts) - 1) // _RUNS_PER_THREAD)) - 1
        futures = [self._workers().submit(self._with_buffer, task) for _ in range(helpers)]
        try:
            self._with_buffer(task)
            for future in futures:
                future.result()
        except BaseException:
            fault[0] += 1  # the others stop at their next run
            raise
        finally:
            wait(futures)  # after this, no thread writes to the caller's rows

    def _with_buffer(self, task: Callable[[np.ndarray], None]) -> None:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = page_aligned(self._span)
        task(buffer)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_owner != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.concurrent_reads, thread_name_prefix="stoker-home")
            self._pool_owner = os.getpid()
        return self._pool

    def _transfer(
        self, buffer: np.ndarray, base: int, end: int, rows: np.ndarray, at: np.ndarray, *, writing: bool
    ) -> None:
        """Read bytes ``base..end`` of the file to the start of ``buffer``, or write them: ``rows`` at ``at``."""
        view, done, action = buffer.data, 0, "writing" if writing else "reading"
        while done < end - base:
            try:
                got = self._call(view[done : end - base], base + done, writing)
            except OSError as error:
                raise self._error(error.errno or 0, self._cut(rows, at, base + done), action) from error
            done += got
            if got == 0 or (self.direct and done % PAGE and done < end - base):
                raise self._error(0, self._cut(rows, at, base + done), action)

    def _call(self, view: memoryview, offset: int, writing: bool) -> int:
        """Make one system call, which may move less than the whole ``view``; return the bytes moved."""
        if hasattr(os, "preadv"):
            return (os.pwritev if writing else os.preadv)(self._fd, [view], offset)
        with self._seeking:
            os.lseek(self._fd, offset, os.SEEK_SET)
            if writing:
                return os.write(self._fd, view)
            data = os.read(self._fd, len(view))
        view[: len(data)] = data
        return len(data)

    def _cut(self, rows: np.ndarray, at: np.ndarray, end: int) -> int | None:
        """Return the first of ``rows`` whose record, at ``at``, does not end by ``end``; None if there are no rows."""
        ends = (self.layout.offset(int(position)) + self.layout.record for position in at)
        last = int(rows[-1]) if len(rows) else None
        return next((int(row) for row, stop in zip(rows, ends, strict=True) if stop > end), last)

    def _place_of(self, row: int, action: str) -> str:
        """Describe the place of a row, for a message."""
        return f"{self.layout.record} B at byte {self.layout.offset(row):,}"

    def _lost(self, length: int) -> str:
        """Describe the rows that a file truncated to ``length`` has lost, for a message."""
        return f" Rows from {length // self.layout.block * self.layout.per_block:,} on are lost."

    def _check_length(self, action: str) -> None:
        """Raise HomeError if the length of the file has changed."""
        try:
            length = os.fstat(self._fd).st_size
        except OSError as error:
            raise self._error(error.errno or 0, None, action) from error
        if length != self.layout.file_bytes:
            raise self._error(0, None, action)

    def _error(self, code: int, row: int | None, action: str) -> HomeError:
        """Return the error for a failed system call, or (code 0) for a file that ended too early."""
        what = f"spill file {self.path}: {action}"
        if row is not None:
            what += f" row {row:,} ({self._place_of(row, action)})"
        again = "then resume from the last checkpoint."
        if code:
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({format_size(shutil.disk_usage(self.path.parent).free)} free on its disk)"
            remedy = _REMEDY.get(code, "Check the disk, or name a directory on another one")
            return HomeError(f"{what} failed: {os.strerror(code)} (errno {code}){free}. {remedy}; {again}")
        length, made = 0, self.layout.file_bytes
        with contextlib.suppress(OSError):
            length = os.fstat(self._fd).st_size
        if length == made:
            return HomeError(f"{what} failed: the system moved no bytes. Check the disk; {again}")
        lost = self._lost(length) if length < made else ""
        return HomeError(
            f"{what} failed: the file is {length:,} B long and was made {made:,} B long: something has changed its "
            f"length.{lost} Keep other programs away from it; {again}"
        )

    def _details(self) -> str:
        on_disk = format_size(self.layout.file_bytes)
        return f", up to {on_disk} in {self.path}{', direct' if self.direct else ''}"


def page_aligned(size: int) -> np.ndarray:
    """Return ``size`` bytes of zeros that begin at a page."""
    memory = np.zeros(size + PAGE, dtype=np.uint8)
    skip = -memory.ctypes.data % PAGE
    return memory[skip : skip + size]


def _no_direct(directory: Path) -> ConfigError:
    """Return the error for a directory whose file system does not support direct I/O."""
    return ConfigError(
        f"the file system of {directory} does not take direct I/O (O_DIRECT). Leave direct=False, or name a directory "
        "on a local disk."
    )


def _make_file(directory: str | Path | None, direct: bool) -> tuple[Path, int]:
    """Create a file in ``directory``; return its path and descriptor. Delete files that a kill left there."""
    folder = Path(tempfile.gettempdir() if directory is None else directory)
    if direct and not hasattr(os, "O_DIRECT"):
        raise _no_direct(folder)
    with errors_as(HomeError, f"a spill file cannot be made in {folder}", "Name a directory that you may write to."):
        if directory is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
        while True:
            path, fd = _open(folder, direct)
            lock_file(fd)
            if path.exists():
                return path, fd
            os.close(fd)  # another process in this directory removed it before it was locked


def _open(folder: Path, direct: bool) -> tuple[Path, int]:
    fd, name = tempfile.mkstemp(_SUFFIX, _PREFIX, folder)
    if direct:
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            _dispose(fd, Path(name), os.getpid())
            raise _no_direct(folder) from error
    return Path(name), fd


def _sweep(folder: Path) -> None:
    """Remove spill files whose process was killed: the system has released their locks."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                if lock_file(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _dispose(fd: int, path: Path, owner: int) -> None:
    """Close the file, and remove it if this process, not a parent, is its ``owner``."""
    with contextlib.suppress(OSError):  # the content of the file is lost anyway
        os.close(fd)
    if os.getpid() == owner:  # a forked child has the descriptor, but its parent owns the file
        with contextlib.suppress(OSError):
            path.unlink()
