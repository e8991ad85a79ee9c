"""How well the rows of each list are ordered: MRR, nDCG@k, hit rate@k and group AUC, exact, in 8 bytes a row.

Rows of equal scores: a negative row stands before a positive one. A model that gives all rows of a list the same score
so earns the worst place, not the best; where ties are ordered by chance or by place in the file, a model that has not
learned anything looks good on data that lists the right answer first. Only group AUC counts a tie half, as AUC does.

Legend: n rows, G groups (lists), P rows with label 1 in a group, k places looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stoker.base.errors import ConfigError

__all__ = ["RANKING", "RankingMetrics"]

#: Names of the metrics that need groups; the larger the better.
RANKING = ("mrr", "ndcg", "hr", "group_auc")
_PIECE = 2**20  # rows worked on together, but for a larger group
_GROUP = np.uint64(33)  # bits below the group in a key

Keys = npt.NDArray[np.uint64]


class RankingMetrics:
    """Metrics over lists of rows, of which positives should stand first.

    * ``mrr``: mean over groups of 1 / (place of the first positive row), places counted from 1.
    * ``ndcg``: DCG@k over that of the best order (Järvelin & Kekäläinen 2002, gain 1 for a positive row, discount
      log2(place + 1)), mean over groups.
    * ``hr``: share of groups with a positive row among the first k.
    * ``group_auc``: AUC within each group, mean weighted by rows (Zhou et al. 2018, Eq. 7).

    The first three are over groups that have a positive row, as in the RecSys Challenge 2019; group AUC over those that
    have both classes. Memory: 8 bytes a row, and as much again while they are computed.

    Args:
        k: places looked at by ``ndcg`` and ``hr``.

    Raises:
        ConfigError: k below 1.
    """

    def __init__(self, *, k: int = 10) -> None:
        if k < 1:
            raise ConfigError(f"k is {k} places of a list; give at least 1.", settings=("ranking_k",))
        self.k = k
        self._finite = True
        self._parts: list[Keys] = []

    def update(self, logits: Tensor, labels: Tensor, groups: npt.NDArray[np.integer]) -> None:
        """Add rows: ``logits`` [n], ``labels`` [n] in {0, 1} and the non-negative number of each row's group [n] below
        2**31. Rows of a group may come in any order and in any number of calls.

        Raises:
            ValueError: shapes differ.
        """
        if not logits.shape == labels.shape == groups.shape or logits.dim() != 1:
            raise ValueError(
                f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)} and groups {groups.shape} must all be [n]."
            )
        scores = logits.detach().float().cpu().numpy() + np.float32(0.0)  # -0.0 and 0.0 are one score
        self._finite &= bool(np.isfinite(scores).all())
        bits = scores.view(np.uint32)
        falling = np.where(bits >> 31, bits, ~(bits | np.uint32(1 << 31)))  # sorts as the negated number does
        positive = (labels.detach().cpu() == 1).numpy()
        key = groups.astype(np.uint64) << _GROUP
        key |= falling.astype(np.uint64) << np.uint64(1)
        key |= positive.astype(np.uint64)
        self._parts.append(key)

    def compute(self) -> dict[str, float]:
        """The metrics so far, not a number where none is defined; with ``ranking_k`` (k), ``groups`` (G) and
        ``ranked_groups`` (those with a positive row)."""
        keys = np.concatenate(self._parts) if self._parts else np.empty(0, np.uint64)
        keys.sort()
        self._parts = [keys]
        groups = ranked = 0
        reciprocal = gain = weighted = 0.0
        hits = weights = 0
        for piece in _pieces(keys):
            found = _Lists(piece, self.k)
            groups += found.groups
            ranked += found.ranked
            reciprocal += found.reciprocal
            gain += found.gain
            hits += found.hits
            weighted += found.weighted_auc
            weights += found.weight
        result = dict.fromkeys(RANKING, math.nan)
        result |= {"ranking_k": self.k, "groups": groups, "ranked_groups": ranked}
        if not self._finite:
            return result
        if ranked:
            result |= {"mrr": reciprocal / ranked, "ndcg": gain / ranked, "hr": hits / ranked}
        if weights:
            result["group_auc"] = weighted / weights
        return result


def _pieces(keys: Keys) -> Iterator[Keys]:
    """Whole groups, about :data:`_PIECE` rows at a time."""
    start = 0
    while start < len(keys):
        last = keys[min(start + _PIECE, len(keys)) - 1] >> _GROUP
        stop = int(np.searchsorted(keys, (last + np.uint64(1)) << _GROUP, side="left"))
        yield keys[start:stop]
        start = stop


class _Lists:
    """Sums over the groups of sorted keys: within a group by falling score, ties negative rows first."""

    def __init__(self, keys: Keys, k: int) -> None:
        positive = (keys & np.uint64(1)).astype(np.int64)
        starts = _begins(keys >> _GROUP)
        self.groups = len(starts)
        sizes = np.diff(np.append(starts, len(keys)))
        of_group = np.repeat(np.arange(len(starts)), sizes)
        count = np.add.reduceat(positive, starts)  # [G] P
        at = np.flatnonzero(positive)
        group = of_group[at]
        place = at - starts[group]  # from 0
        first = place[_begins(group)] if len(at) else place
        self.ranked = len(first)
        self.reciprocal = float((1.0 / (first + 1)).sum())
        self.hits = int(np.count_nonzero(first < k))
        discounts = 1.0 / np.log2(np.arange(min(k, int(sizes.max()))) + 2.0)
        seen = place < k
        gained = np.bincount(group[seen], discounts[place[seen]], len(starts))
        best = np.concatenate(([0.0], np.cumsum(discounts)))[np.minimum(count, k)]
        ranked = count > 0
        self.gain = float((gained[ranked] / best[ranked]).sum())
        # In its group a positive row wins against the negative rows behind it; those of its own score stand before it.
        before = np.cumsum(1 - positive) - (1 - positive)  # negative rows before each row
        ties = _begins(keys >> np.uint64(1))
        tied = before - np.repeat(before[ties], np.diff(np.append(ties, len(keys))))
        negatives = sizes - count
        doubled = 2 * (negatives[group] - (before[at] - before[starts[group]])) + tied[at]
        won = np.zeros(len(starts), np.int64)
        np.add.at(won, group, doubled)
        both = (count > 0) & (negatives > 0)
        areas = won[both] / (2.0 * count[both] * negatives[both])
        self.weighted_auc = float((areas * sizes[both]).sum())
        self.weight = int(sizes[both].sum())


def _begins(values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Where runs of equal values begin, in an array that is not empty."""
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
