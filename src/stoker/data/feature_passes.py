"""Features over all rows: learned ones fitted on training rows, those that look back worked out group by group.

Each pass writes the outputs of some features to one Parquet file, in the order of the rows. Passes follow the list of
features; neighbours in it share a pass as far as none has to be fitted on another's output. What several features need
of a row - codes of key columns, its fold, the share of its group - is worked out once, into a file beside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from stoker.data.dictionary_kernels import splitmix
from stoker.data.ordered import ordered_map
from stoker.data.parts import checksum
from stoker.data.task import Progress, Task
from stoker.errors import DataError
from stoker.features.base import ROW, Derivation, leading
from stoker.features.engine import reason_of
from stoker.features.hashing import hash_values
from stoker.features.keys import Coder, batches, code_column
from stoker.features.learned import JOIN, LABEL, Learned, LearnedTable, MeanTargetEncoding
from stoker.features.past import Past, work_out
from stoker.features.pipeline import apply_feature, in_runs

__all__ = ["GROUP_ROWS", "SPLIT", "FeaturePasses", "passes_of"]

SPLIT = "__split"  # 0 train, 1 valid, 2 test, 255 nowhere; UInt8
GROUP_ROWS = 2**22  # rows of the groups that are worked on together, about: they lie in memory
_ROWS = 2**17  # of a row group
_MANY = 2**20  # rows whose features are put in order together


def passes_of(features: Sequence[Derivation]) -> list[list[Derivation]]:
    """The features behind the leading ones, in runs that are worked out together."""
    runs: list[list[Derivation]] = []
    for feature in features[leading(features) :]:
        past = isinstance(feature, Past)
        made = {output for other in (runs[-1] if runs else []) for output in other.outputs}
        fitted_on = isinstance(feature, Past | Learned) and made & set(feature.inputs)
        if not runs or fitted_on or isinstance(runs[-1][0], Past) != past:
            runs.append([])
        runs[-1].append(feature)
    return runs


class FeaturePasses:
    """Works the features out and fits the learned ones.

    Args:
        task: the preparation.
        rows: Parquet files of the rows in order, with raw columns and leading features.
        keys: Parquet file with ``__row``, ``__label`` and ``__split`` of the same rows.
        count: of the rows.
        learned: tables of an earlier preparation; None: they are fitted here.
    """

    def __init__(
        self, task: Task, rows: Sequence[Path], keys: Path, count: int, learned: Mapping[str, LearnedTable] | None
    ) -> None:
        self.task, self.rows, self.keys, self.count = task, list(rows), keys, count
        self.given = learned
        self.learned: dict[str, LearnedTable] = dict(learned or {})
        self.files: list[Path] = []
        self._folder = task.work / "passes"
        self._folder.mkdir(exist_ok=True)
        self._coder = Coder()
        self._helpers: list[Path] = []  # files of helper columns; worked out again by a run that goes on

    def run(self) -> None:
        """Work out all features; ``files`` are the passes then, ``learned`` what was fitted."""
        runs = passes_of(self.task.schema.feature)
        for number, features in enumerate(runs):
            self.task.report(Progress(stage="features", done=number, total=len(runs), unit="steps"))
            path = self._folder / f"{number:03d}.parquet"
            done = self.task.journal.finished(f"pass {number}", path) is not None
            learned = [feature for feature in features if isinstance(feature, Learned)]
            again = self.given is None and any(self._finished(feature) is None for feature in learned)
            if done:
                self.task.reused += 1
            if not done or again:
                with _explained(features):
                    self._help(features, number)
            if self.given is None:
                self._fit(learned)
            if not done:
                beside = path.with_suffix(".tmp")
                with _explained(features):
                    if isinstance(features[0], Past):
                        self._look_back([one for one in features if isinstance(one, Past)], number, beside)
                    else:
                        self._attach(features, beside)
                os.replace(beside, path)
                self.task.journal.add(f"pass {number}", checksum(path))
            self.files.append(path)
        for file in self._helpers:
            file.unlink()
        self._helpers = []
        self.task.report(Progress(stage="features", done=len(runs), total=len(runs), unit="steps"))

    def _fit(self, features: list[Learned]) -> None:
        for feature, (table, record) in zip(
            features, ordered_map(self._learn, features, self.task.threads), strict=True
        ):
            self.learned[feature.name] = table
            if record is None:
                self.task.reused += 1
            else:
                self.task.journal.add(f"feature {feature.name}", record)

    def _help(self, features: Sequence[Derivation], number: int) -> None:
        """Write the helper columns of some features that are not there yet."""
        there = self.whole().collect_schema()
        learned = [feature for feature in features if isinstance(feature, Learned)]
        keys = [key for key in dict.fromkeys(key for one in learned for key in one.keys)
                if code_column(key) not in there]  # fmt: skip
        folds = {one.fold_column: one.fold() for one in learned if isinstance(one, MeanTargetEncoding)}
        folds = {name: fold for name, fold in folds.items() if name not in there}
        groups = dict.fromkeys(feature.by for feature in features if isinstance(feature, Past))
        shared = [by for by in groups if _share_column(by) not in there] if self.shares > 1 else []
        if not (keys or folds or shared):
            return
        hashed = dict.fromkeys(name for by in shared for name in by)
        columns = dict.fromkeys([*keys, *hashed])
        path = self._folder / f"{number:03d}.helpers"
        writer: Any = None
        try:
            for rows in batches(self.whole().select(*columns, *folds.values())):
                made = ordered_map(partial(self._codes, rows), keys, self.task.threads)
                hashes = {name: hash_values(rows.get_column(name)) for name in hashed}
                shares = [
                    _share_of([hashes[name] for name in by], self.shares).alias(_share_column(by)) for by in shared
                ]
                table = pl.DataFrame([*made, *rows.select(list(folds)).get_columns(), *shares]).to_arrow()
                writer = writer or pq.ParquetWriter(path, table.schema, compression="lz4")
                writer.write_table(table, row_group_size=_ROWS)
        finally:
            if writer is not None:
                writer.close()
        self._helpers.append(path)

    def _codes(self, rows: pl.DataFrame, key: str) -> pl.Series:
        return pl.Series(code_column(key), self._coder.add(key, rows.get_column(key)))

    @property
    def shares(self) -> int:
        """Into how many shares groups are dealt."""
        return -(-self.count // GROUP_ROWS)

    def whole(self) -> pl.LazyFrame:
        """All rows with all that is known of them so far."""
        return pl.concat(
            [
                pl.scan_parquet(files)
                for files in (self.rows, [self.keys], *([file] for file in (*self.files, *self._helpers)))
            ],
            how="horizontal",
        )

    def part(self, rows: Path, start: int, count: int) -> pl.LazyFrame:
        """The rows of one file, which are the rows [start, start + count) of all."""
        beside = [pl.scan_parquet(file).slice(start, count) for file in (self.keys, *self.files)]
        return pl.concat([pl.scan_parquet(rows), *beside], how="horizontal")

    def _files(self, feature: Learned) -> tuple[Path, Path]:
        """Where what a feature learned lies: its table, and the sums of its folds."""
        folder = self.task.work / "features"
        return folder / f"{feature.name}.parquet", folder / f"{feature.name}.folds"

    def _finished(self, feature: Learned) -> dict[str, Any] | None:
        """The record of what an earlier run has left of a feature, if all of it is whole."""
        path, folds = self._files(feature)
        done = self.task.journal.finished(f"feature {feature.name}", path)
        whole = done is None or done["folds"] is None or (folds.exists() and checksum(folds) == done["folds"])
        return done if whole else None

    def _learn(self, feature: Learned) -> tuple[LearnedTable, dict[str, Any] | None]:
        """What a feature learned, and its record for the journal; None where an earlier run has left it."""
        path, folds = self._files(feature)
        path.parent.mkdir(parents=True, exist_ok=True)
        if (done := self._finished(feature)) is not None:
            kept = dict(np.load(folds)) if done["folds"] is not None else None
            return LearnedTable(table=pl.read_parquet(path), facts=done["facts"], folds=kept), None
        wanted = dict.fromkeys((*feature.inputs, *feature.reads(train=feature.out_of_fold), ROW, LABEL))
        with _explained([feature]):
            found = feature.learn(self.whole().filter(pl.col(SPLIT) == 0).select(*wanted), self._coder)
        _write(path, found.table)
        if found.folds is not None:
            beside = folds.with_suffix(".tmp")
            with beside.open("wb") as file:
                np.savez(file, **found.folds)
            os.replace(beside, folds)
        kept_folds = checksum(folds) if found.folds is not None else None
        return found, {**checksum(path), "facts": found.facts, "folds": kept_folds}

    def _attach(self, features: Sequence[Derivation], path: Path) -> None:
        """Learned features and those of the row itself, some rows at a time."""
        whole = self.whole()
        there = whole.collect_schema().names()
        needed = dict.fromkeys([SPLIT])
        for feature in features:
            needed |= dict.fromkeys(feature.inputs)
            if isinstance(feature, Learned):
                self.learned[feature.name].bind(feature.keys, self._coder)
                needed |= dict.fromkeys(feature.reads(train=self._folded(feature)))
        outputs = [output for feature in features for output in feature.outputs]
        writer: Any = None
        try:
            for part in batches(whole.select(name for name in needed if name in there)):
                rows = part
                for run in in_runs(features):  # learned ones side by side
                    parts = ordered_map(partial(self._one, rows), run, self.task.threads)
                    rows = rows.with_columns([series for made in parts for series in made])
                table = rows.select(outputs).to_arrow()
                writer = writer or pq.ParquetWriter(path, table.schema, compression="lz4")
                writer.write_table(table, row_group_size=_ROWS)
        finally:
            if writer is not None:
                writer.close()

    def _folded(self, feature: Derivation) -> bool:
        """Whether rows that a feature was learned from leave out their own fold."""
        learned = self.learned.get(feature.name)
        return learned is not None and learned.folds is not None

    def _one(self, rows: pl.DataFrame, feature: Derivation) -> list[pl.Series]:
        train = pl.col(SPLIT) == 0 if self._folded(feature) else None
        made = apply_feature(rows, feature, self.learned.get(feature.name), train)
        return [made.get_column(name) for name in feature.outputs]

    def _look_back(self, features: list[Past], number: int, path: Path) -> None:
        """Groups of equal keys whole, a share of them at a time; then their rows into the order of all rows."""
        by_keys: dict[tuple[str, ...], list[Past]] = {}
        for feature in features:
            by_keys.setdefault(feature.by, []).append(feature)
        shares = self.shares
        found, jobs = [], []
        for keys, some in enumerate(by_keys.values()):
            files = [self._folder / f"{number:03d}.{keys}.{share}.rows" for share in range(shares)]
            jobs += [(some, share, file) for share, file in enumerate(files)]
            found.append((files, [feature.name for feature in some]))

        def work(job: tuple[list[Past], int, Path]) -> tuple[str, dict[str, Any] | None]:
            some, share, file = job
            step = f"share {file.name}"
            if self.task.journal.finished(step, file) is not None:
                return step, None
            _write(file, self._share(some, share, shares))
            return step, checksum(file)

        # Two at a time and no more, whatever there are of processors: each holds a share of the rows.
        for step, record in ordered_map(work, jobs, min(2, self.task.threads), ahead=1):
            if record is not None:
                self.task.journal.add(step, record)
        if all(len(files) == 1 for files, _ in found):
            frames = [pl.scan_parquet(files).select(names) for files, names in found]
            pl.concat(frames, how="horizontal").sink_parquet(
                path, maintain_order=True, engine="streaming", row_group_size=_ROWS, compression="lz4"
            )
        else:
            self._in_order(found, path)
        for files, _ in found:
            for file in files:
                file.unlink()

    def _share(self, features: list[Past], share: int, shares: int) -> pl.DataFrame:
        """Past features of the same groups, for one share of these."""
        whole, by = self.whole(), features[0].by
        there = whole.collect_schema()
        groups = [code_column(name) if code_column(name) in there else name for name in by]
        values = [name for feature in features for name in feature.values]
        if shares > 1:
            whole = whole.filter(pl.col(_share_column(by)) == share)
        rows = whole.select(*dict.fromkeys((ROW, *groups, *values))).collect(engine="streaming")
        if not rows.get_column(ROW).is_sorted():
            rows = rows.sort(ROW)
        return rows.select(ROW).hstack(work_out(rows, features))

    def _in_order(self, found: Sequence[tuple[Sequence[Path], Sequence[str]]], path: Path) -> None:
        writer: Any = None
        try:
            for start in range(0, self.count, _MANY):
                within = pl.col(ROW).is_between(start, start + _MANY, closed="left")
                pieces = [
                    pl.concat([pl.scan_parquet(file).filter(within) for file in files])
                    .collect()
                    .sort(ROW)
                    .select(names)
                    for files, names in found
                ]
                table = pl.concat(pieces, how="horizontal").to_arrow()
                writer = writer or pq.ParquetWriter(path, table.schema, compression="lz4")
                writer.write_table(table, row_group_size=_ROWS)
        finally:
            if writer is not None:
                writer.close()


def _share_column(by: Sequence[str]) -> str:
    """Where the share of each row's group lies."""
    return f"__share:{JOIN.join(by)}"


def _share_of(hashes: Sequence[Any], shares: int) -> pl.Series:
    """The share of groups whose columns hash so."""
    mixed = hashes[0]
    for other in hashes[1:]:
        mixed = splitmix(mixed) ^ other
    return pl.Series((splitmix(mixed) % np.uint64(shares)).astype(np.uint32))


def _write(path: Path, frame: pl.DataFrame) -> None:
    beside = path.with_name(path.name + ".tmp")
    frame.write_parquet(beside, compression="lz4", row_group_size=_ROWS, statistics=True)
    os.replace(beside, path)


@contextmanager
def _explained(features: Sequence[Derivation]) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.PolarsError as error:
        names = ", ".join(feature.where for feature in features[:3])
        reason = reason_of(error)
        raise DataError(f"{names} cannot be worked out: {reason}. docs/features.md describes the kinds.") from error
