"""Triton kernels that read: lookup, gradient of per-sample weights, fresh rows, row addresses.

Launch every kernel with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the reference
rounds twice. bfloat16 rows are passed as int16 and widened by a shift, which keeps every bit and needs no
hardware support.

Legend: B examples, F features, L ids in all, D columns. BAGS and BLOCK are the tile's rows and columns.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

NO_ERROR = 2**63 - 1  # what the error word holds while every id has been inside its table

_NONE = tl.constexpr(NO_ERROR)
# SplitMix64, as in stoker.ops.reference.counter_bits.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def counter_bits(key, counter):
    """64 random bits, uint64, for int64 ``key`` and ``counter``."""
    z = (counter.to(tl.uint64) + 1) * _GOLDEN + key.to(tl.uint64)
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def read_rows(weight, place, mask, BF16: tl.constexpr):
    """Weights at ``place`` as float32; zero where masked."""
    if BF16:
        raw = tl.load(weight + place, mask=mask, other=0).to(tl.int32)
        values = (raw << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(weight + place, mask=mask, other=0.0)
    return values


@triton.jit
def lookup_kernel(
    weight,
    ids,
    bases,
    limits,
    scales,
    out,
    error,
    bags,
    F: tl.constexpr,
    D: tl.constexpr,
    BF16: tl.constexpr,
    SCALED: tl.constexpr,
    BAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One id a bag. The position of the first id outside its table goes to ``error``; its output is zero."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    feature = bag % F
    row = tl.load(ids + bag, mask=live, other=0).to(tl.int64)
    limit = tl.load(limits + feature)
    inside = live & (row >= 0) & (row < limit)
    outside = live & ((row < 0) | (row >= limit))
    tl.atomic_min(error + tl.zeros([BAGS], tl.int64), bag, mask=outside, sem="relaxed")
    place = (tl.load(bases + feature) + row)[:, None] * D + column[None, :]
    values = read_rows(weight, place, inside[:, None] & (column < D)[None, :], BF16)
    if SCALED:
        values = values * tl.load(scales + bag, mask=live, other=0.0)[:, None]
    tl.store(out + bag[:, None] * D + column[None, :], values, mask=live[:, None] & (column < D)[None, :])


@triton.jit
def lookup_bags_kernel(
    weight,
    ids,
    offsets,
    bases,
    limits,
    scales,
    out,
    error,
    bags,
    F: tl.constexpr,
    D: tl.constexpr,
    BF16: tl.constexpr,
    SCALED: tl.constexpr,
    MEAN: tl.constexpr,
    BAGS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Bags of any length, each summed in order of occurrence; all bags of a tile advance together."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    within = (column < D)[None, :]
    feature = bag % F
    base = tl.load(bases + feature)
    limit = tl.load(limits + feature)
    start = tl.load(offsets + bag, mask=live, other=0)
    count = tl.load(offsets + bag + 1, mask=live, other=0) - start
    worst = tl.full([BAGS], _NONE, tl.int64)
    total = tl.zeros([BAGS, BLOCK], tl.float32)
    for first in range(0, tl.max(count, axis=0), UNROLL):
        for step in tl.static_range(UNROLL):
            here = first + step < count
            at = start + first + step
            row = tl.load(ids + at, mask=here, other=0).to(tl.int64)
            inside = here & (row >= 0) & (row < limit)
            outside = here & ((row < 0) | (row >= limit))
            worst = tl.minimum(worst, tl.where(outside, at, _NONE))
            values = read_rows(weight, (base + row)[:, None] * D + column[None, :], inside[:, None] & within, BF16)
            if SCALED:
                values = values * tl.load(scales + at, mask=here, other=0.0)[:, None]
            # A finished bag adds +0.0, which changes nothing: a sum that began at +0.0 is never -0.0.
            total = total + values
    tl.atomic_min(error + tl.zeros([BAGS], tl.int64), worst, mask=worst < _NONE, sem="relaxed")
    if MEAN:
        total = total * tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32))[:, None]
    tl.store(out + bag[:, None] * D + column[None, :], total, mask=live[:, None] & within)


@triton.jit
def addresses_kernel(
    ids, bag_of, bases, limits, out, error, count, missing, F: tl.constexpr, JAGGED: tl.constexpr, SIZE: tl.constexpr
):
    """The row address of each id; ``missing``, one past the last row, for an id outside its table."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < count
    if JAGGED:
        bag = tl.load(bag_of + at, mask=live, other=0)
    else:
        bag = at
    row = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    limit = tl.load(limits + bag % F)
    outside = live & ((row < 0) | (row >= limit))
    tl.atomic_min(error + tl.zeros([SIZE], tl.int64), at, mask=outside, sem="relaxed")
    address = tl.where(outside, missing, row + tl.load(bases + bag % F))
    tl.store(out + at, address.to(out.dtype.element_ty), mask=live)


@triton.jit
def weight_gradient_kernel(
    weight,
    address,
    bag_of,
    grad,
    out,
    count,
    missing,
    D: tl.constexpr,
    BF16: tl.constexpr,
    JAGGED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The dot product of each occurrence's row with its bag's gradient."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < count
    if JAGGED:
        bag = tl.load(bag_of + at, mask=live, other=0)
    else:
        bag = at
    row = tl.load(address + at, mask=live, other=0).to(tl.int64)
    live = live & (row < missing)
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (column < D)[None, :]
        values = read_rows(weight, row[:, None] * D + column[None, :], mask, BF16)
        grads = tl.load(grad + bag[:, None] * D + column[None, :], mask=mask, other=0.0)
        total = total + tl.sum(values * grads, axis=1)
    tl.store(out + at, total, mask=at < count)


@triton.jit(do_not_specialize=["key", "first"])
def init_kernel(out, key, first, count, scale, BF16: tl.constexpr, SIZE: tl.constexpr):
    """Elements ``first..first + count`` of a fresh table, uniform in [-scale, scale)."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    unit = (counter_bits(key.to(tl.int64), at + first) >> 40).to(tl.int32).to(tl.float32)
    values = (unit * 1.1920928955078125e-07 - 1.0) * scale  # 2**-23: the bracket is exact, in [-1, 1)
    if BF16:
        raw = values.to(tl.int32, bitcast=True)
        raw = raw + 0x7FFF + ((raw >> 16) & 1)  # to nearest, ties to even
        tl.store(out + at, (raw >> 16).to(tl.int16), mask=at < count)
    else:
        tl.store(out + at, values, mask=at < count)
