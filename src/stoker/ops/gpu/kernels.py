"""Triton kernels: lookup and its gradients, fresh rows, row addresses, one update a row, copies of rows.

Launch every kernel with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the reference rounds twice.
bfloat16 rows are passed as int16 and widened by a shift: it keeps every bit and needs no hardware support.

The update sums segments of equal rows without float atomics or tree sums: the additions of a row follow the order of
occurrence, in chunks (reference.add_in_chunks), so only rows, chunks and columns run in parallel. Rows with more than
LONG occurrences, the length of a chunk, are summed first, by programs of their own with many loads in flight.

Gradients keep the layout in which they arrive: [B, F, D] with EXAMPLE and FEATURE elements from one example or feature
to the next, and contiguous columns; GRAD16: bfloat16. Layouts and widths are constants of a kernel, counts are not
specialised: another batch size compiles nothing.

Legend: B examples, F features, L ids (occurrences) in all, U distinct rows, D columns. A tile has BAGS rows and BLOCK
columns.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.rule import RULES

NO_ERROR = 2**63 - 1  # the error word as long as every id was inside its table


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one: Triton launches kernels there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_NONE = tl.constexpr(NO_ERROR)
# SplitMix64, as in stoker.ops.reference.counter_bits.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def counter_bits(key, counter):
    """Return 64 random bits, uint64, for int64 ``key`` and ``counter``."""
    z = (counter.to(tl.uint64) + 1) * _GOLDEN + key.to(tl.uint64)
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def read_rows(weight, place, mask, BF16: tl.constexpr):
    """Load the weights at ``place`` as float32; zero where masked."""
    if BF16:
        raw = tl.load(weight + place, mask=mask, other=0).to(tl.int32)
        values = (raw << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(weight + place, mask=mask, other=0.0)
    return values


@triton.jit
def _bag(bag, columns, F: tl.constexpr, ALL: tl.constexpr):
    """Return the number of a part's bag among those of all parts, of ALL features; 0: there are no others."""
    if ALL > 0:
        bag = bag // F * ALL + tl.load(columns + bag % F)
    return bag


