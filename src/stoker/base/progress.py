"""Progress on standard error: of work in several stages, and of compiling kernels.

Stages are bars in a terminal, and lines with the time elsewhere. Numba keeps compiled kernels on disk, so a machine
compiles them once. Code that compiles calls :func:`compiling`; code that shows it, such as the command line, gives a
function to :func:`listening`. In the same way :class:`Counted` counts long work, such as reading a checkpoint, for what
:func:`showing` names.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from stoker.base.units import format_count, format_duration, format_size

QUIET_SECONDS = 2.0  # shorter work shows no progress
LINE_SECONDS = 30.0  # between two lines where there is no terminal

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)


def quiet(what: str, done: int, total: int) -> None:
    """Show no progress."""


_shown = threading.local()  # blocks of threads overlap, so that one would leave the other's behind


@contextmanager
def showing(show: Callable[[str, int, int, str], Any]) -> Iterator[None]:
    """Call ``show`` with (what, done, total, unit) of what this thread's :class:`Counted` count within the block."""
    before = getattr(_shown, "show", None)
    _shown.show = show
    try:
        yield
    finally:
        _shown.show = before


class Counted:
    """Count how much of some work is done, for what :func:`showing` names.

    >>> with showing(print), Counted("reading rows", 10, "rows") as counted:
    ...     counted.add(4)
    reading rows 0 10 rows
    reading rows 4 10 rows
    reading rows 10 10 rows
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._done, self._total, self._unit = what, 0, total, unit

    def add(self, amount: int) -> None:
        """Note that ``amount`` more is done."""
        self._done = min(self._done + amount, self._total)
        if self._total and (show := getattr(_shown, "show", None)) is not None:
            show(self._what, self._done, self._total, self._unit)

    def __enter__(self) -> Counted:
        self.add(0)
        return self

    def __exit__(self, *error: object) -> None:
        self.add(self._total)


def in_notebook() -> bool:
    """Return True in a notebook where Rich can draw bars, for which it needs ipywidgets."""
    if "ipykernel" not in sys.modules or find_spec("ipywidgets") is None or find_spec("rich") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter


class Bars:
    """A bar for every stage that is still running after two seconds, or ``at_once``; call it with (what, done, total).

    It also shows what :class:`Counted` counts within its block. If standard error is not a terminal, one line every 30
    seconds shows the time and the last stage that was reported.
    """

    def __init__(self, *, quiet: bool, keep: bool = False, at_once: bool = False) -> None:
        self._quiet, self._keep, self._waits = quiet, keep, time.monotonic() + (0.0 if at_once else QUIET_SECONDS)
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._lines: threading.Thread | None = None
        self._ended = threading.Event()
        self._begun: dict[str, tuple[float, int]] = {}  # stage -> when it was first reported, and how much was done
        self._line = ("", 0, 0, "")
        self._showing = showing(self)

    def __enter__(self) -> Bars:
        self._showing.__enter__()
        return self

    def __call__(self, what: str, done: int, total: int, unit: str = "") -> None:
        """Note that ``done`` of ``total`` bytes, or other units, of a stage are done."""
        if self._quiet or not total:
            return
        self._begun.setdefault(what, (time.monotonic(), done))
        self._line = (what, done, total, unit)
        if self._lines is not None or time.monotonic() < self._waits:
            return
        if self._bar is None and not self._start():
            return
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, unit=unit, first=done)
        self._bar.update(self._tasks[what], completed=done, total=total)

    def _start(self) -> bool:
        """Start the bars or the lines; return True for bars."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        console = Console(stderr=True)
        if not (console.is_terminal or in_notebook()):
            self._lines = threading.Thread(target=self._print_lines, name="stoker-progress", daemon=True)
            self._lines.start()
            return False

        class Amount(ProgressColumn):
            """Done, total, rate and time left in the task's own unit."""

            def render(self, task: Any) -> Text:
                seconds = (task.finished_time if task.finished else task.elapsed) or 0.0
                return Text(_amount(task.completed, task.total, task.fields["unit"], task.fields["first"], seconds))

        columns = (TextColumn("{task.description:>20}"), BarColumn(None), Amount(Column(no_wrap=True)))
        self._bar = Progress(*columns, console=console, transient=not self._keep)
        self._bar.start()
        return True

    def _print_lines(self) -> None:
        ended = None
        while not self._ended.wait(LINE_SECONDS):
            line = what, done, total, unit = self._line
            if line == ended:
                continue  # the stage after it has reported nothing yet
            ended = line if done >= total else None
            began, first = self._begun[what]
            amount = _amount(done, total, unit, first, time.monotonic() - began)
            print(f"{time.strftime('%H:%M:%S')} {what}: {amount} ({done / total:.0%})", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        self._showing.__exit__(None, None, None)
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.join()


def _amount(done: float, total: float, unit: str, first: float, seconds: float) -> str:
    """Return how much of a stage is done, and its :func:`pace`."""
    shown = format_size if unit == "bytes" else format_count
    units = f" {unit}" if unit not in ("", "bytes") else ""
    return f"{shown(done)} of {shown(total)}{units}{pace(done, total, unit, first, seconds)}"


def pace(done: float, total: float, unit: str, first: float, seconds: float) -> str:
    """Return the mean speed since ``first`` units were done, ``seconds`` ago, and the time that is left.

    >>> pace(3000, 4000, "rows", 1000, 4.0)
    '  500/s  2.0 s left'
    """
    if seconds < 0.5 or done <= first:
        return ""
    speed = (done - first) / seconds
    shown = format_size(speed) if unit == "bytes" else f"{speed:.2g}" if speed < 10 else format_count(speed)
    return f"  {shown}/s" + (f"  {format_duration((total - done) / speed)} left" if done < total else "")


_SOON, _AGAIN = 1.0, 3.0  # seconds of compiling before the first line, and between lines


class Compiled:
    """Count compiled kernels, and say so if compiling takes longer than a second."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._depth, self._began, self._said, self._name = 0, 0.0, 0.0, ""
        self.count, self.seconds = 0, 0.0

    def start(self, name: str) -> None:
        """Note that the kernel ``name`` begins to compile."""
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
        """Note that a kernel is compiled."""
        with self._lock:
            self._depth -= 1
            self.count += 1
            if not self._depth:
                self.seconds += time.monotonic() - self._began

    def summary(self) -> None:
        """Say how much was compiled, if a line announced it."""
        if self._said:
            self._say(f"compiled {self.count} kernels in {self.seconds:.0f} s; the next run begins at once")


_listener: Compiled | None = None


@contextmanager
def listening(say: Callable[[str], None]) -> Iterator[None]:
    """Report the kernels that are compiled within the block."""
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
    """Note that a kernel is compiled within the block."""
    if (listener := _listener) is not None:
        listener.start(name)
    try:
        yield
    finally:
        if listener is not None:
            listener.stop()
