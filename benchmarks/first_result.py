"""The first result of a fresh install: what compiling adds to each command.

Numba compiles a kernel when a command needs it first, and keeps it beside the sources. Every command runs on a copy of
the sources without kernels and then again; the difference of the two is what a newcomer waits for.
"""

from __future__ import annotations

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stoker
from benchmarks.features import log_folder
from benchmarks.harness import Bar, Crashed, Outcome, Run, Table
from benchmarks.prepare import log_file

__all__ = ["bars"]

ROWS = 20_000
PLACED_MEMORY = "12MiB"
ALLOWED = {"prepare": 3.0, "features": 4.0, "train": 4.0, "placed train": 6.0}  # seconds


def _commands(run: Run, out: Path) -> dict[str, list[str]]:
    log, sessions = str(log_file(ROWS, run)), str(log_folder(ROWS, run) / "log.csv")
    train = ["train", str(out / "data"), "--batch-size", "2048", "--epochs", "1"]
    return {
        "prepare": ["prepare", "criteo", log, "--out", str(out / "prepared")],
        "features": ["prepare", "trivago", sessions, "--preset", "features", "--out", str(out / "featured")],
        "train": [*train, "--out", str(out / "run")],
        "placed train": [*train, "--device-memory", PLACED_MEMORY, "--out", str(out / "placed")],
    }


def _seconds(command: list[str], sources: Path, out: Path) -> float:
    """Run a command of the sources; return the seconds it took, start of Python included."""
    for made in ("prepared", "featured", "run", "placed"):
        shutil.rmtree(out / made, ignore_errors=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "PYTHON"))}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "stoker", *command], env=env | {"PYTHONPATH": str(sources)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if done.returncode:
        raise Crashed(f"stoker {command[0]} ended with {done.returncode}:\n{done.stdout[-800:]}{done.stderr[-1500:]}")
    return seconds


def first_result(run: Run) -> Outcome:
    """The least over the commands of the seconds allowed above a warm run over the seconds found."""
    cold: dict[str, list[float]] = {name: [] for name in ALLOWED}
    warm: dict[str, list[float]] = {name: [] for name in ALLOWED}
    origin = Path(stoker.__file__).parent
    with tempfile.TemporaryDirectory(prefix="stoker-first-") as folder:
        out = Path(folder)
        stoker.prepare("criteo", log_file(ROWS, run), out=out / "data")
        for number in range(run.rounds):
            for name, command in _commands(run, out).items():
                run.log(f"round {number + 1}/{run.rounds}: {name}")
                sources = out / "sources"
                shutil.copytree(origin, sources / "stoker", ignore=shutil.ignore_patterns("__pycache__"))
                compileall.compile_dir(sources, quiet=1)  # as pip does
                cold[name].append(_seconds(command, sources, out))
                warm[name].append(_seconds(command, sources, out))
                shutil.rmtree(sources)
    above = {name: statistics.median(c - w for c, w in zip(cold[name], warm[name], strict=True)) for name in ALLOWED}
    rows = [
        [name, f"{statistics.median(cold[name]):.1f}", f"{statistics.median(warm[name]):.1f}", f"{above[name]:.1f}",
         f"{allowed:g}"]
        for name, allowed in ALLOWED.items()
    ]  # fmt: skip
    table = Table(title="Seconds (medians)", columns=["command", "first", "again", "more", "allowed"], rows=rows)
    return Outcome(
        value=min(allowed / max(above[name], 1e-3) for name, allowed in ALLOWED.items()), tables=[table],
        notes=[f"{ROWS:,} rows; every command on sources of its own without kernels, bytecode compiled"],
        data={"cold": cold, "warm": warm},
    )  # fmt: skip


def bars() -> list[Bar]:
    """The promise of the first minutes."""
    return [
        Bar(
            name="first-result",
            group="first-result",
            title="seconds allowed over those that compiling adds to prepare, features, train and placed train",
            must=1.0,
            rounds=3,
            run=first_result,
        )
    ]
