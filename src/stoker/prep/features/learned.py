"""Features that are fitted on training rows: mean target and count encoding.

A fitted feature is a :class:`LearnedTable`: one row per distinct key. Keys are compared exactly; a missing key is a key
of its own. Sources: Micci-Barreca 2001, "A preprocessing scheme for high-cardinality categorical attributes" (smoothed
means); out of fold as in the RecSys Challenge 2019 solution of Rabhi et al., "Accelerating Recommender System Training
15x with RAPIDS", section 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stoker.base.checks import fail, positive
from stoker.base.engine import collect
from stoker.base.errors import DataError
from stoker.prep.features.base import ROW, Derivation, texts

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "FIRST",
    "LABEL",
    "CountEncoding",
    "KeySums",
    "Keyed",
    "Learned",
    "LearnedTable",
    "MeanTargetEncoding",
    "look_up",
]

LABEL = "__label"  # the label, Float64; a column of the rows while features are fitted
FIRST = "__first"  # the first training row of a key, Int64; a column of tables while they are fitted
_SUM, _COUNT = "sum", "count"
_FOREIGN = "__foreign"


class LearnedTable:
    """A fitted feature: kept in the dataset and used unchanged on new rows.

    Args:
        table: one row per distinct key, or a function that makes it when it is asked for first.
        facts: plain values.
        folds: the sums of each key and fold, by which training rows leave out their own fold. Not kept with a dataset.
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
class Learned(Derivation):
    """A feature that is fitted on training rows. One of your own writes :meth:`learn` and :meth:`attach`."""

    out_of_fold: ClassVar[bool] = False  # whether training rows need ``LearnedTable.folds``
    labelled: ClassVar[bool] = False  # whether it reads the label

    @property
    def has_table(self) -> bool:
        return True

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of which the learned table has each combination of values once."""
        return ()

    @property
    def types(self) -> dict[str, Any]:
        """Polars type of each output."""
        import polars as pl

        return dict.fromkeys(self.outputs, pl.Float64)

    def helpers(self) -> list[pl.Expr]:
        """Return columns that :meth:`learn` needs beside the inputs, and :meth:`attach` of training rows, too."""
        return []

    @abstractmethod
    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        """Fit on training rows, which have the inputs, the helpers, ``__row`` and ``__label``."""

    @abstractmethod
    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        """Return the frame with the outputs, its rows and their order unchanged.

        Args:
            frame: rows with the inputs and, where ``train`` is given, the helpers.
            learned: by :meth:`learn`.
            train: which rows are training rows that ``learned.folds`` knows; None: none.
        """

    def learn_attach(self, rows: pl.DataFrame) -> tuple[LearnedTable, list[pl.Series]]:
        """Fit on training rows in memory; return the table and the outputs of these rows."""
        import polars as pl

        found = self.learn(rows.lazy())
        train = None if found.folds is None else pl.lit(True)
        made = self.attach(rows.lazy(), found, train).select(self.outputs).collect()
        return found, made.get_columns()


def look_up(frame: pl.LazyFrame, by: Mapping[str, str], table: pl.DataFrame, found: Mapping[str, str]) -> pl.LazyFrame:
    """Return the frame with columns of the table's row of the same key; missing where the table has no such key.

    Args:
        frame: rows, whose order stays.
        by: column of the frame -> column of the table.
        table: has each key once. A value of another type is found where it is the same value: 1.0 for 1, not 1.5.
        found: new column of the frame -> column of the table.
    """
    import polars as pl

    from stoker.prep.features.groups import key

    have = frame.collect_schema()
    keys, columns, foreign = {}, {}, None
    for number, (name, other) in enumerate(by.items()):
        given, wanted = key(name, have[name]), table.schema[other]
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
        keys[f"__key:{number}"], columns[f"__key:{number}"] = given, key(other, wanted)
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
class Keyed(Learned):
    """A learned feature whose table is made key by key, so that rows may be worked on by partitions of the keys."""

    by: tuple[str, ...]

    def check(self) -> None:
        texts(self.where, "by", self.by)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.by

    @property
    def keys(self) -> tuple[str, ...]:
        return self.by

    def facts(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> dict[str, Any]:
        """Return what all training rows say, whatever their keys."""
        return {}

    def facts_in_memory(self, rows: pl.DataFrame) -> dict[str, Any]:
        """As :meth:`facts`, of rows in memory."""
        return self.facts(rows.lazy())

    @abstractmethod
    def work_out(self, rows: pl.DataFrame, train: Any, facts: Mapping[str, Any]) -> tuple[KeySums, pl.Series]:
        """Fit and encode at once.

        Args:
            rows: all rows of their keys, with the inputs, the helpers and ``__row``, and ``__label`` of training rows.
            train: bool [n], which are training rows.
            facts: by :meth:`facts`.

        Returns:
            What the table of these keys is made of, and the output of each row.
        """

    def learn_attach(self, rows: pl.DataFrame) -> tuple[LearnedTable, list[pl.Series]]:
        facts = self.facts_in_memory(rows)
        sums, made = self.work_out(rows, np.ones(rows.height, np.bool_), facts)
        keys = rows.select(*self.by, ROW)
        return LearnedTable(table=lambda: sums.table(keys).drop(FIRST), facts=facts, distinct=True), [made]

    def _keys(self, rows: pl.LazyFrame) -> list[pl.Expr]:
        from stoker.prep.features.groups import key

        schema = rows.collect_schema()
        return [key(name, schema[name]) for name in self.by]


@dataclass(frozen=True, kw_only=True)
class KeySums:
    """The learned values of some keys.

    Args:
        by: the columns of the key.
        first: int64 [keys]: place of the first training row of each; -1 for a key that has none and is left out.
        values: column -> [keys].
    """

    by: Sequence[str]
    first: Any
    values: Mapping[str, Any]

    def table(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return one row per key with ``__first``, in its order; ``rows`` have the key and ``__row``."""
        import polars as pl

        from stoker.prep.features.groups import key

        key_of = np.full(rows.height, -1)
        known = self.first >= 0
        key_of[self.first[known]] = np.flatnonzero(known)
        places = np.flatnonzero(key_of >= 0)
        keys = rows.select(pl.col(*self.by, ROW).gather(pl.Series(places))).rename({ROW: FIRST})
        made = [pl.Series(name, values[key_of[places]]) for name, values in self.values.items()]
        return keys.with_columns(key(name, rows.schema[name]) for name in self.by).with_columns(made)


