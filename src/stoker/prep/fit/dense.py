"""Dense columns: how their values are stored, what is fitted on training rows, and what the model sees of them.

A stored column has the narrowest type that holds all its values: uint8, where 255 is missing, uint16, where 65535 is,
or float32 or float64, where NaN is. The transforms are those of the public DLRM scripts ("log1p": log(max(x, 0) + 1))
and of NVTabular ("zscore").

The statistics (zscore, minmax, fills by mean and median) are a function of the training values alone: parts, their
order, threads and file formats do not change a bit. Sums are exact: each value is cut into three whole numbers of 26
bits, relative to the largest value of its column, and the sums of these are exact in any order. Medians, and the cuts
of a split by time, are found by rank: numbers are compared as 64 bits whose unsigned order is theirs, and four passes
find 16 bits each, with 65,536 counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.base.ordered import ordered_map
from stoker.prep.schema import FITTED_TRANSFORMS, DenseColumn

__all__ = [
    "DenseFit", "blocks", "compact", "dense_values", "fit_dense", "median", "ordered_floats", "ordered_int",
    "select_rank", "values_of",
]  # fmt: skip

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]
P = TypeVar("P")
R = TypeVar("R")
RowsOf = Callable[[P, Callable[[Sequence[Array], Array], R]], R]  # calls with raw columns [n] and training rows [m]
Counts = npt.NDArray[np.int64] | None  # how often each value occurs; None: once
Passes = Callable[[Callable[[Array, Counts], Any]], Iterable[Any]]  # calls with float64 training values of a part

TYPES = (np.uint8, np.uint16, np.float32)  # tried in this order before float64
BLOCK = 2**12  # rows that are worked on together, so that temporary arrays and rows of the output stay in cache
_LIMB = 26  # bits of each whole number that a value is cut into
_LIMBS = 3
_DIGIT = 16  # bits that a pass finds
_SHIFTS = (48, 32, 16, 0)


@dataclass(frozen=True, kw_only=True)
class DenseFit:
    """What was fitted for one column: the value of missing fields, and (x - shift) * scale as the last step."""

    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, column: DenseColumn) -> DenseFit:
        """Return the fit of a column that needs no training rows."""
        return cls(fill=float(column.fill))


def blocks(count: int, rows: Array | None = None) -> Iterator[tuple[int, Any]]:
    """Yield, block by block, the number of rows before it and what selects its rows: of ``rows`` [count], or of all."""
    for begin in range(0, count, BLOCK):
        stop = min(begin + BLOCK, count)
        yield begin, slice(begin, stop) if rows is None else rows[begin:stop]


def values_of(column: Array) -> Array:
    """Return stored values [n] as float64, NaN where missing."""
    found = column.astype(np.float64)
    if column.dtype.kind == "u":
        np.putmask(found, column == np.iinfo(column.dtype).max, np.nan)  # much faster than assigning by a mask
    return found


def compact(column: Array) -> Array:
    """Return numbers [n] in the narrowest type that holds all of them as float64."""
    values = column.astype(np.float64, copy=False)
    for dtype in TYPES:
        # Most columns that a type does not hold show it in their first block.
        if _narrowed(values[:BLOCK], dtype) is not None and (narrow := _narrowed(values, dtype)) is not None:
            return narrow
    return values


def _narrowed(values: Array, dtype: Any) -> Array | None:
    """Return float64 values [n] in another type; None if it does not hold all of them."""
    missing = np.isnan(values)
    with np.errstate(over="ignore", invalid="ignore"):
        column: Array = values.astype(dtype)
    if column.dtype.kind == "u":
        np.putmask(column, missing, np.iinfo(column.dtype).max)
    # Bits are compared: -0.0 is no whole number.
    same = values_of(column).view(np.int64) == values.view(np.int64)
    return column if (same | missing).all() else None


def _stepped(column: DenseColumn, values: Array, fill: float) -> Array:
    """Fill, clip and take the logarithms of float64 values [n], NaN where missing, in place; return them."""
    np.putmask(values, np.isnan(values), fill)
    # Not np.clip, which may change the sign of a zero.
    if column.clip_min is not None:
        np.putmask(values, values < column.clip_min, column.clip_min)
    if column.clip_max is not None:
        np.putmask(values, values > column.clip_max, column.clip_max)
    for _ in range(column.transforms.count("log1p")):
        np.maximum(values, 0.0, out=values)
        values += 1.0
        np.log(values, out=values)
    return values


def dense_values(
    columns: Sequence[DenseColumn],
    raw: Sequence[Array],
    fit: Sequence[DenseFit] | None = None,
    *,
    rows: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float32]:
    """Return [m, D'] what the model sees of rows of the ``raw`` columns [n], flags of missing values included.

    Args:
        columns: D of them.
        raw: as many, of a type that :func:`compact` gives.
        fit: of each column; needed where one is fitted.
        rows: numbers of m rows; None: all.
    """
    fits = fit if fit is not None else [DenseFit.of(column) for column in columns]
    places = np.cumsum([0, *(len(column.names) for column in columns)]).tolist()
    count = len(rows) if rows is not None else len(raw[0]) if len(raw) else 0
    out = np.empty((count, places[-1]), np.float32)
    for begin, chosen in blocks(count, rows):
        for column, given, one, place in zip(columns, raw, fits, places, strict=False):
            values = values_of(given[chosen])
            block = out[begin : begin + len(values)]
            if column.null_flag:
                block[:, place + 1] = np.isnan(values)
            values = _stepped(column, values, one.fill)
            with np.errstate(over="ignore"):  # beyond float32: infinite
                block[:, place] = (values - one.shift) * one.scale
    return out


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on the training rows, one column after the other.

    A column that all parts store in 8 or 16 bits takes one pass, which counts its values. Any other takes one more for
    its range, a fill by mean one, by median four or eight; ``zscore`` two. Values must be finite.

    Args:
        columns: D of them.
        parts: those that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: parts that are read at a time.
    """

    def fit(index: int, column: DenseColumn) -> DenseFit:
        def stored(look: Callable[[Array], Any]) -> Iterator[Any]:
            return ordered_map(lambda part: rows_of(part, lambda raw, rows: look(raw[index][rows])), parts, threads)

        total = np.zeros(2**16, np.int64)
        for counts in stored(_count):
            if counts is None:
                return _fit(column, lambda look: stored(lambda values: look(values_of(values), None)))
            total += counts
        known = np.flatnonzero(total)
        return _fit(column, lambda look: [look(values_of(known.astype(np.uint16)), total[known])])

    return [fit(index, column) if column.fitted else DenseFit.of(column) for index, column in enumerate(columns)]


def _count(column: Array) -> Array | None:
    """Return [65536] how often each whole number occurs and, last, how many are missing; None for other types."""
    if column.dtype.kind != "u":
        return None
    counts = np.bincount(column, minlength=2**16)
    if column.dtype == np.uint8:  # whose greatest value stands for a missing one
        counts[-1], counts[255] = counts[255], 0
    return counts


def _fit(column: DenseColumn, passes: Passes) -> DenseFit:
    ranges = np.array(list(passes(_range))).reshape(-1, 4)
    low, high = ranges[:, 0].min(initial=np.inf), ranges[:, 1].max(initial=-np.inf)
    present, missing = (int(total) for total in ranges[:, 2:].sum(axis=0))
    if not isinstance(column.fill, str):
        fill = float(column.fill)
    elif not present:
        fill = 0.0
    elif column.fill == "mean":
        fill = float(_sum(passes, np.nan_to_num, _power(max(-low, high))) / present)
    else:
        fill = median(lambda: passes(_keys), present)
    kind = column.transforms[-1] if column.transforms else ""
    # The steps keep the order of values.
    ends = [*([low, high] if present else []), *([fill] if missing else [])]
    ends = _stepped(column, np.array(ends, np.float64), fill).tolist()
    if kind not in FITTED_TRANSFORMS or not ends:
        return DenseFit(fill=fill)
    if kind == "minmax":
        least = min(ends) + 0.0
        return DenseFit(fill=fill, shift=least, scale=_inverse(max(ends) - least))
    count = present + missing
    exact = _sum(passes, lambda values: _stepped(column, values, fill), _power(max(map(abs, ends)))) / count
    mean = float(exact)
    power = _power(max(abs(end - mean) for end in ends))

    def squares(values: Array) -> Array:
        """Return the squared differences from the mean, in units of 4**power."""
        return np.square(np.ldexp(_stepped(column, values, fill) - mean, -power))

    # What the mean lacks of the exact one is corrected at the end.
    variance = _sum(passes, squares, 0) / count - ((exact - Fraction(mean)) / Fraction(2) ** power) ** 2
    deviation = math.ldexp(math.sqrt(max(variance, Fraction())), power)
    return DenseFit(fill=fill, shift=mean, scale=_inverse(deviation))


def _range(values: Array, counts: Counts) -> tuple[float, float, int, int]:
    """Return the least and the greatest training value of a part, and how many are present and missing."""
    values = values + 0.0  # zeros of either sign are one value
    empty = np.isnan(values)
    missing = int(empty.sum() if counts is None else counts[empty].sum())
    low, high = np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)
    return float(low), float(high), (len(values) if counts is None else int(counts.sum())) - missing, missing


