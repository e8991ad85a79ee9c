"""``stoker evaluate`` and ``stoker predict``: metrics and scores of a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.errors import DataError
from stoker.cli.common.options import (
    Backend,
    Budget,
    Data,
    Device,
    HomePath,
    HostMemory,
    Import,
    Json,
    Threads,
    import_model,
)
from stoker.cli.train import metrics_table

if TYPE_CHECKING:
    from stoker.dataset.dataset import Dataset
    from stoker.dataset.split import Split

__all__ = ["register"]

_LOOKAHEAD = 64  # batches

Run = Annotated[Path, typer.Argument(help="Run directory (its best checkpoint is taken) or checkpoint; or a URL.")]
SplitName = Annotated[str, typer.Option(help="train, valid or test.")]
Rows = Annotated[int | None, typer.Option(help="The first so many rows only.", min=1)]
Places = Annotated[
    int | None, typer.Option("--k", help="Places of a list for nDCG and hit rate. (default: the run's)", min=1)
]
BatchSize = Annotated[int | None, typer.Option(help="Examples at a time. (default: 8192, or what fits)", min=1)]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("evaluate")(evaluate)
    app.command("predict")(predict)


def evaluate(
    run: Run,
    data: Data = None,
    imported: Import = None,
    split: SplitName = "test",
    rows: Rows = None,
    k: Places = None,
    batch_size: BatchSize = None,
    device_memory: Budget = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    device: Device = None,
    backend: Backend = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model, with its rows where the run had them.

    \b
    stoker evaluate runs/a
    stoker evaluate runs/a/checkpoints/step_000001000 --split valid --json
    """
    from stoker.training.scores.evaluation import evaluate as run_evaluation
    from stoker.training.scores.evaluation import finite

    memory = {"device_memory": device_memory, "host_memory": host_memory, "home_path": home_path}
    loaded, chosen, size = _open(run, data, imported, split, device, backend, threads, memory, batch_size)
    places = k or int(loaded.manifest["extra"].get("settings", {}).get("ranking_k", 10))
    metrics = finite(run_evaluation(loaded.model, chosen, rows=rows, batch_size=size, lookahead=_LOOKAHEAD, k=places))
    if as_json:
        print(json.dumps({"checkpoint": str(loaded.path), "step": loaded.step, "split": split, **metrics}))
        return
    if absent := len(chosen) - chosen.labelled:
        typer.echo(f"{absent:,} of {len(chosen):,} rows of split {split} have no label: left out")
    from rich.console import Console

    console = Console()
    console.print(metrics_table({split: metrics}, f"{loaded.model.name} at step {loaded.step:,}"))
    console.print(f"checkpoint: {loaded.path}", highlight=False, soft_wrap=True)


def predict(
    run: Run,
    out: Annotated[
        Path,
        typer.Option(
            help="File to write, .parquet or .csv: row, label, kept columns, score, and group if there is one."
        ),
    ],
    data: Data = None,
    imported: Import = None,
    split: SplitName = "test",
    rows: Rows = None,
    batch_size: BatchSize = None,
    device_memory: Budget = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    device: Device = None,
    backend: Backend = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a score for every row of a split to a Parquet or CSV file.

    \b
    stoker predict runs/a --out scores.parquet
    stoker predict runs/a --data data/criteo --split valid --out scores.csv
    """
    from stoker.base.units import plural
    from stoker.training.scores.evaluation import check_scores_file, write_scores

    check_scores_file(out)
    memory = {"device_memory": device_memory, "host_memory": host_memory, "home_path": home_path}
    loaded, chosen, size = _open(run, data, imported, split, device, backend, threads, memory, batch_size)
    count = write_scores(loaded.model, chosen, out, rows=rows, batch_size=size, lookahead=_LOOKAHEAD)
    if as_json:
        print(json.dumps({"checkpoint": str(loaded.path), "step": loaded.step, "out": str(out), "rows": count}))
    else:
        typer.echo(f"{plural(count, 'score')} of {loaded.path} in {out}")


def _open(
    run: Path,
    data: Path | None,
    imported: str | None,
    split: str,
    device: str | None,
    backend: Any,
    threads: int | None,
    memory: dict[str, str | None],
    batch_size: int | None,
) -> tuple[Any, Split, int]:
    """The model, its rows where the run had them or the options say, the rows to score, and how many at a time."""
    from stoker.base.device import resolve_device
    from stoker.training.files.checkpoint import read_manifest
    from stoker.training.files.loading import load, saved_model
    from stoker.training.files.rundir import find_checkpoint, find_dataset, open_dataset, settings_around
    from stoker.training.placing import place_scoring
    from stoker.training.scores.evaluation import check_dataset

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    import_model(imported)
    checkpoint = find_checkpoint(run)
    saved_model(checkpoint, read_manifest(checkpoint))  # refuses what no command can build
    dataset = open_dataset(find_dataset(checkpoint) if data is None else data)
    chosen = _with_rows(dataset, split)
    on = resolve_device(device)
    given = {name: value for name, value in memory.items() if value is not None}
    if data is None or "device_memory" not in given:
        given = {**settings_around(checkpoint), **given}
    placement, size = place_scoring(
        read_manifest(checkpoint), dataset, given, batch_size=batch_size, lookahead=_LOOKAHEAD, device=on
    )
    loaded = load(checkpoint, device=on, backend=backend or "auto", placement=placement)
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
