"""``stoker profile``: which rows fast memory should hold, and what they would serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.base.bars import Bars
from stoker.base.errors import ConfigError
from stoker.cli.common.options import ROW_OPTIMIZERS, DataArgument, OneObject, option

if TYPE_CHECKING:
    from rich.table import Table

    from stoker.rewrite.hot_profile import HotProfile

__all__ = ["register"]

_ROWS, _SAMPLE, _RESULT = "Rows", "Sample", "Results"
_BAR = 18  # columns of the longest bar: the table fits a terminal of 80


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("profile")(profile)


def profile(
    dataset: DataArgument,
    budget: Annotated[str, option("Memory", "For hot rows and their optimizer state.", "--device-memory")] = "512MiB",
    dim: Annotated[int, option(_ROWS, "Columns of every table.", "--dim", "--embedding-dim")] = 16,
    dtype: Annotated[str, option(_ROWS, "Of the tables: float32 or bfloat16.")] = "float32",
    optimizer: Annotated[str, option(_ROWS, f"Its state lies with the row: {ROW_OPTIMIZERS}.")] = "rowwise_adagrad",
    exact: Annotated[
        bool, option(_SAMPLE, "Take the vocabulary's counts of all rows, which is the default.", "--exact")
    ] = False,
    sample: Annotated[
        str | None,
        option(
            _SAMPLE, "Estimate from this share of the training rows, as published (5%), and compare with the counts."
        ),
    ] = None,
    confidence: Annotated[str | None, option(_SAMPLE, "Of the estimate's intervals. (default: 99.9%)")] = None,
    seed: Annotated[int, option(_SAMPLE, "Of the rows that are drawn; 0 or more.")] = 0,
    out: Annotated[Path | None, option(_RESULT, "File to write the profile to, as JSON, for stoker classify.")] = None,
    plot: Annotated[Path | None, option(_RESULT, "File to write the curve to, as .png (needs matplotlib).")] = None,
    as_json: OneObject = False,
) -> None:
    """Find the rows that are accessed most, as many as fit a budget, and what they would serve.

    A row is hot if it has at least a threshold's share of its table's
    accesses; the threshold is as low as the budget allows. An input is hot if
    all its ids are. Tables under 1 MB are hot as a whole. Accesses are the
    vocabulary's counts; with --sample they are estimated as published (FAE),
    and the counts are shown as the truth.

    \b
    stoker profile data/criteo --device-memory 512MiB
    stoker profile data/criteo --device-memory 1GiB --dim 64 --out hot.json
    stoker profile data/criteo --device-memory 1GiB --plot curve.png
    stoker profile data/globo --device-memory 4MiB --sample 5%
    """
    if exact and sample is not None:
        raise ConfigError("--exact takes the counts of all rows. Leave out --exact, or --sample.")
    if sample is None and confidence is not None:
        raise ConfigError("--confidence is of an estimate. Give --sample, such as 5%, or leave out --confidence.")
    if plot is not None:
        from stoker.base.picture import check_plot

        check_plot(plot)
    from stoker.base.files import check_target

    written = [path for path in (out, plot) if path is not None]
    for path in written:
        if path.exists():
            raise ConfigError(f"{path} exists. Choose another name, or delete it first.")
        check_target(path)
    from stoker.dataset.dataset import Dataset
    from stoker.rewrite import popularity

    data = Dataset(dataset)
    with Bars(quiet=as_json) as bars:
        found = popularity.profile(
            data,
            budget=budget,
            embedding_dim=dim,
            dtype=dtype,
            optimizer=optimizer,
            sample=sample,
            confidence=confidence or "99.9%",
            seed=seed,
            progress=bars,
        )
    if out is not None:
        found.save(out)
    if plot is not None:
        found.plot(plot)
    if as_json:
        typer.echo(json.dumps({"dataset": str(dataset), "hash": found.hash, **found.to_dict()}))
    else:
        _show(dataset, found, None if sample is None else popularity.true_hot_rows(data, found), written)


def _show(dataset: Path, found: HotProfile, truth: Mapping[str, int] | None, written: list[Path]) -> None:
    from rich.console import Console
    from rich.text import Text

    from stoker.base.units import format_size

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    settings = found.settings
    read = "the vocabulary's counts"
    if settings.sample is not None:
        read = f"{100 * settings.sample:.3g}% of the training rows"
    line(f"{dataset}: hot rows within {format_size(settings.budget)}, from {read}")
    console.print(_tables(found))
    rows, hot = (sum(getattr(table, name) for table in found.tables) for name in ("rows", "hot_rows"))
    line(
        f"hot: {hot:,} of {rows:,} rows ({hot / rows:.2%}), {format_size(found.hot_bytes)} of "
        f"{format_size(found.total_bytes)}"
    )
    line(
        f"they serve {found.access_share:.2%} of the accesses and {found.input_share:.2%} of the inputs "
        f"(+-{found.input_error:.2%}, standard error on {found.inputs:,} inputs)"
    )
    share = f"{found.threshold:.3g} of its table's accesses" if found.threshold else "0: all rows fit"
    line(f"threshold: {share}")
    if found.threshold and truth is not None:
        console.print(_estimates(found, truth))
        line(
            f"truth: rows that reach the threshold by the counts of all rows; {100 * settings.confidence:g}% intervals"
        )
    if others := [table.name for table in found.tables if not table.by_count and not table.whole]:
        named = ", ".join(others)
        warning = f"ids of {named} do not follow the count (hash_buckets? reordered?): their first ids were taken"
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    console.print(_curve(found))
    for path in written:
        line(f"wrote {path}")


def _tables(found: HotProfile) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from stoker.base.units import format_size

    table = Table(box=SIMPLE, padding=(0, 0), collapse_padding=True)
    table.add_column("table", no_wrap=True)
    for column in ("rows", "hot rows", "share", "by", "hot bytes", "accesses"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in sorted(found.tables, key=lambda each: -each.rows):
        by = "counts" if found.settings.sample is None else "sample"
        if each.whole or not found.threshold:
            by = "whole" if each.whole else "all"
        table.add_row(
            each.name,
            f"{each.rows:,}",
            f"{each.hot_rows:,}",
            f"{each.hot_rows / each.rows:.2%}",
            by,
            format_size(each.hot_bytes),
            f"{each.access_share:.2%}",
        )
    return table


def _estimates(found: HotProfile, truth: Mapping[str, int]) -> Table:
    """How near the published estimate comes to the counts of all rows."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 0), collapse_padding=True)
    table.add_column("table", no_wrap=True)
    for column in ("estimate", "interval", "truth", "off"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in sorted(found.tables, key=lambda each: -each.rows):
        if not each.whole:
            true = truth[each.name]
            cells = [f"{each.estimate:,}", f"{each.low:,}-{each.high:,}", f"{true:,}"]
            table.add_row(each.name, *cells, f"{each.estimate / max(true, 1) - 1:+.1%}")
    return table


def _curve(found: HotProfile) -> Table:
    """Figure 5 in a terminal: what serves what, by threshold."""
    from rich.table import Table

    from stoker.base.units import format_size

    table = Table(box=None, title="by threshold", title_justify="left", title_style="")
    for column in ("threshold", "hot bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("accesses", "inputs"):
        table.add_column(column, no_wrap=True)
    rows = [(f"{p.threshold:.2g}", p.hot_bytes, p.access_share, p.input_share, "") for p in found.curve]
    rows.append(("this profile", found.hot_bytes, found.access_share, found.input_share, "bold"))
    for name, size, accesses, inputs, style in sorted(rows, key=lambda row: row[1]):
        table.add_row(name, format_size(size), _bar(accesses), _bar(inputs), style=style)
    return table


def _bar(share: float) -> str:
    eighths = round(8 * _BAR * share)
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return f"{bar:<{_BAR}} {share:6.1%}"
