"""What training rows teach: the split of every row, the tables, the statistics of dense columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.files import hash_file
from stoker.base.ordered import ordered_map
from stoker.dataset.manifest import describe_file
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.fit.build_tables import build_table, look_up_table
from stoker.prep.fit.dense_fit import fit_dense
from stoker.prep.fit.split_rules import PartRows, SplitFile, Splitter
from stoker.prep.fit.transforms import DenseFit
from stoker.prep.parse.ingest import IngestedBlock
from stoker.prep.parse.layout import SPLIT_CODES, Layout, raw_columns
from stoker.prep.stages.parts import is_whole
from stoker.prep.stages.task import Progress, Task

__all__ = ["Fitting", "same_file"]


@dataclass(frozen=True, kw_only=True)
class _TableJob:
    """A table to make, in any process."""

    name: str
    layout: Layout
    parts: list[PartRows]
    splits: SplitFile
    work: Path  # file of the ids
    vocabulary: Path
    done: dict[str, Any] | None  # the record of an earlier run

    @property
    def is_done(self) -> bool:
        """Whether an earlier run has left all of it."""
        if self.done is None or not is_whole(self.work, self.done):
            return False
        return not self.done.get("vocab") or same_file(self.vocabulary, self.done["vocab"])


def _make_table(job: _TableJob) -> tuple[dict[str, Any], bool]:
    """Make a table; return its record, and whether an earlier run has left it."""
    if job.is_done:
        return job.done or {}, True
    record = build_table(job.name, job.layout, job.parts, job.splits, job.work, job.vocabulary)
    if job.vocabulary.exists():
        record["vocab"] = describe_file(job.vocabulary)
    return record, False


class Fitting:
    """Parts, the split of their rows, and what was fitted on those that train.

    Args:
        task: the preparation.
        blocks: the finished parts in order.
    """

    def __init__(self, task: Task, blocks: Sequence[IngestedBlock]) -> None:
        self.task, self.blocks = task, list(blocks)
        self.parts: list[PartRows] = []
        start = 0
        for index, block in enumerate(self.blocks):
            self.parts.append(
                PartRows(index=index, file=block.source.number, start=start, rows=block.rows, path=block.path)
            )
            start += block.rows
        self.splits = SplitFile(task.work / "splits")
        self.any_dropped = False  # whether rows were left out after the tables were fitted
        self.sizes = np.zeros((len(self.parts), 4), np.int64)  # rows in train, valid, test, nowhere
        self._split()
        if not self.sizes[:, 0].any() and task.like is None:
            raise UnusableInput(
                f"the split rule {task.schema.split.rule!r} leaves no training row of "
                f"{int(self.sizes.sum()):,}. Change the split in the schema."
            )
        self.table_files: dict[str, Path] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.dense: list[DenseFit] = []
        self._stopped = threading.Event()  # tables cannot be built, so nothing else is to be worked out

    def fit(self) -> None:
        """Build the tables and fit the dense columns, which take turns on the processors."""
        with ThreadPoolExecutor(1, thread_name_prefix="stoker-dense") as beside:
            dense = beside.submit(self._find_dense)
            try:
                self._fit_tables()
                self.dense, fresh = dense.result()
            except BaseException:
                self._stopped.set()
                raise
        if fresh:
            self.task.journal.add("dense", {"fit": [vars(item) for item in self.dense]})

    def _split(self) -> None:
        """Write the split of every row."""
        splitter = Splitter(self.task.inner, self.parts, [path.name for path in self.task.files])
        self.splits.path.write_bytes(b"")
        for part in self.parts:
            found = splitter.assign(part)
            if self.task.like is not None:
                found = np.where(found == SPLIT_CODES["drop"], found, np.uint8(SPLIT_CODES["test"]))
            self._write(part, found)
            self._check_groups(part, found)

    def _write(self, part: PartRows, found: npt.NDArray[np.uint8]) -> None:
        self.splits.write(part, found)
        self.sizes[part.index] = np.bincount(np.minimum(found, 3), minlength=4)

    def place_of(self, part: PartRows, row: int) -> str:
        """Where a row of a part stands, for messages."""
        source = self.blocks[part.index].source
        start = next(other.start for other in self.parts if other.file == part.file)
        return f"{source.name}: row {part.start - start + row + 1:,}, not counting bad lines,"

    def _check_groups(self, part: PartRows, found: npt.NDArray[np.uint8]) -> None:
        """Refuse rows of a split that have no group."""
        column = self.task.schema.group
        if column is None:
            return
        with part.open() as arrays:
            without = np.flatnonzero((arrays["codes.group"] == 0) & (found < SPLIT_CODES["drop"]))
        if len(without):
            raise UnusableInput(
                f"{self.place_of(part, int(without[0]))} has no {column}, which tells the group of a row, as "
                f"{len(without) - 1:,} more rows near it. Let the split rule drop such rows, or fill the column."
            )

    def drop(self, part: PartRows, rows: npt.NDArray[np.bool_]) -> None:
        """Leave rows out of every split."""
        if rows.any():
            self.any_dropped = True
            self._write(part, np.where(rows, np.uint8(SPLIT_CODES["drop"]), self.splits.assign(part)))

    def _fit_tables(self) -> None:
        names = list(dict.fromkeys(column.table_name for column in self.task.layout.features))
        directory = self.task.work / "tables"
        directory.mkdir(exist_ok=True)
        self.table_files = {name: directory / f"{number:05d}.part" for number, name in enumerate(names)}

        jobs = [
            _TableJob(
                name=name, layout=self.task.layout, parts=self.parts, splits=self.splits, work=self.table_files[name],
                vocabulary=self.task.out / "vocab" / f"{name}.parquet",
                done=self.task.journal.done.get(f"table {name}"),
            )
            for name in names
        ]  # fmt: skip
        for number, (job, (record, reused)) in enumerate(zip(jobs, self._make(jobs), strict=True)):
            self.tables[job.name] = record if reused else self.task.journal.add(f"table {job.name}", record)
            self.task.reused += reused
            self.task.report(Progress(stage="fit", done=number + 1, total=len(names), unit="steps"))

    def _make(self, jobs: Sequence[_TableJob]) -> Iterator[tuple[dict[str, Any], bool]]:
        if self.task.like is None:
            return self.task.map(_make_table, jobs, ahead=len(jobs))
        return ordered_map(self._look_up, jobs, self.task.threads, ahead=len(jobs))  # what it knows is here

    def _look_up(self, job: _TableJob) -> tuple[dict[str, Any], bool]:
        if job.is_done:
            return job.done or {}, True
        assert self.task.like is not None
        return look_up_table(job.name, job.layout, job.parts, job.work, self.task.like), False

    def _find_dense(self) -> tuple[list[DenseFit], bool]:
        """The fit of every dense column, and whether it is news to the journal."""
        if self.task.like is not None:
            return self.task.like.dense, False
        if not self.task.layout.fitted:
            return [DenseFit.of(column) for column in self.task.schema.dense], False
        if (done := self.task.journal.finished("dense")) is not None:
            return [DenseFit(**values) for values in done["fit"]], False

        def rows_of(part: PartRows, look: Callable[[Any, Any], Any]) -> Any:
            if self._stopped.is_set():
                raise CancelledError
            with part.open() as arrays:
                return look(raw_columns(arrays, self.task.layout), self.splits.rows(part, 0))

        parts = [part for part in self.parts if self.sizes[part.index, 0]]
        return fit_dense(self.task.schema.dense, parts, rows_of, self.task.threads), True


def same_file(path: Path, record: dict[str, Any]) -> bool:
    """Whether a finished output still has the size and hash that the journal recorded."""
    return path.exists() and hash_file(path) == (record["bytes"], record["sha256"])
