"""Sums of values and squares against Fractions: any values, in any order and in any parts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stoker.prep.fit import exact_sums
from stoker.prep.fit.exact_sums import add_values, counted_sums, mean_and_deviation, no_values, room, times

Floats = npt.NDArray[np.float64]
HUGE, TINY = float(np.finfo(np.float64).max), 5e-324
# All bits set; lower halves at both ends of what their products may be.
DENSE_BITS = [float(np.nextafter(2.0, 0.0)), 1.0 + (2**26 - 1) * 2.0**-52, 1.0 + 2.0**-26, 1.0]


def summed(*parts: Floats) -> npt.NDArray[np.int64]:
    total, held = no_values(1), room()
    for part in parts:
        sums = no_values(1)
        add_values(np.array(part, np.float64), sums[0], held)
        limbs = sums[0, exact_sums._SUM :].view(np.uint64)
        assert (np.delete(limbs, exact_sums._SQUARES - exact_sums._SUM - 1)[:-1] < 2**32).all()  # room for 2**31 parts
        total += sums
    assert not held.any()
    found: npt.NDArray[np.int64] = total[0]
    return found


def carried(sums: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return times(sums, 1)


def check(values: Floats, sums: npt.NDArray[np.int64]) -> tuple[float, float]:
    """The sums hold every digit; the mean and the root of the variance are rounded once."""
    exact = [Fraction(value) for value in values.tolist()]
    total, squares = sum(exact, Fraction()), sum((value * value for value in exact), Fraction())
    mean = total / len(exact)
    variance = squares / len(exact) - mean**2
    first, second = exact_sums._SUM, exact_sums._SQUARES
    assert Fraction(exact_sums._number(sums[first:second]), 2**1074) == total
    assert Fraction(exact_sums._number(sums[second:]), 2**2148) == squares
    found, deviation = mean_and_deviation(sums)
    assert found == float(mean)
    below = (Fraction(deviation) + Fraction(math.nextafter(deviation, 0.0))) / 2
    above = Fraction(deviation) + (Fraction(math.ulp(deviation)) / 2)
    assert deviation == 0 or below**2 <= variance
    assert variance <= above**2
    return found, deviation


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e3, 1e3),
    st.integers(-9, 9).map(float),
    st.sampled_from([0.0, -0.0, HUGE, -HUGE, TINY, -TINY, 2.0**-1022, *DENSE_BITS]),
)


# What fails is shown as it was drawn: shrinking lists of floats takes minutes.
@settings(max_examples=150, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    values=hnp.arrays(np.float64, st.integers(1, 40), elements=NUMBERS),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    seed=st.integers(0, 99),
)
def test_any_values_in_any_parts_and_order(values: Floats, cuts: list[int], seed: int) -> None:
    whole = check(values, summed(values))
    mixed = np.random.default_rng(seed).permutation(values)
    assert check(values, summed(*np.split(mixed, sorted(cuts)))) == whole


@settings(max_examples=100, deadline=None)
@given(value=NUMBERS, count=st.one_of(st.integers(0, 40), st.integers(2**31 - 3, 2**33)), others=st.lists(NUMBERS))
def test_many_times_a_value(value: float, count: int, others: list[float]) -> None:
    first, second = exact_sums._SUM, exact_sums._SQUARES
    whole = summed(np.array(others)) + times(summed(np.array([value])), count)
    total = sum(map(Fraction, others), Fraction(value) * count)
    squares = sum((Fraction(other) ** 2 for other in others), Fraction(value) ** 2 * count)
    assert Fraction(exact_sums._number(whole[first:second]), 2**1074) == total
    assert Fraction(exact_sums._number(whole[second:]), 2**2148) == squares
    assert whole[exact_sums.COUNT] == len(others) + count
    if count < 41:
        np.testing.assert_array_equal(
            mean_and_deviation(whole), mean_and_deviation(summed(np.array(others + [value] * count)))
        )


def drawn(kind: str, count: int) -> Floats:
    draw = np.random.default_rng(5)
    normal = draw.normal(size=count)
    made: dict[str, Any] = {
        "normal": normal,
        "whole": draw.integers(-5, 300, count).astype(np.float64),
        "half zeros": np.where(draw.random(count) < 0.5, 0.0, normal),
        "far from zero": 1e9 + normal,
        "cancelling": np.concatenate([normal, -normal])[:count] * 1e200,
        "24 powers of two": np.ldexp(1 + draw.random(count), draw.integers(-12, 12, count)),
        "25 powers of two": np.ldexp(1 + draw.random(count), draw.integers(-12, 13, count)),
        "any": normal * 10.0 ** draw.integers(-300, 300, count),
        "any bits": draw.integers(0, 2**63 - 2**52, count).view(np.float64),
        "large and tiny": np.where(draw.random(count) < 0.5, HUGE, TINY),
        "below normal": draw.integers(-(2**52), 2**52, count) * TINY,
    }
    return np.array(made[kind], np.float64)


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 65534).map(float),
                  st.integers(0, 40)),
        max_size=20,
    ),
)  # fmt: skip
def test_counted_values_are_values_one_by_one(pairs: list[tuple[float, int]]) -> None:
    values, counts = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs], np.int64)
    np.testing.assert_array_equal(carried(counted_sums(values, counts)), carried(summed(np.repeat(values, counts))))


def test_many_of_a_counted_value() -> None:
    values, counts = np.array([-HUGE, TINY, HUGE, 3.0, np.inf]), np.array([2**33 + 1, 2**40 - 1, 2**33, 5, 0])
    sums = counted_sums(values, counts)
    total = sum((Fraction(v) * c for v, c in zip(values[:4].tolist(), counts[:4].tolist(), strict=True)), Fraction())
    assert Fraction(exact_sums._number(sums[exact_sums._SUM : exact_sums._SQUARES]), 2**1074) == total
    assert sums[exact_sums.COUNT] == counts.sum()
    assert mean_and_deviation(counted_sums(values, counts + 1))[0] == np.inf


@pytest.mark.parametrize(
    "kind",
    ["normal", "whole", "half zeros", "far from zero", "cancelling", "24 powers of two", "25 powers of two", "any",
     "any bits", "large and tiny", "below normal"],
)  # fmt: skip
def test_blocks_of_either_way(kind: str) -> None:
    values = drawn(kind, 2 * exact_sums._BLOCK + 77)
    whole = check(values, summed(values))
    assert mean_and_deviation(summed(values[:1], values[1:700], values[700:])) == whole
    assert mean_and_deviation(summed(values[::-1])) == whole
    if kind in ("normal", "whole", "half zeros", "far from zero"):
        np.testing.assert_allclose(whole, (values.mean(), values.std()), rtol=1e-13)


@pytest.mark.parametrize("value", [*DENSE_BITS, HUGE, TINY, 0.1])
@pytest.mark.parametrize("apart", [False, True])
def test_full_blocks_of_one_value_do_not_overflow(value: float, apart: bool) -> None:
    block = np.full(exact_sums._BLOCK, value)
    if apart:  # so far from the others that the block goes the general way
        block[0] = 1e-100 if value > 1e-100 else 1e100
    check(block, summed(block))
    check(-block, summed(-block))


def test_the_ends_of_the_three_parts() -> None:
    """Parts that are as large as they may be, of both signs: the top one at 2**24, those below at 2**25."""
    for digits in ((2**24, 2**25, 2**25), (2**24, 2**25, -(2**25)), (-(2**24), -(2**25), 2**25), (2**23, 2**25, 1)):
        exact = sum(digit << shift for digit, shift in zip(digits, (52, 26, 0), strict=True))
        near = [float(exact), math.nextafter(exact, 0.0), float(exact >> 24 << 24), float(2**25 << 26), 2.0**25, 1.0]
        block = np.resize(np.array(near), exact_sums._BLOCK)
        check(block, summed(block))
        check(block * 2.0**-60, summed(block * 2.0**-60))


def test_most_blocks_go_the_fast_way() -> None:
    for kind, fast in (("normal", True), ("whole", True), ("half zeros", True), ("24 powers of two", True),
                       ("25 powers of two", False), ("any", False), ("below normal", False)):  # fmt: skip
        block = drawn(kind, exact_sums._BLOCK)
        sums = no_values(1)[0]
        assert exact_sums._add_near(block, sums) == fast, kind
        assert sums.any() == fast, kind  # nothing is left behind by an attempt


def test_roots_are_rounded_once() -> None:
    """Between two float64, and by so little above that 64 bits do not show it."""
    middle = (2**53 + 1) << 100
    for square, count, expected in ((middle**2, 1, 2**53), (middle**2 + 1, 1, 2**53 + 2), (middle**2 - 1, 1, 2**53),
                                    (9 * middle**2, 3, 2**53), (9 * middle**2 + 1, 3, 2**53 + 2)):  # fmt: skip
        assert exact_sums._root(square, count) == math.ldexp(expected, 100 - 1074)


def test_nothing_varies() -> None:
    assert mean_and_deviation(summed(np.full(7, 0.1))) == (0.1, 0.0)  # NumPy's mean of these is below 0.1
    assert mean_and_deviation(summed(np.array([]))) == (0.0, 0.0)
    zero = mean_and_deviation(summed(np.array([-0.0, -0.0])))
    assert zero == (0.0, 0.0)
    assert math.copysign(1.0, zero[0]) == 1.0


@pytest.mark.parametrize(
    ("values", "mean"),
    [([np.inf], np.inf), ([-np.inf, -np.inf], -np.inf), ([np.inf, -np.inf], np.nan), ([np.nan], np.nan),
     ([np.nan, np.inf], np.nan)],
)  # fmt: skip
def test_infinities_and_nan(values: list[float], mean: float) -> None:
    all_values = np.array([1.0, *values, *np.arange(3000.0)])
    for at in (1, 2, 1500):
        found = mean_and_deviation(summed(all_values[:at], all_values[at:]))
        np.testing.assert_array_equal(found, (mean, np.nan))
