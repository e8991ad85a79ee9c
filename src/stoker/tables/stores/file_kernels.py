"""Numba functions that move rows between a home file and the slots with pread and pwrite, free of the interpreter lock.

Several threads run one function with the same arguments and take runs from a shared cursor: while one waits for the
disk the others have asked for theirs. A page fault on mapped memory would wait one at a time.

System calls are given as addresses, so that the compiled code can be kept on disk, and tests can pass failing ones.

Legend: as in ``home_kernels`` and ``file_layout``. ``fault`` is int64 [4]: faults so far (any stops all threads), then
of the first one the error number (0 for a file that ended), the row, and whether it was a write.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import ctypes
import errno
from functools import cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import fetch_add, row_move
from stoker.ops.codegen.llvm_rows import row_init
from stoker.tables.stores import file_layout
from stoker.tables.stores.file_layout import PAGE
from stoker.tables.stores.home_kernels import table_of

__all__ = ["fetch", "plan_reads", "plan_writes", "store", "system_calls"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTE = ir.IntType(8).as_pointer()
_EINTR = errno.EINTR
_jit = jit(error_model="numpy")

plan_reads = jit(file_layout.plan_reads)
plan_writes = jit(file_layout.plan_writes)


@cache
def system_calls() -> tuple[int, int, int] | None:
    """Addresses of pread, pwrite (64-bit offsets) and of the function that finds ``errno``, or None."""
    try:
        libc = ctypes.CDLL(None)
        functions = (
            getattr(libc, "pread64", None) or libc.pread,
            getattr(libc, "pwrite64", None) or libc.pwrite,
            getattr(libc, "__errno_location", None) or libc.__error,  # glibc and musl; macOS
        )
    except (OSError, AttributeError, TypeError):
        return None
    pread, pwrite, error = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return pread, pwrite, error


@intrinsic
def _call(typingctx, function, fd, array, at, size, offset):
    """``ssize_t function(int fd, void *data, size_t size, off_t offset)`` on bytes from ``array[at]`` on."""
    signature = types.int64(types.intp, types.int64, array, types.intp, types.int64, types.int64)

    def codegen(context, b, signature, args):
        data = b.gep(context.make_array(signature.args[2])(context, b, args[2]).data, [args[3]])
        kind = ir.FunctionType(_I64, [_I32, _BYTE, _I64, _I64])
        function = b.inttoptr(args[0], kind.as_pointer())
        return b.call(function, [b.trunc(args[1], _I32), b.bitcast(data, _BYTE), args[4], args[5]])

    return signature, codegen


@intrinsic
def _errno(typingctx, function):
    """This thread's error number, from the function that returns its address."""
    signature = types.int64(types.intp)

    def codegen(context, b, signature, args):
        kind = ir.FunctionType(_I32.as_pointer(), [])
        return b.sext(b.load(b.call(b.inttoptr(args[0], kind.as_pointer()), [])), _I64)

    return signature, codegen


@jit
def _transfer(call, error, fd, buffer, size, offset, direct):
    """Move ``size`` bytes; returns (bytes moved, error number). Fewer bytes without an error mean the file ended."""
    done = 0
    while done < size:
        moved = _call(call, fd, buffer, done, size - done, offset + done)
        if moved < 0:
            code = _errno(error)
            if code != _EINTR:
                return done, code
        elif moved == 0:
            break
        else:
            done += moved
            if direct and done % PAGE:
                break  # the file ended inside a page; asking on from there would be refused as misaligned
    return done, 0


@jit
def _fail(fault, code, row, writing):
    if fetch_add(fault, 1) == 0:
        fault[1], fault[2], fault[3] = code, row, writing


@jit
def _first_cut(rows, at, begin, stop, per_block, block, record, end):
    """The first row of a run whose record does not end by ``end``."""
    for i in range(begin, stop):
        if at[i] // per_block * block + at[i] % per_block * record + record > end:
            return rows[i]
    return rows[stop - 1]


