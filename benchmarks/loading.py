"""Loading from memory: whole batches against torch's item-wise loader over tensors, and what a shuffle takes.

The rows are those of the reader's bars. Here the loader has them in memory as tensors, its best case: no file, no
mapping, a row is one index per tensor; ours copies them to main memory first (``data_memory``). Both read the same rows
in the same shuffled order, and every compared batch must be equal. On a GPU ours is also timed with the rows held there
and with page-locked copies one ahead.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from benchmarks import reader
from benchmarks.harness import Bar, Outcome, Run, Table, WrongResult
from stoker.base.device import resident_memory
from stoker.base.units import format_size
from stoker.dataset.order import EpochOrder
from stoker.dataset.split import BatchStream, Split, resident_bytes

__all__ = ["bars"]

BATCHES = (1024, 4096, 65536)
BATCH = 4096  # of the RAPIDS team's loader (Rabhi et al. 2019, Table 2)
SEED = 1
_NAMES = ("dense", "ids", "labels")


def streams(split: Split) -> dict[str, BatchStream]:
    """Our readers, by what they are called in the table."""
    room = resident_bytes(split, len(split))
    made = {
        "files, mapped": split.batches(BATCH, seed=SEED),
        "held in main memory": split.batches(BATCH, seed=SEED, data_memory=room),
    }
    if torch.cuda.is_available():
        made |= {
            "files, page-locked, one ahead": split.batches(BATCH, seed=SEED, device="cuda", prefetch=2),
            "held on the GPU": split.batches(BATCH, seed=SEED, device="cuda", data_memory=room),
        }
    return made


def item_loader(split: Split, rows: list[int], workers: int) -> DataLoader[Any]:
    """torch's loader over tensors, a row at a time, then the default collate."""
    shards = split.shards
    whole = [torch.cat([torch.from_numpy(getattr(shard, name).copy()) for shard in shards]) for name in _NAMES]
    return DataLoader(TensorDataset(*whole), batch_size=BATCH, sampler=rows, num_workers=workers)  # type: ignore[arg-type]


def check(split: Split, rows: list[int]) -> None:
    """Our first batches, of every stream, equal the loader's.

    Raises:
        WrongResult: one does not.
    """
    expected = list(itertools.islice(item_loader(split, rows[: 4 * BATCH], 0), 4))
    for what, stream in streams(split).items():
        for batch, other in zip(stream, expected, strict=False):
            for name, theirs in zip(_NAMES, other, strict=True):
                mine = getattr(batch, name).cpu()
                if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                    raise WrongResult(f"{what}, batch {batch.step}: {name} differs from the item-wise loader's")


def epoch_seconds(stream: BatchStream) -> float:
    """Mean seconds per batch over an epoch, all of it done on the device too."""
    start = time.perf_counter()
    for _ in stream:
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(stream)


def item_seconds(loader: DataLoader[Any], skip: int) -> float:
    """Mean seconds per batch of the item-wise loader, once its workers run."""
    source = iter(loader)
    for _ in range(skip):
        next(source)
    start = time.perf_counter()
    count = sum(1 for _ in source)
    return (time.perf_counter() - start) / count


def _rows(split: Split, count: int) -> list[int]:
    order = EpochOrder(len(split), pool_rows=len(split), seed=SEED, epoch=0)
    rows: list[int] = order.take(0, min(len(split), count)).tolist()
    return rows


def items(run: Run) -> Outcome:
    """How many times faster than the item-wise loader over tensors, the better of 0 and 2 workers."""
    split = reader.dataset(run).train
    batches = 8 if run.quick else 24
    check(split, _rows(split, 4 * BATCH))
    ours = streams(split)
    for stream in ours.values():
        epoch_seconds(stream)  # compiles, copies, fills the page cache
    loaders = {
        workers: item_loader(split, _rows(split, (batches + skip) * BATCH), workers)
        for workers, skip in ((0, 2), (2, 6))
    }
    times: dict[str, list[float]] = {name: [] for name in ours}
    theirs: dict[int, list[float]] = {workers: [] for workers in loaders}
    for number in range(run.rounds):
        run.log(f"round {number + 1}/{run.rounds}")
        for name, stream in ours.items():
            times[name].append(epoch_seconds(stream))
        for workers, loader in loaders.items():
            theirs[workers].append(item_seconds(loader, 2 if workers == 0 else 6))
    best = min(theirs, key=lambda workers: statistics.median(theirs[workers]))
    ratios = {name: [b / a for a, b in zip(mine, theirs[best], strict=True)] for name, mine in times.items()}
    peers = {f"DataLoader over tensors, {workers} workers": values for workers, values in theirs.items()}
    table = Table(
        title=f"Batches of {BATCH} shuffled rows, {len(split):,} rows of 160 bytes, in memory",
        columns=["reader", "ms/batch", "k rows/s", "times the loader"],
        rows=[
            [
                name,
                f"{statistics.median(values) * 1e3:.3f}",
                f"{BATCH / statistics.median(values) / 1e3:,.0f}",
                f"{statistics.median(ratios[name]):.0f}" if name in ratios else "",
            ]
            for name, values in (times | peers).items()
        ],
    )
    return Outcome(
        value=statistics.median(ratios["held in main memory"]),
        tables=[table],
        notes=["rows held in main memory count", "checked: first batches equal the loader's, tensor by tensor"],
        data={"ours": times, "items": {str(workers): values for workers, values in theirs.items()}},
    )


