"""Row operations for Numba: each works on one row of ``dim`` elements at an element offset of a flat array.

Results equal :mod:`stoker.ops.reference` to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from stoker.ops.codegen.llvm import (
    FLOAT,
    I32,
    I64,
    LANES,
    WIDEST,
    Array,
    Double,
    Float,
    Int,
    Known,
    Row,
    Vec,
    Vectors,
    add_lanes,
    chunks,
    counter_bits,
    fold,
    operation,
)
from stoker.ops.rule import RULES, Constants, condition, direction, moments

DECOUPLED = 32  # a flag of row_lamb
KEPT = 4 * WIDEST  # elements of a sum in registers: 16 vectors of AVX-512


class _Loaded:
    """:class:`stoker.ops.rule.Constants` in an array, each loaded where it is first used."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        value = self._array.b.load(self._array.at(I64(Constants._fields.index(name))))
        setattr(self, name, value)
        return value


@operation
def row_copy(b: ir.IRBuilder, dim: Known, out: Row, row: Row) -> None:
    """Do ``out[...] = row[...]``, converted to float32."""
    for start, width in chunks(dim):
        out.store(start, row.load(start, width))


@operation
def row_accumulate(b: ir.IRBuilder, dim: Known, scaled: Known, fresh: Known, out: Row, row: Row, scale: Float) -> None:
    """Do ``out += row * scale``, from +0.0 if ``fresh``; without the product unless ``scaled``."""
    for start, width in chunks(dim):
        value = row.load(start, width) * scale if scaled else row.load(start, width)
        zero = Vec(b, [ir.Constant(ir.VectorType(FLOAT, width), [0.0] * width)])
        out.store(start, (zero if fresh else out.load(start, width)) + value)


def _in_registers(b: ir.IRBuilder, dim: int) -> Iterator[tuple[int, list[tuple[ir.Value, int, int]]]]:
    """Yield sums of up to KEPT elements of a row that start at 0: where each is kept, its first element, its width."""
    for first in range(0, dim, KEPT):
        sums = []
        for start, width in chunks(min(KEPT, dim - first)):
            kind = ir.VectorType(FLOAT, width)
            kept = cgutils.alloca_once(b, kind)
            b.store(ir.Constant(kind, [0.0] * width), kept)
            sums.append((kept, first + start, width))
        yield first, sums


def _add_row(b: ir.IRBuilder, sums: list[tuple[ir.Value, int, int]], row: Row, factor: ir.Value | None) -> None:
    """Add a row, times ``factor`` if there is one, to the sums of :func:`_in_registers`."""
    for kept, start, width in sums:
        value = row.load(start, width)
        b.store((Vec(b, [b.load(kept)]) + (value if factor is None else value * factor)).parts[0], kept)


@operation
def bag_sum(
    b: ir.IRBuilder, dim: Known, scaled: Known, out: Row, weight: Array, base: Int, limit: Int, ids: Array, begin: Int,
    end: Int, scale: Array,
) -> Int:  # fmt: skip
    """Sum the rows of ``ids[begin:end]`` in order, times their ``scale``; return 1 if an id is out of range."""
    wrong = cgutils.alloca_once_value(b, I64(0))
    for _, sums in _in_registers(b, dim):
        with cgutils.for_range_slice(b, begin, end, I64(1)) as (k, _):
            given = b.load(ids.at(k))
            row = given if given.type == I64 else b.sext(given, I64)
            bad = b.icmp_unsigned(">=", row, limit)
            b.store(b.or_(b.load(wrong), b.zext(bad, I64)), wrong)
            found = weight.row(b.add(base, b.mul(b.select(bad, I64(0), row), I64(dim))))
            _add_row(b, sums, found, b.load(scale.at(k)) if scaled else None)
        for kept, start, _ in sums:
            out.store(start, Vec(b, [b.load(kept)]))
    return b.load(wrong)


@operation
def chain_sum(
    b: ir.IRBuilder, dim: Known, scaled: Known, most: Known, shard_bits: Known, out: Row, grad: Array,
    following: Array, sources: Array, scales: Array, first: Int, last: Int,
) -> Int:  # fmt: skip
    """Sum the gradients of a row's lookups from ``first`` on, in order: at most ``most``, at most to ``last``.

    Lookup n has the gradient from element ``sources[n]`` on, times ``scales[n]``; ``following[n]`` is the next one. The
    number of its shard is above the lowest ``shard_bits`` of its source, if they are not 0: the sum ends with a shard.
    Returns the last lookup of the sum, and from bit 32 on how many it has.
    """
    n, count = cgutils.alloca_once(b, I64), cgutils.alloca_once(b, I64)
    for _, sums in _in_registers(b, dim):
        body, more, after = (b.append_basic_block(name) for name in ("lookup", "more", "done"))
        b.store(first, n)
        b.store(I64(0), count)
        b.branch(body)
        b.position_at_end(body)
        at = b.load(n)
        source = b.load(sources.at(at))
        place = b.and_(source, I64(2**shard_bits - 1)) if shard_bits else source
        _add_row(b, sums, grad.row(place), b.load(scales.at(at)) if scaled else None)
        done = b.add(b.load(count), I64(1))
        b.store(done, count)
        ended = b.or_(b.icmp_signed("==", at, last), b.icmp_signed("==", done, I64(most)))
        b.cbranch(ended, after, more)
        b.position_at_end(more)
        later = b.zext(b.load(following.at(at)), I64)
        if shard_bits:
            other = b.xor(b.load(sources.at(later)), source)
            same = b.icmp_unsigned("<", other, I64(2**shard_bits))
            following_on = b.append_basic_block("same")
            b.cbranch(same, following_on, after)
            b.position_at_end(following_on)
        b.store(later, n)
        b.branch(body)
        b.position_at_end(after)
        for kept, start, _ in sums:
            out.store(start, Vec(b, [b.load(kept)]))
    return b.or_(b.load(n), b.shl(b.load(count), I64(32)))