def _keys(values: Array, counts: Counts) -> tuple[Keys, Counts]:
    present = ~np.isnan(values)
    return ordered_int(values[present]), None if counts is None else counts[present]


def _sum(passes: Passes, change: Callable[[Array], Array], exponent: int) -> Fraction:
    """Return the sum of what ``change`` makes of the training values, all below 2**exponent, to 78 bits of that."""

    def limbs(values: Array, counts: Counts) -> list[int]:
        rest, sums = np.ldexp(change(values.copy()), _LIMB - exponent), []
        for _ in range(_LIMBS):
            whole = np.rint(rest)
            # Whole numbers far below 2**53, or 2**63: exact.
            sums.append(int(whole.sum() if counts is None else whole.astype(np.int64) @ counts))
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


def _inverse(width: float) -> float:
    """Return 1 / width; 1 where the values do not vary, or by so little (1e-308) that this is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < math.inf else 1.0


def ordered_int(values: Array) -> Keys:
    """Return int64 as they are, and float64 as int64 of the same order; zeros of either sign are equal."""
    if values.dtype != np.float64:
        return values.astype(np.int64)
    return _turned((values + 0.0).view(np.int64))


def ordered_floats(keys: Keys) -> npt.NDArray[np.float64]:
    """Return the float64 values from which :func:`ordered_int` made the keys."""
    return _turned(keys).view(np.float64)


def _turned(bits: Keys) -> Keys:
    """Map bits of float64 to int64 of the same order, and back."""
    return np.where(bits < 0, np.int64(-(2**63)) - bits - 1, bits)


def select_rank(passes: Callable[[], Iterable[tuple[Keys, Counts]]], rank: int) -> int:
    """Return the value of ``rank`` (from 0) among all int64 values that ``passes()`` yields, and how often each occurs.

    ``passes`` is called four times.
    """
    prefix = 0
    for shift in _SHIFTS:
        bins = np.zeros(2**_DIGIT, np.int64)
        for values, counts in passes():
            keys = values.view(np.uint64) ^ np.uint64(2**63)
            if shift < _SHIFTS[0]:
                alike = (keys >> np.uint64(shift + _DIGIT)) == np.uint64(prefix)
                keys, counts = keys[alike], None if counts is None else counts[alike]
            digits = ((keys >> np.uint64(shift)) & np.uint64(2**_DIGIT - 1)).astype(np.int64)
            bins += np.bincount(digits, counts, 2**_DIGIT).astype(np.int64)
        sums = np.cumsum(bins)
        digit = int(np.searchsorted(sums, rank, side="right"))
        rank -= int(sums[digit - 1]) if digit else 0
        prefix = prefix << _DIGIT | digit
    return int(np.uint64(prefix ^ 2**63).astype(np.int64))


def median(passes: Callable[[], Iterable[tuple[Keys, Counts]]], count: int) -> float:
    """Return the median of ``count`` float64 values, the mean of the two middle ones; 0 if there are none.

    Args:
        passes: yields the values of every part as :func:`ordered_int` gives them, and how often each occurs (None:
            once); called four or eight times.
        count: of all values.
    """
    if not count:
        return 0.0
    keys = np.array([select_rank(passes, rank) for rank in sorted({(count - 1) // 2, count // 2})])
    low, high = ordered_floats(keys)[[0, -1]].tolist()
    # Half of each where their sum is out of range. Zeros of either sign are one value.
    return float((low + high) / 2 + 0.0 if abs(low + high) < np.inf else low / 2 + high / 2)