@dataclass(frozen=True, kw_only=True)
class CountEncoding(Keyed):
    """How many training rows have this key; 0 for a key that none has."""

    kind: ClassVar[str] = "count"

    @property
    def types(self) -> dict[str, Any]:
        import polars as pl

        return {self.name: pl.Int64}

    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        counted = rows.group_by(self._keys(rows)).agg(pl.len().cast(pl.Int64).alias(_COUNT), pl.col(ROW).min())
        return LearnedTable(table=collect(counted, engine).sort(ROW).drop(ROW), distinct=True)

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        found = look_up(frame, {name: name for name in self.by}, learned.table, {self.name: _COUNT})
        return found.with_columns(pl.col(self.name).fill_null(0))

    def work_out(self, rows: pl.DataFrame, train: Any, facts: Mapping[str, Any]) -> tuple[KeySums, pl.Series]:
        import polars as pl

        from stoker.prep.features.groups import Groups, key_codes

        groups = Groups(*key_codes(rows, self.by))
        counts = groups.count(train)
        sums = KeySums(by=self.by, first=groups.first(train), values={_COUNT: counts})
        return sums, pl.Series(self.name, groups.spread(counts))


@dataclass(frozen=True, kw_only=True)
class MeanTargetEncoding(Keyed):
    """The mean label of a key's training rows, smoothed towards the mean of all.

    ``(sum + smoothing * mean of all) / (count + smoothing)``. For a training row, key and all are taken over the other
    folds only, so that its own label, and those of the rows that share its fold, have no part in it; all other rows
    get the encoding of all training rows. A key without rows has the mean of all.

    Sums of labels that are whole numbers are exact. Of others, the last bits depend on the order in which Polars adds.

    Args:
        by: the columns of the key.
        folds: into how many folds training rows are divided, by a hash; 2 or more.
        smoothing: rows' worth of the mean of all; 0 or more.
        fold_by: rows with the same values share a fold: needed where labels within a group tell of each other, as of
            the one clicked item of a list. Empty: the ``group`` of the schema; without one, every row by itself.
        seed: of the folds.
    """

    kind: ClassVar[str] = "mean_target"
    out_of_fold: ClassVar[bool] = True
    labelled: ClassVar[bool] = True
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
        return tuple(dict.fromkeys((*self.by, *self.fold_by)))

    def in_groups(self, column: str | None) -> MeanTargetEncoding:
        return self if self.fold_by or column is None else replace(self, fold_by=(column,))

    @property
    def fold_column(self) -> str:
        """The helper column with the fold of each row; features with the same folds share it."""
        return "\x1f".join([f"__fold:{self.folds}:{self.seed}:", *self.fold_by])

    def helpers(self) -> list[pl.Expr]:
        import polars as pl

        from stoker.prep.features.hashing import row_folds, stable_hash

        if not self.fold_by:
            return [row_folds(ROW, self.seed, self.folds).alias(self.fold_column)]
        return [(stable_hash(self.fold_by, self.seed) % self.folds).cast(pl.Int32).alias(self.fold_column)]

    def facts(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> dict[str, Any]:
        """Return the mean of all labels and, for each fold, that of the other folds."""
        import polars as pl

        label, fold = pl.col(LABEL), pl.col(self.fold_column)
        sums = rows.group_by(fold).agg(label.sum().alias(_SUM), pl.len().alias(_COUNT),
                                       (~label.is_finite()).fill_null(True).sum().alias("without"))  # fmt: skip
        found = collect(sums, engine)
        of_fold = np.zeros((self.folds, 2))
        of_fold[found[self.fold_column].to_numpy()] = found.select(_SUM, _COUNT).to_numpy()
        return self._means(of_fold, int(found["without"].sum()))

    def facts_in_memory(self, rows: pl.DataFrame) -> dict[str, Any]:
        labels = rows.get_column(LABEL).fill_null(np.nan).to_numpy()
        fold = rows.get_column(self.fold_column).to_numpy()
        sums, counts = (np.bincount(fold, weights, self.folds) for weights in (labels, None))
        return self._means(np.stack([sums, counts], axis=1), int((~np.isfinite(labels)).sum()))

    def _means(self, of_fold: Any, without: int) -> dict[str, Any]:
        """Return the facts of the sum and number of labels of each fold [folds, 2]."""
        if without:
            raise DataError(
                f"{self.where}: the label is missing or no number in {without:,} of {of_fold[:, 1].sum():,.0f} "
                "training rows. Leave such rows out, or fill the label."
            )
        (total, count), sides = of_fold.sum(axis=0).tolist(), of_fold.tolist()
        mean = total / count if count else 0.0
        others = [(total - s) / (count - n) if count > n else mean for s, n in sides]
        return {"mean": mean, "other_folds_mean": others}

    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        facts = self.facts(rows, engine=engine)
        of_fold = rows.group_by(*self._keys(rows), self.fold_column).agg(
            pl.col(LABEL).sum().alias(_SUM), pl.len().cast(pl.Int64).alias(_COUNT), pl.col(ROW).min()
        )
        folds = collect(of_fold, engine).sort(ROW)
        totals = folds.group_by(self.by).agg(pl.col(_SUM, _COUNT).sum(), pl.col(ROW).min())
        table = totals.sort(ROW).drop(ROW)
        return LearnedTable(table=table, facts=facts, folds=folds.drop(ROW), distinct=True)

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        of_key = {"__sum": _SUM, "__count": _COUNT}
        made = look_up(frame, {name: name for name in self.by}, learned.table, of_key)
        total, count = (pl.col(name).cast(pl.Float64).fill_null(0.0) for name in of_key)
        prior: Any = pl.lit(learned.facts["mean"], pl.Float64)
        mine: dict[str, str] = {}
        if train is not None and learned.folds is not None:
            mine = {"__fold_sum": _SUM, "__fold_count": _COUNT}
            made = look_up(made, {name: name for name in (*self.by, self.fold_column)}, learned.folds, mine)
            own = [pl.when(train).then(pl.col(name).cast(pl.Float64)).otherwise(0.0).fill_null(0.0) for name in mine]
            total, count = total - own[0], count - own[1]
            others = pl.lit(pl.Series(learned.facts["other_folds_mean"], dtype=pl.Float64))
            prior = pl.when(train).then(others.gather(pl.col(self.fold_column))).otherwise(prior)
        weight = count + self.smoothing
        mean = pl.when(weight > 0).then((total + self.smoothing * prior) / weight).otherwise(prior)
        return made.with_columns(mean.alias(self.name)).drop(*of_key, *mine)

    def work_out(self, rows: pl.DataFrame, train: Any, facts: Mapping[str, Any]) -> tuple[KeySums, pl.Series]:
        import polars as pl

        from stoker.prep.features.groups import Groups, join_codes, key_codes

        fold = rows.get_column(self.fold_column).to_numpy()
        groups = Groups(
            *join_codes(*key_codes(rows, self.by), fold.astype(np.uint64), self.folds)
        )  # by key and fold: the groups of a key follow each other
        keys = groups.codes // np.uint64(self.folds)
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        size = np.diff(starts, append=len(keys))
        label = rows.get_column(LABEL).fill_null(0.0).to_numpy()
        sums = groups.sums(label if train.all() else np.where(train, label, 0.0))
        counts = groups.count(train).astype(np.float64)
        totals = [np.add.reduceat(one, starts) if len(one) else one for one in (sums, counts)]
        prior = np.array(facts["other_folds_mean"])[(groups.codes % np.uint64(self.folds)).astype(np.int64)]
        rests = [np.repeat(total, size) - one for total, one in zip(totals, (sums, counts), strict=True)]
        made = groups.spread(self._smoothed(rests, prior))
        if not train.all():
            every = np.repeat(self._smoothed(totals, facts["mean"]), size)
            made = np.where(train, made, groups.spread(every))
        first = groups.first(train)  # -1 is the greatest number without a sign
        first = np.minimum.reduceat(first.view(np.uint64), starts).view(np.int64) if len(first) else first
        values = {_SUM: totals[0], _COUNT: totals[1].astype(np.int64)}
        return KeySums(by=self.by, first=first, values=values), pl.Series(self.name, made)

    def _smoothed(self, sums: Sequence[Any], prior: Any) -> Any:
        """Return the encodings of sums of labels and numbers of rows."""
        weight = sums[1] + self.smoothing
        found = sums[0] + self.smoothing * prior
        return np.where(weight > 0, found / np.where(weight > 0, weight, 1.0), prior)
