"""``stoker train --ranks`` as a user types it, and what its launcher does when a rank fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from calling import SMALL, call
from processes import run_python

from stoker.cli import ranks
from stoker.testing import make_dataset

TYPED = ["--steps", "3", *SMALL]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def started(*arguments: object, by: Sequence[str] = ("-m", "stoker")) -> subprocess.CompletedProcess[str]:
    return run_python(*by, *map(str, arguments))


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stoker")


@pytest.mark.slow
@pytest.mark.parametrize(("by", "more"), [(("-m", "stoker"), ["--ranks", "2"]), (TORCHRUN, [])])
def test_two_ranks_write_the_checkpoints_of_one_process_and_speak_once(
    by: Sequence[str], more: list[str], tmp_path: Path
) -> None:
    data = make_dataset(tmp_path / "d", rows=400)
    assert call("train", data.path, "--out", tmp_path / "one", "--shards", "8", *TYPED) == 0
    done = started("train", data.path, "--out", tmp_path / "two", *more, "--json", *TYPED, by=by)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "two" / "checkpoints") == files(tmp_path / "one" / "checkpoints")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["kind"] for line in lines].count("result") == 1
    assert len(lines) == len({json.dumps(line) for line in lines}), "each line comes once"
    assert done.stderr.count("compiled ") <= 1, done.stderr
    again = started("train", data.path, "--out", tmp_path / "two", *more, *TYPED, by=by)
    assert again.returncode != 0
    assert again.stderr.count("exists and is not empty") == 1, again.stderr


@pytest.mark.slow
def test_ctrl_c_writes_one_checkpoint_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    data, out = make_dataset(tmp_path / "d", rows=400), tmp_path / "run"
    typed = [*SMALL, "--save-every", "20", "--eval-every", "100000", "--keep-last", "1"]
    command = ["train", data.path, "--out", out, "--ranks", "2", "--steps", "100000", *typed]
    running = subprocess.Popen(
        [sys.executable, "-m", "stoker", *map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not list(out.glob("checkpoints/step_*0")):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT, said
    assert said.count("stopped by SIGINT; step_") == said.count("--resume") == 1, said
    [newest] = (int(path.name.removeprefix("step_")) for path in out.glob("checkpoints/step_*"))
    assert f"step_{newest:09} is written" in said
    steps = str(newest + 20)
    assert call("train", "--resume", out, "--steps", steps, "--no-tensorboard") == 0
    assert call("train", data.path, "--out", tmp_path / "one", "--shards", "8", "--steps", steps, *typed) == 0
    assert files(out / "checkpoints") == files(tmp_path / "one" / "checkpoints")


@pytest.mark.parametrize(
    ("codes", "left", "printed", "code", "said"),
    [
        ([0, 0], [], ["", ""], 0, ""),
        ([130, 130], [], ["", ""], 130, ""),
        ([2, 2], [], ["", ""], 2, ""),  # the first one has said it
        ([2, -6], [], ["", "terminate called without an active exception"], 2, ""),  # now and then, at exit
        ([-6, 2], [], ["", ""], 2, ""),
        ([3, -9, 3], [], ["", "", "rank 1 of 3 ended"], 137, "rank 1 was ended by SIGKILL."),
        ([-9, 3, -9], [0, 2], ["", "no sign of life", ""], 2, "ranks 0 and 2 were ended, after no sign of life"),
        ([3, 1, 3], [], ["", "error: no dataset", "rank 1 of 3 ended"], 1, "rank 1: no dataset"),
        ([3, 3], [], ["", "error: rank 0 failed"], 2, "rank 0 failed"),
    ],
)
def test_one_message_says_why_ranks_ended(
    codes: list[int], left: list[int], printed: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks._said(codes, left, printed) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said), lines
    assert said in "".join(lines)


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PATIENCE", 0.2)
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    assert ranks._wait([sleeping, failed]) == [0]
    assert (sleeping.returncode, failed.returncode) == (-signal.SIGKILL, 2)
