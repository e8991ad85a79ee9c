"""Texts as Polars holds them: 16 bytes for each, which say where a long one lies and hold a short one (Arrow's views)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["Runs", "runs_of_texts"]

_jit: Any = nb.njit(nogil=True, cache=True)
_LEAST = 2**10  # rows; fewer are not worth a look
_LOOKED = 2**12  # rows looked at before all are


@dataclass(frozen=True)
class Runs:
    """Neighbours that hold the same text, or are all missing."""

    starts: pl.Series  # first row of each
    of_row: npt.NDArray[np.int32]  # [n] number of each row's run


def views_of(series: pl.Series) -> Any:
    """int64 [n, 2]: the views of a text column in one piece, without a copy."""
    array: Any = series.to_arrow(compat_level=pl.CompatLevel.newest())
    views = np.frombuffer(array.buffers()[1], np.int64).reshape(-1, 2)
    return views[array.offset : array.offset + len(array)]


def runs_of_texts(series: pl.Series) -> Runs | None:
    """The runs of a text column where they are worth it: of three rows or more on the average.

    Two rows are taken for the same text only where their views are the same: short texts that are equal, or long ones
    that were taken from the same place, as by exploding a list.
    """
    n = len(series)
    if n < _LEAST:
        return None
    if series.n_chunks() > 1:
        series = series.rechunk()
    head = series.slice(0, _LOOKED)
    if 3 * _begin_runs(views_of(head), head.is_null().to_numpy(), np.empty(len(head), np.int32)) > len(head):
        return None
    absent = series.is_null().to_numpy() if series.null_count() else np.zeros(0, np.bool_)
    of_row = np.empty(n, np.int32)
    count = _begin_runs(views_of(series), absent, of_row)
    if 3 * count > n:
        return None
    starts = np.empty(count, np.uint32)
    _first_rows(of_row, starts)
    return Runs(starts=pl.Series(starts), of_row=of_row)


@_jit
def _begin_runs(views, absent, of_row):  # type: ignore[no-untyped-def]
    """Number the runs; returns how many there are. ``absent``: [n], or empty where nothing is missing."""
    count = 0
    for i in range(views.shape[0]):
        if i == 0 or views[i, 0] != views[i - 1, 0] or views[i, 1] != views[i - 1, 1] or (
            absent.size > 0 and absent[i] != absent[i - 1]
        ):  # fmt: skip
            count += 1
        of_row[i] = count - 1
    return count


@_jit
def _first_rows(of_row, starts):  # type: ignore[no-untyped-def]
    for i in range(of_row.size):
        if i == 0 or of_row[i] != of_row[i - 1]:
            starts[of_row[i]] = i
