"""The state of a run while it trains, :class:`TrainState`: progress, clock, timer of checkpoints, signals."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from stoker.base.device import worked_for_others
from stoker.base.units import quoted
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.tables import Ranks
from stoker.training.config import TrainConfig
from stoker.training.display import Display
from stoker.training.files.logs import RunLog
from stoker.training.files.rundir import RunDirectory, Upload
from stoker.training.placing import STAGES, StageTotals, slotted
from stoker.training.replica import Replica
from stoker.training.scheduled import Feed
from stoker.training.scores.catalogue import Catalogue, catalogue_of
from stoker.training.scores.metrics import merit

_DUE = 256  # added to the number of a signal
_SAVING = 0.03  # share of the time that checkpoints by the clock may take
_SECONDS = "seconds."  # prefix of a stage's name in the result of :func:`moved`


@dataclass
class LoopState:
    """The loop's own state in a checkpoint."""

    step: int = 0
    evaluated: int = 0  # step of the last evaluation
    latest: dict[str, Any] | None = None  # the last evaluation: {"step", "valid"}
    best: dict[str, Any] | None = None  # the best one
    stale: int = 0  # evaluations since the best one
    loss_sum: float = 0.0  # over the steps since the last training record
    loss_count: int = 0
    unread: list[tuple[int, Tensor]] = field(default_factory=list)  # (step, loss); to read a loss waits for the GPU

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; None if there was none."""
        return None if self.best is None else int(self.best["step"])

    def read_losses(self) -> None:
        """Add the unread losses to the sum."""
        if not self.unread:
            return
        steps = [step for step, _ in self.unread]
        losses = torch.stack([loss for _, loss in self.unread]).tolist()
        self.unread.clear()
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(step, loss)
            self.loss_sum += loss
            self.loss_count += 1

    def judge(self, metrics: dict[str, float | None], metric: str) -> bool:
        """Keep an evaluation; return True if it is the best so far."""
        self.evaluated = self.step
        self.latest = {"step": self.step, "valid": metrics}
        better = merit(metrics, metric) > (-math.inf if self.best is None else merit(self.best["valid"], metric))
        if better:
            self.best, self.stale = self.latest, 0
        else:
            self.stale += 1
        return better

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; all losses must have been read."""
        return {name: value for name, value in vars(self).items() if name != "unread"}


class Diverged(Exception):
    """The loss of a step is not finite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss is {loss}")
        self.step = step


class Clock:
    """Count seconds, steps and examples of training, and the readings of ``meter``; pauses do not count."""

    def __init__(self, meter: Callable[[], dict[str, float]]) -> None:
        self.counted = defaultdict(float, seconds=0.0, steps=0.0, examples=0.0)  # readings as of the last pause
        self._meter, self._marks = meter, dict[str, dict[str, float]]()
        self._begun = self._read()

    def _read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter(), **self._meter()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Bring :attr:`counted` up to date, then do not count what happens within the block."""
        for name, value in self._read().items():
            self.counted[name] += value - self._begun[name]
        yield
        self._begun = self._read()

    def mark(self, *names: str) -> None:
        """Set these marks, from which :meth:`since` counts."""
        self._marks |= {name: dict(self.counted) for name in names}

    def mark_now(self, *names: str) -> None:
        """Set these marks, with the time up to now."""
        with self.paused():
            self.mark(*names)

    def since(self, name: str) -> dict[str, float]:
        """Return what was counted since a mark; everything if the mark was never set."""
        mark = self._marks.get(name, {})
        return {key: value - mark.get(key, 0.0) for key, value in self.counted.items()}


