"""Operations for Numba, written for LLVM: types of their arguments, and vectors with IEEE arithmetic.

An operation is a function of an IR builder and arguments, whose annotations say what Numba passes::

    @operation
    def row_copy(b, dim: Known, out: Row, row: Row) -> None:
        for start, width in chunks(dim):
            out.store(start, row.load(start, width))

Compiled code calls it as ``row_copy(dim, out, out_at, row, row_at)``: a row is an array and an element offset.

Vectors are written out because LLVM's loop vectorizer gives up on short rows in arrays that might overlap. Vectors
wider than the machine's are split by LLVM, so the code runs on any processor; without fast-math flags every operation
is plain IEEE.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
BYTE = ir.IntType(8).as_pointer()
LANES = 16  # elements of a cache line, and of the fixed summation tree (reference.row_norm_squared)
WIDEST = 64  # elements handled as one vector

Known: TypeAlias = int  # known when the caller is compiled
Size: TypeAlias = "int | ir.Value"  # known or not
Int: TypeAlias = ir.Value  # int64
Float: TypeAlias = ir.Value  # float32
Double: TypeAlias = ir.Value  # float64
IRValues = list[ir.Value]
_NUMBERS = {"Int": types.int64, "Float": types.float32, "Double": types.float64, "None": types.void}


class Array:
    """A flat array."""

    def __init__(self, b: ir.IRBuilder, kind: types.Array, data: ir.Value) -> None:
        self.b, self.kind, self.data = b, kind, data

    def at(self, offset: ir.Value) -> ir.Value:
        """Return the address of an element."""
        return self.b.gep(self.data, [offset])

    def row(self, offset: ir.Value) -> Row:
        """Return the row that begins at an element."""
        return Row(self, offset)


class Row:
    """A row in memory: elements of a float32 array, or of a uint16 array that holds bfloat16."""

    def __init__(self, array: Array, offset: ir.Value) -> None:
        self.b, self.half = array.b, array.kind.dtype == types.uint16
        self._array, self._offset, self.pointer = array, offset, array.at(offset)

    def behind(self, offset: ir.Value) -> Row:
        """Return the row that begins ``offset`` elements later."""
        return Row(self._array, self.b.add(self._offset, offset))

    @property
    def bytes(self) -> ir.Value:
        """Where the row begins, as the address of a byte; elements may be of any type."""
        return self.b.bitcast(self.pointer, BYTE)

    def _at(self, start: int, kind: ir.Type) -> ir.Value:
        return self.b.bitcast(self.b.gep(self.pointer, [I64(start)]), kind.as_pointer())

    def whole(self, dim: int) -> Vec:
        """Load all ``dim`` elements."""
        return Vec(self.b, [part for start, width in chunks(dim) for part in self.load(start, width).parts])

    def load(self, start: int, width: int) -> Vec:
        """Load ``width`` elements from element ``start`` on."""
        b = self.b
        if not self.half:
            return Vec(b, [b.load(self._at(start, ir.VectorType(FLOAT, width)), align=4)])
        raw = b.zext(b.load(self._at(start, ir.VectorType(I16, width)), align=2), ir.VectorType(I32, width))
        raw = b.shl(raw, ir.Constant(raw.type, [16] * width))
        return Vec(b, [b.bitcast(raw, ir.VectorType(FLOAT, width))])

    def store(self, start: int, vec: Vec, key: ir.Value | None = None, counter: ir.Value | None = None) -> None:
        """Store ``vec`` from element ``start`` on. Bfloat16 is rounded randomly by ``key``; None: to nearest."""
        for part in vec.parts:
            self._store(start, part, key, counter)
            start += part.type.count

    def _store(self, start: int, value: ir.Value, key: ir.Value | None, counter: ir.Value | None) -> None:
        b, width = self.b, value.type.count
        if not self.half:
            b.store(value, self._at(start, value.type), align=4)
            return
        ints = ir.VectorType(I32, width)
        raw = b.bitcast(value, ints)
        if key is None:
            odd = b.and_(b.lshr(raw, ir.Constant(ints, [16] * width)), ir.Constant(ints, [1] * width))
            increment = b.add(odd, ir.Constant(ints, [0x7FFF] * width))  # to nearest, ties to even
        else:
            bits = counter_bits(b, key, counter, start, width)
            increment = b.trunc(b.lshr(bits, ir.Constant(bits.type, [48] * width)), ints)
        exponent = b.and_(raw, ir.Constant(ints, [0x7F800000] * width))
        special = b.icmp_unsigned("==", exponent, ir.Constant(ints, [0x7F800000] * width))
        # A truncated not-a-number could become infinity: set a high mantissa bit, which keeps it quiet.
        mantissa = b.and_(raw, ir.Constant(ints, [0x007FFFFF] * width))
        is_nan = b.icmp_unsigned("!=", mantissa, ir.Constant(ints, [0] * width))
        kept = b.select(is_nan, ir.Constant(ints, [0x7FC00000] * width), raw)
        raw = b.select(special, kept, b.add(raw, increment))
        short = b.trunc(b.lshr(raw, ir.Constant(ints, [16] * width)), ir.VectorType(I16, width))
        b.store(short, self._at(start, short.type), align=2)


class Vec:
    """Elements of a row as vectors, or one number, with the arithmetic of IEEE float32.

    The right side of an operator may be a number: it applies to every element.
    """

    def __init__(self, b: ir.IRBuilder, parts: IRValues) -> None:
        self.b, self.parts = b, parts

    def _lift(self, other: Vec | ir.Value | float) -> IRValues:
        """Return ``other`` in the shape of this."""
        if isinstance(other, Vec) and len(other.parts) == len(self.parts) and other.parts[0].type == self.parts[0].type:
            return other.parts
        number = other.parts[0] if isinstance(other, Vec) else other
        number = FLOAT(number) if isinstance(number, float) else number
        return [
            splat(self.b, number, p.type.count) if isinstance(p.type, ir.VectorType) else number for p in self.parts
        ]

    def _map(self, make: Callable[..., ir.Value], *others: Any) -> Vec:
        return Vec(self.b, [make(*parts) for parts in zip(self.parts, *map(self._lift, others), strict=True)])

    def __add__(self, other: Any) -> Vec:
        return self._map(self.b.fadd, other)

    def __sub__(self, other: Any) -> Vec:
        return self._map(self.b.fsub, other)

    def __mul__(self, other: Any) -> Vec:
        return self._map(self.b.fmul, other)

    def __truediv__(self, other: Any) -> Vec:
        return self._map(self.b.fdiv, other)

    def __gt__(self, other: Any) -> Vec:
        return self._map(partial(self.b.fcmp_ordered, ">"), other)

    def __lt__(self, other: Any) -> Vec:
        return self._map(partial(self.b.fcmp_ordered, "<"), other)


class Vectors:
    """Arithmetic of :mod:`stoker.ops.rule` on :class:`Vec`; not-a-number compares as false."""

    @staticmethod
    def sqrt(value: Vec) -> Vec:
        """Return the square roots, correctly rounded."""
        return value._map(partial(_sqrt, value.b))

    @staticmethod
    def norm(value: Vec) -> Vec:
        """Return the Euclidean norm of the row."""
        return Vectors.sqrt(Vectors.square_sum(value))

    @staticmethod
    def square_sum(value: Vec) -> Vec:
        """Return the sum of squares, in the order of :func:`add_lanes` and :func:`fold`."""
        squares = value * value
        return Vec(value.b, [fold(value.b, add_lanes(value.b, FLOAT, squares.parts))])

    @staticmethod
    def over(number: Vec | ir.Value, value: Vec) -> Vec:
        """Divide a number by each element."""
        return Vec(value.b, value._lift(number)) / value

    @staticmethod
    def is_zero(value: Vec) -> Vec:
        """Return which elements are 0."""
        return value._map(partial(value.b.fcmp_ordered, "=="), 0.0)

    @staticmethod
    def where(condition: Vec, value: Vec, other: Any) -> Vec:
        """Choose between two elements by ``condition``."""
        parts = zip(condition.parts, value.parts, value._lift(other), strict=True)
        return Vec(value.b, [value.b.select(*each) for each in parts])

    @staticmethod
    def clamp(value: Vec, limit: ir.Value) -> Vec:
        """Limit each element to [-limit, limit]."""
        high = Vec(value.b, value._lift(limit))
        low = high._map(value.b.fneg)
        value = Vectors.where(value > high, high, value)
        return Vectors.where(value < low, low, value)


def chunks(dim: int) -> Iterator[tuple[int, int]]:
    """Yield where each vector of a row begins, and how many elements it has."""
    for start in range(0, dim, WIDEST):
        yield start, min(WIDEST, dim - start)


def splat(b: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    """Return a vector of ``width`` copies of ``scalar``."""
    kind = ir.VectorType(scalar.type, width)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, width), [0] * width))


def _sqrt(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    suffix = f"v{value.type.count}f32" if isinstance(value.type, ir.VectorType) else "f32"
    kind = ir.FunctionType(value.type, [value.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.sqrt.{suffix}"), [value])


def _lanes(b: ir.IRBuilder, value: ir.Value, start: int, count: int, padded: int) -> ir.Value:
    """Return elements start..start+count of a vector, then zeros up to ``padded``."""
    mask = [start + i if i < count else value.type.count for i in range(padded)]
    return b.shuffle_vector(value, ir.Constant(value.type, None), ir.Constant(ir.VectorType(I32, padded), mask))


def add_lanes(
    b: ir.IRBuilder, kind: ir.Type, parts: IRValues, change: Callable[[ir.Value], ir.Value] | None = None
) -> ir.Value:
    """Return sixteen sums of type ``kind``, each of every 16th element of ``parts``, in order, after ``change``."""
    total = ir.Constant(ir.VectorType(kind, LANES), [0.0] * LANES)
    for part in parts:
        width = part.type.count
        for start in range(0, width, LANES):
            lanes = _lanes(b, part, start, min(LANES, width - start), LANES)
            total = b.fadd(total, lanes if change is None else change(lanes))
    return total


def fold(b: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """Sum sixteen lanes, in halves, to a number."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = b.fadd(_lanes(b, lanes, 0, width, width), _lanes(b, lanes, width, width, width))
    return b.extract_element(lanes, I32(0))


