"""The input sampler and the access log of FAE (VLDB 2022, section 4.1): which training rows are read, and what is
counted of them.

**Blocks.** Rows are drawn in blocks of :data:`BLOCK_ROWS` neighbours, without replacement, every block with equal
probability. So reads stay long, and every row is as likely to be read as any other: counts over the sampled share
estimate the counts of all rows without bias. Neighbours resemble each other (a session's clicks lie side by side),
which makes a sample of blocks worth less than as many single rows. So blocks are shorter, down to single rows, where
the sample would have fewer than 32,768 of them; and the deviation between **groups**, into which the blocks are dealt
at random, contains what is left of it.

**Strata.** Ids follow the training count, so the access log need not hold a number for each row: it counts by ranges of
neighbouring ids, 64 for each doubling (ids below 64 have one each). Memory does not grow with the tables.

Legend: K blocks, G groups, Z tables, F features, J strata, Q levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.errors import DataError
from stoker.dataset.dataset import Dataset
from stoker.dataset.reading.order import permutation
from stoker.dataset.shards import Shard
from stoker.dataset.split import Split
from stoker.ops.codegen.threads import team
from stoker.rewrite.fae import sampling_reference

__all__ = ["BLOCK_ROWS", "AccessLog", "Sample", "draw", "kernels", "strata_edges"]

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Advance = Callable[[int, int], None]  # (rows read, rows to read)

BLOCK_ROWS = 64  # at most: 6.5 KiB of Criteo's ids
_BLOCKS = 2**15  # wanted at least
_RUN = 2**16  # rows between two signs of progress


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Blocks of rows of a split, in the order of the file."""

    share: float  # of the split's rows
    rows: int
    shards: Int64  # [K] number of the shard, of those that the manifest lists
    starts: Int64  # [K] first row in it
    stops: Int64  # [K] row after the last
    groups: Int64  # [K]
    num_groups: int  # G

    def first(self, rows: int) -> Sample:
        """A random part of the blocks with about so many rows; all of them if there are fewer."""
        count = max(1, round(len(self.starts) * min(1.0, rows / max(self.rows, 1))))
        if count == len(self.starts):
            return self
        picked = np.sort(permutation(f"part of {self.rows}", len(self.starts))(0, count))
        starts, stops = self.starts[picked], self.stops[picked]
        taken = int((stops - starts).sum())
        return Sample(
            share=self.share * taken / self.rows, rows=taken, shards=self.shards[picked], starts=starts, stops=stops,
            groups=self.groups[picked], num_groups=self.num_groups,
        )  # fmt: skip


