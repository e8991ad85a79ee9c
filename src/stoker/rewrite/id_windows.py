"""Which ids of a table occur near one another: pairs of an id and a window of neighbouring training rows.

Windows overlap by half, so that the order which is made of them does not depend on where a batch begins. They are
counted in half windows: window w is the halves w - 1 and w.

Legend: N ids of the table, W windows, M pairs, n training rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.dataset.shards import Shard
from stoker.dataset.spec import FeatureSpec

__all__ = ["IdWindows", "TableUse", "feature_of_ids", "table_ids"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class TableUse:
    """When the ids of a table are used."""

    counts: Int64  # [N] training occurrences
    first: Int64  # [N] training row where each occurs first; n where it never does
    starts: Int64  # [N + 1] first pair of each id
    windows: Int32  # [M] windows that hold it, numbered as drawn
    num_windows: int  # W, of those drawn


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
        )


def table_ids(shard: Shard, schema: FeatureSpec, table: str) -> tuple[npt.NDArray[np.integer], Int64]:
    """Return the ids of a table in a shard and their rows, [L] each, by row."""
    places = [place for place, feature in enumerate(schema.features) if feature.table == table]
    if shard.lengths is None:
        return shard.ids[:, places].reshape(-1), np.repeat(np.arange(shard.rows), len(places))
    mine = np.isin(feature_of_ids(shard), places)
    return shard.ids[mine], np.repeat(np.arange(shard.rows), shard.lengths[:, places].sum(axis=1))


def feature_of_ids(shard: Shard) -> npt.NDArray[np.int16]:
    """Return the place of the feature of each id of a shard with sequences, [L]."""
    assert shard.lengths is not None
    features = np.arange(shard.lengths.shape[1], dtype=np.int16)
    return np.repeat(np.tile(features, shard.rows), shard.lengths.reshape(-1))
