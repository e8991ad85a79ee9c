"""What is said while kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.base import progress
from stoker.testing import make_dataset


def test_lines_come_after_a_second_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 0.0, list[str]()
    monkeypatch.setattr(progress, "_SOON", 1.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100 + now)
    with progress.compiling("nobody listens"):
        pass
    with progress.listening(said.append):
        for name in ("first", "second", "third", "fourth"):
            with progress.compiling(name):
                now += 0.3
                with progress.compiling(f"inside {name}"):
                    now += 0.6
        assert said == ["compiling kernels, once for this machine: 2 done in 1 s, now second"]
        now += 5
        with progress.compiling("fifth"):
            now += 1
    assert said[1:] == [
        "compiling kernels, once for this machine: 8 done in 4 s, now fifth",
        "compiled 9 kernels in 5 s; the next run begins at once",
    ]


def test_nothing_is_said_of_short_work() -> None:
    said = list[str]()
    with progress.listening(said.append), progress.compiling("quick"):
        pass
    assert not said


@pytest.mark.slow
def test_the_first_run_tells_and_a_later_one_is_silent(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", rows=300)
    # Says so from the first kernel on, whatever the machine's speed.
    program = "from stoker.base import progress; progress._SOON = 0.0; from stoker.cli import main; main()"
    command = [sys.executable, "-c", program, "train", str(tmp_path / "data"), "--no-tensorboard"]
    told = []
    for run in ("first", "second", "third"):  # a first run can end before a kernel of a thread is kept
        done = subprocess.run(
            [*command, "--batch-size", "64", "--epochs", "1", "--out", str(tmp_path / run)],
            capture_output=True, text=True, check=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
        )  # fmt: skip
        told.append([line for line in done.stderr.splitlines() if line.startswith("compil")])
        if not told[-1]:
            break
    assert told[0][0].startswith("compiling kernels, once for this machine: ")
    assert told[0][-1].endswith("; the next run begins at once")
    assert told[-1] == []
