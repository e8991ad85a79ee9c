"""What a lookahead cache will hit, from the training counts alone.

Legend: N rows of a table, C slots, k lookups of a table in a batch, T batches of an epoch, W batches looked ahead,
F batches in flight, J buckets.

**How often a row is used.** Ids of a batch are taken for independent draws, as in shuffled training. A row that occurs
n times in an epoch of T batches is in a given batch with probability q = 1 - (1 - 1/T)^n. It is there, and was not in
the w batches before, with probability S(w) = (1 - w/T)^(n-1) given its use: an epoch holds each occurrence once, so
the other n - 1 lie anywhere in it. Where counts are not known, rows are drawn with replacement from Zipf's law with
exponent 1.05: q = 1 - (1 - p)^k and S(w) = (1 - q)^w.

**Who stays.** A row used at step s may leave from the plan of step s + F on, which knows all uses up to s + F + W.
With room enough, then, a row is kept if its next use is at most F + W batches after the last. As the farthest use
leaves first, a smaller cache keeps the rows whose gap between two uses is at most some h < F + W. If slots remain, they
hold rows without a known use, the smallest ids first: rows with ids below some r, once used, stay for good. This is the
characteristic time of Che et al. (2002) with the next use in the place of the last one. After a share t of the epoch,
h (or r, and then h = F + W) is where the expected number of occupied slots equals C:

    sum over ids below r of P(used by t)
    + sum over the others of q (sum over g <= h of g P(gap = g) + F P(gap > h)) = C

Below r a use hits if the row was used before; above, if its last use is at most h batches ago. Against the real
residency on 355 shuffled Zipf traces (exponents 0.6 to 1.3, 2 % to 30 % of the rows in slots, W from 0 to 256) the hit
rate was 0.8 points too low to 1.3 too high, and 0.3 too high on average: h is not quite the same from step to step.

The first epoch begins with empty slots, so first uses, which no cache avoids, are among the misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

ZIPF = 1.05  # exponent where counts are not known
_SINGLE = 64  # the first so many ids have a bucket each
_GROWTH = 1.04  # from one bucket to the next
_CHUNK = 2**24  # counts looked at together
_MOMENTS = 12  # of the epoch at which the cache is looked at
_ROUNDS = 24  # halvings of h
_ENDLESS = 2**20  # batches of an epoch of which no counts are known


@dataclass(frozen=True, kw_only=True, eq=False)
class Uses:
    """How often the rows of one table are used, by buckets of neighbouring ids [J]."""

    rows: Floats  # rows of the bucket that are used at all
    place: Int64  # number of the bucket, the same ids in every table
    q: Floats  # probability that such a row is in a given batch
    lookups: Floats  # of such a row in a batch, on average
    n: Floats  # occurrences of such a row in an epoch; where counts are not known: unused
    batches: float  # T; infinite where counts are not known
    num_rows: int  # N

    @property
    def distinct(self) -> float:
        """Expected distinct rows of a batch."""
        return float((self.rows * self.q).sum())

    def distinct_of(self, batches: int) -> float:
        """Expected distinct rows of ``batches`` consecutive batches."""
        return float((self.rows * -np.expm1(batches * np.log1p(-np.minimum(self.q, 1 - 1e-12)))).sum())


def _edges(num_rows: int) -> Int64:
    """First id of each bucket and the one after the last; the inner ones are the same for every table."""
    edges = list(range(min(_SINGLE, num_rows)))
    edge = _SINGLE
    while edge < num_rows:
        edges.append(edge)
        edge = int(edge * _GROWTH) + 1
    return np.array([*edges, num_rows], np.int64)


def _sums(counts: Any, edges: Int64) -> tuple[Floats, Floats]:
    """Sum of counts, and counts above zero, of each bucket; a few megabytes at a time."""
    total, used = np.zeros((2, len(edges) - 1))
    array = np.asarray(counts)
    for begin in range(0, len(array), _CHUNK):
        part = np.ascontiguousarray(array[begin : begin + _CHUNK])
        first = int(np.searchsorted(edges, begin, side="right")) - 1
        last = int(np.searchsorted(edges, begin + len(part), side="left"))
        starts = np.maximum(edges[first:last] - begin, 0)
        total[first:last] += np.add.reduceat(part, starts, dtype=np.int64)
        used[first:last] += np.add.reduceat(part > 0, starts, dtype=np.int64)
    return total, used


def uses_of(num_rows: int, counts: Any | None, lookups: float) -> Uses:
    """The uses of a table.

    Args:
        num_rows: N.
        counts: [N] occurrences of each id in an epoch of training, falling; None takes Zipf's law.
        lookups: k.
    """
    edges = _edges(num_rows)
    rows = np.diff(edges).astype(np.float64)
    place = np.arange(len(rows))
    if counts is not None:
        total, used = _sums(counts, edges)
        keep = used > 0
        if lookups > 0 and keep.any():
            batches = max(float(total.sum()) / lookups, 1.0 + 1e-9)
            n = total[keep] / used[keep]
            q = -np.expm1(n * np.log1p(-1 / batches))
            return Uses(
                rows=used[keep], place=place[keep], q=q, lookups=n / batches, n=n, batches=batches, num_rows=num_rows
            )
    # The sum of (i + 1)^-a over a bucket, by the midpoint rule; exact enough where buckets are narrow.
    first, last = edges[:-1] + 0.5, edges[1:] + 0.5
    weight = (first ** (1 - ZIPF) - last ** (1 - ZIPF)) / (ZIPF - 1)
    p = weight / weight.sum() / rows
    return Uses(
        rows=rows, place=place, q=-np.expm1(lookups * np.log1p(-np.minimum(p, 1 - 1e-12))), lookups=lookups * p,
        n=np.ones_like(rows), batches=np.inf, num_rows=num_rows,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What is expected of one cache, for each step of the first epoch."""

    distinct: float  # rows that a batch needs
    hits: float  # of them in their slots
    lookups: float  # occurrences
    lookups_hit: float
    first: float  # rows used for the first time: no cache avoids their misses
    written: float  # changed rows that leave

    @property
    def fetched(self) -> float:
        """Rows that come."""
        return self.distinct - self.hits

    @property
    def hit_rate(self) -> float:
        """Of distinct rows."""
        return self.hits / self.distinct if self.distinct else 1.0

    @property
    def lookup_hit_rate(self) -> float:
        """Of lookups."""
        return self.lookups_hit / self.lookups if self.lookups else 1.0