def draw(split: Split, share: float, *, groups: int, seed: int, block_rows: int | None = None) -> Sample:
    """Draw a share of a split's rows.

    Args:
        split: the rows.
        share: x, in (0, 1]; at least one block is drawn.
        groups: G, dealt out evenly and at random.
        seed: same seed, same rows.
        block_rows: neighbours drawn together; None lets the size of the sample decide.
    """
    block = block_rows or max(1, min(BLOCK_ROWS, int(share * len(split)) // _BLOCKS))
    sizes = np.array([int(shard["rows"]) for shard in split.entry["shards"]], np.int64)
    ends = np.cumsum(-(-sizes // block))  # blocks up to the end of each shard
    total = int(ends[-1]) if len(ends) else 0
    count = min(total, max(1, round(share * total)))
    order = permutation(f"{seed}/profile", total)(0, count)
    rank = np.argsort(order, kind="stable")  # the place of each block in the draw, by its place in the file
    blocks = order[rank]
    shards = np.searchsorted(ends, blocks, side="right")
    starts = (blocks - np.concatenate([[0], ends[:-1]])[shards]) * block
    stops = np.minimum(starts + block, sizes[shards])
    taken = int((stops - starts).sum())
    return Sample(
        share=taken / max(len(split), 1), rows=taken, shards=shards, starts=starts, stops=stops, groups=rank % groups,
        num_groups=groups,
    )  # fmt: skip


def strata_edges(num_rows: int) -> Int64:
    """First id of each stratum of a table and the number of its rows, [J + 1]."""
    octaves = max(0, math.ceil(math.log2(num_rows / 64 + 1)))
    edges = [(64 << octave) + (np.arange(64, dtype=np.int64) << octave) - 64 for octave in range(octaves + 1)]
    flat = np.concatenate(edges)
    return np.append(flat[flat < num_rows], num_rows)


def _silent(done: int, total: int) -> None: ...


class AccessLog:
    """Counts the accesses of sampled rows.

    Args:
        dataset: its training rows are counted.

    Its methods call ``advance`` with the rows that they have read and are to read.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._split = dataset.train
        schema = dataset.schema
        self.names = list(dict.fromkeys(feature.table for feature in schema.features))
        self.sizes = np.array([schema.num_embeddings[name] for name in self.names], np.int64)  # [Z]
        self.tables = np.array([self.names.index(feature.table) for feature in schema.features], np.int64)  # [F]
        self._limits = self.sizes[self.tables]
        self._one_hot = schema.one_hot
        self._kernels = kernels()

    def strata(self, sample: Sample, advance: Advance = _silent) -> Int64:
        """Accesses by group, table and stratum of :func:`strata_edges`, [G, Z, J].

        Raises:
            DataError: an id outside its table, or lengths that do not fit the ids.
        """
        most = max((len(strata_edges(int(size))) - 1 for size in self.sizes), default=0)
        out = np.zeros((sample.num_groups, len(self.sizes), most), np.int64)
        kernel = self._kernel("strata")
        # A group belongs to one thread, so no count is written by two.
        threads = min(torch.get_num_threads(), sample.num_groups) if self._kernels else 1
        for shard, picked in self._runs(sample, advance):
            parts = [picked[sample.groups[picked] % threads == i] for i in range(threads)]
            self._count(
                shard,
                kernel,
                [(sample.starts[p], sample.stops[p], sample.groups[p], self.tables, self._limits, out) for p in parts],
            )
        return out

    def rows(self, sample: Sample, advance: Advance = _silent) -> list[npt.NDArray[np.int32]]:
        """Accesses by row, an array for each table: FAE's embedding logger. Takes 4 bytes a row.

        Raises:
            DataError: an id outside its table, or lengths that do not fit the ids.
        """
        ends = np.cumsum(self.sizes)
        bases = ends - self.sizes
        out = np.zeros(int(ends[-1]) if len(ends) else 0, np.int32)
        kernel = self._kernel("rows")
        owned = self._divide(min(torch.get_num_threads(), len(self.sizes)) if self._kernels else 1)
        for shard, picked in self._runs(sample, advance):
            starts, stops = sample.starts[picked], sample.stops[picked]
            self._count(
                shard, kernel, [(starts, stops, columns, self._limits, bases[self.tables], out) for columns in owned]
            )
        return [out[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def levels(self, sample: Sample, hot: Int64, advance: Advance = _silent) -> Int64:
        """Inputs by group and the first level at which all their ids are hot, [G, Q + 1].

        Args:
            sample: the rows.
            hot: [Q, Z] hot rows of each table, rising with the level.

        Raises:
            DataError: an id outside its table, or lengths that do not fit the ids.
        """
        out = np.zeros((sample.num_groups, len(hot) + 1), np.int64)
        kernel = self._kernel("levels")
        threads = min(torch.get_num_threads(), sample.num_groups) if self._kernels else 1
        by_feature = np.ascontiguousarray(hot[:, self.tables])
        for shard, picked in self._runs(sample, advance):
            parts = [picked[sample.groups[picked] % threads == i] for i in range(threads)]
            self._count(
                shard,
                kernel,
                [(sample.starts[p], sample.stops[p], sample.groups[p], self._limits, by_feature, out) for p in parts],
            )
        return out

    def _kernel(self, name: str) -> Callable[..., int]:
        module = self._kernels or sampling_reference
        found: Callable[..., int] = getattr(module, name if self._one_hot else f"bag_{name}")
        return found

    def _runs(self, sample: Sample, advance: Advance) -> Iterator[tuple[Shard, Int64]]:
        """(shard, its blocks), some hundred thousand rows at a time; says how far it is and gives pages back."""
        done = 0
        sizes = np.cumsum(sample.stops - sample.starts)
        for number, shard in enumerate(self._split.shards):
            first, last = np.searchsorted(sample.shards, [number, number + 1])
            while first < last:
                before = int(sizes[first - 1]) if first else 0
                end = min(last, max(first + 1, int(np.searchsorted(sizes, before + _RUN, side="right"))))
                yield shard, np.arange(first, end)
                done += int(sizes[end - 1]) - before
                first = end
                advance(done, sample.rows)
            shard.release()

    def _count(self, shard: Shard, kernel: Callable[..., int], arguments: list[tuple[Any, ...]]) -> None:
        data = (shard.ids,) if self._one_hot else (shard.ids, shard.lengths, shard.row_offsets)
        if any(row >= 0 for row in team(len(arguments)).run(kernel, [data + rest for rest in arguments])):
            self._split.check_ids()  # names the shard, the row, the feature and the id
            raise DataError(f"{shard.path} changed while it was read. Run the command again.")

    def _divide(self, threads: int) -> list[Int64]:
        """Features by thread: those of one table together, large tables weighing more."""
        owned: list[list[int]] = [[] for _ in range(threads)]
        load = [0.0] * threads
        cost = {
            table: float((self.tables == table).sum()) * (4 if self.sizes[table] > 2**17 else 1)
            for table in range(len(self.sizes))
        }
        for table in sorted(cost, key=lambda table: -cost[table]):
            thread = load.index(min(load))
            load[thread] += cost[table]
            owned[thread] += np.flatnonzero(self.tables == table).tolist()
        return [np.array(sorted(columns), np.int64) for columns in owned]


def kernels() -> Any:
    """The module of Numba kernels; None where Numba is not installed."""
    try:
        from stoker.rewrite.fae import sampling_kernels
    except ImportError:
        return None
    return sampling_kernels
