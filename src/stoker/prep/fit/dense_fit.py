"""Statistics of dense columns over the training rows: zscore, minmax, and fills by mean and median.

They are a function of the training values alone: neither parts, their order, threads nor file formats change a bit.
Sums are taken of whole numbers. A value is cut into three of 26 bits, relative to the largest of its column, and sums
of these are exact, in any order. Where 8 or 16 bits hold a column in all parts, its values are counted; all else
follows from the counts.

Legend: D columns, K of them that are looked at, n rows of a part, m of them that train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.base.ordered import ordered_map
from stoker.prep.fit.dense_kernels import Order, tiles, values_of
from stoker.prep.fit.ranks import medians
from stoker.prep.fit.transforms import DenseFit, clips_and_logarithms
from stoker.prep.schema import FITTED_TRANSFORMS, DenseColumn

__all__ = ["fit_dense"]

Array = npt.NDArray[Any]
P = TypeVar("P")
R = TypeVar("R")
Raw = Sequence[Array]  # D columns [n]
RowsOf = Callable[[P, Callable[[Raw, Array], R]], R]  # calls with the raw columns of a part and its training rows [m]

_LIMB = 26  # bits of each whole number that a value is cut into
_LIMBS = 3


class _Seen(NamedTuple):
    """What a first pass over the training rows finds of a raw column."""

    low: float = math.inf  # of the values that are present
    high: float = -math.inf
    present: int = 0
    missing: int = 0
    counts: Array | None = np.zeros(0, np.int64)  # [values] of whole numbers from 0; None: there are other values

    @classmethod
    def of(cls, column: Array) -> _Seen:
        """Look at the training rows of a column [m]."""
        if column.dtype.kind == "u":
            counts = np.bincount(column, minlength=np.iinfo(column.dtype).max + 1)
            there = np.flatnonzero(counts[:-1])
            ends = (float(there[0]), float(there[-1])) if len(there) else (math.inf, -math.inf)
            return cls(*ends, len(column) - int(counts[-1]), int(counts[-1]), counts[:-1])
        values = column + np.float64(0.0)  # zeros of either sign are one value
        missing = int(np.isnan(values).sum())
        low, high = np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)
        return cls(float(low), float(high), len(values) - missing, missing, None)

    def joined(self, other: _Seen) -> _Seen:
        counts = None
        if self.counts is not None and other.counts is not None:
            counts = np.zeros(max(len(self.counts), len(other.counts)), np.int64)
            for some in (self.counts, other.counts):
                counts[: len(some)] += some
        return _Seen(
            min(self.low, other.low), max(self.high, other.high), self.present + other.present,
            self.missing + other.missing, counts,
        )  # fmt: skip


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on the training rows: one pass for the ranges, and those that its columns need.

    Fills by mean take one more pass, by median four; ``zscore`` takes two. Values must be finite.

    Args:
        columns: D of them.
        parts: those that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: parts that are looked at at a time.

    Returns:
        The fit of each column.
    """
    steps, rows = clips_and_logarithms(columns), _Rows(parts, rows_of, threads)
    fills = [0.0 if isinstance(column.fill, str) else float(column.fill) for column in columns]
    fits = [DenseFit(fill=fill) for fill in fills]
    fitted = [index for index, column in enumerate(columns) if column.fitted]
    ranges = dict(zip(fitted, rows.look_at(fitted), strict=True))
    for index, seen in ranges.items():
        if seen.counts is not None:
            fits[index] = _of_counts(columns[index], steps[index : index + 1], fills[index], seen)
    fitted = [index for index in fitted if ranges[index].counts is None]
    plain = np.tile([-np.inf, np.inf, 0.0], (len(columns), 1))  # steps that change nothing

    means = [index for index in fitted if columns[index].fill == "mean"]
    bounds = [max(abs(ranges[index].low), abs(ranges[index].high), 0.0) for index in means]
    for index, total in zip(means, rows.sums(means, plain[means], np.zeros(len(means)), bounds), strict=True):
        fills[index] = float(total / max(1, ranges[index].present))
    by_median = [index for index in fitted if columns[index].fill == "median"]
    for index, fill in zip(by_median, rows.medians(by_median), strict=True):
        fills[index] = fill

    for index in fitted:
        fits[index] = DenseFit(fill=fills[index])
    scored = [index for index in fitted if columns[index].transforms[-1:] == ("zscore",)]
    ends = {index: _ends(ranges[index], steps[index : index + 1], fills[index]) for index in fitted}
    for index in fitted:
        if columns[index].transforms[-1:] == ("minmax",) and len(ends[index]):
            low, high = min(ends[index]) + 0.0, max(ends[index])
            fits[index] = DenseFit(fill=fills[index], shift=low, scale=_inverse(high - low))
    scored = [index for index in scored if len(ends[index])]
    for index, (mean, deviation) in zip(scored, rows.deviations(scored, steps, fills, ranges, ends), strict=True):
        fits[index] = DenseFit(fill=fills[index], shift=mean, scale=_inverse(deviation))
    return fits


