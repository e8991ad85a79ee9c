"""Features of frames: fit a list of them on training rows, apply the fitted ones to any rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from stoker.base.engine import check_engine, collect
from stoker.base.errors import ConfigError, DataError
from stoker.base.units import listed
from stoker.prep.features.base import ROW, Derivation, RowLocal, RowSteps, check_features, explained, leading, pl
from stoker.prep.features.execute import Executor, add_helpers, apply_feature, check_present, runs_of
from stoker.prep.features.learned import LABEL, Learned, LearnedTable
from stoker.prep.features.past import Past
from stoker.prep.features.tables import joined

__all__ = ["Fitted", "fit", "fit_apply"]

_SLICE = 2**15  # rows of a frame whose own features are worked out at a time
_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Features and what the learned ones were fitted to. Made by :func:`fit`."""

    features: tuple[Derivation, ...]
    learned: dict[str, LearnedTable]

    def __post_init__(self) -> None:
        for feature in self.features:
            if isinstance(feature, Learned) and feature.keys and not self.learned[feature.name].distinct:
                table = self.learned[feature.name].table
                twice = int(table.select(feature.keys).is_duplicated().sum())
                if twice:
                    raise DataError(
                        f"{feature.where}: {twice:,} of {table.height:,} rows of its table have a key that another row "
                        "has, too. Fit the features again."
                    )

    def apply(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """Return new rows with all features, as they were fitted on the training rows; in order.

        Of a lazy frame lazily, so that what cannot be worked out is Polars' error when it is collected; of rows in
        memory at once.

        Raises:
            SchemaError: an unknown column, or one that is made and there already. DataError: a feature that cannot be
                worked out, such as of text where it wants numbers.
        """
        return self._all(rows, None)

    def apply_to_training(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """Return the rows that were fitted on, in the same order, with all features, target encodings out of fold.

        For rows in memory :func:`fit_apply` does this and the fitting faster.

        Raises:
            ConfigError: the features do not have the folds, as those from files or :func:`fit_apply`.
        """
        for feature in self.features:
            if isinstance(feature, Learned) and feature.out_of_fold and self.learned[feature.name].folds is None:
                raise ConfigError(
                    f"{feature.where}: its table has the sums of all training rows, not those of the folds, so "
                    "training rows would be encoded with their own labels. Fit again on them."
                )
        return self._all(rows, pl.lit(True))

    def _all(self, rows: pl.DataFrame | pl.LazyFrame, train: pl.Expr | None) -> pl.LazyFrame:
        _check_names(self.features, rows.collect_schema().names())
        if isinstance(rows, pl.DataFrame):
            executor = _InMemory(rows, given=self.learned, train=train)
            for run in executor.runs(self.features):
                if train is not None:
                    executor.number()
                executor.add(run)
            return executor.finished().lazy()
        numbered = False
        for feature in self.features:
            if train is not None:
                if not numbered and not isinstance(feature, RowLocal | RowSteps):
                    rows, numbered = rows.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)), True
                rows = add_helpers(rows, [feature])
            with explained(feature):
                rows = apply_feature(rows, feature, self.learned.get(feature.name), train)
        return cast("pl.LazyFrame", _without_helpers(rows))

    def save(self, directory: str | Path) -> None:
        """Write the tables, and the features themselves, to a directory, with checksums."""
        from stoker.prep.features.store import save_features

        save_features(Path(directory), self.features, self.learned)

    @classmethod
    def load(cls, directory: str | Path) -> Fitted:
        """Return features that :meth:`save` wrote. Raises :class:`DataError` where a file is missing or damaged."""
        from stoker.prep.features.store import load_features

        features, learned = load_features(Path(directory))
        return cls(features=features, learned=learned)


def fit(
    features: Sequence[Derivation], rows: pl.DataFrame | pl.LazyFrame, *, label: str, engine: str = "streaming"
) -> Fitted:
    """Fit features on training rows, in order.

    Args:
        features: each may read the columns of ``rows`` and the outputs of those before it.
        rows: training rows only. A lazy frame is read again for every feature that is fitted; memory has its distinct
            keys.
        label: column to predict, numbers.
        engine: Polars' ``"streaming"``, or ``"gpu"``.

    Returns:
        The fitted features; :meth:`Fitted.apply_to_training` gives these rows' features, :meth:`Fitted.apply` others'.

    Raises:
        SchemaError: an unknown column, one that is made and there already, or features in an impossible order.
        DataError: a feature or the label that cannot be worked out, such as of text where it wants numbers.
        DependencyError: no GPU engine here.
    """
    check_engine(engine)
    check_features(features)
    _check_names(features, rows.collect_schema().names(), label)
    wanted = _read_by_learned(features)
    frame, learned = rows.lazy(), dict[str, LearnedTable]()
    waiting: list[tuple[Derivation | str, pl.LazyFrame]] = []
    numbered = False
    for feature in features:
        if not numbered and not isinstance(feature, RowLocal | RowSteps):
            frame, numbered = frame.with_row_index(ROW).with_columns(_numbers(label)), True
            waiting.append((f"label column {label!r}", frame.select(LABEL)))
        frame = add_helpers(frame, [feature])
        with explained(feature, waiting):
            if isinstance(feature, Learned):
                learned[feature.name] = feature.learn(frame, engine=engine)
            if feature.name not in wanted and not isinstance(feature, RowSteps):
                continue
            frame = apply_feature(frame, feature, learned.get(feature.name), pl.lit(True))
            if isinstance(feature, Past):  # not again for every learned one
                frame, waiting = collect(frame, engine).lazy(), []
        waiting.append((feature, frame.select(feature.outputs or frame.collect_schema().names()[:1])))
    return Fitted(features=tuple(features), learned=learned)


