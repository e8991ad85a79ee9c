"""Predict the hits of a lookahead cache and of hot rows from the training counts, and choose the hot rows.

Legend: N rows of a table, C slots, k lookups of a table in a batch, T batches of an epoch, W batches of lookahead,
F batches in flight, J buckets of neighbouring ids, H hot rows, n uses of a row in an epoch.

**How often a row is used.** The model: the ids of a batch are independent draws, as in shuffled training. A row that
occurs n times in an epoch of T batches is in a given batch with probability q = 1 - (1 - 1/T)^n. Given that it is in a
batch, it was in none of the w batches before with probability S(w) = (1 - w/T)^(n-1), because the other n - 1
occurrences are anywhere in the epoch. Without counts, rows are drawn with replacement from Zipf's law with exponent
1.05: q = 1 - (1 - p)^k and S(w) = (1 - q)^w.

**Which rows remain.** A row used at step s can be evicted from the plan of step s + F on. That plan knows all uses up
to s + F + W. So with enough slots, a row remains if its next use is at most F + W batches after the last. A smaller
cache evicts the row with the farthest use first, so it keeps rows whose gap between two uses is at most some
h < F + W. Slots that are left over keep rows without a known use, the smallest ids first: a row with an id below some r
remains from its first use on. This is the characteristic time of Che et al. (2002) with the next use in place of the
last one. After a share t of the epoch, h (or r, and then h = F + W) is where the expected number of occupied slots
equals C:

    sum over ids below r of P(used by t)
    + sum over the others of q (sum over g <= h of g P(gap = g) + F P(gap > h)) = C

A use below r is a hit if the row was used before. A use above r is a hit if the last use is at most h batches ago.
On 355 shuffled Zipf traces (exponents 0.6 to 1.3, 2 % to 30 % of the rows in slots, W from 0 to 256) this hit rate was
between 0.8 points too low and 1.3 too high, and 0.3 too high on average, because h changes a little with each step.

The first epoch begins with empty slots, so the misses include first uses, which no cache avoids.

**Hot rows.** In shuffled batches a cache moves fewer rows than ``HotCold`` with as many slots, because it can keep the
same rows and changes its choice with each step. Two things are in favor of hot rows: finding them costs nothing, and
batches that contain only hot rows (FAE, VLDB 2022, section 4.2) move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

ZIPF = 1.05  # exponent without counts
_SINGLE = 64  # first ids, with a bucket each
_GROWTH = 1.04  # factor from one bucket to the next
_CHUNK = 2**24  # counts read at a time
_MOMENTS = 12  # of the epoch at which the cache is evaluated
_ROUNDS = 24  # halvings of h
_ENDLESS = 2**20  # batches of an epoch without counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Uses:
    """How often the rows of one table are used, by buckets of neighbouring ids [J]."""

    rows: Floats  # used rows of the bucket
    place: Int64  # number of the bucket; the ids of a bucket are the same in each table
    q: Floats  # probability that such a row is in a given batch
    lookups: Floats  # mean lookups of such a row in a batch
    n: Floats  # occurrences of such a row in an epoch; not used without counts
    batches: float  # T; infinite without counts
    num_rows: int  # N

    @property
    def distinct(self) -> float:
        """Expected distinct rows of a batch."""
        return float((self.rows * self.q).sum())

    def distinct_of(self, batches: int) -> float:
        """Return the expected distinct rows of ``batches`` consecutive batches."""
        return float((self.rows * -np.expm1(batches * np.log1p(-np.minimum(self.q, 1 - 1e-12)))).sum())


def _edges(num_rows: int) -> Int64:
    """Return the first id of each bucket, and N at the end; the inner ones are the same for each table."""
    edges = list(range(min(_SINGLE, num_rows)))
    edge = _SINGLE
    while edge < num_rows:
        edges.append(edge)
        edge = int(edge * _GROWTH) + 1
    return np.array([*edges, num_rows], np.int64)


def _sums(counts: Any, edges: Int64) -> tuple[Floats, Floats]:
    """Return the sum of the counts and the number of counts above zero for each bucket, chunked."""
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
    """Return the uses of a table; ``lookups``: k.

    ``counts`` [N]: training occurrences of each id in an epoch, falling; None takes Zipf's law.
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
    # The sum of (i + 1)^-a over a bucket, by the midpoint rule, which is accurate for narrow buckets.
    first, last = edges[:-1] + 0.5, edges[1:] + 0.5
    weight = (first ** (1 - ZIPF) - last ** (1 - ZIPF)) / (ZIPF - 1)
    p = weight / weight.sum() / rows
    return Uses(
        rows=rows, place=place, q=-np.expm1(lookups * np.log1p(-np.minimum(p, 1 - 1e-12))), lookups=lookups * p,
        n=np.ones_like(rows), batches=np.inf, num_rows=num_rows,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The expected traffic of a cache, per step of the first epoch."""

    distinct: float  # distinct rows of a batch
    hits: float  # of those, in their slots already
    lookups: float  # occurrences of rows
    lookups_hit: float  # of those, rows in their slots already
    first: float  # rows used for the first time, which no cache has
    written: float  # evicted rows; all are changed

    @property
    def fetched(self) -> float:
        """Rows that are fetched."""
        return self.distinct - self.hits

    @property
    def hit_rate(self) -> float:
        """Hit rate of distinct rows."""
        return self.hits / self.distinct if self.distinct else 1.0

    @property
    def lookup_hit_rate(self) -> float:
        """Hit rate of lookups."""
        return self.lookups_hit / self.lookups if self.lookups else 1.0


class _GroupUses:
    """The buckets of several tables that share slots, one table after the other."""

    def __init__(self, tables: Sequence[Uses]) -> None:
        self.rows, self.q, self.n, self.lookups = (
            np.concatenate([getattr(table, name) for table in tables]) for name in ("rows", "q", "n", "lookups")
        )
        self.place: Int64 = np.concatenate([table.place for table in tables])
        self.batches = np.concatenate([np.full(len(table.q), table.batches) for table in tables])
        self.finite = np.isfinite(self.batches)
        self.log_rest = np.log1p(-np.minimum(self.q, 1 - 1e-12))  # ln(1 - q)

    def unused(self, width: Floats | float) -> Floats:
        """Return S: the probability that a used row was in none of the ``width`` batches before."""
        return np.exp(self._log_unused(width))

    def _log_unused(self, width: Floats | float) -> Floats:
        share = np.minimum(np.where(self.finite, width / self.batches, 0.0), 1 - 1e-12)
        log: Floats = np.where(self.finite, (self.n - 1) * np.log1p(-share), width * self.log_rest)
        return log

    def _unused_sum(self, width: Floats | float) -> Floats:
        """Return S(0) + S(1) + ... up to ``width``, which need not be whole."""
        log = self._log_unused(width)
        rate = np.where(self.finite, (self.n - 1) / self.batches, -self.log_rest)
        whole = np.maximum(-np.expm1(-rate), 1e-300)
        geometric = np.where(rate * width < 1e-6, width * (1 - rate * width / 2), -np.expm1(log) / whole)
        # If several batches pass between uses, the sum is an integral and half a step at each end.
        n, share = self.n, np.minimum(np.where(self.finite, width / self.batches, 0.0), 1 - 1e-12)
        integral = -np.expm1(n * np.log1p(-share)) * np.where(self.finite, self.batches, 1.0) / n
        total: Floats = np.where(self.finite & (rate < 0.2), integral - np.expm1(log) / 2, geometric)
        return total

    def occupied(self, keep: float, in_flight: int) -> Floats:
        """Return the mean slots of a row that is kept if its next use is at most ``keep`` batches away."""
        survive = self.unused(keep)
        return self.q * (np.maximum(self._unused_sum(keep) - keep * survive, 0.0) + in_flight * survive)

    def recent(self, share: float, keep: float) -> Floats:
        """Return the probability that the row of a use was used less than ``keep`` batches before, in this epoch."""
        width = np.where(self.finite, np.minimum(keep, share * self.batches), keep)
        return np.where(width == np.inf, 1.0, 1 - self.unused(np.where(width == np.inf, 0.0, width)))

    def staying(self, share: float, taken: Floats, spare: float) -> tuple[Floats, float]:
        """Return the probability that a row remains from its first use on, and the spare slots that such rows take.

        Rows with ids below r do, where r is as high as the slots allow after ``share`` of the epoch.
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
    """Return the expected traffic of tables that share ``slots``, enough for the rows of ``in_flight`` batches.

    ``lookahead`` None: the whole epoch is known. ``transient``: rows leave after their last use in flight.
    """
    if not any(len(uses.rows) for uses in tables):  # for example, cold batches of a dataset that is all hot
        return Traffic(distinct=0.0, hits=0.0, lookups=0.0, lookups_hit=0.0, first=0.0, written=0.0)
    group = _GroupUses(tables)
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
    hits = lookups_hit = kept = 0.0
    moments = _MOMENTS if group.finite.any() else 1
    for moment in range(moments):
        share = (moment + 0.5) / moments
        hit = group.recent(share, keep)
        if spare > 0:
            stays, kept = group.staying(share, taken, spare)
            hit = stays * group.recent(share, np.inf) + (1 - stays) * hit
        hits += float((group.rows * group.q * hit).sum()) / moments
        lookups_hit += float((group.rows * group.lookups * hit).sum()) / moments
    distinct = float((group.rows * group.q).sum())
    # Each fetched row is written back, except those in slots at the end of the epoch.
    kept += min(float(taken.sum()), slots)
    first = float((group.rows / group.batches).sum())
    return Traffic(
        distinct=distinct, hits=hits, lookups=float((group.rows * group.lookups).sum()), lookups_hit=lookups_hit,
        first=first, written=max(0.0, distinct - hits - kept / float(group.batches.max())),
    )  # fmt: skip


_MARGIN = 0.05  # batches are not exactly independent draws
_DEVIATIONS = 5.0  # standard deviations of the distinct rows of a batch


@dataclass(frozen=True, kw_only=True, eq=False)
class HotBatches:
    """Batches of a classified dataset: some have hot rows only, the others are mixed."""

    rows: Mapping[str, int]  # table -> H
    share: float  # of hot batches


def part_of(uses: Uses, share: float) -> Uses:
    """Return the uses in a ``share`` of the examples of each batch."""
    if math.isinf(uses.batches):
        q = -np.expm1(share * np.log1p(-np.minimum(uses.q, 1 - 1e-12)))
    else:
        q = -np.expm1(uses.n * np.log1p(-share / uses.batches))
    return replace(uses, q=q, lookups=share * uses.lookups, batches=uses.batches / share)


def with_margin(expected: float) -> int:
    """Return slots for this many rows on average, with a margin that few batches exceed."""
    return math.ceil((1 + _MARGIN) * expected + _DEVIATIONS * math.sqrt(expected))


@lru_cache(maxsize=64)
def _begins(num_rows: int) -> Floats:
    """Return the first id of each bucket of a table, [J]."""
    widths = uses_of(num_rows, None, 1.0).rows  # without counts, all ids of a bucket are used
    return np.concatenate([[0.0], np.cumsum(widths)[:-1]])


def split_hot(uses: Uses, hot: float) -> tuple[Uses, Uses]:
    """Return the uses of the ids below ``hot``, and of the others; the used ids of a bucket are its first ones."""
    below = np.clip(hot - _begins(uses.num_rows)[uses.place], 0.0, uses.rows)
    return _only(uses, below), _only(uses, uses.rows - below)


def _only(uses: Uses, rows: Floats) -> Uses:
    keep = rows > 0
    columns: dict[str, Any] = {name: getattr(uses, name)[keep] for name in ("place", "q", "lookups", "n")}
    return replace(uses, rows=rows[keep], **columns)


def choose_hot(tables: Sequence[Uses], slots: int, in_flight: int, least: Sequence[int] = ()) -> list[int]:
    """Return H of each table [T]: as many of the most used rows as leave slots for the other rows in flight.

    ``least`` [T]: least H of each table; () means 0.
    """
    hot = [float(count) for count in least] or [0.0] * len(tables)
    owner, reach, width, rank, transit = [], [], [], [], []
    for number, (uses, low) in enumerate(zip(tables, hot, strict=True)):
        cold = split_hot(uses, low)[1]
        ends = np.maximum(_begins(uses.num_rows)[cold.place], low) + cold.rows
        owner.append(np.full(len(ends), number))
        reach.append(ends)
        width.append(np.diff(ends, prepend=low))
        # Hot rows are a prefix of the ids, so a hot row includes all before it, even rare ones (unknown values).
        rank.append(np.maximum.accumulate(cold.q[::-1])[::-1])
        transit.append(cold.rows * -np.expm1(in_flight * np.log1p(-np.minimum(cold.q, 1 - 1e-12))))
    order = np.argsort(-np.concatenate(rank), kind="stable")
    owners, ends, widths = (np.concatenate(each)[order] for each in (owner, reach, width))
    away = np.concatenate(transit)[order]
    # in flight and not hot, after each bucket
    left = np.maximum(away.sum() - np.concatenate([[0.0], np.cumsum(away)]), 0.0)
    taken = sum(hot) + np.concatenate([[0.0], np.cumsum(widths)])
    needed = taken + (1 + _MARGIN) * left + _DEVIATIONS * np.sqrt(left)
    enough = np.flatnonzero(needed <= slots)
    fit = int(enough[-1]) if len(enough) else -1
    for number, end in zip(owners[: max(fit, 0)].tolist(), ends[: max(fit, 0)].tolist(), strict=True):
        hot[number] = end
    if 0 <= fit < len(ends):  # part of the next bucket
        part = (slots - needed[fit]) / (needed[fit + 1] - needed[fit])
        number = int(owners[fit])
        hot[number] = ends[fit] - (1 - part) * widths[fit]
    return [int(count) for count in hot]


def phases(uses: Uses, hot: int, share: float) -> tuple[Uses, Uses]:
    """Return the uses of a table in hot batches, and in the other batches.

    All lookups of cold rows are in the other batches. The remaining lookups there go to hot rows in proportion. H is
    rounded to the nearest border of a bucket.
    """
    if not math.isfinite(uses.batches):
        return uses, uses
    borders = np.append(_begins(uses.num_rows), uses.num_rows)
    warm, cold = split_hot(uses, float(borders[np.abs(borders - hot).argmin()]))
    all_cold = float((cold.rows * cold.n).sum())
    all_warm = float((warm.rows * warm.n).sum())
    elsewhere = (1 - share) * (all_cold + all_warm) - all_cold  # lookups of hot rows in the other batches
    part = min(1.0, max(0.0, elsewhere / all_warm)) if all_warm else 0.0
    inside = _thinned(warm, 1 - part, uses.batches * share)
    outside = _thinned(warm, part, uses.batches * (1 - share)), _thinned(cold, 1.0, uses.batches * (1 - share))
    return inside, _joined(*outside)


def _thinned(uses: Uses, part: float, batches: float) -> Uses:
    """Return the uses with this part of the occurrences of each row, in this many batches."""
    batches = max(batches, 1.0 + 1e-9)
    n = uses.n * part
    rows, n = uses.rows * np.minimum(n, 1.0), np.maximum(n, 1.0)
    made = replace(uses, rows=rows, n=n, q=-np.expm1(n * np.log1p(-1 / batches)), lookups=n / batches, batches=batches)
    return _only(made, rows)


def _joined(a: Uses, b: Uses) -> Uses:
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in ("place", "rows", "q", "lookups", "n")
    }
    return replace(a, **columns)


