"""What dense columns learn from training rows, exactly: zscore, minmax, and fills by mean and median.

The results depend on nothing but the values of the training rows: sums over them are exact (:mod:`exact_sums`), so it
matters neither how they are cut into parts nor in which order they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.base.ordered import ordered_map
from stoker.prep.fit.dense_kernels import Order, moments, present_sums, tiles
from stoker.prep.fit.exact_sums import COUNT, counted_sums, mean_and_deviation, no_values
from stoker.prep.fit.medians import Brackets, by_digits, middle_of_counts
from stoker.prep.fit.transforms import DenseFit, clips_and_logarithms
from stoker.prep.fit.value_counts import MOST_COUNTERS, ValueCounts
from stoker.prep.schema import FITTED_TRANSFORMS, DenseColumn

__all__ = ["fit_dense"]

Array = npt.NDArray[Any]
P = TypeVar("P")
R = TypeVar("R")
Raw = Sequence[Array]  # D columns [n]
RowsOf = Callable[[P, Callable[[Raw, Array], R]], R]  # calls with the raw columns of a part and its training rows [m]
Over = Callable[..., Iterator[Any]]  # calls a function so for every part, or for some


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on training rows, in one pass over the parts but for medians that a sample did not find.

    Args:
        columns: D of them.
        parts: those that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: parts that are looked at at a time.
    """

    def over(look: Callable[[Raw, Array], R], some: Sequence[P] = parts) -> Iterator[R]:
        return ordered_map(lambda part: rows_of(part, look), some, threads)

    types: list[np.dtype[Any]] = []  # that hold each column's values in all parts
    for found in over(lambda raw, _: [column.dtype for column in raw]):
        types = [np.promote_types(a, b) for a, b in zip(types, found, strict=True)] if types else found
    counted = _counted(columns, types)
    rest = [index for index in range(len(columns)) if index not in counted]

    def over_rest(look: Callable[[Raw, Array], R], some: Sequence[P] = parts) -> Iterator[R]:
        return over(lambda raw, rows: look([raw[index] for index in rest], rows), some)

    counts, scan = ValueCounts([types[index] for index in counted]), _Scan([columns[index] for index in rest])
    scan.guess(parts, over_rest)

    def look(raw: Raw, rows: Array) -> Any:
        counts.look([raw[index] for index in counted], rows)
        return scan.look([raw[index] for index in rest], rows)

    if counted or scan.learns:
        for seen in over(look):
            scan.add(seen)
    fits = dict(zip(rest, scan.fits(over_rest), strict=True))
    for index, values in zip(counted, counts.found(), strict=True):
        fits[index] = _of_counts(columns[index], *values)
    return [fits[index] for index in range(len(columns))]


def _wanted(column: DenseColumn) -> str:
    """The transform that has to be learned, if there is one."""
    last = column.transforms[-1] if column.transforms else ""
    return last if last in FITTED_TRANSFORMS else ""


def _counted(columns: Sequence[DenseColumn], types: Sequence[np.dtype[Any]]) -> list[int]:
    """The columns that learn from counts: of few bits in all parts, and while there are counters for them."""
    found, counters = [], 0
    for index, (column, dtype) in enumerate(zip(columns, types, strict=False)):  # no types: no part
        if dtype.kind == "u" and column.fitted:
            counters += np.iinfo(dtype).max + 1
            if counters > MOST_COUNTERS:
                break
            found.append(index)
    return found


def _of_counts(column: DenseColumn, values: Array, counts: Array, missing: int) -> DenseFit:
    """The fit of a column from its ``values`` [m] in training rows, rising, how often each is there, and how many are
    missing."""
    fill = column.fill
    if fill == "mean":
        fill = mean_and_deviation(counted_sums(values, counts))[0]
    elif fill == "median":
        fill = middle_of_counts(values, counts)
    if missing:
        values, counts = np.append(values, np.nan), np.append(counts, missing)
    made = _after(clips_and_logarithms([column]), values, float(fill))
    sums, low, high = no_values(1)[0], np.inf, -np.inf
    kind = _wanted(column)
    if kind == "zscore":
        sums = counted_sums(made, counts)
    elif kind == "minmax":
        low, high = np.fmin.reduce(made, initial=np.inf), np.fmax.reduce(made, initial=-np.inf)
    return DenseFit(fill=float(fill), **_scaling(kind, sums, low, high))


