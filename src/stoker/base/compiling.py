"""Tells what is compiled while a machine runs Stoker for the first time.

Numba keeps compiled kernels on disk, so that this happens once. Who compiles calls :func:`compiling`; who shows it,
such as the command line, gives a function to :func:`listening`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Compiled", "compiling", "listening"]

_SOON, _AGAIN = 1.0, 3.0  # seconds of compiling before the first line, and between lines


class Compiled:
    """Counts what is compiled, and says so if it takes longer than a second.

    Args:
        say: gets a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._depth, self._began, self._said, self._name = 0, 0.0, 0.0, ""
        self.count, self.seconds = 0, 0.0

    def start(self, name: str) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._depth:
                self._began, self._name = now, name
            self._depth += 1
            spent = self.seconds + now - self._began
            if spent > _SOON and now - self._said > _AGAIN:
                self._said = now
                self._say(
                    f"compiling kernels, once for this machine: {self.count} done in {spent:.0f} s, now {self._name}"
                )

    def stop(self) -> None:
        with self._lock:
            self._depth -= 1
            self.count += 1
            if not self._depth:
                self.seconds += time.monotonic() - self._began

    def summary(self) -> None:
        """Say how much was compiled, if a line has told of it."""
        if self._said:
            self._say(f"compiled {self.count} kernels in {self.seconds:.0f} s; the next run begins at once")


_listener: Compiled | None = None


@contextmanager
def listening(say: Callable[[str], None]) -> Iterator[None]:
    """Say what is compiled within the block."""
    global _listener
    before, _listener = _listener, Compiled(say)
    mine = _listener
    try:
        yield
    finally:
        _listener = before
        mine.summary()


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Note that a kernel is compiled, or loaded, within the block."""
    listener = _listener
    if listener is None:
        yield
        return
    listener.start(name)
    try:
        yield
    finally:
        listener.stop()
