"""Loops over the bags of chosen features. Import this module only where Numba is installed."""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit


@jit
def rises(offsets, count):  # type: ignore[no-untyped-def]
    """Whether offsets rise from 0 to ``count``."""
    if offsets.size == 0 or offsets[0] != 0 or offsets[offsets.size - 1] != count:
        return False
    falls = False
    for k in range(1, offsets.size):
        falls |= offsets[k] < offsets[k - 1]
    return not falls


@jit
def chosen_ends(offsets, columns, features, ends):  # type: ignore[no-untyped-def]
    """Where the chosen bags begin and end, [B * C + 1]; returns how many ids they have."""
    at, bag = 0, 0
    ends[0] = 0
    for first in range(0, offsets.size - 1, features):
        for c in range(columns.size):
            place = np.uint64(first + columns[c])
            at += offsets[place + np.uint64(1)] - offsets[place]
            bag += 1
            ends[bag] = at
    return at


@jit
def chosen_values(offsets, columns, features, values, out):  # type: ignore[no-untyped-def]
    """The values [L] of the chosen bags, one bag after the other."""
    at = np.uint64(0)
    for first in range(0, offsets.size - 1, features):
        for c in range(columns.size):
            place = np.uint64(first + columns[c])
            for k in range(offsets[place], offsets[place + np.uint64(1)]):
                out[at] = values[np.uint64(k)]
                at += np.uint64(1)
