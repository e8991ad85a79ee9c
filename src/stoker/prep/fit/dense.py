"""Dense columns: how values are stored, what is fitted on training rows, and what the model sees.

A stored column has the narrowest type that holds all its values: uint8 (255 is missing), uint16 (65535 is missing),
float32 or float64 (NaN is missing). The transforms are those of the public DLRM scripts ("log1p":
log(max(x, 0) + 1)) and of NVTabular ("zscore").

The statistics (zscore, minmax, fills by mean and median) depend on the training values alone: parts, their order,
threads and file formats do not change a bit. Sums are exact: each value is cut into three whole numbers of 26 bits,
relative to the largest value of its column, and the sums of these are exact in any order. Medians, and the cuts of a
split by time, are found by rank: four passes find 16 bits each of the 64 bits of a value, with 65,536 counters.
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

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]
P = TypeVar("P")
R = TypeVar("R")
RowsOf = Callable[[P, Callable[[Sequence[Array], Array], R]], R]  # calls with raw columns [n] and training rows [m]
Counts = npt.NDArray[np.int64] | None  # how often each value occurs; None: once
Passes = Callable[[Callable[[Array, Counts], Any]], Iterable[Any]]  # calls with float64 training values of a part

TYPES = (np.uint8, np.uint16, np.float32)  # tried in this order before float64
BLOCK = 2**12  # rows processed at a time, so that temporary arrays and output rows remain in cache
_LIMB = 26  # bits of each of the whole numbers that make up a value
_LIMBS = 3
_DIGIT = 16  # bits that a pass finds
_SHIFTS = (48, 32, 16, 0)


@dataclass(frozen=True, kw_only=True)
class DenseFit:
    """What was fitted for one column: ``fill`` for missing values; the last step is (x - shift) * scale."""

    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, column: DenseColumn) -> DenseFit:
        """Return the fit of a column that needs no training rows."""
        return cls(fill=float(column.fill))


def blocks(count: int, rows: Array | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the start and the selection of each block of rows, from ``rows`` [count] or from all rows."""
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
    """Return numbers [n] in the narrowest type that holds all of them."""
    values = column.astype(np.float64, copy=False)
    for dtype in TYPES:
        # If a type does not hold a column, the first block mostly shows it.
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
    # Compare bits: -0.0 is not a whole number.
    same = values_of(column).view(np.int64) == values.view(np.int64)
    return column if (same | missing).all() else None


def _fill_clip_log(column: DenseColumn, values: Array, fill: float) -> Array:
    """Fill, clip and take logarithms of float64 values [n] in place, NaN where missing; return them."""
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
    """Return the model's dense values [m, D'] of rows of the ``raw`` columns [n], with flags of missing values.

    Args:
        columns: the D columns.
        raw: the D stored columns, of a type that :func:`compact` returns.
        fit: the fit of each column; required if a column is fitted.
        rows: numbers of the m rows; None: all.
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
            values = _fill_clip_log(column, values, one.fill)
            with np.errstate(over="ignore"):  # values beyond float32 become infinite
                block[:, place] = (values - one.shift) * one.scale
    return out


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on the training rows, one column after the other.

    A column that all parts store in 8 or 16 bits takes one pass, which counts its values. Other columns take one more
    pass for the range, one for a fill by mean, four or eight for a median, and two for ``zscore``. Values must be
    finite.

    Args:
        columns: the D columns.
        parts: the parts that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: how many parts are read at a time.
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
    """Return [65536]: how often each whole number occurs and, last, how many are missing. None for other types."""
    if column.dtype.kind != "u":
        return None
    counts = np.bincount(column, minlength=2**16)
    if column.dtype == np.uint8:  # 255 is missing
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
    # Fill, clip and logarithm keep the order of values.
    ends = [*([low, high] if present else []), *([fill] if missing else [])]
    ends = _fill_clip_log(column, np.array(ends, np.float64), fill).tolist()
    if kind not in FITTED_TRANSFORMS or not ends:
        return DenseFit(fill=fill)
    if kind == "minmax":
        least = min(ends) + 0.0
        return DenseFit(fill=fill, shift=least, scale=_inverse(max(ends) - least))
    count = present + missing
    exact = _sum(passes, lambda values: _fill_clip_log(column, values, fill), _power(max(map(abs, ends)))) / count
    mean = float(exact)
    power = _power(max(abs(end - mean) for end in ends))

    def squares(values: Array) -> Array:
        """Return the squared differences from the mean, in units of 4**power."""
        return np.square(np.ldexp(_fill_clip_log(column, values, fill) - mean, -power))

    # Correct for the rounding of the mean.
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
    """Return the sum of the changed training values, all below 2**exponent, with 78 bits of precision."""

    def limbs(values: Array, counts: Counts) -> list[int]:
        rest, sums = np.ldexp(change(values.copy()), _LIMB - exponent), []
        for _ in range(_LIMBS):
            whole = np.rint(rest)
            # Exact: whole numbers far below 2**53, or 2**63.
            sums.append(int(whole.sum() if counts is None else whole.astype(np.int64) @ counts))
            rest -= whole
            rest *= 2.0**_LIMB
        return sums

    whole = 0
    for limb in np.array(list(passes(limbs)), object).sum(axis=0):
        whole = (whole << _LIMB) + limb
    return whole * Fraction(2) ** (exponent - _LIMBS * _LIMB)


def _power(bound: float) -> int:
    """Return the exponent of the least power of two above ``bound``."""
    return math.frexp(bound)[1]


def _inverse(width: float) -> float:
    """Return 1 / width, or 1 if the values do not vary or the quotient is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < math.inf else 1.0


def ordered_int(values: Array) -> Keys:
    """Return int64 values unchanged, and float64 values as int64 of the same order; -0.0 equals 0.0."""
    if values.dtype != np.float64:
        return values.astype(np.int64)
    return _flip_negative((values + 0.0).view(np.int64))


def ordered_floats(keys: Keys) -> npt.NDArray[np.float64]:
    """Return float64 values from their keys; the inverse of :func:`ordered_int`."""
    return _flip_negative(keys).view(np.float64)


def _flip_negative(bits: Keys) -> Keys:
    """Map bits of float64 to int64 of the same order, and back."""
    return np.where(bits < 0, np.int64(-(2**63)) - bits - 1, bits)


def select_rank(passes: Callable[[], Iterable[tuple[Keys, Counts]]], rank: int) -> int:
    """Return the value of ``rank`` (from 0) among all int64 values.

    ``passes`` is called four times; it yields values and how often each occurs.
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
        passes: yields the values of every part, from :func:`ordered_int`, and how often each occurs (None: once). It is
            called four or eight times.
        count: number of values.
    """
    if not count:
        return 0.0
    keys = np.array([select_rank(passes, rank) for rank in sorted({(count - 1) // 2, count // 2})])
    low, high = ordered_floats(keys)[[0, -1]].tolist()
    # Add halves if the sum overflows. Adding 0.0 turns -0.0 into 0.0.
    return float((low + high) / 2 + 0.0 if abs(low + high) < np.inf else low / 2 + high / 2)
