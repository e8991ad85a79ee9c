"""From a feature table, or from the log itself, to scored rows: stoker.prepare and stoker.train."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from worker_tools import argument, peak_memory, say, versions

import stoker
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat

versions(stoker=stoker.__version__, torch=torch.__version__)

NUMBERS = ("item", "hour", "weekday")  # categories that are whole numbers
PLAIN = ("rank", "price_rank", "is_last_item")  # as are the means: not counts, so without a logarithm


def schema(categories, numbers):
    """Median fills with flags, logarithms of counts and times, z-scores, categories."""

    def column(name):
        steps = ("zscore",) if name in PLAIN or name.endswith("_mean") else ("log1p", "zscore")
        late = name == "price" or "since" in name
        return DenseColumn(name=name, fill="median" if late else 0.0, null_flag=late, transforms=steps)

    return Schema(
        name="pairs",
        label=Label(column="label"),
        group="clickout",
        source=SourceFormat(kind="parquet"),
        dense=tuple(map(column, numbers)),
        categorical=tuple(CategoricalColumn(name=n, type="int" if n in NUMBERS else "string") for n in categories),
        split=SplitRule(rule="column", column="split", values={"train": "train", "valid": "valid"}),
    )


def job(config, source, folder):
    """Seconds of preparing (in memory, as the baseline does) and of training and scoring; dataset and result."""
    start = time.perf_counter()
    if config["preset"]:
        data = stoker.prepare("trivago", source, preset=config["preset"])
    else:
        data = stoker.prepare(schema(config["dims"], config["numbers"]), source)
    middle = time.perf_counter()
    torch.set_num_threads(config["threads"])
    result = stoker.train(
        data, out=folder / "run", model="tabular", model_options={"dims": config["dims"]}, display="quiet",
        tensorboard=False, threads=config["threads"], **config["settings"],
    )  # fmt: skip
    return middle - start, time.perf_counter() - middle, data, result


config = argument()
folder = Path(config["results"])
for name in ("small", "whole"):
    (folder / name).mkdir()
job(config, config["small"], folder / "small")  # loads and compiles everything
prepared, trained, data, result = job(config, config["source"], folder / "whole")
for case, seconds in (("preparation", prepared), ("training", trained)):
    say("checked", case=case)
    say("timed", case=case, seconds=seconds)
valid = {name: result.valid[name] for name in ("auc", "mrr")}
peak = peak_memory()
start = time.perf_counter()
data.save(folder / "saved")
saved = time.perf_counter() - start
say("extra", peak=peak, saved=saved, steps=result.step, rows=len(data.train) + len(data.valid), **valid)
