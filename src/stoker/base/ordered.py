"""Work on several threads, or on an executor, whose results come in the order of the jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
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
            executor). Small results of unequal jobs should wait without limit, or a long job keeps others idle.
        executor: runs the jobs instead of threads made here. It is left open. When the generator ends early, jobs that
            have not begun are cancelled, and the others awaited.
    """
    with ExitStack() as stack:
        if executor is None:
            executor = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="stoker-prepare"))
            most = threads + 1
        else:
            most = 2 * (getattr(executor, "_max_workers", None) or _AHEAD // 2)
        waiting: deque[Future[R]] = deque()
        try:
            for job in jobs:
                waiting.append(executor.submit(work, job))
                if len(waiting) > (most if ahead is None else ahead):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            wait([future for future in waiting if not future.cancel()])
