"""``stoker profile``: how near the published estimate comes to the counts, and how much faster these are than a scan.

The estimate of FAE (VLDB 2022, section 4.1.2) has two errors: the input sampler's (the sampled accesses of a row
scatter) and that of estimating a table's size from some of its rows. Its interval speaks of the second one, so the
truth that it is judged by is a scan of the whole sampled log. Beside it stands the truth of the data: how many rows of
a table have at least the share t of its accesses by the full counts, at the threshold t that the run itself found.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult, data_files
from benchmarks.lookahead import globo
from benchmarks.workload import KAGGLE, SKEW, kaggle_like
from stoker import synthetic
from stoker.base.device import cpu_count
from stoker.dataset.dataset import Dataset
from stoker.ops.codegen.jit import jit
from stoker.placement.replay import row_size
from stoker.prep.prepare import run_prepare
from stoker.rewrite.hot_profile import HotProfile, HotTable
from stoker.rewrite.popularity import ExactRows, Thresholds, count_accesses, draw, profile, true_hot_rows

__all__ = ["CASES", "SHARES", "bars", "book_crossing", "criteo_rows", "forget"]

SHARES = (0.01, 0.05, 0.10, 0.25)  # budgets, of what all rows take
JUDGED = 0.05  # budgets from here on count: below, a table has too few hot rows for chunks of 1,024
SAMPLE = 0.05
BOOKS = """
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

[split]
rule = "hash"
column = "isbn"
train = 1.0
valid = 0.0
test = 0.0
"""


def book_crossing(run: Run) -> Dataset:
    """Book-Crossing ratings: reader and book; prepared once into the cache.

    Raises:
        NotRun: the ratings are not on this machine.
    """
    ratings = data_files("bookcrossing/ratings.parquet")
    out = CACHE / "book_crossing"
    if not (out / "manifest.json").exists():
        run.log("preparing Book-Crossing")
        schema = CACHE / "book_crossing.toml"
        CACHE.mkdir(exist_ok=True)
        schema.write_text(BOOKS)
        run_prepare(str(schema), ratings, out=out)
    return Dataset(out)


def criteo_rows(rows: int, sizes: Sequence[int], run: Run) -> Dataset:
    """Generated rows of Criteo's shape (13 dense columns, 26 tables, 160 bytes a row); kept in the cache."""
    out = CACHE / f"criteo_shape_{rows}_{sum(sizes)}"
    if not (out / "manifest.json").exists():
        run.log(f"writing {rows:,} synthetic rows, {rows * 160 / 1e9:.1f} GB")
        synthetic.dataset(out, rows=rows, sizes=sizes, num_dense=13, alpha=SKEW)
    return Dataset(out)


def _generated(run: Run) -> Dataset:
    return criteo_rows(500_000 if run.quick else 2_000_000, kaggle_like(1_000_000), run)


