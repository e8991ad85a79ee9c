"""``stoker prepare``: raw click logs in, a dataset directory out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base import remote
from stoker.base.bars import Bars
from stoker.base.errors import ConfigError
from stoker.base.units import format_count, format_duration, format_size, plural, quoted
from stoker.cli.common.wording import with_options

if TYPE_CHECKING:
    from stoker.prep.prepare import PrepareReport, Progress
    from stoker.prep.recipe import Recipe
    from stoker.prep.schema import Schema

__all__ = ["register"]

_HELP = """Prepare raw click logs for training.

RECIPE is the name of a known log (stoker prepare --list shows them) or
your own schema file (.toml, .yaml). FILES are delimited text, Parquet or
JSON lines; text may be .gz or .zst. Quoted patterns are expanded in the
order of their numbers, day_2 before day_10; other files are read as given.

An interrupted run goes on where it stopped when the same command is given
again; after a finished one there is nothing to do. Bad lines are set aside in
OUT/quarantine.jsonl with file, line and reason, and summed up at the end.
More than 1 % of them stop the run, or the share that --max-bad names. A label
that is a number but neither 0 nor 1 stops the run, unless --max-bad says what
share of lines may be damaged. A compressed file that breaks off is named in
the summary; with --max-bad or --strict it stops the run.

FILES, --like and --out may be URLs, such as s3://, gs://, https:// or hf://
(docs/remote.md). Inputs are downloaded to a cache first; a dataset is made
there and then uploaded.

With --like, rows may lack a label: a field that is empty, or the whole column,
in all files. They are for stoker predict.

--split takes random:0.8,0.1 (shares of train and valid; the rest is test),
time:0.8,0.1, hash:COLUMN:0.8,0.1, last_touch:COLUMN:0.8,0.1,
leave_last_out:COLUMN, runs:7 and column:COLUMN (which holds train, valid, ...).

