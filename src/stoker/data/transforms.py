"""Dense columns: fill, clip, transform; and what zscore, minmax, mean and median learn from training rows.

The rules are those of the public DLRM scripts ("log1p": log(max(x, 0) + 1)) and of NVTabular ("zscore").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from stoker.data.schema import FITTED_TRANSFORMS, DenseColumn

__all__ = ["DenseFit", "dense_values", "fit_dense", "raw_dense", "select_rank"]

Array = npt.NDArray[Any]
Passes = Callable[[], Iterator[npt.NDArray[np.float64]]]  # training rows [n, D] part by part, as often as needed
_jit: Any = nb.njit(nogil=True, cache=True)
_BINS = 2**16


@_jit
def _apply(values, fill, low, high, log, scale, shift, out, column):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        x = values[i]
        if np.isnan(x):
            x = fill
        x = min(max(x, low), high)
        for _ in range(log):
            x = np.log(max(x, 0.0) + 1.0)
        out[i, column] = (x - shift) * scale


def raw_dense(values: Sequence[Array], rows: int) -> npt.NDArray[np.float64]:
    """[n, D] as read."""
    return np.ascontiguousarray(np.stack(values, axis=1)) if values else np.empty((rows, 0))


def dense_values(
    columns: Sequence[DenseColumn], values: Sequence[Array], rows: int, fit: Sequence[DenseFit] | None = None
) -> npt.NDArray[np.float32]:
    """[n, D] as the model sees them, flags of missing values among them. ``fit`` is needed where a column is fitted."""
    out = np.empty((rows, sum(len(column.names) for column in columns)), np.float32)
    at = 0
    for index, (column, raw) in enumerate(zip(columns, values, strict=True)):
        fitted = fit[index] if fit is not None else DenseFit.of(column)
        low, high, log = _steps(column)
        _apply(raw, fitted.fill, low, high, log, fitted.scale, fitted.shift, out, at)
        if column.null_flag:
            out[:, at + 1] = np.isnan(raw)
        at += len(column.names)
    return out


def _steps(column: DenseColumn) -> tuple[float, float, int]:
    low = -np.inf if column.clip_min is None else float(column.clip_min)
    high = np.inf if column.clip_max is None else float(column.clip_max)
    return low, high, column.transforms.count("log1p")


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


def fit_dense(columns: Sequence[DenseColumn], passes: Passes) -> list[DenseFit]:
    """Fit every column on training rows: first the fills, then the scales of filled, clipped values."""
    fills = _fit_fills(columns, passes)
    plain = [DenseFit(fill=fill) for fill in fills]
    wanted = [c.transforms[-1] if c.transforms and c.transforms[-1] in FITTED_TRANSFORMS else "" for c in columns]
    if not any(wanted):
        return plain
    total = 0
    mean, squares = np.zeros(len(columns)), np.zeros(len(columns))
    low, high = np.full(len(columns), np.inf), np.full(len(columns), -np.inf)
    for part in passes():
        if not len(part):
            continue
        x = np.empty(part.shape)
        for index, column in enumerate(columns):
            _apply(part[:, index], fills[index], *_steps(column), 1.0, 0.0, x, index)
        low, high = np.minimum(low, x.min(axis=0)), np.maximum(high, x.max(axis=0))
        # Chan et al. 1979: exact merging of means and sums of squared differences, without cancellation.
        part_mean = x.mean(axis=0)
        part_squares = ((x - part_mean) ** 2).sum(axis=0)
        delta, count = part_mean - mean, len(part)
        mean = mean + delta * (count / (total + count))
        squares = squares + part_squares + delta**2 * (total * count / (total + count))
        total += count
    fitted = []
    for index, kind in enumerate(wanted):
        shift, scale = 0.0, 1.0
        if total and kind == "zscore":
            deviation = float(np.sqrt(squares[index] / total))
            shift, scale = float(mean[index]), 1.0 / deviation if deviation > 0 else 1.0
        elif total and kind == "minmax":
            width = float(high[index] - low[index])
            shift, scale = float(low[index]), 1.0 / width if width > 0 else 1.0
        fitted.append(DenseFit(fill=fills[index], shift=shift, scale=scale))
    return fitted


def _fit_fills(columns: Sequence[DenseColumn], passes: Passes) -> list[float]:
    fills = [float(c.fill) if not isinstance(c.fill, str) else 0.0 for c in columns]
    learned = [index for index, column in enumerate(columns) if isinstance(column.fill, str)]
    if not learned:
        return fills
    count, mean = np.zeros(len(columns), np.int64), np.zeros(len(columns))
    for part in passes():
        for index in learned:
            present = part[~np.isnan(part[:, index]), index]
            if present.size:
                count[index] += present.size
                mean[index] += (present.mean() - mean[index]) * (present.size / count[index])
    for index in learned:
        if columns[index].fill == "mean":
            fills[index] = float(mean[index])
        elif count[index]:
            fills[index] = _median(index, int(count[index]), passes)
    return fills


def _median(index: int, count: int, passes: Passes) -> float:
    def values() -> Iterator[npt.NDArray[np.int64]]:
        from stoker.data.layout import ordered_int

        for part in passes():
            column = part[:, index]
            yield ordered_int(column[~np.isnan(column)])

    middle = [_float_of(select_rank(values, rank)) for rank in {(count - 1) // 2, count // 2}]
    return float(np.mean(middle))


def _float_of(key: int) -> float:
    bits = np.int64(key) if key >= 0 else np.int64(-(2**63) - key - 1)
    return float(np.array(bits, np.int64).view(np.float64))


def select_rank(passes: Callable[[], Iterator[npt.NDArray[np.int64]]], rank: int) -> int:
    """The value of ``rank`` (from 0) among all int64 values, in four passes and 64 Ki counters of memory."""
    prefix = 0
    for shift in (48, 32, 16, 0):
        bins = np.zeros(_BINS, np.int64)
        for values in passes():
            # Flipping the sign bit makes unsigned order agree with signed order.
            keys = values.view(np.uint64) ^ np.uint64(2**63)
            if shift < 48:
                keys = keys[(keys >> np.uint64(shift + 16)) == np.uint64(prefix)]
            digits = (keys >> np.uint64(shift)) & np.uint64(_BINS - 1)
            bins += np.bincount(digits.astype(np.int64), minlength=_BINS)
        sums = np.cumsum(bins)
        digit = int(np.searchsorted(sums, rank, side="right"))
        rank -= int(sums[digit - 1]) if digit else 0
        prefix = prefix << 16 | digit
    return int(np.uint64(prefix ^ 2**63).astype(np.int64))
