"""trivago with engineered features: pairs, interactions before, ranks, out-of-fold target encoding, metadata.

After "Accelerating Recommender System Training 15x with RAPIDS" (RecSys Challenge 2019), section 2.1. Rows are the
listed items of click-outs and, between them, the interactions with items: these are what features look back at, and
belong to no split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stoker.prep import features as f
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

__all__ = ["PROPERTIES", "derive_features", "features_schema"]

PROPERTIES = 157  # distinct properties in the challenge's item_metadata.csv
_ENCODED = ("current_filters", "city", "device", "user_id")  # each with the item
_CONTEXT = ("user_id", "session_id", "platform", "city", "device", "current_filters")


def _features() -> tuple[f.Derivation, ...]:
    session: dict[str, Any] = {"by": ("session_id",), "events": "event"}
    seen: dict[str, Any] = {"events": "event"}
    return (
        f.TimeParts(name="local", column="timestamp"),
        f.Previous(name="last_item", column="item", order="moment", **session),
        f.Difference(name="steps_since", column="step", order="moment", **session),
        f.SinceLast(name="seconds_since", order="timestamp", **session),
        f.SinceLast(name="seconds_since_item", by=("session_id", "item"), order="timestamp", **seen),
        f.PastCount(name="session_item", by=("session_id", "item"), order="moment", **seen),
        f.PastCount(name="user_item", by=("user_id", "item"), order="timestamp", **seen),
        f.PastCount(name="item_seen", by=("item",), order="timestamp", **seen),
        f.PastCount(name="item_clicked", by=("item",), order="timestamp", events="click"),
        f.Rank(name="price_rank", by=("clickout",), order="price"),
        f.Equal(name="is_last_item", left="item", right="last_item"),
        f.CountEncoding(name="item_shown", by=("item",)),
        f.MeanTargetEncoding(name="item_mean", by=("item",), folds=8, fold_by=("clickout",)),
        *(
            f.MeanTargetEncoding(name=f"{column}_item_mean", by=(column, "item"), folds=8, fold_by=("clickout",))
            for column in _ENCODED
        ),
    )


def _logged(name: str, fill: float | str = 0.0) -> DenseColumn:
    return DenseColumn(name=name, fill=fill, transforms=("log1p", "zscore"))


def features_schema(name: str = "features") -> Schema:
    """The schema of the preset "features", or of "metadata", which adds a column of 0 and 1 for each property."""
    plain = ("rank", "price_rank", "is_last_item", "item_mean", *(f"{column}_item_mean" for column in _ENCODED))
    counted = ("session_item", "user_item", "item_seen", "item_clicked", "item_shown", "step")
    late = ("seconds_since", "seconds_since_item", "steps_since")
    binary = name == "metadata"
    properties = (f.Properties(name="property", column="properties", most=PROPERTIES),) if binary else ()
    return Schema(
        name=f"trivago/{name}",
        label=Label(column="label"),
        group="clickout",
        feature=(*_features(), *properties),
        dense=(
            DenseColumn(name="price", fill="median", null_flag=True, transforms=("log1p", "zscore")),
            *(DenseColumn(name=column, transforms=("zscore",)) for column in plain),
            *(_logged(column) for column in counted),
            *(_logged(column, 1e6) for column in late),
            *((DenseColumn(name="property_*"),) if binary else ()),
        ),
        categorical=(
            CategoricalColumn(name="item", type="int"),
            *(CategoricalColumn(name=column, type="string") for column in _CONTEXT[:-1]),
            CategoricalColumn(name="hour", source="local_hour", type="int"),
            CategoricalColumn(name="weekday", source="local_weekday", type="int"),
        ),
        sequence=(
            SequenceColumn(name="filters", source="current_filters", type="string", max_length=30),
            *(() if binary else (SequenceColumn(name="properties", type="string", max_length=PROPERTIES),)),
        ),
        split=SplitRule(
            rule="column", column="split", values={"train": "train", "valid": "valid", "interaction": "drop"}
        ),
    )


def derive_features(inputs: Mapping[str, pl.LazyFrame], most: int) -> pl.LazyFrame:
    """Listed items of click-outs with at least two, and interactions with items, in the order of the log; streaming.

    ``clickout`` numbers the click-outs from 0, rows of one belong together; ``moment`` numbers the lines of the log.
    """
    is_click = pl.col("action_type") == "clickout item"
    listed = pl.col("listed")
    touched = pl.when(pl.col("reference").str.contains(r"^[0-9]+$")).then(pl.col("reference"))
    none = pl.lit([], dtype=pl.List(pl.String))
    size = listed.list.len()
    rows = (
        inputs["log"]
        .with_row_index("moment")
        .with_columns(
            moment=pl.col("moment").cast(pl.Int64),
            clickout=pl.when(is_click).then(is_click.cast(pl.Int64).cum_sum() - 1),
            click=is_click.cast(pl.Int8),
            touched=touched,
            listed=pl.when(is_click).then(pl.col("impressions").str.split("|").list.head(most)).otherwise(none),
            prices=pl.col("prices").str.split("|").list.head(most),
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
            item=pl.when(touched.is_not_null()).then(pl.concat_list("listed", "touched")).otherwise(listed),
            price=pl.when(touched.is_not_null())
            .then(pl.concat_list("price", pl.lit(None, pl.String)))
            .otherwise(pl.col("price")),
            event=pl.when(touched.is_not_null())
            .then(pl.concat_list("event", pl.lit(1, pl.Int8)))
            .otherwise(pl.col("event")),
        )
        .filter(pl.col("item").list.len() > 0)
        .with_columns(rank=pl.int_ranges(1, pl.col("item").list.len().cast(pl.Int64) + 1))
        .explode("item", "price", "event", "rank")
    )
    shown = pl.col("event") == 0
    split = pl.when(pl.col("clickout") % 5 == 0).then(pl.lit("valid")).otherwise(pl.lit("train"))
    made = rows.select(
        *("moment", "timestamp", "step", *_CONTEXT, "event"),
        click=pl.col("click") * pl.col("event"),
        clickout=pl.when(shown).then(pl.col("clickout")),
        rank=pl.when(shown).then(pl.col("rank")),
        label=((pl.col("item") == pl.col("reference")) & shown).fill_null(False).cast(pl.Int8),
        item=pl.col("item").cast(pl.Int64, strict=False),
        price=pl.col("price").cast(pl.Float64, strict=False),
        split=pl.when(shown).then(split).otherwise(pl.lit("interaction")),
    )
    if "metadata" not in inputs:
        return made.with_columns(properties=pl.lit(None, pl.String))
    known = inputs["metadata"].select(item=pl.col("item_id").cast(pl.Int64), properties="properties")
    return made.join(known.unique("item", keep="first"), on="item", how="left", maintain_order="left")
