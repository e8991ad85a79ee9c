"""Numba kernels that copy scattered rows of mapped shards into one batch.

They take addresses instead of arrays, because the number of shards varies and Numba would compile anew for
each. The copy knows its sources ahead, so it asks for the row 16 places on while it moves this one: the
misses of random rows then overlap. Import this module only where Numba is installed.

Legend: B rows of the batch, S shards, F features.
"""

# mypy: disable-error-code="call-arg, no-untyped-call, var-annotated, unreachable"
# (an intrinsic is called without its typing context, which mypy cannot know)

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import fetch_add
from stoker.ops.codegen.native import Kernel, arguments

__all__ = ["bag_offsets", "copy_bags", "copy_rows"]

Int64 = npt.NDArray[np.int64]

_AHEAD = 8  # rows asked for ahead of the copy
_LINE = 64  # bytes of a cache line
_BLOCK = 1024  # rows that a thread takes at a time


@intrinsic
def _copy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(arg, cgutils.voidptr_t) for arg in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch_at(typingctx: Any, address: Any) -> Any:
    """Start loading the cache line at an address, for one read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _int32_at(typingctx: Any, address: Any) -> Any:
    """An int32 pointer from an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate


@intrinsic
def _word_at(typingctx: Any, address: Any) -> Any:
    """An int64 pointer from an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@njit(nogil=True, inline="always")
def _shard_of(row: int, starts: Int64, mean: int) -> Any:
    """Which shard a row is in: a guess, and as many steps from there as sizes differ; without a mean a search."""
    if mean == 0:
        shard, behind = 0, len(starts) - 1
        while behind - shard > 1:
            middle = (shard + behind) // 2
            if row < starts[middle]:
                behind = middle
            else:
                shard = middle
        return shard
    shard = min(row // mean, len(starts) - 2)
    while row < starts[shard]:
        shard -= 1
    while row >= starts[shard + 1]:
        shard += 1
    return shard


def _copy_rows(p):  # type: ignore[no-untyped-def]
    rows, starts, mean, sources, widths, strides, targets, scratch, cursor, block = arguments(p)
    kinds = len(widths)
    while True:
        begin = fetch_add(cursor, block)
        if begin >= len(rows):
            return
        stop = min(begin + block, len(rows))
        for i in range(begin, stop):
            row = rows[i]
            shard = _shard_of(row, starts, mean)
            for kind in range(kinds):
                scratch[kind, i] = sources[kind, shard] + (row - starts[shard]) * strides[kind]
        for i in range(begin, stop):
            if i + _AHEAD < stop:
                for kind in range(kinds):
                    source = scratch[kind, i + _AHEAD]
                    for line in range(0, widths[kind], _LINE):
                        _prefetch_at(source + line)
                    _prefetch_at(source + widths[kind] - 1)
            for kind in range(kinds):
                _copy(targets[kind] + i * widths[kind], scratch[kind, i], widths[kind])


_rows_kernel = Kernel(_copy_rows)


def copy_rows(
    rows: Int64,  # [B]
    starts: Int64,  # [S + 1] first row of each shard
    mean: int,  # rows of a shard, about; 0: they differ too much
    sources: Int64,  # [K, S] address of each of K tensors in each shard
    widths: Int64,  # [K] bytes per row
    strides: Int64,  # [K] and from a row to the next
    targets: Int64,  # [K] addresses to fill, row by row
    threads: int,
) -> None:
    """Copy the rows of K row-wise tensors; ``threads`` above 1 are torch's."""
    scratch = np.empty((len(widths), len(rows)), np.int64)
    cursor = np.zeros(1, np.int64)
    _rows_kernel.run(
        np.ascontiguousarray(rows), starts, mean, sources, widths, strides, targets, scratch, cursor, _BLOCK,
        threads=max(1, min(threads, len(rows) // _BLOCK)),
    )  # fmt: skip


@jit
def bag_offsets(
    rows: Int64,  # [B]
    starts: Int64,  # [S + 1]
    mean: int,
    lengths: Int64,  # [S] addresses of int32 [n, F]
    row_offsets: Int64,  # [S] addresses of int64 [n + 1]
    ids: Int64,  # [S] addresses of the ids
    ids_in: Int64,  # [S] ids in each shard
    id_width: int,  # bytes
    features: int,  # F
    offsets: Int64,  # [B * F + 1], filled
    scratch: Int64,  # [2, B], filled: address and number of each row's ids
) -> int:
    """Fill the offsets of a batch; returns the place of a row whose lengths and row_offsets disagree, or "
    "-1."""
    total = np.int64(0)
    offsets[0] = 0
    for i in range(len(rows)):
        row = rows[i]
        shard = _shard_of(row, starts, mean)
        if i + _AHEAD < len(rows):
            later = rows[i + _AHEAD]
            other = _shard_of(later, starts, mean)
            later -= starts[other]
            _prefetch_at(lengths[other] + later * features * 4)
            _prefetch_at(lengths[other] + (later + 1) * features * 4 - 1)
            _prefetch_at(row_offsets[other] + later * 8)
        local = row - starts[shard]
        bags = _int32_at(lengths[shard] + local * features * 4)
        ends = _word_at(row_offsets[shard] + local * 8)
        before = total
        for f in range(features):
            if bags[f] < 0:
                return i
            total += bags[f]
            offsets[i * features + f + 1] = total
        first, last = ends[0], ends[1]
        if last - first != total - before or first < 0 or last > ids_in[shard]:
            return i
        scratch[0, i] = ids[shard] + first * id_width
        scratch[1, i] = last - first
    return -1


@jit
def copy_bags(scratch: Int64, id_width: int, target: int) -> None:
    """Copy each row's ids one after the other to the address ``target``."""
    count = scratch.shape[1]
    for i in range(count):
        if i + _AHEAD < count:
            source = scratch[0, i + _AHEAD]
            for line in range(0, scratch[1, i + _AHEAD] * id_width, _LINE):
                _prefetch_at(source + line)
        size = scratch[1, i] * id_width
        _copy(target, scratch[0, i], size)
        target += size
