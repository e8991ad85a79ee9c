"""What ``stoker plan`` predicts against what a run then does: hit rates over a first epoch, time of a step.

Everything runs in this process: predictions hold for one machine, so there is nobody to compare with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, Outcome, Run, Table, WrongResult
from benchmarks.lookahead import TRACES, Trace
from stoker.dataset.dataset import Dataset
from stoker.optim import Constant
from stoker.tables import stage
from stoker.tables.slots.slotted import SlottedRows
from stoker.training.config import TrainConfig
from stoker.training.placing import place_run
from stoker.training.step_time import measure_step

__all__ = ["bars"]

BATCH = 2048
DIM = 16
SHARES = (0.05, 0.25)  # of what all rows and their state take


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Prediction and measurement of one budget; times are medians of rounds."""

    case: str
    predicted_hits: float  # share of distinct rows, mean over the epoch
    hits: float
    predicted_step: float  # seconds
    step: float
    resident: float  # predicted for all rows on the device
    off: float  # predicted / measured - 1 of a step, the median of the rounds' own
    range: tuple[float, float]  # of the rounds

    @property
    def points(self) -> float:
        """Percentage points between the hit rates."""
        return 100 * abs(self.hits - self.predicted_hits)

    @property
    def percent(self) -> float:
        """Of the measured time of a step that the prediction is off."""
        return 100 * abs(self.off)


def _epoch(data: Dataset, config: TrainConfig, timed: int) -> tuple[float, float]:
    """Hit rate over the first epoch and seconds of a step around its middle.

    Only the timed steps train the whole model; the others look up and update rows, which is all that hits depend on.
    """
    optimizer = config.make_row_optimizer(Constant())
    placement = place_run(config, data, optimizer)
    assert placement is not None
    model = config.make_model(data.schema, optimizer, placement)
    dense = config.make_dense_optimizer(model)
    stream = data.train.batches(BATCH, seed=config.seed)
    first = len(stream) // 2
    seconds: list[float] = []
    feed = iter(stage(stream, model))
    mark = time.perf_counter()
    for number, batch in enumerate(feed):
        if first - 32 <= number < first + timed:
            loss = model.loss(batch)
            loss.backward()
            dense.step()
            dense.zero_grad()
            if not np.isfinite(loss.item()):
                raise WrongResult(f"the loss of step {number} is {loss.item()}")
        else:
            pooled = model.embeddings(batch.ids, batch.offsets, batch.weights)
            pooled.backward(torch.zeros_like(pooled))
        now = time.perf_counter()
        if first <= number < first + timed:
            seconds.append(now - mark)  # reading, planning and moving included
        mark = now
    stats = [group.storage.stats for group in model.embeddings.groups if isinstance(group.storage, SlottedRows)]
    wanted, found = sum(each.rows for each in stats), sum(each.hits for each in stats)
    model.embeddings.close()
    return found / wanted, float(np.median(seconds))


def _budget(trace: Trace, data: Dataset, share: float, run: Run) -> Compared:
    rows = sum(data.schema.num_embeddings.values())
    config = TrainConfig(
        embedding_dim=DIM, batch_size=BATCH, device_memory=str(int(share * rows * (4 * DIM + 4))),
        row_optimizer="rowwise_adagrad",
    )  # fmt: skip
    times: list[tuple[float, float, float]] = []  # of each round: predicted, measured, predicted for all resident
    for number in range(run.rounds):
        run.log(f"{trace.title}, {share:.0%}, round {number + 1}")
        placement = place_run(config, data, config.make_row_optimizer(Constant()))
        assert placement is not None
        step = measure_step(config, data, placement)
        slotted = [group for group in placement.groups if group.strategy != "device"]
        if not slotted:
            raise WrongResult(f"{trace.title}: with {share:.0%} of the rows all lie on the device")
        expected = sum(group.hit_rate * group.distinct_rows for group in slotted)
        hits, seconds = _epoch(data, config, 20 if run.quick else 100)
        times.append((step.placed(placement), seconds, step.resident))
    predicted, measured, resident = np.median(times, axis=0)
    off = sorted(told / took - 1 for told, took, _ in times)
    return Compared(
        case=f"{trace.title.split(',')[0]}, {share:.0%} of the bytes",
        predicted_hits=expected / sum(group.distinct_rows for group in slotted),
        hits=hits,
        predicted_step=float(predicted),
        step=float(measured),
        resident=float(resident),
        off=float(np.median(off)),
        range=(off[0], off[-1]),
    )


@lru_cache(maxsize=1)
def _compared(run: Run) -> list[Compared]:
    """One measurement serves both bars."""
    found = []
    for trace in TRACES[1:] if run.quick else TRACES:
        data = trace.open(run)
        found += [_budget(trace, data, share, run) for share in (SHARES[-1:] if run.quick else SHARES)]
    return found


def _outcome(run: Run, value: float) -> Outcome:
    found = _compared(run)
    table = Table(
        title=f"Predicted and measured, batch {BATCH}, shuffled, first epoch",
        columns=["case", "hit rate", "predicted", "points", "ms/step", "predicted", "off", "all resident, predicted"],
        rows=[
            [
                each.case,
                f"{each.hits:.2%}",
                f"{each.predicted_hits:.2%}",
                f"{each.points:.2f}",
                f"{each.step * 1e3:.2f}",
                f"{each.predicted_step * 1e3:.2f}",
                f"{each.off:+.1%} ({each.range[0]:+.1%} to {each.range[1]:+.1%})",
                f"{each.resident * 1e3:.2f}",
            ]
            for each in found
        ],
    )
    notes = [
        "hit rate: distinct rows of each batch found in a slot, over the whole first epoch of a real staged run",
        "step: reading, planning, moving and training, median around the middle of the epoch; predictions are made "
        "before, from the vocabularies' counts and a few seconds of measuring; both in each of the rounds, of which "
        "the median counts, because this machine's speed drifts",
        "shuffled, as training reads; in the order of a log that drifts, hit rates lie above the prediction",
    ]
    data: dict[str, Any] = {"compared": [vars(each) for each in found]}
    return Outcome(value=value, tables=[table], notes=notes, data=data)


def hit_rate(run: Run) -> Outcome:
    """Percentage points between predicted and measured hit rates, the worst case."""
    return _outcome(run, max(each.points for each in _compared(run)))


def step_time(run: Run) -> Outcome:
    """Percent between predicted and measured times of a step, the worst case."""
    return _outcome(run, max(each.percent for each in _compared(run)))


def bars() -> list[Bar]:
    """The promises of the planner."""
    common: dict[str, Any] = {"group": "planner", "at_most": True}
    return [
        Bar(
            name="planner-hit-rate",
            title="hit rate that stoker plan predicts against a run's first epoch",
            must=2.0,
            unit=" points",
            run=hit_rate,
            **common,
        ),
        Bar(
            name="planner-step-time",
            title="time of a step that stoker plan predicts against a run's",
            must=20.0,
            unit=" %",
            run=step_time,
            **common,
        ),
    ]
