"""Baselines: the logistic regression is scikit-learn's, the figures are stored and read."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from stoker.base.errors import DataError
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset
from stoker.training.tools.baseline import _Design, baseline, saved_baselines


def columns(data: Dataset, name: str) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Indicators of ids (the mean over those of a sequence) and dense columns, one row at a time; labels."""
    spec, rows, labels = data.schema, [], []
    sizes = [spec.num_embeddings[feature.table] for feature in spec.features]
    base = np.concatenate([[0], np.cumsum(sizes)])
    for batch in data.split(name).batches(1):
        row = np.zeros(base[-1] + len(spec.dense))
        for place in range(len(sizes)):
            ids = batch.padded(place, int(batch.lengths(place))).numpy().reshape(-1)
            for each in ids:
                row[base[place] + each] += 1 / len(ids)
        row[base[-1] :] = batch.dense.numpy()[0]
        rows.append(sparse.csr_matrix(row))
        labels.append(float(batch.labels[0]))
    return sparse.vstack(rows).tocsr(), np.array(labels)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [None, {1: 3}])
def test_the_logistic_regression_is_that_of_scikit_learn(tmp_path: Path, sequence: dict[int, int] | None) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss, roc_auc_score

    data = make_dataset(tmp_path / "data", rows=1500, sequence=sequence)
    found = baseline(data)
    train, labels = columns(data, "train")
    dense = len(data.schema.dense)
    values = train[:, -dense:].toarray()
    mean, deviation = values.mean(axis=0), values.std(axis=0)

    def scaled(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
        return sparse.hstack([matrix[:, :-dense], (matrix[:, -dense:].toarray() - mean) / deviation]).tocsr()

    model = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(scaled(train), labels)
    for split in ("valid", "test"):
        matrix, known = columns(data, split)
        scores = model.predict_proba(scaled(matrix))[:, 1]
        ours = found.figures["logistic regression"][split]
        assert ours["auc"] == pytest.approx(roc_auc_score(known, scores), abs=2e-3)
        assert ours["log_loss"] == pytest.approx(log_loss(known, scores), abs=1e-3)
        mean_label = np.full(len(known), labels.mean())
        assert found.figures["average"][split]["log_loss"] == pytest.approx(log_loss(known, mean_label), abs=1e-9)


@pytest.mark.parametrize("sequence", [None, {1: 3}])
def test_trees_see_dense_columns_and_the_single_ids_of_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequence: dict[int, int] | None
) -> None:
    data, seen = make_dataset(tmp_path / "data", rows=300, sequence=sequence), []

    class Trees(ModuleType):
        """LightGBM, which learns the last column of what it is given."""

        early_stopping = staticmethod(lambda rounds, *, verbose: rounds)

        @staticmethod
        def Dataset(rows: np.ndarray, labels: np.ndarray, **_: object) -> np.ndarray:
            assert len(rows) == len(labels)
            seen.append(rows)
            return rows

        @staticmethod
        def train(options: object, train: np.ndarray, trees: int, *, valid_sets: list[np.ndarray], **_: object) -> Any:
            assert train is seen[0]
            assert valid_sets == [seen[1]]
            return SimpleNamespace(predict=lambda rows, *, raw_score: rows[:, -1])

    monkeypatch.setitem(sys.modules, "lightgbm", Trees("lightgbm"))
    found = baseline(data)
    single = [place for place, feature in enumerate(data.schema.features) if not feature.sequence]
    for rows, split in zip(seen, (data.train, data.valid), strict=True):
        (batch,) = split.batches(len(split))
        ids = np.stack([batch.padded(place, 1).numpy()[:, 0] for place in single], axis=1)
        order = np.lexsort(rows.T), np.lexsort(np.concatenate([batch.dense.numpy(), ids], axis=1).T)
        np.testing.assert_array_equal(rows[order[0]], np.concatenate([batch.dense.numpy(), ids], axis=1)[order[1]])
    assert set(found.figures) == {"average", "logistic regression", "LightGBM"}
    assert saved_baselines(data) == found


def test_baselines_are_stored_with_the_dataset(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=600)
    assert saved_baselines(data) is None
    found = baseline(data, rows=200)
    assert found.rows == 200
    assert saved_baselines(Dataset(data.path)) == found
    data.verify()
    (tmp_path / "data" / "baselines.json").write_text("{")
    assert saved_baselines(data) is None


@pytest.mark.slow
def test_no_more_rows_than_given_are_fitted_and_steps_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.training.tools.baseline.BATCH", 64)
    data, seen = make_dataset(tmp_path / "data", rows=600), list[tuple[str, int, int]]()
    assert baseline(data, rows=100).rows == 64
    assert baseline(data, progress=lambda *what: seen.append(what)).rows == len(data.train)
    steps = [done for name, done, total in seen if (name, total) == ("logistic regression", 200)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 1


def test_labels_of_one_kind_are_refused(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=20)
    with pytest.raises(DataError, match="no training rows of both labels"):
        baseline(data, rows=1)


def test_only_ids_of_the_fitted_rows_have_weights(tmp_path: Path) -> None:
    """Tables may have a hundred million rows; L-BFGS keeps about thirty numbers of eight bytes for each weight."""
    data = make_dataset(tmp_path / "data", rows=600)
    schema = replace(data.schema, num_embeddings=dict.fromkeys(data.schema.num_embeddings, 10**9))
    batches = list(data.train.batches(16, limit=64))
    design = _Design(schema, batches)
    features = range(len(schema.features))
    seen = sum(len({int(id) for batch in batches for id in batch.ids[:, place]}) for place in features)
    assert design.width == seen + len(schema.dense)
    assert design.matrix(batches[0]).shape == (16, design.width)
    other = next(iter(data.valid.batches(64)))
    entries = design.matrix(other)[:, :seen].sum(axis=1)
    known = [{int(id) for batch in batches for id in batch.ids[:, place]} for place in features]
    assert entries.A1.tolist() == [sum(int(row[place]) in known[place] for place in features) for row in other.ids]


def test_ids_of_held_out_rows_count_as_unknown_if_all_fitted_bags_are_empty(tmp_path: Path) -> None:
    spec = make_dataset(tmp_path / "data", rows=20).schema
    bags = 2 * len(spec.features)
    dense, offsets = torch.zeros(2, len(spec.dense)), torch.zeros(bags + 1, dtype=torch.int64)
    design = _Design(spec, [Batch(dense=dense, ids=torch.zeros(0, dtype=torch.int64), offsets=offsets)])
    offsets[1:] = 1
    assert (
        abs(design.matrix(Batch(dense=dense, ids=torch.tensor([3]), offsets=offsets))[:, : -len(spec.dense)]).sum() == 0
    )
