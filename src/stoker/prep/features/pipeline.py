"""Features of frames: fit a list of them on training rows, apply the fitted ones to any rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stoker.base.engine import check_engine, collect
from stoker.base.errors import ConfigError, DataError
from stoker.base.ordered import ordered_map
from stoker.base.units import listed
from stoker.prep.features.base import ROW, Derivation, RowLocal, RowSteps, check_features, column_taken, missing_column
from stoker.prep.features.explain import explained
from stoker.prep.features.learned import LABEL, Keyed, Learned, LearnedTable
from stoker.prep.features.past import Past, work_out

if TYPE_CHECKING:
    import polars as pl

    Frame = pl.DataFrame | pl.LazyFrame

__all__ = ["Fitted", "add_helpers", "apply_feature", "check_present", "fit", "fit_apply"]

_HELPERS = ("__fold:", "__code:")  # how the names of helper columns begin


def check_present(feature: Derivation, columns: Sequence[str], who: str = "the rows") -> None:
    """Whether the columns that a feature reads are there, and none that it makes. Raises :class:`SchemaError`."""
    for column in feature.inputs:
        if column not in columns:
            raise missing_column(feature, column, [name for name in columns if not name.startswith("__")])
    for column in feature.outputs:
        if column in columns:
            raise column_taken(feature, column, who)


def apply_feature(
    frame: pl.LazyFrame, feature: Derivation, learned: LearnedTable | None = None, train: Any = None
) -> pl.LazyFrame:
    """Return the frame with the outputs of one feature more.

    ``learned`` is what it was fitted to; ``train``, an expression, says which rows are training rows, if any. Window
    features take the frame into memory when it is collected.
    """
    if isinstance(feature, RowSteps):
        return feature.rows(frame)
    if isinstance(feature, RowLocal):
        return frame.with_columns(*feature.expressions())
    if isinstance(feature, Learned):
        if learned is None:
            raise ConfigError(f"{feature.where} was not fitted. Use what stoker.features.fit returns.")
        return feature.attach(frame, learned, train)
    assert isinstance(feature, Past)
    return _look_back(frame, [feature])


def _look_back(frame: pl.LazyFrame, features: list[Past]) -> pl.LazyFrame:
    before = frame.collect_schema()
    probe = work_out(before.to_frame(), features).schema  # no rows: the types of the outputs
    return frame.map_batches(
        lambda rows: rows.with_columns(work_out(rows, features).get_columns()), schema={**before, **probe}
    )


def add_helpers(frame: Any, features: Sequence[Derivation]) -> Any:
    """Return the frame with the helper columns of learned features that are not there yet."""
    there = set(frame.collect_schema().names())
    helpers = {one.meta.output_name(): one for some in features if isinstance(some, Learned) for one in some.helpers()}
    return _more(frame, [one for name, one in helpers.items() if name not in there])


def _in_runs(features: Sequence[Derivation]) -> Iterator[list[Derivation]]:
    """Yield the features one by one; neighbours that are window features, or learned, together, as far as none reads
    another's output."""
    run: list[Derivation] = []
    for feature in features:
        made = {output for other in run for output in other.outputs}
        alike = any(run and isinstance(feature, kind) and isinstance(run[0], kind) for kind in (Past, Learned))
        if run and not (alike and not made & set(feature.inputs)):
            yield run
            run = []
        run.append(feature)
    if run:
        yield run


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

    def apply(self, rows: Frame) -> pl.LazyFrame:
        """Return new rows with all features, as they were fitted on the training rows; in order.

        Of a lazy frame lazily, so that what cannot be worked out is Polars' error when it is collected; of rows in
        memory at once.

        Raises:
            SchemaError: an unknown column, or one that is made and there already. DataError: a feature that cannot be
                worked out, such as of text where it wants numbers.
        """
        return self._all(rows, training=False)

    def apply_to_training(self, rows: Frame) -> pl.LazyFrame:
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
        return self._all(rows, training=True)

    def _all(self, rows: Frame, *, training: bool) -> pl.LazyFrame:
        import polars as pl

        made: Any = rows
        numbered = False
        for run in _in_runs(self.features):
            for feature in run:
                check_present(feature, made.collect_schema().names())
            if training and not numbered and isinstance(run[0], Learned | Past):
                made, numbered = _more(made, [pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)]), True
            if training:
                made = add_helpers(made, run)
            if isinstance(made, pl.DataFrame):
                made = _worked_out(made, run, partial(self._outputs, made, training=training), 2)
            elif isinstance(run[0], Past):
                made = _look_back(made, [feature for feature in run if isinstance(feature, Past)])
            else:
                for feature in run:
                    with explained(feature):
                        made = apply_feature(made, feature, self.learned.get(feature.name), _all_train(training))
        return cast("pl.LazyFrame", _without_helpers(made.lazy()))

    def _outputs(self, frame: pl.DataFrame, feature: Derivation, *, training: bool) -> list[pl.Series]:
        """Return the outputs of a learned feature of rows in memory."""
        assert isinstance(feature, Learned)
        with explained(feature):
            helpers = [one.meta.output_name() for one in feature.helpers()] if training else []
            rows = frame.lazy().select(*dict.fromkeys([*feature.inputs, *helpers]))
            made = apply_feature(rows, feature, self.learned.get(feature.name), _all_train(training))
            return made.select(feature.outputs).collect().get_columns()

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


