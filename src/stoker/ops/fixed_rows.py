"""Rows that have a place of their own: the first ones of every table, found by an addition.

Legend: T tables, H fixed rows of a table, P places (all H together).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from stoker.ops.space import AddressSpace

Int64 = npt.NDArray[np.int64]


class FixedRows:
    """Id i of table t lies in place ``first_place[t] + i``, where ``i < rows[t]``.

    Args:
        space: of the tables.
        rows: [T] H of each table; () means none.
    """

    def __init__(self, space: AddressSpace, rows: Sequence[int] = ()) -> None:
        self.rows: Int64 = np.array(rows or (0,) * len(space.rows), np.int64)
        self.first_place: Int64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows)])
        self._first_row = space.first_row
        self._local = threading.local()

    def __len__(self) -> int:
        """P."""
        return int(self.first_place[-1])

    def addresses(self) -> Int64:
        """[P] the row in each place."""
        table = np.repeat(np.arange(len(self.rows)), self.rows)
        return np.arange(len(self), dtype=np.int64) + (self._first_row[:-1] - self.first_place[:-1])[table]

    def places(self, addresses: Int64) -> Int64:
        """[n] the place of each row; -1 where it has none."""
        table = np.searchsorted(self._first_row, addresses, side="right") - 1
        local = addresses - self._first_row[table]
        return np.where(local < self.rows[table], self.first_place[table] + local, -1)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The addresses ``start..stop`` in stretches (first, end, place of the first; -1 where they have none)."""
        for table, fixed in enumerate(self.rows.tolist()):
            begin, end = int(self._first_row[table]), int(self._first_row[table + 1])
            for first, last, place in ((begin, begin + fixed, int(self.first_place[table])), (begin + fixed, end, -1)):
                low, high = max(first, start), min(last, stop)
                if low < high:
                    yield low, high, place if place < 0 else place + low - first

    def marks(self) -> tuple[npt.NDArray[np.int32], int]:
        """[P] of this thread, and a number that is nowhere in it yet: to count distinct rows with."""
        seen, number = getattr(self._local, "marks", (None, 0))
        if seen is None or number == np.iinfo(np.int32).max:
            seen, number = np.zeros(len(self), np.int32), 0
        self._local.marks = (seen, number + 1)
        return seen, number + 1
