"""Features that all training rows teach: mean target and count encoding.

What was learned is a :class:`LearnedTable`: one row per distinct key. Keys are compared exactly; a missing key is a key
of its own. Sources: Micci-Barreca 2001, "A preprocessing scheme for high-cardinality categorical attributes" (smoothed
means); out of fold as in the RecSys Challenge 2019 solution of Rabhi et al., "Accelerating Recommender System Training
15x with RAPIDS", section 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stoker.data.schema_check import fail, positive
from stoker.features.base import ROW, Derivation, texts

if TYPE_CHECKING:
    import polars as pl

__all__ = ["LABEL", "CountEncoding", "Learned", "LearnedTable", "MeanTargetEncoding", "values_at"]

LABEL = "__label"  # what is to be predicted, Float64; there while features are fitted
_SUM, _COUNT, _FOLD = "sum", "count", "__fold"


@dataclass(kw_only=True)
class LearnedTable:
    """What one feature learned: kept in the dataset and used unchanged on new rows."""

    table: pl.DataFrame  # one row per distinct key
    facts: dict[str, Any] = field(default_factory=dict)  # plain values
    folds: pl.DataFrame | None = None  # of each key, fold by fold; for training rows, and not kept with a dataset
    _keys: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    def remember(self, names: Sequence[str], keys: Any) -> None:
        """Keep the :class:`~stoker.features.keys.KeyTable` that the table was made of."""
        self._keys[tuple(names)] = keys

    def rows_of(self, names: Sequence[str]) -> Callable[[Sequence[pl.Series]], Any]:
        """Finds the table's row of each key, -1 where it has none: columns called ``names`` -> [n] int64."""
        from stoker.features.keys import KeyTable

        key = tuple(names)
        if key not in self._keys:
            self._keys[key] = KeyTable.of(self.table, names)
        find: Callable[[Sequence[pl.Series]], Any] = self._keys[key].find
        return find


@dataclass(frozen=True, kw_only=True)
class Learned(Derivation):
    """A feature that training rows teach. One of your own writes :meth:`learn` and :meth:`attach`."""

    out_of_fold: ClassVar[bool] = False  # whether training rows need ``LearnedTable.folds``

    @abstractmethod
    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        """Learn from training rows, which have the inputs, ``__row`` and ``__label``."""

    @abstractmethod
    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        """The frame with the outputs, its rows and their order unchanged.

        Args:
            frame: rows with the inputs, and ``__row`` where ``train`` is given.
            learned: by :meth:`learn`.
            train: where a row is one of those learned from; None: nowhere.
        """


def values_at(series: pl.Series, rows: Any) -> pl.Series:
    """``series[rows]``, missing where a row is -1."""
    import polars as pl

    places = pl.Series(rows)
    return series.gather(places.set(places < 0, None) if (rows < 0).any() else places)


@dataclass(frozen=True, kw_only=True)
class CountEncoding(Learned):
    """How many training rows have this key; 0 for a key that none has."""

    kind: ClassVar[str] = "count"
    by: tuple[str, ...]

    def check(self) -> None:
        texts(self.where, "by", self.by)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.by

    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        from stoker.features.keys import KeyTable, batches
        from stoker.features.learned_kernels import count_at

        there = rows.collect_schema()
        keys = KeyTable({name: there[name] for name in self.by})
        counts = np.zeros(0, np.int64)
        for part in batches(rows.select(self.by), engine):
            found = keys.add([part.get_column(name) for name in self.by])
            counts = _grown(counts, len(keys))
            count_at(counts, found)
        made = LearnedTable(table=keys.frame().with_columns(pl.Series(_COUNT, counts[: len(keys)])))
        made.remember(self.by, keys)
        return made

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        find, counts = learned.rows_of(self.by), learned.table.get_column(_COUNT)

        def counted(series: pl.Series) -> pl.Series:
            return values_at(counts, find(series.struct.unnest().get_columns())).fill_null(0)

        made = pl.struct(self.by).map_batches(counted, return_dtype=pl.Int64, is_elementwise=True)
        return frame.with_columns(made.alias(self.name))


