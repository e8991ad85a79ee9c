"""Memory operations for Numba, written for LLVM: asking for cache lines, moving bytes, handing out work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTE = ir.IntType(8).as_pointer()
_LINE = 64  # bytes of a cache line
_LANES = 16  # float32 elements in one


def _bytes(context: Any, b: ir.IRBuilder, kind: types.Array, array: ir.Value, at: ir.Value) -> ir.Value:
    """Where an element of a flat array begins."""
    return b.bitcast(b.gep(context.make_array(kind)(context, b, array).data, [at]), _BYTE)


def _ask(b: ir.IRBuilder, pointer: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [pointer, _I32(0), _I32(3), _I32(1)])


@contextmanager
def _each(b: ir.IRBuilder, begin: ir.Value, end: ir.Value, step: int) -> Iterator[ir.Value]:
    """Code for every offset from ``begin`` on below ``end``; not unrolled, as most rows are a line or two."""
    before, body, after = b.block, b.append_basic_block("each"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed("<", begin, end), body, after)
    b.position_at_end(body)
    at = b.phi(_I64)
    at.add_incoming(begin, before)
    yield at
    later = b.add(at, _I64(step))
    at.add_incoming(later, b.block)
    branch = b.cbranch(b.icmp_signed("<", later, end), body, after)
    rolled = b.module.add_metadata([b.module.add_metadata(["llvm.loop.unroll.disable"])])
    branch.set_metadata("llvm.loop", rolled)
    b.position_at_end(after)


@intrinsic
def fetch_add(typingctx, array, amount):
    """Atomically add to ``array[0]`` (int64) and return what was there: hands out work to threads."""
    signature = types.int64(array, types.int64)

    def codegen(context, b, signature, args):
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        return b.atomic_rmw("add", data, args[1], "monotonic")

    return signature, codegen


@intrinsic
def prefetch(typingctx, array, offset):
    """Ask for the cache line of ``array[offset]``, soon to be needed."""
    signature = types.void(array, types.intp)

    def codegen(context, b, signature, args):
        _ask(b, _bytes(context, b, signature.args[0], *args))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def prefetch_row(typingctx, dim, array, offset):
    """Ask for ``array[offset : offset + dim]``; ``dim`` is a compile-time constant."""
    signature = types.void(dim, array, types.intp)

    def codegen(context, b, signature, args):
        for at in range(0, dim.literal_value, _LANES):
            _ask(b, _bytes(context, b, signature.args[1], args[1], b.add(args[2], _I64(at))))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def prefetch_lines(typingctx, dim, address, itemsize):
    """The same for ``dim`` elements of ``itemsize`` bytes at an address."""
    signature = types.void(dim, types.intp, types.intp)

    def codegen(context, b, signature, args):
        for at in range(0, dim.literal_value, _LANES):
            _ask(b, b.inttoptr(b.add(args[1], b.mul(args[2], _I64(at))), _BYTE))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def prefetch_bytes(typingctx, size, row, row_at):
    """Ask for ``size`` bytes, any number, from an element offset of a flat array on."""
    known = isinstance(size, types.IntegerLiteral)
    signature = types.void(size if known else types.intp, row, types.intp)

    def codegen(context, b, signature, args):
        data = _bytes(context, b, signature.args[1], args[1], args[2])
        if known:
            for at in range(0, size.literal_value, _LINE):
                _ask(b, b.gep(data, [_I64(at)]))
        else:
            with _each(b, _I64(0), args[0], _LINE) as at:
                _ask(b, b.gep(data, [at]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def row_move(typingctx, size, out, out_at, row, row_at):
    """Copy ``size`` bytes, an even number, between element offsets of two flat arrays of any types."""
    known = isinstance(size, types.IntegerLiteral)
    signature = types.void(size if known else types.intp, out, types.intp, row, types.intp)

    def codegen(context, b, signature, args):
        target = _bytes(context, b, signature.args[1], args[1], args[2])
        source = _bytes(context, b, signature.args[3], args[3], args[4])
        if known:
            cgutils.raw_memcpy(b, target, source, ir.Constant(_I64, size.literal_value), 1)
            return context.get_dummy_value()
        begin = _I64(0)  # a call of memcpy would cost more than most rows
        for width in (_LINE, 16, 4, 2):
            end = b.and_(args[0], _I64(-width))
            kind = ir.VectorType(ir.IntType(8), width).as_pointer()
            with _each(b, begin, end, width) as at:
                value = b.load(b.bitcast(b.gep(source, [at]), kind), align=1)
                b.store(value, b.bitcast(b.gep(target, [at]), kind), align=1)
            begin = end
        return context.get_dummy_value()

    return signature, codegen
