"""Which of the listed hotels is clicked? Features of sessions, from raw log lines to a trained model; about a minute.

python examples/session_features.py

The log is generated in the format of trivago's RecSys Challenge 2019 (synthetic: the figures say nothing about hotels).
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

import stoker
from stoker import features as f
from stoker.prep.features.tables import read_table
from stoker.prep.schema import DenseColumn


def train(data: stoker.Dataset, out: Path) -> Any:
    """A small model; validated on the held-out click-outs."""
    return stoker.train(
        data, out=out, model="dlrm", model_options={"bottom": (32,), "top": (64,)}, embedding_dim=8, epochs=1,
        batch_size=512, row_optimizer="adagrad", row_lr=0.05, display="quiet", tensorboard=False,
    )  # fmt: skip


def in_memory(log: Path) -> None:
    """The same features on a frame, without a dataset: what is fitted on some sessions is applied to others."""
    columns = {"session_id": "string", "timestamp": "int", "step": "int", "city": "string", "action_type": "string"}
    lines = read_table(log, columns)
    features = [
        f.TimeParts(name="at", column="timestamp"),
        f.SinceLast(name="seconds", by=("session_id",), order="timestamp"),
        f.Match(name="click", column="action_type", values=("clickout item",)),
        f.MeanTargetEncoding(name="city_rate", by=("city", "at_hour"), folds=8, fold_by=("session_id",)),
    ]
    cut = lines.height * 4 // 5
    early = lines.head(cut).with_columns(label=(pl.col("action_type") == "clickout item").cast(pl.Int8))
    late = f.fit(features, early, label="label").apply(lines.tail(lines.height - cut))
    print(late.select("city", "at_hour", "seconds", "city_rate").head(4).collect())


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="stoker-"))
    log = folder / "train.csv"
    truth = stoker.synthetic.write("trivago", 36_000, folder / "all.csv")
    header, *lines = (folder / "all.csv").read_text().splitlines(keepends=True)
    cut = 30_000
    while lines[cut].split(",")[1] == lines[cut - 1].split(",")[1]:  # a session stays whole
        cut += 1
    log.write_text(header + "".join(lines[:cut]))
    (folder / "new.csv").write_text(header + "".join(lines[cut:]))
    in_memory(log)

    # The preset, and a feature more: how expensive the item is in its list.
    recipe = stoker.recipes.trivago("features")
    schema = recipe.schema()
    dearest = f.Rank(name="dear_rank", by=("clickout",), order="price", descending=True, method="dense")
    schema = replace(
        schema, feature=(*schema.feature, dearest), dense=(*schema.dense, DenseColumn(name="dear_rank", fill=0.0))
    )
    recipe = replace(recipe, presets={"features": lambda: schema})
    data = stoker.prepare(recipe, log, out=folder / "features")
    result = train(data, folder / "features-run")
    print("AUC", result.valid["auc"], "where the best of all models has", truth.best_auc)
    print("learned:", *sorted(path.name for path in (folder / "features" / "features").iterdir()))

    # Tomorrow's sessions, with what was learned from today's; what was seen and clicked before goes on.
    new = stoker.prepare(recipe, folder / "new.csv", like=folder / "features", out=folder / "new")
    print("new rows:", new, "AUC", stoker.evaluate(result.model, new.test)["auc"])


if __name__ == "__main__":
    main()