def _of_counts(column: DenseColumn, step: Array, fill: float, seen: _Seen) -> DenseFit:
    """The fit of a column from the counts of its values."""
    assert seen.counts is not None
    raw = np.flatnonzero(seen.counts)
    counts = seen.counts[raw]
    if column.fill == "mean":
        fill = float(Fraction(int(raw @ counts), max(1, seen.present)))
    elif column.fill == "median" and seen.present:
        sums = np.cumsum(counts)
        low, high = raw[np.searchsorted(sums, ((seen.present - 1) // 2, seen.present // 2), side="right")]
        fill = float(low + high) / 2
    if seen.missing:
        raw, counts = np.append(raw, fill), np.append(counts, seen.missing)
    kind = column.transforms[-1] if column.transforms else ""
    if kind not in FITTED_TRANSFORMS or not len(raw):
        return DenseFit(fill=fill)
    values = _after(step, raw.astype(np.float64))
    if kind == "minmax":
        low, high = float(values.min()) + 0.0, float(values.max())
        return DenseFit(fill=fill, shift=low, scale=_inverse(high - low))
    total, power = int(counts.sum()), _power(np.abs(values).max())
    exact = _number(_limbs(values, power, counts), power) / total
    mean = float(exact)
    power = _power(np.abs(values - mean).max())
    variance = _number(_limbs(_squares(values, mean, power), 0, counts), 0) / total
    return DenseFit(fill=fill, shift=mean, scale=_inverse(_deviation(variance, exact, mean, power)))


def _ends(found: _Seen, step: Array, fill: float) -> list[float]:
    """The least and the greatest value of a column behind its steps [1, 3], which keep the order of values."""
    values = [found.low, found.high] if found.present else []
    values += [fill] if found.missing else []
    return _after(step, np.array(values)).tolist()  # type: ignore[no-any-return]


class _Rows(Generic[P]):
    """Passes over the training rows of all parts, some parts at a time."""

    def __init__(self, parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int) -> None:
        self._parts, self._rows_of, self._threads = parts, rows_of, threads

    def _each(self, look: Callable[[Raw, Array], R]) -> Any:
        """What ``look`` returns of each part, in order."""
        return ordered_map(lambda part: self._rows_of(part, look), self._parts, self._threads)

    def look_at(self, chosen: Sequence[int]) -> list[_Seen]:
        """What each chosen column [K] holds."""

        def look(raw: Raw, rows: Array) -> list[_Seen]:
            return [_Seen.of(raw[index][rows]) for index in chosen]

        total = [_Seen()] * len(chosen)
        for found in self._each(look) if chosen else ():
            total = [one.joined(other) for one, other in zip(total, found, strict=True)]
        return total

    def medians(self, chosen: Sequence[int]) -> list[float]:
        """The median of each chosen column's values that are present; 0 of none."""

        def passes(look: Callable[[list[Array]], R]) -> Any:
            return self._each(lambda raw, rows: look([values_of(raw[index][rows]) for index in chosen]))

        return medians(len(chosen), passes) if chosen else []

    def sums(
        self, chosen: Sequence[int], steps: Array, fills: Array, bounds: Sequence[float],
        change: Callable[[Array, int], Array] | None = None,
    ) -> list[Fraction]:  # fmt: skip
        """The sum of each chosen column's values behind ``steps`` [K, 3], to 78 bits of the largest one.

        Args:
            chosen: K columns.
            steps: of these.
            fills: [K], of missing values.
            bounds: [K], which no value exceeds.
            change: makes of the values of column k what is summed.
        """
        if not chosen:
            return []
        order, exponents = Order(steps), list(map(_power, bounds))

        def look(raw: Raw, rows: Array) -> list[list[int]]:
            limbs = [[0] * _LIMBS for _ in chosen]
            for _, _, tile in tiles([raw[index] for index in chosen], rows, steps, fills, order):
                for k, exponent in enumerate(exponents):
                    values = tile[order.values[k]]
                    values = values if change is None else change(values, k)
                    limbs[k] = [a + b for a, b in zip(limbs[k], _limbs(values, exponent), strict=True)]
            return limbs

        total = [[0] * _LIMBS for _ in chosen]
        for found in self._each(look):
            total = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(total, found, strict=True)]
        return [_number(limbs, exponent) for limbs, exponent in zip(total, exponents, strict=True)]

    def deviations(
        self, chosen: Sequence[int], steps: Array, fills: Sequence[float], ranges: dict[int, _Seen],
        ends: dict[int, list[float]],
    ) -> list[tuple[float, float]]:  # fmt: skip
        """Mean and standard deviation of each chosen column behind its steps: the root of the mean squared difference.

        Differences are taken from the mean as a float64; what that lacks of the mean itself is put right at the end.
        """
        index = list(chosen)
        given = steps[index], np.array([fills[at] for at in index])
        count = [ranges[at].present + ranges[at].missing for at in index]
        bounds = [max(map(abs, ends[at])) for at in index]
        exact = [total / n for total, n in zip(self.sums(index, *given, bounds), count, strict=True)]
        means = [float(mean) for mean in exact]
        widths = [max(abs(end - mean) for end in ends[at]) for at, mean in zip(index, means, strict=True)]
        powers = list(map(_power, widths))

        def squares(values: Array, k: int) -> Array:
            return _squares(values, means[k], powers[k])

        totals = self.sums(index, *given, [0.5] * len(index), squares)
        return [
            (mean, _deviation(total / n, right, mean, power))
            for total, n, mean, right, power in zip(totals, count, means, exact, powers, strict=True)
        ]


def _squares(values: Array, mean: float, power: int) -> Array:
    """The squared differences from the mean, in units of 4**power."""
    scaled = _scaled(values - mean, -power)
    return np.square(scaled, out=scaled)


def _deviation(variance: Fraction, exact: Fraction, mean: float, power: int) -> float:
    """The standard deviation from the mean square of differences from ``mean``, in units of 4**power."""
    variance -= ((exact - Fraction(mean)) / Fraction(2) ** power) ** 2
    return math.ldexp(math.sqrt(max(variance, Fraction())), power)


def _power(bound: float) -> int:
    """The least power of two that is above ``bound``."""
    return math.frexp(bound)[1]


def _scaled(values: Array, power: int) -> Array:
    """The values times 2**power, exactly."""
    return values * 2.0**power if abs(power) < 1000 else np.ldexp(values, power)


def _limbs(values: Array, exponent: int, counts: Array | None = None) -> list[int]:
    """The sums of three whole numbers for each value: of at most 26 bits each, relative to 2**exponent.

    ``counts``: how often each value is there; None: once.
    """
    rest, sums = _scaled(values, _LIMB - exponent), []
    for _ in range(_LIMBS):
        whole = np.rint(rest)
        # Of whole numbers that are far below 2**53, or 2**63: exact.
        sums.append(int(whole.sum()) if counts is None else int(whole.astype(np.int64) @ counts))
        rest -= whole
        rest *= 2.0**_LIMB
    return sums


def _number(limbs: Sequence[int], exponent: int) -> Fraction:
    whole = 0
    for limb in limbs:
        whole = (whole << _LIMB) + limb
    return whole * Fraction(2) ** (exponent - _LIMBS * _LIMB)


def _after(step: Array, values: Array) -> Array:
    """Values [m] of a column as its steps [1, 3] leave them."""
    found = np.empty(len(values))
    for begin, end, tile in tiles([values], np.arange(len(values)), step, np.zeros(1), Order(step)):
        found[begin:end] = tile[0]
    return found


def _inverse(width: float) -> float:
    """1 / width; 1 where the values do not vary, or by so little (1e-308) that this is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < math.inf else 1.0
