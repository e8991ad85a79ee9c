"""Ctrl-C and SIGTERM end a run after the step that is under way, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from stoker.base.units import quoted

__all__ = ["Interrupted", "StopSignals"]


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, wrote a checkpoint and did. ``exit_code`` is 128 plus the signal's number.

    Args:
        number: of the signal.
        checkpoint: the newest one.
        run: the run directory.
        at_once: it was asked twice, or not in the loop, and wrote none.
    """

    def __init__(self, number: int, checkpoint: Path | None, run: Path, *, at_once: bool = False) -> None:
        self.signal = signal.Signals(number)
        self.checkpoint = checkpoint
        self.run = run
        self.exit_code = 128 + number
        saved = f"{checkpoint.name} is written" if checkpoint else "before its first step, nothing to keep"
        if at_once:
            saved = f"{checkpoint.name} is the newest checkpoint" if checkpoint else "there is no checkpoint yet"
        super().__init__(f"stopped by {self.signal.name}; {saved}. Continue with: stoker train --resume {quoted(run)}")


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets :attr:`number`; a second one acts as usual.

    Outside the main thread, where Python allows no handlers, it never sets anything.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *args: object) -> None:
        self._restore()
