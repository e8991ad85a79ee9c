"""Classified datasets: which rows are hot, their order, and what is left when something goes wrong."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import numbers, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import context, start_process

from stoker.base.errors import DataError
from stoker.dataset import rebuild
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import NumpyGather
from stoker.dataset.manifest import read_manifest, write_manifest
from stoker.dataset.shards import open_shard, write_shard
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.dataset.split import Split
from stoker.rewrite import classified as rewriting
from stoker.rewrite.classified import ClassifyReport, hot_limits, hot_mask, write_classified
from stoker.testing import make_dataset

SIZES = (60, 30, 10)
HOT = {"C1": 25, "C2": 12, "C3": 10}
Row = tuple[Any, ...]


def profile(hot_rows: dict[str, int] | None = None, name: str = "a") -> dict[str, Any]:
    hot_rows = hot_rows or HOT
    return {"hot_rows": hot_rows, "profile_hash": name * 64, "profile": {"hot_rows": hot_rows}}


@pytest.fixture(params=["one-hot", "sequence", "int64"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    settings = {"one-hot": {}, "sequence": {"sequence": {1: 4, 2: 2}}, "int64": {"id_type": "int64", "num_dense": 0}}
    return make_dataset(tmp_path / "source", rows=1500, num_embeddings=SIZES, shard_rows=170, **settings[request.param])


def rows(split: Split) -> list[Row]:
    """All rows, each with its bags."""
    found = []
    for number in range(len(split)):
        item = split[number]
        ids = item["ids"].tolist()
        lengths = item["lengths"].tolist() if "lengths" in item else [1] * len(ids)
        bags = [ids[sum(lengths[:f]) : sum(lengths[: f + 1])] for f in range(len(lengths))]
        found.append((item["dense"].tolist(), item["labels"].item(), bags))
    return found


def is_hot(row: Row, spec: FeatureSpec, hot_rows: dict[str, int]) -> bool:
    return all(i < hot_rows[feature.table] for feature, bag in zip(spec.features, row[2], strict=True) for i in bag)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def classified(data: Dataset, out: Path, chosen: dict[str, Any] | None = None, **settings: Any) -> ClassifyReport:
    return write_classified(data, out, **(chosen or profile()), **settings)


@pytest.mark.slow
def test_hot_rows_come_first_and_both_parts_keep_their_order(data: Dataset, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = classified(data, tmp_path / "out", progress=lambda *given: told.append(given))
    made = Dataset(tmp_path / "out")
    source = rows(data.train)
    hot = [row for row in source if is_hot(row, data.schema, HOT)]
    cold = [row for row in source if not is_hot(row, data.schema, HOT)]
    assert (report.hot, report.cold, report.reused) == (len(hot), len(cold), False)
    assert hot
    assert cold
    assert rows(made.hot) == hot
    assert rows(made.cold) == cold
    assert rows(made.train) == hot + cold
    assert made.train.positives == data.train.positives
    assert made.hot.positives == sum(row[1] == 1 for row in hot)
    assert made.cold.positives == sum(row[1] == 1 for row in cold)
    assert told[-1] == ("classify", len(source), len(source))
    assert made.verify() > 0


def test_groups_of_several_shards_go_with_their_rows(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "source", rows=600, num_embeddings=SIZES, shard_rows=50, group_rows=4)
    classified(data, tmp_path / "out")
    made = Dataset(tmp_path / "out").train
    hot = np.array([is_hot(row, data.schema, HOT) for row in rows(data.train)])
    order = np.concatenate([np.flatnonzero(hot), np.flatnonzero(~hot)])
    assert data.train.groups is not None
    assert made.groups is not None
    places: dict[int, int] = {}
    assert made.groups.tolist() == [places.setdefault(one, len(places)) for one in data.train.groups[order].tolist()]


@pytest.mark.slow
def test_the_rest_of_the_dataset_is_shared(data: Dataset, tmp_path: Path) -> None:
    classified(data, tmp_path / "out")
    made = Dataset(tmp_path / "out")
    for split in ("valid", "test"):
        assert rows(made.split(split)) == rows(data.split(split))
    others = [name for name in contents(data.path) if not name.startswith("train/") and name != "manifest.json"]
    assert others
    for name in others:
        assert os.path.samefile(data.path / name, made.path / name), name
    differ = {"splits", "hot_cold"}
    manifest = read_manifest(made.path)
    assert {k: v for k, v in manifest.items() if k not in differ} == {
        k: v for k, v in data.manifest.items() if k not in differ
    }
    known = made.hot_cold
    assert known is not None
    assert known["hot_rows"] == HOT
    assert known["profile_hash"] == profile()["profile_hash"]
    assert known["profile"] == {"hot_rows": HOT}
    assert known["source_data_hash"] == data.train.data_hash
    assert known["hot_rows_of_train"] == len(made.hot)
    assert len({made.hot.data_hash, made.cold.data_hash, made.train.data_hash}) == 3


@pytest.mark.slow
def test_where_links_fail_files_are_copied(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    classified(data, tmp_path / "linked")
    monkeypatch.setattr(os, "link", link)
    classified(data, tmp_path / "copied")
    assert contents(tmp_path / "linked") == contents(tmp_path / "copied")
    assert not os.path.samefile(data.path / "counts.safetensors", tmp_path / "copied" / "counts.safetensors")


def test_the_views_read_like_any_split(data: Dataset, tmp_path: Path) -> None:
    classified(data, tmp_path / "out")
    made = Dataset(tmp_path / "out")
    for part in (made.hot, made.cold):
        batches = list(part.batches(64, seed=3))
        assert sum(map(len, batches)) == len(part)
        state = part.batches(64, seed=3).state_dict()
        part.batches(64, seed=3).load_state_dict(state)
    for batch in made.hot.batches(50):
        for place, feature in enumerate(data.schema.features):
            ids = batch.ids[:, place] if batch.offsets is None else bag_ids(batch.ids, batch.offsets, place)
            assert (ids < HOT[feature.table]).all()


def bag_ids(ids: torch.Tensor, offsets: torch.Tensor, place: int) -> torch.Tensor:
    starts, ends = offsets[:-1].view(-1, 3)[:, place], offsets[1:].view(-1, 3)[:, place]
    return torch.cat([ids[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 10**6])
def test_all_rows_may_be_of_one_kind(tmp_path: Path, limit: int) -> None:
    data = make_dataset(tmp_path / "source", rows=500, num_embeddings=SIZES, shard_rows=100)
    limits = {table: min(limit, size) for table, size in data.schema.num_embeddings.items()}
    report = classified(data, tmp_path / "out", profile(limits))
    made = Dataset(tmp_path / "out")
    assert (report.hot, report.cold) == ((0, 400) if limit == 0 else (400, 0))
    assert rows(made.train) == rows(data.train)
    assert not list((made.hot if limit == 0 else made.cold).batches(8))
    (made.hot if limit == 0 else made.cold).check()


def test_an_unclassified_dataset_has_no_parts(data: Dataset) -> None:
    assert data.hot_cold is None
    for part in ("hot", "cold"):
        with pytest.raises(DataError, match=r"not classified into hot and cold.*stoker classify"):
            getattr(data, part)


def test_a_garbled_record_is_named(data: Dataset, tmp_path: Path) -> None:
    classified(data, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    write_manifest(tmp_path / "out", {**manifest, "hot_cold": {"hot_shards": 1}})
    with pytest.raises(DataError, match="hot_cold"):
        _ = Dataset(tmp_path / "out").hot


@pytest.mark.slow
def test_threads_and_gathers_change_no_byte(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classified(data, tmp_path / "one", threads=1)
    classified(data, tmp_path / "three", threads=3)
    monkeypatch.setattr("stoker.rewrite.derived.make_gather", NumpyGather)
    classified(data, tmp_path / "plain", threads=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "plain")


@st.composite
def shards(draw: st.DrawFn) -> tuple[FeatureSpec, dict[str, int], dict[str, Any]]:
    """A schema whose features may share a table, hot rows, and the arrays of a shard."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = {f"t{i}": draw(st.integers(1, 5)) for i in range(draw(st.integers(1, 3)))}
    sequence = draw(st.booleans())
    features = tuple(
        Feature(name=f"f{i}", table=draw(st.sampled_from(sorted(tables))), sequence=sequence, max_length=3)
        for i in range(draw(st.integers(1, 4)))
    )
    spec = FeatureSpec(dense=(), features=features, num_embeddings=tables)
    hot_rows = {table: draw(st.integers(0, size)) for table, size in tables.items()}
    count = draw(st.integers(0, 40))
    lengths = generator.integers(0 if sequence else 1, 4 if sequence else 2, (count, len(features))).astype(np.int32)
    sizes = np.tile([tables[feature.table] for feature in features], count)
    ids = generator.integers(0, np.repeat(sizes, lengths.reshape(-1))).astype(draw(st.sampled_from(["i4", "i8"])))
    arrays: dict[str, Any] = {"dense": np.zeros((count, 0), np.float32), "labels": np.zeros(count, np.float32)}
    if not sequence:
        return spec, hot_rows, arrays | {"ids": ids.reshape(count, len(features))}
    ends = np.concatenate(([0], np.cumsum(lengths.sum(axis=1), dtype=np.int64)))
    return spec, hot_rows, arrays | {"ids": ids, "lengths": lengths, "row_offsets": ends}


