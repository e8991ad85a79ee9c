"""Features over all rows: learned ones fitted on training rows, window features worked out over whole groups.

Each pass writes the outputs of some features to one Arrow file, in the order of the rows. Passes follow the list of
features; neighbours in it share a pass as far as none is fitted on another's output. Features with a key are worked on
by partitions of it (:mod:`stoker.prep.rows.partitions`), all others block by block.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pyarrow as pa

from stoker.base.device import give_back_memory
from stoker.base.engine import reason_of
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.dataset.manifest import describe_file
from stoker.prep.features.base import ROW, Derivation, leading
from stoker.prep.features.groups import key, with_codes
from stoker.prep.features.learned import FIRST, LABEL, Keyed, Learned, LearnedTable
from stoker.prep.features.past import WEIGHT, Past, work_out
from stoker.prep.features.pipeline import add_helpers, apply_feature
from stoker.prep.features.store import StoredTable, write_table
from stoker.prep.rows import partitions
from stoker.prep.rows.partitions import by_key, partition_numbers
from stoker.prep.stages.parts import checksum
from stoker.prep.stages.task import Progress, Task

__all__ = ["SPLIT", "TIME", "FeaturePasses", "passes_of", "write_pieces"]

SPLIT = "__split"  # 0 train, 1 valid, 2 test, 255 nowhere; UInt8
TIME = "__time"  # Int64, as in the keys of the rows
_FEW = 2**16  # keys whose table is small enough to be searched anew for each block
_IS_TRAIN = pl.col(SPLIT) == 0


def passes_of(features: Sequence[Derivation]) -> list[list[Derivation]]:
    """Return the features behind the leading ones, in runs that are worked out together."""
    runs: list[list[Derivation]] = []
    for feature in features[leading(features) :]:
        made = {output for other in (runs[-1] if runs else []) for output in other.outputs}
        fitted_on = isinstance(feature, Past | Learned) and made & set(feature.inputs)
        if not runs or fitted_on or _has_key(runs[-1][0]) != _has_key(feature):
            runs.append([])
        runs[-1].append(feature)
    return runs


def _has_key(feature: Derivation) -> bool:
    return isinstance(feature, Past | Keyed)


class FeaturePasses:
    """Works the features out and fits the learned ones.

    Args:
        task: the preparation.
        rows: blocks of the rows in order, with raw columns and leading features, by their files.
        sizes: rows of each of them, above 0.
        keys: Arrow file with ``__row``, ``__label`` and ``__split`` of the same rows.
        learned: tables of an earlier preparation; None: they are fitted here.

    Window features of rows that go on from a dataset, ``task.like``, are worked out with the state that it stores in
    front of the rows; the state after these rows is stored in its place.
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
        self.stored: dict[str, StoredTable] = {}
        self.files: list[Path] = []
        self._folder = task.work / "passes"
        self._folder.mkdir(exist_ok=True)

    def run(self) -> None:
        """Work out all features; ``files`` are the passes then, ``stored`` what was fitted."""
        runs = passes_of(self.task.schema.feature)
        for number, features in enumerate(runs):
            self.task.report(Progress(stage="features", done=number, total=len(runs), unit="steps"))
            path = self._folder / f"{number:03d}.arrow"
            stored = self._finished(number, path)
            if stored is None:
                beside = path.with_suffix(".tmp")
                learned: dict[str, LearnedTable] = {}
                with _explained(features):
                    made = self._by_key(features, learned) if _has_key(features[0]) else self._local(features, learned)
                    write_pieces(beside, made)
                os.replace(beside, path)
                stored = self._store(learned)
                tables = {name: {"entry": one.entry, "facts": one.facts} for name, one in stored.items()}
                self.task.journal.add(f"pass {number}", {**checksum(path), "tables": tables})
            else:
                self.task.reused += 1
            self.stored |= stored
            self.files.append(path)
            give_back_memory()
        self.task.report(Progress(stage="features", done=len(runs), total=len(runs), unit="steps"))

    def _finished(self, number: int, path: Path) -> dict[str, StoredTable] | None:
        """Return the tables of a pass that an earlier run finished, if all of it is whole."""
        done = self.task.journal.finished(f"pass {number}", path)
        if done is None:
            return None
        stored = {name: StoredTable(path=self._table(name), **one) for name, one in done["tables"].items()}
        whole = all(one.path.exists() and describe_file(one.path) == dict(one.entry) for one in stored.values())
        return stored if whole else None

    def _table(self, name: str) -> Path:
        return self.task.work / "features" / f"{name}.parquet"

    def _store(self, learned: Mapping[str, LearnedTable]) -> dict[str, StoredTable]:
        """Write tables to the files that the dataset will have."""

        def work(name: str) -> StoredTable:
            entry = write_table(self._table(name), learned[name].table)
            return StoredTable(path=self._table(name), entry=entry, facts=learned[name].facts)

        return dict(zip(learned, ordered_map(work, learned, self.task.threads), strict=True))

    def whole(self) -> pl.LazyFrame:
        """Return all rows with all that is known of them so far."""
        beside = [pl.scan_ipc(file) for file in (self.keys, *self.files)]
        return pl.concat([pl.scan_parquet(self.rows), *beside], how="horizontal")

    def part(self, block: int) -> pl.LazyFrame:
        """Return the rows of one file, with all that is known of them so far."""
        start, count = self._starts[block], self.sizes[block]
        beside = [pl.scan_ipc(file).slice(start, count) for file in (self.keys, *self.files)]
        return pl.concat([pl.scan_parquet(self.rows[block]), *beside], how="horizontal")

    def _training(self, features: Sequence[Learned]) -> pl.LazyFrame:
        """Return the training rows with all that features are fitted on."""
        wanted = dict.fromkeys([ROW, LABEL, *(name for one in features for name in one.inputs)])
        rows = self.whole().filter(_IS_TRAIN).select(*wanted)
        made: pl.LazyFrame = add_helpers(rows, features)
        return made

    def _local(self, features: Sequence[Derivation], learned: dict[str, LearnedTable]) -> Iterator[pl.DataFrame]:
        """Yield the outputs of features block by block; learned ones are fitted first."""
        some = [feature for feature in features if isinstance(feature, Learned)]
        if self.given is None:
            learned |= {one.name: one.learn(self._training([one])) for one in some}
        tables = learned if self.given is None else self.given
        there = self.whole().collect_schema().names()
        needed = dict.fromkeys([ROW, SPLIT, *(name for feature in features for name in feature.inputs)])
        outputs = [output for feature in features for output in feature.outputs]

        def work(block: int) -> pl.DataFrame:
            rows = self.part(block).select(name for name in needed if name in there)
            rows = add_helpers(rows, [one for one in some if tables[one.name].folds is not None])
            for feature in features:
                table = tables.get(feature.name)
                folded = table is not None and table.folds is not None
                rows = apply_feature(rows, feature, table, _IS_TRAIN if folded else None)
            return rows.select(outputs).collect()

        yield from ordered_map(work, range(len(self.rows)), self.task.threads)

    def _by_key(self, features: Sequence[Derivation], learned: dict[str, LearnedTable]) -> Iterator[pl.DataFrame]:
        """Yield the outputs of features with keys, block by block."""
        groups, few = self._by_partition_key([one for one in features if isinstance(one, Past | Keyed)])
        made = [self._partitioned(by, some, learned) for by, some in groups.items()]
        if few:
            made.append(self._local(few, learned))
        names = [output for feature in features for output in feature.outputs]
        for blocks in zip(*made, strict=True):
            yield pl.concat(blocks, how="horizontal").select(names)

    def _by_partition_key(
        self, features: Sequence[Past | Keyed]
    ) -> tuple[dict[tuple[str, ...], list[Past | Keyed]], list[Keyed]]:
        """Return the features by the key that their rows are partitioned by; and those with few keys, that need not."""
        if self.count <= partitions.PARTITION_ROWS:
            return {(): list(features)}, []
        schema = self.whole().collect_schema()
        keys = dict.fromkeys(feature.by for feature in features)
        hashes = [pl.struct(key(name, schema[name]) for name in by).hash().approx_n_unique() for by in keys]
        found = self.whole().select(one.alias(str(place)) for place, one in enumerate(hashes))
        distinct = dict(zip(keys, found.collect(engine="streaming").row(0), strict=True))
        groups: dict[tuple[str, ...], list[Past | Keyed]] = {}
        few: list[Keyed] = []
        for feature in sorted(features, key=lambda one: len(one.by)):
            if isinstance(feature, Keyed) and distinct[feature.by] <= _FEW:
                few.append(feature)
            else:  # rows that share (user, item) share (user): if there are many users, partitions by them do
                shared = [by for by in groups if set(by) <= set(feature.by) and distinct[by] > _FEW]
                groups.setdefault(shared[0] if shared else feature.by, []).append(feature)
        return groups, few

    def _partitioned(
        self, by: tuple[str, ...], features: Sequence[Past | Keyed], learned: dict[str, LearnedTable]
    ) -> Iterator[pl.DataFrame]:
        """Yield the outputs of features block by block, worked out by partitions of the key ``by``."""
        fitted = [feature for feature in features if isinstance(feature, Keyed)]
        past = [feature for feature in features if isinstance(feature, Past)]
        teaching = fitted if self.given is None else []
        facts = {one.name: one.facts(self._training([one])) for one in teaching}
        like = self.task.like
        lasting = [one for one in past if one.has_table and (like is None or like.stores_state(one))]
        states = {} if like is None else {one.name: like.state[one.name] for one in past if one.name in like.state}
        tables: dict[str, list[pl.DataFrame]] = {one.name: [] for one in (*teaching, *lasting)}
        wanted = dict.fromkeys(name for feature in features for name in feature.inputs)
        if teaching or lasting:
            wanted |= dict.fromkeys([ROW, *([LABEL, SPLIT] if teaching else [])])
        types = self.whole().select(*wanted).collect_schema()
        states = {one.name: _as_new(one, states[one.name], types) for one in past if one.name in states}

        def read(block: int) -> pl.DataFrame:
            return self.part(block).select(*wanted).collect()

        def work(rows: pl.DataFrame, partition: int, count: int) -> pl.DataFrame:
            made = work_out(rows, [one for one in past if one.name not in states], tables).get_columns()
            for feature in (one for one in past if one.name in states):
                known = _in_partition(states[feature.name], by, partition, count)
                frame = rows.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT)).select(known.columns)
                source = like.data.path if like is not None else None
                found = work_out(pl.concat([known, frame]), [feature], tables, known.height, source)
                made += found[known.height :].get_columns()
            if self.given is not None:
                made += [self._looked_up(one, rows, by, partition, count) for one in fitted]
                return pl.DataFrame(made)
            rows = with_codes(add_helpers(rows, teaching), (name for one in teaching for name in one.by))
            train = (rows.get_column(SPLIT) == 0).to_numpy() if teaching else None
            for one in teaching:
                sums, series = one.work_out(rows, train, facts[one.name])
                tables[one.name].append(sums.table(rows.select(*one.by, ROW)))
                made.append(series)
            return pl.DataFrame(made)

        with TemporaryDirectory(dir=self._folder) as folder:
            rows = partitions.PARTITION_ROWS
            yield from by_key(read, self.sizes, by, work, Path(folder), self.task.threads, rows)
        for one in teaching:
            table = pl.concat(tables.pop(one.name)).sort(FIRST).drop(FIRST)
            learned[one.name] = LearnedTable(table=table, facts=facts[one.name], distinct=True)
        for other in lasting:
            state = pl.concat(tables.pop(other.name)).sort(ROW).drop(ROW)
            learned[other.name] = LearnedTable(table=state)

    def _looked_up(
        self, feature: Keyed, rows: pl.DataFrame, by: Sequence[str], partition: int, count: int
    ) -> pl.Series:
        """Return the output of a feature that an earlier preparation fitted."""
        assert self.given is not None
        known = self.given[feature.name]
        if all(rows.schema[name] == known.table.schema[name] for name in by):
            table = _in_partition(known.table, by, partition, count)
            known = LearnedTable(table=table, facts=known.facts, distinct=True)
        return feature.attach(rows.lazy(), known).select(feature.outputs).collect().to_series()


def _in_partition(table: pl.DataFrame, by: Sequence[str], partition: int, count: int) -> pl.DataFrame:
    """Return the rows of a table whose keys are in a partition of ``count``."""
    return table if count == 1 else table.filter(pl.Series(partition_numbers(table, by, count) == partition))


def _as_new(feature: Past, state: pl.DataFrame, types: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return the state of a feature with the types of the new rows, and numbers of rows below theirs.

    Raises:
        DataError: a column of another type, in which the values of the state are others.
    """
    for name in feature.inputs:
        cast = state.get_column(name).cast(types[name], strict=False)
        if not cast.cast(state.schema[name], strict=False).equals(state.get_column(name), null_equal=True):
            raise DataError(
                f"{feature.where}: column {name!r} is {types[name]} in the new rows and {state.schema[name]} in the "
                "dataset that they go on from. Convert it in the new files."
            )
        state = state.with_columns(cast)
    return state.with_columns(pl.int_range(-state.height, 0, dtype=pl.Int64).alias(ROW))


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
