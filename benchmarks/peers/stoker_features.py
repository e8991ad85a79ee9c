"""The same features by stoker.features.

Frames are dropped after their last use, and results written as soon as they are made, as where memory is short.
"""

from __future__ import annotations

import polars as pl
from features_tools import COLUMNS, COMBINATIONS, FOLDS, KEYS, MOST, PROPERTIES, SMOOTHING, UNUSED, feature_case
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
    with clock("binary features from text"):
        properties = f.Properties(name="property", column="properties", most=PROPERTIES)
        fitted, binary = f.fit_apply([properties], metadata, label="item_id")
    names = fitted.fitted_tables["property"].table["value"].to_list()
    binary = binary.select(f"property_{k + 1}" for k in range(len(names)))
    binary.columns = names
    binary.select(sorted(names)).write_parquet(out / "binary.parquet")
    known = metadata.select(item="item_id", merged_stars="stars")
    del binary, metadata
    with clock("string comparison and masking"):
        log = added(log, f.Match(name="is_click_out", column="action_type", values=("clickout item",)))
        clicks = added(log, f.Keep(column="action_type", values=("clickout item",)))
        clicks = clicks.with_row_index("clickout").with_columns(pl.col("clickout").cast(pl.Int64))
    with clock("difference features"):
        session = {"by": ("session_id",), "order": "step"}
        log = added(
            log,
            f.Difference(name="seconds_since", column="timestamp", **session),
            f.Previous(name="last_reference", column="reference", **session),
        )
    log.select("is_click_out", "seconds_since", "last_reference").write_parquet(out / "log.parquet")
    with clock("constrain string"):
        touched = added(
            log,
            f.Keep(column="action_type", pattern="^interaction"),
            f.Constrain(name="item", column="reference", pattern="^[0-9]+$"),
        ).cast({"item": pl.Int64})
    del log
    with clock("count items"):
        counted = {"_".join(columns): f.fit(counts_of(columns), touched, label="step") for columns in COMBINATIONS}
    del touched
    with clock("string column split & expand"):
        lists = clicks.select("impressions", "prices", "step")
        expanded = added(
            lists,
            f.Split(name="item", column="impressions", width=MOST),
            f.Split(name="price", column="prices", width=MOST),
        )
    with clock("assign string columns"):
        wide = expanded.select(name for place in range(MOST) for name in (f"item_{place + 1}", f"price_{place + 1}"))
    wide.write_parquet(out / "wide.parquet")
    del wide, expanded, lists
    with clock("create data pair"):
        clicks = clicks.drop(UNUSED)
        listed = f.Pairs(columns=("impressions", "prices"), names=("item", "price"), rank="rank", most=MOST, least=2)
        label = f.Equal(name="label", left="item", right="reference")
        fitted = f.fit([listed, label], clicks, label="clickout")

        def pairs_of(some):
            made = fitted.apply(some).drop("impressions", "prices", "reference").collect()
            return made.cast({"item": pl.Int64, "price": pl.Float64})

        pairs = pl.concat(map(pairs_of, clicks.iter_slices(2**15)))  # texts of few pairs are there at a time
        del clicks
        pairs = added(pairs, f.CountEncoding(name="listed", by=("clickout",)), label="rank")
    with clock("prepare for target encoding"):
        pairs = pairs.with_columns(pl.col("current_filters").fill_null("None"))
    with clock("mean target encoding"):
        for key in KEYS:  # one by one: what each is fitted to is as large as the rows
            mean = f.MeanTargetEncoding(name=f"{key}_item_mean", by=(key, "item"), folds=FOLDS, smoothing=SMOOTHING)
            pairs = added(pairs, mean, label="label")
    pairs = pairs.drop("current_filters", "device")
    with clock("merge"):
        while counted:
            tag, counts = counted.popitem()
            share = f.Divide(name=f"share_{tag}", left=f"count_{tag}", right=f"all_{tag}")
            pairs = added(counts.apply(pairs).collect(), share, label="rank").drop(f"all_{tag}")
        pairs = pairs.drop("user_id", "session_id", "city")
        merge = f.Merge(name="merged", on="item", file="item_metadata.csv", number_columns="stars")
        joined = f.Fitted(features=(merge,), fitted_tables={"merged": f.FittedTable(table=known)})
        pairs = joined.apply(pairs).collect()
    with clock("difference features"):
        pairs = added(
            pairs,
            f.Difference(name="price_difference", by=("clickout",), order="rank", column="price"),
            f.Rank(name="price_rank", by=("clickout",), order="price"),
            label="rank",
        )
    tags = ["_".join(columns) for columns in COMBINATIONS]
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
    return pairs.height


feature_case(argument(), job)