def expect_pinned(
    tables: Sequence[Uses], hot: Sequence[int], slots: int, *, lookahead: float | None, in_flight: int, transient: bool
) -> Traffic:
    """Return the traffic of tables whose hot rows are pinned, ``hot`` [T] of each; other arguments: :func:`expect`.

    The ``slots`` are for hot rows and all others together.
    """
    parts = [split_hot(uses, count) for uses, count in zip(tables, hot, strict=True)]
    stays = all_hits([warm for warm, _ in parts])
    cold = [uses for _, uses in parts if len(uses.rows)]
    if not cold:
        return stays
    moves = expect(cold, slots - sum(hot), lookahead=lookahead, in_flight=in_flight, transient=transient)
    return Traffic(**{f.name: getattr(stays, f.name) + getattr(moves, f.name) for f in fields(Traffic)})


def all_hits(tables: Sequence[Uses]) -> Traffic:
    """Return the traffic of tables whose used rows are all in slots."""
    distinct = sum(uses.distinct for uses in tables)
    lookups = sum(float(uses.lookups @ uses.rows) for uses in tables)
    return Traffic(distinct=distinct, hits=distinct, lookups=lookups, lookups_hit=lookups, first=0.0, written=0.0)


def weighted(a: Traffic, b: Traffic, share: float) -> Traffic:
    """Average two kinds of traffic, with weight ``share`` for the first."""
    return Traffic(**{f.name: share * getattr(a, f.name) + (1 - share) * getattr(b, f.name) for f in fields(Traffic)})
