"""Going over some steps of a run again, without touching it: what ``stoker verify`` and ``stoker trace`` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.remote import local_run
from stoker.base.timeline import span
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream
from stoker.placement.placement import Placement
from stoker.training.config import TrainConfig
from stoker.training.files import checkpoint, loading
from stoker.training.files.rundir import RunDirectory, open_dataset, own_dataset
from stoker.training.process import seed_generators
from stoker.training.scheduled import HotColdStream, ScheduledFeed, run_feed, run_stream, swap_loss
from stoker.training.scores.evaluation import check_dataset
from stoker.training.settings import MachineSettings

__all__ = ["MACHINE", "Rerun", "Section", "find_section"]

#: Settings that may differ from the run's: they leave its numbers alone (device, backend, threads but for rounding).
MACHINE = frozenset(MachineSettings.__annotations__)


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

    def batches(self) -> BatchStream | HotColdStream:
        """The run's batches from its first step on."""
        return run_stream(self.config, self.data)


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
        found = next(
            (step for step in reversed(directory.steps()) if total - step >= steps and _whole(directory, step)), None
        )
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


def _whole(directory: RunDirectory, step: int) -> bool:
    try:
        checkpoint.verify(directory.checkpoint(step))
    except CheckpointError:
        return False
    return True


class Rerun:
    """A run at the beginning of a section: model, dense optimizer and batches.

    Args:
        section: the steps.
        placement: where the rows lie; None: on the device.
        wait: end each part of a step with a synchronisation of the GPU, so that a timeline shows its own time.
        endless: look ahead beyond the end of the run too, so that its last steps take as long as others.
    """

    def __init__(
        self, section: Section, placement: Placement | None, *, wait: bool = False, endless: bool = False
    ) -> None:
        config = section.config
        seed_generators(config)
        stream = section.batches()
        self.section = section
        self.schedule = config.make_schedule(section.total)
        self.model = config.make_model(section.data.schema, config.make_row_optimizer(self.schedule), placement)
        self.dense = config.make_dense_optimizer(self.model)
        if config.compile:
            self.model.compile_dense()
        if section.checkpoint is not None:
            manifest = checkpoint.read_manifest(section.checkpoint)
            check_dataset(section.data, self.model, manifest["extra"].get("dataset"))
            loading.load(section.checkpoint, self.model, self.dense, stream)
        for group in self.dense.param_groups:
            group.setdefault("initial_lr", group["lr"])
        end = section.total + (config.lookahead + 1 if endless else 0)
        # Next uses are recorded as far as these steps go: a whole epoch may take longer than they do.
        foreseen = section.begin + section.steps
        self.feed = run_feed(stream, end, self.model, config, foreseen=foreseen, metered=False)
        self._parameters = self.model.dense_parameters()
        self._wait = wait and self.model.device.type == "cuda"
        self._drawn = _generators(self.model.device)
        self.model.train()
        self._swap()

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch of :attr:`feed`; its loss."""
        _set_generators(self._drawn, self.model.device)
        for group in self.dense.param_groups:
            group["lr"] = group["initial_lr"] * self.section.config.dense_factor(self.schedule, batch.step)
        with span("forward"):
            loss = self.model.loss(batch)
            self._synchronize()
        with span("backward"):
            loss.backward()
            self._synchronize()
        with span("dense"):
            if self.section.config.dense_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self.section.config.dense_clip_norm)
            self.dense.step()
            self.dense.zero_grad()
            self._synchronize()
        self._drawn = _generators(self.model.device)  # two reruns that take turns draw the same numbers
        self._swap()
        return loss.detach()

    def _swap(self) -> None:
        """Decide as the run did what follows a segment of hot or cold batches."""
        if isinstance(self.feed, ScheduledFeed) and self.feed.swapping:
            with span("swap"):
                self.feed.swap(swap_loss(self.model, self.section.data, self.section.config))
                self._synchronize()

    def _synchronize(self) -> None:
        if self._wait:
            torch.cuda.synchronize(self.model.device)

    def close(self) -> None:
        """Let go of threads and files."""
        self.model.embeddings.close()


def _generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_generators(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
