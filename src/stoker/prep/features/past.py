"""Window features: previous values, histories, differences, time since, counts of earlier rows; and ranks.

"Earlier" means a strictly lower ``order``: rows of one moment do not count each other, so a feature uses nothing of its
own moment or later. If ``events`` names a column, only rows in which it is above 0 count.

The state of a feature has the rows of each group that later rows can need. With it, later rows get the values that they
would get with all earlier rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.base.checks import choice, fail, positive
from stoker.base.errors import DataError
from stoker.prep.features.base import COUNT, MAYBE_MISSING, ROW, TEXT, Derivation, explained, groups, pa, pl, texts

Ints = NDArray[np.int64]
WEIGHT = "__weight"  # column of the state of a count: how many events a row stands for, Int64


def previous_values(values: Any, first: Ints, stop: Ints, most: int) -> tuple[Any, Ints]:
    """Return ``values[max(first, stop - most):stop]`` of all rows: flat values [L] and lengths [n]."""
    start = np.maximum(first, stop - most)
    lengths = stop - start
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    index = np.arange(total) - np.repeat(ends - lengths, lengths) + np.repeat(start, lengths)
    return values[index], lengths


def lists_of(flat: pl.Series, lengths: Ints) -> pl.Series:
    """Build a list column from flat values and the length of every row's list."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    column = pl.from_arrow(pa.LargeListArray.from_arrays(offsets, flat.to_arrow()))
    assert isinstance(column, pl.Series)
    return column


