"""AUC on real logs against a plain PyTorch DLRM: same settings, batches, initial values and optimizers;
three seeds.

The data sets are not ours to distribute. They are read from ``STOKER_DATA`` or ``../shared/data``.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult, data_files
from benchmarks.rounds import Contestant, work

__all__ = ["auc", "bars"]

OURS = Contestant(label="stoker", script="auc.py", options={"role": "stoker"})
PLAIN = Contestant(label="plain PyTorch", script="auc.py", options={"role": "torch"})


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set and the settings that both sides train with."""

    recipe: str
    title: str
    files: Sequence[str]
    settings: dict[str, Any]


TASKS = {
    "movielens": Task(
        recipe="movielens",
        title="MovieLens-1M, rating >= 4, random 90/5/5",
        files=("movielens_1m/ratings.parquet", "movielens_1m/users.dat", "movielens_1m/movies.dat"),
        settings={"bottom": [64], "top": [256, 128], "batch": 2048, "epochs": 3, "row_lr": 0.05, "lr": 1e-3},
    ),
    "ebnerd": Task(
        recipe="ebnerd",
        title="EB-NeRD, week 1 to week 2",
        files=tuple(
            f"ebnerd/{week}_{what}.parquet" for week in ("train", "validation") for what in ("behaviors", "history")
        ),
        settings={"bottom": [64], "top": [256, 128], "batch": 1024, "epochs": 1, "row_lr": 0.02, "lr": 1e-3},
    ),
}


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve from ranks; ties count half (Mann-Whitney)."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = labels > 0.5
    wins = rank[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(wins / (positive.sum() * (~positive).sum()))


def prepared(task: Task, run: Run) -> Path:
    """The data set, prepared once into the cache.

    Raises:
        NotRun: its files are not on this machine.
    """
    files = data_files(*task.files)
    from stoker.prep.prepare import run_prepare

    out = CACHE / task.recipe
    if not (out / "manifest.json").exists():
        run.log(f"preparing {task.recipe}")
        run_prepare(task.recipe, files, out=out)
    return out


def train_once(contestant: Contestant, config: dict[str, Any]) -> dict[str, Any]:
    """One training; its AUCs are computed here, from its scores, with one function for all."""
    lines = work(contestant, config)
    done = next(line for line in lines if line["event"] == "trained")
    found = dict(np.load(config["results"]))
    Path(config["results"]).unlink()
    return {
        "first": found["first"],
        "auc": auc(found["scores"], found["labels"]),
        "labels": found["labels"],
        "seconds": done["seconds"],
    }


def same_auc(name: str, run: Run) -> Outcome:
    """The difference of the mean test AUCs over the seeds."""
    task = TASKS[name]
    data = prepared(task, run)
    seeds = (0,) if run.quick else (0, 1, 2)
    settings = {**task.settings, "data": str(data), "limit": 60 if run.quick else None}
    values: dict[str, list[float]] = {OURS.label: [], PLAIN.label: []}
    rows = []
    for seed in seeds:
        found = {}
        for contestant in (OURS, PLAIN):
            run.log(f"seed {seed}: {contestant.label}")
            results = CACHE / f"{name}_{contestant.options['role']}_{os.getpid()}.npz"
            found[contestant.label] = train_once(contestant, {**settings, "seed": seed, "results": str(results)})
        mine, plain = found[OURS.label], found[PLAIN.label]
        if not np.allclose(mine["first"], plain["first"], rtol=1e-4, atol=1e-5):
            worst = float(np.abs(mine["first"] - plain["first"]).max())
            raise WrongResult(
                f"first logits of seed {seed} differ by {worst:.3g}: not the same initial values or batch"
            )
        if not np.array_equal(mine["labels"], plain["labels"]):
            raise WrongResult(f"the test rows of seed {seed} are not the same")
        for label, result in found.items():
            values[label].append(result["auc"])
        rows.append([str(seed), f"{mine['auc']:.5f}", f"{plain['auc']:.5f}", f"{mine['auc'] - plain['auc']:+.5f}"])
    means = {label: statistics.mean(several) for label, several in values.items()}
    difference = means[OURS.label] - means[PLAIN.label]
    rows.append(["mean", f"{means[OURS.label]:.5f}", f"{means[PLAIN.label]:.5f}", f"{difference:+.5f}"])
    table = Table(title=f"Test AUC, {task.title}", columns=["seed", "stoker", "plain PyTorch", "difference"], rows=rows)
    notes = [
        "settings: " + ", ".join(f"{key} {value}" for key, value in task.settings.items()),
        "rows by row-wise Adagrad, dense part by Adam",
        "checked: logits of the first batch and the test rows are the same",
    ]
    if run.quick:
        notes.append("quick: one seed, 60 steps")
    return Outcome(value=abs(difference), tables=[table], notes=notes, data={"auc": values})


def bars() -> list[Bar]:
    """The accuracy promises."""
    return [
        Bar(
            name=f"auc-{name}",
            group="auc",
            title=f"test AUC on {task.title}, against a plain PyTorch DLRM (difference of means)",
            must=0.001,
            at_most=True,
            unit="",
            digits=5,
            run=partial(same_auc, name),
        )
        for name, task in TASKS.items()
    ]
