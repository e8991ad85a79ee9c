"""Recipes whose features count the past: no row knows its own moment or later, no negative was positive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from recipe_logs import RETAIL, derived, generated, real

import stoker
from stoker.prep import recipes


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
    numbered = moments.with_columns(at=pl.int_range(pl.len()).over("customer"), visits=pl.len().over("customer"))
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


@pytest.mark.slow
def test_online_retail_rows_know_only_the_past() -> None:
    raw = pl.read_parquet(RETAIL).with_columns(pl.all().cast(pl.String))
    rows = derived(recipes.get("online-retail"), {"invoices": raw})
    _check_retail(rows, raw, 4, 300)
    assert dict(rows.group_by("split").len().iter_rows()) == {
        "train": 1_427_547,
        "valid": 216_906,
        "test": 286_550,
    }


def test_online_retail_features_do_not_change_when_the_future_does(tmp_path: Path) -> None:
    (file,) = generated(tmp_path, "online-retail", 6_000)
    raw = pl.read_parquet(file)
    cut = raw["InvoiceDate"].sort()[4_000]
    # Planted on purpose: after the cut everyone buys the same item.
    base = derived(recipes.get("online-retail"), {"invoices": raw})
    later = raw.with_columns(
        StockCode=pl.when(pl.col("InvoiceDate") > cut).then(pl.lit("10002")).otherwise("StockCode")
    )
    changed = derived(recipes.get("online-retail"), {"invoices": later})
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


@pytest.mark.slow
def test_online_retail_presets_differ_in_their_negatives() -> None:
    raw = {"invoices": pl.scan_parquet(RETAIL).head(60_000)}
    popular, uniform, first = (
        derived(recipes.get("online-retail", preset), raw) for preset in ("popular", "uniform", "first-purchase")
    )
    sold = {name: rows.filter(label=0)["item_popularity"].mean() for name, rows in (("p", popular), ("u", uniform))}
    assert sold["p"] > 1.3 * sold["u"]
    bought_before = pl.col("bought").list.contains(pl.col("item"))
    assert popular.filter(label=1).select(bought_before.mean()).item() > 0.02
    assert first.filter(bought_before).height == 0
    assert popular.filter(label=0).filter(bought_before).height == 0
    more = derived(stoker.recipes.online_retail(negatives=1, seed=5), raw)
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
        # Oldest first; clicks of one millisecond have no order among themselves, so only their times are compared.
        assert len(row["clicked"]) == min(20, mine.sum())
        newest = np.sort(time[mine])[max(0, mine.sum() - 20) :]
        for clicked, moment in zip(row["clicked"], newest, strict=True):
            assert clicked in article[mine & (time == moment)]
        same = time[article == row["article"]]
        assert row["last_hour"] == np.sum((same < row["time"]) & (same >= row["time"] - 3_600_000))
        assert row["age_hours"] == pytest.approx((row["time"] - same.min()) / 3_600_000)
        if not row["label"]:
            assert np.any((same < row["time"]) & (same >= row["time"] - 6 * 3_600_000))


def test_globo_negatives_are_read_in_the_same_hours(tmp_path: Path) -> None:
    (file,) = generated(tmp_path, "globo", 12_000, drift=1.0)
    clicks = pl.read_parquet(file)
    rows = derived(recipes.get("globo"), {"clicks": clicks})
    _check_globo(rows, clicks, 300)
    per_user = rows.filter(label=1).group_by("user").agg(pl.col("split"), pl.len())
    for splits, size in per_user.select("split", "len").iter_rows():
        assert splits == (["train"] * (size - 2) + ["valid", "test"] if size > 2 else ["train"] * size)


def test_globo_splits(tmp_path: Path) -> None:
    (file,) = generated(tmp_path, "globo", 9_000)
    clicks = pl.read_parquet(file)
    by_session = derived(recipes.get("globo", "session-hash"), {"clicks": clicks})
    assert by_session.group_by("session").agg(pl.col("split").n_unique())["split"].max() == 1
    shares = dict(by_session.group_by("split").agg(pl.len() / by_session.height).iter_rows())
    assert shares == pytest.approx({"train": 0.8, "valid": 0.1, "test": 0.1}, abs=0.03)
    by_time = derived(recipes.get("globo", "progressive"), {"clicks": clicks})
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
    generated(tmp_path, "ebnerd", 2_000)
    inputs = _ebnerd_inputs(
        {key: tmp_path / "log" / f"{name}.parquet" for key, name in zip(INPUTS, NAMES, strict=True)}
    )
    _check_ebnerd(derived(recipes.get("ebnerd"), inputs), inputs, 150)
    columns = {
        column.raw for column in (*recipes.get("ebnerd").schema().dense, *recipes.get("ebnerd").schema().features)
    }
    assert not columns & {"next_read_time", "next_scroll_percentage", "read_time", "scroll_percentage"}


def test_a_history_from_the_future_is_left_out(tmp_path: Path) -> None:
    generated(tmp_path, "ebnerd", 1_000)
    inputs = _ebnerd_inputs(
        {key: tmp_path / "log" / f"{name}.parquet" for key, name in zip(INPUTS, NAMES, strict=True)}
    )
    leak = inputs["train_history"].with_columns(
        impression_time_fixed=pl.col("impression_time_fixed").list.eval(pl.element() + pl.duration(days=60)),
    )
    rows = derived(recipes.get("ebnerd"), inputs | {"train_history": leak})
    assert rows.filter(split="train")["history"].list.len().max() == 0
    assert rows.filter(split="test")["history"].list.len().max() > 0


@pytest.mark.slow
def test_real_ebnerd() -> None:
    files = real(*(f"ebnerd/{name}.parquet" for name in NAMES))
    inputs = _ebnerd_inputs(dict(zip(INPUTS, files, strict=True)))
    rows = derived(recipes.get("ebnerd"), inputs)
    _check_ebnerd(rows, inputs, 60)
    assert rows.height == 583_054
    assert dict(rows.group_by("split").len().iter_rows())["train"] == 278_139
    assert rows["label"].mean() == pytest.approx(0.0862, abs=0.0005)


@pytest.mark.slow
def test_real_globo() -> None:
    (file,) = real("globo/clicks.parquet")
    clicks = pl.read_parquet(file).sort("click_timestamp").head(300_000)
    _check_globo(derived(recipes.get("globo"), {"clicks": clicks}), clicks, 100)
