"""MRR with losses over lists, against binary cross entropy of each row, after equal epochs on Globo.

All sides are runs of ``stoker.train`` with the settings that the bars of :mod:`benchmarks.schedule` have for Globo. A
list is a click with its negatives; test rows are each reader's last click.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import stoker
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.schedule import CASES, globo_sessions

__all__ = ["bars"]

LOSSES = ("bce", "softmax", "bpr")
METRICS = ("mrr", "ndcg", "group_auc", "auc")
SEEDS = 3


def gain(run: Run) -> Outcome:
    """By how much softmax has a higher MRR, in the mean over the seeds."""
    data, case = globo_sessions(run, lists=True), CASES["globo"]
    values: dict[str, dict[str, list[float]]] = {loss: {name: [] for name in METRICS} for loss in LOSSES}
    rows = []
    for seed in range(1 if run.quick else SEEDS):
        for loss in LOSSES:
            run.log(f"seed {seed}: {loss}")
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                result = stoker.train(
                    data, out=Path(folder) / "run", **case.settings, seed=seed, loss=loss, eval_every=10**9,
                    tensorboard=False, display="quiet",
                )  # fmt: skip
            if result.best_step != result.step:
                raise WrongResult(f"{loss}: step {result.best_step} of {result.step} was scored")
            for name in METRICS:
                values[loss][name].append(float(result.test[name] or 0.0))
            rows.append([str(seed), loss, *(f"{values[loss][name][-1]:.5f}" for name in METRICS)])
    means = {loss: {name: statistics.mean(each) for name, each in found.items()} for loss, found in values.items()}
    rows += [["mean", loss, *(f"{means[loss][name]:.5f}" for name in METRICS)] for loss in LOSSES]
    table = Table(title=f"Test rows, {case.title}, in lists", columns=["seed", "loss", *METRICS], rows=rows)
    notes = ["settings: " + ", ".join(f"{key} {value}" for key, value in case.settings.items())]
    if run.quick:
        notes.append("quick: one seed, a tenth of the readers")
    return Outcome(
        value=means["softmax"]["mrr"] - means["bce"]["mrr"], tables=[table], notes=notes, data={"values": values}
    )


def bars() -> list[Bar]:
    """The promise of the loss over lists."""
    return [
        Bar(
            name="list-loss-globo", group="list-loss", must=0.0, unit="", digits=5, run=gain,
            title="MRR with loss softmax minus MRR with loss bce, Globo, mean of three seeds",
        )
    ]  # fmt: skip
