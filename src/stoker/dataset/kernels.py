"""Numba kernels that read a dataset: rows copied from addresses, and the Feistel network of an epoch's order.

:mod:`stoker.dataset.gather` and :mod:`stoker.dataset.order` define the results in NumPy. Import this module only where
Numba is installed.
"""

# mypy: disable-error-code="call-arg, no-untyped-call, no-untyped-def, var-annotated, unreachable"
# (an intrinsic is called without its typing context, which mypy cannot know)

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import fetch_add
from stoker.ops.codegen.native import Kernel, arguments

__all__ = ["copy_rows", "encrypt"]

_AHEAD = 8  # rows asked for ahead of the copy
_LINE = 64  # bytes of a cache line
_BLOCK = 1024  # rows that a thread takes at a time
# Not inlined by Numba, which would work out the types of every copy: LLVM inlines them, in half the time.
_part: Any = numba.njit


@intrinsic
def _copy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(arg, cgutils.voidptr_t) for arg in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch(typingctx: Any, address: Any) -> Any:
    """Start loading the cache line at an address, for one read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _copy_rows(p):
    shard, first, sizes, places, sources, widths, targets, cursor, block = arguments(p)
    while True:
        begin = fetch_add(cursor, block)
        if begin >= len(shard):
            return
        stop = min(begin + block, len(shard))
        for i in range(begin, stop):
            if i + _AHEAD < stop:  # the misses of random rows then overlap
                for kind in range(len(widths)):
                    source = sources[kind, shard[i + _AHEAD]] + first[i + _AHEAD] * widths[kind]
                    size = sizes[i + _AHEAD] * widths[kind]
                    for line in range(0, size, _LINE):
                        _prefetch(source + line)
                    _prefetch(source + size - 1)
            for kind in range(len(widths)):
                source = sources[kind, shard[i]] + first[i] * widths[kind]
                _copy(targets[kind] + places[i] * widths[kind], source, sizes[i] * widths[kind])


_kernel = Kernel(_copy_rows)


def copy_rows(*args: Any, threads: int) -> None:
    """Copy B slices of each of K tensors; ``threads`` above 1 are torch's.

    Args:
        args: [B] shard of each slice, its first row there, its rows, and its first row in the target; [K, S] address of
            each tensor in each shard; [K] bytes of a row; [K] addresses to fill. All int64.
        threads: as many as there is work for.
    """
    threads = max(1, min(threads, len(args[0]) // _BLOCK))
    _kernel.run(*args, np.zeros(1, np.int64), _BLOCK, threads=threads)


@_part
def _mix(value, key):
    # Every step is cast back: Numba widens what it computes of 32 bits to 64.
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
    """out[i] = the place of ``start + i`` among the first ``limit``: encrypted until it falls inside."""
    keys = (words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7])
    found, outside = out.view(np.uint64), np.arange(out.size)
    values = np.uint64(start) + outside.astype(np.uint64)
    left = out.size
    while left > 0:
        # Without a branch this loop is worked out several rows at a time, and a row stays in registers for all rounds.
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
