"""The features of the RecSys Challenge 2019 in pandas, as notebooks have them: no loops over rows, no apply."""

from __future__ import annotations

import numpy as np
import pandas as pd
from features_tools import FOLDS, KEYS, MOST, PROPERTIES, SMOOTHING, feature_case, fold_of_rows
from worker_tools import argument, versions

versions(pandas=pd.__version__)


def job(folder, clock, out):
    with clock("read csv"):
        log = pd.read_csv(folder / "log.csv", dtype={"reference": str})
        metadata = pd.read_csv(folder / "item_metadata.csv")
    with clock("string comparison and masking"):
        log["is_item"] = log["reference"].str.match(r"^[0-9]+$").fillna(False).astype("int8")
        clicks = log[(log["action_type"] == "clickout item") & log["impressions"].notna()].copy()
        log["clicked"] = log["reference"].where(log["action_type"] == "clickout item")
    with clock("string column split & expand"):
        expanded = clicks["impressions"].str.split("|", expand=True)
    with clock("assign string columns"):
        for column in expanded.columns:
            clicks[f"impression_{column + 1}"] = expanded[column]
        first = clicks["impression_1"]
        clicks = clicks.drop(columns=[f"impression_{column + 1}" for column in expanded.columns])
    with clock("create data pair"):
        clicks["clickout"] = np.arange(len(clicks))
        clicks["item"] = clicks["impressions"].str.split("|")
        clicks["price"] = clicks["prices"].str.split("|")
        pairs = clicks.drop(columns=["impressions", "prices"]).explode(["item", "price"], ignore_index=True)
        pairs["rank"] = pairs.groupby("clickout").cumcount() + 1
        pairs["price"] = pairs["price"].astype(float)
        pairs["label"] = (pairs["item"] == pairs["reference"]).astype("int8")
        pairs["item"] = pairs["item"].astype("int64")
    with clock("prepare for target encoding"):
        pairs["fold"] = fold_of_rows(len(pairs))
        pairs["current_filters"] = pairs["current_filters"].fillna("")
    with clock("mean target encoding"):
        for key in KEYS:
            name = f"{key}_item_mean"
            pairs[name] = 0.0
            for fold in range(FOLDS):
                others, own = pairs[pairs["fold"] != fold], pairs["fold"] == fold
                mean = others["label"].mean()
                stats = others.groupby([key, "item"])["label"].agg(["sum", "count"])
                stats["mean"] = (stats["sum"] + SMOOTHING * mean) / (stats["count"] + SMOOTHING)
                found = pairs.loc[own, [key, "item"]].merge(stats[["mean"]].reset_index(), on=[key, "item"], how="left")
                pairs.loc[own, name] = found["mean"].fillna(mean).to_numpy()
    with clock("constrain string"):
        log["city_short"] = log["city"].str.lower().str.slice(0, 12)
        log["item_reference"] = log["reference"].where(log["reference"].str.isdigit())
    with clock("count items"):
        pairs["shown"] = pairs.groupby("item")["item"].transform("count")
        touched = log["item_reference"].value_counts()
        pairs["touched"] = pairs["item"].astype(str).map(touched).fillna(0).astype("int64")
    with clock("merge"):
        pairs = pairs.merge(metadata, left_on="item", right_on="item_id", how="left")
    with clock("binary features from text"):
        binary = metadata["properties"].str.get_dummies("|")
    with clock("difference features"):
        log = log.sort_values(["session_id", "step"], kind="stable")
        session = log.groupby("session_id")
        log["seconds_since"] = session["timestamp"].diff()
        log["last_reference"] = session["reference"].shift()
        groups = pairs.groupby("clickout")
        pairs["price_difference"] = groups["price"].diff()
        pairs["price_rank"] = groups["price"].rank(method="min").astype("int64")
        log = log.sort_index()
    made = [f"{key}_item_mean" for key in KEYS]
    pairs[["clickout", "item", "price", "label", "rank", *made, "shown", "touched", "properties", "stars",
           "price_difference", "price_rank"]].to_parquet(out / "pairs.parquet", index=False)  # fmt: skip
    log[["is_item", "clicked", "city_short", "item_reference", "seconds_since", "last_reference"]].to_parquet(
        out / "log.parquet", index=False
    )
    expanded.columns = [f"impression_{column + 1}" for column in expanded.columns]
    expanded.assign(first=first).to_parquet(out / "expanded.parquet", index=False)
    binary[sorted(binary.columns)].astype("int8").to_parquet(out / "binary.parquet", index=False)
    assert expanded.shape[1] <= MOST
    assert binary.shape[1] <= PROPERTIES
    return len(pairs)


feature_case(argument(), job)
