"""From a session log to a ranking: features, preparation, training and scoring, against the way people write it.

The baseline is pandas for the features and the preparation, an item-wise data set behind a DataLoader with two workers,
``nn.Embedding`` with dense gradients, AdamW. Both sides derive the same features and train the same model for as many
epochs; what they score the validation click-outs with must rank them equally well before a time is shown.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.features import log_folder
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.rounds import Contestant, work

__all__ = ["bars", "mean_reciprocal_rank"]

LINES = {False: 1_500_000, True: 60_000}  # of the log; three pairs each
DIMS = {
    "item": 16, "user_id": 16, "session_id": 16, "platform": 4, "city": 8, "device": 1, "hour": 4, "weekday": 2,
    "filters": 8, "properties": 1,
}  # fmt: skip
OURS = Contestant(label="stoker", script="stoker_sessions.py")
PANDAS = Contestant(label="pandas", script="pandas_sessions.py", environment="pandas")
PLAIN = Contestant(label="plain PyTorch", script="plain_tabular.py")
SETTINGS = {
    "model_options": {"dims": DIMS}, "batch_size": 4096, "epochs": 1, "row_optimizer": "adam", "row_lr": 1e-3,
}  # fmt: skip
BASELINE = {"dims": list(DIMS.values())[:-1], "lr": 1e-3, "batch": 4096, "workers": 2, "epochs": 1, "seed": 0}
WITHIN = 0.002  # AUC and MRR


def mean_reciprocal_rank(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """Over the groups that have a positive row; of equal scores the positive one counts as the last."""
    order = np.lexsort((labels, -scores, groups))
    groups, labels = groups[order], labels[order]
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    sizes = np.diff(np.r_[starts, len(groups)])
    places = np.arange(len(groups)) - np.repeat(starts, sizes) + 1
    return float((1 / places[labels > 0]).mean())


def _plain(log: Path, run: Run) -> tuple[dict[str, float], dict[str, float], int]:
    """Seconds of the baseline's phases, its metrics and its peak memory."""
    from sklearn.metrics import roc_auc_score

    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = work(PANDAS, {"log": str(log), "results": folder})
        trained = work(PLAIN, {"folder": folder, "results": folder, **BASELINE})
        labels, groups, scores = (
            np.load(Path(folder) / f"{name}.npy") for name in ("valid_labels", "valid_groups", "scores")
        )
    seconds = {line["case"]: line["seconds"] for line in [*made, *trained] if line["event"] == "timed"}
    peak = max(line["peak"] for line in [*made, *trained] if line["event"] == "extra")
    metrics = {"auc": float(roc_auc_score(labels, scores)), "mrr": mean_reciprocal_rank(scores, labels, groups)}
    return seconds, metrics, peak


def end_to_end(run: Run) -> Outcome:
    """Time from the log to scored rows, ours over theirs."""
    log = log_folder(LINES[run.quick], run) / "log.csv"
    small = log_folder(3_000, run) / "log.csv"
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    extra: dict[str, Any] = {}
    metrics: dict[str, dict[str, float]] = {}
    peaks: dict[str, int] = {}
    for number in range(run.rounds):
        run.log(f"round {number + 1}/{run.rounds}: stoker")
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            config = {"log": str(log), "small": str(small), "results": folder, "settings": SETTINGS}
            lines = work(OURS, config)
        for line in lines:
            if line["event"] == "timed":
                ours.setdefault(line["case"], []).append(line["seconds"])
            elif line["event"] == "extra":
                extra = line
        run.log(f"round {number + 1}/{run.rounds}: pandas and plain PyTorch")
        seconds, metrics["plain"], peaks["plain"] = _plain(log, run)
        for case, value in seconds.items():
            theirs.setdefault(case, []).append(value)
        metrics["stoker"], peaks["stoker"] = {name: extra[name] for name in ("auc", "mrr")}, extra["peak"]
        for name in ("auc", "mrr"):
            if metrics["stoker"][name] < metrics["plain"][name] - WITHIN:
                raise WrongResult(
                    f"{name} is {metrics['stoker'][name]:.4f}, the baseline's {metrics['plain'][name]:.4f}"
                )
    totals = {
        side: [sum(values) for values in zip(*phases.values(), strict=True)]
        for side, phases in (("stoker", ours), ("plain", theirs))
    }
    ratio = statistics.median(b / a for a, b in zip(totals["stoker"], totals["plain"], strict=True))
    rows = [["pandas: " + case if case in ("features", "preparation") else case, f"{statistics.median(v):.1f}", ""]
            for case, v in theirs.items()]  # fmt: skip
    rows += [[{"preparation": "stoker prepare, features included"}.get(case, f"{case}, scoring included"), "",
              f"{statistics.median(v):.1f}"] for case, v in ours.items()]  # fmt: skip
    rows.append(["total", *(f"{statistics.median(totals[side]):.1f}" for side in ("plain", "stoker"))])
    notes = [
        "AUC and MRR of the validation click-outs: " + "; ".join(
            f"{side} {values['auc']:.4f}, {values['mrr']:.4f}" for side, values in metrics.items()
        ),
        f"peak memory: stoker {peaks['stoker'] / 2**30:.2f} GiB, baseline {peaks['plain'] / 2**30:.2f} GiB, "
        f"{peaks['stoker'] / peaks['plain']:.2f} of it (without the workers of its loader)",
        f"{extra['rows']:,} pairs of a generated log; tabular model, one epoch; stoker: {SETTINGS}",
        f"checked: AUC and MRR are no more than {WITHIN} below the baseline's",
    ]  # fmt: skip
    table = Table(title="From a trivago-format log to scores (medians)", columns=["phase", "baseline s", "stoker s"],
                  rows=rows)  # fmt: skip
    data = {"ours": ours, "theirs": theirs, "metrics": metrics, "peaks": peaks}
    return Outcome(value=ratio, tables=[table], notes=notes, data=data)


def bars() -> list[Bar]:
    """The promise of the whole loop."""
    return [
        Bar(
            name="sessions-end-to-end",
            group="sessions",
            title="from a session log to a ranking, against pandas, an item-wise loader and dense gradients",
            must=15.6,
            aim=25.0,
            run=end_to_end,
        )
    ]
