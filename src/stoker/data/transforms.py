"""Dense columns: fill, clip, transform; and what zscore, minmax, mean and median learn from training rows.

The rules are those of the public DLRM scripts ("log1p": log(max(x, 0) + 1)) and of NVTabular ("zscore").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.data.dense_kernels import DIGITS, apply_rows, count_digits, moments, narrowed, present_sums
from stoker.data.exact_sums import mean_and_deviation, no_values
from stoker.data.ordered import ordered_map
from stoker.data.schema import FITTED_TRANSFORMS, DenseColumn
from stoker.ops.memory import zeros

__all__ = ["DenseFit", "compact", "dense_values", "fit_dense", "select_rank"]

Array = npt.NDArray[Any]
P = TypeVar("P")
R = TypeVar("R")
Raw = Sequence[Array]  # D columns [n]
RowsOf = Callable[[P, Callable[[Raw, Array], R]], R]  # calls with the raw columns of a part and its training rows [m]


def compact(column: npt.NDArray[np.float64]) -> Array:
    """The column [n] as float32 if that holds all its values, as it does whole numbers up to 2**24; else as it is."""
    half = np.empty(len(column), np.float32)
    return half if narrowed(column, half) else column


def dense_values(
    columns: Sequence[DenseColumn],
    raw: Raw,
    fit: Sequence[DenseFit] | None = None,
    *,
    rows: npt.NDArray[np.int64] | None = None,
    out: npt.NDArray[np.float32] | None = None,
    at: int = 0,
) -> npt.NDArray[np.float32]:
    """[m, D'] as the model sees rows of the ``raw`` columns [n], flags of missing values among them.

    Args:
        columns: D of them.
        raw: as many, float64 or float32.
        fit: what columns learned; needed where one is fitted.
        rows: which rows, m; None: all.
        out, at: write to rows ``at`` and on of this array instead.
    """
    rows = np.arange(len(raw[0]) if len(raw) else 0) if rows is None else rows
    widths = [len(column.names) for column in columns]
    if out is None:
        out = np.empty((len(rows), sum(widths)), np.float32)
    found = fit if fit is not None else [DenseFit.of(column) for column in columns]
    fits = np.array([(one.fill, one.shift, one.scale) for one in found]).reshape(-1, 3)
    places = np.cumsum([0, *widths[:-1]]).astype(np.int64)
    flags = np.array([column.null_flag for column in columns], np.bool_)
    apply_rows(raw, rows, _steps(columns), fits, places, flags, out, at)
    return out


def _steps(columns: Sequence[DenseColumn]) -> Array:
    """[D, 3] least and greatest value, and how often the logarithm is taken."""
    return np.array(
        [
            (
                -np.inf if column.clip_min is None else float(column.clip_min),
                np.inf if column.clip_max is None else float(column.clip_max),
                column.transforms.count("log1p"),
            )
            for column in columns
        ]
    ).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class DenseFit:
    """What one column learned: the value of missing fields, and (x - shift) * scale as the last step."""

    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, column: DenseColumn) -> DenseFit:
        """The fit of a column that learns nothing."""
        return cls(fill=float(column.fill))


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on training rows: first the fills, then the scales of filled, clipped values.

    Args:
        columns: D of them.
        parts: those that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: parts that are looked at at a time.

    The result depends on nothing but the values of the training rows: sums over them are exact (:mod:`exact_sums`), so
    it matters neither how they are cut into parts nor in which order they come.
    """

    def over(look: Callable[[Raw, Array], R]) -> Iterator[R]:
        return ordered_map(lambda part: rows_of(part, look), parts, threads)

    fills = _fit_fills(columns, over)
    wanted = [c.transforms[-1] if c.transforms and c.transforms[-1] in FITTED_TRANSFORMS else "" for c in columns]
    if not any(wanted):
        return [DenseFit(fill=fill) for fill in fills]
    steps, given = _steps(columns), np.array(fills)
    summed, ranged = (np.array([kind == one for kind in wanted]) for one in ("zscore", "minmax"))
    sums = no_values(len(columns))
    low, high = np.full(len(columns), np.inf), np.full(len(columns), -np.inf)
    for found in over(lambda raw, rows: moments(raw, rows, steps, given, summed, ranged)):
        sums += found[0]
        low, high = np.minimum(low, found[1]), np.maximum(high, found[2])
    fitted = []
    for index, kind in enumerate(wanted):
        shift, scale = 0.0, 1.0
        if kind == "zscore":
            shift, deviation = mean_and_deviation(sums[index])
            scale = _inverse(deviation)
        elif kind == "minmax" and not low[index] > high[index]:
            shift = float(low[index]) + 0.0  # which of 0 and -0 is the least depends on their order
            scale = _inverse(float(high[index]) - shift)
        fitted.append(DenseFit(fill=fills[index], shift=shift, scale=scale))
    return fitted


def _inverse(width: float) -> float:
    """1 / width; 1 where the values do not vary, or by so little (1e-308) that this is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < np.inf else 1.0


Over = Callable[[Callable[[Raw, Array], R]], Iterator[R]]


def _fit_fills(columns: Sequence[DenseColumn], over: Over[Any]) -> list[float]:
    fills = [float(c.fill) if not isinstance(c.fill, str) else 0.0 for c in columns]
    by_mean = [index for index, column in enumerate(columns) if column.fill == "mean"]
    by_median = [index for index, column in enumerate(columns) if column.fill == "median"]
    for some, found in ((by_mean, _means), (by_median, _medians)):
        if some:
            for index, value in zip(some, found(np.array(some, np.int64), over), strict=True):
                fills[index] = value
    return fills


def _means(columns: Array, over: Over[Array]) -> list[float]:
    sums = no_values(len(columns))
    for some in over(lambda raw, rows: present_sums(raw, rows, columns)):
        sums += some
    return [mean_and_deviation(one)[0] for one in sums]


class _Counters:
    """int64 counters of ``shape``, which every thread has for itself: to clear and add them for each part took longer
    than to count."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self._local = shape, threading.local()
        self._all: list[Array] = []

    def mine(self) -> Array:
        if not hasattr(self._local, "counters"):
            self._local.counters = zeros(self._shape, np.int64)
            self._all.append(self._local.counters)
        found: Array = self._local.counters
        return found

    def sum(self) -> Array:
        return sum(self._all, zeros(self._shape, np.int64))


def _medians(columns: Array, over: Over[Any]) -> list[float]:
    """The two middle values digit by digit, in four passes and 128 Ki counters a column."""
    prefixes = np.zeros((len(columns), 2), np.uint64)
    ranks = np.zeros((len(columns), 2), np.int64)
    counts = np.zeros(len(columns), np.int64)
    for shift in (48, 32, 16, 0):
        counters = _Counters((len(columns), 2, DIGITS))

        def look(raw: Raw, rows: Array, shift: int = shift, counters: _Counters = counters) -> None:
            count_digits(raw, rows, columns, shift, prefixes, counters.mine())

        for _ in over(look):
            pass
        bins = counters.sum()
        if shift == 48:  # nothing is known yet, so both middle values are counted once
            bins[:, 1] = bins[:, 0]
            counts = bins[:, 0].sum(axis=1)
            ranks = np.stack([np.maximum(counts - 1, 0) // 2, counts // 2], axis=1)
        sums = np.cumsum(bins, axis=2)
        for k, p in np.ndindex(prefixes.shape):
            digit = int(np.searchsorted(sums[k, p], ranks[k, p], side="right")) if counts[k] else 0
            ranks[k, p] -= sums[k, p, digit - 1] if digit else 0
            prefixes[k, p] = prefixes[k, p] << np.uint64(16) | np.uint64(digit)
    sign = np.uint64(2**63)
    bits = np.where(prefixes & sign, prefixes & ~sign, ~prefixes)
    middle = np.ascontiguousarray(bits).view(np.float64).mean(axis=1)
    found: list[float] = np.where(counts > 0, middle, 0.0).tolist()
    return found


def select_rank(passes: Callable[[], Iterator[npt.NDArray[np.int64]]], rank: int) -> int:
    """The value of ``rank`` (from 0) among all int64 values, in four passes and 64 Ki counters of memory."""
    prefix = 0
    for shift in (48, 32, 16, 0):
        bins = np.zeros(DIGITS, np.int64)
        for values in passes():
            # Flipping the sign bit makes unsigned order agree with signed order.
            keys = values.view(np.uint64) ^ np.uint64(2**63)
            if shift < 48:
                keys = keys[(keys >> np.uint64(shift + 16)) == np.uint64(prefix)]
            digits = (keys >> np.uint64(shift)) & np.uint64(DIGITS - 1)
            bins += np.bincount(digits.astype(np.int64), minlength=DIGITS)
        sums = np.cumsum(bins)
        digit = int(np.searchsorted(sums, rank, side="right"))
        rank -= int(sums[digit - 1]) if digit else 0
        prefix = prefix << 16 | digit
    return int(np.uint64(prefix ^ 2**63).astype(np.int64))
