"""``stoker trace``: where the time of a run's steps goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.base.bars import Bars
from stoker.cli.common import options

if TYPE_CHECKING:
    from stoker.training.tools.trace import Trace

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("trace")(trace)


def trace(
    run: options.RunArgument,
    steps: Annotated[int, typer.Option(help="Steps to record.")] = 30,
    out: Annotated[Path, typer.Option(help="File for the timeline; it is replaced if there.")] = Path("trace.json"),
    start: options.Start = None,
    data: options.Data = None,
    imported: options.Import = None,
    device_memory: options.Budget = None,
    host_memory: options.HostMemory = None,
    home_path: options.HomePath = None,
    strategy: options.Strategy = None,
    lookahead: options.Lookahead = None,
    foresight: options.Foresight = None,
    in_flight: options.InFlight = None,
    spill: options.Spill = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    as_json: options.OneObject = False,
) -> None:
    """Record what every thread does during some steps of a run.

    Replays steps with the run's placement, prints the time of each stage and
    how long training waited for it, and writes a timeline that
    https://ui.perfetto.dev and chrome://tracing open: trace.json in the
    directory you are in, unless --out names another file.

    \b
    stoker trace runs/a
    stoker trace runs/a --steps 100 --device-memory 256MiB --out runs-a.json
    """
    settings = options.rerun_settings(locals())
    begin = options.begin_at(start)
    options.import_model(imported)
    replaced = out.exists()

    from stoker.training.tools.trace import trace as run_trace

    with Bars(quiet=as_json) as bars:
        found = run_trace(run, steps=steps, out=out, begin=begin, data=data, progress=bars, **settings)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _show(found, replaced)


def _show(found: Trace, replaced: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from stoker.base.units import format_count, format_duration
    from stoker.training.placing import STAGES

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    rate = format_count(found.examples / found.seconds)
    line(
        f"{found.run}: steps {found.begin:,} to {found.begin + found.steps - 1:,}, "
        f"{format_duration(found.seconds / found.steps)} each, {rate} samples/s; training waited "
        f"{found.stall_seconds / found.seconds:.1%} of the time"
    )
    table = Table()
    table.add_column("stage", no_wrap=True)
    for column in ("seconds", "share", "training waited"):
        table.add_column(column, justify="right")
    table.add_column("what")
    for stage in found.stages:
        stalled = f"{stage.stall_seconds:.3f} s" if stage.stall_seconds else "-"
        table.add_row(stage.name, f"{stage.seconds:.3f}", f"{stage.share:.1%}", stalled, STAGES.get(stage.name, ""))
    console.print(table)
    beside = [name for name in found.threads if name != "MainThread"]
    if beside:
        line(f"Work in {', '.join(beside)} goes on beside training, so the shares may add up to more than 100 %.")
    before = ", in place of the one that was there" if replaced else ""
    line(f"timeline: {found.out}{before} (https://ui.perfetto.dev opens it)")
