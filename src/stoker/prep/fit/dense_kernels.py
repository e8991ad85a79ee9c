"""Loops over D dense columns [n], with values that may be missing: what rows teach, and what the model sees of them.

A column is of the narrowest type that holds all its values: uint8, where 255 is missing, uint16, where 65535 is, or
float32 or float64, where NaN is. Rows go by in tiles, of which all columns stay in the processor's cache; a loop takes
all columns of a tile, as it takes longer to call one than to go through a column's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from stoker.ops.codegen.jit import jit

__all__ = [
    "SHORT",
    "STRIPE",
    "TILE",
    "TYPES",
    "Columns",
    "Order",
    "column_at",
    "finite",
    "nan_for_null",
    "narrowed",
    "stretches",
    "tiles",
    "values_of",
    "whole_narrowed",
    "write_stripe",
    "write_tile",
]

STRIPE = 64  # rows written together, so that the row-major output stays in cache
SHORT = 3  # rows of a stretch, below which rows are rather taken one by one
TILE = 2**13  # rows whose logarithms are taken together
TYPES = (np.uint8, np.uint16, np.float32, np.float64)  # of columns; their places here tell kernels which one it is


def _as_pointer(typingctx: Any, address: Any) -> Any:
    """A number as the address that it is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return nb.types.voidptr(nb.types.uintp), codegen


_pointer: Any = intrinsic(_as_pointer)
_carray: Any = nb.carray  # type: ignore[attr-defined]


class Columns:
    """D columns [n] in a form that one kernel takes.

    Args:
        raw: the columns.
    """

    def __init__(self, raw: Sequence[Any]) -> None:
        self._held = [_plain(column) for column in raw]  # what the addresses are of
        self.addresses = np.array([column.__array_interface__["data"][0] for column in self._held], np.uintp)
        self.types = np.array([TYPES.index(column.dtype.type) for column in self._held], np.int64)
        self.rows = len(self._held[0]) if self._held else 0


def _plain(column: Any) -> Any:
    return np.ascontiguousarray(column, None if column.dtype.type in TYPES else np.float64)


def values_of(column: Any) -> Any:
    """A column [n] of any type, or some rows of one, as float64, NaN where missing."""
    found = column.astype(np.float64)
    if column.dtype.kind == "u":
        found[column == np.iinfo(column.dtype).max] = np.nan
    return found


def _number(x: Any) -> Any:
    """An element of a column as float64, NaN where missing."""
    raise TypeError("this is for compiled loops; values_of does it for whole columns")


@overload(_number)
def _number_of(x):  # type: ignore[no-untyped-def]
    if not isinstance(x, nb.types.Integer):
        return lambda x: np.float64(x)
    missing = x.maxval
    return lambda x: np.nan if x == missing else np.float64(x)


@jit
def column_at(address, n, dtype):  # type: ignore[no-untyped-def]
    """The column [n] of a type at an address."""
    return _carray(_pointer(address), (n,), dtype)


@jit
def stretches(rows, first, stop):  # type: ignore[no-untyped-def]
    """Write where stretches of rows that follow each other begin and end; how many there are."""
    count = 0
    for i in range(rows.size):
        if i == 0 or rows[i] != rows[i - 1] + 1:
            first[count] = rows[i]
            count += 1
        stop[count - 1] = rows[i] + 1
    return count


@jit
def _clipped(x, fill, low, high, more):  # type: ignore[no-untyped-def]
    x = _number(x)
    x = fill if np.isnan(x) else x
    x = low if x < low else x
    return (high if x > high else x) + more


