"""How many rows of a table have at least so many accesses, from full counts or from a sample (FAE, section 4.1.2).

**Exact**: the vocabulary's counts. **Chunks**: as published, rows of a table are drawn at random in n
chunks of m, their sampled accesses are compared with Equation 1's cut-off, and the share of hot ones is taken for that
of the table. The draw is a permutation of the rows, not runs of neighbours: with ids by falling count all hot rows are
neighbours, and a chunk would hold all or nothing. Two errors remain. The sampled accesses of a row scatter: at 5 % a
row with 20 accesses may show none or three, so that a cut-off of 20, which is 1 in the sample, finds other rows.
And where one row in 1,000 is hot, 35 x 1,024 rows hold 36 hot ones, give or take 6.

A third way is :mod:`stoker.rewrite.fae.stratified`, the default.

Legend: N rows of a table, R steps, J strata, Q cut-offs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.dataset.reading.order import permutation
from stoker.rewrite.fae import sampling_reference
from stoker.rewrite.fae.sampling import kernels, strata_edges
from stoker.rewrite.fae.student import half_width

__all__ = ["ChunkRows", "ExactRows", "RowEstimate", "Steps", "falling", "follow"]

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_UNORDERED, _DEVIATIONS = 0.02, 4.0  # share of the accesses by which ids may miss the order, and what scatters


class RowEstimate(Protocol):
    """The rows of one table by their accesses."""

    rows: int  # N
    accesses: int  # T_z, in an epoch
    by_count: bool  # ids follow the count

    def hot(self, cuts: Floats) -> Int64:
        """Rows with at least so many accesses in an epoch, for each of [Q] cut-offs."""
        ...

    def interval(self, cut: float) -> tuple[int, int]:
        """Where that number lies for one cut-off, at the confidence."""
        ...

    def served(self, hot: Int64) -> Floats:
        """Accesses of the ids below ``hot``, as a share of all, [Q]."""
        ...


def falling(means: Floats, weights: Floats) -> tuple[Floats, Int64]:
    """Isotonic regression: the falling sequence nearest to ``means`` in weighted squares.

    Args:
        means: [J].
        weights: [J], above 0.

    Returns:
        The values of its level parts, falling strictly, and the place after the last of each.
    """
    values, sizes, ends = means.astype(np.float64), weights.astype(np.float64), np.empty(len(means), np.int64)
    count = (kernels() or sampling_reference).pool(values, sizes, ends)
    return values[:count], ends[:count]


def _sums(counts: npt.NDArray[Any], edges: Int64) -> Floats:
    """Accesses of each stratum from row 1 on."""
    if len(edges) < 2:
        return np.zeros(0)
    return np.add.reduceat(counts, edges[:-1], dtype=np.int64).astype(np.float64)


def follow(sums: Floats, means: Floats, ends: Int64, widths: Floats) -> bool:
    """Whether ids follow the count as far as scatter lets one see: the accesses up to each stratum hardly lie below
    those of the fitted means."""
    sizes = np.diff(np.concatenate([[0], ends]))
    fitted = np.cumsum(np.repeat(means, sizes) * widths)
    total = float(sums.sum())
    gap = float(np.max(fitted - np.cumsum(sums), initial=0.0))
    return gap <= _UNORDERED * total + _DEVIATIONS * float(np.sqrt(total))


class Steps:
    """A table whose counts fall in steps, row 0 (out of vocabulary) apart.

    Args:
        rows: N.
        first: accesses of row 0.
        counts: [R] accesses of each row of a step, falling strictly.
        ends: [R] row after the last of each step.
        marks: [J] rows, rising from 1 to N.
        below: [J] accesses of the rows before each mark, row 0 left out.
    """

    def __init__(self, rows: int, first: float, counts: Floats, ends: Int64, marks: Int64, below: Floats) -> None:
        self.rows = rows
        self._first, self._counts, self._ends = first, counts, np.concatenate([[1], ends])
        self._marks, self._below = marks, below

    def hot(self, cuts: Floats) -> Int64:
        """See :class:`RowEstimate`. Hot rows are a prefix: row 0 is among them if any other is."""
        # Counts are whole: at least c means more than ceil(c) - 1, and the middle is where noise changes least.
        cuts = np.maximum(np.ceil(cuts) - 0.5, 0.0)
        passed = np.searchsorted(-self._counts, -cuts, side="right")
        return np.where((passed > 0) | (self._first >= cuts), self._ends[passed], 0).astype(np.int64)

    def served(self, hot: Int64) -> Floats:
        """See :class:`RowEstimate`."""
        total = self._first + self._below[-1]
        share = (self._first + np.interp(hot, self._marks, self._below)) / max(total, 1.0)
        return np.where(hot > 0, np.minimum(share, 1.0), 0.0)


class ExactRows(Steps):
    """From full counts [N]. Where they do not fall along the ids, by strata."""

    def __init__(self, counts: npt.NDArray[Any]) -> None:
        self.accesses = int(counts.sum())
        known = counts[1:]
        self.by_count = not bool((known[1:] > known[:-1]).any())
        if self.by_count:
            marks = np.concatenate([[1], np.flatnonzero(known[1:] != known[:-1]) + 2, [len(counts)]])
            marks = np.unique(marks).astype(np.int64)
            steps, ends = known[marks[:-1] - 1].astype(np.float64), marks[1:]
            below = np.concatenate([[0.0], np.cumsum(steps * np.diff(marks))])
        else:
            marks = strata_edges(len(counts))[1:]
            sums, widths = _sums(counts, marks), np.diff(marks).astype(np.float64)
            steps, last = falling(sums / widths, widths)
            ends, below = marks[last], np.concatenate([[0.0], np.cumsum(sums)])
        super().__init__(len(counts), float(counts[0]), steps, ends, marks, below)

    def interval(self, cut: float) -> tuple[int, int]:
        """See :class:`RowEstimate`; nothing was estimated."""
        hot = int(self.hot(np.array([cut]))[0])
        return hot, hot


class ChunkRows:
    """From sampled accesses by row [N], as published.

    Args:
        counts: sampled accesses of each row.
        share: x, of the inputs that were sampled.
        chunks: n.
        chunk_rows: m.
        confidence: of the interval.
        seed: of the chunks; together with ``name``.
        name: of the table.
    """

    def __init__(
        self,
        counts: npt.NDArray[np.int32],
        *,
        share: float,
        chunks: int,
        chunk_rows: int,
        confidence: float,
        seed: int,
        name: str,
    ) -> None:
        self.rows = len(counts)
        self._counts = counts
        self._share, self._confidence = share, confidence
        self._total = int(counts.sum(dtype=np.int64))
        self.accesses = round(self._total / share)
        known = counts[1:]  # row 0 is apart, as it may have any count
        self._of = len(known) / chunk_rows  # N, in chunks
        if self._of <= chunks:
            self._chunks = np.sort(known)[None, :]  # counted whole
        else:
            picked = permutation(f"{seed}/{name}/chunks", len(known))(0, chunks * chunk_rows)
            self._chunks = np.sort(known[picked].reshape(chunks, chunk_rows), axis=1)
        marks = strata_edges(self.rows)[1:]
        sums, widths = _sums(counts, marks), np.diff(marks).astype(np.float64)
        self.by_count = follow(sums, *falling(sums / widths, widths), widths)

    def _hits(self, cuts: Floats) -> Floats:
        """C_i for each cut-off, [n, Q] (Equation 2), with Equation 1's cut-off."""
        hits = [len(chunk) - np.searchsorted(chunk, cuts * self._share) for chunk in self._chunks]
        return np.stack(hits).astype(np.float64)

    def _of_all(self, mean: Floats, cuts: Floats) -> Int64:
        """Rows of the whole prefix, from the mean of the chunks' hits."""
        found = np.rint(mean.clip(0, self._chunks.shape[1]) / max(self._chunks.shape[1], 1) * (self.rows - 1))
        own = self._counts[0] >= cuts * self._share
        return np.where((found > 0) | own, found + 1, 0).astype(np.int64)

    def hot(self, cuts: Floats) -> Int64:
        """See :class:`RowEstimate`. Hot rows are a prefix: row 0 is among them if any other is."""
        return self._of_all(self._hits(cuts).mean(axis=0), cuts)

    def interval(self, cut: float) -> tuple[int, int]:
        """See :class:`RowEstimate`. It covers the chunks' error only: its truth is that of the whole sampled log."""
        cuts = np.array([cut])
        hits = self._hits(cuts)[:, 0]
        n = len(hits)
        half = half_width(float(hits.std(ddof=1)), n, n / self._of, self._confidence) if n > 1 else 0.0
        low, high = (int(self._of_all(hits.mean(keepdims=True) + side, cuts)[0]) for side in (-half, half))
        return low, high

    def served(self, hot: Int64) -> Floats:
        """See :class:`RowEstimate`."""
        order = np.argsort(hot, kind="stable")
        cuts = np.concatenate([[0], hot[order]])
        parts = np.array([int(self._counts[a:b].sum(dtype=np.int64)) for a, b in pairwise(cuts)])
        out = np.empty(len(hot))
        out[order] = np.cumsum(parts) / max(self._total, 1)
        return out
