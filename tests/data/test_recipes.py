"""Recipes on generated logs of their own format, and on the real ones where they are present."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from recipe_logs import derived, generated, real

import stoker
from stoker.base.errors import ConfigError
from stoker.dataset.dataset import Dataset
from stoker.prep import recipes
from stoker.prep.prepare import prepare
from stoker.prep.recipes import rows as tools
from stoker.prep.recipes.shops import WINDOW

SIZES = {
    "criteo": 4_000,
    "avazu": 4_000,
    "taobao": 20_000,
    "trivago": 6_000,
    "movielens": 5_000,
    "online-retail": 8_000,
    "globo": 6_000,
    "ebnerd": 1_500,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.names())
def test_every_preset_prepares_a_generated_log_twice_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    files = generated(tmp_path, name, SIZES[name], drift=0.3, scale=0.01 if name in ("criteo", "avazu") else 1.0)
    schemas = set()
    for preset in recipes.get(name).presets:
        if preset in ("terabyte", "mlperf"):
            continue  # they split by the names of the day files
        first = prepare(recipes.get(name, preset), files, out=tmp_path / preset)
        again = prepare(recipes.get(name, preset), files, out=tmp_path / f"{preset}-again", threads=1)
        assert first.manifest == again.manifest
        assert first.verify() > 0
        assert first.manifest["quarantined"] == 0
        assert len(first.train) > len(first.valid) > 0
        positives = first.manifest["splits"]["train"]["positives"] / len(first.train)
        assert 0.02 < positives < 0.8
        schemas.add(first.schema_hash)
    assert len(schemas) == len(set(recipes.get(name).presets) - {"terabyte", "mlperf"})


def test_recipes_are_found_by_name_and_stay_functions() -> None:
    assert recipes.names()[:2] == ["criteo", "avazu"]
    for name in recipes.names():
        recipe = recipes.get(name)
        assert recipe.name == name
        assert f"stoker prepare {name} " in recipe.example
        assert callable(getattr(stoker.recipes, name.replace("-", "_")))
        assert recipes.get(name.replace("-", "_").upper()).name == name
    with pytest.raises(ConfigError, match="Did you mean 'avazu'"):
        recipes.get("avazzu")
    with pytest.raises(ConfigError, match="elrec"):
        recipes.get("avazu", "nvt")


def test_past_counts_are_strictly_before_and_within_the_window() -> None:
    generator = np.random.default_rng(0)
    keys, times = generator.integers(0, 5, 300), generator.integers(-50, 50, 300)
    past = tools.PastCounts(keys, times)
    ask, when = generator.integers(0, 5, 200), generator.integers(-60, 70, 200)
    for window in (None, 1, 13):
        found = past.before(ask, when, window=window)
        for key, moment, count in zip(ask, when, found, strict=True):
            mine = times[keys == key]
            since = -1_000 if window is None else moment - window
            assert count == np.sum((mine < moment) & (mine >= since))


def test_negatives_are_given_up_where_everything_is_refused() -> None:
    drawn = tools.negatives(
        0,
        50,
        lambda chance, rows: (chance * 4).astype(np.int64),
        lambda items, rows: (rows % 2 == 0) | (items == 3),
    )
    assert np.all(drawn[::2] == -1)
    assert set(drawn[1::2].tolist()) == {0, 1, 2}


def test_streamed_rows_can_be_cut_filtered_and_selected() -> None:
    frame = tools.streamed(
        100,
        lambda start, stop: pl.DataFrame({"a": np.arange(start, stop), "b": np.arange(start, stop) * 2}),
        step=7,
    )
    assert frame.head(30).collect()["a"].to_list() == list(range(30))
    assert frame.filter(pl.col("a") > 95).select("b").collect(engine="streaming")["b"].to_list() == [
        192,
        194,
        196,
        198,
    ]


@pytest.mark.slow
def test_avazu_presets(tmp_path: Path) -> None:
    files = generated(tmp_path, "avazu", 3_000, scale=0.01)
    fae = prepare(recipes.get("avazu"), files, out=tmp_path / "fae")
    elrec = prepare(recipes.get("avazu", "elrec"), files, out=tmp_path / "elrec")
    assert fae.schema.dense == ("hour",)
    assert elrec.schema.dense == ("day", "hour")
    assert len(fae.schema.features) == 21
    assert {item.name for item in fae.schema.features} - {item.name for item in elrec.schema.features} == {"C1"}
    raw = pl.read_csv(files[0])
    rows = derived(recipes.get("avazu"), {"log": raw})
    assert rows["moment"].is_sorted()
    assert rows["day"].unique().sort().to_list() == list(range(21, 31))
    assert (rows["day"] * 100 + rows["hour"]).to_list() == (raw["hour"] % 10_000).to_list()


def _touches(users: Mapping[int, list[tuple[int, int]]]) -> pl.DataFrame:
    """A Taobao log from user -> (item, time); an item's category is item // 10."""
    flat = [(user, item, item // 10, "pv", time) for user, log in users.items() for item, time in log]
    names = ["user", "item", "category", "behaviour", "time"]
    return pl.DataFrame(flat, schema=names, orient="row").sample(fraction=1.0, shuffle=True, seed=0)


def test_taobao_windows_hold_only_earlier_touches_and_users_are_in_one_split(tmp_path: Path) -> None:
    (file,) = generated(tmp_path, "taobao", 30_000)
    names = ["user", "item", "category", "behaviour", "time"]
    log = pl.read_csv(file, has_header=False, new_columns=names)
    rows = derived(recipes.get("taobao"), {"log": log})
    assert rows["label"].mean() == 0.5
    assert rows.group_by("user").agg(pl.col("split").n_unique())["split"].max() == 1
    last = log.group_by("user").agg(pl.col("time").max().alias("last"))
    by_split = rows.select("user", "split").unique().join(last, on="user")
    assert by_split.filter(split="train")["last"].max() < by_split.filter(split="valid")["last"].min()
    assert set(by_split["split"]) == {"train", "valid", "test"}
    share = (last["last"] <= by_split.filter(split="train")["last"].max()).mean()
    assert share == pytest.approx(0.7, abs=0.02)
    touched = log.group_by("user").agg(pl.col("item"), pl.col("time"))
    for row in rows.join(touched, on="user", suffix="_log").sample(400, seed=1).iter_rows(named=True):
        history = sorted(zip(row["time_log"], row["item_log"], strict=True))[-200:]
        earlier = [item for time, item in history if time < row["time"]][-WINDOW:]
        assert row["items"] == earlier
        assert row["position"] == pytest.approx((len(earlier) + 1) / (WINDOW + 1))
        if row["label"]:
            assert (row["time"], row["item"]) in history
        else:
            assert row["item"] not in row["item_log"]
    category = dict(log.select("item", "category").iter_rows())
    assert all(category[item] == kind for item, kind in rows.select("item", "category").iter_rows())


def test_taobao_points_follow_the_length_of_the_history() -> None:
    lengths = {1: 4, 2: 5, 3: 20, 4: 21, 5: 50, 6: 51, 7: 100, 8: 101, 9: 450}
    log = _touches({user: [(1_000 * user + k, 10 * k + user) for k in range(size)] for user, size in lengths.items()})
    rows = derived(recipes.get("taobao"), {"log": log})
    points = dict(rows.filter(label=1).group_by("user").len().iter_rows())
    assert rows["items"].list.len().min() == 4
    assert points == {2: 1, 3: 1, 4: 3, 5: 3, 6: 6, 7: 6, 8: 10, 9: 10}
    of_nine = rows.filter((pl.col("user") == 9) & (pl.col("label") == 1))
    assert of_nine["time"].min() >= 10 * 250  # targets are among the last 200 touches
    assert rows.filter(label=1).select("user", "time").is_unique().all()


def test_taobao_in_groups_of_users_gives_the_same_kind_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = generated(tmp_path, "taobao", 20_000)
    log = pl.read_csv(file, has_header=False, new_columns=["user", "item", "category", "behaviour", "time"])
    whole = derived(recipes.get("taobao"), {"log": log})
    monkeypatch.setattr(sys.modules["stoker.prep.recipes.shops"], "_GROUP_ROWS", 3_000)
    grouped = derived(recipes.get("taobao"), {"log": log})
    assert_frame_equal(
        whole.group_by("user", "label", "split").len(),
        grouped.group_by("user", "label", "split").len(),
        check_row_order=False,
    )


def test_trivago_pairs(tmp_path: Path) -> None:
    log = pl.DataFrame(
        {
            "user_id": ["a", "a", "b", "c", "d", "e", "f"],
            "session_id": ["1", "1", "2", "3", "4", "5", "6"],
            "timestamp": [1, 2, 3, 4, 5, 6, 7],
            "step": [1, 2, 1, 1, 1, 1, 1],
            "action_type": ["search for item", *["clickout item"] * 6],
            "reference": ["9", "12", "7", "3", "99", "5", "1"],
            "platform": ["AU"] * 7,
            "city": ["Lyon, France"] * 7,
            "device": ["mobile"] * 7,
            "current_filters": [None, "Hotel|Best Value", None, None, None, None, None],
            "impressions": [None, "11|12|13", "7", "3|4", "5|6", "5|6", "|".join(map(str, range(1, 31)))],
            "prices": [None, "50|60|70", "9", "80", None, "10|20", "|".join(["8"] * 30)],
        }
    )
    rows = derived(recipes.get("trivago"), {"log": log})
    assert rows.group_by("clickout", maintain_order=True).agg("item", "label", "split").rows() == [
        (0, [11, 12, 13], [0, 1, 0], ["valid"] * 3),
        (2, [3, 4], [1, 0], ["train"] * 2),  # click-out 1 has a single candidate
        (3, [5, 6], [0, 0], ["train"] * 2),  # its reference is not listed
        (4, [5, 6], [1, 0], ["train"] * 2),
        (5, list(range(1, 26)), [1] + [0] * 24, ["valid"] * 25),
    ]
    assert rows["price"].to_list()[:9] == [50, 60, 70, None, None, None, None, 10, 20]
    assert rows["rank"].to_list()[:5] == [1, 2, 3, 1, 2]
    (file,) = generated(tmp_path, "trivago", 3_000)
    made = derived(recipes.get("trivago"), {"log": pl.read_csv(file, schema_overrides={"reference": pl.String})})
    per_click = made.group_by("clickout").agg(pl.len(), pl.col("label").sum(), pl.col("split").n_unique())
    assert per_click["len"].min() >= 2
    assert per_click["label"].max() == 1
    assert per_click["split"].max() == 1


@pytest.mark.slow
def test_movielens_takes_text_and_parquet_alike(tmp_path: Path) -> None:
    files = generated(tmp_path, "movielens", 4_000)
    text = prepare(recipes.get("movielens"), files, out=tmp_path / "text")
    names = ["u", "m", "r", "t"]
    text_of = (tmp_path / "log" / "ratings.dat").read_text()
    lines = [list(map(int, line.split("::"))) for line in text_of.splitlines()]
    pl.DataFrame(lines, schema=names, orient="row").write_parquet(tmp_path / "ratings.parquet")
    rest = [file for file in files if file.name != "ratings.dat"]
    parquet = prepare(recipes.get("movielens"), [tmp_path / "ratings.parquet", *rest], out=tmp_path / "parquet")
    assert text.manifest["splits"]["train"]["rows"] == parquet.manifest["splits"]["train"]["rows"]
    assert [shard["sha256"] for split in text.manifest["splits"].values() for shard in split["shards"]] == [
        shard["sha256"] for split in parquet.manifest["splits"].values() for shard in split["shards"]
    ]
    alone = prepare(recipes.get("movielens"), [tmp_path / "ratings.parquet"], out=tmp_path / "alone")
    assert alone.schema.num_embeddings["genres"] == 1
    assert alone.schema.num_embeddings["movie"] == text.schema.num_embeddings["movie"]


@pytest.mark.slow
def test_real_movielens(tmp_path: Path) -> None:
    files = real("movielens_1m/ratings.parquet", "movielens_1m/users.dat", "movielens_1m/movies.dat")
    made = prepare(recipes.get("movielens"), files, out=tmp_path / "ml")
    assert sum(len(split) for split in made.splits.values()) == 1_000_209
    assert len(made.train) == pytest.approx(900_188, abs=1_500)
    assert made.manifest["splits"]["train"]["positives"] / len(made.train) == pytest.approx(0.575, abs=0.002)
    assert made.schema.num_embeddings["user"] == 6_041


@pytest.mark.slow
def test_real_criteo_lines(tmp_path: Path) -> None:
    (file,) = real("criteo_tb/day_0_head.tsv.gz")
    made: Dataset = prepare(recipes.get("criteo"), [file], out=tmp_path / "criteo")
    assert sum(len(split) for split in made.splits.values()) == 10_000
    assert made.manifest["quarantined"] == 0
