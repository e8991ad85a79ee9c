"""The two inner loops of the pairwise interaction, as vector code for LLVM (see :mod:`stoker.ops.codegen.llvm_rows`).

Here fused multiply-add is welcome: the interaction belongs to the dense part of a model, which promises results within
rounding of the reference, not bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16  # dot products done side by side

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _data(context: Any, b: ir.IRBuilder, kind: types.Array, array: ir.Value) -> ir.Value:
    return context.make_array(kind)(context, b, array).data


def _splat(b: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    kind = ir.VectorType(_F32, width)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, width), [0] * width))


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
            factor = _splat(b, b.load(b.gep(row, [_I64(d)])), LANES)
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
            factor = _splat(b, b.load(b.gep(weights, [at])), width)
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
