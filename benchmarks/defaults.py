"""A run without settings against the logistic regression of ``stoker baseline``, on six small logs; three seeds.

What a newcomer gets from ``stoker train data --out run`` should not be below what a linear model gets from the same
rows. The rules for defaults were chosen by AUC on validation rows, of other users or impressions than these where there
are others. A test part of Criteo's head would have 20 to 50 clicks, whose AUC is off by 0.05 or more, so each seventh
of its lines is the test once. The logs are read from ``STOKER_DATA`` or ``../shared/data``.
"""

from __future__ import annotations

import gzip
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from benchmarks.accuracy import TASKS
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, data_files
from benchmarks.tensor_train_accuracy import SCHEMA
from stoker.dataset.dataset import Dataset
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import SplitRule
from stoker.training.tools.baseline import baseline

__all__ = ["bars"]

SEEDS = 3
PARTS = ("train", "valid", "test")
FOLDS = 7  # of Criteo's head: runs of lines, each the test once
READERS = 50  # one in so many of Online Retail's customers, of Globo's and five of Book-Crossing's readers


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log and how it is cut: ``write`` puts files for a fold into a folder."""

    title: str
    files: Sequence[str]
    write: Callable[[Sequence[Path], Path, int], Sequence[Path]]
    recipe: str  # or the text of a schema
    split: str | None = None
    folds: int = 1


def _retail(sources: Sequence[Path], folder: Path, fold: int) -> list[Path]:
    import polars as pl

    customer = pl.col("CustomerID").cast(pl.Float64, strict=False).cast(pl.Int64, strict=False)
    pl.scan_parquet(sources[0]).filter(customer % READERS == 0).sink_parquet(folder / "invoices.parquet")
    return [folder / "invoices.parquet"]


def _globo(sources: Sequence[Path], folder: Path, fold: int) -> list[Path]:
    import polars as pl

    pl.scan_parquet(sources[0]).filter(pl.col("user_id") % READERS == 0).sink_parquet(folder / "clicks.parquet")
    return [folder / "clicks.parquet"]


def _movielens(sources: Sequence[Path], folder: Path, fold: int) -> list[Path]:
    import polars as pl

    pl.scan_parquet(sources[0]).filter(pl.col("u") % 5 == 0).sink_parquet(folder / "ratings.parquet")
    return [folder / "ratings.parquet", *sources[1:]]


def _books(sources: Sequence[Path], folder: Path, fold: int) -> list[Path]:
    import polars as pl

    ratings, books = sources
    known = pl.scan_parquet(books).select("isbn", "author", "publisher").unique("isbn", maintain_order=True)
    mine = pl.scan_parquet(ratings).filter(pl.col("user_id") % (READERS // 2) == 0)
    mine.join(known, on="isbn", how="left", maintain_order="left").sink_parquet(folder / "rows.parquet")
    return [folder / "rows.parquet"]


def _ebnerd(sources: Sequence[Path], folder: Path, fold: int) -> list[Path]:
    import polars as pl

    files = []
    for behaviors, history, every in ((*sources[:2], 70), (*sources[2:], 10)):
        pl.scan_parquet(behaviors).gather_every(every).sink_parquet(folder / behaviors.name)
        files += [folder / behaviors.name, history]
    return files


def _criteo(sources: Sequence[Path], folder: Path, fold: int) -> list[Path]:
    """Lines of which run number ``fold`` is the test; every ninth of the others validates."""
    lines = gzip.decompress(sources[0].read_bytes()).splitlines(keepends=True)
    begin, end = (len(lines) * number // FOLDS for number in (fold, fold + 1))
    known = lines[:begin] + lines[end:]
    parts = {
        "train": [line for number, line in enumerate(known) if number % 9],
        "valid": known[::9],
        "test": lines[begin:end],
    }
    for name, part in parts.items():
        (folder / f"{name}.tsv").write_bytes(b"".join(part))
    return [folder / f"{name}.tsv" for name in parts]


LOGS = {
    "criteo": Log(
        title="Criteo, first 10,000 lines; 7 folds, as they have 320 clicks", files=["criteo_tb/day_0_head.tsv.gz"],
        write=_criteo, recipe="criteo", folds=FOLDS,
    ),
    "ebnerd": Log(
        title="EB-NeRD, one impression in 70 of week 1, one in 10 of week 2",
        files=TASKS["ebnerd"].files,
        write=_ebnerd, recipe="ebnerd",
    ),
    "online-retail": Log(
        title="Online Retail, one customer in 50", files=["online_retail/invoices.parquet"], write=_retail,
        recipe="online-retail",
    ),
    "book-crossing": Log(
        title="Book-Crossing, one reader in 25", files=["bookcrossing/ratings.parquet", "bookcrossing/books.parquet"],
        write=_books, recipe=SCHEMA,
    ),
    "globo": Log(title="Globo, one reader in 50", files=["globo/clicks.parquet"], write=_globo, recipe="globo"),
    "movielens": Log(
        title="MovieLens, one person in 5, random 80/10/10",
        files=TASKS["movielens"].files,
        write=_movielens, recipe="movielens", split="random:0.8,0.1",
    ),
}  # fmt: skip


def prepared(name: str, fold: int) -> Dataset:
    """Return a log's dataset, prepared once into the cache.

    Raises:
        NotRun: its files are not on this machine.
    """
    log, out = LOGS[name], CACHE / f"defaults_{name}_{fold}"
    sources = data_files(*log.files)
    if not (out / "manifest.json").exists():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            files = log.write(sources, folder, fold)
            recipe: Any = log.recipe
            if "\n" in recipe:
                (folder / "schema.toml").write_text(recipe)
                recipe = str(folder / "schema.toml")
            given: dict[str, Any] = {} if log.split is None else {"split": log.split}
            if log.folds > 1:
                given["split"] = SplitRule(rule="files", files={f"{part}*": part for part in PARTS})
            run_prepare(recipe, list(files), out=out, **given)
    return Dataset(out)


def least_margin(run: Run) -> Outcome:
    """Return the least, over the logs, of the mean test AUC of default runs less that of the logistic regression."""
    seeds = range(1 if run.quick else SEEDS)
    rows, margins, values = [], {}, {}
    for name, log in LOGS.items():
        ours: list[float] = []
        linear: list[float] = []
        said = ""
        for fold in range(1 if run.quick else log.folds):
            data = prepared(name, fold)
            figures = baseline(data).figures["logistic regression"]["test"]
            linear.append(float(figures["auc"] or 0.5))
            for seed in seeds:
                run.log(f"{name}: fold {fold}, seed {seed}")
                with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                    result = stoker.train(data, out=Path(folder) / "run", seed=seed, display="quiet")
                    result.model.embeddings.close()
                ours.append(float(result.test["auc"] or 0.5))
                said = f"{len(data.train):,}"
        margins[name] = statistics.mean(ours) - statistics.mean(linear)
        values[name] = {"ours": ours, "logistic regression": linear}
        middle = statistics.mean(ours)
        cells = (middle, min(ours), max(ours), statistics.mean(linear))
        rows.append([log.title, said, *(f"{value:.4f}" for value in cells), f"{margins[name]:+.4f}"])
    table = Table(
        title="Test AUC", rows=rows,
        columns=["log", "training rows", "default run", "least", "most", "logistic regression", "margin"],
    )  # fmt: skip
    notes = [
        f"default run: stoker.train(data, out=...) with {len(seeds)} seed(s) a fold, no other setting",
        "logistic regression: stoker.baseline on the same rows",
        "the value is the least margin",
    ]
    return Outcome(value=min(margins.values()), tables=[table], notes=notes, data={"auc": values})


def bars() -> list[Bar]:
    """The promise of the first run."""
    return [
        Bar(
            name="defaults-vs-logistic",
            group="defaults",
            title="test AUC of a run without settings, less that of a logistic regression, on the worst of six logs",
            must=0.0,
            unit="",
            digits=4,
            rounds=1,
            run=least_margin,
        )
    ]
