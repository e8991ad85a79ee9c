"""``stoker train`` and ``stoker find-lr``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from stoker.base.errors import ConfigError
from stoker.base.progress import Bars
from stoker.base.remote import url_of
from stoker.base.units import format_count, plural, quoted
from stoker.cli.options import DataArgument, Json, Plot, check_new_files, option, printed, say, show_grids, takes
from stoker.cli.prepare import is_log, prepare_log
from stoker.cli.ranks import is_started, joined, launch, speaks
from stoker.placement.budget import MemoryBudget
from stoker.training.settings import BATCHES, PARTS, DenseConfig, MachineConfig, ModelConfig, RangeTest, RowConfig

if TYPE_CHECKING:
    from stoker.training import TrainResult
    from stoker.training.tools.find_lr import Finding

_WIDTH = 64  # of a curve: it fits a terminal of 80


@takes(*PARTS)
def train(
    dataset: Annotated[Path | None, typer.Argument(help="Directory that stoker prepare wrote, or a raw log.")] = None,
    out: Path | None = option("Run", "New run directory, or a URL."),
    resume: Path | None = option("Run", "Run directory or URL to continue, to the bit."),
    batch_size: str | None = option(
        "Optimization",
        f"Examples per batch, or auto: doubled from the base batch size while that is faster. (default: {BATCHES})",
    ),
    ranks: int | None = option(
        "Run",
        "Processes on this machine that train together and divide the rows. Results are the same.",
        metavar="R",
        min=1,
    ),
    why: bool = option("Run", "Show the value of each setting and why, without training.", "--explain", default=False),
    *,
    settings: dict[str, Any],
    json_lines: Json = False,
) -> None:
    """Train a model on a prepared dataset or a raw log, or continue a run.

    A raw log, such as clicks.csv, is first prepared as by stoker prepare auto,
    to a directory next to the run: clicks-data.

    Ctrl-C and SIGTERM end the run after the current step and write a checkpoint.

    With --ranks, or started by torchrun on one or several machines, processes
    train together. They write the files that one process with their --shards
    (default: 8) would write.

    \b
    stoker train clicks.csv --out run
    stoker train data/criteo --out runs/a
    stoker train data/criteo --explain
    stoker train data/criteo --out runs/b --model dcn --dim 32 --patience 3
    stoker train --resume runs/a --epochs 3
    stoker train data/criteo --out runs/c --dim 64 --device-memory 4GiB
    stoker train data/criteo --out runs/f --tt-rank 32 --tt-own C7=2
    stoker train data/criteo-hot --out runs/d --swap-rate 25
    stoker train data/globo --out runs/e --device-memory 1GiB --home /fast
    stoker train data/criteo --out runs/g --ranks 2
    torchrun --nproc-per-node 2 -m stoker train data/criteo --out runs/h
    """
    if batch_size is not None:
        settings["batch_size"] = _size(batch_size)

    started = is_started()
    if is_log(dataset):
        if started:
            raise ConfigError(f"{dataset} is a raw log. Prepare it first (stoker prepare auto), then start the ranks.")
        dataset = _prepared(cast(Path, dataset), out, resume, settings, quiet=json_lines)
    if why:
        _explain(dataset, settings, json_lines)
        return
    if ranks is not None and not started:
        launch(ranks, dataset)
    from stoker.training import train as run_training

    display: Any = "json" if json_lines else "auto"
    with joined(ranks) as group:
        result = run_training(dataset, out=out, resume=resume, display=display, ranks=group, **settings)
    if not speaks():
        return
    place = url_of(resume if out is None else out) or str(result.run)
    record = {name: value for name, value in vars(result).items() if name not in ("run", "model")}
    if not printed({"kind": "result", "run": place, **record}, json_lines):
        _show_result(result, place)


def _explain(dataset: Path | None, settings: dict[str, Any], as_json: bool) -> None:
    """Print what a run would do and why."""
    from stoker.training.tools.explain import explain

    if dataset is None:
        raise ConfigError("--explain needs a dataset: the settings of a run that is there are in its config.json.")
    if settings.get("batch_size") == "auto":
        raise ConfigError("--explain measures nothing, so it cannot tell what --batch-size auto would choose.")
    found = explain(dataset, **settings)
    if not printed(found.to_dict(), as_json):
        show_grids(found.grids())


def _prepared(log: Path, out: Path | None, resume: Path | None, settings: dict[str, Any], *, quiet: bool) -> Path:
    """Prepare a raw log to a directory next to the new run."""
    if resume is not None:
        raise ConfigError(f"--resume continues a run on its own dataset. Leave out {log}, or give --out for a new run.")
    if out is None or url_of(out) is not None:
        raise ConfigError(f"{log} is a raw log, which is prepared next to the run. Add --out RUN, a local directory.")
    from stoker.training.ends import check_settings
    from stoker.training.files.rundir import RunDirectory

    # Before the work, not after it.
    check_settings(None, {name: value for name, value in settings.items() if (name, value) != ("batch_size", "auto")})
    RunDirectory(out).check_new()
    return prepare_log(log, out.parent, quiet=quiet)


def _show_result(result: TrainResult, run: str) -> None:
    from stoker.training.report.advice import weak
    from stoker.training.scores.metrics import metric_grid

    columns = {name: metrics for name, metrics in (("valid", result.valid), ("test", result.test)) if metrics}
    if columns:
        step = result.step if result.best_step is None else result.best_step
        show_grids([metric_grid(columns, f"{result.model.name} at step {step:,} of {result.step:,}")])
    for each in weak({"validation": result.valid, "test": result.test}, result.model.objective):
        say(f"note: {each.why}. {each.change}", "yellow")
    if result.samples_per_second:
        say(f"{format_count(result.samples_per_second)} samples/s while training")
    say(f"run: {run}")
    say("next: " + "\n      ".join(_next(result, run)))


def _next(result: TrainResult, run: str) -> list[str]:
    """Return commands worth trying after a run."""
    from stoker.training.files.rundir import RunDirectory

    scored = "" if result.test else " --split valid" if result.valid else " --split train"  # predict takes test unasked
    commands = [f"stoker predict {quoted(run)}{scored} --out scores.parquet"]
    directory = RunDirectory(result.run)
    if "baselines" not in directory.read("report.json") and not result.model.spec.grow:
        dataset = directory.read("config.json")["dataset"].removeprefix(f"{Path.cwd()}/")
        commands.append(f"stoker baseline {quoted(dataset)}")
    if not result.stopped_early and result.best_step in (None, result.step):  # longer training may still help
        commands.append(f"stoker train --resume {quoted(run)} --epochs {int(result.epochs) + 1}")
    if (events := result.run / "tensorboard").is_dir():
        commands.append(f"tensorboard --logdir {quoted(events)}")
    return commands


def _size(text: str) -> int | Literal["auto"]:
    """Return the value of ``--batch-size``."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--batch-size {text!r} is neither a whole number nor auto.") from error


