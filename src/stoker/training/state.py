"""A run while it trains: what all parts of the loop look at."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.training.config import TrainConfig
from stoker.training.display import Display
from stoker.training.files.rundir import RunDirectory, RunLog, Upload
from stoker.training.placing import STAGES, StageTotals, slotted
from stoker.training.progress import Clock, Progress, SaveTimer, StopSignals
from stoker.training.replica import Replica
from stoker.training.scheduled import Feed

_SECONDS = "seconds."  # before the name of a stage, in what :func:`moved` counts


@dataclass(kw_only=True)
class TrainState:
    """A run while it trains."""

    data: Dataset
    config: TrainConfig
    replica: Replica  # the model and its optimizers
    feed: Feed  # its batches
    epoch: int  # steps of a pass over the training rows
    total: int  # steps of the whole run
    run: RunDirectory
    log: RunLog
    shown: Display
    upload: Upload
    progress: Progress
    timer: SaveTimer
    totals: StageTotals = field(default_factory=StageTotals)
    stop: StopSignals = field(default_factory=StopSignals)
    clock: Clock = field(init=False)
    swaps: int = 0  # of hot and cold batches, in this process
    saved: tuple[int, int, int] = field(init=False)  # what :attr:`moment` was at the last checkpoint

    def __post_init__(self) -> None:
        # The meter must not hold the state: what a cycle holds is not freed when training ends.
        self.clock = Clock(partial(moved, self.replica.model, self.feed, self.totals))
        self.saved = self.moment

    @property
    def moment(self) -> tuple[int, int, int]:
        """What differs between two checkpoints: the step, that of the last evaluation, and the swaps."""
        return self.progress.step, self.progress.evaluated, self.swaps

    @property
    def finished(self) -> bool:
        """Return True if all steps are done, or patience is at its end."""
        patience = self.config.patience
        return self.progress.step >= self.total or (patience is not None and self.progress.stale >= patience)

    def record(self, kind: str, **values: Any) -> None:
        """Write and show a record of this step."""
        epoch = round(self.feed.step / self.epoch, 6)
        self.write(kind=kind, step=self.progress.step, epoch=epoch, **values, time=round(time.time(), 3))

    def write(self, **record: Any) -> None:
        """Write and show one line of metrics.jsonl."""
        self.log.write(record)
        self.shown.record(record)


def moved(model: RecModel, feed: Feed, totals: StageTotals) -> dict[str, float]:
    """What has moved so far: distinct rows wanted and found in place, bytes fetched, seconds that training waited; and
    seconds of every stage. Nothing where no rows can move."""
    storages = slotted(model)
    if not storages:
        return {}
    return {
        "rows": sum(storage.stats.rows for storage in storages),
        "hits": sum(storage.stats.hits for storage in storages),
        "bytes": sum(storage.stats.fetched_bytes for storage in storages),
        "waited": feed.stall_seconds + sum(storage.stats.stall_seconds for storage in storages),
    } | {_SECONDS + name: value for name, value in totals.seconds().items()}


def movement(since: Mapping[str, float], times: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a training record for what was :func:`moved`.

    Args:
        since: what the clock counted since the last record.
        times: what it counted over the steps whose times count.
    """
    if "rows" not in since:
        return {}
    return {
        "hit_rate": since["hits"] / since["rows"] if since["rows"] else 1.0,
        "fetched_mib_per_step": since["bytes"] / 2**20 / since["steps"],
        "stall_share": min(1.0, times["waited"] / times["seconds"]),
        # Threads add up, waited for or not.
        "stage_seconds": {name: round(spent, 6) for name in STAGES if (spent := times[_SECONDS + name]) > 0},
    }
