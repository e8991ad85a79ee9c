"""Statistics of dense columns over the training rows: zscore, minmax, and fills by mean and median.

They are a function of the training values alone: parts, their order, threads and file formats do not change a bit.
Sums are exact: each value is cut into three whole numbers of 26 bits, relative to the largest value of its column, and
the sums of these are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.base.ordered import ordered_map
from stoker.prep.fit.ranks import median, ordered_int
from stoker.prep.fit.transforms import DenseFit, stepped, values_of
from stoker.prep.schema import FITTED_TRANSFORMS, DenseColumn

__all__ = ["fit_dense"]

Array = npt.NDArray[Any]
P = TypeVar("P")
R = TypeVar("R")
RowsOf = Callable[[P, Callable[[Sequence[Array], Array], R]], R]  # calls with raw columns [n] and training rows [m]
Passes = Callable[[Callable[[Array], Any]], Iterable[Any]]  # a function of the stored training values of a part

_LIMB = 26  # bits of each whole number that a value is cut into
_LIMBS = 3


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on the training rows, one column after the other.

    A column takes one pass for its range; a fill by mean one more, by median four or eight; ``zscore`` two. Values must
    be finite.

    Args:
        columns: D of them.
        parts: those that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: parts that are read at a time.
    """

    def fit(index: int, column: DenseColumn) -> DenseFit:
        def passes(look: Callable[[Array], Any]) -> Iterable[Any]:
            return ordered_map(
                lambda part: rows_of(part, lambda raw, rows: look(raw[index][rows])), parts, threads
            )  # fmt: skip

        return _fit(column, passes) if column.fitted else DenseFit.of(column)

    return [fit(index, column) for index, column in enumerate(columns)]


def _fit(column: DenseColumn, passes: Passes) -> DenseFit:
    ranges = np.array(list(passes(_range))).reshape(-1, 4)
    low, high = ranges[:, 0].min(initial=np.inf), ranges[:, 1].max(initial=-np.inf)
    present, missing = (int(total) for total in ranges[:, 2:].sum(axis=0))
    if not isinstance(column.fill, str):
        fill = float(column.fill)
    elif not present:
        fill = 0.0
    elif column.fill == "mean":
        fill = float(_sum(passes, lambda values: np.nan_to_num(values, copy=False), _power(max(-low, high))) / present)
    else:
        fill = median(lambda: passes(_keys), present)
    kind = column.transforms[-1] if column.transforms else ""
    # The steps keep the order of values.
    ends = [*([low, high] if present else []), *([fill] if missing else [])]
    ends = stepped(column, np.array(ends, np.float64), fill).tolist()
    if kind not in FITTED_TRANSFORMS or not ends:
        return DenseFit(fill=fill)
    if kind == "minmax":
        least = min(ends) + 0.0
        return DenseFit(fill=fill, shift=least, scale=_inverse(max(ends) - least))
    exact = _sum(passes, lambda values: stepped(column, values, fill), _power(max(map(abs, ends)))) / (
        present + missing
    )
    mean = float(exact)
    power = _power(max(abs(end - mean) for end in ends))

    def squares(values: Array) -> Array:
        """Return the squared differences from the mean, in units of 4**power."""
        return np.square(_scaled(stepped(column, values, fill) - mean, -power))

    # What the mean lacks of the exact one is corrected at the end.
    variance = _sum(passes, squares, 0) / (present + missing) - ((exact - Fraction(mean)) / Fraction(2) ** power) ** 2
    deviation = math.ldexp(math.sqrt(max(variance, Fraction())), power)
    return DenseFit(fill=fill, shift=mean, scale=_inverse(deviation))


def _range(column: Array) -> tuple[float, float, int, int]:
    """Return the least and the greatest training value of a part, and how many are present and missing."""
    values = values_of(column) + 0.0  # zeros of either sign are one value
    missing = int(np.isnan(values).sum())
    low, high = np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)
    return float(low), float(high), len(values) - missing, missing


def _keys(column: Array) -> Array:
    values = values_of(column)
    return ordered_int(values[~np.isnan(values)])


def _sum(passes: Passes, change: Callable[[Array], Array], exponent: int) -> Fraction:
    """Return the sum of what ``change`` makes of the training values, all below 2**exponent, to 78 bits of that."""

    def limbs(column: Array) -> list[int]:
        counts = None
        if column.dtype.kind == "u":  # few different values: each is changed once
            counts = np.bincount(column)
            column = np.flatnonzero(counts).astype(column.dtype)
            counts = counts[column]
        rest, sums = _scaled(change(values_of(column)), _LIMB - exponent), []
        for _ in range(_LIMBS):
            whole = np.rint(rest)
            # Whole numbers far below 2**53, or 2**63: exact.
            sums.append(int(whole.sum()) if counts is None else int(whole.astype(np.int64) @ counts))
            rest -= whole
            rest *= 2.0**_LIMB
        return sums

    whole = 0
    for limb in np.array(list(passes(limbs)), object).sum(axis=0):
        whole = (whole << _LIMB) + limb
    return whole * Fraction(2) ** (exponent - _LIMBS * _LIMB)


def _power(bound: float) -> int:
    """Return the exponent of the least power of two that is above ``bound``."""
    return math.frexp(bound)[1]


def _scaled(values: Array, power: int) -> Array:
    """Return the values times 2**power, exactly."""
    return values * 2.0**power if abs(power) < 1000 else np.ldexp(values, power)


def _inverse(width: float) -> float:
    """Return 1 / width; 1 where the values do not vary, or by so little (1e-308) that this is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < math.inf else 1.0
