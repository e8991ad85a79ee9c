"""Features of the rows before in a group: previous values, differences, time since, counts; and ranks in a group.

"Before" means a strictly lower ``order``: rows of one moment do not see each other, so a feature knows nothing of its
own moment or later. Where ``events`` names a column, only rows in which it is above 0 are looked back at.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stoker.base.checks import choice, fail
from stoker.prep.features.base import Derivation, texts
from stoker.prep.features.explain import explained

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Difference", "GroupOrder", "Past", "PastCount", "Previous", "Rank", "SinceLast", "work_out"]


@dataclass(frozen=True, kw_only=True)
class Past(Derivation):
    """A feature of the rows of its group, in order.

    Args:
        by: the columns of the group's key; groups are worked on whole.
        order: a column of numbers; rows where it is missing are not looked back at and have a missing value.
        events: a column of numbers; rows above 0 are looked back at. None: all.
    """

    by: tuple[str, ...]
    order: str
    events: str | None = None

    def check(self) -> None:
        texts(self.where, "by", self.by)

    @property
    def values(self) -> tuple[str, ...]:
        """Columns whose values it looks at, beside the group's."""
        return (self.order, *([self.events] if self.events else []))

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.by, *self.values)))

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.order, *([self.events] if self.events else []))))

    @property
    def direction(self) -> int:
        """1: by rising order; -1: by falling."""
        return 1

    @abstractmethod
    def compute(self, frame: pl.DataFrame, rows: GroupOrder) -> pl.Series:
        """The feature of all rows of whole groups, in the order of ``frame``."""


class GroupOrder:
    """Rows of a frame sorted by (group, order, place in the frame), and back.

    Args:
        frame: whole groups.
        codes: of the groups, by :func:`group_codes`.
        order, direction: of the features that share it.
    """

    def __init__(self, frame: pl.DataFrame, codes: Any, order: str, direction: int) -> None:
        import polars as pl

        from stoker.prep.features.past_kernels import by_group, in_order

        values = frame.get_column(order)
        if values.dtype.is_temporal():
            values = values.to_physical()
        if not values.dtype.is_integer():
            values = values.cast(pl.Float64).fill_nan(None)
        self.known = values.is_not_null().to_numpy()
        order_of = _ordered(values.fill_null(0).to_numpy())
        if direction < 0:  # for whole numbers the complement: the least one has no negative
            order_of = -order_of if order_of.dtype == np.float64 else ~order_of
        # Rows without an order are set apart, each a group of its own behind the others.
        apart = np.flatnonzero(~self.known)
        groups = int(codes.max(initial=-1)) + 1
        if len(apart):
            codes = codes.copy()
            codes[apart] = groups + np.arange(len(apart))
        #: the rows in order, or all of them where they lie so already, as in a log
        self.sorted: Any = slice(None)
        if not in_order(codes, order_of):
            self.sorted = np.empty(len(codes), np.int64)
            by_group(codes, order_of, groups + len(apart), self.sorted)
        self.groups, self.order = codes[self.sorted], order_of[self.sorted]
        self._last: dict[str | None, Any] = {}

    def events(self, frame: pl.DataFrame, column: str | None) -> Any:
        """Bool [n], sorted: the rows that are looked back at."""
        import polars as pl

        if column is None:
            return self.known[self.sorted]
        shown = (frame.get_column(column).cast(pl.Float64).fill_nan(None) > 0).fill_null(False).to_numpy()
        return (shown & self.known)[self.sorted]

    def last(self, frame: pl.DataFrame, column: str | None) -> Any:
        """Int64 [n], in the frame's order: the row of the last event before, or -1."""
        from stoker.prep.features.past_kernels import last_before

        if column not in self._last:
            found = np.empty(len(self.groups), np.int64)
            last_before(self.groups, self.order, self.events(frame, column), found)
            if not isinstance(self.sorted, slice):
                found = self.back(np.where(found < 0, -1, self.sorted[found]))
            self._last[column] = found
        return self._last[column]

    def back(self, values: Any) -> Any:
        """Values in sorted order, in the frame's order."""
        if isinstance(self.sorted, slice):
            return values
        out = np.empty_like(values)
        out[self.sorted] = values
        return out


def group_codes(frame: pl.DataFrame, by: tuple[str, ...]) -> Any:
    """[n] numbers of the groups from 0, by first occurrence."""
    from stoker.prep.features.fitted.keys import Coder, KeyTable, code_column

    coder, columns = Coder(), []
    for name in by:
        known = frame.get_column(code_column(name)) if code_column(name) in frame.columns else None
        if known is None or (known < 0).any():  # values without a code are not one value
            columns.append(coder.add(name, frame.get_column(name)))
        else:
            columns.append(known.to_numpy())
    return KeyTable(len(by)).add_all(columns)


def _ordered(values: Any) -> Any:
    """Numbers as int64 or float64 of the same order and the same differences."""
    if values.dtype == np.uint64:
        return (values ^ np.uint64(2**63)).view(np.int64)
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def _taken(series: pl.Series, rows: Any) -> pl.Series:
    """``series[rows]``, missing where a row is -1."""
    import polars as pl

    known = rows >= 0
    # Decimals and whole numbers of 128 bits are numbers that NumPy has no type for.
    plain = series.dtype.is_numeric() and not str(series.dtype).startswith(("Decimal", "Int128", "UInt128"))
    if plain and series.null_count() == 0:
        taken = pl.Series(series.to_numpy()[np.maximum(rows, 0)], dtype=series.dtype)
    else:
        taken = series.gather(np.maximum(rows, 0))
    return taken if known.all() else taken.zip_with(pl.Series(known), pl.Series([None], dtype=series.dtype))


