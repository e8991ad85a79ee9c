"""Two towers: the loss in a batch, its correction, the catalogue, and recall over all of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from small_runs import HALF, assert_same_run, records

import stoker
from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.models import TwoTower
from stoker.ops.loss import in_batch_softmax
from stoker.testing import make_dataset
from stoker.training import Catalogue
from stoker.training.notes import of_both_towers
from stoker.training.scores.evaluation import finite
from stoker.training.scores.metrics import metric_grid

SPEC = FeatureSpec.from_sizes(1, [4, 6])
RUN: dict[str, Any] = {
    "model": "two-tower", "model_options": {"item": ("C1", "I1"), "hidden": (16,), "width": 8}, "loss": "in-batch",
    "embedding_dim": 4, "batch_size": 64, "tensorboard": False, "display": "quiet", "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("data") / "d"
    return make_dataset(path, rows=3000, num_embeddings=(600, 300, 10), sequence={1: 4})


def test_loss_in_a_batch_equals_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    labels, log_q = torch.tensor([1.0, 0, 1, 1, 0]).double(), torch.rand(5, generator=generator).double().log()
    given = [users.clone().requires_grad_(), items.clone().requires_grad_()]
    found = in_batch_softmax(*given, labels, log_q)
    plain = [users.clone().requires_grad_(), items.clone().requires_grad_()]
    losses = []
    for row in (0, 2, 3):
        scores = [(plain[0][row] * plain[1][j]).sum() - log_q[j] for j in range(5)]
        losses.append(-(scores[row].exp() / sum(score.exp() for score in scores)).log())
    expected = sum(losses) / 3
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for one, other in zip(given, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    none = in_batch_softmax(*given, torch.zeros(5).double(), log_q)
    assert none.item() == 0
    assert in_batch_softmax(*given, labels * math.nan, log_q).isnan()


def test_frequencies_are_counted_in_training_alone() -> None:
    model = TwoTower(SPEC, item=("C2",), embedding_dim=4, hidden=(8,), width=4, backend="reference", slots=4)
    model.objective = "in-batch"
    ids = torch.tensor([[0, 1], [1, 5], [2, 2], [3, 3]])
    batch = Batch(dense=torch.zeros(4, 1), ids=ids, labels=torch.ones(4))
    model.loss(batch).backward()
    assert model.seen.tolist() == [0, 1, 1, 2], "items 3 and 5 share a counter of the second half"
    torch.testing.assert_close(model._log_frequency(batch), torch.tensor([2 / 8, 4 / 8, 2 / 8, 4 / 8]).log())
    raw = Batch(dense=batch.dense, ids=torch.tensor([[0, -1], [0, -3], [0, -2], [0, 1]]), labels=batch.labels)
    with torch.no_grad():  # raw ids of tables that grow may be negative
        found = model._log_frequency(raw)
    torch.testing.assert_close(found, torch.tensor([4 / 8, 4 / 8, 2 / 8, 2 / 8]).log())
    model.eval()
    with torch.no_grad():
        assert model.loss(batch).isfinite()
        assert TwoTower(SPEC, item=("C2",)).eval().own_loss(batch).isfinite(), "items that were never seen"
    assert (model.seen.sum(), model.rows_seen) == (8, 8)
    inputs = model.inputs(batch)
    users, items = model.users(*inputs), model.items(*inputs)
    torch.testing.assert_close(users.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(model(batch), (users * items).sum(1) / 0.1 + model.bias)


def taste_log(rows: int, seed: int) -> Batch:
    """Clicks of two kinds of users. Item 1 has most clicks of both; each kind has a favourite among the others."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 2, rows)
    chances = np.array([[0.6, 0.3, 0.1], [0.6, 0.1, 0.3]])
    items = np.array([1 + rng.choice(3, p=chances[kind]) for kind in kinds])
    return Batch(dense=torch.zeros(rows, 0), ids=torch.tensor(np.stack([kinds, items], 1)), labels=torch.ones(rows))


