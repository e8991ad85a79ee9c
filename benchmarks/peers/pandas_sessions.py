"""From a trivago-format log to a table of features in pandas, as notebooks have it: no loops over rows, no apply.

The features are those of the recipe's preset "features".
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
from worker_tools import argument, peak_memory, say, versions

versions(pandas=pd.__version__)

FOLDS, SMOOTHING, MOST = 8, 20.0, 25
ENCODED = ("current_filters", "city", "device", "user_id")
CATEGORICAL = ("item", "user_id", "session_id", "platform", "city", "device", "hour", "weekday", "current_filters")
CONTINUOUS = (
    "price", "rank", "price_rank", "is_last_item", "item_mean", *(f"{key}_item_mean" for key in ENCODED),
    "session_item", "user_item", "item_seen", "item_clicked", "item_shown", "step",
    "seconds_since", "seconds_since_item", "steps_since",
)  # fmt: skip


def featured(path):
    """Pairs of listed items and click-outs, with everything engineered."""
    log = pd.read_csv(path, dtype={"reference": str})
    log["moment"] = np.arange(len(log))
    clicks = log[(log["action_type"] == "clickout item") & log["impressions"].notna()].copy()
    clicks["clickout"] = np.arange(len(clicks))
    clicks["item"] = clicks["impressions"].str.split("|")
    clicks["price"] = clicks["prices"].str.split("|")
    clicks = clicks[clicks["item"].str.len() > 1]
    pairs = clicks.drop(columns=["impressions", "prices"]).explode(["item", "price"], ignore_index=True)
    pairs["rank"] = pairs.groupby("clickout").cumcount() + 1
    pairs = pairs[pairs["rank"] <= MOST]
    pairs["price"] = pairs["price"].astype(float)
    pairs["label"] = (pairs["item"] == pairs["reference"]).astype("int8")
    pairs["item"] = pairs["item"].astype("int64")
    pairs["event"] = 0
    pairs["click"] = 0

    touched = log[log["reference"].str.match(r"^[0-9]+$").fillna(False)].copy()
    touched["item"] = touched["reference"].astype("int64")
    touched["event"] = 1
    touched["click"] = (touched["action_type"] == "clickout item").astype(int)
    names = ["moment", "timestamp", "step", "user_id", "session_id", "item", "event", "click"]
    both = pd.concat([pairs, touched[names]], ignore_index=True)
    both = both.sort_values(["moment", "event"], kind="stable")
    both["session_item"] = both.groupby(["session_id", "item"])["event"].cumsum() - both["event"]
    both["user_item"] = both.groupby(["user_id", "item"])["event"].cumsum() - both["event"]
    both["item_seen"] = both.groupby("item")["event"].cumsum() - both["event"]
    both["item_clicked"] = both.groupby("item")["click"].cumsum() - both["click"]
    for name, keys, column in (
        ("last_item", ["session_id"], "item"),
        ("last_step", ["session_id"], "step"),
        ("last_time", ["session_id"], "timestamp"),
        ("last_time_item", ["session_id", "item"], "timestamp"),
    ):
        both["_value"] = both[column].where(both["event"] == 1)
        both[name] = both.groupby(keys)["_value"].ffill()
        both[name] = both.groupby(keys)[name].shift()
    pairs = both[both["event"] == 0].drop(columns="_value")
    pairs["steps_since"] = pairs["step"] - pairs["last_step"]
    pairs["seconds_since"] = pairs["timestamp"] - pairs["last_time"]
    pairs["seconds_since_item"] = pairs["timestamp"] - pairs["last_time_item"]
    pairs["is_last_item"] = (pairs["item"] == pairs["last_item"]).astype(int)
    pairs["price_rank"] = pairs.groupby("clickout")["price"].rank(method="min")
    moments = pd.to_datetime(pairs["timestamp"], unit="s")
    pairs["hour"], pairs["weekday"] = moments.dt.hour, moments.dt.weekday
    pairs["current_filters"] = pairs["current_filters"].fillna("")

    train = pairs["clickout"] % 5 != 0
    learned = pairs[train]
    pairs["item_shown"] = pairs["item"].map(learned["item"].value_counts()).fillna(0)
    fold = pairs["clickout"] // 5 % FOLDS
    for keys in (["item"], *([key, "item"] for key in ENCODED)):
        name = "_".join([*keys, "mean"])
        pairs[name] = 0.0
        for number in range(FOLDS + 1):  # the last for the rows that are not learned from
            if number < FOLDS:
                others, own = pairs[train & (fold != number)], train & (fold == number)
            else:
                others, own = learned, ~train
            mean = others["label"].mean()
            stats = others.groupby(keys)["label"].agg(["sum", "count"])
            stats["mean"] = (stats["sum"] + SMOOTHING * mean) / (stats["count"] + SMOOTHING)
            found = pairs.loc[own, keys].merge(stats[["mean"]].reset_index(), on=keys, how="left")
            pairs.loc[own, name] = found["mean"].fillna(mean).to_numpy()
    return pairs


def job(log, out):
    start = time.perf_counter()
    pairs = featured(log)
    seconds = time.perf_counter() - start
    pairs["split"] = np.where(pairs["clickout"] % 5 == 0, "valid", "train")
    pairs["clickout"] = pairs["clickout"].astype("int64")
    pairs["label"] = pairs["label"].astype("int8")
    pairs[[*CATEGORICAL, *CONTINUOUS, "label", "split", "clickout"]].to_parquet(out, index=False)
    return seconds, len(pairs)


config = argument()
features, rows = job(Path(config["log"]), Path(config["out"]))
say("checked", case="features")
say("timed", case="features", seconds=features)
say("extra", rows=rows, peak=peak_memory())
