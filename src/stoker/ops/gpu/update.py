"""Triton kernels that write: segments of equal rows, their gradients summed in order, one update a row.

No float atomics and no tree sums: the additions of a row follow the order of occurrence, so the work is
spread over rows and columns only. Rows with more than LONG occurrences are summed first, by programs of
their own with many loads in flight, so that one popular row does not hold up the others of its tile. Launch
with ``enable_fp_fusion=False``, as in :mod:`stoker.ops.gpu.kernels`.

Legend: L occurrences, U distinct rows, F features, D columns.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from stoker.ops.gpu.kernels import NO_ERROR, counter_bits, read_rows
from stoker.ops.rule import CODES

_NONE = tl.constexpr(NO_ERROR)
_SGD = tl.constexpr(CODES["sgd"])
_ADAGRAD = tl.constexpr(CODES["adagrad"])
_ROWWISE_ADAGRAD = tl.constexpr(CODES["rowwise_adagrad"])
_ADAM = tl.constexpr(CODES["adam"])
_MOMENTUM = tl.constexpr(CODES["momentum"])
_NESTEROV = tl.constexpr(CODES["nesterov"])
_FTRL = tl.constexpr(CODES["ftrl"])


@triton.jit
def mark_kernel(rows, heads, count, SIZE: tl.constexpr):
    """1 where a new row begins among the sorted ``rows`` [L], else 0."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < count
    row = tl.load(rows + at, mask=live, other=0)
    before = tl.load(rows + at - 1, mask=live & (at > 0), other=0)
    tl.store(heads + at, ((at == 0) | (row != before)).to(tl.int64), mask=live)


@triton.jit
def starts_kernel(rows, segments, starts, count, SIZE: tl.constexpr):
    """Where each distinct row's occurrences begin, and L after the last: ``starts`` [U + 1].

    ``segments`` [L] is the running sum of :func:`mark_kernel`'s marks.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < count
    row = tl.load(rows + at, mask=live, other=0)
    before = tl.load(rows + at - 1, mask=live & (at > 0), other=0)
    segment = tl.load(segments + at, mask=live, other=1)
    tl.store(starts + segment - 1, at, mask=live & ((at == 0) | (row != before)))
    tl.store(starts + segment, at + 1, mask=at == count - 1)


@triton.jit
def sum_long_kernel(
    segments,
    starts,
    sources,
    scales,
    grad,
    totals,
    error,
    count,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The gradient of the long row that begins in window ``p`` of LONG occurrences, into ``totals[p]``.

    A long row has more than LONG occurrences, so no two begin in one window.
    """
    if tl.load(error) != _NONE:
        return
    window = tl.program_id(0).to(tl.int64)
    at = window * LONG + tl.arange(0, LONG)
    live = at < count
    segment = tl.load(segments + at, mask=live, other=1)
    begin = tl.load(starts + segment - 1, mask=live, other=0)
    end = tl.load(starts + segment, mask=live, other=0)
    here = live & (begin == at) & (end - begin > LONG)
    start = tl.max(tl.where(here, begin, -1), axis=0)
    stop = tl.max(tl.where(here, end, -1), axis=0)
    if start < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, UNROLL):
        for step in tl.static_range(UNROLL):
            more = first + step < stop
            source = tl.load(sources + first + step, mask=more, other=0)
            values = tl.load(grad + source * D + column, mask=column < tl.where(more, D, 0), other=0.0)
            if SCALED:
                values = values * tl.load(scales + first + step, mask=more, other=0.0)
            total = total + values
    tl.store(totals + window * D + column, total, mask=column < D)


