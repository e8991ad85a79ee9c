"""Workers of pytest-xdist that are forks of the process that starts them, once it has imported all tests.

A new interpreter needs seconds to import torch, Stoker and the tests, and a fork none. All workers share one fork
server, too (tests/processes.py). A worker that replaces one that crashed is a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from processes import context

__all__ = ["fork_workers"]


class Worker:
    """A fork that waits for what execnet says to a new interpreter; execnet takes it for a ``Popen``."""

    def __init__(self, config: pytest.Config, others: list[Worker]) -> None:
        (asked, to_ask), (to_answer, answered) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(to_ask)
                os.close(to_answer)
                for other in others:  # or they would not see that their master has ended
                    other.stdin.close()
                    other.stdout.close()
                _begin(config, asked, answered)
            finally:
                os._exit(1)
        os.close(asked)
        os.close(answered)
        self.stdin, self.stdout = os.fdopen(to_ask, "wb"), os.fdopen(to_answer, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _begin(config: pytest.Config, asked: int, answered: int) -> None:
    config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    os.dup2(asked, 0)
    os.dup2(answered, 1)
    os.close(asked)
    os.close(answered)
    shared: Any = forkserver
    shared.ensure_running = shared._forkserver.ensure_running = lambda: None  # it is no child of this process
    with open(0, closefd=False) as file:
        line = file.readline()
    exec(eval(line), {"__name__": "__main__"})
    os._exit(0)


def fork_workers(config: pytest.Config, count: int) -> None:
    """Let xdist take ``count`` forks as its first workers.

    Raises:
        pytest.UsageError: importing a file of tests starts threads.
    """
    from execnet import gateway_base, gateway_io

    if not sys.platform.startswith("linux"):  # forks of a process that has used its frameworks fail on macOS
        return
    _start_server()
    _import_tests(config)
    gc.freeze()
    waiting: list[Worker] = []
    for _ in range(count):
        waiting.append(Worker(config, waiting))

    class Master(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            if waiting:
                self.popen = waiting.pop(0)
                gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)
            else:
                super().__init__(args, execmodel)

    gateway_io.Popen2IOMaster = Master


def _start_server() -> None:
    """Start the fork server; nobody looks for what its forks print."""
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nothing:
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
    context()
    for number, file in enumerate(kept, 1):
        os.dup2(file, number)
        os.close(file)


def _import_tests(config: pytest.Config) -> None:
    from _pytest.pathlib import import_path

    given = [Path(config.invocation_params.dir, each.partition("::")[0]) for each in config.args]
    threads = _threads()
    files = [file for path in given for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    for file in files:
        # A worker meets the error again, and reports it.
        with warnings.catch_warnings(), contextlib.suppress(Exception, pytest.skip.Exception):
            warnings.simplefilter("error")
            import_path(
                file, mode=config.getoption("importmode"), root=config.rootpath, consider_namespace_packages=False
            )
        if (found := _threads()) != threads:  # forks have none of them
            raise pytest.UsageError(f"{file} starts threads when it is imported: {set(found) - set(threads) or found}")


def _threads() -> list[str]:
    """Return the names of the threads of this process, but for those that importing Polars starts."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if name not in ("jemalloc_bg_thd", "polars-ooc-clea"))
