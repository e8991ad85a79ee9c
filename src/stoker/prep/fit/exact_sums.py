"""Sums of float64 values and of their squares without rounding, so that neither order nor parts matter.

A float64 is a whole number below 2**53 times a power of two. Sums are kept as one long fixed-point number, whose limbs
of 64 bits stand 32 bits apart: half of a limb is room for carries (the superaccumulators of Neal 2015, "Fast exact
summation using small and large superaccumulators"). Values get there a thousand at a time, in one of two ways:

* Mostly they lie within 24 powers of two, or have few digits. Each then is a whole number of at most 76 bits times one
  power of two; three parts of it and their products are added as whole numbers, several values at once.
* Any values: the 53 bits and the products of their halves are added apart by exponent.

Squares are exact, too, and nothing underflows or overflows on the way.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

__all__ = ["COUNT", "add_values", "counted_sums", "mean_and_deviation", "no_values", "room", "times"]

Sums = npt.NDArray[np.int64]

_BLOCK = 2**10  # values that are added together: sums of as many products of at most 2**52 stay within an int64
_HALF = 27  # bits of the lower half of 53, with a sign
_PART = 26  # bits of the lower parts of three, with a sign
_ROUND = np.float64(
    3 * 2.0**51
)  # adding it rounds what is at most 2**51 to a whole number, which the last bits then hold
_EXPONENTS = 2048
COUNT, _PLUS, _MINUS, _NAN = range(4)  # values, and those among them that no sum holds
_SUM = 4  # limbs of the sum of values from here, of shifts up to 2045 and 62 bits; in units of 2**-1074
_SQUARES = _SUM + 2045 // 32 + 3  # of squares, of shifts up to 2 * 2045 + 54; in units of 2**-2148
_LENGTH = _SQUARES + (2 * 2045 + 2 * _HALF) // 32 + 3
_LIMB = 0xFFFFFFFF


def no_values(columns: int) -> Sums:
    """[columns, L] sums of no values. Those of parts are added like numbers, up to 2**31 of them."""
    return np.zeros((columns, _LENGTH), np.int64)


def room() -> Sums:
    """[2048, 4] zeros in which :func:`add_values` works, and which it leaves."""
    return np.zeros((_EXPONENTS, 4), np.int64)


@jit
def _shifted(limbs, first, number, shift):  # type: ignore[no-untyped-def]
    """Add ``number * 2**shift`` to the number whose limbs begin at ``first``."""
    at, shift = first + (shift >> 5), shift & 31
    low, high = (number & _LIMB) << shift, (number >> 32) << shift  # 32 bits and 31 with a sign, by at most 31
    limbs[at] += low & _LIMB
    limbs[at + 1] += (low >> 32) + (high & _LIMB)
    limbs[at + 2] += high >> 32


@jit
def _carried(limbs, first, stop):  # type: ignore[no-untyped-def]
    """Leave 32 bits in every limb but the last, which has the sign."""
    for at in range(first, stop - 1):
        limbs[at + 1] += limbs[at] >> 32
        limbs[at] &= _LIMB


@jit
def _power(exponent, half):  # type: ignore[no-untyped-def]
    """2**(exponent - 1023), times 1.5 with ``half`` = 1."""
    return np.int64(exponent << 52 | half << 51).view(np.float64)


@jit
def _bits(x):  # type: ignore[no-untyped-def]
    return np.float64(x).view(np.uint64)


@jit
def _sum_of(bits, count, base):  # type: ignore[no-untyped-def]
    """The sum of whole numbers from that of the bits of ``base`` plus each of them, which went around 2**64."""
    return np.int64(bits - np.uint64(count) * _bits(base))


@jit
def _add_near(values, sums):  # type: ignore[no-untyped-def]
    """Add at most 2**10 values if whole numbers of 76 bits times one power of two hold them; whether they did."""
    words = values.view(np.int64)
    top = np.int64(0)
    for i in range(values.size):
        top = max(top, words[i] & 0x7FFFFFFFFFFFFFFF)
    if top == 0:
        return True
    top >>= 52
    if top < 100 or top > 2000:  # so that every constant is a normal number
        return False
    # x = a * A + b * B + c * C of three powers of two, a at most 2**24, b and c at most 2**25.
    first = top - 24 + 1
    round_a, round_b, round_c = _power(first + 52, 1), _power(first + 52 - _PART, 1), _power(first + 52 - 2 * _PART, 1)
    per_a, per_b, per_c = _power(2046 - first, 0), _power(2046 - first + _PART, 0), _power(2046 - first + 2 * _PART, 0)
    sum_a = sum_b = sum_c = rest = np.uint64(0)
    aa = ab = acb = bc = cc = np.uint64(0)
    for i in range(values.size):  # without a branch: several at once
        x = values[i]
        rounded = x + round_a
        sum_a += _bits(rounded)
        a = rounded - round_a
        x -= a
        rounded = x + round_b
        sum_b += _bits(rounded)
        b = rounded - round_b
        x -= b
        rounded = x + round_c
        sum_c += _bits(rounded)
        c = rounded - round_c
        rest |= _bits(x - c)
        a, b, c = a * per_a, b * per_b, c * per_c
        aa += _bits(a * a + _ROUND)
        ab += _bits(a * b + _ROUND)
        acb += _bits((2 * a * c + b * b) + _ROUND)
        bc += _bits(b * c + _ROUND)
        cc += _bits(c * c + _ROUND)
    if rest != 0:
        return False
    n = values.size
    shift_a = first - 1023 + 1074
    shift_b, shift_c = shift_a - _PART, shift_a - 2 * _PART
    _shifted(sums, _SUM, _sum_of(sum_a, n, round_a), shift_a)
    _shifted(sums, _SUM, _sum_of(sum_b, n, round_b), shift_b)
    _shifted(sums, _SUM, _sum_of(sum_c, n, round_c), shift_c)
    _shifted(sums, _SQUARES, _sum_of(aa, n, _ROUND), 2 * shift_a)
    _shifted(sums, _SQUARES, _sum_of(ab, n, _ROUND), shift_a + shift_b + 1)
    _shifted(sums, _SQUARES, _sum_of(acb, n, _ROUND), 2 * shift_b)
    _shifted(sums, _SQUARES, _sum_of(bc, n, _ROUND), shift_b + shift_c + 1)
    _shifted(sums, _SQUARES, _sum_of(cc, n, _ROUND), 2 * shift_c)
    return True


@jit
def _add_any(values, sums, held):  # type: ignore[no-untyped-def]
    """Add at most 2**10 values."""
    words = values.view(np.int64)
    low, high = _EXPONENTS, 0
    for i in range(values.size):
        word = words[i]
        exponent = (word >> 52) & 2047
        mantissa = word & ((1 << 52) - 1)
        if exponent == 2047:
            sums[_NAN if mantissa else _MINUS if word < 0 else _PLUS] += 1
            continue
        mantissa |= np.int64(exponent > 0) << 52
        # Zeros, of which there are many, must not widen what is flushed.
        low = min(low, exponent if mantissa else _EXPONENTS)
        high = max(high, exponent)
        upper = (mantissa + (1 << (_HALF - 1))) >> _HALF  # at most 2**26, as is the rest
        lower = mantissa - (upper << _HALF)
        sign = word >> 63
        row = held[np.uint64(exponent)]  # unsigned: no check whether it counts from the end
        row[0] += (mantissa ^ sign) - sign
        row[1] += lower * lower
        row[2] += upper * lower
        row[3] += upper * upper
    for exponent in range(low, high + 1):
        row = held[exponent]
        if row[1] | row[3]:  # squares cannot cancel
            shift = max(exponent, 1) - 1
            _shifted(sums, _SUM, row[0], shift)
            _shifted(sums, _SQUARES, row[1], 2 * shift)
            _shifted(sums, _SQUARES, row[2], 2 * shift + _HALF + 1)
            _shifted(sums, _SQUARES, row[3], 2 * shift + 2 * _HALF)
            row[:] = 0


@jit
def add_values(values, sums, held):  # type: ignore[no-untyped-def]
    """Add ``values`` [n] float64 to ``sums`` [L], a row of :func:`no_values`, working in ``held`` of :func:`room`."""
    for begin in range(0, values.size, _BLOCK):
        block = values[begin : min(begin + _BLOCK, values.size)]
        if not _add_near(block, sums):
            _add_any(block, sums, held)
        _carried(sums, _SUM, _SQUARES)
        _carried(sums, _SQUARES, _LENGTH)
    sums[COUNT] += values.size


def times(sums: Sums, count: int) -> Sums:
    """[L] the sums of ``count`` times the values of a row ``sums`` [L], fresh from :func:`add_values` or from here."""
    most, done = 2**31 - 1, np.zeros_like(sums)  # limbs of 32 bits, so many times, are less than an int64 holds
    for number in (most,) * (count // most) + (count % most,):
        done += sums * number
        _carried(done, _SUM, _SQUARES)
        _carried(done, _SQUARES, _LENGTH)
    return done


def counted_sums(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> Sums:
    """[L] the sums of ``values`` [n], each as often as ``counts`` [n] says: digit by digit of the counts."""
    sums: Sums = no_values(1)[0]
    held = room()
    for bit in reversed(range(int(counts.max(initial=0)).bit_length())):
        sums = times(sums, 2)
        add_values(values[(counts >> bit & 1).astype(np.bool_)], sums, held)
    return sums


def mean_and_deviation(sums: Sums) -> tuple[float, float]:
    """The mean of the values that were added to ``sums`` [L] and the root of their mean squared difference from it.

    Both are the exact results, rounded once; 0 and 0 of no values. Of values with an infinity the mean is that
    infinity, and NaN of both or with a NaN; the deviation is then NaN.
    """
    count, plus, minus, missing = (int(sums[at]) for at in (COUNT, _PLUS, _MINUS, _NAN))
    if plus or minus or missing:
        mean = float("nan") if missing or (plus and minus) else float("inf") if plus else float("-inf")
        return mean, float("nan")
    if count == 0:
        return 0.0, 0.0
    total, squares = _number(sums[_SUM:_SQUARES]), _number(sums[_SQUARES:])
    # Division of whole numbers is rounded correctly, whatever their size.
    return total / (count << 1074), _root(count * squares - total * total, count)


def _number(limbs: Sums) -> int:
    return sum(int(limb) << (32 * at) for at, limb in enumerate(limbs))


def _root(number: int, count: int) -> float:
    """The root of number * 2**-2148, divided by count, rounded once."""
    # A root of 64 bits and more; that it goes on behind them is all that rounding needs to know of the rest.
    digits = max(64 + count.bit_length() - number.bit_length() // 2, 0)
    scaled, square = number << (2 * digits), count * count
    root = isqrt(scaled // square)
    return (2 * root + (root * root * square != scaled)) / (1 << (1075 + digits))
