"""Number the distinct values of a block, and hash values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.ops.codegen.jit import jit

Array = npt.NDArray[Any]
_SMALL = 2**14  # slots of a hash table that fits a core's cache


def number_ints(column: pl.Series) -> tuple[Array, Array]:
    """Return the number of each int64 value, uint32 [n], and the distinct values.

    Numbers count from 1 by first occurrence; 0 is null.
    """
    array = (column.rechunk() if column.n_chunks() > 1 else column).to_arrow()
    valid, data = array.buffers()
    bits = np.frombuffer(valid if column.null_count() else b"", np.uint8)
    values = np.frombuffer(data, np.int64)[array.offset :]
    codes, distinct = np.empty(len(column), np.uint32), np.empty(len(column), np.int64)
    size = 1 << max(4, (2 * len(codes)).bit_length())
    for slots in (min(size, _SMALL), size):  # most columns have few values: first try a table that fits the cache
        found = _number(values, bits, array.offset, codes, distinct, np.full(slots, -1, np.int32))
        if found >= 0:
            break
    return codes, distinct[:found].copy()


@jit
def _number(values, bits, first, codes, distinct, table):  # type: ignore[no-untyped-def]
    """Assign numbers to values; return how many are distinct, or -1 if more than half of ``table`` would be full.

    ``bits``, from bit ``first`` on, are cleared where a value is missing; ``bits`` is empty if none is missing.
    """
    mask = np.uint64(table.size - 1)
    found = 0
    for i in range(codes.size):
        bit = first + i
        if bits.size > 0 and not (bits[bit >> 3] >> (bit & 7)) & 1:
            codes[i] = 0
            continue
        value = values[i]
        mixed = np.uint64(value) * np.uint64(0x9E3779B97F4A7C15)
        at = (mixed ^ (mixed >> np.uint64(32))) & mask
        while True:
            entry = table[at]
            if entry < 0:
                table[at] = found
                distinct[found] = value
                entry = found
                found += 1
                if found * 2 > table.size:
                    return -1
                break
            if distinct[entry] == value:
                break
            at = (at + np.uint64(1)) & mask
        codes[i] = entry + 1
    return found


def number_texts(texts: pl.Series) -> tuple[Array, Array, Array]:
    """Return the numbers of texts as :func:`number_ints` does, the bytes of the D distinct texts, and D + 1 ends."""
    found = texts.to_arrow(compat_level=pl.CompatLevel.oldest()).dictionary_encode()
    indices = found.indices.fill_null(-1) if found.indices.null_count else found.indices
    codes = np.add(values_of(indices, np.int32), 1, dtype=np.uint32, casting="unsafe")
    _, offsets, data = found.dictionary.buffers()
    ends = np.zeros(1, np.int64)
    if len(found.dictionary):
        ends = np.frombuffer(offsets, np.int64)[: len(found.dictionary) + 1].copy()
    return codes, np.frombuffer(data or b"", np.uint8)[: ends[-1]].copy(), ends


def values_of(array: Any, kind: Any) -> Array:
    """Return the numbers of an Arrow array without nulls as a view; its own conversion imports pandas."""
    data = array.buffers()[1]
    return np.frombuffer(data if data is not None else b"", kind)[array.offset :][: len(array)]


def text_hashes(texts: pl.Series, seed: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each text [n] (FNV-1a, then the splitmix64 finisher); 0 for a missing text."""
    codes, data, ends = number_texts(texts)
    each: npt.NDArray[np.uint64] = np.append(np.uint64(0), hash_spans(data, ends, seed))[codes]
    return each


def hash_spans(data: Array, ends: Array, seed: int) -> npt.NDArray[np.uint64]:
    """Return the hash of each of the D texts that :func:`number_texts` found."""
    hashes = np.zeros(len(ends) - 1, np.uint64)
    _hash_spans(data, ends, seed, hashes)
    return hashes


@jit
def _hash_spans(data, ends, seed, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = _hash(data, ends[i], ends[i + 1], seed)


@jit
def _hash(data, begin, end, seed):  # type: ignore[no-untyped-def]
    h = np.uint64(14695981039346656037) ^ np.uint64(seed)
    for p in range(begin, end):
        h = (h ^ np.uint64(data[p])) * np.uint64(1099511628211)
    h ^= h >> np.uint64(30)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def spans_of(texts: Any) -> tuple[Array, Array]:
    """Return the bytes of an Arrow array of large strings, and the n + 1 ends of its texts, as views."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset :][: len(texts) + 1] if len(texts) else np.zeros(1, np.int64)
    return np.frombuffer(data if data is not None else b"", np.uint8), ends


@jit
def find_texts(data, ends, bits, first, known, out):  # type: ignore[no-untyped-def]
    """Write the id of each text into ``out`` [n], 0 for one that is missing or not known.

    ``bits``, from bit ``first`` on, are cleared where a text is missing; ``bits`` is empty if none is missing.
    ``known`` has the hashes of the known texts in rising order, their ids, their bytes and ends.
    """
    keys, ids, others, other_ends = known
    for i in range(out.size):
        out[i] = 0
        bit = first + i
        if bits.size > 0 and not (bits[bit >> 3] >> (bit & 7)) & 1:
            continue
        begin, size = ends[i], ends[i + 1] - ends[i]
        key = _hash(data, begin, ends[i + 1], 0)
        low, high = 0, keys.size
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] < key:
                low = middle + 1
            else:
                high = middle
        while low < keys.size and keys[low] == key:
            other = other_ends[low]
            if other_ends[low + 1] - other == size and other >= 0 and other + size <= others.size:
                p = 0
                while p < size and data[begin + p] == others[other + p]:
                    p += 1
                if p == size:
                    out[i] = ids[low]
                    break
            low += 1


def hashes_of(keys: pl.Series) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each text or int64 number [n]; any for a missing one."""
    return text_hashes(keys, 0) if keys.dtype == pl.String else splitmix(keys.fill_null(0).to_numpy().view(np.uint64))


def splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64 of each uint64, the hash for ``hash_buckets`` of numbers and for row sampling."""
    with np.errstate(over="ignore"):
        h = values + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = h ^ (h >> np.uint64(31))
        return mixed
