"""The stages of a training step, and how long each took in all, without keeping what happened when."""

from __future__ import annotations

import threading
from collections import Counter, deque

from stoker.base.timeline import Recorder

__all__ = ["STAGES", "StageTotals"]

#: What a step consists of, in the order in which a batch goes through it.
STAGES = {
    "foresight": "find next uses",
    "read": "make the batch",
    "plan": "choose slots",
    "fence": "wait for writebacks",
    "fetch": "rows from home to slots",
    "forward": "dense part and loss",
    "lookup": "look up and pool rows",
    "backward": "dense part",
    "update": "optimizer of the rows",
    "dense": "optimizer of the dense part",
    "writeback": "rows from slots to home",
    "stall": "other waiting",
    "step": "everything else",
}
_WITHIN = 2**14  # spans that one span may have directly inside it


class StageTotals(Recorder):
    """Seconds of each stage over all threads, each without the stages inside it.

    A span is known when it ends, and those inside it ended before: each thread keeps its last ones until one ends that
    turns out to contain them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._totals: list[Counter[str]] = []  # nanoseconds, of each thread
        self._own = threading.local()

    def add(self, name: str, start: int, end: int, step: int | None) -> None:
        own = self._own
        if not hasattr(own, "totals"):
            own.totals, own.within = Counter(), deque(maxlen=_WITHIN)
            self._totals.append(own.totals)
        within: deque[tuple[int, int]] = own.within
        rest = end - start
        while within and within[-1][0] >= start:
            begun, ended = within.pop()
            rest -= ended - begun
        within.append((start, end))
        own.totals[name] += rest

    def seconds(self) -> dict[str, float]:
        """Seconds of each of :data:`STAGES` so far."""
        found = Counter[str]()
        for totals in list(self._totals):
            found.update(totals.copy())
        return {name: found[name] / 1e9 for name in STAGES}
