"""What batches many times as large cost in accuracy, with LAMB and with CowClip, after equal epochs.

Both sides are runs of ``stoker.train`` on the same rows, each with settings of its own, sought by ``extreme_search``:
on validation rows, with another seed. Nothing is chosen here; five seeds. Where the test rows come in groups that can
be ranked, MRR is compared beside AUC. The data sets are not ours to distribute. They are read from ``STOKER_DATA`` or
``../shared/data``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import stoker
from benchmarks.accuracy import TASKS, prepared
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.schedule import globo_sessions
from stoker.dataset.dataset import Dataset

__all__ = ["bars"]

SMALL = 4096
SEEDS = 5
MOST = 0.002  # lost at most, of AUC and of MRR
METRICS = ("auc", "mrr")  # those of them that the test rows have
#: what was trained: bars of one process share the runs of the small batch
_known: dict[str, tuple[dict[str, float], int, float]] = {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set, what both sides have in common, and the settings of each."""

    title: str
    open: Callable[[Run], Dataset]
    settings: dict[str, Any]
    small: dict[str, Any]
    large: dict[str, dict[str, Any]]  # by what carries the large batch


# Linear without a warm-up of the rows: a large batch has few steps, and one cycle spends a quarter of them rising.
_DLRM = {"model": "dlrm", "model_options": {"bottom": [64], "top": [256, 128]}, "schedule": "linear"}
CASES = {
    "movielens": Case(
        title=TASKS["movielens"].title,
        open=lambda run: Dataset(prepared(TASKS["movielens"], run)),
        settings={**_DLRM, "epochs": 3},
        small={
            "row_optimizer": "adam", "row_lr": 1e-2, "row_weight_decay": 3e-4, "dense_lr": 8e-3, "dense_warmup": 80,
        },
        large={
            "lamb": {
                "batch_size": 8192, "row_optimizer": "lamb", "row_lr": 0.02, "row_l2": 3e-4, "min_trust": 0.7,
                "max_trust": 1.5, "dense_optimizer": "lamb", "dense_lr": 0.014, "dense_warmup": 40,
            },
            "cowclip": {
                "batch_size": 8192, "row_optimizer": "adam", "row_lr": 1.5e-2, "row_weight_decay": 1.5e-4,
                "row_cow_clip": (1.0, 1e-4), "dense_lr": 1.2e-2, "dense_warmup": 40,
            },
        },
    ),
    "globo": Case(
        title="Globo, one reader in 4, last click",
        open=partial(globo_sessions, lists=True),
        settings={**_DLRM, "epochs": 2},
        small={
            "row_optimizer": "adam", "row_lr": 1.5e-2, "row_weight_decay": 3e-5, "dense_lr": 8e-3, "dense_warmup": 80,
        },
        large={
            "lamb": {
                "batch_size": 8192, "row_optimizer": "lamb", "row_lr": 0.025, "row_weight_decay": 0.1,
                "min_trust": 0.7, "max_trust": 1.5, "dense_optimizer": "lamb", "dense_lr": 0.014, "dense_warmup": 40,
            },
            "cowclip": {
                "batch_size": 8192, "row_optimizer": "adam", "row_lr": 2e-2, "row_weight_decay": 2e-5,
                "row_cow_clip": (1.0, 1e-4), "dense_lr": 1.2e-2, "dense_warmup": 40,
            },
        },
    ),
}  # fmt: skip


def _trained(data: Dataset, settings: dict[str, Any]) -> tuple[dict[str, float], int, float]:
    """Metrics on the test rows after the last step, the steps, and examples/s."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # Evaluated once, at the end: the best checkpoint is then the last one.
        result = stoker.train(
            data, out=Path(folder) / "run", eval_every=10**9, tensorboard=False, display="quiet", **settings
        )
    if result.best_step != result.step or result.epochs != settings["epochs"]:
        raise WrongResult(f"step {result.best_step} of {result.step} was scored, after {result.epochs} epochs")
    found = {name: result.test.get(name) for name in METRICS}
    return (
        {name: float(value) for name, value in found.items() if value is not None},
        result.step,
        float(result.samples_per_second or 0.0),
    )


def lost(name: str, means: str, run: Run) -> Outcome:
    """What the large batch loses against the small one, in the means over the seeds: the larger of AUC and MRR."""
    case = CASES[name]
    data = case.open(run)
    sides = {"small": {"batch_size": SMALL, **case.small}, "large": case.large[means]}
    values: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    steps, rates, rows = {}, {side: [] for side in sides}, []  # type: ignore[var-annotated]
    for seed in range(1 if run.quick else SEEDS):
        for side, own in sides.items():
            run.log(f"seed {seed}: batches of {own['batch_size']:,}")
            settings = {**case.settings, **own, "seed": seed}
            key = json.dumps([name, run.quick, settings], sort_keys=True)
            if key not in _known:
                _known[key] = _trained(data, settings)
            found, steps[side], rate = _known[key]
            rates[side].append(rate)
            for metric, value in found.items():
                values[side].setdefault(metric, []).append(value)
    metrics = [metric for metric in METRICS if metric in values["small"]]
    if not metrics or any(len(values["large"].get(m, ())) != len(values["small"][m]) for m in metrics):
        raise WrongResult("both sides need the same metrics of every seed")

    def cells(side: str) -> list[str]:
        spread = [(statistics.mean(of), statistics.stdev(of) if len(of) > 1 else 0.0) for of in values[side].values()]
        return [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in spread]

    for side, own in sides.items():
        speed = f"{statistics.median(rates[side]):,.0f}"
        rows.append([f"{own['batch_size']:,}", f"{steps[side]:,}", *cells(side), speed])
    off = {
        metric: statistics.mean(values["small"][metric]) - statistics.mean(values["large"][metric])
        for metric in metrics
    }
    rows.append(["lost", "", *(f"{off[metric]:+.4f}" for metric in metrics), ""])
    table = Table(
        title=f"Test rows, {case.title}, {means}", columns=["batch", "steps", *metrics, "examples/s"], rows=rows
    )
    notes = [
        f"mean ± standard deviation of {len(values['small'][metrics[0]])} seeds; below 0 nothing is lost",
        "settings of both: " + ", ".join(f"{key} {value}" for key, value in case.settings.items()),
        f"of the small batch: {case.small}; of the large one: {case.large[means]}",
        "settings were sought by extreme_search on validation rows with another seed",
        "checked: both sides have trained as many epochs, and the last step is scored",
    ]
    if "mrr" not in metrics:
        notes.append("no MRR: the test rows have no groups to rank")
    data_out = {"values": values, "steps": steps, "examples_per_second": rates}
    return Outcome(value=max(off.values()), tables=[table], notes=notes, data=data_out)


def bars() -> list[Bar]:
    """The accuracy promises of extreme batches."""
    return [
        Bar(
            name=f"extreme-{means}-{name}",
            group="extreme-batches",
            title=f"lost by batches of {settings['batch_size']:,} instead of {SMALL:,} with {means}, {case.title}",
            must=MOST,
            aim=0.0,
            at_most=True,
            unit="",
            digits=4,
            run=partial(lost, name, means),
        )
        for name, case in CASES.items()
        for means, settings in case.large.items()
    ]
