"""Epoch lookahead: the ids of an epoch are read once before its first step, to find next uses beyond the window.

The order of an epoch is a formula, so it can be read twice. A forward pass writes the distinct rows of every batch to a
temporary file, in the same order in which :meth:`SlottedRows.announce` will get them. A backward pass replaces each by
the number of batches until the row's next use. So a residency decides as if it knew the whole epoch: by Belady's rule
(1966), which has the fewest possible misses.

This takes 4 bytes on disk for every distinct row of every batch, and 4 for every row of the table during the backward
pass; in memory 8 bytes a batch, and the current chunk. The mapped pages belong to the page cache, so the system can
reclaim them.

Legend: T batches of the rest of an epoch, U distinct rows of a batch, N rows of a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stoker.base import spool
from stoker.base.errors import HomeError, errors_as
from stoker.base.progress import Progress, quiet
from stoker.base.spool import Spool
from stoker.dataset.batch import Batch
from stoker.tables.slots.residency import Ints

_OFTEN = 0.1  # seconds between two reports
_NARROW = 2**31  # fewer rows have addresses of 32 bits


class EpochBatches(Protocol):
    """Batches with a known number."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


@runtime_checkable
class Rereadable(Protocol):
    """A stream whose epochs can be read ahead, such as :class:`stoker.dataset.split.BatchStream`."""

    def rest_of_epoch(self, step: int, *, ids_only: bool) -> EpochBatches:
        """Return the batches from number ``step`` to the end of its epoch, without moving the stream.

        ``ids_only``: ids and offsets are enough.
        """
        ...


def _disk(directory: Path | None) -> AbstractContextManager[None]:
    """Raise an error with a remedy if temporary files fail."""
    return errors_as(
        HomeError, f"next uses cannot be recorded in {directory or 'the temporary directory'}",
        "Free space there, name another directory (the environment's TMPDIR; for a spill file: home_path), or leave "
        "epoch_lookahead out.",
    )  # fmt: skip


class Recording:
    """The next uses of one group's N rows in a sequence of batches: ``add`` them all, ``link``, then ``take``.

    Temporary files are in ``directory``; None means the system's temporary directory.
    """

    def __init__(self, num_rows: int, directory: Path | None = None) -> None:
        self._num_rows, self._directory = num_rows, directory
        self._begins = [0]
        with _disk(directory):
            self._spool = Spool(np.int32 if num_rows <= _NARROW else np.int64, directory)

    def add(self, rows: Ints) -> None:
        """Append the distinct addresses [U] of the next batch."""
        with _disk(self._directory):
            self._spool.add(rows)
        self._begins.append(self._begins[-1] + len(rows))

    def link(self, advance: Callable[[int], None] = lambda done: None) -> None:
        """Replace rows by the batches until their next use; call ``advance`` with the batches done."""
        begins = np.array(self._begins, np.int64)
        total = len(begins) - 1
        with _disk(self._directory), Spool(np.int32, self._directory) as file:
            file.reserve(self._num_rows)
            soonest = file.mapped()  # [N] number of the batch of the next use, from 1 on; 0: none
            for first, last in reversed(list(spool.stretches(begins))):
                values = self._spool.read(self._begins[first], self._begins[last])
                for number in range(last, first, -1):
                    places = slice(begins[number - 1] - begins[first], begins[number] - begins[first])
                    rows = values[places]
                    following = soonest[rows]
                    soonest[rows] = number
                    values[places] = np.where(following > 0, following - number, 0)
                self._spool.write(self._begins[first], values)
                advance(total - first)

    def take(self, number: int) -> npt.NDArray[np.int32]:
        """Return batches [U] from batch ``number`` (counted from 0) until the next use of its rows; 0: none known."""
        with _disk(self._directory):
            return self._spool.read(self._begins[number], self._begins[number + 1]).astype(np.int32, copy=False)

    def close(self) -> None:
        """Delete the file."""
        self._spool.close()


class EpochLookahead:
    """The next uses of the rows of each batch of a stream, recorded one epoch at a time, up to its end.

    ``groups``: for each, a function for its distinct rows of a batch, its number of rows, and the directory of
    temporary files (None: the system's). ``hurry`` is called while an epoch is recorded; True stops that, and no next
    use in the epoch is known.
    """

    def __init__(
        self, stream: Rereadable, groups: Sequence[tuple[Callable[[Batch], Ints], int, Path | None]],
        progress: Progress | None, hurry: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.seconds = 0.0  # spent recording
        self._stream, self._groups = stream, groups
        self._progress, self._hurry = progress or quiet, hurry
        self._begin = self._end = -1  # steps of the batches recorded
        self._recordings: list[Recording] = []

    def upcoming(self, batch: Batch) -> list[npt.NDArray[np.int32] | None]:
        """Return batches until the next use of the batch's distinct rows [U], for each group; None: not known.

        The first batch of an epoch, or after a gap, starts the recording of the rest of its epoch.
        """
        if not self._begin <= batch.step < self._end:
            start = time.perf_counter()
            self._record(batch.step)
            self.seconds += time.perf_counter() - start
        if not self._recordings:
            return [None] * len(self._groups)
        return [recording.take(batch.step - self._begin) for recording in self._recordings]

    def _record(self, step: int) -> None:
        self.close()
        batches = self._stream.rest_of_epoch(step, ids_only=True)
        total = len(batches)
        self._begin, self._end = step, step + total
        if not total:
            return
        with ExitStack() as unfinished:
            made = [unfinished.enter_context(closing(Recording(rows, where))) for _, rows, where in self._groups]
            for batch in self._reported("reading ids of the epoch", batches, total):
                if self._hurry():
                    return
                for recording, (rows, _, _) in zip(made, self._groups, strict=True):
                    recording.add(rows(batch))
            for recording in made:
                recording.link(lambda done: self._progress("linking next uses", done, total))
            unfinished.pop_all()
            self._recordings = made

    def _reported(self, what: str, batches: Iterable[Batch], total: int) -> Iterator[Batch]:
        last = -_OFTEN
        for done, batch in enumerate(batches):
            if (now := time.monotonic()) - last >= _OFTEN:
                last = now
                self._progress(what, done, total)
            yield batch
        self._progress(what, total, total)

    def close(self) -> None:
        """Delete the files; a later batch of the epoch starts another recording."""
        for recording in self._recordings:
            recording.close()
        self._recordings = []
        self._begin = self._end = -1
