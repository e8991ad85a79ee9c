"""Commands on trained runs: evaluate, predict, verify, trace, compare; and baselines for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.errors import ConfigError, DataError
from stoker.base.picture import check_plot
from stoker.base.progress import Bars
from stoker.base.units import format_count, parse_count, plural, quoted
from stoker.cli.options import (
    Data,
    DataArgument,
    Json,
    OneObject,
    RunArgument,
    Start,
    begin_at,
    option,
    printed,
    say,
    show_grids,
    takes,
)
from stoker.cli.prepare import is_log, prepared_like
from stoker.placement.budget import MemoryBudget
from stoker.training.scores.metrics import metric_grid
from stoker.training.settings import MachineConfig

if TYPE_CHECKING:
    from stoker.dataset.dataset import Dataset
    from stoker.dataset.split import Split
    from stoker.training.tools.compare import Comparison
    from stoker.training.tools.trace import Trace
    from stoker.training.tools.verify import Verification

_LOOKAHEAD = 64  # batches
_PLACED = ("device_memory", "host_memory", "home_path")

Run = Annotated[Path, typer.Argument(help="Run directory (its best checkpoint is taken) or checkpoint; or a URL.")]
RowsToScore = Annotated[
    Path | None, typer.Option(help="Dataset, or raw rows such as today.csv. (default: the run's dataset)")
]
SplitName = Annotated[str, typer.Option(help="train, valid or test.")]
Rows = Annotated[int | None, typer.Option(help="The first so many rows only.", min=1)]
BatchSize = Annotated[int | None, typer.Option(help="Examples at a time. (default: 8192, or what fits)", min=1)]


@takes(MachineConfig, of_run=_PLACED)
def evaluate(
    run: Run,
    data: Data = None,
    split: SplitName = "test",
    rows: Rows = None,
    k: int | None = typer.Option(
        None, "--k", help="Places of a list for nDCG and hit rate. (default: the run's)", min=1
    ),
    batch_size: BatchSize = None,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Evaluate a trained model, with its rows where the run had them.

    \b
    stoker evaluate runs/a
    stoker evaluate runs/a/checkpoints/step_000001000 --split valid --json
    """
    from stoker.training.scores.evaluation import evaluate as run_evaluation
    from stoker.training.scores.evaluation import finite

    loaded, chosen, size = _open(run, data, split, batch_size, settings)
    places = k or int(loaded.manifest["extra"].get("settings", {}).get("ranking_k", 10))
    metrics = finite(run_evaluation(loaded.model, chosen, rows=rows, batch_size=size, lookahead=_LOOKAHEAD, k=places))
    if printed({"checkpoint": str(loaded.path), "step": loaded.step, "split": split, **metrics}, as_json):
        return
    if absent := len(chosen) - chosen.labelled:
        say(f"{absent:,} of {len(chosen):,} rows of split {split} have no label: left out")
    show_grids([metric_grid({split: metrics}, f"{loaded.model.name} at step {loaded.step:,}")])
    say(f"checkpoint: {loaded.path}")


