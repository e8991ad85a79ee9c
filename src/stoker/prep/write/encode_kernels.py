"""Loops that write the rows of shards: ids behind codes, and dense values.

Rows are written in stripes, of which all that a row has stays in the processor's cache until it is complete.
"""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.prep.fit.dense_kernels import STRIPE, column_at, write_stripe

__all__ = ["gather", "gather_bags", "write_rows"]


@jit
def _code_at(address, kind, n, row):  # type: ignore[no-untyped-def]
    """The code of a row."""
    if kind == 0:
        return np.uint64(column_at(address, n, np.uint8)[np.uint64(row)])
    if kind == 1:
        return np.uint64(column_at(address, n, np.uint16)[np.uint64(row)])
    return np.uint64(column_at(address, n, np.uint32)[np.uint64(row)])


@jit
def _gather_codes(codes, lut, base, rows, first, last, out, at, place):  # type: ignore[no-untyped-def]
    # Unsigned: no look at whether a place counts from the end.
    unsigned_base, column = np.uint64(base), np.uint64(place)
    unknown = 0
    for i in range(first, last):
        found = lut[unsigned_base + np.uint64(codes[np.uint64(rows[np.uint64(i)])])]
        out[np.uint64(at + i), column] = found
        unknown += found == 0
    return unknown


@jit
def _gather_feature(address, kind, n, lut, base, rows, first, last, out, at, place):  # type: ignore[no-untyped-def]
    """out[at + i, place] = lut[base + codes[rows[i]]], for i from ``first`` to ``last``; how many of them are 0."""
    if kind == 0:
        return _gather_codes(column_at(address, n, np.uint8), lut, base, rows, first, last, out, at, place)
    if kind == 1:
        return _gather_codes(column_at(address, n, np.uint16), lut, base, rows, first, last, out, at, place)
    return _gather_codes(column_at(address, n, np.uint32), lut, base, rows, first, last, out, at, place)


@jit
def _gather_stripe(addresses, types, n, lut, bases, rows, first, last, out, at, zeros):  # type: ignore[no-untyped-def]
    for f in range(addresses.size):
        zeros[f] += _gather_feature(addresses[f], types[f], n, lut, bases[f], rows, first, last, out, at, f)


@jit
def gather(addresses, types, n, lut, bases, rows, out, at, zeros):  # type: ignore[no-untyped-def]
    """out[at + i, f] = lut[bases[f] + codes[f, rows[i]]]; adds the ids that are 0 to ``zeros``.

    ``addresses``, ``types`` and ``n``: codes, as :class:`stoker.prep.parse.code_columns.CodeColumns` has them.
    """
    for first in range(0, rows.size, STRIPE):
        last = min(first + STRIPE, rows.size)
        _gather_stripe(addresses, types, n, lut, bases, rows, first, last, out, at, zeros)


@jit
def write_rows(  # type: ignore[no-untyped-def]
    tile, scales, places, dense, addresses, types, n, lut, bases, rows, ids, known, labels, at, zeros
):
    """Write dense values, ids and labels of some rows to ``dense``, ``ids`` and ``labels`` from row ``at``.

    ``tile``, ``scales``, ``places`` as of :func:`stoker.prep.fit.dense_kernels.write_stripe`; ``addresses`` to
    ``bases`` and ``zeros`` as of :func:`gather`; ``known``: labels of the part.
    """
    for first in range(0, rows.size, STRIPE):
        last = min(first + STRIPE, rows.size)
        write_stripe(tile, scales, places, dense, at, first, last)
        _gather_stripe(addresses, types, n, lut, bases, rows, first, last, ids, at, zeros)
        for i in range(first, last):
            labels[np.uint64(at + i)] = known[np.uint64(rows[np.uint64(i)])]


@jit
def gather_bags(  # type: ignore[no-untyped-def]
    addresses, types, n, slots, flat, flat_base, bags, bag_base, lut, bases, rows, lengths, row_starts, out, zeros
):
    """Write the ids of all bags of the rows, sample-major. ``slots[f]``: which of the columns of codes, or -1 - bag."""
    features = slots.size
    for i in range(rows.size):
        at = row_starts[i]
        for f in range(features):
            if slots[f] >= 0:
                code = _code_at(addresses[slots[f]], types[slots[f]], n, rows[i])
                out[at] = lut[np.uint64(bases[f]) + code]
                zeros[f] += out[at] == 0
                at += 1
            else:
                s = -1 - slots[f]
                begin = flat_base[s] + bags[bag_base[s] + rows[i]]
                for k in range(lengths[i, f]):
                    out[at] = lut[bases[f] + flat[begin + k]]
                    zeros[f] += out[at] == 0
                    at += 1
