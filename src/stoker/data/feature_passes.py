"""Features over all rows: learned ones fitted on training rows, those that look back worked out group by group.

Each pass writes the outputs of some features to one Arrow file, in the order of the rows. Passes follow the list of
features; neighbours in it share a pass as far as none has to be fitted on another's output. What several learned
features need of a row - codes of key columns, its fold - is worked out once, into a file beside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.look_back import LookBack, can_deal
from stoker.data.ordered import ordered_map
from stoker.data.parts import checksum
from stoker.data.task import Progress, Task
from stoker.errors import DataError
from stoker.features.base import ROW, Derivation, leading
from stoker.features.engine import full_disk, reason_of
from stoker.features.keys import Coder, code_column
from stoker.features.learned import LABEL, Learned, LearnedTable, MeanTargetEncoding
from stoker.features.past import Past, work_out
from stoker.features.pipeline import apply_feature

__all__ = ["GROUP_ROWS", "SPLIT", "FeaturePasses", "passes_of", "write_pieces"]

SPLIT = "__split"  # 0 train, 1 valid, 2 test, 255 nowhere; UInt8
GROUP_ROWS = 2**17  # rows of the groups that are looked back at together, about: they lie in cache
_MOST_SHARES = 256  # of the groups, from where on each has more rows
_ROWS = 2**17  # of a row group


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
        sizes: rows of each of them, above 0.
        keys: Arrow file with ``__row``, ``__label`` and ``__split`` of the same rows.
        learned: tables of an earlier preparation; None: they are fitted here.
    """

    def __init__(
        self,
        task: Task,
        rows: Sequence[Path],
        sizes: Sequence[int],
        keys: Path,
        learned: Mapping[str, LearnedTable] | None,
    ) -> None:
        self.task, self.rows, self.sizes, self.keys = task, list(rows), list(sizes), keys
        self.count = sum(self.sizes)
        self._starts = [0, *accumulate(self.sizes)][:-1]
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
            path = self._folder / f"{number:03d}.arrow"
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
                        self._look_back([one for one in features if isinstance(one, Past)], beside)
                    else:
                        self._attach(features, beside)
                os.replace(beside, path)
                self.task.journal.add(f"pass {number}", checksum(path))
            self.files.append(path)
        for file in self._helpers:
            file.unlink()
        self._helpers = []
        # What only training rows need goes: sums of folds and numbered keys are larger than the tables.
        self.learned = {name: LearnedTable(table=one.table, facts=one.facts) for name, one in self.learned.items()}
        self._coder = Coder()
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
        """Write the helper columns of learned features that are not there yet."""
        there = self.whole().collect_schema()
        learned = [feature for feature in features if isinstance(feature, Learned)]
        keys = [key for key in dict.fromkeys(key for one in learned for key in one.keys)
                if code_column(key) not in there]  # fmt: skip
        folds = {one.fold_column: one.fold() for one in learned if isinstance(one, MeanTargetEncoding)}
        folds = {name: fold for name, fold in folds.items() if name not in there}
        if not (keys or folds):
            return

        def work(piece: int) -> pl.DataFrame:
            rows = self.part(piece).select(*keys, *folds.values()).collect()
            return pl.DataFrame([*(self._codes(rows, key) for key in keys), *map(rows.get_column, folds)])

        path = self._folder / f"{number:03d}.helpers"
        write_pieces(path, ordered_map(work, range(len(self.rows)), self.task.threads))
        self._helpers.append(path)

    def _codes(self, rows: pl.DataFrame, key: str) -> pl.Series:
        return pl.Series(code_column(key), self._coder.add(key, rows.get_column(key)))

    def whole(self) -> pl.LazyFrame:
        """All rows with all that is known of them so far."""
        beside = [pl.scan_ipc(file) for file in (self.keys, *self.files, *self._helpers)]
        return pl.concat([pl.scan_parquet(self.rows), *beside], how="horizontal")

    def part(self, piece: int) -> pl.LazyFrame:
        """The rows of one file, with all that is known of them so far."""
        start, count = self._starts[piece], self.sizes[piece]
        beside = [pl.scan_ipc(file).slice(start, count) for file in (self.keys, *self.files, *self._helpers)]
        return pl.concat([pl.scan_parquet(self.rows[piece]), *beside], how="horizontal")

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
        there = self.whole().collect_schema().names()
        needed = dict.fromkeys([SPLIT])
        for feature in features:
            needed |= dict.fromkeys(feature.inputs)
            if isinstance(feature, Learned):
                self.learned[feature.name].bind(feature.keys, self._coder)
                needed |= dict.fromkeys(feature.reads(train=self._folded(feature)))
        outputs = [output for feature in features for output in feature.outputs]

        def work(piece: int) -> pl.DataFrame:
            rows = self.part(piece).select(name for name in needed if name in there).collect()
            for feature in features:
                train = pl.col(SPLIT) == 0 if self._folded(feature) else None
                rows = apply_feature(rows, feature, self.learned.get(feature.name), train)
            return rows.select(outputs)

        write_pieces(path, ordered_map(work, range(len(self.rows)), self.task.threads))

    def _folded(self, feature: Derivation) -> bool:
        """Whether rows that a feature was learned from leave out their own fold."""
        learned = self.learned.get(feature.name)
        return learned is not None and learned.folds is not None

    def _look_back(self, features: list[Past], path: Path) -> None:
        """Groups of equal keys whole, a share of them at a time."""
        there = self.whole().collect_schema()
        schema = pl.Schema({name: there[name] for feature in features for name in feature.inputs})
        dealt = [feature for feature in features if can_deal(feature, schema)]
        others = [feature for feature in features if feature not in dealt]
        columns = dict.fromkeys(name for feature in others for name in feature.inputs)
        # Of lists and the like, which are rare, whole columns lie in memory.
        made = work_out(self.whole().select(*columns).collect(engine="streaming"), others) if others else None
        shares = min(_MOST_SHARES, -(-self.count // GROUP_ROWS))
        with LookBack(dealt, schema, self.sizes, shares, self.task.threads, self._folder, self._short(schema)) as back:

            def pieces() -> Iterator[pl.DataFrame]:
                read = back.run(lambda piece: self.part(piece).select(back.columns).collect())
                for piece, start in enumerate(self._starts):
                    rows = next(read) if dealt else pl.DataFrame()
                    beside = made.slice(start, self.sizes[piece]) if made is not None else pl.DataFrame()
                    both = pl.DataFrame([*rows.get_columns(), *beside.get_columns()])
                    yield both.select(feature.name for feature in features)

            write_pieces(path, pieces())

    def _short(self, schema: pl.Schema) -> set[str]:
        """Columns of whole numbers in the files of rows that 32 bits hold, as their statistics tell."""
        found = {name for name, dtype in schema.items() if dtype in (pl.Int64, pl.UInt64)}
        for path in self.rows:
            footer = pq.read_metadata(path)
            for group in range(footer.num_row_groups):
                columns = [footer.row_group(group).column(number) for number in range(footer.num_columns)]
                known = {column.path_in_schema: column.statistics for column in columns}
                found = {name for name in found if _is_short(known.get(name))}
        return found


def _is_short(statistics: Any) -> bool:
    if statistics is None:
        return False
    if not statistics.has_min_max:  # as of no value at all
        return bool(statistics.has_null_count and statistics.num_values == 0)
    return bool(statistics.min >= -(2**31) and statistics.max < 2**31)


def write_pieces(path: Path, pieces: Iterable[pl.DataFrame]) -> None:
    """Write rows that come in pieces to a file in which any of them are found at once."""
    writer: Any = None
    try:
        for rows in pieces:
            table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
            writer = writer or pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _write(path: Path, frame: pl.DataFrame) -> None:
    beside = path.with_name(path.name + ".tmp")
    with full_disk():
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
