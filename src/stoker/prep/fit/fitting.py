"""What training rows teach: the split of every row, the tables, the statistics of dense columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.files import hash_file
from stoker.base.ordered import ordered_map
from stoker.dataset.leftovers import UnusableInput
from stoker.dataset.manifest import describe_file
from stoker.prep.fit.build_tables import build_table, look_up_table
from stoker.prep.fit.dense_fit import fit_dense
from stoker.prep.fit.split_rules import PartRows, Splitter
from stoker.prep.fit.transforms import DenseFit
from stoker.prep.parse.ingest import IngestedBlock
from stoker.prep.parse.layout import SPLIT_CODES, raw_columns
from stoker.prep.stages.parts import Part
from stoker.prep.stages.task import Progress, Task

__all__ = ["Fitting", "same_file"]


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
            self.parts.append(PartRows(index=index, file=block.source.number, start=start, rows=block.rows))
            start += block.rows
        names = [path.name for path in task.files]
        self._splitter = Splitter(task.inner, self.parts, names, self.open)
        self._lock = threading.Lock()
        self._assigned: dict[int, npt.NDArray[np.uint8]] = {}
        self._dropped: dict[int, npt.NDArray[np.uint8]] = {}
        self.sizes = np.zeros((len(self.parts), 4), np.int64)  # rows in train, valid, test, nowhere
        for part in self.parts:
            self._measure(part)
            self._check_groups(part)
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

    def open(self, part: PartRows) -> Part:
        """The arrays of a part."""
        return self.task.parts.open(self.blocks[part.index].path)

    def place_of(self, part: PartRows, row: int) -> str:
        """Where a row of a part stands, for messages."""
        source = self.blocks[part.index].source
        start = next(other.start for other in self.parts if other.file == part.file)
        return f"{source.name}: row {part.start - start + row + 1:,}, not counting bad lines,"

    def _measure(self, part: PartRows) -> None:
        self.sizes[part.index] = np.bincount(np.minimum(self.assign(part), 3), minlength=4)

    def _check_groups(self, part: PartRows) -> None:
        """Refuse rows of a split that have no group."""
        column = self.task.schema.group
        if column is None:
            return
        with self.open(part) as arrays:
            without = np.flatnonzero((arrays["codes.group"] == 0) & (self.assign(part) < SPLIT_CODES["drop"]))
        if len(without):
            raise UnusableInput(
                f"{self.place_of(part, int(without[0]))} has no {column}, which tells the group of a row, as "
                f"{len(without) - 1:,} more rows near it. Let the split rule drop such rows, or fill the column."
            )

    def drop(self, part: PartRows, rows: npt.NDArray[np.bool_]) -> None:
        """Leave rows out of every split."""
        if rows.any():
            self._dropped[part.index] = np.packbits(rows)
            self._measure(part)

    @property
    def any_dropped(self) -> bool:
        """Whether rows were left out after the tables were fitted."""
        return bool(self._dropped)

    def assign(self, part: PartRows) -> npt.NDArray[np.uint8]:
        """Splits of a part's rows; the latest few parts are remembered, as tables ask for them in turn."""
        with self._lock:
            known = self._assigned.get(part.index)
        if known is None:
            known = self._splitter.assign(part)
            if self.task.like is not None:
                known = np.where(known == SPLIT_CODES["drop"], known, np.uint8(SPLIT_CODES["test"]))
            with self._lock:
                if len(self._assigned) > 64:
                    self._assigned.clear()
                self._assigned[part.index] = known
        if part.index in self._dropped:
            bits = np.unpackbits(self._dropped[part.index], count=part.rows).astype(np.bool_)
            return np.where(bits, np.uint8(255), known)
        return known

    def train_rows(self, part: PartRows) -> npt.NDArray[np.bool_] | None:
        if not self.sizes[part.index, 0]:
            return None
        chosen: npt.NDArray[np.bool_] = self.assign(part) == 0
        return chosen

    def _fit_tables(self) -> None:
        names = list(dict.fromkeys(column.table_name for column in self.task.layout.features))
        directory = self.task.work / "tables"
        directory.mkdir(exist_ok=True)
        self.table_files = {name: directory / f"{number:05d}.part" for number, name in enumerate(names)}

        def work(name: str) -> tuple[str, dict[str, Any], bool]:
            path = self.table_files[name]
            done = self.task.journal.finished(f"table {name}", path)
            vocabulary = self.task.out / "vocab" / f"{name}.parquet"
            if done is not None and (not done.get("vocab") or same_file(vocabulary, done["vocab"])):
                return name, done, True
            if self.task.like is not None:
                record = look_up_table(name, self.task.layout, self.parts, self.open, path, self.task.like)
                return name, record, False
            record = build_table(name, self.task.layout, self.parts, self.open, self.train_rows, path, vocabulary)
            if vocabulary.exists():
                record["vocab"] = describe_file(vocabulary)
            return name, record, False

        for number, (name, record, reused) in enumerate(ordered_map(work, names, self.task.threads, ahead=len(names))):
            self.tables[name] = record if reused else self.task.journal.add(f"table {name}", record)
            self.task.reused += reused
            self.task.report(Progress(stage="fit", done=number + 1, total=len(names), unit="steps"))

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
            with self.open(part) as arrays:
                return look(raw_columns(arrays, self.task.layout), np.flatnonzero(self.assign(part) == 0))

        parts = [part for part in self.parts if self.sizes[part.index, 0]]
        return fit_dense(self.task.schema.dense, parts, rows_of, self.task.threads), True


def same_file(path: Path, record: dict[str, Any]) -> bool:
    """Whether a finished output still has the size and hash that the journal recorded."""
    return path.exists() and hash_file(path) == (record["bytes"], record["sha256"])