class _Group:
    """The buckets of several tables that share slots, side by side."""

    def __init__(self, tables: Sequence[Uses]) -> None:
        self.rows, self.q, self.n, self.lookups = (
            np.concatenate([getattr(table, name) for table in tables]) for name in ("rows", "q", "n", "lookups")
        )
        self.place: Int64 = np.concatenate([table.place for table in tables])
        self.batches = np.concatenate([np.full(len(table.q), table.batches) for table in tables])
        self.finite = np.isfinite(self.batches)
        self.log_rest = np.log1p(-np.minimum(self.q, 1 - 1e-12))  # ln(1 - q)

    def unused(self, width: Floats | float) -> Floats:
        """S: the probability that a row in use was in none of the ``width`` batches before."""
        return np.exp(self._log_unused(width))

    def _log_unused(self, width: Floats | float) -> Floats:
        share = np.minimum(np.where(self.finite, width / self.batches, 0.0), 1 - 1e-12)
        log: Floats = np.where(self.finite, (self.n - 1) * np.log1p(-share), width * self.log_rest)
        return log

    def _unused_sum(self, width: Floats | float) -> Floats:
        """S(0) + S(1) + ... up to ``width``, which need not be whole."""
        log = self._log_unused(width)
        rate = np.where(self.finite, (self.n - 1) / self.batches, -self.log_rest)
        whole = np.maximum(-np.expm1(-rate), 1e-300)
        geometric = np.where(rate * width < 1e-6, width * (1 - rate * width / 2), -np.expm1(log) / whole)
        # Where several batches pass between uses, a sum is an integral and half a step at either end.
        n, share = self.n, np.minimum(np.where(self.finite, width / self.batches, 0.0), 1 - 1e-12)
        integral = -np.expm1(n * np.log1p(-share)) * np.where(self.finite, self.batches, 1.0) / n
        total: Floats = np.where(self.finite & (rate < 0.2), integral - np.expm1(log) / 2, geometric)
        return total

    def occupied(self, keep: float, in_flight: int) -> Floats:
        """Slots that a row takes on average if it stays for its next use at most ``keep`` batches away."""
        survive = self.unused(keep)
        return self.q * (np.maximum(self._unused_sum(keep) - keep * survive, 0.0) + in_flight * survive)

    def recent(self, share: float, keep: float) -> Floats:
        """The probability that the row of a use was used less than ``keep`` batches before, in this epoch."""
        width = np.where(self.finite, np.minimum(keep, share * self.batches), keep)
        return np.where(width == np.inf, 1.0, 1 - self.unused(np.where(width == np.inf, 0.0, width)))

    def staying(self, share: float, taken: Floats, spare: float) -> tuple[Floats, float]:
        """The probability that a row stays for good once used, and how many of the ``spare`` slots such rows take.

        All with ids below r do, where r is as high as the slots allow after ``share`` of the epoch.
        """
        ever = np.where(self.finite, -np.expm1(self.n * np.log1p(-share)), 1.0)
        gain = np.bincount(self.place, weights=np.maximum(self.rows * ever - taken, 0.0))
        before = np.concatenate([[0.0], np.cumsum(gain)])
        last = int(np.searchsorted(before, spare, side="right")) - 1
        stays = (np.arange(len(gain)) < last).astype(np.float64)
        if last < len(gain):
            stays[last] = (spare - before[last]) / gain[last]
        return stays[self.place], min(float(before[-1]), spare)


