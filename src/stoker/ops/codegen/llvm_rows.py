"""Row operations for Numba, written as vector code for LLVM.

Each intrinsic works on one row of ``dim`` elements (a compile-time constant) at an element offset of a flat array.
Written out as vectors because LLVM's loop vectorizer gives up on short rows in arrays that might overlap. Vectors
wider than the machine's are split by LLVM, so the code runs on any processor; without fast-math flags every
operation is plain IEEE, so results equal :mod:`stoker.ops.reference` to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from stoker.ops.rule import CODES, STATE, Constants

# Flags of row_condition.
CLIP_VALUE, CLIP_NORM, DECAY, COW = 1, 2, 4, 8
MOVE = 16  # of row_lamb
L2 = 32  # of lamb's kernel: DECAY for row_condition, which DECAY is not there

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WIDEST = 64  # elements handled as one vector
_LANES = 16  # of the fixed summation tree (reference.row_norm_squared)


class Vec:
    """A vector value with the arithmetic of IEEE float32."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.b, self.value = builder, value

    @property
    def width(self) -> int:
        return int(self.value.type.count)

    def _lift(self, other: Vec | ir.Value | float) -> ir.Value:
        other = ir.Constant(_F32, other) if isinstance(other, float) else other
        return other.value if isinstance(other, Vec) else splat(self.b, other, self.width)

    def __add__(self, other: Any) -> Vec:
        return Vec(self.b, self.b.fadd(self.value, self._lift(other)))

    def __sub__(self, other: Any) -> Vec:
        return Vec(self.b, self.b.fsub(self.value, self._lift(other)))

    def __mul__(self, other: Any) -> Vec:
        return Vec(self.b, self.b.fmul(self.value, self._lift(other)))

    def __truediv__(self, other: Any) -> Vec:
        return Vec(self.b, self.b.fdiv(self.value, self._lift(other)))

    def sqrt(self) -> Vec:
        return Vec(self.b, vector_sqrt(self.b, self.value))

    def compare(self, relation: str, other: Any) -> ir.Value:
        """Compare each element; not-a-number compares as false."""
        return self.b.fcmp_ordered(relation, self.value, self._lift(other))

    def where(self, condition: ir.Value, other: Vec) -> Vec:
        """These elements where ``condition`` holds, those of ``other`` elsewhere."""
        return Vec(self.b, self.b.select(condition, self.value, other.value))

    def clamp(self, limit: ir.Value) -> Vec:
        high = splat(self.b, limit, self.width)
        low = self.b.fneg(high)
        value = self.b.select(self.b.fcmp_ordered(">", self.value, high), high, self.value)
        return Vec(self.b, self.b.select(self.b.fcmp_ordered("<", value, low), low, value))

    def lanes(self, start: int, count: int, padded: int) -> ir.Value:
        """Elements start..start+count, then zeros up to ``padded``."""
        mask = [start + i if i < count else self.width for i in range(padded)]
        zero = ir.Constant(self.value.type, None)
        return self.b.shuffle_vector(self.value, zero, ir.Constant(ir.VectorType(_I32, padded), mask))


def splat(b: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    kind = ir.VectorType(scalar.type, width)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, width), [0] * width))


