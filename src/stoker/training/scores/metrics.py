"""Metrics over a stream of logits, in bounded memory, equal to scikit-learn's.

The area under the ROC curve is exact, ties included, up to ``exact_rows``; beyond, scores are counted in
2**21 bins and the largest possible error is reported beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.training.scores.ranking import RANKING

__all__ = ["DECIDING", "StreamingMetrics", "auc", "deciding", "merit"]

#: What may say which checkpoint is best.
DECIDING = ("auc", "log_loss", *RANKING)
_BINS = 2**21  # the top bits of an ordered float32: sign, exponent and 12 bits of the fraction
_SHIFT = 32 - 21
_PIECE = 2**20  # rows ordered at a time while counting

Scores = npt.NDArray[np.float32]


def auc(positives: Scores, negatives: Scores) -> float:
    """The share of (positive, negative) pairs ranked rightly, a tie counting half.

    Not a number where a class is absent. Sorts both arrays in place; counts are exact integers.
    """
    pairs = len(positives) * len(negatives)
    if pairs == 0:
        return math.nan
    positives.sort()
    negatives.sort()
    doubled = 0
    for start in range(0, len(positives), _PIECE):
        piece = positives[start : start + _PIECE]
        below: npt.NDArray[np.int64] = np.searchsorted(negatives, piece, side="left")
        upto: npt.NDArray[np.int64] = np.searchsorted(negatives, piece, side="right")
        doubled += int(below.sum()) + int(upto.sum())
    return doubled / (2 * pairs)


def _bin_of(scores: Scores) -> npt.NDArray[np.int64]:
    """Bins in the order of the scores: float32 bits, with the sign folded so that they sort as numbers."""
    bits = (scores + np.float32(0.0)).view(np.uint32)  # -0.0 and 0.0 are one score
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (ordered >> np.uint32(_SHIFT)).astype(np.int64)


def merit(values: Mapping[str, float | None], metric: str) -> float:
    """How good an evaluation is by one of :data:`DECIDING`: the larger the better, -inf where it is undefined.

    Without both classes there is no AUC and nothing to rank; log loss decides then.
    """
    name = deciding(values, metric)
    value = values.get(name)
    if value is None or not math.isfinite(value):
        return -math.inf
    return -value if name == "log_loss" else value


def deciding(values: Mapping[str, float | None], metric: str) -> str:
    """The metric that says how good an evaluation is, where ``metric`` was asked for."""
    rows = values.get("rows")
    if rows is None:
        return metric
    # Lists of a single class each have no group AUC, though there are rows of both.
    unranked = metric == "group_auc" and values.get(metric) is None and values.get("log_loss") is not None
    return "log_loss" if unranked or values.get("positives") in (0, rows) else metric


class StreamingMetrics:
    """AUC, log loss, normalized entropy, accuracy and calibration of a binary classifier.

    Args:
        exact_rows: scores kept for an exact AUC: 4 bytes each, and as much again while it is computed.
    """

    def __init__(self, *, exact_rows: int = 2**25) -> None:
        self.exact_rows = exact_rows
        self.rows = 0
        self.positives = 0
        self._loss = 0.0
        self._right = 0
        self._predicted = 0.0
        self._kept: tuple[list[Scores], list[Scores]] = ([], [])  # scores of negatives, of positives
        self._counts: npt.NDArray[np.int64] | None = None  # [2, bins] beyond exact_rows

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
        scores = logits.float()
        parts = (scores[~positive].numpy(), scores[positive].numpy())
        if self._counts is None and self.rows > self.exact_rows:
            self._counts = np.zeros((2, _BINS), dtype=np.int64)
            for kind, kept in enumerate(self._kept):
                for part in kept:
                    self._count(kind, part)
                kept.clear()
        for kind, part in enumerate(parts):
            if self._counts is None:
                self._kept[kind].append(part)
            else:
                self._count(kind, part)

    def _count(self, kind: int, part: Scores) -> None:
        assert self._counts is not None
        np.add.at(self._counts[kind], _bin_of(part), 1)

    def compute(self) -> dict[str, float]:
        """The metrics so far; nan where a metric is undefined.

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
            return auc(positives, negatives), 0.0
        negative, positive = self._counts.astype(np.float64)
        below = np.cumsum(negative) - negative
        tied = float((positive * negative).sum()) / 2
        pairs = float(positive.sum() * negative.sum())
        return (float((positive * below).sum()) + tied) / pairs, tied / pairs