def _scaling(kind: str, sums: Array, low: float, high: float) -> dict[str, float]:
    """The last step from the exact sums of a column's values, or from the least and the greatest of them."""
    if kind == "zscore":
        mean, deviation = mean_and_deviation(sums)
        return {"shift": mean, "scale": _inverse(deviation)}
    if kind == "minmax" and not low > high:
        shift = float(low) + 0.0  # which of 0 and -0 is the least depends on their order
        return {"shift": shift, "scale": _inverse(float(high) - shift)}
    return {}


class _Scan:
    """What columns of any values learn, as their parts go by.

    Fills that are learned do not have to be known beforehand: what was summed up with another one is corrected,
    exactly.
    """

    def __init__(self, columns: Sequence[DenseColumn]) -> None:
        self._fills = np.array([float(c.fill) if not isinstance(c.fill, str) else 0.0 for c in columns])
        self._by_mean, self._by_median = (
            np.array([index for index, column in enumerate(columns) if column.fill == kind], np.int64)
            for kind in ("mean", "median")
        )
        self._wanted = [_wanted(column) for column in columns]
        self._summed, self._ranged = (
            np.array([kind == one for kind in self._wanted], np.bool_) for one in ("zscore", "minmax")
        )
        self._steps, self._brackets = clips_and_logarithms(columns), Brackets(self._by_median)
        self._learned = np.concatenate([self._by_mean, self._by_median])
        self._given = self._fills.copy()
        self._means, self._sums = no_values(len(self._by_mean)), no_values(len(columns))
        self._low, self._high, self._rows = np.full(len(columns), np.inf), np.full(len(columns), -np.inf), 0

    @property
    def learns(self) -> bool:
        """Whether there is anything to look for."""
        return bool(len(self._learned)) or any(self._wanted)

    def guess(self, parts: Sequence[Any], over: Over) -> None:
        """Look at a sample for medians, before the rows are gone through."""
        if len(self._by_median):
            self._brackets.guess(parts, over)
        self._given[self._by_median] = self._brackets.guesses
        # No least value can be corrected: such values are left out.
        self._given[self._learned[self._ranged[self._learned]]] = np.nan

    def look(self, raw: Raw, rows: Array) -> tuple[Any, ...] | None:
        """What a part says. To be given to :meth:`add`."""
        if not self.learns:
            return None
        found = None
        if any(self._wanted):
            found = moments(raw, rows, self._steps, self._given, self._summed, self._ranged)
        return found, present_sums(raw, rows, self._by_mean), self._brackets.look(raw, rows), len(rows)

    def add(self, seen: tuple[Any, ...] | None) -> None:
        """Add what a part said."""
        if seen is None:
            return
        found, present, bracket, count = seen
        if found is not None:
            self._sums += found[0]
            self._low, self._high = np.minimum(self._low, found[1]), np.maximum(self._high, found[2])
        self._means += present
        self._brackets.add(bracket)
        self._rows += count

    def fits(self, over: Over) -> list[DenseFit]:
        """What was learned; another look ``over`` the parts where the sample did not find a median."""
        fills = self._fills
        fills[self._by_mean] = [mean_and_deviation(one)[0] for one in self._means]
        fills[self._by_median] = self._medians(over)
        missing = self._rows - np.concatenate([self._means[:, COUNT], self._brackets.present])
        for index, absent in zip(self._learned.tolist(), missing.tolist(), strict=True):
            if absent and self._wanted[index]:
                step, missed = self._steps[index : index + 1], np.array([absent])
                true, other = (_after(step, np.array([fill]), 0.0) for fill in (fills[index], self._given[index]))
                if self._summed[index]:
                    self._sums[index] += counted_sums(true, missed) - counted_sums(other, missed)
                self._low[index], self._high[index] = min(self._low[index], true[0]), max(self._high[index], true[0])
        found = zip(fills.tolist(), self._wanted, self._sums, self._low, self._high, strict=True)
        return [DenseFit(fill=fill, **_scaling(kind, sums, low, high)) for fill, kind, sums, low, high in found]

    def _medians(self, over: Over) -> list[float]:
        found = self._brackets.medians()
        open_ = [k for k, value in enumerate(found) if value is None]
        if open_:
            for k, value in zip(open_, by_digits(self._by_median[open_], over), strict=True):
                found[k] = value
        return [value for value in found if value is not None]


def _after(step: Array, values: Array, fill: float) -> Array:
    """Values [m] of a column as its steps [1, 3] leave them, ``fill`` for missing ones."""
    found = np.empty(len(values))
    for begin, end, tile in tiles([values], np.arange(len(values)), step, np.array([fill]), Order(step)):
        found[begin:end] = tile[0]
    return found


def _inverse(width: float) -> float:
    """1 / width; 1 where the values do not vary, or by so little (1e-308) that this is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < np.inf else 1.0
