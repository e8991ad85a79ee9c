"""Loops over dense columns [D, n], float64 and NaN where missing: what rows teach, and what the model sees of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba as nb
import numpy as np

from stoker.data.exact_sums import add_values, no_values, room

__all__ = ["DIGITS", "apply_rows", "count_digits", "moments", "present_sums"]

_jit: Any = nb.njit(nogil=True, cache=True)
_STRIPE = 256  # rows written together, so that the row-major output stays in cache
_TILE = 2**13  # rows whose logarithms are taken together; all their columns stay in cache
DIGITS = 2**16  # counters of one digit of a float64
_SIGN = np.uint64(2**63)


@_jit
def filled(raw, rows, begin, stop, steps, fills, tile):  # type: ignore[no-untyped-def]
    """tile[c, i] = raw[c, rows[begin + i]], filled where it is missing and clipped; where a logarithm follows
    (``steps[c, 2]``: how often), max(., 0) + 1 of that."""
    for c in range(raw.shape[0]):
        low, high, fill = steps[c, 0], steps[c, 1], fills[c]
        log = steps[c, 2] > 0
        for i in range(begin, stop):
            x = raw[c, rows[i]]
            if np.isnan(x):
                x = fill
            x = min(max(x, low), high)
            tile[c, i - begin] = max(x, 0.0) + 1.0 if log else x


@_jit
def written(raw, rows, begin, stop, tile, fits, places, flags, out, at):  # type: ignore[no-untyped-def]
    """out[at + i, places[c]] = (tile[c, i] - shift) * scale; a flag of what was missing behind it where flags[c]."""
    for first in range(begin, stop, _STRIPE):
        last = min(first + _STRIPE, stop)
        for c in range(raw.shape[0]):
            place, shift, scale = places[c], fits[c, 1], fits[c, 2]
            for i in range(first, last):
                out[at + i, place] = (tile[c, i - begin] - shift) * scale
            if flags[c]:
                for i in range(first, last):
                    out[at + i, place + 1] = np.isnan(raw[c, rows[i]])


def tiles(raw: Any, rows: Any, steps: Any, fills: Any) -> Iterator[tuple[int, int, Any]]:
    """The values of ``rows`` after fill, clip and logarithms, some rows at a time: first, behind the last, [D, rows].

    NumPy takes the logarithms: several at once, where a loop over rows would take them one by one.
    """
    held = np.empty((raw.shape[0], min(_TILE, rows.size)))
    for begin in range(0, rows.size, _TILE):
        stop = min(begin + _TILE, rows.size)
        tile = held[:, : stop - begin]
        filled(raw, rows, begin, stop, steps, fills, tile)
        for c in np.flatnonzero(steps[:, 2]):
            np.log(tile[c], out=tile[c])
            for _ in range(int(steps[c, 2]) - 1):
                np.log(np.maximum(tile[c], 0.0) + 1.0, out=tile[c])
        yield begin, stop, tile


def apply_rows(raw: Any, rows: Any, steps: Any, fits: Any, places: Any, flags: Any, out: Any, at: int) -> None:
    """out[at + i, places[c]] = (steps of raw[c, rows[i]] - shift) * scale; a flag of what was missing behind it.

    ``steps`` [D, 3]: low, high and how often the logarithm is taken; ``fits`` [D, 3]: fill, shift and scale; ``flags``
    [D]: whether a flag follows.
    """
    for begin, stop, tile in tiles(raw, rows, steps, np.ascontiguousarray(fits[:, 0])):
        written(raw, rows, begin, stop, tile, fits, places, flags, out, at)


def moments(raw: Any, rows: Any, steps: Any, fills: Any, summed: Any) -> tuple[Any, Any, Any]:
    """What ``rows`` teach of each column's values after its steps.

    Returns: [D, L] exact sums, of no values where ``summed`` [D] is false, and [D] least and [D] greatest values.
    """
    sums, held = no_values(raw.shape[0]), room()
    low, high = np.full(raw.shape[0], np.inf), np.full(raw.shape[0], -np.inf)
    for _, _, tile in tiles(raw, rows, steps, fills):
        for c in np.flatnonzero(summed):
            add_values(tile[c], sums[c], held)
        low, high = np.minimum(low, tile.min(axis=1)), np.maximum(high, tile.max(axis=1))
    return sums, low, high


def present_sums(raw: Any, rows: Any, columns: Any) -> Any:
    """[K, L] exact sums of the values of some columns that are there, over ``rows``."""
    sums, held = no_values(columns.size), room()
    found = np.empty(min(_TILE, rows.size))
    for k, c in enumerate(columns):
        for begin in range(0, rows.size, _TILE):
            count = present(raw[c], rows[begin : begin + _TILE], found)
            add_values(found[:count], sums[k], held)
    return sums


@_jit
def present(column, rows, out):  # type: ignore[no-untyped-def]
    """Write the values of ``rows`` that are there to the front of ``out``; how many there are."""
    count = 0
    for row in rows:
        out[count] = column[row]
        count += not np.isnan(column[row])
    return count


@_jit
def count_digits(raw, rows, columns, shift, prefixes, bins):  # type: ignore[no-untyped-def]
    """Count a digit of 16 bits of the values that begin with a prefix, whose unsigned order is that of the values.

    ``prefixes`` [K, P]: the bits above the digit, of each column that is looked at; ``bins`` [K, P, 2**16].
    """
    digit = np.uint64(shift)
    for k in range(columns.size):
        column = raw[columns[k]]
        for i in range(rows.size):
            x = column[rows[i]]
            if np.isnan(x):
                continue
            bits = np.float64(x + 0.0).view(np.uint64)
            bits = ~bits if bits & _SIGN else bits | _SIGN
            place = np.int64((bits >> digit) & np.uint64(DIGITS - 1))
            if shift == 48:
                bins[k, 0, place] += 1
                continue
            above = bits >> (digit + np.uint64(16))
            for p in range(prefixes.shape[1]):
                if above == prefixes[k, p]:
                    bins[k, p, place] += 1
