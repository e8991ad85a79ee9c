"""Compute features, and fit those that need it, run by run over blocks of rows.

A run is a list of features of which none is fitted on another's output. Features with a key (window features, counts,
target encodings) see all rows of a key at once, other features one block. More than a million rows are partitioned by a
hash of the key: through temporary files (:func:`by_key`), or in memory for a frame, which is one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from stoker.base.errors import ConfigError, DataError
from stoker.base.ordered import ordered_map
from stoker.prep.features.base import (
    ROW,
    Derivation,
    RowLocal,
    RowSteps,
    column_taken,
    explained,
    groups,
    leading,
    missing_column,
    pa,
    pl,
)
from stoker.prep.features.fitted import FIRST, LABEL, Fittable, FittedTable, Keyed
from stoker.prep.features.past import WEIGHT, Past, compute_all

PARTITION_ROWS = 2**20  # rows of a partition, roughly
_MOST_PARTITIONS = 256  # beyond that, partitions get more rows
_FEW_KEYS = 2**16  # up to here each block searches the whole table
_SAMPLE = 2**18  # rows in which the values of a key are counted before all rows
_AT = "__at"  # column: the position of a row in its block


def check_present(feature: Derivation, columns: Sequence[str], who: str = "the rows") -> None:
    """Raise :class:`SchemaError` if an input of a feature is missing or one of its outputs exists."""
    for column in feature.inputs:
        if column not in columns:
            raise missing_column(feature, column, [name for name in columns if not name.startswith("__")])
    for column in feature.outputs:
        if column in columns:
            raise column_taken(feature, column, who)


def apply_feature(
    frame: pl.LazyFrame, feature: Derivation, fitted: FittedTable | None = None, train: pl.Expr | None = None
) -> pl.LazyFrame:
    """Return the frame with the outputs of one more feature.

    ``fitted`` is its fitted table; ``train`` selects the training rows, if any. Window features load the frame into
    memory when it is collected.
    """
    if isinstance(feature, RowSteps):
        return feature.rows(frame)
    if isinstance(feature, RowLocal):
        return frame.with_columns(*feature.expressions())
    if isinstance(feature, Fittable):
        if fitted is None:
            raise ConfigError(f"{feature.where} was not fitted. Use what stoker.features.fit returns.")
        return feature.attach(frame, fitted, train)
    assert isinstance(feature, Past)
    before = frame.collect_schema()
    probe = compute_all(before.to_frame(), [feature]).schema  # no rows: the types of the outputs
    return frame.map_batches(
        lambda rows: rows.with_columns(compute_all(rows, [feature]).get_columns()), schema={**before, **probe}
    )


def derive(
    frame: pl.DataFrame,
    features: Sequence[Derivation],
    tables: Mapping[str, FittedTable] | None = None,
    train: pl.Expr | None = None,
    file: str = "",
) -> pl.DataFrame:
    """Return rows in memory with the outputs of features, computed one after the other.

    Args:
        frame: the rows.
        features: to compute.
        tables: fitted tables, by feature.
        train: selects the training rows that the tables were fitted on, if any.
        file: where the rows are from, for errors.
    """
    for feature in features:
        with explained(feature, file):
            if isinstance(feature, RowSteps):
                frame = feature.rows(frame.lazy()).collect()
                continue
            if isinstance(feature, Past):
                made = compute_all(frame, [feature])
            else:
                table, rows = (tables or {}).get(feature.name), frame.lazy()
                known = None if table is None or table.folds is None else train
                rows = rows if known is None else add_helpers(rows, [feature])
                made = apply_feature(rows, feature, table, known).select(feature.outputs).collect()
            frame = frame.hstack(made)
    return frame


def add_helpers(frame: pl.LazyFrame, features: Sequence[Derivation]) -> pl.LazyFrame:
    """Return the frame with the helper columns of fitted features that it lacks."""
    there = set(frame.collect_schema().names())
    helpers = {one.meta.output_name(): one for some in features if isinstance(some, Fittable) for one in some.helpers()}
    return frame.with_columns(one for name, one in helpers.items() if name not in there)


def _has_key(feature: Derivation) -> bool:
    """Return True if the feature needs all rows of a key at once."""
    return isinstance(feature, Past | Keyed)


def runs_of(features: Sequence[Derivation]) -> list[list[Derivation]]:
    """Return the features after the leading ones, in runs that are computed together."""
    runs: list[list[Derivation]] = []
    for feature in features[leading(features) :]:
        made = {output for other in (runs[-1] if runs else []) for output in other.outputs}
        fitted_on = isinstance(feature, Past | Fittable) and made & set(feature.inputs)
        if not runs or fitted_on or _has_key(runs[-1][0]) != _has_key(feature):
            runs.append([])
        runs[-1].append(feature)
    return runs


class RowBlocks(Protocol):
    """Rows in order, with the columns computed so far."""

    sizes: list[int]  # rows of each block

    def part(self, block: int) -> pl.LazyFrame:
        """Return the rows of one block."""

    def whole(self) -> pl.LazyFrame:
        """Return all rows."""


@dataclass(kw_only=True)
class Executor:
    """Computes runs of features.

    Args:
        rows: with ``__row`` and, if features are to be fitted, ``__label``.
        threads: number of threads.
        given: tables of features that were fitted before; None: fit them.
        train: selects the training rows; None if ``given`` is set.
        folder: for files of partitions; None: the rows are in memory.
        keep_states: names of window features whose state to keep.
        states: state before the rows, by feature.
        source: the dataset that ``states`` come from, for errors.
    """

    rows: RowBlocks
    threads: int
    given: Mapping[str, FittedTable] | None = None
    train: pl.Expr | None = None
    folder: Path | None = None
    keep_states: Collection[str] = ()
    states: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    source: object = None
    #: fitted tables and states, by feature
    fitted_tables: dict[str, FittedTable] = field(default_factory=dict)

    def run(self, features: Sequence[Derivation]) -> Iterator[pl.DataFrame]:
        """Yield the outputs of a run of features, block by block."""
        partitioned, whole = self._by_partition_key([one for one in features if isinstance(one, Past | Keyed)])
        made = [self._by_key(by, some) for by, some in partitioned.items()]
        if by_block := [one for one in features if one in whole or not _has_key(one)]:
            made.append(self._by_block(by_block))
        names = [output for feature in features for output in feature.outputs]
        for blocks in zip(*made, strict=True):
            yield pl.concat(blocks, how="horizontal").select(names)

    @property
    def _row_columns(self) -> list[str]:
        """Columns with a row's number and whether it is a training row."""
        return [ROW, *([] if self.train is None else self.train.meta.root_names())]

    def _training(self, feature: Fittable) -> pl.LazyFrame:
        """Return the training rows with the columns that a feature is fitted on."""
        assert self.train is not None
        rows = self.rows.whole().filter(self.train).select(*dict.fromkeys([ROW, LABEL, *feature.inputs]))
        return add_helpers(rows, [feature])

    def _by_block(self, features: Sequence[Derivation]) -> Iterator[pl.DataFrame]:
        """Yield the outputs of features that need one block at a time, after fitting them."""
        if self.given is None:
            for one in features:
                if isinstance(one, Fittable):
                    with explained(one):
                        self.fitted_tables[one.name] = one.fit(self._training(one))
        tables = self.fitted_tables if self.given is None else self.given
        there = self.rows.whole().collect_schema().names()
        inputs = dict.fromkeys([*self._row_columns, *(name for feature in features for name in feature.inputs)])
        columns = [name for name in inputs if name in there]

        def work(block: int) -> pl.DataFrame:
            return derive(self.rows.part(block).select(columns).collect(), features, tables, self.train)

        return ordered_map(work, range(len(self.rows.sizes)), self.threads)

    def _by_partition_key(
        self, features: Sequence[Past | Keyed]
    ) -> tuple[dict[tuple[str, ...], list[Past | Keyed]], list[Keyed]]:
        """Group the features by partition key; return those with few keys apart, as they need no partitions."""
        if self._at_once or not features:
            return {(): list(features)} if features else {}, []
        schema = self.rows.whole().collect_schema()
        hashes = {
            feature.by: pl.struct(groups.key(name, schema[name]) for name in feature.by).hash().approx_n_unique()
            for feature in features
        }

        def of_many(rows: pl.LazyFrame, keys: Collection[tuple[str, ...]]) -> set[tuple[str, ...]]:
            """Return the keys with more than a few values in these rows."""
            found = rows.select(hashes[by].alias(str(place)) for place, by in enumerate(keys))
            numbers = found.collect(engine="streaming").row(0) if keys else ()
            return {by for by, number in zip(keys, numbers, strict=True) if number > _FEW_KEYS}

        many = of_many(self.rows.part(0).head(_SAMPLE), hashes)  # most keys with many values show it there
        many |= of_many(self.rows.whole(), [by for by in hashes if by not in many])
        partitioned: dict[tuple[str, ...], list[Past | Keyed]] = {}
        few: list[Keyed] = []
        for feature in sorted(features, key=lambda one: len(one.by)):
            if isinstance(feature, Keyed) and feature.by not in many:
                few.append(feature)
            else:  # rows with the same (user, item) have the same user: with many users, partition by user
                shared = [by for by in partitioned if set(by) <= set(feature.by) and by in many]
                partitioned.setdefault(shared[0] if shared else feature.by, []).append(feature)
        return partitioned, few

    @property
    def _at_once(self) -> bool:
        """Whether all rows fit one partition."""
        return sum(self.rows.sizes) <= PARTITION_ROWS

    def _by_key(self, by: tuple[str, ...], features: Sequence[Past | Keyed]) -> Iterator[pl.DataFrame]:
        """Yield the outputs of features block by block, computed by partitions of the key ``by``."""
        keyed = [feature for feature in features if isinstance(feature, Keyed)]
        past = [feature for feature in features if isinstance(feature, Past)]
        fitted = keyed if self.given is None else []
        lasting = [one for one in past if one.name in self.keep_states]
        tables: dict[str, list[Any]] = {one.name: [] for one in (*fitted, *lasting)}
        inputs = [name for feature in features for name in feature.inputs]
        wanted = dict.fromkeys([*inputs, *self._row_columns, *([LABEL] if fitted else [])])
        types = self.rows.whole().select(*wanted).collect_schema()
        states = {one.name: _as_new(one, self.states[one.name], types) for one in past if one.name in self.states}
        facts = {} if self._at_once else {one.name: one.facts(self._training(one)) for one in fitted}

        def work(rows: pl.DataFrame, partition: int, count: int) -> pl.DataFrame:
            mine = partial(_in_partition, by=by, partition=partition, count=count, types=types)
            made = compute_all(rows, [one for one in past if one.name not in states], tables).get_columns()
            for feature in (one for one in past if one.name in states):
                known = mine(states[feature.name])
                frame = rows.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT)).select(known.columns)
                found = compute_all(pl.concat([known, frame]), [feature], tables, known.height, self.source)
                made += found[known.height :].get_columns()
            if self.given is not None:
                of = {one.name: self.given[one.name] for one in keyed}
                some = {name: FittedTable(table=mine(one.table), facts=one.facts) for name, one in of.items()}
                return pl.DataFrame([*made, *derive(rows, keyed, some).select(*some)])
            rows = add_helpers(rows.lazy(), fitted).collect()
            train = np.broadcast_to(rows.select(self.train).to_series().to_numpy(), rows.height)

            def fit(one: Keyed) -> pl.Series:
                with explained(one):
                    if count == 1:
                        facts[one.name] = one.facts(rows.lazy().filter(pl.Series(train)))
                    values, series = one.fit_and_encode(rows, train, facts[one.name])
                    known = values.filter(pl.col(FIRST) < rows.height)
                    numbered = known.with_columns(rows.get_column(ROW)[known.get_column(FIRST)].alias(FIRST))
                    tables[one.name].append(
                        numbered
                        if whole is not None
                        else one.table_of(rows, known).with_columns(numbered.get_column(FIRST))
                    )
                    return series

            threads = self.threads if count == 1 else 1  # threads share the features or the partitions
            return pl.DataFrame([*made, *ordered_map(fit, fitted, threads)])

        whole = self.rows.whole().select(*wanted).collect() if self._at_once or self.folder is None else None
        if whole is not None:
            made = _by_key_in_memory(whole, by, work, self.threads, PARTITION_ROWS)
            ends = np.cumsum(self.rows.sizes).tolist()
            yield from (made[end - size : end] for end, size in zip(ends, self.rows.sizes, strict=True))
        else:

            def read(block: int) -> pl.DataFrame:
                return self.rows.part(block).select(*wanted).collect()

            assert self.folder is not None
            yield from by_key(read, self.rows.sizes, by, work, self.folder, self.threads, PARTITION_ROWS)
        for one in fitted:
            table = partial(
                _assembled, tables[one.name], FIRST, partial(one.table_of, whole) if whole is not None else None
            )
            self.fitted_tables[one.name] = FittedTable(table=table, facts=facts[one.name], distinct=True)
        for other in lasting:
            self.fitted_tables[other.name] = FittedTable(table=partial(_assembled, tables[other.name], ROW))