# The test has no evaluation and no checkpoints, so it does not take their settings.
@takes(
    RangeTest, ModelConfig, "batch_size", "seed", "shuffle_memory", RowConfig, DenseConfig, "lr_scaling",
    "base_batch_size", "data_memory", MemoryBudget, MachineConfig,
)  # fmt: skip
def find_lr(dataset: DataArgument, *, settings: dict[str, Any], plot: Plot = None, as_json: Json = False) -> None:
    """Find learning rates with a range test.

    Trains a model, which is not kept, with learning rates that rise from step
    to step. Two candidates come from the curve: the rates where the loss falls
    fastest, and a tenth of the rates where it is lowest. Each is compared with
    the rates of the settings on held-out rows. The better one is suggested.

    \b
    stoker find-lr data/criteo
    stoker find-lr data/criteo --batch-size 65536 --row-optimizer lamb
    stoker find-lr data/criteo --which rows --lr-steps 400 --plot lr.png
    """
    written = check_new_files(plot=plot)
    from stoker.training.tools.find_lr import find_lr as run

    with Bars(quiet=as_json) as bars:
        found = run(dataset, progress=lambda done, total: bars("steps", done, total), **settings)
    if plot is not None:
        found.plot(plot)
    if printed({"dataset": str(dataset), **found.to_dict()}, as_json):
        return
    _show_finding(dataset, found)
    for path in written:
        say(f"wrote {path}")


def _show_finding(dataset: Path, found: Finding) -> None:
    base = found.rates(1.0)
    say(
        f"{dataset}: {len(found.losses)} steps of {found.batch_size:,}, factors {found.factors[0]:g} to "
        f"{found.factors[-1]:.3g} on {', '.join(f'{name} {value:g}' for name, value in base.items())}"
        + (", stopped because the loss diverged" if found.diverged else "")
    )
    if len(found.smoothed) > 1:
        say(curve(found))
    if not found.candidates:
        if found.diverged:
            say("the loss diverged before it fell: lower --low and --high")
        else:
            say("the loss did not fall: lower --low, raise --high, or give more --lr-steps")
    if found.trials:
        rows = plural(found.held_out, "row")
        say(f"log loss on {rows} held out, after {plural(found.trial_steps, 'step')} at constant rates:")
    for trial in found.trials:
        change = "" if trial.rule == "settings" else f" ({trial.change:+.4f} ± {trial.error:.4f})"
        say(f"{trial.rule:>12}: {_options(found.rates(trial.factor))}  {trial.loss:.4f}{change}")
    if found.suggestions:
        say(f"   suggested: {_options(next(iter(found.suggestions.values())))}")
    elif found.trials:
        say("   suggested: the rates of the settings; no other rates are better")
    for text in found.warnings:
        say(f"note: {text}", "yellow")


def _options(rates: dict[str, float]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value:.2g}" for name, value in rates.items())


def curve(found: Finding) -> str:
    """Draw the smoothed loss by step in characters, with the candidates marked on the axis."""
    from stoker.training.tools.compare import text_plot

    last = len(found.smoothed) - 1
    # Cut off losses above the start, so that a diverging end does not squeeze the bend.
    top = max(found.smoothed[: max(1, last // 3)])
    points = [(float(step), min(loss, top)) for step, loss in enumerate(found.smoothed)]
    words = "learning rates, rising; s: steepest, m: minimum"
    *lines, axis, below = text_plot({"loss": points}, {"loss": "•"}, below=words, width=_WIDTH).splitlines()
    for at, mark in ((found.steepest, "s"), (found.minimum, "m")):
        if at is not None:
            column = axis.index("+") + 1 + round(at / last * (_WIDTH - 1))
            axis = f"{axis[:column]}{mark}{axis[column + 1 :]}"
    return "\n".join([*lines, axis, below])
