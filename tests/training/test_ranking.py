"""Metrics over lists: against plain definitions and scikit-learn, and in runs, commands and records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import SMALL, checkpoint_files, records
from typer.testing import CliRunner

import stoker
from stoker.base.errors import ConfigError
from stoker.cli import app
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset
from stoker.training.scores import metrics
from stoker.training.scores.metrics import RankingMetrics, deciding, merit


def by_hand(scores: list[float], labels: list[int], groups: list[int], k: int) -> dict[str, float]:
    """The definitions, list by list; of equal scores negative rows come first."""
    lists: dict[int, list[tuple[float, int]]] = {}
    for score, label, group in zip(scores, labels, groups, strict=True):
        lists.setdefault(group, []).append((score, label))
    reciprocal, gains, hits, areas, weights = [], [], [], [], []
    for rows in lists.values():
        order = [label for _, label in sorted(rows, key=lambda row: (-row[0], row[1]))]
        if any(order):
            reciprocal.append(1 / (order.index(1) + 1))
            hits.append(1 in order[:k])
            best = sum(1 / math.log2(place + 2) for place in range(min(k, sum(order))))
            gains.append(sum(label / math.log2(place + 2) for place, label in enumerate(order[:k])) / best)
        if 0 < sum(order) < len(order):
            pairs = [(p > n) + (p == n) / 2 for p, one in rows if one for n, other in rows if not other]
            areas.append(sum(pairs) / len(pairs) * len(rows))
            weights.append(len(rows))

    def mean(values: list[Any]) -> float:
        return sum(values) / len(values) if values else math.nan

    return {
        "mrr": mean(reciprocal), "ndcg": mean(gains), "hr": mean(hits),
        "group_auc": sum(areas) / sum(weights) if weights else math.nan,
        "ranking_k": k, "groups": len(lists), "ranked_groups": len(reciprocal),
    }  # fmt: skip


def measured(scores: Any, labels: Any, groups: Any, k: int, batch: int = 7) -> dict[str, float]:
    metrics = RankingMetrics(k=k)
    scores, labels = torch.tensor(scores, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)
    for start in range(0, len(scores), batch):
        rows = slice(start, start + batch)
        metrics.update(scores[rows], labels[rows], np.asarray(groups, np.int32)[rows])
    return metrics.compute()


_ROW = st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1e-30, 3.0]), st.integers(0, 1), st.integers(0, 5))


@given(st.lists(_ROW, min_size=1, max_size=60), st.integers(1, 6))
def test_equals_the_definitions_with_ties_and_scattered_lists(rows: list[tuple[float, int, int]], k: int) -> None:
    scores, labels, groups = (list(column) for column in zip(*rows, strict=True))
    assert measured(scores, labels, groups, k) == pytest.approx(by_hand(scores, labels, groups, k), nan_ok=True)


@pytest.mark.slow
def test_equals_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.metrics import ndcg_score, roc_auc_score

    monkeypatch.setattr(metrics, "_BLOCK", 100)  # many blocks, and groups larger than one
    generator = np.random.default_rng(2)
    sizes = [1, 2, 3, 25, 25, 400, 7, 30]
    groups = np.repeat(np.arange(len(sizes)), sizes)
    scores, labels = generator.permutation(len(groups)) / 7.0 - 20, generator.integers(0, 2, len(groups))
    labels[groups == 6] = 0  # one list without an answer
    found = measured(scores, labels, groups, k=10, batch=50)
    lists = [(labels[groups == g], scores[groups == g]) for g in range(len(sizes))]
    ranked = [ndcg_score([truth], [score], k=10) for truth, score in lists[1:] if truth.any()]
    ranked += [1.0 for truth, _ in lists[:1] if truth.any()]  # scikit-learn refuses a list of one
    assert found["ndcg"] == pytest.approx(np.mean(ranked), rel=1e-12)
    both = [(truth, score) for truth, score in lists if 0 < truth.sum() < len(truth)]
    areas = [roc_auc_score(truth, score) for truth, score in both]
    mean = np.average(areas, weights=[len(truth) for truth, _ in both])
    assert found["group_auc"] == pytest.approx(mean, rel=1e-12)
    assert found["ranked_groups"] == sum(truth.any() for truth, _ in lists)


def test_a_constant_score_earns_the_worst_place() -> None:
    found = measured([0.0] * 10, [1] + [0] * 9, [0] * 10, k=5)
    assert (found["mrr"], found["ndcg"], found["hr"], found["group_auc"]) == (0.1, 0.0, 0.0, 0.5)


def test_a_hit_is_among_the_first_k() -> None:
    found = [measured([4.0, 3.0, 2.0, 1.0], [0, 0, 1, 0], [0] * 4, k) for k in (2, 3)]
    assert [(each["hr"], each["ndcg"]) for each in found] == [(0.0, 0.0), (1.0, 0.5)]


def test_logits_that_were_infinite_in_one_batch_leave_the_metrics_undefined() -> None:
    metrics = RankingMetrics()
    for value in (math.inf, 1.0):
        metrics.update(torch.tensor([value, 0.0]), torch.tensor([1.0, 0.0]), np.array([1, 1]))
    assert math.isnan(metrics.compute()["mrr"])


def test_undefined_metrics() -> None:
    empty = RankingMetrics().compute()
    assert all(math.isnan(empty[name]) for name in metrics.RANKING)
    negative = measured([1.0, 2.0], [0, 0], [0, 0], k=3)
    assert math.isnan(negative["mrr"])
    assert (negative["groups"], negative["ranked_groups"]) == (1, 0)
    assert math.isnan(measured([math.nan, 1.0], [0, 1], [0, 0], k=3)["mrr"])
    with pytest.raises(ConfigError, match="k is 0"):
        RankingMetrics(k=0)
    with pytest.raises(ValueError, match="must all be"):
        RankingMetrics().update(torch.zeros(2), torch.zeros(2), np.zeros(3, np.int32))
    last = RankingMetrics()
    last.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), np.array([0, 2**31 - 1]))
    assert (last.compute()["mrr"], last.compute()["groups"]) == (1.0, 2)
    for groups in (np.array([0, 2**31]), np.array([-1, 0]), np.array([0.2, 0.7])):
        with pytest.raises(ValueError, match="whole numbers from 0"):
            RankingMetrics().update(torch.zeros(2), torch.zeros(2), groups)
    for label in (float("nan"), 2.0, 0.5):
        with pytest.raises(ValueError, match="is neither 0 nor 1"):
            RankingMetrics().update(torch.zeros(2), torch.tensor([0.0, label]), np.zeros(2, np.int32))


def test_what_decides() -> None:
    values: dict[str, float | None] = {"rows": 4, "positives": 2, "mrr": 0.5, "group_auc": None, "log_loss": 0.7}
    assert merit(values, "mrr") == 0.5
    assert deciding(values, "group_auc") == "log_loss"
    assert merit(values, "group_auc") == -0.7
    assert deciding({**values, "positives": 4}, "mrr") == "log_loss"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(
        tmp_path_factory.mktemp("ranking") / "d", rows=2000, num_embeddings=(600, 300, 10), group_rows=8
    )


@pytest.mark.slow
def test_a_run_chooses_its_best_checkpoint_by_mrr(data: Dataset, tmp_path: Path) -> None:
    settings = {**SMALL, "metric": "mrr", "ranking_k": 3, "eval_every": 10, "epochs": 2, "row_lr": 0.5}
    result = stoker.train(data, out=tmp_path / "a", **settings)
    valid = records(tmp_path / "a", "valid")
    best = max(valid, key=lambda record: record["mrr"])
    assert result.best_step == best["step"]
    assert best["step"] != max(valid, key=lambda record: record["auc"])["step"], "the test must tell mrr from auc"
    assert result.test["ranking_k"] == 3
    # The same figures from the scores that a user gets.
    scores = tmp_path / "scores.parquet"
    stoker.training.predict(result.model, data.test, scores)
    frame = pl.read_parquet(scores)
    logits = torch.logit(torch.tensor(frame["score"].to_numpy()).double()).tolist()
    expected = by_hand(logits, frame["label"].cast(int).to_list(), frame["group"].to_list(), 3)
    assert {name: result.test[name] for name in expected} == pytest.approx(expected)
    # Stopped and continued, the same run.
    stoker.train(data, out=tmp_path / "b", **{**settings, "epochs": 1})
    stoker.train(resume=tmp_path / "b", display="quiet", epochs=2)
    again = {record["step"]: record["mrr"] for record in records(tmp_path / "b", "valid")}
    assert all(again[record["step"]] == record["mrr"] for record in valid)
    assert checkpoint_files(tmp_path / "a") == checkpoint_files(tmp_path / "b")


def test_ranking_metrics_need_groups(tmp_path: Path) -> None:
    plain = make_dataset(tmp_path / "d", rows=200)
    with pytest.raises(ConfigError, match="prepared without group"):
        stoker.train(plain, out=tmp_path / "a", **SMALL, metric="mrr")
    assert not (tmp_path / "a").exists()
    stoker.train(plain, out=tmp_path / "b", **SMALL)
    assert not set(records(tmp_path / "b", "test")[0]) & {*metrics.RANKING, "groups"}


def test_evaluate_and_tensorboard_show_them(data: Dataset, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stoker.train(data, out=tmp_path / "a", **{**SMALL, "tensorboard": True})
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    for name in metrics.RANKING:
        assert events.Scalars(f"valid/{name}")[0].value == pytest.approx(records(tmp_path / "a", "valid")[0][name])
    shown = CliRunner().invoke(app, ["evaluate", str(tmp_path / "a"), "--k", "2"])
    assert shown.exit_code == 0, shown.output
    for words in ("MRR", "nDCG@2", "hit rate@2", "group AUC", "lists with a positive"):
        assert words in shown.output
    told = json.loads(CliRunner().invoke(app, ["evaluate", str(tmp_path / "a"), "--json"]).output)
    test = records(tmp_path / "a", "test")[0]
    assert {name: told[name] for name in metrics.RANKING} == {name: test[name] for name in metrics.RANKING}
    assert told["ranking_k"] == 10
