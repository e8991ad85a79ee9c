"""A few threads that run one kernel together.

Kernels release the interpreter lock and take disjoint work from a shared cursor. The calling thread works too, so a
helper that wakes late costs nothing but its share.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class _Helper(threading.Thread):
    def __init__(self, index: int) -> None:
        super().__init__(name=f"stoker-kernel-{index}", daemon=True)
        self.jobs: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], list[Any], threading.Lock]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            function, arguments, result, done = self.jobs.get()
            try:
                result.append(function(*arguments))
            except BaseException as error:
                result.append(error)
            finally:
                del function, arguments
                done.release()


class Team:
    """``size`` threads: the caller and ``size - 1`` helpers, which live as long as the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._helpers = [_Helper(i) for i in range(size - 1)]
        self._busy = threading.Lock()

    def run(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call ``function`` once with each of at most ``size`` argument tuples, at the same time.

        Raises:
            Exception: the first error of a helper, with its own traceback.
        """
        if len(arguments) == 1 or not self._busy.acquire(blocking=False):
            # Another thread has the helpers: do all the work here. The shared cursor makes that the same work.
            return [function(*args) for args in arguments]
        try:
            pending = []
            for helper, args in zip(self._helpers, arguments[1:], strict=False):
                done = threading.Lock()
                done.acquire()
                result: list[Any] = []
                helper.jobs.put((function, args, result, done))
                pending.append((result, done))
            try:
                results = [function(*arguments[0])]
            finally:
                for _, done in pending:
                    done.acquire()
            for result, _ in pending:
                if isinstance(result[0], BaseException):
                    raise result[0]
                results.append(result[0])
            return results
        finally:
            self._busy.release()


_teams: dict[tuple[int, int], Team] = {}


def team(size: int) -> Team:
    """The team of ``size`` threads of this process."""
    key = (os.getpid(), size)  # helpers do not survive a fork
    if key not in _teams:
        _teams[key] = Team(size)
    return _teams[key]
