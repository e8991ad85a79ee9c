"""Show a run while it trains: a progress bar, plain lines, JSON lines, or nothing."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import ExitStack
from typing import Any, Literal, TextIO

from stoker.base.progress import LINE_SECONDS, in_notebook, listening, pace
from stoker.base.units import format_count, format_duration, format_size, plural

_WIDE = 100  # columns of a terminal in which a bar fits, too
_REFRESH = 0.1  # seconds between updates of the bar
_LONG = 2.0  # seconds after which work before the steps is mentioned
_SCHEDULE_LINES = 10  # most lines about the hot-cold schedule in an epoch; metrics.jsonl has all swaps
_MIB = 2**20

Mode = Literal["auto", "rich", "plain", "json", "quiet"]
Unit = Literal["bytes", "batches", "rows"]


class Display:
    """Show nothing. Subclasses show more."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def start(self, step: int, total: int, facts: str) -> None:
        """Show that training begins at ``step`` of ``total``; ``facts`` describe the run in a line."""

    def work(self, what: str, done: int, total: int, *, unit: Unit = "bytes") -> None:
        """Show the progress of work before or between steps; any thread may call this."""

    def step(self, done: int) -> None:
        """Show that ``done`` steps are done. Called after every step, so it must take no time."""

    def record(self, values: dict[str, Any]) -> None:
        """Show one record of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Show a line of text."""


def _amount(done: int, total: int, unit: Unit) -> str:
    if unit == "bytes":
        return f"{format_size(done)} of {format_size(total)}"
    return f"{done:,} of {total:,} {unit}"


def _decided(values: dict[str, Any]) -> str:
    loss = "not finite" if values["loss"] is None else f"{values['loss']:.4f}"
    rates = dict.fromkeys(f"R({values[name]:.4g})" for name in ("rate_before", "rate_after"))
    return f"test loss {loss} after {values['after']} batches; {' to '.join(rates)}: {values['why']}"


def _metrics(values: dict[str, Any]) -> str:
    names = ("auc", "log_loss", "normalized_entropy", "accuracy", "calibration", "mrr", "ndcg", "hr", "group_auc",
             "recall_10", "recall_50", "recall_100")  # fmt: skip
    words = {name: f"{name}@{values.get('ranking_k')}" for name in ("ndcg", "hr")}
    shown = (name for name in names if values.get(name) is not None)
    return "  ".join(f"{words.get(name, name)} {values[name]:.4f}" for name in shown)


