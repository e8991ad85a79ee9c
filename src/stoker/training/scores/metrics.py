"""Metrics over a stream of logits in bounded memory, equal to those of scikit-learn; and metrics of lists of rows.

The area under the ROC curve is exact, including ties, up to ``exact_rows``. With more rows, scores are counted in 2**21
bins, and the largest possible error is reported.

Metrics of the order in each list (MRR, nDCG@k, hit rate@k and group AUC) are exact, with 8 bytes per row. Among equal
scores, negative rows are before positive ones. So a model with the same score for all rows of a list gets the worst
metric, not the best. If ties were ordered by chance or by position in the file, a model that has learned nothing would
look good on data that lists the right answer first. Only group AUC counts a tie half, as AUC does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.base.picture import Grid

#: Metrics that need groups; larger is better.
RANKING = ("mrr", "ndcg", "hr", "group_auc")

#: Metrics over the items of a catalogue, with their k (:class:`stoker.training.Catalogue`); larger is better.
RECALL = {"recall_10": 10, "recall_50": 50, "recall_100": 100}

#: Metrics that can choose the best checkpoint.
DECIDING = ("auc", "log_loss", *RANKING, *RECALL)

_NAMES = {
    "auc": "AUC", "log_loss": "log loss", "normalized_entropy": "normalized entropy", "accuracy": "accuracy",
    "calibration": "calibration",
}  # fmt: skip
OF_PROBABILITIES = _NAMES.keys() - {"auc"}
_RANKING_NAMES = {"mrr": "MRR", "ndcg": "nDCG@{k}", "hr": "hit rate@{k}", "group_auc": "group AUC"}
_BINS = 2**21  # the top bits of an ordered float32: sign, exponent and 12 bits of the fraction
_SHIFT = 32 - 21
_BLOCK = 2**20  # rows that are sorted at a time, or a larger group
_GROUP = np.uint64(33)  # bits below the group in a key

Keys = npt.NDArray[np.uint64]
Ordered = npt.NDArray[np.uint32]


def _ordered(logits: Tensor) -> Ordered:
    """Return integers [B] in the order of the logits: the float32 bits with the sign folded; -0.0 is 0.0."""
    bits = (logits.detach().float().cpu().numpy() + np.float32(0.0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _exact_auc(positives: Ordered, negatives: Ordered) -> float:
    """Return the share of (positive, negative) pairs in the right order, a tie half, exactly; sorts both arrays."""
    positives.sort()
    negatives.sort()
    doubled = 0
    for start in range(0, len(positives), _BLOCK):
        block = positives[start : start + _BLOCK]
        doubled += sum(int(np.searchsorted(negatives, block, side=side).sum()) for side in ("left", "right"))
    return doubled / (2 * len(positives) * len(negatives))


def merit(values: Mapping[str, float | None], metric: str) -> float:
    """Return the value of an evaluation by one of :data:`DECIDING`: larger is better, -inf if it is undefined.

    With one class only there is no AUC and no ranking, so :func:`deciding` takes another.
    """
    name = deciding(values, metric)
    value = values.get(name)
    if value is None or not math.isfinite(value):
        return -math.inf
    return -value if name == "log_loss" else value


def deciding(values: Mapping[str, float | None], metric: str) -> str:
    """Return the metric that decides: ``metric``, or recall@10 of a catalogue, else log loss, if it is undefined."""
    rows = values.get("rows")
    if rows is None:
        return metric
    # If each list has one class only, there is no group AUC, even with rows of both classes.
    unranked = metric == "group_auc" and values.get(metric) is None and values.get("log_loss") is not None
    if metric in (*RECALL, "log_loss") and values.get(metric) is not None:  # rows of label 1 alone have a recall
        return metric
    other = "log_loss" if values.get("recall_10") is None else "recall_10"
    return other if unranked or values.get("positives") in (0, rows) else metric


def metric_names(k: int | str | None) -> dict[str, str]:
    """Return the words for each metric; metrics over lists, at ``k``, are among them unless it is None."""
    ranking = {} if k is None else {name: words.format(k=k) for name, words in _RANKING_NAMES.items()}
    return _NAMES | ranking | {name: f"recall@{k}" for name, k in RECALL.items()}


def metric_grid(columns: Mapping[str, Mapping[str, float | None]], title: str = "") -> Grid:
    """Return a table with a line for each metric and a column for each set of rows."""
    k = next((int(k) for metrics in columns.values() if (k := metrics.get("ranking_k"))), None)
    rows = []
    for name, words in metric_names(k).items():
        values = [metrics.get(name) for metrics in columns.values()]
        if any(value is not None for value in values):
            rows.append([words, *("-" if value is None else f"{value:.4f}" for value in values)])
    counted = {"rows": "rows"} | ({} if k is None else {"lists with a positive": "ranked_groups"})
    counted |= {"items of the catalogue": "catalogue"} if any("catalogue" in each for each in columns.values()) else {}
    for words, name in counted.items():
        rows.append([words, *(f"{int(metrics.get(name) or 0):,}" for metrics in columns.values())])
    return Grid(["", *columns], rows, title)


class StreamingMetrics:
    """AUC, log loss, normalized entropy, accuracy and calibration of a binary classifier.

    Args:
        exact_rows: scores kept for an exact AUC: 4 bytes each, and twice that while it is computed.

    >>> metrics = stoker.training.StreamingMetrics()
    >>> metrics.update(torch.tensor([2.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 0.0]))
    >>> found = metrics.compute()
    >>> found["auc"], round(found["log_loss"], 4)
    (1.0, 0.5845)
    """

    def __init__(self, *, exact_rows: int = 2**25) -> None:
        self.exact_rows = exact_rows
        self.rows = 0
        self.positives = 0
        self._loss = 0.0
        self._right = 0
        self._predicted = 0.0
        self._kept: tuple[list[Ordered], list[Ordered]] = ([], [])  # scores of negatives, of positives
        self._counts: npt.NDArray[np.int64] | None = None  # [2, bins] with more than exact_rows

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add rows: ``logits`` and ``labels`` in {0, 1}, both [B].

        Raises:
            ValueError: shapes differ, or a label is neither 0 nor 1.
        """
        if logits.shape != labels.shape or logits.dim() != 1:
            raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must both be [B].")
        logits, labels = logits.detach().cpu(), labels.detach().cpu()
        positive = labels == 1
        found = int(positive.sum())
        if found + int((labels == 0).sum()) != len(labels):
            raise ValueError("labels must be 0 or 1.")
        wide = logits.double()
        self.rows += len(labels)
        self.positives += found
        self._loss += float(torch.nn.functional.softplus(torch.where(positive, -wide, wide), threshold=40.0).sum())
        self._right += int(((wide >= 0) == positive).sum())
        self._predicted += float(torch.sigmoid(wide).sum())
        scores, known = _ordered(logits), positive.numpy()
        for kept, part in zip(self._kept, (scores[~known], scores[known]), strict=True):
            kept.append(part)
        if self.rows > self.exact_rows:
            self._count()

    def _count(self) -> None:
        """Move the kept scores into bins."""
        if self._counts is None:
            self._counts = np.zeros((2, _BINS), dtype=np.int64)
        for counts, kept in zip(self._counts, self._kept, strict=True):
            for part in kept:
                np.add.at(counts, part >> np.uint32(_SHIFT), 1)
            kept.clear()

    def compute(self) -> dict[str, float]:
        """Return the metrics so far; nan if a metric is undefined.

        ``normalized_entropy`` is the log loss over that of always predicting the mean label (He et al. 2014,
        Eq. 1); ``calibration`` is the mean prediction over the mean label; ``auc_error`` bounds the error of
        ``auc``.
        """
        rows, positives = self.rows, self.positives
        result = dict.fromkeys(
            ("auc", "log_loss", "normalized_entropy", "accuracy", "calibration", "auc_error"), math.nan
        )
        result |= {"rows": rows, "positives": positives}
        if rows == 0:
            return result
        mean = positives / rows
        result["log_loss"] = self._loss / rows
        result["accuracy"] = self._right / rows
        if 0 < positives < rows:
            entropy = -(mean * math.log(mean) + (1 - mean) * math.log1p(-mean))
            result["normalized_entropy"] = result["log_loss"] / entropy
            result["auc"], result["auc_error"] = self._auc()
        if positives:
            result["calibration"] = self._predicted / positives
        return result

    def _auc(self) -> tuple[float, float]:
        if not math.isfinite(self._loss):
            return math.nan, math.nan
        if self._counts is None:
            negatives, positives = (np.concatenate(kept) for kept in self._kept)
            return _exact_auc(positives, negatives), 0.0
        negative, positive = self._counts.astype(np.float64)
        below = np.cumsum(negative) - negative
        tied = float((positive * negative).sum()) / 2
        pairs = float(positive.sum() * negative.sum())
        return (float((positive * below).sum()) + tied) / pairs, tied / pairs


