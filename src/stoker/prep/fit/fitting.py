"""What is fitted on training rows: the split of every row, the tables, the statistics of dense columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stoker.base.files import hash_file
from stoker.base.ordered import ordered_map
from stoker.dataset.manifest import describe_file
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.fit.dense import DenseFit, fit_dense
from stoker.prep.fit.split_rules import PartRows, SplitFile, Splitter
from stoker.prep.fit.vocabulary import TableBuilder, read_dictionary
from stoker.prep.parse.ingest import IngestedBlock
from stoker.prep.parse.layout import SPLIT_CODES, Layout, feature_codes, raw_columns
from stoker.prep.stages.parts import PartFile, is_whole, made_beside, write_part
from stoker.prep.stages.task import Progress, Task
from stoker.rewrite.reorder import write_vocabulary

if TYPE_CHECKING:
    from stoker.prep.like import Like

__all__ = ["Fitting", "count_codes", "same_file"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class _TableJob:
    """A table to make, in any process."""

    name: str
    layout: Layout
    parts: list[PartRows]
    splits: SplitFile
    work: Path  # file of the ids behind the codes of every part, and of the counts by id
    vocabulary: Path
    done: dict[str, Any] | None  # the record of an earlier run

    def make(self, like: Like | None) -> tuple[dict[str, Any], bool]:
        """Make the table; return its record for the journal, and whether an earlier run left it."""
        done = self.done
        if done and is_whole(self.work, done) and ("vocab" not in done or same_file(self.vocabulary, done["vocab"])):
            return done, True
        features = [(i, column) for i, column in enumerate(self.layout.features) if column.table_name == self.name]
        first, buckets = features[0][1], features[0][1].hash_buckets
        counted = np.zeros((buckets or 0) + 1, np.int64)
        builder = TableBuilder(first.type)
        missing, total = 0, 0
        for part in self.parts:
            chosen = self.splits.train_rows(part)
            with part.open() as arrays:
                for index, column in features:
                    if buckets is not None:
                        counted += count_codes(arrays, self.layout, index, chosen, buckets + 1)
                        continue
                    values = read_dictionary(arrays, index, column.type)
                    counts = count_codes(arrays, self.layout, index, chosen, len(values) + 1)
                    missing += int(counts[0]) if column.missing == "category" else 0
                    total += int(counts.sum())
                    builder.add(values, counts[1:])
        if like is not None:
            counted = like.data.counts[self.name].numpy()
        if buckets is not None:
            return {**write_part(self.work, {"counts": counted}), "rows": buckets + 1}, False
        record: dict[str, Any] = {}
        if like is not None:
            found = builder.find(like.vocabulary(self.name))
        else:
            own = any(column.missing == "category" for _, column in features)
            found = builder.finish(min_count=first.min_count, missing=missing if own else None, total=total)
            counted = found.counts()
            with made_beside(self.vocabulary, self.work.parent) as path:
                write_vocabulary(found.frame, path)
            record = {"vocab": describe_file(self.vocabulary)}
        # What a code is looked up in: the id of a missing value, then those of the dictionary.
        known, refs = found.ids.astype(np.int32), builder.refs
        starts = np.cumsum([0, *(len(entries) + 1 for entries in refs)])
        ids = np.empty(starts[-1], np.int32)
        for place, (_, column) in zip(range(len(refs)), cycle(features), strict=False):
            start, stop = starts[place : place + 2]
            ids[start] = found.missing_id if column.missing == "category" else 0
            np.take(known, refs[place], out=ids[start + 1 : stop])
            refs[place] = refs[place][:0].copy()  # memory is given back as it goes
        written = write_part(self.work, {"ids": ids, "starts": starts, "counts": counted})
        return {**written, **record, "rows": found.num_embeddings}, False


def count_codes(arrays: PartFile, layout: Layout, index: int, chosen: Array | None, size: int) -> npt.NDArray[np.int64]:
    """Return [size] how often each code of a feature occurs in the rows of a part that ``chosen`` [n] marks."""
    if chosen is None:
        return np.zeros(size, np.int64)
    codes, lengths = feature_codes(arrays, layout, index)
    if not chosen.all():
        codes = codes[chosen if lengths is None else np.repeat(chosen, lengths)]
    return np.bincount(codes, minlength=size)


def same_file(path: Path, record: dict[str, Any]) -> bool:
    """Return whether a finished output still has the size and hash that the journal recorded."""
    return path.exists() and hash_file(path) == (record["bytes"], record["sha256"])


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
            part = PartRows(index=index, file=block.source.number, start=start, rows=block.rows, path=block.path)
            self.parts.append(part)
            start += block.rows
        self.splits = SplitFile(task.work / "splits")
        self.any_dropped = False  # whether rows were left out after the tables were fitted
        self.sizes = np.zeros((len(self.parts), 4), np.int64)  # rows in train, valid, test, nowhere
        self.table_files: dict[str, Path] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.dense: list[DenseFit] = []
        self._split()
        if not self.sizes[:, 0].any() and task.like is None:
            raise UnusableInput(
                f"the split rule {task.schema.split.rule!r} leaves no training row of "
                f"{int(self.sizes.sum()):,}. Change the split in the schema."
            )

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
        """Return where a row of a part is, for messages."""
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

    def fit(self) -> None:
        """Build the tables and fit the dense columns."""
        task, journal = self.task, self.task.journal
        names = list(dict.fromkeys(column.table_name for column in task.layout.features))
        directory = task.work / "tables"
        directory.mkdir(exist_ok=True)
        self.table_files = {name: directory / f"{number:05d}.part" for number, name in enumerate(names)}
        jobs = [
            _TableJob(
                name=name, layout=task.layout, parts=self.parts, splits=self.splits, work=self.table_files[name],
                vocabulary=task.out / "vocab" / f"{name}.parquet", done=journal.done.get(f"table {name}"),
            )
            for name in names
        ]  # fmt: skip
        make = methodcaller("make", task.like)
        executor = task.executor if task.like is None else None  # the dataset to prepare like is in this process
        for number, (name, (record, reused)) in enumerate(
            zip(names, ordered_map(make, jobs, task.threads, ahead=len(jobs), executor=executor), strict=True)
        ):
            self.tables[name] = record if reused else journal.add(f"table {name}", record)
            task.reused += reused
            task.report(Progress(stage="fit", done=number + 1, total=len(names), unit="steps"))
        self.dense = self._fit_dense()

    def _fit_dense(self) -> list[DenseFit]:
        task = self.task
        if task.like is not None:
            return task.like.dense
        if not task.layout.fitted:
            return [DenseFit.of(column) for column in task.schema.dense]
        if (done := task.journal.finished("dense")) is not None:
            return [DenseFit(**values) for values in done["fit"]]

        def rows_of(part: PartRows, look: Callable[[Any, Any], Any]) -> Any:
            with part.open() as arrays:
                return look(raw_columns(arrays, task.layout), self.splits.rows(part, 0))

        parts = [part for part in self.parts if self.sizes[part.index, 0]]
        found = fit_dense(task.schema.dense, parts, rows_of, task.threads)
        task.journal.add("dense", {"fit": [vars(item) for item in found]})
        return found
