"""Walks over the rows of groups in order. Rows are sorted by (group, order) and numbered so; n rows, O(n) each."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

__all__ = ["count_before", "group_codes", "last_before", "rank_in_group"]

Array = npt.NDArray[Any]
_jit: Any = nb.njit(nogil=True, cache=True)


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


def group_codes(columns: list[Any]) -> npt.NDArray[np.int64]:
    """A number for each distinct combination of values of some Polars columns, by exact comparison, [n]."""
    codes: npt.NDArray[np.int64] | None = None
    for series in columns:
        own, size = _dictionary(series)
        if codes is None:
            codes, room = own, size
        else:
            if room * size >= 2**62:
                codes, room = _densified(codes)
            codes, room = codes * size + own, room * size
    assert codes is not None
    return codes


def _dictionary(series: Any) -> tuple[npt.NDArray[np.int64], int]:
    encoded = series.rechunk().to_arrow().dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), max(1, len(encoded.dictionary))


def _densified(codes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    distinct, dense = np.unique(codes, return_inverse=True)
    return dense.astype(np.int64), max(1, len(distinct))
