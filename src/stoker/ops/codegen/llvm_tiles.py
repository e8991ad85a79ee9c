"""The inner loops of the pairwise interaction and of small matrix products, as vector code for LLVM (see
:mod:`stoker.ops.codegen.llvm_rows`).

Here fused multiply-add is welcome: both promise results within rounding of the reference, not bits. A tile of a product
stays in registers while its products are summed, in order of the inner index: an element of the result does not depend
on the tile that computed it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from stoker.ops.codegen.llvm_rows import splat

LANES = 16  # dot products done side by side

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _data(context: Any, b: ir.IRBuilder, kind: types.Array, array: ir.Value) -> ir.Value:
    return context.make_array(kind)(context, b, array).data


def _multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = z.type
    name = f"llvm.fmuladd.v{kind.count}f32"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z])


@intrinsic
def transpose(typingctx, rows, rows_at, row_stride, columns, columns_at, column_stride):
    """Turn a 16 by 16 block: ``columns[d * column_stride + v] = rows[v * row_stride + d]``."""
    i = types.intp
    signature = types.void(rows, i, i, columns, i, i)

    def codegen(context, b, signature, args):
        vector = ir.VectorType(_F32, LANES)
        source = b.gep(_data(context, b, signature.args[0], args[0]), [args[1]])
        target = b.gep(_data(context, b, signature.args[3], args[3]), [args[4]])
        block = [
            b.load(b.bitcast(b.gep(source, [b.mul(args[2], _I64(v))]), vector.as_pointer()), align=4)
            for v in range(LANES)
        ]
        lanes = ir.VectorType(_I32, LANES)
        size = LANES // 2
        while size:
            # Vectors v and v + size swap their off-diagonal blocks of ``size`` lanes.
            turned = list(block)
            low = [lane if not lane & size else lane - size + LANES for lane in range(LANES)]
            high = [lane + size if not lane & size else lane + LANES for lane in range(LANES)]
            for v in range(LANES):
                if not v & size:
                    pair = (block[v], block[v + size])
                    turned[v] = b.shuffle_vector(*pair, ir.Constant(lanes, low))
                    turned[v + size] = b.shuffle_vector(*pair, ir.Constant(lanes, high))
            block = turned
            size //= 2
        for d in range(LANES):
            at = b.gep(target, [b.mul(args[5], _I64(d))])
            b.store(block[d], b.bitcast(at, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dots(typingctx, dim, row, row_at, columns, columns_at, stride, out, out_at):
    """``out[0:16] = sum over d of row[d] * columns[d * stride : d * stride + 16]``."""
    i = types.intp
    signature = types.void(dim, row, i, columns, i, i, out, i)

    def codegen(context, b, signature, args):
        kinds = signature.args
        vector = ir.VectorType(_F32, LANES)
        row = b.gep(_data(context, b, kinds[1], args[1]), [args[2]])
        columns = b.gep(_data(context, b, kinds[3], args[3]), [args[4]])
        # Two sums, so that one does not wait for the other's latency.
        sums = [ir.Constant(vector, [0.0] * LANES)] * 2
        for d in range(kinds[0].literal_value):
            factor = splat(b, b.load(b.gep(row, [_I64(d)])), LANES)
            at = b.gep(columns, [b.mul(args[5], _I64(d))])
            column = b.load(b.bitcast(at, vector.as_pointer()), align=4)
            sums[d % 2] = _multiply_add(b, factor, column, sums[d % 2])
        at = b.gep(_data(context, b, kinds[6], args[6]), [args[7]])
        b.store(b.fadd(*sums), b.bitcast(at, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def weighted_rows(typingctx, dim, fresh, out, out_at, rows, rows_at, count, weights, weights_at, step, growth):
    """``out (+)= sum over j < count of weights[w_j] * rows[j]``, with w_0 = weights_at.

    w_{j+1} = w_j + step, and step grows by ``growth`` each time: walks a row (1, 0) or a column (k, 1) of a triangle
    stored row by row. ``fresh`` (literal) starts from zero instead of ``out``.
    """
    i = types.intp
    signature = types.void(dim, fresh, out, i, rows, i, i, weights, i, i, i)

    def codegen(context, b, signature, args):
        kinds = signature.args
        size = kinds[0].literal_value
        out = b.gep(_data(context, b, kinds[2], args[2]), [args[3]])
        rows = b.gep(_data(context, b, kinds[4], args[4]), [args[5]])
        weights = _data(context, b, kinds[7], args[7])
        for start in range(0, size, 64):
            width = min(64, size - start)
            vector = ir.VectorType(_F32, width)
            target = b.bitcast(b.gep(out, [_I64(start)]), vector.as_pointer())
            if kinds[1].literal_value:
                first = ir.Constant(vector, [0.0] * width)
            else:
                first = b.load(target, align=4)
            entry = b.block
            head = b.append_basic_block("pairs.head")
            body = b.append_basic_block("pairs.body")
            done = b.append_basic_block("pairs.done")
            b.branch(head)
            b.position_at_end(head)
            j, at, step = b.phi(_I64), b.phi(_I64), b.phi(_I64)
            total = b.phi(vector)
            b.cbranch(b.icmp_signed("<", j, args[6]), body, done)
            b.position_at_end(body)
            factor = splat(b, b.load(b.gep(weights, [at])), width)
            source = b.gep(rows, [b.add(b.mul(j, _I64(size)), _I64(start))])
            row = b.load(b.bitcast(source, vector.as_pointer()), align=4)
            grown = _multiply_add(b, factor, row, total)
            following = (b.add(j, _I64(1)), b.add(at, step), b.add(step, args[10]), grown)
            b.branch(head)
            for phi, initial, later in zip(
                (j, at, step, total), (_I64(0), args[8], args[9], first), following, strict=True
            ):
                phi.add_incoming(initial, entry)
                phi.add_incoming(later, body)
            b.position_at_end(done)
            b.store(total, target, align=4)
        return context.get_dummy_value()

    return signature, codegen


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
                scalar = splat(b, b.load(at), LANES)
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