@_jit
def fetch(
    calls,
    fd,
    direct,
    rows,
    at,
    nowhere,
    places,
    starts,
    runs,
    per_block,
    block,
    record,
    out,
    out_state,
    out_state2,
    dim,
    first,
    second,
    first_row,
    keys,
    scales,
    buffer,
    cursor,
    fault,
):
    """Read rows at positions ``at`` to places of a target, or make those that are ``nowhere``."""
    size, first_size, second_size = dim * out.itemsize, 4 * first, 4 * second
    while True:
        run = fetch_add(cursor, 1)
        if run >= runs or fault[0] != 0:
            return
        begin, stop = starts[run], starts[run + 1]
        if at[begin] == nowhere:
            for i in range(begin, stop):
                row, place = rows[i], places[i]
                table = table_of(first_row, row)
                row_init(dim, out, place * dim, keys[table], (row - first_row[table]) * dim, scales[table])
                for d in range(first):
                    out_state[place * first + d] = 0.0
                for d in range(second):
                    out_state2[place * second + d] = 0.0
            continue
        base = at[begin] // per_block * block + at[begin] % per_block * record
        end = at[stop - 1] // per_block * block + at[stop - 1] % per_block * record + record
        if direct:
            base = base // PAGE * PAGE
            end = (end + PAGE - 1) // PAGE * PAGE
        got, code = _transfer(calls[0], calls[2], fd, buffer, end - base, base, direct)
        if got < end - base:
            _fail(fault, code, _first_cut(rows, at, begin, stop, per_block, block, record, base + got), 0)
            return
        for i in range(begin, stop):
            place = places[i]
            begins = at[i] // per_block * block + at[i] % per_block * record - base
            row_move(size, out, place * dim, buffer, begins)
            row_move(first_size, out_state, place * first, buffer, begins + size)
            row_move(second_size, out_state2, place * second, buffer, begins + size + first_size)


@_jit
def store(
    calls,
    fd,
    direct,
    rows,
    places,
    starts,
    runs,
    num_rows,
    per_block,
    block,
    record,
    source,
    source_state,
    source_state2,
    dim,
    first,
    second,
    buffer,
    cursor,
    fault,
):
    """Write rows at places of a source to a file.

    Directly to the disk only whole blocks can be written, so the other rows of a block are read first.
    """
    size, first_size, second_size = dim * source.itemsize, 4 * first, 4 * second
    while True:
        run = fetch_add(cursor, 1)
        if run >= runs or fault[0] != 0:
            return
        begin, stop = starts[run], starts[run + 1]
        head, tail = rows[begin], rows[stop - 1]
        if direct:
            base = head // per_block * block
            end = (tail // per_block + 1) * block
            covered = tail - head == stop - begin - 1 and head % per_block == 0
            if not covered or (tail % per_block != per_block - 1 and tail != num_rows - 1):
                got, code = _transfer(calls[0], calls[2], fd, buffer, end - base, base, direct)
                if got < end - base:
                    _fail(fault, code, _first_cut(rows, rows, begin, stop, per_block, block, record, base + got), 0)
                    return
        else:
            base = head // per_block * block + head % per_block * record
            end = tail // per_block * block + tail % per_block * record + record
            # A page written in part is read first by the system, which lets one thread at a time write to a file:
            # threads that touch the page before that wait for the disk together.
            for at in (base, end - 1):
                if at // PAGE * PAGE < base or at // PAGE * PAGE + PAGE > end:
                    got, code = _transfer(calls[0], calls[2], fd, buffer, 1, at, False)
                    if got < 1:
                        _fail(fault, code, head, 0)
                        return
                if (end - 1) // PAGE == base // PAGE:
                    break
        for i in range(begin, stop):
            row, place = rows[i], places[i]
            at = row // per_block * block + row % per_block * record - base
            row_move(size, buffer, at, source, place * dim)
            row_move(first_size, buffer, at + size, source_state, place * first)
            row_move(second_size, buffer, at + size + first_size, source_state2, place * second)
        done, code = _transfer(calls[1], calls[2], fd, buffer, end - base, base, direct)
        if done < end - base:
            _fail(fault, code, _first_cut(rows, rows, begin, stop, per_block, block, record, base + done), 1)
            return
