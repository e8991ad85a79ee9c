"""Streaming metrics against scikit-learn and against their definitions."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.training.scores.metrics import StreamingMetrics

# Few distinct values make ties; the rest of the range makes odd exponents and signed zeros.
LOGIT = st.one_of(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0]), st.floats(-80, 80, width=32))
ROWS = st.lists(st.tuples(LOGIT, st.booleans()), min_size=1, max_size=60)


def stream(logits: torch.Tensor, labels: torch.Tensor, cuts: list[int], **options: Any) -> dict[str, float]:
    metrics = StreamingMetrics(**options)
    for start, stop in zip([0, *cuts], [*cuts, len(labels)], strict=True):
        metrics.update(logits[start:stop], labels[start:stop])
    return metrics.compute()


@pytest.mark.slow
@settings(max_examples=scaled(200), deadline=None)
@given(ROWS, st.lists(st.integers(0, 60), max_size=4))
def test_equals_scikit_learn_however_the_rows_arrive(rows: list[tuple[float, bool]], cuts: list[int]) -> None:
    from sklearn import metrics as sk

    logits = torch.tensor([logit for logit, _ in rows])
    labels = torch.tensor([float(label) for _, label in rows])
    found = stream(logits, labels, sorted(min(cut, len(rows)) for cut in cuts))
    scores = torch.sigmoid(logits.double()).numpy()
    truth = labels.double().numpy()
    # scikit-learn works on rounded probabilities, which lose the logits of confident predictions.
    exact = np.logaddexp(0, np.where(truth == 1, -logits.double().numpy(), logits.double().numpy())).mean()
    assert found["log_loss"] == pytest.approx(exact, rel=1e-12, abs=1e-300)
    if abs(logits).max() < 15:
        assert found["log_loss"] == pytest.approx(sk.log_loss(truth, scores, labels=[0, 1]), rel=1e-9, abs=1e-12)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, logits.numpy() >= 0), rel=1e-12)
    mean = truth.mean()
    if 0 < mean < 1:
        assert found["auc"] == pytest.approx(sk.roc_auc_score(truth, logits.numpy()), rel=1e-12)
        base = sk.log_loss(truth, np.full(len(truth), mean), labels=[0, 1])
        assert found["normalized_entropy"] == pytest.approx(exact / base, rel=1e-9)
    else:
        assert math.isnan(found["auc"])
        assert math.isnan(found["normalized_entropy"])
    if mean > 0:
        assert found["calibration"] == pytest.approx(scores.sum() / truth.sum(), rel=1e-9)
    else:
        assert math.isnan(found["calibration"])
    assert (found["rows"], found["positives"]) == (len(rows), int(truth.sum()))


@settings(max_examples=scaled(100), deadline=None)
@given(ROWS, st.integers(0, 20))
def test_counting_in_bins_stays_within_the_error_it_reports(rows: list[tuple[float, bool]], kept: int) -> None:
    logits = torch.tensor([logit for logit, _ in rows])
    labels = torch.tensor([float(label) for _, label in rows])
    exact = stream(logits, labels, [])
    cuts = list(range(7, len(rows), 7))
    found = stream(logits, labels, cuts, exact_rows=kept)
    for name in ("log_loss", "accuracy", "calibration"):
        assert found[name] == pytest.approx(exact[name], rel=1e-9, nan_ok=True)
    if math.isnan(exact["auc"]):
        assert math.isnan(found["auc"])
    else:
        assert abs(found["auc"] - exact["auc"]) <= found["auc_error"] + 1e-12
        assert exact["auc_error"] == 0


def test_as_many_rows_as_may_be_kept_are_exact() -> None:
    logits, labels = torch.tensor([1.0, 1.0 + 2.0**-20, 0.0]), torch.tensor([0.0, 1.0, 1.0])
    exact, binned = stream(logits, labels, [], exact_rows=3), stream(logits, labels, [], exact_rows=2)
    assert (exact["auc"], exact["auc_error"]) == (0.5, 0.0)
    assert binned["auc_error"] > 0.0, "two scores are in one bin"


def test_binned_auc_of_many_rows_is_close() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200_000, generator=generator)
    labels = (torch.rand(200_000, generator=generator) < torch.sigmoid(logits)).float()
    exact = stream(logits, labels, [])
    binned = stream(logits, labels, list(range(0, 200_000, 4096)), exact_rows=1000)
    assert binned["auc_error"] < 2e-5
    assert binned["auc"] == pytest.approx(exact["auc"], abs=1e-6)


def test_memory_does_not_grow_with_the_rows() -> None:
    metrics = StreamingMetrics(exact_rows=100_000)
    logits, labels = torch.randn(50_000), (torch.rand(50_000) < 0.5).float()
    for _ in range(3):
        metrics.update(logits, labels)
    tracemalloc.start()
    for _ in range(10):
        metrics.update(logits, labels)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 50_000
    assert metrics.compute()["rows"] == 13 * 50_000


def test_no_rows_and_wrong_rows() -> None:
    empty = StreamingMetrics().compute()
    assert empty["rows"] == 0
    assert math.isnan(empty["log_loss"])
    with pytest.raises(ValueError, match="0 or 1"):
        StreamingMetrics().update(torch.zeros(2), torch.tensor([0.0, 0.5]))
    with pytest.raises(ValueError, match="0 or 1"):
        StreamingMetrics().update(torch.zeros(2), torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match="both be"):
        StreamingMetrics().update(torch.zeros(2), torch.zeros(3))


def test_infinite_logits_do_not_hide() -> None:
    found = stream(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 0.0]), [])
    assert math.isnan(found["auc"])
    assert math.isnan(found["log_loss"])
