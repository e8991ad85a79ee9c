"""Logs of several days, with ids that fall out of use and new ones that appear, and runs on the first day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import stoker
from stoker.prep.schema import Schema

SCHEMA = """
name = "days"
derive = ["past_count name=seen by=item order=when window=400", "mean_target name=rate by=user"]
[label]
column = "click"
[timestamp]
column = "when"
[[categorical]]
name = "item"
[[categorical]]
name = "user"
[[dense]]
name = "price"
[split]
rule = "time"
train = 0.8
valid = 0.1
test = 0.1
"""
RUN: dict[str, Any] = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 64, "epochs": 1, "threads": 1,
    "tensorboard": False, "display": "quiet", "backend": "reference",
}  # fmt: skip


def day(number: int, rows: int = 300, items: int = 60) -> pl.DataFrame:
    """The log of a day."""
    random = np.random.default_rng(number)
    item = random.zipf(1.3, rows) % items + 3 * number
    user = random.integers(0, 40, rows)
    click = random.random(rows) < 0.1 + 0.8 * ((item + user) % 2)
    return pl.DataFrame(
        {
            "click": click.astype(int), "when": 1000 * number + np.sort(random.integers(0, 1000, rows)),
            "item": [f"i{each}" for each in item], "user": [f"u{each}" for each in user],
            "price": random.random(rows).round(3),
        }
    )  # fmt: skip


def write_days(folder: Path, last: int, rows: int = 300) -> list[Path]:
    """Write the logs of days 0 to ``last``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"day_{number}.csv" for number in range(last + 1)]
    for number, path in enumerate(paths):
        day(number, 3 * rows if number == 0 else rows).write_csv(path)
    return paths


def schema(folder: Path) -> Schema:
    path = folder / "days.toml"
    path.write_text(SCHEMA)
    return Schema.from_file(path)


def first_run(folder: Path, columns: Schema | None = None, **settings: Any) -> Path:
    """A run on day 0, next to the dataset ``data``."""
    stoker.prepare(columns or schema(folder), folder / "logs" / "day_0.csv", out=folder / "data", threads=1)
    stoker.train(folder / "data", out=folder / "run", **{**RUN, **settings}).model.embeddings.close()
    return folder / "run"
