"""What tensor-train tables cost in accuracy, against the same model uncompressed, after equal epochs.

Both sides are runs of ``stoker.train`` on the same rows in the same order, with settings of their own; three seeds. The
data sets are not ours to distribute. They are read from ``STOKER_DATA`` or ``../shared/data``.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import stoker
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult, data_files
from benchmarks.schedule import globo_sessions
from stoker.dataset.dataset import Dataset
from stoker.prep.prepare import run_prepare
from stoker.training import TrainConfig

__all__ = ["bars"]

METRICS = ("auc", "log_loss", "accuracy")
MOST = {"auc": 0.002, "accuracy": 0.001}  # lost at most
SCHEMA = """
[label]
column = "rating"
rule = "> 0"

[[categorical]]
name = "user"
source = "user_id"
type = "int"

[[categorical]]
name = "book"
source = "isbn"
type = "string"

[[categorical]]
name = "author"
source = "author"
type = "string"

[[categorical]]
name = "publisher"
source = "publisher"
type = "string"

[split]
rule = "hash"
train = 0.8
valid = 0.1
test = 0.1
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set, and the settings of both sides and of each."""

    title: str
    open: Callable[[Run], Dataset]
    settings: dict[str, Any]
    plain: dict[str, Any]
    compressed: dict[str, Any]


def book_ratings(run: Run) -> Dataset:
    """Book-Crossing: whether a reader rated a book, with its author and publisher; prepared once into the cache.

    Raises:
        NotRun: the files are not on this machine.
    """
    import polars as pl

    ratings, books = data_files("bookcrossing/ratings.parquet", "bookcrossing/books.parquet")
    out = CACHE / "book_ratings"
    if not (out / "manifest.json").exists():
        run.log("preparing Book-Crossing")
        with tempfile.TemporaryDirectory() as folder:
            rows, schema = Path(folder) / "rows.parquet", Path(folder) / "schema.toml"
            schema.write_text(SCHEMA)
            known = pl.scan_parquet(books).select("isbn", "author", "publisher").unique("isbn", maintain_order=True)
            pl.scan_parquet(ratings).join(known, on="isbn", how="left", maintain_order="left").sink_parquet(rows)
            run_prepare(str(schema), [rows], out=out)
    return Dataset(out)


_DLRM = {"model": "dlrm", "model_options": {"bottom": [64], "top": [256, 128]}, "schedule": "linear"}
_BOOKS = {"open": book_ratings, "settings": {**_DLRM, "batch_size": 2048, "epochs": 1, "dense_lr": 1e-3}}
CASES = {
    "books": Case(
        title="Book-Crossing, rated or not, random 80/10/10; books as tensor train",
        **_BOOKS,
        plain={"row_lr": 0.05},
        compressed={"row_lr": 0.05, "tt_rank": 32, "tt_rows": 100_000},
    ),
    "book-crossing": Case(
        title="Book-Crossing, the same; books, readers and authors as tensor trains",
        **_BOOKS,
        plain={"row_lr": 0.05},
        compressed={"row_lr": 0.05, "tt_rank": 32, "tt_rows": 100_000, "tt_own": {"user": 2, "author": 2}},
    ),
    "globo": Case(
        title="Globo, one reader in 4, last click; readers as tensor train",
        open=globo_sessions,
        settings={**_DLRM, "batch_size": 1024, "epochs": 1, "dense_lr": 1e-3},
        plain={"row_lr": 0.05},
        compressed={"row_lr": 0.05, "tt_own": {"user": 1}},
    ),
}


def _trained(data: Dataset, settings: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Metrics on the test rows after the last step, and bytes of rows or cores."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # Evaluated once, at the end: the best checkpoint is then the last one.
        result = stoker.train(
            data, out=Path(folder) / "run", eval_every=10**9, tensorboard=False, display="quiet", **settings
        )
    if result.best_step != result.step or result.epochs != settings["epochs"]:
        raise WrongResult(f"step {result.best_step} of {result.step} was scored, after {result.epochs} epochs")
    size = sum(table.num_bytes for table in result.model.embeddings.stored)
    return {name: float(result.test[name] or 0.0) for name in METRICS}, size


def loss(name: str, run: Run) -> Outcome:
    """What compression loses of AUC and accuracy in the means over the seeds, as a share of what it may: the larger."""
    case = CASES[name]
    data = case.open(run)
    seeds = range(1 if run.quick else 3)
    sides = {"uncompressed": case.plain, "tensor trains": case.compressed}
    values: dict[str, dict[str, list[float]]] = {side: {metric: [] for metric in METRICS} for side in sides}
    rows, sizes = [], {}
    for seed in seeds:
        for side, own in sides.items():
            run.log(f"seed {seed}: {side}")
            found, sizes[side] = _trained(data, {**case.settings, **own, "seed": seed})
            for metric in METRICS:
                values[side][metric].append(found[metric])
            rows.append([str(seed), side, *(f"{found[metric]:.5f}" for metric in METRICS)])
    means = {side: {metric: statistics.mean(each) for metric, each in of.items()} for side, of in values.items()}
    rows += [["mean", side, *(f"{means[side][metric]:.5f}" for metric in METRICS)] for side in sides]
    off = {metric: means["tensor trains"][metric] - means["uncompressed"][metric] for metric in METRICS}
    rows.append(["", "difference", *(f"{off[metric]:+.5f}" for metric in METRICS)])
    trains = TrainConfig(**case.compressed).tensor_trains(data.schema)
    large = {name: data.schema.num_embeddings[name] for name in trains}
    notes = [
        "compressed: " + ", ".join(f"{name} ({rows:,} rows)" for name, rows in large.items()),
        f"all tables take {sizes['uncompressed'] / 2**20:.1f} MiB uncompressed, "
        f"{sizes['tensor trains'] / 2**20:.2f} MiB with tensor trains",
        f"may lose: AUC {MOST['auc']}, accuracy {MOST['accuracy']}; the value is the larger share of that, below 0 "
        "where nothing is lost",
        "settings: " + ", ".join(f"{key} {value}" for key, value in case.settings.items())
        + f"; uncompressed {case.plain}; tensor trains {case.compressed}",
        "checked: both sides have trained as many epochs, and the last step is scored",
    ]  # fmt: skip
    table = Table(title=f"Test rows, {case.title}", columns=["seed", "tables", *METRICS], rows=rows)
    return Outcome(
        value=max(-off[metric] / most for metric, most in MOST.items()), tables=[table], notes=notes,
        data={"values": values, "bytes": sizes},
    )  # fmt: skip


def bars() -> list[Bar]:
    """The accuracy promises of tensor trains."""
    return [
        Bar(
            name=f"tt-accuracy-{name}",
            group="tensor-train-accuracy",
            title=f"accuracy and AUC that tensor trains lose, {case.title}, as a share of what they may",
            must=1.0,
            at_most=True,
            unit="",
            digits=2,
            run=partial(loss, name),
        )
        for name, case in CASES.items()
    ]
