"""Columns of few bits are the columns of float64 that they were made of: the same values, fits and dense values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prep.fit.dense import compact, dense_values, fit_dense, values_of
from stoker.prep.parse.frames import Field, frame_block
from stoker.prep.schema import DenseColumn

NUMBERS = {
    "uint8": st.integers(0, 254).map(float) | st.just(np.nan),
    "uint16": st.integers(0, 65534).map(float) | st.just(np.nan),
    "float32": st.floats(width=32, allow_infinity=False) | st.integers(-300, 70000).map(float),
    "float64": st.floats(allow_infinity=False) | st.just(-0.0),
}
STEPS = [(), ("log1p",), ("log1p", "log1p"), ("zscore",), ("log1p", "zscore"), ("minmax",), ("log1p", "minmax")]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 254, np.nan], "uint8"), ([], "uint8"), ([-np.nan, 3], "uint8"), ([255], "uint16"),
        ([65534, np.nan], "uint16"), ([65535], "float32"), ([-0.0], "float32"), ([0.5], "float32"), ([-1], "float32"),
        ([2.0**24], "float32"), ([1.0] * 3000 + [255.0], "uint16"), ([7.0] * 3000 + [0.25], "float32"),
        ([1.0] * 3000 + [300.0] * 3000 + [-0.0], "float32"), ([0.1], None), ([1.0] * 3000 + [2.0**24 + 1], None),
    ],
)  # fmt: skip
def test_the_narrowest_type_that_holds_all_values(values: list[float], expected: str | None, dtype: str) -> None:
    whole = np.array(values, dtype)
    found = compact(whole)
    assert found.dtype == (expected if expected is not None else dtype)
    same_bits(values_of(found), whole.astype(np.float64))


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours, theirs)
    there = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours[there]), np.signbit(theirs[there]))


@st.composite
def columns(draw: Any) -> tuple[list[DenseColumn], list[np.ndarray]]:
    rows = draw(st.integers(1, 60))
    made, raw = [], []
    for number in range(draw(st.integers(1, 5))):
        made.append(DenseColumn(
            name=f"c{number}", fill=draw(st.sampled_from(["mean", "median", 0.0, -3.5])), null_flag=draw(st.booleans()),
            clip_min=draw(st.sampled_from([None, 3.0])), clip_max=draw(st.sampled_from([None, 200.5])),
            transforms=draw(st.sampled_from(STEPS)),
        ))  # fmt: skip
        values = NUMBERS[draw(st.sampled_from(list(NUMBERS)))]
        raw.append(np.array(draw(st.lists(values, min_size=rows, max_size=rows)), np.float64))
    return made, raw


@settings(max_examples=scaled(60), deadline=None)
@given(made=columns(), cut=st.integers(0, 60), train=st.integers(1, 60))
def test_they_teach_and_give_the_same(made: tuple[list[DenseColumn], list[np.ndarray]], cut: int, train: int) -> None:
    """Each part of the narrowest types that hold its rows."""
    dense, raw = made

    def fit(narrow: bool) -> tuple[list[Any], list[np.ndarray]]:
        parts = [[column[:cut] for column in raw], [column[cut:] for column in raw]]
        parts = [[compact(c) for c in part] if narrow else part for part in parts if len(part[0])]
        fitted = fit_dense(dense, parts, lambda part, look: look(part, np.arange(0, len(part[0]), train)))
        return fitted, [dense_values(dense, part, fitted) for part in parts]

    with np.errstate(over="ignore", invalid="ignore"):
        (ours, values), (theirs, expected) = fit(True), fit(False)
    assert ours == theirs
    for mine, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), other.view(np.uint32))


@settings(max_examples=scaled(100), deadline=None)
@given(
    values=st.lists(
        st.one_of(st.none(), st.integers(0, 300), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**53 + 1, -1])),
        max_size=40,
    ),
    dtype=st.sampled_from([pl.Int64, pl.Float64, pl.Int32, pl.UInt8, pl.Float32]),
    cuts=st.lists(st.integers(0, 40), max_size=2),
    begin=st.integers(0, 20),
)
def test_numbers_of_frames(values: list[int | None], dtype: Any, cuts: list[int], begin: int) -> None:
    """With nulls or without, in pieces that begin anywhere: what Polars' cast to float64 and NumPy say.

    A Float32 is the number that NumPy writes for it: 161114580 for 161114576, its nearest.
    """
    series = pl.Series("a", values, pl.Int64).cast(pl.Float64).cast(dtype, strict=False)
    if dtype == pl.Int64:
        series = pl.Series("a", values, pl.Int64)
    pieces = [series[at:to] for at, to in pairwise([0, *sorted(cuts), 40])]
    series = pl.concat(pieces, rechunk=False)[begin:]
    field = Field(column="a", kind="float")
    column = frame_block(pl.DataFrame({"a": series}), [field]).columns[field]
    expected = series.cast(pl.Float64).to_numpy()
    if dtype == pl.Float32:
        expected = np.array([float(str(value)) for value in series.cast(pl.Float32).to_numpy()], np.float64)
    same_bits(values_of(compact(column.to_numpy())), expected)
    same_bits(column.to_numpy(), expected)
    assert column.dtype == pl.Float64
    np.testing.assert_array_equal(column.is_null().to_numpy(), np.isnan(expected))
