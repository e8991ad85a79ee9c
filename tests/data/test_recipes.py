"""Recipes on generated logs of their own format, and on the real ones where they are present."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import stoker
from stoker.data import recipes, synthetic
from stoker.data.dataset import Dataset
from stoker.data.prepare import prepare
from stoker.data.recipe import Recipe
from stoker.data.recipes import rows as tools
from stoker.data.recipes.taobao import WINDOW
from stoker.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("STOKER_DATA", ROOT.parent / "shared" / "data"))
RETAIL = ROOT / "data" / "online_retail" / "invoices.parquet"


def _real(*names: str) -> list[Path]:
    files = [SHARED / name for name in names]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        pytest.skip(f"the data set is not on this machine: {missing[0]}")
    return files


def _rows(recipe: Recipe, frames: Mapping[str, pl.DataFrame | pl.LazyFrame]) -> pl.DataFrame:
    assert recipe.derive is not None
    return recipe.derive({name: frame.lazy() for name, frame in frames.items()}, recipe.schema()).collect(
        engine="streaming"
    )


def _log(folder: Path, recipe: str, rows: int, **settings: float) -> list[Path]:
    """A generated log, as the files a user would name."""
    suffix = {"movielens": "", "ebnerd": "", "online-retail": ".parquet", "globo": ".parquet"}.get(
        recipe, ".csv"
    )
    out = folder / f"log{suffix}"
    synthetic.write(recipe, rows, out, **settings)
    return sorted(out.iterdir()) if out.is_dir() else [out]


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


@pytest.mark.parametrize("name", recipes.names())
def test_every_preset_prepares_a_generated_log_twice_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    files = _log(tmp_path, name, SIZES[name], drift=0.3, scale=0.01 if name in ("criteo", "avazu") else 1.0)
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
        {"a": pl.Int64, "b": pl.Int64},
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


def test_avazu_presets(tmp_path: Path) -> None:
    files = _log(tmp_path, "avazu", 3_000, scale=0.01)
    fae = prepare(recipes.get("avazu"), files, out=tmp_path / "fae")
    elrec = prepare(recipes.get("avazu", "elrec"), files, out=tmp_path / "elrec")
    assert fae.schema.dense == ("hour",)
    assert elrec.schema.dense == ("day", "hour")
    assert len(fae.schema.features) == 21
    assert {item.name for item in fae.schema.features} - {item.name for item in elrec.schema.features} == {
        "C1"
    }
    raw = pl.read_csv(files[0])
    rows = _rows(recipes.get("avazu"), {"log": raw})
    assert rows["moment"].is_sorted()
    assert rows["day"].unique().sort().to_list() == list(range(21, 31))
    assert (rows["day"] * 100 + rows["hour"]).to_list() == (raw["hour"] % 10_000).to_list()


def _touches(users: Mapping[int, list[tuple[int, int]]]) -> pl.DataFrame:
    """A Taobao log from user -> (item, time); an item's category is item // 10."""
    flat = [(user, item, item // 10, "pv", time) for user, log in users.items() for item, time in log]
    names = ["user", "item", "category", "behaviour", "time"]
    return pl.DataFrame(flat, schema=names, orient="row").sample(fraction=1.0, shuffle=True, seed=0)


def test_taobao_windows_hold_only_earlier_touches_and_users_are_in_one_split(tmp_path: Path) -> None:
    (file,) = _log(tmp_path, "taobao", 30_000)
    names = ["user", "item", "category", "behaviour", "time"]
    log = pl.read_csv(file, has_header=False, new_columns=names)
    rows = _rows(recipes.get("taobao"), {"log": log})
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
    log = _touches(
        {user: [(1_000 * user + k, 10 * k + user) for k in range(size)] for user, size in lengths.items()}
    )
    rows = _rows(recipes.get("taobao"), {"log": log})
    points = dict(rows.filter(label=1).group_by("user").len().iter_rows())
    assert points == {2: 1, 3: 1, 4: 3, 5: 3, 6: 6, 7: 6, 8: 10, 9: 10}
    of_nine = rows.filter((pl.col("user") == 9) & (pl.col("label") == 1))
    assert of_nine["time"].min() >= 10 * 250  # targets are among the last 200 touches
    assert rows.filter(label=1).select("user", "time").is_unique().all()


def test_taobao_in_groups_of_users_gives_the_same_kind_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = _log(tmp_path, "taobao", 20_000)
    log = pl.read_csv(file, has_header=False, new_columns=["user", "item", "category", "behaviour", "time"])
    whole = _rows(recipes.get("taobao"), {"log": log})
    monkeypatch.setattr(sys.modules["stoker.data.recipes.taobao"], "_GROUP_ROWS", 3_000)
    grouped = _rows(recipes.get("taobao"), {"log": log})
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
    rows = _rows(recipes.get("trivago"), {"log": log})
    assert rows.group_by("clickout", maintain_order=True).agg("item", "label", "split").rows() == [
        (0, [11, 12, 13], [0, 1, 0], ["valid"] * 3),
        (2, [3, 4], [1, 0], ["train"] * 2),  # click-out 1 has a single candidate
        (3, [5, 6], [0, 0], ["train"] * 2),  # its reference is not listed
        (4, [5, 6], [1, 0], ["train"] * 2),
        (5, list(range(1, 26)), [1] + [0] * 24, ["valid"] * 25),
    ]
    assert rows["price"].to_list()[:9] == [50, 60, 70, None, None, None, None, 10, 20]
    assert rows["rank"].to_list()[:5] == [1, 2, 3, 1, 2]
    (file,) = _log(tmp_path, "trivago", 3_000)
    made = _rows(
        recipes.get("trivago"), {"log": pl.read_csv(file, schema_overrides={"reference": pl.String})}
    )
    per_click = made.group_by("clickout").agg(pl.len(), pl.col("label").sum(), pl.col("split").n_unique())
    assert per_click["len"].min() >= 2
    assert per_click["label"].max() == 1
    assert per_click["split"].max() == 1


def test_movielens_takes_text_and_parquet_alike(tmp_path: Path) -> None:
    files = _log(tmp_path, "movielens", 4_000)
    text = prepare(recipes.get("movielens"), files, out=tmp_path / "text")
    names = ["u", "m", "r", "t"]
    text_of = (tmp_path / "log" / "ratings.dat").read_text()
    lines = [list(map(int, line.split("::"))) for line in text_of.splitlines()]
    pl.DataFrame(lines, schema=names, orient="row").write_parquet(tmp_path / "ratings.parquet")
    rest = [file for file in files if file.name != "ratings.dat"]
    parquet = prepare(
        recipes.get("movielens"), [tmp_path / "ratings.parquet", *rest], out=tmp_path / "parquet"
    )
    assert text.manifest["splits"]["train"]["rows"] == parquet.manifest["splits"]["train"]["rows"]
    assert [shard["sha256"] for split in text.manifest["splits"].values() for shard in split["shards"]] == [
        shard["sha256"] for split in parquet.manifest["splits"].values() for shard in split["shards"]
    ]
    alone = prepare(recipes.get("movielens"), [tmp_path / "ratings.parquet"], out=tmp_path / "alone")
    assert alone.schema.num_embeddings["genres"] == 1
    assert alone.schema.num_embeddings["movie"] == text.schema.num_embeddings["movie"]


def _check_retail(rows: pl.DataFrame, raw: pl.DataFrame, per_positive: int, sample: int) -> None:
    """No row of a sample knows anything of its own moment or later, and no negative was ever bought."""
    lines = (
        raw.filter(
            pl.col("CustomerID").is_not_null()
            & (pl.col("Quantity").cast(pl.Float64) > 0)
            & ~pl.col("InvoiceNo").str.starts_with("C")
            & pl.col("StockCode").str.to_uppercase().str.contains(r"^\d{5}[A-Z]*$")
        )
        .select(
            customer=pl.col("CustomerID").str.replace(r"\.0$", ""),
            item=pl.col("StockCode").str.to_uppercase(),
            time=pl.col("InvoiceDate").str.to_datetime("%Y-%m-%d %H:%M:%S").dt.epoch("s"),
        )
        .unique()
    )
    positives = rows.filter(label=1).select("customer", "item", "time")
    assert_frame_equal(positives, lines, check_row_order=False)
    assert rows.filter(label=0).join(lines, on=["customer", "item"], how="semi").height == 0
    assert rows["label"].mean() == pytest.approx(1 / (1 + per_positive), abs=0.01)
    moments = lines.select("customer", "time").unique().sort("customer", "time")
    numbered = moments.with_columns(
        at=pl.int_range(pl.len()).over("customer"), visits=pl.len().over("customer")
    )
    split = rows.select("customer", "time", "split").unique()
    assert split.height == numbered.height  # an invoice is in one split
    for row in split.join(numbered, on=["customer", "time"]).sample(200, seed=0).iter_rows(named=True):
        left = row["visits"] - 1 - row["at"]
        expected = "test" if left == 0 and row["visits"] > 1 else "train"
        expected = "valid" if left == 1 and row["visits"] > 2 else expected
        assert row["split"] == expected
    by_customer = {key[0]: part for key, part in lines.group_by("customer")}
    by_item = {key[0]: part["time"].to_numpy() for key, part in lines.group_by("item")}
    for row in rows.sample(sample, seed=2).iter_rows(named=True):
        mine = by_customer[row["customer"]]
        before = mine.filter(pl.col("time") < row["time"])
        assert len(row["bought"]) == min(20, before.height)
        assert set(row["bought"]) <= set(before["item"])
        assert row["earlier_invoices"] == before["time"].n_unique()
        if before.height == 0:
            assert row["days_since"] is None
        else:
            assert row["days_since"] == pytest.approx((row["time"] - before["time"].max()) / 86_400)
        sold = by_item[row["item"]]
        assert row["item_popularity"] == np.sum(sold < row["time"])
        assert row["item_week"] == np.sum((sold < row["time"]) & (sold >= row["time"] - 7 * 86_400))
        assert sold.min() <= row["time"] <= sold.max()  # on sale at that moment


def test_online_retail_rows_know_only_the_past() -> None:
    raw = pl.read_parquet(RETAIL).with_columns(pl.all().cast(pl.String))
    rows = _rows(recipes.get("online-retail"), {"invoices": raw})
    _check_retail(rows, raw, 4, 300)
    assert dict(rows.group_by("split").len().iter_rows()) == {
        "train": 1_427_547,
        "valid": 216_906,
        "test": 286_550,
    }


def test_online_retail_features_do_not_change_when_the_future_does(tmp_path: Path) -> None:
    (file,) = _log(tmp_path, "online-retail", 6_000)
    raw = pl.read_parquet(file)
    cut = raw["InvoiceDate"].sort()[4_000]
    # Planted on purpose: after the cut everyone buys the same item.
    base = _rows(recipes.get("online-retail"), {"invoices": raw})
    later = raw.with_columns(
        StockCode=pl.when(pl.col("InvoiceDate") > cut).then(pl.lit("10002")).otherwise("StockCode")
    )
    changed = _rows(recipes.get("online-retail"), {"invoices": later})
    moment = pl.Series([cut]).str.to_datetime("%Y-%m-%d %H:%M:%S").dt.epoch("s")[0]
    keys = ["customer", "time", "item"]
    past = [
        "bought",
        "days_since",
        "earlier_invoices",
        "item_popularity",
        "item_month",
        "item_week",
        "hour",
        "weekday",
    ]
    before, after = (
        frame.filter((pl.col("time") <= moment) & (pl.col("label") == 1)).select(*keys, *past).sort(keys)
        for frame in (base, changed)
    )
    assert before.height > 1_000
    assert_frame_equal(before, after)


def test_online_retail_presets_differ_in_their_negatives() -> None:
    raw = {"invoices": pl.scan_parquet(RETAIL).head(60_000)}
    popular, uniform, first = (
        _rows(recipes.get("online-retail", preset), raw)
        for preset in ("popular", "uniform", "first-purchase")
    )
    sold = {
        name: rows.filter(label=0)["item_popularity"].mean()
        for name, rows in (("p", popular), ("u", uniform))
    }
    assert sold["p"] > 1.3 * sold["u"]
    bought_before = pl.col("bought").list.contains(pl.col("item"))
    assert popular.filter(label=1).select(bought_before.mean()).item() > 0.02
    assert first.filter(bought_before).height == 0
    assert popular.filter(label=0).filter(bought_before).height == 0
    more = _rows(stoker.recipes.online_retail(negatives=1, seed=5), raw)
    assert more["label"].mean() == pytest.approx(0.5, abs=0.01)
    assert not more.filter(label=0).equals(popular.filter(label=0))


def _check_globo(rows: pl.DataFrame, clicks: pl.DataFrame, sample: int) -> None:
    assert rows["label"].sum() == clicks.height
    assert rows["time"].is_sorted()
    ever = clicks.select(user="user_id", article="click_article_id").unique()
    assert rows.filter(label=0).join(ever, on=["user", "article"], how="semi").height == 0
    user, article = clicks["user_id"].to_numpy(), clicks["click_article_id"].to_numpy()
    time = clicks["click_timestamp"].to_numpy()
    for row in rows.sample(sample, seed=3).iter_rows(named=True):
        mine = (user == row["user"]) & (time < row["time"])
        assert len(row["clicked"]) == min(20, mine.sum())
        assert set(row["clicked"]) <= set(article[mine].tolist())
        same = time[article == row["article"]]
        assert row["last_hour"] == np.sum((same < row["time"]) & (same >= row["time"] - 3_600_000))
        assert row["age_hours"] == pytest.approx((row["time"] - same.min()) / 3_600_000)
        if not row["label"]:
            assert np.any((same < row["time"]) & (same >= row["time"] - 6 * 3_600_000))


def test_globo_negatives_are_read_in_the_same_hours(tmp_path: Path) -> None:
    (file,) = _log(tmp_path, "globo", 12_000, drift=2.0)
    clicks = pl.read_parquet(file)
    rows = _rows(recipes.get("globo"), {"clicks": clicks})
    _check_globo(rows, clicks, 300)
    per_user = rows.filter(label=1).group_by("user").agg(pl.col("split"), pl.len())
    for splits, size in per_user.select("split", "len").iter_rows():
        assert splits == (["train"] * (size - 2) + ["valid", "test"] if size > 2 else ["train"] * size)


def test_globo_splits(tmp_path: Path) -> None:
    (file,) = _log(tmp_path, "globo", 9_000)
    clicks = pl.read_parquet(file)
    by_session = _rows(recipes.get("globo", "session-hash"), {"clicks": clicks})
    assert by_session.group_by("session").agg(pl.col("split").n_unique())["split"].max() == 1
    shares = dict(by_session.group_by("split").agg(pl.len() / by_session.height).iter_rows())
    assert shares == pytest.approx({"train": 0.8, "valid": 0.1, "test": 0.1}, abs=0.03)
    by_time = _rows(recipes.get("globo", "progressive"), {"clicks": clicks})
    ends = {split: part["time"] for (split,), part in by_time.group_by("split")}
    assert ends["train"].max() <= ends["valid"].min() <= ends["valid"].max() <= ends["test"].min()


def _ebnerd_inputs(files: Mapping[str, Path]) -> dict[str, pl.LazyFrame]:
    return {name: pl.scan_parquet(path) for name, path in files.items()}


def _check_ebnerd(rows: pl.DataFrame, inputs: Mapping[str, pl.LazyFrame], sample: int) -> None:
    columns = ["impression_id", "impression_time", "article_ids_inview", "article_ids_clicked", "user_id"]
    train, later = (inputs[name].select(columns).collect() for name in ("train", "later"))
    assert rows.height == sum(frame["article_ids_inview"].list.len().sum() for frame in (train, later))
    assert not [name for name in rows.columns if "next" in name or "read_time" in name or "scroll" in name]
    weeks = {split: part["time"] for (split,), part in rows.group_by("split")}
    assert weeks["train"].max() < min(weeks["valid"].min(), weeks["test"].min())
    assert rows.group_by("impression").agg(pl.col("split").n_unique())["split"].max() == 1
    log = pl.concat([train, later]).with_columns(time=pl.col("impression_time").dt.epoch("s"))
    clicked = dict(log.select("impression_id", "article_ids_clicked").iter_rows())
    views = log.explode("article_ids_inview").select("time", article="article_ids_inview")
    clicks = log.explode("article_ids_clicked").select("time", article="article_ids_clicked")
    histories = {
        split: dict(inputs[name].select("user_id", "article_id_fixed").collect().iter_rows())
        for split, name in (("train", "train_history"), ("later", "later_history"))
    }
    for row in rows.sample(sample, seed=4).iter_rows(named=True):
        assert row["label"] == (row["article"] in clicked[row["impression"]])
        window = (pl.col("time") < row["time"]) & (pl.col("time") >= row["time"] - 86_400)
        assert row["recent_views"] == views.filter(window & (pl.col("article") == row["article"])).height
        assert row["recent_clicks"] == clicks.filter(window & (pl.col("article") == row["article"])).height
        past = histories["train" if row["split"] == "train" else "later"].get(row["user"], [])
        assert row["history"] == past[-20:]


NAMES = ("train_behaviors", "validation_behaviors", "train_history", "validation_history")
INPUTS = ("train", "later", "train_history", "later_history")


def test_ebnerd_rows_know_only_the_past(tmp_path: Path) -> None:
    _log(tmp_path, "ebnerd", 2_000)
    inputs = _ebnerd_inputs(
        {key: tmp_path / "log" / f"{name}.parquet" for key, name in zip(INPUTS, NAMES, strict=True)}
    )
    _check_ebnerd(_rows(recipes.get("ebnerd"), inputs), inputs, 150)
    columns = {
        column.raw
        for column in (*recipes.get("ebnerd").schema().dense, *recipes.get("ebnerd").schema().features)
    }
    assert not columns & {"next_read_time", "next_scroll_percentage", "read_time", "scroll_percentage"}


def test_a_history_from_the_future_is_left_out(tmp_path: Path) -> None:
    _log(tmp_path, "ebnerd", 1_000)
    inputs = _ebnerd_inputs(
        {key: tmp_path / "log" / f"{name}.parquet" for key, name in zip(INPUTS, NAMES, strict=True)}
    )
    leak = inputs["train_history"].with_columns(
        impression_time_fixed=pl.col("impression_time_fixed").list.eval(pl.element() + pl.duration(days=60)),
    )
    rows = _rows(recipes.get("ebnerd"), inputs | {"train_history": leak})
    assert rows.filter(split="train")["history"].list.len().max() == 0
    assert rows.filter(split="test")["history"].list.len().max() > 0


@pytest.mark.slow
def test_real_movielens(tmp_path: Path) -> None:
    files = _real("movielens_1m/ratings.parquet", "movielens_1m/users.dat", "movielens_1m/movies.dat")
    made = prepare(recipes.get("movielens"), files, out=tmp_path / "ml")
    assert sum(len(split) for split in made.splits.values()) == 1_000_209
    assert len(made.train) == pytest.approx(900_188, abs=1_500)
    assert made.manifest["splits"]["train"]["positives"] / len(made.train) == pytest.approx(0.575, abs=0.002)
    assert made.schema.num_embeddings["user"] == 6_041


@pytest.mark.slow
def test_real_ebnerd() -> None:
    files = _real(*(f"ebnerd/{name}.parquet" for name in NAMES))
    inputs = _ebnerd_inputs(dict(zip(INPUTS, files, strict=True)))
    rows = _rows(recipes.get("ebnerd"), inputs)
    _check_ebnerd(rows, inputs, 60)
    assert rows.height == 583_054
    assert dict(rows.group_by("split").len().iter_rows())["train"] == 278_139
    assert rows["label"].mean() == pytest.approx(0.0862, abs=0.0005)


@pytest.mark.slow
def test_real_globo() -> None:
    (file,) = _real("globo/clicks.parquet")
    clicks = pl.read_parquet(file).sort("click_timestamp").head(300_000)
    _check_globo(_rows(recipes.get("globo"), {"clicks": clicks}), clicks, 100)


def test_real_criteo_lines(tmp_path: Path) -> None:
    (file,) = _real("criteo_tb/day_0_head.tsv.gz")
    made: Dataset = prepare(recipes.get("criteo"), [file], out=tmp_path / "criteo")
    assert sum(len(split) for split in made.splits.values()) == 10_000
    assert made.manifest["quarantined"] == 0
