"""Features that all training rows teach: mean target and count encoding.

What was learned is a :class:`LearnedTable`: one row per distinct key. Keys are compared exactly; a missing key is a key
of its own. Sources: Micci-Barreca 2001, "A preprocessing scheme for high-cardinality categorical attributes" (smoothed
means); out of fold as in the RecSys Challenge 2019 solution of Rabhi et al., "Accelerating Recommender System Training
15x with RAPIDS", section 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stoker.data.schema_check import fail, positive
from stoker.features.base import ROW, Derivation, texts
from stoker.features.engine import collect

if TYPE_CHECKING:
    import polars as pl

__all__ = ["LABEL", "CountEncoding", "Learned", "LearnedTable", "MeanTargetEncoding", "same_types"]

LABEL = "__label"  # what is to be predicted, Float64; there while features are fitted
_SUM, _COUNT, _FOLD = "sum", "count", "__fold"


@dataclass(kw_only=True)
class LearnedTable:
    """What one feature learned: kept in the dataset and used unchanged on new rows."""

    table: pl.DataFrame  # one row per distinct key, sorted
    facts: dict[str, Any] = field(default_factory=dict)  # plain values
    folds: pl.DataFrame | None = None  # per key and fold; needed for training rows only and not kept with the dataset


@dataclass(frozen=True, kw_only=True)
class Learned(Derivation):
    """A feature that training rows teach. One of your own writes :meth:`learn` and :meth:`attach`."""

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


def same_types(frame: pl.LazyFrame, table: pl.DataFrame, keys: Sequence[str]) -> pl.LazyFrame:
    """The frame with its keys in the types of the learned table's, so that they can be compared."""
    import polars as pl

    there = frame.collect_schema()
    casts = [pl.col(key).cast(table.schema[key], strict=False) for key in keys if there[key] != table.schema[key]]
    return frame.with_columns(casts) if casts else frame


def _left(frame: pl.LazyFrame, table: pl.DataFrame, on: Sequence[str]) -> pl.LazyFrame:
    return frame.join(table.lazy(), on=list(on), how="left", maintain_order="left", nulls_equal=True)


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

        counted = rows.group_by(list(self.by)).agg(pl.len().cast(pl.Int64).alias(_COUNT))
        return LearnedTable(table=collect(counted, engine).sort(list(self.by)))

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        there = frame.collect_schema()
        renamed = learned.table.rename({_COUNT: self.name})
        found = _left(same_types(frame, learned.table, self.by), renamed, self.by)
        return _restored(found.with_columns(pl.col(self.name).fill_null(0)), there, self.by)


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

        keys = list(self.by)
        counted = rows.with_columns(self.fold()).group_by([*keys, _FOLD]).agg(
            pl.col(LABEL).sum().alias(_SUM), pl.len().cast(pl.Int64).alias(_COUNT)
        )  # fmt: skip
        # Sorted before anything is added up, so that labels other than 0 and 1 give the same bits, too.
        folds = collect(counted, engine).sort([*keys, _FOLD])
        totals = folds.group_by(keys, maintain_order=True).agg(pl.col(_SUM).sum(), pl.col(_COUNT).sum())
        each = folds.group_by(_FOLD).agg(pl.col(_SUM).sum(), pl.col(_COUNT).sum()).sort(_FOLD)
        held = {f: (float(s), int(n)) for f, s, n in each.iter_rows()}
        total, count = sum(s for s, _ in held.values()), sum(n for _, n in held.values())
        mean = total / count if count else 0.0
        out = [held.get(f, (0.0, 0)) for f in range(self.folds)]
        others = [(total - s) / (count - n) if count > n else mean for s, n in out]
        return LearnedTable(table=totals, folds=folds, facts={"mean": mean, "other_folds_mean": others})

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        there = frame.collect_schema()
        found = same_types(frame, learned.table, self.by)
        total, count = pl.col("__s").fill_null(0.0), pl.col("__n").fill_null(0)
        mean = pl.lit(learned.facts["mean"], pl.Float64)
        if train is not None:
            assert learned.folds is not None
            own = learned.folds.rename({_SUM: "__fs", _COUNT: "__fn"})
            found = _left(found.with_columns(self.fold()), own, [*self.by, _FOLD])
            total = total - pl.when(train).then(pl.col("__fs")).fill_null(0.0)
            count = count - pl.when(train).then(pl.col("__fn")).fill_null(0)
            others = learned.facts["other_folds_mean"]
            elsewhere = pl.col(_FOLD).replace_strict(list(range(self.folds)), others, return_dtype=pl.Float64)
            mean = pl.when(train).then(elsewhere).otherwise(mean)
        found = _left(found, learned.table.rename({_SUM: "__s", _COUNT: "__n"}), self.by)
        weight = count.cast(pl.Float64) + self.smoothing
        encoded = pl.when(weight > 0).then((total + self.smoothing * mean) / weight).otherwise(mean)
        return _restored(found.with_columns(encoded.alias(self.name)), there, self.by, self.name)


def _restored(frame: pl.LazyFrame, there: Any, keys: Sequence[str], *made: str) -> pl.LazyFrame:
    """The columns that were there, in their own types, and the new ones only."""
    import polars as pl

    have = frame.collect_schema()
    casts = [pl.col(key).cast(there[key], strict=False) for key in keys if have[key] != there[key]]
    new = made or tuple(name for name in have.names() if name not in there and not name.startswith("__"))
    return frame.select(*(pl.col(name) for name in there.names() if name not in keys or have[name] == there[name]),
                        *casts, *new)  # fmt: skip
