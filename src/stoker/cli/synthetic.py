"""``stoker synthetic``: a generated log in the raw format of a recipe, with a planted truth."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stoker.base.errors import ConfigError

__all__ = ["register"]


def _synthetic(
    recipe: Annotated[str, typer.Argument(help="Whose format: criteo, avazu, taobao, trivago, movielens, ...")],
    rows: Annotated[str, typer.Option(help="Log lines, such as 10M; ratings or impressions for some.")],
    out: Annotated[Path, typer.Option(help="File (.gz and .zst compress), or directory for several files.")],
    seed: Annotated[int, typer.Option(help="Another seed, other rows; 0 or more.")] = 0,
    universe: Annotated[int | None, typer.Option(help="Seed of ids and hidden weights; default: --seed.")] = None,
    alpha: Annotated[float, typer.Option(help="Exponent of Zipf's law for ids, without --curve; 0 to 10.")] = 1.05,
    curve: Annotated[
        str | None,
        typer.Option(help="Measured skew: globo-articles, book-crossing-books, or a curve's JSON file."),
    ] = None,
    drift: Annotated[
        float, typer.Option(help="Share of the frequency ranks that change hands over the log, 0 to 1.")
    ] = 0.0,
    bad: Annotated[str, typer.Option(help="Share of lines to spoil, such as 0.1%.")] = "0",
    scale: Annotated[float, typer.Option(help="Factor on the number of distinct ids, up to 100.")] = 1.0,
    base_rate: Annotated[float | None, typer.Option(help="Share of positives; default: that of the real log.")] = None,
    signal: Annotated[float, typer.Option(help="Spread of the true logit, 0 to 5; 0 plants nothing.")] = 1.3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a log that is there.")] = False,
    metadata: Annotated[
        Path | None, typer.Option(help="trivago: also write the items' properties here, as item_metadata.csv.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the planted truth as JSON.")] = False,
) -> None:
    """Write a generated log with a planted truth.

    The best reachable AUC and log loss are printed and written to OUT.truth.json. Figures from such logs must
    be called synthetic.

    \b
    stoker synthetic criteo --rows 10M --out day_0.tsv.gz
    stoker synthetic criteo --rows 1M --out drift.tsv --curve globo-articles --drift 0.3 --bad 0.1%
    stoker synthetic movielens --rows 100k --out data/ml --seed 7
    stoker synthetic criteo --rows 10M --out day_1.tsv.gz --seed 1 --universe 0
    stoker synthetic trivago --rows 100k --out train.csv --metadata item_metadata.csv
    """
    if str(out) == "-":
        raise ConfigError("--out - names no file, and a log is not written to standard output. Name a file for it.")
    from stoker.base.units import format_count, format_duration, plural
    from stoker.synthetic import write

    start = time.perf_counter()
    truth = write(
        recipe,
        rows,
        out,
        seed=seed,
        universe=universe,
        alpha=alpha,
        curve=curve,
        drift=drift,
        bad=bad,
        scale=scale,
        base_rate=base_rate,
        signal=signal,
        overwrite=overwrite,
        metadata=metadata,
    )
    seconds = time.perf_counter() - start
    if as_json:
        typer.echo(json.dumps(asdict(truth)))
        return
    spoiled = f", {truth.bad:,} of them spoiled" if truth.bad else ""
    typer.echo(
        f"{out}: {plural(truth.rows, 'row')} of {truth.recipe}{spoiled}, in {format_duration(seconds)} "
        f"({format_count(truth.rows / max(seconds, 1e-9))} rows/s)"
    )
    typer.echo(
        f"planted truth ({truth.task}): base rate {truth.base_rate:.4f}, best AUC {truth.best_auc:.4f}, "
        f"best log loss {truth.best_log_loss:.4f}"
    )


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("synthetic")(_synthetic)
