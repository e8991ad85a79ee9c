"""A timeline: spans of named work of all threads, recorded while a :class:`Recorder` is active.

Without a recorder, a span costs one read of a global.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_active: Recorder | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


class Span(NamedTuple):
    """One span of work; times in nanoseconds of ``time.perf_counter_ns``."""

    name: str
    thread: int  # position in Recorder.threads
    start: int
    end: int
    step: int | None  # of training, where known


class Recorder:
    """Collect the spans of all threads within a ``with`` block; only one may be active at a time."""

    def __init__(self) -> None:
        self.spans: list[Span] = []  # in the order in which they ended
        self._known: dict[tuple[int, str], int] = {}  # identifier and name of a thread -> its number
        self._lock = threading.Lock()

    @property
    def threads(self) -> list[str]:
        """Names of the threads, by number."""
        return [name for _, name in self._known]

    def add(self, name: str, start: int, end: int, step: int | None) -> None:
        """Note a span of the calling thread."""
        thread = threading.current_thread()
        key = (thread.ident or 0, thread.name)  # a new thread may get the identifier of an ended one
        with self._lock:
            number = self._known.setdefault(key, len(self._known))
        self.spans.append(Span(name, number, start, end, step))

    def __enter__(self) -> Recorder:
        global _active
        if _active is not None:
            raise RuntimeError("another timeline is being recorded in this process; end that one first.")
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        _active = None


class _Running:
    """A span that has not ended."""

    __slots__ = ("_name", "_recorder", "_start", "_step")

    def __init__(self, recorder: Recorder, name: str, step: int | None) -> None:
        self._recorder, self._name, self._step = recorder, name, step

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._name, self._start, time.perf_counter_ns(), self._step)


def span(name: str, step: int | None = None) -> AbstractContextManager[None]:
    """Record the block of a ``with`` statement under ``name``, if a recorder is active."""
    recorder = _active
    return _NOTHING if recorder is None else _Running(recorder, name, step)


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Record every call of the decorated function as a span."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*given: P.args, **named: P.kwargs) -> R:
            if _active is None:  # entering a span of nothing would take as long as the call
                return function(*given, **named)
            with span(name):
                return function(*given, **named)

        return call

    return decorate
