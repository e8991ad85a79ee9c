"""How many batches to look ahead: as many as evictions need.

Belady's rule evicts the rows whose next use is farthest. A plan that knows only a window of batches follows it exactly
if all rows without a known use are evicted; if such rows remain, the plan has guessed among them
(:attr:`Residency.guesses`). So the window grows while plans guess, and shrinks slowly while they do not. Nothing here
depends on time, so a run and its replay choose the same windows.

Knowing the uses of all rows in slots costs planning, too: 1.7 ms a batch instead of 1.4 with 64 batches, on the
synthetic trace of ``benchmarks/lookahead.py`` in order of time. It saved 214 rows a batch, half a microsecond each if
rows are in memory, tens of microseconds in a file. So only there windows have no other limit than memory.
"""

from __future__ import annotations

from stoker.base.device import total_memory

LEAST = 8  # batches ahead at first, and at least
FARTHER = 7  # batches more after a guess. They are read before the next step, so a few milliseconds
CALM = 8  # plans without a guess before the window shrinks by one batch
IN_MEMORY = 64  # most batches where all rows are in memory
SHARE = 64  # of main memory, one part is for the window, unless a strategy says how much


def default_memory() -> int:
    """Return the bytes for batches that wait, if no strategy says how many."""
    return (total_memory() or 2**32) // SHARE


class Ahead:
    """The number of batches to look ahead beyond the next one to plan.

    >>> ahead = Ahead()
    >>> ahead.judge(True, ahead.batches)
    >>> ahead.batches
    15
    """

    def __init__(self, fixed: int | None = None, most: int | None = None) -> None:
        self.batches = LEAST if fixed is None else fixed
        self._fixed, self._most, self._calm = fixed is not None, most, 0

    def judge(self, guessed: bool, known: int) -> None:
        """Follow a plan that knew ``known`` batches after its own, and ``guessed`` or not."""
        if self._fixed:
            return
        self._calm = 0 if guessed else self._calm + 1
        if guessed:
            self.batches = known + FARTHER if self._most is None else min(known + FARTHER, self._most)
        elif self._calm == CALM:
            self._calm, self.batches = 0, max(LEAST, self.batches - 1)
