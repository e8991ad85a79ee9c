"""Runs at URLs: uploaded at each checkpoint, so that a kill leaves something that loads; continued and scored there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import stoker
from stoker.base import remote
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import seal
from stoker.dataset.rebuild import check_out
from stoker.testing import make_daily_run, make_dataset
from stoker.training.files import checkpoint
from stoker.training.files.checkpoint import verify
from tests.cli.calling import output
from tests.data.prepared import digests

SMALL: dict[str, Any] = {
    "model": "dlrm", "embedding_dim": 4, "model_options": {"bottom": [8], "top": [8]}, "batch_size": 32,
    "display": "quiet", "tensorboard": False, "backend": "reference", "save_every": 2, "checkpoint_minutes": 0,
}  # fmt: skip


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def checkpoints(memory: Any, url: str) -> list[str]:
    return sorted({name.split("/")[4] for name in memory.find(f"/{url}/checkpoints")})


def test_a_run_is_uploaded_continued_and_scored(
    tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", rows=800)
    memory.put(f"{data.path}/", "/b/data", recursive=True)
    stoker.train(data, out=tmp_path / "local", steps=4, **SMALL)
    local = stoker.train(resume=tmp_path / "local", steps=6, display="quiet")
    there = stoker.train("memory://b/data", out="memory://b/run", steps=4, **SMALL)
    assert checkpoints(memory, "b/run") == sorted(path.name for path in (there.run / "checkpoints").iterdir())
    assert json.loads(memory.cat_file("/b/run/config.json"))["dataset"] == "memory://b/data"
    with pytest.raises(ConfigError, match=r"memory://b/run is not empty. Continue the run there with --resume"):
        stoker.train("memory://b/data", out="memory://b/run", steps=4, **SMALL)
    shutil.rmtree(tmp_path / "cache")  # another machine
    again = stoker.train(resume="memory://b/run", steps=6, display="quiet")
    assert digests(again.run / "checkpoints") == digests(local.run / "checkpoints")
    assert checkpoints(memory, "b/run") == sorted(path.name for path in (local.run / "checkpoints").iterdir())
    assert memory.exists("/b/run/report.json")
    shutil.rmtree(tmp_path / "cache")
    found = stoker.load("memory://b/run")
    assert found.step in (2, 4, 6)
    assert stoker.load("memory://b/run/checkpoints/step_000000006").step == 6
    code, said, error = output(capsys, "evaluate", "memory://b/run")
    assert code == 0, error
    assert "checkpoint: memory://b/run/checkpoints/step_" in said
    code, _, error = output(capsys, "inspect", "memory://b/run", "--json")
    assert code == 0, error
    code, _, error = output(capsys, "evaluate", "memory://b/data")
    assert error.startswith("error: memory://b/data is a dataset, not a run.")
    scores = tmp_path / "scores.parquet"
    code, _, error = output(capsys, "predict", "memory://b/run", "--data", "memory://b/data", "--out", scores)
    assert code == 0, error
    assert scores.exists()


def test_a_run_that_is_stopped_is_uploaded_and_names_its_url(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset(tmp_path / "data", rows=800)
    original, uploads = remote.upload_run, []

    def upload(folder: Path, url: str, **more: Any) -> None:
        original(folder, url, **more)
        uploads.append(checkpoints(memory, "b/run"))
        for name in uploads[-1]:
            verify(remote.fetch_sealed(f"{url}/checkpoints/{name}", tmp_path / "seen" / name))
        if len(uploads) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(remote, "upload_run", upload)
    with pytest.raises(KeyboardInterrupt, match="Continue with: stoker train --resume memory://b/run"):
        stoker.train(data, out="memory://b/run", steps=20, **SMALL)
    assert uploads[0] == ["step_000000002"]
    assert uploads[-1][-1] == checkpoints(memory, "b/run")[-1]


def test_a_failed_upload_does_not_stop_training_but_is_told(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", rows=800)
    original, failing = type(memory).put_file, [True]

    def put_file(self: Any, source: str, target: str, **more: Any) -> None:
        if failing[0] and "step_000000002" in target:
            raise ConnectionError("gone")
        failing[0] = "step_000000002" in target or failing[0]
        original(self, source, target, **more)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    with pytest.raises(DataError, match="cannot be used: gone"):
        stoker.train(data, out="memory://b/run", steps=2, **SMALL | {"display": "plain"})
    assert "The run goes on" in capsys.readouterr().err
    failing[0] = False
    with pytest.raises(DataError, match="is not a run, checkpoint or dataset"):
        stoker.load("memory://b/none")
    monkeypatch.undo()
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    resumed = stoker.train(resume="memory://b/run", steps=2, display="quiet")
    assert resumed.step == 2
    assert checkpoints(memory, "b/run") == ["step_000000002"]


def test_a_url_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    data = make_dataset(tmp_path / "data", rows=800)
    monkeypatch.setattr(type(memory), "put_file", denied)
    with pytest.raises(DataError, match=r"memory://b/run cannot be used: Access Denied. Check that you may use it"):
        stoker.train(data, out="memory://b/run", steps=2, **SMALL)
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_what_has_no_upload_refuses_a_url(tmp_path: Path, memory: Any) -> None:
    data = make_dataset(tmp_path / "data", rows=800)
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), optimizer=stoker.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="cannot be written to a URL"):
        stoker.save("memory://b/model", model)
    with pytest.raises(ConfigError, match="cannot be written to a URL"):
        check_out(Path("memory://b/ordered"), overwrite=False)


@pytest.mark.slow
def test_a_follower_reads_manifests_again_only_after_a_change(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = make_daily_run(tmp_path / "run", days=2)
    stoker.update(tmp_path / "run", days[0])
    memory.put(f"{tmp_path}/run/", "/b/run", recursive=True)
    follower = stoker.Follower("memory://b/run")
    fetched: list[str] = []
    fetch = remote.fetch_sealed
    monkeypatch.setattr(remote, "fetch_sealed", lambda url, folder: (fetched.append(url), fetch(url, folder))[1])
    assert not follower.poll()
    assert not fetched
    assert stoker.rollback("memory://b/run", 0)
    fetched.clear()
    assert follower.poll()
    assert fetched


@pytest.mark.slow
def test_a_run_at_a_url_is_updated(tmp_path: Path, memory: Any) -> None:
    days = make_daily_run(tmp_path / "run", days=3)
    memory.put(f"{tmp_path}/run-data/", "/b/data", recursive=True)
    config = json.loads((tmp_path / "run/config.json").read_text())
    memory.put(f"{tmp_path}/run/", "/b/run", recursive=True)
    memory.pipe_file("/b/run/config.json", json.dumps(seal({**config, "dataset": "memory://b/data"})).encode())
    for day in days[:2]:
        stoker.update(tmp_path / "run", day)
        assert stoker.update("memory://b/run", day).rows == 300
        shutil.rmtree(tmp_path / "cache")  # another machine
    assert stoker.update("memory://b/run", days[0]).rows == 0
    found = stoker.load("memory://b/run/checkpoints/update_000002").model
    assert digests(stoker.load("memory://b/run").path) == digests(stoker.load(tmp_path / "run").path)
    follower = stoker.Follower("memory://b/run", found)
    assert stoker.rollback("memory://b/run", 0).name.startswith("step_")
    assert not memory.exists("/b/run/head.json")
    for act in (stoker.rollback, stoker.compact):
        with pytest.raises(ConfigError, match=r"^memory://b/run was not updated"):
            act("memory://b/run")
    with pytest.raises(ConfigError, match=r"^memory://b/run is a URL, and this needs a run on a local disk"):
        stoker.report("memory://b/run")
    assert follower.poll()
    stoker.update("memory://b/run", days[2])
    assert follower.poll()
    assert follower.version.number == 1
    assert stoker.compact("memory://b/run").joined == 1
    assert not follower.poll()
    assert "parent" not in checkpoint.read_manifest(stoker.load("memory://b/run").path)


def test_rows_of_updates_and_old_records_are_moved_once(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, copy, moved, headed = tmp_path / "run", tmp_path / "copy", list[str](), threading.Event()
    puts, gets = type(memory).put_file, type(memory).get_file

    def put_file(fs: Any, path: str, target: str, **more: Any) -> None:
        name = target.removeprefix("/b/run/")
        if name == "head.json":
            headed.set()
        elif name == "metrics.jsonl":
            headed.wait(0.05)  # a slow one, which the head must not overtake
        puts(fs, path, target, **more)
        moved.append(name)

    def get_file(fs: Any, path: str, target: str, **more: Any) -> None:
        moved.append(path.removeprefix("/b/run/"))
        gets(fs, path, target, **more)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    monkeypatch.setattr(type(memory), "get_file", get_file)
    (run / "updates/000003.new").mkdir(parents=True)
    (run / "updates/000003.new/part").write_text("of a preparation that was killed")
    for number in (1, 2):
        make_dataset(run / f"updates/00000{number}", rows=50, seed=number)
        for name in ("config.json", "head.json", "metrics.jsonl"):
            (run / name).write_text(str(number))
        headed.clear()
        remote.upload_run(run, "memory://b/run", quiet=True)
        assert moved[-1] == "head.json"
        remote.fetch_run("memory://b/run", copy)
        assert digests(copy / "updates/000001") == digests(run / "updates/000001")
        assert any(name.startswith("updates/000001") for name in moved) == (number == 1)
        assert (copy / "head.json").read_text() == str(number)
        moved.clear()
    remote.fetch_run("memory://b/run", copy)
    assert sorted(moved) == ["config.json", "head.json"], "those whose size does not say whether they changed"
    shutil.rmtree(run / "updates/000001")
    make_dataset(run / "updates/000002", rows=50, seed=3)
    remote.upload_run(run, "memory://b/run", quiet=True)
    remote.fetch_run("memory://b/run", copy)
    assert digests(copy / "updates/000002") == digests(run / "updates/000002"), "another one of this number"
    assert not memory.find("/b/run/updates/000001")
    assert not memory.exists("/b/run/updates/000003.new")
