"""A few threads that run one kernel together.

Kernels release the interpreter lock and take disjoint work from a shared cursor. The calling thread works too, so if a
helper wakes late, only its share of the work is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

import torch

own = threading.local()  # own.size: threads of a team that run this thread's kernels, instead of torch's workers


def kernel_threads() -> int:
    """Return on how many threads kernels run."""
    return getattr(own, "size", 0) or torch.get_num_threads()


class Team:
    """``size`` threads: the caller and ``size - 1`` helpers, which end with the process."""

    def __init__(self, size: int) -> None:
        self._helpers = ThreadPoolExecutor(max(1, size - 1), thread_name_prefix="stoker-kernel")
        self._busy = Lock()

    def run(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call ``function`` once with each of at most ``size`` argument tuples, at the same time.

        Raises:
            Exception: the first error of a helper, with its own traceback.
        """
        if len(arguments) == 1 or not self._busy.acquire(blocking=False):
            # Another thread has the helpers: do all the work here. With the shared cursor the result is the same.
            return [function(*args) for args in arguments]
        try:
            helped = [self._helpers.submit(function, *args) for args in arguments[1:]]
            try:
                first = function(*arguments[0])
            finally:
                wait(helped)
            return [first, *(each.result() for each in helped)]
        finally:
            self._busy.release()


_teams: dict[tuple[int, int], Team] = {}


def team(size: int) -> Team:
    """Return the team of ``size`` threads of this process."""
    key = (os.getpid(), size)  # helpers do not survive a fork
    if key not in _teams:
        _teams[key] = Team(size)
    return _teams[key]