def vector_sqrt(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    suffix = f"v{value.type.count}f32" if isinstance(value.type, ir.VectorType) else "f32"
    kind = ir.FunctionType(value.type, [value.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.sqrt.{suffix}"), [value])


# The steps of the rules that treat every element of a row alike, as stoker.ops.reference.update_rows does them, in the
# same order: from the constants by name (stoker.ops.rule.Constants), the row, its gradient and its state tensors to the
# new row and states.
_Constants = Callable[[str], Any]


def _adagrad(c: _Constants, w: Vec, g: Vec, total: Vec) -> tuple[Vec, ...]:
    total = total + g * g
    return w - (g * c("lr")) / (total.sqrt() + c("eps")), total


def _adam(c: _Constants, w: Vec, g: Vec, mean: Vec, square: Vec) -> tuple[Vec, ...]:
    mean = mean * c("beta1") + g * c("rest1")
    square = square * c("beta2") + (g * g) * c("rest2")
    return w * c("keep") - (mean * c("lr")) / (square.sqrt() * c("unbias") + c("eps")), mean, square


def _momentum(c: _Constants, w: Vec, g: Vec, buffer: Vec) -> tuple[Vec, ...]:
    buffer = buffer * c("beta1") + g
    return w - buffer * c("lr"), buffer


def _nesterov(c: _Constants, w: Vec, g: Vec, buffer: Vec) -> tuple[Vec, ...]:
    buffer = buffer * c("beta1") + g
    return w - (g + buffer * c("beta1")) * c("lr"), buffer


def _ftrl(c: _Constants, w: Vec, g: Vec, before: Vec, linear: Vec) -> tuple[Vec, ...]:
    total = before + g * g
    root = total.sqrt()
    fresh = (w * c("eps")).where(linear.compare("==", 0.0), linear)
    linear = fresh.where(before.compare("==", 0.0), linear) + (root - before.sqrt()) * w - g * c("lr")
    above, below = linear - c("l1"), linear + c("l1")
    shrunk = above.where(above.compare(">", 0.0), below.where(below.compare("<", 0.0), linear * 0.0))
    scale = root + c("eps") + c("l2")
    return w.where(scale.compare("==", 0.0), shrunk / scale), total, linear


_STEPS: dict[str, Callable[..., tuple[Vec, ...]]] = {
    "adagrad": _adagrad, "adam": _adam, "momentum": _momentum, "nesterov": _nesterov, "ftrl": _ftrl,
}  # fmt: skip


def _chunks(dim: int) -> Iterator[tuple[int, int]]:
    for start in range(0, dim, _WIDEST):
        yield start, min(_WIDEST, dim - start)


def _bits(b: ir.IRBuilder, key: ir.Value, counter: ir.Value, start: int, width: int) -> ir.Value:
    """reference.counter_bits(key, counter + start + [0, 1, ..., width - 1])."""
    kind = ir.VectorType(_I64, width)
    steps = ir.Constant(kind, [start + i + 1 for i in range(width)])
    golden = ir.Constant(kind, [0x9E3779B97F4A7C15] * width)
    z = b.add(b.mul(b.add(splat(b, counter, width), steps), golden), splat(b, key, width))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = b.xor(z, b.lshr(z, ir.Constant(kind, [shift] * width)))
        z = b.mul(z, ir.Constant(kind, [factor] * width))
    return b.xor(z, b.lshr(z, ir.Constant(kind, [31] * width)))


class _Row:
    """One row in memory: ``dim`` elements of a float32 array, or of a uint16 array that holds bfloat16."""

    def __init__(self, context: Any, b: ir.IRBuilder, kind: types.Array, array: ir.Value, offset: ir.Value) -> None:
        data = context.make_array(kind)(context, b, array).data
        self.b, self.half = b, kind.dtype == types.uint16
        self.pointer = b.gep(data, [offset])

    def _at(self, start: int, kind: ir.Type) -> ir.Value:
        return self.b.bitcast(self.b.gep(self.pointer, [ir.Constant(_I64, start)]), kind.as_pointer())

    def load(self, start: int, width: int) -> Vec:
        b = self.b
        if not self.half:
            return Vec(b, b.load(self._at(start, ir.VectorType(_F32, width)), align=4))
        raw = b.zext(b.load(self._at(start, ir.VectorType(_I16, width)), align=2), ir.VectorType(_I32, width))
        raw = b.shl(raw, ir.Constant(raw.type, [16] * width))
        return Vec(b, b.bitcast(raw, ir.VectorType(_F32, width)))

    def store(self, start: int, vec: Vec, key: ir.Value | None = None, counter: ir.Value | None = None) -> None:
        b, width = self.b, vec.width
        if not self.half:
            b.store(vec.value, self._at(start, vec.value.type), align=4)
            return
        ints = ir.VectorType(_I32, width)
        raw = b.bitcast(vec.value, ints)
        if key is None:
            odd = b.and_(b.lshr(raw, ir.Constant(ints, [16] * width)), ir.Constant(ints, [1] * width))
            increment = b.add(odd, ir.Constant(ints, [0x7FFF] * width))  # to nearest, ties to even
        else:
            bits = _bits(b, key, counter, start, width)
            increment = b.trunc(b.lshr(bits, ir.Constant(bits.type, [48] * width)), ints)
        exponent = b.and_(raw, ir.Constant(ints, [0x7F800000] * width))
        special = b.icmp_unsigned("==", exponent, ir.Constant(ints, [0x7F800000] * width))
        # A truncated not-a-number could turn into infinity: keep it quiet by setting a high mantissa bit.
        mantissa = b.and_(raw, ir.Constant(ints, [0x007FFFFF] * width))
        is_nan = b.icmp_unsigned("!=", mantissa, ir.Constant(ints, [0] * width))
        kept = b.select(is_nan, ir.Constant(ints, [0x7FC00000] * width), raw)
        raw = b.select(special, kept, b.add(raw, increment))
        short = b.trunc(b.lshr(raw, ir.Constant(ints, [16] * width)), ir.VectorType(_I16, width))
        b.store(short, self._at(start, short.type), align=2)


def _norm_squared(b: ir.IRBuilder, parts: list[Vec]) -> ir.Value:
    """reference.row_norm_squared of the chunks of one row: a float."""
    total = ir.Constant(ir.VectorType(_F32, _LANES), [0.0] * _LANES)
    for part in parts:
        squares = part * part
        for start in range(0, part.width, _LANES):
            total = b.fadd(total, squares.lanes(start, min(_LANES, part.width - start), _LANES))
    width = _LANES
    lanes = Vec(b, total)
    while width > 1:
        width //= 2
        low, high = lanes.lanes(0, width, width), lanes.lanes(width, width, width)
        lanes = Vec(b, b.fadd(low, high))
    return b.extract_element(lanes.value, ir.Constant(_I32, 0))


@intrinsic(prefer_literal=True)
def row_copy(typingctx, dim, out, out_at, row, row_at):
    """``out[...] = row[...]``, converted to float32."""
    signature = types.void(dim, out, types.intp, row, types.intp)

    def codegen(context, b, signature, args):
        target = _Row(context, b, signature.args[1], args[1], args[2])
        source = _Row(context, b, signature.args[3], args[3], args[4])
        for start, width in _chunks(signature.args[0].literal_value):
            target.store(start, source.load(start, width))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_accumulate(typingctx, dim, scaled, fresh, out, out_at, row, row_at, scale):
    """``out += row * scale``, from +0.0 if ``fresh``; without the product unless ``scaled`` (both literals)."""
    signature = types.void(dim, scaled, fresh, out, types.intp, row, types.intp, types.float32)

    def codegen(context, b, signature, args):
        kinds = signature.args
        target = _Row(context, b, kinds[3], args[3], args[4])
        source = _Row(context, b, kinds[5], args[5], args[6])
        for start, width in _chunks(kinds[0].literal_value):
            value = source.load(start, width)
            if kinds[1].literal_value:
                value = value * args[7]
            zero = Vec(b, ir.Constant(ir.VectorType(_F32, width), [0.0] * width))
            target.store(start, (zero if kinds[2].literal_value else target.load(start, width)) + value)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_scale(typingctx, dim, out, out_at, scale):
    """``out *= scale``."""
    signature = types.void(dim, out, types.intp, types.float32)

    def codegen(context, b, signature, args):
        target = _Row(context, b, signature.args[1], args[1], args[2])
        for start, width in _chunks(signature.args[0].literal_value):
            target.store(start, target.load(start, width) * args[3])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_dot(typingctx, dim, left, left_at, right, right_at):
    """Dot product of two rows, summed in sixteen lanes."""
    signature = types.float32(dim, left, types.intp, right, types.intp)

    def codegen(context, b, signature, args):
        first = _Row(context, b, signature.args[1], args[1], args[2])
        second = _Row(context, b, signature.args[3], args[3], args[4])
        total = ir.Constant(ir.VectorType(_F32, _LANES), [0.0] * _LANES)
        for start, width in _chunks(signature.args[0].literal_value):
            product = first.load(start, width) * second.load(start, width)
            for lane in range(0, width, _LANES):
                total = b.fadd(total, product.lanes(lane, min(_LANES, width - lane), _LANES))
        result: ir.Value = ir.Constant(_F32, 0.0)
        for lane in range(_LANES):
            result = b.fadd(result, b.extract_element(total, ir.Constant(_I32, lane)))
        return result

    return signature, codegen


def _init(
    b: ir.IRBuilder, target: _Row, start: int, width: int, key: ir.Value, counter: ir.Value, scale: ir.Value
) -> None:
    bits = _bits(b, key, counter, start, width)
    top = b.trunc(b.lshr(bits, ir.Constant(bits.type, [40] * width)), ir.VectorType(_I32, width))
    unit = Vec(b, b.uitofp(top, ir.VectorType(_F32, width)))
    unit = unit * ir.Constant(_F32, 2.0**-23) - ir.Constant(_F32, 1.0)
    target.store(start, unit * scale)


@intrinsic(prefer_literal=True)
def row_init(typingctx, dim, out, out_at, key, counter, scale):
    """reference.init_rows for ``dim`` elements, here any number, of which the first has ``counter``."""
    known = isinstance(dim, types.IntegerLiteral)
    signature = types.void(dim if known else types.intp, out, types.intp, types.int64, types.int64, types.float32)

    def codegen(context, b, signature, args):
        if known:
            target = _Row(context, b, signature.args[1], args[1], args[2])
            for start, width in _chunks(dim.literal_value):
                _init(b, target, start, width, args[3], args[4], args[5])
            return context.get_dummy_value()
        begin = ir.Constant(_I64, 0)
        for width in (_LANES, 1):
            end = b.and_(args[0], ir.Constant(_I64, -width))
            with cgutils.for_range_slice(b, begin, end, ir.Constant(_I64, width)) as (at, _):
                target = _Row(context, b, signature.args[1], args[1], b.add(args[2], at))
                _init(b, target, 0, width, args[3], b.add(args[4], at), args[5])
            begin = end
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_condition(
    typingctx, dim, flags, grad, grad_at, row, row_at, clip_value, clip_norm, decay, count, cow_ratio, cow_floor
):
    """Clip and decay the gradient of a row in place, as reference.update_rows does; ``flags`` is a literal, ``count``
    how often the row occurs."""
    f32 = types.float32
    signature = types.void(dim, flags, grad, types.intp, row, types.intp, f32, f32, f32, types.int64, f32, f32)

    def codegen(context, b, signature, args):
        flags = signature.args[1].literal_value
        grad = _Row(context, b, signature.args[2], args[2], args[3])
        row = _Row(context, b, signature.args[4], args[4], args[5])
        chunks = list(_chunks(signature.args[0].literal_value))
        parts = [grad.load(start, width) for start, width in chunks]
        if flags & CLIP_VALUE:
            parts = [part.clamp(args[6]) for part in parts]
        if flags & CLIP_NORM:
            norm = vector_sqrt(b, _norm_squared(b, parts))
            scale = b.select(b.fcmp_ordered(">", norm, args[7]), b.fdiv(args[7], norm), ir.Constant(_F32, 1.0))
            parts = [part * scale for part in parts]
        if flags & COW:
            own = b.fmul(
                vector_sqrt(b, _norm_squared(b, [row.load(start, width) for start, width in chunks])), args[10]
            )
            limit = b.select(b.fcmp_ordered(">", own, args[11]), own, args[11])
            limit = b.fmul(b.sitofp(args[9], _F32), limit)
            norm = vector_sqrt(b, _norm_squared(b, parts))
            scale = b.select(b.fcmp_ordered(">", norm, limit), b.fdiv(limit, norm), ir.Constant(_F32, 1.0))
            parts = [part * scale for part in parts]
        for (start, width), part in zip(chunks, parts, strict=True):
            if flags & DECAY:
                part = part + row.load(start, width) * args[8]
            grad.store(start, part)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_sgd(typingctx, dim, row, row_at, grad, grad_at, lr, key, counter):
    """``row -= lr * grad``."""
    signature = types.void(dim, row, types.intp, grad, types.intp, types.float32, types.int64, types.int64)

    def codegen(context, b, signature, args):
        row = _Row(context, b, signature.args[1], args[1], args[2])
        grad = _Row(context, b, signature.args[3], args[3], args[4])
        for start, width in _chunks(signature.args[0].literal_value):
            value = row.load(start, width) - grad.load(start, width) * args[5]
            row.store(start, value, args[6], args[7])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_rowwise_adagrad(typingctx, dim, row, row_at, total, index, grad, grad_at, lr, eps, share, key, counter):
    """``total[index] += mean(grad**2); row -= lr / (sqrt(total[index]) + eps) * grad``; ``share`` is 1/dim."""
    f32 = types.float32
    signature = types.void(
        dim, row, types.intp, total, types.intp, grad, types.intp, f32, f32, f32, types.int64, types.int64
    )

    def codegen(context, b, signature, args):
        row = _Row(context, b, signature.args[1], args[1], args[2])
        pointer = _Row(context, b, signature.args[3], args[3], args[4]).pointer
        grad = _Row(context, b, signature.args[5], args[5], args[6])
        chunks = list(_chunks(signature.args[0].literal_value))
        parts = [grad.load(start, width) for start, width in chunks]
        total = b.fadd(b.load(pointer), b.fmul(_norm_squared(b, parts), args[9]))
        b.store(total, pointer)
        step = b.fdiv(args[7], b.fadd(vector_sqrt(b, total), args[8]))
        for (start, width), part in zip(chunks, parts, strict=True):
            row.store(start, row.load(start, width) - part * step, args[10], args[11])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_step(typingctx, dim, rule, row, row_at, state, state2, grad, grad_at, constants, key, counter):
    """The step of the rule with code ``rule`` (a literal) on a row and its states; ``constants`` holds Constants."""
    i64 = types.int64
    signature = types.void(dim, rule, row, types.intp, state, state2, grad, types.intp, constants, i64, i64)

    def codegen(context, b, signature, args):
        kinds = signature.args
        kind = next(kind for kind, code in CODES.items() if code == kinds[1].literal_value)
        row = _Row(context, b, kinds[2], args[2], args[3])
        states = [_Row(context, b, kinds[4 + i], args[4 + i], args[3]) for i in range(len(STATE[kind]))]
        grad = _Row(context, b, kinds[6], args[6], args[7])
        data = context.make_array(kinds[8])(context, b, args[8]).data
        loaded: dict[str, ir.Value] = {}

        def constant(name: str) -> ir.Value:
            if name not in loaded:
                loaded[name] = b.load(b.gep(data, [ir.Constant(_I64, Constants._fields.index(name))]))
            return loaded[name]

        for start, width in _chunks(kinds[0].literal_value):
            parts = (part.load(start, width) for part in (row, grad, *states))
            value, *moved = _STEPS[kind](constant, *parts)
            for target, part in zip(states, moved, strict=True):
                target.store(start, part)
            row.store(start, value, args[9], args[10])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_lamb(typingctx, dim, flags, row, row_at, mean, square, out, out_at, constants):
    """LAMB's direction into ``out``; literal ``flags``: MOVE, ``out`` holds the gradient, with which the moments move
    first, and DECAY. ``constants`` is [beta1, 1 - beta1, beta2, 1 - beta2, 1/bias1, 1/sqrt(bias2), eps, decay]."""
    signature = types.void(dim, flags, row, types.intp, mean, square, out, types.intp, constants)

    def codegen(context, b, signature, args):
        kinds = signature.args
        flags = kinds[1].literal_value
        row = _Row(context, b, kinds[2], args[2], args[3])
        mean = _Row(context, b, kinds[4], args[4], args[3])
        square = _Row(context, b, kinds[5], args[5], args[3])
        out = _Row(context, b, kinds[6], args[6], args[7])
        data = context.make_array(kinds[8])(context, b, args[8]).data
        loaded = (b.load(b.gep(data, [ir.Constant(_I64, i)])) for i in range(8))
        beta1, rest1, beta2, rest2, step, root, eps, decay = loaded
        for start, width in _chunks(kinds[0].literal_value):
            m, v = mean.load(start, width), square.load(start, width)
            if flags & MOVE:
                g = out.load(start, width)
                m, v = m * beta1 + g * rest1, v * beta2 + (g * g) * rest2
                mean.store(start, m)
                square.store(start, v)
            direction = (m * step) / (v.sqrt() * root + eps)
            if flags & DECAY:
                direction = direction + row.load(start, width) * decay
            out.store(start, direction)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_squares(typingctx, dim, row, row_at):
    """reference.row_norm_squared of a row in float64."""
    signature = types.float64(dim, row, types.intp)

    def codegen(context, b, signature, args):
        row = _Row(context, b, signature.args[1], args[1], args[2])
        wide = ir.DoubleType()
        total = ir.Constant(ir.VectorType(wide, _LANES), [0.0] * _LANES)
        for start, width in _chunks(signature.args[0].literal_value):
            part = row.load(start, width)
            for begin in range(0, width, _LANES):
                lanes = b.fpext(part.lanes(begin, min(_LANES, width - begin), _LANES), total.type)
                total = b.fadd(total, b.fmul(lanes, lanes))
        width = _LANES
        while width > 1:
            width //= 2
            low, high = (Vec(b, total).lanes(first, width, width) for first in (0, width))
            total = b.fadd(low, high)
        return b.extract_element(total, ir.Constant(_I32, 0))

    return signature, codegen
