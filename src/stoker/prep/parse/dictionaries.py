"""The distinct values of a block: each row's number, and the values by number.

Texts of a Polars column are 16-byte views: up to 12 bytes lie in the view itself, of longer ones it says where they
lie. Equal views are equal texts, and a reader of Parquet gives most equal texts equal views; so rows are numbered by
their views, and only the distinct ones are looked at as texts.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.prep.parse import dictionary_kernels as kernels
from stoker.prep.parse.columns import Field, RawColumn, split_list
from stoker.prep.parse.text_kernels import hash_spans

__all__ = ["WIDE", "list_column", "number_ints", "number_texts", "text_column", "text_hashes", "views_of"]

Array = npt.NDArray[Any]
#: Whole numbers that int64 does not hold; older versions of Polars lack some.
WIDE = tuple(getattr(pl, name) for name in ("UInt64", "Int128", "UInt128") if hasattr(pl, name))
_SMALL = 2**14  # slots of a table that a core's cache holds
_INLINE = 12  # bytes of a text that lie in its view
_NONE = np.empty(0, np.bool_)

_local = threading.local()


def _scratch(name: str, size: int, dtype: npt.DTypeLike) -> Array:
    """Memory of this thread, used again by the next column: fresh pages cost more than the work."""
    held: Array | None = getattr(_local, name, None)
    if held is None or len(held) < size:
        held = np.empty(size + size // 8, dtype)
        setattr(_local, name, held)
    return held


def _number(kernel: Any, n: int, *arguments: Any, words: int = 1) -> Array:
    """What a kernel notes of each of the distinct values that it finds among n: a number, or several ``words``.

    Most columns repeat a few: it begins with a table that stays in cache, and begins again where that is too small.
    """
    noted = _scratch("distinct", words * n, np.int64)[: words * n]
    noted = noted if words == 1 else noted.reshape(n, words)
    size = 1 << max(4, (2 * n).bit_length())
    for some in (min(size, _SMALL), size):
        table = _scratch("table", some, np.int32)[:some]
        table.fill(-1)
        found = int(kernel(*arguments, noted, table))
        if found >= 0:
            break
    return noted[:found]


def number_ints(values: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_], codes: Array) -> Array:
    """Write the number of each value [n] to ``codes``, from 1 by first occurrence, 0 where missing; the distinct."""
    return _number(kernels.block_ints, len(values), values, missing, codes).copy()


def number_texts(column: RawColumn, room: Array) -> tuple[Array, Array, Array]:
    """As :func:`number_ints` for the texts [n] of a column: the numbers, which are in ``room`` unless the column has
    them; the bytes of the distinct ones, and their D + 1 ends."""
    if column.codes is not None and column.ends is not None and column.data is not None:
        return column.codes, column.data, column.ends
    starts, lengths = column.spans()
    first = _number(kernels.block_texts, len(starts), column.data, starts, lengths, room)
    return room, *_gathered(column.data, starts[first], lengths[first])


def text_hashes(column: RawColumn, seed: int) -> npt.NDArray[np.uint64]:
    """[n] the hash of each text; 0 where it is missing."""
    if column.codes is None or column.ends is None:
        starts, lengths = column.spans()
        hashes = np.empty(len(starts), np.uint64)
        hash_spans(column.data, starts, lengths, seed, hashes)
        return hashes
    starts, lengths = np.append(0, column.ends[:-1]), np.append(-1, np.diff(column.ends)).astype(np.int32)
    hashes = np.empty(len(starts), np.uint64)
    hash_spans(column.data, starts, lengths, seed, hashes)
    each: npt.NDArray[np.uint64] = hashes[column.codes]
    return each


def _gathered(data: Any, starts: Array, lengths: Array) -> tuple[Array, Array]:
    out = np.empty(int(lengths.sum(dtype=np.int64)), np.uint8)
    ends = np.empty(len(starts) + 1, np.int64)
    kernels.gather_bytes(data, starts, lengths, out, ends)
    return out, ends


def views_of(series: pl.Series) -> tuple[npt.NDArray[np.int64], list[Any]] | None:
    """int64 [n, 2]: the views of a text column in one piece, without a copy; and the buffers of Arrow that hold long
    texts. None: of a Polars that keeps texts in another way."""
    array: Any = series.to_arrow(compat_level=pl.CompatLevel.newest())
    if not str(array.type).endswith("string_view"):
        return None
    _, views, *held = array.buffers()
    found = np.frombuffer(views if len(array) else b"", np.int64).reshape(-1, 2)
    return found[array.offset : array.offset + len(array)], held


def text_column(series: pl.Series) -> RawColumn:
    """The texts of a column as spans of one buffer, and their numbers. Whole numbers become texts."""
    if series.dtype != pl.String:
        if series.dtype.is_integer() and series.dtype not in WIDE:
            return _texts_of_ints(series)
        series = series.cast(pl.String)
    pieces, buffers = [], list[Any]()
    for piece in series.get_chunks():
        if (held := views_of(piece)) is None:
            return _plain(series)
        absent = piece.is_null().to_numpy() if piece.null_count() else _NONE
        pieces.append((held[0], len(buffers), absent))
        buffers += held[1]
    codes = np.empty(len(series), np.uint32)

    def number(distinct: Array, table: Array) -> int:
        found = at = 0
        for views, base, absent in pieces:
            found = kernels.block_views(views, base, absent, codes[at : at + len(views)], distinct, table, found)
            if found < 0:
                break
            at += len(views)
        return found

    distinct = _number(number, len(series), words=2)
    found = len(distinct)
    data, ends = _texts(distinct, buffers)
    if found and int(np.diff(ends).max()) > _INLINE:  # two places may hold the same text
        again = np.empty(found, np.uint32)
        once = RawColumn(data=data, starts=ends[:-1], lengths=np.diff(ends).astype(np.int32))
        _, kept, kept_ends = number_texts(once, again)
        if len(kept_ends) < len(ends):
            data, ends = kept, kept_ends
            codes = np.concatenate([np.zeros(1, np.uint32), again])[codes]
    return RawColumn(data=data, codes=codes, ends=ends)


def _texts(views: Array, buffers: list[Any]) -> tuple[Array, Array]:
    """The bytes of some views one after the other, and where each begins and ends."""
    words = views.view(np.int32)  # [D, 4]: bytes, the first four of them, and of a long text buffer and place in it
    lengths = words[:, 0]
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    out = np.empty(int(ends[-1]), np.uint8)
    short = np.flatnonzero(lengths <= _INLINE)
    inside = views.reshape(-1).view(np.uint8)
    inside.flags.writeable = False  # as a buffer of Polars is: kernels are compiled for one of the two
    kernels.copy_spans(inside, short * (2 * views.itemsize) + 4, short, ends, out)
    if len(short) < len(views):
        long = np.flatnonzero(lengths > _INLINE)
        for number in np.flatnonzero(np.bincount(words[long, 2])).tolist():
            some = long[words[long, 2] == number]
            data = np.frombuffer(buffers[number], np.uint8)
            kernels.copy_spans(data, words[some, 3].astype(np.int64), some, ends, out)
    return out, ends


def list_column(column: RawColumn, item: Field, wrong: dict[int, str]) -> RawColumn:
    """As :func:`stoker.prep.parse.columns.split_list`; of texts that are numbered, each distinct one is split once."""
    if column.codes is None or column.ends is None:
        return split_list(column, item, wrong)
    sizes = np.diff(column.ends).astype(np.int32)
    distinct = RawColumn(data=column.data, starts=column.ends[:-1], lengths=sizes)
    failed: dict[int, str] = {}
    pieces = split_list(distinct, item, failed)
    assert pieces.counts is not None
    if failed:
        bad = np.zeros(len(column.ends), np.bool_)
        bad[[text + 1 for text in failed]] = True
        for row in np.flatnonzero(bad[column.codes]).tolist():
            wrong.setdefault(row, failed[int(column.codes[row]) - 1])
    begins = np.concatenate([[0], np.cumsum(pieces.counts, dtype=np.int64)])
    counts = np.concatenate([np.zeros(1, np.int32), pieces.counts])[column.codes]
    total = int(counts.sum(dtype=np.int64))

    def spread(source: Array) -> Array:
        out = np.empty(total, source.dtype)
        kernels.spread_lists(column.codes, begins, source, out)
        return out

    if not pieces.textual:
        missing = None if pieces.missing is None else spread(pieces.missing)
        return RawColumn(values=spread(pieces.numbers()), missing=missing, counts=counts)
    numbers, data, ends = number_texts(pieces, np.empty(len(pieces), np.uint32))
    return RawColumn(data=data, codes=spread(numbers), ends=ends, counts=counts)


def _texts_of_ints(series: pl.Series) -> RawColumn:
    """Of whole numbers, of which only the distinct ones are written out."""
    absent = np.zeros(len(series), np.bool_)
    if series.null_count():  # each of these calls is a query of its own
        absent, series = series.is_null().to_numpy(), series.fill_null(0)
    codes = np.empty(len(series), np.uint32)
    distinct = number_ints(series.cast(pl.Int64).to_numpy(), absent, codes)
    each = _plain(pl.Series(distinct).cast(pl.String))
    assert each.data is not None
    assert each.lengths is not None
    ends = np.concatenate([[0], np.cumsum(each.lengths, dtype=np.int64)])
    return RawColumn(data=each.data, codes=codes, ends=ends)


def _plain(series: pl.Series) -> RawColumn:
    """The texts as they lie, without numbers."""
    array: Any = series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    _, offsets, data = array.buffers()
    n = len(series)
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + n + 1] if n else np.zeros(1, np.int64)
    held = np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])].copy() if ends[-1] else np.empty(0, np.uint8)
    lengths = np.diff(ends).astype(np.int32)
    if series.null_count():
        lengths[series.is_null().to_numpy()] = -1
    return RawColumn(data=held, starts=ends[:-1] - ends[0], lengths=lengths)
