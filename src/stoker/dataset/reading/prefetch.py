"""A background thread that makes the next items while the caller works on this one."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import TypeVar

__all__ = ["prefetched"]

T = TypeVar("T")

_POLL = 0.1  # seconds between looks at whether the consumer has left
_PATIENCE = 5.0  # seconds the interpreter waits at its end for a thread to finish its item


_running: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    """Threads still inside torch when the interpreter is torn down would abort the process."""
    threads = list(_running.items())
    for _, left in threads:
        left.set()
    for thread, _ in threads:
        thread.join(timeout=_PATIENCE)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, up to ``depth`` of them made ahead by a thread.

    What the thread raises reaches the consumer at the item where it happened, with its own traceback. Closing
    the generator, Ctrl-C or leaving the interpreter never waits for more than the item being made.
    """
    ready: queue.Queue[T | _Failure | None] = queue.Queue(maxsize=depth)
    left = threading.Event()

    def put(item: T | _Failure | None) -> bool:
        while not left.is_set():
            try:
                ready.put(item, timeout=_POLL)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(None)
        except BaseException as error:
            put(_Failure(error))

    # A daemon, so that an abandoned stream cannot keep the interpreter from ending.
    thread = threading.Thread(target=work, name="stoker-reader", daemon=True)
    _running[thread] = left
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        left.set()
        while not ready.empty():
            ready.get_nowait()
