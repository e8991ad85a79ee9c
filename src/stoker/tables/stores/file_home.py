"""Rows in a sparse file: tables larger than main memory.

Legend: N rows at home, n rows of one call. A record is a row's weights, then its state tensors (``file_layout``); here
row r has position r, in :class:`stoker.tables.stores.log_home.LogHome` any.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.base.errors import ConfigError, HomeError
from stoker.base.units import format_size
from stoker.tables.storage import Rows
from stoker.tables.stores.file_layout import PAGE, Layout, plan_reads, plan_writes
from stoker.tables.stores.home import Home, Initial, flat
from stoker.tables.stores.home_file import dispose, make_file, no_direct

__all__ = ["FileHome"]

_SPAN = 128 * 1024  # bytes moved by one system call at most
_RUNS_PER_THREAD = 4  # fewer are not worth waking a thread for
_REMEDY = {
    errno.ENOSPC: "The disk is full: free space on it, or name a directory on a larger one",
    errno.EDQUOT: "Your disk quota is used up: free space, or name a directory on another disk",
    errno.EFBIG: "A limit on the size of files stands in the way: raise it (ulimit -f), or use another file system",
    errno.EIO: "The device failed: look at the system log, and name a directory on another disk",
    errno.EBADF: "The file was closed by other code in this process: keep that away from it",
}


class FileHome(Home):
    """Rows in one sparse file, read and written at random with many system calls in flight.

    Fetches and stores go through the system's page cache, which may take all memory that is free and gives it back
    when asked. With ``direct`` they pass it by: memory use is then known, and every row that is not in a slot costs a
    disk access; a store reads the rest of a page before it writes it, unless the whole page is stored.

    The file is of no use to any other run: rows leave through ``read``, into a checkpoint. In a named directory it can
    be seen while it is used, is removed by :meth:`close`, at exit, or when the home is no longer used, and after a kill
    by the next home made there. In the temporary directory (beware: on some systems that is memory) it is unnamed
    from the start.

    Args:
        initial: what the rows are before they are first stored.
        state: as for :class:`stoker.tables.stores.home.Home`.
        directory: where the file goes, made if missing; None means the system's temporary directory.
        direct: pass the page cache by (O_DIRECT), where the file system can.
        concurrent_reads: system calls in flight at once, each with a thread of its own.

    Raises:
        ConfigError: a setting that cannot work here.
        HomeError: the file cannot be made.

    Warns:
        UserWarning: the disk could not hold all rows. Space is taken as rows are stored, so it may yet be enough.
    """

    kind = "file"

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
        self._nowhere = self.layout.num_records  # the position of a row that was never stored
        self.path, self._fd = make_file(directory, direct)
        self._remove = weakref.finalize(self, dispose, self._fd, self.path, os.getpid())
        if directory is None:
            with contextlib.suppress(OSError):  # Windows keeps the name of an open file; it goes at close
                self.path.unlink()
        try:
            os.ftruncate(self._fd, self.layout.file_bytes)
        except OSError as error:
            self._remove()
            raise HomeError(
                f"home file {self.path}: setting its length to {format_size(self.layout.file_bytes)} failed: {error}. "
                f"{_REMEDY.get(error.errno or 0, 'Name a directory on a file system that allows large sparse files')}."
            ) from error
        free = shutil.disk_usage(self.path.parent).free
        if free < self.layout.file_bytes:
            warnings.warn(
                f"home file {self.path} may grow to {format_size(self.layout.file_bytes)} for {self.num_rows:,} rows, "
                f"but its disk has {format_size(free)} free. Rows take space when they are first stored; if too many "
                "are, training stops with an error. Name a directory on a larger disk to be safe.",
                stacklevel=2,
            )
        if direct:
            self._try_direct()
        self._span = max(_SPAN, self.layout.block)
        self._calls = self._find_calls()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_owner = os.getpid()
        self._local = threading.local()
        # Whole blocks are read, changed and written: two stores may not do so to one block at once.
        self._writing: Any = threading.Lock() if direct else contextlib.nullcontext()
        self._seeking = threading.Lock()

    def flush(self) -> None:
        """Wait until all stored rows are on the disk.

        The system reports some failures of a disk only here: call it after the rows of a checkpoint were read.
        """
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

    def _lay_out(self) -> Layout:
        return Layout.of(self.num_rows, self.row_bytes)

    def _where(self, rows: np.ndarray) -> np.ndarray:
        """The position of each of ``rows`` [n]."""
        return np.where(self.held.of(rows), rows, self._nowhere)

    def _reading(self) -> AbstractContextManager[Any]:
        """While this is open, what lies at a position stays there."""
        return contextlib.nullcontext()

    def _fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None) -> None:
        self._check_length("reading")
        with self._reading():
            at, rows, places = _ascending(self._where(rows), rows, places)
            layout, nowhere = self.layout, self._nowhere
            starts = np.empty(len(rows) + 1, dtype=np.int64)
            fault = np.zeros(4, dtype=np.int64)
            if self._calls is None:
                runs = plan_reads(at, nowhere, layout.per_block, layout.block, layout.record, self._span, starts)
                self._plain_fetch(rows, at, target, places, starts[: runs + 1], fault)
                return
            from stoker.tables.stores import file_kernels as kernels

            runs = kernels.plan_reads(at, nowhere, layout.per_block, layout.block, layout.record, self._span, starts)
            widths = self._kernel_widths()
            common = (self._calls, self._fd, self.direct, rows, at, nowhere, places, starts, runs)
            shape = (layout.per_block, layout.block, layout.record)
            initial = (self.initial.first_row, self.initial.keys, self.initial.scales)
            columns, cursor = self._columns(target), np.zeros(1, dtype=np.int64)
            self._run(
                lambda buffer: kernels.fetch(*common, *shape, *columns, *widths, *initial, buffer, cursor, fault),
                runs,
                fault,
            )

    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        self._check_length("writing")
        rows, _, places = _ascending(rows, rows, places)
        layout = self.layout
        starts = np.empty(len(rows) + 1, dtype=np.int64)
        fault = np.zeros(4, dtype=np.int64)
        with self._writing:
            if self._calls is None:
                runs = plan_writes(rows, layout.per_block, layout.block, self._span, self.direct, starts)
                self._plain_store(rows, source, places, starts[: runs + 1], fault)
            else:
                from stoker.tables.stores import file_kernels as kernels

                runs = kernels.plan_writes(rows, layout.per_block, layout.block, self._span, self.direct, starts)
                widths = self._kernel_widths()
                common = (self._calls, self._fd, self.direct, rows, places, starts, runs, self.num_rows)
                shape = (layout.per_block, layout.block, layout.record)
                columns, cursor = self._columns(source), np.zeros(1, dtype=np.int64)
                self._run(
                    lambda buffer: kernels.store(*common, *shape, *columns, *widths, buffer, cursor, fault), runs, fault
                )
        self._check_length("writing")  # cut short meanwhile: these rows may be among the lost
        self.held.mark(rows)

    def _run(self, task: Callable[[np.ndarray], None], runs: int, fault: np.ndarray) -> None:
        """Run ``task`` on several threads, each with a buffer of its own, and raise what went wrong."""
        helpers = min(self.concurrent_reads, -(-runs // _RUNS_PER_THREAD)) - 1
        futures = [self._workers().submit(self._with_buffer, task) for _ in range(helpers)]
        try:
            self._with_buffer(task)
            for future in futures:
                future.result()
        except BaseException:
            fault[0] += 1  # the others stop at their next run
            raise
        finally:
            wait(futures)  # nobody may write to the caller's rows after this
        if fault[0]:
            raise self._error(int(fault[1]), int(fault[2]), "writing" if fault[3] else "reading")

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

    def _find_calls(self) -> np.ndarray | None:
        if not self.native:
            return None
        from stoker.tables.stores.file_kernels import system_calls

        calls = system_calls()
        return None if calls is None else np.array(calls, dtype=np.int64)

    def _try_direct(self) -> None:
        """One direct read: some file systems accept the flag and refuse its use."""
        try:
            os.preadv(self._fd, [page_aligned(PAGE).data], 0)
        except OSError as error:
            self._remove()
            raise no_direct(self.path.parent) from error

    def _plain_fetch(
        self,
        rows: np.ndarray,
        at: np.ndarray,
        target: Rows,
        places: np.ndarray,
        starts: np.ndarray,
        fault: np.ndarray,
    ) -> None:
        """``file_kernels.fetch`` without Numba."""
        layout, held = self.layout, at != self._nowhere
        records = np.zeros((len(rows), layout.record), dtype=np.uint8)
        runs = iter(range(len(starts) - 1))

        def task(buffer: np.ndarray) -> None:
            for run in runs:
                begin, stop = int(starts[run]), int(starts[run + 1])
                if fault[0]:
                    return
                if not held[begin]:
                    continue
                base, end = layout.offset(int(at[begin])), layout.offset(int(at[stop - 1])) + layout.record
                if self.direct:
                    base, end = base // PAGE * PAGE, -(-end // PAGE) * PAGE
                self._read_into(buffer, base, end, rows[begin:stop], at[begin:stop])
                for i in range(begin, stop):
                    first = layout.offset(int(at[i])) - base
                    records[i] = buffer[first : first + layout.record]

        self._run(task, len(starts) - 1, fault)
        index = torch.from_numpy(places)
        end = self.dim * self.dtype.itemsize
        weight = torch.from_numpy(records[:, :end].copy()).view(self.dtype)
        if not held.all():
            weight[torch.from_numpy(~held)] = self.initial.rows(rows[~held])
        target.weight[index] = weight
        for (name, kind), width in zip(self.state.items(), self.widths, strict=True):
            begin, end = end, end + 4 * width
            tensor = torch.from_numpy(records[:, begin:end].copy()).view(torch.float32)
            target.state[name][index] = tensor if kind == "row" else tensor.squeeze(1)

    def _records(self, source: Rows, places: np.ndarray) -> np.ndarray:
        """Records [n, bytes] of the rows at ``places``."""
        records = np.zeros((len(places), self.layout.record), dtype=np.uint8)
        index, end = torch.from_numpy(places), 0
        for tensor in (source.weight, *(source.state[name] for name in self.state)):
            values = flat(tensor[index]).view(np.uint8).reshape(len(places), -1)
            records[:, end : end + values.shape[1]] = values
            end += values.shape[1]
        return records

    def _plain_store(
        self, rows: np.ndarray, source: Rows, places: np.ndarray, starts: np.ndarray, fault: np.ndarray
    ) -> None:
        """``file_kernels.store`` without Numba."""
        layout, records = self.layout, self._records(source, places)
        runs = iter(range(len(starts) - 1))

        def task(buffer: np.ndarray) -> None:
            for run in runs:
                begin, stop = int(starts[run]), int(starts[run + 1])
                if fault[0]:
                    return
                base, end = layout.offset(int(rows[begin])), layout.offset(int(rows[stop - 1])) + layout.record
                if self.direct:
                    base, end = base // layout.block * layout.block, -(-end // layout.block) * layout.block
                    self._read_into(buffer, base, end, rows[begin:stop], rows[begin:stop])
                for i in range(begin, stop):
                    at = layout.offset(int(rows[i])) - base
                    buffer[at : at + layout.record] = records[i]
                self._write_from(buffer, base, end, rows[begin:stop], rows[begin:stop])

        self._run(task, len(starts) - 1, fault)

    def _read_into(self, buffer: np.ndarray, base: int, end: int, rows: np.ndarray, at: np.ndarray) -> None:
        """Bytes ``base..end`` of the file to the start of ``buffer``; for errors: ``rows`` at ``at`` lie there."""
        view, done = buffer.data, 0
        while done < end - base:
            try:
                if hasattr(os, "preadv"):
                    got = os.preadv(self._fd, [view[done : end - base]], base + done)
                else:
                    with self._seeking:
                        os.lseek(self._fd, base + done, os.SEEK_SET)
                        data = os.read(self._fd, end - base - done)
                    got = len(data)
                    view[done : done + got] = data
            except OSError as error:
                raise self._error(error.errno or 0, self._cut(rows, at, base + done), "reading") from error
            done += got
            if got == 0 or (self.direct and done % PAGE and done < end - base):
                raise self._error(0, self._cut(rows, at, base + done), "reading")

    def _write_from(self, buffer: np.ndarray, base: int, end: int, rows: np.ndarray, at: np.ndarray) -> None:
        view, done = buffer.data, 0
        while done < end - base:
            try:
                if hasattr(os, "pwritev"):
                    done += os.pwritev(self._fd, [view[done : end - base]], base + done)
                else:
                    with self._seeking:
                        os.lseek(self._fd, base + done, os.SEEK_SET)
                        done += os.write(self._fd, view[done : end - base])
            except OSError as error:
                raise self._error(error.errno or 0, self._cut(rows, at, base + done), "writing") from error

    def _cut(self, rows: np.ndarray, at: np.ndarray, end: int) -> int | None:
        """The first of ``rows`` whose record, at ``at``, does not end by ``end``; None if there are no rows."""
        ends = (self.layout.offset(int(position)) + self.layout.record for position in at)
        last = int(rows[-1]) if len(rows) else None
        return next((int(row) for row, stop in zip(rows, ends, strict=True) if stop > end), last)

    def _place_of(self, row: int, action: str) -> str:
        """Where a row lies, for a message."""
        return f"{self.layout.record} B at byte {self.layout.offset(row):,}"

    def _lost(self, length: int) -> str:
        """What a file cut to ``length`` has lost, for a message."""
        return f" Rows from {length // self.layout.block * self.layout.per_block:,} on are lost."

    def _check_length(self, action: str) -> None:
        """Raise if the file is no longer as long as it was made."""
        try:
            length = os.fstat(self._fd).st_size
        except OSError as error:
            raise self._error(error.errno or 0, None, action) from error
        if length != self.layout.file_bytes:
            raise self._error(0, None, action)

    def _error(self, code: int, row: int | None, action: str) -> HomeError:
        """The error for a failed system call, or (code 0) for a file that ended too early."""
        what = f"home file {self.path}: {action}"
        if row is not None:
            what += f" row {row:,} ({self._place_of(row, action)})"
        again = "then resume from the last checkpoint."
        if code:
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({format_size(shutil.disk_usage(self.path.parent).free)} free on its disk)"
            remedy = _REMEDY.get(code, "Check the disk, or name a directory on another one")
            return HomeError(f"{what} failed: {os.strerror(code)} (errno {code}){free}. {remedy}; {again}")
        try:
            length = os.fstat(self._fd).st_size
        except OSError:
            length = 0
        made, lost = self.layout.file_bytes, ""
        if length == made:
            return HomeError(f"{what} failed: the system moved no bytes. Check the disk; {again}")
        if length < made:
            lost = self._lost(length)
        return HomeError(
            f"{what} failed: the file is {length:,} B long and was made {made:,} B long: something has changed its "
            f"length.{lost} Keep other programs away from it; {again}"
        )

    def _details(self) -> str:
        on_disk = format_size(self.layout.file_bytes)
        return f", up to {on_disk} in {self.path}{', direct' if self.direct else ''}"


def _ascending(
    at: np.ndarray, rows: np.ndarray, places: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions in the order of the file, and the row and the place of each."""
    if (at[1:] >= at[:-1]).all():
        return at, rows, np.arange(len(rows), dtype=np.int64) if places is None else places
    order = np.argsort(at)
    return at[order], rows[order], order if places is None else places[order]


def page_aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + PAGE, dtype=np.uint8)
    skip = -memory.ctypes.data % PAGE
    return memory[skip : skip + size]
