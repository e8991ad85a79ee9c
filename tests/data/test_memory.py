"""A dataset in memory is the one that would lie on disk: the same rows, batches, checksums and, once saved, bytes."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

sys.path.append(str(Path(__file__).parents[1] / "training"))

from prepared import digests
from small_runs import SMALL, assert_same_run

import stoker
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import passes
from stoker.dataset import memory
from stoker.dataset.memory import TemporaryFolder, temporary_folder_of
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat
from stoker.prep.write import publish


def schema(*, bags: bool = False, dense: bool = True, fitted: bool = True, group: bool = True) -> Schema:
    steps = ("log1p", "zscore") if fitted else ("log1p",)
    columns = (DenseColumn(name="a", fill="median" if fitted else 0.0, null_flag=True, transforms=steps),
               DenseColumn(name="b", transforms=steps))  # fmt: skip
    features: list[CategoricalColumn] = [
        CategoricalColumn(name="user", type="string"), CategoricalColumn(name="item", type="int"),
        CategoricalColumn(name="hashed", source="user", type="string", hash_buckets=7),
    ]  # fmt: skip
    if bags:
        del features[1]
    seen = SequenceColumn(name="seen", type="int", separator="|", max_length=3)
    return Schema(
        name="small", label=Label(column="label"), group="list" if group else None, source=SourceFormat(kind="parquet"),
        dense=columns if dense else (), categorical=tuple(features), sequence=(seen,) if bags else (),
        split=SplitRule(rule="hash", column="list", train=0.6, valid=0.3, test=0.1),
    )  # fmt: skip


def table(path: Path, rows: int, *, row_group: int = 150) -> Path:
    draw = np.random.default_rng(rows)
    numbers = draw.normal(size=(rows, 2)).round(2)
    seen = ["|".join(map(str, draw.integers(0, 9, draw.integers(0, 5)))) for _ in range(rows)]
    frame = pl.DataFrame({
        "label": draw.integers(0, 2, rows), "list": [f"list {n}" for n in draw.integers(0, rows // 3 + 1, rows)],
        "a": [None if x < -1 else x for x in numbers[:, 0].tolist()], "b": numbers[:, 1] / 3,
        "user": [f"user number {n}" for n in draw.zipf(1.5, rows) % 40], "item": draw.integers(0, 30, rows),
        "seen": seen,
    })  # fmt: skip
    frame.write_parquet(path, row_group_size=row_group)
    return path


KINDS: dict[str, dict[str, Any]] = {
    "one-hot": {}, "bags": {"bags": True}, "no dense": {"dense": False}, "plain": {"fitted": False, "group": False},
}  # fmt: skip


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts and shards of few rows."""
    monkeypatch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", 200)
    monkeypatch.setattr(publish, "SHARD_ROWS", 128)
    monkeypatch.setattr(publish, "_LEAST_ROWS", 64)


