"""Memory operations for Numba: prefetch cache lines, move bytes, distribute work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

from stoker.ops.codegen.llvm import BYTE, I32, I64, LANES, Array, Int, Known, Row, Size, operation

_LINE = 64  # bytes of a cache line


def _prefetch_line(b: ir.IRBuilder, pointer: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [BYTE, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [pointer, I32(0), I32(3), I32(1)])


@contextmanager
def _loop(b: ir.IRBuilder, begin: ir.Value, end: ir.Value, step: int) -> Iterator[ir.Value]:
    """Emit a loop over the offsets from ``begin`` below ``end``; not unrolled: most rows are a line or two."""
    before, body, after = b.block, b.append_basic_block("each"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed("<", begin, end), body, after)
    b.position_at_end(body)
    at = b.phi(I64)
    at.add_incoming(begin, before)
    yield at
    later = b.add(at, I64(step))
    at.add_incoming(later, b.block)
    branch = b.cbranch(b.icmp_signed("<", later, end), body, after)
    rolled = b.module.add_metadata([b.module.add_metadata(["llvm.loop.unroll.disable"])])
    branch.set_metadata("llvm.loop", rolled)
    b.position_at_end(after)


@operation
def fetch_add(b: ir.IRBuilder, array: Array, amount: Int) -> Int:
    """Atomically add to ``array[0]`` (int64) and return the value before: threads get work by it."""
    return b.atomic_rmw("add", array.data, amount, "monotonic")


@operation
def set_bits(b: ir.IRBuilder, array: Array, at: Int, bits: Int) -> None:
    """Do ``array[at] |= bits`` (int64) atomically."""
    b.atomic_rmw("or", array.at(at), bits, "monotonic")


@operation
def prefetch(b: ir.IRBuilder, row: Row) -> None:
    """Prefetch the cache line where a row begins."""
    _prefetch_line(b, row.bytes)


@operation
def prefetch_row(b: ir.IRBuilder, dim: Known, row: Row) -> None:
    """Prefetch a row of ``dim`` elements."""
    for at in range(0, dim, LANES):
        _prefetch_line(b, row.behind(I64(at)).bytes)


@operation
def prefetch_bytes(b: ir.IRBuilder, size: Size, row: Row) -> None:
    """Prefetch ``size`` bytes from where a row begins."""
    if isinstance(size, int):
        for at in range(0, size, _LINE):
            _prefetch_line(b, b.gep(row.bytes, [I64(at)]))
    else:
        data = row.bytes
        with _loop(b, I64(0), size, _LINE) as at:
            _prefetch_line(b, b.gep(data, [at]))


@operation
def row_move(b: ir.IRBuilder, size: Int, out: Row, row: Row) -> None:
    """Copy ``size`` bytes, an even number, from a row to another; their arrays may be of any types."""
    target, source = out.bytes, row.bytes
    begin = I64(0)  # a call of memcpy would cost more than most rows
    for width in (_LINE, 16, 4, 2):
        end = b.and_(size, I64(-width))
        kind = ir.VectorType(ir.IntType(8), width).as_pointer()
        with _loop(b, begin, end, width) as at:
            value = b.load(b.bitcast(b.gep(source, [at]), kind), align=1)
            b.store(value, b.bitcast(b.gep(target, [at]), kind), align=1)
        begin = end


@operation
def bytes_move(b: ir.IRBuilder, size: Size, out: Row, row: Row) -> None:
    """Copy ``size`` bytes with memcpy: faster than :func:`row_move`, except for rows of 64 bytes or of few."""
    cgutils.raw_memcpy(b, out.bytes, row.bytes, I64(size) if isinstance(size, int) else size, 1)
