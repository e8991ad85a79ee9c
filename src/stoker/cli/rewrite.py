"""``stoker profile``, ``stoker classify`` and ``stoker reorder``: find hot rows, and rewrite datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.progress import Bars
from stoker.base.units import format_duration, format_size, quoted
from stoker.cli.options import (
    DataArgument,
    Json,
    NewDataset,
    Overwrite,
    Plot,
    check_new_files,
    option,
    printed,
    say,
    show_rows,
    show_table,
    takes,
)
from stoker.rewrite.hot_profile import ProfileOptions
from stoker.rewrite.id_order import Reordering

if TYPE_CHECKING:
    from stoker.rewrite.hot_profile import HotProfile

_BAR = 18  # columns of the longest bar: the table fits a terminal of 80


@takes(ProfileOptions, "batch_size")
def profile(
    dataset: DataArgument,
    *,
    settings: dict[str, Any],
    exact: bool = option(
        "Sample", "Use the counts of all training rows. This is the default.", "--exact", default=False
    ),
    out: Path | None = option("Results", "Write the profile to this JSON file, for stoker classify."),
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Find the most used rows that fit a memory budget.

    A row is hot if its share of the accesses to its table reaches a threshold.
    The threshold is as low as the budget allows. Tables under 1 MB are hot as
    a whole. An input is hot if all its ids are. Accesses are the counts of the
    vocabulary. With --sample they are estimated as in the paper (FAE, 2022)
    and compared with the counts. The last lines predict what hot and cold
    batches (stoker classify) will gain.

    \b
    stoker profile data/criteo --device-memory 512MiB
    stoker profile data/criteo --device-memory 1GiB --dim 64 --out hot.json
    stoker profile data/retail --device-memory 64MiB --model tabular
    stoker profile data/criteo --device-memory 1GiB --plot curve.png
    stoker profile data/globo --device-memory 4MiB --sample 5%
    """
    if exact and "sample" in settings:
        raise ConfigError("--exact uses the counts of all rows, --sample an estimate. Leave out one of them.")
    if "sample" not in settings and "confidence" in settings:
        raise ConfigError("--confidence needs an estimate. Give --sample, such as 5%, or leave out --confidence.")
    written = check_new_files(out, plot=plot)
    from stoker.rewrite import popularity
    from stoker.rewrite.classified import predict_gain
    from stoker.training.files.rundir import open_dataset

    data, batch_size = open_dataset(dataset), settings.pop("batch_size", None)
    with Bars(quiet=as_json) as bars:
        found = popularity.profile(data, progress=bars, **settings)
    gain = predict_gain(data, found, batch_size)
    if out is not None:
        found.save(out)
    if plot is not None:
        found.plot(plot)
    record = {"dataset": str(dataset), "hash": found.hash, **found.to_dict(), "expected": gain.to_dict()}
    if not printed(record, as_json):
        _show_profile(dataset, found, popularity.true_hot_rows(data, found) if "sample" in settings else None, written)
        say("\n".join(gain.lines()))


def _show_profile(dataset: Path, found: HotProfile, truth: Mapping[str, int] | None, written: list[Path]) -> None:
    settings = found.settings
    read = "the vocabulary's counts"
    if settings.sample is not None:
        read = f"{100 * settings.sample:.3g}% of the training rows"
    say(f"{dataset}: hot rows within {format_size(settings.budget)}, from {read}")
    _show_tables(found)
    rows, hot = (sum(getattr(table, name) for table in found.tables) for name in ("rows", "hot_rows"))
    say(
        f"hot: {hot:,} of {rows:,} rows ({hot / rows:.2%}), {format_size(found.hot_bytes)} of "
        f"{format_size(found.total_bytes)}"
    )
    say(
        f"they serve {found.access_share:.2%} of the accesses and {found.input_share:.2%} of {found.inputs:,} inputs"
        + (f", with a standard error of {found.input_error:.2%}" if found.input_error else "")
    )
    share = f"{found.threshold:.3g} of its table's accesses" if found.threshold else "0: all rows fit"
    say(f"threshold: {share}")
    if found.threshold and truth is not None:
        _show_estimates(found, truth)
        say(f"truth: rows that reach the threshold by the counts of all rows; {100 * settings.confidence:g}% intervals")
    if others := [table.name for table in found.tables if not table.by_count and not table.whole]:
        named = ", ".join(others)
        warning = f"ids of {named} are not sorted by count (hash_buckets? reordered?): the first ids were taken"
        say(warning, "yellow")
    _show_curve(found)
    for path in written:
        say(f"wrote {path}")


def _show_tables(found: HotProfile) -> None:
    by = "counts" if found.settings.sample is None else "sample"
    columns = {
        "table": "{0.name}", "rows": "{0.rows:,}", "hot rows": "{0.hot_rows:,}", "share": "{1:.2%}", "by": "{2}",
        "hot bytes": "{0.hot_bytes:size}", "accesses": "{0.access_share:.2%}",
    }  # fmt: skip
    rows = (
        (each, each.hot_rows / each.rows, "whole" if each.whole else by if found.threshold else "all")
        for each in sorted(found.tables, key=lambda each: -each.rows)
    )
    _show_dense(columns, rows)


def _show_dense(columns: dict[str, str], rows: Iterable[tuple[Any, ...]]) -> None:
    from rich.box import SIMPLE

    show_rows(None, columns, rows, whole=range(len(columns)), box=SIMPLE, padding=(0, 0), collapse_padding=True)


