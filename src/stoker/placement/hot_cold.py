"""Which rows to make hot, and what is then expected to move.

In shuffled batches a cache moves less than ``HotCold`` with as many slots: it may keep the same rows, and chooses anew
from step to step. What speaks for hot rows is that finding them costs nothing, and a dataset whose batches were made of
them alone (FAE, VLDB 2022, section 4.2): those move nothing.

Legend: N rows of a table, H hot ones, C slots, T batches of an epoch, n uses of a row in it, J buckets of neighbouring
ids (:class:`stoker.placement.expected.Uses`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.placement.expected import Traffic, Uses, expect, uses_of

Floats = npt.NDArray[np.float64]

_MARGIN = 0.05  # batches are not quite independent draws
_DEVIATIONS = 5.0  # and their distinct rows scatter


@dataclass(frozen=True, kw_only=True, eq=False)
class HotBatches:
    """A classified dataset read by its schedule: batches whose rows are all hot, and others."""

    rows: Mapping[str, int]  # table -> H
    share: float  # of the batches that are hot


def roomy(expected: float) -> int:
    """Slots for as many rows on average; few batches have more."""
    return math.ceil((1 + _MARGIN) * expected + _DEVIATIONS * math.sqrt(expected))


@lru_cache(maxsize=64)
def _begins(num_rows: int) -> Floats:
    """[J] the first id of each bucket of a table."""
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
    """[T] H of each table: the most used rows of all, as many as leave room for the others of the batches in flight.

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
    """The uses of a table in batches whose rows are all hot, and in the others.

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
    """The same with so much of each row's uses, in so many batches."""
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
    """The traffic of tables whose hot rows stay.

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
    """The traffic of tables whose used rows all lie in slots."""
    distinct = sum(uses.distinct for uses in tables)
    lookups = sum(float(uses.lookups @ uses.rows) for uses in tables)
    return Traffic(distinct=distinct, hits=distinct, lookups=lookups, lookups_hit=lookups, first=0.0, written=0.0)


def mixed(a: Traffic, b: Traffic, share: float) -> Traffic:
    """The average where ``share`` of the batches are of the first kind."""
    return Traffic(**{f.name: share * getattr(a, f.name) + (1 - share) * getattr(b, f.name) for f in fields(Traffic)})
