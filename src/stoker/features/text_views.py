"""Texts as Polars holds them: 16 bytes for each, which say where a long one lies and hold a short one (Arrow's views)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.data.ordered import ordered_map

__all__ = ["Runs", "pieces_of", "repeated", "repeated_rows", "runs_of_texts", "texts_of_spans"]

_jit: Any = nb.njit(nogil=True, cache=True)
_inline: Any = nb.njit(nogil=True, inline="always")
_LEAST = 2**10  # rows; fewer are not worth a look
_LOOKED = 2**12  # rows looked at before all are
_INLINE = 12  # bytes of a text that its view holds itself
_MOST_BYTES = 2**31 - 1  # of a buffer: views have 32 bits for where a text begins


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


def texts_of_views(views: Any, data: Any, absent: Any = None) -> pl.Series:
    """The texts of some views, whose long ones lie in ``data``; missing where ``absent``. Nothing is copied."""
    import pyarrow as pa

    return _texts(views, [pa.py_buffer(data)] if len(data) else [], absent)


def _texts(views: Any, buffers: list[Any], absent: Any) -> pl.Series:
    import pyarrow as pa

    validity = pa.py_buffer(np.packbits(~absent, bitorder="little")) if absent is not None and absent.any() else None
    made = pa.Array.from_buffers(pa.string_view(), len(views), [validity, pa.py_buffer(views), *buffers])
    return pl.Series(pl.from_arrow(made))


def texts_of_spans(data: Any, starts: Any, lengths: Any) -> pl.Series | None:
    """Texts that lie in ``data`` [bytes] as UTF-8, missing where a length is below 0: ``data`` stays in memory as long
    as the texts do. None: too much data for views."""
    if len(data) > _MOST_BYTES:
        return None
    views = np.empty((len(starts), 2), np.int64)
    longer = _view_spans(data, starts, lengths, views, views.view(np.uint8))
    return texts_of_views(views, data if longer else data[:0], lengths < 0)


def pieces_of(series: pl.Series, separator: str, most: int) -> tuple[Any, Any] | None:
    """The number of pieces of each text, at most ``most``, 0 where it is missing; and a function that takes how many
    rows each text has, and which texts are wanted, and gives the pieces of these in rows. None: not to be had so."""
    from stoker.data.frames import text_column

    cut = np.frombuffer(separator.encode(), np.uint8)
    if not len(cut):
        return None
    column = text_column(series)
    data, starts, lengths = column.data, column.starts, column.lengths
    if len(data) > _MOST_BYTES:
        return None
    counts = np.empty(len(series), np.int64)
    _count_pieces(data, starts, lengths, cut, most, counts)

    def pieces(size: Any, wanted: Any) -> pl.Series:
        total = int(size.sum())
        views, absent = np.empty((total, 2), np.int64), None
        if not (wanted | (size == 0)).all():
            absent = ~np.repeat(wanted, size)
        longer = _view_pieces(data, starts, lengths, cut, size, wanted, views, views.view(np.uint8))
        return texts_of_views(views, data if longer else data[:0], absent)

    return counts, pieces


def repeated(size: Any) -> tuple[Any, Any]:
    """Of each row ``size`` times: uint32 the row, and int64 the place within it from 1."""
    total = int(size.sum())
    rows, rank = np.empty(total, np.uint32), np.empty(total, np.int64)
    _repeat(size, rows, rank)
    return rows, rank


def repeated_rows(frame: pl.DataFrame, size: Any, rows: Any, *, threads: int = 2) -> pl.DataFrame:
    """Each row ``size`` times, ``rows`` as of :func:`repeated`. A tenth of the work of taking them one by one."""

    def work(series: pl.Series) -> pl.Series:
        if series.dtype != pl.String:
            return series.gather(pl.Series(rows))
        series = series.rechunk()
        array: Any = series.to_arrow(compat_level=pl.CompatLevel.newest())
        given, out = views_of(series), np.empty((len(rows), 2), np.int64)
        _repeat_views(given, size, out)
        absent = series.is_null().to_numpy()[rows] if series.null_count() else None
        return _texts(out, array.buffers()[2:], absent).alias(series.name)

    return pl.DataFrame(list(ordered_map(work, frame.get_columns(), threads)))


@_jit
def _repeat_views(views, size, out):  # type: ignore[no-untyped-def]
    at = 0
    for i in range(size.size):
        first, second = views[i, 0], views[i, 1]
        for _ in range(size[i]):
            out[at, 0], out[at, 1] = first, second
            at += 1


@_jit
def _repeat(size, rows, rank):  # type: ignore[no-untyped-def]
    at = 0
    for i in range(size.size):
        for k in range(size[i]):
            rows[at], rank[at] = i, k + 1
            at += 1


@_inline
def _put_view(data, start, length, row, views, raw):  # type: ignore[no-untyped-def]
    """Write a view; returns whether the text lies in ``data``."""
    if length <= 12:
        views[row, 0], views[row, 1] = length, 0
        for p in range(length):
            raw[row, 4 + p] = data[start + p]
        return False
    first = np.int64(data[start]) | np.int64(data[start + 1]) << 8
    first |= np.int64(data[start + 2]) << 16 | np.int64(data[start + 3]) << 24
    views[row, 0] = np.int64(length) | first << 32
    views[row, 1] = np.int64(start) << 32  # of the first buffer
    return True


@_jit
def _view_spans(data, starts, lengths, views, raw):  # type: ignore[no-untyped-def]
    longer = False
    for i in range(starts.size):
        if lengths[i] < 0:
            views[i, 0], views[i, 1] = 0, 0
        elif _put_view(data, starts[i], lengths[i], i, views, raw):
            longer = True
    return longer


@_inline
def _next_cut(data, at, stop, cut):  # type: ignore[no-untyped-def]
    """Where the next separator begins, ``stop`` where there is none."""
    if cut.size == 1:
        while at < stop and data[at] != cut[0]:
            at += 1
        return at
    while at + cut.size <= stop:
        same = True
        for p in range(cut.size):
            same &= data[at + p] == cut[p]
        if same:
            return at
        at += 1
    return stop


@_jit
def _count_pieces(data, starts, lengths, cut, most, counts):  # type: ignore[no-untyped-def]
    for i in range(starts.size):
        counts[i] = 0
        if lengths[i] >= 0:
            at, stop = starts[i], starts[i] + lengths[i]
            while counts[i] < most:
                counts[i] += 1
                at = _next_cut(data, at, stop, cut)
                if at == stop:
                    break
                at += cut.size


@_jit
def _view_pieces(data, starts, lengths, cut, size, wanted, views, raw):  # type: ignore[no-untyped-def]
    longer, row = False, 0
    for i in range(starts.size):
        at, stop = starts[i], starts[i] + max(lengths[i], 0)
        for _ in range(size[i]):
            if wanted[i]:
                end = _next_cut(data, at, stop, cut)
                if _put_view(data, at, end - at, row, views, raw):
                    longer = True
                at = end + cut.size
            else:
                views[row, 0], views[row, 1] = 0, 0
            row += 1
    return longer
