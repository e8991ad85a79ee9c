"""Work on several threads whose results come in the order of the jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ordered_map"]

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(
    work: Callable[[T], R], jobs: Iterable[T], threads: int, *, ahead: int | None = None
) -> Generator[R, None, None]:
    """Results of ``work`` in the order of ``jobs``, which are drawn as threads come free.

    ``ahead``: results that may wait for an earlier one (None: one more than threads). Small results of unequal jobs
    should wait without limit, lest a long job keep the other threads idle.
    """
    most = threads + 1 if ahead is None else ahead
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="stoker-prepare") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(work, job))
                if len(waiting) > most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
