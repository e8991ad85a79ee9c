"""Work on threads: results in the order of the jobs, and threads that end before the interpreter does."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 32  # jobs for an executor that does not say how many workers it has
_PATIENCE = 5.0  # seconds that the interpreter waits for a thread when it ends
_running: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(name: str, work: Callable[[], None], leave: Callable[[], None]) -> threading.Thread:
    """Start a thread that keeps no interpreter alive; when that ends, it calls ``leave``, which tells ``work`` to."""

    def run() -> None:
        _running[thread] = leave
        try:
            work()
        finally:
            del _running[thread]  # it may lead to the thread itself, which then is never freed

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@atexit.register
def _stop_all() -> None:
    """End the threads: a thread inside torch when the interpreter ends would abort the process."""
    for thread, leave in list(_running.items()):
        leave()
        thread.join(timeout=_PATIENCE)


def ordered_map(
    work: Callable[[T], R],
    jobs: Iterable[T],
    threads: int,
    *,
    ahead: int | None = None,
    executor: Executor | None = None,
) -> Generator[R, None, None]:
    """Yield the results of ``work`` in the order of ``jobs``; a thread that is free draws the next job.

    Args:
        work: a function; a top-level one, if the executor has processes.
        jobs: its arguments.
        threads: number of threads, without an executor.
        ahead: results that may wait for an earlier one (None: one more than threads, two for each worker of an
            executor). Small results of unequal jobs should wait without limit, or workers idle behind a long job.
        executor: runs the jobs instead of threads. It remains open. When the generator ends early, jobs that have not
            begun are cancelled, and the others awaited.
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
