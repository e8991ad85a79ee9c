"""Write the records of a run to its metrics.jsonl, to TensorBoard, and to the caller's loggers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stoker.base.errors import CheckpointError, errors_as, install
from stoker.base.files import atomic_file
from stoker.base.units import quoted
from stoker.training.files.rundir import RunDirectory


class Logger(Protocol):
    """A logger for :func:`stoker.train`: any object with these two methods.

    >>> import stoker
    >>> class Printer:
    ...     def log(self, step, values):
    ...         print(step, values["train/loss"])
    ...
    ...     def close(self):
    ...         print("closed")
    >>> logger: stoker.Logger = Printer()
    >>> logger.log(50, {"train/loss": 0.52})  # as stoker.train(data, out="run", loggers=[logger]) does
    50 0.52
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of one record, after ``step`` batches; names begin with its kind, such as ``train/loss``.

        An error in this method ends the run, which can be resumed from its last checkpoint.
        """

    def close(self) -> None:
        """Flush and close. Called once, when the run ends or fails."""


class RunLog:
    """Append records to metrics.jsonl. First drop those after ``step``, which a killed run left, and that of the test.

    ``again``: also drop the training record at ``step``, because the next one repeats its steps.
    """

    missed = ""  # a hint to install TensorBoard, if there is no logger

    def __init__(
        self, run: RunDirectory, step: int, *, tensorboard: bool | None, loggers: Iterable[Logger] = (),
        again: bool = False,
    ) -> None:  # fmt: skip
        if run.metrics.exists():
            _cut(run.metrics, step, again=again)
        self._file = run.metrics.open("ab", buffering=0)  # a buffer would fail again when it is closed
        remedy = f"Free some space, then continue with: stoker train --resume {quoted(run.path)}"
        named = partial(errors_as, CheckpointError, remedy=remedy)
        self._named = partial(named, f"{run.metrics} could not be written")
        self._loggers = list(loggers)
        if tensorboard is not False:
            try:
                folder = run.path / "tensorboard"
                self._loggers.append(_TensorBoard(folder, step, partial(named, f"{folder} could not be written")))
            except ImportError:
                if not self._loggers:
                    self.missed = (
                        f"the metrics are only in {run.metrics.name}; for TensorBoard: {install('tensorboard')}"
                    )

    def write(self, values: dict[str, Any]) -> None:
        """Write one record; ``kind`` and ``step`` are required."""
        left = json.dumps(values, allow_nan=False).encode() + b"\n"
        with self._named():
            while left:
                left = left[self._file.write(left) :]
        if self._loggers:
            kind, numbers = values["kind"], {k: v for k, v in values.items() if isinstance(v, int | float)}
            figures = {f"{kind}/{name}": v for name, v in numbers.items() if name not in ("step", "seconds")}
            for logger in self._loggers:
                logger.log(values["step"], figures)

    def close(self) -> None:
        """Flush metrics.jsonl to disk, and close it and all loggers."""
        with self._named(), self._file:
            os.fsync(self._file.fileno())
        with ExitStack() as each:
            for logger in self._loggers:
                each.callback(logger.close)


class NoLog(RunLog):
    """Write nothing: the log of all ranks but the first."""

    def __init__(self) -> None:
        pass

    def write(self, values: dict[str, Any]) -> None:
        return

    def close(self) -> None:
        return


class _TensorBoard:
    """Write TensorBoard events to a folder; older events after ``step`` are hidden."""

    def __init__(self, folder: Path, step: int, named: Callable[[], AbstractContextManager[None]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._named = named
        with named():
            self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._named():
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._named():
            self._writer.close()


def _cut(path: Path, step: int, *, again: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as lines, atomic_file(path) as kept:
        for line in lines:
            try:
                record = json.loads(line)
                fits = record["kind"] != "test" and record["step"] <= step - (again and record["kind"] == "train")
            except (ValueError, KeyError, TypeError):
                continue  # an incomplete line of a killed run
            if fits:
                kept.write(line.encode())
