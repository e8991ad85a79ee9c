"""How many rows of a table have at least so many accesses, from full counts or from a sample (FAE, section 4.1.2).

:class:`ExactRows` takes the vocabulary's counts. :class:`ChunkRows` is the published estimate: rows of a table are
drawn at random in n chunks of m, their sampled accesses are compared with Equation 1's cut-off, and the share of hot
ones is taken for that of the table. The draw is a permutation of the rows, not runs of neighbours: with ids by falling
count all hot rows are neighbours, and a chunk would hold all or nothing. Two errors remain. The sampled accesses of a
row scatter: at 5 % a row with 20 accesses may show none or three, so that a cut-off of 20, which is 1 in the sample,
finds other rows. And where one row in 1,000 is hot, 35 x 1,024 rows hold 36 hot ones, give or take 6.

Legend: N rows of a table, R steps, Q cut-offs.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.dataset.order import permutation

__all__ = ["ChunkRows", "ExactRows", "RowEstimate", "follows_count", "half_width"]

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class RowEstimate(Protocol):
    """The rows of one table by their accesses. Hot rows are a prefix: row 0 is among them if any other is."""

    rows: int  # N
    accesses: int  # T_z, in an epoch

    def hot(self, cuts: Floats) -> Int64:
        """Rows with at least so many accesses in an epoch, for each of [Q] cut-offs."""
        ...

    def interval(self, cut: float) -> tuple[int, int]:
        """Where that number lies for one cut-off, at the confidence."""
        ...

    def served(self, hot: Int64) -> Floats:
        """Accesses of the ids below ``hot``, as a share of all, [Q]."""
        ...


def follows_count(counts: npt.NDArray[Any]) -> bool:
    """Return whether the counts [N] fall along the ids, row 0 (out of vocabulary) apart."""
    return not bool((counts[2:] > counts[1:-1]).any())


def _served(counts: npt.NDArray[Any], hot: Int64) -> Floats:
    """Accesses of the ids below ``hot``, as a share of all, [Q]."""
    ends, place = np.unique(hot, return_inverse=True)
    parts = [int(counts[a:b].sum(dtype=np.int64)) for a, b in pairwise([0, *ends, len(counts)])]
    return np.asarray(np.cumsum(parts)[place] / max(sum(parts), 1))


class ExactRows:
    """From full counts [N]. Where they do not fall along the ids, the nearest falling ones (isotonic regression)."""

    def __init__(self, counts: npt.NDArray[Any]) -> None:
        self.rows, self.accesses = len(counts), int(counts.sum())
        known = counts[1:]  # row 0 is apart, as it may have any count
        fitted = known
        if not follows_count(counts):
            from scipy.optimize import isotonic_regression

            fitted = isotonic_regression(known, increasing=False).x
        falls = np.append([True], fitted[1:] != fitted[:-1])[: len(fitted)]
        starts = np.flatnonzero(falls)  # of each step of equal counts
        self._all = counts
        self._counts = fitted[starts].astype(np.float64)  # [R], falling
        self._ends = np.append(starts, len(known)).astype(np.int64) + 1  # [R + 1] row after each step; the first is 1

    def hot(self, cuts: Floats) -> Int64:
        """See :class:`RowEstimate`."""
        # Counts are whole: at least c means more than ceil(c) - 1, and fitted ones lie between.
        cuts = np.maximum(np.ceil(cuts) - 0.5, 0.0)
        passed = np.searchsorted(-self._counts, -cuts, side="right")
        return np.where((passed > 0) | (self._all[0] >= cuts), self._ends[passed], 0).astype(np.int64)

    def interval(self, cut: float) -> tuple[int, int]:
        """See :class:`RowEstimate`; nothing was estimated."""
        hot = int(self.hot(np.array([cut]))[0])
        return hot, hot

    def served(self, hot: Int64) -> Floats:
        """See :class:`RowEstimate`."""
        return _served(self._all, hot)


def half_width(deviation: float, samples: int, share: float, confidence: float) -> float:
    """Half the interval of a mean (Equation 4): t * sqrt((N - n) / N * s**2 / n), with n - 1 degrees of freedom.

    Args:
        deviation: s, of the samples.
        samples: n, at least 2.
        share: n / N, of the population that was sampled.
        confidence: 1 - alpha.
    """
    from scipy.special import stdtrit

    t = float(stdtrit(samples - 1, (1 + confidence) / 2))
    return t * deviation * math.sqrt(max(0.0, 1 - share) / samples)


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
        self.accesses = round(int(counts.sum(dtype=np.int64)) / share)
        known = counts[1:]  # row 0 is apart, as it may have any count
        self._of = len(known) / chunk_rows  # N, in chunks
        if self._of <= chunks:
            self._chunks = np.sort(known)[None, :]  # counted whole
        else:
            picked = permutation(f"{seed}/{name}/chunks", len(known))(0, chunks * chunk_rows)
            self._chunks = np.sort(known[picked].reshape(chunks, chunk_rows), axis=1)

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
        """See :class:`RowEstimate`."""
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
        return _served(self._counts, hot)
