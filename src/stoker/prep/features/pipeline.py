"""Features of frames in memory: fit a list of them on training rows, apply what was learned to any rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stoker.base.engine import check_engine, collect
from stoker.base.errors import ConfigError
from stoker.base.ordered import ordered_map
from stoker.base.units import listed
from stoker.prep.features.base import ROW, Derivation, RowLocal, RowSteps, check_features, column_taken, missing_column
from stoker.prep.features.explain import explained
from stoker.prep.features.fitted.learned import LABEL, TRAIN, Learned, LearnedTable, MeanTargetEncoding
from stoker.prep.features.past import Past, work_out

if TYPE_CHECKING:
    import polars as pl

    from stoker.prep.features.fitted.keys import Coder

    Frame = pl.DataFrame | pl.LazyFrame

__all__ = ["Fitted", "apply_feature", "fit", "fit_apply", "in_runs"]


def _coder() -> Coder:
    from stoker.prep.features.fitted.keys import Coder

    return Coder()


def check_present(feature: Derivation, columns: Sequence[str], who: str = "the rows") -> None:
    """Whether the columns that a feature reads are there, and none that it makes. Raises :class:`SchemaError`."""
    for column in feature.inputs:
        if column not in columns:
            raise missing_column(feature, column, [name for name in columns if not name.startswith("__")])
    for column in feature.outputs:
        if column in columns:
            raise column_taken(feature, column, who)


def apply_feature(frame: Frame, feature: Derivation, learned: LearnedTable | None = None, train: Any = None) -> Any:
    """The frame with one feature more: at once where it is in memory, else lazily.

    ``learned`` is bound to the coder whose codes the frame has, ``train`` an expression: where a row was learned from.
    Features that look back take a lazy frame into memory when it is collected.
    """
    import polars as pl

    if isinstance(feature, RowSteps):
        return feature.rows(frame) if isinstance(frame, pl.LazyFrame) else feature.rows_now(frame)
    if isinstance(feature, RowLocal):
        return frame.with_columns(*feature.expressions())
    if isinstance(feature, Learned):
        if learned is None:
            raise ConfigError(f"{feature.where} was not fitted. Use what stoker.features.fit returns.")
        if isinstance(frame, pl.LazyFrame):
            return feature.attach(frame, learned, train)
        return frame.with_columns(_encoded(feature, frame, learned, train))
    assert isinstance(feature, Past)
    return look_back(frame, [feature])


def _encoded(feature: Learned, frame: pl.DataFrame, learned: LearnedTable, train: Any) -> list[pl.Series]:
    marked = [] if train is None else [train.alias(TRAIN)]
    numbers = [learned.keys.column] if learned.keys is not None and learned.keys.column in frame.columns else []
    return feature.encode(frame.select(*feature.reads(train=train is not None), *numbers, *marked), learned)


def look_back(frame: Frame, features: list[Past]) -> Any:
    """The frame with features of the rows before, none of which reads another's output; those of one order share it."""
    import polars as pl

    if isinstance(frame, pl.DataFrame):
        return frame.with_columns(work_out(frame, features).get_columns())
    before = frame.collect_schema()
    probe = work_out(before.to_frame(), features).schema  # no rows: the types of the outputs
    return frame.map_batches(
        lambda rows: rows.with_columns(work_out(rows, features).get_columns()), schema={**before, **probe}
    )


def prepared_for(frame: Frame, features: Sequence[Derivation], coder: Coder, *, add: bool, folds: bool) -> Any:
    """The frame with the codes of all key columns that learned ``features`` look up, and their folds, where they are
    not there yet; ``add``: new values get codes."""
    import polars as pl

    from stoker.prep.features.fitted.keys import code_column

    there = set(frame.collect_schema().names())
    some = [feature for feature in features if isinstance(feature, Learned)]
    names = [name for name in dict.fromkeys(key for one in some for key in one.keys) if code_column(name) not in there]
    ask = coder.add if add else coder.find

    def codes(series: pl.Series, name: str) -> pl.Series:
        return pl.Series(code_column(name), ask(name, series))

    made: Any = frame
    if isinstance(frame, pl.DataFrame):
        columns = frame
        made = frame.with_columns(list(ordered_map(lambda name: codes(columns.get_column(name), name), names, 2)))
        made = coder.number(made, [one.keys for one in some if one.numbered], add=add, threads=2)
    else:
        if add:  # no batch may come
            schema = frame.collect_schema()
            for name in names:
                coder.add(name, pl.Series(name, [], schema[name]))
        made = frame.with_columns(
            pl.col(name)
            .map_batches(partial(codes, name=name), return_dtype=pl.Int32, is_elementwise=True)
            .alias(code_column(name))
            for name in names
        )
    dealt = {one.fold_column: one.fold() for one in some if isinstance(one, MeanTargetEncoding)} if folds else {}
    return made.with_columns(fold for name, fold in dealt.items() if name not in there)


