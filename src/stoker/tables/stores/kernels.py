"""Numba kernels of the backing stores: rows between memory and slots, and records between a file and memory.

Memory latency bounds random access to a large store, so kernels prefetch rows. Rows move as bytes: a row returns with
the same bits, also if it has not-a-numbers.

System calls are passed as addresses, so that the compiled code can be kept on disk, and tests can pass failing ones.

Legend: n rows of one call, D (``dim``) columns, T tables. ``first`` and ``second`` are the float32 elements a row of
the optimizer's state tensors, 0 for none.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import ctypes
import errno
import mmap
from functools import cache

import numpy as np
from llvmlite import ir

from stoker.ops.codegen.jit import INNER, PLAIN, jit
from stoker.ops.codegen.llvm import BYTE, I32, I64, Int, Row, operation
from stoker.ops.codegen.llvm_memory import fetch_add, prefetch, prefetch_bytes, row_move, set_bits
from stoker.ops.codegen.llvm_rows import row_init
from stoker.ops.codegen.native import Kernel, arguments

_AHEAD = 24  # rows to prefetch ahead: the work of about one DRAM latency
_PAGE = mmap.PAGESIZE
_EINTR = errno.EINTR


@jit(**PLAIN)
def segment_of(first_row, row):
    """Return the segment of a row: segment i begins at ``first_row[i]``; the last entry is the end."""
    low, high = 0, len(first_row) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if first_row[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@jit
def _mark_one(words, row):
    word, bit = row >> 6, np.int64(1) << (row & 63)
    if not words[word] & bit:  # nearly always set: a read keeps the cache line shared between threads
        set_bits(words, word, bit)


def _move(p):
    """Copy rows of a store to ``side``, and compute those whose bit in ``words`` is not set; or store them."""
    (
        rows, places, words, weight, state, state2, side, side_state, side_state2, first_row, keys, scales, step,
        storing, dim, first, second, cursor, block,
    ) = arguments(p)  # fmt: skip
    size, size1, size2 = dim * weight.itemsize, first * 4, second * 4
    count, placed, stored = len(rows), len(places) > 0, len(words) > 0
    while True:
        start = fetch_add(cursor, block)
        if start >= count:
            return
        stop = min(start + block, count)
        for i in range(start, stop):
            prefetch(words, rows[i] >> 6)
        for i in range(start - _AHEAD, stop):
            if i + _AHEAD < stop:
                row = rows[i + _AHEAD]
                prefetch_bytes(size, weight, row * dim)
                prefetch_bytes(size1, state, row * first)
                prefetch_bytes(size2, state2, row * second)
                if placed:
                    prefetch_bytes(size, side, places[i + _AHEAD] * dim)
            if i < start:
                continue
            row = rows[i]
            place = places[i] if placed else i
            if storing:
                row_move(size, weight, row * dim, side, place * dim)
                row_move(size1, state, row * first, side_state, place * first)
                row_move(size2, state2, row * second, side_state2, place * second)
                _mark_one(words, row)
            elif stored and (words[row >> 6] >> (row & 63)) & 1:
                row_move(size, side, place * dim, weight, row * dim)
                row_move(size1, side_state, place * first, state, row * first)
                row_move(size2, side_state2, place * second, state2, row * second)
            else:
                table = segment_of(first_row, row)
                row_init(dim, side, place * dim, keys[table], (row - first_row[table]) * dim * step, scales[table])
                for d in range(first):
                    side_state[place * first + d] = 0.0
                for d in range(second):
                    side_state2[place * second + d] = 0.0


MOVE = Kernel(_move)


@cache
def system_calls() -> tuple[int, int, int] | None:
    """Return the addresses of pread, pwrite (64-bit offsets) and of the ``errno`` function, or None."""
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


@operation
def _call(b: ir.IRBuilder, function: Int, fd: Int, row: Row, size: Int, offset: Int) -> Int:
    """Call ``ssize_t function(int fd, void *data, size_t size, off_t offset)`` on bytes from the start of a row."""
    kind = ir.FunctionType(I64, [I32, BYTE, I64, I64])
    return b.call(b.inttoptr(function, kind.as_pointer()), [b.trunc(fd, I32), row.bytes, size, offset])


@operation
def _errno(b: ir.IRBuilder, function: Int) -> Int:
    """Return this thread's error number, from the function that returns its address."""
    kind = ir.FunctionType(I32.as_pointer(), [])
    return b.sext(b.load(b.call(b.inttoptr(function, kind.as_pointer()), [])), I64)


@jit
def _transfer(call, error, fd, buffer, size, offset, direct):
    """Move ``size`` bytes; return (bytes moved, error number). Fewer bytes without an error mean the file ended."""
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
            if direct and done % _PAGE:
                break  # the file ended inside a page; a further call would be misaligned
    return done, 0


@jit(**INNER)
def _offset(position, per_block, block, record):
    return position // per_block * block + position % per_block * record


@jit(error_model="numpy")
def move_records(
    calls, fd, direct, writing, at, starts, num_records, per_block, block, record, records, buffer, cursor, fault
):  # fmt: skip
    """Read the ``records`` [n * bytes] at positions ``at`` [n] of a file, or write them, without Python's lock.

    Several threads run it with the same arguments and take runs ``starts[r]:starts[r + 1]`` from a shared cursor: while
    one waits for the disk the others issue their calls. Page faults on mapped memory would wait one at a time.

    ``fault`` is int64 [4]: faults so far (any stops all threads), then of the first one the error number (0 for a file
    that ended), which record it was, and whether it was written. Directly to the disk only whole blocks can be
    written, so the other records of a block are read first.
    """
    while True:
        run = fetch_add(cursor, 1)
        if run >= len(starts) - 1 or fault[0] != 0:
            return
        begin, stop = starts[run], starts[run + 1]
        head, tail = at[begin], at[stop - 1]
        base = _offset(head, per_block, block, record)
        end = _offset(tail, per_block, block, record) + record
        if direct:
            unit = block if writing else _PAGE
            base, end = base // unit * unit, (end + unit - 1) // unit * unit
        got, code, wrote = end - base, 0, 0
        covered = tail - head == stop - begin - 1 and head % per_block == 0
        covered = covered and (tail % per_block == per_block - 1 or tail == num_records - 1)
        if not writing or (direct and not covered):
            got, code = _transfer(calls[0], calls[2], fd, buffer, end - base, base, direct)
        elif not direct:
            # The system reads a page before a partial write, and only one thread at a time writes to a file:
            # threads that touch the page first wait for the disk together.
            for edge in (base, end - 1):
                if code == 0 and got > 0 and (edge // _PAGE * _PAGE < base or edge // _PAGE * _PAGE + _PAGE > end):
                    touched, code = _transfer(calls[0], calls[2], fd, buffer, 1, edge, False)
                    if touched < 1:
                        got = 0
        if writing and got == end - base:
            for i in range(begin, stop):
                row_move(record, buffer, _offset(at[i], per_block, block, record) - base, records, i * record)
            got, code = _transfer(calls[1], calls[2], fd, buffer, end - base, base, direct)
            wrote = 1
        if got < end - base:
            if fetch_add(fault, 1) == 0:
                cut = begin
                while cut < stop - 1 and _offset(at[cut], per_block, block, record) + record <= base + got:
                    cut += 1
                fault[1], fault[2], fault[3] = code, cut, wrote
            return
        if not writing:
            for i in range(begin, stop):
                row_move(record, records, i * record, buffer, _offset(at[i], per_block, block, record) - base)
