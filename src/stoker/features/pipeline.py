"""Features of frames in memory: fit a list of them on training rows, apply what was learned to any rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.ordered import ordered_map
from stoker.errors import ConfigError
from stoker.features.base import ROW, Derivation, RowLocal, RowSteps, check_features, missing_column
from stoker.features.engine import check_engine, collect
from stoker.features.learned import LABEL, Learned, LearnedTable
from stoker.features.past import Past, work_out

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Fitted", "apply_feature", "fit"]


def check_present(feature: Derivation, columns: Sequence[str]) -> None:
    """Whether the columns that a feature reads are there. Raises :class:`SchemaError`."""
    for column in feature.inputs:
        if column not in columns:
            raise missing_column(feature, column, [name for name in columns if not name.startswith("__")])


def apply_feature(
    frame: pl.LazyFrame, feature: Derivation, learned: LearnedTable | None = None, train: pl.Expr | None = None
) -> pl.LazyFrame:
    """The frame with one feature more. Past ones take the whole frame into memory when it is collected."""
    if isinstance(feature, RowSteps):
        return feature.rows(frame)
    if isinstance(feature, RowLocal):
        return frame.with_columns(*feature.expressions())
    if isinstance(feature, Learned):
        if learned is None:
            raise ConfigError(f"{feature.where} was not fitted. Use what stoker.features.fit returns.")
        return feature.attach(frame, learned, train)
    assert isinstance(feature, Past)
    return look_back(frame, [feature])


def look_back(frame: pl.LazyFrame, features: list[Past]) -> pl.LazyFrame:
    """The frame with features of the rows before, none of which reads another's output; those of one order share it."""
    before = frame.collect_schema()
    probe = work_out(before.to_frame(), features).schema  # no rows: the types of the outputs
    return frame.map_batches(
        lambda rows: rows.with_columns(work_out(rows, features).get_columns()), schema={**before, **probe}
    )


def in_runs(features: Sequence[Derivation]) -> Iterator[list[Derivation]]:
    """The features one by one, but neighbours that look back together, as far as none reads another's output."""
    run: list[Derivation] = []
    for feature in features:
        made = {output for other in run for output in other.outputs}
        if run and not (isinstance(feature, Past) and isinstance(run[0], Past) and not made & set(feature.inputs)):
            yield run
            run = []
        run.append(feature)
    if run:
        yield run


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Features and what the learned ones learned. Made by :func:`fit`."""

    features: tuple[Derivation, ...]
    learned: dict[str, LearnedTable]

    def apply(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """New rows with all features, as the training rows taught them; in order, lazily."""
        frame = rows.lazy()
        for run in in_runs(self.features):
            for feature in run:
                check_present(feature, frame.collect_schema().names())
            frame = self._with(frame, run, None)
        return frame

    def _with(self, frame: pl.LazyFrame, run: list[Derivation], train: pl.Expr | None) -> pl.LazyFrame:
        if len(run) > 1:
            return look_back(frame, [feature for feature in run if isinstance(feature, Past)])
        learned = self.learned.get(run[0].name)
        if learned is None or learned.folds is None:
            train = None
        return apply_feature(frame, run[0], learned, train)

    def apply_to_training(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """The rows that were fitted on, in the same order, with all features, target encodings out of fold.

        Raises:
            ConfigError: the features were loaded from files, which do not keep the folds.
        """
        import polars as pl

        for feature in self.features:
            if isinstance(feature, Learned) and feature.out_of_fold and self.learned[feature.name].folds is None:
                raise ConfigError(
                    f"{feature.where}: files keep what all training rows taught, not the folds, so training rows would "
                    "be encoded with their own labels. Fit again on them."
                )
        frame, numbered = rows.lazy(), False
        for run in in_runs(self.features):
            if not isinstance(run[0], RowSteps) and not numbered:
                frame, numbered = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)), True
            frame = self._with(frame, run, pl.lit(True))
        return frame.drop(ROW, strict=False)

    def save(self, directory: str | Path) -> None:
        """Write what was learned, and the features themselves, to a directory, with checksums."""
        from stoker.features.store import save_features

        save_features(Path(directory), self.features, self.learned)

    @classmethod
    def load(cls, directory: str | Path) -> Fitted:
        """Features that :meth:`save` wrote. Raises :class:`DataError` where a file is missing or damaged."""
        from stoker.features.store import load_features

        features, learned = load_features(Path(directory))
        return cls(features=features, learned=learned)


def fit(
    features: Sequence[Derivation],
    rows: pl.DataFrame | pl.LazyFrame,
    *,
    label: str,
    engine: str = "streaming",
    threads: int = 2,
) -> Fitted:
    """Fit features on training rows, in order.

    Args:
        features: each may read the columns of ``rows`` and the outputs of those before it.
        rows: training rows only.
        label: column to predict, numbers.
        engine: Polars' ``"streaming"``, or ``"gpu"`` for what is read of the rows; counting is done on the CPU.
        threads: learned features that are fitted at a time.

    Returns:
        The fitted features; :meth:`Fitted.apply_to_training` gives these rows' features, :meth:`Fitted.apply` others'.

    Raises:
        SchemaError: an unknown column, or features in an impossible order. DependencyError: no GPU engine here.
    """
    import polars as pl

    check_engine(engine)
    check_features(features)
    frame, learned, numbered = rows.lazy(), dict[str, LearnedTable](), False
    wanted = _read_by_learned(features)
    names = list(frame.collect_schema().names())
    for number, feature in enumerate(features):
        check_present(feature, names)
        if not isinstance(feature, RowSteps) and not numbered:
            if label not in names:
                raise ConfigError(f"the rows have no label column {label!r}. There are: {', '.join(names)}.")
            frame, numbered = frame.with_columns(
                pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW), pl.col(label).cast(pl.Float64).alias(LABEL)
            ), True  # fmt: skip
        if isinstance(feature, Learned) and feature.name not in learned:
            some = _learned_together(features[number:])
            work = partial(_learn, rows=frame, engine=engine)
            learned |= zip((one.name for one in some), ordered_map(work, some, threads), strict=True)
        table = learned.get(feature.name)
        names += feature.outputs
        if feature.name in wanted or isinstance(feature, RowSteps):
            train = pl.lit(True) if table is not None and table.folds is not None else None
            frame = apply_feature(frame, feature, table, train)
            if isinstance(feature, Past):  # not anew for every learned one that follows
                frame = collect(frame, engine).lazy()
    return Fitted(features=tuple(features), learned=learned)


def _learn(feature: Learned, *, rows: pl.LazyFrame, engine: str) -> LearnedTable:
    return feature.learn(rows, engine=engine)


def _learned_together(features: Sequence[Derivation]) -> list[Learned]:
    """The learned features from the first one on that can be fitted before any of them is worked out."""
    found: list[Learned] = []
    made: set[str] = set()
    for feature in features:
        if not isinstance(feature, Learned) or made & set(feature.inputs):
            break
        found.append(feature)
        made |= set(feature.outputs)
    return found


def _read_by_learned(features: Sequence[Derivation]) -> set[str]:
    """Names of the features that learned ones read, by way of others too."""
    columns: set[str] = set()
    found: set[str] = set()
    for feature in reversed(features):
        if isinstance(feature, Learned) or columns & set(feature.outputs):
            if columns & set(feature.outputs):
                found.add(feature.name)
            columns |= set(feature.inputs)
    return found
