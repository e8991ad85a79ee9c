"""Loops that write the rows of shards: ids behind codes, and dense values.

Rows are written in stripes, of which all that a row has stays in the processor's cache until it is complete.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from stoker.data.dense_kernels import STRIPE, write_stripe

__all__ = ["gather", "gather_bags", "gather_feature", "write_rows"]

_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def gather_feature(codes, lut, base, rows, first, last, out, at, place):  # type: ignore[no-untyped-def]
    """out[at + i, place] = lut[base + codes[rows[i]]], for i from ``first`` to ``last``; how many of them are 0."""
    # Unsigned: no look at whether a place counts from the end.
    unsigned_base, column = np.uint64(base), np.uint64(place)
    unknown = 0
    for i in range(first, last):
        found = lut[unsigned_base + np.uint64(codes[np.uint64(rows[np.uint64(i)])])]
        out[np.uint64(at + i), column] = found
        unknown += found == 0
    return unknown


@_jit
def _gather_stripe(codes, lut, bases, rows, first, last, out, at, zeros):  # type: ignore[no-untyped-def]
    for f in range(codes.shape[0]):
        zeros[f] += gather_feature(codes[f], lut, bases[f], rows, first, last, out, at, f)


@_jit
def gather(codes, lut, bases, rows, out, at, zeros):  # type: ignore[no-untyped-def]
    """out[at + i, f] = lut[bases[f] + codes[f, rows[i]]]; adds the ids that are 0 to ``zeros``."""
    for first in range(0, rows.size, STRIPE):
        _gather_stripe(codes, lut, bases, rows, first, min(first + STRIPE, rows.size), out, at, zeros)


@_jit
def write_rows(tile, scales, places, dense, codes, lut, bases, rows, ids, known, labels, at, zeros):  # type: ignore[no-untyped-def]
    """Write dense values, ids and labels of some rows to ``dense``, ``ids`` and ``labels`` from row ``at``.

    ``tile``, ``scales``, ``places`` as of :func:`stoker.data.dense_kernels.write_stripe`; ``codes``, ``lut``, ``bases``
    and ``zeros`` as of :func:`gather`; ``known``: labels of the part.
    """
    for first in range(0, rows.size, STRIPE):
        last = min(first + STRIPE, rows.size)
        write_stripe(tile, scales, places, dense, at, first, last)
        _gather_stripe(codes, lut, bases, rows, first, last, ids, at, zeros)
        for i in range(first, last):
            labels[np.uint64(at + i)] = known[np.uint64(rows[np.uint64(i)])]


@_jit
def gather_bags(  # type: ignore[no-untyped-def]
    one_hot, slots, flat, flat_base, bags, bag_base, lut, bases, rows, lengths, row_starts, out, zeros
):
    """Write the ids of all bags of the rows, sample-major. ``slots[f]``: row of ``one_hot``, or -1 - bag."""
    features = slots.size
    for i in range(rows.size):
        at = row_starts[i]
        for f in range(features):
            if slots[f] >= 0:
                out[at] = lut[bases[f] + one_hot[slots[f], rows[i]]]
                zeros[f] += out[at] == 0
                at += 1
            else:
                s = -1 - slots[f]
                begin = flat_base[s] + bags[bag_base[s] + rows[i]]
                for k in range(lengths[i, f]):
                    out[at] = lut[bases[f] + flat[begin + k]]
                    zeros[f] += out[at] == 0
                    at += 1