@pytest.mark.slow
def test_without_the_correction_frequent_items_score_too_low() -> None:
    """The scores converge to log P(item | user), or without the correction to log P(item | user) / P(item)."""
    log = taste_log(8192, seed=0)
    spec = FeatureSpec.from_sizes(0, [2, 4])
    scores = {}
    for corrected in (True, False):
        model = TwoTower(
            spec, item=("C2",), log_q=corrected, temperature=0.25, hidden=(16,), width=8, embedding_dim=8,
            optimizer=stoker.Adagrad(lr=0.1), backend="reference",
        )  # fmt: skip
        model.objective = "in-batch"
        optimizer = torch.optim.Adam(model.dense_parameters(), lr=0.01)
        for step in range(160):
            rows = slice(step % 32 * 256, step % 32 * 256 + 256)
            batch = Batch(dense=log.dense[rows], ids=log.ids[rows], labels=log.labels[rows])
            model.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = torch.tensor([[kind, item] for kind in (0, 1) for item in (1, 2, 3)])
        with torch.no_grad():
            scores[corrected] = model(Batch(dense=torch.zeros(6, 0), ids=pairs)).view(2, 3).log_softmax(1).exp()
    truth = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.1, 0.3]])
    torch.testing.assert_close(scores[True], truth, atol=0.05, rtol=0)
    assert scores[True].argmax(1).tolist() == [0, 0], "the item that most users of each kind choose"
    assert scores[False].argmax(1).tolist() == [1, 2]
    torch.testing.assert_close(scores[False], torch.tensor([[2, 3, 1], [2, 1, 3]]) / 6, atol=0.06, rtol=0)


@pytest.mark.slow
def test_training_learns_and_no_placement_changes_a_bit(data: Dataset, tmp_path: Path) -> None:
    """Also across a resume, which takes the counts up."""
    chosen = {**RUN, "metric": "recall_50"}
    result = stoker.train(data, out=tmp_path / "a", steps=60, eval_every=30, **chosen)
    placed = stoker.train(data, out=tmp_path / "b", steps=60, eval_every=30, device_memory=HALF, **chosen)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert result.test == placed.test
    stoker.train(data, out=tmp_path / "c", steps=30, eval_every=30, **chosen)
    resumed = stoker.train(resume=tmp_path / "c", steps=60, display="quiet")
    assert resumed.test == result.test
    assert torch.equal(resumed.model.seen, result.model.seen)
    assert stoker.verify(tmp_path / "a", steps=5).identical
    best = max(records(tmp_path / "a", "valid"), key=lambda line: line["recall_50"])
    assert result.best_step == best["step"]
    assert result.test["recall_50"] > 2 * 50 / result.test["catalogue"], "twice what chance finds"
    assert result.test["recall_rows"] == int(sum(batch.labels.sum() for batch in data.test.batches(64)))


