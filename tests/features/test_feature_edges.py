"""Values at the edge: the largest numbers, NaN, moments out of reach, no rows, other types, labels that are missing."""

from __future__ import annotations

import math
from typing import Any

import naive_features as naive
import polars as pl
import pytest

from stoker import features as f

LEAST, MOST = -(2**63), 2**63 - 1
NAN = float("nan")


def made(features: list[f.Derivation], rows: pl.DataFrame, new: pl.DataFrame | None = None) -> list[tuple[Any, ...]]:
    """The outputs for new rows, by default the same."""
    rows = rows if "y" in rows.columns else rows.with_columns(y=pl.lit(0))
    got = f.fit(features, rows, label="y").apply(rows if new is None else new).collect()
    return got.select(name for feature in features for name in feature.outputs).rows()


@pytest.mark.parametrize("window", [None, 0.5, 2.5, 10.0, 1e30, math.inf])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([LEAST, LEAST + 1, 5, LEAST + 11, MOST, MOST - 2, 0, 5], pl.Int64),
        ([2**64 - 1, 3, 2**63 + 3, 2**63 + 1, 0, 2**63 - 1, 2**64 - 3], pl.UInt64),
        ([2**60 + 3, 2**60, 2**60 + 1, 2**60 + 1], pl.Int64),
        ([-1.5, 1e300, -math.inf, math.inf, 0.0], pl.Float64),
    ],
)
def test_an_order_of_extreme_numbers(values: list[Any], dtype: Any, window: float | None) -> None:
    rows: list[naive.Row] = [{"u": "a", "t": value} for value in values]
    features: list[f.Derivation] = [
        f.PastCount(name="count", by="u", order="t", window=window), f.SinceLast(name="since", by="u", order="t"),
        f.Rank(name="rank", by="u", order="t"), f.Rank(name="down", by="u", order="t", descending=True),
    ]  # fmt: skip
    got = made(features, pl.DataFrame(rows, schema={"u": pl.String, "t": dtype}))
    for at, row in enumerate(rows):
        past = naive.before(rows, at, ("u",), "t", None)
        since = float(row["t"] - values[past[-1]]) if past else None
        within = [i for i in past if window is None or row["t"] - values[i] <= window]
        ranks = [naive.rank(rows, at, ("u",), "t", descending=down, dense=False) for down in (False, True)]
        assert got[at] == (len(within), since, *ranks)