def _assembled(
    parts: list[pl.DataFrame], by: str, complete: Callable[[pl.DataFrame], pl.DataFrame] | None = None
) -> pl.DataFrame:
    """Join the tables of the partitions, in the order of column ``by``."""
    table = pl.concat(parts).sort(by)
    return table.drop(by) if complete is None else complete(table)


def _partition_numbers(frame: pl.DataFrame, names: Sequence[str], partitions: int) -> Any:
    """Return int64 [n]: the partition of each row, the same for equal keys of the same types, in one process."""
    keys = [groups.key(name, frame.schema[name]) for name in names]
    hashes = frame.select(pl.struct(keys).hash(seed=0)).to_series().to_numpy()
    return (hashes >> np.uint64(32)) % np.uint64(partitions)


def _in_partition(
    table: pl.DataFrame, by: Sequence[str], partition: int, count: int, types: Mapping[str, Any]
) -> pl.DataFrame:
    """Return the rows of a table whose keys are in a partition of ``count``; all if its keys have other types."""
    if count == 1 or any(table.schema[name] != types[name] for name in by):
        return table
    return table.filter(pl.Series(_partition_numbers(table, by, count) == partition))


def _as_new(feature: Past, state: pl.DataFrame, types: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return the state of a feature with the types of the new rows, and with row numbers below theirs.

    Raises:
        DataError: the type of a column changes the values of the state.
    """
    for name in feature.inputs:
        cast = state.get_column(name).cast(types[name], strict=False)
        if not cast.cast(state.schema[name], strict=False).equals(state.get_column(name), null_equal=True):
            raise DataError(
                f"{feature.where}: column {name!r} is {types[name]} in the new rows and {state.schema[name]} in the "
                "dataset that they continue. Convert it in the new files."
            )
        state = state.with_columns(cast)
    return state.with_columns(pl.int_range(-state.height, 0, dtype=pl.Int64).alias(ROW))


def _by_key_in_memory(
    rows: pl.DataFrame,
    names: Sequence[str],
    work: Callable[[pl.DataFrame, int, int], pl.DataFrame],
    threads: int,
    most: int,
) -> pl.DataFrame:
    """Return what :func:`by_key` yields, for rows in memory and partitions of about ``most`` rows."""
    count = -(-rows.height // most)
    if count <= 1:
        return work(rows.rechunk(), 0, 1)
    numbers = _partition_numbers(rows, names, count).astype(np.uint16)

    kind = np.uint32 if pl.get_index_type() == pl.UInt32 else np.uint64  # Polars casts and checks any other

    def of_partition(partition: int) -> tuple[pl.DataFrame, Any]:
        places = np.flatnonzero(numbers == partition).astype(kind)
        return work(rows[pl.Series(places)], partition, count), places

    parts = list(ordered_map(of_partition, range(count), threads))
    places = np.empty(rows.height, kind)
    places[np.concatenate([at for _, at in parts])] = np.arange(rows.height, dtype=kind)
    return pl.concat([made for made, _ in parts])[pl.Series(places)]


def by_key(
    read: Callable[[int], pl.DataFrame],
    sizes: Sequence[int],
    names: Sequence[str],
    work: Callable[[pl.DataFrame, int, int], pl.DataFrame],
    folder: Path,
    threads: int,
    rows: int,
) -> Iterator[pl.DataFrame]:
    """Yield the outputs of the rows of each block, in order, computed by partitions of their keys.

    Each block is sorted by a hash of the key and written to an Arrow file with a record batch for each partition. A
    partition is read from all these files, and its outputs are written with a record batch for each block; the outputs
    of a block are read from the files of all partitions. Memory holds the blocks and partitions in work.

    Args:
        read: returns the rows of a block, by its number.
        sizes: rows of each block.
        names: columns of the key.
        work: returns the outputs of the rows of a partition, one row for each; it gets the rows, the number of the
            partition, and the number of partitions.
        folder: for a folder of temporary files.
        threads: number of threads.
        rows: rows of a partition, roughly.

    Raises:
        OSError: the disk is full or fails.
    """
    partitions = min(_MOST_PARTITIONS, -(-sum(sizes) // rows))
    counts = np.zeros((len(sizes), partitions), np.int64)

    def split(block: int) -> Path:
        frame = read(block)
        numbers = _partition_numbers(frame, names, partitions)
        order = np.argsort(numbers.astype(np.uint16), kind="stable")
        counts[block] = np.bincount(numbers.astype(np.int64), minlength=partitions)
        ordered = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(_AT))[pl.Series(order)]
        return _write_batches(made / f"block-{block}", ordered, counts[block])

    def of_partition(partition: int) -> Path:
        frame = pl.concat((_read_batch(file, partition) for file in given), rechunk=True)
        outcome = work(frame.drop(_AT), partition, partitions)
        return _write_batches(made / f"partition-{partition}", outcome, counts[:, partition])

    def together(block: int) -> pl.DataFrame:
        at = pl.concat(_read_batch(given[block], partition).get_column(_AT) for partition in range(partitions))
        places = np.empty(len(at), np.int64)
        places[at.to_numpy()] = np.arange(len(at))
        return pl.concat((_read_batch(file, block) for file in outputs), rechunk=True)[pl.Series(places)]

    with TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary)
        given = list(ordered_map(split, range(len(sizes)), threads))
        outputs = list(ordered_map(of_partition, range(partitions), threads))
        yield from ordered_map(together, range(len(sizes)), threads)


def _write_batches(path: Path, frame: pl.DataFrame, sizes: Any) -> Path:
    """Write rows to an Arrow file with a record batch for each of ``sizes`` rows."""
    table = frame.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    whole = table.to_batches()[0] if frame.height else pa.RecordBatch.from_pylist([], table.schema)
    with pa.ipc.new_file(path, table.schema) as writer:  # not compressed: batches are mapped
        for start, size in zip((np.cumsum(sizes) - sizes).tolist(), sizes.tolist(), strict=True):
            writer.write_batch(whole.slice(start, size))
    return path


def _read_batch(path: Path, number: int) -> pl.DataFrame:
    """Map one record batch of a file that :func:`_write_batches` wrote."""
    with pa.memory_map(str(path)) as source:
        return pl.DataFrame(pl.from_arrow(pa.ipc.open_file(source).get_batch(number)))
