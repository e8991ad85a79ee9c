"""Values of a given rank among many that are read part by part: medians, and the cuts of a split by time.

Numbers are looked at as 64 bits whose unsigned order is theirs. Four passes find 16 bits each, with 65,536 counters for
each column and rank: exact, whatever the values, the parts and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["medians", "select_rank"]

Array = npt.NDArray[Any]
_DIGIT = 16  # bits
_SHIFTS = (48, 32, 16, 0)
_SIGN = np.uint64(2**63)


def _count(keys: Array, shift: int, prefix: int) -> Array:
    """[2**16] how many of the ``keys`` that begin with ``prefix`` have each value of the digit behind it."""
    if shift < _SHIFTS[0]:
        keys = keys[(keys >> np.uint64(shift + _DIGIT)) == np.uint64(prefix)]
    digits = (keys >> np.uint64(shift)) & np.uint64(2**_DIGIT - 1)
    return np.bincount(digits.astype(np.int64), minlength=2**_DIGIT)


def _found(bins: Array, rank: int) -> tuple[int, int]:
    """The digit of the key of ``rank``, and its rank among the keys that have it."""
    sums = np.cumsum(bins)
    digit = int(np.searchsorted(sums, rank, side="right"))
    return digit, rank - (int(sums[digit - 1]) if digit else 0)


def select_rank(passes: Callable[[], Iterator[npt.NDArray[np.int64]]], rank: int) -> int:
    """Return the value of ``rank`` (from 0) among all int64 values that ``passes()`` yields, each of four times."""
    prefix = 0
    for shift in _SHIFTS:
        bins = np.zeros(2**_DIGIT, np.int64)
        for values in passes():
            bins += _count(values.view(np.uint64) ^ _SIGN, shift, prefix)
        digit, rank = _found(bins, rank)
        prefix = prefix << _DIGIT | digit
    return int(np.uint64(prefix ^ 2**63).astype(np.int64))


def medians(columns: int, passes: Callable[[Callable[[list[Array]], Any]], Iterator[Any]]) -> list[float]:
    """Return the median of each column of float64 values, the mean of the two middle ones; 0 where all are missing.

    Args:
        columns: K.
        passes: calls a function with the K columns of every part, NaN where missing, and yields what it returns.
    """
    prefixes, ranks = [[0, 0] for _ in range(columns)], [[0, 0] for _ in range(columns)]
    counts = [0] * columns
    for shift in _SHIFTS:

        def look(values: list[Array], shift: int = shift) -> Array:
            return np.stack([
                np.stack([_count(keys, shift, prefix) for prefix in dict.fromkeys(mine)])
                if len(set(mine)) == 2 else np.repeat(_count(keys, shift, mine[0])[None], 2, axis=0)
                for keys, mine in zip(map(_keys, values), prefixes, strict=True)
            ])  # fmt: skip

        bins = np.zeros((columns, 2, 2**_DIGIT), np.int64)
        for found in passes(look):
            bins += found
        for k in range(columns):
            if shift == _SHIFTS[0]:
                counts[k] = int(bins[k, 0].sum())
                ranks[k] = [max(counts[k] - 1, 0) // 2, counts[k] // 2]
            for place in (0, 1):
                digit, ranks[k][place] = _found(bins[k, place], ranks[k][place]) if counts[k] else (0, 0)
                prefixes[k][place] = prefixes[k][place] << _DIGIT | digit
    return [_middle(_values(prefixes[k])) if counts[k] else 0.0 for k in range(columns)]


def _keys(values: Array) -> Array:
    """The values that are present as uint64 of the same order; zeros of either sign are one."""
    bits = (values[~np.isnan(values)] + 0.0).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _values(keys: list[int]) -> Array:
    found = np.array(keys, np.uint64)
    return np.where(found & _SIGN, found & ~_SIGN, ~found).view(np.float64)


def _middle(pair: Array) -> float:
    with np.errstate(over="ignore"):
        mean = float(pair.mean())
    # Halves of large values first: their sum may be out of range. Zeros of either sign are one value.
    return (float((pair / 2).sum()) if np.isinf(mean) else mean) + 0.0
