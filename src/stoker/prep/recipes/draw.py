"""Random numbers by counter: a value depends on the seed, the column and the row only.

So a log can be generated from any row, in blocks of any size and by several processes, with the same result. The
generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), read at position ``row`` of a stream whose start is a hash
of the seed and the column's name.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from stoker.dataset.order import mix32

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def key_of(seed: int, *names: str | int) -> int:
    """Return the start of the stream for ``seed`` and a column's name, 64 bits."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def bits(key: int, counters: NDArray) -> NDArray[np.uint64]:
    """Return 64 random bits for each counter [n]: a row, or an id if the value should depend on the id."""
    z = counters.astype(np.uint64)
    z *= _GOLDEN
    z += np.uint64(key)
    z ^= z >> _S30
    z *= _MIX1
    z ^= z >> _S27
    z *= _MIX2
    z ^= z >> _S31
    return z


def uniform(key: int, counters: NDArray) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), 53 bits, [n]."""
    return np.asarray((bits(key, counters) >> _S11) * 2.0**-53, dtype=np.float64)


def integers(key: int, counters: NDArray, below: int) -> NDArray[np.int64]:
    """Return whole numbers in [0, below), [n]; below is at most 2**32."""
    return ((bits(key, counters) >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int64)


def normal(key: int, counters: NDArray) -> NDArray[np.float32]:
    """Return nearly normal numbers with mean 0 and variance 1: the sum of four uniforms (at most 3.46 in size), [n]."""
    quarters = bits(key, counters).view(np.uint16).reshape(-1, 4)
    total = quarters[:, 0].astype(np.float32)
    for column in range(1, 4):
        total += quarters[:, column]
    total -= np.float32(2 * 65535)
    total *= np.float32(1 / (65536 * (4 / 12) ** 0.5))
    return total


def scatter32(key: int, ids: NDArray) -> NDArray[np.uint32]:
    """Return a one-to-one map of 32-bit ids onto 32-bit values, so that distinct ids keep distinct values, [n]."""
    return mix32(ids.astype(np.uint32) + np.uint32(key & 0xFFFFFFFF), np.uint32(0))
