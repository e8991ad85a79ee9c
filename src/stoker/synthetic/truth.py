"""What the best possible model would reach on a generated log, known because the true probabilities are.

Nothing can rank better than the probability that drew the label, nor have a lower expected log loss; so a
model's distance from these figures is its own doing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.base.errors import DataError

__all__ = ["SyntheticTruth", "TruthMeter"]


@dataclass(frozen=True, kw_only=True)
class SyntheticTruth:
    """The planted truth of one log; AUC, log loss (nats) and base rate are expectations over the labels."""

    recipe: str
    rows: int  # rows of the log, bad lines included
    bad: int  # lines spoiled on purpose
    examples: int  # labelled examples that the figures below speak of
    seed: int
    base_rate: float  # share of positives
    best_auc: float
    best_log_loss: float
    task: str  # what an example is, and what its negatives are
    universe: int | None = None  # None: the seed, as in files that do not name it

    def save(self, path: str | Path) -> None:
        """Write as JSON, without a universe where it is None."""
        kept = {name: value for name, value in asdict(self).items() if name != "universe" or value is not None}
        Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> SyntheticTruth:
        """Read what :meth:`save` wrote; ``write`` puts it beside the log as ``<out>.truth.json``."""
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            message = f"{path} is no synthetic truth file ({error}). stoker.synthetic.write makes one."
            raise DataError(message) from error


class TruthMeter:
    """Sums up true logits in bounded memory: expected AUC by a fine histogram, expected log loss exactly."""

    BINS = 2**17
    RANGE = 20.0  # logits beyond +-20 fall into the end bins; they are certain to 2e-9

    def __init__(self) -> None:
        self._positive = np.zeros(self.BINS)
        self._negative = np.zeros(self.BINS)
        self._entropy = 0.0
        self.examples = 0

    def add(self, logits: NDArray, weight: float = 1.0) -> None:
        """Examples with these true logits, each drawn positive with ``1 / (1 + exp(-logit))``, [n]."""
        z = logits.astype(np.float64)
        p = 1.0 / (1.0 + np.exp(-z))
        self._add(z, weight * p, weight * (1.0 - p), len(z))

    def add_known(self, logits: NDArray, labels: NDArray) -> None:
        """Examples whose best logits are known and whose labels are fixed by how they were made, [n] each."""
        y = labels.astype(np.float64)
        self._add(logits.astype(np.float64), y, 1.0 - y, len(y))

    def _add(self, z: NDArray, positive: NDArray, negative: NDArray, examples: int) -> None:
        bins = ((np.clip(z, -self.RANGE, self.RANGE) + self.RANGE) * (self.BINS / (2 * self.RANGE))).astype(np.int64)
        np.minimum(bins, self.BINS - 1, out=bins)
        self._positive += np.bincount(bins, weights=positive, minlength=self.BINS)
        self._negative += np.bincount(bins, weights=negative, minlength=self.BINS)
        self._entropy += float(positive @ np.logaddexp(0.0, -z) + negative @ np.logaddexp(0.0, z))
        self.examples += examples

    def truth(self, **log: Any) -> SyntheticTruth:
        """The planted truth of the log whose examples were added; ``log``: the other fields of it."""
        figures: dict[str, Any] = {"base_rate": self.base_rate, "best_auc": self.auc, "best_log_loss": self.log_loss}
        return SyntheticTruth(examples=self.examples, **figures, **log)

    @property
    def base_rate(self) -> float:
        """Expected share of positives."""
        total = self._positive.sum() + self._negative.sum()
        return float(self._positive.sum() / total) if total else float("nan")

    @property
    def auc(self) -> float:
        """Expected AUC of ranking by the true probability; ties within a bin count half."""
        below = np.cumsum(self._negative) - self._negative
        pairs = self._positive.sum() * self._negative.sum()
        return float((self._positive * (below + self._negative / 2)).sum() / pairs) if pairs else float("nan")

    @property
    def log_loss(self) -> float:
        """Expected log loss of predicting the true probability, nats per example."""
        total = self._positive.sum() + self._negative.sum()
        return self._entropy / float(total) if total else float("nan")
