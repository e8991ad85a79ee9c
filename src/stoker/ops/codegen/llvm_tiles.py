"""The inner loop of small matrix products, as vector code for LLVM (see :mod:`stoker.ops.codegen.llvm_rows`).

A tile of the result stays in registers while its products are summed, in order of the inner index and by fused
multiply-add where the processor has it: an element of the result does not depend on the tile that computed it.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from stoker.ops.codegen.llvm_pairs import LANES, _data, _multiply_add, _splat

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


def _codegen(across: bool):
    """Code of a tile of ``height`` x (``vectors`` * LANES) results."""

    def codegen(context, b, signature, args):
        height, vectors = signature.args[0].literal_value, signature.args[1].literal_value
        left, right, out = (_data(context, b, signature.args[at], args[at]) for at in (2, 6, 9))
        offsets = _data(context, b, signature.args[3], args[3])
        first, count, right_at, right_stride, out_at, out_stride = (args[at] for at in (4, 5, 7, 8, 10, 11))
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(b, zero) for _ in range(vectors)] for _ in range(height)]
        if not across:
            starts = [b.gep(left, [b.load(b.gep(offsets, [b.add(first, _I64(row))]))]) for row in range(height)]
        with cgutils.for_range(b, count, intp=_I64) as loop:
            line = b.gep(right, [b.add(right_at, b.mul(loop.index, right_stride))])
            given = [
                b.load(b.bitcast(b.gep(line, [_I64(LANES * place)]), _VECTOR.as_pointer()), align=4)
                for place in range(vectors)
            ]
            if across:
                start = b.gep(left, [b.add(b.load(b.gep(offsets, [loop.index])), first)])
            for row in range(height):
                at = b.gep(start, [_I64(row)]) if across else b.gep(starts[row], [loop.index])
                scalar = _splat(b, b.load(at), LANES)
                for place in range(vectors):
                    memory = sums[row][place]
                    b.store(_multiply_add(b, scalar, given[place], b.load(memory)), memory)
        for row in range(height):
            target = b.gep(out, [b.add(out_at, b.mul(out_stride, _I64(row)))])
            for place in range(vectors):
                at = b.bitcast(b.gep(target, [_I64(LANES * place)]), _VECTOR.as_pointer())
                b.store(b.load(sums[row][place]), at, align=4)
        return context.get_dummy_value()

    return codegen


@intrinsic(prefer_literal=True)
def tile_product(
    typingctx, height, vectors, left, offsets, first, count, right, right_at, right_stride, out, out_at, out_stride
):
    """``out[i, j] = sum over k < count of left[offsets[first + i] + k] * right[k, j]``, i < height, j < 16 * vectors.

    ``right`` and ``out`` begin at an element of a flat array and have a stride; ``height``, ``vectors`` are literals.
    """
    i = types.intp
    signature = types.void(height, vectors, left, offsets, i, i, right, i, i, out, i, i)
    return signature, _codegen(across=False)


@intrinsic(prefer_literal=True)
def tile_across(
    typingctx, height, vectors, left, offsets, first, count, right, right_at, right_stride, out, out_at, out_stride
):
    """``out[i, j] = sum over k < count of left[offsets[k] + first + i] * right[k, j]``: the left side lies turned."""
    i = types.intp
    signature = types.void(height, vectors, left, offsets, i, i, right, i, i, out, i, i)
    return signature, _codegen(across=True)
