"""What a lookahead cache or hot rows will hit, from the training counts alone, and which rows to make hot.

Legend: N rows of a table, C slots, k lookups of a table in a batch, T batches of an epoch, W batches looked ahead,
F batches in flight, J buckets of neighbouring ids, H hot rows, n uses of a row in an epoch.

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

**Hot rows.** In shuffled batches a cache moves less than ``HotCold`` with as many slots: it may keep the same rows, and
chooses anew from step to step. What speaks for hot rows is that finding them costs nothing, and a dataset whose batches
were made of them alone (FAE, VLDB 2022, section 4.2): those move nothing.
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
        """Return the expected distinct rows of ``batches`` consecutive batches."""
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
    """Return the sum of counts, and counts above zero, of each bucket; a few megabytes at a time."""
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
    """Return the uses of a table.

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
        """Return S: the probability that a row in use was in none of the ``width`` batches before."""
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
        # Where several batches pass between uses, a sum is an integral and half a step at either end.
        n, share = self.n, np.minimum(np.where(self.finite, width / self.batches, 0.0), 1 - 1e-12)
        integral = -np.expm1(n * np.log1p(-share)) * np.where(self.finite, self.batches, 1.0) / n
        total: Floats = np.where(self.finite & (rate < 0.2), integral - np.expm1(log) / 2, geometric)
        return total

    def occupied(self, keep: float, in_flight: int) -> Floats:
        """Return the slots that a row takes on average if it stays for its next use at most ``keep`` batches away."""
        survive = self.unused(keep)
        return self.q * (np.maximum(self._unused_sum(keep) - keep * survive, 0.0) + in_flight * survive)

    def recent(self, share: float, keep: float) -> Floats:
        """Return the probability that the row of a use was used less than ``keep`` batches before, in this epoch."""
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
    """Return the traffic expected of tables that share ``slots``.

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


_MARGIN = 0.05  # batches are not quite independent draws
_DEVIATIONS = 5.0  # and their distinct rows scatter


@dataclass(frozen=True, kw_only=True, eq=False)
class HotBatches:
    """A classified dataset read by its schedule: batches whose rows are all hot, and others."""

    rows: Mapping[str, int]  # table -> H
    share: float  # of the batches that are hot


def roomy(expected: float) -> int:
    """Return the slots for as many rows on average; few batches have more."""
    return math.ceil((1 + _MARGIN) * expected + _DEVIATIONS * math.sqrt(expected))


@lru_cache(maxsize=64)
def _begins(num_rows: int) -> Floats:
    """Return the first id of each bucket of a table, [J]."""
    widths = uses_of(num_rows, None, 1.0).rows  # without counts every id of a bucket is used
    return np.concatenate([[0.0], np.cumsum(widths)[:-1]])


def parted(uses: Uses, hot: float) -> tuple[Uses, Uses]:
    """The uses of the ids below ``hot``, and of the others. Counts fall, so the used ids of a bucket come first."""
    below = np.clip(hot - _begins(uses.num_rows)[uses.place], 0.0, uses.rows)
    return _only(uses, below), _only(uses, uses.rows - below)


def _only(uses: Uses, rows: Floats) -> Uses:
    keep = rows > 0
    columns: dict[str, Any] = {name: getattr(uses, name)[keep] for name in ("place", "q", "lookups", "n")}
    return replace(uses, rows=rows[keep], **columns)


def choose_hot(tables: Sequence[Uses], slots: int, in_flight: int, least: Sequence[int] = ()) -> list[int]:
    """Return H of each table, [T]: the most used rows of all, as many as leave room for the others in flight.

    Args:
        tables: their uses.
        slots: C.
        in_flight: batches whose rows have slots at a time.
        least: [T] rows that are hot anyway; () means none.
    """
    hot = [float(count) for count in least] or [0.0] * len(tables)
    owner, reach, width, rank, transit = [], [], [], [], []
    for number, (uses, low) in enumerate(zip(tables, hot, strict=True)):
        cold = parted(uses, low)[1]
        ends = np.maximum(_begins(uses.num_rows)[cold.place], low) + cold.rows
        owner.append(np.full(len(ends), number))
        reach.append(ends)
        width.append(np.diff(ends, prepend=low))
        # A hot row takes all before it along, also the one of unknown values, which may be rare.
        rank.append(np.maximum.accumulate(cold.q[::-1])[::-1])
        transit.append(cold.rows * -np.expm1(in_flight * np.log1p(-np.minimum(cold.q, 1 - 1e-12))))
    order = np.argsort(-np.concatenate(rank), kind="stable")
    owners, ends, widths = (np.concatenate(each)[order] for each in (owner, reach, width))
    away = np.concatenate(transit)[order]
    left = np.maximum(away.sum() - np.concatenate([[0.0], np.cumsum(away)]), 0.0)  # in transit, after each bucket
    taken = sum(hot) + np.concatenate([[0.0], np.cumsum(widths)])
    needed = taken + (1 + _MARGIN) * left + _DEVIATIONS * np.sqrt(left)
    enough = np.flatnonzero(needed <= slots)
    fit = int(enough[-1]) if len(enough) else -1
    for number, end in zip(owners[: max(fit, 0)].tolist(), ends[: max(fit, 0)].tolist(), strict=True):
        hot[number] = end
    if 0 <= fit < len(ends):  # part of the next bucket
        part = (slots - needed[fit]) / max(needed[fit + 1] - needed[fit], 1e-9)
        number = int(owners[fit])
        hot[number] = ends[fit] - (1 - min(part, 1.0)) * widths[fit]
    return [int(count) for count in hot]


def phases(uses: Uses, hot: int, share: float) -> tuple[Uses, Uses]:
    """Return the uses of a table in batches whose rows are all hot, and in the others.

    Lookups of rows that are not hot are all in the others; there hot rows share the remaining lookups in proportion.
    H is taken to the nearest border of a bucket.

    Args:
        uses: of the table in all batches.
        hot: H.
        share: of the batches that are hot.
    """
    if not math.isfinite(uses.batches):
        return uses, uses
    borders = np.append(_begins(uses.num_rows), uses.num_rows)
    warm, cold = parted(uses, float(borders[np.abs(borders - hot).argmin()]))
    all_cold = float((cold.rows * cold.n).sum())
    all_warm = float((warm.rows * warm.n).sum())
    beside = (1 - share) * (all_cold + all_warm) - all_cold  # lookups of hot rows in the other batches
    part = min(1.0, max(0.0, beside / all_warm)) if all_warm else 0.0
    inside = _in(warm, 1 - part, uses.batches * share)
    outside = _in(warm, part, uses.batches * (1 - share)), _in(cold, 1.0, uses.batches * (1 - share))
    return inside, _joined(*outside)


def _in(uses: Uses, part: float, batches: float) -> Uses:
    """Return the same with so much of each row's uses, in so many batches."""
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


