"""Digits eight at a time, as the bytes of one 64-bit word: a click log is mostly short numbers and hashes.

Reading them one by one costs a mispredicted branch per field, as their lengths vary.
"""

from __future__ import annotations

import sys

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stoker.ops.codegen.jit import jit

__all__ = ["few_decimals", "hex_digits"]


_DIGIT = np.full(256, 255, np.uint8)
for _i, _c in enumerate(b"0123456789abcdef"):
    _DIGIT[_c] = _i
for _i, _c in enumerate(b"ABCDEF"):
    _DIGIT[_c] = 10 + _i


def _each(byte: int) -> np.uint64:
    """A word of eight equal bytes."""
    return np.uint64(byte * 0x0101010101010101)


_TOP, _ZERO, _CASE, _BEFORE_A = _each(0x80), _each(0x30), _each(0x20), _each(0x60)
_TEN, _ONE, _SEVEN, _NIBBLE, _UNIT = _each(0x80 - 10), _each(0x80 - 1), _each(0x80 - 7), _each(0x0F), _each(0x01)
_PAIRS, _QUADS, _LOW = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
_SPARSE = np.uint64(0x000000FF000000FF)
_ODD, _EVEN = np.uint64(100 + (1000000 << 32)), np.uint64(1 + (10000 << 32))


@intrinsic
def _word(typingctx, data, at):
    """Eight bytes from ``data[at]`` on, the first as the lowest; the caller has checked bounds."""
    signature = types.uint64(data, at)

    def codegen(context, b, signature, args):
        array = context.make_array(signature.args[0])(context, b, args[0])
        place = b.gep(array.data, [args[1]], inbounds=True)
        value = b.load(b.bitcast(place, ir.IntType(64).as_pointer()), align=1)
        return value if sys.byteorder == "little" else b.bswap(value)

    return signature, codegen


@intrinsic
def _trailing_zeros(typingctx, word):
    """Zero bits below the lowest set one; 64 for 0."""
    signature = types.int64(types.uint64)

    def codegen(context, b, signature, args):
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return signature, codegen


@jit
def hex_digits(data, at):
    """Value of the digits from ``at`` on (uint64, the last 16 of them) and the position after them.

    ``data`` ends with a byte that is no digit.
    """
    value = np.uint64(0)
    while at + 8 <= data.size:
        word = _word(data, at)
        # Bytes below 0x80 leave room for sums that carry into the top bit of their own byte only.
        decimal, letter = word ^ _ZERO, (word | _CASE) ^ _BEFORE_A
        wrong = (decimal + _TEN) & ~((letter + _ONE) & ~(letter + _SEVEN))
        if (word | wrong) & _TOP:
            break
        word = (word & _NIBBLE) + ((word >> np.uint64(6)) & _UNIT) * np.uint64(9)
        word = ((word << np.uint64(4)) | (word >> np.uint64(8))) & _PAIRS
        word = ((word << np.uint64(8)) | (word >> np.uint64(16))) & _QUADS
        word = ((word << np.uint64(16)) | (word >> np.uint64(32))) & _LOW
        value = (value << np.uint64(32)) | word
        at += 8
    digit = _DIGIT[data[at]]
    while digit < 16:
        value = (value << np.uint64(4)) | np.uint64(digit)
        at += 1
        digit = _DIGIT[data[at]]
    return value, at


@jit
def few_decimals(data, at):
    """Value and number of the up to seven decimal digits from ``at`` on; number 8: there are more.

    ``data`` has eight bytes from ``at`` on.
    """
    word = _word(data, at)
    digits = word ^ _ZERO
    # The lowest byte that is no digit is exact; above it a carry may have spread.
    other = ((digits + _TEN) | word) & _TOP
    count = _trailing_zeros(other) >> 3
    if count == 0 or count == 8:
        return np.int64(0), count
    digits = (digits & _NIBBLE) << np.uint64(64 - 8 * count)  # leading zeros
    digits = digits * np.uint64(10) + (digits >> np.uint64(8))
    value = ((digits & _SPARSE) * _ODD + ((digits >> np.uint64(16)) & _SPARSE) * _EVEN) >> np.uint64(32)
    return np.int64(value), count
