"""Order the ids of a table so that ids used together are neighbours.

EL-Rec (SC 2022, section IV and algorithm 2) keeps hot ids in order of frequency and orders the others by communities of
their co-occurrence graph. Three defaults differ here, because measurements were better (docs/reorder.md):

* Ids change places only within **tiers** of similar counts. Batches of shuffled rows need the fewest blocks of
  neighbouring ids if ids are sorted by count; with tiers they need about 1 % more.
* Within a tier, **recursive bisection** of ids against windows of the log orders the ids. The cost of a batch is the
  number of blocks that it touches, and bisection lowers about that number. Modularity finds a few communities, each
  hundreds of blocks wide.
* The result is a **permutation** of the ids, never a hash of them.

The input is pairs of an id and a window of neighbouring training rows in which it occurs. Windows overlap by half, so
that the order does not depend on the begin of a batch. Window w consists of the half windows w - 1 and w.

Legend: N ids of the table, H pinned ids, W windows, M pairs, E edges, n training rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError, install, require
from stoker.base.settings import Settings, setting

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
_DRAWS = 32  # most partners of an id in a window; more add little for a small table


@dataclass(frozen=True, kw_only=True)
class Reordering(Settings, panel="Order"):
    """The settings of :func:`stoker.reorder`.

    Raises:
        ConfigError: a setting outside its range.

    >>> stoker.Reordering(window=8192).method
    'bisect'
    """

    method: Literal["bisect", "communities", "first-use"] = setting(
        "bisect", "Method of ordering. communities needs networkit."
    )
    hot: float = setting(
        0.01, "Most frequent ids, which are not moved: their share of the accesses, or, from 1 on, their number."
    )
    spread: float = setting(
        2.0, "Other ids change places if their counts differ by less than this factor; inf: always."
    )
    window: int = setting(4096, "Neighbouring training rows that count as one batch.", least=2)
    edges: int = setting(8_000_000, "Most pairs of an id and a window, or of two ids, per table.", least=1000)
    seed: int = setting(0, "Seed of the draw if there are more pairs.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.hot < math.inf:
            raise ConfigError(f"hot is {self.hot}; give a share of the accesses below 1, or a number of ids.")
        if not self.spread >= 1:
            raise ConfigError(f"spread is {self.spread}; a factor between counts is at least 1.")


@dataclass(frozen=True, kw_only=True)
class TableUse:
    """The uses of the ids of a table."""

    counts: Int64  # [N] training occurrences
    first: Int64  # [N] training row of the first occurrence; n if there is none
    starts: Int64  # [N + 1] first pair of each id
    windows: Int32  # [M] windows of each id, numbered in the order of the draw
    num_windows: int  # W, drawn windows


class IdWindows:
    """Collect the pairs of a table in bounded memory. The result does not depend on how the rows are cut into blocks.

    If there are more than ``limit`` pairs, half of the windows are dropped, in an order drawn by ``seed``. All pairs of
    the other windows are kept. ``counts`` [N] are training occurrences; ``rows``: n.
    """

    def __init__(self, counts: Int64, *, rows: int, window: int, limit: int, seed: int) -> None:
        self._counts, self._limit = counts, limit
        self._half = max(1, window // 2)
        self._width = -(-rows // self._half) + 1  # W, before any is dropped
        self._rank = np.random.default_rng(seed).permutation(self._width)
        self._kept = self._width  # windows with a lower rank are kept
        self._first = np.full(len(counts), rows, np.int64)
        self._parts: list[Int64] = []  # keys id * width + window, each sorted
        self._size = 0

    def add(self, ids: npt.NDArray[np.integer], rows: Int64) -> None:
        """Add occurrences ``ids`` [L] in the training rows ``rows`` [L], which rise."""
        if not len(ids):
            return
        keys = np.unique(ids.astype(np.int64) * self._width + rows // self._half)
        seen, place = np.unique(ids, return_index=True)
        self._first[seen] = np.minimum(self._first[seen], rows[place])
        for part in (keys, keys + 1):
            part = part[self._rank[part % self._width] < self._kept]
            self._parts.append(part)
            self._size += len(part)
        if self._size > 2 * self._limit:
            self._thin()

    def _thin(self) -> None:
        keys = np.unique(np.concatenate(self._parts)) if self._parts else np.empty(0, np.int64)
        while len(keys) > self._limit and self._kept > 1:
            self._kept = -(-self._kept // 2)
            keys = keys[self._rank[keys % self._width] < self._kept]
        self._parts, self._size = [keys], len(keys)

    def use(self) -> TableUse:
        """Return the collected uses."""
        self._thin()
        ids, windows = np.divmod(self._parts[0], self._width)
        return TableUse(
            counts=self._counts,
            first=self._first,
            starts=np.searchsorted(ids, np.arange(len(self._counts) + 1)).astype(np.int64),
            windows=self._rank[windows].astype(np.int32),
            num_windows=self._kept,
        )


def new_ids(use: TableUse, how: Reordering) -> Int64:
    """Return the new id of each id, [N]: a permutation. Id 0 (out of vocabulary) remains 0.

    Raises:
        DependencyError: a package that the method needs is not installed.
    """
    order = np.concatenate(([0], 1 + np.argsort(-use.counts[1:], kind="stable")))  # most frequent first
    hot = 1 + hot_ids(use.counts[order[1:]], how.hot)
    cold = order[hot:]
    tier = tiers(use.counts[cold], how.spread)
    if how.method == "communities":
        community = _communities(use, cold, how)
        begin = np.full(int(community.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(begin, community, use.first[cold])
        cold = cold[np.lexsort((use.first[cold], community, begin[community], -tier))]
    else:
        cold = cold[np.lexsort((use.first[cold], -tier))]
    if how.method == "bisect":
        _bisect(cold, -np.sort(-tier), use)
    order[hot:] = cold
    made = np.empty(len(order), np.int64)
    made[order] = np.arange(len(order))
    return made


def hot_ids(counts: Int64, hot: float) -> int:
    """Return the number of ids that are not moved, for falling counts."""
    if hot >= 1:
        return min(int(hot), len(counts))
    return (
        int(np.searchsorted(np.cumsum(counts), hot * counts.sum(), side="left")) + 1 if hot > 0 and len(counts) else 0
    )


def tiers(counts: Int64, spread: float) -> Int64:
    """Return the tier of each id, rising with its count; ids that never occur are in the lowest one."""
    if math.isinf(spread):
        return np.zeros(len(counts), np.int64)
    if spread == 1:
        return counts.astype(np.int64)
    most = int(counts.max(initial=1))
    bounds = spread ** np.arange(math.ceil(math.log(most) / math.log(spread)) + 1)
    return np.searchsorted(bounds, counts, side="right").astype(np.int64)


def _bisect(cold: Int64, tier: Int64, use: TableUse) -> None:
    """Order each tier by bisection, in place."""
    require("numba", "bisection needs", "pip install numba, or take the method first-use.")
    from stoker.rewrite.bisect_kernels import bisect

    degree = np.zeros((use.num_windows, 2), np.int32)
    cuts = np.flatnonzero(np.diff(tier)) + 1
    for part in np.split(cold, cuts):  # views
        bisect(part, use.starts, use.windows, degree)


def _edges(use: TableUse, cold: Int64, how: Reordering) -> tuple[Int64, Int64, Int64]:
    """Return weighted edges between positions in ``cold``: ids that share a window, as many of each as fit.

    Algorithm 2 connects all ids of a batch, which is quadratic in its distinct ids. Here each pair of an id and a
    window draws partners from that window.
    """
    place = np.full(len(use.counts), -1, np.int64)
    place[cold] = np.arange(len(cold))
    own = place[np.repeat(np.arange(len(use.counts)), np.diff(use.starts))]
    window = use.windows[own >= 0].astype(np.int64)
    own = own[own >= 0]
    by_window = np.argsort(window, kind="stable")
    own, window = own[by_window], window[by_window]
    begin = np.searchsorted(window, np.arange(use.num_windows + 1))
    draws = min(max(1, how.edges // max(1, len(own))), _DRAWS)
    generator = np.random.default_rng(how.seed)
    keys = []
    for _ in range(draws):
        other = own[begin[window] + (generator.random(len(own)) * np.diff(begin)[window]).astype(np.int64)]
        low, high = np.minimum(own, other), np.maximum(own, other)
        keys.append((low * len(cold) + high)[low != high])
    edges, weight = np.unique(np.concatenate(keys), return_counts=True)
    return (*np.divmod(edges, max(1, len(cold))), weight)


def _communities(use: TableUse, cold: Int64, how: Reordering) -> Int64:
    """Return the community of each id of ``cold``, by the Louvain method (networkit's PLM, on one thread)."""
    networkit = require("networkit", "communities need", f"{install('networkit')}, or take the method bisect.")
    low, high, weight = _edges(use, cold, how)
    threads = networkit.getMaxNumberOfThreads()
    networkit.setNumberOfThreads(1)  # with more threads the result would depend on a race
    try:
        networkit.setSeed(how.seed, False)
        graph: Any = networkit.GraphFromCoo(
            (weight.astype(np.float64), (low, high)), n=len(cold), weighted=True, directed=False
        )
        found = networkit.community.PLM(graph, refine=True).run().getPartition()
        return np.asarray(found.getVector(), np.int64)
    finally:
        networkit.setNumberOfThreads(threads)


def blocks_of_windows(use: TableUse, ids: Int64, rows: int) -> float:
    """Return the mean number of blocks of ``rows`` neighbouring ids that a window touches; id i becomes ``ids[i]``."""
    if not len(use.windows):
        return 0.0
    at = np.repeat(ids // rows, np.diff(use.starts))
    blocks = -(-len(ids) // rows)
    touched = np.unique(use.windows.astype(np.int64) * blocks + at)
    return len(touched) / len(np.unique(use.windows))


def blocks_of_shuffled(use: TableUse, ids: Int64, rows: int, batches: float) -> float:
    """Return the mean number of blocks that a batch of shuffled rows touches, for independent lookups."""
    uses = np.bincount(ids // rows, weights=use.counts, minlength=-(-len(ids) // rows))
    return float(-np.expm1(uses * math.log1p(-1 / max(batches, 1 + 1e-9))).sum())