def expect(
    tables: Sequence[Uses], slots: int, *, lookahead: float | None, in_flight: int, transient: bool = False
) -> Traffic:
    """The traffic of tables that share ``slots``.

    Args:
        tables: their uses.
        slots: C, enough for the rows of ``in_flight`` batches.
        lookahead: W, on average; None means that the whole epoch is known.
        in_flight: F.
        transient: rows leave after their last use in flight (``HostPipelined``).
    """
    if not any(len(uses.rows) for uses in tables):  # such as the cold batches of a dataset that is all hot
        return Traffic(distinct=0.0, hits=0.0, lookups=0.0, lookups_hit=0.0, first=0.0, written=0.0)
    group = _Group(tables)
    if lookahead is None:
        lookahead = math.ceil(group.batches[group.finite].max(initial=0)) or _ENDLESS
    keep = float(in_flight if transient else in_flight + lookahead)
    taken = group.rows * group.occupied(keep, in_flight)
    spare = 0.0 if transient else slots - float(taken.sum())
    if spare < 0:
        low, high = float(in_flight), keep
        for _ in range(_ROUNDS):
            keep = (low + high) / 2
            full = float((group.rows * group.occupied(keep, in_flight)).sum()) > slots
            low, high = (low, keep) if full else (keep, high)
    hits = lookups_hit = held = 0.0
    moments = _MOMENTS if group.finite.any() else 1
    for moment in range(moments):
        share = (moment + 0.5) / moments
        hit = group.recent(share, keep)
        if spare > 0:
            stays, held = group.staying(share, taken, spare)
            hit = stays * group.recent(share, np.inf) + (1 - stays) * hit
        hits += float((group.rows * group.q * hit).sum()) / moments
        lookups_hit += float((group.rows * group.lookups * hit).sum()) / moments
    distinct = float((group.rows * group.q).sum())
    # Every row that came has left, changed, but for those in their slots at the end of the epoch.
    held += min(float(taken.sum()), slots)
    first = float((group.rows / group.batches).sum())
    return Traffic(
        distinct=distinct, hits=hits, lookups=float((group.rows * group.lookups).sum()), lookups_hit=lookups_hit,
        first=first, written=max(0.0, distinct - hits - held / float(group.batches.max())),
    )  # fmt: skip
