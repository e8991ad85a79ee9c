"""Other Python processes that begin with torch and Stoker imported: forks of a server that has done so once.

A new interpreter needs seconds for that; a fork of the server needs none. The server has no thread, runs no test, and
ends with the process that asked for it. Where the start or the end of an interpreter is the point, start a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import all_processes  # noqa: F401
import pytest
import torch.multiprocessing as mp

__all__ = ["Python", "context", "fork_contestants", "run_python", "start_process", "start_ranks"]

PRELOADED = [
    "pytest", "hypothesis", "torch", "torch._dynamo", "torch.distributed.fsdp", "stoker", "stoker.training",
    "stoker.prep.prepare", "stoker.prep.features.groups", "stoker.cli", "pandas",
]  # fmt: skip


def context() -> BaseContext:
    """Return a context for ``multiprocessing`` and ``ProcessPoolExecutor``."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def start_ranks(worker: Callable[..., None], *given: Any, ranks: int = 2) -> None:
    """Call ``worker(rank, *given)`` in a process for each rank, and wait for all; an error of one is raised here."""
    context()
    mp.start_processes(worker, args=given, nprocs=ranks, start_method="forkserver")


def start_process(work: Callable[..., None], *given: Any) -> BaseProcess:
    """Call ``work(*given)``, a function of a module, in another process."""
    process: BaseProcess = context().Process(target=work, args=given)  # type: ignore[attr-defined]
    process.start()
    return process


class Python:
    """A running ``python`` with arguments: ``-c CODE``, ``-m MODULE`` or a script, and their own. A context manager."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self.process = start_process(
            _run, self.arguments, {**os.environ, **environment}, os.getcwd(), list(map(str, self._files))
        )

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return how it ended, with what it printed."""
        self.process.join()
        assert self.process.exitcode is not None
        texts = [path.read_text() for path in self._files]
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *texts)

    def __enter__(self) -> Python:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.join()
        self._folder.cleanup()


def run_python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return what ``python`` with these arguments prints, and how it ends."""
    with Python(*arguments, **environment) as running:
        return running.wait()


def fork_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``benchmarks.rounds`` run its contestants as forks."""

    def run(command: Sequence[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        return run_python(*command[1:], **env)

    stand_in = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("benchmarks.rounds.subprocess", stand_in)


def _run(arguments: list[str], environment: dict[str, str], folder: str, files: list[str]) -> None:
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
