"""What the command line says of mistakes, of Ctrl-C, and at the end of a run."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from calling import SMALL, call, output

from stoker import cli as command_line
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import seal
from stoker.base.progress import Bars
from stoker.cli.options import interruption, message_of
from stoker.cli.options import say as print_line
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_manifest
from stoker.testing import make_dataset
from stoker.training.files.rundir import RunDirectory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=2000)


@pytest.fixture(scope="module")
def run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    assert call("train", data.path, "--out", out, "--epochs", 2, *SMALL) == 0
    return out


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls a command: its exit code, standard output and error, white space folded."""

    def told(*arguments: Any) -> tuple[int, str, str]:
        code, out, err = output(capsys, *arguments)
        return code, " ".join(out.split()), " ".join(err.split())

    return told


@pytest.mark.parametrize(
    ("cores", "environment", "policy"),
    [(0.0, {}, None), (0.6, {}, "passive"), (0.6, {"OMP_WAIT_POLICY": "active"}, "active"), (0.6, {"RANK": "1"}, None)],
)
def test_threads_sleep_while_they_wait_if_other_programs_use_the_cores(
    cores: float, environment: dict[str, str], policy: str | None, monkeypatch: pytest.MonkeyPatch, say: Any
) -> None:
    monkeypatch.setattr(command_line, "contending", lambda: cores)
    for name in ("OMP_WAIT_POLICY", "RANK"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        del os.environ[name]
    for name, value in environment.items():
        os.environ[name] = value
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        command_line._yield_cores()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    monkeypatch.setattr(command_line, "_yield_cores", lambda: 1 / 0)
    for command in ("plan", "inspect", "serve", "train", "--help"):
        assert say(command, "--help")[0] == 0
    for command in ("inspect", "compact", "report"):
        assert say(command, "nowhere")[0] == 2
    with pytest.raises(ZeroDivisionError):
        call("train", "data")


OPTIONS = {"batch_size": "--batch-size", "home_path": "--home", "epochs": "--epochs", "out": "--out"}


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ConfigError("batch_size is 0. Lower batch_size."), "--batch-size is 0. Lower --batch-size."),
        (ConfigError("home_path=x, not (home_path)"), "--home=x, not (--home)"),
        (ConfigError("the epochs are out"), "the epochs are out"),
        (ConfigError("2 epochs and 50 more; epochs=1", settings=("epochs",)), "2 epochs and 50 more; --epochs=1"),
        (ConfigError("/a/batch_size/b.batch_size 'batch_size' --batch_size"), None),
        (ConfigError("row_lr and my_batch_size, batch_size.csv"), None),
        (DataError("column batch_size of x.csv"), None),
        (DataError("batch_size is 0, home_path", settings=("batch_size",)), "--batch-size is 0, home_path"),
    ],
)
def test_parameters_are_shown_as_options(error: Any, shown: str | None) -> None:
    assert message_of(error, OPTIONS) == (str(error) if shown is None else shown)


@pytest.mark.slow
def test_settings_in_errors_are_options_of_the_command(data: Dataset, run: Path, tmp_path: Path, say: Any) -> None:
    new = ["train", data.path, "--out", tmp_path / "x", *SMALL]
    cases = {
        "--batch-size is 0": [*new, "--batch-size", 0],
        "--epochs is 0": [*new, "--epochs", 0],
        "--metric 'x' is unknown": [*new, "--metric", "x"],
        "--row-lr is -1.0": [*new, "--row-lr", -1],
        "--device-memory: size '4Gx'": [*new, "--device-memory", "4Gx"],
        "give either --out, the run directory to make, or --resume": ["train", data.path],
        "give --epochs or --steps, not both": [*new, "--epochs", 1, "--steps", 3],
        "was started with --batch-size=64; a resumed": ["train", "--resume", run, "--batch-size", 3],
    }
    for words, arguments in cases.items():
        code, _, err = say(*arguments)
        assert code == 2, words
        assert words in err
    assert not (tmp_path / "x").exists()


