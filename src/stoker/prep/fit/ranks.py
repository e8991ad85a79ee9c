"""Values of a given rank among many that are read part by part: medians, and the cuts of a split by time.

Numbers are compared as 64 bits whose unsigned order is theirs. Four passes find 16 bits each, with 65,536 counters:
exact, for all values and parts in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["median", "ordered_floats", "ordered_int", "select_rank"]

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]
_DIGIT = 16  # bits
_SHIFTS = (48, 32, 16, 0)
_SIGN = np.uint64(2**63)


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


def select_rank(passes: Callable[[], Iterable[Keys]], rank: int) -> int:
    """Return the value of ``rank`` (from 0) among all int64 values that ``passes()`` yields, each of four times."""
    prefix = 0
    for shift in _SHIFTS:
        bins = np.zeros(2**_DIGIT, np.int64)
        for values in passes():
            keys = values.view(np.uint64) ^ _SIGN
            if shift < _SHIFTS[0]:
                keys = keys[(keys >> np.uint64(shift + _DIGIT)) == np.uint64(prefix)]
            digits = (keys >> np.uint64(shift)) & np.uint64(2**_DIGIT - 1)
            bins += np.bincount(digits.astype(np.int64), minlength=2**_DIGIT)
        sums = np.cumsum(bins)
        digit = int(np.searchsorted(sums, rank, side="right"))
        rank -= int(sums[digit - 1]) if digit else 0
        prefix = prefix << _DIGIT | digit
    return int(np.uint64(prefix ^ 2**63).astype(np.int64))


def median(passes: Callable[[], Iterable[Keys]], count: int) -> float:
    """Return the median of ``count`` float64 values, the mean of the two middle ones; 0 if there are none.

    Args:
        passes: yields the values of every part as :func:`ordered_int` gives them, each of four or eight times.
        count: of all values.
    """
    if not count:
        return 0.0
    ranks = {(count - 1) // 2, count // 2}
    keys = np.array([select_rank(passes, rank) for rank in sorted(ranks)])
    low, high = float(ordered_floats(keys)[0]), float(ordered_floats(keys)[-1])
    # Half of each where their sum is out of range. Zeros of either sign are one value.
    return (low + high) / 2 + 0.0 if abs(low + high) < np.inf else low / 2 + high / 2
