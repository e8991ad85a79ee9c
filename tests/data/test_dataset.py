"""A dataset directory opens when it is whole, and says what is wrong when it is not."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from stoker.base.errors import DataError
from stoker.base.files import atomic_file, hash_json, seal
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import read_manifest, write_manifest
from stoker.dataset.shards import allow_open_files, open_shard, write_shard
from stoker.testing import make_dataset


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=500, shard_rows=150, sequence={1: 4}).path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "d"))


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(seal(manifest | changes)))


def test_opens_and_verifies(path: Path) -> None:
    dataset = Dataset(path)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (400, 50, 50)
    assert dataset.verify() == 3 + 1 + 1 + 1
    assert dataset.schema.features[1].max_length == 4
    assert list(dataset.splits) == ["train", "valid", "test"]
    assert dataset.train.positives == sum(int(b.labels.sum()) for b in dataset.train.batches(64))


def test_counts_are_those_of_the_training_rows(path: Path) -> None:
    dataset = Dataset(path)
    (batch,) = dataset.train.batches(len(dataset.train))
    bag = torch.arange(len(batch.offsets) - 1).repeat_interleave(batch.offsets.diff())
    for place, feature in enumerate(dataset.schema.features):
        ids = batch.ids[bag % len(dataset.schema.features) == place]
        expected = torch.bincount(ids, minlength=dataset.schema.num_embeddings[feature.table])
        assert torch.equal(dataset.counts[feature.table], expected)


def test_shards_are_plain_safetensors_and_reproducible(tmp_path: Path) -> None:
    arrays = {
        "dense": np.arange(15, dtype=np.float32).reshape(5, 3),
        "labels": np.ones(5, np.float32),
        "ids": np.arange(6, dtype=np.int32),
        "lengths": np.array([[1, 1], [0, 0], [2, 1], [0, 1], [0, 0]], np.int32),
        "row_offsets": np.array([0, 2, 2, 5, 6, 6], np.int64),
    }
    first = write_shard(tmp_path / "train" / "a.safetensors", **arrays)
    second = write_shard(tmp_path / "train" / "b.safetensors", **arrays)
    assert (first.sha256, first.rows, first.file) == (second.sha256, 5, "train/a.safetensors")
    assert (tmp_path / "train" / "a.safetensors").stat().st_size == first.bytes
    loaded = load_file(tmp_path / "train" / "a.safetensors")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": np.zeros((4, 3), np.float32)}, "disagree on the number of rows"),
        ({"dense": np.zeros((5, 3))}, "dense is float64"),
        ({"ids": np.zeros((5, 2), np.int16)}, "ids is int16"),
        ({"ids": np.zeros(10, np.int32)}, "expected i4 or i8 with 2 axes"),
        ({"lengths": np.ones((5, 2), np.int32)}, "belong together"),
        (
            {
                "ids": np.zeros(10, np.int32),
                "lengths": np.ones((5, 2), np.int32),
                "row_offsets": np.array([0, 2, 4, 6, 9, 10]),
            },
            "running sum",
        ),
        (
            {
                "ids": np.zeros(11, np.int32),
                "lengths": np.ones((5, 2), np.int32),
                "row_offsets": np.arange(6) * 2,
            },
            "row_offsets end at 10, but there are 11 ids",
        ),
    ],
)
def test_arrays_that_are_no_shard(tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    good = {
        "dense": np.zeros((5, 3), np.float32),
        "labels": np.zeros(5, np.float32),
        "ids": np.zeros((5, 2), np.int32),
    }
    with pytest.raises(DataError, match=message):
        write_shard(tmp_path / "x.safetensors", **(good | changes))
    assert list(tmp_path.iterdir()) == []


def test_missing_truncated_and_altered_shards_are_named(path: Path) -> None:
    shard = path / "train" / "00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=rf"00001.*has {len(whole) - 100:,} bytes.*says {len(whole):,}"):
        Dataset(path)
    shard.unlink()
    with pytest.raises(DataError, match=r"00001\.safetensors is missing"):
        Dataset(path)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    dataset = Dataset(path)
    with pytest.raises(DataError, match=r"train/00001\.safetensors was altered: sha256"):
        dataset.verify()


def test_damaged_side_file_is_found(path: Path) -> None:
    counts = path / "counts.safetensors"
    data = bytearray(counts.read_bytes())
    data[-1] ^= 1
    counts.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"counts\.safetensors was altered"):
        Dataset(path).verify()
    data[:8] = b"\xff" * 8
    counts.write_bytes(bytes(data))
    with pytest.raises(DataError, match="cannot be read"):
        _ = Dataset(path).counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "interrupted"),
        ("{", "cannot be read"),
        ("[]", "is of kind list"),
        ('{"kind": "checkpoint"}', "is of kind checkpoint, not a dataset"),
        ("{}", "no format_version"),
        ('{"format_version": 99}', "dataset format 99, this Stoker reads up to 2. Update Stoker"),
        ('{"format_version": 1}', "lacks"),
    ],
)
def test_wrong_manifests(path: Path, text: str | None, message: str) -> None:
    (path / "manifest.json").unlink()
    if text is not None:
        (path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=message):
        Dataset(path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dataset at"):
        read_manifest(tmp_path / "nowhere")


def test_garbled_features_and_row_counts(path: Path) -> None:
    splits = json.loads((path / "manifest.json").read_text())["splits"]
    edit(path, features={"dense": 3})
    with pytest.raises(DataError, match="garbled"):
        Dataset(path)
    splits["train"]["rows"] += 1
    edit(path, splits=splits, features={"dense": [], "features": [], "num_embeddings": {}})
    with pytest.raises(DataError, match="claims 401 rows, its shards hold 400"):
        Dataset(path)


def test_shards_of_another_schema_are_refused(path: Path) -> None:
    edit(path, features={"dense": ["a"], "features": [], "num_embeddings": {}})
    with pytest.raises(DataError, match="4 dense columns"):
        next(iter(Dataset(path).train.batches(10)))


def test_an_id_outside_its_table_is_found(path: Path) -> None:
    manifest = read_manifest(path)
    largest = manifest["features"]["num_embeddings"]
    edit(path, features=manifest["features"] | {"num_embeddings": largest | {"C2": 3}})
    with pytest.raises(DataError, match=r"feature C2 holds id \d+, table C2 has 3 rows"):
        Dataset(path).train.check_ids()


@pytest.mark.parametrize("cut", [0, 4, 20, 200])
def test_what_is_no_shard_is_refused(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "s.safetensors"
    info = write_shard(
        file,
        dense=np.zeros((9, 3), np.float32),
        labels=np.zeros(9, np.float32),
        ids=np.zeros((9, 2), np.int32),
    )
    data = file.read_bytes()
    file.write_bytes(data[:cut])
    with pytest.raises(DataError, match=r"s\.safetensors"):
        open_shard(file, rows=info.rows)
    file.write_bytes(data)
    with pytest.raises(DataError, match="holds 9 rows, the manifest says 8"):
        open_shard(file, rows=8)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")

    def write() -> None:
        with atomic_file(target) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no room left on the disk"), atomic_file(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_manifest_bytes_are_reproducible_and_checked(tmp_path: Path) -> None:
    values = {"features": {}, "schema_hash": "x", "splits": {"train": {}, "test": {}}}
    write_manifest(tmp_path / "a", values)
    write_manifest(tmp_path / "b", dict(reversed(values.items())))
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()
    with pytest.raises(DataError, match="lacks"):
        write_manifest(tmp_path / "c", {"features": {}})
    assert hash_json({"a": 1, "b": [2]}) == hash_json({"b": [2], "a": 1}) != hash_json({"a": 2, "b": [2]})


def test_missing_split_and_rows(path: Path) -> None:
    dataset = Dataset(path)
    with pytest.raises(DataError, match="no split 'day_3', only"):
        dataset.split("day_3")
    with pytest.raises(IndexError):
        dataset.train[400]
    assert torch.equal(dataset.train[-1]["dense"], dataset.train[399]["dense"])


def test_rows_equal_batches(path: Path) -> None:
    split = Dataset(path).train
    (batch,) = split.batches(len(split))
    for row in (0, 149, 150, 399):
        item = split[row]
        begin, end = int(batch.offsets[row * 3]), int(batch.offsets[row * 3 + 3])
        assert torch.equal(item["dense"], batch.dense[row])
        assert torch.equal(item["ids"], batch.ids[begin:end])
        assert torch.equal(item["lengths"], batch.offsets[row * 3 : row * 3 + 4].diff().to(torch.int32))
        assert item["labels"] == batch.labels[row]


def test_more_shards_than_open_files_allowed() -> None:
    resource = pytest.importorskip("resource", reason="file size limits exist on POSIX systems only")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        allow_open_files(2000)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised >= 2000 or raised == 600  # 3.13 and later keep no file open
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_split_can_be_sent_to_a_worker(path: Path) -> None:
    split = Dataset(path).train
    assert torch.equal(pickle.loads(pickle.dumps(split))[7]["dense"], split[7]["dense"])


def test_a_log_in_place_of_a_dataset_is_told_from_a_missing_one(tmp_path: Path) -> None:
    log = tmp_path / "clicks.csv"
    with pytest.raises(DataError, match=r"clicks\.csv: it does not exist\. Check the name, and the directory"):
        Dataset(log)
    remedy = r"Make one of a log with: stoker prepare auto .*clicks\.csv --out DATASET"
    log.write_text("a,b\n")
    with pytest.raises(DataError, match=rf"clicks\.csv: it is a file, not a dataset\. {remedy}"):
        Dataset(log)
    with pytest.raises(DataError, match=r"data: it does not exist\. Make one with: stoker prepare RECIPE"):
        Dataset(tmp_path / "data")
