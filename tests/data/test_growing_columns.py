"""Columns with oov = "grow": raw ids from preparation to training, new values, and resumed runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import stoker
from stoker.base.errors import DataError, SchemaError
from stoker.prep.like import Like
from stoker.prep.requests import FittedSchema, RowEncoder
from stoker.training.files.rundir import RunDirectory

SMALL = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 64, "threads": 1,
    "tensorboard": False, "display": "quiet",
}  # fmt: skip


def log(path: Path, first: int, rows: int = 1200) -> Path:
    random = np.random.default_rng(first)
    items = [f"item {n}" for n in first + random.geometric(0.02, rows)]
    users = random.integers(0, 40, rows)
    likes = (users * 7 + random.integers(0, 3, rows)) % 3 == 0
    frame = pl.DataFrame({"click": likes.astype(int), "x": random.random(rows), "item": items, "user": users})
    frame = frame.with_columns(pl.when(pl.col("user") == 3).then(None).otherwise(pl.col("user")).alias("user"))
    frame.with_columns(recent=pl.lit("item 7|item 9|") + pl.col("item")).write_csv(path)
    return path


def schema(**grow: object) -> stoker.Schema:
    return stoker.Schema.from_dict(
        {
            "label": "click", "dense": [{"name": "x"}],
            "categorical": [
                {"name": "item", "oov": "grow", "grow": grow, "table": "items"},
                {"name": "user", "type": "int", "oov": "grow", "missing": "category"},
            ],
            "sequence": [{"name": "recent", "oov": "grow", "grow": grow, "table": "items"}],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    folder = tmp_path_factory.mktemp("growing")
    return stoker.prepare(schema(rows=150, admit=2, evict="lfu"), log(folder / "a.csv", 0), out=folder / "data")


def test_ids_are_hashes_that_any_log_has_in_common(data: stoker.Dataset, tmp_path: Path) -> None:
    assert data.schema.grow["items"] == stoker.Grow(admit=2, evict="lfu")
    assert data.schema.num_embeddings == {"items": 150, "user": 1000}
    assert stoker.Schema.from_dict(data.manifest["schema"]) == schema(rows=150, admit=2, evict="lfu")
    more = stoker.prepare(like=data, files=log(tmp_path / "b.csv", 100), out=tmp_path / "more")
    both = [
        {each for batch in split.batches(64) for each in batch.bags(0)[0].tolist()} for split in (data.train, more.test)
    ]
    assert both[0] & both[1]
    assert len(both[1] - both[0]) > 50  # new values keep their own raw ids
    users = {each for batch in data.train.batches(64) for each in batch.bags(1)[0].tolist()}
    assert len(users) == 40  # the empty field is one of them
    assert 0 not in users
    counts = data.counts["items"]  # as if rows came by falling count
    assert (len(counts), int(counts[0]), bool((counts[1:].diff() <= 0).all())) == (150, 0, True)
    data.train.check()


def test_rows_in_memory_have_the_raw_ids_of_prepared_ones(data: stoker.Dataset, tmp_path: Path) -> None:
    """Also where the field is empty, which is a category of column user."""
    path = log(tmp_path / "b.csv", 100)
    more = stoker.prepare(like=data, files=path, out=tmp_path / "more").test
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    found, [expected] = encoder.encode(pl.read_csv(path).select(encoder.columns)), more.batches(len(more))
    assert torch.equal(found.ids, expected.ids)
    assert found.offsets is not None
    assert torch.equal(found.offsets, expected.offsets)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int", "float", "string"])
def test_new_rows_need_not_have_all_values(kind: str, tmp_path: Path) -> None:
    """The vocabulary then adds entries between theirs, which must not move raw ids."""
    values = {"label": "click", "categorical": [{"name": "user", "type": kind, "oov": "grow"}]}
    rows = pl.DataFrame({"click": [0, 1] * 30, "user": [str(3 * (number % 20)) for number in range(60)]})
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    new = pl.DataFrame({"click": [0, 1] * 3, "user": ["30", "33", "100", "36", "7", "30"]})
    wanted = RowEncoder(FittedSchema.of(Like(data.path))).encode(new.drop("click"))
    for grow in (False, True):
        made = stoker.prepare(None, new, out=tmp_path / f"new{grow}", like=data, grow=grow)
        [batch] = made.test.batches(6)
        assert batch.ids.tolist() == wanted.ids.tolist()


@pytest.mark.slow
def test_a_run_grows_resumes_and_scores_the_same_under_any_placement(data: stoker.Dataset, tmp_path: Path) -> None:
    whole = stoker.train(data, out=tmp_path / "a", epochs=2, **SMALL)
    part = stoker.train(data, out=tmp_path / "b", epochs=1, device_memory="16KiB", **SMALL)
    assert part.step < whole.step
    rest = stoker.train(resume=tmp_path / "b", epochs=2, device_memory="12KiB", display="quiet")
    assert rest.test == whole.test
    one, two = (sorted((RunDirectory(tmp_path / name).checkpoint(whole.step) / "tables").iterdir()) for name in "ab")
    assert [path.name for path in one] == [path.name for path in two]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert any(".raw_ids." in path.name for path in one)
    found = stoker.load(tmp_path / "a").model
    assert 0 < found.embeddings.raw_ids("items").count_nonzero() <= 149
    assert np.array_equal(stoker.predict(found, data.test).scores, stoker.predict(whole.model, data.test).scores)
    assert stoker.verify(tmp_path / "a", steps=3, begin="start").identical


@pytest.mark.slow
def test_an_update_gives_rows_to_new_values_and_followers_have_them(data: stoker.Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stoker.train(data, out=run, epochs=1, **SMALL)
    follower = stoker.Follower(run)
    before = set(follower.model.embeddings.raw_ids("items").tolist())
    for first in (60, 90):
        assert stoker.update(run, log(tmp_path / f"{first}.csv", first)).rows == 1200
    assert follower.poll()
    model, followed = stoker.load(run).model, follower.model
    after = set(model.embeddings.raw_ids("items").tolist())
    assert len(after - before) > 20
    more = stoker.prepare(like=data, files=log(tmp_path / "c.csv", 100), out=tmp_path / "more").test
    assert np.array_equal(stoker.predict(model, more).scores, stoker.predict(followed, more).scores)
    for name, value in model.state_dict().items():
        assert torch.equal(value, followed.state_dict()[name]), name
    stoker.rollback(run, 1)
    assert follower.poll()
    stoker.compact(run)
    model = stoker.load(run).model
    assert len(before & set(model.embeddings.raw_ids("items").tolist())) < len(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, followed.state_dict()[name]), name


def test_what_needs_known_ids_is_refused(data: stoker.Dataset, tmp_path: Path) -> None:
    for work in (
        lambda: stoker.profile(data, device_memory="1KiB"),
        lambda: stoker.reorder(data, tmp_path / "ordered"),
        lambda: stoker.replay(data, slots=10, batch_size=32),
        lambda: stoker.baseline(data),
    ):
        with pytest.raises(DataError, match="tables items, user grow"):
            work()
    base = {"label": "click", "dense": [{"name": "x"}]}
    for column, words in (
        ({"oov": "grow", "min_count": 2}, "min_count cannot be combined with"),
        ({"oov": "grow", "hash_buckets": 9}, "hash_buckets cannot be combined with"),
        ({"grow": {"rows": 9}}, "has no effect with oov = 'reserved'"),
        ({"oov": "grow", "grow": {"rows": 1}}, "rows 1 is below 2"),
        ({"oov": "grow", "grow": {"evict": "lrv"}}, "Did you mean 'lru'"),
    ):
        with pytest.raises(SchemaError, match=words):
            stoker.Schema.from_dict({**base, "categorical": [{"name": "item", **column}]})
    shared = [{"name": "item", "oov": "grow", "table": "t"}, {"name": "user", "table": "t"}]
    with pytest.raises(SchemaError, match=r"oov .* differs"):
        stoker.Schema.from_dict({**base, "categorical": shared})
