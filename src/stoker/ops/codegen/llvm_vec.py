"""A vector value in LLVM code, with the arithmetic of IEEE float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

_F32, _I32 = ir.FloatType(), ir.IntType(32)


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
    function = cgutils.get_or_insert_function(
        b.module,
        ir.FunctionType(value.type, [value.type]),
        f"llvm.sqrt.{suffix}",  # type: ignore[no-untyped-call]
    )
    return b.call(function, [value])