def both(kind: dict[str, Any], source: Path, out: Path, **options: Any) -> tuple[stoker.Dataset, stoker.Dataset]:
    return stoker.prepare(schema(**kind), source, **options), stoker.prepare(schema(**kind), source, out=out, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", KINDS)
def test_saved_it_has_the_bytes_of_one_prepared_on_disk(kind: str, tmp_path: Path) -> None:
    held, lying = both(KINDS[kind], table(tmp_path / "rows.parquet", 1000), tmp_path / "lying")
    assert (held.in_memory, held.train.in_memory, lying.train.in_memory) == (True, True, False)
    assert not lying.in_memory
    assert "in memory" in repr(held)
    assert len(lying.train.entry["shards"]) > 2
    assert len(held.train.shards) > 2
    for name, split in lying.splits.items():
        assert held.split(name).bytes == split.bytes
        assert held.split(name).positives == split.positives
        assert held.split(name).data_hash == split.data_hash
    saved = held.save(tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(tmp_path / "lying")
    assert not saved.in_memory
    assert saved.verify() == lying.verify()
    assert held.verify() == lying.verify()


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"seed": 3}, {"seed": 5, "shuffle_memory": "4KiB", "limit": 500}, {"seed": 1, "prefetch": 2, "reuse": True}],
    ids=str,
)
def test_its_batches_are_those_from_files(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    held, lying = both(KINDS[kind], table(tmp_path / "rows.parquet", 1000), tmp_path / "lying")
    stream, files = held.train.batches(32, data_memory="1MiB", **options), lying.train.batches(32, **options)
    assert stream.resident
    for _ in range(2):
        for ours, theirs in zip(stream, files, strict=True):
            assert torch.equal(ours.dense, theirs.dense)
            assert torch.equal(ours.ids, theirs.ids)
            assert torch.equal(ours.labels, theirs.labels)
            assert (ours.offsets is None) == (theirs.offsets is None)
            if ours.offsets is not None and theirs.offsets is not None:
                assert torch.equal(ours.offsets, theirs.offsets)
    for row in (0, 200, len(lying.valid) - 1):
        mine, other = held.valid[row], lying.valid[row]
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    if KINDS[kind].get("group", True):
        np.testing.assert_array_equal(held.train.groups, lying.train.groups)
    assert held.counts.keys() == lying.counts.keys()
    assert all(torch.equal(held.counts[name], lying.counts[name]) for name in lying.counts)


@pytest.mark.slow
@settings(max_examples=scaled(40), deadline=None)
@given(
    rows=st.integers(3, 400), group=st.integers(1, 120), most=st.integers(1, 90), threads=st.integers(1, 3),
    kind=st.sampled_from(list(KINDS)),
)  # fmt: skip
def test_however_parts_and_shards_are_cut(
    rows: int, group: int, most: int, threads: int, kind: str, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source = table(folder / "rows.parquet", rows, row_group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", most)
        patch.setattr(publish, "SHARD_ROWS", 64)
        patch.setattr(publish, "_LEAST_ROWS", 8)
        try:
            run_prepare(schema(**KINDS[kind]), source, out=folder / "lying", threads=threads)
        except DataError:  # no training row
            return
        held = TemporaryFolder()
        report = run_prepare(schema(**KINDS[kind]), source, out=held.path, threads=threads)
        stoker.Dataset(report.path).save(folder / "saved")
    assert digests(folder / "saved") == digests(folder / "lying")


@pytest.mark.slow
def test_training_on_it_is_training_on_files(tmp_path: Path) -> None:
    held, lying = both({}, table(tmp_path / "rows.parquet", 600), tmp_path / "lying")
    ours = stoker.train(held, out=tmp_path / "ours", **SMALL)
    theirs = stoker.train(lying, out=tmp_path / "theirs", **SMALL)
    assert ours.valid == theirs.valid
    assert_same_run(tmp_path / "ours", tmp_path / "theirs")
    # A run on it finds it, where it still is, and so does what compares runs.
    assert stoker.compare(tmp_path / "ours", tmp_path / "theirs")
    stoker.train(resume=tmp_path / "ours", epochs=2, display="quiet")
    stoker.train(resume=tmp_path / "theirs", epochs=2, display="quiet")
    assert_same_run(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.slow
def test_it_goes_with_what_refers_to_it(tmp_path: Path) -> None:
    held = stoker.prepare(schema(), table(tmp_path / "rows.parquet", 100))
    place, split = held.path, held.train
    assert stoker.Dataset(place).in_memory
    del held
    gc.collect()
    assert split.groups is not None  # its file is still there
    assert temporary_folder_of(place) is not None
    del split
    gc.collect()
    assert not place.exists()
    assert temporary_folder_of(place) is None
    with pytest.raises(DataError, match="no dataset"):
        stoker.Dataset(place)


def test_rows_prepared_like_it_do_not_keep_it(tmp_path: Path) -> None:
    held = stoker.prepare(schema(), source := table(tmp_path / "rows.parquet", 100))
    place = held.path
    gc.collect()
    gc.disable()  # its files and the memory of its rows go with the last reference, not some time later
    try:
        new = stoker.prepare(files=source, like=held)
        del held
        assert not place.exists()
    finally:
        gc.enable()
    assert new.verify()


@pytest.mark.slow
def test_a_preparation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    source = table(tmp_path / "rows.parquet", 100)

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"nothing was kept.*Pass out=DIRECTORY"):
        stoker.prepare(schema(), source, progress=stop)
    with pytest.raises(DataError, match="no column"):
        stoker.prepare(schema(), _without(source))
    with monkeypatch.context() as patch:
        patch.setattr(publish, "_FREE", 2**60)
        with pytest.raises(DataError, match=r"shards need .* free.*TMPDIR.*pass out=DIRECTORY"):
            stoker.prepare(schema(), source)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(publish.stored, "write_counts", full)
    with pytest.raises(DataError, match=r"no room left on the disk of (?!.*kept).*TMPDIR.*pass out=DIRECTORY"):
        stoker.prepare(schema(), source)
    gc.collect()
    assert not any((tmp_path / "temporary").iterdir())
    (tmp_path / "temporary").rmdir()
    monkeypatch.setattr("stoker.dataset.memory._SHARED", tmp_path / "absent")
    with pytest.raises(DataError, match=r"temporary directory.*TMPDIR.*pass out=DIRECTORY"):
        stoker.prepare(schema(), source)


def _without(source: Path) -> Path:
    other = source.with_name("other.parquet")
    pl.read_parquet(source).drop("user").write_parquet(other)
    return other


def test_what_needs_files_says_so(tmp_path: Path) -> None:
    source = table(tmp_path / "rows.parquet", 100)
    held = stoker.prepare(schema(), source)
    with pytest.raises(ConfigError, match=r"reorder needs a dataset in files. Pass out=DIRECTORY"):
        stoker.prepare(schema(), source, reorder=True)
    saved = held.save(tmp_path / "saved")
    assert pickle.loads(pickle.dumps(saved.train))[3].keys() == held.train[3].keys()
    with pytest.raises(DataError, match="already holds a dataset"):
        held.save(tmp_path / "saved")
    held.save(tmp_path / "saved", overwrite=True)
    again = saved.save(tmp_path / "again")  # of files: a second name of each
    assert digests(again.path) == digests(saved.path)


def test_what_is_made_of_it_is_made_of_its_files(tmp_path: Path) -> None:
    held, lying = both({}, table(tmp_path / "rows.parquet", 300), tmp_path / "lying")
    profile = stoker.profile(lying, device_memory="1KiB", sample=None)
    made = {}
    for name, data in (("held", held), ("lying", lying)):
        stoker.reorder(data, tmp_path / f"{name}-reordered", tables=["item"])
        stoker.classify(data, profile, tmp_path / f"{name}-classified")
        for kind in ("reordered", "classified"):
            found = digests(tmp_path / f"{name}-{kind}")
            del found["manifest.json"]  # names the source
            made[name, kind] = found
    assert made["held", "reordered"] == made["lying", "reordered"]
    assert made["held", "classified"] == made["lying", "classified"]


def test_another_process_reads_it(tmp_path: Path) -> None:
    held = stoker.prepare(schema(), table(tmp_path / "rows.parquet", 100))
    (tmp_path / "split").write_bytes(pickle.dumps(held.train))
    code = (
        "import pickle, sys, torch; split = pickle.loads(open(sys.argv[1], 'rb').read()); "
        "print(sum(batch.labels.sum().item() for batch in split.batches(10)))"
    )
    assert float(run_python("-c", code, tmp_path / "split").stdout) == held.train.positives
    assert (held.path / "manifest.json").exists()


def test_it_is_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(small))
    monkeypatch.setattr("stoker.dataset.memory._SHARED", large)
    usage = memory.shutil.disk_usage
    monkeypatch.setattr(
        memory.shutil, "disk_usage", lambda path: usage(path)._replace(free=10**7 if Path(path) == small else 2 * 10**7)
    )
    assert TemporaryFolder().path.parent == small.resolve()
    assert TemporaryFolder(10**7).path.parent == small.resolve()
    assert TemporaryFolder(10**7 + 1).path.parent == large.resolve()
    assert TemporaryFolder(3 * 10**7).path.parent == large.resolve()
    source = table(tmp_path / "rows.parquet", 100)
    monkeypatch.setattr("stoker.prep.prepare._ROOM", 10**7 // source.stat().st_size + 1)
    assert stoker.prepare(schema(), source).path.parent == large.resolve()
    monkeypatch.setattr("stoker.dataset.memory._SHARED", tmp_path / "absent")
    assert TemporaryFolder(3 * 10**7).path.parent == small.resolve()


def test_rows_like_it(tmp_path: Path) -> None:
    """Its vocabularies and statistics prepare new rows, in memory or on disk."""
    source, more = table(tmp_path / "rows.parquet", 300), table(tmp_path / "more.parquet", 80)
    held = stoker.prepare(schema(), source)
    new = stoker.prepare(files=more, like=held.path)
    assert new.in_memory
    stoker.prepare(files=more, like=held.path, out=tmp_path / "new")
    new.save(tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(tmp_path / "new")


@pytest.mark.slow
def test_a_forked_process_leaves_it_where_it_is(tmp_path: Path) -> None:
    held = stoker.prepare(schema(), table(tmp_path / "rows.parquet", 100))
    place = held.path
    child = os.fork()
    if not child:  # which lets go of it by dropping it as well as by its end
        try:
            del held
            gc.collect()
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (place / "manifest.json").exists()
    assert held.save(tmp_path / "saved").verify()
    del held
    gc.collect()
    assert not place.exists()


def test_datasets_come_and_go_while_files_are_written() -> None:
    """As the collector of garbage has them do, on whatever thread it runs."""

    class Coming(Path(".").__class__):  # type: ignore[misc]
        def is_relative_to(self, *other: Any) -> bool:
            folders.append(TemporaryFolder())
            return False

    folders = [TemporaryFolder(), TemporaryFolder()]
    assert not passes(Coming("file"))
    assert passes(folders[0].path / "file")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one-hot", "bags"])
def test_samples_of_it_are_of_the_same_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", 70)
    monkeypatch.setattr(publish, "SHARD_ROWS", 256)
    monkeypatch.setattr("stoker.rewrite.popularity._BLOCKS", 8)
    held, lying = both(KINDS[kind], table(tmp_path / "rows.parquet", 2000, row_group=70), tmp_path / "lying")
    assert len(held.train.shards) == len(lying.train.shards) > 2
    for sample in (None, 0.3, 1.0):
        ours, theirs = (stoker.profile(data, device_memory="1KiB", sample=sample) for data in (held, lying))
        assert ours == theirs


def test_where_it_may_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = stoker.prepare(schema(), table(tmp_path / "rows.parquet", 100))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    held.save(tmp_path / "link")
    assert digests(held.save(tmp_path / "link", overwrite=True).path) == digests(tmp_path / "folder")
    assert digests(held.save(tmp_path / "plain").path) == digests(tmp_path / "folder")
    (tmp_path / "whole.tmp").symlink_to(tmp_path / "plain")
    with pytest.raises(DataError, match=r"whole.tmp next to it, which has other files"):
        held.save(tmp_path / "whole")  # a dataset of its own
    assert len(digests(tmp_path / "plain")) == len(digests(tmp_path / "folder"))
    (tmp_path / "left.tmp" / "train").mkdir(parents=True)  # as threads of a run that was stopped might leave
    assert digests(held.save(tmp_path / "left").path) == digests(tmp_path / "folder")
    (tmp_path / "own.tmp").mkdir()
    (tmp_path / "own.tmp" / "precious").touch()
    with pytest.raises(DataError, match=r"own.tmp next to it, which has other files"):
        held.save(tmp_path / "own")
    assert (tmp_path / "own.tmp" / "precious").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in ("", ".", ".."):
        with pytest.raises(DataError, match=r"cannot be put in place|overlaps|not a dataset"):
            held.save(out)
    held.save("there")
    assert sorted(path.name for path in tmp_path.rglob(".lock")) == []


def test_what_is_replaced_stays_if_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = stoker.prepare(schema(), table(tmp_path / "rows.parquet", 100))
    saved = held.save(tmp_path / "saved")
    replace = os.replace

    def stopped(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(".stoker-old"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        held.save(tmp_path / "saved", overwrite=True)
    assert saved.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "saved"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file locks, which Windows lacks")
def test_what_a_killed_process_left_goes_with_the_next_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive = TemporaryFolder()
    (alive.path / "kept").touch()
    code = (
        f"import os, signal, tempfile; tempfile.tempdir = {str(tmp_path)!r}; from stoker.dataset "
        "import memory; "
        "folder = memory.TemporaryFolder(); (folder.path / 'large').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    new = TemporaryFolder()
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {alive.path, new.path}
    assert (alive.path / "kept").exists()
    del alive, new
    gc.collect()
    assert not any(tmp_path.iterdir())
