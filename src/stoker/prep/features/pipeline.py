"""Features of frames: fit a list of them on training rows, apply the fitted ones to any rows."""

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
from stoker.prep.features.learned import LABEL, Learned, LearnedTable
from stoker.prep.features.past import Past
from stoker.prep.features.tables import joined

__all__ = ["Fitted", "fit", "fit_apply"]

_SLICE = 2**15  # rows of a frame whose own features are worked out at a time
_THREADS = 2
_Rows = TypeVar("_Rows", "pl.DataFrame", "pl.LazyFrame")


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
        own = leading(self.features)
        if isinstance(rows, pl.DataFrame):
            made = _of_the_row(rows, self.features[:own])
            made = made if train is None else made.with_columns(_row_numbers())
            return _without_helpers(derive(made, self.features[own:], self.learned, train).lazy())
        for place, feature in enumerate(self.features):
            if train is not None:
                rows = add_helpers(rows.with_columns(_row_numbers()) if place == own else rows, [feature])
            with explained(feature):
                rows = apply_feature(rows, feature, self.learned.get(feature.name), train)
        return _without_helpers(rows)

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
    for place, feature in enumerate(features):
        if place == leading(features):
            frame = frame.with_columns(_row_numbers(), _labels(label))
            waiting.append((f"label column {label!r}", frame.select(LABEL)))
        frame = add_helpers(frame, [feature])
        with explained(feature), _of_whom(waiting):
            if isinstance(feature, Learned):
                learned[feature.name] = feature.learn(frame, engine=engine)
            if feature.name not in wanted and not isinstance(feature, RowSteps):
                continue
            frame = apply_feature(frame, feature, learned.get(feature.name), pl.lit(True))
            if isinstance(feature, Past):  # not again for every learned one
                frame, waiting = collect(frame, engine).lazy(), []
        waiting.append((feature, frame.select(feature.outputs or frame.collect_schema().names()[:1])))
    return Fitted(features=tuple(features), learned=learned)


@contextmanager
def _of_whom(waiting: Sequence[tuple[Derivation | str, pl.LazyFrame]]) -> Iterator[None]:
    """Blame the first of some lazy features, or a label, for an error of the block, which works them out, too."""
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
    frame = _of_the_row(rows, features[: leading(features)], threads)
    runs, learned = runs_of(features), dict[str, LearnedTable]()
    if runs:
        with explained(f"label column {label!r}"):
            frame = frame.with_columns(_row_numbers(), _labels(label))
    for run in runs:
        executor = Executor(rows=_Frame(frame), threads=threads, train=pl.lit(True))
        [made] = executor.run(run)
        frame = frame.hstack(made)
        learned |= executor.learned
        give_back_memory()
    return Fitted(features=tuple(features), learned=learned), _without_helpers(frame)


def _of_the_row(frame: pl.DataFrame, features: Sequence[Derivation], threads: int = _THREADS) -> pl.DataFrame:
    """Return a frame with leading features, some rows at a time."""
    if not features:
        return frame
    starts = range(0, max(frame.height, 1), _SLICE)
    blocks = list(ordered_map(lambda start: derive(frame[start : start + _SLICE], features), starts, threads))
    if any(isinstance(feature, RowSteps) for feature in features):
        return joined(blocks)
    outputs = [output for feature in features for output in feature.outputs]
    return frame.hstack(joined([block.select(outputs) for block in blocks]))


class _Frame:
    """A frame in memory as a block of rows."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame, self.sizes = frame, [frame.height]

    def part(self, block: int) -> pl.LazyFrame:
        return self._frame.lazy()

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


def _row_numbers() -> pl.Expr:
    return pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)


def _labels(label: str) -> pl.Expr:
    return pl.col(label).cast(pl.Float64).alias(LABEL)


def _without_helpers(frame: _Rows) -> _Rows:
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
