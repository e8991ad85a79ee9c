"""The loop: what it learns, records and refuses; interrupted runs end like uninterrupted ones."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest
import small_runs
import torch
from killing import Server
from small_runs import assert_same_run, files, records

import stoker
from stoker.base.errors import CheckpointError, ConfigError, DataError, StokerError
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_manifest
from stoker.testing import make_dataset
from stoker.training import Interrupted, StreamingMetrics, TrainConfig
from stoker.training.display import Display, PlainLines, ProgressBar, make_display
from stoker.training.files.checkpoint import read_manifest
from stoker.training.files.logs import RunLog
from stoker.training.files.rundir import RunDirectory, find_checkpoint
from stoker.training.progress import SaveTimer
from stoker.training.scores import evaluation
from stoker.training.scores.evaluation import check_dataset
from stoker.training.tools.compare import compare

SMALL = {**small_runs.SMALL, "batch_size": 64, "backend": "reference"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=4000, sequence={1: 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend"),
    [("dlrm", "reference"), ("dlrm", "auto"), ("deepfm", "auto"), ("dcn", "auto"), ("rankmixer", "auto")],
)
def test_learns_and_leaves_a_run(data: Dataset, tmp_path: Path, model: str, backend: Any) -> None:
    settings = {**SMALL, "model_options": {}, "backend": backend}
    result = stoker.train(data, out=tmp_path / "run", model=model, epochs=4, eval_every=25, log_every=10, **settings)
    assert result.step == 200
    assert result.test["auc"] is not None
    assert result.test["auc"] > 0.85
    assert result.samples_per_second is not None
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["test"] == result.test
    assert [line["step"] for line in records(tmp_path / "run", "train")] == list(range(10, 201, 10))
    evaluations = records(tmp_path / "run", "valid")
    assert [line["step"] for line in evaluations] == list(range(25, 201, 25))
    best = max(evaluations, key=lambda line: line["auc"])
    assert result.best_step == best["step"]
    assert result.valid["auc"] == best["auc"]
    again = stoker.evaluate(stoker.load(tmp_path / "run", backend=backend).model, data.test)
    assert again["auc"] == result.test["auc"], "a run directory loads as its best checkpoint"
    assert stoker.evaluate(result.model, data.test)["auc"] == result.test["auc"]


@pytest.mark.slow
def test_records_say_what_happened(data: Dataset, tmp_path: Path) -> None:
    stoker.train(
        data,
        out=tmp_path / "run",
        schedule="linear",
        warmup=10,
        row_lr=0.5,
        dense_lr=0.25,
        log_every=7,
        **SMALL,
    )
    lines = records(tmp_path / "run", "train")
    assert [line["step"] for line in lines] == [7, 14, 21, 28, 35, 42, 49, 50], "the last steps have one, too"
    for line in lines:
        step = line["step"] - 1
        factor = (step + 1) / 10 if step < 10 else 1 - (step - 10) / 40
        assert line["row_lr"] == pytest.approx(0.5 * factor)
        assert line["dense_lr"] == pytest.approx(0.25 * factor)
        assert line["epoch"] == pytest.approx(line["step"] / 50)
        assert line["samples_per_second"] > 0
    assert records(tmp_path / "run", "valid")[0]["rows"] == 400
    assert records(tmp_path / "run", "test")[0]["rows"] == 400


@pytest.mark.slow
def test_loss_in_the_records_is_the_mean_over_the_steps(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "a", log_every=1, steps=20, **SMALL)
    stoker.train(data, out=tmp_path / "b", log_every=5, steps=20, **SMALL)
    single = [line["loss"] for line in records(tmp_path / "a", "train")]
    assert [line["loss"] for line in records(tmp_path / "b", "train")] == pytest.approx(
        [sum(single[i : i + 5]) / 5 for i in range(0, 20, 5)]
    )
    stoker.train(data, out=tmp_path / "c", log_every=1000, steps=7, eval_every=3, **SMALL)
    lines = [(line["step"], line["loss"]) for line in records(tmp_path / "c", "train")]
    assert lines == [(3, pytest.approx(sum(single[:3]) / 3)), (7, pytest.approx(sum(single[3:7]) / 4))]


@pytest.mark.slow
def test_the_loop_equals_one_written_by_hand(data: Dataset, tmp_path: Path) -> None:
    settings = {**SMALL, "dense_optimizer": "sgd", "dense_clip_norm": 0.5, "row_optimizer": "sgd"}
    result = stoker.train(data, out=tmp_path / "run", steps=60, metric="log_loss", patience=None, **settings)
    model = stoker.DLRM(
        data.schema, embedding_dim=4, bottom=(8,), top=(8,), optimizer=stoker.SGD(lr=0.1), backend="reference"
    )
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.1, fused=True)
    stream = data.train.batches(64, seed=0)
    done = 0
    for _ in range(2):
        for batch in stream:
            if done == 60:
                break
            model.loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.dense_parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    last = stoker.load(tmp_path / "run" / "checkpoints" / "step_000000060", backend="reference").model
    for name, value in model.state_dict().items():
        assert torch.equal(last.state_dict()[name], value), name
    assert result.step == 60


@pytest.mark.slow
def test_same_seed_same_files_and_another_seed_others(data: Dataset, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        stoker.train(data, out=tmp_path / name, seed=seed, **SMALL)
    a, b, c = (files(tmp_path / name / "checkpoints") for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [None, 25])  # the best one is saved whenever it comes
def test_checkpoints_kept_are_the_last_ones_and_the_best(data: Dataset, tmp_path: Path, save_every: int | None) -> None:
    # A learning rate so large that an early evaluation is the best one.
    result = stoker.train(
        data, out=tmp_path / "run", steps=60, eval_every=10, save_every=save_every, keep_last=2, dense_lr=1.0,
        metric="log_loss", **SMALL,
    )  # fmt: skip
    evaluations = records(tmp_path / "run", "valid")
    best = min(evaluations, key=lambda line: line["log_loss"])["step"]
    assert best < 50
    assert RunDirectory(tmp_path / "run").steps() == [best, 50, 60]
    assert result.best_step == best


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [None, 1000])
def test_early_stopping_waits_for_patience(data: Dataset, tmp_path: Path, save_every: int | None) -> None:
    result = stoker.train(
        data,
        out=tmp_path / "run",
        epochs=50,
        eval_every=10,
        save_every=save_every,
        patience=3,
        row_lr=3.0,
        metric="log_loss",
        **SMALL,
    )
    losses = [line["log_loss"] for line in records(tmp_path / "run", "valid")]
    best = losses.index(min(losses))
    assert len(losses) == best + 4
    assert result.step == 10 * (best + 4)
    assert RunDirectory(tmp_path / "run").steps()[-1] == result.step
    again = stoker.train(resume=tmp_path / "run", display="quiet")
    assert again.step == result.step, "resuming a stopped run stops at once"


def test_a_dataset_or_a_path_is_neither_split_nor_model(data: Dataset) -> None:
    model = stoker.DLRM(data.schema, embedding_dim=4)
    for arguments in ((model, data), (model, "data"), ("run", data.test)):
        for function in (stoker.evaluate, stoker.predict):
            with pytest.raises(ConfigError, match=r"a split of a dataset, such as data\.test\."):
                function(*arguments)


@pytest.mark.slow
def test_evaluation_rows_are_fixed(data: Dataset, tmp_path: Path) -> None:
    result = stoker.train(data, out=tmp_path / "run", valid_rows=100, **SMALL)
    assert result.valid["rows"] == 100
    assert result.valid["auc"] == stoker.evaluate(result.model, data.valid, rows=100)["auc"]


@pytest.mark.slow
def test_resuming_with_more_epochs_equals_a_longer_run(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "long", epochs=3, **SMALL)
    stoker.train(data, out=tmp_path / "short", epochs=1, **SMALL)
    stoker.train(resume=tmp_path / "short", epochs=3, display="quiet")
    assert files(tmp_path / "short" / "checkpoints") == files(tmp_path / "long" / "checkpoints")
    for kind in ("train", "valid"):
        ours, theirs = (records(tmp_path / name, kind) for name in ("short", "long"))
        keep = ("step", "loss", "auc", "log_loss", "epoch")
        assert [[line.get(k) for k in keep] for line in ours] == [[line.get(k) for k in keep] for line in theirs]


@pytest.mark.slow
def test_the_record_of_the_last_steps_gives_way_to_those_of_a_longer_run(data: Dataset, tmp_path: Path) -> None:
    settings = {**SMALL, "eval_every": 5, "log_every": 8}
    stoker.train(data, out=tmp_path / "long", steps=30, **settings)
    stoker.train(data, out=tmp_path / "short", steps=20, **settings)
    assert [line["step"] for line in records(tmp_path / "short", "train")] == [5, 8, 16, 20]
    before = files(tmp_path / "short")["metrics.jsonl"].splitlines()
    stoker.train(resume=tmp_path / "short", display="quiet")  # nothing is left to do
    assert files(tmp_path / "short")["metrics.jsonl"].splitlines() == before
    stoker.train(resume=tmp_path / "short", steps=30, display="quiet")
    assert_same_run(tmp_path / "short", tmp_path / "long")


KILLABLE: dict[str, Any] = {
    **SMALL, "batch_size": 16, "backend": "reference", "epochs": 2, "eval_every": 30, "save_every": 7, "log_every": 5,
    "schedule": "cosine", "dense_clip_norm": 1.0, "row_optimizer": "adam", "dtype": "bfloat16", "keep_last": 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork") or os.name != "posix", reason="needs os.fork, which this system lacks")
def test_killed_and_stopped_runs_end_with_the_files_of_an_undisturbed_one(data: Dataset, tmp_path: Path) -> None:
    chance = random.Random(0)
    ends = []
    with Server(tmp_path, data.path, out=tmp_path / "whole", **KILLABLE) as server:
        for number, kill in enumerate((signal.SIGKILL, signal.SIGTERM)):
            out = tmp_path / f"disturbed{number}"
            for resume in (False, True, True):
                how = {"kill": kill, "after": chance.uniform(0.0, 0.5), "begun": out / "metrics.jsonl"}
                if resume:
                    ended = server.run(resume=out, display="plain", **how)
                else:
                    ended = server.run(data.path, out=out, **how, **KILLABLE | {"display": "plain"})
                ends.append(ended.signal)
                if ended.signal < 0:
                    assert "stopped by SIGTERM" in ended.messages
                    assert f"--resume {out}" in ended.messages
            ended = server.run(resume=out, display="plain")
            assert ended.signal == 0, ended.messages
            assert files(out / "checkpoints") == files(tmp_path / "whole" / "checkpoints")
            ours, theirs = (records(path, "train") for path in (out, tmp_path / "whole"))
            assert [(line["step"], line["loss"]) for line in ours] == [(line["step"], line["loss"]) for line in theirs]
    assert signal.SIGKILL in ends, "no run was killed in time: make the runs longer"
    assert -128 - signal.SIGTERM in ends, "no run was stopped in time: make the runs longer"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(data: Dataset, tmp_path: Path, number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    timer = threading.Timer(0.7, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(Interrupted, match="--resume") as caught:
        stoker.train(data, out=tmp_path / "run", epochs=10_000, **SMALL)
    timer.join()
    assert caught.value.exit_code == 128 + number
    assert caught.value.checkpoint is not None
    assert caught.value.checkpoint.is_dir()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    manifest = json.loads((caught.value.checkpoint / "manifest.json").read_text())
    assert manifest["step"] == manifest["tick"] > 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["Feed", "facts", "finish"])
def test_a_signal_outside_the_loop_says_how_to_go_on(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: signal.Signals
) -> None:
    def end(*arguments: Any, **named: Any) -> None:
        os.kill(os.getpid(), number)
        threading.Event().wait(5)

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(f"stoker.training.loop.{where}", end)
    with pytest.raises(Interrupted) as caught:
        stoker.train(data, out=tmp_path / "run", steps=3, **SMALL)
    newest = "step_000000003 is the newest checkpoint" if where == "finish" else "there is no checkpoint yet"
    assert str(caught.value).startswith(f"stopped by {number.name}; {newest}. Continue with: stoker train --resume ")
    assert caught.value.exit_code == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    monkeypatch.undo()
    assert stoker.train(resume=tmp_path / "run", display="quiet").step == 3


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize("nth", [0, 2])
def test_a_signal_during_evaluation_loses_nothing(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    stoker.train(data, out=tmp_path / "whole", steps=60, eval_every=20, **SMALL)
    real = StreamingMetrics.update
    calls = iter(range(1000))

    def update(self: StreamingMetrics, *arguments: Any) -> None:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, *arguments)

    monkeypatch.setattr(StreamingMetrics, "update", update)
    with pytest.raises(Interrupted):
        stoker.train(data, out=tmp_path / "run", steps=60, eval_every=20, **SMALL)
    assert len(records(tmp_path / "run", "valid")) == nth
    monkeypatch.undo()
    stoker.train(resume=tmp_path / "run", display="quiet")
    assert [line["step"] for line in records(tmp_path / "run", "valid")] == [20, 40, 60]
    assert files(tmp_path / "run" / "checkpoints") == files(tmp_path / "whole" / "checkpoints")


class Killed(Exception):
    """A run ends here, at once."""


class Minutes(Display):
    """A clock on which every step takes 20 seconds; the run is killed at a step."""

    def __init__(self, killed: int = 0) -> None:
        self.seconds, self.killed, self.notes = 0.0, killed, list[str]()

    def step(self, done: int) -> None:
        self.seconds += 20.0
        if done == self.killed:
            raise Killed

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
@pytest.mark.parametrize("device_memory", [None, "8KiB"])
def test_a_checkpoint_every_few_minutes_costs_a_killed_run_no_epoch(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_memory: str | None
) -> None:
    def train(shown: Display, **given: Any) -> None:
        if isinstance(shown, Minutes):
            monkeypatch.setattr("stoker.training.loop.SaveTimer", partial(SaveTimer, now=lambda: shown.seconds))
        stoker.train(display=shown, **given)

    settings = {**SMALL, "epochs": 3, "row_optimizer": "adam", "device_memory": device_memory}
    del settings["display"]
    run = RunDirectory(tmp_path / "killed")
    train(Display(), dataset=data, out=tmp_path / "whole", **settings)
    with pytest.raises(Killed):
        train(Minutes(killed=40), dataset=data, out=run.path, **settings)
    assert run.steps() == [30], "every five minutes, one at a time"
    again = Minutes(killed=90)
    with pytest.raises(Killed):
        train(again, resume=run.path)
    assert any(note.startswith(f"resuming from {run.checkpoint(30)}") for note in again.notes)
    assert run.steps() == [50, 80], "the one at 45 has gone, that of the epoch stays"
    train(Minutes(), resume=run.path)
    assert files(run.checkpoints) == files(tmp_path / "whole" / "checkpoints")
    assert_same_run(run.path, tmp_path / "whole")
    with pytest.raises(Killed):
        train(Minutes(killed=40), dataset=data, out=tmp_path / "never", checkpoint_minutes=0, **settings)
    assert RunDirectory(tmp_path / "never").steps() == []


def test_checkpoints_by_the_clock_take_little_of_the_time() -> None:
    seconds = iter([0.0, 299.0, 300.0, 330.0, 630.0, 1330.0]).__next__
    timer = SaveTimer(5, now=seconds)
    assert [timer.due, timer.due] == [False, True]
    timer.saved(30.0)  # next in 1,000 seconds, of which it then takes 3 %
    assert [timer.due, timer.due] == [False, True]


def test_records_of_a_killed_run_are_cut_to_its_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    lines = [json.dumps({"kind": "train", "step": step}) for step in (5, 10, 15)]
    run.metrics.write_text("\n".join(lines) + '\n{"kind": "tra')
    log = RunLog(run, 10, tensorboard=False)
    log.write({"kind": "train", "step": 12})
    log.close()
    assert [line["step"] for line in records(run.path, "train")] == [5, 10, 12]


def test_records_without_room_are_named_once(tmp_path: Path) -> None:
    """Closing the log writes nothing, so the error of a full disk, or another one, is not lost."""
    resource = pytest.importorskip("resource", reason="limits of a process exist on POSIX systems only")
    run = RunDirectory.create(tmp_path / "run", {})
    log, before = RunLog(run, 0, tensorboard=False), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        log.write({"kind": "train", "step": 1})
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl could not be written \(File too large\)\. Free"):
            log.write({"kind": "train", "step": 2})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log = RunLog(run, 2, tensorboard=False)
    log.write({"kind": "train", "step": 3})
    log.close()
    assert [line["step"] for line in records(run.path, "train")] == [1, 3]


@pytest.mark.slow  # TensorBoard is imported
def test_events_without_room_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog(RunDirectory.create(tmp_path / "run", {}), 0, tensorboard=True)
    monkeypatch.setattr(writer, "add_scalar", full)
    with pytest.raises(
        CheckpointError, match=r"run.tensorboard could not be written \(No space left .*\)\. Free .*stoker"
    ):
        log.write({"kind": "train", "step": 1, "loss": 0.5})
    log.close()
    assert [line["step"] for line in records(tmp_path / "run", "train")] == [1]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "hurt"):
        stoker.train(data, out=tmp_path / name, steps=60, eval_every=20, keep_last=3, **SMALL)
    run = RunDirectory(tmp_path / "hurt")
    victim = run.checkpoint(60) / "tables" / "001.00000.safetensors"
    for stale in (True, False):  # what was set aside before gives way
        victim.write_bytes(victim.read_bytes()[: -1 - stale])
        damaged = files(run.checkpoint(60))
        stoker.train(resume=tmp_path / "hurt", display="plain")
    messages = capsys.readouterr().err
    assert str(victim) in messages
    assert f"resuming from {run.checkpoint(40)}, the newest whole checkpoint" in messages
    aside = run.checkpoints / "step_000000060.damaged"
    assert f"kept as {aside}" in messages
    assert run.steps() == [20, 40, 60]
    assert files(aside) == damaged
    shutil.rmtree(aside)
    assert files(run.checkpoints) == files(tmp_path / "whole" / "checkpoints")
    for step in run.steps():
        (run.checkpoint(step) / "dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*dense.safetensors is missing"):
        stoker.train(resume=tmp_path / "hurt", display="quiet")


def test_a_loss_that_is_not_finite_stops_the_run(data: Dataset, tmp_path: Path) -> None:
    settings = {**SMALL, "row_optimizer": "sgd", "dense_optimizer": "sgd", "dense_lr": 1e18, "row_lr": 1e18}
    with pytest.raises(
        StokerError, match=r"(the loss is|no longer finite).* at step [\d,]+, with row_lr .*Lower"
    ) as caught:
        stoker.train(data, out=tmp_path / "run", save_every=1, **settings)
    kept = RunDirectory(tmp_path / "run").steps()
    if kept:
        assert f"step_{kept[-1]:09d}" in str(caught.value)
        model = stoker.load(RunDirectory(tmp_path / "run").checkpoint(kept[-1])).model
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    else:
        assert "no checkpoint yet" in str(caught.value)


def test_rows_that_are_not_finite_are_never_saved(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stoker.DLRM.loss

    def loss(self: stoker.DLRM, batch: stoker.Batch) -> torch.Tensor:
        if self.embeddings.tick == 12:
            self.embeddings.groups[0].storage.weight[7] = math.inf  # seen at step 12, or later, or never
        return real(self, batch)

    monkeypatch.setattr(stoker.DLRM, "loss", loss)
    with pytest.raises(StokerError, match=r"step_000000010"):
        stoker.train(data, out=tmp_path / "run", steps=30, save_every=5, **SMALL)
    assert RunDirectory(tmp_path / "run").steps() == [5, 10]


@pytest.mark.slow
def test_a_damaged_best_checkpoint_does_not_cost_the_run(data: Dataset, tmp_path: Path) -> None:
    settings = {**SMALL, "row_lr": 3.0, "metric": "log_loss"}
    stoker.train(data, out=tmp_path / "run", steps=60, eval_every=10, **settings)
    run = RunDirectory(tmp_path / "run")
    best = json.loads((run.path / "report.json").read_text())["best_step"]
    assert best < 60, "the best checkpoint should be an early one here"
    (run.checkpoint(best) / "dense.safetensors").unlink()
    damaged = files(run.checkpoint(best))
    result = stoker.train(resume=run.path, display="quiet")
    assert result.best_step == 60
    assert best not in run.steps()
    assert files(run.checkpoints / f"step_{best:09d}.damaged") == damaged
    assert result.test["auc"] is not None


def test_resuming_refuses_what_would_change_the_numbers(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", steps=5, **SMALL)
    with pytest.raises(ConfigError, match=r"batch_size=64.*cannot change"):
        stoker.train(resume=tmp_path / "run", batch_size=32, display="quiet")
    with pytest.raises(ConfigError, match="train takes no argument 'learning_rate'"):
        stoker.train(resume=tmp_path / "run", learning_rate=0.1, display="quiet")
    with pytest.raises(ConfigError, match="is not a run directory"):
        stoker.train(resume=tmp_path / "nothing", display="quiet")
    run = RunDirectory(tmp_path / "run")
    config = run.read("config.json")
    run.write("config.json", {**config, "settings": {**config["settings"], "fast": 1}})
    with pytest.raises(ConfigError, match=r"config\.json has settings of a newer Stoker: \['fast'\]"):
        stoker.train(resume=run.path, display="quiet")
    run.write("config.json", config)
    other = make_dataset(tmp_path / "other", rows=4000, num_embeddings=(50, 20, 11))
    with pytest.raises(StokerError, match="another schema"):
        stoker.train(other, resume=tmp_path / "run", display="quiet")
    same_shape = make_dataset(tmp_path / "same", rows=4000, sequence={1: 4}, seed=1)
    with pytest.raises(StokerError, match="other rows"):
        stoker.train(same_shape, resume=tmp_path / "run", display="quiet")


def test_a_schedule_that_is_stretched_by_a_longer_run_is_said(data: Dataset, tmp_path: Path, capsys: Any) -> None:
    for schedule, said in (("linear", True), ("constant", False)):
        run = tmp_path / schedule
        stoker.train(data, out=run, steps=5, schedule=schedule, **SMALL)
        stoker.train(resume=run, steps=5, display="quiet")
        assert json.loads((run / "config.json").read_text())["lengths"] == [5]
        capsys.readouterr()
        stoker.train(resume=run, steps=8, display="plain")
        shown = capsys.readouterr()
        assert ("the schedule linear was for 5 steps and is now for 8" in shown.out + shown.err) == said
        assert json.loads((run / "config.json").read_text())["lengths"] == [5, 8]
    notes = compare(tmp_path / "linear", tmp_path / "constant").notes
    assert any("linear was resumed with another length (5, 8 steps)" in note for note in notes)


def test_a_run_whose_newest_manifest_is_lost_is_not_taken_for_an_earlier_one(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", steps=8, save_every=4, keep_last=2, eval_every=4, **SMALL)
    run = RunDirectory(tmp_path / "run")
    assert run.steps() == [4, 8]
    (run.checkpoint(8) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_000000008.* It says which checkpoint is the best.*step_000000004"):
        stoker.load(tmp_path / "run")
    assert stoker.load(run.checkpoint(4)).step == 4


def test_datasets_fitted_to_other_rows_are_refused(tmp_path: Path) -> None:
    """With hash buckets there is no vocabulary that would tell."""
    random = np.random.default_rng(0)
    days = [pl.DataFrame({"click": random.integers(0, 2, 300), "user": random.integers(0, 40, 300),
                          "price": scale * random.random(300)}) for scale in (1, 9)]  # fmt: skip
    schema = stoker.Schema.from_dict(
        {
            "label": "click", "dense": [{"name": "price", "transforms": ["zscore"]}],
            "categorical": [{"name": "user", "hash_buckets": 20}], "derive": ["count by=user"],
        }
    )  # fmt: skip
    first, second = (stoker.prepare(schema, day, out=tmp_path / f"day{at}") for at, day in enumerate(days))
    same = stoker.prepare(schema, days[0], out=tmp_path / "same")
    stoker.train(first, out=tmp_path / "run", steps=5, **SMALL)
    model = stoker.load(tmp_path / "run").model
    known = read_manifest(find_checkpoint(tmp_path / "run"))["extra"]["dataset"]
    for fits in (first, same, stoker.prepare(None, days[1], out=tmp_path / "like", like=first)):
        check_dataset(fits, model.spec, known)
    with pytest.raises(ConfigError, match=r"day1 was prepared by itself: its fills, scales and features .* --like"):
        check_dataset(second, model.spec, known)
    check_dataset(second, model.spec, {name: known[name] for name in ("schema_hash", "vocabulary_hash")})  # an old run


def test_ids_of_another_vocabulary_are_refused(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", steps=5, **SMALL)
    other = make_dataset(tmp_path / "other", rows=4000, sequence={1: 4})
    entry = {"bytes": 0, "sha256": "0" * 64}
    (other.path / "vocab").mkdir()
    (other.path / "vocab" / "C1.parquet").write_bytes(b"")
    write_manifest(other.path, {**other.manifest, "files": {**other.manifest["files"], "vocab/C1.parquet": entry}})
    with pytest.raises(ConfigError, match="another schema or vocabulary"):
        stoker.train(Dataset(other.path), resume=tmp_path / "run", epochs=2, display="quiet")


def test_wrong_input_is_refused_before_anything_is_written(data: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match="there is no dataset"):
        stoker.train(tmp_path / "nothing", out=out)
    with pytest.raises(ConfigError, match="either out"):
        stoker.train(data)
    with pytest.raises(ConfigError, match="needs a dataset"):
        stoker.train(out=out)
    with pytest.raises(ConfigError, match="'dlrm2' is unknown"):
        stoker.train(data, out=out, model="dlrm2")
    with pytest.raises(ConfigError, match="has no option 'hiden'"):
        stoker.train(data, out=out, model_options={"hiden": (3,)})
    with pytest.raises(ConfigError, match="option rank of model 'dcn' is 'big', expected a whole number or null"):
        stoker.train(data, out=out, model="dcn", model_options={"rank": "big"})
    with pytest.raises(ConfigError, match="cannot be built with"):
        stoker.train(data, out=out, model_options={"embedding_dim": 8})
    with pytest.raises(ConfigError, match="batch_size is 0"):
        stoker.train(data, out=out, batch_size=0)
    with pytest.raises(ConfigError, match="row_lr is nan"):
        stoker.train(data, out=out, row_lr=math.nan)
    with pytest.raises(ConfigError, match="'abacus' is unknown"):
        stoker.train(data, out=out, device="abacus")
    with pytest.raises(ConfigError, match="display 'off' is unknown: choose 'auto' or"):
        stoker.train(data, out=out, display="off")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks is 2, and"):
        stoker.train(data, out=out, ranks=2)  # type: ignore[arg-type]
    assert not out.exists()
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        stoker.train(data, out=out, **SMALL)
    assert (out / "thesis.tex").read_text() == "years of work"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file locks, which this system lacks")
def test_two_processes_do_not_train_in_one_run(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", steps=5, **SMALL)
    with (
        RunDirectory(tmp_path / "run").locked(),
        pytest.raises(ConfigError, match="another process"),
    ):
        stoker.train(resume=tmp_path / "run", epochs=2, display="quiet")
    stoker.train(resume=tmp_path / "run", epochs=2, display="quiet")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which is not installed here")
def test_compiled_bfloat16_learns_the_same(data: Dataset, tmp_path: Path) -> None:
    plain = stoker.train(data, out=tmp_path / "plain", **SMALL)
    fast = stoker.train(data, out=tmp_path / "fast", compile=True, matmul="bf16", **SMALL)
    assert fast.test["log_loss"] == pytest.approx(plain.test["log_loss"], abs=0.01)
    again = stoker.load(tmp_path / "fast", backend="reference").model
    assert again.matmul == "bf16"
    assert stoker.evaluate(again, data.test)["log_loss"] == fast.test["log_loss"]


def test_compiling_without_a_compiler_is_refused(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-of-another-world")
    with pytest.raises(ConfigError, match=r"C\+\+ compiler"):
        stoker.train(data, out=tmp_path / "run", compile=True, **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rich", "plain", "json"])
def test_every_display_shows_a_run(data: Dataset, tmp_path: Path, mode: Any, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "display": mode}
    with make_display(mode) as shown:
        if mode == "plain":
            shown._seconds = 0.0  # type: ignore[attr-defined]
        stoker.train(data, out=tmp_path / "run", log_every=10, **{**settings, "display": shown})
    out, err = capfd.readouterr()
    if mode == "json":
        assert [json.loads(line)["kind"] for line in out.splitlines()] == ["train"] * 5 + ["valid", "test"]
    else:
        assert out == ""
        assert "dlrm: 3 tables" in err
        assert "log_loss" in err
    if mode == "plain":
        assert "step 40 of 50  loss" in err


def test_a_notebook_gets_a_bar_if_rich_can_draw_one_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for name in ("ipykernel", "ipywidgets"):
        assert isinstance(make_display("auto"), PlainLines)
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    assert isinstance(make_display("auto"), ProgressBar)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: False)
    assert isinstance(make_display("auto"), PlainLines)


def test_a_notebook_keeps_the_last_state_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, calls = ProgressBar(), list[str]()
    for name in ("refresh", "stop"):
        monkeypatch.setattr(bar._bar, name, partial(calls.append, name))
    with bar:
        pass
    assert calls == ["refresh", "stop"]


def test_config_round_trip_and_unknown_settings() -> None:
    config = TrainConfig(model="dcn", row_lr=0.5, model_options={"rank": 8})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="do not exist"):
        TrainConfig.from_dict({"modle": "dcn"})


@pytest.mark.slow
def test_tensorboard_holds_the_curves(data: Dataset, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stoker.train(data, out=tmp_path / "run", log_every=10, **{**SMALL, "tensorboard": True})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [10, 20, 30, 40, 50]
    lines = records(tmp_path / "run", "valid")
    assert events.Scalars("valid/auc")[0].value == pytest.approx(lines[0]["auc"])


@pytest.mark.slow
def test_predictions_are_written_whole(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    result = stoker.train(data, out=tmp_path / "run", **SMALL)
    out = tmp_path / "scores.parquet"
    found = stoker.predict(result.model, data.test, out, batch_size=64)
    assert len(found) == 400
    table = pq.read_table(out)
    assert table.column_names == ["row", "label", "score"]
    assert table["row"].to_pylist() == list(range(400))
    batch = next(iter(data.test.batches(400)))
    assert torch.equal(torch.tensor(table["label"].to_numpy()), batch.labels)
    torch.testing.assert_close(torch.tensor(table["score"].to_numpy()), result.model.predict(batch))
    with pytest.raises(ConfigError, match="exists"):
        stoker.predict(result.model, data.test, out)
    assert len(stoker.predict(result.model, data.test, tmp_path / "few.parquet", rows=7)) == 7
    assert np.array_equal(found.scores, table["score"].to_numpy())
    assert np.array_equal(found.labels, table["label"].to_numpy())
    assert np.array_equal(found.rows, table["row"].to_numpy())
    assert found.groups is None
    without_a_file = stoker.predict(result.model, data.test, batch_size=64)
    assert np.array_equal(np.asarray(without_a_file), found.scores)
    assert without_a_file.scores.dtype == np.float32
    lists = make_dataset(tmp_path / "lists", rows=1000, sequence={1: 4}, group_rows=5)
    grouped = stoker.predict(result.model, lists.test, rows=50)
    assert np.array_equal(grouped.groups, lists.test.groups[:50])
    monkeypatch.setattr(evaluation, "_ROW_GROUP", 32)  # rows of the file that are written at a time
    stoker.predict(result.model, lists.test, tmp_path / "lists.parquet", batch_size=16)
    table = pq.read_table(tmp_path / "lists.parquet")
    assert table["row"].to_pylist() == list(range(100))
    assert table["group"].to_pylist() == lists.test.groups.tolist()


def test_a_run_without_validation_and_test_rows(tmp_path: Path) -> None:
    whole = make_dataset(tmp_path / "d", rows=500)
    manifest = whole.manifest
    write_manifest(whole.path, {**manifest, "splits": {"train": manifest["splits"]["train"]}})
    result = stoker.train(whole.path, out=tmp_path / "run", **SMALL)
    assert result.best_step is None
    assert result.valid == result.test == {}
    assert RunDirectory(tmp_path / "run").steps() == [7]