class RankingMetrics:
    """Metrics over lists of rows, whose positive rows should be first.

    * ``mrr``: mean over groups of 1 / (place of the first positive row), with places from 1.
    * ``ndcg``: DCG@k divided by that of the best order (Järvelin & Kekäläinen 2002, gain 1 for a positive row, discount
      log2(place + 1)), mean over groups.
    * ``hr``: share of groups with a positive row among the first k.
    * ``group_auc``: AUC within each group, mean weighted by rows (Zhou et al. 2018, Eq. 7).

    The first three use groups with a positive row, as in the RecSys Challenge 2019, and group AUC uses groups with both
    classes. They take 8 bytes of memory per row, and twice that while they are computed.

    Args:
        k: places of ``ndcg`` and ``hr``.

    Raises:
        ConfigError: k below 1.

    >>> import numpy as np
    >>> metrics = stoker.training.RankingMetrics(k=2)
    >>> metrics.update(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0.0, 0.0, 1.0]), np.array([7, 7, 7]))
    >>> found = metrics.compute()
    >>> found["mrr"], found["hr"], found["group_auc"]
    (0.5, 1.0, 0.5)
    """

    def __init__(self, *, k: int = 10) -> None:
        if k < 1:
            raise ConfigError(f"k is {k} places of a list; give at least 1.", settings=("ranking_k",))
        self.k = k
        self._finite = True
        self._parts: list[Keys] = []

    def update(self, logits: Tensor, labels: Tensor, groups: npt.NDArray[np.integer]) -> None:
        """Add rows: ``logits`` [n], ``labels`` [n] in {0, 1}, and the group of each row [n], from 0 to 2**31 - 1.

        Rows of a group may come in any order and in several calls.

        Raises:
            ValueError: shapes differ, a label is neither 0 nor 1, or a group is not such a number.
        """
        if not logits.shape == labels.shape == groups.shape or logits.dim() != 1:
            raise ValueError(
                f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)} and groups {groups.shape} must all be [n]."
            )
        if groups.dtype.kind not in "iu" or (len(groups) and not 0 <= groups.min() <= groups.max() < 2**31):
            raise ValueError("groups must be whole numbers from 0 to 2**31 - 1.")
        wrong = (labels != 0) & (labels != 1)
        if bool(wrong.any()):
            raise ValueError(f"label {float(labels[wrong][0])} is neither 0 nor 1.")
        self._finite &= bool(logits.isfinite().all())
        key = groups.astype(np.uint64) << _GROUP
        key |= (~_ordered(logits)).astype(np.uint64) << np.uint64(1)  # by falling score
        key |= (labels.detach().cpu() == 1).numpy().astype(np.uint64)
        self._parts.append(key)

    def compute(self) -> dict[str, float]:
        """Return the metrics so far; nan if a metric is undefined.

        They include ``ranking_k`` (k), ``groups`` (G) and ``ranked_groups`` (groups with a positive row).
        """
        keys = np.concatenate(self._parts) if self._parts else np.empty(0, np.uint64)
        keys.sort()
        self._parts = [keys]
        sums: tuple[float, ...] = (0,) * 7
        for block in _blocks(keys):
            sums = tuple(so_far + found for so_far, found in zip(sums, _sums(block, self.k), strict=True))
        groups, ranked, hits, weights, reciprocal, gain, weighted = sums
        result = dict.fromkeys(RANKING, math.nan)
        result |= {"ranking_k": self.k, "groups": groups, "ranked_groups": ranked}
        if not self._finite:
            return result
        if ranked:
            result |= {"mrr": reciprocal / ranked, "ndcg": gain / ranked, "hr": hits / ranked}
        if weights:
            result["group_auc"] = weighted / weights
        return result


