"""Exact medians of columns whose rows lie in parts: one pass where a sample says well where to look, else four more.

A sample of the training rows gives two values that the middle lies between but for bad luck. One pass counts what is
below them and keeps what is between; the ranks of the two middle values then lie there or they do not, which is known.
Where they do not (parts unlike those that were sampled), or too much lies between, digits are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.prep.fit.dense_kernels import DIGITS, bracketed, count_digits, values_of
from stoker.prep.fit.value_counts import Counters

__all__ = ["Brackets", "by_digits", "middle_of_counts", "select_rank"]

Array = npt.NDArray[Any]
Raw = Sequence[Array]  # D columns [n]
_SAMPLE = 2**16  # rows that are looked at first
_PARTS = 256  # parts at most that they come from, as each may have to be read from a disk
_MARGIN = 2.0  # roots of the sample's size: a rank in a sample of m is off by half a root of m, one in 16,000 by more
_MOST = 2**23  # values that are kept at most, of all columns
_BELOW, _LOW, _HIGH, _PRESENT = range(4)


class Brackets:
    """Where the medians of some columns lie, narrowed down by a sample and then a pass over all training rows.

    Args:
        columns: [K] which.
        sample: rows to look at first, at most about.
        most: values between the two that are kept, of all columns; where they are more, the pass gives no median.
    """

    def __init__(self, columns: Array, *, sample: int = _SAMPLE, most: int = _MOST) -> None:
        self._columns, self._sample, self._most = columns, sample, most // max(len(columns), 1)
        self._ends = np.zeros((len(columns), 2))
        self.guesses = np.zeros(len(columns))
        self._counts = np.zeros((len(columns), 4), np.int64)
        self._between: list[list[Array]] = [[] for _ in columns]
        self._kept = np.zeros(len(columns), np.int64)

    def guess(self, parts: Sequence[Any], over: Callable[..., Iterator[Any]]) -> None:
        """Look at some rows of some of the parts, spread over all of them."""
        chosen = [parts[at] for at in np.unique(np.linspace(0, len(parts) - 1, min(len(parts), _PARTS)).astype(int))]
        each = -(-self._sample // max(len(chosen), 1))

        def look(raw: Raw, rows: Array) -> list[Array]:
            if len(rows) > each:
                # Not at equal distances, with which something in the log may be in step.
                strata = np.arange(each) * len(rows) // each
                widths = np.diff(np.append(strata, len(rows)))
                rows = rows[strata + np.random.default_rng(len(rows)).integers(0, widths)]
            return [values_of(raw[c][rows]) for c in self._columns]

        seen = list(over(look, chosen))
        for k in range(len(self._columns)):
            values = np.concatenate([some[k] for some in seen]) if seen else np.empty(0)
            values = values[~np.isnan(values)] + 0.0  # zeros of either sign are one value
            if not len(values):
                continue
            middle, margin = (len(values) - 1) // 2, int(_MARGIN * len(values) ** 0.5) + 1
            low, high = max(middle - margin, 0), min(middle + margin, len(values) - 1)
            sorted_ = np.partition(values, (low, middle, high))
            self._ends[k], self.guesses[k] = (sorted_[low], sorted_[high]), sorted_[middle]

    def look(self, raw: Raw, rows: Array) -> tuple[Array, list[Array]]:
        """What a part has below, at and between the two values of each column. To be given to :meth:`add`."""
        counts, held = np.zeros((len(self._columns), 4), np.int64), np.empty(len(rows))
        between = []
        for k, c in enumerate(self._columns):
            found = bracketed(raw[c], rows, self._ends[k, 0], self._ends[k, 1], counts[k], held)
            between.append(held[:found].copy())
        return counts, between

    def add(self, found: tuple[Array, list[Array]]) -> None:
        """Add what a part has."""
        self._counts += found[0]
        for k, values in enumerate(found[1]):
            self._kept[k] += len(values)
            if self._kept[k] <= self._most:
                self._between[k].append(values)
            else:
                self._between[k].clear()

    @property
    def present(self) -> Array:
        """[K] values that are there."""
        return self._counts[:, _PRESENT]

    def medians(self) -> list[float | None]:
        """The median of each column, 0 where it has no value; None: it lies elsewhere."""
        return [self._median(k) for k in range(len(self._columns))]

    def _median(self, k: int) -> float | None:
        below, low, high, present = self._counts[k].tolist()
        if not present:
            return 0.0
        between = int(self._kept[k])
        values = np.concatenate(self._between[k]) if self._between[k] else np.empty(0)
        middles = []
        for rank in ((present - 1) // 2, present // 2):
            place = rank - below
            if 0 <= place < low:
                middles.append(float(self._ends[k, 0]))
            elif low <= place < low + between and between <= self._most:
                middles.append(float(np.partition(values, place - low)[place - low]))
            elif low + between <= place < low + between + high:
                middles.append(float(self._ends[k, 1]))
            else:
                return None
        return _mean_of(np.array([middles]))[0]


def _mean_of(middles: Array) -> list[float]:
    """The mean of the two middle values [K, 2] of each column."""
    with np.errstate(over="ignore"):
        means = middles.mean(axis=1)
    # Halves of large values first: their sum may be out of range. Zeros of either sign are one value.
    found: list[float] = (np.where(np.isinf(means), (middles / 2).sum(axis=1), means) + 0.0).tolist()
    return found


def middle_of_counts(values: Array, counts: Array) -> float:
    """The median of ``values`` [m], rising, of which each is there so often; 0 of none."""
    sums = np.cumsum(counts)
    if not len(sums):
        return 0.0
    ranks = ((sums[-1] - 1) // 2, sums[-1] // 2)
    return _mean_of(values[np.searchsorted(sums, ranks, side="right")][None])[0]


def by_digits(columns: Array, over: Callable[[Callable[[Raw, Array], Any]], Iterator[Any]]) -> list[float]:
    """The medians of some columns [K] digit by digit, in four passes and 128 Ki counters a column.

    ``over`` calls a function with the raw columns and the training rows of every part.
    """
    prefixes = np.zeros((len(columns), 2), np.uint64)
    ranks = np.zeros((len(columns), 2), np.int64)
    counts = np.zeros(len(columns), np.int64)
    for shift in (48, 32, 16, 0):
        counters = Counters((len(columns), 2, DIGITS))

        def look(raw: Raw, rows: Array, shift: int = shift, counters: Counters = counters) -> None:
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
    middles = np.where(counts[:, None] > 0, np.ascontiguousarray(bits).view(np.float64), 0.0)
    return _mean_of(middles)


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
