"""The same features by stoker.features."""

from __future__ import annotations

import polars as pl
from features_tools import COLUMNS, FOLDS, KEYS, MOST, PROPERTIES, SMOOTHING, feature_case
from worker_tools import argument, versions

import stoker
from stoker import features as f
from stoker.features.tables import read_table

versions(stoker=stoker.__version__, polars=pl.__version__)


def added(rows, *features, label="step"):
    """The rows with the features, worked out."""
    fitted = f.fit(features, rows, label=label)
    return fitted.apply_to_training(rows).collect(engine="streaming")


def job(folder, clock, out):
    with clock("read csv"):
        log = read_table(folder / "log.csv", COLUMNS)
        metadata = read_table(
            folder / "item_metadata.csv", {"item_id": "int", "properties": "string", "stars": "float"}
        )
    with clock("string comparison and masking"):
        log = added(
            log,
            f.Match(name="is_item", column="reference", pattern="^[0-9]+$"),
            f.Mask(name="clicked", column="reference", where_column="action_type", values=("clickout item",)),
        )
        click = f.Keep(column="action_type", values=("clickout item",))
        clicks = added(log, click, f.Keep(column="impressions", pattern=""))
    with clock("string column split & expand"):
        expanded = added(
            clicks.select("impressions", "step"), f.Split(name="impression", column="impressions", width=MOST)
        )
    with clock("assign string columns"):
        clicks = clicks.hstack(expanded.drop("impressions", "step"))
        first = clicks["impression_1"]
        clicks = clicks.select(pl.exclude("^impression_.*$"))
    with clock("create data pair"):
        listed = f.Pairs(columns=("impressions", "prices"), names=("item", "price"), rank="rank", most=MOST)
        pairs = added(
            clicks.with_row_index("clickout").with_columns(pl.col("clickout").cast(pl.Int64)),
            listed,
            f.Equal(name="label", left="item", right="reference"),
        ).drop("impressions", "prices").cast({"item": pl.Int64, "price": pl.Float64})  # fmt: skip
    with clock("prepare for target encoding"):
        pairs = pairs.with_columns(pl.col("current_filters").fill_null(""))
    with clock("mean target encoding"):
        encodings = [
            f.MeanTargetEncoding(name=f"{key}_item_mean", by=(key, "item"), folds=FOLDS, smoothing=SMOOTHING)
            for key in KEYS
        ]
        pairs = added(pairs, *encodings, label="label")
    with clock("constrain string"):
        log = added(
            log,
            f.Constrain(name="city_short", column="city", lower=True, max_length=12),
            f.Constrain(name="item_reference", column="reference", pattern="^[0-9]+$"),
        )
    with clock("count items"):
        touched = f.fit([f.CountEncoding(name="touched", by=("item",))], items_of(log), label="item")
        pairs = touched.apply(added(pairs, f.CountEncoding(name="shown", by=("item",)))).collect(engine="streaming")
    with clock("merge"):
        merge = f.Merge(
            name="merged", on="item", file="item_metadata.csv", columns=("properties",), number_columns="stars"
        )
        known = metadata.rename({"item_id": "item", "properties": "merged_properties", "stars": "merged_stars"})
        pairs = merge.attach(pairs.lazy(), f.LearnedTable(table=known)).collect(engine="streaming")
        pairs = pairs.rename({"merged_properties": "properties", "merged_stars": "stars"})
    with clock("binary features from text"):
        properties = f.Properties(name="property", column="properties", most=PROPERTIES)
        fitted = f.fit([properties], metadata, label="item_id")
        binary = fitted.apply(metadata.select("properties")).drop("properties").collect(engine="streaming")
    with clock("difference features"):
        session = {"by": ("session_id",), "order": "step"}
        log = added(
            log,
            f.Difference(name="seconds_since", column="timestamp", **session),
            f.Previous(name="last_reference", column="reference", **session),
        )
        pairs = added(
            pairs,
            f.Difference(name="price_difference", by=("clickout",), order="rank", column="price"),
            f.Rank(name="price_rank", by=("clickout",), order="price"),
        )
    made = [f"{key}_item_mean" for key in KEYS]
    pairs.select("clickout", "item", "price", "label", "rank", *made, "shown", "touched", "properties", "stars",
                 "price_difference", "price_rank").write_parquet(out / "pairs.parquet")  # fmt: skip
    log.select("is_item", "clicked", "city_short", "item_reference", "seconds_since", "last_reference").write_parquet(
        out / "log.parquet"
    )
    expanded.drop("impressions", "step").with_columns(first=first).write_parquet(out / "expanded.parquet")
    names = fitted.learned["property"].table["value"].to_list()
    binary = binary.select(f"property_{k + 1}" for k in range(len(names)))
    binary.columns = names
    binary.select(sorted(names)).write_parquet(out / "binary.parquet")
    return pairs.height


def items_of(log):
    """The items that were touched, as numbers."""
    return log.select(item=pl.col("item_reference").cast(pl.Int64)).drop_nulls()


feature_case(argument(), job)
