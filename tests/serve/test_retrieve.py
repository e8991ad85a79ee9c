"""Retrieval: the best of all items by the scores of the model, from a run and from an export, exact and approximate."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.serve import retrieve, scorer
from stoker.serve.items import ITEMS
from stoker.testing import make_daily_run
from stoker.training.scores.catalogue import catalogue_of

TRAIN: dict[str, Any] = {
    "model": "two-tower", "model_options": {"item": ("item", "kind", "price"), "hidden": (16,), "width": 8},
    "loss": "in-batch", "embedding_dim": 4, "batch_size": 64, "epochs": 2, "tensorboard": False, "display": "quiet",
}  # fmt: skip


def log(rows: int, seed: int = 0) -> pl.DataFrame:
    """Purchases of 300 items, some of which are seldom; one has no name."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 300, rows) * rng.integers(1, 3, rows) // 2
    names = [None if one == 7 else f"item {one}" for one in item]
    return pl.DataFrame({
        "bought": rng.integers(0, 2, rows), "user": rng.integers(0, 20, rows), "age": rng.normal(size=rows),
        "item": names, "kind": item % 5, "price": item / 100,
    })  # fmt: skip


def prepare(folder: Path, **item: Any) -> stoker.Dataset:
    columns = [
        {"name": "user", "type": "int"}, {"name": "kind", "type": "int"},
        {"name": "item", "missing": "category", **item},
    ]  # fmt: skip
    dense = [{"name": "age"}, {"name": "price"}]
    schema = {"name": "shop", "label": "bought", "categorical": columns, "dense": dense}
    return stoker.prepare(stoker.Schema.from_dict(schema), log(4000), out=folder, split="random:0.8,0.1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    stoker.train(prepare(folder / "data"), out=folder / "run", **TRAIN)
    return folder / "run"


@pytest.mark.slow
def test_the_best_items_are_those_with_the_best_scores(run: Path) -> None:
    retriever, scorer = stoker.Retriever(run), stoker.Scorer(run)
    assert sorted(retriever.columns) == ["age", "user"]
    users = log(9).select("user", "age")
    found = retriever.topk(users, k=20)
    assert found.summary() == "20 items for 9 users"
    items = log(4000).select("item", "kind", "price").unique()
    known = items.filter(pl.col("item").is_in(retriever.items.to_pylist(), nulls_equal=True))
    assert len(known) == len(retriever) > 200
    assert None in known["item"].to_list(), "the item without a name is one, too"
    for place in range(9):
        pairs = known.join(users[place], how="cross")
        scores = scorer.score(pairs)
        best = np.argsort(-scores, kind="stable")[:20]
        np.testing.assert_allclose(found.scores[place], scores[best], rtol=1e-5)
        of = dict(zip(known["item"].to_list(), scores, strict=True))
        np.testing.assert_allclose([of[item] for item in found.items[place]], scores[best], rtol=1e-5)
    model = stoker.load(run).model
    with torch.no_grad():
        model.bias.fill_(1.5)  # which in-batch losses leave at 0
    shifted = stoker.Retriever(model, run.with_name("data")).topk(users, k=20)
    logits = [torch.from_numpy(each.scores).double().logit() for each in (found, shifted)]
    torch.testing.assert_close(logits[1], logits[0] + 1.5, atol=1e-3, rtol=0)
    alone = [retriever.topk(users[place], k=20).items[0] for place in range(9)]
    assert alone == found.items
    assert retriever.topk(users, k=10**6).scores.shape == (9, len(retriever))


def test_items_are_searched_block_by_block(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = log(9).select("user", "age")
    expected = stoker.Retriever(run).topk(users, k=20)
    monkeypatch.setattr(retrieve, "_EXACT", 16)  # fewer items than are asked for
    found = stoker.Retriever(run).topk(users, k=20)
    assert found.items == expected.items
    np.testing.assert_array_equal(found.scores, expected.scores)


@given(
    values=st.lists(st.integers(-2, 2), min_size=1, max_size=300), share=st.floats(0, 1), block=st.integers(1, 400),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_places_are_those_of_the_largest_products(values: list[int], share: float, block: int, seed: int) -> None:
    """Among equal items the first; a graph that finds fewer gets others."""
    vectors, user, k = np.array(values, np.float32)[:, None], np.ones(1, np.float32), max(1, int(share * len(values)))
    best = sorted(range(len(values)), key=lambda place: (-values[place], place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieve, "_EXACT", block)
        assert retrieve._nearest(vectors, user, k).tolist() == best[:k]
    rng = np.random.default_rng(seed)
    seen = rng.permutation(len(values))[: rng.integers(k + 1)].astype(np.uint64)
    found = retrieve._near(SimpleNamespace(search=lambda *_: SimpleNamespace(keys=seen)), vectors, user, k).tolist()
    assert len(found) == len(set(found)) == k
    assert set(seen.tolist()) <= set(found)
    assert found == [place for place in best if place in found]


def test_a_graph_of_vectors_that_were_replaced_meanwhile_is_not_used(run: Path) -> None:
    retriever, graphs = stoker.Retriever(run), []

    class Graph:
        def __init__(self, **_: Any) -> None:
            graphs.append(self)

        def add(self, *_: Any, **__: Any) -> None:
            if len(graphs) == 1:  # a poll, from another thread
                retriever.vectors = retriever.vectors.copy()

    retriever._graphs = SimpleNamespace(Index=Graph)
    for index in (None, 1):
        retriever._build()
        assert retriever._index is (index and graphs[index])


@pytest.mark.slow
def test_users_need_nothing_that_features_of_the_item_read(tmp_path: Path) -> None:
    schema = stoker.Schema.from_dict({
        "name": "shop", "label": "bought", "timestamp": {"column": "at", "type": "datetime", "format": "%d.%m.%Y"},
        "derive": ["past_count name=sold by=item order=at", "mean_target name=rate by=kind",
                   "divide name=share left=sold right=price"],
        "categorical": [{"name": "item"}, {"name": "user", "type": "int"}],
    })  # fmt: skip
    rows = log(600).with_columns(at=pl.Series([f"{1 + row // 100:02}.03.2026" for row in range(600)])).drop("age")
    data = stoker.prepare(schema, rows, out=tmp_path / "data", split="time:0.8,0.1")
    options = {"item": ("item", *data.schema.dense), "hidden": (16,), "width": 8}
    stoker.train(data, out=tmp_path / "run", **TRAIN | {"model_options": options})
    retriever, rows = stoker.Retriever(tmp_path / "run"), rows.tail(3).drop("bought")
    assert retriever.columns == ["user"]
    users, wanted = rows.select("user"), retriever.topk(rows)
    for found in (retriever.topk(users), retriever.topk(users.cast(pl.String).to_dicts())):
        assert found.items == wanted.items
        assert np.array_equal(found.scores, wanted.scores)


def test_an_export_has_the_items(run: Path, tmp_path: Path) -> None:
    users = log(50).select("user", "age")
    expected = stoker.Retriever(run).topk(users)
    for rows in ("fp32", "int8"):
        made = stoker.export(run, tmp_path / rows, rows=rows).path
        found = stoker.Retriever(made, check=True).topk(users)
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6 if rows == "fp32" else 0.05)
        assert rows != "fp32" or found.items == expected.items
    (made / ITEMS).write_bytes(b"short")
    with pytest.raises(stoker.CheckpointError, match="was altered: 5 bytes"):
        stoker.Retriever(made)


def test_a_graph_finds_nearly_all_of_them(run: Path) -> None:
    pytest.importorskip("usearch", reason="the index is usearch's")
    users = log(200).select("user", "age")
    exact, near = (stoker.Retriever(run, approximate=each).topk(users, k=10) for each in (False, True))
    shared = [len({*one} & {*other}) for one, other in zip(exact.items, near.items, strict=True)]
    assert sum(shared) >= 0.95 * 2000
    assert (near.scores <= exact.scores + 1e-6).all()
    assert (np.diff(near.scores, axis=1) <= 0).all()


@pytest.mark.slow
def test_what_has_no_vectors_is_refused(run: Path, tmp_path: Path) -> None:
    make_daily_run(tmp_path / "dlrm")
    with pytest.raises(stoker.ConfigError, match="model 'dlrm' has no vectors of items"):
        stoker.Retriever(tmp_path / "dlrm")
    data = prepare(tmp_path / "hashed", hash_buckets=50)
    stoker.train(data, out=tmp_path / "run", **TRAIN)
    with pytest.raises(stoker.ConfigError, match="ids of column 'item' are hashes"):
        stoker.Retriever(tmp_path / "run")
    assert not (stoker.export(tmp_path / "run", tmp_path / "out").path / ITEMS).exists()
    with pytest.raises(stoker.ConfigError, match="ids of column 'item' are hashes"):
        stoker.Retriever(tmp_path / "out")
    retriever = stoker.Retriever(run)
    with pytest.raises(stoker.DataError, match="lack 'age'"):
        retriever.topk(log(3).select("user"))
    with pytest.raises(stoker.ConfigError, match="k is 0 items"):
        retriever.topk(log(3).select("user", "age"), k=0)


@pytest.mark.slow
def test_a_run_that_is_updated_while_it_is_opened(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items and window features must be those of the model, not of the update that is published meanwhile."""
    shutil.copytree(run, tmp_path / "run")
    run = tmp_path / "run"
    day = log(400, 2).with_columns(item=pl.col("item") + " new")

    def replaced(place: Any, name: str) -> None:
        call = getattr(place, name)

        def late(*arguments: Any, **settings: Any) -> Any:
            monkeypatch.undo()
            found = call(*arguments, **settings)
            stoker.rollback(run)
            stoker.update(run, day.head(300))
            return found

        monkeypatch.setattr(place, name, late)

    for follow in (False, True):
        for place, name in ((scorer, "newest_rows"), (scorer, "_encoder"), (retrieve, "Scorer")):
            stoker.update(run, day)
            replaced(place, name)
            with pytest.raises(stoker.CheckpointError, match="was replaced while it was read"):
                stoker.Retriever(run, follow=follow)
            stoker.rollback(run)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", [stoker.Scorer, stoker.Retriever])
@pytest.mark.usefixtures("no_cycle_is_found")
def test_the_model_goes_with_the_last_reference(kind: Any, follow: bool, run: Path) -> None:
    made = kind(run, follow=follow)
    made.poll()
    alive = weakref.ref(made), weakref.ref(made.model)
    del made
    assert [each() for each in alive] == [None, None]


@pytest.mark.slow
def test_a_retriever_follows_updates_and_roll_backs(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    run = tmp_path / "run"
    days = [
        log(400, seed).with_columns(item=pl.col("item") + f" of {seed // 2}", price=pl.lit(float(seed)))
        for seed in (2, 3, 4)
    ]
    users = log(5).select("user", "age")
    follower, near = stoker.Retriever(run, follow=True), stoker.Retriever(run, follow=True, approximate=True)
    states = [(follower.items, follower.vectors)]

    def check(*past: pl.DataFrame) -> None:
        assert follower.poll() == near.poll()
        fresh = stoker.Retriever(run)
        for one in (follower, near):
            assert one.items.equals(fresh.items)
            assert np.array_equal(one.vectors, fresh.vectors), "to the bit"
        assert near._index is not None
        assert len(near._index) == len(near)
        bought = pl.concat([log(4000), *past]).filter(pl.col("item").is_in(fresh.items.to_pylist(), nulls_equal=True))
        last = bought.unique("item", keep="last").select("item", "kind", "price")
        assert len(last) == len(fresh)
        scores = np.sort(stoker.Scorer(run).score(last.join(users[0], how="cross")))[::-1]
        found = follower.topk(users, k=20)
        np.testing.assert_allclose(found.scores[0], scores[:20], rtol=1e-5)
        assert found.version["update"] == len(past)

    check()
    for number, day in enumerate(days[:2], 1):
        found = stoker.update(run, day)
        assert found.before["catalogue"] == len(states[-1][0])
        assert 0 < found.before["recall_rows"] < 400
        check(*days[:number])
        assert len(follower) > len(states[-1][0]) or number > 1
        states.append((follower.items, follower.vectors))
    loaded, rows = stoker.load(run), stoker.Dataset(run / "updates/000002")
    catalogue = catalogue_of(loaded.model, rows, loaded.path)
    assert catalogue is not None
    assert stoker.evaluate(loaded.model, rows.test, catalogue=catalogue)["catalogue"] == len(follower)
    served = stoker.Retriever(stoker.export(run, tmp_path / "out").path)
    np.testing.assert_allclose(served.vectors, follower.vectors, atol=1e-6)
    assert served.items.equals(follower.items)
    for number in (1, 0):
        stoker.rollback(run, number)
        check(*days[:number])
        assert np.array_equal(follower.vectors, states[number][1])
    stoker.update(run, days[2])
    stoker.update(run, days[1])
    check(days[2], days[1])
    stoker.compact(run)
    assert not follower.poll(), "the same model"
    check(days[2], days[1])
    with pytest.raises(stoker.ConfigError, match="has no training rows, so no items"):
        stoker.Retriever(run, data=run / "updates/000001")
    shutil.rmtree(run / "updates/000001")
    shutil.copytree(run / "updates/000002", run / "updates/000001")
    with pytest.raises(stoker.DataError, match="000001 has other rows than update 1 was trained on"):
        stoker.Retriever(run)  # the columns of items would be those of an earlier day
    shutil.rmtree(run / "updates/000001")
    with pytest.raises(stoker.DataError, match="000001 is missing: the rows of that update were deleted"):
        stoker.Retriever(run)