\b
stoker prepare criteo 'day_*.gz' --out data/criteo
stoker prepare criteo train.txt --preset nvt --max-bad 0.1% --out data/c
stoker prepare shop.toml 'logs/*.parquet' --out data/shop
stoker prepare globo clicks.parquet --reorder --out data/globo
stoker prepare shop.toml log.csv --feature 'mean_target by=city,item' --out data/rates
stoker prepare shop.toml log.csv --split time:0.8,0.1 --keep user --out data/shop
stoker prepare --like data/shop new.csv --out data/new
"""
_STAGES = {
    "read": "reading", "derive": "deriving rows", "features": "working out features", "encode": "encoding rows",
    "fit": "counting", "write": "writing",
    "look": "reading again", "order": "ordering ids", "replace": "replacing ids",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="prepare", help=_HELP, no_args_is_help=True)(prepare)


def prepare(
    recipe: Annotated[str | None, typer.Argument(help="Recipe name, or a schema file.")] = None,
    files: Annotated[list[str] | None, typer.Argument(help="Raw files or patterns.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory to make.")] = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", help="A prepared dataset: use its schema, vocabularies and fitted features; no RECIPE."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the recipe; the first one if left out.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad line.")] = False,
    max_bad: Annotated[
        str | None, typer.Option(help="Share of bad lines allowed, e.g. 0.1%. (default: 1%, from 10 bad lines on)")
    ] = None,
    min_count: Annotated[
        int | None,
        typer.Option(help="Training occurrences a value needs to get an id, for all columns.", min=1),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option("--feature", help="One feature more, with columns: 'mean_target by=city,item'. Repeatable."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split rule instead of the recipe's: random:0.8,0.1, time:0.9, hash:user:0.8,0.1, ..."),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="Raw column that stoker predict writes, too. Repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset that is there.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = True,
    reorder: Annotated[
        bool, typer.Option("--reorder", help="Make ids that are used together neighbours, as stoker reorder does.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="Threads; one per core if left out.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes and their presets.")] = False,
) -> None:
    """The command; its help is ``_HELP``."""
    if list_recipes:
        _list(as_json)
        return
    if like is not None and recipe is not None:
        if Path(recipe).suffix.lower() in (".toml", ".yaml", ".yml") or (not Path(recipe).exists() and _known(recipe)):
            raise ConfigError(
                f"--like takes schema and recipe from {like}. Leave {recipe} out, name the new files only."
            )
        files, recipe = [recipe, *(files or [])], None
    if (recipe is None and like is None) or not files:
        raise ConfigError("prepare needs a recipe and files: stoker prepare RECIPE FILES... --out DIR")
    if out is None:
        raise ConfigError("prepare needs a directory to make: add --out DIR")
    from stoker.prep.inputs import files_of
    from stoker.prep.prepare import run_prepare

    if like is not None and min_count is not None:
        raise ConfigError("--min-count shapes vocabularies, and --like takes those of the dataset. Leave it out.")
    if like is not None and feature:
        raise ConfigError(
            "--feature adds a column, and --like takes those of the dataset. Leave it out, or prepare both anew."
        )
    chosen, preset = (None, preset) if recipe is None else _changed(recipe, preset, min_count, feature or [])
    try:
        with (
            files_of(files) as inputs,
            remote.published(out, overwrite=overwrite) as folder,
            Bars(quiet=as_json, keep=True) as bars,
        ):

            def show(progress: Progress) -> None:
                bars(_STAGES[progress.stage], progress.done, progress.total, progress.unit)

            report = run_prepare(
                chosen, inputs, out=folder, like=like, preset=preset, strict=strict, max_bad=max_bad,
                overwrite=overwrite, resume=resume, reorder=reorder, split=split, keep=keep or (), threads=threads,
                progress=show,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(with_options(str(stop), {"resume": "--resume"}, ["resume"])) from stop
    if as_json:
        typer.echo(json.dumps({**vars(report), "path": remote.url_of(out) or str(report.path)}))
    else:
        _show(report, remote.url_of(out) or str(report.path))


def _known(recipe: str) -> bool:
    from stoker.prep import recipes

    return recipe in recipes.names()


def _changed(
    recipe: str, preset: str | None, min_count: int | None, features: list[str]
) -> tuple[str | Recipe | Schema | None, str | None]:
    """The recipe with another minimum count in every column that has a vocabulary, and with more features."""
    if min_count is None and not features:
        return recipe, preset
    from dataclasses import replace

    from stoker.prep.prepare import load_recipe

    found, schema = load_recipe(recipe, preset)
    for text in features:
        schema = schema.with_feature(text)

    def changed(columns: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(c if c.hash_buckets or not min_count else replace(c, min_count=min_count) for c in columns)

    schema = replace(schema, categorical=changed(schema.categorical), sequence=changed(schema.sequence))
    return replace(found, presets={found.preset_name: lambda: schema}, preset=found.preset_name), None


def _show(report: PrepareReport, path: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    splits = Table(title=f"Dataset {path}", title_justify="left")
    splits.add_column("split")
    splits.add_column("rows", justify="right")
    splits.add_column("positive", justify="right")
    splits.add_column("share", justify="right")
    for name, rows in report.rows.items():
        positive = report.positives[name]
        share = f"{positive / report.labelled[name]:.2%}" if report.labelled[name] else "-"
        splits.add_row(name, f"{rows:,}", f"{positive:,}", share)
    console.print(splits)
    if report.tables:
        tables = Table(title="Tables", title_justify="left")
        tables.add_column("table")
        tables.add_column("rows", justify="right")
        tables.add_column("held-out ids unknown", justify="right")
        for name, entry in report.tables.items():
            tables.add_row(name, f"{int(entry['rows']):,}", f"{entry['unknown']:.2%}")
        console.print(tables)
    rows = sum(report.rows.values())
    rate = format_count(rows / report.seconds) if report.seconds else "-"
    parts = [
        f"{format_count(rows)} {'row' if rows == 1 else 'rows'} in {format_duration(report.seconds)} ({rate} rows/s)",
        f"peak memory {format_size(report.peak_memory)}",
    ]
    if report.reused:
        parts.append(f"{plural(report.reused, 'step')} kept from the interrupted run")
    if report.dropped:
        parts.append(f"{plural(report.dropped, 'row')} left out by split, sampling or oov rule")
    if report.already:
        parts = ["already prepared from the same files and settings: nothing was done. --overwrite prepares it anew"]
    console.print("; ".join(parts))
    if report.bad:
        share, place = f"{report.bad / max(report.lines, 1):.3%}", f"{path}/quarantine.jsonl"
        told = [(f"{plural(report.bad, 'bad line')} ({share}) set aside in {place}", "bold yellow")]
        told += [(f"  {count:,} x {reason}", "yellow") for reason, count in report.reasons.items()]
        for text, style in [*told, *((f"  {remedy}", "cyan") for remedy in report.remedies)]:
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print("no bad lines")
    if absent := sum(report.rows.values()) - sum(report.labelled.values()):
        hint = f"{plural(absent, 'row')} without label: stoker predict RUN --data {quoted(path)} --out scores.parquet"
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
    if groups := report.groups:
        console.print(f"{plural(groups['count'], 'group')} by column {groups['column']}", highlight=False)
    for text in report.warnings:
        console.print(f"warning: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def _list(as_json: bool) -> None:
    from stoker.prep import recipes

    found = [recipes.get(name) for name in recipes.names()]
    if as_json:
        listed = [{"name": r.name, "description": r.description, "presets": list(r.presets)} for r in found]
        typer.echo(json.dumps(listed))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Recipes", title_justify="left")
    for heading in ("recipe", "presets", "what it reads"):
        table.add_column(heading)
    for recipe in found:
        table.add_row(recipe.name, ", ".join(recipe.presets), recipe.description)
    Console().print(table)
