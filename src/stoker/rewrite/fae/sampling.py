"""The input sampler and the access log of FAE (VLDB 2022, section 4.1): which training rows are read, and what is
counted of them.

Rows are drawn in blocks of up to :data:`BLOCK_ROWS` neighbours, without replacement, every block with equal
probability: reads stay long, and every row is as likely to be read as any other. Neighbours resemble each other (the
clicks of a session are next to each other), so a sample of blocks is worth less than as many single rows. Blocks are
therefore shorter, down to single rows, where the sample would have fewer than 32,768 of them.

Legend: n sampled rows, K blocks, F features, L ids, Z tables, Q levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.errors import DataError
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import make_gather
from stoker.dataset.order import permutation
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split

__all__ = ["BLOCK_ROWS", "Sample", "count_accesses", "draw", "first_hot_levels", "table_names"]

Int64 = npt.NDArray[np.int64]
Advance = Callable[[int, int], None]  # (rows read, rows to read)

BLOCK_ROWS = 64  # at most: 6.5 KiB of Criteo's ids
_BLOCKS = 2**15  # wanted at least
_ROWS = 2**16  # read together


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Blocks of rows of a split, in the order of the files."""

    share: float  # of the split's rows
    starts: Int64  # [K] first row
    stops: Int64  # [K] row after the last

    @property
    def rows(self) -> int:
        """How many rows were drawn."""
        return int((self.stops - self.starts).sum())


def draw(split: Split, share: float, *, seed: int, block_rows: int | None = None) -> Sample:
    """Draw a share of a split's rows.

    Args:
        split: the rows.
        share: x, in (0, 1]; at least one block is drawn.
        seed: same seed, same rows.
        block_rows: neighbours drawn together; None lets the size of the sample decide.
    """
    block = block_rows or max(1, min(BLOCK_ROWS, int(share * len(split)) // _BLOCKS))
    total = -(-len(split) // block)
    starts = block * np.sort(permutation(f"{seed}/profile", total)(0, min(total, max(1, round(share * total)))))
    stops = np.minimum(starts + block, len(split))
    return Sample(share=int((stops - starts).sum()) / max(len(split), 1), starts=starts, stops=stops)


def table_names(schema: FeatureSpec) -> list[str]:
    """Return the tables that features address, in the order of the features."""
    return list(dict.fromkeys(feature.table for feature in schema.features))


def count_accesses(dataset: Dataset, sample: Sample, advance: Advance) -> dict[str, npt.NDArray[np.int32]]:
    """Count the accesses of each table's rows: FAE's embedding logger. Takes 4 bytes a row.

    Raises:
        DataError: an id outside its table, or lengths that do not fit the ids.
    """
    schema = dataset.schema
    sizes = [schema.num_embeddings[name] for name in table_names(schema)]
    ends = np.cumsum(sizes)
    base_of = dict(zip(table_names(schema), ends - sizes, strict=True))
    bases = np.array([base_of[feature.table] for feature in schema.features], np.int64)  # [F]
    counts = np.zeros(int(ends[-1]), np.int32)
    for _, ids, feature in _read(dataset, sample, advance):
        np.add.at(counts, bases[feature] + ids, 1)
    return dict(zip(base_of, np.split(counts, ends[:-1]), strict=True))


def first_hot_levels(dataset: Dataset, sample: Sample, hot: Int64, advance: Advance) -> Int64:
    """Find the first level at which all ids of each sampled row are hot, [n]; Q where none is.

    Args:
        dataset: its training rows.
        sample: those to look at.
        hot: [Q, Z] hot rows of each table of :func:`table_names`, rising with the level.
        advance: called with (rows read, rows to read).

    Raises:
        DataError: an id outside its table, or lengths that do not fit the ids.
    """
    names = table_names(dataset.schema)
    levels = np.zeros(sample.rows, np.int64)
    for row, ids, feature in _read(dataset, sample, advance):
        for place, each in enumerate(dataset.schema.features):
            mine = feature == place
            level = np.searchsorted(hot[:, names.index(each.table)], ids[mine], side="right")
            np.maximum.at(levels, row[mine], level)
    return levels


def _read(dataset: Dataset, sample: Sample, advance: Advance) -> Iterator[tuple[Int64, Int64, Int64]]:
    """Read the ids of sampled rows, some rows at a time.

    Yields:
        The place of each id's row in the sample, the id, and the place of its feature, [L] each.
    """
    split, schema = dataset.train, dataset.schema
    gather = make_gather(split.shards, split.starts, ids_only=True)
    limits = np.array([schema.num_embeddings[feature.table] for feature in schema.features], np.int64)
    ends = np.cumsum(sample.stops - sample.starts)  # of each block, in the sample
    for start in range(0, sample.rows, _ROWS):
        place = np.arange(start, min(start + _ROWS, sample.rows))
        block = np.searchsorted(ends, place, side="right")
        rows = sample.stops[block] - ends[block] + place
        tensors = gather(rows, lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
        ids = tensors["ids"].numpy().reshape(-1).astype(np.int64)
        feature, row = np.tile(np.arange(len(limits)), len(rows)), np.repeat(place, len(limits))
        if "offsets" in tensors:
            lengths = np.diff(tensors["offsets"].numpy())
            feature, row = np.repeat(feature, lengths), np.repeat(row, lengths)
        if ((ids < 0) | (ids >= limits[feature])).any():
            split.check_ids()  # names the shard, the row, the feature and the id
            raise DataError(f"{split.shards[0].path.parent} changed while it was read. Run the command again.")
        yield row, ids, feature
        first, last = np.searchsorted(split.starts, [rows[0], rows[-1]], side="right")
        for shard in split.shards[first - 1 : last]:
            shard.release()
        advance(int(place[-1]) + 1, sample.rows)