def test_ctrl_c_is_found_behind_other_errors() -> None:
    stop = KeyboardInterrupt("kept")
    outer = RuntimeError("c")
    outer.__context__ = ImportError("b")
    outer.__context__.__cause__ = stop
    assert interruption(outer) is stop
    stop.__context__ = outer  # a ring
    assert interruption(outer) is stop
    assert interruption(KeyError("a")) is None


def test_ctrl_c_is_one_line(run: Path, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(kind: str) -> Any:
        def stop(*_: Any, **__: Any) -> None:
            if kind == "plain":
                raise KeyboardInterrupt
            if kind == "told":
                raise KeyboardInterrupt("interrupted; 3 parts are kept")
            if kind == "wrapped":
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt as error:
                    raise ImportError("numpy failed") from error
            with contextlib.suppress(KeyboardInterrupt):  # as packages do that are being imported
                os.kill(os.getpid(), signal.SIGINT)
            raise RecursionError("half of a package")

        return stop

    kinds = {"plain": "interrupted", "told": "interrupted; 3 parts are kept", "wrapped": "interrupted"}
    if os.name == "posix":
        kinds["swallowed"] = "interrupted"
    before = signal.getsignal(signal.SIGINT)
    for kind, words in kinds.items():
        monkeypatch.setattr("stoker.training.scores.evaluation.evaluate", stopping(kind))
        for rank in "", "0", "1":  # alone, and as the first or another rank of torchrun: one of these says it
            with monkeypatch.context() as patch:
                for name, value in {"RANK": rank, "WORLD_SIZE": "2"}.items() if rank else ():
                    patch.setenv(name, value)
                assert say("evaluate", run) == (130, "", words if rank != "1" else ""), (kind, rank)
        assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_a_command_is_read(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.cli._LazyGroup.parse_args", stop, raising=False)
    assert say("evaluate", "runs/a") == (130, "", "interrupted")


@pytest.mark.slow
def test_what_is_next_fits_the_run(data: Dataset, run: Path, tmp_path: Path, say: Any) -> None:
    shutil.copytree(run, tmp_path / "run")
    _, out, err = say("train", "--resume", tmp_path / "run")
    assert "nothing is left to do: 50 steps of 50 are done" in err
    assert ("--epochs 3" in out) == (json.loads((run / "report.json").read_text())["best_step"] == 50)
    assert "--epochs 2" not in out
    assert "tensorboard" not in out
    # Where patience ended a run, training longer is no advice.
    wild = [*SMALL, "--row-lr", 9, "--metric", "log_loss", "--steps", 9000, "--eval-every", 5]
    _, out, _ = say("train", data.path, "--out", tmp_path / "wild", *wild, "--tensorboard", "--patience", 1)
    assert json.loads((tmp_path / "wild" / "report.json").read_text())["stopped_early"]
    assert "--resume" not in out
    assert f"tensorboard --logdir {tmp_path}/wild/tensorboard" in out


@pytest.mark.slow
def test_a_run_given_in_steps_goes_on_in_epochs(data: Dataset, tmp_path: Path, say: Any) -> None:
    _, _, err = say("train", data.path, "--out", tmp_path / "run", *SMALL, "--steps", 1)
    assert "training rows, 1 step of 64" in err
    assert say("train", "--resume", tmp_path / "run", "--epochs", 1)[0] == 0
    assert RunDirectory(tmp_path / "run").steps()[-1] == 25


def test_resuming_for_less_than_was_done_is_refused(run: Path, say: Any) -> None:
    before = (run / "config.json").read_bytes()
    for option, value, more in (("--epochs", 1, "--epochs=3"), ("--steps", 20, "--steps=100")):
        code, _, err = say("train", "--resume", run, option, value)
        assert code == 2
        assert "has trained 50 steps (2 epochs)" in err
        assert f"{option}={value} leaves nothing to do. Give more, such as {more}" in err
    assert (run / "config.json").read_bytes() == before


@pytest.mark.slow
def test_one_epoch_is_one_epoch(data: Dataset, tmp_path: Path, say: Any) -> None:
    say("train", data.path, "--out", tmp_path / "run", *SMALL)
    assert "has trained 25 steps (1 epoch), so" in say("train", "--resume", tmp_path / "run", "--steps", 3)[2]


@pytest.mark.slow
def test_trace_says_where_it_writes_and_what_it_replaces(
    run: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "trace.json in the current directory" in say("trace", "--help")[1]
    for words in ("timeline: trace.json (https", "timeline: trace.json, replaced (https"):
        assert words in say("trace", run, "--steps", 2)[1]


@pytest.mark.slow
def test_an_early_end_is_said(data: Dataset, tmp_path: Path, say: Any) -> None:
    wild = [*SMALL, "--row-lr", 9, "--metric", "log_loss", "--steps", 9000, "--eval-every", 5, "--patience", 3]
    for arguments in ([data.path, "--out", tmp_path / "run", *wild], ["--resume", tmp_path / "run"]):
        _, _, err = say("train", *arguments)
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        assert f"stopped early at step {report['step']:,} of 9,000: log loss on the validation rows" in err
        assert f"has not improved for 3 evaluations (patience); best at step {report['best_step']:,}" in err
        assert ("A larger patience trains on" in err) == ("--resume" in arguments)


def test_an_empty_split_is_an_error(run: Path, tmp_path: Path, say: Any) -> None:
    data = make_dataset(tmp_path / "d", rows=2000)
    splits = {**data.manifest["splits"], "test": {"rows": 0, "positives": 0, "shards": []}}
    write_manifest(data.path, {**data.manifest, "splits": splits})
    for command in (["evaluate", run], ["predict", run, "--out", tmp_path / "p.parquet"]):
        code, out, err = say(*command, "--data", data.path)
        assert (code, out) == (2, "")
        assert "split test has 0 rows" in err
        assert "--split valid has 200" in err
    assert not (tmp_path / "p.parquet").exists()


def test_another_vocabulary_has_a_true_remedy(run: Path, tmp_path: Path, say: Any) -> None:
    data = make_dataset(tmp_path / "d", rows=2000)
    write_manifest(data.path, {**data.manifest, "schema_hash": "0" * 64})
    _, _, err = say("evaluate", run, "--data", data.path)
    assert "another schema or vocabulary" in err
    assert "Use the dataset of the training run" in err


@pytest.mark.slow
def test_a_damaged_best_checkpoint_names_the_others(data: Dataset, tmp_path: Path, say: Any) -> None:
    wild = [*SMALL, "--row-lr", 9, "--metric", "log_loss", "--steps", 9000, "--eval-every", 5, "--keep-last", 4]
    say("train", data.path, "--out", tmp_path / "run", *wild, "--patience", 4)  # so the best is not the last
    run = RunDirectory(tmp_path / "run")
    losses = {e["step"]: e["valid"]["log_loss"] for e in run.evaluated("log_loss")}
    best = run.best()
    assert best is not None
    assert best.name == f"step_{min(losses, key=lambda step: losses[step]):09d}"
    (best / "dense.safetensors").write_bytes(b"")
    others = [run.checkpoint(step) for step in run.steps() if run.checkpoint(step) != best]
    code, _, err = say("evaluate", run.path)
    assert code == 2
    assert f"{best / 'dense.safetensors'} has 0 bytes" in err
    assert f"give one of {', '.join(map(str, others))} in place of the run" in err
    assert say("evaluate", others[0])[0] == 0
    # Going on puts the best of the others in its place, not the last one.
    say("train", "--resume", run.path)
    del losses[int(best.name[5:])]
    second = min(losses, key=lambda step: losses[step])
    assert json.loads((run.path / "report.json").read_text())["best_step"] == second
    code, out, _ = say("evaluate", run.path, "--json")
    assert code == 0
    assert json.loads(out)["step"] == second


def test_scores_are_written_in_the_format_of_their_name(run: Path, tmp_path: Path, say: Any) -> None:
    import polars as pl

    code, _, err = say("predict", run, "--out", tmp_path / "p.txt")
    assert code == 2
    assert "ends in neither .parquet nor .csv" in err
    for name in ("p.parquet", "p.csv"):
        assert say("predict", run, "--out", tmp_path / name)[0] == 0
    parquet, csv = pl.read_parquet(tmp_path / "p.parquet"), pl.read_csv(tmp_path / "p.csv")
    assert csv.cast(dict(parquet.schema)).equals(parquet)  # type: ignore[arg-type]
    assert say("predict", run, "--out", tmp_path / "one.csv", "--rows", 1)[1].startswith("1 score of")


def settings_with(run: Path, **changes: Any) -> None:
    """Change what a run's config.json says of where rows lie."""
    config = json.loads((run / "config.json").read_text())
    config["settings"].update(changes)
    (run / "config.json").write_text(json.dumps(seal(config)))


def test_scores_are_worked_out_where_the_run_had_its_rows(
    run: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stoker.training.files.loading as checkpoints

    placed = Path(shutil.copytree(run, tmp_path / "run"))
    settings_with(placed, device_memory="600", host_memory="100", home_path=str(tmp_path / "home"))
    seen: list[Any] = []
    real = checkpoints.load

    def load(*arguments: Any, **settings: Any) -> Any:
        seen.append(settings["placement"])
        return real(*arguments, **settings)

    monkeypatch.setattr(checkpoints, "load", load)
    whole = json.loads(say("evaluate", run, "--json")[1])
    for command in (["evaluate", placed], ["predict", placed, "--out", tmp_path / "p.csv"]):
        assert say(*command)[0] == 0
        assert not seen[-1].resident
        assert {strategy.path for strategy in seen[-1].values() if hasattr(strategy, "path")} == {
            str(tmp_path / "home")
        }
    code, out, _ = say("evaluate", placed, "--json", "--device-memory", "all")
    assert (code, seen[-1], json.loads(out)["auc"]) == (0, None, whole["auc"])
    (placed / "config.json").write_text("{")
    code, _, err = say("evaluate", placed)
    assert code == 2
    assert "is garbled" in err
    assert "stoker evaluate CHECKPOINT --data DATASET" in err
    dataset = json.loads((run / "config.json").read_text())["dataset"]
    assert say("evaluate", placed, "--data", dataset, "--device-memory", "all")[0] == 0


def test_a_budget_for_small_batches_scores_in_small_batches(
    run: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stoker.training.scores.evaluation as evaluation

    # The bookkeeping of large batches is what a small budget on the CPU does not hold.
    monkeypatch.setattr("stoker.placement.footprint._SMALL", 2**18)
    sizes: list[int] = []
    real = evaluation.evaluate

    def evaluate(*arguments: Any, **settings: Any) -> Any:
        sizes.append(settings["batch_size"])
        return real(*arguments, **settings)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    code, _, err = say("evaluate", run, "--device-memory", "600", "--batch-size", 8192)
    assert code == 2
    assert "bookkeeping takes" in err
    assert "with batches of 8,192 examples" in err
    assert "choose a smaller --batch-size" in err
    code, _, err = say("evaluate", run, "--device-memory", "600")
    assert code == 0, err
    assert 32 <= sizes[0] < 8192
    assert say("evaluate", run)[0] == 0
    assert sizes[1] == 8192


def test_checkpoints_without_manifests_are_damaged_not_missing(run: Path, tmp_path: Path, say: Any) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "run"))
    lines = (broken / "metrics.jsonl").read_bytes()
    found = RunDirectory(broken)
    for step in found.steps():
        (found.checkpoint(step) / "manifest.json").unlink()
    last = found.checkpoint(found.steps()[-1])
    code, _, err = say("train", "--resume", broken, "--epochs", 3)
    assert code == 2
    assert "has no whole checkpoint to resume from" in err
    assert "Put a checkpoint back from a copy" in err
    assert (broken / "metrics.jsonl").read_bytes() == lines
    for arguments in ([broken], [last]):
        code, _, err = say("evaluate", *arguments)
        assert code == 2
        assert "it has no manifest.json" in err
        assert "Put a checkpoint back from a copy" in err
    # What a kill leaves under its temporary name is no checkpoint at all.
    shutil.rmtree(broken / "checkpoints")
    (broken / "checkpoints" / "step_000000025.tmp").mkdir(parents=True)
    assert "has no checkpoint yet; starting from the beginning" in say("train", "--resume", broken, "--steps", 1)[2]


def test_a_path_with_the_name_of_an_option_is_a_path(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data.path)
    for command in (("predict", "data", "--out", "scores.csv"), ("rollback", "data"), ("update", "data", "new.csv")):
        code, _, err = say(*command)
        assert code == 2
        assert err.startswith("error: data is a dataset, not a run"), err


@pytest.mark.parametrize("out", [".", "/"])
def test_a_directory_without_a_name_is_no_output(
    data: Dataset, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Any, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("label,user\n1,a\n0,b\n")
    for command, message in (
        (("prepare", "auto", "log.csv", "--out", out), "Name a directory in it."),
        (("synthetic", "criteo", "--rows", 10, "--out", out), "is a directory. Name a file in it"),
        (("predict", run, "--out", out), f"Choose for example {Path(out) / 'scores.parquet'}."),
        (("compare", run, run, "--page", out), f"Choose for example {Path(out) / 'report.html'}."),
        (("compare", run, run, "--plot", out), f"Choose for example {Path(out) / 'plot.png'}."),
        (("export", run, out), "Choose another"),
    ):
        code, _, err = say(*command)
        assert code == 2, err
        assert message in err
    assert say("synthetic", "movielens", "--rows", 10, "--out", ".")[0] == 0
    assert [
        path.name for path in tmp_path.iterdir() if path.name not in ("ratings.dat", "users.dat", "movies.dat")
    ] == ["log.csv"]


@pytest.mark.slow
def test_a_moved_dataset_has_a_remedy(run: Path, tmp_path: Path, say: Any) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "run"))
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(seal({**config, "dataset": str(tmp_path / "gone")})))
    code, _, err = say("train", "--resume", moved, "--epochs", 3)
    assert code == 2
    assert f"no longer at {tmp_path}/gone" in err
    assert f"stoker train DATASET --resume {moved}" in err
    for command in ("evaluate", "verify", "trace"):
        code, _, err = say(command, moved)
        assert code == 2
        assert "If it was moved: name it with --data DATASET" in err, command
    assert say("train", config["dataset"], "--resume", moved, "--epochs", 3)[0] == 0


def test_a_path_of_another_kind_is_named_for_what_it_is(data: Dataset, run: Path, tmp_path: Path, say: Any) -> None:
    cases: dict[str, list[Any]] = {
        f"{run} is a run, not a dataset. Name the directory that stoker prepare wrote (its own is {data.path}": [
            "train", run, "--out", tmp_path / "x",
        ],
        f"{run} is a run, not a": ["plan", run],
        f"{data.path} is a dataset, not a run. Name the run or checkpoint": ["evaluate", data.path],
        f"{data.path} is a dataset, not a run directory": ["train", "--resume", data.path],
        "an argument is empty": ["train", "", "--out", tmp_path / "x"],
    }  # fmt: skip
    for words, arguments in cases.items():
        code, _, err = say(*arguments)
        assert code == 2, words
        assert words in err
    assert not (tmp_path / "x").exists()


def test_an_existing_out_is_found_before_anything_is_built(
    data: Dataset, run: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr("stoker.training.loop.place_run", late)
    monkeypatch.setattr("stoker.training.tools.trace.find_section", late)
    assert "exists and is not empty" in say("train", data.path, "--out", run, *SMALL)[2]
    (tmp_path / "file").write_text("")
    assert "is not a writable directory" in say("train", data.path, "--out", tmp_path / "file" / "run", *SMALL)[2]
    code, _, err = say("trace", run, "--out", tmp_path / "no" / "t.json")
    assert code == 2
    assert f"{tmp_path}/no/t.json cannot be written (No such file or directory). Choose another file with --out" in err
    monkeypatch.setattr("stoker.rewrite.popularity.profile", late)
    monkeypatch.setattr("stoker.cli.runs._open", late)
    inside = tmp_path / "file" / "x"
    for command in (
        ["profile", data.path, "--out", inside],
        ["profile", data.path, "--plot", inside.with_suffix(".png")],
        ["predict", run, "--out", inside.with_suffix(".csv")],
    ):
        code, _, err = say(*command)
        assert (code, f"{tmp_path / 'file'} is not a writable directory" in err) == (2, True), err
    assert ".tmp" not in err


@pytest.mark.slow
def test_settings_without_effect_are_named(data: Dataset, tmp_path: Path, say: Any) -> None:
    short = ["train", data.path, *SMALL, "--steps", 2]
    _, _, err = say(*short, "--out", tmp_path / "a", "--lookahead", 8, "--in-flight", 2, "--warmup", 10)
    assert "lookahead and in_flight are ignored: without device_memory" in err
    assert "the warm-up of 10 steps is not shorter than the run of 2 steps" in err
    _, _, err = say(*short, "--out", tmp_path / "b", "--device-memory", "600", "--lookahead", 0)
    assert "without a lookahead" in err
    _, _, err = say(*short, "--out", tmp_path / "c")
    assert "ignored" not in err
    assert "warm-up" not in err
    for wrong, words in (
        (["--seed", -1], "--seed is -1; it must not be negative"),
        (["--dtype", "fp16"], "--dtype 'fp16' is unknown. Choose one of 'float32', 'bfloat16'"),
        (["--backend", "gpu"], "--backend 'gpu' is unknown"),
        (["--hidden", "12"], "model 'dlrm' has no option 'hidden'. It has: bottom, top, linear."),
    ):
        code, _, err = say(*short, "--out", tmp_path / "d", *wrong)
        assert (code, words in err) == (2, True), (words, err)


def test_our_warnings_are_words_and_others_are_left_alone(run: Path, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import stoker

    def warn(*_: Any, **__: Any) -> None:
        warnings.warn_explicit("the disk is small", UserWarning, stoker.__file__, 1)
        warnings.warn_explicit("not ours", UserWarning, "/else/where.py", 7)
        raise ConfigError("enough")

    shown: list[Any] = []
    monkeypatch.setattr("stoker.training.scores.evaluation.evaluate", warn)
    monkeypatch.setattr(warnings, "showwarning", lambda *given: shown.append(given))
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", before)
        assert say("evaluate", run) == (2, "", "warning: the disk is small error: enough")
        assert warnings.showwarning is before
    assert [(str(given[0]), given[2]) for given in shown] == [("not ours", "/else/where.py")]


def test_what_cannot_be_written_is_named_as_it_was_given(run: Path, tmp_path: Path, say: Any) -> None:
    from stoker.base.files import atomic_file

    (tmp_path / "x.json.tmp").mkdir()  # stands in the way even of a superuser
    with pytest.raises(OSError, match=r"x\.json'$"), atomic_file(tmp_path / "x.json"):
        pass
    with pytest.raises(OSError, match=r"too large: .*y\.json'$"), atomic_file(tmp_path / "y.json"):
        raise OSError(errno.EFBIG, "File too large")  # of a write, which has no name
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / ".lock").unlink(missing_ok=True)
    (copy / ".lock").mkdir()
    code, _, err = say("train", "--resume", copy, "--epochs", 3)
    assert code == 2
    assert f"{copy} cannot be written to (Is a directory). Training puts its checkpoints there: make it writable" in err


def test_a_directory_that_is_closed_after_a_run_is_named(
    run: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(dir: Path) -> Any:  # a superuser may write anywhere
        if dir.name == copy.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(dir / "tmp"))
        return io.BytesIO()

    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / ".lock").touch()
    monkeypatch.setattr("stoker.training.files.rundir.TemporaryFile", closed)
    for command in (("train", "--resume", copy, "--epochs", 3), ("compact", copy), ("rollback", copy)):
        code, _, err = say(*command)
        assert code == 2
        assert f"{copy} cannot be written to (Permission denied). Training puts its checkpoints there" in err


def test_a_second_ctrl_c_says_what_is_kept(
    run: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stoker.training.loop as loop

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    copy = Path(shutil.copytree(run, tmp_path / "run"))
    monkeypatch.setattr(loop, "fit", stop)
    code, _, err = say("train", "--resume", copy, "--epochs", 3)
    assert code == 130
    assert "step_000000050 is the newest checkpoint. Continue with: stoker train --resume" in err


def test_running_out_of_memory_names_the_budget(
    data: Dataset, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = ["train", data.path, "--out", tmp_path / "x", *SMALL]
    monkeypatch.setattr("stoker.training.placing.total_memory", lambda: 1000)
    code, _, err = say(*new)
    assert code == 2
    assert "with optimizer state, but it has only 1000 B. Give a smaller --device-memory" in err
    assert "stoker plan" in err
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 23.8 GiB")

    monkeypatch.setattr("stoker.training.loop.place_run", full)
    code, _, err = say(*new)
    assert code == 2
    assert "out of memory: Unable to allocate 23.8 GiB. Give a smaller --device-memory" in err


def test_a_failed_start_leaves_no_home(
    data: Dataset, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("the start fails")

    monkeypatch.setattr("stoker.training.loop.check_disk", lambda *_, **__: fail())
    home = ["--device-memory", "600", "--host-memory", "100", "--home", tmp_path / "new" / "home"]
    assert "the start fails" in say("train", data.path, "--out", tmp_path / "x", *SMALL, *home)[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_breaks_lines_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """But no path, nor a command that may be copied; nothing breaks them in a file, also not with colours."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR" if terminal else "FORCE_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR" if terminal else "NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    path, command = "/data/" + "x" * 60, "next: stoker predict run --out " + "y" * 20
    shown = f"all rows are in the file of the backing store {path}, which is-long\n\n  {command}"
    print_line(shown)
    print_line(shown.replace("stoker ", ""))
    first, second = capsys.readouterr().out.split(shown + "\n")
    assert not first
    words = second.rstrip("\n").split("\n")
    assert (max(map(len, (line for line in words if path not in line))) <= 40) == terminal
    assert " ".join(second.split()) == " ".join(shown.replace("stoker ", "").split())
    assert "" in words
    for other in (
        "pip install 'a[b]'",
        "gzip -dc log.csv.gz | iconv -f UTF-16 -t UTF-8 > NEW.csv",
        "tensorboard --logdir",
    ):
        print_line(line := f"error: something is missing here. Run: {other}")
        assert capsys.readouterr().out == line + "\n"
    monkeypatch.setenv("COLUMNS", "0")
    print_line("no width is known")  # Rich prints nothing, but nothing fails


def test_lines_are_printed_above_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Next to a bar they would be erased with it, in part, and leave copies of bars behind."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with Bars(quiet=False, at_once=True) as bars:
        bars("a stage", 1, 2)
        print_line("a line of text", "dim", error=True)
        print_line("a result")
    out, err = capsys.readouterr()
    before, _, _ = err.partition("a line of text")
    assert "a stage" in before
    assert before.removesuffix("\x1b[2m").endswith("\x1b[2K")
    assert out == "a result\n"
