"""The Feistel network of :mod:`stoker.dataset.reading.order` as one Numba kernel; the definition is the NumPy form
there.

A row stays in registers through all rounds, instead of in a hundred passes over memory. Import only where Numba is
installed.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from stoker.ops.codegen.jit import jit

__all__ = ["encrypt"]

# Not inlined by Numba, which would work out the types of every copy: LLVM inlines them, in half the time.
_part: Any = nb.njit


@_part
def _mix(value, key):  # type: ignore[no-untyped-def]
    # Every step is cast back: Numba widens what it computes of 32 bits to 64.
    mixed = np.uint32(value ^ key)
    mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(16)))
    mixed = np.uint32(mixed * np.uint32(0x7FEB352D))
    mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(15)))
    mixed = np.uint32(mixed * np.uint32(0x846CA68B))
    return np.uint32(mixed ^ np.uint32(mixed >> np.uint32(16)))


@_part
def _once(value, keys, low_bits, low_mask, high_mask):  # type: ignore[no-untyped-def]
    low = np.uint32(np.uint32(value) & low_mask)
    high = np.uint32(value >> low_bits)
    low = np.uint32(low ^ (_mix(high, keys[0]) & low_mask))
    high = np.uint32(high ^ (_mix(low, keys[1]) & high_mask))
    low = np.uint32(low ^ (_mix(high, keys[2]) & low_mask))
    high = np.uint32(high ^ (_mix(low, keys[3]) & high_mask))
    low = np.uint32(low ^ (_mix(high, keys[4]) & low_mask))
    high = np.uint32(high ^ (_mix(low, keys[5]) & high_mask))
    low = np.uint32(low ^ (_mix(high, keys[6]) & low_mask))
    high = np.uint32(high ^ (_mix(low, keys[7]) & high_mask))
    return (np.uint64(high) << low_bits) | np.uint64(low)


@jit
def encrypt(start, words, low_bits, low_mask, high_mask, limit, out):  # type: ignore[no-untyped-def]
    """out[i] = the place of ``start + i`` among the first ``limit``: encrypted until it falls inside."""
    keys = (words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7])
    found = out.view(np.uint64)
    # Without a branch these loops are worked out several rows at a time; those that fall outside are collected and go
    # through once more together.
    outside, values = np.empty(found.size, np.int64), np.empty(found.size, np.uint64)
    for i in range(found.size):
        found[i] = _once(np.uint64(start) + np.uint64(i), keys, low_bits, low_mask, high_mask)
    left = 0
    for i in range(found.size):
        if found[i] >= limit:
            outside[left], values[left] = i, found[i]
            left += 1
    while left > 0:
        for k in range(left):
            values[k] = _once(values[k], keys, low_bits, low_mask, high_mask)
        still = 0
        for k in range(left):
            if values[k] < limit:
                found[outside[k]] = values[k]
            else:
                outside[still], values[still] = outside[k], values[k]
                still += 1
        left = still