def _show_estimates(found: HotProfile, truth: Mapping[str, int]) -> None:
    """Print the published estimate next to the counts of all rows."""
    columns = {
        "table": "{0.name}", "estimate": "{0.estimate:,}", "interval": "{0.low:,}-{0.high:,}", "truth": "{1:,}",
        "off": "{2:+.1%}",
    }  # fmt: skip
    rows = (
        (each, truth[each.name], each.estimate / max(truth[each.name], 1) - 1)
        for each in sorted(found.tables, key=lambda each: -each.rows)
        if not each.whole
    )
    _show_dense(columns, rows)


def _show_curve(found: HotProfile) -> None:
    """Print Figure 5 of the paper: what hot rows serve, by threshold."""
    from rich.text import Text

    lines = [(f"{p.threshold:.2g}", p.hot_bytes, p.access_share, p.input_share, "") for p in found.curve]
    lines.append(("this profile", found.hot_bytes, found.access_share, found.input_share, "bold"))
    rows = [
        [Text(cell, style=style) for cell in (name, format_size(size), _bar(accesses), _bar(inputs))]
        for name, size, accesses, inputs, style in sorted(lines, key=lambda line: line[1])
    ]
    headings = ["threshold", "hot bytes", "accesses", "inputs"]
    show_table("by threshold", headings, rows, left=(2, 3), whole=range(4), box=None, title_style="")


def _bar(share: float) -> str:
    eighths = round(8 * _BAR * share)
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return f"{bar:<{_BAR}} {share:6.1%}"


@takes(ProfileOptions, "batch_size", without=("sample", "confidence", "seed"))
def classify(
    dataset: DataArgument,
    out: NewDataset,
    profile: Path | None = option("Profile", "File that stoker profile wrote. (default: a new profile)"),
    *,
    settings: dict[str, Any],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a dataset with hot and cold training rows apart.

    A training row is hot if all its ids are hot rows of their tables. stoker
    train then trains on batches that are all hot or all cold, in the order of
    a schedule. The rest of the dataset is linked, not copied. Before it begins,
    it predicts what this order will gain over shuffled batches.

    \b
    stoker classify data/criteo --device-memory 512MiB --out data/hot
    stoker classify data/criteo --device-memory 1GiB --dim 64 --out data/hot
    stoker classify data/criteo --profile hot.json --out data/hot --overwrite
    """
    batch_size = settings.pop("batch_size", None)
    if profile is not None and settings:
        raise ConfigError(
            "--profile has its own --device-memory, --model, --dim, --dtype and --row-optimizer. Leave these out, or "
            "make another profile with stoker profile."
        )
    from stoker.rewrite.classified import check_profile, predict_gain, said_by, write_classified
    from stoker.rewrite.hot_profile import HotProfile
    from stoker.rewrite.popularity import profile as run_profile
    from stoker.training.files.rundir import open_dataset

    data = open_dataset(dataset)
    with Bars(quiet=as_json) as bars:
        found = run_profile(data, progress=bars, **settings) if profile is None else HotProfile.load(profile)
        check_profile(data, found, profile)
        gain = predict_gain(data, found, batch_size)
        if not as_json:
            say("\n".join(gain.lines()))
        report = write_classified(data, out, **said_by(found), overwrite=overwrite, progress=bars)
    rows = report.hot + report.cold
    values = {name: value for name, value in vars(report).items() if name != "path"}
    if printed({"out": str(out), "profile_hash": found.hash, **values, "expected": gain.to_dict()}, as_json):
        return
    what = "already classified" if report.reused else f"classified in {format_duration(report.seconds)}"
    say(f"{out}: {rows:,} training rows {what}")
    say(f"by profile {found.hash[:16]}, whose hot rows take {format_size(found.hot_bytes)}")
    for kind, count in (("hot", report.hot), ("cold", report.cold)):
        say(f"{kind:>5}: {count:,} rows ({count / max(1, rows):.2%})")
    say(f"next: stoker train {quoted(out)} --out RUN")


@takes(Reordering)
def reorder(
    dataset: DataArgument,
    out: NewDataset,
    tables: list[str] | None = option(
        "Order", "Table to reorder. Repeatable. (default: all with a vocabulary and 1,000 rows)", "--table"
    ),
    overwrite: Overwrite = False,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Renumber ids so that ids used together are neighbours.

    Batches in the order of the log then touch fewer blocks of rows: less work
    in tensor-train tables, fewer pages of a file. Shuffled batches hardly
    change. Examples, values and vocabularies remain the same. Train a new model
    on the new dataset: ids have other rows.

    \b
    stoker reorder data/criteo --out data/criteo-ordered
    stoker reorder data/criteo --table C3 --window 8192 --out data/criteo-ordered
    stoker reorder data/criteo --method communities --spread inf --out data/el-rec
    """
    from stoker.rewrite.reorder import BLOCK_IDS, run_reorder
    from stoker.training.files.rundir import open_dataset

    how = Reordering.from_dict(settings)
    with Bars(quiet=as_json) as bars:
        report = run_reorder(open_dataset(dataset), out, how=how, tables=tables, overwrite=overwrite, progress=bars)
    if printed({**asdict(report), "path": str(report.path)}, as_json):
        return
    what = "already reordered" if report.reused else f"reordered in {format_duration(report.seconds)}"
    say(f"{out}: {what}")
    say(f"blocks of {BLOCK_IDS} ids that {report.window:,} rows touch, before and after:")
    for name, one in report.tables.items():
        log = _change(one.log_before, one.log_after)
        shuffled = _change(one.shuffled_before, one.shuffled_after)
        say(f"  {name} ({one.rows:,} rows): in order of the log {log}; shuffled {shuffled}")
    say(f"next: stoker train {quoted(out)} --out RUN")


def _change(before: float, after: float) -> str:
    return f"{before:,.1f} -> {after:,.1f} ({(after / before - 1 if before else 0):+.1%})"
