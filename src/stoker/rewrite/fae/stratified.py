"""How many rows of a table have at least so many accesses, from a sample and the order of the ids.

Ids follow the count, so counts can only fall along the ids. Strata are ranges of neighbouring ids; the mean of their
sampled accesses, made to fall (isotonic regression, by the pool-adjacent-violators algorithm: Ayer et al. 1955), is the
curve of accesses, and the number of hot rows is where it crosses the cut-off. Means of many rows scatter little where
counts of single ones do much. Such a crossing still wanders where the curve is flat; a power law between the means of
the quarter before a row and the quarter behind it halves that (:func:`_smoothed`). Counts under 5 fall in steps too
wide for it.

The interval inverts two tests. If h rows are hot, those before h have at least c accesses each: a window before h
whose sampled accesses fall short of that by more than Equation 4's half-width refutes it. If fewer than h are, those
from h on have at most c - 1: refuted likewise. The deviation s is that between the n groups of sampled inputs, of which
the population has N = n / x.

Legend: N rows of a table, J strata, G = n groups, R steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.rewrite.fae.row_estimates import Steps, falling, follow
from stoker.rewrite.fae.sampling import strata_edges
from stoker.rewrite.fae.student import half_width, t_quantile

__all__ = ["StratifiedRows"]

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_QUARTER = 1.25
_STEPS_BELOW = 4.5  # accesses: so few fall in steps; between two whole numbers, where cut-offs are compared
_POINTS = 1024
_SURE = 3.0  # deviations by which rows differ from a cut-off for sure


class StratifiedRows(Steps):
    """From sampled accesses by group and stratum [G, J].

    Args:
        rows: N.
        counts: of the strata of :func:`stoker.rewrite.fae.sampling.strata_edges`.
        share: x, of the inputs that were sampled.
        confidence: of the interval.
    """

    def __init__(self, rows: int, counts: Int64, *, share: float, confidence: float) -> None:
        edges = strata_edges(rows)
        counts = counts[:, : len(edges) - 1]
        self._share, self._confidence = share, confidence
        sums = counts.sum(axis=0).astype(np.float64)
        self.accesses = round(float(sums.sum()) / share)
        marks = edges[1:]
        widths = np.diff(marks).astype(np.float64)
        means, last = falling(sums[1:] / widths, widths)
        self.by_count = follow(sums[1:], means, last, widths)
        # Sampled accesses below each mark, by group and in all.
        self._groups = np.concatenate([np.zeros((len(counts), 1)), np.cumsum(counts[:, 1:], axis=1)], axis=1)
        self._sums = self._groups.sum(axis=0)
        # How much more the strata scatter than single draws would.
        scatter = len(counts) * counts[:, 1:].var(axis=0, ddof=1).sum() / max(sums[1:].sum(), 1.0)
        steps, ends = _smoothed(means / share, marks[last], marks, self._sums / share, max(1.0, scatter) / share)
        super().__init__(rows, sums[0] / share, steps, ends, marks, self._sums / share)

    def interval(self, cut: float) -> tuple[int, int]:
        """See :class:`RowEstimate`."""
        hot = int(self.hot(np.array([cut]))[0])
        count = len(self._marks)
        if cut <= 0 or count < 2:
            return hot, hot
        c, marks, own = float(np.ceil(cut)), self._marks, np.arange(count)
        # A window as wide as tells a slope from scatter: the wider, the less its mean scatters, and the more it
        # differs from the count at its end.
        t = t_quantile(self._confidence, len(self._groups) - 1)
        width = marks * np.minimum(1.0, (t / np.sqrt(self._share * c * marks)) ** (2 / 3))
        before = np.minimum(np.searchsorted(marks, marks - width, side="right") - 1, own - 1).clip(0)
        after = np.maximum(np.searchsorted(marks, marks + width), own + 1).clip(max=count - 1)
        fewer = self._differs(before, own, c, below=True)
        more = self._differs(own, after, c - 1, below=False)
        # Not at a mark or behind it from which on all are refuted, and not at or before the last of those that are
        # refuted from the first one on: each end rests on the one test where the truth lies.
        last = int(np.flatnonzero(~fewer)[-1]) + 1
        high = int(marks[last]) - 1 if last < count else self.rows
        reached = int(np.flatnonzero(~more)[0])
        low = int(marks[reached - 1]) + 1 if reached else 0
        return min(low, hot), max(high, hot)

    def _differs(self, begin: Int64, end: Int64, count: float, *, below: bool) -> npt.NDArray[np.bool_]:
        """Where the rows of windows have significantly fewer (or more) than ``count`` accesses each; never where a
        window is empty."""
        expected = self._share * count * (self._marks[end] - self._marks[begin])
        found = self._sums[end] - self._sums[begin]
        groups = self._groups[:, end] - self._groups[:, begin]
        n = len(groups)
        # Groups may agree by chance, most of all where they hold few accesses: never less than single draws would.
        least = np.sqrt(np.maximum(expected if below else found, 1.0) / n)
        deviation = np.maximum(groups.std(axis=0, ddof=1), least)
        margin = n * half_width(1.0, n, self._share, self._confidence) * deviation
        significant: npt.NDArray[np.bool_] = found < expected - margin if below else found > expected + margin
        return np.asarray(significant & (end > begin), np.bool_)


def _smoothed(counts: Floats, ends: Int64, marks: Int64, below: Floats, variance: float) -> tuple[Floats, Int64]:
    """The steps of isotonic regression, smoothed where counts are 5 or more.

    Args:
        counts: [R] accesses of a row of each step, falling strictly.
        ends: [R] row after the last of each step.
        marks: [J] rows.
        below: [J] estimated accesses before each mark.
        variance: of an estimated number of accesses, per access.

    Returns:
        Counts, falling strictly, and rows that have at least so many.
    """
    few = int(np.searchsorted(-counts, -_STEPS_BELOW))
    if few == 0 or counts[0] <= _STEPS_BELOW or len(marks) < 3:
        return counts, ends
    inner = marks[1:-1].astype(np.float64)
    before, behind = np.maximum(inner / _QUARTER, 1.0), np.minimum(inner * _QUARTER, marks[-1])
    at = np.interp(np.stack([before, inner, behind]), marks, below)
    left, right = (at[1] - at[0]) / (inner - before), (at[2] - at[1]) / (behind - inner)
    where = np.log((inner + before) / 2), np.log((inner + behind) / 2)
    part = (np.log(inner) - where[0]) / (where[1] - where[0])
    law = np.exp(np.log(np.maximum(left, 1e-9)) * (1 - part) + np.log(np.maximum(right, 1e-9)) * part)
    law = np.where((left > 0) & (right > 0), law, (at[2] - at[0]) / (behind - before))
    curve, last = falling(law, np.diff(marks)[1:].astype(np.float64))
    points = np.geomspace(counts[0], _STEPS_BELOW, _POINTS)
    rough = np.concatenate([[1], ends])[np.searchsorted(-counts, -points, side="right")].astype(np.float64)
    smooth = np.exp(np.interp(-np.log(points), -np.log(np.maximum(curve, 1e-9)), np.log(inner[last - 1])))
    # Between the two crossings rows have about as many accesses as the cut-off asks, or the step is a sharp one.
    expected = points * np.abs(smooth - rough)
    found = np.abs(np.interp(smooth, marks, below) - np.interp(rough, marks, below))
    sharp = np.abs(found - expected) > _SURE * np.sqrt(np.maximum(expected, found) * variance)
    hot = np.maximum.accumulate(np.where(sharp, rough, smooth))
    rest = np.maximum(ends[few:], int(hot[-1]))
    return np.concatenate([points, counts[few:]]), np.concatenate([np.rint(hot).astype(np.int64), rest])
