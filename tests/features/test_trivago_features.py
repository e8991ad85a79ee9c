"""The trivago recipe with features, end to end, against loops over the lines of a generated log."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive_features as naive
import numpy as np
import polars as pl
import pytest

import stoker
from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.prep import recipes
from stoker.prep.recipe import Recipe


def plain(preset: str) -> Recipe:
    """The recipe with dense columns as they are: no logarithms, no scales, missing is -1."""
    recipe = recipes.get("trivago", preset)
    schema = recipe.schema()
    dense = tuple(replace(column, transforms=(), fill=-1.0) for column in schema.dense)
    return replace(recipe, presets={preset: lambda: replace(schema, dense=dense)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trivago")
    stoker.synthetic.write("trivago", 1_400, folder / "log.csv", scale=0.2)
    with (folder / "item_metadata.csv").open("w") as file:
        file.write("item_id,properties\n")
        for item in range(1, 300):
            file.write(f"{item},{'|'.join(f'p{k}' for k in range(1, 8) if item % (k + 1) == 0)}\n")
    return folder


def by_loops(path: Path) -> list[dict[str, Any]]:
    """A row for each listed item of a click-out, with what features should be."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    rows: list[dict[str, Any]] = []
    past: list[dict[str, Any]] = []  # interactions with items in the order of the log
    clickout = -1
    for moment, line in enumerate(lines):
        when, step, is_click = int(line["timestamp"]), int(line["step"]), line["action_type"] == "clickout item"
        clickout += is_click
        items = line["impressions"].split("|")[:25] if is_click and line["impressions"] else []
        prices = line["prices"].split("|")[:25]
        session = [e for e in past if e["session"] == line["session_id"]]
        sooner = [e for e in session if e["when"] < when]
        for place, item in enumerate(items if len(items) > 1 else [], 1):
            same, price = [e for e in session if e["item"] == item], float(prices[place - 1])
            earlier = [e for e in past if e["item"] == item and e["when"] < when]
            rows.append({
                "clickout": clickout, "item": item, "y": int(item == line["reference"]), "price": price, "rank": place,
                "price_is_null": 0,
                "price_rank": 1 + sum(float(p) < price for p in prices[: len(items)]),
                "is_last_item": int(bool(session) and session[-1]["item"] == item),
                "steps_since": step - session[-1]["step"] if session else -1,
                "seconds_since": when - sooner[-1]["when"] if sooner else -1,
                "seconds_since_item": min((when - e["when"] for e in same if e["when"] < when), default=-1),
                "session_item": len(same), "item_seen": len(earlier), "step": step,
                "user_item": sum(e["user"] == line["user_id"] for e in earlier),
                "item_clicked": sum(e["click"] for e in earlier),
                **{c: line[c] for c in ("user_id", "city", "device", "current_filters")},
            })  # fmt: skip
        if line["reference"].isdigit():
            past.append({"session": line["session_id"], "user": line["user_id"], "item": line["reference"],
                         "when": when, "step": step, "click": is_click, "moment": moment})  # fmt: skip
    return rows


def dense_of(data: stoker.Dataset, split: str) -> np.ndarray:
    batches = [batch.dense.numpy() for batch in data.split(split).batches(4096)]
    return np.concatenate(batches)


