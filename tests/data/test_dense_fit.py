"""What dense columns learn is a function of the training values: not of parts, their order, threads or file formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from campaigns import scaled
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prepared import digests, rows_of

from stoker.prep.fit.dense import DenseFit, dense_values, fit_dense
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule

Array = npt.NDArray[Any]
COLUMNS = (
    DenseColumn(name="a", fill="mean", transforms=("log1p", "zscore"), null_flag=True),
    DenseColumn(name="b", fill="median", clip_min=-3.0, clip_max=1e6, transforms=("zscore",)),
    DenseColumn(name="c", fill="mean", transforms=("minmax",), null_flag=True),
    DenseColumn(name="d", fill=0.25, transforms=("log1p", "log1p", "zscore")),
    DenseColumn(name="e", fill="median"),
    DenseColumn(name="f", fill="mean", transforms=("zscore",)),
)


def fitted(
    columns: Sequence[DenseColumn], raw: Array, train: Array, cuts: Sequence[int] = (), threads: int = 1
) -> list[DenseFit]:
    """Fit on the rows of ``raw`` [D, n] for which ``train`` [n] is true, cut into parts before the rows ``cuts``."""
    parts = [
        (np.ascontiguousarray(some), np.flatnonzero(rows))
        for some, rows in zip(np.split(raw, sorted(cuts), axis=1), np.split(train, sorted(cuts)), strict=True)
        if rows.any()
    ]

    def rows_of_part(part: tuple[Array, Array], look: Callable[[Array, Array], Any]) -> Any:
        return look(*part)

    return fit_dense(columns, parts, rows_of_part, threads)


def by_fractions(column: DenseColumn, values: Array) -> DenseFit:
    """The definition, over the training values [m] of a column."""
    present = sorted(values[~np.isnan(values)].tolist())
    fill: Any = column.fill
    if fill == "mean":
        fill = float(sum(map(Fraction, present), Fraction()) / len(present)) if present else 0.0
    elif fill == "median":
        fill = (present[(len(present) - 1) // 2] + present[len(present) // 2]) / 2 + 0.0 if present else 0.0
    x = np.where(np.isnan(values), fill, values)
    x = np.clip(x, column.clip_min, column.clip_max) if column.clip_min is not None else x
    for _ in range(column.transforms.count("log1p")):
        x = np.log(np.maximum(x, 0.0) + 1.0)
    shift, width = 0.0, Fraction()
    if column.transforms[-1:] == ("zscore",):
        exact = [Fraction(value) for value in x.tolist()]
        mean = sum(exact, Fraction()) / len(exact)
        variance = sum((value * value for value in exact), Fraction()) / len(exact) - mean**2
        digits = 2**1200  # far more than the root of the smallest variance needs
        shift, width = float(mean), Fraction(math.isqrt(int(variance * digits**2)), digits)
    elif column.transforms[-1:] == ("minmax",):
        shift, width = float(x.min()) + 0.0, Fraction(float(x.max() - x.min()))
    return DenseFit(fill=fill, shift=shift, scale=1.0 / float(width) if width else 1.0)


def bits(fits: Sequence[DenseFit]) -> Array:
    """Zeros of either sign differ."""
    return np.array([(one.fill, one.shift, one.scale) for one in fits]).view(np.uint64)


def assert_fit(found: DenseFit, expected: DenseFit, values: Array) -> None:
    """Equal up to what the last of the 78 bits below the largest value, and rounding, may change."""
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    assert found.fill == pytest.approx(expected.fill, rel=1e-15, abs=largest * 2.0**-75)
    assert found.shift == pytest.approx(expected.shift, rel=1e-15, abs=largest * 2.0**-75)
    width, wanted = 1 / found.scale, 1 / expected.scale
    assert width == pytest.approx(wanted, rel=1e-12) or max(width, wanted) < 1e-15 * largest


VALUES = st.one_of(
    st.floats(-100, 100).map(lambda x: x if abs(x) > 1e-30 else 0.0),
    st.floats(1e-30, 1e30),
    st.sampled_from([np.nan, np.nan, 0.0, -0.0, 0.1, 1.0, -2.0, 1e9, 1e9 + 1e-3]),
)


# What fails is shown as it was drawn: shrinking lists of floats takes minutes.
@pytest.mark.slow
@settings(max_examples=scaled(60), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data(), rows=st.integers(1, 25), threads=st.sampled_from([1, 3]))
def test_the_same_fit_however_rows_are_cut(data: st.DataObject, rows: int, threads: int) -> None:
    raw = np.array(data.draw(st.lists(st.lists(VALUES, min_size=6, max_size=6), min_size=rows, max_size=rows))).T
    train = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    train[data.draw(st.integers(0, rows - 1))] = True
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=5))
    found = fitted(COLUMNS, raw, train, cuts, threads)
    np.testing.assert_array_equal(bits(found), bits(fitted(COLUMNS, raw, train)))
    for fit, column, values in zip(found, COLUMNS, raw[:, train], strict=True):
        assert_fit(fit, by_fractions(column, values), values)


def table(rows: int) -> tuple[Array, Array]:
    """Values of every size, a fifth missing, and random training rows."""
    draw = np.random.default_rng(11)
    raw = draw.lognormal(2, 3, (6, rows)) * draw.choice([1, 1, 1, -1], (6, rows))
    raw[3] = draw.integers(0, 5, rows)
    raw[5] = 1e8 + draw.normal(size=rows) * np.linspace(0.1, 9, rows)  # other parts, other means and deviations
    raw[draw.random((6, rows)) < np.linspace(0, 0.4, rows)] = np.nan
    return raw, draw.random(rows) < np.linspace(0.9, 0.2, rows)


@pytest.mark.slow
def test_many_rows_in_uneven_parts() -> None:
    raw, train = table(30_000)  # several tiles a part
    expected = fitted(COLUMNS, raw, train)
    for cuts, threads in (([10_000], 1), ([1, 2, 9_000, 29_990], 2), (list(range(0, 30_000, 999)), 3)):
        assert fitted(COLUMNS, raw, train, cuts, threads) == expected
    order = np.random.default_rng(1).permutation(30_000)
    assert fitted(COLUMNS, raw[:, order], train[order], [7_000, 7_100], 2) == expected
    for fit, column, values in zip(expected, COLUMNS, raw[:, train], strict=True):
        filled = np.where(np.isnan(values), fit.fill, values)
        if column.fill == "mean":
            np.testing.assert_allclose(fit.fill, np.nanmean(values), rtol=1e-12)
        if column.name == "f":
            np.testing.assert_allclose((fit.shift, 1 / fit.scale), (filled.mean(), filled.std()), rtol=1e-12)


def test_the_logarithm_of_a_value_does_not_depend_on_where_it_stands() -> None:
    values = np.random.default_rng(2).lognormal(2, 3, 1000)
    whole = np.log(values)
    for at in range(0, 990, 7):
        np.testing.assert_array_equal(np.log(values[at : at + 9].copy()), whole[at : at + 9])


def test_flags_and_values_are_those_of_the_rows_that_are_asked_for() -> None:
    """Some rows of a part, as a split takes them: not its first ones."""
    raw, train = table(5_000)
    fit = fitted(COLUMNS, raw, train, [1_000, 4_000])
    whole = dense_values(COLUMNS, raw, fit)
    flags = [1, 4]  # behind a and c
    np.testing.assert_array_equal(whole[:, flags], np.isnan(raw[[0, 2]]).T)
    for rows in (np.flatnonzero(~train), np.flatnonzero(train)[::-1].copy(), np.flatnonzero(np.isnan(raw[2]))[-1:]):
        assert not np.array_equal(whole[rows][:, flags], whole[: len(rows)][:, flags])
        np.testing.assert_array_equal(dense_values(COLUMNS, raw, fit, rows=rows), whole[rows])


def test_zeros_of_either_sign_are_one_value() -> None:
    columns = (DenseColumn(name="a", fill="median"), DenseColumn(name="b", fill="median", transforms=("minmax",)),
               DenseColumn(name="c", fill="mean", transforms=("zscore",)))  # fmt: skip
    for zeros in ([-0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0, -0.0]):
        raw = np.array([zeros] * 3)
        for cuts in ([], [1]):
            found = bits(fitted(columns, raw, np.ones(len(zeros), np.bool_), cuts))
            np.testing.assert_array_equal(found, bits([DenseFit()] * 3))
    # The middle of two values, a zero of either sign and the next above it.
    raw = np.array([[-0.0, 3.0, -5.0, 0.0, 2.0, 4.0]] * 3)
    assert fitted(columns, raw, np.ones(6, np.bool_))[0].fill == 1.0


def test_values_that_nothing_is_done_to_keep_their_bits() -> None:
    values = np.array([-0.0, 0.0, 1.5, -3.0])
    for column in (DenseColumn(name="a"), DenseColumn(name="a", clip_min=-9.0, clip_max=9.0)):
        made = dense_values([column], values[None], [DenseFit()])
        np.testing.assert_array_equal(made[:, 0].view(np.uint32), values.astype(np.float32).view(np.uint32))


def test_columns_that_hardly_vary_or_go_out_of_range() -> None:
    column = DenseColumn(name="a", transforms=("zscore",))
    for rows in (1, 7, 10_000):  # NumPy's mean of seven times 0.1 is not 0.1
        (fit,) = fitted((column,), np.full((1, rows), 0.1), np.ones(rows, np.bool_))
        assert fit == DenseFit(shift=0.1, scale=1.0)
    for kind in ("zscore", "minmax"):  # varies by so little that no scale could show it
        raw = np.array([[0.0, 5e-324, 1e-323]])
        (fit,) = fitted((replace(column, transforms=(kind,)),), raw, np.ones(3, np.bool_))
        assert fit.scale == 1.0
    values = (
        1e9 + np.arange(1000.0) % 2 * 2.0**-23
    )  # the last digit; no float64 holds the mean, which NumPy's std takes
    (fit,) = fitted((column,), values[None], np.ones(1000, np.bool_), [10])
    assert fit.scale == 2.0**24
    (fit,) = fitted((column,), np.array([[1e300, -1e300]]), np.ones(2, np.bool_))  # the squares are out of range
    assert fit == DenseFit(shift=0.0, scale=1 / 1e300)


def test_no_value_and_no_row() -> None:
    raw = np.full((6, 4), np.nan)
    assert [one.fill for one in fitted(COLUMNS, raw, np.ones(4, np.bool_), [2])] == [0.0, 0.0, 0.0, 0.25, 0.0, 0.0]
    assert fitted(COLUMNS, raw, np.zeros(4, np.bool_)) == [DenseFit(fill=fill) for fill in (0, 0, 0, 0.25, 0, 0)]


SCHEMA = Schema(
    label=Label(column="label"),
    dense=COLUMNS,
    categorical=(CategoricalColumn(name="item"),),
    split=SplitRule(rule="column", column="day", values={"mo": "train", "tu": "valid", "we": "test"}),
)


@pytest.mark.slow
def test_blocks_threads_and_formats_give_the_same_statistics_and_shards(tmp_path: Path) -> None:
    rows = 1500
    raw, _ = table(rows)
    draw = np.random.default_rng(3)
    frame = pl.DataFrame(
        {
            "label": draw.integers(0, 2, rows),
            "item": draw.integers(0, 30, rows).astype(str),
            "day": draw.choice(["mo", "tu", "we"], rows),  # every part has rows of every split
            **{column.name: pl.Series(values).fill_nan(None) for column, values in zip(COLUMNS, raw, strict=True)},
        }
    )
    frame.write_csv(tmp_path / "log.csv")
    frame.write_ndjson(tmp_path / "log.jsonl")
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=130)
    frame.write_parquet(tmp_path / "whole.parquet")
    made: list[tuple[Any, dict[str, str]]] = []
    for number, (file, block_bytes, threads) in enumerate(
        (("log.csv", 2**24, 1), ("log.csv", 9_000, 2), ("log.csv", 1_100, 3), ("log.jsonl", 20_000, 2),
         ("log.parquet", 9_000, 2), ("whole.parquet", 2**24, 1))
    ):  # fmt: skip
        out = tmp_path / f"out{number}"
        run_prepare(SCHEMA, tmp_path / file, out=out, block_bytes=block_bytes, threads=threads)
        manifest = json.loads((out / "manifest.json").read_text())
        made.append((manifest["dense_stats"], digests(out, without=("manifest.json",))))
        assert made[-1] == made[0], file
    train = (frame["day"] == "mo").to_numpy()
    expected = [DenseFit(**made[0][0][column.name]) for column in COLUMNS]
    for fit, column, values in zip(expected, COLUMNS, raw[:, train], strict=True):
        assert_fit(fit, by_fractions(column, values), values)
    for split, day in (("train", "mo"), ("valid", "tu"), ("test", "we")):
        some = raw[:, (frame["day"] == day).to_numpy()]
        found = np.array(rows_of(tmp_path / "out2", split)["dense"], np.float32)
        np.testing.assert_array_equal(found, dense_values(COLUMNS, some, expected))
        np.testing.assert_array_equal(found[:, [1, 4]], np.isnan(some[[0, 2]]).T)


def test_the_fit_sees_training_rows_alone() -> None:
    raw, train = table(400)
    expected = fitted(COLUMNS, raw, train, [100])
    raw[:, ~train] = 1e12
    assert fitted(COLUMNS, raw, train, [100]) == expected
