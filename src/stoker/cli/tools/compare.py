"""``stoker compare``: runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.common.options import OneObject

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.training.tools.compare import Comparison, RunFacts

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compare")(compare)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more; unfinished ones too.")],
    metric: Annotated[
        str | None, typer.Option(help="Of the curves: auc, log_loss, mrr, ... (default: what the runs choose by)")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw the curves in, as .png (needs matplotlib).")] = None,
    as_json: OneObject = False,
) -> None:
    """Show how runs differ: figures, settings, data, curves.

    The best validation figures and the test figures of every run, the settings
    in which they differ, columns that one dataset has and another has not, and
    what keeps figures from being comparable.

    \b
    stoker compare runs/a runs/b
    stoker compare runs/* --metric mrr --plot curves.png
    """
    from stoker.training.tools.compare import compare as run_comparison

    if plot is not None:
        from stoker.base.picture import check_plot

        check_plot(plot)
    found = run_comparison(*runs, metric=metric)
    if plot is not None:
        found.plot(plot)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    from rich.console import Console

    _show(Console(), found, plot)


def _show(console: Console, found: Comparison, plot: Path | None) -> None:
    _figures(console, found, "Best validation figures", "valid")
    _figures(console, found, "Test figures", "test")
    if found.settings:
        rows = {name: [_text(value) for value in values] for name, values in found.settings.items()}
        console.print(_table("Settings that differ", found.runs, rows))
    else:
        console.print("all settings are the same", highlight=False)
    for text in found.data:
        console.print(f"data: {text}", markup=False, highlight=False, soft_wrap=True)
    _curves(console, found)
    for text in found.notes:
        console.print(f"note: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if plot is not None:
        console.print(f"curves: {plot}", highlight=False, soft_wrap=True)


def _table(title: str, runs: tuple[RunFacts, ...], rows: dict[str, list[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(Text(run.name), justify="right", overflow="fold")
    for name, values in rows.items():
        table.add_row(name, *map(Text, values))
    return table


def _figures(console: Console, found: Comparison, title: str, which: str) -> None:
    """One table of metrics, a column for each run."""
    from stoker.base.units import format_count
    from stoker.cli.train import metric_names

    columns = [getattr(run, which) for run in found.runs]
    if not any(columns):
        return
    rows: dict[str, list[str]] = {}
    if which == "valid":
        steps = [("-" if run.best_step is None else f"{run.best_step:,}", run.step) for run in found.runs]
        rows["at step"] = [f"{best} of {last:,}" for best, last in steps]
    places = {int(k) for metrics in columns if (k := metrics.get("ranking_k"))}
    for name, words in metric_names(places.pop() if len(places) == 1 else "k" if places else None).items():
        values = [metrics.get(name) for metrics in columns]
        if any(value is not None for value in values):
            rows[words] = ["-" if value is None else f"{value:.4f}" for value in values]
    if len(places) > 0:
        rows["k"] = [f"{int(metrics.get('ranking_k') or 0):,}" for metrics in columns]
    rows["rows"] = [f"{int(metrics.get('rows') or 0):,}" for metrics in columns]
    if which == "valid":
        rates = [run.samples_per_second for run in found.runs]
        rows["samples/s in training"] = ["-" if rate is None else format_count(rate) for rate in rates]
    console.print(_table(title, found.runs, rows))


def _curves(console: Console, found: Comparison) -> None:
    from stoker.training.tools.compare import MARKS, curves, text_plot

    points = curves(found)
    if not points:
        console.print("no run has validation figures to draw a curve of", highlight=False)
        return
    if max(map(len, points.values())) < 2:
        console.print(
            f"{found.metric}: at most one evaluation of each, so no curve; --eval-every or more --epochs make one",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return
    marks = {run.name: MARKS[number % len(MARKS)] for number, run in enumerate(found.runs)}
    legend = "   ".join(f"{marks[name]} {name}" for name in points)
    width = max(20, min(72, console.width - 12))
    console.print(f"{found.metric} on the validation rows:   {legend}", markup=False, highlight=False, soft_wrap=True)
    console.print(text_plot(points, marks, width=width), markup=False, highlight=False, soft_wrap=True)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return json.dumps(value) if isinstance(value, list | dict) else f"{value}"