@dataclass
class SaveTimer:
    """Decide when a checkpoint is due by the clock, between those that are due by the step.

    Writing takes at most 3 % of the time: checkpoints that take long are written less often.
    """

    minutes: float  # 0: never
    now: Callable[[], float] = time.monotonic
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        self.saved(0.0)

    @property
    def due(self) -> bool:
        """True if a checkpoint is due now."""
        return self.minutes > 0 and self.now() >= self._next

    def saved(self, seconds: float) -> None:
        """Start the next interval, after a checkpoint that took ``seconds`` to write."""
        self._next = self.now() + max(60.0 * self.minutes, seconds / _SAVING)


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run, which wrote a checkpoint first. ``exit_code`` is 128 plus the signal's number.

    Args:
        number: of the signal.
        checkpoint: the newest one.
        run: the run directory.
        at_once: the signal came twice, or outside the loop: no checkpoint was written.
    """

    def __init__(self, number: int, checkpoint: Path | None, run: Path, *, at_once: bool = False) -> None:
        self.signal = signal.Signals(number)
        self.checkpoint = checkpoint
        self.run = run
        self.exit_code = 128 + number
        saved = f"{checkpoint.name} is written" if checkpoint else "no step was done, so there is no checkpoint"
        if at_once:
            saved = f"{checkpoint.name} is the newest checkpoint" if checkpoint else "there is no checkpoint yet"
        super().__init__(f"stopped by {self.signal.name}; {saved}. Continue with: stoker train --resume {quoted(run)}")

    @classmethod
    @contextmanager
    def by_signals(cls, path: Path) -> Iterator[None]:
        """Raise this error for a signal that ends the block, also SIGTERM, once the run at ``path`` is there."""
        came = [signal.SIGINT]

        def end(number: int, frame: FrameType | None) -> None:
            came[:] = [signal.Signals(number)]
            raise KeyboardInterrupt

        main = threading.current_thread() is threading.main_thread()
        if mine := main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end)
        try:
            yield
        except KeyboardInterrupt as stop:
            run = RunDirectory(path)
            if isinstance(stop, cls) or not (path / "config.json").exists():
                vars(stop).setdefault("exit_code", 128 + came[0])  # of the command line
                raise
            newest = run.checkpoint(run.steps()[-1]) if run.steps() else None
            raise cls(came[0], newest, path, at_once=True) from None
        finally:
            if mine:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopSignals:
    """Within the block the first SIGINT or SIGTERM only sets :attr:`number`; a second one acts as usual.

    Outside the main thread, where Python allows no handlers, nothing changes. A signal to one of ``ranks`` sets the
    number once all know of it (:meth:`hear`).
    """

    def __init__(self, ranks: Ranks | None = None, timer: SaveTimer | None = None) -> None:
        self.number: int | None = None
        self.due = False  # whether a checkpoint is due on the first rank
        self.came = 0  # the signal that came here
        self.ranks, self.timer = ranks, timer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def asked(self) -> bool:
        """Return True if a signal came."""
        return self.number is not None

    def asked_together(self) -> bool:
        """Return :meth:`asked`, after all ranks said what came; all of them call this."""
        if self.ranks is not None:
            self.hear([note for [note] in self.ranks.numbers("ask for signals", [self.note()])])
        return self.asked()

    def note(self) -> int:
        """Return what this rank says to the others: the signal that came here, and whether a checkpoint is due."""
        return self.came + _DUE * bool(self.timer and self.timer.due)

    def hear(self, notes: Sequence[int]) -> None:
        """Take what all ranks say at one moment. Only what the first one says about checkpoints counts."""
        if self.ranks is not None:
            self.number = self.number or max(note % _DUE for note in notes) or None
            self.due = notes[0] >= _DUE

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.came = number
        if self.ranks is None:
            self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *args: object) -> None:
        self._restore()


@dataclass(kw_only=True)
class TrainState:
    """A run while it trains."""

    data: Dataset
    config: TrainConfig
    replica: Replica  # the model and its optimizers
    feed: Feed  # the batches
    epoch_steps: int  # steps of a pass over the training rows
    total_steps: int  # steps of the whole run
    run: RunDirectory
    log: RunLog  # metrics.jsonl and loggers
    shown: Display  # the screen
    upload: Upload  # to the run's URL, if it has one
    progress: LoopState  # counters, running loss, best evaluation
    timer: SaveTimer
    stage_totals: StageTotals = field(default_factory=StageTotals)  # seconds of each stage
    stop: StopSignals = field(default_factory=StopSignals)
    clock: Clock = field(init=False)
    swaps: int = 0  # decisions of the hot-cold schedule, in this process
    crowded: bool = False  # the user knows that other programs use the cores
    saved_moment: tuple[int, int, int] = field(init=False)  # :attr:`moment` at the last checkpoint

    def __post_init__(self) -> None:
        # The meter must not refer to the state: a reference cycle would keep the model in memory after training.
        self.clock = Clock(partial(moved, self.replica.model, self.feed, self.stage_totals))
        self.saved_moment = self.moment
        if (loss := self.replica.by_shards) is not None:
            loss.note, loss.hear = self.stop.note, self.stop.hear

    @property
    def moment(self) -> tuple[int, int, int]:
        """The step, the step of the last evaluation, and the swaps: two checkpoints differ in one of them."""
        return self.progress.step, self.progress.evaluated, self.swaps

    @cached_property
    def catalogue(self) -> Catalogue | None:
        """The items for the recall of a two-tower model; None for others."""
        return catalogue_of(self.replica.model, self.data)

    @property
    def finished(self) -> bool:
        """True if all steps are done, or patience has ended."""
        patience = self.config.patience
        return self.progress.step >= self.total_steps or (patience is not None and self.progress.stale >= patience)

    @property
    def newest(self) -> Path | None:
        """The last checkpoint; None before the first."""
        return self.run.checkpoint(self.saved_moment[0]) if self.saved_moment[0] else None

    @property
    def save_due(self) -> bool:
        """Whether a checkpoint is due by the clock: of several ranks, that of the first one."""
        return self.timer.due if self.replica.ranks is None else self.stop.due

    def record(self, kind: str, **values: Any) -> None:
        """Write and show a record of this step."""
        epoch = round(self.feed.step / self.epoch_steps, 6)
        self.write(kind=kind, step=self.progress.step, epoch=epoch, **values, time=round(time.time(), 3))

    def write(self, **record: Any) -> None:
        """Write and show one line of metrics.jsonl."""
        self.log.write(record)
        self.shown.record(record)


def moved(model: RecModel, feed: Feed, totals: StageTotals) -> dict[str, float]:
    """Return readings of the caches: rows needed, found, and fetched on demand; bytes, seconds.

    Without caches only the bytes that were sent to other ranks, if there are any, or how long cores worked for others.
    """
    storages, ranks = slotted(model), model.embeddings.ranks
    known = {"others": worked_for_others()} if ranks is None else {"sent": float(ranks.sent.total())}
    if not storages:
        return known
    return (
        known
        | {
            "rows": sum(storage.stats.rows for storage in storages),
            "hits": sum(storage.stats.hits for storage in storages),
            "bytes": sum(storage.stats.fetched_bytes for storage in storages),
            "on_demand": sum(storage.stats.on_demand for storage in storages),
            "waited": feed.stall_seconds + sum(storage.stats.stall_seconds for storage in storages),
        }
        | {_SECONDS + name: value for name, value in totals.seconds().items()}
    )


def movement(since: Mapping[str, float], times: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a training record that come from :func:`moved`."""
    sent = {"sent_mib_per_step": since["sent"] / 2**20 / since["steps"]} if "sent" in since else {}
    if "rows" not in since:
        return sent
    return sent | {
        "hit_rate": since["hits"] / since["rows"] if since["rows"] else 1.0,
        "fetched_mib_per_step": since["bytes"] / 2**20 / since["steps"],
        "on_demand_rows_per_step": since["on_demand"] / since["steps"],
        "stall_share": min(1.0, times["waited"] / times["seconds"]),
        # The sum over all threads, including work that hides behind training.
        "stage_seconds": {name: round(spent, 6) for name in STAGES if (spent := times[_SECONDS + name]) > 0},
    }
