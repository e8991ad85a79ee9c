"""Progress bars for work of several stages, on standard error."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

__all__ = ["QUIET_SECONDS", "Bars"]

QUIET_SECONDS = 2.0  # shorter work shows no progress bar


class Bars:
    """A bar for every stage that goes on after the first two seconds; called with (what, done, total).

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._started = quiet, time.monotonic()
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._quiet or time.monotonic() - self._started < QUIET_SECONDS:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description:>14}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
