"""Reordered datasets: a bijection, the same values and examples under it, and fewer blocks for each batch."""

from __future__ import annotations

import os
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from campaigns import numbers, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import digests, rows_of, vocabulary
from processes import context, start_process

import stoker
from stoker.base.errors import ConfigError, DataError, DependencyError
from stoker.dataset.dataset import Dataset
from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.rewrite.classified import hot_limits, hot_mask
from stoker.rewrite.id_order import (
    IdWindows,
    Reordering,
    TableUse,
    blocks_of_shuffled,
    blocks_of_windows,
    hot_ids,
    new_ids,
    tiers,
)
from stoker.rewrite.popularity import ExactRows
from stoker.rewrite.reorder import run_reorder
from stoker.testing import make_dataset

SMALL = Reordering(window=64, hot=0.05)
TABLES = ("C1", "C2")


def used(ids: list[list[int]], size: int, *, window: int = 4, limit: int = 10**6, seed: int = 0) -> TableUse:
    """The use of a table by rows of bags."""
    flat = np.array([i for bag in ids for i in bag], np.int64)
    rows = np.repeat(np.arange(len(ids)), [len(bag) for bag in ids])
    counts = np.bincount(flat, minlength=size)
    found = IdWindows(counts, rows=len(ids), window=window, limit=limit, seed=seed)
    found.add(flat, rows)
    return found.use()


