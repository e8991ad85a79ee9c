"""trivago RecSys Challenge 2019: which of the listed items does the click-out go to?

Engineered features follow "Accelerating Recommender System Training 15x with RAPIDS" (RecSys Challenge 2019), section
2.1: pairs, interactions before, ranks, out-of-fold target encoding, metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import polars as pl

from stoker.prep import features as f
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.rows import LOGGED, categorical, dense, split_column
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat

__all__ = ["trivago"]

_MOST_ITEMS = 25  # listed items of one click-out that are looked at
_PROPERTIES = 157  # distinct properties in the challenge's item_metadata.csv
_ENCODED = ("current_filters", "city", "device", "user_id")  # each with the item
_CATEGORIES = ("user_id", "session_id", "platform", "city", "device")
_CONTEXT = (*_CATEGORIES, "current_filters")
_COLUMNS = (
    *("user_id", "session_id", "timestamp", "step", "action_type", "reference", "platform", "city", "device"),
    *("current_filters", "impressions", "prices"),
)


def trivago(preset: str = "raw") -> Recipe:
    """trivago's session log, click-outs turned into pairs; every fifth click-out validates.

    "features" adds what happened before, ranks and target encodings; "metadata" also the properties of items, one
    column for each. Both take ``item_metadata.csv`` next to the log: "features" as a sequence, if it is given.
    """
    csv = SourceFormat(kind="csv", separator=",")
    return Recipe(
        name="trivago",
        description="trivago RecSys 2019: listed items of click-outs, label = the clicked one ",
        presets={"raw": _raw, "features": _features, "metadata": partial(_features, "metadata")},
        preset=preset,
        inputs={
            "metadata": RawInput(
                files=("*metadata*",),
                format=csv,
                columns={"item_id": "int", "properties": "string"},
                required=("item_id",),
                optional=True,
            ),
            "log": RawInput(
                format=csv,
                columns={name: "int" if name in ("timestamp", "step") else "string" for name in _COLUMNS},
                required=("user_id", "session_id", "action_type"),
            ),
        },
        derive=_derive,
        example="stoker prepare trivago train.csv --out data/trivago",
        source="trivago, RecSys Challenge 2019",
    )


def _raw() -> Schema:
    return Schema(
        name="trivago",
        label=Label(column="label"),
        group="clickout",
        dense=(
            DenseColumn(name="price", fill="median", null_flag=True, transforms=LOGGED),
            *dense(("rank",), "zscore"),
            *dense(("step",), *LOGGED),
        ),
        categorical=(*categorical(("item",)), *categorical(_CATEGORIES, "string")),
        sequence=(SequenceColumn(name="filters", source="current_filters", max_length=30),),
        split=split_column(("train", "valid")),
    )


def _features(name: str = "features") -> Schema:
    """The schema of the preset "features", or of "metadata", which adds a column of 0 and 1 for each property."""
    session: dict[str, Any] = {"by": ("session_id",), "events": "event"}
    item: dict[str, Any] = {"by": ("session_id", "item"), "events": "event"}
    folds: dict[str, Any] = {"folds": 8, "fold_by": ("clickout",)}
    encoded = tuple(f"{column}_item_mean" for column in _ENCODED)
    features = (
        f.TimeParts(name="local", column="timestamp"),
        f.Previous(name="last_item", column="item", order="moment", **session),
        f.Difference(name="steps_since", column="step", order="moment", **session),
        f.SinceLast(name="seconds_since", order="timestamp", **session),
        f.SinceLast(name="seconds_since_item", order="timestamp", **item),
        f.PastCount(name="session_item", order="moment", **item),
        f.PastCount(name="user_item", by=("user_id", "item"), order="timestamp", events="event"),
        f.PastCount(name="item_seen", by=("item",), order="timestamp", events="event"),
        f.PastCount(name="item_clicked", by=("item",), order="timestamp", events="click"),
        f.Rank(name="price_rank", by=("clickout",), order="price"),
        f.Equal(name="is_last_item", left="item", right="last_item"),
        f.CountEncoding(name="item_shown", by=("item",)),
        f.MeanTargetEncoding(name="item_mean", by=("item",), **folds),
        *(f.MeanTargetEncoding(name=f"{column}_item_mean", by=(column, "item"), **folds) for column in _ENCODED),
    )
    binary = name == "metadata"
    properties = (f.Properties(name="property", column="properties", most=_PROPERTIES),) if binary else ()
    return Schema(
        name=f"trivago/{name}",
        label=Label(column="label"),
        group="clickout",
        feature=(*features, *properties),
        dense=(
            DenseColumn(name="price", fill="median", null_flag=True, transforms=LOGGED),
            *dense(("rank", "price_rank", "is_last_item", "item_mean", *encoded), "zscore"),
            *dense(("session_item", "user_item", "item_seen", "item_clicked", "item_shown", "step"), *LOGGED),
            *dense(("seconds_since", "seconds_since_item", "steps_since"), *LOGGED, fill=1e6),
            *dense(("property_*",) if binary else ()),
        ),
        categorical=(
            *categorical(("item",)),
            *categorical(_CATEGORIES, "string"),
            CategoricalColumn(name="hour", source="local_hour", type="int"),
            CategoricalColumn(name="weekday", source="local_weekday", type="int"),
        ),
        sequence=(
            SequenceColumn(name="filters", source="current_filters", max_length=30),
            *(() if binary else (SequenceColumn(name="properties", max_length=_PROPERTIES),)),
        ),
        split=SplitRule(
            rule="column", column="split", values={"train": "train", "valid": "valid", "interaction": "drop"}
        ),
    )


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """Listed items of click-outs with at least two and, for features, interactions with items; in the log's order.

    ``clickout`` numbers the click-outs from 0, rows of one belong together; ``moment`` numbers the lines of the log.
    Interactions are what features look back at, and belong to no split. Streaming.
    """
    is_click = pl.col("action_type") == "clickout item"
    none = pl.lit([], dtype=pl.List(pl.String))
    listed, size = pl.col("listed"), pl.col("listed").list.len()
    touched = pl.when(pl.col("reference").str.contains(r"^[0-9]+$")).then(pl.col("reference"))
    also = pl.when(touched.is_not_null() if schema.feature else False)
    rows = (
        inputs["log"]
        .with_row_index("moment")
        .with_columns(
            moment=pl.col("moment").cast(pl.Int64),
            clickout=pl.when(is_click).then(is_click.cast(pl.Int64).cum_sum() - 1),
            listed=pl.when(is_click).then(pl.col("impressions").str.split("|").list.head(_MOST_ITEMS)).otherwise(none),
            prices=pl.col("prices").str.split("|").list.head(_MOST_ITEMS),
        )
        # A single candidate leaves nothing to rank; prices that do not match the items cannot be paired.
        .with_columns(listed=pl.when(size > 1).then(listed).otherwise(none))
        .with_columns(
            price=pl.when(pl.col("prices").list.len() == size)
            .then(pl.col("prices"))
            .otherwise(pl.lit(None, pl.String).repeat_by(size)),
            event=pl.lit(0, pl.Int8).repeat_by(size),
        )
        .with_columns(
            item=also.then(pl.concat_list("listed", touched)).otherwise(listed),
            price=also.then(pl.concat_list("price", pl.lit(None, pl.String))).otherwise(pl.col("price")),
            event=also.then(pl.concat_list("event", pl.lit(1, pl.Int8))).otherwise(pl.col("event")),
        )
        .filter(pl.col("item").list.len() > 0)
        .with_columns(rank=pl.int_ranges(1, pl.col("item").list.len().cast(pl.Int64) + 1))
        .explode("item", "price", "event", "rank")
    )
    shown = pl.col("event") == 0
    split = pl.when(pl.col("clickout") % 5 == 0).then(pl.lit("valid")).otherwise(pl.lit("train"))
    made = rows.select(
        *("moment", "timestamp", "step", *_CONTEXT, "event"),
        click=is_click.cast(pl.Int8) * pl.col("event"),
        clickout=pl.when(shown).then(pl.col("clickout")),
        rank=pl.when(shown).then(pl.col("rank")),
        label=((pl.col("item") == pl.col("reference")) & shown).fill_null(False).cast(pl.Int8),
        item=pl.col("item").cast(pl.Int64, strict=False),
        price=pl.col("price").cast(pl.Float64, strict=False),
        split=pl.when(shown).then(split).otherwise(pl.lit("interaction")),
    )
    if "metadata" not in inputs or not schema.feature:
        return made.with_columns(properties=pl.lit(None, pl.String))
    known = inputs["metadata"].select(item=pl.col("item_id").cast(pl.Int64), properties="properties")
    return made.join(known.unique("item", keep="first"), on="item", how="left", maintain_order="left")
