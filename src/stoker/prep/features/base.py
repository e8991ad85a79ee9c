"""What every derived feature has: a kind, a name, the columns that it reads and those that it makes.

There are four families. :class:`RowSteps` change the number of rows and come first. :class:`RowLocal` features need
their own row. Fitted ones (:mod:`stoker.prep.features.fitted`) need all training rows. Window features
(:mod:`stoker.prep.features.past`) need the rows of their group in order.
"""

from __future__ import annotations

import json
import re
import shlex
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from stoker.base.checks import build_part, choice, fail, hints_of, near
from stoker.base.engine import reason_of
from stoker.base.errors import DataError, SchemaError
from stoker.base.units import listed

__all__ = [
    "BUCKET", "COUNT", "KINDS", "MAYBE_MISSING", "ROW", "SCALED", "TEXT", "Derivation", "RowLocal", "RowSteps",
    "check_features", "column_taken", "explained", "feature_from_dict", "feature_from_text", "feature_of", "groups",
    "leading", "missing_column", "pa", "pl", "texts", "work_of",
]  # fmt: skip


class _Lazy:
    """Import a module at its first use, so that declaring features needs NumPy only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from stoker.prep.features import groups
else:
    pl, pa, groups = _Lazy("polars"), _Lazy("pyarrow"), _Lazy("stoker.prep.features.groups")

KINDS: dict[str, type[Derivation]] = {}  # by the name in a schema file; subclasses register themselves
ROW = "__row"  # number of the row among all rows, Int64; present while features are computed
_NAME = re.compile(r"[^\x00-\x1f/\\*]{1,100}")
_MOST_BYTES = 200  # file systems allow 255, including suffixes
#: settings of the column by which a model reads an output
SCALED: dict[str, Any] = {"transforms": ("zscore",)}
TEXT: dict[str, Any] = {"type": "string"}
BUCKET: dict[str, Any] = {"type": "int"}
COUNT: dict[str, Any] = {"transforms": ("log1p", "zscore")}
MAYBE_MISSING: dict[str, Any] = {"fill": "median", "null_flag": True, **SCALED}


@dataclass(frozen=True, kw_only=True)
class Derivation(ABC):  # noqa: B024
    """A feature to derive. Subclasses are frozen dataclasses with a ``kind`` of their own.

    Args:
        name: name of the new column; if empty, made from the kind and the columns read.
    """

    name: str = ""
    kind: ClassVar[str] = ""
    reads: ClassVar[str] = ""  # settings that name the columns read, such as "by order"
    reads_numbers: ClassVar[str] = ""  # those whose columns must be numbers
    read_as: ClassVar[dict[str, Any]] = SCALED  # categorical where there is a type, else dense

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if cls.__dict__.get("kind"):
            KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if str(item.type).startswith("tuple"):
                object.__setattr__(self, item.name, (value,) if isinstance(value, str) else tuple(value))
        if not self.name:
            object.__setattr__(self, "name", "_".join([self.kind, *self.inputs]))
        if not _NAME.fullmatch(self.name) or self.name.startswith("__") or len(self.name.encode()) > _MOST_BYTES:
            remedy = "Use letters, digits and _, at most 100 of them"
            fail(self.where, "name", f"{self.name!r} cannot name a column and a file. {remedy}")
        self.check()

    def check(self) -> None:  # noqa: B027  (a feature without settings has nothing to check)
        """Raise :class:`SchemaError` if settings contradict each other."""

    def in_groups(self, column: str | None) -> Derivation:
        """Return the feature with the defaults of a schema whose ``group`` is this column (None: no group)."""
        return self

    @property
    def where(self) -> str:
        """The feature's name in errors."""
        return f"feature {self.name or self.kind!r} ({self.kind})"

    def _named(self, settings: str) -> tuple[str, ...]:
        """Return the columns that some settings name."""
        given = [getattr(self, setting) or () for setting in settings.split()]
        return tuple(name for value in given for name in ((value,) if isinstance(value, str) else value))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that the feature reads."""
        return self._named(self.reads)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Inputs that must be numbers."""
        return tuple(dict.fromkeys(self._named(self.reads_numbers)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Columns that the feature makes."""
        return (self.name,)

    @property
    def has_table(self) -> bool:
        """Whether a dataset stores a table under the feature's name."""
        return False

    def model_columns(self) -> dict[str, dict[str, Any]]:
        """Return output -> default settings of the model's column.

        With a type the column is categorical, with a type and a length a sequence, else dense.
        """
        return dict.fromkeys(self.outputs, self.read_as)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values with ``kind``; :func:`feature_from_dict` is the inverse."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items() if v is not None}
        return {"kind": self.kind, **values}


@dataclass(frozen=True, kw_only=True)
class RowLocal(Derivation):
    """A feature of its own row alone. For your own, subclass it and write :meth:`expressions`."""

    @abstractmethod
    def expressions(self) -> Sequence[pl.Expr]:
        """Return one elementwise Polars expression per output, with its name. They see the columns before it."""


@dataclass(frozen=True, kw_only=True)
class RowSteps(Derivation):
    """A step that drops rows or makes several rows of one. It comes before all other kinds of features."""

    @abstractmethod
    def rows(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Return the rows after the step, in order. Each must depend on one row of ``frame`` only."""

    def model_columns(self) -> dict[str, dict[str, Any]]:
        return {}


def texts(where: str, key: str, names: Sequence[str], *, least: int = 1) -> None:
    """Raise :class:`SchemaError` if a list of column names is too short or has a name twice."""
    if len(names) < least:
        fail(where, key, f"names {len(names)} columns and needs at least {least}")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        fail(where, key, f"names {twice[0]!r} twice")


def feature_from_dict(values: Any, where: str) -> Derivation:
    """Build a feature from plain values.

    Raises:
        SchemaError: an unknown kind or key, or a value of the wrong type or out of range; the text begins with
            ``where``.
    """
    if not isinstance(values, Mapping) or "kind" not in values:
        raise SchemaError(f"{where}: must be a table with a kind: {', '.join(sorted(KINDS))}; found {values!r}.")
    choice(where, "kind", values["kind"], sorted(KINDS))
    rest = {key: value for key, value in values.items() if key != "kind"}
    built: Derivation = build_part(KINDS[values["kind"]], rest, where)
    return built


def feature_from_text(text: str) -> Derivation:
    """Build a feature from its kind and its settings, such as ``mean_target by=city,item folds=10``.

    Lists are separated by commas; a value with blanks is quoted as in a shell.

    Raises:
        SchemaError: no such kind or setting, or a value of the wrong type or out of range.
    """
    where = f"feature {text!r}"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SchemaError(f"{where}: {str(error).lower()}. Close the quotes.") from None
    if not words:
        raise SchemaError("a feature is empty. Give a kind and settings: mean_target by=city,item")
    choice(where, "kind", words[0], sorted(KINDS))
    hints = hints_of(KINDS[words[0]])
    values: dict[str, Any] = {"kind": words[0]}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise SchemaError(f"{where}: {word!r} is not a setting. Write key=value, without blanks around the sign.")
        if key in values:
            raise SchemaError(f"{where}: {key} is given twice.")
        values[key] = _parsed(value, hints.get(key, str))
    return feature_from_dict(values, where)


def _parsed(text: str, hint: Any) -> Any:
    """Return the value of the given type that the text stands for, or the text itself if it stands for none."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(typing.get_origin(kind) is tuple for kind in allowed):
        return text.split(",") if text else []
    if str in allowed:
        return text
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def feature_of(given: Derivation | Mapping[str, Any] | str) -> Derivation:
    """Build a feature from plain values with a ``kind`` or from one line; return a feature as it is."""
    if isinstance(given, Derivation):
        return given
    return feature_from_text(given) if isinstance(given, str) else feature_from_dict(given, "feature")


def leading(features: Sequence[Derivation]) -> int:
    """Return how many features at the beginning of the list need no row but their own."""
    local = [isinstance(feature, RowLocal | RowSteps) for feature in features]
    return [*local, False].index(False)


def check_features(features: Sequence[Derivation]) -> None:
    """Check that a list of features can be computed in its order.

    Raises:
        SchemaError: a feature that reads itself or a later one, an output made twice, or rows changed too late.
    """
    made: dict[str, int] = {}
    for number, feature in enumerate(features):
        for output in feature.outputs:
            if output in made:
                other = features[made[output]]
                fail(feature.where, "name", f"makes column {output!r}, which {other.where} made already. Rename one")
            made[output] = number
    named: dict[str, Derivation] = {}
    for feature in features:
        if feature.has_table and named.setdefault(feature.name, feature) is not feature:
            fail(feature.where, "name", f"is that of {named[feature.name].where}, and names a file. Rename one")
    local = leading(features)
    for number, feature in enumerate(features):
        for column in feature.inputs:
            source = made.get(column, -1)
            if column in feature.outputs:
                fail(feature.where, "reads", f"its own output {column!r}. Give it another name")
            if source > number:
                fail(
                    feature.where, "reads",
                    f"{column!r}, which {features[source].where} makes only later. Put that one before it",
                )  # fmt: skip
        if isinstance(feature, RowSteps) and number > local:
            fail(feature.where, "stands", f"after {features[local].where}, but changes the rows. Put it before")


def column_taken(feature: Derivation, column: str, who: str) -> SchemaError:
    """Return the error for a feature that would replace a column of ``who``."""
    return SchemaError(
        f"{feature.where} makes column {column!r}, which {who} have already. Choose another name for the feature."
    )


def missing_column(feature: Derivation, column: str, present: Sequence[str]) -> SchemaError:
    """Return the error for a column that a feature reads and that does not exist."""
    return SchemaError(
        f"{feature.where} reads column {column!r}, which is neither in the input nor made by an earlier feature. "
        f"There are: {listed(present)}." + near(column, list(present))
    )


def work_of(feature: Derivation) -> str:
    """Return the name of a feature and its inputs, for errors."""
    return f"{feature.where} of {', '.join(map(repr, feature.inputs))}"


@contextmanager
def explained(who: Derivation | str, file: str = "") -> Iterator[None]:
    """Turn errors of Polars in the block into :class:`DataError`.

    Args:
        who: the feature that is computed or fitted, or another name.
        file: where the rows are from.
    """
    from polars.exceptions import PolarsError

    try:
        yield
    except PolarsError as error:
        culprit = who if isinstance(who, str) else f"{file}: {who.where}" if file else work_of(who)
        raise DataError(f"{culprit} cannot be computed: {reason_of(error)}. {_remedy(who)}") from error


def _remedy(who: Derivation | str) -> str:
    if isinstance(who, str):
        return "It must be numbers: fix what is not a number, or leave such rows out."
    if getattr(who, "pattern", None) is not None:
        return "docs/features.md says what a pattern may contain."
    if who.numbers:
        return f"It wants numbers in {', '.join(map(repr, who.numbers))}: fix what is not a number, or make it missing."
    return "docs/features.md describes the kinds."