class JsonLines(Display):
    """Print every record as one line of JSON on standard output; notes go to standard error."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file

    def record(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._file, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Lines(Display):
    """Show a line for each record but those of training; about the schedule at most ten lines an epoch."""

    def __init__(self) -> None:
        self._total = 0
        self._epoch, self._shown, self._left_out = -1, 0, 0  # lines of the schedule

    def start(self, step: int, total: int, facts: str) -> None:
        self._total = total
        self.note(facts)

    def record(self, values: dict[str, Any]) -> None:
        if values["kind"] == "train":
            self._train(values)
        elif values["kind"] == "schedule":
            self._schedule(values)
        else:
            self.note(f"step {values['step']:,}  {values['kind']}  {_metrics(values)}")

    def _train(self, values: dict[str, Any]) -> None:
        """Show a record of training."""

    def _schedule(self, values: dict[str, Any]) -> None:
        epoch = math.ceil(values["epoch"]) - 1  # a record at 1.0 is the last of epoch 0
        if epoch != self._epoch:
            self._epoch, self._shown = epoch, 0
        if self._shown >= min(_SCHEDULE_LINES, 1 + _SCHEDULE_LINES * (values["epoch"] - epoch)):
            self._left_out += 1
            return
        more = f" ({plural(self._left_out, 'swap')} before it not shown)" if self._left_out else ""
        self._shown, self._left_out = self._shown + 1, 0
        self.note(f"step {values['step']:,}  schedule  {_decided(values)}{more}")


class PlainLines(_Lines):
    """Print lines for log files: every evaluation, and the progress of training at most every ``seconds``."""

    def __init__(self, file: TextIO | None = None, seconds: float = 15.0) -> None:
        super().__init__()
        self._file = sys.stderr if file is None else file
        self._seconds = seconds
        self._last = time.monotonic()
        self._what, self._begun, self._next = "", 0.0, 0.0  # the current work, its start, and when it will be shown
        self._first = 0  # what was done then

    def work(self, what: str, done: int, total: int, *, unit: Unit = "bytes") -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._begun, self._next, self._first = what, now, now + _LONG, done
        if done < total and now > self._next:
            self._next = now + LINE_SECONDS
            self.note(f"{what}: {_amount(done, total, unit)}{pace(done, total, unit, self._first, now - self._begun)}")
        if done >= total:
            self._what = ""

    def _train(self, values: dict[str, Any]) -> None:
        if time.monotonic() - self._last < self._seconds:
            return
        self._last = time.monotonic()
        rate = format_count(values["samples_per_second"])
        self.note(f"step {values['step']:,} of {self._total:,}  loss {values['loss']:.4f}  {rate} samples/s")

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)


class ProgressBar(_Lines):
    """Show a Rich progress bar on standard error: loss, AUC, samples/s, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__()
        self._console = Console(stderr=True)
        status = TextColumn("{task.fields[status]}")
        self._amount = Column(no_wrap=True)
        bar = [BarColumn(bar_width=None)] if self._console.width >= _WIDE else []
        columns = (TextColumn("[bold]{task.description}"), *bar, MofNCompleteColumn(table_column=self._amount), status)
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task: Any = None
        self._works: dict[str, Any] = {}
        self._next = 0.0  # time of the next update
        self._auc = ""
        self._status = ""
        self._seconds_per_step = 0.0
        self._begun = (0.0, -1)  # time of the first step that was shown, and its number
        self._kernels = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._kernels.close()
        self._bar.refresh()  # a notebook keeps what was shown last
        self._bar.stop()

    def start(self, step: int, total: int, facts: str) -> None:
        super().start(step, total, facts)
        self._amount.min_width = 2 * len(str(total)) + 1  # a narrow terminal shortens the rest
        self._task = self._bar.add_task("training", total=total, completed=step, status="")
        self._bar.start()
        self._kernels.enter_context(listening(self.note))  # lines of another console would end on the bar

    def work(self, what: str, done: int, total: int, *, unit: Unit = "bytes") -> None:
        self._bar.start()  # a checkpoint is read before the first step
        now = time.monotonic()
        if what not in self._works:
            self._works[what] = self._bar.add_task(what, status="", visible=False), None, 0
        task, begun, first = self._works[what]
        begun, first = (now, done) if begun is None else (begun, first)
        self._works[what] = task, begun if done < total else None, first  # it may be done again later
        one, words = (_MIB, "MiB") if unit == "bytes" else (1, unit)
        words += pace(done, total, unit, first, now - begun)
        self._bar.update(task, completed=done // one, total=total // one, visible=done < total, status=words)

    def step(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH
            if self._begun[1] < 0:
                self._begun = now, done
            self._move(done)

    def _move(self, done: int) -> None:
        if self._status:
            status = f"{self._status}  {format_duration((self._total - done) * self._seconds_per_step)} left"
        else:  # before the first record
            begun, first = self._begun
            status = pace(done, self._total, "steps", first, time.monotonic() - begun).lstrip()
        self._bar.update(self._task, completed=done, status=status)

    def record(self, values: dict[str, Any]) -> None:
        if values.get("auc") is not None:
            self._auc = f"  AUC {values['auc']:.4f}"
        super().record(values)

    def _train(self, values: dict[str, Any]) -> None:
        rate = format_count(values["samples_per_second"])
        self._status = f"loss {values['loss']:.4f}{self._auc}  {rate} samples/s"
        self._seconds_per_step = values["seconds_per_step"]
        self._move(values["step"])

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, emoji=False)


def make_display(mode: Mode) -> Display:
    """Return the display of this name; "auto" takes the bar in a terminal or notebook, and plain lines elsewhere."""
    if mode == "auto":
        mode = "rich" if sys.stderr.isatty() or in_notebook() else "plain"
    if mode == "rich":
        try:
            return ProgressBar()
        except ImportError:
            return PlainLines()
    kinds: dict[str, type[Display]] = {"plain": PlainLines, "json": JsonLines, "quiet": Display}
    return kinds[mode]()