def in_runs(features: Sequence[Derivation]) -> Iterator[list[Derivation]]:
    """The features one by one, but neighbours that look back, or were learned, together, as far as none reads another's
    output."""
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
    """Features and what the learned ones learned. Made by :func:`fit`."""

    features: tuple[Derivation, ...]
    learned: dict[str, LearnedTable]
    coder: Coder = field(default_factory=_coder, repr=False, compare=False)

    def __post_init__(self) -> None:
        for feature in self.features:
            if isinstance(feature, Learned):
                self.learned[feature.name].bind(feature.keys, self.coder)

    def apply(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """New rows with all features, as the training rows taught them; in order.

        Of a lazy frame lazily, so that what cannot be worked out is Polars' error when it is collected; of rows in
        memory at once.

        Raises:
            SchemaError: an unknown column, or one that is made and there already. DataError: a feature that cannot be
                worked out, such as of text where it wants numbers.
        """
        return self._all(rows, training=False)

    def apply_to_training(self, rows: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
        """The rows that were fitted on, in the same order, with all features, target encodings out of fold.
        For rows in memory :func:`fit_apply` does this and the fitting faster.

        Raises:
            ConfigError: the features were loaded from files, which do not keep the folds.
        """
        for feature in self.features:
            if isinstance(feature, Learned) and feature.out_of_fold and self.learned[feature.name].folds is None:
                raise ConfigError(
                    f"{feature.where}: files keep what all training rows taught, not the folds, so training rows would "
                    "be encoded with their own labels. Fit again on them."
                )
        return self._all(rows, training=True)

    def _all(self, frame: Frame, *, training: bool) -> pl.LazyFrame:
        import polars as pl

        made: Any = frame
        numbered = False
        for run in in_runs(self.features):
            for feature in run:
                check_present(feature, made.collect_schema().names())
            if training and not numbered and not isinstance(run[0], RowSteps):
                made, numbered = made.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW)), True
            made = prepared_for(made, run, self.coder, add=False, folds=training)
            if isinstance(run[0], Past):
                made = look_back(made, [feature for feature in run if isinstance(feature, Past)])
            elif isinstance(run[0], Learned) and isinstance(made, pl.DataFrame):
                work = partial(_own, rows=made, learned=self.learned, training=training)
                made = made.with_columns([series for part in ordered_map(work, run, 2) for series in part])
            else:
                for feature in run:
                    learned = self.learned.get(feature.name)
                    folded = training and learned is not None and learned.folds is not None
                    with explained(feature):
                        made = apply_feature(made, feature, learned, pl.lit(True) if folded else None)
        return cast("pl.LazyFrame", _without_helpers(made).lazy())

    def save(self, directory: str | Path) -> None:
        """Write what was learned, and the features themselves, to a directory, with checksums."""
        from stoker.prep.features.fitted.store import save_features

        save_features(Path(directory), self.features, self.learned)

    @classmethod
    def load(cls, directory: str | Path) -> Fitted:
        """Features that :meth:`save` wrote. Raises :class:`DataError` where a file is missing or damaged."""
        from stoker.prep.features.fitted.store import load_features

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
        rows: training rows only. A lazy frame is read again for every feature that is fitted, some rows at a time.
        label: column to predict, numbers.
        engine: Polars' ``"streaming"``, or ``"gpu"`` for what is read of a lazy frame; counting is done on the CPU.
        threads: learned features that are fitted at a time.

    Returns:
        The fitted features; :meth:`Fitted.apply_to_training` gives these rows' features, :meth:`Fitted.apply` others'.

    Raises:
        SchemaError: an unknown column, one that is made and there already, or features in an impossible order.
        DataError: a feature or the label that cannot be worked out, such as of text where it wants numbers.
        DependencyError: no GPU engine here.
    """
    check_engine(engine)
    check_features(features)
    return _fit(features, rows, _read_by_learned(features), label, engine, threads)[0]


def fit_apply(
    features: Sequence[Derivation], rows: pl.DataFrame, *, label: str, threads: int = 2
) -> tuple[Fitted, pl.DataFrame]:
    """Fit features on training rows in memory and work them out for these rows, target encodings out of fold.

    The same as :func:`fit` and then :meth:`Fitted.apply_to_training`, with every key looked up once less.

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
    fitted, made = _fit(features, rows, {feature.name for feature in features}, label, "streaming", threads)
    return fitted, _without_helpers(made)


