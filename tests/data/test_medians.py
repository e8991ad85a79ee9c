"""Medians in one pass where a sample finds them, and by digits where it does not: the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prep.fit import dense_fit
from stoker.prep.fit.dense_fit import fit_dense
from stoker.prep.fit.medians import Brackets, by_digits
from stoker.prep.fit.transforms import DenseFit
from stoker.prep.schema import DenseColumn

Array = npt.NDArray[Any]
Part = tuple[list[Array], Array]  # raw columns and training rows
HUGE = float(np.finfo(np.float64).max)
VALUES = st.one_of(
    st.sampled_from([np.nan, 0.0, -0.0, 1.0, 2.0, -5.0, HUGE, -HUGE, 5e-324, 0.1]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-3, 3).map(float),
)


def over(parts: Sequence[Part]) -> Callable[..., Iterator[Any]]:
    def look(function: Callable[[list[Array], Array], Any], some: Sequence[Part] = parts) -> Iterator[Any]:
        return (function(*part) for part in some)

    return look


def passed(brackets: Brackets, parts: Sequence[Part]) -> list[float | None]:
    brackets.guess(parts, over(parts))
    for part in parts:
        brackets.add(brackets.look(*part))
    return brackets.medians()


def middle(values: Array) -> float:
    present = np.sort(values[~np.isnan(values)])
    if not len(present):
        return 0.0
    low, high = float(present[(len(present) - 1) // 2]), float(present[len(present) // 2])
    return low / 2 + high / 2 if np.isinf(low + high) else (low + high) / 2 + 0.0


@settings(max_examples=200, deadline=None)
@given(
    columns=st.lists(st.lists(VALUES, min_size=30, max_size=30), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    sample=st.sampled_from([1, 3, 8, 100]),
    most=st.sampled_from([0, 2, 100]),
    rising=st.booleans(),
)
def test_what_a_pass_finds_is_the_median(
    columns: list[list[float]], cuts: list[int], sample: int, most: int, rising: bool
) -> None:
    raw = np.array(columns)
    if rising:
        raw = np.sort(raw, axis=1)
    train = np.arange(30) % 5 != 1
    parts = [(list(np.ascontiguousarray(some)), np.flatnonzero(rows))
             for some, rows in zip(np.split(raw, sorted(cuts), axis=1), np.split(train, sorted(cuts)), strict=True)
             if rows.any()]  # fmt: skip
    every = np.arange(len(raw))
    expected = [middle(values[train]) for values in raw]
    found = passed(Brackets(every, sample=sample, most=most), parts)
    assert [value for value in found if value is not None] == [
        right for value, right in zip(found, expected, strict=True) if value is not None
    ]
    if sample == 100 and most == 100:  # it looks at all rows
        assert None not in found
    assert by_digits(every, over(parts)) == expected


def test_a_sample_of_a_large_column_finds_it_and_keeps_little() -> None:
    draw = np.random.default_rng(4)
    values = np.stack([draw.lognormal(2, 3, 400_000), draw.integers(0, 7, 400_000).astype(np.float64)])
    parts = [([a, b.astype(np.float32)], np.arange(len(a)))
             for a, b in zip(*(np.array_split(column, 9) for column in values), strict=True)]  # fmt: skip
    brackets = Brackets(np.arange(2), sample=4096)
    assert passed(brackets, parts) == [middle(column) for column in values]
    assert 0 < sum(map(len, brackets._between[0])) < 40_000
    assert brackets.present.tolist() == [400_000, 400_000]


def test_parts_that_were_not_sampled_may_be_otherwise() -> None:
    """Values that rise from part to part, of which the sample has the first and the last alone."""
    parts = [([np.full(10, number, np.float64)], np.arange(10)) for number in range(301)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.prep.fit.medians._PARTS", 2)
        brackets = Brackets(np.arange(1), sample=4)
        found = passed(brackets, parts)
    assert brackets.guesses[0] in (0.0, 300.0)
    assert found in ([None], [150.0])
    assert by_digits(np.arange(1), over(parts)) == [150.0]


@pytest.mark.parametrize(("sample", "most"), [(1, 2**20), (4, 0), (2**16, 2**20)])
def test_fits_do_not_depend_on_what_the_sample_says(sample: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that were made with a guess of the fill are corrected, exactly."""
    columns = [DenseColumn(name="a", fill="median", transforms=("log1p", "zscore")),
               DenseColumn(name="b", fill="median", transforms=("minmax",)),
               DenseColumn(name="c", fill="mean", transforms=("zscore",)),
               DenseColumn(name="d", fill="mean", transforms=("minmax",))]  # fmt: skip
    draw = np.random.default_rng(8)
    raw = draw.lognormal(1, 2, (4, 5000))
    raw[:, draw.random(5000) < 0.4] = np.nan
    raw[1, 7] = raw[3, 7] = np.nan
    filled = []
    for column, values in zip(columns, raw, strict=True):
        fill = np.nanmedian(values) if column.fill == "median" else np.nanmean(values)
        filled.append(np.where(np.isnan(values), fill, values))
    filled[0] = np.log(filled[0] + 1)

    def fits() -> list[DenseFit]:
        parts = [
            (list(np.ascontiguousarray(some)), np.arange(some.shape[1])) for some in np.array_split(raw, 7, axis=1)
        ]
        return fit_dense(columns, parts, lambda part, look: look(*part), 2)

    expected = fits()
    monkeypatch.setattr(dense_fit, "Brackets", partial(Brackets, sample=sample, most=most))
    found = fits()
    assert found == expected
    for fit, values, column in zip(found, filled, columns, strict=True):
        if column.transforms[-1] == "zscore":
            np.testing.assert_allclose((fit.shift, 1 / fit.scale), (values.mean(), values.std()), rtol=1e-12)
        else:
            np.testing.assert_allclose((fit.shift, 1 / fit.scale), (values.min(), np.ptp(values)), rtol=1e-12)


def test_the_middle_of_values_whose_sum_is_out_of_range() -> None:
    parts: list[Part] = [([np.array([HUGE, HUGE, HUGE, 0.75 * HUGE])], np.arange(4))]
    assert passed(Brackets(np.arange(1)), parts) == [HUGE]
    assert by_digits(np.arange(1), over(parts)) == [HUGE]
