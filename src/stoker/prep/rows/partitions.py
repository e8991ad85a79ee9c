"""Rows by partitions of their keys: all rows of a key at once, in bounded memory.

Few rows are one partition, in memory. Of more, each block of rows is sorted by a hash of the key and written to an
Arrow file with a record batch for each partition. A partition is read from all these files, and its outputs are written
with a record batch for each block; the outputs of a block are read from the files of all partitions. Memory has the
blocks and partitions that are worked on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from stoker.base.ordered import ordered_map
from stoker.prep.features.groups import key

__all__ = ["PARTITION_ROWS", "by_key", "partition_numbers"]

PARTITION_ROWS = 2**20  # about
_MOST = 256  # partitions: with more rows, each has more
_AT = "__at"  # a row's place in its block


def partition_numbers(frame: pl.DataFrame, names: Sequence[str], partitions: int) -> Any:
    """Return int64 [n]: the partition of each row, the same for equal keys of the same types, in one process."""
    keys = [key(name, frame.schema[name]) for name in names]
    hashes = frame.select(pl.struct(keys).hash(seed=0)).to_series().to_numpy()
    return (hashes >> np.uint64(32)) % np.uint64(partitions)


def by_key(
    read: Callable[[int], pl.DataFrame],
    sizes: Sequence[int],
    names: Sequence[str],
    work: Callable[[pl.DataFrame, int, int], pl.DataFrame],
    folder: Path,
    threads: int,
    rows: int = PARTITION_ROWS,
) -> Iterator[pl.DataFrame]:
    """Yield the outputs of the rows of each block, in order.

    Args:
        read: the rows of a block, by its number.
        sizes: rows of each block.
        names: columns of the key.
        work: makes the outputs of the rows of a partition, one row for each; also gets the partition's number and how
            many there are.
        folder: of temporary files.
        threads: that work.
        rows: of a partition, about.

    Raises:
        OSError: the disk is full or fails.
    """
    partitions = min(_MOST, -(-sum(sizes) // rows))
    blocks = range(len(sizes))
    if partitions <= 1:
        made = work(pl.concat(ordered_map(read, blocks, threads), rechunk=True), 0, 1)
        ends = np.cumsum(sizes)
        for block in blocks:
            yield made[int(ends[block]) - sizes[block] : int(ends[block])]
        return
    counts = np.zeros((len(sizes), partitions), np.int64)

    def split(block: int) -> None:
        frame = read(block)
        numbers = partition_numbers(frame, names, partitions)
        order = np.argsort(numbers.astype(np.uint16), kind="stable")
        counts[block] = np.bincount(numbers.astype(np.int64), minlength=partitions)
        ordered = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(_AT))[pl.Series(order)]
        _write(folder / f"block-{block}", ordered, counts[block])

    def work_out(partition: int) -> None:
        frame = pl.concat((file.batch(partition) for file in given), rechunk=True)
        made = work(frame.drop(_AT), partition, partitions)
        _write(folder / f"partition-{partition}", made, counts[:, partition])

    def together(block: int) -> pl.DataFrame:
        made = pl.concat((file.batch(block) for file in outputs), rechunk=True)
        places = np.empty(made.height, np.int64)
        places[given[block].whole(_AT).to_numpy()] = np.arange(made.height)
        return made[pl.Series(places)]

    given: list[_Batches] = []
    outputs: list[_Batches] = []
    try:
        for _ in ordered_map(split, blocks, threads):
            pass
        given = [_Batches(folder / f"block-{block}") for block in blocks]
        for _ in ordered_map(work_out, range(partitions), threads):
            pass
        outputs = [_Batches(folder / f"partition-{partition}") for partition in range(partitions)]
        yield from ordered_map(together, blocks, threads)
    finally:
        for file in (*given, *outputs):
            file.close()
        for path in [*folder.glob("block-*"), *folder.glob("partition-*")]:
            path.unlink()


def _write(path: Path, frame: pl.DataFrame, sizes: Any) -> None:
    """Write rows with a record batch for each of ``sizes`` rows."""
    table = frame.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    whole = table.to_batches()[0] if frame.height else pa.RecordBatch.from_pylist([], table.schema)
    with pa.ipc.new_file(path, table.schema) as writer:  # not compressed: batches are mapped
        start = 0
        for size in map(int, sizes):
            writer.write_batch(whole.slice(start, size))
            start += size


class _Batches:
    """A file of record batches, of which any may be read."""

    def __init__(self, path: Path) -> None:
        self._source = pa.memory_map(str(path))
        self._file: Any = pa.ipc.open_file(self._source)
        self._lock = threading.Lock()

    def batch(self, number: int) -> pl.DataFrame:
        with self._lock:
            found = self._file.get_batch(number)
        return pl.DataFrame(pl.from_arrow(found))

    def whole(self, column: str) -> pl.Series:
        with self._lock:
            batches = [self._file.get_batch(number).select([column]) for number in range(self._file.num_record_batches)]
        return pl.DataFrame(pl.from_arrow(pa.Table.from_batches(batches))).to_series()

    def close(self) -> None:
        self._source.close()