CASES: dict[str, Callable[[Run], Dataset]] = {
    "Globo, in order of time": globo,
    "Book-Crossing": book_crossing,
    "Criteo-like (synthetic)": _generated,
}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Tables of many runs at one budget."""

    case: str
    budget: float  # share of all bytes
    tables: int  # judged, over all runs; those that are hot as a whole left out
    inside: float  # share of them with the truth in the interval
    near: float  # share with the estimate within 10 % of the truth
    near_total: float  # share of runs whose total size is within 10 %
    worst: float  # of the totals
    near_log: float  # share within 10 % of the truth of the sampled log
    inside_log: float
    width: float  # of the interval over the truth, median
    over: int  # runs that exceeded the budget


def _judge(case: str, data: Dataset, budget: float, seeds: int) -> Judged:
    row = row_size(16, "float32", "rowwise_adagrad")
    size = int(budget * row * sum(data.schema.num_embeddings.values()))
    inside, near, totals, widths, log_near, log_inside, over = [], [], [], [], [], [], 0
    for seed in range(seeds):
        found = profile(data, device_memory=size, sample=SAMPLE, seed=seed)
        over += found.hot_bytes > size
        judged = [table for table in found.tables if not table.whole]
        true = true_hot_rows(data, found)
        truths = [true[table.name] for table in judged]
        for table, truth in zip(judged, truths, strict=True):
            inside.append(table.low <= truth <= table.high)
            near.append(_off(table.estimate, truth) <= 0.1)
            widths.append((table.high - table.low) / max(truth, 1))
        totals.append(_off(sum(table.estimate for table in judged), sum(truths)))
        for table, truth in _log_truths(data, found, judged, seed):
            log_inside.append(table.low <= truth <= table.high)
            log_near.append(_off(table.estimate, truth) <= 0.1)
    return Judged(
        case=case, budget=budget, tables=len(near), inside=_share(inside), near=_share(near),
        near_total=_share([off <= 0.1 for off in totals]), worst=max(totals), near_log=_share(log_near),
        inside_log=_share(log_inside), width=statistics.median(widths), over=over,
    )  # fmt: skip


def _off(estimate: int, truth: int) -> float:
    return abs(estimate - truth) / max(truth, 1)


def _share(values: Sequence[bool]) -> float:
    return sum(values) / max(len(values), 1)


def _log_truths(data: Dataset, found: HotProfile, judged: Sequence[HotTable], seed: int) -> list[tuple[HotTable, int]]:
    """Tables and how many of their rows the whole sampled log shows as hot."""
    taken = draw(data.train, SAMPLE, seed=seed)
    rows = count_accesses(data, taken, lambda done, total: None)
    return [
        (table, int((rows[table.name] >= found.threshold * table.accesses * taken.share).sum())) for table in judged
    ]


@lru_cache(maxsize=1)
def _judged(run: Run) -> list[Judged]:
    """One measurement serves both bars."""
    out = []
    for case, opened in CASES.items():
        data = opened(run)
        for budget in SHARES[1::2] if run.quick else SHARES:
            run.log(f"{case}, {budget:.0%}")
            out.append(_judge(case, data, budget, 20 if run.quick else 200))
    return out


def _outcome(run: Run, value: Callable[[Judged], float]) -> Outcome:
    found = _judged(run)
    if exceeded := sum(each.over for each in found):
        raise WrongResult(f"{exceeded} runs exceeded their budget")
    table = Table(
        title=f"Hot rows at the found threshold against full counts, {SAMPLE:.0%} sample, 99.9 % intervals",
        columns=[
            "case", "budget", "inside", "within 10 %", "totals within 10 %", "worst total", "width",
            "inside, sampled log", "within 10 %, sampled log",
        ],
        rows=[
            [
                each.case, f"{each.budget:.0%}", f"{each.inside:.1%}", f"{each.near:.1%}",
                f"{each.near_total:.1%}", f"{each.worst:.1%}", f"{each.width:.0%}",
                f"{each.inside_log:.1%}", f"{each.near_log:.1%}",
            ]
            for each in found
        ],
    )  # fmt: skip
    notes = [
        "inside, within 10 %: of the tables of all runs, those under 1 MB left out; totals: of runs, all their tables",
        "width: of the interval, over the truth, median",
        "sampled log: the truth is what a scan of the whole sampled log would find: the chunks' own error",
        f"the worst case counts, of budgets from {JUDGED:.0%} on, against the sampled log; no run exceeded its budget",
    ]
    data: dict[str, Any] = {"judged": [vars(each) for each in found]}
    return Outcome(
        value=100 * min(value(each) for each in found if each.budget >= JUDGED), tables=[table], notes=notes, data=data
    )


def interval(run: Run) -> Outcome:
    """Share of tables and runs with the truth of the sampled log in the interval."""
    return _outcome(run, lambda each: each.inside_log)


def estimate(run: Run) -> Outcome:
    """Share of tables and runs with the estimate within a tenth of the truth of the sampled log."""
    return _outcome(run, lambda each: each.near_log)


@jit
def _count_column(ids: np.ndarray, column: int, out: np.ndarray) -> None:
    for row in range(len(ids)):
        out[ids[row, column]] += 1


def _counted(data: Dataset) -> dict[str, np.ndarray]:
    """Accesses by row of one-hot tables, in one pass over all ids on as many threads as there are cores."""
    out = {feature.table: np.zeros(data.schema.num_embeddings[feature.table], np.int64)
           for feature in data.schema.features}  # fmt: skip
    columns = list(enumerate(data.schema.features))
    with ThreadPoolExecutor(cpu_count()) as pool:
        for shard in data.train.shards:
            list(pool.map(lambda each: _count_column(shard.ids, each[0], out[each[1].table]), columns))  # noqa: B023
            shard.release()
    return out


def _scan(data: Dataset, budget: int, row: int) -> dict[str, int]:
    """The hot rows of a full scan: one pass over all ids counts them, and the counts are compared with the cut-off."""
    tables = {name: ExactRows(counts) for name, counts in _counted(data).items()}
    whole = [table.rows * row < 10**6 for table in tables.values()]
    _, hot = Thresholds(list(tables.values()), [row] * len(tables), whole).fill(budget)
    return dict(zip(tables, hot.tolist(), strict=True))


def forget(data: Dataset) -> bool:
    """Drop the training shards from the page cache; False where the system cannot."""
    for shard in data.train.shards:
        shard.release()
        with contextlib.suppress(OSError), shard.path.open("rb") as file:
            if not hasattr(os, "posix_fadvise"):
                return False
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def speed(run: Run) -> Outcome:
    """How many times faster than a full scan the profile from the vocabulary's counts is."""
    data = criteo_rows(4_000_000 if run.quick else 40_000_000, KAGGLE, run)
    budget, row = 2**29, row_size(16, "float32", "rowwise_adagrad")
    for name, counts in _counted(data).items():
        if not np.array_equal(counts, data.counts[name].numpy()):
            raise WrongResult(f"the full scan counts table {name} differently than the dataset does")
    exact = profile(data, device_memory=budget)
    if exact.hot_rows != _scan(data, budget, row):
        raise WrongResult("the profile's hot rows are not the full scan's")
    ways: dict[str, Callable[[], object]] = {
        "full scan": lambda: _scan(data, budget, row),
        "counts of the vocabulary": lambda: profile(data, device_memory=budget),
        "sample of 5 %, as published": lambda: profile(data, device_memory=budget, sample=SAMPLE),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(run.rounds):
        for name, way in ways.items():
            data.__dict__.pop("counts", None)
            seconds[name].append(_timed(way))
    cold = {name: _timed(way) for name, way in list(ways.items())[:2] if forget(data)}
    scan = statistics.median(seconds["full scan"])
    table = Table(
        title=f"{len(data.train):,} generated rows, 26 tables of {sum(KAGGLE):,} rows, budget 512 MiB",
        columns=["", "seconds", "of the full scan", "files not in memory"],
        rows=[
            [
                name,
                f"{statistics.median(values):.3f}",
                f"1/{scan / statistics.median(values):.1f}",
                f"{cold[name]:.2f}" if name in cold else "",
            ]
            for name, values in seconds.items()
        ],
    )
    ratios = [a / b for a, b in zip(seconds["full scan"], seconds["counts of the vocabulary"], strict=True)]
    return Outcome(
        value=statistics.median(ratios),
        tables=[table],
        notes=[
            "full scan: one pass over all ids counts them by row, on as many threads; then the same search for t",
            "checked: its counts are the dataset's, and its hot rows the profile's",
        ],
        data={"seconds": seconds, "cold": cold, "hot_rows": exact.hot_rows},
    )


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bars() -> list[Bar]:
    """The promises of the profile."""
    return [
        Bar(
            name="profile-interval",
            group="profile",
            title="published size estimates of hot tables: the sampled log inside the 99.9 % interval",
            must=99.0,
            unit=" %",
            run=interval,
        ),
        Bar(
            name="profile-estimate",
            group="profile",
            title="published size estimates of hot tables: within 10 % of the sampled log",
            must=95.0,
            unit=" %",
            run=estimate,
        ),
        Bar(
            name="profile-speed",
            group="profile",
            title="profile from the vocabulary's counts against a full scan, 40 M generated rows",
            must=15.0,
            run=speed,
        ),
    ]