@dataclass(frozen=True, kw_only=True)
class Past(Derivation):
    """A feature of the rows of its group, in order.

    Args:
        by: the columns of the group's key.
        order: a column of numbers. Rows without it have a missing value, and later rows do not see them.
        events: a column of numbers; later rows see only rows above 0. None: all rows.
    """

    reads = "by order events"
    reads_numbers = "order events"
    by: tuple[str, ...]
    order: str
    events: str | None = None

    def check(self) -> None:
        texts(self.where, "by", self.by)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(super().inputs))

    @property
    def direction(self) -> int:
        """1 for rising order, -1 for falling."""
        return 1

    @abstractmethod
    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        """Return the feature of all rows of whole groups, in the order of ``frame``."""

    def state(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.DataFrame:
        """Return the events that later rows need, by rising order in their groups, with the inputs and ``__row``."""
        raise NotImplementedError(f"{self.where} has no state")

    @property
    def has_table(self) -> bool:
        """Whether a dataset stores the state: True if the class defines :meth:`state`."""
        return type(self).state is not Past.state

    def recorded(self, frame: pl.DataFrame, rows: OrderedRows) -> Any:
        """Return bool [m]: which rows, sorted by group and order, later rows see."""
        return rows.events(frame, self.events)

    def _stored(self, frame: pl.DataFrame, places: Any) -> pl.DataFrame:
        """Return the rows of the frame at some places, with the columns of a state."""
        return frame.select(pl.col(*self.inputs, ROW).gather(pl.Series(places)))


@dataclass(frozen=True, kw_only=True)
class _LastEvents(Past):
    """A feature of the last earlier events."""

    @property
    def depth(self) -> int:
        """How many events the feature uses."""
        return 1

    def state(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.DataFrame:
        """Return the last ``depth`` events at the last moment of each group and the last ``depth`` before it."""
        places = np.flatnonzero(self.recorded(frame, rows))
        moments, ends = rows.moment[places], rows.ends(places)
        begins = np.searchsorted(moments, moments[ends - 1])  # of the last moment
        place = np.arange(len(places))
        kept = (place >= ends - self.depth) | ((place >= begins - self.depth) & (place < begins))
        return self._stored(frame, rows.sorted[places[kept]])


class OrderedRows:
    """The rows of a frame that have an order, sorted by (group, order, place in the frame).

    Args:
        frame: whole groups.
        codes: codes of the groups and their bound, from :func:`~stoker.prep.features.groups.key_codes`.
        order: column of the features.
        direction: 1 for rising order, -1 for falling.
    """

    def __init__(self, frame: pl.DataFrame, codes: tuple[Any, int], order: str, direction: int) -> None:
        values = frame.get_column(order)
        if values.dtype.is_temporal():
            values = values.to_physical()
        if not values.dtype.is_integer():
            values = values.cast(pl.Float64).fill_nan(None)
        #: bool [n]: which rows have an order
        self.known = values.is_not_null().to_numpy()
        order_of, (key, bound) = _ordered(values.fill_null(0).to_numpy()), codes
        rows = None if self.known.all() else np.flatnonzero(self.known)
        if rows is not None:
            order_of, key = order_of[rows], key[rows]
        if direction < 0:  # whole numbers take the complement: the least one has no negative
            order_of = -order_of if order_of.dtype == np.float64 else ~order_of
        by_order = None
        if (order_of[1:] < order_of[:-1]).any():  # most logs are in order
            by_order = groups.sort_rows(*groups.order_codes(order_of))
        places = groups.sort_rows(key, bound, by_order)
        #: int32 or int64 [m]: the rows in sorted order, which is the order of all arrays below
        self.sorted = places if rows is None else rows[places].astype(places.dtype)
        self.order = order_of[places]
        new_group = groups.starts_of(key[places])
        new_moment = new_group | groups.starts_of(self.order)
        #: [m]: the number of each row's moment; below, where its group and its moment begin
        self.moment = np.cumsum(new_moment, dtype=places.dtype) - 1
        place = np.arange(len(places), dtype=places.dtype)
        self.group_start = np.maximum.accumulate(np.where(new_group, place, 0))
        self.moment_start = np.maximum.accumulate(np.where(new_moment, place, 0))
        self._last: dict[str | None, Any] = {}

    def events(self, frame: pl.DataFrame, column: str | None) -> Any:
        """Return bool [m]: the rows that later rows see."""
        if column is None:
            return np.ones(len(self.sorted), np.bool_)
        return (frame.get_column(column).cast(pl.Float64).fill_nan(None) > 0).fill_null(False).to_numpy()[self.sorted]

    def last(self, frame: pl.DataFrame, column: str | None) -> Any:
        """Return int64 [n], in the order of the frame: the row of the last earlier event, or -1."""
        if column not in self._last:
            place = np.arange(len(self.sorted), dtype=self.sorted.dtype)
            latest = np.maximum.accumulate(np.where(self.events(frame, column), place, -1))
            found = np.append(latest, -1)[self.moment_start - 1]  # -1 before the first row
            rows = np.append(self.sorted, -1)[np.where(found >= self.group_start, found, -1)]
            self._last[column] = self.back(rows, -1)
        return self._last[column]

    def count(self, events: Any, window: float | None) -> Any:
        """Return int64 [m]: how many earlier events the group has within ``window``."""
        counted = np.append(0, np.cumsum(events))
        return counted[self.moment_start] - counted[self.window_start(window)]

    def ends(self, places: Any) -> Any:
        """Return, for rising places in sorted order, the index in ``places`` where the group of each ends."""
        starts = self.group_start[places]
        return np.searchsorted(starts, starts, side="right")

    def first_older(self, stored: int) -> tuple[int, int] | None:
        """Find a new row that is earlier than a stored row of its group.

        The first ``stored`` rows of the frame are stored. Return the new row and the last stored row of the group, or
        None.
        """
        place, known = np.arange(len(self.sorted)), self.sorted < stored
        following = np.minimum.accumulate(np.where(known, place, len(place))[::-1])[::-1]
        older = np.flatnonzero(~known & (np.append(self.group_start, -1)[following] == self.group_start))
        if not len(older):
            return None
        last = np.flatnonzero(known & (self.group_start == self.group_start[older[0]]))[-1]
        return int(self.sorted[older[0]]), int(self.sorted[last])

    def window_start(self, window: float | None) -> Any:
        """Return int64 [m]: the first row of the group whose order is at least the row's order minus ``window``."""
        if window is None:
            return self.group_start
        bounded = np.ones(len(self.order), np.bool_)
        if self.order.dtype == np.int64:  # between whole numbers are whole numbers
            width = int(min(window, 2.0**63 - 1024))
            bounded = self.order >= -(2**63) + width  # else the window begins before all numbers
            bound = self.order - np.int64(width)
            if window >= 2.0**63:
                bounded[:] = False
        else:
            with np.errstate(invalid="ignore"):  # infinity minus an infinite window: no order is below
                bound = self.order - np.float64(window)
        low, high = self.group_start.copy(), np.where(bounded, self.moment_start, self.group_start)
        while (open_ := low < high).any():  # a binary search for all rows at once
            middle = low + (high - low) // 2
            below = open_ & (self.order[np.minimum(middle, len(self.order) - 1)] < bound)
            low, high = np.where(below, middle + 1, low), np.where(open_ & ~below, middle, high)
        return low

    def back(self, values: Any, missing: Any) -> Any:
        """Return values [m] for all rows [n], in the order of the frame."""
        rows = np.full(len(self.known), missing, values.dtype)
        rows[self.sorted] = values
        return rows


def _ordered(values: Any) -> Any:
    """Return numbers as int64 or float64 with the same order and the same differences."""
    if values.dtype == np.uint64:
        return (values ^ np.uint64(2**63)).view(np.int64)
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def _taken(series: pl.Series, rows: Any) -> pl.Series:
    """Return ``series[rows]``, missing where a row is -1."""
    return series.gather(pl.Series(rows).set(pl.Series(rows < 0), None))


@dataclass(frozen=True, kw_only=True)
class Previous(_LastEvents):
    """The value of ``column`` in the last earlier row of the group; missing if there is none."""

    kind: ClassVar[str] = "previous"
    reads = "by column order events"
    read_as = TEXT
    column: str

    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        return _taken(frame.get_column(self.column), rows.last(frame, self.events)).alias(self.name)


@dataclass(frozen=True, kw_only=True)
class History(_LastEvents):
    """The last values of ``column`` in the earlier rows of the group, oldest first: a list, which may be empty.

    Rows without a value in ``column`` do not count.

    Args:
        column: the column of the values.
        length: most values of a list.
    """

    kind: ClassVar[str] = "history"
    reads = "by column order events"
    column: str
    length: int = 20

    def check(self) -> None:
        super().check()
        positive(self.where, "length", self.length)

    @property
    def depth(self) -> int:
        return self.length

    def model_columns(self) -> dict[str, dict[str, Any]]:
        return {self.name: {**TEXT, "max_length": self.length}}

    def recorded(self, frame: pl.DataFrame, rows: OrderedRows) -> Any:
        return super().recorded(frame, rows) & self._items(frame).is_not_null().to_numpy()[rows.sorted]

    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        items = self._items(frame)
        if items.dtype.is_nested():
            raise DataError(f"{self.where} reads column {self.column!r} of {items.dtype}, but needs single values.")
        events = self.recorded(frame, rows)
        counted = np.append(0, np.cumsum(events))
        first, stop = (rows.back(counted[start], 0) for start in (rows.group_start, rows.moment_start))
        places, lengths = previous_values(rows.sorted[events], first, stop, self.length)
        lists = lists_of(items.gather(pl.Series(places)), lengths).alias(self.name)
        return lists if rows.known.all() else lists.set(pl.Series(~rows.known), None)

    def _items(self, frame: pl.DataFrame) -> pl.Series:
        items = frame.get_column(self.column)
        return items.fill_nan(None) if items.dtype.is_float() else items


@dataclass(frozen=True, kw_only=True)
class Difference(_LastEvents):
    """``column`` minus its value in the last earlier row of the group; missing if there is none."""

    kind: ClassVar[str] = "difference"
    reads = "by column order events"
    reads_numbers = "column order events"
    read_as = MAYBE_MISSING
    column: str

    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        values = frame.get_column(self.column).cast(pl.Float64)
        return (values - _taken(values, rows.last(frame, self.events))).alias(self.name)


@dataclass(frozen=True, kw_only=True)
class SinceLast(_LastEvents):
    """``order`` minus that of the last earlier row of the group, in its unit; missing if there is none."""

    kind: ClassVar[str] = "since_last"
    read_as: ClassVar[dict[str, Any]] = {**MAYBE_MISSING, **COUNT}

    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        last = rows.last(frame, self.events)
        order = rows.back(rows.order, 0)
        before = order[np.maximum(last, 0)]
        if order.dtype == np.int64:  # exact for any whole numbers, as the difference is never negative
            passed: Any = (order.view(np.uint64) - before.view(np.uint64)).astype(np.float64)
        else:
            passed = order - before
        return pl.Series(self.name, passed).set(pl.Series(last < 0), None)


@dataclass(frozen=True, kw_only=True)
class PastCount(Past):
    """The number of earlier rows of the group, at most ``window`` earlier, in the unit of ``order``."""

    kind: ClassVar[str] = "past_count"
    read_as = COUNT
    window: float | None = None

    def check(self) -> None:
        super().check()
        if self.window is not None and not self.window > 0:
            fail(self.where, "window", f"{self.window} is not above 0. Leave it out to count from the beginning")

    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        counted = pl.Series(self.name, rows.back(rows.count(self._weights(frame, rows), self.window), 0))
        return counted if rows.known.all() else counted.set(pl.Series(~rows.known), None)

    def _weights(self, frame: pl.DataFrame, rows: OrderedRows) -> Any:
        """Return int64 [m]: how many events each row, sorted by group and order, stands for."""
        events = self.recorded(frame, rows).astype(np.int64)
        return events * frame.get_column(WEIGHT).to_numpy()[rows.sorted] if WEIGHT in frame.columns else events

    def state(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.DataFrame:
        """Return a row for the events at the last moment of each group, and one for the earlier events.

        With a window, the latter is one row for each moment in the window. ``__weight`` is the number of events that a
        row stands for.
        """
        weights = self._weights(frame, rows)
        places = np.flatnonzero(weights)
        last = places[rows.ends(places) - 1]
        if self.window is not None:
            inside = places >= rows.window_start(self.window)[last]
            places, last = places[inside], last[inside]
        at = rows.moment[places] if self.window is not None else rows.moment[places] == rows.moment[last]
        begins = (last[1:] != last[:-1]) | (at[1:] != at[:-1])
        starts = np.flatnonzero(np.append(True, begins)[: len(places)])
        sums = np.add.reduceat(weights[places], starts) if len(starts) else weights[:0]
        return self._stored(frame, rows.sorted[places[starts]]).with_columns(pl.Series(WEIGHT, sums))


@dataclass(frozen=True, kw_only=True)
class Rank(Past):
    """The rank of ``order`` among all rows of the group, from 1; for example of the price in a list.

    Equal values share a rank. The next value's rank counts all of them (``method="min"``) or one (``"dense"``).
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

    def compute(self, frame: pl.DataFrame, rows: OrderedRows) -> pl.Series:
        rank = rows.moment_start - rows.group_start
        if self.method == "dense":
            rank = rows.moment - rows.moment[rows.group_start]
        ranked = pl.Series(self.name, rows.back(rank.astype(np.int64) + 1, 0))
        return ranked if rows.known.all() else ranked.set(pl.Series(~rows.known), None)


def compute_all(
    frame: pl.DataFrame,
    features: list[Past],
    states: Mapping[str, list[pl.DataFrame]] | None = None,
    stored: int = 0,
    source: object = None,
) -> pl.DataFrame:
    """Return the outputs of window features over whole groups, one row per row of ``frame``.

    Rows are sorted once for all features with the same group and order.

    Args:
        frame: with the inputs and, for states, ``__row``.
        features: to compute.
        states: feature -> list to which its state is appended; None: compute no state.
        stored: the first ``stored`` rows are rows of a state.
        source: the dataset of that state, for errors.

    Raises:
        DataError: a row is older than the last stored row of its group.
    """
    orders: dict[Any, OrderedRows] = {}
    codes: dict[Any, Any] = {}
    series: dict[str, Any] = {}
    for feature in sorted(features, key=lambda f: (f.by, f.order, f.direction)):
        key = (feature.by, feature.order, feature.direction)
        with explained(feature):
            if feature.by not in codes:
                codes = {feature.by: groups.key_codes(frame, feature.by)}
            if key not in orders:  # keep one at a time: each has three arrays of the frame's length
                orders = {key: OrderedRows(frame, codes[feature.by], feature.order, feature.direction)}
            if stored and (found := orders[key].first_older(stored)) is not None:
                raise _older(feature, frame, *found, source)
            series[feature.name] = feature.compute(frame, orders[key])
            if states is not None and feature.name in states:
                states[feature.name].append(feature.state(frame, orders[key]))
    return pl.DataFrame([series[feature.name].alias(feature.name) for feature in features])


def _older(feature: Past, frame: pl.DataFrame, row: int, last: int, source: object) -> DataError:
    """Return the error for a row that is older than the last stored row of its group."""
    from stoker.dataset.rebuild import UnusableInput  # imports torch, 190 MB that features of frames do not need

    group = ", ".join(f"{name} = {frame.get_column(name)[row]!r}" for name in feature.by)
    moments = frame.get_column(feature.order)
    return UnusableInput(
        f"{feature.where}: a new row with {group} has {feature.order} = {moments[row]}, before the last such row of "
        f"{source} ({feature.order} = {moments[last]}). Rows before that one are not stored, so the value cannot be "
        "right. Give only rows that follow those of the dataset. An update with later rows is taken back by stoker "
        'rollback. stoker.prepare with history="ignore" (stoker prepare --history ignore) computes window features '
        "from the new rows alone."
    )
