"""Features that are fitted on training rows: mean target and count encoding, properties, and columns of other files.

Fitting gives a :class:`FittedTable`: one row per distinct key. Keys are compared exactly; a missing key is a key of
its own. Smoothed means: Micci-Barreca 2001, "A preprocessing scheme for high-cardinality categorical attributes".
Out-of-fold means: Rabhi et al., "Accelerating Recommender System Training 15x with RAPIDS", section 2 (RecSys
Challenge 2019).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stoker.base.checks import fail, positive
from stoker.base.engine import collect
from stoker.base.errors import DataError
from stoker.prep.features.base import COUNT, MAYBE_MISSING, ROW, TEXT, Derivation, groups, pl, texts

LABEL = "__label"  # column of the rows while features are fitted: the label, Float64
FIRST = "__first"  # column of tables while they are fitted: the first training row of the key, Int64
_SUM, _COUNT = "sum", "count"
_FOREIGN = "__foreign"


class FittedTable:
    """What a feature was fitted to. The dataset stores it, and new rows use it unchanged.

    Args:
        table: one row per distinct key, or a function that returns it.
        facts: plain values.
        folds: sums of each key and fold, so that training rows can leave out their own fold. A dataset does not store
            them.
        distinct: whether the keys are known to be distinct.
    """

    def __init__(
        self,
        *,
        table: pl.DataFrame | Callable[[], pl.DataFrame],
        facts: dict[str, Any] | None = None,
        folds: pl.DataFrame | None = None,
        distinct: bool = False,
    ) -> None:
        self._table = table
        self.facts: dict[str, Any] = {} if facts is None else facts
        self.folds, self.distinct = folds, distinct

    @property
    def table(self) -> pl.DataFrame:
        """One row per distinct key."""
        if callable(self._table):
            self._table = self._table()
        return self._table


@dataclass(frozen=True, kw_only=True)
class Fittable(Derivation):
    """A feature that is fitted on training rows. For your own, write :meth:`fit` and :meth:`attach`."""

    out_of_fold: ClassVar[bool] = False  # whether training rows need ``FittedTable.folds``

    def __init_subclass__(cls, **given: Any) -> None:
        if "learn" in vars(cls):  # the name of ``fit`` before
            setattr(cls, "fit", vars(cls)["learn"])  # noqa: B010  (mypy refuses to replace a method)
        super().__init_subclass__(**given)

    @property
    def has_table(self) -> bool:
        return True

    @property
    def keys(self) -> tuple[str, ...]:
        """Key columns: the fitted table has each combination of their values once."""
        return ()

    def helpers(self) -> list[pl.Expr]:
        """Return more columns that :meth:`fit` needs; :meth:`attach` needs them for training rows, too."""
        return []

    @abstractmethod
    def fit(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> FittedTable:
        """Fit on training rows, which have the inputs, the helpers, ``__row`` and ``__label``."""

    @abstractmethod
    def attach(self, frame: pl.LazyFrame, fitted: FittedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        """Return the frame with the outputs, its rows and their order unchanged.

        Args:
            frame: rows with the inputs and, where ``train`` is given, the helpers.
            fitted: from :meth:`fit`.
            train: selects the training rows, which ``fitted.folds`` covers; None: there are none.
        """


def look_up(frame: pl.LazyFrame, by: Mapping[str, str], table: pl.DataFrame, found: Mapping[str, str]) -> pl.LazyFrame:
    """Join columns of a table by key; missing where the table lacks the key. The order of rows does not change.

    Args:
        frame: the rows.
        by: column of the frame -> column of the table.
        table: has each key once. Values of different types match if they are equal: 1.0 and 1.
        found: new column of the frame -> column of the table.
    """
    have = frame.collect_schema()
    keys, columns, foreign = {}, {}, None
    for number, (name, other) in enumerate(by.items()):
        given, wanted = groups.key(name, have[name]), table.schema[other]
        if have[name] == wanted and given.meta.eq(pl.col(name)):  # joined as it is, without a copy
            columns[name] = pl.col(other)
            continue
        if have[name] != wanted:
            cast = given.cast(wanted, strict=False)
            wrong = cast.is_null() & given.is_not_null()
            if have[name].is_numeric() and wanted != pl.String:
                back = cast.cast(have[name], strict=False)
                wrong = wrong | (given.is_not_null() & (back.is_null() | (back != given)).fill_null(True))
            given, foreign = cast, wrong if foreign is None else foreign | wrong
        keys[f"__key:{number}"], columns[f"__key:{number}"] = given, groups.key(other, wanted)
    known = table.lazy().select(**columns, **{new: pl.col(old) for new, old in found.items()})
    if foreign is not None:
        frame = frame.with_columns(foreign.alias(_FOREIGN))
    joined = frame.with_columns(**keys).join(
        known, on=list(columns), how="left", nulls_equal=True, maintain_order="left"
    )
    if foreign is not None:
        joined = joined.with_columns(pl.when(~pl.col(_FOREIGN)).then(pl.col(name)) for name in found).drop(_FOREIGN)
    return joined.drop(*keys)


@dataclass(frozen=True, kw_only=True)
class Keyed(Fittable):
    """A fitted feature whose table is made key by key, so that partitions of the keys can be processed apart."""

    reads = "by"
    by: tuple[str, ...]

    def check(self) -> None:
        texts(self.where, "by", self.by)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.by

    def facts(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> dict[str, Any]:
        """Return facts of all training rows, whatever their keys."""
        return {}

    @abstractmethod
    def fit_and_encode(
        self, rows: pl.DataFrame, train: Any, facts: Mapping[str, Any]
    ) -> tuple[pl.DataFrame, pl.Series]:
        """Fit and encode at once.

        Args:
            rows: all rows of some keys, with the inputs, the helpers and ``__row``, and ``__label`` of training rows.
            train: bool [n], which are training rows.
            facts: from :meth:`facts`.

        Returns:
            The table without its key columns, and the output of each row. Column ``__first`` of the table is the
            position of the key's first training row, or the number of rows if it has none.
        """

    def _keys(self, rows: pl.LazyFrame) -> list[pl.Expr]:
        schema = rows.collect_schema()
        return [groups.key(name, schema[name]) for name in self.by]

    def table_of(self, rows: pl.DataFrame, values: pl.DataFrame) -> pl.DataFrame:
        """Return the table of some keys.

        Args:
            rows: with the key columns.
            values: from :meth:`fit_and_encode`, of keys with a training row, in the order of the table.
        """
        keys = rows.select(self.by)[values.get_column(FIRST)]
        return keys.select(self._keys(keys.lazy())).hstack(values.drop(FIRST))


@dataclass(frozen=True, kw_only=True)
class CountEncoding(Keyed):
    """The number of training rows with the same key; 0 for an unknown key."""

    kind: ClassVar[str] = "count"
    read_as = COUNT

    def fit(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> FittedTable:
        counted = rows.group_by(self._keys(rows)).agg(pl.len().cast(pl.Int64).alias(_COUNT), pl.col(ROW).min())
        return FittedTable(table=collect(counted, engine).sort(ROW).drop(ROW), distinct=True)

    def attach(self, frame: pl.LazyFrame, fitted: FittedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        found = look_up(frame, {name: name for name in self.by}, fitted.table, {self.name: _COUNT})
        return found.with_columns(pl.col(self.name).fill_null(0))

    def fit_and_encode(
        self, rows: pl.DataFrame, train: Any, facts: Mapping[str, Any]
    ) -> tuple[pl.DataFrame, pl.Series]:
        made, counts, first = (np.empty(rows.height, np.int64) for _ in range(3))
        keys = 0
        for some in groups.sorted_groups(*groups.key_codes(rows, self.by)):
            here = slice(keys, keys := keys + len(some.codes))
            counts[here], first[here] = some.counts(train), some.first(train)
            made[some.rows] = np.repeat(counts[here], some.sizes)
        return pl.DataFrame({_COUNT: counts[:keys], FIRST: first[:keys]}), pl.Series(self.name, made)


@dataclass(frozen=True, kw_only=True)
class MeanTargetEncoding(Keyed):
    """The mean label of a key's training rows, smoothed towards the mean of all training rows.

    The value is ``(sum + smoothing * mean of all) / (count + smoothing)``. For a training row, both means leave out the
    row's own fold, so that no row sees its own label. Other rows get the value from all training rows. An unknown key
    gets the mean of all.

    Sums of whole numbers are exact. For other labels, the order in which Polars adds decides the last bits.

    Args:
        by: the columns of the key.
        folds: number of folds, 2 or more; a hash of the row decides its fold.
        smoothing: weight of the mean of all, in rows; 0 or more.
        fold_by: rows with the same values share a fold. Use it where the labels of a group depend on each other, such
            as those of a list with one click. Empty: the ``group`` of the schema, or else every row by itself.
        seed: of the hash.
    """

    kind: ClassVar[str] = "mean_target"
    out_of_fold: ClassVar[bool] = True
    reads = "by fold_by"
    folds: int = 8
    smoothing: float = 20.0
    fold_by: tuple[str, ...] = ()
    seed: int = 0

    def check(self) -> None:
        super().check()
        texts(self.where, "fold_by", self.fold_by, least=0)
        if self.folds < 2:
            fail(
                self.where, "folds",
                f"{self.folds} is below 2: a training row would be encoded with its own label. Use 5 to 10",
            )  # fmt: skip
        if not 0 <= self.smoothing < float("inf"):
            fail(self.where, "smoothing", f"{self.smoothing} is not a number of rows, 0 or more")
        positive(self.where, "seed", self.seed, least=0)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(super().inputs))

    def in_groups(self, column: str | None) -> MeanTargetEncoding:
        return self if self.fold_by or column is None else replace(self, fold_by=(column,))

    @property
    def fold_column(self) -> str:
        """Name of the helper column with the fold of each row; features with the same folds share it."""
        return "\x1f".join([f"__fold:{self.folds}:{self.seed}:", *self.fold_by])

    def helpers(self) -> list[pl.Expr]:
        if not self.fold_by:
            return [groups.row_folds(ROW, self.seed, self.folds).alias(self.fold_column)]
        return [(groups.stable_hash(self.fold_by, self.seed) % self.folds).cast(pl.Int32).alias(self.fold_column)]

    def facts(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> dict[str, Any]:
        """Return the mean of all labels and, for each fold, that of the other folds."""
        label = pl.col(LABEL)
        without = (~label.is_finite()).fill_null(True).sum().alias("without")
        sums = rows.group_by(self.fold_column).agg(label.sum().alias(_SUM), pl.len().alias(_COUNT), without)
        found = collect(sums, engine)
        of_fold = np.zeros((self.folds, 2))
        of_fold[found[self.fold_column].to_numpy()] = found.select(_SUM, _COUNT).to_numpy()
        (total, count), sides = of_fold.sum(axis=0).tolist(), of_fold.tolist()
        if bad := int(found["without"].sum()):
            raise DataError(
                f"{self.where}: the label is missing or no number in {bad:,} of {count:,.0f} training rows. Leave such "
                "rows out, or fill the label."
            )
        mean = total / count if count else 0.0
        others = [(total - s) / (count - n) if count > n else mean for s, n in sides]
        return {"mean": mean, "other_folds_mean": others}

    def fit(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> FittedTable:
        facts = self.facts(rows, engine=engine)
        of_fold = rows.group_by(*self._keys(rows), self.fold_column).agg(
            pl.col(LABEL).sum().alias(_SUM), pl.len().cast(pl.Int64).alias(_COUNT), pl.col(ROW).min()
        )
        folds = collect(of_fold, engine).sort(ROW)
        totals = folds.group_by(self.by).agg(pl.col(_SUM, _COUNT).sum(), pl.col(ROW).min())
        table = totals.sort(ROW).drop(ROW)
        return FittedTable(table=table, facts=facts, folds=folds.drop(ROW), distinct=True)

    def attach(self, frame: pl.LazyFrame, fitted: FittedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        of_key = {"__sum": _SUM, "__count": _COUNT}
        made = look_up(frame, {name: name for name in self.by}, fitted.table, of_key)
        total, count = (pl.col(name).cast(pl.Float64).fill_null(0.0) for name in of_key)
        prior: Any = pl.lit(fitted.facts["mean"], pl.Float64)
        mine: dict[str, str] = {}
        if train is not None and fitted.folds is not None:
            mine = {"__fold_sum": _SUM, "__fold_count": _COUNT}
            made = look_up(made, {name: name for name in (*self.by, self.fold_column)}, fitted.folds, mine)
            own = [pl.when(train).then(pl.col(name).cast(pl.Float64)).otherwise(0.0).fill_null(0.0) for name in mine]
            total, count = total - own[0], count - own[1]
            others = pl.lit(pl.Series(fitted.facts["other_folds_mean"], dtype=pl.Float64))
            prior = pl.when(train).then(others.gather(pl.col(self.fold_column))).otherwise(prior)
        weight = count + self.smoothing
        mean = pl.when(weight > 0).then((total + self.smoothing * prior) / weight).otherwise(prior)
        return made.with_columns(mean.alias(self.name)).drop(*of_key, *mine)

    def fit_and_encode(
        self, rows: pl.DataFrame, train: Any, facts: Mapping[str, Any]
    ) -> tuple[pl.DataFrame, pl.Series]:
        fold = rows.get_column(self.fold_column).to_numpy().astype(np.uint64)
        label = rows.get_column(LABEL).fill_null(0.0).to_numpy()
        if not (all_train := train.all()):
            label = np.where(train, label, 0.0)
        others = np.array(facts["other_folds_mean"])
        made, sums = np.empty(rows.height), np.empty(rows.height)
        counts, first = np.empty(rows.height, np.int64), np.empty(rows.height, np.int64)
        keys = 0
        # Groups are of a key and a fold; those of a key follow each other.
        codes, bound = groups.join_codes(*groups.key_codes(rows, self.by), fold, self.folds)
        for some in groups.sorted_groups(codes, bound, self.folds):
            starts = np.flatnonzero(groups.starts_of(some.codes // np.uint64(self.folds)))
            size = np.diff(starts, append=len(some.codes))
            sides = some.sums(label), some.counts(train).astype(np.float64)
            totals = [np.add.reduceat(side, starts) for side in sides]
            prior = others[(some.codes % np.uint64(self.folds)).astype(np.int64)]
            rests = [np.repeat(total, size) - side for total, side in zip(totals, sides, strict=True)]
            encoded = np.repeat(self._smoothed(rests, prior), some.sizes)
            if not all_train:
                every = np.repeat(np.repeat(self._smoothed(totals, facts["mean"]), size), some.sizes)
                encoded = np.where(train[some.rows], encoded, every)
            made[some.rows] = encoded
            here = slice(keys, keys := keys + len(starts))
            sums[here], counts[here], first[here] = *totals, np.minimum.reduceat(some.first(train), starts)
        values = pl.DataFrame({_SUM: sums[:keys], _COUNT: counts[:keys], FIRST: first[:keys]})
        return values, pl.Series(self.name, made)

    def _smoothed(self, sums: Sequence[Any], prior: Any) -> Any:
        """Return the smoothed means of (sums of labels, numbers of rows)."""
        weight = sums[1] + self.smoothing
        found = sums[0] + self.smoothing * prior
        return np.where(weight > 0, found / np.where(weight > 0, weight, 1.0), prior)


@dataclass(frozen=True, kw_only=True)
class Merge(Fittable):
    """Columns of ``file``, joined where its ``key`` equals ``on``; missing for keys that the file lacks.

    The file is read once, when a dataset is prepared. The dataset stores its columns, and new rows use these.

    Args:
        on: column of the rows.
        file: delimited text, Parquet or JSON lines, with one line per key. A relative path in a schema file is first
            searched next to that file, then in the working directory.
        columns: columns of the file to join as text; in the result they are called ``name_<column>``.
        number_columns: the same for columns of numbers.
        key: key column of the file; empty: the name of ``on``.
    """

    kind: ClassVar[str] = "merge"
    reads = "on"
    folder: ClassVar[Path | None] = None  # folder of the schema file; not a setting, so that no hash depends on it
    on: str
    file: str
    columns: tuple[str, ...] = ()
    number_columns: tuple[str, ...] = ()
    key: str = ""

    def check(self) -> None:
        texts(self.where, "columns", (*self.columns, *self.number_columns))
        if not self.file:
            fail(self.where, "file", "is empty")

    def of_schema(self, folder: Path) -> Merge:
        """Return the same feature for a schema file in ``folder``."""
        made = replace(self)
        object.__setattr__(made, "folder", folder)
        return made

    @property
    def path(self) -> Path:
        """The file next to the schema file if it exists, else the path from the working directory."""
        near = None if self.folder is None else self.folder / self.file
        return near if near is not None and near.is_file() else Path(self.file)

    def check_file(self) -> None:
        """Raise :class:`DataError` if the file is missing or lacks a column."""
        from stoker.prep.features.tables import open_table

        if not self.path.is_file():
            places = [Path.cwd()] if self.folder is None else [self.folder.absolute(), Path.cwd()]
            listed = "" if Path(self.file).is_absolute() else f" in {' or '.join(map(str, dict.fromkeys(places)))}"
            raise DataError(f"{self.where}: there is no file {self.file!r}{listed}. Check the path.")
        open_table(self.path, self._types())

    def _types(self) -> dict[str, str]:
        """Return column -> type of the columns to read."""
        texts_, numbers = dict.fromkeys(self.columns, "string"), dict.fromkeys(self.number_columns, "float")
        return {self.key or self.on: "string", **texts_, **numbers}

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{column}" for column in (*self.columns, *self.number_columns))

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.on,)

    def model_columns(self) -> dict[str, dict[str, Any]]:
        many = len(self.columns)
        return {name: TEXT if place < many else MAYBE_MISSING for place, name in enumerate(self.outputs)}

    def fit(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> FittedTable:
        from stoker.prep.features.tables import read_table

        key = self.key or self.on
        if key in (*self.columns, *self.number_columns):
            raise DataError(f"{self.where}: {key!r} is the key of {self.file} and cannot be joined, too. Leave it out.")
        self.check_file()
        types = self._types()
        table = read_table(self.path, types).rename({c: f"{self.name}_{c}" for c in types if c != key})
        there = rows.collect_schema()[self.on]
        if not there.is_integer() and there != pl.String:
            raise DataError(f"{self.where}: column {self.on!r} holds {there}, not text or whole numbers.")
        # A key that is not a number matches no row; "7" and "07" are the same number.
        table = table.rename({key: self.on}).cast({self.on: there}, strict=False).drop_nulls(self.on)
        twice = table.filter(table[self.on].is_duplicated())
        if twice.height:
            raise DataError(
                f"{self.where}: {self.file} has {twice.height:,} lines whose {key} another line has, too, for example "
                f"{twice[self.on][0]!r}. Keep one line for each."
            )
        return FittedTable(table=table, distinct=True)

    def attach(self, frame: pl.LazyFrame, fitted: FittedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        return look_up(frame, {self.on: self.on}, fitted.table, {name: name for name in self.outputs})


@dataclass(frozen=True, kw_only=True)
class Properties(Fittable):
    """Columns ``name_1`` ... ``name_<most>``: 1 if the list in ``column`` contains the column's value, else 0.

    Args:
        column: texts; ``separator`` divides each into its values.
        values: one value for each column. Empty: the ``most`` values that occur in the most training rows, ties by
            rising text; if there are fewer values, the last columns are 0. The fitted table lists them.
        most: number of columns if ``values`` is empty.
    """

    kind: ClassVar[str] = "properties"
    reads = "column"
    read_as: ClassVar[dict[str, Any]] = {}
    column: str
    separator: str = "|"
    values: tuple[str, ...] = ()
    most: int | None = None

    def check(self) -> None:
        if bool(self.values) == (self.most is not None):
            fail(self.where, "values", "and most: give one of the two")
        positive(self.where, "most", self.most)
        texts(self.where, "values", self.values, least=0)
        if not self.separator:
            fail(self.where, "separator", "is empty")

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{number}" for number in range(1, (self.most or len(self.values)) + 1))

    def fit(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> FittedTable:
        if self.values:
            return FittedTable(table=pl.DataFrame({"value": list(self.values)}))
        # Distinct texts first: a list that many rows share is split once.
        lists = rows.group_by(pl.col(self.column).cast(pl.String).alias("value")).agg(pl.len().alias("count"))
        elements = lists.with_columns(pl.col("value").str.split(self.separator).list.unique()).explode("value")
        counted = elements.filter(pl.col("value").str.len_bytes() > 0).group_by("value").agg(pl.col("count").sum())
        found = collect(counted, engine).sort("count", "value", descending=[True, False])
        return FittedTable(table=found.head(self.most or 0).cast({"count": pl.Int64}))

    def attach(self, frame: pl.LazyFrame, fitted: FittedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        known = fitted.table.select("value").with_row_index("column")

        def marked(series: pl.Series) -> pl.Series:
            """Split each distinct text once."""
            encoded = series.rechunk().to_arrow().dictionary_encode(null_encoding="encode")
            distinct = pl.DataFrame({"value": pl.Series(pl.from_arrow(encoded.dictionary), dtype=pl.String)})
            elements = distinct.with_row_index("at").with_columns(pl.col("value").str.split(self.separator))
            hits = elements.explode("value").join(known, on="value")
            marks = np.zeros((len(self.outputs), max(1, distinct.height)), np.int8)
            marks[hits["column"].to_numpy(), hits["at"].to_numpy()] = 1
            made = marks[:, encoded.indices.to_numpy(zero_copy_only=False)]
            return pl.DataFrame(dict(zip(self.outputs, made, strict=True))).to_struct("__made")

        types = pl.Struct(dict.fromkeys(self.outputs, pl.Int8))
        made = pl.col(self.column).cast(pl.String).map_batches(marked, return_dtype=types, is_elementwise=True)
        return frame.with_columns(made.alias("__made")).unnest("__made")
