"""The end of a run: back to its best checkpoint, the test rows, the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.base.units import plural
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.training.config import TrainConfig
from stoker.training.files import checkpoint, loading
from stoker.training.files.log import RunLog
from stoker.training.files.rundir import RunDirectory
from stoker.training.scores.evaluation import evaluate, finite
from stoker.training.scores.metrics import deciding
from stoker.training.terminal.display import Display
from stoker.training.terminal.progress import Clock, Progress

__all__ = ["TrainResult", "finish"]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished run leaves. ``model`` holds the rows of the best checkpoint.

    Where rows lie in a file, ``model.embeddings.close()`` removes it; so does the end of the process.
    """

    run: Path
    model: RecModel
    step: int  # batches trained
    epochs: float  # and passes over the training rows
    stopped_early: bool  # by patience
    best_step: int | None  # None where there are no validation rows
    valid: dict[str, float | None]  # metrics of the best checkpoint on the validation rows
    test: dict[str, float | None]  # and on the test rows
    samples_per_second: float | None  # of training alone, over this call; None when no step was left to do


def finish(
    model: RecModel,
    data: Dataset,
    config: TrainConfig,
    progress: Progress,
    clock: Clock,
    total: int,
    epoch: int,
    run: RunDirectory,
    log: RunLog,
    shown: Display,
) -> TrainResult:
    """Say why training ended, go back to the best checkpoint, evaluate it on the test rows, write the report.

    ``total`` steps were asked for; a pass over the training rows has ``epoch`` of them.
    """
    if said := _ending(progress, config, total, trained=clock.examples > 0):
        shown.note(said)
    best = _go_to_best(model, data, config, progress, run, shown)
    test: dict[str, float | None] = {}
    if split := data.splits.get("test"):
        test = finite(evaluate(model, split, lookahead=config.lookahead, k=config.ranking_k))
        record = {"kind": "test", "step": progress.step if best is None else best["step"], **test}
        log.write(record)
        shown.record(record)
    result = TrainResult(
        run=run.path,
        model=model,
        step=progress.step,
        epochs=progress.step / epoch,
        stopped_early=progress.step < total,
        best_step=None if best is None else int(best["step"]),
        valid={} if best is None else best["valid"],
        test=test,
        samples_per_second=clock.examples / clock.seconds if clock.examples else None,
    )
    run.write("report.json", {name: value for name, value in vars(result).items() if name not in ("run", "model")})
    return result


def _ending(progress: Progress, config: TrainConfig, total: int, *, trained: bool) -> str | None:
    """What is to be said at the end of training, if anything."""
    if progress.step < total:
        name = deciding({} if progress.latest is None else progress.latest["valid"], config.metric).replace("_", " ")
        best = "" if progress.best is None else f"; best at step {progress.best['step']:,}"
        return (
            f"stopped early at step {progress.step:,} of {total:,}: {name} on the validation rows has not improved for "
            f"{plural(progress.stale, 'evaluation')} (patience){best}"
        )
    return None if trained else f"nothing is left to do: {plural(progress.step, 'step')} of {total:,} are done"


def _go_to_best(
    model: RecModel, data: Dataset, config: TrainConfig, progress: Progress, run: RunDirectory, shown: Display
) -> dict[str, Any] | None:
    """Load the best checkpoint that is whole; damaged ones are named and set aside.

    Returns:
        Its evaluation, ``{"step", "valid"}``; None if nothing was ever evaluated.
    """
    best = progress.best
    while best is not None and best["step"] != progress.step:
        path = run.checkpoint(int(best["step"]))
        try:
            loading.load(path, model)
        except CheckpointError as error:
            kept = f" It is kept as {checkpoint.set_aside(path)}." if path.exists() else ""
            shown.note(f"warning: {error} This was the best checkpoint; the best of the others takes its place.{kept}")
            best = next(iter(run.evaluated(config.metric)), None) or {
                "step": progress.step,
                "valid": finite(
                    evaluate(model, data.valid, rows=config.valid_rows, lookahead=config.lookahead, k=config.ranking_k)
                ),
            }
        else:
            break
    return best
