"""``stoker init``: a first schema for a log that nobody has described yet."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.base.errors import ConfigError
from stoker.base.files import refuse_url

if TYPE_CHECKING:
    from stoker.prep.draft import Draft

__all__ = ["register"]


def _init(
    log: Annotated[list[str], typer.Argument(help="Raw files or patterns of your log.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Schema file to write, .toml.")] = Path("schema.toml"),
    rows: Annotated[int, typer.Option(help="Rows to look at, in all files together.", min=1)] = 100_000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Draft a schema for a log of your own.

    Looks at the first rows of delimited text, JSON lines (text may be .gz or
    .zst) or Parquet, and writes a schema with comments: the format, the type
    of each column, the label, the time, a split. What is uncertain has a
    comment that begins with "unsure:". Read the file before you prepare.

    \b
    stoker init log.csv
    stoker init 'logs/*.parquet' --out shop.toml --rows 1000000
    """
    refuse_url(out, "a schema")
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out} does not end in .toml, and the draft is written in TOML. Use {out.stem}.toml.")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory. Name a file, for example {out / 'schema.toml'}.")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already. Add --overwrite to replace it, or choose another --out.")
    from stoker.base.files import atomic_file
    from stoker.prep.draft import draft_log

    names = " ".join(map(shlex.quote, log))
    command = f"stoker prepare {shlex.quote(str(out))} {names} --out data"
    draft = draft_log(log, rows=rows, command=command)
    with atomic_file(out) as file:
        file.write(draft.text.encode())
    _show(draft, out, command)


def _show(draft: Draft, out: Path, command: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from stoker.base.units import plural

    table = Table(title=f"{plural(draft.rows, 'row')} looked at", title_justify="left")
    for heading, side in (("column", "left"), ("kind", "left"), ("values", "right"), ("missing", "right")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    table.add_column("example", overflow="ellipsis", no_wrap=True)
    for column in draft.columns:
        missing = f"{column.missing:.1%}" if column.missing else "-"
        table.add_row(Text(column.name), draft.role(column), f"{column.distinct:,}", missing, Text(column.example))
    Console().print(table)
    doubts = f" {plural(draft.unsure, 'comment')} in it begin with 'unsure:'." if draft.unsure else ""
    typer.echo(f"wrote {out}.{doubts}")
    if draft.label is None:
        typer.echo(f"no column looks like a label: fill in [label] of {out}, then:")
    elif not draft.features:
        typer.echo(f"no column looks like a feature: add one to {out}, then:")
    else:
        typer.echo("read it, then:")
    typer.echo(f"  {command}")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("init", no_args_is_help=True)(_init)
