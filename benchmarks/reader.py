"""The reader: whole shuffled batches against one training step, and against an item-wise DataLoader.

Both read the same rows of the same files in the same shuffled order, and every compared batch must be equal.
Ours is timed over whole epochs, without prefetch and with fresh tensors for every batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from stoker.base.errors import DataError
from stoker.dataset.dataset import Dataset
from stoker.dataset.order import EpochOrder
from stoker.dataset.split import Split
from stoker.testing import make_dataset

__all__ = ["STEP_SECONDS", "bars", "seconds_per_batch"]

BATCH = 2048
SEED = 1
#: our fastest full DLRM step at batch 2048 (bf16, AVX-512 machine): the hardest step to keep up with
STEP_SECONDS = 0.011


def dataset(run: Run) -> Dataset:
    """A Criteo-shaped dataset (13 dense, 26 ids, 160 bytes a row): 4 M rows, quick 1 M; kept in the cache."""
    rows = 1_000_000 if run.quick else 4_000_000
    path = CACHE / f"reader_{rows}"
    try:
        return Dataset(path)
    except DataError:
        run.log(f"writing {rows:,} rows to {path.name}")
        return make_dataset(path, rows=rows, num_dense=13, num_embeddings=[100_000] * 26)


def item_loader(split: Split, rows: list[int], workers: int) -> DataLoader[Any]:
    """torch's usual way: one row at a time through ``__getitem__``, then the default collate."""
    return DataLoader(split, batch_size=BATCH, sampler=rows, num_workers=workers)  # type: ignore[arg-type]


def check(split: Split, rows: list[int]) -> None:
    """Our first batches equal the loader's.

    Raises:
        WrongResult: one does not.
    """
    pairs = zip(split.batches(BATCH, seed=SEED), item_loader(split, rows[: 8 * BATCH], 0), strict=False)
    for ours, theirs in islice(pairs, 8):
        for name in ("dense", "ids", "labels"):
            mine = getattr(ours, name)
            if mine.dtype != theirs[name].dtype or not torch.equal(mine, theirs[name]):
                raise WrongResult(f"batch {ours.step}: {name} differs from the item-wise loader's")
    epoch = np.sort(np.concatenate([batch.dense.numpy()[:, 0] for batch in split.batches(BATCH, seed=SEED)]))
    plain = np.sort(np.concatenate([shard.dense[:, 0] for shard in split.shards]))
    if not np.array_equal(epoch, plain):
        raise WrongResult("an epoch does not hold every row exactly once")


def seconds_per_batch(split: Split, **settings: Any) -> float:
    """Mean seconds per batch over an epoch of ours."""
    stream = split.batches(BATCH, seed=SEED, **settings)
    start = time.perf_counter()
    for _ in stream:
        pass
    return (time.perf_counter() - start) / len(stream)


def item_seconds(split: Split, rows: list[int], workers: int, batches: int) -> float:
    """Mean seconds per batch of the item-wise loader, once its workers run."""
    skip = 2 if workers == 0 else 10
    source: Iterator[Any] = iter(item_loader(split, rows[: (batches + skip) * BATCH], workers))
    for _ in range(skip):
        next(source)
    start = time.perf_counter()
    count = sum(1 for _ in source)
    return (time.perf_counter() - start) / count


def bandwidth(num_bytes: int) -> float:
    """Seconds to copy as many bytes from one place in memory to another, one thread: the physical limit."""
    source, target = np.ones(2**26, np.uint8), np.empty(2**26, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return min(times[1:]) * num_bytes / len(source)


def _prepare(run: Run) -> tuple[Split, list[int]]:
    split = dataset(run).train
    order = EpochOrder(len(split), pool_rows=len(split), seed=SEED, epoch=0)
    rows: list[int] = order.take(0, min(len(split), 100 * BATCH)).tolist()
    check(split, rows)
    seconds_per_batch(split)  # compiles the kernels and fills the page cache
    return split, rows


def share(run: Run) -> Outcome:
    """Reader time as a percentage of a training step."""
    split, _ = _prepare(run)
    settings: dict[str, dict[str, Any]] = {
        "shuffled, whole split": {},
        "shuffled, pools of 64 MiB": {"shuffle_memory": "64MiB"},
        "shuffled, recycled tensors": {"reuse": True},
    }
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(run.rounds):
        for name, extra in settings.items():
            seconds[name].append(seconds_per_batch(split, **extra))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    floor = bandwidth(BATCH * 160)
    rows = [
        [
            name,
            f"{value * 1e3:.3f}",
            f"{BATCH / value / 1e6:.1f}",
            f"{value / STEP_SECONDS:.2%}",
            f"{floor / value:.0%}",
        ]
        for name, value in medians.items()
    ]
    worst = max(medians["shuffled, whole split"], medians["shuffled, pools of 64 MiB"])
    return Outcome(
        value=100 * worst / STEP_SECONDS,
        tables=[
            Table(
                title=f"Reader, batch {BATCH}, {len(split):,} rows of 160 bytes, one thread, no prefetch",
                columns=["order", "ms/batch", "M rows/s", "of a step", "of copy speed"],
                rows=rows,
            )
        ],
        notes=[
            f"against a step of {STEP_SECONDS * 1e3:.0f} ms; the slower of the first two counts",
            "checked: first batches equal the item-wise loader's, an epoch holds every row once",
        ],
        data={"seconds": seconds, "step_seconds": STEP_SECONDS},
    )


def loader(run: Run) -> Outcome:
    """How many times faster than the item-wise loader, the better of 0 and 2 workers."""
    split, rows = _prepare(run)
    batches = 20 if run.quick else 60
    ours: list[float] = []
    theirs: dict[int, list[float]] = {0: [], 2: []}
    for number in range(run.rounds):
        run.log(f"round {number + 1}/{run.rounds}")
        ours.append(seconds_per_batch(split))
        for workers, times in theirs.items():
            times.append(item_seconds(split, rows, workers, batches))
    best = min(theirs, key=lambda workers: statistics.median(theirs[workers]))
    ratios = [item / mine for item, mine in zip(theirs[best], ours, strict=True)]
    table = Table(
        title=f"Batches of {BATCH} shuffled rows, {len(split):,} rows of 160 bytes",
        columns=["reader", "ms/batch", "k rows/s"],
        rows=[
            [
                label,
                f"{statistics.median(values) * 1e3:.3f}",
                f"{BATCH / statistics.median(values) / 1e3:,.0f}",
            ]
            for label, values in [
                ("stoker, one thread", ours),
                *((f"DataLoader over rows, {workers} workers", values) for workers, values in theirs.items()),
            ]
        ],
    )
    return Outcome(
        value=statistics.median(ratios),
        tables=[table],
        notes=["checked: the loader's first batches are equal to ours, tensor by tensor"],
        data={"ours": ours, "items": {str(workers): values for workers, values in theirs.items()}},
    )


def bars() -> list[Bar]:
    """The two promises of the reader."""
    return [
        Bar(
            name="reader-share",
            group="reader",
            title="reader time per training step at batch 2048",
            must=5.0,
            aim=1.0,
            at_most=True,
            unit=" %",
            run=share,
        ),
        Bar(
            name="reader-loader",
            group="reader",
            title="shuffled batches against an item-wise DataLoader",
            must=100.0,
            aim=300.0,
            digits=0,
            run=loader,
        ),
    ]