def whole_batch_loaders(split: Split, batch: int) -> dict[str, Callable[[], Iterator[Sequence[Tensor]]]]:
    """What people write who load whole batches: each gives a shuffled epoch of (dense, ids, labels)."""
    dense, ids, labels = (
        torch.cat([torch.from_numpy(getattr(shard, name).copy()) for shard in split.shards]) for name in _NAMES
    )
    width = dense.shape[1], ids.shape[1], 1
    matrix = torch.cat([dense.view(torch.int32), ids, labels.view(torch.int32).unsqueeze(1)], dim=1)

    def order() -> Tensor:
        drawn = EpochOrder(len(split), pool_rows=len(split), seed=SEED, epoch=0).take(0, len(split))
        return torch.from_numpy(drawn.astype("int64"))

    def one_matrix() -> Iterator[Sequence[Tensor]]:
        for rows in order().split(batch):
            d, i, y = matrix.index_select(0, rows).split(width, dim=1)
            yield d.view(torch.float32), i, y.squeeze(1).view(torch.float32)

    def three_tensors() -> Iterator[Sequence[Tensor]]:
        for rows in order().split(batch):
            yield [whole.index_select(0, rows) for whole in (dense, ids, labels)]

    def data_loader() -> Iterator[Sequence[Tensor]]:
        sampler = BatchSampler(order().tolist(), batch, drop_last=False)
        yield from DataLoader(TensorDataset(dense, ids, labels), batch_size=None, sampler=sampler)

    return {
        "index_select, one matrix": one_matrix,
        "index_select, three tensors": three_tensors,
        "DataLoader(batch_size=None, BatchSampler)": data_loader,
    }


def batches(run: Run) -> Outcome:
    """How many times faster than the fastest loader of whole batches, at the worst batch size."""
    split = reader.dataset(run).train
    room = resident_bytes(split, len(split))
    rows, ratios, times = [], {}, {}
    for size in BATCHES:
        stream = split.batches(size, seed=SEED, data_memory=room)
        loaders = whole_batch_loaders(split, size)
        first = list(itertools.islice(stream, 4))  # copies the rows, as those of the loaders are by now, and compiles
        for _ in stream:  # the rest of the epoch
            pass
        for label, loader in loaders.items():
            for batch, theirs in zip(first, loader(), strict=False):
                for name, other in zip(_NAMES, theirs, strict=True):
                    if not torch.equal(getattr(batch, name), other):
                        raise WrongResult(f"{label}, batch {batch.step} of {size}: {name} differs from ours")
        seconds: dict[str, list[float]] = {"stoker": [], **{label: [] for label in loaders}}
        for number in range(run.rounds):
            run.log(f"batch {size}, round {number + 1}/{run.rounds}")
            labels = list(seconds)
            for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
                start = time.perf_counter()
                # An epoch is a new order each time: what drawing it takes belongs to everybody's epoch.
                for _ in stream if label == "stoker" else loaders[label]():
                    pass
                seconds[label].append((time.perf_counter() - start) / len(stream))
        best = min(loaders, key=lambda label: statistics.median(seconds[label]))
        for label, values in seconds.items():
            pairs = [theirs / mine for theirs, mine in zip(values, seconds["stoker"], strict=True)]
            if label == best:
                ratios[f"batch {size}"] = statistics.median(pairs)
            cells = [f"{statistics.median(values) * 1e3:.3f}", f"{size / statistics.median(values) / 1e3:,.0f}"]
            rows.append([f"batch {size}: {label}", *cells, f"{statistics.median(pairs):.2f}"])
        times[f"batch {size}"] = seconds
    return Outcome(
        value=min(ratios.values()),
        tables=[
            Table(
                title=f"Shuffled epochs of {len(split):,} rows of 160 bytes in memory, whole batches",
                columns=["reader", "ms/batch", "k rows/s", "ours faster by"],
                rows=rows,
            )
        ],
        notes=["the fastest peer of each batch size is compared", "checked: first batches equal, tensor by tensor"],
        data={"ratios": ratios, "by batch": times},
    )


def shuffle(run: Run) -> Outcome:
    """Memory that shuffled epochs take on top of the rows held, in percent of them."""
    split = reader.dataset(run).train
    room = resident_bytes(split, len(split))
    before = resident_memory() or 0
    stream = split.batches(BATCH, seed=SEED, data_memory=room, reuse=True)
    next(iter(stream))  # copies the rows
    held = (resident_memory() or 0) - before
    if held < 0.9 * room:
        raise WrongResult(f"{format_size(held)} were taken for {format_size(room)} of rows: they are not held")
    peak = 0
    for _ in range(2 if run.quick else 4):
        for number, _batch in enumerate(stream):
            if number % 32 == 0:
                peak = max(peak, resident_memory() or 0)
    more = peak - before - held
    return Outcome(
        value=100 * max(0, more) / room,
        tables=[
            Table(
                title=f"Memory of shuffled epochs over {len(split):,} rows",
                columns=["rows", "held", "on top at most", "a second copy would take"],
                rows=[[format_size(room), format_size(held), format_size(max(0, more)), format_size(room)]],
            )
        ],
        notes=["anonymous memory of this process, looked at every 32 batches of every epoch"],
        data={"room": room, "held": held, "more": more},
    )


def bars() -> list[Bar]:
    """Loading from memory."""
    return [
        Bar(
            name="loading-items",
            group="loading",
            title="batches of rows held in memory against an item-wise DataLoader over tensors",
            must=100.0,
            aim=200.0,
            digits=0,
            run=items,
        ),
        Bar(
            name="loading-batches",
            group="loading",
            title="batches of rows held in memory against the fastest loader of whole batches, the worst batch size",
            must=1.0,
            aim=1.3,
            run=batches,
        ),
        Bar(
            name="loading-shuffle",
            group="loading",
            title="memory of a shuffled epoch on top of the rows held",
            must=5.0,
            aim=2.0,
            at_most=True,
            unit=" %",
            run=shuffle,
        ),
    ]
