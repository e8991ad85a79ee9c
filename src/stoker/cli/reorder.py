"""``stoker reorder``: ids that are used together become neighbours."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.bars import Bars
from stoker.cli.common.options import DataArgument, OneObject, option

__all__ = ["register"]

_ORDER, _COST, _RESULT = "Order", "Cost", "Results"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("reorder")(reorder)


def reorder(
    dataset: DataArgument,
    out: Annotated[Path, option(_RESULT, "Directory to make.")],
    method: Annotated[
        str | None, option(_ORDER, "bisect, communities (needs networkit) or first-use. (default: bisect)")
    ] = None,
    hot: Annotated[
        float | None,
        option(
            _ORDER,
            "Ids that stay, most frequent first: the share of accesses they take, or, from 1 on, how many. "
            "(default: 0.01)",
        ),
    ] = None,
    spread: Annotated[
        float | None,
        option(
            _ORDER,
            "Other ids trade places where their counts differ by less than this factor; inf: all of them. (default: 2)",
        ),
    ] = None,
    window: Annotated[
        int | None, option(_ORDER, "Neighbouring training rows that are looked at as one batch. (default: 4096)")
    ] = None,
    tables: Annotated[
        list[str] | None,
        option(_ORDER, "To reorder; may be repeated. (default: all with a vocabulary and 1,000 rows)", "--table"),
    ] = None,
    edges: Annotated[
        int | None, option(_COST, "Pairs of an id and a window, or of two ids, per table at most. (default: 8000000)")
    ] = None,
    seed: Annotated[int | None, option(_COST, "Of what is drawn where there are more. (default: 0)")] = None,
    overwrite: Annotated[bool, option(_RESULT, "Replace a dataset that is there.", "--overwrite")] = False,
    as_json: OneObject = False,
) -> None:
    """Number ids anew, so that those used together are neighbours.

    Batches in the order of the log then touch fewer blocks of neighbouring
    rows: less work in tensor-train tables, fewer pages of a file. Shuffled
    batches hardly change. Examples, values and vocabularies stay; models have
    to be trained on the new dataset.

    \b
    stoker reorder data/criteo --out data/criteo-ordered
    stoker reorder data/criteo --table C3 --window 8192 --out data/criteo-ordered
    stoker reorder data/criteo --method communities --spread inf --out data/el-rec
    """
    asked: dict[str, Any] = {
        "method": method, "hot": hot, "spread": spread, "window": window, "edges": edges, "seed": seed,
    }  # fmt: skip
    from stoker.base.units import format_duration, quoted
    from stoker.rewrite.id_order import Reordering
    from stoker.rewrite.reorder import BLOCK_IDS, run_reorder

    how = Reordering(**{name: value for name, value in asked.items() if value is not None})
    with Bars(quiet=as_json) as bars:
        report = run_reorder(dataset, out, how=how, tables=tables, overwrite=overwrite, progress=bars)
    if as_json:
        told = {name: asdict(one) for name, one in report.tables.items()}
        typer.echo(json.dumps({**vars(report), "path": str(report.path), "tables": told}))
        return
    what = "already reordered" if report.reused else f"reordered in {format_duration(report.seconds)}"
    typer.echo(f"{out}: {what}")
    typer.echo(f"blocks of {BLOCK_IDS} ids that {report.window:,} rows touch, by count and now:")
    for name, one in report.tables.items():
        log = _change(one.log_before, one.log_after)
        shuffled = _change(one.shuffled_before, one.shuffled_after)
        typer.echo(f"  {name} ({one.rows:,} rows): in order of the log {log}; shuffled {shuffled}")
    typer.echo(f"next: stoker train {quoted(out)} --out RUN")


def _change(before: float, after: float) -> str:
    return f"{before:,.1f} -> {after:,.1f} ({(after / before - 1 if before else 0):+.1%})"