@pytest.mark.slow
def test_every_feature_is_that_of_the_loops(folder: Path, tmp_path: Path) -> None:
    data = stoker.prepare(plain("features"), folder / "log.csv", out=tmp_path / "made")
    rows = by_loops(folder / "log.csv")
    assert rows
    train = [row for row in rows if row["clickout"] % 5]
    valid = [row for row in rows if row["clickout"] % 5 == 0]
    assert (len(data.train), len(data.valid), len(data.test)) == (len(train), len(valid), 0)
    names = list(data.schema.dense)
    folds = {c: naive.hash_text(str(c)) % 8 for c in {row["clickout"] for row in rows}}
    for split, own in (("train", train), ("valid", valid)):
        known: dict[int, int] = {}
        lists = [known.setdefault(row["clickout"], len(known)) for row in own]
        np.testing.assert_array_equal(data.split(split).groups, lists)
        dense = dense_of(data, split)
        for name in names:
            if not name.endswith("_mean") and name != "item_shown":
                np.testing.assert_array_equal(dense[:, names.index(name)], [row[name] for row in own], err_msg=name)
        shown = [sum(r["item"] == row["item"] for r in train) for row in own]
        np.testing.assert_array_equal(dense[:, names.index("item_shown")], shown)
        for key in (None, "city", "current_filters"):
            name = "item_mean" if key is None else f"{key}_item_mean"
            means = []
            for row in own[::7]:
                seen = [r for r in train if split == "valid" or folds[r["clickout"]] != folds[row["clickout"]]]
                overall = sum(r["y"] for r in seen) / len(seen)
                same = [r["y"] for r in seen if r["item"] == row["item"] and (key is None or r[key] == row[key])]
                means.append((sum(same) + 20 * overall) / (len(same) + 20))
            np.testing.assert_allclose(dense[::7, names.index(name)], means, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_metadata_becomes_binary_columns(folder: Path, tmp_path: Path) -> None:
    files = [folder / "log.csv", folder / "item_metadata.csv"]
    data = stoker.prepare(plain("metadata"), files, out=tmp_path / "made")
    names = list(data.schema.dense)
    binary = [names.index(f"property_{number}") for number in range(1, 158)]
    found = pl.read_parquet(tmp_path / "made" / "features" / "property.parquet")["value"].to_list()
    assert set(found) == {f"p{k}" for k in range(1, 8)}
    rows = [row for row in by_loops(folder / "log.csv") if row["clickout"] % 5 == 0]
    expected = [[float(int(r["item"]) < 300 and int(r["item"]) % (int(p[1:]) + 1) == 0) for p in found] for r in rows]
    dense = dense_of(data, "valid")[:, binary]
    assert (dense[:, :7] == np.array(expected)).all()
    assert (dense[:, 7:] == 0).all()
    bags = stoker.prepare("trivago", files, out=tmp_path / "bags", preset="features")
    assert bags.schema.num_embeddings["properties"] == 8


@pytest.mark.slow
def test_generated_metadata_is_prepared_and_serves_the_next_day(tmp_path: Path) -> None:
    log, later, metadata = tmp_path / "train.csv", tmp_path / "day_2.csv", tmp_path / "item_metadata.csv"
    stoker.synthetic.write("trivago", 1_400, log, metadata=metadata)
    stoker.synthetic.write("trivago", 1_400, later, seed=1, universe=0)
    data = stoker.prepare(plain("metadata"), [log, metadata], out=tmp_path / "made")
    with metadata.open() as file:
        known = {line["item_id"]: set(line["properties"].split("|")) for line in csv.DictReader(file)}
    found = pl.read_parquet(tmp_path / "made" / "features" / "property.parquet")["value"].to_list()
    assert len(found) > 150
    names = list(data.schema.dense)
    binary = [names.index(f"property_{number}") for number in range(1, len(found) + 1)]
    rows = [row for row in by_loops(log) if row["clickout"] % 5 == 0]
    expected = [[float(name in known[row["item"]]) for name in found] for row in rows]
    assert (dense_of(data, "valid")[:, binary] == np.array(expected)).all()
    # Its times are those of the first day.
    new = stoker.prepare(files=[later, metadata], like=tmp_path / "made", out=tmp_path / "later", history="ignore")
    assert dense_of(new, "test")[:, binary].sum(axis=1).min() >= 2  # stars and a kind


@pytest.mark.slow
def test_new_sessions_are_prepared_like_the_old(folder: Path, tmp_path: Path) -> None:
    data = stoker.prepare("trivago", folder / "log.csv", out=tmp_path / "made", preset="features")
    again = stoker.prepare(files=folder / "log.csv", like=tmp_path / "made", out=tmp_path / "again", history="ignore")
    rows = by_loops(folder / "log.csv")
    held = np.array([row["clickout"] % 5 == 0 for row in rows])
    assert len(again.test) == len(rows)
    assert np.array_equal(dense_of(again, "test")[held], dense_of(data, "valid"))


def test_rows_of_a_click_out_carry_its_number(folder: Path) -> None:
    recipe = recipes.get("trivago", "features")
    assert recipe.derive is not None
    log = pl.scan_csv(folder / "log.csv", schema_overrides={"reference": pl.String})
    rows = recipe.derive({"log": log}, recipe.schema()).collect(engine="streaming")
    shown = rows.filter(pl.col("split") != "interaction")
    assert shown["clickout"].null_count() == 0
    assert shown.group_by("clickout").agg(pl.col("label").sum())["label"].max() == 1
    assert rows["moment"].is_sorted()
    between = rows.filter(pl.col("split") == "interaction")
    assert between["event"].min() == 1
    assert between["clickout"].null_count() == between.height > 0


def test_a_feature_that_takes_the_place_of_a_column(folder: Path, tmp_path: Path) -> None:
    recipe = recipes.get("trivago", "features")
    schema = replace(
        recipe.schema(), feature=(*recipe.schema().feature, f.CountEncoding(name="platform", by=("city",)))
    )
    taken = replace(recipe, presets={"features": lambda: schema})
    with pytest.raises(
        SchemaError, match=r"feature 'platform' \(count\) makes column 'platform', which rows .* have already"
    ):
        stoker.prepare(taken, folder / "log.csv", out=tmp_path / "out")
    schema2 = replace(recipe.schema(), feature=(*recipe.schema().feature, f.CountEncoding(by=("town",))))
    absent = replace(recipe, presets={"features": lambda: schema2})
    with pytest.raises(SchemaError, match=r"reads column 'town', which is neither in the input nor made"):
        stoker.prepare(absent, folder / "log.csv", out=tmp_path / "out")


def test_a_log_without_a_column(folder: Path, tmp_path: Path) -> None:
    pl.read_csv(folder / "log.csv").drop("city").write_csv(tmp_path / "log.csv")
    with pytest.raises(DataError, match="has no column 'city'"):
        stoker.prepare("trivago", tmp_path / "log.csv", out=tmp_path / "out", preset="features")
