"""``stoker train``, ``evaluate`` and ``predict`` as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from calling import SMALL, call, output
from processes import Python

from stoker.base import progress
from stoker.cli import COMMANDS, main
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=2000)


@pytest.fixture(scope="module")
def run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    assert call("train", data.path, "--out", out, *SMALL) == 0
    return out


@pytest.mark.slow
def test_a_person_sees_a_closing_table(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "train", data.path, "--out", tmp_path / "a", *SMALL)
    assert code == 0
    for word in ("AUC", "log loss", "accuracy", "samples/s", str(tmp_path / "a"), "stoker predict"):
        assert word in out


@pytest.mark.slow
def test_a_script_reads_json_lines(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "dcn", "--dim", "4", "--hidden", "8"]
    model += ["--model-option", "rank=2", "--model-option", "structure=stacked"]
    code, out, _ = output(
        capsys, "train", data.path, "--out", tmp_path / "a", "--json", "--log-every", 5, *model, *SMALL[6:]
    )
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["kind"] for line in lines] == ["train"] * 5 + ["valid", "test", "result"]
    assert lines[-1]["test"]["auc"] == lines[-2]["auc"]
    manifest = json.loads((tmp_path / "a" / "checkpoints" / "step_000000025" / "manifest.json").read_text())
    assert manifest["model"]["rank"] == 2
    assert manifest["model"]["structure"] == "stacked"


@pytest.mark.slow
def test_resume_continues(data: Dataset, run: Path, tmp_path: Path) -> None:
    assert call("train", data.path, "--out", tmp_path / "b", *SMALL) == 0
    assert call("train", "--resume", tmp_path / "b", "--epochs", 2) == 0
    assert json.loads((tmp_path / "b" / "report.json").read_text())["step"] == 50


def test_evaluate_finds_the_best_checkpoint_and_the_dataset(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads((run / "report.json").read_text())
    code, out, _ = output(capsys, "evaluate", run, "--json")
    assert code == 0
    assert json.loads(out)["auc"] == report["test"]["auc"]
    checkpoint = run / "checkpoints" / f"step_{report['best_step']:09d}"
    code, out, _ = output(capsys, "evaluate", checkpoint, "--split", "valid", "--json")
    assert json.loads(out)["auc"] == report["valid"]["auc"]
    code, out, _ = output(capsys, "evaluate", run)
    assert f"{report['test']['auc']:.4f}" in out


def test_long_work_of_evaluate_and_predict_has_bars(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 100 GiB takes minutes to check and to read."""
    seen: dict[str, tuple[int, int, str]] = {}
    monkeypatch.setattr(progress.Bars, "__call__", lambda bars, what, *more: seen.update({what: more}))
    size = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.safetensors"))
    assert call("evaluate", run) == 0
    assert call("predict", run, "--out", tmp_path / "scores.csv") == 0
    assert seen["checking files"] == (size, size, "bytes")
    assert {"reading rows", "evaluating test", "scoring"} <= seen.keys()
    assert seen["scoring"] == (200, 200, "rows")


def test_predict_writes_scores(run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    out = tmp_path / "scores.parquet"
    code, text, _ = output(capsys, "predict", run, "--data", data.path, "--split", "valid", "--out", out, "--json")
    assert code == 0
    assert json.loads(text)["rows"] == 200
    assert pq.read_table(out).num_rows == 200


@pytest.mark.slow
def test_mistakes_are_one_paragraph_without_traceback(
    data: Dataset, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "there is no dataset": ["train", tmp_path / "no", "--out", tmp_path / "x"],
        "needs a dataset": ["train", "--out", tmp_path / "x"],
        "either --out": ["train", data.path],
        "not empty. Continue it with --resume": ["train", data.path, "--out", run],
        "'wide' is unknown": ["train", data.path, "--out", tmp_path / "x", "--model", "wide"],
        "is not a list of layer sizes": ["train", data.path, "--out", tmp_path / "x", "--top", "8-big"],
        "lacks a value": ["train", data.path, "--out", tmp_path / "x", "--model-option", "rank"],
        "is not a run directory": ["train", "--resume", tmp_path / "x"],
        "neither a checkpoint nor a run": ["evaluate", data.path.parent],
        "no split 'later'": ["evaluate", run, "--split", "later"],
        "is not in a run directory": ["evaluate", _lone_checkpoint(run, tmp_path)],
    }
    for words, arguments in cases.items():
        code, out, err = output(capsys, *arguments)
        assert (code, out) == (2, ""), words
        assert words in " ".join(err.split())
        assert "Traceback" not in err
    assert not (tmp_path / "x").exists()


def _lone_checkpoint(run: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(run / "checkpoints" / "step_000000025", tmp_path / "lone"))


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no dataset"):
        main(["train", str(tmp_path / "no"), "--out", str(tmp_path / "x"), "--debug"])


def test_our_own_mistakes_say_so(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("slot")

    monkeypatch.setattr("stoker.training.scores.evaluation.evaluate", broken)
    code, _, err = output(capsys, "evaluate", run)
    assert code == 1
    assert "an error in Stoker" in err


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from stoker.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'polars', 'numba', 'pyarrow'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "heavy: []"
    for command in COMMANDS:
        assert f" {command} " in done.stdout


@pytest.mark.slow
def test_a_missing_package_does_not_break_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys; sys.modules['stoker.cli.prepare'] = None\nfrom stoker.cli import main\nmain(sys.argv[1:])"
    help_text = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=True)
    assert "train" in help_text.stdout
    refused = subprocess.run(
        [sys.executable, "-c", script, "prepare", "criteo", "x.tsv", "--out", "y"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "stoker prepare" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_set_the_exit_code_and_say_how_to_go_on(data: Dataset, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    command = [
        "-m",
        "stoker",
        "train",
        str(data.path),
        "--out",
        str(out),
        "--epochs",
        "100000",
        *SMALL,
    ]
    with Python(*command) as running:
        while not list(out.glob("checkpoints/step_*/manifest.json")):
            assert running.process.is_alive(), running.wait().stderr
            time.sleep(0.02)
        assert running.process.pid is not None
        os.kill(running.process.pid, number)
        ended = running.wait()
    assert ended.returncode == 128 + number
    assert f"stoker train --resume {out}" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_is_a_run_sets_the_exit_code(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def end(*arguments: Any) -> None:
        os.kill(os.getpid(), number)
        threading.Event().wait(5)

    monkeypatch.setattr("stoker.training.loop._train", end)
    assert call("train", data.path, "--out", tmp_path / "run", *SMALL) == 128 + number


def test_explain_shows_settings_and_trains_nothing(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "train", data.path, "--explain", "--batch-size", 32)
    assert code == 0
    assert re.search(r"batch-size .* 32 .* given", out)
    code, out, _ = output(capsys, "train", data.path, "--explain", "--json")
    found = {reason["setting"]: reason["value"] for reason in json.loads(out)["reasons"]}
    assert found["batch_size"] == 64
    assert call("train", "--explain") == 2
    assert call("train", data.path, "--explain", "--batch-size", "auto") == 2