@takes(MachineConfig, of_run=_PLACED)
def predict(
    run: Run,
    out: Annotated[
        Path,
        typer.Option(
            help="File to write, .parquet or .csv: row, label, kept columns, score, and group if there is one."
        ),
    ],
    data: RowsToScore = None,
    split: SplitName = "test",
    keep: list[str] | None = typer.Option(None, "--keep", help="Column of raw rows to write, too. Repeatable."),
    rows: Rows = None,
    batch_size: BatchSize = None,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Write a score for every row of a split to a Parquet or CSV file.

    Raw rows, such as today.csv, are prepared first as those of the run's dataset
    were; they may lack a label.

    \b
    stoker predict runs/a --out scores.parquet
    stoker predict runs/a --data today.csv --keep user_id --out scores.parquet
    stoker predict runs/a --data data/criteo --split valid --out scores.csv
    """
    from stoker.training.scores.evaluation import check_scores_file, write_scores

    check_scores_file(out)
    with _data_to_score(run, data, keep or (), quiet=as_json) as data:
        loaded, chosen, size = _open(run, data, split, batch_size, settings)
        count = write_scores(loaded.model, chosen, out, rows=rows, batch_size=size, lookahead=_LOOKAHEAD)
    if not printed({"checkpoint": str(loaded.path), "step": loaded.step, "out": str(out), "rows": count}, as_json):
        say(f"{plural(count, 'score')} of {loaded.path} in {out}")


@contextmanager
def _data_to_score(run: Path, data: Path | None, keep: Sequence[str], *, quiet: bool) -> Iterator[Path | None]:
    """The dataset of these rows; raw ones are prepared like the run's, for as long as the block."""
    from stoker.training.files.rundir import find_checkpoint, find_dataset

    if data is not None and is_log(data):
        with prepared_like(data, find_dataset(find_checkpoint(run)), keep, quiet=quiet) as made:
            yield made
    elif keep:
        raise ConfigError("--keep takes columns of raw rows along. Of a dataset: stoker prepare --keep COLUMN")
    else:
        yield data


def _open(
    run: Path,
    data: Path | None,
    split: str,
    batch_size: int | None,
    settings: dict[str, Any],
) -> tuple[Any, Split, int]:
    """The model, its rows where the run had them or the options say, the rows to score, and how many at a time."""
    from stoker.base.device import resolve_device
    from stoker.training.files.checkpoint import read_manifest
    from stoker.training.files.loading import load, saved_model
    from stoker.training.files.rundir import find_checkpoint, find_dataset, open_dataset, settings_around
    from stoker.training.placing import place_scoring
    from stoker.training.scores.evaluation import check_dataset

    if "threads" in settings:
        import torch

        torch.set_num_threads(settings["threads"])
    checkpoint = find_checkpoint(run)
    manifest = read_manifest(checkpoint)
    saved_model(checkpoint, manifest)  # refuses what no command can build
    dataset = open_dataset(find_dataset(checkpoint) if data is None else data)
    chosen = _with_rows(dataset, split)
    on = resolve_device(settings.get("device"))
    own = settings_around(checkpoint) if data is None or "device_memory" not in settings else {}
    given = {name: settings.get(name, own.get(name)) for name in _PLACED}
    budget = MemoryBudget.from_dict({"lookahead": _LOOKAHEAD, **given})
    placement, size = place_scoring(manifest, dataset, budget, batch_size=batch_size, device=on)
    loaded = load(checkpoint, device=on, backend=settings.get("backend", "auto"), placement=placement)
    check_dataset(dataset, loaded.model, loaded.manifest["extra"].get("dataset"))
    return loaded, chosen, size


def _with_rows(dataset: Dataset, name: str) -> Split:
    """The split of that name.

    Raises:
        DataError: there is no such split, or it is empty.
    """
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
    steps: int = typer.Option(50, help="Steps to replay."),
    start: Start = None,
    data: Data = None,
    *,
    settings: dict[str, Any],
    as_json: OneObject = False,
) -> None:
    """Check that a run computes the same bits as one with all its rows in fast memory.

    Replays some steps twice from the same checkpoint, with rows that come and
    go and with all of them resident, and compares every row that a step
    touches with its optimizer state, the loss and the dense part, and at the
    end all rows. A run that had all rows in fast memory is placed with a
    tenth of their memory. Exits with 1 at a difference.

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
    say(f"{found.run}: {plural(found.steps, 'step')} {origin}, {found.placement}, against all rows resident")
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
    steps: int = typer.Option(30, help="Steps to record."),
    out: Path = typer.Option(Path("trace.json"), help="File for the timeline; it is replaced if there."),
    start: Start = None,
    data: Data = None,
    *,
    settings: dict[str, Any],
    as_json: OneObject = False,
) -> None:
    """Record what every thread does during some steps of a run.

    Replays steps with the run's placement, prints the time of each stage and
    how long training waited for it, and writes a timeline that
    https://ui.perfetto.dev and chrome://tracing open: trace.json in the
    directory you are in, unless --out names another file.

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
    beside = [name for name in found.threads if name != "MainThread"]
    if beside:
        say(f"Work in {', '.join(beside)} goes on beside training, so the shares may add up to more than 100 %.")
    before = ", in place of the one that was there" if replaced else ""
    say(f"timeline: {found.out}{before} (https://ui.perfetto.dev opens it)")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more; unfinished ones too.")],
    metric: str | None = typer.Option(
        None, help="Of the curves: auc, log_loss, mrr, ... (default: what the runs choose by)"
    ),
    plot: Path | None = typer.Option(None, help="File to draw the curves in, as .png (needs matplotlib)."),
    as_json: OneObject = False,
) -> None:
    """Show how runs differ: figures, settings, data, curves.

    The best validation figures and the test figures of every run, the settings
    in which they differ, columns that one dataset has and another has not, and
    what keeps figures from being comparable.

    \b
    stoker compare runs/a runs/b
    stoker compare runs/* --metric mrr --plot curves.png
    """
    from stoker.training.tools.compare import compare as run_comparison

    if plot is not None:
        check_plot(plot)
    found = run_comparison(*runs, metric=metric)
    if plot is not None:
        found.plot(plot)
    if printed(found.to_dict(), as_json):
        return
    show_grids(found.grids())
    if not found.settings:
        say("all settings are the same")
    for text in found.data:
        say(f"data: {text}")
    _show_curves(found)
    for text in found.notes:
        say(f"note: {text}", "yellow")
    if plot is not None:
        say(f"curves: {plot}")


def _show_curves(found: Comparison) -> None:
    from rich.console import Console

    from stoker.training.tools.compare import MARKS, curves, text_plot

    points = curves(found)
    if not points:
        say("no run has validation figures to draw a curve of")
        return
    if max(map(len, points.values())) < 2:
        say(f"{found.metric}: at most one evaluation of each, so no curve; --eval-every or more --epochs make one")
        return
    marks = {run.name: MARKS[number % len(MARKS)] for number, run in enumerate(found.runs)}
    legend = "   ".join(f"{marks[name]} {name}" for name in points)
    width = max(20, min(72, Console().width - 12))
    say(f"{found.metric} on the validation rows:   {legend}")
    say(text_plot(points, marks, width=width))


def baseline(
    dataset: DataArgument,
    rows: str = option("Fit", "Training rows to fit on at most.", default="500k"),
    as_json: OneObject = False,
) -> None:
    """Fit the average, a logistic regression and, if LightGBM is installed, trees.

    The figures are stored with the dataset. Every later run shows them next
    to its own: so you see what the embeddings bring.

    \b
    stoker baseline data/criteo
    stoker baseline data/criteo --rows 2M --json
    """
    from stoker.training.tools.baseline import baseline as fit

    with Bars(quiet=as_json) as bars:
        found = fit(dataset, rows=parse_count(rows), progress=bars)
    if printed({"dataset": str(dataset), **found.to_dict()}, as_json):
        return
    show_grids(found.grids())
    say(f"stored with the dataset; stoker train {quoted(dataset)} shows them next to its own figures")
