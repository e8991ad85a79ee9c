"""``stoker find-lr``."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from stoker.base.errors import ConfigError
from stoker.cli.common import options
from stoker.cli.common.options import DataArgument, OneObject, option
from stoker.cli.train import train

if TYPE_CHECKING:
    from stoker.training.tools.find_lr import Finding

__all__ = ["register"]

_TEST, _RESULT = "Range test", "Results"
_WIDTH, _HEIGHT = 64, 12  # of the curve: it fits a terminal of 80
#: options of stoker train that a test without end, evaluation and checkpoints has no use for
_WITHOUT = frozenset(
    {
        "dataset", "out", "resume", "batch_size", "epochs", "steps", "batch_order", "swap_rate", "schedule_rows",
        "ranking_k", "schedule", "cycle_rise", "warmup", "dense_warmup", "decay_steps", "eval_every", "valid_rows",
        "metric", "patience", "save_every", "checkpoint_minutes", "keep_last", "log_every", "tensorboard", "json_lines",
    }
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("find-lr")(_with_options_of_train())


def find_lr(
    dataset: DataArgument,
    lr_steps: Annotated[int, option(_TEST, "Batches to train on.")] = 200,
    low: Annotated[float, option(_TEST, "First factor on the learning rates.")] = 1e-3,
    high: Annotated[float, option(_TEST, "Last factor.")] = 1e3,
    which: Annotated[str, option(_TEST, "Rates that rise: both, rows or dense.")] = "both",
    smoothing: Annotated[float, option(_TEST, "Weight of the past in the smoothed loss.")] = 0.9,
    trial_steps: Annotated[
        int | None, option(_TEST, "Batches of each trial. (default: 5 times lr-steps, an epoch at most)")
    ] = None,
    batch_size: options.BatchSize = None,
    plot: Annotated[Path | None, option(_RESULT, "File to write the curve to, as .png (needs matplotlib).")] = None,
    as_json: OneObject = False,
    **given: Any,
) -> None:
    """Find learning rates: raise them from step to step and see where the loss falls.

    Trains a model that is thrown away. Both rates are multiplied by a factor
    that rises evenly on a logarithmic scale. The rates where the smoothed loss
    falls fastest, and a tenth of those where it is least, are then tried
    against those of the settings: suggested is what does better on held-out rows.

    \b
    stoker find-lr data/criteo
    stoker find-lr data/criteo --batch-size 65536 --dense-optimizer lamb --row-optimizer lamb
    stoker find-lr data/criteo --which rows --dense-lr 0.001 --lr-steps 400 --plot lr.png
    """
    if plot is not None:
        from stoker.base.files import check_target
        from stoker.base.picture import check_plot

        check_plot(plot)
        if plot.exists():
            raise ConfigError(f"{plot} exists. Choose another name, or delete it first.")
        check_target(plot)
    from stoker.base.bars import Bars
    from stoker.training.tools.find_lr import find_lr as run

    settings = options.train_settings({"batch_size": batch_size, **given})
    with Bars(quiet=as_json) as bars:
        found = run(
            dataset, lr_steps=lr_steps, low=low, high=high, which=which, smoothing=smoothing,  # type: ignore[arg-type]
            trial_steps=trial_steps, progress=lambda done, total: bars("steps", done, total), **settings,
        )  # fmt: skip
    if plot is not None:
        found.plot(plot)
    if as_json:
        typer.echo(json.dumps({"dataset": str(dataset), **found.to_dict()}))
    else:
        _show(dataset, found, plot)


def _with_options_of_train() -> Any:
    """The command, with those options of ``stoker train`` that change a step."""
    shared = [each for each in _parameters(train) if each.name not in _WITHOUT]
    own = [each for each in _parameters(find_lr) if each.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared)]

    def command(**given: Any) -> None:
        find_lr(**given)

    # What typer looks at.
    command.__doc__ = find_lr.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameters(function: Any) -> list[inspect.Parameter]:
    """With annotations that are no text any more."""
    hints = get_type_hints(function, include_extras=True)
    return [each.replace(annotation=hints[name]) for name, each in inspect.signature(function).parameters.items()]


def _show(dataset: Path, found: Finding, plot: Path | None) -> None:
    from rich.console import Console

    from stoker.base.units import plural

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    base = found.rates(1.0)
    line(
        f"{dataset}: {len(found.losses)} steps of {found.batch_size:,}, factors {found.factors[0]:g} to "
        f"{found.factors[-1]:.3g} on {', '.join(f'{name} {value:g}' for name, value in base.items())}"
        + (", ended where the loss left all bounds" if found.diverged else "")
    )
    if len(found.smoothed) > 1:
        line(curve(found))
    if not found.candidates:
        if found.diverged:
            line("the loss left all bounds before it fell: lower --low and --high")
        else:
            line("the loss did not fall: lower --low, raise --high, or give more --lr-steps")
    if found.trials:
        rows = plural(found.held_out, "row")
        line(f"log loss on {rows} that trials of {plural(found.trial_steps, 'step')} at constant rates had not seen:")
    for trial in found.trials:
        change = "" if trial.rule == "settings" else f" ({trial.change:+.4f} ± {trial.error:.4f})"
        line(f"{trial.rule:>12}: {_options(found.rates(trial.factor))}  {trial.loss:.4f}{change}")
    if found.suggestions:
        line(f"   suggested: {_options(next(iter(found.suggestions.values())))}")
    elif found.trials:
        line("   suggested: the rates of the settings; no other did better")
    for text in found.warnings:
        console.print(f"note: {text}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    if plot is not None:
        line(f"wrote {plot}")


def _options(rates: dict[str, float]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value:.2g}" for name, value in rates.items())


def curve(found: Finding) -> str:
    """The smoothed loss by factor, in characters; columns of the suggestions are marked below."""
    steps = len(found.smoothed)
    width = min(_WIDTH, steps)
    columns = [found.smoothed[min(steps - 1, column * steps // width)] for column in range(width)]
    # What lies above where it began is cut off: the end of the curve would squeeze its bend.
    low, high = min(columns), max(columns[: max(1, width // 3)])
    span = (high - low) or 1.0
    rows = [[" "] * width for _ in range(_HEIGHT)]
    for column, value in enumerate(columns):
        level = round((min(value, high) - low) / span * (_HEIGHT - 1))
        rows[_HEIGHT - 1 - level][column] = "•" if value <= high else "˙"
    lines = [f"{high:8.4f} " + "".join(rows[0])]
    lines += [" " * 9 + "".join(row) for row in rows[1:-1]] + [f"{low:8.4f} " + "".join(rows[-1])]
    marks = [" "] * width
    for at, mark in ((found.steepest, "s"), (found.minimum, "m")):
        if at is not None:
            marks[min(width - 1, at * width // steps)] = mark
    lines.append(" " * 9 + "".join(marks).rstrip())
    lines.append(" " * 9 + "learning rates, rising; s: steepest, m: minimum")
    return "\n".join(lines)
