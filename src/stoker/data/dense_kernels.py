"""Loops over D dense columns [n], NaN where missing: what rows teach, and what the model sees of them.

A column is float64, or float32 where that holds all its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba as nb
import numpy as np

from stoker.data.exact_sums import add_values, no_values, room

__all__ = ["DIGITS", "apply_rows", "count_digits", "moments", "narrowed", "present_sums"]

_jit: Any = nb.njit(nogil=True, cache=True)
_STRIPE = 256  # rows written together, so that the row-major output stays in cache
_TILE = 2**13  # rows whose logarithms are taken together; all their columns stay in cache
DIGITS = 2**16  # counters of one digit of a float64
_SIGN = np.uint64(2**63)


@_jit
def filled(column, rows, step, fill, out):  # type: ignore[no-untyped-def]
    """out[i] = column[rows[i]], filled where it is missing and clipped; where a logarithm follows (``step[2]``: how
    often), max(., 0) + 1 of that."""
    low, high, more = step[0], step[1], -0.0  # which changes no value, as 0.0 would that of -0.0
    if step[2] > 0:
        low, high, more = max(low, 0.0), max(high, 0.0), 1.0
    for i in range(np.uint64(rows.size)):  # unsigned, here and below: no look at whether a place counts from the end
        x = np.float64(column[np.uint64(rows[i])])
        x = fill if np.isnan(x) else x
        x = low if x < low else x
        out[i] = (high if x > high else x) + more


@_jit
def written(tile, fits, places, out, at):  # type: ignore[no-untyped-def]
    """out[at + i, places[c]] = (tile[c, i] - shift) * scale."""
    columns, count = tile.shape
    for first in range(0, count, _STRIPE):
        last = min(first + _STRIPE, count)
        for c in range(columns):
            place, shift, scale = np.uint64(places[c]), fits[c, 1], fits[c, 2]
            for i in range(first, last):
                out[np.uint64(at + i), place] = (tile[np.uint64(c), np.uint64(i)] - shift) * scale


@_jit
def flagged(column, rows, out, at, place):  # type: ignore[no-untyped-def]
    """out[at + i, place] = 1 where column[rows[i]] is missing, else 0."""
    for i in range(rows.size):
        out[at + i, place] = np.isnan(column[rows[i]])


@_jit
def narrowed(column, out):  # type: ignore[no-untyped-def]
    """Write the values [n] to ``out``, float32; whether each is what it was."""
    for begin in range(0, column.size, _STRIPE):
        changed = 0  # counted, as a loop that may end at any value takes them one by one
        for i in range(np.uint64(begin), np.uint64(min(begin + _STRIPE, column.size))):
            x = column[i]
            y = np.float32(x)
            out[i] = y
            changed += (np.float64(y) != x) & (x == x)
        if changed:
            return False
    return True


def tiles(raw: Any, rows: Any, steps: Any, fills: Any) -> Iterator[tuple[int, int, Any]]:
    """The values of ``rows`` after fill, clip and logarithms, some rows at a time: first, behind the last, [D, rows].

    NumPy takes the logarithms: several at once, where a loop over rows would take them one by one.
    """
    held = np.empty((len(raw), min(_TILE, rows.size)))
    for begin in range(0, rows.size, _TILE):
        stop = min(begin + _TILE, rows.size)
        tile = held[:, : stop - begin]
        for column, step, fill, values in zip(raw, steps, fills, tile, strict=True):
            filled(column, rows[begin:stop], step, fill, values)
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
    for begin, stop, tile in tiles(raw, rows, steps, fits[:, 0]):
        written(tile, fits, places, out, at + begin)
        for c in np.flatnonzero(flags):
            flagged(raw[c], rows[begin:stop], out, at + begin, places[c] + 1)


def moments(raw: Any, rows: Any, steps: Any, fills: Any, summed: Any, ranged: Any) -> tuple[Any, Any, Any]:
    """What ``rows`` teach of each column's values after its steps.

    Returns: [D, L] exact sums, of no values where ``summed`` [D] is false, and [D] least and [D] greatest values, inf
    and -inf where ``ranged`` [D] is false.
    """
    sums, held = no_values(len(raw)), room()
    low, high = np.full(len(raw), np.inf), np.full(len(raw), -np.inf)
    for _, _, tile in tiles(raw, rows, steps, fills):
        for c in np.flatnonzero(summed):
            add_values(tile[c], sums[c], held)
        for c in np.flatnonzero(ranged):
            low[c], high[c] = min(low[c], tile[c].min()), max(high[c], tile[c].max())
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


def count_digits(raw: Any, rows: Any, columns: Any, shift: int, prefixes: Any, bins: Any) -> None:
    """Count a digit of 16 bits of the values that begin with a prefix, whose unsigned order is that of the values.

    ``prefixes`` [K, P]: the bits above the digit, of each column that is looked at; ``bins`` [K, P, 2**16].
    """
    for k, c in enumerate(columns):
        digits_of(raw[c], rows, shift, prefixes[k], bins[k])


@_jit
def digits_of(column, rows, shift, prefixes, bins):  # type: ignore[no-untyped-def]
    digit = np.uint64(shift)
    for i in range(rows.size):
        x = np.float64(column[np.uint64(rows[i])])
        if np.isnan(x):
            continue
        bits = np.float64(x + 0.0).view(np.uint64)
        bits = ~bits if bits & _SIGN else bits | _SIGN
        place = np.int64((bits >> digit) & np.uint64(DIGITS - 1))
        if shift == 48:
            bins[0, place] += 1
            continue
        above = bits >> (digit + np.uint64(16))
        for p in range(prefixes.size):
            if above == prefixes[p]:
                bins[p, place] += 1
