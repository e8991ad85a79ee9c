"""Globo and EB-NeRD with engineered features, from generated logs to ranked lists, against loops over the rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import stoker
from stoker.prep import recipes
from stoker.prep.recipe import Recipe

NAMES = {"globo": ("click", "last_hour", "age_hours"), "ebnerd": ("impression", "recent_clicks", "position")}


def plain(name: str) -> Recipe:
    """The recipe with dense columns as they are, missing is -1."""
    recipe = recipes.get(name, "features")
    schema = recipe.schema()
    dense = tuple(replace(column, transforms=(), fill=-1.0, null_flag=False) for column in schema.dense)
    return replace(recipe, presets={"features": lambda: replace(schema, dense=dense)})


def rows_of(recipe: Recipe, files: list[Path]) -> pl.DataFrame:
    assert recipe.derive is not None
    inputs = {}
    for key, kind in recipe.inputs.items():
        [inputs[key]] = [pl.scan_parquet(f) for f in files if any(f.match(pattern) for pattern in kind.files)]
    return recipe.derive(inputs, recipe.schema()).collect(engine="streaming")


@pytest.fixture(scope="module", params=sorted(NAMES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    log = folder / ("log.parquet" if request.param == "globo" else "log")
    stoker.synthetic.write(request.param, 1_500 if request.param == "globo" else 400, log)
    files = sorted(log.glob("*.parquet")) if log.is_dir() else [log]
    data = stoker.prepare(plain(request.param), files, out=folder / "made")
    return request.param, data, rows_of(recipes.get(request.param, "features"), files)


@pytest.mark.slow
def test_every_feature_is_that_of_the_loops(made: tuple[str, stoker.Dataset, pl.DataFrame]) -> None:
    name, data, frame = made
    group, popular, differ = NAMES[name]
    rows = frame.to_dicts()
    for split in ("train", "valid", "test"):
        own = [row for row in rows if row["split"] == split]
        dense = np.concatenate([batch.dense.numpy() for batch in data.split(split).batches(512)])
        assert len(own) == len(dense)
        known: dict[int, int] = {}
        assert data.split(split).groups is not None
        np.testing.assert_array_equal(
            data.split(split).groups, [known.setdefault(row[group], len(known)) for row in own]
        )
        columns = dict(zip(data.schema.dense, dense.T, strict=True))
        for at in range(0, len(own), 1 + len(own) // 60):
            row = own[at]
            clicks = [r for r in rows if r["time"] < row["time"] and r["label"]]
            session = [r for r in clicks if r["session"] == row["session"]]
            last = max(session, key=lambda r: r["time"], default=None)
            if last is not None and sum(r["time"] == last["time"] for r in session) > 1:
                continue  # two clicks of one moment: which is the last is the order of the rows
            user = [r for r in clicks if r["user"] == row["user"]]
            again = [r for r in user if r["article"] == row["article"]]
            listed = sum(r["article"] == row["article"] and r["time"] < row["time"] for r in rows)
            clicked = sum(r["article"] == row["article"] for r in clicks)
            expected = {
                f"{differ}_change": row[differ] - last[differ] if last else -1,
                "is_last_article": float(last is not None and last["article"] == row["article"]),
                "since_click": row["time"] - last["time"] if last else -1,
                "since_user_click": min((row["time"] - r["time"] for r in user), default=-1),
                "since_article": min((row["time"] - r["time"] for r in again), default=-1),
                "session_clicks": len(session),
                "session_article": sum(r["article"] == row["article"] for r in session),
                "user_article": len(again),
                "article_clicked": clicked,
                "article_listed": listed,
                "click_rate": clicked / listed if listed else -1,
                "popularity_rank": 1 + sum(r[group] == row[group] and r[popular] > row[popular] for r in rows),
                "article_rows": sum(r["article"] == row["article"] for r in rows if r["split"] == "train"),
            }
            for column, value in expected.items():
                assert columns[column][at] == pytest.approx(value, rel=1e-5), column


def test_what_a_list_is(made: tuple[str, stoker.Dataset, pl.DataFrame]) -> None:
    name, data, frame = made
    assert data.groups is not None
    assert data.groups["cut"] == 0
    lists = frame.group_by(NAMES[name][0]).agg(pl.col("label").sum(), pl.len(), pl.col("article").n_unique().alias("n"))
    if name == "globo":
        assert lists["label"].unique().to_list() == [1]
        assert (lists["len"] == lists["n"]).all()  # no article twice
        assert lists["len"].max() == 5
        # An article that nobody has clicked before is the click for sure: such lists only count as what came before.
        fresh = frame.filter(pl.col("label") == 1, pl.col("age_hours") == 0)
        assert set(frame.filter(pl.col("age_hours") == 0)["label"]) == {1}
        assert 0 < fresh.height < frame["click"].n_unique()
        assert (frame.filter(pl.col("click").is_in(fresh["click"].implode()))["split"] == "drop").all()
        kept = frame.filter(~pl.col("click").is_in(fresh["click"].implode()))
        assert not (kept["split"] == "drop").any()
        assert sum(len(data.split(split)) for split in ("train", "valid", "test")) == kept.height
        # What was read before may be listed again: refusing it would tell that what was read and is listed is clicked.
        read = frame.filter(pl.col("clicked").list.contains(pl.col("article")))
        assert 0 < read["label"].mean() < 1  # type: ignore[operator]
    else:
        assert lists["len"].max() > 5


@pytest.mark.slow
def test_a_run_ranks_what_was_shown(made: tuple[str, stoker.Dataset, pl.DataFrame], tmp_path: Path) -> None:
    _, data, _ = made
    # The plain back end: every column has another width, and so a kernel to compile.
    settings = {"model": "tabular", "batch_size": 256, "backend": "reference", "display": "quiet"}
    result = stoker.train(data, out=tmp_path / "run", **settings)
    assert {"auc", "mrr", "ndcg", "hr", "group_auc"} <= set(result.test)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert 0 < report["test"]["mrr"] < 1
    assert 0 < report["test"]["ndcg"] < 1
