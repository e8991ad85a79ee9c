"""Work on several threads, or on an executor, whose results come in the order of the jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 32  # jobs given to an executor that does not tell how many workers it has


def ordered_map(
    work: Callable[[T], R],
    jobs: Iterable[T],
    threads: int,
    *,
    ahead: int | None = None,
    executor: Executor | None = None,
) -> Generator[R, None, None]:
    """Yield the results of ``work`` in the order of ``jobs``, which are drawn as threads come free.

    Args:
        work: a function at the top of a module, where the executor has processes.
        ahead: results that may wait for an earlier one (None: one more than threads, two for each worker of an
            executor). Small results of unequal jobs should wait without limit, lest a long job keep others idle.
        executor: runs the jobs instead of threads made here. It is left open. When the generator ends early, jobs that
            have not begun are cancelled, and the others awaited.
    """
    if executor is None:
        with ThreadPoolExecutor(threads, thread_name_prefix="stoker-prepare") as pool:
            yield from _ordered(work, jobs, pool, threads + 1 if ahead is None else ahead)
    else:
        workers = getattr(executor, "_max_workers", None) or _AHEAD // 2
        yield from _ordered(work, jobs, executor, 2 * workers if ahead is None else ahead)


def _ordered(work: Callable[[T], R], jobs: Iterable[T], executor: Executor, ahead: int) -> Generator[R, None, None]:
    waiting: deque[Future[R]] = deque()
    try:
        for job in jobs:
            waiting.append(executor.submit(work, job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        wait([future for future in waiting if not future.cancel()])
