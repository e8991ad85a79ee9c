"""Features of one row: conditions on texts, splitting, pairs, parts of a time, crosses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stoker.base.checks import choice, fail, positive
from stoker.prep.features.base import BUCKET, MAYBE_MISSING, TEXT, Derivation, RowLocal, RowSteps, groups, pl, texts

UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, kw_only=True)
class _Condition(Derivation):
    """A feature with a condition: a text is one of ``values`` or matches ``pattern``."""

    reads = "column"
    column: str
    values: tuple[str, ...] = ()
    pattern: str | None = None  # a regular expression, found anywhere: "^...$" for the whole text

    @property
    def tested(self) -> str:
        """The column whose texts the condition compares."""
        return self.column

    def check(self) -> None:
        if bool(self.values) == (self.pattern is not None):
            fail(self.where, "values", "and pattern: give one of the two")
        if self.pattern is not None:
            try:
                re.compile(re.sub(r"\\[pP](\w|\{\^?\w+\})", "x", self.pattern))  # Python knows no classes of Unicode
            except re.error as error:
                fail(self.where, "pattern", f"{self.pattern!r} is not a regular expression ({error})")

    def texts(self, series: pl.Series) -> pl.Series:
        """Return the texts that the condition compares: 5 for 5.0 of a column that the schema reads as numbers."""
        from stoker.prep.parse.notation import text_of_floats

        texts = series.cast(pl.String)
        if series.dtype.is_float():
            texts = text_of_floats(series.fill_nan(None)).fill_null(texts.set(series.is_nan(), None))
        return texts.str.to_lowercase() if getattr(self, "lower", False) else texts

    def met_by(self, column: pl.Expr) -> pl.Expr:
        """Return an expression: whether a column meets the condition; null where it is missing."""
        values = pl.Series(self.values)

        def met(series: pl.Series) -> pl.Series:
            if self.pattern is not None:
                return self.texts(series).str.contains(self.pattern)
            if series.dtype.is_float():  # 5.00 is 5.0, too
                return series.fill_nan(None).is_in(values.cast(pl.Float64, strict=False).drop_nulls().implode())
            return self.texts(series).is_in(values.implode())

        return column.map_batches(met, return_dtype=pl.Boolean, is_elementwise=True)


@dataclass(frozen=True, kw_only=True)
class Match(_Condition, RowLocal):
    """1 if the text of ``column`` is one of ``values`` or matches ``pattern``, else 0; a missing text gives 0."""

    kind: ClassVar[str] = "match"
    read_as: ClassVar[dict[str, Any]] = {}

    def expressions(self) -> Sequence[pl.Expr]:
        return [self.met_by(pl.col(self.column)).fill_null(False).cast(pl.Int8).alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class Constrain(_Condition, RowLocal):
    """The text of ``column`` if it is one of ``values`` or matches ``pattern``, else missing."""

    kind: ClassVar[str] = "constrain"
    read_as = TEXT
    lower: bool = False  # first convert to lower case
    max_length: int | None = None  # characters kept

    def check(self) -> None:
        if self.values or self.pattern is not None or not (self.lower or self.max_length):
            super().check()
        positive(self.where, "max_length", self.max_length)

    def expressions(self) -> Sequence[pl.Expr]:
        text = pl.col(self.column).map_batches(self.texts, return_dtype=pl.String, is_elementwise=True)
        if self.values or self.pattern is not None:
            text = pl.when(self.met_by(pl.col(self.column))).then(text)
        if self.max_length is not None:
            text = text.str.head(self.max_length)
        return [text.alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class Mask(_Condition, RowLocal):
    """The value of ``column`` if ``where_column`` is one of ``values`` or matches ``pattern``, else missing."""

    kind: ClassVar[str] = "mask"
    reads = "column where_column"
    read_as = TEXT
    where_column: str

    @property
    def tested(self) -> str:
        return self.where_column

    def expressions(self) -> Sequence[pl.Expr]:
        return [pl.when(self.met_by(pl.col(self.where_column))).then(pl.col(self.column)).alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class Equal(RowLocal):
    """1 if the texts of two columns are equal, or the numbers if one column has numbers; a missing one gives 0."""

    kind: ClassVar[str] = "equal"
    reads = "left right"
    read_as: ClassVar[dict[str, Any]] = {}
    left: str
    right: str

    def expressions(self) -> Sequence[pl.Expr]:
        def same(pair: Sequence[pl.Series]) -> pl.Series:
            kind = pl.Float64() if any(each.dtype.is_float() for each in pair) else pl.String()  # 5.0 is the text 5
            left, right = (each.fill_nan(None) if each.dtype.is_float() else each for each in pair)
            return left.cast(kind, strict=False) == right.cast(kind, strict=False)

        found = pl.map_batches([self.left, self.right], same, return_dtype=pl.Boolean, is_elementwise=True)
        return [found.fill_null(False).cast(pl.Int8).alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class _TwoNumbers(RowLocal):
    """A number computed from two columns of numbers."""

    reads = "left right"
    reads_numbers = "left right"
    read_as = MAYBE_MISSING
    left: str
    right: str


@dataclass(frozen=True, kw_only=True)
class Subtract(_TwoNumbers):
    """``left - right``; missing if one of them is missing."""

    kind: ClassVar[str] = "subtract"

    def expressions(self) -> Sequence[pl.Expr]:
        return [(pl.col(self.left).cast(pl.Float64) - pl.col(self.right).cast(pl.Float64)).alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class Divide(_TwoNumbers):
    """``left / right``; missing if one of them is missing or ``right`` is 0."""

    kind: ClassVar[str] = "divide"

    def expressions(self) -> Sequence[pl.Expr]:
        under = pl.col(self.right).cast(pl.Float64)
        return [(pl.col(self.left).cast(pl.Float64) / pl.when(under != 0).then(under)).alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class Split(RowLocal):
    """The first ``width`` elements of a text: columns ``name_1`` ... ``name_<width>``, missing after the last."""

    kind: ClassVar[str] = "split"
    reads = "column"
    read_as = TEXT
    column: str
    width: int
    separator: str = "|"

    def check(self) -> None:
        positive(self.where, "width", self.width)
        if not self.separator:
            fail(self.where, "separator", "is empty")

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{number}" for number in range(1, self.width + 1))

    def expressions(self) -> Sequence[pl.Expr]:
        # One struct for all elements, so that the text is cut once. The field after the last holds the rest.
        cut = pl.col(self.column).cast(pl.String).str.splitn(self.separator, self.width + 1)
        return [cut.struct.field(f"field_{number}").alias(name) for number, name in enumerate(self.outputs)]


@dataclass(frozen=True, kw_only=True)
class TimeParts(RowLocal):
    """Parts of a time, UTC plus ``utc_offset`` hours: ``name_hour`` 0 to 23, ``name_weekday`` 1 (Monday) to 7 ..."""

    kind: ClassVar[str] = "time_parts"
    reads = "column"
    reads_numbers = "column"
    read_as = BUCKET
    column: str
    parts: tuple[str, ...] = ("hour", "weekday")  # of hour, weekday, day, month, minute_of_day
    unit: str = "s"  # of a number: s, ms, us or ns since 1970
    utc_offset: float = 0.0  # hours

    def check(self) -> None:
        choice(self.where, "unit", self.unit, tuple(UNITS))
        texts(self.where, "parts", self.parts)
        for part in self.parts:
            choice(self.where, "parts", part, ("hour", "weekday", "day", "month", "minute_of_day"))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{part}" for part in self.parts)

    def expressions(self) -> Sequence[pl.Expr]:
        def counted(series: pl.Series) -> pl.Series:
            if series.dtype.is_temporal():  # a timestamp, which tells its unit
                return series.dt.epoch("us").cast(pl.Float64)
            if self.unit == "ns":  # float64 rounds today's nanoseconds to 256
                return (series // 1000).cast(pl.Float64)
            return series.cast(pl.Float64) / UNITS[self.unit] * 1e6

        micros = pl.col(self.column).map_batches(counted, return_dtype=pl.Float64, is_elementwise=True)
        micros = micros.floor() + self.utc_offset * 3.6e9
        # What is not a number, or beyond the calendar (about 250,000 years), is missing.
        moment = pl.when(micros.abs() < 8e18).then(micros).floor().cast(pl.Int64).cast(pl.Datetime("us")).dt
        found: dict[str, Any] = {
            "hour": moment.hour, "weekday": moment.weekday, "day": moment.day, "month": moment.month,
            "minute_of_day": lambda: moment.hour().cast(pl.Int32) * 60 + moment.minute(),
        }  # fmt: skip
        return [found[part]().cast(pl.Int32).alias(f"{self.name}_{part}") for part in self.parts]


@dataclass(frozen=True, kw_only=True)
class Cross(RowLocal):
    """A bucket for each combination of values: a hash of their texts modulo ``buckets``.

    The hash is FNV-1a of the texts joined by 0x1F, then splitmix64; a missing value is the text 0x00. It is the same on
    every machine and in every version.
    """

    kind: ClassVar[str] = "cross"
    reads = "columns"
    read_as = BUCKET
    columns: tuple[str, ...]
    buckets: int
    seed: int = 0

    def check(self) -> None:
        texts(self.where, "columns", self.columns, least=2)
        positive(self.where, "buckets", self.buckets, least=2)
        positive(self.where, "seed", self.seed, least=0)

    def expressions(self) -> Sequence[pl.Expr]:
        return [(groups.stable_hash(self.columns, self.seed) % self.buckets).cast(pl.Int64).alias(self.name)]


@dataclass(frozen=True, kw_only=True)
class Keep(_Condition, RowSteps):
    """Keep only the rows in which ``column`` is one of ``values`` or matches ``pattern``."""

    kind: ClassVar[str] = "keep"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ()

    def rows(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        return frame.filter(self.met_by(pl.col(self.column)))


@dataclass(frozen=True, kw_only=True)
class Pairs(RowSteps):
    """Make a row for each element of a list: the elements of ``columns`` become ``names``, and ``rank`` counts from 1.

    The first column decides the number of rows. A column with another number of elements is missing in all of them.
    """

    kind: ClassVar[str] = "pairs"
    reads = "columns"
    columns: tuple[str, ...]  # e.g. impressions, prices: "12|7|33", "80|65|120"
    names: tuple[str, ...]  # e.g. item, price
    separator: str = "|"
    rank: str = "rank"  # name of the column with the place in the list
    most: int = 25  # further elements are ignored
    least: int = 1  # shorter lists give no row

    def check(self) -> None:
        texts(self.where, "columns", self.columns)
        texts(self.where, "names", (*self.names, self.rank))
        if len(self.names) != len(self.columns):
            fail(self.where, "names", f"lists {len(self.names)} names for {len(self.columns)} columns")
        positive(self.where, "most", self.most)
        positive(self.where, "least", self.least)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.names, self.rank)

    def rows(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        def elements(column: str) -> pl.Expr:
            return pl.col(column).cast(pl.String).str.split(self.separator).list.head(self.most)

        size = pl.col(self.names[0]).list.len()
        # Only rows whose lists differ in length repeat a missing text; the others keep their list.
        others = {}
        for name in self.names[1:]:
            same = (pl.col(name).list.len() == size).fill_null(False)
            nothing = pl.lit(None, pl.String).repeat_by(pl.when(~same).then(size).otherwise(0))
            others[name] = pl.when(same).then(pl.col(name)).otherwise(nothing)
        return (
            frame.with_columns(**{name: elements(c) for name, c in zip(self.names, self.columns, strict=True)})
            .filter(size >= self.least)
            .with_columns(**others, **{self.rank: pl.int_ranges(1, size.cast(pl.Int64) + 1)})
            .explode(*self.outputs)
        )
