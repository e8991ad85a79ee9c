"""Medians by ranks, over parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prep.fit.dense import median, ordered_int

Array = npt.NDArray[Any]
HUGE = float(np.finfo(np.float64).max)
VALUES = st.one_of(
    st.sampled_from([np.nan, 0.0, -0.0, 1.0, 2.0, -5.0, HUGE, -HUGE, 5e-324, 0.1]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-3, 3).map(float),
)


def found(columns: Array, cuts: list[int]) -> list[float]:
    """The median of each column [K, n], over parts of it that are cut before the rows ``cuts``."""

    def of(values: Array) -> float:
        def passes() -> Iterator[tuple[Array, None]]:
            return ((ordered_int(part[~np.isnan(part)]), None) for part in np.split(values, sorted(cuts)))

        return median(passes, int((~np.isnan(values)).sum()))

    return [of(values) for values in columns]


def middle(values: Array) -> float:
    present = np.sort(values[~np.isnan(values)])
    if not len(present):
        return 0.0
    low, high = float(present[(len(present) - 1) // 2]), float(present[len(present) // 2])
    return low / 2 + high / 2 if np.isinf(low + high) else (low + high) / 2 + 0.0


@settings(max_examples=scaled(100), deadline=None)
@given(
    columns=st.integers(0, 20).flatmap(
        lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=3)
    ),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_medians_are_those_of_sorted_values(columns: list[list[float]], cuts: list[int]) -> None:
    values = np.array(columns, np.float64).reshape(len(columns), -1)
    np.testing.assert_array_equal(
        np.array(found(values, cuts)).view(np.uint64), np.array([middle(one) for one in values]).view(np.uint64)
    )


def test_many_values_in_parts() -> None:
    draw = np.random.default_rng(4)
    values = np.stack([draw.lognormal(2, 3, 200_001), draw.integers(0, 7, 200_001).astype(np.float64)])
    assert found(values, [1, 70_000]) == np.median(values, axis=1).tolist()


def test_the_middle_of_values_whose_sum_is_out_of_range() -> None:
    assert found(np.array([[HUGE, HUGE, HUGE, 0.75 * HUGE]]), []) == [HUGE]
