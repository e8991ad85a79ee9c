"""The Statistical Optimizer of FAE (VLDB 2022, section 4.1.3): the threshold whose hot rows fill a budget best.

A row is hot if it has at least the share t of its table's accesses (section 4.1). The lower t, the more rows. Hot rows
are a prefix of the ids, so as many lie in fast memory as the profile says, no more: the budget holds exactly, whatever
the estimate's error. What an error moves is the share at which the prefix really ends. So the estimate itself, not the
upper end of its interval, fills the budget; that end would leave memory unused.

Rows with equal counts become hot at the same t, and may be more than the budget has room for. Then each table's
prefix goes the same part of the way on, to the last row that fits.

Legend: Z tables, Q thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stoker.rewrite.fae.row_estimates import RowEstimate

__all__ = ["Thresholds"]

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_GRID = 512  # thresholds looked at first
_HALVINGS = 48
_ALL_COLD = 2.0  # a share that no row has


class Thresholds:
    """Hot rows by threshold.

    Args:
        tables: their rows by accesses.
        row_bytes: of each table, with optimizer state.
        whole: which tables are hot as a whole.
    """

    def __init__(self, tables: Sequence[RowEstimate], row_bytes: Sequence[int], whole: Sequence[bool]) -> None:
        self._tables, self._whole = tables, whole
        self._row_bytes = np.array(row_bytes, np.int64)
        self._rows = np.array([table.rows for table in tables], np.int64)
        most = max((table.accesses for table in tables), default=0)
        # The last but one asks for a single access, the last for none.
        shares = np.geomspace(1.0, 1.0 / max(most, 2), _GRID)
        self._grid = np.concatenate([[_ALL_COLD], shares, [0.0]])
        self._hot = self.hot(self._grid)
        self._bytes = self.bytes(self._hot)

    def hot(self, thresholds: Floats) -> Int64:
        """Hot rows of each table at each threshold, [Q, Z]."""
        out = np.empty((len(thresholds), len(self._tables)), np.int64)
        for z, table in enumerate(self._tables):
            found = table.hot(thresholds * max(table.accesses, 1))  # at least one access, where there are none
            out[:, z] = table.rows if self._whole[z] else np.where(thresholds > 0, found, table.rows)
        return out

    def bytes(self, hot: Int64) -> Int64:
        """What hot rows [Q, Z] take, [Q]."""
        taken: Int64 = hot @ self._row_bytes
        return taken

    def fill(self, budget: int) -> tuple[float, Int64]:
        """The lowest threshold whose rows fit the budget, and the hot rows [Z], equal ones included as far as they fit.

        The tables that are hot as a whole must fit.
        """
        place = int(np.searchsorted(self._bytes, budget, side="right")) - 1
        assert place >= 0
        high, fits = float(self._grid[place]), self._hot[place]
        if place == len(self._grid) - 1:
            return 0.0, fits
        low, over = float(self._grid[place + 1]), self._hot[place + 1]
        for _ in range(_HALVINGS if low > 0 else 0):
            middle = math.sqrt(high * low)
            found = self.hot(np.array([middle]))
            if int(self.bytes(found)[0]) <= budget:
                high, fits = middle, found[0]
            else:
                low, over = middle, found[0]
        used, more = (int(rows @ self._row_bytes) for rows in (fits, over))
        part = (budget - used) / (more - used)
        return min(high, 1.0), fits + np.floor(part * (over - fits)).astype(np.int64)

    def curve(self, points: int) -> tuple[Floats, Int64]:
        """Thresholds whose rows take evenly spaced shares of all used rows on a logarithmic scale (Figure 5).

        Returns:
            At most ``points`` thresholds, falling, and their hot rows [Q, Z].
        """
        used = float(self._bytes[-2])
        steps = np.geomspace(max(used / 1000, 1.0), max(used, 1.0), points)
        places = np.searchsorted(self._bytes[:-1], steps * (1 + 1e-9), side="right") - 1
        chosen = np.unique(places[places > 0])
        return self._grid[chosen], self._hot[chosen]
