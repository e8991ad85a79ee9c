"""The yardstick of the bars of features, and of that which goes from a session log to a ranking."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from processes import fork_contestants

from benchmarks import features
from benchmarks.harness import Run, WrongResult
from benchmarks.rounds import work
from benchmarks.sessions import DIMS, NUMBERS, mean_reciprocal_rank


def test_mean_reciprocal_rank_by_hand() -> None:
    groups = np.array([7, 3, 7, 7, 3, 9])
    scores = np.array([0.9, 0.1, 0.5, 0.2, 0.4, 0.3])
    labels = np.array([0, 1, 1, 0, 0, 0])
    assert mean_reciprocal_rank(scores, labels, groups) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert mean_reciprocal_rank(np.zeros(6), labels, groups) == pytest.approx((1 / 3 + 1 / 2) / 2)  # equal scores


def test_the_table_has_what_both_sides_read() -> None:
    source = ast.parse((Path(__file__).parents[1] / "benchmarks" / "peers" / "pandas_sessions.py").read_text())
    made: dict[str, list[str]] = {"ENCODED": ["current_filters", "city", "device", "user_id"]}
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("CATEGORICAL", "CONTINUOUS"):
                code = compile(ast.Expression(node.value), "table", "eval")
                made[name] = sorted(eval(code, {"ENCODED": made["ENCODED"]}))
    assert made["CATEGORICAL"] == sorted(DIMS)
    assert made["CONTINUOUS"] == sorted(NUMBERS)


def table_of_pairs(path: Path, rows: int = 600) -> Path:
    """A table with missing numbers and categories, and categories that only validation rows have."""
    draw = np.random.default_rng(0)

    def missing(values: list[object]) -> list[object]:
        return [None if lost else value for value, lost in zip(values, draw.random(rows) < 0.1, strict=True)]

    whole = ("item", "hour", "weekday")
    data: dict[str, list[object]] = {
        name: missing([int(k) if name in whole else f"é{k}" for k in draw.integers(0, 400, rows)]) for name in DIMS
    }
    data |= {name: missing(draw.normal(2, 3, rows).tolist()) for name in NUMBERS}
    data |= {"label": draw.integers(0, 2, rows).tolist(), "split": draw.choice(["train", "valid"], rows).tolist()}
    pl.DataFrame(data).write_parquet(path)
    return path


@pytest.mark.slow
def test_duckdb_prepares_what_polars_does(tmp_path: Path) -> None:
    pytest.importorskip("duckdb", reason="the peer is DuckDB")
    from benchmarks.peers.frames_sessions import by_duckdb, by_polars

    table = table_of_pairs(tmp_path / "pairs.parquet")
    codes, values, labels, train, sizes = by_polars(table, DIMS, NUMBERS)
    other = by_duckdb(table, DIMS, NUMBERS, threads=2)
    np.testing.assert_allclose(other[1], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(other[2], labels)
    np.testing.assert_array_equal(other[3], train)
    assert other[4] == sizes
    for mine, theirs in zip(codes.T.tolist(), other[0].T.tolist(), strict=True):
        assert {0} == {b for a, b in zip(mine, theirs, strict=True) if a == 0}
        assert len(set(zip(mine, theirs, strict=True))) == len(set(mine)) == len(set(theirs))


@pytest.mark.slow
def test_duckdb_makes_the_features_that_ours_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb", reason="the peer is DuckDB")
    fork_contestants(monkeypatch)
    monkeypatch.setattr(features, "CACHE", tmp_path)
    log = str(features.log_folder(500, Run.of(quick=True)))
    found = []
    for contestant in (features.OURS, replace(features.DUCKDB, environment=None)):
        found.append(tmp_path / contestant.label)
        found[-1].mkdir()
        work(contestant, {"log": log, "small": log, "results": str(found[-1])})
    ours, theirs = (folder / "out" for folder in found)
    assert sorted(path.name for path in theirs.iterdir()) == sorted(path.name for path in ours.iterdir())
    features.check_same(ours, theirs)
    pairs = pl.read_parquet(theirs / "pairs.parquet")
    pairs.with_columns(pl.col("city_item_mean") + 1e-6).write_parquet(theirs / "pairs.parquet")
    with pytest.raises(WrongResult, match="city_item_mean of row 0"):
        features.check_same(ours, theirs)
