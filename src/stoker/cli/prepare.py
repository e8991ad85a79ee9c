"""Commands that make datasets: ``stoker init``, ``schema``, ``prepare`` and ``synthetic``."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base import remote
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import atomic_file, check_target
from stoker.base.progress import Bars
from stoker.base.settings import Settings, setting
from stoker.base.units import format_count, format_duration, format_size, plural, quoted
from stoker.cli.options import printed, say, show_rows, show_table, takes, with_options
from stoker.dataset.manifest import MANIFEST
from stoker.prep.settings import DRAFT_ROWS, LOG_SUFFIXES, PRESET, PrepareSettings
from stoker.synthetic.settings import TextSettings

if TYPE_CHECKING:
    from stoker.prep.draft import Draft
    from stoker.prep.prepare import PrepareReport
    from stoker.prep.recipe import Recipe
    from stoker.prep.schema import Schema
    from stoker.prep.stages.task import StageProgress


def init(
    log: Annotated[list[str], typer.Argument(help="Raw files or patterns of your log.")],
    out: Path = typer.Option(Path("schema.toml"), "--out", "-o", help="Schema file to write, .toml."),
    rows: int = typer.Option(DRAFT_ROWS, help="Rows to read, in all files together.", min=1),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing file."),
) -> None:
    """Draft a schema for your own log.

    Reads the first rows of delimited text, JSON lines or Parquet (text may be
    .gz or .zst), and writes a schema: the format, the type of each column, the
    label, the time, a split. A comment with "unsure:" marks what may be wrong.
    Read the file before you prepare.

    \b
    stoker init log.csv
    stoker init 'logs/*.parquet' --out shop.toml --rows 1000000
    """
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out} does not end in .toml, and the draft is written in TOML. Use {out.stem}.toml.")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory. Name a file, for example {out / 'schema.toml'}.")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already. Add --overwrite to replace it, or choose another --out.")
    check_target(out)
    from stoker.prep.draft import draft_log

    names = " ".join(map(quoted, log))
    command = f"stoker prepare {quoted(out)} {names} --out data"
    draft = draft_log(log, rows=rows, command=command)
    with atomic_file(out) as file:
        file.write(draft.text.encode())
    _show_draft(draft, out, command)


def _show_columns(draft: Draft) -> None:
    from rich.text import Text

    rows = []
    for column in draft.columns:
        missing = f"{column.missing:.1%}" if column.missing else "-"
        example = Text(column.example, overflow="ellipsis", no_wrap=True)
        rows.append([column.name, draft.role(column), f"{column.distinct:,}", missing, example])
    headings = ["column", "kind", "values", "missing", "example"]
    show_table(f"{plural(draft.rows, 'row')} read", headings, rows, left=(0, 1, 4), whole=range(4))


def _show_draft(draft: Draft, out: Path, command: str) -> None:
    _show_columns(draft)
    for note in draft.notes:
        if not note.startswith("left out"):
            say(f"  {note}", "yellow")
    doubts = f" It has {plural(draft.unsure, 'comment')} marked 'unsure:'." if draft.unsure else ""
    say(f"wrote {out}.{doubts}")
    if draft.label is None:
        say(f"no column looks like a label: fill in [label] in {out}, or [negatives] if all rows are positive, then:")
    elif not draft.features:
        say(f"no column looks like a feature: add one to {out}, then:")
    else:
        say("read it, then:")
    say(f"  {command}")


def schema(
    recipe: Annotated[str, typer.Argument(help="Recipe name; stoker prepare --list shows them.")],
    preset: str | None = typer.Option(None, help=PRESET),
) -> None:
    """Print the schema of a recipe as TOML.

    Save it, change it, and prepare with the file in place of the recipe. Keys
    that are not in the file have their defaults. If the recipe also derives
    rows in Python, comments at the top say so.

    \b
    stoker schema criteo > my_criteo.toml
    stoker schema criteo --preset nvt
    stoker prepare my_criteo.toml 'day_*.gz' --out data/criteo
    """
    from stoker.prep import recipes
    from stoker.prep.draft import schema_toml

    found = recipes.get(recipe, preset)
    lines = [f"# Schema of the recipe {found.name}, preset {found.preset_name}. Left out: keys with their defaults."]
    if found.derive is not None:
        lines += [
            "# The recipe derives its rows from the raw files in Python, which a schema file cannot express.",
            "# This file describes the derived rows. To prepare the raw files, use the recipe itself:",
            f"#   {found.example or found.command}",
        ]
    print("\n".join(lines) + "\n\n" + schema_toml(found.schema()), end="")


@dataclass(frozen=True, kw_only=True)
class _Changes(Settings):
    """Changes of a schema."""

    min_count: int | None = setting(None, "Training occurrences that a value needs for an id, in all columns.", least=1)
    feature: Sequence[str] = setting((), "Add a feature, such as 'mean_target by=city,item'. Repeatable.")


@takes(PrepareSettings, _Changes)
def prepare(
    recipe: Annotated[str | None, typer.Argument(help="Recipe name, schema file, or auto.")] = None,
    files: Annotated[list[str] | None, typer.Argument(help="Raw files or patterns.")] = None,
    out: Path | None = typer.Option(None, "--out", "-o", help="New dataset directory."),
    like: Path | None = typer.Option(
        None, "--like", help="Dataset whose schema, vocabularies and fitted features to use, without a RECIPE."
    ),
    *,
    settings: dict[str, Any],
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing dataset."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
    list_recipes: bool = typer.Option(False, "--list", help="List the recipes and their presets."),
) -> None:
    """Prepare raw click logs for training.

    RECIPE is the name of a known log (see stoker prepare --list) or your own
    schema file (.toml, .yaml). With auto, a schema is drafted as by stoker init
    and used without a change. FILES are delimited text, Parquet or JSON lines.
    Text may be .gz or .zst. A quoted pattern is expanded in the order of the
    numbers in the names: day_2 before day_10.

    To continue an interrupted run, give the same command again.

    Bad lines go to OUT/quarantine.jsonl with file, line and reason. The run stops
    if they are more than 1 %, or the share in --max-bad. A label other than 0 and
    1 stops the run, unless --max-bad is given. The summary names a truncated
    compressed file. With --max-bad or --strict such a file stops the run.

    FILES, --like and --out may be URLs: s3://, gs://, https://, hf://. Inputs are
    downloaded to a cache first. See docs/remote.md.

    With --like, the label may be empty or absent, for stoker predict. Window
    features continue from that dataset, so the new rows must come later. With
    --history ignore they see the new rows only.

    --split takes random:0.8,0.1 (shares of train and valid; the rest is test),
    time:0.8,0.1, hash:COLUMN:0.8,0.1, last_touch:COLUMN:0.8,0.1,
    leave_last_out:COLUMN, runs:7 and column:COLUMN (which contains train, valid
    or test).

    \b
    stoker prepare auto clicks.csv --out data
    stoker prepare criteo 'day_*.gz' --out data/criteo
    stoker prepare criteo train.txt --preset nvt --max-bad 0.1% --out data/c
    stoker prepare shop.toml 'logs/*.parquet' --out data/shop
    stoker prepare globo clicks.parquet --reorder --out data/globo
    stoker prepare shop.toml log.csv --feature 'mean_target by=city' --out data/b
    stoker prepare shop.toml log.csv --split time:0.8 --keep user --out data/c
    stoker prepare --like data/shop new.csv --out data/new
    """
    if list_recipes:
        _list_recipes(as_json)
        return
    if like is not None and recipe is not None:
        from stoker.prep import recipes

        named = not Path(recipe).exists() and recipe in recipes.names()
        if named or Path(recipe).suffix.lower() in (".toml", ".yaml", ".yml"):
            raise ConfigError(f"--like takes schema and recipe from {like}. Leave {recipe} out, name new files only.")
        files, recipe = [recipe, *(files or [])], None
    if (recipe is None and like is None) or not files:
        raise ConfigError(
            "prepare needs a recipe and files (with --like only files): stoker prepare RECIPE FILES... --out DIR. For "
            "a log of your own draft a schema, stoker init LOG, and name it as the recipe; or take the draft: auto."
        )
    if out is None:
        raise ConfigError("prepare needs a directory to make: add --out DIR")
    changes = _Changes.taken_from(settings)
    if like is not None and changes.min_count is not None:
        raise ConfigError("--min-count shapes vocabularies, and --like takes those of the dataset. Leave it out.")
    if like is not None and changes.feature:
        raise ConfigError(
            "--feature adds a column, and --like takes those of the dataset. Leave it out, or prepare both anew."
        )
    chosen: Draft | str | Recipe | Schema | None = recipe
    if recipe == "auto":
        chosen = _drafted(files, quiet=as_json)
    if chosen is not None:
        chosen, settings["preset"] = _changed(chosen, settings.get("preset"), changes.min_count, changes.feature)
    report = _prepare(chosen, files, out, quiet=as_json, like=like, overwrite=overwrite, **settings)
    path = remote.url_of(out) or str(report.path)
    if not printed({**vars(report), "path": path}, as_json):
        _show_report(report, path)


def _prepare(
    chosen: Draft | str | Recipe | Schema | None, files: list[str], out: Path, *, quiet: bool, again: str = "",
    **given: Any,
) -> PrepareReport:  # fmt: skip
    """Prepare with a bar for each stage; ``again``: arguments for ``stoker prepare``, if this is another command."""
    from stoker.prep.inputs import files_of
    from stoker.prep.prepare import run_prepare
    from stoker.prep.stages.task import STAGE_WORDS

    overwrite = bool(given.get("overwrite"))
    try:
        with (
            files_of(files) as inputs,
            remote.published(out, overwrite=overwrite) as folder,
            Bars(quiet=quiet, keep=True) as bars,
        ):

            def show(progress: StageProgress) -> None:
                bars(STAGE_WORDS[progress.stage], progress.done, progress.total, progress.unit)

            return run_prepare(chosen, inputs, out=folder, progress=show, **given)
    except DataError as error:
        more = f"more with stoker prepare {again} --max-bad" if again else "more with max_bad"
        raise DataError(str(error).replace("more with max_bad", more), settings=error.settings) from error
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(with_options(str(stop), {"resume": "--resume"}, ["resume"])) from stop


def is_log(path: Path | None) -> bool:
    """Return whether a path is that of a raw log, or a pattern of raw files, and not that of a dataset."""
    if path is not None and remote.url_of(path) is not None:
        return has_magic(path.name) or path.suffix.lower() in LOG_SUFFIXES
    return path is not None and not path.is_dir() and (path.is_file() or has_magic(str(path)))


def _typed(log: Path) -> str:
    """Return the path, pattern or URL of a raw log as text; ``pathlib`` shortens URLs."""
    return remote.url_of(log) or str(log)


def prepare_log(log: Path, folder: Path, *, quiet: bool) -> Path:
    """Prepare a raw log with a drafted schema, as ``stoker prepare auto`` does, and say what was done.

    The dataset gets the name of the log: ``clicks-data`` for ``clicks.csv``. One of the same rows is taken as it is.
    """
    out = folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '', log.name.split('.')[0]) or 'log'}-data"
    files = [_typed(log)]
    draft = _drafted(files, quiet=quiet)
    try:
        report = _prepare(draft, files, out, quiet=quiet, again=f"auto {quoted(files[0])} --out {quoted(out)}")
    except DataError as error:
        if not (out / MANIFEST).exists():
            raise
        command = f"stoker prepare auto {quoted(files[0])} --out {quoted(out)} --overwrite"
        raise DataError(
            f"{out} is there, and it is not what {files[0]} makes today. To replace it: {command}. To train on it as "
            f"it is: stoker train {quoted(out)}"
        ) from error
    if not quiet:
        _show_report(report, str(out))
    return out


@contextmanager
def prepared_like(log: Path, dataset: Path, keep: Sequence[str], *, quiet: bool) -> Iterator[tuple[Path, int]]:
    """Prepare raw rows like a dataset's; yield the result, deleted at the end of the block, and its bad lines."""
    with tempfile.TemporaryDirectory(prefix="stoker-score-") as folder:
        out = Path(folder) / "data"
        again = f"--like {quoted(dataset)} {quoted(_typed(log))} --out NEW"
        report = _prepare(None, [_typed(log)], out, quiet=quiet, again=again, like=dataset, keep=keep)
        if report.bad and not quiet:
            first = json.loads((out / "quarantine.jsonl").read_text(encoding="utf-8").split("\n", 1)[0])
            say(
                f"{plural(report.bad, 'bad line')} of {_typed(log)} left out, the first: {first['file']}:"
                f"{first['line']}: {first['reason']}. The column row counts the other rows only: to find yours again, "
                "--keep a column.",
                "bold yellow",
            )
        yield out, report.bad


