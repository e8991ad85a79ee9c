"""``stoker classify``: how long 40 M rows take, and how many inputs are hot at which budget.

Results are compared with the definition in NumPy, row by row and in order, before a time is believed.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.peers.worker_tools import peak_memory
from benchmarks.popularity import CASES, SHARES, criteo_rows, forget
from benchmarks.workload import KAGGLE
from stoker.base.units import format_size
from stoker.dataset.dataset import Dataset
from stoker.dataset.shards import Shard
from stoker.dataset.split import Split
from stoker.placement.replay import row_size
from stoker.rewrite.classified import ClassifyReport, said_by, write_classified
from stoker.rewrite.hot_profile import HotProfile
from stoker.rewrite.popularity import profile

__all__ = ["bars", "byte_budget"]

ROWS = 40_000_000
QUICK_ROWS = 4_000_000
BUDGET = 0.05  # of the bytes of all rows are for hot ones
ROUNDS = 3  # each writes as much as it reads


def byte_budget(data: Dataset, share: float) -> int:
    """Bytes of this share of all rows, at 16 columns and row-wise Adagrad."""
    return int(share * sum(data.schema.num_embeddings.values()) * row_size(16, "float32", "rowwise_adagrad"))


def _hot_rows(split: Split, found: HotProfile) -> Iterator[tuple[Shard, np.ndarray]]:
    """Every shard of a split, with which of its rows are hot by the definition."""
    limits = [found.hot_rows[feature.table] for feature in split.schema.features]
    for shard in split.shards:
        hot = np.ones(shard.rows, np.bool_)
        for column, limit in enumerate(limits):
            hot &= shard.ids[:, column] < limit
        yield shard, hot
        shard.release()


def _rows(split: Split, name: str, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of one tensor of a split."""
    parts = [
        getattr(shard, name)[max(0, start - first) : max(0, min(stop, first + shard.rows) - first)]
        for shard, first in zip(split.shards, split.starts, strict=False)
        if first < stop and first + shard.rows > start
    ]
    return np.concatenate(parts) if parts else getattr(split.shards[0], name)[:0]


def check(data: Dataset, made: Dataset, found: HotProfile) -> None:
    """The classified rows are those of the source, in its order, each in the part that the definition says.

    Raises:
        WrongResult: naming the first shard of the source that is not.
    """
    places = {True: 0, False: 0}
    for number, (shard, hot) in enumerate(_hot_rows(data.train, found)):
        for kind, part in ((True, made.hot), (False, made.cold)):
            count = int((hot == kind).sum())
            for name in ("dense", "ids", "labels"):
                mine = _rows(part, name, places[kind], places[kind] + count) if count else None
                if mine is not None and not np.array_equal(mine, getattr(shard, name)[hot == kind]):
                    raise WrongResult(f"{name} of the {'hot' if kind else 'cold'} rows of shard {number} differ")
            places[kind] += count
        for part in (made.hot, made.cold):
            for one in part.shards:
                one.release()
    if (places[True], places[False]) != (len(made.hot), len(made.cold)):
        raise WrongResult(f"{places[True]:,} rows are hot, {len(made.hot):,} were written")


def _classified(data: Dataset, found: HotProfile, out: Path) -> ClassifyReport:
    shutil.rmtree(out, ignore_errors=True)
    return write_classified(data, out, **said_by(found))


def speed(run: Run) -> Outcome:
    """Seconds for 40 M rows; quick: of 4 M, times ten."""
    data = criteo_rows(QUICK_ROWS if run.quick else ROWS, KAGGLE, run)
    found = profile(data, device_memory=byte_budget(data, BUDGET))
    out = CACHE / "classified"
    try:
        run.log("classifying")
        report = _classified(data, found, out)
        run.log("comparing with the definition")
        check(data, Dataset(out), found)
        written = Dataset(out).train.bytes
        seconds = []
        for number in range(min(run.rounds, ROUNDS)):
            run.log(f"round {number + 1}")
            seconds.append(_classified(data, found, out).seconds)
        cold = _classified(data, found, out).seconds if forget(data) else None
    finally:
        shutil.rmtree(out, ignore_errors=True)
    scale = ROWS / len(data.train)
    median = statistics.median(seconds)
    rows = [
        ["files in memory", f"{median:.1f}", f"{len(data.train) / median / 1e6:.2f}", f"{written / median / 1e9:.2f}"]
    ]
    if cold is not None:
        rate = [f"{len(data.train) / cold / 1e6:.2f}", f"{written / cold / 1e9:.2f}"]
        rows.append(["files not in memory", f"{cold:.1f}", *rate])
    peak = peak_memory()
    share = report.hot / len(data.train)
    notes = [
        f"{share:.1%} of the inputs are hot, by {format_size(found.hot_bytes)} of hot rows",
        "checked: hot and cold rows are those of the definition in NumPy, in the order of the source",
        f"shards are hashed on the way in and out and flushed to disk; peak memory {format_size(peak)}, mapped files "
        "and comparison included",
        "the slower of the two lines counts, scaled to 40 M rows",
    ]
    return Outcome(
        value=scale * max([median, *([cold] if cold is not None else [])]),
        tables=[
            Table(
                title=f"{len(data.train):,} generated Criteo rows, {format_size(written)}",
                columns=["", "seconds", "M rows/s", "GB/s"],
                rows=rows,
            )
        ],
        notes=notes,
        data={"seconds": seconds, "cold": cold, "hot": report.hot, "rows": len(data.train)},
    )


def hot_share(run: Run) -> Outcome:
    """Percentage points between the profile's share of hot inputs and that of all training rows, the worst case."""
    rows, worst, values = [], 0.0, []
    for title, opened in CASES.items():
        data = opened(run)
        counts = {name: each.numpy() for name, each in data.counts.items()}
        for share in SHARES:
            run.log(f"{title}, {share:.0%}")
            found = profile(data, device_memory=byte_budget(data, share))
            hot = sum(int(mask.sum()) for _, mask in _hot_rows(data.train, found)) / len(data.train)
            served = sum(int(counts[name][:limit].sum()) for name, limit in found.hot_rows.items())
            accesses = served / sum(int(each.sum()) for each in counts.values())
            worst = max(worst, 100 * abs(found.input_share - hot))
            used = sum(found.hot_rows.values()) / sum(data.schema.num_embeddings.values())
            rows.append([
                title, f"{share:.0%}", f"{used:.1%}", f"{accesses:.1%}", f"{hot:.1%}", f"{found.access_share:.1%}",
                f"{found.input_share:.1%}",
            ])  # fmt: skip
            values.append({"case": title, "budget": share, "accesses": accesses, "inputs": hot})
    columns = ["data", "budget", "rows hot", "accesses", "inputs", "accesses, profile", "inputs, profile"]
    return Outcome(
        value=worst,
        tables=[Table(title="Share of accesses and of inputs that hot rows serve", columns=columns, rows=rows)],
        notes=[
            "budget: of the bytes of all rows; an input is hot if all its ids are",
            "accesses by the counts and inputs by the definition, over all training rows; the profile read 5 % of them",
        ],
        data={"shares": values},
    )


def bars() -> list[Bar]:
    """The promises of the classifier."""
    return [
        Bar(
            name="classify-40m",
            group="classify",
            title="classification of 40 M generated Criteo rows",
            must=110.0,
            at_most=True,
            unit=" s",
            digits=1,
            run=speed,
        ),
        Bar(
            name="hot-share",
            group="classify",
            title="share of inputs that are hot, profile against all rows, in percentage points",
            must=1.0,
            at_most=True,
            unit="",
            run=hot_share,
        ),
    ]