@dataclass(frozen=True, kw_only=True)
class Previous(Past):
    """The value of ``column`` at the group's last row before; missing where there is none."""

    kind: ClassVar[str] = "previous"
    column: str

    @property
    def values(self) -> tuple[str, ...]:
        return (self.column, *super().values)

    def compute(self, frame: pl.DataFrame, rows: GroupOrder) -> pl.Series:
        return _taken(frame.get_column(self.column), rows.last(frame, self.events)).alias(self.name)


@dataclass(frozen=True, kw_only=True)
class Difference(Past):
    """``column`` minus its value at the group's last row before; missing where there is none."""

    kind: ClassVar[str] = "difference"
    column: str

    @property
    def values(self) -> tuple[str, ...]:
        return (self.column, *super().values)

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.column, *super().numbers)))

    def compute(self, frame: pl.DataFrame, rows: GroupOrder) -> pl.Series:
        import polars as pl

        values = frame.get_column(self.column).cast(pl.Float64)
        return (values - _taken(values, rows.last(frame, self.events))).alias(self.name)


@dataclass(frozen=True, kw_only=True)
class SinceLast(Past):
    """How far ``order`` has moved since the group's last row before, in its unit; missing where there is none."""

    kind: ClassVar[str] = "since_last"

    def compute(self, frame: pl.DataFrame, rows: GroupOrder) -> pl.Series:
        import polars as pl

        last = rows.last(frame, self.events)
        order = rows.back(rows.order)
        before = order[np.maximum(last, 0)]
        if order.dtype == np.int64:  # whole numbers exactly, however large: what lies between is never negative
            passed: Any = (order.view(np.uint64) - before.view(np.uint64)).astype(np.float64)
        else:
            passed = order - before
        return pl.Series(self.name, passed).set(pl.Series(last < 0), None)


@dataclass(frozen=True, kw_only=True)
class PastCount(Past):
    """How many rows of the group lie before, or at most ``window`` before, in the unit of ``order``."""

    kind: ClassVar[str] = "past_count"
    window: float | None = None

    def check(self) -> None:
        super().check()
        if self.window is not None and not self.window > 0:
            fail(self.where, "window", f"{self.window} is not above 0. Leave it out to count from the beginning")

    def compute(self, frame: pl.DataFrame, rows: GroupOrder) -> pl.Series:
        import polars as pl

        from stoker.prep.features.past_kernels import count_before

        out = np.empty(len(rows.groups), np.int64)
        window: Any = np.float64(-1 if self.window is None else self.window)
        least: Any = -np.inf
        if rows.order.dtype == np.int64:  # between whole numbers lie whole numbers
            window = np.int64(np.floor(window) if window < 2.0**63 else -1)
            least = np.int64(-(2**63)) + max(window, np.int64(0))
        count_before(rows.groups, rows.order, rows.events(frame, self.events), window, least, out)
        counted = pl.Series(self.name, rows.back(out))
        return counted if rows.known.all() else counted.set(pl.Series(~rows.known), None)


@dataclass(frozen=True, kw_only=True)
class Rank(Past):
    """Rank from 1 of ``order`` among the rows of the group, all of them: of the price in a list, say.

    Equal values share the lowest rank ("min"; the next value's rank counts them all) or are counted once ("dense").
    """

    kind: ClassVar[str] = "rank"
    descending: bool = False
    method: str = "min"

    def check(self) -> None:
        super().check()
        choice(self.where, "method", self.method, ("min", "dense"))
        if self.events is not None:
            fail(self.where, "events", "does not apply: all rows of the group are ranked")

    @property
    def direction(self) -> int:
        return -1 if self.descending else 1

    def compute(self, frame: pl.DataFrame, rows: GroupOrder) -> pl.Series:
        import polars as pl

        from stoker.prep.features.past_kernels import rank_in_group

        out = np.empty(len(rows.groups), np.int64)
        rank_in_group(rows.groups, rows.order, self.method == "dense", out)
        ranked = pl.Series(self.name, rows.back(out))
        return ranked if rows.known.all() else ranked.set(pl.Series(~rows.known), None)


def work_out(frame: pl.DataFrame, features: list[Past]) -> pl.DataFrame:
    """The outputs of past features over whole groups, one row per row of ``frame``. Features with the same group and
    order are sorted once."""
    import polars as pl

    orders: dict[Any, GroupOrder] = {}
    codes: dict[Any, Any] = {}
    series: dict[str, Any] = {}
    for feature in sorted(features, key=lambda f: (f.by, f.order, f.direction)):
        key = (feature.by, feature.order, feature.direction)
        with explained(feature):
            if feature.by not in codes:
                codes = {feature.by: group_codes(frame, feature.by)}
            if key not in orders:  # one at a time: each holds three arrays of the frame's length
                orders = {key: GroupOrder(frame, codes[feature.by], feature.order, feature.direction)}
            series[feature.name] = feature.compute(frame, orders[key])
    return pl.DataFrame([series[feature.name].alias(feature.name) for feature in features])