def _drafted(files: list[str], *, quiet: bool) -> Draft:
    from stoker.prep.draft import draft_log

    draft = draft_log(files)
    draft.schema()  # refuses a draft that lacks something
    if not quiet:
        _show_columns(draft)
        names = " ".join(map(quoted, files))
        say(f"label: {draft.positive}. To change what a column is: stoker init {names}")
        for note in draft.notes:
            say(f"  {note}", "yellow")
    return draft


def _changed(
    recipe: Draft | str | Recipe | Schema, preset: str | None, min_count: int | None, features: Sequence[str]
) -> tuple[Draft | str | Recipe | Schema | None, str | None]:
    """Return the recipe with another minimum count in each column with a vocabulary, and with more features."""
    if min_count is None and not features:
        return recipe, preset
    from dataclasses import replace

    from stoker.prep.draft import Draft, schema_toml
    from stoker.prep.prepare import load_recipe

    found, schema = load_recipe(recipe, preset)
    for text in features:
        schema = schema.with_feature(text)

    def changed(columns: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(c if c.hash_buckets or not min_count else replace(c, min_count=min_count) for c in columns)

    schema = replace(schema, categorical=changed(schema.categorical), sequence=changed(schema.sequence))
    if isinstance(recipe, Draft):  # it knows how many rows are bad
        return replace(recipe, text=schema_toml(schema)), None
    return replace(found, presets={found.preset_name: lambda: schema}, preset=found.preset_name), None


def _show_report(report: PrepareReport, path: str) -> None:
    shares = {name: report.positives[name] / rows if rows else None for name, rows in report.labelled.items()}
    splits = (
        (name, rows, report.positives[name] if report.labelled[name] or not rows else None, shares[name])
        for name, rows in report.rows.items()
    )
    columns = {"split": "{0}", "rows": "{1:,}", "positive": "{2:,}", "share": "{3:.2%}"}
    show_rows(f"Dataset {path}", columns, splits)
    if report.tables:
        columns = {"table": "{0}", "rows": "{1[rows]:,.0f}", "held-out ids missing or unknown": "{1[unknown]:.2%}"}
        show_rows("Tables", columns, report.tables.items())
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
        parts = ["already prepared from the same files and settings: nothing was done. --overwrite prepares it again"]
    say("; ".join(parts))
    if report.bad:
        share, place = f"{report.bad / max(report.lines, 1):.3%}", f"{path}/quarantine.jsonl"
        say(f"{plural(report.bad, 'bad line')} ({share}) set aside in {place}", "bold yellow")
        for reason, count in report.reasons.items():
            say(f"  {count:,} x {reason}", "yellow")
        for remedy in report.remedies:
            say(f"  {remedy}", "cyan")
    else:
        say("no bad lines")
    if absent := sum(report.rows.values()) - sum(report.labelled.values()):
        say(f"{plural(absent, 'row')} without label: stoker predict RUN --data {quoted(path)} --out scores.parquet")
    if groups := report.groups:
        say(f"{plural(groups['count'], 'group')} by column {groups['column']}")
    for text in report.warnings:
        say(f"warning: {text}", "bold red")


def _list_recipes(as_json: bool) -> None:
    from stoker.prep import recipes

    found = [recipes.get(name) for name in recipes.names()]
    record = [{"name": r.name, "description": r.description, "presets": list(r.presets)} for r in found]
    if not printed(record, as_json):
        rows = [[recipe.name, ", ".join(recipe.presets), recipe.description] for recipe in found]
        show_table("Recipes", ["recipe", "presets", "what it reads"], rows, left=range(3))


@takes(TextSettings)
def synthetic(
    recipe: Annotated[str, typer.Argument(help="Log to imitate: criteo, avazu, taobao, trivago, movielens, ...")],
    rows: Annotated[str, typer.Option(help="Lines of the log, such as 10M. For some logs: ratings or impressions.")],
    out: Annotated[
        Path, typer.Option(help="File to write (.gz and .zst compress), or directory if there are several.")
    ],
    *,
    settings: dict[str, Any],
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing log."),
    metadata: Path | None = typer.Option(
        None, help="For trivago: write the properties of the items to this file, as item_metadata.csv."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the planted truth as JSON."),
) -> None:
    """Write a generated log whose best reachable AUC is known.

    Prints the best AUC and log loss that a model can reach, and writes them to
    OUT.truth.json. Call results on such logs synthetic.

    \b
    stoker synthetic criteo --rows 10M --out day_0.tsv.gz
    stoker synthetic criteo --rows 1M --out a.gz --curve globo-articles --bad 1%
    stoker synthetic movielens --rows 100k --out data/ml --seed 7
    stoker synthetic criteo --rows 10M --out day_1.tsv.gz --seed 1 --universe 0
    stoker synthetic trivago --rows 100k --out train.csv --metadata metadata.csv
    """
    if str(out) == "-":
        raise ConfigError("--out is -, but a log is not written to standard output. Name a file.")
    from stoker.synthetic import write

    start = time.perf_counter()
    truth = write(recipe, rows, out, overwrite=overwrite, metadata=metadata, **settings)
    seconds = time.perf_counter() - start
    if printed(asdict(truth), as_json):
        return
    spoiled = f", {truth.bad:,} of them spoiled" if truth.bad else ""
    say(
        f"{out}: {plural(truth.rows, 'row')} of {truth.recipe}{spoiled}, in {format_duration(seconds)} "
        f"({format_count(truth.rows / max(seconds, 1e-9))} rows/s)"
    )
    say(
        f"planted truth ({truth.task}): base rate {truth.base_rate:.4f}, best AUC {truth.best_auc:.4f}, "
        f"best log loss {truth.best_log_loss:.4f}"
    )
