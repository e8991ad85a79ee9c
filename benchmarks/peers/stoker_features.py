"""The same features by stoker.features."""

from __future__ import annotations

import polars as pl
from features_tools import COLUMNS, COMBINATIONS, FOLDS, KEYS, MOST, PROPERTIES, SMOOTHING, feature_case
from worker_tools import argument, versions

import stoker
from stoker import features as f
from stoker.prep.features.tables import read_table

versions(stoker=stoker.__version__, polars=pl.__version__)


def added(rows, *features, label="step"):
    """The rows with the features, worked out."""
    return f.fit_apply(features, rows, label=label)[1]


def counts_of(columns):
    """Counts of items with some columns, and of these columns alone."""
    tag = "_".join(columns)
    return f.CountEncoding(name=f"count_{tag}", by=(*columns, "item")), f.CountEncoding(name=f"all_{tag}", by=columns)


def job(folder, clock, out):
    with clock("read csv"):
        log = read_table(folder / "log.csv", COLUMNS)
        metadata = read_table(
            folder / "item_metadata.csv", {"item_id": "int", "properties": "string", "stars": "float"}
        )
    with clock("string comparison and masking"):
        log = added(log, f.Match(name="is_click_out", column="action_type", values=("clickout item",)))
        clicks = added(log, f.Keep(column="action_type", values=("clickout item",)))
        clicks = clicks.with_row_index("clickout").with_columns(pl.col("clickout").cast(pl.Int64))
    with clock("string column split & expand"):
        lists = clicks.select("impressions", "prices", "step")
        expanded = added(
            lists,
            f.Split(name="item", column="impressions", width=MOST),
            f.Split(name="price", column="prices", width=MOST),
        )
    with clock("assign string columns"):
        wide = expanded.select(name for place in range(MOST) for name in (f"item_{place + 1}", f"price_{place + 1}"))
    with clock("create data pair"):
        listed = f.Pairs(columns=("impressions", "prices"), names=("item", "price"), rank="rank", most=MOST, least=2)
        pairs = added(clicks, listed, f.Equal(name="label", left="item", right="reference"))
        pairs = pairs.drop("impressions", "prices").cast({"item": pl.Int64, "price": pl.Float64})
        sizes = f.CountEncoding(name="listed", by=("clickout",))
        pairs = added(pairs, sizes)
    with clock("prepare for target encoding"):
        pairs = pairs.with_columns(pl.col("current_filters").fill_null("None"))
    with clock("mean target encoding"):
        encodings = [
            f.MeanTargetEncoding(name=f"{key}_item_mean", by=(key, "item"), folds=FOLDS, smoothing=SMOOTHING)
            for key in KEYS
        ]
        pairs = added(pairs, *encodings, label="label")
    with clock("constrain string"):
        touched = added(
            log,
            f.Keep(column="action_type", pattern="^interaction"),
            f.Constrain(name="item", column="reference", pattern="^[0-9]+$"),
        ).cast({"item": pl.Int64})
    with clock("count items"):
        counted = f.fit([feature for columns in COMBINATIONS for feature in counts_of(columns)], touched, label="step")
    with clock("merge"):
        pairs = counted.apply(pairs).collect()
        tags = ["_".join(columns) for columns in COMBINATIONS]
        shares = [f.Divide(name=f"share_{tag}", left=f"count_{tag}", right=f"all_{tag}") for tag in tags]
        pairs = added(pairs, *shares)
        merge = f.Merge(name="merged", on="item", file="item_metadata.csv", number_columns="stars")
        known = metadata.select(item="item_id", merged_stars="stars")
        joined = f.Fitted(features=(merge,), learned={"merged": f.LearnedTable(table=known)})
        pairs = joined.apply(pairs).collect()
    with clock("binary features from text"):
        properties = f.Properties(name="property", column="properties", most=PROPERTIES)
        fitted, binary = f.fit_apply([properties], metadata, label="item_id")
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
    # theirs has nothing where a key was never counted
    counts = [
        pl.when(pl.col(f"count_{tag}") > 0).then(pl.col(f"{what}_{tag}")).alias(f"{what}_{tag}")
        for tag in tags for what in ("count", "share")
    ]  # fmt: skip
    pairs.select("clickout", "item", "price", "label", "rank", "listed", *made, *counts, stars="merged_stars",
                 price_difference="price_difference", price_rank="price_rank").write_parquet(
        out / "pairs.parquet"
    )  # fmt: skip
    log.select("is_click_out", "seconds_since", "last_reference").write_parquet(out / "log.parquet")
    wide.write_parquet(out / "wide.parquet")
    names = fitted.learned["property"].table["value"].to_list()
    binary = binary.select(f"property_{k + 1}" for k in range(len(names)))
    binary.columns = names
    binary.select(sorted(names)).write_parquet(out / "binary.parquet")
    return pairs.height


feature_case(argument(), job)
