"""Walks over the rows of groups in order. Rows are sorted by (group, order) and numbered so; n rows, O(n) each."""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit

__all__ = ["by_group", "count_before", "deal", "in_order", "last_before", "rank_in_group"]


@jit
def deal(shares, begins, out):  # type: ignore[no-untyped-def]
    """out: the rows by (share, row); ``begins`` [shares + 1] zeros, receives where each share begins there, and n."""
    for i in range(shares.size):
        begins[shares[i]] += 1
    at = 0
    for share in range(begins.size):
        count = begins[share]
        begins[share] = at
        at += count
    for i in range(shares.size):
        out[begins[shares[i]]] = i
        begins[shares[i]] += 1
    for share in range(begins.size - 1, 0, -1):  # each has moved to where the next one begins
        begins[share] = begins[share - 1]
    begins[0] = 0


@jit
def in_order(groups, order):  # type: ignore[no-untyped-def]
    """Whether rows are sorted by (group, order) already."""
    for i in range(1, groups.size):
        if groups[i] < groups[i - 1] or (groups[i] == groups[i - 1] and order[i] < order[i - 1]):
            return False
    return True


@jit
def by_group(groups, order, count, out):  # type: ignore[no-untyped-def]
    """out: the rows by (group, order, row); groups are numbers below ``count``. O(n) where rows of a group come in
    order, as in a log."""
    ends = np.zeros(count + 1, np.int64)
    for i in range(groups.size):
        ends[groups[i] + 1] += 1
    for g in range(count):
        ends[g + 1] += ends[g]
    for i in range(groups.size):
        out[ends[groups[i]]] = i
        ends[groups[i]] += 1
    first = 0
    for g in range(count):
        stop = ends[g]  # moved to where the group ends
        sorted_so_far = True
        for k in range(first + 1, stop):
            if order[out[k]] < order[out[k - 1]]:
                sorted_so_far = False
                break
        if not sorted_so_far and stop - first <= 64:
            for k in range(first + 1, stop):
                row, at = out[k], k
                while at > first and order[out[at - 1]] > order[row]:
                    out[at] = out[at - 1]
                    at -= 1
                out[at] = row
        elif not sorted_so_far:
            rows = out[first:stop].copy()
            out[first:stop] = rows[np.argsort(order[rows], kind="mergesort")]
        first = stop


@jit
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


@jit
def count_before(groups, order, event, window, least, out):  # type: ignore[no-untyped-def]
    """out[i]: events of i's group with order in [order[i] - window, order[i]); a negative window has no beginning, nor
    has one of an order below ``least``: its beginning is no number."""
    first, counted, upto = 0, 0, 0
    for i in range(groups.size):
        if i == 0 or groups[i] != groups[i - 1]:
            first, upto, counted = i, i, 0
        while order[upto] < order[i]:  # upto never passes i, as order[i] is not below itself
            counted += event[upto]
            upto += 1
        if window >= 0 and order[i] >= least:
            while first < upto and order[first] < order[i] - window:
                counted -= event[first]
                first += 1
        out[i] = counted


@jit
def rank_in_group(groups, order, dense, out):  # type: ignore[no-untyped-def]
    """out[i]: 1 + how many rows of the group have a lower order, or with ``dense`` how many lower values there are."""
    begin, rank = 0, 0
    for i in range(groups.size):
        if i == 0 or groups[i] != groups[i - 1]:
            begin, rank = i, 1
        elif order[i] != order[i - 1]:
            rank = rank + 1 if dense else i - begin + 1
        out[i] = rank