@operation
def row_scale(b: ir.IRBuilder, dim: Known, out: Row, scale: Float) -> None:
    """Do ``out *= scale``."""
    for start, width in chunks(dim):
        out.store(start, out.load(start, width) * scale)


@operation
def row_dot(b: ir.IRBuilder, dim: Known, left: Row, right: Row) -> Float:
    """Return the dot product of two rows, summed in sixteen lanes."""
    products = [(left.load(start, width) * right.load(start, width)).parts[0] for start, width in chunks(dim)]
    total = add_lanes(b, FLOAT, products)
    result: ir.Value = FLOAT(0.0)
    for lane in range(LANES):
        result = b.fadd(result, b.extract_element(total, I32(lane)))
    return result


@operation
def row_init(b: ir.IRBuilder, dim: Int, out: Row, key: Int, counter: Int, scale: Float) -> None:
    """Do reference.init_rows for ``dim`` elements; ``counter`` is that of the first."""
    begin = I64(0)
    for width in (LANES, 1):
        end = b.and_(dim, I64(-width))
        with cgutils.for_range_slice(b, begin, end, I64(width)) as (at, _):
            bits = counter_bits(b, key, b.add(counter, at), 0, width)
            top = b.trunc(b.lshr(bits, ir.Constant(bits.type, [40] * width)), ir.VectorType(I32, width))
            unit = Vec(b, [b.uitofp(top, ir.VectorType(FLOAT, width))]) * 2.0**-23 - 1.0
            out.behind(at).store(0, unit * scale)
        begin = end


@operation
def row_condition(b: ir.IRBuilder, dim: Known, flags: Known, grad: Row, row: Row, count: Int, constants: Array) -> None:
    """Clip and decay the gradient of a row in place (:func:`stoker.ops.rule.condition`)."""
    occurs = Vec(b, [b.sitofp(count, FLOAT)])
    grad.store(0, condition(Vectors, _Loaded(constants), flags, grad.whole(dim), row.whole(dim), occurs))


@operation
def row_sgd(b: ir.IRBuilder, dim: Known, row: Row, grad: Row, lr: Float, key: Int, counter: Int) -> None:
    """Do ``row -= lr * grad``."""
    for start, width in chunks(dim):
        row.store(start, row.load(start, width) - grad.load(start, width) * lr, key, counter)


@operation
def row_step(
    b: ir.IRBuilder, dim: Known, code: Known, row: Row, state: Row, state2: Row, grad: Row, constants: Array, key: Int,
    counter: Int,
) -> None:  # fmt: skip
    """Do the step of the rule with this code on a row and its states; a state of one number begins there, too."""
    rule = next(rule for rule in RULES.values() if rule.code == code)
    c = _Loaded(constants)
    if rule.scalar:
        total = state.pointer
        given = row.whole(dim), grad.whole(dim), Vec(b, [b.load(total)])
        value, moved = rule.step(Vectors, c, *given)
        b.store(moved.parts[0], total)
        row.store(0, value, key, counter)
        return
    states = (state, state2)[: len(rule.state)]
    for start, width in chunks(dim):
        value, *moved = rule.step(Vectors, c, *(part.load(start, width) for part in (row, grad, *states)))
        for target, part in zip(states, moved, strict=True):
            target.store(start, part)
        row.store(start, value, key, counter)


@operation
def row_lamb(
    b: ir.IRBuilder, dim: Known, flags: Known, weight: Array, at: Int, mean: Array, square: Array, out: Row,
    constants: Array,
) -> None:  # fmt: skip
    """Update the moments by the gradient in ``out``, and write LAMB's direction there. DECOUPLED: decay."""
    c, row, moved = _Loaded(constants), weight.row(at), (mean.row(at), square.row(at))
    for start, width in chunks(dim):
        m, v = (each.load(start, width) for each in moved)
        m, v = moments(c, out.load(start, width), m, v)
        for target, part in zip(moved, (m, v), strict=True):
            target.store(start, part)
        u = direction(Vectors, c, m, v)
        out.store(start, u + row.load(start, width) * c.l2 if flags & DECOUPLED else u)


@operation
def row_squares(b: ir.IRBuilder, dim: Known, row: Row) -> Double:
    """Return reference.row_norm_squared of a row in float64."""
    wide = ir.DoubleType()

    def square(lanes: ir.Value) -> ir.Value:
        doubled = b.fpext(lanes, ir.VectorType(wide, LANES))
        return b.fmul(doubled, doubled)

    return fold(b, add_lanes(b, wide, row.whole(dim).parts, square))
