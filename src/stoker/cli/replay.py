"""``stoker replay``: what cache strategies would do on a dataset's ids, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.base.bars import Bars
from stoker.base.errors import ConfigError
from stoker.base.units import format_count, format_size, parse_count
from stoker.cli.common.options import ROW_OPTIMIZERS, DataArgument, OneObject, option

if TYPE_CHECKING:
    from stoker.placement.replay import Replay

__all__ = ["register"]

_SLOTS, _TRACE = "Fast memory (one of three)", "Batches"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("replay")(replay)


def replay(
    dataset: DataArgument,
    fraction: Annotated[str | None, option(_SLOTS, "Share of all rows, 0.1 or 10%. (default: 10%)")] = None,
    slots: Annotated[str | None, option(_SLOTS, "Rows, such as 50k.")] = None,
    device_memory: Annotated[str | None, option(_SLOTS, "Bytes for rows and their state, such as 1GiB.")] = None,
    lookahead: Annotated[str, option(None, "Batches whose ids are known ahead, several windows.")] = "1,4,16,64,256",
    in_flight: Annotated[int, option(None, "Batches whose rows may not leave, the current one included.")] = 1,
    batch_size: Annotated[int, option(_TRACE, "Examples.")] = 2048,
    steps: Annotated[int | None, option(_TRACE, "Batches in all. (default: one epoch)")] = None,
    order: Annotated[str, option(_TRACE, "shuffled, as in training, or file.")] = "shuffled",
    seed: Annotated[int, option(_TRACE, "Of the shuffled order.")] = 0,
    dim: Annotated[int, option("Rows", "Columns of every table.", "--dim", "--embedding-dim")] = 16,
    dtype: Annotated[str, option("Rows", "Of the tables: float32 or bfloat16.")] = "float32",
    optimizer: Annotated[str, option("Rows", f"Its state travels with a row: {ROW_OPTIMIZERS}.")] = "rowwise_adagrad",
    as_json: OneObject = False,
) -> None:
    """Replay the ids of a dataset through cache strategies, without training.

    Shows how often a row that a batch needs already lies in fast memory, and
    what has to travel: for least recently used (lru), least frequently used
    (lfu), Stoker's lookahead with several windows, the most used rows kept
    for ever (hot-cold), no cache at all (host-pipelined), and the optimum
    that knows all batches (belady), which is what stoker train --foresight
    does.

    \b
    stoker replay data/criteo
    stoker replay data/criteo --device-memory 1GiB --dim 64 --optimizer adam
    stoker replay data/globo --fraction 5% --order file --lookahead 16,64
    stoker replay data/criteo --slots 200k --batch-size 8192 --steps 500 --json
    """
    if order not in ("shuffled", "file"):
        raise ConfigError(f"--order {order!r} is unknown. Choose shuffled or file.")
    from stoker.placement.replay import replay as run_replay

    with Bars(quiet=as_json) as bars:
        found = run_replay(
            dataset,
            slots=None if slots is None else parse_count(slots),
            fraction=fraction,
            device_memory=device_memory,
            strategies=[
                "lru",
                "lfu",
                *(f"lookahead-{w}" for w in _windows(lookahead)),
                "hot-cold",
                "host-pipelined",
                "belady",
            ],
            in_flight=in_flight,
            batch_size=batch_size,
            steps=steps,
            seed=seed if order == "shuffled" else None,
            dim=dim,
            dtype=dtype,
            optimizer=optimizer,
            progress=bars,
        )
    if as_json:
        typer.echo(json.dumps({"dataset": str(dataset), "order": order, **found.to_dict()}))
    else:
        _show(dataset, order, found)


def _windows(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--lookahead {text!r} is not a list of numbers. Write for example 16,64.") from error


def _show(dataset: Path, order: str, found: Replay) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(
        f"{dataset}: {found.steps:,} batches of {found.batch_size:,} ({order}), {format_count(found.lookups)} lookups "
        f"of {format_count(found.rows_used)} rows; {found.rows_needed / found.steps:,.0f} distinct rows a batch"
    )
    line(
        f"fast memory: {found.slots:,} slots of {found.row_bytes} bytes, {format_size(found.slots * found.row_bytes)}, "
        f"for {found.num_rows:,} rows ({found.slots / found.num_rows:.1%}); the least that works: "
        f"{found.least_slots:,} slots"
    )
    table = Table()
    table.add_column("strategy", no_wrap=True)
    for column in ("hit rate", "of lookups", "misses", "above belady", "in a step", "out a step"):
        table.add_column(column, justify="right")
    for figures in found.strategies:
        table.add_row(
            figures.strategy,
            f"{figures.hit_rate:.2%}",
            f"{figures.lookup_hit_rate:.2%}",
            f"{figures.misses:,}",
            "-" if figures.above_belady is None else f"{figures.above_belady:+.1%}",
            format_size(figures.mib_in_per_step * 2**20),
            format_size(figures.mib_out_per_step * 2**20),
        )
    console.print(table)
    first = found.strategies[0].compulsory
    line(
        "Hit rate: the share of each batch's distinct rows that already lay in a slot. Every miss fetches a row and "
        f"its state; {first:,} are first uses, which no strategy avoids. belady knows all batches, as training with "
        "--foresight does: none misses less."
    )