def _fit(
    features: Sequence[Derivation],
    rows: pl.DataFrame | pl.LazyFrame,
    wanted: set[str],
    label: str,
    engine: str,
    threads: int,
) -> tuple[Fitted, Any]:
    """Fitted features, and the rows with those that are ``wanted``."""
    import polars as pl

    frame: Any = rows
    waiting: list[tuple[Derivation | str, pl.LazyFrame]] = []
    learned, coder, numbered, done = dict[str, LearnedTable](), _coder(), False, set[str]()
    names = list(frame.collect_schema().names())
    for number, feature in enumerate(features):
        check_present(feature, names)
        if not isinstance(feature, RowSteps) and not numbered:
            if label not in names:
                raise ConfigError(f"the rows have no label column {label!r}. There are: {listed(names)}.")
            numbered = True
            labelled = any(isinstance(one, Learned) and one.labelled for one in features)
            # Numbers are labels, so nothing has to be looked at where none is learned from.
            if labelled or not isinstance(frame, pl.DataFrame) or not frame.schema[label].is_numeric():
                with explained(f"label column {label!r}"):
                    frame = frame.with_columns(
                        pl.int_range(pl.len(), dtype=pl.Int64).alias(ROW), pl.col(label).cast(pl.Float64).alias(LABEL)
                    )
            if isinstance(frame, pl.LazyFrame):
                waiting.append((f"label column {label!r}", frame.select(LABEL)))
        if isinstance(feature, Learned) and feature.name not in learned:
            some = cast("list[Learned]", next(in_runs(features[number:])))
            frame = prepared_for(frame, some, coder, add=True, folds=True)
            if isinstance(frame, pl.DataFrame) and all(one.name in wanted for one in some):
                made = list(ordered_map(partial(_learn_encode, rows=frame, coder=coder), some, threads))
                learned |= {one.name: table for one, (table, _) in zip(some, made, strict=True)}
                frame = frame.with_columns([series for _, part in made for series in part])
                done |= {one.name for one in some}  # none reads another's output
            else:
                work = partial(_learn, rows=frame, coder=coder, engine=engine, waiting=waiting)
                learned |= zip((one.name for one in some), ordered_map(work, some, threads), strict=True)
        table = learned.get(feature.name)
        names += feature.outputs
        if feature.name not in done and (feature.name in wanted or isinstance(feature, RowSteps)):
            train = pl.lit(True) if table is not None and table.folds is not None else None
            with explained(feature, waiting):
                frame = apply_feature(frame, feature, table, train)
                if isinstance(feature, Past) and isinstance(frame, pl.LazyFrame):  # not anew for every learned one
                    frame = collect(frame, engine).lazy()
                    waiting = []
            if isinstance(frame, pl.LazyFrame):
                waiting.append((feature, frame.select(feature.outputs or pl.len())))
    return Fitted(features=tuple(features), learned=learned, coder=coder), frame


def _learn(
    feature: Learned, *, rows: Frame, coder: Coder, engine: str, waiting: list[tuple[Derivation | str, pl.LazyFrame]]
) -> LearnedTable:
    with explained(feature, waiting):
        return feature.learn(rows, coder, engine=engine)


def _learn_encode(feature: Learned, *, rows: pl.DataFrame, coder: Coder) -> tuple[LearnedTable, list[pl.Series]]:
    with explained(feature):
        return feature.learn_encode(rows, coder)


def _own(feature: Learned, *, rows: pl.DataFrame, learned: dict[str, LearnedTable], training: bool) -> list[pl.Series]:
    """A feature of rows in memory; ``training``: of those that taught it."""
    import polars as pl

    table = learned[feature.name]
    with explained(feature):
        return _encoded(feature, rows, table, pl.lit(True) if training and table.folds is not None else None)


def _without_helpers(frame: Any) -> Any:
    names = frame.collect_schema().names()
    helpers = ("__key:", "__keys:", "__fold:")
    return frame.drop([name for name in names if name in (ROW, LABEL) or name.startswith(helpers)])


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
