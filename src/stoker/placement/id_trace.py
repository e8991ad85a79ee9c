"""The ids of a stream of batches as a trace: for each step its distinct rows, numbered from the most frequent on.

Legend: T steps, L distinct rows of all steps one after the other, K rows that occur at all, N rows of all tables,
B examples, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base import spool
from stoker.base.errors import DataError
from stoker.base.spool import Spool
from stoker.dataset.dataset import Dataset
from stoker.ops.space import AddressSpace, make_space
from stoker.tables import tables_for

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class IdTrace:
    """Distinct rows step by step.

    Rows are numbered from 0 in the order of (id within its table, position of the table), and listed rising within a
    step. ``rows``, ``counts`` and ``following`` lie in unnamed temporary files, 16 bytes a place in all; what a
    simulation keeps in memory grows with K (about 40 bytes a row while recording), not with L.
    """

    offsets: Int64  # [T + 1] first place of each step
    rows: Int32  # [L]
    counts: Int32  # [L] occurrences of the row in its batch
    following: Int64  # [L] place of the row's next use; L + row if there is none
    num_rows: int  # K
    lookups: int  # occurrences of all rows

    @property
    def steps(self) -> int:
        """T."""
        return len(self.offsets) - 1

    @property
    def places(self) -> int:
        """L."""
        return int(self.offsets[-1])

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Steps [first, last) that are worked on together."""
        return spool.stretches(self.offsets)


def dataset_space(dataset: Dataset) -> AddressSpace:
    """The tables of a dataset as one group, in the order that models make them in.

    Raises:
        DataError: a dataset without categorical columns.
    """
    if not dataset.schema.features:
        raise DataError(f"{dataset.path} has no categorical or sequence column, so there is no row to cache.")
    tables = tables_for(dataset.schema, 1)
    return make_space(
        [table.name for table in tables],
        [table.num_embeddings for table in tables],
        [table.features for table in tables],
        [feature.name for feature in dataset.schema.features],
    )


def dataset_steps(
    dataset: Dataset, space: AddressSpace, *, batch_size: int, seed: int | None, steps: int | None
) -> tuple[int, Iterator[Int64]]:
    """The number of steps, and the keys ``id * tables + table`` of each training batch's lookups.

    Args:
        seed: of the shuffled order, as in ``Split.batches``; None keeps the order of the file.
        steps: batches in all, over several epochs where needed; None takes one epoch.

    Raises:
        DataError: no training rows, or (while reading) an id outside its table.
    """
    stream = dataset.train.batches(batch_size, seed=seed, reuse=True)
    if not len(stream):
        raise DataError(f"{dataset.path} has no training rows.")
    total = len(stream) if steps is None else steps
    table_of, rows = np.asarray(space.table_of, np.int64), np.asarray(space.rows, np.int64)

    def keys() -> Iterator[Int64]:
        left = total
        while left:
            for batch in stream:
                ids = batch.ids.numpy().astype(np.int64)
                table = table_of
                if batch.offsets is not None:
                    table = np.repeat(np.tile(table_of, len(batch)), np.diff(batch.offsets.numpy()))
                if np.any(ids < 0) or np.any(ids >= rows[table]):
                    dataset.train.check_ids()  # names the shard, the feature and the id
                yield (ids * len(space.names) + table).reshape(-1)
                left -= 1
                if not left:
                    return

    return total, keys()


def array_steps(arrays: Iterable[Any], num_embeddings: int | None, steps: int | None) -> Iterator[Int64]:
    """The keys of batches given as arrays of ids of one table, any shape."""
    for number, array in enumerate(arrays):
        if number == steps:
            return
        ids = np.asarray(array)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"batch {number} has ids of type {ids.dtype}; ids are whole numbers. Convert them first.")
        keys = ids.astype(np.int64).reshape(-1)
        if keys.size and (keys.min() < 0 or (num_embeddings is not None and keys.max() >= num_embeddings)):
            low, high = int(keys.min()), int(keys.max())
            room = "" if num_embeddings is None else f" and below num_embeddings={num_embeddings:,}"
            raise DataError(f"batch {number} has ids from {low:,} to {high:,}; they must be at least 0{room}.")
        yield keys


def record(steps: Iterable[Int64], advance: Callable[[int], None] = lambda step: None) -> tuple[IdTrace, int]:
    """Make a trace of each step's keys.

    Args:
        steps: for each step the keys of its lookups, where the greater key leaves first when all else is equal.
        advance: called with the number of steps read.

    Returns:
        The trace, and the greatest key.

    Raises:
        DataError: no lookups at all.
        OSError: the disk of the temporary files is full.
    """
    from stoker.placement.replay_kernels import link

    offsets, lookups = [0], 0
    known, fresh, waiting = np.empty(0, np.int64), list[Int64](), 0
    with Spool(np.int64) as wide, Spool(np.int32) as narrow, Spool(np.int32) as numbers:
        for keys in steps:
            distinct, counts = np.unique(keys, return_counts=True)
            wide.add(distinct)
            narrow.add(counts)
            offsets.append(offsets[-1] + len(distinct))
            lookups += len(keys)
            fresh.append(distinct)
            waiting += len(distinct)
            if waiting >= max(4 * spool.CHUNK, len(known)):  # as rarely as memory in proportion to K allows
                known, fresh, waiting = np.unique(np.concatenate([known, *fresh])), [], 0
            advance(len(offsets) - 1)
        known = np.unique(np.concatenate([known, *fresh]))
        if not len(known):
            raise DataError("the trace has no lookups. Give a dataset, or batches with ids.")
        places = wide.mapped()
        for begin, end in spool.spans(len(places)):
            numbers.add(np.searchsorted(known, places[begin:end]))
        rows, occurrences = numbers.mapped(), narrow.mapped()
    greatest = int(known[-1])
    nearest = len(rows) + np.arange(len(known), dtype=np.int64)
    for begin, end in reversed(list(spool.spans(len(rows)))):
        link(rows, begin, end, nearest, places)  # the keys are no longer needed: their file takes the links
    trace = IdTrace(
        offsets=np.array(offsets, np.int64),
        rows=rows,
        counts=occurrences,
        following=places,
        num_rows=len(known),
        lookups=lookups,
    )
    return trace, greatest
