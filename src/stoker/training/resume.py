"""Continuing a run: the same dataset and settings, and everything a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stoker.data.dataset import Dataset
from stoker.data.reader import BatchStream
from stoker.errors import CheckpointError, ConfigError
from stoker.models import RecModel
from stoker.training import checkpoint
from stoker.training.config import RESUMABLE, TrainConfig
from stoker.training.display import Display
from stoker.training.evaluation import check_dataset
from stoker.training.progress import Progress
from stoker.training.rundir import RunDirectory

__all__ = ["reopen", "restore"]


def reopen(
    resume: str | Path,
    dataset: Dataset | str | Path | None,
    config: TrainConfig | None,
    settings: dict[str, Any],
) -> tuple[Dataset, TrainConfig]:
    """The dataset and settings of a run that is to go on."""
    values = RunDirectory(resume).read("config.json")
    before = TrainConfig.from_dict(values["settings"])
    if config is not None:
        settings = {**config.to_dict(), **settings}
    wanted = before.replace(**settings)
    old, new = before.to_dict(), wanted.to_dict()
    changed = [name for name in old if old[name] != new[name] and name not in RESUMABLE]
    if changed:
        raise ConfigError(
            f"{resume} was started with {', '.join(f'{name}={old[name]!r}' for name in changed)}; a resumed "
            "run cannot change that. Start a new run, or leave it out. What may change: "
            f"{', '.join(sorted(RESUMABLE))}."
        )
    if isinstance(dataset, Dataset):
        return dataset, wanted
    return Dataset(dataset or values["dataset"]), wanted


def restore(
    run: RunDirectory,
    data: Dataset,
    model: RecModel,
    dense: torch.optim.Optimizer,
    stream: BatchStream,
    shown: Display,
) -> Progress:
    """Take up the newest whole checkpoint; a run killed before its first one starts over."""
    newest, problems = run.newest_whole()
    for problem in problems:
        shown.note(f"warning: {problem}")
    if newest is None:
        if problems:
            raise CheckpointError(f"{run.path} has no whole checkpoint to resume from. {problems[-1]}")
        shown.note(f"{run.path} has no checkpoint yet; starting from the beginning.")
        return Progress()
    check_dataset(data, model, checkpoint.read_manifest(newest)["extra"].get("dataset"))
    loaded = checkpoint.load(newest, model, dense, stream)
    shown.note(f"resuming from {newest}{', the newest whole checkpoint' if problems else ''}")
    for step in run.steps():
        if step > loaded.step:  # damaged, or it would not have been passed over
            checkpoint.discard(run.checkpoint(step))
    return Progress(**loaded.manifest["extra"]["progress"])
