"""``stoker verify``: placed and resident, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stoker.cli.bars import Bars
from stoker.cli.train import Backend, Device, HomePath, HostMemory, InFlight, Lookahead, Spill, Threads
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from stoker.training.verify import Verification

__all__ = ["DeviceMemory", "Start", "begin_at", "register"]

DeviceMemory = Annotated[
    str | None,
    typer.Option(
        help="For rows and their optimizer state, such as 4GiB. (default: the run's own)", rich_help_panel="Memory"
    ),
]
Start = Annotated[
    str | None,
    typer.Option(
        "--from", help="Step of a checkpoint, or start. (default: the newest one with so many steps before it)"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("verify")(verify)


def begin_at(text: str | None) -> int | Literal["start"] | None:
    """What ``--from`` means."""
    if text is None:
        return None
    if text == "start":
        return "start"
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError as error:
        raise ConfigError(f"--from {text!r} is neither a step nor start. Write for example --from 1000.") from error


def verify(
    run: Annotated[Path, typer.Argument(help="Run directory; it is only read.")],
    steps: Annotated[int, typer.Option(help="Steps to replay.")] = 50,
    start: Start = None,
    data: Annotated[Path | None, typer.Option(help="Dataset; default: the run's own.")] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    lookahead: Lookahead = None,
    in_flight: InFlight = None,
    spill: Spill = None,
    device: Device = None,
    backend: Backend = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a run computes the same bits as one with all its rows in fast memory.

    Replays some steps twice from the same checkpoint, with rows that come and go and with all of them resident, and
    compares every row that a step touches with its optimizer state, the loss and the dense part, and at the end all
    rows. A run that had all rows in fast memory is placed with a tenth of them. Exits with 1 at a difference.

    \b
    stoker verify runs/a
    stoker verify runs/a --steps 200 --from start
    stoker verify runs/a --device-memory 256MiB --host-memory 1GiB --home /fast/disk
    """
    given = dict(locals())
    names = (
        "device_memory", "host_memory", "home_path", "lookahead", "in_flight", "spill", "device", "backend", "threads",
    )  # fmt: skip
    settings = {name: given[name] for name in names if given[name] is not None}
    begin = begin_at(start)

    from stoker.training.verify import verify as run_verify

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

    from stoker.units import format_count

    console = Console()

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    origin = "from its start" if found.checkpoint is None else f"from {found.checkpoint.name}"
    line(f"{found.run}: {found.steps:,} steps {origin}, {found.placement}, against all rows resident")
    line(
        f"compared: the loss and the dense part after every step, {found.touched_rows:,} touched rows before and after "
        f"their step, {found.all_rows:,} rows at the end; {format_count(found.values)} values in {found.seconds:.1f} s"
    )
    if found.difference is None:
        line("identical", "bold green")
    else:
        line(f"different {found.difference}", "bold red")
