"""Features that all training rows teach: mean target and count encoding.

What was learned is a :class:`LearnedTable`: one row per distinct key. Keys are compared exactly; a missing key is a key
of its own. Sources: Micci-Barreca 2001, "A preprocessing scheme for high-cardinality categorical attributes" (smoothed
means); out of fold as in the RecSys Challenge 2019 solution of Rabhi et al., "Accelerating Recommender System Training
15x with RAPIDS", section 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from stoker.base.checks import fail, positive
from stoker.base.errors import DataError
from stoker.ops.memory import zeros
from stoker.prep.features.base import ROW, Derivation, texts
from stoker.prep.features.fitted.learned_table import FoldSums, Later, LearnedTable, coded, codes_of

if TYPE_CHECKING:
    import polars as pl

    from stoker.prep.features.fitted.keys import Coder, KeyTable

__all__ = [
    "LABEL",
    "TRAIN",
    "CountEncoding",
    "Learned",
    "LearnedTable",
    "MeanTargetEncoding",
    "coded",
    "codes_of",
    "values_at",
]  # fmt: skip

TRAIN = "__train"  # whether a row was learned from, while its features are worked out
LABEL = "__label"  # what is to be predicted, Float64; there while features are fitted
_SUM, _COUNT = "sum", "count"
JOIN = "\x1f"  # between names of columns in that of a helper
_WAITING = 2**23  # rows whose labels are kept before they are summed
_ROWS = 2**16  # encoded at a time: what is made for them stays in cache


@dataclass(frozen=True, kw_only=True)
class Learned(Derivation):
    """A feature that training rows teach. One of your own writes :meth:`learn`, :meth:`reads` and :meth:`encode`.

    Columns of :attr:`keys` come as codes (:func:`~stoker.prep.features.fitted.keys.code_column`), the same for all
    features.
    """

    out_of_fold: ClassVar[bool] = False  # whether training rows need ``LearnedTable.folds``
    labelled: ClassVar[bool] = True  # whether it reads ``__row`` or ``__label`` where it learns
    numbered: ClassVar[bool] = False  # whether its keys' numbers are all it takes, where rows in memory have them

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns whose values it looks up."""
        return ()

    @property
    def types(self) -> dict[str, Any]:
        """Polars type of each output."""
        import polars as pl

        return dict.fromkeys(self.outputs, pl.Float64)

    @abstractmethod
    def learn(self, rows: pl.DataFrame | pl.LazyFrame, coder: Coder, *, engine: str = "streaming") -> LearnedTable:
        """Learn from training rows, which have :meth:`reads`, ``__row`` and ``__label``."""

    def learn_encode(self, rows: pl.DataFrame, coder: Coder) -> tuple[LearnedTable, list[pl.Series]]:
        """Learn from training rows in memory, and their outputs."""
        import polars as pl

        found = self.learn(rows, coder)
        return found, self.encode(rows if found.folds is None else rows.with_columns(pl.lit(True).alias(TRAIN)), found)

    @abstractmethod
    def reads(self, *, train: bool) -> list[str]:
        """Columns that :meth:`encode` needs; ``train``: where rows that were learned from may be among them."""

    @abstractmethod
    def encode(self, rows: pl.DataFrame, learned: LearnedTable) -> list[pl.Series]:
        """The outputs for some rows.

        Args:
            rows: what it :meth:`reads`, and ``__train`` where rows that were learned from may be among them.
            learned: by :meth:`learn`, bound to the coder of the rows' codes.
        """

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        """The frame with the outputs, its rows and their order unchanged; lazily.

        Args:
            frame: rows with what :meth:`reads` names.
            learned: by :meth:`learn`, bound.
            train: where a row is one of those learned from; None: nowhere.
        """
        import polars as pl

        columns: list[Any] = [pl.col(name) for name in self.reads(train=train is not None)]
        if train is not None:
            columns.append(train.alias(TRAIN))
        kind = pl.Struct(self.types)

        def encoded(series: pl.Series) -> pl.Series:
            return pl.DataFrame(self.encode(series.struct.unnest(), learned)).to_struct("__made")

        made = pl.struct(columns).map_batches(encoded, return_dtype=kind, is_elementwise=True)
        return frame.with_columns(made.alias("__made")).unnest("__made")