@given(shards(), st.integers(1, 7))
@settings(max_examples=scaled(60))
def test_a_row_is_hot_if_all_its_ids_are(
    case: tuple[FeatureSpec, dict[str, int], dict[str, Any]], at_once: int
) -> None:
    import tempfile

    spec, hot_rows, arrays = case
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "_IDS", at_once)
        write_shard(Path(folder) / "s", **arrays)
        shard = open_shard(Path(folder) / "s", rows=len(arrays["labels"]))
        mask = hot_mask(shard, hot_limits(spec, hot_rows))
    assert mask.dtype == np.bool_
    lengths = arrays.get("lengths", np.ones((len(mask), len(spec.features)), np.int32))
    flat = arrays["ids"].reshape(-1).tolist()
    for row, found in enumerate(mask.tolist()):
        first = int(lengths[:row].sum())
        expected = True
        for feature, length in zip(spec.features, lengths[row].tolist(), strict=True):
            expected &= all(i < hot_rows[feature.table] for i in flat[first : first + length])
            first += length
        assert found == expected


def test_hot_rows_must_fit_the_tables(data: Dataset) -> None:
    with pytest.raises(DataError, match="differ in the tables C3"):
        hot_limits(data.schema, {"C1": 1, "C2": 1})
    with pytest.raises(DataError, match="C2 has 30 rows, so 31"):
        hot_limits(data.schema, {**HOT, "C2": 31})