@pytest.mark.slow
def test_rows_of_label_0_are_negatives_of_bce(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = stoker.train(data, out=tmp_path / "run", epochs=8, **{**RUN, "loss": "bce", "display": "plain"})
    assert f"recall_50 {result.test['recall_50']:.4f}" in capsys.readouterr().err
    assert result.test["auc"] > 0.8
    assert result.test["log_loss"] < 0.6


def test_recall_is_that_of_all_products(data: Dataset) -> None:
    model = TwoTower(data.schema, item=("C1", "I1"), embedding_dim=4, hidden=(8,), width=4, backend="reference").eval()
    catalogue = Catalogue(model, data)
    whole = next(iter(data.train.batches(len(data.train))))
    last = {int(id_): row for row, id_ in enumerate(model.item_ids(whole))}
    del last[0]
    assert sorted(last) == sorted(catalogue.ids.tolist())
    inputs = model.inputs(whole)
    with torch.no_grad():
        items = model.items(*inputs)[[last[int(id_)] for id_ in catalogue.ids]]
    torch.testing.assert_close(catalogue.vectors(model), items)
    test = next(iter(data.test.batches(len(data.test))))
    with torch.no_grad():
        scores = model.users(*model.inputs(test)) @ items.T
    hits = {10: 0, 50: 0, 100: 0}
    order = scores.argsort(1, descending=True)
    for row in test.labels.nonzero().flatten():
        best = catalogue.ids[order[row]].tolist()
        for k in hits:
            hits[k] += int(model.item_ids(test)[row]) in best[:k]
    found = stoker.evaluate(model, data.test, catalogue=catalogue)
    asked = int(test.labels.sum())
    assert {k: found[f"recall_{k}"] * asked for k in hits} == pytest.approx(hits)
    assert 0 < hits[10] < hits[100] < asked
    with torch.no_grad():  # equal products: the item asked for counts as the last
        for parameter in model.item_tower.parameters():
            parameter.zero_()
    assert stoker.evaluate(model, data.test, catalogue=catalogue)["recall_100"] == 0
    assert stoker.evaluate(model, data.test, rows=50, catalogue=catalogue)["recall_rows"] == int(test.labels[:50].sum())


def test_rows_of_an_update_extend_a_catalogue(data: Dataset) -> None:
    model = TwoTower(data.schema, item=("C1", "I1"), embedding_dim=4, hidden=(8,), width=4, backend="reference").eval()
    catalogue = Catalogue(model, data)
    catalogue.ids, catalogue._items = catalogue.ids[:0], []
    alone = catalogue.extended(model, data)  # of the test rows
    test = next(iter(data.test.batches(len(data.test))))
    assert sorted(alone.ids.tolist()) == sorted({*model.item_ids(test).tolist()} - {0})
    ranks = alone._ranks(torch.ones(2, 4), torch.ones(1, 4), torch.tensor([-1, 0]))
    assert ranks.tolist() == [101, 0], "an item that is not in the catalogue is not found"
    both = Catalogue(model, data).extended(model, data)
    assert len(both) == len({*both.ids.tolist()}) == len({*both.ids.tolist(), *alone.ids.tolist()})
    of = dict(zip(both.ids.tolist(), both.vectors(model), strict=True))
    torch.testing.assert_close(torch.stack([of[one] for one in alone.ids.tolist()]), alone.vectors(model))


def test_metrics_of_probabilities_are_undefined_after_a_loss_that_ranks() -> None:
    found = {"auc": 0.7, "log_loss": 2.0, "normalized_entropy": 3.0, "accuracy": 0.4, "calibration": 9.0, "rows": 4}
    odd = dict.fromkeys(["log_loss", "normalized_entropy", "accuracy", "calibration"])
    assert finite(found | {"positives": 2}, "bce") == found | {"positives": 2}
    assert finite(found | {"positives": 2}, "softmax") == found | odd | {"positives": 2}
    # It decides: because it is to, or because there is no AUC.
    for metric, positives in (("log_loss", 2), ("auc", 4)):
        kept = finite(found | {"positives": positives}, "in-batch", metric)
        assert kept == found | odd | {"log_loss": 2.0, "positives": positives}
    assert [row[0] for row in metric_grid({"valid": found | odd, "test": {"auc": None}}).rows] == ["AUC", "rows"]


@pytest.mark.parametrize("tower", ["user_tower", "item_tower"])
def test_the_recall_of_a_model_that_is_not_finite_is_undefined(data: Dataset, tower: str) -> None:
    model = TwoTower(data.schema, item=("C1", "I1"), embedding_dim=4, hidden=(8,), width=4, backend="reference").eval()
    with torch.no_grad():
        getattr(model, tower).layers[-1].bias.fill_(math.nan)
    found = Catalogue(model, data).recall(model, data.test)
    assert math.isnan(found["recall_10"])


def test_columns_of_the_item_are_found_or_asked_for() -> None:
    item, kind = Feature(name="item", table="items"), Feature(name="kind", table="kinds")
    past = [Feature(name=f"{one.name}s", table=one.table, sequence=True, max_length=3) for one in (kind, item)]
    spec = FeatureSpec(dense=("age",), features=(kind, item, *past), num_embeddings={"items": 90, "kinds": 9})
    model = TwoTower(spec)
    assert (model.item, model.identity) == (("item", "kind"), 1)
    with pytest.raises(ConfigError, match=r'cannot tell which columns are of the item.*item=\["C2"\]'):
        TwoTower(SPEC)
    with pytest.raises(ConfigError, match=r"item names C3, which the dataset does not have. It has: I1, C1, C2"):
        TwoTower(SPEC, item=("C3",))
    for wrong in (("age",), ("items",)):
        with pytest.raises(ConfigError, match="first categorical column must be the id of the item"):
            TwoTower(spec, item=wrong)
    with pytest.raises(ConfigError, match="none is left for the user"):
        TwoTower(SPEC, item=("C1", "C2", "I1"))
    with pytest.raises(ConfigError, match="temperature=0"):
        TwoTower(SPEC, item=("C1",), temperature=0)
    with pytest.raises(ConfigError, match="model 'dlrm' has no loss 'in-batch', which is of two-tower"):
        stoker.TrainConfig(loss="in-batch")
    with pytest.raises(ConfigError, match="is over the items of a batch, which 8 shards, or ranks, would cut"):
        stoker.TrainConfig(model="two-tower", loss="in-batch", shards=8)
    with pytest.raises(ConfigError, match="metric recall_10 is of model two-tower"):
        stoker.TrainConfig(metric="recall_10")
    with pytest.raises(ConfigError, match="compile"):
        stoker.TrainConfig(model="two-tower", loss="in-batch", compile=True)


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "decides"), [(None, "recall_10"), ("recall_50", "recall_50")])
def test_without_a_row_of_label_0_recall_chooses_the_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str | None, decides: str
) -> None:
    log = pl.DataFrame({"sold": 1, "user": [i % 40 for i in range(800)], "item": [i % 40 * 7 % 60 for i in range(800)]})
    plain = {"label": "sold", "categorical": [{"name": name, "type": "int"} for name in ("user", "item")]}
    data = stoker.prepare(stoker.Schema.from_dict(plain), log, out=tmp_path / "d", split="random:0.6,0.3")
    given = RUN | {"display": "plain", "model_options": {"item": ("item",)}} | ({"metric": metric} if metric else {})
    result = stoker.train(data, out=tmp_path / "run", steps=20, eval_every=2, **given)
    lines = records(tmp_path / "run", "valid")
    assert result.best_step == max(lines, key=lambda line: (line[decides], -line["step"]))["step"]
    assert {line["log_loss"] for line in lines} == {None}
    note = "all validation labels are the same: without an AUC, recall@10 says what is best"
    assert (note in " ".join("".join(capsys.readouterr()).split())) == (metric is None)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "named"), [
    ("match column=kind values=item", ""),
    ("previous by=user column=item order=at", ""),
    ("merge on=item file=FILE columns=maker number_columns=price", "x_maker, x_price are computed from item,"),
    ("split column=item width=1", "x_1 is computed from item,"),
    ("time_parts column=item parts=hour", "x_hour is computed from item,"),
    ("difference by=user column=item order=at", "x is computed from item,"),
    ("rank by=user order=item", "x is computed from item,"),
    ("mask column=kind where_column=item values=1", "x is computed from item,"),
    ("", "again is computed from item,"),
])  # fmt: skip
def test_columns_of_each_kind_know_the_item_or_not(tmp_path: Path, feature: str, named: str) -> None:
    file = tmp_path / "items.csv"
    pl.DataFrame({"item": [*range(5)], "maker": [*"ababc"], "price": [1.0, 2.0, 3.0, 4.0, 5.0]}).write_csv(file)
    log = pl.DataFrame({"click": [0, 1] * 50, "user": [*range(10)] * 10, "item": [*range(5)] * 20, "at": [*range(100)]})
    columns = [{"name": name, "type": "int"} for name in ("user", "item")]
    columns += [] if feature else [{"name": "again", "source": "item", "type": "int"}]
    derive = [feature.replace(" ", " name=x ", 1).replace("FILE", str(file))] if feature else []
    plain = {"label": "click", "categorical": columns, "timestamp": {"column": "at"}, "derive": derive}
    rows = log.with_columns(kind=pl.lit("item"))
    data = stoker.prepare(stoker.Schema.from_dict(plain), rows, out=tmp_path / "d", split="random:0.8,0.1")
    notes = [*of_both_towers(stoker.TwoTower(data.schema, item=("item",), embedding_dim=4), data)]
    assert len(notes) == bool(named)
    assert not named or notes[0].startswith(named)


def test_a_column_of_the_user_that_knows_the_item_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = pl.DataFrame({"click": [0, 1] * 50, "user": [*range(10)] * 10, "item": [*range(5)] * 20, "at": [*range(100)]})
    columns = [{"name": name, "type": "int"} for name in ("user", "item")]
    features = ["past_count name=sold by=item order=at", "past_count name=busy by=user order=at"]
    plain = {"label": "click", "categorical": columns, "timestamp": {"column": "at"}, "derive": features}
    data = stoker.prepare(stoker.Schema.from_dict(plain), log, out=tmp_path / "d", split="random:0.8,0.1")
    for item, named in ((("item",), True), (("item", "sold"), False)):
        given = RUN | {"display": "plain", "model_options": {"item": item}, "steps": 1}
        stoker.train(data, out=tmp_path / "-".join(item), **given)
        said = " ".join("".join(capsys.readouterr()).split())
        assert ("sold is computed from item, which is of the item, but belongs to the user" in said) == named
        assert "busy is computed" not in said
