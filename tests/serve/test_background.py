"""A thread that works beside requests sleeps often, but not while requests wait for what it does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from stoker.serve import background


def slept(busy: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a thread sleeps in ten calls, before each of which a millisecond goes by."""
    clock, sleeps = itertools.count(), list[float]()
    monkeypatch.setattr(background.time, "perf_counter", lambda: next(clock) / 1000)
    monkeypatch.setattr(background.time, "sleep", sleeps.append)

    def work() -> None:
        background.give_way(busy)
        for _ in range(10):
            slept.__name__.upper()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return len(sleeps)


def test_it_sleeps_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slept(lambda: False, monkeypatch) >= 10


def test_it_does_not_sleep_while_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slept(lambda: True, monkeypatch) == 0
