"""``stoker verify`` and ``stoker trace`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calling import output

import stoker
from stoker.base import progress
from stoker.tables.stores.home import MemoryHome
from stoker.testing import make_dataset


@pytest.fixture(autouse=True)
def _no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 1e9)  # however busy the machine is


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = make_dataset(tmp_path_factory.mktemp("data") / "d", rows=1000, num_embeddings=(600, 300, 40))
    out = tmp_path_factory.mktemp("runs") / "a"
    stoker.train(
        data, out=out, steps=12, save_every=6, eval_every=12, embedding_dim=4, batch_size=32, backend="reference",
        model_options={"bottom": (8,), "top": (8,)}, tensorboard=False, display="quiet",
    )  # fmt: skip
    return out


@pytest.mark.slow
def test_verify_says_identical_and_what_it_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "verify", run, "--steps", 4)
    assert (code, err.strip()) == (0, "")
    assert "4 steps from step_000000006" in out
    assert "940 rows at the end" in out
    assert out.splitlines()[-1] == "identical"
    code, out, _ = output(
        capsys,
        "verify",
        run,
        "--from",
        "start",
        "--device-memory",
        "2KiB",
        "--lookahead",
        2,
        "--epoch-lookahead",
        "--json",
    )
    found = json.loads(out)
    assert code == 0
    assert found["identical"] is True
    assert (found["begin"], found["steps"], found["checkpoint"], found["difference"]) == (0, 12, None, None)
    assert found["touched_rows"] > 0


def test_verify_names_a_difference_and_exits_with_1(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MemoryHome.read

    def wrong(self: MemoryHome, start: int, stop: int) -> Any:
        rows = read(self, start, stop)
        rows.weight[3, 1] += 1
        return rows

    monkeypatch.setattr(MemoryHome, "read", wrong)
    code, out, _ = output(capsys, "verify", run, "--steps", 2)
    assert code == 1
    assert "identical" not in out
    assert "different at the end, after step 7: table 'C1', id 3, weight, column 1: placed" in out
    code, out, _ = output(capsys, "verify", run, "--steps", 2, "--json")
    assert code == 1
    assert json.loads(out)["difference"]["id"] == 3


def test_trace_prints_stages_and_writes_a_timeline(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    target = tmp_path / "trace.json"
    target.write_text("an older one")
    code, out, err = output(capsys, "trace", run, "--steps", 3, "--device-memory", "2KiB", "--out", target)
    assert (code, err.strip()) == (0, "")
    for words in ("stage", "fetch", "writeback", "update", "training waited", "steps 5 to 7", "samples/s"):
        assert words in out
    assert json.loads(target.read_text())["traceEvents"]
    code, out, _ = output(capsys, "trace", run, "--steps", 3, "--out", target, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["steps"] == 3
    assert found["out"] == str(target)
    assert "fetch" not in found["stages"], "this run has all its rows on the device"


@pytest.mark.slow
def test_slow_work_shows_a_bar(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # to Rich, a terminal
    monkeypatch.setenv("COLUMNS", "140")
    _, _, err = output(capsys, "verify", run, "--steps", 3)
    assert "3 of 3" in err
    assert "all rows" in err
    _, _, err = output(capsys, "trace", run, "--steps", 3, "--out", tmp_path / "t.json")
    assert "3 of 3" in err
    _, _, err = output(capsys, "verify", run, "--steps", 3, "--json")
    assert err == ""


@pytest.mark.parametrize("command", ["verify", "trace"])
def test_mistakes_are_one_paragraph(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        ([run, "--from", "x"], "'x' is neither a step nor start"),
        ([run, "--from", "7"], "has no checkpoint at step 7. It has: 6, 12."),
        ([run, "--steps", "0"], "at least 1"),
        ([tmp_path], "is not a run directory"),
    ):
        code, out, err = output(capsys, command, *arguments)
        assert (code, out) == (2, "")
        assert words in " ".join(err.split())
        assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
