"""Shards are checked before their rows are read: the bytes against the manifest, the ids against their tables.

A file is hashed once per process, with all of torch's threads where several files are due: about 1.5 GB/s a core,
so 0.1 s for a million rows of Criteo, in files that are then in the page cache. What this process wrote was hashed on
its way.

Legend: n rows of a shard, F features, L ids in all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.errors import DataError
from stoker.base.files import file_identity
from stoker.dataset.rows import SplitRows
from stoker.dataset.shards import Shard
from stoker.dataset.spec import FeatureSpec
from stoker.ops.codegen.threads import team

__all__ = ["ShardChecks", "check_ids", "written"]

_IDS = 2**20  # looked at together
_REMEDY = "Restore the file from a copy, or {again}: the same input gives the same bytes, and runs go on from them."
_AGAIN = {
    "prepare": "run the dataset's stoker prepare command again with --overwrite",
    # Its other splits share their files with the source.
    "classify": "run the dataset's stoker classify command again with --overwrite, and stoker prepare before it if the "
    "source is damaged too",
    "reorder": "run the dataset's stoker reorder command again with --overwrite, and stoker prepare before it if the "
    "source is damaged too",
}

_good: set[Hashable] = set()  # what this process has found good: file, checksum, sizes of the tables


def written(path: Path, sha256: str, sizes: Sequence[int]) -> None:
    """Take note of a shard that this process has just written, with ids below ``sizes`` by feature."""
    with path.open("rb") as file:
        _good.add((file_identity(file), sha256, tuple(sizes)))


class ShardChecks:
    """The shards of a split that this process has not checked yet."""

    def __init__(self, split: SplitRows) -> None:
        self._split = split
        self._entries = split.entry["shards"]
        schema = split.schema
        sizes = tuple(schema.num_embeddings[feature.table] for feature in schema.features)
        self._keys: list[Hashable] = [
            (shard.identity, entry["sha256"], sizes) for shard, entry in zip(split.shards, self._entries, strict=True)
        ]
        self._pending = {number for number, key in enumerate(self._keys) if key not in _good}

    def before(self, start: int, stop: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Check the shards that hold the rows [start, stop) of the split, which are about to be read.

        Args:
            progress: called with the bytes checked and those due, from any thread.

        Raises:
            DataError: a shard is damaged or holds an id outside its table.
        """
        if not self._pending or start >= stop:
            return
        starts = self._split.starts
        numbers = range(bisect_right(starts, start) - 1, bisect_left(starts, stop))
        due = [number for number in numbers if number in self._pending]
        if not due:
            return
        work = iter(due)
        failed: list[int] = []
        sizes = {number: int(self._entries[number]["bytes"]) for number in due}
        done: list[int] = []  # bytes of each shard checked

        def check_some(helper: int) -> None:
            for number in work:
                if failed:
                    return
                try:
                    self._check(number)
                    done.append(sizes[number])
                    if progress is not None:
                        progress(sum(done), sum(sizes.values()))
                except BaseException:
                    failed.append(helper)
                    raise

        threads = min(torch.get_num_threads(), len(due))
        team(threads).run(check_some, [(helper,) for helper in range(threads)])
        self._pending.difference_update(due)

    def _check(self, number: int) -> None:
        shard, entry, split = self._split.shards[number], self._entries[number], self._split
        affected = f"Rows {split.starts[number]:,} to {split.starts[number + 1] - 1:,} of split {split.name} lie in it."
        remedy = _REMEDY.format(again=_AGAIN[split.made_by])
        size, digest = shard.digest()
        if size != entry["bytes"]:
            raise DataError(
                f"{shard.path} has {size:,} bytes, the manifest says {entry['bytes']:,}: it was truncated or altered. "
                f"{affected} {remedy}"
            )
        if digest != entry["sha256"]:
            raise DataError(
                f"{shard.path} is damaged: its sha256 begins with {digest[:16]}, in the manifest with "
                f"{entry['sha256'][:16]}. {affected} {remedy}"
            )
        check_ids(shard, split.schema)
        _good.add(self._keys[number])


def check_ids(shard: Shard, schema: FeatureSpec) -> None:
    """Check every id of a shard against its table.

    Raises:
        DataError: naming the first row, feature and id outside its table, or a row whose lengths are wrong.
    """
    if not schema.features:
        return
    limits = np.array([schema.num_embeddings[feature.table] for feature in schema.features], np.int64)
    # Read as unsigned numbers, negative ids are too large as well: one comparison finds both.
    held = shard.ids
    unsigned = np.dtype(f"u{held.itemsize}")
    bounds = np.minimum(limits.view(np.uint64), np.uint64(2 ** (8 * unsigned.itemsize - 1))).astype(unsigned)
    step = max(1, _IDS * shard.rows // max(1, held.size))  # rows
    for start in range(0, shard.rows, step):
        outside = _first_outside(shard, start, min(start + step, shard.rows), bounds)
        if outside is not None:
            row, column, found = outside
            feature = schema.features[column]
            raise DataError(
                f"{shard.path}, row {row:,}: feature {feature.name} holds id {found:,}, table {feature.table} has "
                f"{limits[column]:,} rows (ids 0 to {limits[column] - 1:,}). Prepare the dataset again."
            )
        shard.release()


def _first_outside(
    shard: Shard, start: int, stop: int, bounds: npt.NDArray[np.unsignedinteger]
) -> tuple[int, int, int] | None:
    """Row, feature and value of the first id of rows [start, stop) that reaches its feature's bound."""
    if shard.lengths is None or shard.row_offsets is None:
        found = shard.ids[start:stop]
        ids = found.view(bounds.dtype)
        if (ids.max(axis=0) < bounds).all():
            return None
        row, column = np.argwhere(ids >= bounds)[0].tolist()
        return start + row, column, int(found[row, column])
    _check_lengths(shard, start, stop)
    first = int(shard.row_offsets[start])
    ids = shard.ids[first : shard.row_offsets[stop]].view(bounds.dtype)
    # Most often no id reaches even the smallest table's size, and nobody needs to know whose it is.
    if not len(ids) or ids.max() < bounds.min():
        return None
    lengths = shard.lengths[start:stop].reshape(-1)
    outside = ids >= np.repeat(np.tile(bounds, stop - start), lengths)
    at = int(np.argmax(outside))
    if not outside[at]:
        return None
    row, column = divmod(int(np.searchsorted(np.cumsum(lengths), at, side="right")), len(bounds))
    return start + row, column, int(shard.ids[first + at])


def _check_lengths(shard: Shard, start: int, stop: int) -> None:
    """The bags of rows [start, stop) lie one after the other within the ids."""
    assert shard.lengths is not None
    assert shard.row_offsets is not None
    lengths, offsets = shard.lengths[start:stop], shard.row_offsets[start : stop + 1]
    good = (lengths >= 0).all(axis=1) & (offsets[:-1] >= 0) & (offsets[1:] <= len(shard.ids))
    good &= lengths.sum(axis=1, dtype=np.int64) == np.diff(offsets)
    if not good.all():
        raise DataError(
            f"{shard.path}, row {start + int(np.argmin(good)):,}: lengths and row_offsets disagree. Prepare the "
            "dataset again."
        )