def test_the_same_profile_is_not_classified_twice(data: Dataset, tmp_path: Path) -> None:
    first = classified(data, tmp_path / "out")
    written = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    again = classified(data, tmp_path / "out")
    assert again.reused
    assert (again.hot, again.cold) == (first.hot, first.cold)
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == written


def test_another_profile_is_refused_unless_told_to_overwrite(data: Dataset, tmp_path: Path) -> None:
    classified(data, tmp_path / "out")
    other = profile({**HOT, "C1": 30}, "b")
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match=r"classified by another profile.*overwrite=True"):
        classified(data, tmp_path / "out", other)
    assert contents(tmp_path / "out") == before
    report = classified(data, tmp_path / "out", other, overwrite=True)
    assert not report.reused
    assert Dataset(tmp_path / "out").hot_cold["hot_rows"]["C1"] == 30  # type: ignore[index]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["out", "source"]


def test_other_data_are_refused(data: Dataset, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", rows=300, num_embeddings=SIZES, seed=1)
    classified(other, tmp_path / "out")
    with pytest.raises(DataError, match="already holds a dataset"):
        classified(data, tmp_path / "out")
    assert not classified(data, tmp_path / "out", overwrite=True).reused
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty and no dataset"):
        classified(data, tmp_path / "notes", overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="is a file"):
        classified(data, tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_the_source_is_never_the_target(data: Dataset, place: str) -> None:
    before = contents(data.path)
    with pytest.raises(DataError, match="overlaps the dataset"):
        classified(data, data.path / place, overwrite=True)
    assert contents(data.path) == before


def test_a_damaged_classified_dataset_is_to_be_classified_again(data: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    classified(data, out)
    shard = next((out / "train").glob("cold_*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for name in ("train", "cold"):
        with pytest.raises(DataError, match="stoker classify command again with --overwrite"):
            list(getattr(Dataset(out), name).batches(100))
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="or classify the dataset again"):
        Dataset(out)
    shard.unlink()
    with pytest.raises(DataError, match="or classify the dataset again"):
        Dataset(out)


def test_a_damaged_shard_stops_it_and_nothing_is_left(data: Dataset, tmp_path: Path) -> None:
    file = data.path / data.train.entry["shards"][3]["file"]
    found = bytearray(file.read_bytes())
    found[-1] ^= 1
    file.write_bytes(bytes(found))
    with pytest.raises(DataError, match="damaged"):
        classified(Dataset(data.path), tmp_path / "deep" / "er" / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_is_noticed_before(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": data.train.bytes + 2**20 - 1})
    monkeypatch.setattr(rebuild.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"needs .*free. Free some space"):
        classified(data, tmp_path / "out")
    usage.free += 1
    classified(data, tmp_path / "out")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file locks, which this system lacks")
def test_one_process_writes_at_a_time(data: Dataset, tmp_path: Path) -> None:
    def second(what: str, done: int, total: int) -> None:
        with pytest.raises(DataError, match="another process is writing"):
            classified(data, tmp_path / "out")

    classified(data, tmp_path / "out", progress=second)
    assert Dataset(tmp_path / "out").verify() > 0


def classify_on_and_on(path: Path, out: Path, begun: Any) -> None:
    data = Dataset(path)
    for number in range(1000):
        limits = {"C1": 10 + number % 40, "C2": 12, "C3": 10}
        begun.release()
        write_classified(data, out, hot_rows=limits, profile_hash=str(number), profile={}, overwrite=True)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL, which this system lacks")
@pytest.mark.parametrize("number", numbers(6))
def test_a_kill_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, number: int) -> None:
    data = make_dataset(tmp_path / "source", rows=3000, num_embeddings=SIZES, shard_rows=100)
    out, beside = tmp_path / "out", tmp_path / "out.tmp"
    begun = context().Semaphore(0)
    running = start_process(classify_on_and_on, data.path, out, begun)
    for _ in range(1 + number % 3):
        begun.acquire()
    time.sleep(random.Random(number).uniform(0, 0.4))
    running.kill()
    running.join()
    if out.exists():
        made = Dataset(out)
        made.verify()
        assert len(made.hot) + len(made.cold) == len(data.train)
    if beside.exists() and (beside / "manifest.json").exists():
        Dataset(beside).verify()  # all of it was written: only the renaming was left
    classified(data, out, overwrite=True)
    Dataset(out).verify()
    assert {p.name for p in tmp_path.iterdir()} == {"out", "source"}
