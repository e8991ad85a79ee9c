"""Continuing a run: the same dataset and settings, and everything a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.units import plural, quoted
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream
from stoker.models import RecModel
from stoker.training.config import RESUMABLE, TrainConfig
from stoker.training.files import checkpoint, loading
from stoker.training.files.rundir import LOST, RunDirectory, open_dataset, own_dataset
from stoker.training.scheduled import HotColdStream
from stoker.training.scores.evaluation import check_dataset
from stoker.training.terminal.display import Display
from stoker.training.terminal.progress import Progress

__all__ = ["reopen", "restore"]


def reopen(
    resume: str | Path,
    dataset: Dataset | str | Path | None,
    config: TrainConfig | None,
    settings: dict[str, Any],
) -> tuple[Dataset, TrainConfig]:
    """The dataset and settings of a run that is to go on."""
    values = RunDirectory(resume).config()
    before = TrainConfig.from_dict(values["settings"])
    if config is not None:
        settings = {**config.to_dict(), **settings}
    elif settings.get("epochs") is not None:
        settings = {"steps": None, **settings}  # a run that was given in steps goes on in epochs
    if settings.get("batch_order") == "auto":  # what it stood for was settled when the run began
        settings = {**settings, "batch_order": before.batch_order}
    wanted = before.replace(**settings)
    old, new = before.to_dict(), wanted.to_dict()
    changed = [name for name in old if old[name] != new[name] and name not in RESUMABLE]
    if changed:
        raise ConfigError(
            f"{resume} was started with {', '.join(f'{name}={old[name]!r}' for name in changed)}; a resumed "
            "run cannot change that. Start a new run, or leave it out. What may change: "
            f"{', '.join(sorted(RESUMABLE))}.",
            settings=(*changed, *RESUMABLE),
        )
    own = dataset or own_dataset(values, f"stoker train DATASET --resume {quoted(resume)}")
    return open_dataset(own), wanted


def restore(
    run: RunDirectory,
    data: Dataset,
    model: RecModel,
    dense: torch.optim.Optimizer,
    stream: BatchStream | HotColdStream,
    config: TrainConfig,
    shown: Display,
) -> Progress:
    """Take up the newest whole checkpoint; a run killed before its first one starts over.

    Raises:
        ConfigError: the run has trained more steps than it is asked for, or the dataset is another one.
        CheckpointError: no checkpoint is whole.
    """
    newest, problems = run.newest_whole()
    if newest is None:
        if problems:
            raise CheckpointError(f"{run.path} has no whole checkpoint to resume from. {' '.join(problems)} {LOST}")
        shown.note(f"{run.path} has no checkpoint yet; starting from the beginning.")
        return Progress()
    for problem in problems:
        shown.note(f"warning: {problem} What it had is trained again.")
    manifest = checkpoint.read_manifest(newest)
    check_dataset(data, model, manifest["extra"].get("dataset"))
    _check_length(run, int(manifest["step"]), config, len(stream))
    loaded = loading.load(newest, model, dense, stream)
    shown.note(f"resuming from {newest}{', the newest whole checkpoint' if problems else ''}")
    for step in run.steps():
        if step > loaded.step:  # damaged, or it would not have been passed over
            aside = checkpoint.set_aside(run.checkpoint(step))
            shown.note(f"the damaged checkpoint is kept as {aside}; delete it when it is of no use to you")
    progress = Progress(**loaded.manifest["extra"]["progress"])
    if progress.best is not None and progress.best["step"] not in run.steps():
        progress.best = next(iter(run.evaluated(config.metric)), None)
    run.prune(
        config.keep_last, None if progress.best is None else int(progress.best["step"])
    )  # a kill may have come before
    return progress


def _check_length(run: RunDirectory, step: int, config: TrainConfig, epoch: int) -> None:
    if step <= config.total_steps(epoch):
        return
    asked = f"epochs={config.epochs}" if config.steps is None else f"steps={config.steps}"
    more = f"epochs={step // epoch + 1}" if config.steps is None else f"steps={2 * step}"
    raise ConfigError(
        f"{run.path} has trained {plural(step, 'step')} ({_epochs(step / epoch)}), so {asked} leaves nothing to do. "
        f"Give more, such as {more}.",
        settings=("epochs", "steps"),
    )


def _epochs(count: float) -> str:
    return "1 epoch" if count == 1 else f"{count:g} epochs"
