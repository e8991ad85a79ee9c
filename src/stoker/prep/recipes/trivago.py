"""trivago RecSys Challenge 2019: which of the listed items does the click-out go to?

"raw": one row for each listed item of a click-out. "features" and "metadata" add engineered features
(:mod:`stoker.prep.recipes.trivago_features`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import polars as pl

from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.trivago_features import derive_features, features_schema
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat

__all__ = ["MOST_ITEMS", "trivago"]

MOST_ITEMS = 25  # listed items of one click-out that are looked at
_CONTEXT = ("user_id", "session_id", "platform", "city", "device", "current_filters")
_COLUMNS = {
    "user_id": "string",
    "session_id": "string",
    "timestamp": "int",
    "step": "int",
    "action_type": "string",
    "reference": "string",
    "platform": "string",
    "city": "string",
    "device": "string",
    "current_filters": "string",
    "impressions": "string",
    "prices": "string",
}


def _schema() -> Schema:
    return Schema(
        name="trivago",
        label=Label(column="label"),
        group="clickout",
        dense=(
            DenseColumn(name="price", fill="median", null_flag=True, transforms=("log1p", "zscore")),
            DenseColumn(name="rank", transforms=("zscore",)),
            DenseColumn(name="step", transforms=("log1p", "zscore")),
        ),
        categorical=(
            CategoricalColumn(name="item", type="int"),
            *(CategoricalColumn(name=column, type="string") for column in _CONTEXT[:-1]),
        ),
        sequence=(SequenceColumn(name="filters", source="current_filters", type="string", max_length=30),),
        split=SplitRule(rule="column", column="split", values={"train": "train", "valid": "valid"}),
    )


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """Click-outs with at least two listed items, a row for each; streaming, in the order of the file."""
    if schema.feature:
        return derive_features(inputs, MOST_ITEMS)
    size = pl.col("item").list.len()
    prices = pl.col("prices").str.split("|").list.head(MOST_ITEMS)
    paired = (
        inputs["log"]
        .filter(pl.col("action_type") == "clickout item")
        .with_row_index("clickout")
        .select(
            *("clickout", "timestamp", "step", "reference", *_CONTEXT),
            item=pl.col("impressions").str.split("|").list.head(MOST_ITEMS),
            price=prices,
        )
        # A single candidate leaves nothing to rank; prices that do not match the items cannot be paired.
        .filter(size > 1)
        .with_columns(
            price=pl.when(pl.col("price").list.len() == size)
            .then(pl.col("price"))
            .otherwise(pl.lit("").repeat_by(size)),
            rank=pl.int_ranges(1, size.cast(pl.Int64) + 1),
        )
    )
    split = pl.when(pl.col("clickout") % 5 == 0).then(pl.lit("valid")).otherwise(pl.lit("train"))
    return paired.explode("item", "price", "rank").select(
        *("clickout", "timestamp", "step", *_CONTEXT, "rank"),
        label=(pl.col("item") == pl.col("reference")).fill_null(False).cast(pl.Int8),
        item=pl.col("item").cast(pl.Int64, strict=False),
        price=pl.col("price").cast(pl.Float64, strict=False),
        split=split,
    )


def trivago(preset: str = "raw") -> Recipe:
    """trivago's session log, click-outs turned into pairs; every fifth click-out validates.

    "features" adds what happened before, ranks and target encodings; "metadata" also the properties of items, one
    column for each. Both take ``item_metadata.csv`` beside the log: "features" as a sequence, if it is given.
    """
    return Recipe(
        name="trivago",
        description="trivago RecSys 2019: listed items of click-outs, label = the clicked one ",
        presets={"raw": _schema, "features": features_schema, "metadata": partial(features_schema, "metadata")},
        preset=preset,
        inputs={
            "metadata": RawInput(
                files=("*metadata*",),
                format=SourceFormat(kind="csv", separator=","),
                columns={"item_id": "int", "properties": "string"},
                required=("item_id",),
                optional=True,
            ),
            "log": RawInput(
                format=SourceFormat(kind="csv", separator=","),
                columns=_COLUMNS,
                required=("user_id", "session_id", "action_type"),
            ),
        },
        derive=_derive,
        example="stoker prepare trivago train.csv --out data/trivago",
        source="trivago, RecSys Challenge 2019",
    )
