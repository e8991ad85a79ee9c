"""Split the rows; fit tables and statistics of dense columns on the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.files import hash_file
from stoker.dataset.manifest import describe_file
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.fit.dense import DenseFit, fit_dense
from stoker.prep.fit.split_rules import SplitAssigner, SplitFile, no_training_row
from stoker.prep.fit.vocabulary import TableBuilder, as_raw_ids, read_dictionary
from stoker.prep.parse.dictionaries import hashes_of
from stoker.prep.parse.layout import SPLIT_CODES, Layout, feature_codes, raw_columns
from stoker.prep.parse.notation import BY_VALUE, notation_of, twins_of
from stoker.prep.stages.parts import Arrays, LogPart, atomic_path, is_whole, write_part
from stoker.prep.stages.task import StageProgress, Task
from stoker.rewrite.reorder import write_vocabulary

if TYPE_CHECKING:
    from stoker.prep.like import Like

Array = npt.NDArray[Any]
_LEAST_ROWS = 1_000  # of a table that grows


@dataclass(frozen=True, kw_only=True)
class _TableStep:
    """Build one table, in any process."""

    table: str
    layout: Layout
    parts: list[LogPart]
    splits: SplitFile
    work: Path  # file of the ids behind the codes of every part, and of the counts by id
    vocabulary: Path
    like: Like | None

    @property
    def name(self) -> str:
        return f"table {self.table}"

    @property
    def grows(self) -> bool:
        """Whether new values get ids after those of ``like``; raw ids need none."""
        column = next(column for column in self.layout.features if column.table_name == self.table)
        return self.like is not None and self.like.grow and column.oov != "grow"

    def is_whole(self, record: Mapping[str, Any]) -> bool:
        return is_whole(self.work, record) and ("vocab" not in record or same_file(self.vocabulary, record["vocab"]))

    def make(self) -> dict[str, Any]:
        features = [(i, column) for i, column in enumerate(self.layout.features) if column.table_name == self.table]
        first, buckets = features[0][1], features[0][1].hash_buckets
        counted = np.zeros((buckets or 0) + 1, np.int64)
        builder = TableBuilder(first.type)
        missing, total = 0, 0
        for part in self.parts:
            chosen = np.ones(part.rows, np.bool_) if self.grows else self.splits.train_rows(part)
            with part.open() as arrays:
                for index, column in features:
                    if buckets is not None:
                        counted += count_codes(arrays, index, chosen, buckets + 1)
                        continue
                    values = read_dictionary(arrays, index, column.type)
                    counts = count_codes(arrays, index, chosen, len(values) + 1)
                    missing += int(counts[0]) if column.missing == "category" else 0
                    total += int(counts.sum())
                    builder.add(values, counts[1:])
        if self.like is not None:
            counted = self.like.data.counts[self.table].numpy()
        if buckets is not None:
            return {**write_part(self.work, {"counts": counted}), "rows": buckets + 1}
        record: dict[str, Any] = {}
        if self.like is not None and not self.grows:
            found = builder.find(self.like.vocabulary(self.table))
        elif self.like is not None:
            found = builder.extend(self.like.vocabulary(self.table), min_count=first.min_count)
            added = found.frame["count"].to_numpy()[len(counted) - 1 :]
            counted = np.concatenate([counted, added.astype(np.int64)])
        else:
            own = any(column.missing == "category" for _, column in features)
            found = builder.finish(min_count=first.min_count, missing=missing if own else None, total=total)
            counted = found.counts()
        if self.like is None or self.grows:
            with atomic_path(self.vocabulary, self.work.parent) as path:
                write_vocabulary(found.frame, path)
            record = {"vocab": describe_file(self.vocabulary)}
            if first.type in ("string", "float"):
                before = "" if self.like is None else self.like.notations.get(self.table, "")
                record["notation"] = before if before.startswith(BY_VALUE) else notation_of(found.frame["value"])
            if first.type == "string" and self.like is None:
                record["twins"] = twins_of(found.frame["value"], record["notation"])
        known: Array = found.ids.astype(np.int32)
        missing_id, size = found.missing_id, found.num_embeddings
        if first.oov == "grow":
            known, missing_id = builder.raw_ids(), int(as_raw_ids(hashes_of(pl.Series([""])))[0])
            given = first.grow.rows if first.grow is not None else None
            size = given or max(_LEAST_ROWS, 2 * found.num_embeddings)
            if self.like is not None:
                size = self.like.data.schema.num_embeddings[self.table]
            counted = np.pad(counted[:size], (0, size - len(counted[:size])))  # as if rows came by falling count
        arrays_of_table = {"counts": counted}
        for place, (index, column) in enumerate(features):
            # The ids behind the codes, part by part: first that of a missing value, then those of the dictionary.
            refs = builder.refs[place :: len(features)]
            starts = np.cumsum([0, *(len(entries) + 1 for entries in refs)])
            ids = np.full(starts[-1], missing_id if column.missing == "category" else 0, known.dtype)
            for start, entries in zip(starts.tolist(), refs, strict=False):
                np.take(known, entries, out=ids[start + 1 : start + 1 + len(entries)])
            arrays_of_table |= {f"ids.{index}": ids, f"starts.{index}": starts}
        return {**write_part(self.work, arrays_of_table), **record, "rows": size}


def count_codes(arrays: Arrays, index: int, chosen: Array | None, size: int) -> npt.NDArray[np.int64]:
    """Return [size]: how often each code of a feature occurs in the rows of a part that ``chosen`` [n] selects."""
    if chosen is None:
        return np.zeros(size, np.int64)
    codes, lengths = feature_codes(arrays, index)
    if not chosen.all():
        codes = codes[chosen if lengths is None else np.repeat(chosen, lengths)]
    return np.bincount(codes, minlength=size)


def same_file(path: Path, record: Mapping[str, Any]) -> bool:
    """Return True if a finished output still has the size and hash of its journal record."""
    return path.exists() and hash_file(path) == (record["bytes"], record["sha256"])


class Fitting:
    """Parts, the split of their rows, and what was fitted on the training rows.

    Args:
        task: the preparation.
        parts: the finished parts in order.
    """

    def __init__(self, task: Task, parts: Sequence[LogPart]) -> None:
        self.task, self.parts = task, list(parts)
        self.splits = SplitFile(task.work / "splits")
        self.any_dropped = False  # whether rows were dropped after the tables were fitted
        self.sizes = np.zeros((len(self.parts), 4), np.int64)  # rows in train, valid, test, dropped
        self.table_files: dict[str, Path] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.dense: list[DenseFit] = []
        splitter = SplitAssigner(task.inner, self.parts, [path.name for path in task.files])
        self.splits.path.write_bytes(b"")
        for part in self.parts:
            found = splitter.assign(part)
            self._write(part, found)
            self._check_groups(part, found)
        if not self.sizes[:, 0].any() and task.like is None:
            raise no_training_row(task.schema, int(self.sizes.sum()))

    def _write(self, part: LogPart, found: npt.NDArray[np.uint8]) -> None:
        self.splits.write(part, found)
        self.sizes[part.index] = np.bincount(np.minimum(found, 3), minlength=4)

    def place_of(self, part: LogPart, row: int) -> str:
        """Return the file and number of a row, for messages."""
        start = next(other.start for other in self.parts if other.file == part.file)
        return f"{part.name}: row {part.start - start + row + 1:,}, not counting bad lines,"

    def _check_groups(self, part: LogPart, found: npt.NDArray[np.uint8]) -> None:
        """Raise an error if a row of a split has no group."""
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

    def drop(self, part: LogPart, rows: npt.NDArray[np.bool_]) -> None:
        """Drop rows from every split."""
        if rows.any():
            self.any_dropped = True
            self._write(part, np.where(rows, np.uint8(SPLIT_CODES["drop"]), self.splits.assign(part)))

    def fit(self) -> None:
        """Build the tables and fit the dense columns."""
        task = self.task
        names = list(dict.fromkeys(column.table_name for column in task.layout.features))
        directory = task.work / "tables"
        directory.mkdir(exist_ok=True)
        self.table_files = {name: directory / f"{number:05d}.part" for number, name in enumerate(names)}
        steps = [
            _TableStep(
                table=name, layout=task.layout, parts=self.parts, splits=self.splits, work=work,
                vocabulary=task.out / "vocab" / f"{name}.parquet", like=task.like,
            )
            for name, work in self.table_files.items()
        ]  # fmt: skip
        executor = task.executor if task.like is None else None  # only this process has the dataset of ``like``
        sizes, done = self._dictionary_sizes(), 0
        for step, record in task.run(steps, executor=executor, ahead=len(steps)):
            self.tables[step.table] = record
            done += sizes[step.table]
            task.report(StageProgress(stage="fit", done=done, total=sum(sizes.values()), unit="values"))
        self.dense = self._fit_dense()

    def _dictionary_sizes(self) -> Counter[str]:
        """Return the distinct values of the blocks by table, with one more each: about the work of a table."""
        columns = list(enumerate(self.task.layout.features))
        found = Counter(column.table_name for _, column in columns)
        for part in self.parts:
            with part.open() as arrays:
                for index, column in columns:
                    if column.hash_buckets is None:
                        name = "ends" if column.type == "string" else "values"
                        found[column.table_name] += len(arrays[f"{name}.{index}"])
        return found

    def _fit_dense(self) -> list[DenseFit]:
        task = self.task
        if task.like is not None:
            return task.like.dense
        if (done := task.journal.finished("dense")) is not None:
            return [DenseFit(**values) for values in done["fit"]]

        def rows_of(part: LogPart, look: Callable[[Any, Any], Any]) -> Any:
            with part.open() as arrays:
                return look(raw_columns(arrays, task.layout), self.splits.rows(part, 0))

        parts = [part for part in self.parts if self.sizes[part.index, 0]]
        found = fit_dense(task.schema.dense, parts, rows_of, task.threads)
        task.journal.add("dense", {"fit": [vars(item) for item in found]})
        return found
