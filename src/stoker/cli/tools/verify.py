"""``stoker verify``: placed and resident, the same bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.base.bars import Bars
from stoker.cli.common import options

if TYPE_CHECKING:
    from stoker.training.tools.verify import Verification

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("verify")(verify)


def verify(
    run: options.RunArgument,
    steps: Annotated[int, typer.Option(help="Steps to replay.")] = 50,
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
    """Check that a run computes the same bits as one with all its rows in fast memory.

    Replays some steps twice from the same checkpoint, with rows that come and
    go and with all of them resident, and compares every row that a step
    touches with its optimizer state, the loss and the dense part, and at the
    end all rows. A run that had all rows in fast memory is placed with a
    tenth of their memory. Exits with 1 at a difference.

    \b
    stoker verify runs/a
    stoker verify runs/a --steps 200 --from start
    stoker verify runs/a --device-memory 256MiB --host-memory 1GiB --home /fast
    """
    settings = options.rerun_settings(locals())
    begin = options.begin_at(start)
    options.import_model(imported)

    from stoker.training.tools.verify import verify as run_verify

    with Bars(quiet=as_json) as bars:
        found = run_verify(run, steps=steps, begin=begin, data=data, progress=bars, **settings)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _show(found)
    if not found.identical:
        raise typer.Exit(1)


def _show(found: Verification) -> None:
    from rich.console import Console
    from rich.text import Text

    from stoker.base.units import format_count, plural

    console = Console()

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    origin = "from its start" if found.checkpoint is None else f"from {found.checkpoint.name}"
    line(f"{found.run}: {plural(found.steps, 'step')} {origin}, {found.placement}, against all rows resident")
    line(
        f"compared: the loss and the dense part after every step, {found.touched_rows:,} touched rows before and after "
        f"their step, {found.all_rows:,} rows at the end; {format_count(found.values)} values in {found.seconds:.1f} s"
    )
    if found.difference is None:
        line("identical", "bold green")
    else:
        line(f"different {found.difference}", "bold red")
