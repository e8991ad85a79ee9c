"""Walks over the rows of groups in order. Rows are sorted by (group, order) and numbered so; n rows, O(n) each."""

from __future__ import annotations

from typing import Any

import numba as nb

__all__ = ["count_before", "in_order", "last_before", "rank_in_group"]

_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def in_order(groups, order):  # type: ignore[no-untyped-def]
    """Whether rows are sorted by (group, order) already."""
    for i in range(1, groups.size):
        if groups[i] < groups[i - 1] or (groups[i] == groups[i - 1] and order[i] < order[i - 1]):
            return False
    return True


@_jit
def last_before(groups, order, event, out):  # type: ignore[no-untyped-def]
    """out[i]: the latest event row of i's group whose order is less than i's, -1 where there is none.

    Of several events at one moment the last one in sorted order counts.
    """
    latest, pending = -1, -1
    for i in range(groups.size):
        if i == 0 or groups[i] != groups[i - 1]:
            latest, pending = -1, -1
        elif order[i] != order[i - 1]:
            latest = pending
        out[i] = latest
        if event[i]:
            pending = i


@_jit
def count_before(groups, order, event, window, out):  # type: ignore[no-untyped-def]
    """out[i]: events of i's group with order in [order[i] - window, order[i]); a negative window has no beginning."""
    first, counted, upto = 0, 0, 0
    for i in range(groups.size):
        if i == 0 or groups[i] != groups[i - 1]:
            first, upto, counted = i, i, 0
        while order[upto] < order[i]:  # upto never passes i, as order[i] is not below itself
            counted += event[upto]
            upto += 1
        if window >= 0:
            while first < upto and order[first] < order[i] - window:
                counted -= event[first]
                first += 1
        out[i] = counted


@_jit
def rank_in_group(groups, order, dense, out):  # type: ignore[no-untyped-def]
    """out[i]: 1 + how many rows of the group have a lower order, or with ``dense`` how many lower values there are."""
    begin, rank = 0, 0
    for i in range(groups.size):
        if i == 0 or groups[i] != groups[i - 1]:
            begin, rank = i, 1
        elif order[i] != order[i - 1]:
            rank = rank + 1 if dense else i - begin + 1
        out[i] = rank
