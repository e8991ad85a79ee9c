"""Features of data frames: fit them on training rows, apply them to any rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stoker.base.device import give_back_memory
from stoker.base.engine import check_engine, collect
from stoker.base.errors import ConfigError, DataError
from stoker.base.ordered import ordered_map
from stoker.base.units import listed
from stoker.prep.features.base import ROW, Derivation, RowSteps, check_features, explained, leading, pl
from stoker.prep.features.execute import Executor, add_helpers, apply_feature, check_present, derive, runs_of
from stoker.prep.features.fitted import LABEL, Fittable, FittedTable
from stoker.prep.features.past import Past
from stoker.prep.features.tables import joined

_SLICE = 2**15  # rows of a frame whose leading features are computed at a time
_THREADS = 2
_AnyFrame = TypeVar("_AnyFrame", "pl.DataFrame", "pl.LazyFrame")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Features with their fitted tables. :func:`fit` makes it."""

    features: tuple[Derivation, ...]
    fitted_tables: dict[str, FittedTable]

    def __post_init__(self) -> None:
        for feature in self.features:
            if isinstance(feature, Fittable) and feature.keys and not self.fitted_tables[feature.name].distinct:
                table = self.fitted_tables[feature.name].table
                twice = int(table.select(feature.keys).is_duplicated().sum())
                if twice:
                    raise DataError(
                        f"{feature.where}: {twice:,} of {table.height:,} rows of its table have a key that another row "
                        "has, too. Fit the features again."
                    )

    @property
    def learned(self) -> dict[str, FittedTable]:
        """The name of ``fitted_tables`` before."""
        return self.fitted_tables

    def apply(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """Return new rows, in order, with all features as they were fitted on the training rows.

        For a lazy frame nothing is computed yet; errors then come from Polars when the frame is collected.

        Raises:
            SchemaError: a column does not exist, or an output exists already.
            DataError: a feature cannot be computed, for example from text instead of numbers.
        """
        return self._all(rows, None)

    def apply_to_training(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """Return the training rows, in the same order, with all features, target encodings out of fold.

        For rows in memory :func:`fit_apply` fits and applies faster.

        Raises:
            ConfigError: the sums of the folds are missing: :meth:`load` and :func:`fit_apply` do not keep them.
        """
        for feature in self.features:
            if isinstance(feature, Fittable) and feature.out_of_fold and self.fitted_tables[feature.name].folds is None:
                raise ConfigError(
                    f"{feature.where}: its table has the sums of all training rows, not those of the folds, so "
                    "training rows would be encoded with their own labels. Fit again on them."
                )
        return self._all(rows, pl.lit(True))

    def _all(self, rows: pl.DataFrame | pl.LazyFrame, train: pl.Expr | None) -> pl.LazyFrame:
        _check_names(self.features, rows.collect_schema().names())
        own = leading(self.features)
        if isinstance(rows, pl.DataFrame):
            made = _with_leading(rows, self.features[:own])
            made = made if train is None else made.with_columns(_row_numbers())
            return _without_helpers(derive(made, self.features[own:], self.fitted_tables, train).lazy())
        for place, feature in enumerate(self.features):
            if train is not None:
                rows = add_helpers(rows.with_columns(_row_numbers()) if place == own else rows, [feature])
            with explained(feature):
                rows = apply_feature(rows, feature, self.fitted_tables.get(feature.name), train)
        return _without_helpers(rows)

    def save(self, directory: str | Path) -> None:
        """Write the features and their tables to a directory, with checksums."""
        from stoker.prep.features.store import save_features

        save_features(Path(directory), self.features, self.fitted_tables)

    @classmethod
    def load(cls, directory: str | Path) -> Fitted:
        """Load what :meth:`save` wrote. Raise :class:`DataError` if a file is missing or damaged."""
        from stoker.prep.features.store import load_features

        features, fitted_tables = load_features(Path(directory))
        return cls(features=features, fitted_tables=fitted_tables)


def fit(
    features: Sequence[Derivation], rows: pl.DataFrame | pl.LazyFrame, *, label: str, engine: str = "streaming"
) -> Fitted:
    """Fit features on training rows, in order.

    Args:
        features: each may read the columns of ``rows`` and the outputs of earlier features.
        rows: training rows only. A lazy frame is read once for every fitted feature; memory holds the distinct keys.
        label: column to predict, numbers.
        engine: engine of Polars, ``"streaming"`` or ``"gpu"``.

    Returns:
        The fitted features. Use :meth:`Fitted.apply_to_training` for these rows and :meth:`Fitted.apply` for others.

    Raises:
        SchemaError: a column does not exist, an output exists already, or the order of the features is impossible.
        DataError: a feature or the label cannot be computed, for example from text instead of numbers.
        DependencyError: Polars has no GPU engine here.
    """
    check_engine(engine)
    check_features(features)
    _check_names(features, rows.collect_schema().names(), label)
    wanted = _read_by_fitted(features)
    frame, fitted_tables = rows.lazy(), dict[str, FittedTable]()
    waiting: list[tuple[Derivation | str, pl.LazyFrame]] = []
    for place, feature in enumerate(features):
        if place == leading(features):
            frame = frame.with_columns(_row_numbers(), _labels(label))
            waiting.append((f"label column {label!r}", frame.select(LABEL)))
        frame = add_helpers(frame, [feature])
        with explained(feature), _blamed_on_first(waiting):
            if isinstance(feature, Fittable):
                fitted_tables[feature.name] = feature.fit(frame, engine=engine)
            if feature.name not in wanted and not isinstance(feature, RowSteps):
                continue
            frame = apply_feature(frame, feature, fitted_tables.get(feature.name), pl.lit(True))
            if isinstance(feature, Past):  # compute it once, not once for every fitted feature
                frame, waiting = collect(frame, engine).lazy(), []
        waiting.append((feature, frame.select(feature.outputs or frame.collect_schema().names()[:1])))
    return Fitted(features=tuple(features), fitted_tables=fitted_tables)


@contextmanager
def _blamed_on_first(waiting: Sequence[tuple[Derivation | str, pl.LazyFrame]]) -> Iterator[None]:
    """If the block fails, raise the error of the first lazy feature or label that fails by itself."""
    try:
        yield
    except pl.exceptions.PolarsError:
        for who, frame in waiting:
            with explained(who):
                collect(frame)
        raise


def fit_apply(
    features: Sequence[Derivation], rows: pl.DataFrame, *, label: str, threads: int = _THREADS
) -> tuple[Fitted, pl.DataFrame]:
    """Fit features on training rows in memory and compute them for these rows, target encodings out of fold.

    This equals :func:`fit` and then :meth:`Fitted.apply_to_training`, but sorts every key once.

    Args:
        features: each may read the columns of ``rows`` and the outputs of earlier features.
        rows: training rows only.
        label: column to predict, numbers.
        threads: how many features are fitted at a time.

    Returns:
        The fitted features, and the rows with all outputs.

    Raises:
        SchemaError: a column does not exist, an output exists already, or the order of the features is impossible.
        DataError: a feature or the label cannot be computed, for example from text instead of numbers.
    """
    check_features(features)
    _check_names(features, rows.columns, label)
    frame = _with_leading(rows, features[: leading(features)], threads)
    runs, fitted_tables = runs_of(features), dict[str, FittedTable]()
    if runs:
        with explained(f"label column {label!r}"):
            frame = frame.with_columns(_row_numbers(), _labels(label))
    for run in runs:
        executor = Executor(rows=FrameBlocks(frame), threads=threads, train=pl.lit(True))
        [made] = executor.run(run)
        frame = frame.hstack(made)
        fitted_tables |= executor.fitted_tables
        give_back_memory()
    return Fitted(features=tuple(features), fitted_tables=fitted_tables), _without_helpers(frame)


def _with_leading(frame: pl.DataFrame, features: Sequence[Derivation], threads: int = _THREADS) -> pl.DataFrame:
    """Return a frame with its leading features, computed a slice of rows at a time."""
    if not features:
        return frame
    starts = range(0, max(frame.height, 1), _SLICE)
    blocks = list(ordered_map(lambda start: derive(frame[start : start + _SLICE], features), starts, threads))
    if any(isinstance(feature, RowSteps) for feature in features):
        return joined(blocks)
    outputs = [output for feature in features for output in feature.outputs]
    return frame.hstack(joined([block.select(outputs) for block in blocks]))


class FrameBlocks:
    """A frame in memory as one block of rows."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame, self.sizes = frame, [frame.height]

    def part(self, block: int) -> pl.LazyFrame:
        """Return the rows."""
        return self._frame.lazy()

    def whole(self) -> pl.LazyFrame:
        """Return the rows."""
        return self._frame.lazy()


def _check_names(features: Sequence[Derivation], columns: Sequence[str], label: str | None = None) -> None:
    """Raise an error if a feature reads a missing column or makes an existing one, or if the label comes too late."""
    names = list(columns)
    for feature in features:
        check_present(feature, names)
        names += feature.outputs
        if label is not None and label not in names and not isinstance(feature, RowSteps):
            raise ConfigError(f"the rows have no label column {label!r}. There are: {listed(names)}.")


def _row_numbers() -> pl.Expr:
    return pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)


def _labels(label: str) -> pl.Expr:
    return pl.col(label).cast(pl.Float64).alias(LABEL)


def _without_helpers(frame: _AnyFrame) -> _AnyFrame:
    names = frame.collect_schema().names()
    return frame.drop([name for name in names if name in (ROW, LABEL) or name.startswith("__fold:")])


def _read_by_fitted(features: Sequence[Derivation]) -> set[str]:
    """Return the names of the features that fitted features read, directly or through others."""
    columns: set[str] = set()
    found: set[str] = set()
    for feature in reversed(features):
        if isinstance(feature, Fittable) or columns & set(feature.outputs):
            if columns & set(feature.outputs):
                found.add(feature.name)
            columns |= set(feature.inputs)
    return found
