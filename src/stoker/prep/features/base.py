"""What every derived feature has: a kind, a name, the columns that it reads and those that it makes.

Families: :class:`RowSteps` change the number of rows and stand first; :class:`RowLocal` features need their own row
only; learned ones (:mod:`stoker.prep.features.learned`) need all training rows; past ones
(:mod:`stoker.prep.features.past`)
the rows of their group in order.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from stoker.base.checks import build_part, choice, fail, near
from stoker.base.errors import SchemaError
from stoker.base.units import listed

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "KINDS", "ROW", "Derivation", "RowLocal", "RowSteps", "check_features", "column_taken",
    "feature_from_dict", "leading", "missing_column", "texts",
]  # fmt: skip

KINDS: dict[str, type[Derivation]] = {}  # by the name that a schema file uses; subclasses enter by themselves
ROW = "__row"  # number of the row among all rows, Int64; there while features are worked out
_NAME = re.compile(r"[^\x00-\x1f/\\*]{1,100}")
_MOST_BYTES = 200  # file systems know 255, with what is put behind


@dataclass(frozen=True, kw_only=True)
class Derivation(ABC):
    """A feature to derive. Subclasses are frozen dataclasses with a ``kind`` of their own.

    Args:
        name: of the column made; empty: from the kind and the columns read.
    """

    name: str = ""
    kind: ClassVar[str] = ""

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
        """Refuse settings that contradict themselves. Raises :class:`SchemaError`."""

    def in_groups(self, column: str | None) -> Derivation:
        """Return the feature with the defaults of a schema whose ``group`` is this column; None: it has none."""
        return self

    @property
    def where(self) -> str:
        """How errors call it."""
        return f"feature {self.name or self.kind!r} ({self.kind})"

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Columns that it reads."""

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of the inputs that must be numbers."""
        return ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Columns that it makes."""
        return (self.name,)

    def to_dict(self) -> dict[str, Any]:
        """Plain values with ``kind``, which :func:`feature_from_dict` takes back."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items() if v is not None}
        return {"kind": self.kind, **values}


@dataclass(frozen=True, kw_only=True)
class RowLocal(Derivation):
    """A feature that its own row decides. Subclass it, or write :meth:`expressions`, for one of your own."""

    @abstractmethod
    def expressions(self) -> Sequence[pl.Expr]:
        """One elementwise Polars expression per output, named so. They see the columns before this feature."""


@dataclass(frozen=True, kw_only=True)
class RowSteps(Derivation):
    """A step that drops rows or makes several of one. It stands before all other kinds of features."""

    @abstractmethod
    def rows(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        """The rows after the step. Each must hang on one row before it, and their order be kept."""


def texts(where: str, key: str, names: Sequence[str], *, least: int = 1) -> None:
    """Refuse a list of column names that is too short or has one twice."""
    if len(names) < least:
        fail(where, key, f"names {len(names)} columns and needs at least {least}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        fail(where, key, f"names {twice[0]!r} twice")


def feature_from_dict(values: Any, where: str) -> Derivation:
    """A feature from plain values.

    Raises:
        SchemaError: naming ``where``: an unknown kind or key, a value of the wrong type or out of range.
    """
    if not isinstance(values, Mapping) or "kind" not in values:
        raise SchemaError(f"{where}: must be a table with a kind: {', '.join(sorted(KINDS))}; found {values!r}.")
    choice(where, "kind", values["kind"], sorted(KINDS))
    rest = {key: value for key, value in values.items() if key != "kind"}
    built: Derivation = build_part(KINDS[values["kind"]], rest, where)
    return built


def leading(features: Sequence[Derivation]) -> int:
    """How many of the features, from the first on, need no row but their own."""
    for number, feature in enumerate(features):
        if not isinstance(feature, RowLocal | RowSteps):
            return number
    return len(features)


def check_features(features: Sequence[Derivation]) -> None:
    """Whether a list of features can be worked out in its order.

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
    """The error for a feature that would replace a column which ``who`` already has."""
    return SchemaError(
        f"{feature.where} makes column {column!r}, which {who} have already. Choose another name for the feature."
    )


def missing_column(feature: Derivation, column: str, present: Sequence[str]) -> SchemaError:
    """The error for a column that a feature reads and nobody has."""
    return SchemaError(
        f"{feature.where} reads column {column!r}, which is neither in the input nor made by an earlier feature. "
        f"There are: {listed(present)}." + near(column, list(present))
    )
