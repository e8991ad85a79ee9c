"""Numba kernels that read a dataset: copy rows from addresses, and compute the order of an epoch.

:mod:`stoker.dataset.gather` and :mod:`stoker.dataset.order` define the results in NumPy. Import this module only if
Numba is installed.
"""

# mypy: disable-error-code="call-arg, no-untyped-call, no-untyped-def, var-annotated, unreachable"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import bytes_move, fetch_add, prefetch_bytes
from stoker.ops.codegen.native import Kernel, arguments, shared

_AHEAD = 16  # rows to prefetch ahead of the copy
_BLOCK = 512  # rows of a work item: fewer are not worth a second thread
# Numba does not inline it, or it would infer the types of every copy. LLVM inlines them, in half the time.
_part: Any = numba.njit


def _copy_rows(p):
    origin, zero, shard, first, sizes, places, sources, widths, targets, cursor, block = arguments(p)
    while True:
        begin = fetch_add(cursor, block)
        if begin >= len(shard):
            return
        stop = min(begin + block, len(shard))
        for i in range(begin, stop):
            if i + _AHEAD < stop:  # so that the cache misses of random rows overlap
                later = i + _AHEAD
                for kind in range(len(widths)):
                    size = sizes[later] * widths[kind]
                    at = sources[kind, np.uint64(shard[later])] - zero + first[later] * widths[kind]
                    prefetch_bytes(size, origin, at)
                    prefetch_bytes(1, origin, at + size - 1)
            for kind in range(len(widths)):
                at = sources[kind, np.uint64(shard[i])] - zero + first[i] * widths[kind]
                target = targets[kind] - zero + places[i] * widths[kind]
                bytes_move(sizes[i] * widths[kind], origin, target, origin, at)


_kernel = Kernel(_copy_rows)
_origin = np.zeros(1, np.uint8)  # addresses are offsets from here
_zero = _origin.ctypes.data


def copy_rows(slices: tuple[Any, Any, Any, Any], sources: Any, widths: Any, targets: Any, *, threads: int) -> None:
    """Copy B slices of each of K tensors; ``threads`` above 1 are torch's.

    Args:
        slices: [B] shard of each slice, its first row, its rows, and its first row in the target, int64.
        sources: [K, S] address of row 0 of each tensor, by the numbers of the rows of each shard, int64.
        widths: [K] bytes of a row, int64.
        targets: [K] addresses to fill, int64.
        threads: at most; no more than there is work for.
    """
    threads = max(1, min(threads, len(slices[0]) // _BLOCK))
    cursor = np.zeros(1, np.int64)
    _kernel.run(_origin, _zero, *slices, sources, widths, targets, cursor, _BLOCK, threads=threads)


@lru_cache(maxsize=64)
def _packed_kernel(row: int, one: int, two: int, three: int) -> Kernel:
    """Make the kernel of :func:`copy_packed`, which knows the sizes: LLVM copies so many bytes without a call."""
    both = one + two

    def copy(p):
        packed, rows, origin, first_out, second_out, third_out, cursor, block = arguments(p)
        for i in shared(cursor, block, len(rows)):
            if i + _AHEAD < len(rows):
                later = rows[i + _AHEAD] * row
                prefetch_bytes(row, packed, later)
                prefetch_bytes(1, packed, later + row - 1)
            at = rows[i] * row
            bytes_move(one, origin, first_out + i * one, packed, at)
            bytes_move(two, origin, second_out + i * two, packed, at + one)
            bytes_move(three, origin, third_out + i * three, packed, at + both)

    return Kernel(copy)


def copy_packed(packed: Any, row: int, widths: list[int], rows: Any, targets: list[int], *, threads: int) -> None:
    """Copy B packed rows, which begin with the values of three tensors, to these; ``threads`` above 1 are torch's.

    Args:
        packed: their bytes [n * row] uint8.
        row: bytes of a packed row.
        widths: bytes of it for each tensor.
        rows: [B] int64.
        targets: addresses to fill.
        threads: at most; no more than there is work for.
    """
    threads = max(1, min(threads, len(rows) // _BLOCK))
    places = [target - _zero for target in targets]
    _packed_kernel(row, *widths).run(packed, rows, _origin, *places, np.zeros(1, np.int64), _BLOCK, threads=threads)


@_part
def _mix(value, key):
    # Every step casts back: Numba widens results of 32-bit arithmetic to 64 bits.
    mixed = np.uint32(value ^ key)
    mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(16)))
    mixed = np.uint32(mixed * np.uint32(0x7FEB352D))
    mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(15)))
    mixed = np.uint32(mixed * np.uint32(0x846CA68B))
    return np.uint32(mixed ^ np.uint32(mixed >> np.uint32(16)))


@_part
def _once(value, keys, low_bits, low_mask, high_mask):
    low = np.uint32(np.uint32(value) & low_mask)
    high = np.uint32(value >> low_bits)
    for pair in range(4):
        low = np.uint32(low ^ (_mix(high, keys[2 * pair]) & low_mask))
        high = np.uint32(high ^ (_mix(low, keys[2 * pair + 1]) & high_mask))
    return (np.uint64(high) << low_bits) | np.uint64(low)


@jit
def encrypt(start, words, low_bits, low_mask, high_mask, limit, out):
    """Write ``start + i`` encrypted to ``out[i]``, encrypted again until it is below ``limit``."""
    keys = (words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7])
    found, outside = out.view(np.uint64), np.arange(out.size)
    values = np.uint64(start) + outside.astype(np.uint64)
    left = out.size
    while left > 0:
        # Without a branch the compiler vectorizes this loop, and keeps a row in registers for all rounds.
        for k in range(left):
            values[k] = _once(values[k], keys, low_bits, low_mask, high_mask)
        still = 0
        for k in range(left):  # without a branch, which would be mispredicted for up to half of the rows
            value, place = values[k], outside[k]
            found[place] = value
            values[still], outside[still] = value, place
            still += value >= limit
        left = still
