"""``stoker train --ranks`` as a user types it, and what its launcher does when a rank fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calling import SMALL, call
from processes import run_python

from stoker.cli import ranks
from stoker.testing import make_dataset

TYPED = ["--steps", "3", *SMALL]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def started(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "stoker", *map(str, arguments))


def test_two_ranks_write_the_checkpoints_of_one_process_and_speak_once(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", rows=400)
    assert call("train", data.path, "--out", tmp_path / "one", "--shards", "8", *TYPED) == 0
    done = started("train", data.path, "--out", tmp_path / "two", "--ranks", "2", "--json", *TYPED)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "two" / "checkpoints") == files(tmp_path / "one" / "checkpoints")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum("test" in line for line in lines) <= 1
    again = started("train", data.path, "--out", tmp_path / "two", "--ranks", "2", *TYPED)
    assert again.returncode != 0
    assert again.stderr.count("exists and is not empty") == 1, again.stderr


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ranks, "_PATIENCE", 0.2)
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ranks._wait([sleeping, failed])
    assert (sleeping.returncode, failed.returncode) == (-signal.SIGKILL, 3)
    assert "rank 0 did not end within 0.2 s of the others" in capsys.readouterr().err