@jit
def _filled(column, rows, first, stop, step, fill, out):  # type: ignore[no-untyped-def]
    """out[i] = column[rows[i]], filled where it is missing and clipped; where a logarithm follows (``step[2]``: how
    often), max(., 0) + 1 of that. ``first`` and ``stop`` are the stretches of ``rows``: a loop over one takes several
    values at once."""
    low, high, more = step[0], step[1], -0.0  # which changes no value, as 0.0 would that of -0.0
    if step[2] > 0:
        low, high, more = max(low, 0.0), max(high, 0.0), 1.0
    # Unsigned, here and below: no look at whether a place counts from the end.
    if first.size * SHORT > rows.size:
        for i in range(np.uint64(rows.size)):
            out[i] = _clipped(column[np.uint64(rows[i])], fill, low, high, more)
        return
    at = np.uint64(0)
    for s in range(first.size):
        begin = np.uint64(first[s])
        count = np.uint64(stop[s]) - begin
        for i in range(count):
            out[at + i] = _clipped(column[begin + i], fill, low, high, more)
        at += count


@jit
def _flagged(column, rows, first, stop, out):  # type: ignore[no-untyped-def]
    """out[i] = 1 where column[rows[i]] is missing, else 0. As :func:`_filled`."""
    if first.size * SHORT > rows.size:
        for i in range(np.uint64(rows.size)):
            out[i] = np.isnan(_number(column[np.uint64(rows[i])]))
        return
    at = np.uint64(0)
    for s in range(first.size):
        begin = np.uint64(first[s])
        count = np.uint64(stop[s]) - begin
        for i in range(count):
            out[at + i] = np.isnan(_number(column[begin + i]))
        at += count


@jit
def _fill_rows(column, rows, first, stop, step, fill, row, flags, tile):  # type: ignore[no-untyped-def]
    _filled(column, rows, first, stop, step, fill, tile[row])
    if flags >= 0:
        _flagged(column, rows, first, stop, tile[flags])


@jit
def _fill_tile(addresses, types, n, rows, first, stop, steps, fills, order, flags, tile):  # type: ignore[no-untyped-def]
    """tile[order[c], i]: the value of column c in ``rows[i]`` as :func:`_filled` has it; tile[flags[c], i]: its flag,
    if flags[c] is not -1."""
    for c in range(addresses.size):
        address, step, fill, row, flag = addresses[c], steps[c], fills[c], order[c], flags[c]
        if types[c] == 0:
            _fill_rows(column_at(address, n, np.uint8), rows, first, stop, step, fill, row, flag, tile)
        elif types[c] == 1:
            _fill_rows(column_at(address, n, np.uint16), rows, first, stop, step, fill, row, flag, tile)
        elif types[c] == 2:
            _fill_rows(column_at(address, n, np.float32), rows, first, stop, step, fill, row, flag, tile)
        else:
            _fill_rows(column_at(address, n, np.float64), rows, first, stop, step, fill, row, flag, tile)


@jit
def write_stripe(tile, scales, places, out, at, first, last):  # type: ignore[no-untyped-def]
    """out[at + i, places[r]] = (tile[r, i] - shift) * scale, for i from ``first`` to ``last``.

    ``tile``: of :func:`tiles`; ``scales``: [R, 2] shift and scale of each of its rows; ``places`` [R].
    """
    for r in range(places.size):
        row, place, shift, scale = np.uint64(r), np.uint64(places[r]), scales[r, 0], scales[r, 1]
        for i in range(first, last):
            out[np.uint64(at + i), place] = (tile[row, np.uint64(i)] - shift) * scale


@jit
def write_tile(tile, scales, places, out, at):  # type: ignore[no-untyped-def]
    """:func:`write_stripe` of all rows of a tile."""
    for first in range(0, tile.shape[1], STRIPE):
        write_stripe(tile, scales, places, out, at, first, min(first + STRIPE, tile.shape[1]))


@jit
def narrowed(column, out):  # type: ignore[no-untyped-def]
    """Write the values [n] to ``out``, float32; whether each is what it was."""
    for begin in range(0, column.size, 256):
        changed = 0  # counted, as a loop that may end at any value takes them one by one
        for i in range(np.uint64(begin), np.uint64(min(begin + 256, column.size))):
            x = np.float64(column[i])
            y = np.float32(x)
            out[i] = y
            changed += (np.float64(y) != x) & (x == x)
        if changed:
            return False
    return True