@triton.jit
def _place(bag, places, F: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return where the output of a part's bag begins, among WIDTH elements of an example; 0: only this part's."""
    if WIDTH > 0:
        place = bag // F * WIDTH + tl.load(places + bag % F)
    else:
        place = bag * D
    return place


@triton.jit
def _gradient_of(bag, places, F: tl.constexpr, EXAMPLE: tl.constexpr, FEATURE: tl.constexpr):
    """Return where the gradient of a bag begins; FEATURE below 0: at the place of its feature."""
    if FEATURE < 0:
        start = bag // F * EXAMPLE + tl.load(places + bag % F)
    else:
        start = bag // F * EXAMPLE + bag % F * FEATURE
    return start


@triton.jit(do_not_specialize=["bags"])
def lookup_kernel(
    weight, ids, bases, limits, columns, places, scales, out, error, bags, F: tl.constexpr, D: tl.constexpr,
    ALL: tl.constexpr, WIDTH: tl.constexpr, BF16: tl.constexpr, SCALED: tl.constexpr, BAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Look up one id a bag. ``error`` gets the position of the first id outside its table; its output is zero."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    feature = bag % F
    to = _place(bag, places, F, D, WIDTH)
    bag = _bag(bag, columns, F, ALL)
    row = tl.load(ids + bag, mask=live, other=0).to(tl.int64)
    limit = tl.load(limits + feature)
    inside = live & (row >= 0) & (row < limit)
    outside = live & ((row < 0) | (row >= limit))
    tl.atomic_min(error + tl.zeros([BAGS], tl.int64), bag, mask=outside, sem="relaxed")
    place = (tl.load(bases + feature) + row)[:, None] * D + column[None, :]
    values = read_rows(weight, place, inside[:, None] & (column < D)[None, :], BF16)
    if SCALED:
        values = values * tl.load(scales + bag, mask=live, other=0.0)[:, None]
    tl.store(out + to[:, None] + column[None, :], values, mask=live[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["bags", "count"])
def lookup_bags_kernel(
    weight, ids, offsets, bases, limits, columns, places, scales, out, error, bags, count, F: tl.constexpr,
    D: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr, BF16: tl.constexpr, SCALED: tl.constexpr,
    MEAN: tl.constexpr, BAGS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum bags of any length in order of occurrence; all bags of a tile advance together.

    Offsets may be wrong (:func:`offsets_kernel`): no id outside the ``count`` that there are is read.
    """
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    within = (column < D)[None, :]
    feature = bag % F
    base = tl.load(bases + feature)
    limit = tl.load(limits + feature)
    to = _place(bag, places, F, D, WIDTH)
    bag = _bag(bag, columns, F, ALL)
    start = tl.maximum(tl.load(offsets + bag, mask=live, other=0), 0)
    length = tl.minimum(tl.load(offsets + bag + 1, mask=live, other=0), count) - start
    worst = tl.full([BAGS], _NONE, tl.int64)
    total = tl.zeros([BAGS, BLOCK], tl.float32)
    for first in range(0, tl.max(length, axis=0), UNROLL):
        for step in tl.static_range(UNROLL):
            here = first + step < length
            at = start + first + step
            row = tl.load(ids + at, mask=here, other=0).to(tl.int64)
            inside = here & (row >= 0) & (row < limit)
            outside = here & ((row < 0) | (row >= limit))
            worst = tl.minimum(worst, tl.where(outside, at, _NONE))
            values = read_rows(weight, (base + row)[:, None] * D + column[None, :], inside[:, None] & within, BF16)
            if SCALED:
                values = values * tl.load(scales + at, mask=here, other=0.0)[:, None]
            # A finished bag adds +0.0. That changes nothing: a sum that began at +0.0 is never -0.0.
            total = total + values
    tl.atomic_min(error + tl.zeros([BAGS], tl.int64), worst, mask=worst < _NONE, sem="relaxed")
    if MEAN:
        total = total * tl.div_rn(1.0, tl.maximum(length, 1).to(tl.float32))[:, None]
    tl.store(out + to[:, None] + column[None, :], total, mask=live[:, None] & within)


@triton.jit(do_not_specialize=["bags", "count"])
def offsets_kernel(offsets, most, error, bags, count, F: tl.constexpr, SIZE: tl.constexpr):
    """Set ``error`` to a negative number unless ``offsets`` rise from 0 to ``count``, by at most ``most`` [F]."""
    bag = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = bag < bags
    start = tl.load(offsets + bag, mask=live, other=0)
    stop = tl.load(offsets + bag + 1, mask=live, other=0)
    length = stop - start
    wrong = (start < 0) | (stop > count) | (length < 0) | (length > tl.load(most + bag % F))
    wrong = wrong | ((bag == 0) & (start != 0)) | ((bag == bags - 1) & (stop != count))
    tl.atomic_min(error + tl.zeros([SIZE], tl.int64), -1 - bag, mask=live & wrong, sem="relaxed")


@triton.jit(do_not_specialize=["bags", "count", "missing", "steps"])
def addresses_kernel(
    ids, offsets, bases, limits, means, out, bag_of, scales, error, bags, count, missing, steps, F: tl.constexpr,
    JAGGED: tl.constexpr, MEAN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the row address of each id; ``missing``, one past the last row, for an id outside its table.

    JAGGED: find its bag among ``offsets`` [bags + 1] by ``steps`` bisections, and write it to ``bag_of``; MEAN: write 1
    over the length of that bag to ``scales``, but 1 for features where ``means`` [F] is 0.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < count
    if JAGGED:
        bag = tl.zeros([SIZE], tl.int64)
        after = bag + bags
        for _ in range(steps):
            middle = (bag + after) // 2
            below = tl.load(offsets + middle, mask=live, other=0) <= at
            bag = tl.where(below, middle, bag)
            after = tl.where(below, after, middle)
        tl.store(bag_of + at, bag, mask=live)
        if MEAN:
            length = tl.load(offsets + bag + 1, mask=live, other=1) - tl.load(offsets + bag, mask=live, other=0)
            length = tl.where(tl.load(means + bag % F) == 0, 1, tl.maximum(length, 1))
            tl.store(scales + at, tl.div_rn(1.0, length.to(tl.float32)), mask=live)
    else:
        bag = at
    row = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    limit = tl.load(limits + bag % F)
    outside = live & ((row < 0) | (row >= limit))
    tl.atomic_min(error + tl.zeros([SIZE], tl.int64), at, mask=outside, sem="relaxed")
    address = tl.where(outside, missing, row + tl.load(bases + bag % F))
    tl.store(out + at, address.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["count", "missing"])
def weight_gradient_kernel(
    weight, address, bag_of, grad, out, count, missing, F: tl.constexpr, D: tl.constexpr, EXAMPLE: tl.constexpr,
    FEATURE: tl.constexpr, GRAD16: tl.constexpr, BF16: tl.constexpr, JAGGED: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the dot product of each occurrence's row with its bag's gradient."""
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
        start = bag // F * EXAMPLE + bag % F * FEATURE
        grads = read_rows(grad, start[:, None] + column[None, :], mask, GRAD16)
        total = total + tl.sum(values * grads, axis=1)
    tl.store(out + at, total, mask=at < count)


@triton.jit(do_not_specialize=["key", "first", "count"])
def init_kernel(out, key, first, count, scale, BF16: tl.constexpr, SIZE: tl.constexpr):
    """Write elements ``first..first + count`` of a fresh table, uniform in [-scale, scale)."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    unit = (counter_bits(key.to(tl.int64), at + first) >> 40).to(tl.int32).to(tl.float32)
    values = (unit * 1.1920928955078125e-07 - 1.0) * scale  # 2**-23: the bracket is exact, in [-1, 1)
    if BF16:
        raw = values.to(tl.int32, bitcast=True)
        raw = raw + 0x7FFF + ((raw >> 16) & 1)  # to nearest, ties to even
        tl.store(out + at, (raw >> 16).to(tl.int16), mask=at < count)
    else:
        tl.store(out + at, values, mask=at < count)


#: rules that update_kernel knows
STEPS = frozenset({"sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "nesterov", "ftrl"})
_SGD = tl.constexpr(RULES["sgd"].code)
_ADAGRAD = tl.constexpr(RULES["adagrad"].code)
_ROWWISE_ADAGRAD = tl.constexpr(RULES["rowwise_adagrad"].code)
_ADAM = tl.constexpr(RULES["adam"].code)
_MOMENTUM = tl.constexpr(RULES["momentum"].code)
_NESTEROV = tl.constexpr(RULES["nesterov"].code)
_FTRL = tl.constexpr(RULES["ftrl"].code)


@triton.jit
def _heads(rows, at, live):
    """Return 1 where a new row begins among the sorted ``rows``, else 0."""
    row = tl.load(rows + at, mask=live, other=0)
    before = tl.load(rows + at - 1, mask=live & (at > 0), other=0)
    return (live & ((at == 0) | (row != before))).to(tl.int64)


@triton.jit(do_not_specialize=["count"])
def mark_kernel(rows, found, count, SIZE: tl.constexpr):
    """Write how many new rows begin in each tile of the sorted ``rows`` [L]: ``found`` [tiles] int64."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * SIZE + tl.arange(0, SIZE)
    tl.store(found + tile, tl.sum(_heads(rows, at, at < count), axis=0))


@triton.jit(do_not_specialize=["count"])
def starts_kernel(rows, found, segments, starts, count, SIZE: tl.constexpr):
    """Write where the occurrences of each distinct row begin, and L after the last: ``starts`` [U + 1].

    ``segments`` [L] gets the running number of each occurrence's row, from 1; ``found`` is from :func:`mark_kernel`.
    """
    tile = tl.program_id(0).to(tl.int64)
    before = tl.zeros([SIZE], tl.int64)
    for first in range(0, tile, SIZE):
        other = first + tl.arange(0, SIZE)
        before += tl.load(found + other, mask=other < tile, other=0)
    at = tile * SIZE + tl.arange(0, SIZE)
    live = at < count
    head = _heads(rows, at, live)
    segment = tl.sum(before, axis=0) + tl.cumsum(head, axis=0)
    tl.store(segments + at, segment, mask=live)
    tl.store(starts + segment - 1, at, mask=head == 1)
    tl.store(starts + segment, at + 1, mask=at == count - 1)


@triton.jit
def _long_segments(
    rows, segments, starts, window, count, first_address, missing, LONG: tl.constexpr, PART: tl.constexpr
):
    """Return the places of a window of LONG occurrences, and begin and end of their rows.

    These are 0 for short rows and, if PART, for addresses outside ``first_address..missing``.
    """
    at = window * LONG + tl.arange(0, LONG)
    live = at < count
    segment = tl.load(segments + at, mask=live, other=1)
    begin = tl.load(starts + segment - 1, mask=live, other=0)
    end = tl.load(starts + segment, mask=live, other=0)
    long = live & (end - begin > LONG)
    if PART:
        row = tl.load(rows + at, mask=live, other=0).to(tl.int64)
        long = long & (row >= first_address) & (row < missing)
    return at, tl.where(long, begin, 0), tl.where(long, end, 0)


@triton.jit(do_not_specialize=["count", "first_address", "missing"])
def sum_chunks_kernel(
    rows, segments, starts, sources, scales, grad, places, sums, error, count, first_address, missing, F: tl.constexpr,
    D: tl.constexpr, EXAMPLE: tl.constexpr, FEATURE: tl.constexpr, GRAD16: tl.constexpr, SCALED: tl.constexpr,
    LONG: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum each LONG occurrences of a long row of the part, which has more of them.

    In window ``p`` of LONG occurrences, the last chunk of one long row can begin, and the first of the next: their sums
    go to ``sums[2 * p]`` and ``sums[2 * p + 1]``.
    """
    if tl.load(error) != _NONE:
        return
    window = tl.program_id(0).to(tl.int64)
    at, begin, end = _long_segments(rows, segments, starts, window, count, first_address, missing, LONG, FEATURE < 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for fresh in tl.static_range(2):
        here = (begin < end) & ((begin == at) if fresh else ((at - begin) % LONG == 0) & (begin < at))
        start = tl.max(tl.where(here, at, -1), axis=0)
        stop = tl.minimum(start + LONG, tl.max(tl.where(here, end, -1), axis=0))
        if start >= 0:
            total = tl.zeros([BLOCK], tl.float32)
            for first in range(start, stop, UNROLL):
                for step in tl.static_range(UNROLL):
                    more = first + step < stop
                    source = tl.load(sources + first + step, mask=more, other=0)
                    start_of = _gradient_of(source, places, F, EXAMPLE, FEATURE)
                    values = read_rows(grad, start_of + column, column < tl.where(more, D, 0), GRAD16)
                    if SCALED:
                        values = values * tl.load(scales + first + step, mask=more, other=0.0)
                    total = total + values
            tl.store(sums + (2 * window + fresh) * D + column, total, mask=column < D)


@triton.jit(do_not_specialize=["count", "first_address", "missing"])
def sum_long_kernel(
    rows, segments, starts, sums, totals, error, count, first_address, missing, D: tl.constexpr, PART: tl.constexpr,
    LONG: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the long row that begins in window ``p`` of LONG occurrences to ``totals[p]``.

    It adds the ``sums`` of :func:`sum_chunks_kernel` in order. No two long rows begin in one window.
    """
    if tl.load(error) != _NONE:
        return
    window = tl.program_id(0).to(tl.int64)
    at, begin, end = _long_segments(rows, segments, starts, window, count, first_address, missing, LONG, PART)
    start = tl.max(tl.where((begin < end) & (begin == at), begin, -1), axis=0)
    if start < 0:
        return
    stop = tl.max(tl.where(begin == start, end, -1), axis=0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sums + (2 * window + 1) * D + column, mask=column < D, other=0.0)
    for first in range(start + LONG, stop, LONG * UNROLL):
        for step in tl.static_range(UNROLL):
            chunk = first + LONG * step
            place = chunk // LONG * 2 * D + column
            total = total + tl.load(sums + place, mask=column < tl.where(chunk < stop, D, 0), other=0.0)
    tl.store(totals + window * D + column, total, mask=column < D)


@triton.jit
def _norm_squared(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of each row in the order of the reference: 16 lanes add every 16th element, then fold.

    The order of ``tl.sum`` is unspecified; here it only adds zeros to one value, or two values.
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
    """Round float32 to bfloat16 as int16, up or down by the upper 16 of 64 random ``bits``."""
    raw = values.to(tl.int32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    low = (bits >> 48).to(tl.int32)
    special = tl.where((raw & 0x7FFFFF) != 0, 0x7FC00000, raw)
    return (tl.where(finite, tl.where(finite, raw, 0) + low, special) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["count", "first_address", "missing"])
def update_kernel(
    weight, state1, state2, rows, segments, starts, sources, scales, grad, places, totals, error, table_of, first_row,
    keys, row_in_slot, count, first_address, missing, lr, eps, share, beta1, rest1, beta2, rest2, unbias, keep, l1, l2,
    clip_value, clip_norm, decay, cow_ratio, cow_floor, F: tl.constexpr, D: tl.constexpr, EXAMPLE: tl.constexpr,
    FEATURE: tl.constexpr, GRAD16: tl.constexpr, RULE: tl.constexpr, BF16: tl.constexpr, SLOTTED: tl.constexpr,
    SCALED: tl.constexpr, CLIP_VALUE: tl.constexpr, CLIP_NORM: tl.constexpr, DECAY: tl.constexpr, COW: tl.constexpr,
    LONG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of each distinct row of addresses ``first_address..missing`` and update the row and its state.

    Do nothing once an id was outside its table: the tables keep their values from before that batch.
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
    live = live & (row < missing) & (row >= first_address)
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
            start = _gradient_of(source, places, F, EXAMPLE, FEATURE)
            values = read_rows(grad, start[:, None] + column[None, :], column[None, :] < width[:, None], GRAD16)
            if SCALED:
                values = values * tl.load(scales + begin + first + step, mask=more, other=0.0)[:, None]
            g = g + values

    address = row
    row = row - first_address
    at = row[:, None] * D + column[None, :]
    w = read_rows(weight, at, mask, BF16)
    if CLIP_VALUE:
        g = tl.where(g > clip_value, clip_value, tl.where(g < -clip_value, -clip_value, g))
    if CLIP_NORM:
        norm = tl.sqrt_rn(_norm_squared(g, ROWS, BLOCK))
        # Where the norm is within bounds the quotient is not used: 1 avoids a division by zero.
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
            local = address - tl.load(first_row + table)
        counter = local[:, None] * D + column[None, :]
        tl.store(weight + at, _round_randomly(w, counter_bits(key[:, None], counter)), mask=mask)
    else:
        tl.store(weight + at, w, mask=mask)


_TILE = 2048  # elements of a tile: each thread has several reads in flight, because the latency of the link is long
_INTEGERS = {2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["count"])
def copy_rows_kernel(source, rows, target, places, count, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy row ``rows[i]`` of ``source`` to row ``places[i]`` of ``target``."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    row = tl.load(rows + at, mask=live, other=0)
    place = tl.load(places + at, mask=live, other=0)
    mask = live[:, None] & (column < D)[None, :]
    values = tl.load(source + row[:, None] * D + column[None, :], mask=mask, other=0)
    tl.store(target + place[:, None] * D + column[None, :], values, mask=mask)


def copy_rows(source: Tensor, rows: Tensor, target: Tensor, places: Tensor) -> None:
    """Copy row ``rows[i]`` of ``source`` to row ``places[i]`` of ``target``, queued on the current stream.

    The GPU itself reads rows from page-locked host memory over the link; no processor gathers them first (zero-copy
    access, as in EMOGI, VLDB 2020). Rows move as integers, so not-a-numbers keep their bits.

    Args:
        source: [N, D] or [N], contiguous, of 2 or 4 bytes an element; on the device, or page-locked on the host.
        rows: [n] int64 on the device.
        target: [C, D] or [C], contiguous, on the device, of the same type.
        places: [n] int64 on the device; distinct.
    """
    assert (source.dtype, source.shape[1:]) == (target.dtype, target.shape[1:])
    assert all(tensor.is_contiguous() for tensor in (source, target)), "the kernel addresses rows by row * D"
    count, dim = len(rows), source[:1].numel()
    if count == 0:
        return
    whole = _INTEGERS[source.element_size()]
    block = min(256, 1 << max(0, dim - 1).bit_length())
    tile = max(1, _TILE // block)
    grid = (triton.cdiv(count, tile), triton.cdiv(dim, block))
    copy_rows_kernel[grid](
        source.view(whole), rows, target.view(whole), places, count, D=dim, ROWS=tile, BLOCK=block,
        enable_fp_fusion=False,
    )  # fmt: skip
