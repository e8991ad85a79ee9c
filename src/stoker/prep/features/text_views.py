"""Texts as Polars holds them: 16 bytes for each, a view, that holds a short text or says where a long one lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np
import polars as pl

from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.ops.codegen.jit import jit
from stoker.prep.parse.dictionaries import views_of

__all__ = ["pieces_of", "repeated", "repeated_rows", "texts_of_views", "views_of_spans"]

_inline: Any = nb.njit(nogil=True, inline="always")
_SOON = 2**10  # texts that are looked at whether one is there again
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


def views_of_spans(data: Any, starts: Any, lengths: Any, part: int) -> tuple[Any, Any]:
    """int64 [n, 2] and uint8 [bytes]: views of texts that lie in ``data``, and a copy of the long ones, each once if
    they come again soon; ``part``: of :func:`texts_of_views`, where the copy will be. A missing text (a length below
    0) has an empty view.

    Raises:
        DataError: more than 2 GiB of texts in one part.
    """
    room = _long_bytes(lengths)
    if room > _MOST_BYTES:
        raise DataError(f"{room:,} bytes of text in one block: views have room for {_MOST_BYTES:,}. Take fewer rows.")
    views, held = np.empty((len(starts), 2), np.int64), np.empty(room, np.uint8)
    cache = np.full(_SOON, -1, np.int64)
    used = _view_spans(data, starts, lengths, part, views, views.view(np.uint8), held, cache)
    return views, held if used == room else held[:used].copy()


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


@jit
def _long_bytes(lengths):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(lengths.size):
        total += lengths[i] if lengths[i] > 12 else 0
    return total


@jit
def _view_spans(data, starts, lengths, part, views, raw, held, cache):  # type: ignore[no-untyped-def]
    used = 0
    for i in range(starts.size):
        n, start = lengths[i], starts[i]
        if n <= 12:
            _put_view(data, start, max(n, 0), i, views, raw)
            continue
        tag = np.uint64(n)
        for p in range(start + n - 8, start + n):
            tag = (tag << np.uint64(8) | tag >> np.uint64(56)) ^ np.uint64(data[p])
        tag = (tag * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(54)  # 10 bits: as many as _SOON has places
        before = cache[tag]
        same = before >= 0 and lengths[before] == n
        if same:
            other = starts[before]
            for p in range(n):
                same &= data[start + p] == data[other + p]
        cache[tag] = i
        if same:
            views[i, 0], views[i, 1] = views[before, 0], views[before, 1]
            continue
        _put_view(data, start, n, i, views, raw)
        views[i, 1] = np.int64(part) | np.int64(used) << 32
        for p in range(n):
            held[used + p] = data[start + p]
        used += n
    return used


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