@jit
def whole_narrowed(column, out, missing):  # type: ignore[no-untyped-def]
    """Write the values [n] to ``out``, whole numbers of few bits whose greatest, ``missing``, stands for NaN; whether
    each is below that and what it was, of which -0.0 is none."""
    top = np.float64(missing)
    for begin in range(0, column.size, 256):
        changed = 0
        for i in range(np.uint64(begin), np.uint64(min(begin + 256, column.size))):
            x = np.float64(column[i])
            absent = x != x
            # Its bits as a whole number: of -0.0 they are negative, too.
            fits = (x.view(np.int64) >= 0) & (x < top)
            y = np.int32(x if fits else top)
            out[i] = y
            changed += (not absent) & ((not fits) | (np.float64(y) != x))
        if changed:
            return False
    return True


@jit
def finite(column):  # type: ignore[no-untyped-def]
    """Whether no value is infinite; NaN is not."""
    found = 0
    for i in range(np.uint64(column.size)):
        found += np.abs(column[i]) == np.inf
    return found == 0


@jit
def nan_for_null(values, bits, offset, out):  # type: ignore[no-untyped-def]
    """out[i] = values[i], NaN where bit ``offset + i`` of ``bits``, uint8, is not set."""
    first = np.uint64(offset)
    for i in range(np.uint64(values.size)):
        at = first + i
        there = (bits[at >> np.uint64(3)] >> (at & np.uint64(7))) & 1
        out[i] = np.float64(values[i]) if there else np.nan


class Order:
    """Which row of a tile is which of D columns: first those with logarithms, those with more of them before others;
    then, behind all columns, flags of missing values.

    Args:
        steps: [D, 3] least and greatest value, and how often the logarithm is taken.
        flags: [D] whether a column has a flag; None: none has.
    """

    def __init__(self, steps: Any, flags: Any = None) -> None:
        self.values = np.empty(len(steps), np.int64)  # [D] the row of each column
        self.values[np.argsort(-steps[:, 2], kind="stable")] = np.arange(len(steps))
        self.flags = np.full(len(steps), -1, np.int64)  # [D] the row of its flag; -1: it has none
        if flags is not None:
            self.flags[flags] = len(steps) + np.arange(np.count_nonzero(flags))
        self.rows = len(steps) + int((self.flags >= 0).sum())
        self.logarithms: list[int] = []  # of how many rows one more is taken, each time
        while np.any(steps[:, 2] > len(self.logarithms)):
            self.logarithms.append(int(np.count_nonzero(steps[:, 2] > len(self.logarithms))))


def tiles(raw: Any, rows: Any, steps: Any, fills: Any, order: Order) -> Iterator[tuple[int, int, Any]]:
    """The values of ``rows`` of raw columns after fill, clip and logarithms, some rows at a time.

    NumPy takes the logarithms: several at once, where a loop over rows would take them one by one.

    Yields:
        The first row, that behind the last, and the tile [R, rows], its rows in ``order``.
    """
    columns = Columns(raw)
    held = np.empty(order.rows * min(TILE, rows.size))
    first, last = np.empty((2, min(TILE, rows.size)), np.int64)
    for begin in range(0, rows.size, TILE):
        stop = min(begin + TILE, rows.size)
        chosen = rows[begin:stop]
        tile = held[: order.rows * len(chosen)].reshape(order.rows, len(chosen))  # in one piece, for kernels
        count = stretches(chosen, first, last)
        _fill_tile(
            columns.addresses, columns.types, columns.rows, chosen, first[:count], last[:count], steps, fills,
            order.values, order.flags, tile,
        )  # fmt: skip
        for times, number in enumerate(order.logarithms):
            some = tile[:number]
            np.log(some if times == 0 else np.maximum(some, 0.0) + 1.0, out=some)
        yield begin, stop, tile