def counter_bits(b: ir.IRBuilder, key: ir.Value, counter: ir.Value, start: int, width: int) -> ir.Value:
    """Compute reference.counter_bits(key, counter + start + [0, 1, ..., width - 1])."""
    kind = ir.VectorType(I64, width)
    steps = ir.Constant(kind, [start + i + 1 for i in range(width)])
    golden = ir.Constant(kind, [0x9E3779B97F4A7C15] * width)
    z = b.add(b.mul(b.add(splat(b, counter, width), steps), golden), splat(b, key, width))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = b.xor(z, b.lshr(z, ir.Constant(kind, [shift] * width)))
        z = b.mul(z, ir.Constant(kind, [factor] * width))
    return b.xor(z, b.lshr(z, ir.Constant(kind, [31] * width)))


def operation(body: Callable[..., Any]) -> Any:
    """Make ``body(b, ...)`` callable from compiled code; see the docstring of the module."""
    given = dict(list(inspect.signature(body).parameters.items())[1:])
    kinds = {name: str(parameter.annotation) for name, parameter in given.items()}
    names = [each for name, kind in kinds.items() for each in ((name, f"{name}_at") if kind == "Row" else (name,))]
    returned = _NUMBERS[str(inspect.signature(body).return_annotation)]

    def define(typingctx: Any, *arguments: Any) -> Any:
        passed = iter(arguments)
        fixed = []
        for kind in kinds.values():
            own = next(passed)
            known = isinstance(own, types.IntegerLiteral)
            fixed.append(_NUMBERS.get(kind, types.intp if kind == "Size" and not known else own))
            if kind == "Row":
                next(passed)
                fixed.append(types.intp)

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            values = []
            pairs = iter(zip(signature.args, args, strict=True))
            for kind in kinds.values():
                own, value = next(pairs)
                if isinstance(own, types.IntegerLiteral):
                    value = own.literal_value
                elif isinstance(own, types.Array):
                    value = Array(b, own, context.make_array(own)(context, b, value).data)
                values.append(value.row(next(pairs)[1]) if kind == "Row" else value)
            result = body(b, *values)
            return context.get_dummy_value() if result is None else result

        return returned(*fixed), generate

    define.__name__, define.__doc__ = body.__name__, body.__doc__
    order = inspect.Parameter.POSITIONAL_OR_KEYWORD
    define.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, order) for name in ("typingctx", *names)]
    )
    return intrinsic(prefer_literal=True)(define)
