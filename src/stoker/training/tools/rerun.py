"""Going over some steps of a run again, without touching it: what ``stoker verify`` and ``stoker trace`` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.remote import local_run
from stoker.base.timeline import span
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.placement.placement import Placement
from stoker.training.config import MACHINE, TrainConfig
from stoker.training.files import checkpoint, loading
from stoker.training.files.rundir import RunDirectory, open_dataset, own_dataset
from stoker.training.replica import Replica, seed_generators
from stoker.training.scheduled import ScheduledFeed, run_feed, run_stream, swap_loss
from stoker.training.scores.evaluation import check_dataset


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some steps of a run."""

    run: RunDirectory
    data: Dataset
    config: TrainConfig
    checkpoint: Path | None  # to begin from; None: the model as it was made
    begin: int  # step of the first batch, counted from 0
    steps: int  # batches
    total: int  # of the whole run


def find_section(
    run: str | Path,
    *,
    steps: int,
    begin: int | Literal["start"] | None = None,
    data: Dataset | str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Section:
    """The steps of a run to go over, and the settings to do it with.

    Args:
        run: the run directory.
        steps: how many; fewer where the run has fewer.
        begin: a step that has a checkpoint, or "start"; None takes the newest whole checkpoint that has so many steps
            before it, else the start.
        data: the dataset; None means the run's own.
        settings: fields of :class:`TrainConfig` among :data:`MACHINE`, instead of the run's.

    Raises:
        ConfigError: no run there, or settings that would change its numbers.
        CheckpointError: no whole checkpoint at ``begin``.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; give at least 1.")
    if forbidden := sorted(set(settings or {}) - MACHINE):
        raise ConfigError(f"settings {forbidden} would change the run. What may change: {', '.join(sorted(MACHINE))}.")
    directory = RunDirectory(local_run(run))
    values = directory.config()
    config = TrainConfig.from_dict(values["settings"]).replace(**(settings or {}))
    dataset = open_dataset(data or own_dataset(values, "Name it with --data DATASET."))
    total = config.steps or config.epochs * len(run_stream(config, dataset))
    found = None
    if begin is None:
        early = (step for step in reversed(directory.steps()) if total - step >= steps)
        found = next((step for step in early if directory.problem(step) is None), None)
    elif begin not in ("start", 0):
        if begin not in directory.steps():
            known = ", ".join(f"{step:,}" for step in directory.steps()) or "none"
            raise CheckpointError(f"{run} has no checkpoint at step {begin:,}. It has: {known}. Or begin at the start.")
        checkpoint.verify(directory.checkpoint(int(begin)))
        found = int(begin)
    first = found or 0
    if first >= total:
        raise ConfigError(f"the run ends at step {total:,}, so none is left after step {first:,}. Begin earlier.")
    return Section(
        run=directory, data=dataset, config=config, checkpoint=None if found is None else directory.checkpoint(found),
        begin=first, steps=min(steps, total - first), total=total,
    )  # fmt: skip


class Rerun(Replica):
    """A run at the beginning of a section: model, dense optimizer and batches.

    Args:
        section: the steps.
        placement: where the rows are; None: on the device.
        wait: as for :class:`Replica`.
        endless: look ahead beyond the end of the run too, so that its last steps take as long as others.
    """

    def __init__(
        self, section: Section, placement: Placement | None, *, wait: bool = False, endless: bool = False
    ) -> None:
        config, data = section.config, section.data
        seed_generators(config)
        stream = run_stream(config, data)
        schedule = config.make_schedule(section.total)
        optimizer = config.make_row_optimizer(schedule)
        super().__init__(config, data.schema, optimizer, placement, partial(config.dense_factor, schedule), wait=wait)
        self.data = data
        if section.checkpoint is not None:
            manifest = checkpoint.read_manifest(section.checkpoint)
            check_dataset(data, self.model, manifest["extra"].get("dataset"))
            loading.load(section.checkpoint, self.model, self.dense, stream)
        end = section.total + (config.lookahead + 1 if endless else 0)
        # Next uses are recorded as far as these steps go: a whole epoch may take longer than they do.
        foreseen = section.begin + section.steps
        self.feed = run_feed(stream, end, self.model, config, foreseen=foreseen)
        self._drawn = _generators(self.model.device)
        self._swap()

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch of :attr:`feed`; its loss."""
        torch.set_rng_state(self._drawn[0])
        if self._drawn[1] is not None:
            torch.cuda.set_rng_state(self._drawn[1], self.model.device)
        loss = super().step(batch)
        self._drawn = _generators(self.model.device)  # two reruns that take turns draw the same numbers
        self._swap()
        return loss

    def _swap(self) -> None:
        """Decide as the run did what follows a segment of hot or cold batches."""
        if isinstance(self.feed, ScheduledFeed) and self.feed.swapping:
            with span("swap"):
                self.feed.swap(swap_loss(self.model, self.data, self.config))
                self.synchronize()

    def close(self) -> None:
        """Close threads and files."""
        self.model.embeddings.close()


def _generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
