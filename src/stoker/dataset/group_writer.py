"""Numbers for the lists of rows that go by, and what is to be recorded of them. Reading them (:mod:`groups`) needs no
compiler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

__all__ = ["GroupWriter"]

Int32 = npt.NDArray[np.int32]


@jit
def _number(names, labels, numbers, rows, positive, count, out):  # type: ignore[no-untyped-def]
    """Write the numbers of named groups to ``out``, new ones from ``count`` on; how many there are then."""
    for i in range(names.size):
        name = np.uint64(names[i])
        number = numbers[name]
        if number < 0:
            number = count
            numbers[name] = count
            count += 1
        rows[np.uint64(number)] += 1
        if labels[i] > 0.5:
            positive[np.uint64(number)] = True
        out[i] = number
    return count


class GroupWriter:
    """Gives groups dense numbers, from 0, in the order in which they are first seen, and sums up what the manifest
    records of them.

    Args:
        known: how many groups there may be; each is named by a number below that.
    """

    def __init__(self, known: int) -> None:
        self.count = 0
        self._numbers = np.full(known, -1, np.int32)
        self._rows = np.zeros(known, np.int64)
        self._positive = np.zeros(known, np.bool_)

    def add(self, names: npt.NDArray[np.integer], labels: npt.NDArray[np.float32]) -> Int32:
        """Numbers of the next rows, whose groups go by ``names`` [n]."""
        numbers = np.empty(len(names), np.int32)
        self.count = _number(names, labels, self._numbers, self._rows, self._positive, self.count, numbers)
        return numbers

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """[known] which names had a row."""
        return self._numbers >= 0

    def summary(self) -> dict[str, int]:
        """``count`` of groups, rows of the ``largest``, and how many have a row with label 1 (``with_positive``)."""
        count = self.count
        return {
            "count": count,
            "largest": int(self._rows[:count].max()) if count else 0,
            "with_positive": int(self._positive[:count].sum()),
        }
