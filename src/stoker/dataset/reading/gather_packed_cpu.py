"""Numba kernel that unpacks scattered packed rows into one batch. Import this module only where Numba is installed.

Records are fetched a stripe at a time and unpacked field by field, as a loop over one field of many rows has nothing to
ask of each; while that goes on, the records of the next stripe are on their way.
"""

# mypy: disable-error-code="call-arg, no-untyped-call, var-annotated, unreachable"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from stoker.dataset.reading.gather_cpu import prefetch_at, shard_of, word_at
from stoker.ops.codegen.llvm_memory import fetch_add
from stoker.ops.codegen.native import Kernel, arguments, thread_index

__all__ = ["BLOCK", "STRIPE", "unpack_rows"]

STRIPE = 64  # rows that are unpacked together
BLOCK = 1024  # rows that a thread takes at a time
_EACH = 4  # rows asked for before each field
_LINE = 64  # bytes of a cache line


@njit(nogil=True, inline="always")
def _ask(addresses: Any, asked: int, stop: int, size: int) -> Any:
    """Start loading some of the records up to ``stop``; up to where that is done."""
    until = min(asked + _EACH, stop)
    for i in range(np.uint64(asked), np.uint64(until)):
        for line in range(0, size, _LINE):
            prefetch_at(addresses[i] + line)
        prefetch_at(addresses[i] + size - 1)
    return until


@njit(nogil=True, inline="always")
def _look_up(numbers: Any, count: int, place: int, tables: Any, begin: int, dense: Any, at: int, column: int) -> None:
    """The values behind codes."""
    source, base, target = np.uint64(place), np.uint64(begin), np.uint64(column)
    for i in range(np.uint64(count)):
        dense[np.uint64(at) + i, target] = tables[base + np.uint64(numbers[i, source])]


@njit(nogil=True, inline="always")
def _flag(numbers: Any, count: int, place: int, dense: Any, at: int, column: int) -> None:
    """Which codes are 0."""
    source, target = np.uint64(place), np.uint64(column)
    for i in range(np.uint64(count)):
        dense[np.uint64(at) + i, target] = np.float32(numbers[i, source] == 0)


@njit(nogil=True, inline="always")
def _take(numbers: Any, count: int, place: int, out: Any, at: int, column: int) -> None:
    """Numbers as they are."""
    source, target = np.uint64(place), np.uint64(column)
    for i in range(np.uint64(count)):
        out[np.uint64(at) + i, target] = numbers[i, source]


def _unpack_rows(p):  # type: ignore[no-untyped-def]
    (
        rows, starts, mean, sources, size, tables, coded8, coded16, plain, flags, ids8, ids16, ids32, ids64, labels32,
        labels8, dense, ids, labels, all_bytes, all_shorts, all_words, all_longs, all_floats, addresses, cursor, block,
    ) = arguments(p)  # fmt: skip
    me = thread_index(p)
    records, shorts, words, longs, floats = all_bytes[me], all_shorts[me], all_words[me], all_longs[me], all_floats[me]
    while True:
        begin = fetch_add(cursor, block)
        if begin >= len(rows):
            return
        stop = min(begin + block, len(rows))
        for i in range(begin, stop):
            row = rows[i]
            shard = shard_of(row, starts, mean)
            addresses[np.uint64(i)] = sources[shard] + (row - starts[shard]) * size
        asked = begin
        while asked < min(begin + STRIPE, stop):
            asked = _ask(addresses, asked, min(begin + STRIPE, stop), size)
        for at in range(begin, stop, STRIPE):
            count = min(STRIPE, stop - at)
            for i in range(np.uint64(count)):
                source = word_at(addresses[np.uint64(at) + i])
                for word in range(np.uint64(size // 8)):
                    longs[i, word] = source[word]
            asked, later = at + count, min(at + 2 * STRIPE, stop)
            for k in range(coded8.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _look_up(records, count, coded8[k, 0], tables, coded8[k, 1], dense, at, coded8[k, 2])
                if coded8[k, 3] >= 0:
                    _flag(records, count, coded8[k, 0], dense, at, coded8[k, 3])
            for k in range(coded16.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _look_up(shorts, count, coded16[k, 0], tables, coded16[k, 1], dense, at, coded16[k, 2])
                if coded16[k, 3] >= 0:
                    _flag(shorts, count, coded16[k, 0], dense, at, coded16[k, 3])
            for k in range(plain.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _take(floats, count, plain[k, 0], dense, at, plain[k, 1])
            for k in range(flags.shape[0]):
                _take(records, count, flags[k, 0], dense, at, flags[k, 1])
            for k in range(ids8.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _take(records, count, ids8[k, 0], ids, at, ids8[k, 1])
            for k in range(ids16.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _take(shorts, count, ids16[k, 0], ids, at, ids16[k, 1])
            for k in range(ids32.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _take(words, count, ids32[k, 0], ids, at, ids32[k, 1])
            for k in range(ids64.shape[0]):
                asked = _ask(addresses, asked, later, size)
                _take(longs, count, ids64[k, 0], ids, at, ids64[k, 1])
            while asked < later:
                asked = _ask(addresses, asked, later, size)
            for k in range(labels32.shape[0]):
                for i in range(np.uint64(count)):
                    labels[np.uint64(at) + i] = floats[i, np.uint64(labels32[k, 0])]
            for k in range(labels8.shape[0]):
                for i in range(np.uint64(count)):
                    labels[np.uint64(at) + i] = records[i, np.uint64(labels8[k, 0])]


unpack_rows = Kernel(_unpack_rows)
