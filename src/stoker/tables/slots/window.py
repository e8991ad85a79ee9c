"""How many batches to look ahead: as many as evictions need.

Belady's rule evicts the rows whose next use is farthest. A plan that knows only a window of batches follows it exactly
if all rows without a known use leave; if such rows remain, the plan has guessed among them (:attr:`Residency.guesses`).
So the window grows while plans guess, and shrinks slowly while they do not. Nothing here depends on time, so a run and
its replay choose the same windows.
"""

from __future__ import annotations

from stoker.base.device import total_memory

__all__ = ["CALM", "FARTHER", "LEAST", "SHARE", "Ahead", "default_memory"]

LEAST = 8  # batches ahead at first, and at least
FARTHER = 7  # batches more after a guess. They are read before the next step, so a few milliseconds
CALM = 8  # plans without a guess before the window shrinks by one batch
SHARE = 64  # of main memory, one part is for the window, unless a strategy says how much


def default_memory() -> int:
    """Return the bytes for batches that wait, if no strategy says how many."""
    return (total_memory() or 2**32) // SHARE


class Ahead:
    """The number of batches to look ahead beyond the next one to plan; ``fixed``: always this many.

    >>> ahead = Ahead()
    >>> ahead.judge(True, ahead.batches)
    >>> ahead.batches
    15
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.batches = LEAST if fixed is None else fixed
        self._fixed, self._calm = fixed is not None, 0

    def judge(self, guessed: bool, known: int) -> None:
        """Follow a plan that knew ``known`` batches after its own, and ``guessed`` or not."""
        if self._fixed:
            return
        self._calm = 0 if guessed else self._calm + 1
        if guessed:
            self.batches = known + FARTHER
        elif self._calm == CALM:
            self._calm, self.batches = 0, max(LEAST, self.batches - 1)