def topics(groups: int = 32, each: int = 32, rows: int = 8000, seed: int = 0) -> TableUse:
    """A log that stays with one group of equally frequent ids for 50 rows; groups are scattered over the ids."""
    rng = np.random.default_rng(seed)
    member = rng.permutation(groups * each).reshape(groups, each) + 1
    group = np.repeat(rng.integers(0, groups, -(-rows // 50)), 50)[:rows]
    ids = member[group, rng.integers(0, each, rows)]
    return used([[int(i)] for i in ids], groups * each + 1, window=50)


bags = st.lists(st.lists(st.integers(0, 19), max_size=4), min_size=1, max_size=40)
settings_of_order = st.builds(
    Reordering,
    method=st.sampled_from(["bisect", "first-use", "communities"]),
    hot=st.sampled_from([0.0, 0.3, 3, 100]),
    spread=st.sampled_from([1.0, 1.7, 2.0, float("inf")]),
    seed=st.integers(0, 3),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(150))
@given(bags, settings_of_order)
def test_new_ids_are_a_bijection_that_keeps_what_it_promises(ids: list[list[int]], how: Reordering) -> None:
    use = used(ids, 20)
    made = new_ids(use, how)
    assert sorted(made.tolist()) == list(range(20))
    assert made[0] == 0
    by_count = 1 + np.argsort(-use.counts[1:], kind="stable")
    stay = hot_ids(use.counts[by_count], how.hot)
    assert made[by_count[:stay]].tolist() == list(range(1, stay + 1))
    after = use.counts[np.argsort(made)][1 + stay :]
    if how.spread == 1:
        assert (np.diff(after) <= 0).all()
    elif np.isfinite(how.spread):
        # No id stands behind one that is rarer by the factor or more.
        rarest_before = np.minimum.accumulate(after)
        assert (after[1:] < np.maximum(1, how.spread * rarest_before[:-1]) + 1e-9).all()
    assert np.array_equal(made, new_ids(use, how))


@settings(deadline=None, max_examples=scaled(60))
@given(bags, st.lists(st.integers(1, 39), max_size=5), st.integers(4, 60))
def test_windows_do_not_depend_on_the_pieces(ids: list[list[int]], cuts: list[int], limit: int) -> None:
    whole = used(ids, 20, limit=limit)
    counts = whole.counts
    found = IdWindows(counts, rows=len(ids), window=4, limit=limit, seed=0)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    for start, stop in pairwise(edges):
        part = [(i, row) for row in range(start, stop) for i in ids[row]]
        found.add(np.array([i for i, _ in part], np.int32), np.array([row for _, row in part], np.int64))
    pieces = found.use()
    for name in ("counts", "first", "starts", "windows"):
        assert np.array_equal(getattr(whole, name), getattr(pieces, name)), name
    assert len(whole.windows) <= max(limit, 20)  # 20: one window is always kept


def test_windows_are_whole_and_overlap_by_half() -> None:
    use = used([[1], [2], [3], [4], [5]], 6, window=2)
    held = {i: use.windows[use.starts[i] : use.starts[i + 1]] for i in range(6)}
    assert [len(held[i]) for i in range(6)] == [0, 2, 2, 2, 2, 2]
    assert all(len(np.intersect1d(held[i], held[i + 1])) == 1 for i in range(1, 5))
    assert all(len(np.intersect1d(held[i], held[j])) == 0 for i in range(1, 6) for j in range(i + 2, 6))
    assert use.first.tolist() == [5, 0, 1, 2, 3, 4]


def test_bisection_finds_what_is_used_together() -> None:
    use = topics()
    size = len(use.counts)
    by_count = np.empty(size, np.int64)
    by_count[np.concatenate(([0], 1 + np.argsort(-use.counts[1:], kind="stable")))] = np.arange(size)
    before = blocks_of_windows(use, by_count, 16)
    found = {
        method: blocks_of_windows(use, new_ids(use, Reordering(method=method, spread=float("inf"), hot=0)), 16)
        for method in ("bisect", "communities")
    }
    assert max(found.values()) < 0.4 * before
    tiered = blocks_of_windows(use, new_ids(use, Reordering(hot=0.1)), 16)
    assert tiered < 0.8 * before


def test_shuffled_batches_need_the_fewest_blocks_by_count() -> None:
    """The number of blocks is a sum of concave functions of their uses, least where these are most unequal."""
    rng = np.random.default_rng(0)
    counts = np.sort(rng.zipf(1.5, 500).clip(max=10**5))[::-1].astype(np.int64)
    use = used([[1]], len(counts))
    use = TableUse(**{**vars(use), "counts": counts})
    least = blocks_of_shuffled(use, np.arange(len(counts)), 8, 100.0)
    for _ in range(20):
        assert blocks_of_shuffled(use, rng.permutation(len(counts)), 8, 100.0) >= least
    draws = [np.unique(rng.choice(500, int(counts.sum() / 100), p=counts / counts.sum()) // 8).size for _ in range(200)]
    assert least == pytest.approx(np.mean(draws), rel=0.02)


def test_tiers_are_powers_of_the_spread() -> None:
    counts = np.array([9, 8, 7, 4, 3, 2, 1, 0])
    assert tiers(counts, 2.0).tolist() == [4, 4, 3, 3, 2, 2, 1, 0]
    assert tiers(counts, 1.0).tolist() == counts.tolist()
    assert set(tiers(counts, float("inf")).tolist()) == {0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "leiden"}, "Choose one of 'bisect', 'communities', 'first-use'"),
        ({"hot": -0.1}, "share of the accesses"),
        ({"spread": 0.5}, "at least 1"),
        ({"spread": float("nan")}, "at least 1"),
        ({"window": 1}, "at least 2"),
        ({"edges": 3}, "at least 1000"),
        ({"seed": -1}, "must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Reordering(**given)


@pytest.mark.parametrize(("method", "package"), [("communities", "networkit"), ("bisect", "numba")])
def test_a_missing_package_is_named(method: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyError, match="pip install"):
        new_ids(topics(), Reordering(method=method))


@pytest.fixture(params=["one-hot", "sequence", "int64"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    given = {"one-hot": {}, "sequence": {"sequence": {1: 4, 2: 2}}, "int64": {"id_type": "int64", "num_dense": 0}}
    return make_dataset(
        tmp_path / "source", rows=1500, num_embeddings=(200, 90, 10), shard_rows=170, **given[request.param]
    )


@pytest.mark.slow
def test_examples_stay_and_their_ids_follow_the_order(data: Dataset, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = run_reorder(data, tmp_path / "out", how=SMALL, tables=TABLES, progress=lambda *it: told.append(it))
    made = Dataset(tmp_path / "out")
    assert not report.reused
    assert made.new_ids.keys() == report.tables.keys() == set(TABLES)
    assert report.tables["C1"].moved > 50
    assert [told[-1], told[0][0]] == [("write", 1500, 1500), "read"]
    ids = {**{name: np.arange(size) for name, size in data.schema.num_embeddings.items()}, **made.new_ids}
    for split in data.splits:
        mine, theirs = rows_of(made.path, split), rows_of(data.path, split)
        assert mine["labels"] == theirs["labels"]
        assert mine["dense"] == theirs["dense"]
        assert mine["bags"] == [
            [[int(ids[f.table][i]) for i in bag] for f, bag in zip(data.schema.features, row, strict=True)]
            for row in theirs["bags"]
        ]
        assert made.split(split).positives == data.split(split).positives
        assert made.split(split).shards[0].ids.dtype == data.split(split).shards[0].ids.dtype
    for name, counts in data.counts.items():
        assert torch.equal(made.counts[name][torch.as_tensor(ids[name])], counts)
    assert made.verify() > 0
    assert made.schema_hash != data.schema_hash
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["out", "source"]


@pytest.mark.slow
def test_the_same_bytes_from_any_number_of_threads(data: Dataset, tmp_path: Path) -> None:
    for threads in (1, 3):
        run_reorder(data, tmp_path / f"out{threads}", how=SMALL, tables=TABLES, threads=threads)
    assert digests(tmp_path / "out1") == digests(tmp_path / "out3")


@pytest.mark.slow
def test_the_same_order_again_is_taken_another_is_refused(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = run_reorder(data, out, how=SMALL, tables=TABLES)
    again = run_reorder(data, out, how=SMALL, tables=TABLES[::-1])
    assert (first.reused, again.reused, first.tables) == (False, True, again.tables)
    other = Reordering(window=64, hot=0.5)
    with pytest.raises(DataError, match=r"reordered with other settings.*overwrite"):
        run_reorder(data, out, how=other, tables=TABLES)
    assert not run_reorder(data, out, how=other, tables=TABLES, overwrite=True).reused
    with monkeypatch.context() as patch:  # another version may make another order
        patch.setattr("stoker.rewrite.reorder.__version__", "0")
        with pytest.raises(DataError, match="overwrite"):
            run_reorder(data, out, how=other, tables=TABLES)
    with pytest.raises(DataError, match=r"is reordered already\. Reorder its source, .*source"):
        run_reorder(out, tmp_path / "twice", tables=TABLES)
    assert not (tmp_path / "twice").exists()


def test_what_cannot_be_reordered_is_refused(data: Dataset, tmp_path: Path) -> None:
    for tables, said in ((["C9"], "no table C9; it has C1"), ([], "no table is named"), (None, "nothing to gain")):
        with pytest.raises(DataError, match=said):
            run_reorder(data, tmp_path / "out", tables=tables)
    with pytest.raises(DataError, match="overlaps the dataset"):
        run_reorder(data, data.path, tables=TABLES, overwrite=True)
    profile = stoker.profile(data, device_memory="2KiB", embedding_dim=4, sample=None)
    stoker.classify(data, profile, tmp_path / "hot")
    with pytest.raises(DataError, match="is classified, and its hot ids would no longer be the first"):
        run_reorder(tmp_path / "hot", tmp_path / "out", tables=TABLES)
    with pytest.raises(DataError, match="is not reordered"):
        data.new_ids  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a label of a split that is read late", "an id, now beyond its table"])
def test_a_damaged_shard_stops_it_and_nothing_is_left(data: Dataset, tmp_path: Path, where: str) -> None:
    split = data.valid if "label" in where else data.train
    file = data.path / split.entry["shards"][0]["file"]
    found = bytearray(file.read_bytes())
    found[-1 if "label" in where else split.shards[0].starts["ids"] + 3] ^= 0x40
    file.write_bytes(bytes(found))
    with pytest.raises(DataError, match="damaged"):
        run_reorder(Dataset(data.path), tmp_path / "deep" / "out", how=SMALL, tables=TABLES)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_damaged_reordered_dataset_is_to_be_reordered_again(data: Dataset, tmp_path: Path) -> None:
    run_reorder(data, tmp_path / "out", how=SMALL, tables=TABLES)
    shard = next((tmp_path / "out" / "train").iterdir())
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="stoker reorder command again with --overwrite"):
        list(Dataset(tmp_path / "out").train.batches(100))


def small_model(data: Dataset) -> stoker.DLRM:
    return stoker.DLRM(
        data.schema, embedding_dim=4, bottom=(8, 4) if data.schema.dense else (), top=(8,),
        optimizer=stoker.RowWiseAdagrad(lr=0.1), seed=1,
    )  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Dataset, Dataset]:
    """A dataset and the same reordered."""
    data = make_dataset(tmp_path / "source", rows=1500, num_embeddings=(200, 90, 10), sequence={1: 4})
    run_reorder(data, tmp_path / "out", how=SMALL, tables=TABLES)
    return data, Dataset(tmp_path / "out")


def moved(model: stoker.DLRM, data: Dataset) -> stoker.DLRM:
    """The model with every row where its value's new id is."""
    made = small_model(data)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for table, ids in data.new_ids.items():
        for name in [name for name in state if f".{table}." in name or name.endswith(f".{table}")]:
            state[name] = torch.empty_like(state[name]).index_copy_(0, ids, state[name])
    made.load_state_dict(state)
    return made


@pytest.mark.slow
def test_a_model_with_its_rows_moved_trains_and_predicts_to_the_same_bits(
    pair: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    data, made = pair
    plain = small_model(data)
    other = moved(plain, made)
    assert not torch.equal(plain.embeddings.rows("C1"), other.embeddings.rows("C1"))
    for model, source in ((plain, data), (other, made)):
        dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
        for batch in source.train.batches(64, seed=0):
            model.loss(batch).backward()
            dense.step()
            dense.zero_grad()
    for table, ids in made.new_ids.items():
        assert torch.equal(other.embeddings.rows(table)[ids], plain.embeddings.rows(table))
    stoker.predict(plain, data.test, tmp_path / "plain.csv")
    stoker.predict(other, made.test, tmp_path / "other.csv")
    scores = (tmp_path / "plain.csv").read_text()
    assert scores == (tmp_path / "other.csv").read_text()
    assert len(set(scores.split())) > 100


def test_profile_and_classification_are_right_on_it(pair: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    _, made = pair
    assert any((counts[2:] > counts[1:-1]).any() for counts in made.counts.values())  # ids no longer follow the count
    profile = stoker.profile(made, device_memory="2KiB", embedding_dim=4, sample=None)
    hot = stoker.classify(made, profile, tmp_path / "hot")
    limits = hot_limits(made.schema, profile.hot_rows)
    mask = np.concatenate([hot_mask(shard, limits) for shard in made.train.shards])
    assert 0 < len(hot.hot) == int(mask.sum()) < len(made.train)
    assert hot.reordered == made.reordered
    assert torch.equal(hot.new_ids["C1"], made.new_ids["C1"])
    hot.verify()
    for table in profile.tables:
        counts = made.counts[table.name]
        assert table.hot_rows <= len(counts)
        assert ExactRows(counts.numpy()).served(np.array([table.hot_rows]))[0] == pytest.approx(
            float(counts[: table.hot_rows].sum() / counts.sum()), abs=0.02
        )


@pytest.mark.slow
def test_a_placed_run_on_it_equals_a_resident_one(pair: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    _, made = pair
    given = {"model": "dlrm", "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 64}
    results = [
        stoker.train(made, out=tmp_path / name, epochs=1, **given, **memory)
        for name, memory in (("resident", {}), ("placed", {"device_memory": "6KiB"}))
    ]
    assert results[0].test == results[1].test


def log(rows: int = 3000, seed: int = 0) -> pl.DataFrame:
    """Users with a few items each; ids of their own kind, some fields empty."""
    rng = np.random.default_rng(seed)
    user = np.sort(rng.integers(0, 400, rows))
    item = (user * 7 + rng.integers(0, 6, rows)) % 1500
    return pl.DataFrame(
        {
            "label": rng.integers(0, 2, rows),
            "price": rng.random(rows),
            "user": [None if u % 97 == 0 else f"u{u}" for u in user.tolist()],
            "item": item,
            "seen": [[int(v) for v in rng.integers(0, 1500, n)] for n in rng.integers(0, 4, rows)],
            "part": rng.choice(["a", "b", "c"], rows, p=[0.8, 0.1, 0.1]),
        }
    )


LOG = Schema(
    label=Label(column="label"),
    dense=(DenseColumn(name="price"),),
    categorical=(
        CategoricalColumn(name="user", type="string"),
        CategoricalColumn(name="item", type="int"),
        CategoricalColumn(name="bucket", source="item", type="int", hash_buckets=2000),
    ),
    sequence=(SequenceColumn(name="seen", type="int", table="item", max_length=4),),
    split=SplitRule(rule="column", column="part", values={"a": "train", "b": "valid", "c": "test"}),
)


def values_of(data: Path, table: str) -> dict[int, Any]:
    return {0: "unknown", **{row + 1: value for row, (value, _) in enumerate(vocabulary(data, table))}}


@pytest.mark.slow
def test_every_value_keeps_its_examples_and_its_count(tmp_path: Path) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    run_prepare(LOG, tmp_path / "log.parquet", out=tmp_path / "plain")
    report = run_reorder(tmp_path / "plain", tmp_path / "out", how=SMALL)
    assert set(report.tables) == {"item"}  # users are few, and a bucket is a formula of the value
    both = {}
    for name in ("plain", "out"):
        path = tmp_path / name
        values = {"user": values_of(path, "user"), "item": values_of(path, "item")}
        spec = Dataset(path).schema
        both[name] = {
            split: [
                [
                    [values.get(feature.table, {}).get(i, i) for i in bag]
                    for feature, bag in zip(spec.features, row, strict=True)
                ]
                for row in rows_of(path, split)["bags"]
            ]
            for split in ("train", "valid", "test")
        }
        found = vocabulary(path, "item")
        assert [count for _, count in found] == Dataset(path).counts["item"][1:].tolist()
        both[name]["vocabulary"] = sorted(found)  # type: ignore[assignment]
    assert both["plain"] == both["out"]
    assert vocabulary(tmp_path / "plain", "item") != vocabulary(tmp_path / "out", "item")
    Dataset(tmp_path / "out").verify()
    named = run_reorder(tmp_path / "plain", tmp_path / "named", how=SMALL, tables=["user", "bucket"])
    assert set(named.tables) == {"user", "bucket"}
    assert sorted(vocabulary(tmp_path / "named", "user"), key=str) == sorted(
        vocabulary(tmp_path / "plain", "user"), key=str
    )


def test_new_rows_are_refused_if_ids_that_are_a_formula_moved(tmp_path: Path) -> None:
    log(600).write_parquet(tmp_path / "log.parquet")
    run_prepare(LOG, tmp_path / "log.parquet", out=tmp_path / "plain")
    run_reorder(tmp_path / "plain", tmp_path / "listed", how=SMALL, tables=["user", "item"])
    run_reorder(tmp_path / "plain", tmp_path / "hashed", how=SMALL, tables=["bucket"])
    found = stoker.prepare(files=tmp_path / "log.parquet", like=tmp_path / "listed", out=tmp_path / "new")
    assert found.counts["item"].equal(Dataset(tmp_path / "listed").counts["item"])
    with pytest.raises(DataError, match=r"hashed is reordered, also table bucket, whose ids are hashes"):
        stoker.prepare(files=tmp_path / "log.parquet", like=tmp_path / "hashed", out=tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["b", "c"])
def test_other_rows_of_any_split_are_other_data(tmp_path: Path, split: str) -> None:
    rows = log(600)
    other = rows.with_columns(label=(pl.col("part") == split) ^ pl.col("label").cast(pl.Boolean))
    for name, frame in (("first", rows), ("second", other)):
        frame.with_columns(pl.col("label").cast(pl.Int64)).write_parquet(tmp_path / f"{name}.parquet")
        run_prepare(LOG, tmp_path / f"{name}.parquet", out=tmp_path / name)
    first, second = Dataset(tmp_path / "first"), Dataset(tmp_path / "second")
    assert first.train.data_hash == second.train.data_hash
    profile = stoker.profile(first, device_memory="2KiB")
    for again in (False, True):
        assert run_reorder(first, tmp_path / "reordered", how=SMALL, tables=["item"]).reused == again
        stoker.classify(first, profile, tmp_path / "classified")
    with pytest.raises(DataError, match="already holds a dataset"):
        run_reorder(second, tmp_path / "reordered", how=SMALL, tables=["item"])
    with pytest.raises(DataError, match="already holds a dataset"):
        stoker.classify(second, profile, tmp_path / "classified")


@pytest.mark.slow
def test_preparing_in_order_is_preparing_then_reordering(tmp_path: Path) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    told: list[StageProgress] = []
    report = run_prepare(LOG, tmp_path / "log.parquet", out=tmp_path / "once", reorder=SMALL, progress=told.append)
    assert report.path == tmp_path / "once"
    assert [name for name in dict.fromkeys(p.stage for p in told)][-3:] == ["look", "order", "replace"]
    run_prepare(LOG, tmp_path / "log.parquet", out=tmp_path / "plain")
    run_reorder(tmp_path / "plain", tmp_path / "twice", how=SMALL)
    without = ("manifest.json",)  # which tells the source
    assert digests(tmp_path / "once", without=without) == digests(tmp_path / "twice", without=without)
    once, twice = Dataset(tmp_path / "once"), Dataset(tmp_path / "twice")
    assert once.reordered == {**twice.reordered, "source": None}  # type: ignore[dict-item]
    assert once.schema_hash == twice.schema_hash
    with pytest.raises(DataError, match="already holds a dataset"):
        run_prepare(LOG, tmp_path / "log.parquet", out=tmp_path / "once", reorder=True)
    (tmp_path / "once" / "mine.parquet").write_bytes((tmp_path / "log.parquet").read_bytes())
    with pytest.raises(DataError, match=r"is inside .*once, the directory of the dataset"):
        run_prepare(LOG, tmp_path / "once" / "mine.parquet", out=tmp_path / "once", reorder=True, overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"log.parquet", "once", "plain", "twice"}


def reorder_on_and_on(path: Path, out: Path, begun: Any) -> None:
    for number in range(1000):
        begun.release()
        run_reorder(path, out, how=Reordering(window=64, hot=number % 50), tables=["C1", "C2"], overwrite=True)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL, which this system lacks")
@pytest.mark.parametrize("number", numbers(4))
def test_a_killed_reorder_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, number: int) -> None:
    data = make_dataset(tmp_path / "source", rows=3000, num_embeddings=(200, 90, 10), shard_rows=100)
    out, beside = tmp_path / "out", tmp_path / "out.tmp"
    begun = context().Semaphore(0)
    running = start_process(reorder_on_and_on, data.path, out, begun)
    for _ in range(1 + number % 3):
        begun.acquire()
    time.sleep(random.Random(number).uniform(0, 0.5))
    running.kill()
    running.join()
    for path in (out, beside):
        if (path / "manifest.json").exists():
            made = Dataset(path)
            made.verify()
            assert made.new_ids.keys() == set(TABLES)
    run_reorder(data, out, how=SMALL, tables=TABLES, overwrite=True)
    Dataset(out).verify()
    assert {p.name for p in tmp_path.iterdir()} == {"out", "source"}


def prepare_in_order(path: Path, out: Path, begun: Any) -> None:
    begun.release()
    run_prepare(LOG, path, out=out, reorder=SMALL)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL, which this system lacks")
@pytest.mark.parametrize("wait", [0.3, 0.1, 0.6][: scaled(3)])
def test_a_killed_preparation_is_whole_and_in_order_or_absent(tmp_path: Path, wait: float) -> None:
    log(rows=20_000).write_parquet(tmp_path / "log.parquet")
    out = tmp_path / "out"
    begun = context().Semaphore(0)
    running = start_process(prepare_in_order, tmp_path / "log.parquet", out, begun)
    begun.acquire()
    time.sleep(wait)
    running.kill()
    running.join()
    if out.exists():
        assert Dataset(out).reordered is not None
        Dataset(out).verify()
    run_prepare(LOG, tmp_path / "log.parquet", out=out, reorder=SMALL, overwrite=True)
    assert Dataset(out).reordered is not None
    Dataset(out).verify()
    assert {p.name for p in tmp_path.iterdir()} == {"log.parquet", "out"}
