"""The yardstick of the bar that goes from a session log to a ranking."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sessions import BASELINE, DIMS, mean_reciprocal_rank


def test_mean_reciprocal_rank_by_hand() -> None:
    groups = np.array([7, 3, 7, 7, 3, 9])
    scores = np.array([0.9, 0.1, 0.5, 0.2, 0.4, 0.3])
    labels = np.array([0, 1, 1, 0, 0, 0])
    assert mean_reciprocal_rank(scores, labels, groups) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert mean_reciprocal_rank(np.zeros(6), labels, groups) == pytest.approx((1 / 3 + 1 / 2) / 2)  # equal scores


def test_both_sides_embed_alike() -> None:
    """The baseline has one column of filters where ours has a sequence, and no item properties."""
    assert BASELINE["dims"] == [size for name, size in DIMS.items() if name != "properties"]