def values_at(series: pl.Series, rows: Any) -> pl.Series:
    """``series[rows]``, missing where a row is -1."""
    import polars as pl

    places = pl.Series(rows)
    return series.gather(places.set(places < 0, None) if (rows < 0).any() else places)


@dataclass(frozen=True, kw_only=True)
class CountEncoding(Learned):
    """How many training rows have this key; 0 for a key that none has."""

    kind: ClassVar[str] = "count"
    labelled: ClassVar[bool] = False
    numbered: ClassVar[bool] = True
    by: tuple[str, ...]

    def check(self) -> None:
        texts(self.where, "by", self.by)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.by

    @property
    def keys(self) -> tuple[str, ...]:
        return self.by

    @property
    def types(self) -> dict[str, Any]:
        import polars as pl

        return {self.name: pl.Int64}

    def reads(self, *, train: bool) -> list[str]:
        return coded(self.by)

    def learn(self, rows: pl.DataFrame | pl.LazyFrame, coder: Coder, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        from stoker.prep.features.fitted.keys import KeyTable, batches
        from stoker.prep.features.fitted.learned_kernels import count_at

        known = numbers_of(rows, self.by, coder)
        if known is not None:
            keys, places = known
            counts = zeros(len(keys) + 1, np.int64)
            count_at(counts, places)
            return LearnedTable(
                table=lambda: key_frame(keys, self.by, coder).with_columns(pl.Series(_COUNT, counts[:-1])),
                keys=keys,
                numbers=counts,
            )
        keys, counts = KeyTable(len(self.by)), np.zeros(0, np.int64)
        for part in batches(rows.select(coded(self.by)), engine):
            found = keys.add(codes_of(part, self.by))
            counts = _grown(counts, len(keys))
            count_at(counts, found)
        table = key_frame(keys, self.by, coder).with_columns(pl.Series(_COUNT, counts[: len(keys)]))
        return LearnedTable(table=table, keys=keys)

    def encode(self, rows: pl.DataFrame, learned: LearnedTable) -> list[pl.Series]:
        import polars as pl

        from stoker.prep.features.fitted.learned_kernels import take_counts

        if learned.numbers is None:  # -1, which is not there, finds the 0
            learned.numbers = np.append(learned.table.get_column(_COUNT).to_numpy(), 0)
        out = np.empty(rows.height, np.int64)
        take_counts(learned.numbers, learned.places(rows, self.by), out)
        return [pl.Series(self.name, out)]


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
            the one clicked item of a list. Empty: the ``group`` of the schema; without one, every row by itself.
        seed: of the folds.
    """

    kind: ClassVar[str] = "mean_target"
    out_of_fold: ClassVar[bool] = True
    numbered: ClassVar[bool] = True
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

    def in_groups(self, column: str | None) -> MeanTargetEncoding:
        return self if self.fold_by or column is None else replace(self, fold_by=(column,))

    @property
    def keys(self) -> tuple[str, ...]:
        return self.by

    @property
    def fold_column(self) -> str:
        """Where the folds of its rows lie in a frame; features that deal alike share it."""
        return f"__fold:{self.folds}:{self.seed}:{JOIN.join(self.fold_by)}"

    def fold(self) -> pl.Expr:
        """Number of a row's fold, 0 to folds - 1."""
        import polars as pl

        from stoker.prep.features.hashing import deal, stable_hash

        if not self.fold_by:
            return deal(ROW, self.seed, self.folds).alias(self.fold_column)
        return (stable_hash(self.fold_by, self.seed) % self.folds).cast(pl.Int32).alias(self.fold_column)

    def reads(self, *, train: bool) -> list[str]:
        return [*coded(self.by), *([self.fold_column] if train else [])]

    def learn(self, rows: pl.DataFrame | pl.LazyFrame, coder: Coder, *, engine: str = "streaming") -> LearnedTable:

        from stoker.prep.features.fitted.keys import KeyTable, batches

        known = numbers_of(rows, self.by, coder)
        if known is not None:
            return self._learn_all(cast("pl.DataFrame", rows), *known, coder, None)
        keys, small = KeyTable(len(self.by)), np.uint8 if self.folds <= 2**8 else np.int32
        # Key, fold, and label and 1 of rows; from time to time those of one key and fold become one.
        held: list[Any] = [(np.zeros(0, np.int32), np.zeros(0, small), np.zeros((0, 2)))]
        waiting = 0
        for part in batches(rows.select(*self.reads(train=True), LABEL), engine):
            places = keys.add(codes_of(part, self.by)).astype(np.int32)
            labels = part.get_column(LABEL).to_numpy()
            self._check_labels(labels)
            fold = part.get_column(self.fold_column).to_numpy().astype(small)
            held.append((places, fold, np.stack([labels, np.ones(len(labels))], axis=1)))
            waiting += len(labels)
            if waiting >= _WAITING:
                first, fold_of, sums, _, _ = self._summed(held, len(keys))
                held, waiting = [(np.repeat(np.arange(len(keys), dtype=np.int32), np.diff(first)), fold_of, sums)], 0
        first, fold_of, sums, of_key, of_fold = self._summed(held, len(keys))
        return LearnedTable(
            table=_with_totals(key_frame(keys, self.by, coder), of_key),
            folds={"first": first, "fold_of": fold_of, "held": sums},
            facts=_means(of_fold),
            keys=keys,
        )

    def learn_encode(self, rows: pl.DataFrame, coder: Coder) -> tuple[LearnedTable, list[pl.Series]]:
        import polars as pl

        known = numbers_of(rows, self.by, coder)
        if known is None:
            return super().learn_encode(rows, coder)
        out = np.empty(rows.height)
        return self._learn_all(rows, *known, coder, out), [pl.Series(self.name, out)]

    def _learn_all(self, rows: pl.DataFrame, keys: KeyTable, places: Any, coder: Coder, out: Any) -> LearnedTable:
        """From rows in memory whose keys are numbered; ``out`` receives their encodings, unless it is None. The sums of
        keys and folds are those of :meth:`learn`, to the bit, and made when they are asked for."""
        from stoker.prep.features.fitted.learned_kernels import rest_means, rests_of_folds

        labels = rows.get_column(LABEL).to_numpy()
        self._check_labels(labels)
        fold = rows.get_column(self.fold_column).to_numpy()
        rest = np.empty(len(labels)) if out is None else out
        left, of_fold = np.empty(len(labels), np.int32), np.zeros((self.folds, 2))
        ends, order = zeros(len(keys) + 1, np.int32), np.empty(len(labels), np.int32)
        of_key = np.empty((len(keys), 2))
        rests_of_folds(places, fold, labels, ends, order, of_key, of_fold, rest, left)
        facts = _means(of_fold)
        if out is not None:
            rest_means(rest, left, fold, np.array(facts["other_folds_mean"]), float(self.smoothing))
        count = len(keys)

        def summed() -> tuple[Any, ...]:
            small = np.uint8 if self.folds <= 2**8 else np.int32
            given = np.stack([labels, np.ones(len(labels))], axis=1)
            return self._summed([(places, fold.astype(small), given)], count)

        return LearnedTable(
            table=lambda: _with_totals(key_frame(keys, self.by, coder), of_key),
            folds=FoldSums(Later(summed)),
            facts=facts,
            keys=keys,
            numbers=of_key,
        )

    def _check_labels(self, labels: Any) -> None:
        without = int(np.count_nonzero(~np.isfinite(labels)))
        if without:
            raise DataError(
                f"{self.where}: the label is missing or no number in {without:,} of {len(labels):,} training rows "
                "that were looked at. Leave such rows out, or fill the label."
            )

    def _summed(self, held: list[Any], count: int) -> tuple[Any, Any, Any, Any, Any]:
        """Where each of ``count`` keys begins, the fold and the sums of every entry; totals of keys and of folds."""
        from stoker.prep.features.fitted.learned_kernels import sum_folds

        places, fold, given = (np.concatenate(each) for each in zip(*held, strict=True))
        first, order = zeros(count + 1, np.int64), np.empty(len(places), np.int64)
        fold_of, sums = np.empty(len(places), fold.dtype), np.empty((len(places), 2))
        of_key, of_fold = zeros((count, 2)), np.zeros((self.folds, 2))
        entries = sum_folds(places, fold, given, count, first, order, fold_of, sums, of_key, of_fold)
        return first, fold_of[:entries].copy(), sums[:entries].copy(), of_key, of_fold

    def encode(self, rows: pl.DataFrame, learned: LearnedTable) -> list[pl.Series]:
        import polars as pl

        from stoker.prep.features.fitted.learned_kernels import smoothed_means

        if learned.numbers is None:
            learned.numbers = learned.table.select(_SUM, pl.col(_COUNT).cast(pl.Float64)).to_numpy(order="c")
        mean, others = learned.facts["mean"], np.array(learned.facts["other_folds_mean"])
        trained = TRAIN in rows.columns
        assert not trained or learned.folds is not None
        none = {"first": np.zeros(1, np.int64), "fold_of": np.zeros(0, np.uint8), "held": np.zeros((0, 2))}
        own = learned.folds if trained else none
        out = np.empty(rows.height)
        for start in range(0, rows.height, _ROWS):
            part = rows.slice(start, _ROWS)
            places = learned.places(part, self.by)
            chosen, fold = np.zeros(len(places), np.bool_), np.zeros(len(places), np.int32)
            if trained:
                chosen, fold = part.get_column(TRAIN).to_numpy(), part.get_column(self.fold_column).to_numpy()
            smoothed_means(
                places,
                fold,
                chosen,
                learned.numbers,
                own["first"],
                own["fold_of"],
                own["held"],
                mean,
                others,
                float(self.smoothing),
                out[start : start + _ROWS],
            )
        return [pl.Series(self.name, out)]


def _means(of_fold: Any) -> dict[str, Any]:
    """The mean of all labels and, for each fold, that of the others."""
    (total, count), sides = of_fold.sum(axis=0).tolist(), of_fold.tolist()
    mean = total / count if count else 0.0
    return {"mean": mean, "other_folds_mean": [(total - s) / (count - n) if count > n else mean for s, n in sides]}


def _with_totals(table: pl.DataFrame, of_key: Any) -> pl.DataFrame:
    import polars as pl

    return table.with_columns(
        pl.Series(_SUM, of_key[:, 0]), pl.Series(_COUNT, of_key[:, 1], dtype=pl.Float64).cast(pl.Int64)
    )


def numbers_of(rows: Any, names: tuple[str, ...], coder: Coder) -> tuple[KeyTable, Any] | None:
    """The keys of rows in memory that were numbered, all of them these rows', and each row's number."""
    keys = coder.table(names)
    if keys is None or keys.column not in rows.collect_schema().names():
        return None
    return keys, rows.get_column(keys.column).to_numpy()


def key_frame(keys: Any, names: Sequence[str], coder: Coder) -> pl.DataFrame:
    """The values of all keys, in the order of their numbers."""
    import polars as pl

    return pl.DataFrame([coder.values(name, codes) for name, codes in zip(names, keys.codes(), strict=True)])


def _grown(array: Any, size: int) -> Any:
    if size <= len(array):
        return array
    larger = zeros((max(size, len(array) * 3 // 2), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
