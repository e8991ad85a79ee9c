"""The features of pandas_features.py in Polars, as its users write them: expressions, group-bys, joins, windows.

Frames are dropped after their last use, and results written as soon as they are made, as where memory is short.
"""

from __future__ import annotations

import polars as pl
from features_tools import COMBINATIONS, FOLDS, KEYS, MOST, SMOOTHING, UNUSED, feature_case, fold_of_rows
from worker_tools import argument, versions

versions(polars=pl.__version__)


def count_items(data, columns):
    """Rows of each item with each value of some columns, and their share of the rows with that value."""
    tag = "_".join(columns)
    counts = data.group_by(*columns, "item").len(f"count_{tag}")
    whole = data.group_by(columns).len("whole")
    share = pl.col(f"count_{tag}") / pl.col("whole")
    return counts.join(whole, on=columns).select(*columns, "item", f"count_{tag}", share.alias(f"share_{tag}"))


def encode(train, key, means):
    """Mean target of the other folds for each value of a column with the item."""
    by, name = [key, "item"], f"{key}_item_mean"
    own = train.group_by(*by, "fold").agg(pl.col("label").sum().alias("own_sum"), pl.len().cast(int).alias("own_count"))
    whole = own.group_by(by).agg(pl.col("own_sum").sum().alias("sum"), pl.col("own_count").sum().alias("count"))
    smooth = SMOOTHING * pl.col("mean")
    encoded = (pl.col("sum") - pl.col("own_sum") + smooth) / (pl.col("count") - pl.col("own_count") + SMOOTHING)
    table = own.join(whole, on=by).join(means, on="fold").select(*by, "fold", encoded.alias(name))
    return train.join(table, on=[*by, "fold"], how="left", maintain_order="left")


def job(folder, clock, out):
    with clock("read csv"):
        log = pl.read_csv(folder / "log.csv", schema_overrides={"reference": pl.String})
        metadata = pl.read_csv(folder / "item_metadata.csv")
    with clock("binary features from text"):
        values = metadata.select(pl.col("properties").str.split("|").explode().unique().sort()).to_series().to_list()
        binary = metadata.select(
            pl.col("properties").str.contains(value, literal=True).cast(pl.Int8).alias(value) for value in values
        )
    binary.write_parquet(out / "binary.parquet")
    del binary
    with clock("string comparison and masking"):
        log = log.with_columns(is_click_out=pl.col("action_type") == "clickout item")
        clicks = log.filter("is_click_out").with_row_index("clickout").with_columns(pl.col("clickout").cast(pl.Int64))
    with clock("difference features"):
        log = log.with_columns(
            seconds_since=pl.col("timestamp").diff().over("session_id", order_by="step"),
            last_reference=pl.col("reference").shift().over("session_id", order_by="step"),
        )
    log.select("is_click_out", "seconds_since", "last_reference").write_parquet(out / "log.parquet")
    with clock("constrain string"):
        touched = log.filter(pl.col("action_type").str.starts_with("interaction") & (pl.col("reference") != "unknown"))
        touched = touched.with_columns(item=pl.col("reference").cast(pl.Int64))
    del log
    with clock("count items"):
        counts = [count_items(touched, columns) for columns in COMBINATIONS]
    del touched
    with clock("string column split & expand"):
        pieces = clicks.select("clickout", pl.col("impressions", "prices").str.split("|"))
        candidates, prices = (
            pieces[column].list.to_struct(fields=[f"{name}_{place + 1}" for place in range(MOST)]).struct.unnest()
            for column, name in (("impressions", "item"), ("prices", "price"))
        )
    with clock("assign string columns"):
        wide = pl.concat([candidates, prices], how="horizontal")
        wide = wide.select(name for place in range(MOST) for name in (f"item_{place + 1}", f"price_{place + 1}"))
    wide.write_parquet(out / "wide.parquet")
    del wide, candidates, prices
    with clock("create data pair"):
        clicks = clicks.drop(UNUSED, "impressions", "prices")
        listed = pl.col("impressions").list.len().cast(pl.Int64)
        items = (
            pieces.with_columns(rank=pl.int_ranges(1, listed + 1), listed=listed)
            .filter(pl.col("listed") > 1)
            .rename({"impressions": "item", "prices": "price"})
            .explode("item", "price", "rank")
            .cast({"item": pl.Int64, "price": pl.Int64})
        )
        del pieces
        pairs = items.join(clicks, on="clickout", how="left", maintain_order="left")
        del items, clicks
        pairs = pairs.with_columns(pl.col("reference").cast(pl.Int64, strict=False).fill_null(-1))
        pairs = pairs.with_columns(label=(pl.col("reference") == pl.col("item")).cast(pl.Int64))
        pairs = pairs.drop("reference")
    with clock("prepare for target encoding"):
        pairs = pairs.with_columns(pl.col("current_filters").fill_null("None"))
        pairs = pairs.with_columns(pl.Series("fold", fold_of_rows(len(pairs))))
    with clock("mean target encoding"):
        sums = pairs.group_by("fold").agg(pl.col("label").sum().alias("sum"), pl.len().cast(int).alias("count"))
        others = (pl.col("sum").sum() - pl.col("sum")) / (pl.col("count").sum() - pl.col("count"))
        means = sums.select("fold", others.alias("mean"))
        assert len(means) == FOLDS
        for key in KEYS:
            pairs = encode(pairs, key, means)
    pairs = pairs.drop("fold", "current_filters", "device")
    with clock("merge"):
        for columns, count in zip(COMBINATIONS, counts, strict=True):
            pairs = pairs.join(count, on=[*columns, "item"], how="left", maintain_order="left")
        del count, counts
        pairs = pairs.drop("user_id", "session_id", "city")
        stars = metadata.select("item_id", "stars")
        pairs = pairs.join(stars, left_on="item", right_on="item_id", how="left", maintain_order="left")
    with clock("difference features"):
        pairs = pairs.with_columns(
            price_difference=pl.col("price").diff().over("clickout"),
            price_rank=pl.col("price").rank("min").over("clickout"),
        )
    made = [f"{key}_item_mean" for key in KEYS]
    made += [f"{what}_{'_'.join(columns)}" for columns in COMBINATIONS for what in ("count", "share")]
    pairs.select(
        "clickout", "item", "price", "label", "rank", "listed", *made, "stars", "price_difference", "price_rank"
    ).write_parquet(out / "pairs.parquet")
    return len(pairs)


feature_case(argument(), job)