def fit_apply(
    features: Sequence[Derivation], rows: pl.DataFrame, *, label: str, threads: int = _THREADS
) -> tuple[Fitted, pl.DataFrame]:
    """Fit features on training rows in memory and work them out for these rows, target encodings out of fold.

    The same as :func:`fit` and then :meth:`Fitted.apply_to_training`, with every key sorted once.

    Args:
        features: each may read the columns of ``rows`` and the outputs of those before it.
        rows: training rows only.
        label: column to predict, numbers.
        threads: learned features that are worked on at a time.

    Returns:
        The fitted features, and the rows with all outputs.

    Raises:
        SchemaError: an unknown column, one that is made and there already, or features in an impossible order.
        DataError: a feature or the label that cannot be worked out, such as of text where it wants numbers.
    """
    check_features(features)
    _check_names(features, rows.columns, label)
    executor = _InMemory(rows, train=pl.lit(True), threads=threads)
    for run in executor.runs(features):
        with explained(f"label column {label!r}"):
            executor.number(label)
        executor.add(run)
    return Fitted(features=tuple(features), learned=executor.learned), executor.finished()


class _InMemory(Executor):
    """Works out features of a frame in memory, which gets their outputs."""

    def __init__(self, frame: pl.DataFrame, *, threads: int = _THREADS, **settings: Any) -> None:
        super().__init__(rows=_FrameBlocks(frame, frame.height), threads=threads, **settings)
        self.frame = frame

    def runs(self, features: Sequence[Derivation]) -> list[list[Derivation]]:
        """Work out the features of the row itself; return the others, in runs that :meth:`add` takes."""
        first = list(features[: leading(features)])
        if first:
            self.rows = _FrameBlocks(self.frame, _SLICE)
            changed = any(isinstance(feature, RowSteps) for feature in first)
            made = joined(list(self.run(first)))
            self.frame = made if changed else self.frame.hstack(made)
        return runs_of(features)

    def number(self, label: str | None = None) -> None:
        """Number the rows and take their labels, once."""
        if ROW not in self.frame.columns:
            numbered = self.frame.with_row_index(ROW)
            self.frame = numbered.with_columns(pl.col(ROW).cast(pl.Int64) if label is None else _numbers(label))

    def add(self, run: Sequence[Derivation]) -> None:
        """Work out a run of features."""
        self.rows = _FrameBlocks(self.frame, self.frame.height)
        self.frame = self.frame.hstack(joined(list(self.run(run))))

    def finished(self) -> pl.DataFrame:
        """Return the rows with all outputs."""
        return cast("pl.DataFrame", _without_helpers(self.frame))


class _FrameBlocks:
    """A frame in memory, as slices of ``most`` rows."""

    def __init__(self, frame: pl.DataFrame, most: int) -> None:
        self._frame = frame
        edges = [*range(0, max(frame.height, 1), max(most, 1)), frame.height]
        self._edges = list(pairwise(edges))
        self.sizes = [stop - start for start, stop in self._edges]

    def part(self, block: int) -> pl.LazyFrame:
        start, stop = self._edges[block]
        return self._frame[start:stop].lazy()

    def whole(self) -> pl.LazyFrame:
        return self._frame.lazy()


def _check_names(features: Sequence[Derivation], columns: Sequence[str], label: str | None = None) -> None:
    """Refuse features that read what is not there, or make what is; and a label that is not there in time."""
    names = list(columns)
    for feature in features:
        check_present(feature, names)
        names += feature.outputs
        if label is not None and label not in names and not isinstance(feature, RowSteps):
            raise ConfigError(f"the rows have no label column {label!r}. There are: {listed(names)}.")


def _numbers(label: str) -> list[pl.Expr]:
    return [pl.col(ROW).cast(pl.Int64), pl.col(label).cast(pl.Float64).alias(LABEL)]


def _without_helpers(frame: Any) -> Any:
    names = frame.collect_schema().names()
    return frame.drop([name for name in names if name in (ROW, LABEL) or name.startswith("__fold:")])


def _read_by_learned(features: Sequence[Derivation]) -> set[str]:
    """Return the names of the features that learned ones read, by way of others too."""
    columns: set[str] = set()
    found: set[str] = set()
    for feature in reversed(features):
        if isinstance(feature, Learned) or columns & set(feature.outputs):
            if columns & set(feature.outputs):
                found.add(feature.name)
            columns |= set(feature.inputs)
    return found
