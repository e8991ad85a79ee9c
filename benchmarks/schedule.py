"""Accuracy of hot and cold batches in the order of the Shuffle Scheduler, against shuffled ones, after equal epochs.

Both sides are runs of ``stoker.train`` with the same settings, initial values and rows. Seeds differ from each other by
more than the bar, so six are averaged where three were asked, and the error of the mean stands beside it. The data sets
are not ours to distribute. They are read from ``STOKER_DATA`` or ``../shared/data``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import stoker
from benchmarks.accuracy import TASKS, Task, prepared
from benchmarks.classify import byte_budget
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult, data_files
from stoker.dataset.dataset import Dataset
from stoker.prep.prepare import load_recipe, run_prepare

__all__ = ["bars"]

SHARE = 0.1  # of the bytes of all rows are for hot ones
ORDERS = ("shuffled", "hot-cold")
METRICS = {"auc": 1, "log_loss": -1, "accuracy": 1}  # and which way is better
SEEDS = 6
READERS = 4  # one in so many of Globo's readers is taken; quick: a tenth of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set and the settings that both orders train with."""

    title: str
    open: Callable[[Run], Dataset]
    settings: dict[str, Any]


def _settings(task: Task) -> dict[str, Any]:
    """The model of the AUC bars, with learning rates that fall to 0: at a constant one the last batches weigh most."""
    given = task.settings
    return {
        "model": "dlrm", "model_options": {"bottom": given["bottom"], "top": given["top"]}, "schedule": "linear",
        "batch_size": given["batch"], "epochs": given["epochs"], "row_lr": 0.02, "dense_lr": given["lr"],
    }  # fmt: skip


def globo_sessions(run: Run, *, lists: bool = False) -> Dataset:
    """Globo clicks with their negatives, each reader's last click for testing; prepared once into the cache.

    ``lists``: a click and its negatives are a list to rank; the rows are the same.

    Raises:
        NotRun: the log is not on this machine.
    """
    import polars as pl

    [source] = data_files("globo/clicks.parquet")
    one_in = READERS * (10 if run.quick else 1)
    out = CACHE / f"globo_sessions_{one_in}{'_lists' * lists}"
    if not (out / "manifest.json").exists():
        run.log("preparing globo")
        with tempfile.TemporaryDirectory() as folder:
            clicks = Path(folder) / "clicks.parquet"
            pl.scan_parquet(source).filter(pl.col("user_id") % one_in == 0).sink_parquet(clicks)
            recipe, schema = load_recipe("globo", None)
            schema = replace(schema, group="click" if lists else None)
            run_prepare(replace(recipe, presets={recipe.preset_name: lambda: schema}), [clicks], out=out)
    return Dataset(out)


CASES = {
    **{
        name: Case(
            title=TASKS[name].title,
            open=lambda run, name=name: Dataset(prepared(TASKS[name], run)),  # type: ignore[misc]
            settings=_settings(TASKS[name]),
        )
        for name in ("movielens", "ebnerd")
    },
    "globo": Case(
        title=f"Globo, one reader in {READERS}, last click, TBSM",
        open=globo_sessions,
        settings={
            "model": "tbsm",
            "model_options": {"tower": (64, 32), "top": (128, 64)},
            "batch_size": 1024,
            "epochs": 1,
            "schedule": "linear",
            "row_optimizer": "adagrad",
            "row_lr": 0.05,
            "dense_lr": 1e-3,
        },
    ),
}


def _trained(data: Dataset, settings: dict[str, Any], order: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics on the test rows after the last step, and the decisions of the schedule."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        out = Path(folder) / "run"
        # Evaluated once, at the end: the best checkpoint is then the last one.
        result = stoker.train(
            data, out=out, batch_order=order, eval_every=10**9, tensorboard=False, display="quiet", **settings
        )
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if result.best_step != result.step or result.epochs != settings["epochs"]:
        raise WrongResult(f"{order}: step {result.best_step} of {result.step} was scored, after {result.epochs} epochs")
    found = {name: result.test[name] for name in METRICS}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise WrongResult(f"{order}: no {', '.join(missing)}")
    return {name: float(value or 0.0) for name, value in found.items()}, [
        line for line in lines if line["kind"] == "schedule"
    ]


def difference(name: str, run: Run) -> Outcome:
    """By how much the schedule is worse, in the means over the seeds: the largest of AUC, log loss and accuracy."""
    case = CASES[name]
    data = case.open(run)
    profile = stoker.profile(data, device_memory=byte_budget(data, SHARE), sample=None)
    classified = stoker.classify(data, profile, CACHE / f"{data.path.name}_hot_{profile.hash[:12]}")
    share = len(classified.hot) / len(data.train)
    if not 0 < share < 1:
        raise WrongResult(f"{share:.0%} of the rows are hot: there is nothing to schedule")
    seeds = range(1 if run.quick else SEEDS)
    settings = {**case.settings, "epochs": 1} if run.quick else case.settings
    rows, values, rates = [], {order: {name: [] for name in METRICS} for order in ORDERS}, []
    for seed in seeds:
        found = {}
        for order in ORDERS:
            run.log(f"seed {seed}: {order}")
            found[order], decisions = _trained(classified, {**settings, "seed": seed}, order)
            for metric, value in found[order].items():
                values[order][metric].append(value)
            if order == "hot-cold":
                rates.append([decision["rate_after"] for decision in decisions])
        rows += [[str(seed), order, *(f"{found[order][metric]:.5f}" for metric in METRICS)] for order in ORDERS]
    means = {order: {m: statistics.mean(v) for m, v in several.items()} for order, several in values.items()}
    rows += [["mean", order, *(f"{means[order][metric]:.5f}" for metric in METRICS)] for order in ORDERS]
    off = {metric: means["hot-cold"][metric] - means["shuffled"][metric] for metric in METRICS}
    rows.append(["", "difference", *(f"{off[metric]:+.5f}" for metric in METRICS)])
    if len(seeds) > 1:
        error = {
            metric: statistics.stdev(map(float.__sub__, values["hot-cold"][metric], values["shuffled"][metric]))
            / len(seeds) ** 0.5
            for metric in METRICS
        }
        rows.append(["", "its standard error", *(f"{error[metric]:.5f}" for metric in METRICS)])
    notes = [
        f"hot rows take {SHARE:.0%} of the bytes of all; {share:.1%} of the training rows are hot",
        "rates of the schedule, by swap: " + "; ".join(", ".join(f"{rate:g}" for rate in each) for each in rates),
        "settings: " + ", ".join(f"{key} {value}" for key, value in settings.items()),
        "worse: lower AUC, higher log loss, lower accuracy; below 0 means better in all three",
        "checked: both orders have trained as many epochs, and the last step is scored",
    ]
    if run.quick:
        notes.append("quick: one seed, one epoch" + (", a tenth of the readers" if name == "globo" else ""))
    table = Table(title=f"Test rows, {case.title}", columns=["seed", "order", *METRICS], rows=rows)
    return Outcome(
        value=max(-way * off[metric] for metric, way in METRICS.items()), tables=[table], notes=notes,
        data={"values": values, "rates": rates, "hot_share": share},
    )  # fmt: skip


def bars() -> list[Bar]:
    """The accuracy promises of the schedule."""
    return [
        Bar(
            name=f"schedule-{name}",
            group="schedule",
            title=f"hot and cold batches against shuffled ones, {case.title} (how much worse, at most)",
            must=0.001,
            at_most=True,
            unit="",
            digits=5,
            run=partial(difference, name),
        )
        for name, case in CASES.items()
    ]
