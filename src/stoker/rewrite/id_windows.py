"""Which ids of a table occur near one another: pairs of an id and a window of neighbouring training rows.

Windows overlap by half, so that the order which is made of them does not depend on where a batch begins. They are
counted in half windows: window w is the halves w - 1 and w.

Legend: N ids of the table, W windows, M pairs, n training rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.dataset.shards import Shard
from stoker.dataset.spec import FeatureSpec

__all__ = ["IdWindows", "TableUse", "table_ids"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

_IDS = 2**21  # looked at together


@dataclass(frozen=True, kw_only=True)
class TableUse:
    """When the ids of a table are used."""

    counts: Int64  # [N] training occurrences
    first: Int64  # [N] training row where each occurs first; n where it never does
    starts: Int64  # [N + 1] first pair of each id
    windows: Int32  # [M] windows that hold it, numbered as drawn
    num_windows: int  # W, of those drawn
    share: float  # of all windows that were drawn


class IdWindows:
    """Collects the pairs of a table in bounded memory, whatever the pieces they come in.

    Once there are more than ``limit``, every second of the windows still in is left out, in an order drawn by
    ``seed``: the pairs of the others stay whole.

    Args:
        counts: [N] training occurrences.
        rows: n.
        window: rows of a window, at least 2.
        limit: M at most.
        seed: of the draw.
    """

    def __init__(self, counts: Int64, *, rows: int, window: int, limit: int, seed: int) -> None:
        self._counts, self._limit = counts, limit
        self._half = max(1, window // 2)
        self._width = -(-rows // self._half) + 1  # W, before any is left out
        self._rank = np.random.default_rng(seed).permutation(self._width)
        self._kept = self._width  # windows whose rank is below are in
        self._first = np.full(len(counts), rows, np.int64)
        self._parts: list[Int64] = []  # keys id * width + window, each sorted
        self._size = 0

    def add(self, ids: npt.NDArray[np.integer], rows: Int64) -> None:
        """Occurrences ``ids`` [L] in the training rows ``rows`` [L], which rise."""
        if not len(ids):
            return
        keys = np.unique(ids.astype(np.int64) * self._width + rows // self._half)
        seen, place = np.unique(ids, return_index=True)
        self._first[seen] = np.minimum(self._first[seen], rows[place])
        for part in (keys, keys + 1):
            part = part[self._rank[part % self._width] < self._kept]
            self._parts.append(part)
            self._size += len(part)
        if self._size > 2 * self._limit:
            self._thin()

    def _thin(self) -> None:
        keys = np.unique(np.concatenate(self._parts)) if self._parts else np.empty(0, np.int64)
        while len(keys) > self._limit and self._kept > 1:
            self._kept = -(-self._kept // 2)
            keys = keys[self._rank[keys % self._width] < self._kept]
        self._parts, self._size = [keys], len(keys)

    def use(self) -> TableUse:
        """What was collected."""
        self._thin()
        ids, windows = np.divmod(self._parts[0], self._width)
        return TableUse(
            counts=self._counts,
            first=self._first,
            starts=np.searchsorted(ids, np.arange(len(self._counts) + 1)).astype(np.int64),
            windows=self._rank[windows].astype(np.int32),
            num_windows=self._kept,
            share=self._kept / self._width,
        )


def table_ids(shard: Shard, schema: FeatureSpec, table: str) -> Iterator[tuple[npt.NDArray[np.integer], Int64]]:
    """The ids of a table in a shard with their rows, some at a time, by row.

    Yields:
        Ids [L] and their rows in the shard [L].
    """
    places = [place for place, feature in enumerate(schema.features) if feature.table == table]
    ids = shard.ids
    step = max(1, _IDS * shard.rows // max(1, ids.size))  # rows
    for start in range(0, shard.rows, step):
        stop = min(start + step, shard.rows)
        if shard.lengths is None or shard.row_offsets is None:
            yield ids[start:stop][:, places].reshape(-1), np.repeat(np.arange(start, stop), len(places))
            continue
        lengths = shard.lengths[start:stop]
        feature = np.repeat(np.tile(np.arange(lengths.shape[1], dtype=np.int16), stop - start), lengths.reshape(-1))
        mine = np.isin(feature, places)
        row = np.repeat(np.arange(start, stop), lengths.sum(axis=1, dtype=np.int64))
        yield ids[shard.row_offsets[start] : shard.row_offsets[stop]][mine], row[mine]
