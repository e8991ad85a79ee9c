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

from stoker.base.device import available_memory, give_back_memory
from stoker.base.engine import reason_of
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.prep.features.base import ROW, Derivation, leading
from stoker.prep.features.fitted.keys import Coder, code_column
from stoker.prep.features.learned import LABEL, Learned, LearnedTable, MeanTargetEncoding
from stoker.prep.features.past import Past, work_out
from stoker.prep.features.pipeline import apply_feature
from stoker.prep.features.store import StoredTable, write_table
from stoker.prep.rows.learn_in_memory import learn_in_memory, memory_to_learn
from stoker.prep.rows.look_back import LookBack, can_deal
from stoker.prep.stages.parts import checksum
from stoker.prep.stages.task import Progress, Task

__all__ = ["GROUP_ROWS", "SPLIT", "TIME", "FeaturePasses", "passes_of", "write_pieces"]

SPLIT = "__split"  # 0 train, 1 valid, 2 test, 255 nowhere; UInt8
TIME = "__time"  # Int64, as in the keys of the rows
GROUP_ROWS = 2**17  # rows of the groups that are looked back at together, about: they lie in cache
_MOST_SHARES = 256  # of the groups, from where on each has more rows
_ROOM = 4  # the part of the free memory that learned features may take


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
        rows: pieces of the rows in order, with raw columns and leading features, by their path in ``task.rows``.
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
        self.stored: dict[str, StoredTable] = {}
        self.files: list[Path] = []
        self._folder = task.work / "passes"
        self._folder.mkdir(exist_ok=True)
        self._coder = Coder()
        self._helpers: list[Path] = []  # files of helper columns; worked out again by a run that goes on

    def run(self) -> None:
        """Work out all features; ``files`` are the passes then, ``stored`` what was fitted."""
        runs = passes_of(self.task.schema.feature)
        for number, features in enumerate(runs):
            self.task.report(Progress(stage="features", done=number, total=len(runs), unit="steps"))
            path = self._folder / f"{number:03d}.arrow"
            done = self.task.journal.finished(f"pass {number}", path) is not None
            learned = [feature for feature in features if isinstance(feature, Learned)]
            held = [] if done or self.given is not None else self._held(learned)
            self._streamed([feature for feature in learned if feature not in held], number, done=done)
            if not done:
                beside = path.with_suffix(".tmp")
                with _explained(features):
                    if isinstance(features[0], Past):
                        self._look_back([one for one in features if isinstance(one, Past)], beside)
                    else:
                        self._attach(features, held, beside)
                os.replace(beside, path)
                self.task.journal.add(f"pass {number}", checksum(path))
                give_back_memory()
            else:
                self.task.reused += 1
            self._store(held)
            if self.given is None:
                self.learned = {}  # tables are in files now, and what was numbered is larger
            self.files.append(path)
            give_back_memory()
        for file in self._helpers:
            file.unlink()
        self._helpers, self._coder = [], Coder()
        self.task.report(Progress(stage="features", done=len(runs), total=len(runs), unit="steps"))

    def _held(self, features: Sequence[Learned]) -> list[Learned]:
        """The features that are fitted and worked out in memory, if it has room."""
        numbered = [feature for feature in features if feature.numbered]
        room = (available_memory() or 0) // _ROOM
        return numbered if memory_to_learn(numbered, self.count) <= room else []

    def _streamed(self, features: list[Learned], number: int, *, done: bool) -> None:
        """Fit features on rows that are read some at a time; ``done``: where that is all there is to do."""
        fitted = [] if self.given is not None else [self._finished(feature, attached=done) for feature in features]
        if features and (not done or None in fitted):
            with _explained(features):
                self._help(features, number)
        jobs = list(zip(features, fitted, strict=self.given is None))
        for (feature, _), (table, record) in zip(jobs, ordered_map(self._learn, jobs, self.task.threads), strict=True):
            self._keep(feature, table, record)

    def _keep(self, feature: Learned, table: LearnedTable, record: dict[str, Any] | None) -> None:
        """Take what a feature learned; ``record``: None where an earlier run has left it."""
        if record is None:
            self.task.reused += 1
        else:
            self.task.journal.add(f"feature {feature.name}", record)
        self.learned[feature.name] = table
        entry = self.task.journal.done[f"feature {feature.name}"]["stored"]
        self.stored[feature.name] = StoredTable(path=self._files(feature)[0], entry=entry, facts=table.facts)

    def _store(self, features: Sequence[Learned]) -> None:
        """Write what features learned in memory. Last: without their folds, these files are of no use to a pass."""

        def work(feature: Learned) -> dict[str, Any]:
            table = self.learned[feature.name]
            return self._written(feature, table.table, table.facts, None)

        for feature, record in zip(features, ordered_map(work, features, self.task.threads), strict=True):
            self._keep(feature, self.learned[feature.name], record)

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
        return pl.concat([self.task.rows.scan_all(self.rows), *beside], how="horizontal")

    def part(self, piece: int) -> pl.LazyFrame:
        """The rows of one file, with all that is known of them so far."""
        start, count = self._starts[piece], self.sizes[piece]
        beside = [pl.scan_ipc(file).slice(start, count) for file in (self.keys, *self.files, *self._helpers)]
        return pl.concat([self.task.rows.scan(self.rows[piece]), *beside], how="horizontal")

    def _files(self, feature: Learned) -> tuple[Path, Path]:
        """Where what a feature learned lies: its table, and the sums of its folds."""
        folder = self.task.work / "features"
        return folder / f"{feature.name}.parquet", folder / f"{feature.name}.folds"

    def _finished(self, feature: Learned, *, attached: bool) -> dict[str, Any] | None:
        """The record of what an earlier run has left of a feature, if all of it is whole; ``attached``: where no row is
        to be encoded with it."""
        path, folds = self._files(feature)
        done = self.task.journal.finished(f"feature {feature.name}", path)
        if done is None or attached or not feature.out_of_fold:
            return done
        # Without its folds, which what was learned in memory does not leave, a row would meet its own label.
        return done if done["folds"] is not None and folds.exists() and checksum(folds) == done["folds"] else None

    def _learn(self, job: tuple[Learned, dict[str, Any] | None]) -> tuple[LearnedTable, dict[str, Any] | None]:
        """What a feature learned, and its record for the journal; None where an earlier run has left it."""
        feature, done = job
        path, folds = self._files(feature)
        path.parent.mkdir(parents=True, exist_ok=True)
        if done is not None:
            kept = dict(np.load(folds)) if done["folds"] is not None and folds.exists() else None
            return LearnedTable(table=lambda: pl.read_parquet(path), facts=done["facts"], folds=kept), None
        wanted = dict.fromkeys((*feature.inputs, *feature.reads(train=feature.out_of_fold), ROW, LABEL))
        with _explained([feature]):
            found = feature.learn(self.whole().filter(pl.col(SPLIT) == 0).select(*wanted), self._coder)
        if found.folds is not None:
            beside = folds.with_suffix(".tmp")
            with beside.open("wb") as file:
                np.savez(file, **found.folds)
            os.replace(beside, folds)
        return found, self._written(feature, found.table, found.facts, folds if found.folds is not None else None)

    def _written(
        self, feature: Learned, table: pl.DataFrame, facts: Mapping[str, Any], folds: Path | None
    ) -> dict[str, Any]:
        """The record of a feature, whose table is in the file that the dataset will have."""
        path = self._files(feature)[0]
        stored = write_table(path, table)
        return {
            **checksum(path), "stored": stored, "facts": dict(facts), "folds": checksum(folds) if folds else None
        }  # fmt: skip

    def _attach(self, features: Sequence[Derivation], held: list[Learned], path: Path) -> None:
        """Learned features and those of the row itself, some rows at a time; those that are ``held`` in memory."""
        taught = learn_in_memory(held, self.part, self.keys, self.sizes, self.task.threads) if held else None
        if taught is not None:
            self.learned |= taught.tables
        there = self.whole().collect_schema().names()
        needed = dict.fromkeys([SPLIT])
        for feature in features:
            if feature in held:
                continue
            needed |= dict.fromkeys(feature.inputs)
            if isinstance(feature, Learned):
                self.learned[feature.name].bind(feature.keys, self._coder)
                needed |= dict.fromkeys(feature.reads(train=self._folded(feature)))
        outputs = [output for feature in features for output in feature.outputs]

        def work(piece: int) -> pl.DataFrame:
            rows = self.part(piece).select(name for name in needed if name in there).collect()
            rows = rows if taught is None else rows.hstack(taught.piece(piece))
            for feature in (one for one in features if one not in held):
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
        """Columns of whole numbers of the rows that 32 bits hold, as far as is known."""
        found = {name for name, dtype in schema.items() if dtype in (pl.Int64, pl.UInt64)}
        for path in self.rows:
            found = self.task.rows.short(path, found)
        return found


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


@contextmanager
def _explained(features: Sequence[Derivation]) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.PolarsError as error:
        names = ", ".join(feature.where for feature in features[:3])
        reason = reason_of(error)
        raise DataError(f"{names} cannot be worked out: {reason}. docs/features.md describes the kinds.") from error
