"""Texts as Polars holds them: 16 bytes for each, a view, that holds a short text or says where a long one lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np
import polars as pl

from stoker.base.ordered import ordered_map
from stoker.ops.codegen.jit import jit

__all__ = ["pieces_of", "repeated", "repeated_rows", "texts_of_views"]

_inline: Any = nb.njit(nogil=True, inline="always")
_MOST_BYTES = 2**31 - 1  # of a buffer: views have 32 bits for where a text begins


def texts_of_views(views: Any, held: Sequence[Any], absent: Any = None) -> pl.Series:
    """The texts of some views, missing where ``absent``. Nothing is copied.

    Args:
        views: int64 [n, 2].
        held: uint8 arrays that hold the long texts, or buffers of Arrow; views name one by its place.
        absent: bool [n], or None.
    """
    import pyarrow as pa

    validity = pa.py_buffer(np.packbits(~absent, bitorder="little")) if absent is not None and absent.any() else None
    buffers = [validity, pa.py_buffer(views), *(pa.py_buffer(one) for one in held)]
    return pl.Series(pl.from_arrow(pa.Array.from_buffers(pa.string_view(), len(views), buffers)))


def views_of(series: pl.Series) -> tuple[Any, list[Any]] | None:
    """Return the views of a text column in one piece, int64 [n, 2], without a copy, and the buffers of Arrow that hold
    long texts; None: of a Polars that keeps texts in another way."""
    array: Any = series.to_arrow(compat_level=pl.CompatLevel.newest())
    if not str(array.type).endswith("string_view"):
        return None
    _, views, *held = array.buffers()
    found = np.frombuffer(views if len(array) else b"", np.int64).reshape(-1, 2)
    return found[array.offset : array.offset + len(array)], held


def pieces_of(series: pl.Series, separator: str, most: int) -> tuple[Any, Any] | None:
    """The number of pieces of each text, at most ``most``, 0 where it is missing; and a function that takes how many
    rows each text has, and which texts are wanted, and gives the pieces of these in rows. None: not to be had so."""
    cut = np.frombuffer(separator.encode(), np.uint8)
    if not len(cut):
        return None
    array: Any = series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())  # one after the other, no views
    _, places, texts = array.buffers()
    ends = np.frombuffer(places, np.int64)[array.offset : array.offset + len(array) + 1] if len(array) else np.zeros(1)
    starts, lengths = ends[:-1].astype(np.int64), np.diff(ends).astype(np.int32)
    lengths[series.is_null().to_numpy()] = -1
    data = np.frombuffer(texts, np.uint8) if texts is not None and texts.size else np.zeros(0, np.uint8)
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
        return texts_of_views(views, [data] if longer else [], absent)

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
        if (found := views_of(series.rechunk())) is None:
            return series.gather(pl.Series(rows))
        views, held = found
        out = np.empty((len(rows), 2), np.int64)
        _repeat_views(views, size, out)
        absent = series.is_null().to_numpy()[rows] if series.null_count() else None
        return texts_of_views(out, held, absent).alias(series.name)

    return pl.DataFrame(list(ordered_map(work, frame.get_columns(), threads)))


@jit
def _repeat_views(views, size, out):  # type: ignore[no-untyped-def]
    at = 0
    for i in range(size.size):
        first, second = views[i, 0], views[i, 1]
        for _ in range(size[i]):
            out[at, 0], out[at, 1] = first, second
            at += 1


@jit
def _repeat(size, rows, rank):  # type: ignore[no-untyped-def]
    at = 0
    for i in range(size.size):
        for k in range(size[i]):
            rows[at], rank[at] = i, k + 1
            at += 1


@_inline
def _put_view(data, start, length, row, views, raw):  # type: ignore[no-untyped-def]
    """Write a view; returns whether the text lies in ``data``."""
    if length <= 12:  # as many bytes as a view has room for
        views[row, 0], views[row, 1] = length, 0
        for p in range(length):
            raw[row, 4 + p] = data[start + p]
        return False
    first = np.int64(data[start]) | np.int64(data[start + 1]) << 8
    first |= np.int64(data[start + 2]) << 16 | np.int64(data[start + 3]) << 24
    views[row, 0] = np.int64(length) | first << 32
    views[row, 1] = np.int64(start) << 32  # of the first buffer
    return True


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


@jit
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


@jit
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
