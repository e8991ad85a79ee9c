"""Row operations for Numba: each works on one row of ``dim`` elements at an element offset of a flat array.

Results equal :mod:`stoker.ops.reference` to the bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from stoker.ops.codegen.llvm import (
    FLOAT,
    I32,
    I64,
    LANES,
    Array,
    Double,
    Float,
    Int,
    Known,
    Row,
    Size,
    Vec,
    Vectors,
    add_lanes,
    chunks,
    counter_bits,
    fold,
    operation,
)
from stoker.ops.rule import RULES, Constants, condition, direction, moments

MOVE, DECOUPLED = 16, 32  # flags of row_lamb


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


def _init(b: ir.IRBuilder, row: Row, start: int, width: int, key: Int, counter: Int, scale: Float) -> None:
    bits = counter_bits(b, key, counter, start, width)
    top = b.trunc(b.lshr(bits, ir.Constant(bits.type, [40] * width)), ir.VectorType(I32, width))
    unit = Vec(b, [b.uitofp(top, ir.VectorType(FLOAT, width))]) * 2.0**-23 - 1.0
    row.store(start, unit * scale)


@operation
def row_init(b: ir.IRBuilder, dim: Size, out: Row, key: Int, counter: Int, scale: Float) -> None:
    """Do reference.init_rows for ``dim`` elements; ``counter`` is that of the first."""
    if isinstance(dim, int):
        for start, width in chunks(dim):
            _init(b, out, start, width, key, counter, scale)
        return
    begin = I64(0)
    for width in (LANES, 1):
        end = b.and_(dim, I64(-width))
        with cgutils.for_range_slice(b, begin, end, I64(width)) as (at, _):
            _init(b, out.behind(at), 0, width, key, b.add(counter, at), scale)
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
    """Write LAMB's direction to out. MOVE: update the moments by the gradient in ``out`` first. DECOUPLED: decay."""
    c, row, moved = _Loaded(constants), weight.row(at), (mean.row(at), square.row(at))
    for start, width in chunks(dim):
        m, v = (each.load(start, width) for each in moved)
        if flags & MOVE:
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
