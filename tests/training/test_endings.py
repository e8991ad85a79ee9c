"""How runs begin and end: full disks, one-sided validation rows, the bar in between."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_runs

import stoker
from stoker.base import progress
from stoker.base.errors import CheckpointError, ConfigError, DataError
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_manifest
from stoker.dataset.shards import write_shard
from stoker.testing import make_dataset
from stoker.training.display import Display, PlainLines, ProgressBar
from stoker.training.files.rundir import RunDirectory
from stoker.training.scores.metrics import merit

SMALL = {**small_runs.SMALL, "batch_size": 64, "backend": "reference"}


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    out, config = tmp_path / "runs" / "a", {"settings": {}, "dataset": "data"}
    if there:
        out.mkdir(parents=True)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="no room left"):
            RunDirectory.create(out, config)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == (["runs", "runs/a"] if there else [])
    assert RunDirectory.create(out, config).read("config.json") == config


def _create_and_die(out: Path, moment: int) -> int:
    """Make a run in a fork that is killed right before its operation ``moment`` in ``out.parent``; return its end."""
    left = [moment]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.listdir") and str(out.parent) in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        try:
            sys.addaudithook(hook)
            RunDirectory.create(out, {"settings": {}, "dataset": "data"})
        finally:
            os._exit(int(sys.exc_info()[0] is not None))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_run_whose_begin_was_killed_can_be_begun_again(tmp_path: Path) -> None:
    again = {"settings": {}, "dataset": "again"}
    for moment in range(40):
        out = tmp_path / str(moment) / "a"
        if (ended := _create_and_die(out, moment)) == 0:
            break
        assert ended == -signal.SIGKILL
        if not (out / "config.json").exists():
            assert RunDirectory.create(out, again).read("config.json") == again
        with pytest.raises(ConfigError, match=r"is not empty\. Continue it with --resume"):
            RunDirectory(out).check_new()
    assert ended == 0
    assert moment >= 6


@pytest.mark.parametrize("other", ["checkpoints/x", "notes.txt", "config.json"])
def test_a_directory_with_other_files_is_no_begin_of_a_run(tmp_path: Path, other: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / other).touch()
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory(tmp_path).check_new()


def test_a_link_to_an_empty_directory_is_no_begin_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(out, {})
    assert [each.name for each in out.iterdir()] == ["checkpoints"]


def test_a_run_waits_for_a_process_that_only_looks_whether_it_can_begin(tmp_path: Path) -> None:
    """It has the lock for a moment: the run that was made would not be trained."""
    run = RunDirectory.create(tmp_path, {"settings": {}, "dataset": "data"})
    with ExitStack() as other:
        other.enter_context(RunDirectory(tmp_path).locked())
        timer = threading.Timer(0.1, other.close)
        timer.start()
        with run.locked() as alone:
            assert alone
        timer.join()


def test_a_run_that_another_process_is_making_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    with run.locked(), pytest.raises(ConfigError, match="another process"):
        RunDirectory.create(tmp_path, {})
    assert run.checkpoints.is_dir()


def test_a_run_whose_path_is_not_utf8_is_refused_before_any_work(tmp_path: Path) -> None:
    """TensorBoard cannot write there: the run was begun, and ended with an error of its own."""
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")) / "run"
    with pytest.raises(DataError, match=r"caf\\xe9/run: this path is not UTF-8. Rename the file or its directory"):
        RunDirectory.create(out, {})
    assert not out.parent.exists()


def test_of_two_processes_one_makes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *arguments: Any, **settings: Any) -> None:
        if path.name == "checkpoints":
            real(path)  # the other process, at the worst moment
        real(path, *arguments, **settings)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ConfigError, match="another process"):
        RunDirectory.create(tmp_path / "run", {})
    assert (tmp_path / "run" / "checkpoints").is_dir(), "it is the other's"


def one_sided(path: Path) -> Dataset:
    """A dataset whose validation labels are all 0."""
    data = make_dataset(path, rows=1000)
    rows, generator = 100, np.random.default_rng(0)
    shard = write_shard(
        path / "valid" / "00000.safetensors",
        dense=generator.normal(size=(rows, 4)).astype(np.float32),
        labels=np.zeros(rows, np.float32),
        ids=np.zeros((rows, 3), np.int32),
    ).to_dict()
    splits = {**data.manifest["splits"], "valid": {"rows": rows, "positives": 0, "shards": [shard]}}
    write_manifest(path, {**data.manifest, "splits": splits})
    return Dataset(path)


class Noted(Display):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, done: int) -> None:
        self.steps.append(done)


@pytest.mark.slow
def test_log_loss_decides_where_there_is_no_auc(tmp_path: Path) -> None:
    shown = Noted()
    settings = {**SMALL, "display": shown}
    result = stoker.train(
        one_sided(tmp_path / "d"), out=tmp_path / "run", steps=9000, eval_every=4, patience=2, row_lr=3.0, **settings
    )
    assert result.valid["auc"] is None
    assert result.best_step is not None
    assert result.stopped_early
    assert result.step == result.best_step + 8
    assert sum("log loss says what is best" in note for note in shown.notes) == 1
    assert any("log loss on the validation rows has not improved for 2" in note for note in shown.notes)


def test_patience_needs_validation_rows(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", rows=500)
    write_manifest(data.path, {**data.manifest, "splits": {"train": data.manifest["splits"]["train"]}})
    with pytest.raises(ConfigError, match="no validation rows"):
        stoker.train(data.path, out=tmp_path / "run", patience=2, **SMALL)
    assert not (tmp_path / "run").exists()


def test_merit_orders_evaluations() -> None:
    two = {"rows": 10, "positives": 4}
    assert merit({**two, "auc": 0.7, "log_loss": 9.0}, "auc") > merit({**two, "auc": 0.6, "log_loss": 0.1}, "auc")
    assert merit({**two, "log_loss": 0.1}, "log_loss") > merit({**two, "log_loss": 0.2}, "log_loss")
    one = {"rows": 10, "positives": 0, "auc": None}
    assert merit({**one, "log_loss": 0.1}, "auc") > merit({**one, "log_loss": 0.2}, "auc")
    for undefined in ({**two, "auc": None}, {**two, "auc": float("nan")}, {}):
        assert merit(undefined, "auc") == -float("inf")


@pytest.mark.slow
def test_a_lost_best_checkpoint_is_no_hurdle_for_the_rest_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 1.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 9.5, 9.5, 9.5, 9.5])
    monkeypatch.setattr("stoker.training.loop.evaluate", lambda *given, **named: {"rows": 9, "log_loss": next(losses)})
    data = make_dataset(tmp_path / "d", rows=2000)
    settings = {**SMALL, "metric": "log_loss", "eval_every": 5, "keep_last": 3}
    stoker.train(data, out=tmp_path / "run", steps=40, **settings)
    run = RunDirectory(tmp_path / "run")
    assert run.steps() == [10, 30, 35, 40]
    assert run.best() == run.checkpoint(10)
    (run.checkpoint(10) / "dense.safetensors").unlink()
    result = stoker.train(resume=run.path, display="quiet")
    assert (result.best_step, result.valid["log_loss"]) == (30, 7.0), "not the last model, but the next best"
    shutil.rmtree(run.checkpoint(10).with_name("step_000000010.damaged"))
    assert run.best() == run.checkpoint(30)
    result = stoker.train(resume=run.path, steps=60, keep_last=1, display="quiet")
    assert run.steps() == [30, 60]
    assert (result.best_step, result.valid["log_loss"]) == (30, 7.0)


def test_a_resumed_run_deletes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_dataset(tmp_path / "d", rows=1000)
    stoker.train(data, out=tmp_path / "run", steps=8, save_every=2, eval_every=8, keep_last=9, **SMALL)
    run = RunDirectory(tmp_path / "run")
    assert run.steps() == [2, 4, 6, 8]
    (run.checkpoints / "step_000000010.tmp").mkdir()

    def begin(state: object) -> None:  # before a step is trained
        raise DataError("begun")

    monkeypatch.setattr("stoker.training.loop.fit", begin)
    with pytest.raises(DataError, match="begun"):
        stoker.train(resume=run.path, steps=10, keep_last=2, display="quiet")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000000006", "step_000000008"]


def test_the_bar_moves_between_records_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Noted()
    data = make_dataset(tmp_path / "d", rows=1000)
    stoker.train(data, out=tmp_path / "run", log_every=1000, **{**SMALL, "display": shown})
    assert shown.steps == list(range(1, 14))
    with ProgressBar() as bar:
        bar.start(0, 1000, "")
        bar.step(7)
        assert bar._bar.tasks[0].completed == 7
        bar.step(8)
        assert bar._bar.tasks[0].completed == 7, "not more often than can be seen"
        bar._next = 0.0
        bar.step(9)
        assert bar._bar.tasks[0].completed == 9
        monkeypatch.setattr("stoker.training.display.time.monotonic", lambda: 0.0)
        monkeypatch.setattr(bar, "_move", None)
        for step in range(10_000):
            bar.step(step)  # nothing is drawn while the clock stands still


def test_every_piece_of_work_has_its_own_bar_and_unit() -> None:
    with ProgressBar() as bar:
        bar.start(0, 1000, "")
        bar.work("checking shards", 3 * 2**20, 4 * 2**20)
        bar.work("checking shards", 4 * 2**20, 4 * 2**20)
        for total in (7, 5):  # of two epochs
            bar.work("reading ids of the epoch", 2, total, unit="batches")
        _, shards, ids = bar._bar.tasks
        assert (shards.completed, shards.total, shards.visible) == (4, 4, False)
        assert (ids.completed, ids.total, ids.visible) == (2, 5, True)
        assert (shards.fields["status"], ids.fields["status"]) == ("MiB", "batches")


def test_bars_show_a_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("stoker.training.display.time.monotonic", lambda: now[0])
    with ProgressBar() as bar:
        bar.start(0, 1000, "")
        for done in (0, 2**20):
            bar.work("checking shards", done, 4 * 2**20)
            now[0] += 2.0
        steps, shards = bar._bar.tasks
        assert shards.fields["status"] == "MiB  512.0 KiB/s  6.0 s left"
        for done in (1, 5):  # before the first record
            bar.step(done)
            now[0] += 8.0
        assert steps.fields["status"] == "0.5/s  33 min 10 s left"


def test_the_bar_shows_notes_as_they_are_and_those_of_kernels_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SOON", -1.0)
    with ProgressBar() as bar:
        bar.start(0, 10, "")
        bar.note("pip install 'stoker[tensorboard]' :smile:")
        with progress.compiling("kernel"):
            pass
    said = capsys.readouterr().err
    assert "'stoker[tensorboard]' :smile:" in said
    assert "now kernel" in said


@pytest.mark.parametrize(("policy", "times"), [(None, 1), ("active", 0)])
def test_a_run_says_once_that_other_programs_use_the_cores(
    policy: str | None, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr("stoker.training.progress.worked_for_others", count(0.0, 1e6).__next__)
    data = make_dataset(tmp_path / "data", rows=200, num_embeddings=(9, 7))
    stoker.train(data, out=tmp_path / "run", **{**SMALL, "steps": 3, "log_every": 1, "display": "plain"})
    assert capsys.readouterr().err.count("cores, and threads spin while they wait") == times


def test_a_narrow_terminal_shows_all_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with ProgressBar() as bar:
        bar.start(4690, 15000, "")
        bar._bar.update(bar._task, status="loss 0.5872  AUC 0.5100  15.90 k samples/s  1 min 54 s left")
        bar.work("evaluating valid", 3, 7, unit="batches")
        bar._bar.console.record = True
        bar._bar.console.print(bar._bar.get_renderable())
        assert "4690/15000 " in bar._bar.console.export_text()


def test_plain_lines_tell_of_long_work_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("stoker.training.display.time.monotonic", lambda: now[0])
    shown = PlainLines()
    for epoch, seconds in enumerate((1.0, 5.0, 5.0)):
        for done in range(4):
            shown.work("reading ids of the epoch", done, 3, unit="batches")
            now[0] += seconds
        said = "reading ids of the epoch: 1 of 3 batches  0.2/s  10.0 s left\n"
        assert capsys.readouterr().err.count(said) == (epoch > 0)


def test_work_that_is_done_again_gets_a_new_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("stoker.training.display.time.monotonic", lambda: now[0])
    with ProgressBar() as bar:
        bar.start(0, 1000, "")
        for _ in range(2):
            for done in (0, 10, 20):
                bar.work("evaluating valid", done, 20, unit="rows")
                now[0] += 5.0
            now[0] += 500.0  # of training
        bar.work("evaluating valid", 0, 20, unit="rows")
        now[0] += 5.0
        bar.work("evaluating valid", 10, 20, unit="rows")
        assert bar._bar.tasks[1].fields["status"] == "rows  2/s  5.0 s left"


def test_plain_lines_of_very_long_work_come_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("stoker.training.display.time.monotonic", lambda: now[0])
    shown = PlainLines()
    for done in range(100):
        shown.work("writing the checkpoint", done, 100, unit="rows")
        now[0] += 1.0
    assert [line.split()[3] for line in capsys.readouterr().err.splitlines()] == ["3", "34", "65", "96"]


def test_checkpoints_and_evaluations_of_a_run_are_shown(tmp_path: Path) -> None:
    """A checkpoint of 100 GiB takes minutes."""

    class Watching(Display):
        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {}

        def work(self, what: str, done: int, total: int, *, unit: str = "bytes") -> None:
            self.seen.setdefault(f"{what} ({total:,} {unit})", []).append(done)

    shown, data = Watching(), make_dataset(tmp_path / "data", rows=2000)
    settings: dict[str, Any] = {"batch_size": 64, "embedding_dim": 4, "display": shown}
    stoker.train(data, out=tmp_path / "run", steps=5, **settings)
    rows = sum(data.schema.num_embeddings.values())
    written = shown.seen[f"writing the checkpoint ({rows} rows)"]
    assert written == sorted(written)
    assert (written[0], written[-1], len(set(written))) == (0, rows, 1 + len(data.schema.num_embeddings))
    assert {"evaluating valid (200 rows)", "evaluating test (200 rows)"} <= shown.seen.keys()
    again = Watching()
    stoker.train(resume=tmp_path / "run", steps=10, display=again)
    assert f"reading rows ({rows} rows)" in again.seen
    assert any(name.startswith("checking files") for name in again.seen)


def test_a_home_may_be_given_as_a_path(tmp_path: Path) -> None:
    assert stoker.TrainConfig(home_path=tmp_path).to_dict()["home_path"] == str(tmp_path)  # type: ignore[arg-type]


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("stoker.training.placing.shutil.disk_usage", lambda _: SimpleNamespace(free=free))


def test_room_for_checkpoints_is_looked_for_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, shown = make_dataset(tmp_path / "d", rows=1000), Noted()
    settings = {**SMALL, "display": shown}
    disk(monkeypatch, 1000)
    with pytest.raises(CheckpointError, match=r"a checkpoint takes .* has 1000 B free\. Free some space"):
        stoker.train(data, out=tmp_path / "run", steps=4, **settings)
    assert not (tmp_path / "run").exists()
    disk(monkeypatch, 10_000)
    stoker.train(data, out=tmp_path / "a", steps=4, save_every=1, **settings)
    assert sum("but the run keeps up to 4, which need" in note for note in shown.notes) == 1
    shown.notes.clear()
    stoker.train(data, out=tmp_path / "b", steps=4, **settings)  # only one is written
    assert not any("at a time" in note for note in shown.notes)
    disk(monkeypatch, 0)
    stoker.train(resume=tmp_path / "a", display=shown)  # nothing is left to do


def test_memory_that_is_short_just_now_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, shown = make_dataset(tmp_path / "d", rows=1000), Noted()
    monkeypatch.setattr("stoker.training.placing.available_memory", lambda: 100)
    stoker.train(data, out=tmp_path / "run", steps=1, **{**SMALL, "display": shown})
    assert any("100 B is free. Give a smaller device_memory" in note for note in shown.notes)


def test_rates_leave_out_the_first_steps_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_dataset(tmp_path / "d", rows=2000)
    real, calls, now = stoker.DLRM.loss, iter(range(10**6)), [0.0]

    def loss(self: stoker.DLRM, batch: stoker.Batch) -> Any:
        now[0] += 0.01 if next(calls) else 2.0  # seconds: the first step takes as long as with a compiler
        return real(self, batch)

    monkeypatch.setattr(stoker.DLRM, "loss", loss)
    monkeypatch.setattr("stoker.training.progress.time.perf_counter", lambda: now[0])
    result = stoker.train(data, out=tmp_path / "run", steps=20, log_every=10, **SMALL)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_second"] for line in lines if line["kind"] == "train"]
    assert result.samples_per_second is not None
    assert [round(64 / rate, 6) for rate in (*rates, result.samples_per_second)] == [0.01] * 3
    calls = iter(range(10**6))
    short = stoker.train(data, out=tmp_path / "short", steps=5, **SMALL)
    assert short.samples_per_second is not None, "where nothing follows they are all there is"
    assert 5 * 64 / short.samples_per_second == pytest.approx(2.04)