def _blocks(keys: Keys) -> Iterator[Keys]:
    """Yield whole groups, about :data:`_BLOCK` rows at a time."""
    start = 0
    while start < len(keys):
        last = keys[min(start + _BLOCK, len(keys)) - 1] | np.uint64(2**33 - 1)
        stop = int(np.searchsorted(keys, last, side="right"))
        yield keys[start:stop]
        start = stop


def _sums(keys: Keys, k: int) -> tuple[float, ...]:
    """Return sums over groups of keys, sorted within a group by falling score, negative rows first among ties.

    Returns:
        Groups, groups with a positive row, hits, rows of groups with both classes, reciprocal places, gains, group AUC
        times rows.
    """
    positive = (keys & np.uint64(1)).astype(np.int64)
    starts = run_starts(keys >> _GROUP)
    sizes = np.diff(np.append(starts, len(keys)))
    count = np.add.reduceat(positive, starts)  # [G] P
    at = np.flatnonzero(positive)
    group = np.repeat(np.arange(len(starts)), sizes)[at]
    place = at - starts[group]  # from 0
    first = place[run_starts(group)]
    discounts = 1.0 / np.log2(np.arange(min(k, int(sizes.max()))) + 2.0)
    seen = place < k
    gained = np.bincount(group[seen], discounts[place[seen]], len(starts))
    best = np.concatenate(([0.0], np.cumsum(discounts)))[np.minimum(count, k)]
    ranked = count > 0
    # A positive row wins against later negative rows of its group. Negative rows of equal score are before it.
    before = np.cumsum(1 - positive) - (1 - positive)  # negative rows before each row
    ties = run_starts(keys >> np.uint64(1))
    tied = before - np.repeat(before[ties], np.diff(np.append(ties, len(keys))))
    negatives = sizes - count
    won = np.zeros(len(starts), np.int64)
    np.add.at(won, group, 2 * (negatives[group] - (before[at] - before[starts[group]])) + tied[at])
    both = ranked & (negatives > 0)
    areas = won[both] / (2.0 * count[both] * negatives[both])
    return (
        len(starts), len(first), int(np.count_nonzero(first < k)), int(sizes[both].sum()),
        float((1.0 / (first + 1)).sum()), float((gained[ranked] / best[ranked]).sum()),
        float((areas * sizes[both]).sum()),
    )  # fmt: skip


def run_starts(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return where each run of equal values begins."""
    return np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)[: len(values)]