@dataclass(frozen=True, kw_only=True)
class MeanTargetEncoding(Learned):
    """The mean label of a key's training rows, smoothed towards the mean of all.

    ``(sum + smoothing * mean of all) / (count + smoothing)``. For a training row, key and all are taken over the other
    folds only, so that its own label, and those of the rows that share its fold, have no part in it; all other rows
    get the encoding of all training rows. A key without rows has the mean of all.

    Args:
        by: the columns of the key.
        folds: into how many folds training rows are dealt, by a hash; 2 or more.
        smoothing: rows' worth of the mean of all; 0 or more.
        fold_by: rows with the same values share a fold: needed where labels within a group tell of each other, as of
            the one clicked item of a list. Empty: every row by itself.
        seed: of the folds.
    """

    kind: ClassVar[str] = "mean_target"
    out_of_fold: ClassVar[bool] = True
    by: tuple[str, ...]
    folds: int = 8
    smoothing: float = 20.0
    fold_by: tuple[str, ...] = ()
    seed: int = 0

    def check(self) -> None:
        texts(self.where, "by", self.by)
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

    def fold(self) -> pl.Expr:
        """Number of a row's fold, 0 to folds - 1."""
        import polars as pl

        from stoker.features.hashing import hash_of_rows, stable_hash

        hashed = stable_hash(self.fold_by, self.seed) if self.fold_by else hash_of_rows(ROW, self.seed)
        return (hashed % self.folds).cast(pl.Int32).alias(_FOLD)

    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        from stoker.features.keys import KeyTable, batches
        from stoker.features.learned_kernels import add_at, count_at, fold_totals

        there = rows.collect_schema()
        keys = KeyTable({name: there[name] for name in self.by})
        # A place for every key and fold: most keys have a few rows, and a place costs less than finding one.
        sums: Any = np.zeros(0)
        counts: Any = np.zeros(0, np.int32)
        for part in batches(rows.select(*self.by, LABEL, self.fold()), engine):
            places = keys.add([part.get_column(name) for name in self.by]) * self.folds
            places += part.get_column(_FOLD).to_numpy()
            sums, counts = (_grown(array, len(keys) * self.folds) for array in (sums, counts))
            add_at(sums, places, part.get_column(LABEL).to_numpy())
            count_at(counts, places)
        sums, counts = sums[: len(keys) * self.folds], counts[: len(keys) * self.folds]
        of_key: Any = (np.zeros(len(keys)), np.zeros(len(keys), np.int64))
        of_fold: Any = (np.zeros(self.folds), np.zeros(self.folds, np.int64))
        fold_totals(sums, counts, *of_key, *of_fold)
        held = list(zip(of_fold[0].tolist(), of_fold[1].tolist(), strict=True))
        total, count = sum(s for s, _ in held), sum(n for _, n in held)
        mean = total / count if count else 0.0
        others = [(total - s) / (count - n) if count > n else mean for s, n in held]
        table = keys.frame().with_columns(pl.Series(_SUM, of_key[0]), pl.Series(_COUNT, of_key[1]))
        made = LearnedTable(
            table=table,
            folds=pl.DataFrame({_SUM: sums, _COUNT: counts}),
            facts={"mean": mean, "other_folds_mean": others},
        )
        made.remember(self.by, keys)
        return made

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        from stoker.features.learned_kernels import smoothed_means

        find, folds = learned.rows_of(self.by), learned.folds
        sums, counts = (learned.table.get_column(name).to_numpy() for name in (_SUM, _COUNT))
        mean, others = learned.facts["mean"], np.array(learned.facts["other_folds_mean"])
        columns: list[Any] = [pl.col(name) for name in self.by]
        own: Any = (np.zeros(0), np.zeros(0, np.int32))
        if train is not None:
            assert folds is not None
            own = tuple(folds.get_column(name).to_numpy() for name in (_SUM, _COUNT))
            columns += [self.fold(), train.alias("__train")]

        def encoded(series: pl.Series) -> pl.Series:
            parts = series.struct.unnest()
            rows = find([parts.get_column(name) for name in self.by])
            chosen, fold = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.int32)
            if train is not None:
                chosen, fold = parts.get_column("__train").to_numpy(), parts.get_column(_FOLD).to_numpy()
            out = np.empty(len(rows))
            smoothed_means(rows, fold, chosen, sums, counts, *own, mean, others, float(self.smoothing), out)
            return pl.Series(out)

        made = pl.struct(columns).map_batches(encoded, return_dtype=pl.Float64, is_elementwise=True)
        return frame.with_columns(made.alias(self.name))


def _grown(array: Any, size: int) -> Any:
    if size <= len(array):
        return array
    larger = np.zeros(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger
