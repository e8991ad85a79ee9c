"""Commands on trained runs: evaluate, predict, verify, trace, compare, report; and the command for baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.errors import ConfigError, DataError
from stoker.base.progress import Bars
from stoker.base.settings import Settings, setting
from stoker.base.units import format_count, parse_count, parse_setting, plural, quoted
from stoker.cli.options import (
    Data,
    DataArgument,
    Json,
    RunArgument,
    StartOption,
    begin_at,
    check_new_files,
    option,
    printed,
    say,
    show_grids,
    takes,
)
from stoker.cli.prepare import is_log, prepared_like
from stoker.placement.budget import LOOKAHEAD, MemoryBudget
from stoker.training.settings import BASELINE_ROWS, RECORDED, REPLAYED, MachineConfig

if TYPE_CHECKING:
    from stoker.dataset.dataset import Dataset
    from stoker.dataset.split import Split
    from stoker.training.tools.compare import Comparison
    from stoker.training.tools.trace import Trace
    from stoker.training.tools.verify import Verification

_PLACED = ("device_memory", "host_memory", "home_path")

RunPath = Annotated[Path, typer.Argument(help="Run directory (the best checkpoint), checkpoint, or URL.")]
RowsToScore = Annotated[
    Path | None, typer.Option(help="Dataset, or raw rows such as today.csv. (default: the dataset of the run)")
]


@dataclass(frozen=True, kw_only=True)
class _Scored(Settings):
    """The rows that a model scores."""

    split: str = setting("test", "Split: train, valid or test.")
    rows: int | None = setting(None, "Score this many rows only, the first ones.", least=1)
    batch_size: int | None = setting(None, "Examples per batch.", unset="8192, or what fits", least=1)


@takes(_Scored, MachineConfig, of_run=_PLACED)
def evaluate(
    run: RunPath,
    data: Data = None,
    k: int | None = typer.Option(None, "--k", help="k of nDCG@k and hit rate@k. (default: that of the run)", min=1),
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on a split.

    \b
    stoker evaluate runs/a
    stoker evaluate runs/a/checkpoints/step_000001000 --split valid --json
    """
    from stoker.training.scores.catalogue import catalogue_of
    from stoker.training.scores.evaluation import evaluate as run_evaluation
    from stoker.training.scores.evaluation import finite
    from stoker.training.scores.metrics import metric_grid

    wanted = _Scored.taken_from(settings)
    split = wanted.split
    with Bars(quiet=as_json):
        loaded, dataset, chosen, size = _open(run, data, wanted, settings)
        known = {"ranking_k": 10, "loss": "bce", "metric": "auc", **loaded.manifest["extra"].get("settings", {})}
        metrics = finite(run_evaluation(
            loaded.model, chosen, rows=wanted.rows, batch_size=size, lookahead=LOOKAHEAD, k=k or known["ranking_k"],
            catalogue=catalogue_of(loaded.model, dataset, loaded.path),
        ), known["loss"], known["metric"])  # fmt: skip
    if printed({"checkpoint": str(loaded.path), "step": loaded.step, "split": split, **metrics}, as_json):
        return
    if absent := len(chosen) - chosen.labelled:
        say(f"{absent:,} of {len(chosen):,} rows of split {split} have no label and are left out")
    show_grids([metric_grid({split: metrics}, f"{loaded.model.name} at step {loaded.step:,}")])
    say(f"checkpoint: {loaded.path}")


@takes(_Scored, MachineConfig, of_run=_PLACED)
def predict(
    run: RunPath,
    out: Annotated[
        Path,
        typer.Option(
            help="File to write, .parquet or .csv. Columns: row, label, kept columns, score, and group if there is one."
        ),
    ],
    data: RowsToScore = None,
    keep: list[str] | None = typer.Option(
        None, "--keep", help="Column of raw rows to write next to the scores. Repeatable."
    ),
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Write a score for each row of a split to a file.

    Raw rows, such as today.csv, are first prepared like the dataset of the run.
    They need no label.

    \b
    stoker predict runs/a --out scores.parquet
    stoker predict runs/a --data today.csv --keep user_id --out scores.parquet
    stoker predict runs/a --data data/criteo --split valid --out scores.csv
    """
    from stoker.training.scores.evaluation import check_scores_file, write_scores

    check_scores_file(out)
    with _data_to_score(run, data, keep or (), quiet=as_json) as (data, bad):
        wanted = _Scored.taken_from(settings)
        with Bars(quiet=as_json):
            loaded, _, chosen, size = _open(run, data, wanted, settings)
            count = write_scores(loaded.model, chosen, out, rows=wanted.rows, batch_size=size, lookahead=LOOKAHEAD)
    found = {"checkpoint": str(loaded.path), "step": loaded.step, "out": str(out), "rows": count, "bad_lines": bad}
    if not printed(found, as_json):
        say(f"{plural(count, 'score')} of {loaded.path} in {out}")


@contextmanager
def _data_to_score(
    run: Path, data: Path | None, keep: Sequence[str], *, quiet: bool
) -> Iterator[tuple[Path | None, int]]:
    """Yield the dataset to score and its bad lines; raw rows are prepared like the run's, to a temporary directory."""
    from stoker.training.files.checkpoint import read_manifest
    from stoker.training.files.rundir import find_checkpoint, newest_rows, open_dataset
    from stoker.training.scores.evaluation import check_rows

    if data is not None and is_log(data):
        remedy = f"stoker prepare --like DATASET {quoted(data)} --out NEW, and score NEW with --data NEW"
        checkpoint = find_checkpoint(run)
        like = newest_rows(checkpoint, remedy)
        check_rows(open_dataset(like), read_manifest(checkpoint), continued=True)
        with prepared_like(data, like, keep, quiet=quiet) as made:
            yield made
    elif keep:
        raise ConfigError("--keep takes columns of raw rows along. Of a dataset: stoker prepare --keep COLUMN")
    else:
        yield data, 0


def _open(run: Path, data: Path | None, wanted: _Scored, settings: dict[str, Any]) -> tuple[Any, Dataset, Split, int]:
    """Load the model, placed as in the run or as the options say; return it, data, the split and the batch size."""
    from stoker.base.device import check_threads, resolve_device
    from stoker.training.files.checkpoint import read_manifest
    from stoker.training.files.loading import load, saved_model
    from stoker.training.files.rundir import find_checkpoint, find_dataset, open_dataset, settings_around
    from stoker.training.placing import place_scoring
    from stoker.training.scores.evaluation import check_rows, dataset_identity

    if "threads" in settings:
        import torch

        torch.set_num_threads(check_threads(settings["threads"]))
    checkpoint = find_checkpoint(run)
    manifest = read_manifest(checkpoint)
    saved_model(checkpoint, manifest)  # refuses a model that no command can build
    dataset = open_dataset(find_dataset(checkpoint) if data is None else data)
    check_rows(dataset, manifest)
    known, found = manifest["extra"].get("dataset") or {}, dataset_identity(dataset)["vocabulary_hash"]
    if known.get("first") == found != known["vocabulary_hash"] and data is not None:
        say(f"note: {dataset.path} lacks the ids that updates of the run have added: they are scored as unknown ids. "
            "To score them, prepare the logs --like RUN/updates/NUMBER, the newest", error=True)  # fmt: skip
    chosen = _with_rows(dataset, wanted.split)
    on = resolve_device(settings.get("device"))
    own = settings_around(checkpoint) if data is None or "device_memory" not in settings else {}
    given = {name: settings.get(name, own.get(name)) for name in _PLACED}
    budget = MemoryBudget.from_dict({"lookahead": LOOKAHEAD, **given})
    placement, size = place_scoring(manifest, dataset, budget, batch_size=wanted.batch_size, device=on)
    loaded = load(checkpoint, device=on, backend=settings.get("backend", "auto"), placement=placement)
    return loaded, dataset, chosen, size


def _with_rows(dataset: Dataset, name: str) -> Split:
    """Return a split by name."""
    split = dataset.split(name)
    if not len(split):
        others = [f"--split {other} has {len(found):,}" for other, found in dataset.splits.items() if len(found)]
        raise DataError(
            f"{dataset.path}: split {name} has 0 rows, so there is nothing to score. {'; '.join(others)}".rstrip()
        )
    return split


@takes(of_run=(MemoryBudget, MachineConfig))
def verify(
    run: RunArgument,
    steps: int = typer.Option(REPLAYED, help="Steps to replay."),
    start: StartOption = None,
    data: Data = None,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Check that a cache changes no bit of a run.

    Replays some steps twice from the same checkpoint: with rows in a cache,
    and with all rows resident. Compares the rows of each batch with their
    optimizer state, the loss and the dense part in each step, and all rows at
    the end. If the run had all rows in fast memory, the cache gets a tenth of
    that memory. The exit code is 1 if there is a difference.

    \b
    stoker verify runs/a
    stoker verify runs/a --steps 200 --from start
    stoker verify runs/a --device-memory 256MiB --host-memory 1GiB --home /fast
    """
    begin = begin_at(start)

    from stoker.training.tools.verify import verify as run_verify

    with Bars(quiet=as_json) as bars:
        found = run_verify(run, steps=steps, begin=begin, data=data, progress=bars, **settings)
    if not printed(found.to_dict(), as_json):
        _show_verification(found)
    if not found.identical:
        raise typer.Exit(1)


def _show_verification(found: Verification) -> None:
    origin = "from its start" if found.checkpoint is None else f"from {found.checkpoint.name}"
    say(f"{found.run}: {plural(found.steps, 'step')} {origin}, {found.placement}, compared with all rows resident")
    say(
        f"compared: the loss and the dense part after every step, {found.touched_rows:,} touched rows before and after "
        f"their step, {found.all_rows:,} rows at the end; {format_count(found.values)} values in {found.seconds:.1f} s"
    )
    if found.difference is None:
        say("identical", "bold green")
    else:
        say(f"different {found.difference}", "bold red")


@takes(of_run=(MemoryBudget, MachineConfig))
def trace(
    run: RunArgument,
    steps: int = typer.Option(RECORDED, help="Steps to record."),
    out: Path = typer.Option(Path("trace.json"), help="File for the timeline. An existing file is replaced."),
    start: StartOption = None,
    data: Data = None,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Record what each thread does during some steps of a run.

    Replays steps with the placement of the run. Prints the time of each stage
    and how long training waited for it. Writes a timeline for
    https://ui.perfetto.dev or chrome://tracing to trace.json in the current
    directory, unless --out names another file.

    \b
    stoker trace runs/a
    stoker trace runs/a --steps 100 --device-memory 256MiB --out runs-a.json
    """
    begin = begin_at(start)
    replaced = out.exists()

    from stoker.training.tools.trace import trace as run_trace

    with Bars(quiet=as_json) as bars:
        found = run_trace(run, steps=steps, out=out, begin=begin, data=data, progress=bars, **settings)
    if not printed(found.to_dict(), as_json):
        _show_trace(found, replaced)


def _show_trace(found: Trace, replaced: bool) -> None:
    say(f"{found.run}: {found.summary()}")
    show_grids(found.grids())
    others = [name for name in found.threads if name != "MainThread"]
    if others:
        say(f"{', '.join(others)} works at the same time as training, so the shares may add up to more than 100 %.")
    before = ", replaced" if replaced else ""
    say(f"timeline: {found.out}{before} (https://ui.perfetto.dev opens it)")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories, finished or not.")],
    metric: str | None = typer.Option(
        None, help="Metric of the curves: auc, log_loss, mrr, ... (default: that of the runs)"
    ),
    plot: Path | None = typer.Option(None, help="Draw the curves to this .png file (needs matplotlib)."),
    page: Path | None = typer.Option(None, help="Write tables and curves to this .html file."),
    as_json: Json = False,
) -> None:
    """Show how runs differ: metrics, settings, data, curves.

    Prints the best validation metrics and the test metrics of each run, the
    settings that differ, how the datasets differ, and notes on metrics that
    cannot be compared.

    \b
    stoker compare runs/a runs/b
    stoker compare runs/* --metric mrr --plot curves.png
    stoker compare runs/a runs/b --page both.html
    """
    from rich.console import Console

    from stoker.training.files.rundir import kind_of
    from stoker.training.report.charts import check_page
    from stoker.training.tools.compare import MARKS
    from stoker.training.tools.compare import compare as run_comparison

    check_new_files(page if page is None else check_page(page), plot=plot)
    those = [run for run in runs if kind_of(run) != "a dataset"]  # which train LOG puts next to its run: runs/*
    found = run_comparison(*(those if len(those) > 1 else runs), metric=metric)
    if plot is not None:
        found.plot(plot)
    if page is not None:
        found.page(page)
    if printed(found.to_dict(), as_json):
        return
    marks = {run.name: MARKS[number % len(MARKS)] for number, run in enumerate(found.runs)}
    grids = found.grids()
    width = Console().width
    if max((len(line) for grid in grids for line in grid.text().split("\n")), default=0) > width:
        say("\n".join(f"{mark} {name}" for name, mark in marks.items()))
        grids = tuple(grid._replace(headings=["", *marks.values()]) for grid in grids)
    show_grids(grids)
    if not found.settings:
        say("all settings are the same")
    for text in found.data:
        say(f"data: {text}")
    _show_curves(found, marks, max(20, min(72, width - 12)))
    for text in found.notes:
        say(f"note: {text}", "yellow")
    if plot is not None:
        say(f"curves: {plot}")


def report(
    run: RunArgument,
    out: Path | None = typer.Option(None, help="File to write, .html. (default: report.html in the run)"),
    again: bool = typer.Option(False, "--again", help="Measure again what is measured once for a run."),
    as_json: Json = False,
) -> None:
    """Write one page about a run, to send to a colleague.

    Shows metrics next to baselines, curves, what limits the speed, where the
    time and bytes of a step go, calibration, metrics of slices, what each
    table costs and brings, and what to change next. The file opens offline.

    \b
    stoker report runs/a
    stoker report runs/a --out a.html
    """
    from stoker.training.report.page import report as write_report

    with Bars(quiet=as_json):
        made = write_report(run, out, again=again)
    if not printed({"run": str(run), "out": str(made)}, as_json):
        say(f"report: {made}")


def _show_curves(found: Comparison, marks: Mapping[str, str], width: int) -> None:
    from stoker.training.tools.compare import curves, text_plot

    points = curves(found)
    if not points:
        say(f"no curves: no run has {found.metric} of validation rows")
        return
    if max(map(len, points.values())) < 2:
        say(f"no curves of {found.metric}: each run has at most one evaluation. Use --eval-every or more --epochs")
        return
    legend = "   ".join(f"{marks[name]} {name}" for name in points)
    say(f"{found.metric} on the validation rows:   {legend}   * several")
    say(text_plot(points, marks, width=width))


def baseline(
    dataset: DataArgument,
    rows: str = option("Fit", "Largest number of training rows to fit on.", default=f"{BASELINE_ROWS // 1000}k"),
    as_json: Json = False,
) -> None:
    """Fit simple models that your model should beat.

    Fits the average, a logistic regression and, if LightGBM is installed,
    boosted trees. Stores their metrics with the dataset. Every later run shows
    them next to its own, so that you see what the embeddings bring.

    \b
    stoker baseline data/criteo
    stoker baseline data/criteo --rows 2M --json
    """
    from stoker.training.files.rundir import open_dataset
    from stoker.training.tools.baseline import baseline as fit

    with Bars(quiet=as_json) as bars:
        found = fit(open_dataset(dataset), rows=parse_setting("rows", parse_count, rows), progress=bars)
    if printed({"dataset": str(dataset), **found.to_dict()}, as_json):
        return
    show_grids(found.grids())
    say(f"stored with the dataset; stoker train {quoted(dataset)} shows them next to its own metrics")