@triton.jit
def _norm_squared(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of squares of each row in the reference's order: 16 lanes add every 16th element, then fold.

    ``tl.sum`` adds in an order of its own; here it only ever adds zeros to one value, or two values.
    """
    lanes = values * values
    if BLOCK > 16:
        squares = tl.reshape(lanes, [ROWS, BLOCK // 16, 16])
        chunk = tl.arange(0, BLOCK // 16)[None, :, None]
        lanes = tl.zeros([ROWS, 16], tl.float32)
        for index in range(BLOCK // 16):
            lanes = lanes + tl.sum(tl.where(chunk == index, squares, 0.0), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 8]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 4]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 2]), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def _round_randomly(values, bits):
    """float32 to the int16 image of bfloat16, up or down by the upper 16 of 64 random ``bits``."""
    raw = values.to(tl.int32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    low = (bits >> 48).to(tl.int32)
    special = tl.where((raw & 0x7FFFFF) != 0, 0x7FC00000, raw)
    return (tl.where(finite, tl.where(finite, raw, 0) + low, special) >> 16).to(tl.int16)


@triton.jit
def update_kernel(
    weight,
    state1,
    state2,
    rows,
    segments,
    starts,
    sources,
    scales,
    grad,
    totals,
    error,
    table_of,
    first_row,
    keys,
    row_in_slot,
    count,
    missing,
    lr,
    eps,
    share,
    beta1,
    rest1,
    beta2,
    rest2,
    unbias,
    keep,
    l1,
    l2,
    clip_value,
    clip_norm,
    decay,
    cow_ratio,
    cow_floor,
    F: tl.constexpr,
    D: tl.constexpr,
    RULE: tl.constexpr,
    BF16: tl.constexpr,
    SLOTTED: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP_VALUE: tl.constexpr,
    CLIP_NORM: tl.constexpr,
    DECAY: tl.constexpr,
    COW: tl.constexpr,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum the gradient of each distinct row and update the row and its state.

    Does nothing once an id was found outside its table: the tables stay as they were before that batch.
    """
    if tl.load(error) != _NONE:
        return
    distinct = tl.load(segments + count - 1)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0).to(tl.int64) * ROWS >= distinct:
        return
    column = tl.arange(0, BLOCK)
    within = (column < D)[None, :]
    live = index < distinct
    begin = tl.load(starts + index, mask=live, other=0)
    end = tl.load(starts + index + 1, mask=live, other=0)
    row = tl.load(rows + begin, mask=live, other=0).to(tl.int64)
    live = live & (row < missing)
    mask = live[:, None] & within
    long = live & (end - begin > LONG)
    short = tl.where(live & (end - begin <= LONG), end - begin, 0)

    place = tl.load(sources + begin, mask=live, other=0)
    g = tl.load(totals + (begin // LONG)[:, None] * D + column[None, :], mask=long[:, None] & within, other=0.0)
    for first in range(0, tl.max(short, axis=0), UNROLL):
        for step in tl.static_range(UNROLL):
            more = first + step < short
            width = tl.where(more, D, 0)  # Triton 3.6 fails to compile the plain mask, more & within, for small D
            source = tl.load(sources + begin + first + step, mask=more, other=0)
            values = tl.load(
                grad + source[:, None] * D + column[None, :], mask=column[None, :] < width[:, None], other=0.0
            )
            if SCALED:
                values = values * tl.load(scales + begin + first + step, mask=more, other=0.0)[:, None]
            g = g + values

    at = row[:, None] * D + column[None, :]
    w = read_rows(weight, at, mask, BF16)
    if CLIP_VALUE:
        g = tl.where(g > clip_value, clip_value, tl.where(g < -clip_value, -clip_value, g))
    if CLIP_NORM:
        norm = tl.sqrt_rn(_norm_squared(g, ROWS, BLOCK))
        # Where the norm is within bounds the quotient is not used: keep it from dividing by zero.
        over = norm > clip_norm
        g = g * tl.where(over, tl.div_rn(clip_norm, tl.where(over, norm, 1.0)), 1.0)[:, None]
    if COW:
        own = tl.sqrt_rn(_norm_squared(w, ROWS, BLOCK)) * cow_ratio
        limit = (end - begin).to(tl.float32) * tl.where(own > cow_floor, own, cow_floor)
        norm = tl.sqrt_rn(_norm_squared(g, ROWS, BLOCK))
        over = norm > limit
        g = g * tl.where(over, tl.div_rn(limit, tl.where(over, norm, 1.0)), 1.0)[:, None]
    if DECAY:
        g = g + w * decay
    if RULE == _SGD:
        w = w - g * lr
    elif RULE == _ADAGRAD:
        total = tl.load(state1 + at, mask=mask, other=1.0) + g * g
        tl.store(state1 + at, total, mask=mask)
        w = w - tl.div_rn(g * lr, tl.sqrt_rn(total) + eps)
    elif RULE == _ROWWISE_ADAGRAD:
        sums = tl.load(state1 + row, mask=live, other=1.0) + _norm_squared(g, ROWS, BLOCK) * share
        tl.store(state1 + row, sums, mask=live)
        w = w - g * tl.div_rn(lr, tl.sqrt_rn(sums) + eps)[:, None]
    elif RULE == _FTRL:
        before = tl.load(state1 + at, mask=mask, other=1.0)
        linear = tl.load(state2 + at, mask=mask, other=1.0)
        total = before + g * g
        root = tl.sqrt_rn(total)
        linear = tl.where((before == 0) & (linear == 0), w * eps, linear)
        linear = linear + (root - tl.sqrt_rn(before)) * w - g * lr
        tl.store(state1 + at, total, mask=mask)
        tl.store(state2 + at, linear, mask=mask)
        scale = root + eps + l2
        shrunk = tl.where(linear > l1, linear - l1, tl.where(linear < -l1, linear + l1, linear * 0.0))
        w = tl.where(scale == 0, w, tl.div_rn(shrunk, tl.where(scale == 0, 1.0, scale)))
    elif (RULE == _MOMENTUM) | (RULE == _NESTEROV):
        buffer = tl.load(state1 + at, mask=mask, other=0.0) * beta1 + g
        tl.store(state1 + at, buffer, mask=mask)
        if RULE == _NESTEROV:
            buffer = g + buffer * beta1
        w = w - buffer * lr
    else:
        tl.static_assert(RULE == _ADAM)
        m = tl.load(state1 + at, mask=mask, other=0.0) * beta1 + g * rest1
        v = tl.load(state2 + at, mask=mask, other=1.0) * beta2 + (g * g) * rest2
        tl.store(state1 + at, m, mask=mask)
        tl.store(state2 + at, v, mask=mask)
        w = w * keep - tl.div_rn(m * lr, tl.sqrt_rn(v) * unbias + eps)
    if BF16:
        table = tl.load(table_of + place % F)
        key = tl.load(keys + table)
        if SLOTTED:  # the random bits belong to the row, not to its slot
            local = tl.load(row_in_slot + row, mask=live, other=0)
        else:
            local = row - tl.load(first_row + table)
        counter = local[:, None] * D + column[None, :]
        tl.store(weight + at, _round_randomly(w, counter_bits(key[:, None], counter)), mask=mask)
    else:
        tl.store(weight + at, w, mask=mask)
