"""The inner loops of the pairwise interaction and of small matrix products, for Numba.

Here fused multiply-add is allowed: both promise results within rounding of the reference, not bits. Registers hold a
tile of the result while its products are summed, in order of the inner index: so an element of the result does not
depend on its tile.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from stoker.ops.codegen.llvm import FLOAT, I32, I64, LANES, Array, Int, Known, Row, chunks, operation, splat

_VECTOR = ir.VectorType(FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


def _multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = z.type
    name = f"llvm.fmuladd.v{kind.count}f32"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z])


def _load(b: ir.IRBuilder, pointer: ir.Value, kind: ir.Type = _VECTOR) -> ir.Value:
    return b.load(b.bitcast(pointer, kind.as_pointer()), align=4)


def _store(b: ir.IRBuilder, value: ir.Value, pointer: ir.Value) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=4)


@operation
def transpose(b: ir.IRBuilder, rows: Row, row_stride: Int, columns: Row, column_stride: Int) -> None:
    """Transpose a 16 by 16 block: ``columns[d * column_stride + v] = rows[v * row_stride + d]``."""
    block = [_load(b, b.gep(rows.pointer, [b.mul(row_stride, I64(v))])) for v in range(LANES)]
    lanes = ir.VectorType(I32, LANES)
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
        _store(b, block[d], b.gep(columns.pointer, [b.mul(column_stride, I64(d))]))


@operation
def dots(b: ir.IRBuilder, dim: Known, row: Row, columns: Row, stride: Int, out: Row) -> None:
    """Do ``out[0:16] = sum over d of row[d] * columns[d * stride : d * stride + 16]``."""
    sums = [_ZERO, _ZERO]  # two, so that neither waits for the latency of the other
    for d in range(dim):
        factor = splat(b, b.load(b.gep(row.pointer, [I64(d)])), LANES)
        column = _load(b, b.gep(columns.pointer, [b.mul(stride, I64(d))]))
        sums[d % 2] = _multiply_add(b, factor, column, sums[d % 2])
    _store(b, b.fadd(*sums), out.pointer)


@operation
def weighted_rows(
    b: ir.IRBuilder, dim: Known, fresh: Known, out: Row, rows: Row, count: Int, weights: Array, weights_at: Int,
    step: Int, growth: Int,
) -> None:  # fmt: skip
    """Do ``out (+)= sum over j < count of weights[w_j] * rows[j]``, with w_0 = weights_at.

    w_{j+1} = w_j + step, and step grows by ``growth`` each time: walks a row (1, 0) or a column (k, 1) of a triangle
    stored row by row. ``fresh`` starts from zero instead of ``out``.
    """
    for start, width in chunks(dim):
        vector = ir.VectorType(FLOAT, width)
        target = b.gep(out.pointer, [I64(start)])
        first = ir.Constant(vector, [0.0] * width) if fresh else _load(b, target, vector)
        at, by, total = (cgutils.alloca_once_value(b, value) for value in (weights_at, step, first))
        with cgutils.for_range(b, count, intp=I64) as loop:
            factor = splat(b, b.load(weights.at(b.load(at))), width)
            row = _load(b, b.gep(rows.pointer, [b.add(b.mul(loop.index, I64(dim)), I64(start))]), vector)
            b.store(_multiply_add(b, factor, row, b.load(total)), total)
            b.store(b.add(b.load(at), b.load(by)), at)
            b.store(b.add(b.load(by), growth), by)
        _store(b, b.load(total), target)


def _tile(
    b: ir.IRBuilder, height: int, vectors: int, left: Callable[[ir.Value], list[ir.Value]], count: Int, right: Row,
    right_stride: Int, out: Row, out_stride: Int,
) -> None:  # fmt: skip
    """Emit a tile of ``height`` x (``vectors`` * LANES) results; ``left(k)`` are the addresses of the k-th factors."""
    sums = [[cgutils.alloca_once_value(b, _ZERO) for _ in range(vectors)] for _ in range(height)]
    with cgutils.for_range(b, count, intp=I64) as loop:
        line = b.gep(right.pointer, [b.mul(loop.index, right_stride)])
        given = [_load(b, b.gep(line, [I64(LANES * place)])) for place in range(vectors)]
        for row, factor in zip(sums, left(loop.index), strict=True):
            scalar = splat(b, b.load(factor), LANES)
            for memory, vector in zip(row, given, strict=True):
                b.store(_multiply_add(b, scalar, vector, b.load(memory)), memory)
    for index, row in enumerate(sums):
        target = b.gep(out.pointer, [b.mul(out_stride, I64(index))])
        for place, memory in enumerate(row):
            _store(b, b.load(memory), b.gep(target, [I64(LANES * place)]))


@operation
def tile_product(
    b: ir.IRBuilder, height: Known, vectors: Known, left: Array, offsets: Array, first: Int, count: Int, right: Row,
    right_stride: Int, out: Row, out_stride: Int,
) -> None:  # fmt: skip
    """Do ``out[i, j] = sum over k < count of left[offsets[first + i] + k] * right[k, j]``.

    i < height, j < 16 * vectors; ``right`` and ``out`` have a stride.
    """
    starts = [left.at(b.load(offsets.at(b.add(first, I64(row))))) for row in range(height)]
    _tile(
        b, height, vectors, lambda k: [b.gep(start, [k]) for start in starts], count, right, right_stride, out,
        out_stride,
    )  # fmt: skip


@operation
def tile_across(
    b: ir.IRBuilder, height: Known, vectors: Known, left: Array, offsets: Array, first: Int, count: Int, right: Row,
    right_stride: Int, out: Row, out_stride: Int,
) -> None:  # fmt: skip
    """Do ``out[i, j] = sum over k < count of left[offsets[k] + first + i] * right[k, j]``: left is transposed."""

    def column(k: ir.Value) -> list[ir.Value]:
        start = left.at(b.add(b.load(offsets.at(k)), first))
        return [b.gep(start, [I64(row)]) for row in range(height)]

    _tile(b, height, vectors, column, count, right, right_stride, out, out_stride)