def fit(features: Sequence[Derivation], rows: Frame, *, label: str, engine: str = "streaming") -> Fitted:
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
    wanted = _read_by_learned(features)
    frame, learned = rows.lazy(), dict[str, LearnedTable]()
    waiting: list[tuple[Derivation | str, pl.LazyFrame]] = []
    names, numbered = frame.collect_schema().names(), False
    for run in _in_runs(features):
        frame = _started(frame, run, names, label, waiting, numbered=numbered)
        numbered |= isinstance(run[0], Learned | Past)
        for feature in run:
            if isinstance(feature, Learned):
                with explained(feature, waiting):
                    learned[feature.name] = feature.learn(frame, engine=engine)
        for feature in run:
            if feature.name in wanted or isinstance(feature, RowSteps):
                with explained(feature, waiting):
                    frame = apply_feature(frame, feature, learned.get(feature.name), _all_train(True))
                    if isinstance(feature, Past):  # not again for every learned one
                        frame, waiting = collect(frame, engine).lazy(), []
                waiting.append((feature, frame.select(feature.outputs or frame.collect_schema().names()[:1])))
    return Fitted(features=tuple(features), learned=learned)


def fit_apply(
    features: Sequence[Derivation], rows: pl.DataFrame, *, label: str, threads: int = 2
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
    from stoker.prep.features.groups import with_codes

    check_features(features)
    frame, learned = rows, dict[str, LearnedTable]()
    names, numbered = list(frame.columns), False
    for run in _in_runs(features):
        with explained(f"label column {label!r}" if isinstance(run[0], Learned) else run[0]):
            frame = with_codes(_started(frame, run, names, label, [], numbered=numbered), _keys(run), threads)
        numbered |= isinstance(run[0], Learned | Past)

        def work(feature: Derivation, frame: pl.DataFrame = frame) -> list[pl.Series]:
            assert isinstance(feature, Learned)
            with explained(feature):
                learned[feature.name], made = feature.learn_attach(frame)
            return made

        frame = _worked_out(frame, run, work, threads)
    return Fitted(features=tuple(features), learned=learned), _without_helpers(frame)


def _started(
    frame: Any,
    run: Sequence[Derivation],
    names: list[str],
    label: str,
    waiting: list[tuple[Derivation | str, pl.LazyFrame]],
    *,
    numbered: bool,
) -> Any:
    """Return the frame with the columns that a run of features needs while it is fitted; ``names`` get its outputs."""
    import polars as pl

    for feature in run:
        check_present(feature, names)
        names += feature.outputs
    if label not in names and not isinstance(run[0], RowSteps):
        raise ConfigError(f"the rows have no label column {label!r}. There are: {listed(names)}.")
    if not numbered and isinstance(run[0], Learned | Past):
        numbers = [pl.col(ROW).cast(pl.Int64), pl.col(label).cast(pl.Float64).alias(LABEL)]
        frame = _more(frame.with_row_index(ROW), numbers)
        waiting.append((f"label column {label!r}", frame.lazy().select(LABEL)))
    return add_helpers(frame, run)


def _worked_out(
    frame: pl.DataFrame, run: Sequence[Derivation], learned: Callable[[Derivation], list[pl.Series]], threads: int
) -> pl.DataFrame:
    """Return rows in memory with a run of features; ``learned`` makes the outputs of a learned one."""
    if isinstance(run[0], Learned):
        return _wider(frame, (series for made in ordered_map(learned, run, threads) for series in made))
    with explained(run[0]):
        if isinstance(run[0], Past):
            return _wider(frame, work_out(frame, [feature for feature in run if isinstance(feature, Past)]))
        if isinstance(run[0], RowLocal):
            return cast("pl.DataFrame", _more(frame, run[0].expressions()))
        return apply_feature(frame.lazy(), run[0]).collect().rechunk()


def _more(frame: Any, expressions: Iterable[pl.Expr]) -> Any:
    """Return the frame, lazy or in memory, with columns more."""
    import polars as pl

    if isinstance(frame, pl.LazyFrame):
        return frame.with_columns(expressions)
    return _wider(frame, frame.select(expressions))


def _wider(frame: pl.DataFrame, made: Iterable[pl.Series]) -> pl.DataFrame:
    """Return the frame with columns more, each in one piece: columns of several pieces make Polars copy all others."""
    return frame.with_columns([series.rechunk() for series in made])


def _keys(features: Sequence[Derivation]) -> list[str]:
    return [name for one in features if isinstance(one, Keyed | Past) for name in one.by]


def _all_train(training: bool) -> Any:
    import polars as pl

    return pl.lit(True) if training else None


def _without_helpers(frame: Any) -> Any:
    names = frame.collect_schema().names()
    return frame.drop([name for name in names if name in (ROW, LABEL) or name.startswith(_HELPERS)])


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