def expect_hot_cold(tables: Sequence[Uses], hot: Sequence[int], slots: int, *, in_flight: int) -> Traffic:
    """Return the traffic of tables whose hot rows stay.

    Args:
        tables: their uses.
        hot: [T] H of each.
        slots: C, hot rows and rows in transit together.
        in_flight: batches whose rows have slots at a time.
    """
    parts = [parted(uses, count) for uses, count in zip(tables, hot, strict=True)]
    stays = resting([warm for warm, _ in parts])
    cold = [uses for _, uses in parts if len(uses.rows)]
    if not cold:
        return stays
    moves = expect(cold, slots - sum(hot), lookahead=0, in_flight=in_flight, transient=True)
    return Traffic(**{f.name: getattr(stays, f.name) + getattr(moves, f.name) for f in fields(Traffic)})


def resting(tables: Sequence[Uses]) -> Traffic:
    """Return the traffic of tables whose used rows all lie in slots."""
    distinct = sum(uses.distinct for uses in tables)
    lookups = sum(float(uses.lookups @ uses.rows) for uses in tables)
    return Traffic(distinct=distinct, hits=distinct, lookups=lookups, lookups_hit=lookups, first=0.0, written=0.0)


def mixed(a: Traffic, b: Traffic, share: float) -> Traffic:
    """Average the traffic where ``share`` of the batches are of the first kind."""
    return Traffic(**{f.name: share * getattr(a, f.name) + (1 - share) * getattr(b, f.name) for f in fields(Traffic)})
