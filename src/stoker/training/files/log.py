"""The record of a run: metrics.jsonl, and the same numbers as TensorBoard events."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, TextIO

from stoker.base.files import atomic_file
from stoker.training.files.rundir import RunDirectory

__all__ = ["RunLog"]


class RunLog:
    """Appends records to a run. Records behind ``step``, left by a run that was killed, are dropped first.

    Args:
        run: the run.
        step: that training begins at.
        tensorboard: whether to write its events, too.
        again: whether the next training record has the steps of one at ``step``, the end of a shorter run: it goes.
    """

    def __init__(self, run: RunDirectory, step: int, *, tensorboard: bool, again: bool = False) -> None:
        if run.metrics.exists():
            _cut(run.metrics, step, again=again)
        self._file: TextIO = run.metrics.open("a", encoding="utf-8")
        self._events: Any = _events(run.tensorboard, step) if tensorboard else None

    def write(self, values: dict[str, Any]) -> None:
        """One record; ``kind`` and ``step`` are required."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("step", "seconds"):
                    self._events.add_scalar(f"{values['kind']}/{name}", value, values["step"])

    def close(self) -> None:
        """Flush to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._events is not None:
            self._events.close()


def _cut(path: Path, step: int, *, again: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as lines, atomic_file(path) as kept:
        for line in lines:
            try:
                record = json.loads(line)
                fits = record["step"] <= step - (again and record.get("kind") == "train")
            except (ValueError, KeyError, TypeError):
                continue  # the half line of a killed run
            if fits:
                kept.write(line.encode())


def _events(path: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(
            "no TensorBoard events are written because tensorboard is not installed. Run: pip install tensorboard",
            stacklevel=4,
        )
        return None
    return SummaryWriter(str(path), purge_step=step + 1 if step else None)
