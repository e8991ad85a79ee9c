"""What a damaged shard does: it is refused by name before one of its rows is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import DataError
from stoker.base.files import hash_json
from stoker.dataset import rows
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_manifest
from stoker.dataset.shards import Shard, write_shard
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.prep.prepare import prepare
from stoker.prep.schema import CategoricalColumn, Label, Schema, SplitRule
from stoker.testing import make_dataset

SHARD = 150  # rows


@pytest.fixture(scope="module", params=[False, True], ids=["one-hot", "sequences"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 training rows in three shards, never read as they are."""
    sequence = {1: 4} if request.param else None
    path = tmp_path_factory.mktemp("pristine") / "d"
    return make_dataset(path, rows=500, shard_rows=SHARD, sequence=sequence).path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "d", rows=500, shard_rows=SHARD, sequence={1: 4}).path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files as they are hashed."""
    names: list[str] = []
    real = Shard.digest

    def digest(self: Shard) -> tuple[int, str]:
        names.append(self.path.name)
        return real(self)

    monkeypatch.setattr(Shard, "digest", digest)
    return names


def shard_of(path: Path, number: int) -> Path:
    return path / "train" / f"{number:05d}.safetensors"


def flip(file: Path, at: int, change: int = 1) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ change]))


@given(data=st.data(), number=st.integers(0, 2), change=st.integers(1, 255), seed=st.sampled_from([None, 1]))
@settings(max_examples=scaled(150), deadline=None)
def test_any_altered_byte_is_refused_by_name(
    pristine: Path, data: st.DataObject, number: int, change: int, seed: int | None
) -> None:
    file = shard_of(pristine, number)
    at = data.draw(st.integers(0, file.stat().st_size - 1))
    flip(file, at, change)
    try:
        read: list[int] = []
        with pytest.raises(DataError, match=rf"train/{file.name}"):
            read.extend(len(batch) for batch in Dataset(pristine).train.batches(64, seed=seed))
        assert sum(read) <= (SHARD * number if seed is None else 0), "not one row of the shard was handed out"
    finally:
        flip(file, at, change)


@given(number=st.integers(0, 2), cut=st.integers(1, 5000), longer=st.booleans(), late=st.booleans())
@settings(max_examples=scaled(60), deadline=None)
def test_a_shard_of_another_length_is_refused_by_name(
    pristine: Path, number: int, cut: int, longer: bool, late: bool
) -> None:
    file = shard_of(pristine, number)
    whole = file.read_bytes()
    dataset = Dataset(pristine)
    file.write_bytes(whole + bytes(cut) if longer else whole[: -min(cut, len(whole))])
    try:
        with pytest.raises(DataError, match=rf"train/{file.name}"):
            next(iter((dataset if late else Dataset(pristine)).train.batches(64, seed=1)))
    finally:
        file.write_bytes(whole)


def test_the_message_has_both_checksums_the_rows_and_the_remedy(path: Path) -> None:
    entry = Dataset(path).manifest["splits"]["train"]["shards"][1]
    file = shard_of(path, 1)
    flip(file, file.stat().st_size - 1)
    with pytest.raises(DataError) as caught:
        next(iter(Dataset(path).train.batches(10, seed=0)))
    text = str(caught.value)
    found = Dataset(path).train.shards[1].digest()[1]
    assert text.startswith(str(file))
    for part in (found[:16], entry["sha256"][:16], "Rows 150 to 299 of split train", "stoker prepare", "--overwrite"):
        assert part in text


def test_what_is_known_of_shards_does_not_grow_with_the_number_of_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_KNOWN", 4)
    monkeypatch.setattr(rows, "_checked", set())
    for number in range(3):  # three shards each
        data = make_dataset(tmp_path / str(number), rows=500, shard_rows=SHARD)
        assert len(list(data.train.batches(50, seed=1))) == 8
        assert 0 < len(rows._checked) <= 4
        rows.note_checked(data.train.shards[0].path, "0", (number,))
        assert 0 < len(rows._checked) <= 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_in_file_order_a_shard_is_checked_when_it_is_reached(path: Path, hashed: list[str], prefetch: int) -> None:
    flip(shard_of(path, 2), 4000)
    batches = iter(Dataset(path).train.batches(50, prefetch=prefetch))
    assert [next(batches).step for _ in range(6)] == list(range(6))
    with pytest.raises(DataError, match=r"00002\.safetensors is damaged"):
        next(batches)
    assert hashed == ["00000.safetensors", "00001.safetensors", "00002.safetensors"]


def test_what_is_not_read_is_not_checked(path: Path, hashed: list[str]) -> None:
    flip(shard_of(path, 2), 4000)
    split = Dataset(path).train
    assert len(list(split.batches(50, seed=1, limit=300))) == 6
    resumed = split.batches(50)
    resumed.load_state_dict(resumed.state_dict(step=6))
    with pytest.raises(DataError, match=r"00002\.safetensors is damaged"):
        next(iter(resumed))
    assert sorted(hashed) == ["00000.safetensors", "00001.safetensors", "00002.safetensors"]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_is_hashed_once_per_process_until_it_changes(path: Path, hashed: list[str], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            stream = Dataset(path).train.batches(64, seed=0)
            for _ in range(2):
                assert sum(len(batch) for batch in stream) == 400
        assert sorted(hashed) == ["00000.safetensors", "00001.safetensors", "00002.safetensors"]
        file = shard_of(path, 1)
        flip(file, 4000)
        state = file.stat()
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))  # clocks may be too coarse to tell
        with pytest.raises(DataError, match=r"00001\.safetensors is damaged"):
            next(iter(Dataset(path).train.batches(64, seed=0)))
        assert hashed[3:] == ["00001.safetensors"], "the others are known"
    finally:
        torch.set_num_threads(before)


def test_a_file_replaced_while_open_is_refused(path: Path) -> None:
    split = Dataset(path).train
    assert len(split.shards) == 3
    file = shard_of(path, 1)
    beside = file.with_name("beside")
    beside.write_bytes(file.read_bytes())
    os.replace(beside, file)  # the same bytes, but the map shows the old file
    with pytest.raises(DataError, match=r"00001\.safetensors was changed or replaced"):
        next(iter(split.batches(64, seed=0)))


def test_a_file_that_cannot_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> None:
        raise OSError(5, "Input/output error")

    split = Dataset(path).train
    assert split.shards
    monkeypatch.setattr("hashlib.file_digest", failing)
    with pytest.raises(DataError, match=r"train/00000\.safetensors cannot be read \(Input/output error\)"):
        next(iter(split.batches(64)))


LIMITS = (7, 1000, 3)


def with_ids(path: Path, ids: np.ndarray, lengths: np.ndarray | None) -> Dataset:
    """A dataset of one shard with these ids, whose checksum is right."""
    rows = len(ids) if lengths is None else len(lengths)
    extra: dict[str, Any] = {}
    if lengths is not None:
        extra = {"lengths": lengths, "row_offsets": np.concatenate(([0], lengths.sum(axis=1).cumsum()))}
    info = write_shard(
        path / "train" / "00000.safetensors",
        dense=np.zeros((rows, 1), np.float32),
        labels=np.zeros(rows, np.float32),
        ids=ids,
        **extra,
    )
    spec = FeatureSpec(
        dense=("d",),
        features=tuple(
            Feature(name=f"f{i}", table=f"t{i}", sequence=lengths is not None, max_length=9) for i in range(3)
        ),
        num_embeddings={f"t{i}": limit for i, limit in enumerate(LIMITS)},
    )
    splits = {"train": {"rows": rows, "positives": 0, "shards": [info.to_dict()]}}
    write_manifest(path, {"features": spec.to_dict(), "schema_hash": hash_json({}), "splits": splits})
    return Dataset(path)


@pytest.fixture(params=[64, 2**20], ids=["small steps", "one step"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.dataset.rows._IDS", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("value", [-1, 0, 1, -(2**31), 2**31 - 1], ids=["-1", "size", "size+1", "least", "most"])
@pytest.mark.parametrize("sequence", [False, True])
def test_an_id_outside_its_table_is_named(tmp_path: Path, step: None, sequence: bool, value: int, wide: Any) -> None:
    random = np.random.default_rng(abs(value) % 97 + sequence)
    rows = 300
    lengths = random.integers(0, 5, (rows, 3)).astype(np.int32) if sequence else None
    flat = np.ones((rows, 3), np.int64) if lengths is None else lengths
    feature_of = np.repeat(np.tile(np.arange(3), rows), flat.reshape(-1))
    row_of = np.repeat(np.arange(rows), flat.sum(axis=1))
    limits = np.array(LIMITS)
    ids = random.integers(0, limits[feature_of]).astype(wide)
    ids[:: len(ids) // 7] = limits[feature_of[:: len(ids) // 7]] - 1  # the last row of a table is one of its rows
    shape = (rows, 3) if lengths is None else (-1,)
    fine = with_ids(tmp_path / "fine", ids.reshape(shape), lengths)
    assert sum(len(batch) for batch in fine.train.batches(64, seed=0)) == rows
    at = int(random.integers(len(ids)))
    ids[at] = value + limits[feature_of[at]] if value in (0, 1) else value
    wrong = with_ids(tmp_path / "wrong", ids.reshape(shape), lengths)
    feature = feature_of[at]
    message = (
        rf"train/00000\.safetensors, row {row_of[at]}: feature f{feature} holds id {int(ids[at]):,}, "
        rf"table t{feature} has {LIMITS[feature]:,} rows"
    )
    for seed in (None, 3):
        with pytest.raises(DataError, match=message):
            next(iter(wrong.train.batches(16, seed=seed)))
    with pytest.raises(DataError, match=message):
        wrong.verify()


def test_a_manifest_of_smaller_tables_is_noticed_though_the_bytes_are_known(tmp_path: Path) -> None:
    ids = np.full((10, 3), 2, np.int32)
    dataset = with_ids(tmp_path, ids, None)
    assert len(list(dataset.train.batches(5))) == 2
    features = dataset.manifest["features"]
    smaller = {**features, "num_embeddings": {**features["num_embeddings"], "t1": 2}}
    write_manifest(tmp_path, {**dataset.manifest, "features": smaller})
    with pytest.raises(DataError, match="row 0: feature f1 holds id 2, table t1 has 2 rows"):
        next(iter(Dataset(tmp_path).train.batches(5)))


@pytest.mark.parametrize("rows", [2**32 + 1, 2**40])
def test_a_table_may_have_more_rows_than_its_ids_could_name(tmp_path: Path, rows: int) -> None:
    ids = np.full((10, 3), 2, np.int32)
    for value in (2, -1):
        ids[9, 1] = value
        manifest = with_ids(tmp_path / str(value), ids, None).manifest
        features = manifest["features"]
        larger = {**features, "num_embeddings": {**features["num_embeddings"], "t1": rows}}
        write_manifest(tmp_path / str(value), {**manifest, "features": larger})
    assert len(list(Dataset(tmp_path / "2").train.batches(5))) == 2
    with pytest.raises(DataError, match=f"row 9: feature f1 holds id -1, table t1 has {rows:,} rows"):
        next(iter(Dataset(tmp_path / "-1").train.batches(5)))


def test_negative_lengths_are_named(tmp_path: Path) -> None:
    lengths = np.ones((10, 3), np.int32)
    lengths[4] = (2, -1, 2)  # their sum is right
    dataset = with_ids(tmp_path, np.zeros(30, np.int32), lengths)
    with pytest.raises(DataError, match="row 4: lengths and row_offsets disagree"):
        next(iter(dataset.train.batches(2)))  # before the batch with that row


def test_checking_can_be_watched_and_is_done_once(path: Path, hashed: list[str]) -> None:
    train = Dataset(path).train
    seen: list[tuple[int, int]] = []
    train.check(lambda done, total: seen.append((done, total)))
    assert len(seen) == len(train.entry["shards"]) == len(hashed)
    assert max(seen) == (train.bytes, train.bytes)
    train.check(lambda done, total: seen.append((done, total)))
    next(iter(train.batches(64, seed=1)))
    assert len(hashed) == len(train.entry["shards"])


def test_what_this_process_wrote_is_hashed_again_only_if_it_changed(tmp_path: Path, hashed: list[str]) -> None:
    raw = tmp_path / "log.csv"
    raw.write_text("label,user\n" + "".join(f"{row % 2},u{row % 9}\n" for row in range(300)))
    schema = Schema(
        name="x", label=Label(column="label"), categorical=(CategoricalColumn(name="user"),),
        split=SplitRule(rule="hash", column="user", train=0.6, valid=0.2, test=0.2),
    )  # fmt: skip
    data = prepare(schema, raw, out=tmp_path / "out")
    for split in (data.train, data.valid):
        split.check()
    assert not hashed
    flip(
        tmp_path / "out" / "train" / "00000.safetensors", -1 + (tmp_path / "out/train/00000.safetensors").stat().st_size
    )
    with pytest.raises(DataError, match="is damaged"):
        Dataset(tmp_path / "out").train.check()
