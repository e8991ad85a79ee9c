"""The distinct values of a block: each row's number, and the values by number; and hashes of values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from stoker.ops.codegen.jit import jit

__all__ = ["number_ints", "number_texts", "splitmix", "text_hashes"]

Array = npt.NDArray[Any]


def number_ints(values: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the number of each value, uint32 [n], and the distinct values.

    They count from 1 by first occurrence; 0 is missing.
    """
    codes, distinct = _numbered(pa.array(values, mask=missing if missing.any() else None))
    return codes, distinct.to_numpy().copy()


def number_texts(texts: pl.Series) -> tuple[Array, Array, Array]:
    """Return the numbers of texts, as :func:`number_ints`; the bytes of the D distinct ones; and their D + 1 ends."""
    codes, distinct = _numbered(texts.to_arrow(compat_level=pl.CompatLevel.oldest()))
    _, offsets, data = distinct.buffers()
    ends = np.frombuffer(offsets, np.int64)[: len(distinct) + 1].copy() if len(distinct) else np.zeros(1, np.int64)
    held = np.frombuffer(data, np.uint8)[: ends[-1]].copy() if ends[-1] else np.empty(0, np.uint8)
    return codes, held, ends


def _numbered(array: Any) -> tuple[Array, Any]:
    found = array.dictionary_encode()
    codes = found.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.add(codes, 1, dtype=np.uint32, casting="unsafe"), found.dictionary


def text_hashes(texts: pl.Series, seed: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each text [n] (FNV-1a, then the splitmix64 finisher); 0 where it is missing."""
    codes, data, ends = number_texts(texts)
    hashes = np.zeros(len(ends), np.uint64)
    _hash_spans(data, ends, seed, hashes[1:])
    each: npt.NDArray[np.uint64] = hashes[codes]
    return each


@jit
def _hash_spans(data, ends, seed, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        h = np.uint64(14695981039346656037) ^ np.uint64(seed)
        for p in range(ends[i], ends[i + 1]):
            h = (h ^ np.uint64(data[p])) * np.uint64(1099511628211)
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        out[i] = h ^ (h >> np.uint64(31))


def splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64 of each uint64: the hash behind ``hash_buckets`` of numbers and behind row sampling."""
    with np.errstate(over="ignore"):
        h = values + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = h ^ (h >> np.uint64(31))
        return mixed
