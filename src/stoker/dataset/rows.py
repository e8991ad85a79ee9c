"""The rows of one split of a dataset, over several shards, each checked before its rows are read.

A check compares the bytes with the manifest and the ids with their tables. A file is hashed once per process, on all
threads of torch: about 1.5 GB/s a core, so 0.1 s for a million rows of Criteo, whose files are then in the page cache.
Files that this process wrote were hashed then.

Legend: n rows, F features, L ids in all.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import DataError
from stoker.base.files import file_identity
from stoker.base.ordered import ordered_map
from stoker.dataset.gather import NumpyGather, new_tensor, sound_bags
from stoker.dataset.memory import temporary_folder_of
from stoker.dataset.row_files import KeptColumns, map_groups
from stoker.dataset.shards import Shard, allow_open_files, open_shard
from stoker.dataset.spec import FeatureSpec

_IDS = 2**20  # ids of a chunk
_REMEDY = "Restore the file from a copy, or {again}: the same input gives the same bytes, and runs go on from them."

_KNOWN = 2**15  # shards: a process that prepares rows for months writes any number
_checked: set[Hashable] = set()  # shards that this process has checked: file, checksum, sizes of the tables


def made_by(manifest: Mapping[str, Any]) -> str:
    """Return the command that makes a dataset: prepare, classify or reorder."""
    if "hot_cold" in manifest:
        return "classify"
    return "reorder" if (manifest.get("reordered") or {}).get("source") else "prepare"


class SplitRows:
    """The rows of one split. ``len(split)`` is their number."""

    def __init__(
        self, path: Path, name: str, entry: Mapping[str, Any], schema: FeatureSpec, manifest: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.entry = entry  # the manifest's record: rows, positives, shards; labelled, if some rows have no label
        self.schema = schema
        self.sizes = tuple(schema.num_embeddings[feature.table] for feature in schema.features)  # [F] rows of tables
        self.schema_hash = str(manifest["schema_hash"])
        self._made_by = made_by(manifest)
        self._path = path
        self._folder = temporary_folder_of(path)  # keeps temporary files until the last reader is gone
        self._files = dict(manifest.get("files", {}))  # by name
        # First row of each shard, then the number of rows.
        self.starts = [0, *accumulate(int(shard["rows"]) for shard in entry["shards"])]
        self.rows = int(entry["rows"])
        if self.starts[-1] != self.rows:
            raise DataError(
                f"{path / 'manifest.json'}: split {name} claims {self.rows:,} rows, its shards hold "
                f"{self.starts[-1]:,}. Prepare the dataset again."
            )

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"Split({self.name!r}, rows={self.rows:,}, shards={len(self.entry['shards'])})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the maps, which a worker process opens itself, and the lock of a temporary directory."""
        maps = ("shards", "groups", "kept")
        return {name: value for name, value in self.__dict__.items() if name not in maps} | {"_folder": None}

    @property
    def positives(self) -> int:
        """Rows with label 1."""
        return int(self.entry["positives"])

    @property
    def labelled(self) -> int:
        """Rows that have a label: all of them, except in data prepared for scoring, whose labels may be NaN."""
        return int(self.entry.get("labelled", self.rows))

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(int(shard["bytes"]) for shard in self.entry["shards"])

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in temporary files, which are deleted with the last reference to the dataset."""
        return self._folder is not None

    @property
    def data_hash(self) -> str:
        """sha256 over the checksums of the shards, which identifies the rows."""
        return hashlib.sha256("".join(shard["sha256"] for shard in self.entry["shards"]).encode()).hexdigest()

    @cached_property
    def groups(self) -> npt.NDArray[np.int32] | None:
        """The list of each row [n]: numbers from 0 in order of first appearance in the split.

        Mapped read-only; row i is row i of :meth:`batches` without a seed. None if the dataset was prepared without
        ``group``, and for the hot and cold rows of a classified dataset.

        Raises:
            DataError: the file is damaged.
        """
        entry = self.entry.get("groups")
        if entry is None:
            return None
        return map_groups(*self._listed(entry), self.rows)

    @cached_property
    def kept(self) -> KeptColumns | None:
        """The raw columns in ``keep`` of the schema, row by row; None if there are none.

        Row i of ``kept.read()``, a PyArrow table, is row i of :meth:`batches` without a seed.

        Raises:
            DataError: the file is damaged.
        """
        entry = self.entry.get("keep")
        return None if entry is None else KeptColumns(*self._listed(entry), int(entry.get("first", 0)), self.rows)

    def _listed(self, entry: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]]:
        """Return path and manifest entry of the file that an entry of this split names."""
        file = str(entry["file"])
        if file not in self._files:
            raise DataError(f"{self._path / 'manifest.json'} does not list {file}. Prepare the dataset again.")
        return self._path / file, self._files[file]

    @cached_property
    def shards(self) -> Sequence[Shard]:
        """The shards, mapped.

        Raises:
            DataError: a shard does not fit the features in the manifest.
        """
        allow_open_files(len(self.entry["shards"]))
        shards = [open_shard(self._path / s["file"], rows=int(s["rows"])) for s in self.entry["shards"]]
        columns = (len(self.schema.dense), len(self.schema.features))
        for shard in shards:
            ids = shard.ids if self.schema.one_hot else shard.lengths
            found = (shard.dense.shape[1], ids.shape[1] if ids is not None and ids.ndim == 2 else 0)
            if found != columns or shard.ids.dtype != shards[0].ids.dtype:
                raise DataError(
                    f"{shard.path} has {found[0]} dense columns and {found[1]} features of {shard.ids.dtype.name}, the "
                    f"manifest {columns[0]} and {columns[1]} of {shards[0].ids.dtype.name}. Prepare the dataset again."
                )
        return shards

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """Return one row: ``dense`` [num_dense], ``labels`` [], ``ids`` [F] (sequences: flat, and ``lengths`` [F]).

        Use it to look at data; training reads :meth:`batches`, which is two orders of magnitude faster.
        """
        if not -self.rows <= row < self.rows:
            raise IndexError(f"row {row:,} of {self.rows:,}")
        found = NumpyGather(self.shards, self.starts)(np.array([row % self.rows]), new_tensor)
        item = {"dense": found["dense"][0], "labels": found["labels"][0]}
        if "offsets" not in found:
            return item | {"ids": found["ids"][0]}
        return item | {"ids": found["ids"], "lengths": found["offsets"].diff().to(torch.int32)}

    def check_rows(self, start: int, stop: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Check the shards with rows [start, stop) before they are read, unless this process has checked them.

        Args:
            start: first row.
            stop: row after the last.
            progress: called with the bytes checked and the bytes to check.

        Raises:
            DataError: a shard is damaged or holds an id outside its table.
        """
        numbers = range(bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, stop))
        due = [number for number in numbers if self._check_key(number) not in _checked] if start < stop else []
        if not due:
            return
        total, done = sum(int(self.entry["shards"][number]["bytes"]) for number in due), 0
        threads = min(torch.get_num_threads(), len(due))
        with closing(ordered_map(self._check_shard, due, threads, ahead=len(due))) as checked:
            for size in checked:
                done += size
                if progress is not None:
                    progress(done, total)

    def check_ids(self) -> None:
        """Check every id of the split against its table.

        Raises:
            DataError: names the first shard, row, feature and id outside its table.
        """
        for shard in self.shards:
            _check_ids(shard, self.schema)

    def _check_key(self, number: int) -> Hashable:
        return self.shards[number].identity, self.entry["shards"][number]["sha256"], self.sizes

    def _check_shard(self, number: int) -> int:
        """Check the bytes of one shard against the manifest, its ids against their tables; return its size."""
        shard, entry = self.shards[number], self.entry["shards"][number]
        affected = f"Rows {self.starts[number]:,} to {self.starts[number + 1] - 1:,} of split {self.name} are in it."
        again = f"run the dataset's stoker {self._made_by} command again with --overwrite"
        if self._made_by != "prepare":  # its other splits share their files with the source
            again += ", and stoker prepare before it if the source is damaged too"
        remedy = _REMEDY.format(again=again)
        size, digest = shard.digest()
        if digest != entry["sha256"]:
            raise DataError(
                f"{shard.path} is damaged: its sha256 begins with {digest[:16]}, in the manifest with "
                f"{entry['sha256'][:16]}. {affected} {remedy}"
            )
        _check_ids(shard, self.schema)
        _note(self._check_key(number))
        return size

    def will_need(self, start: int, stop: int) -> None:
        """Ask the kernel to read rows [start, stop) soon."""
        number = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[number + 1])
            self.shards[number].will_need(start - self.starts[number], end - self.starts[number])
            start, number = end, number + 1


def note_checked(path: Path, sha256: str, sizes: Sequence[int]) -> None:
    """Record that a shard is good: this process has just written it, with ids below ``sizes`` [F]."""
    with path.open("rb") as file:
        _note((file_identity(file), sha256, tuple(sizes)))


def _note(key: Hashable) -> None:
    if len(_checked) >= _KNOWN:
        _checked.clear()
    _checked.add(key)


def _check_ids(shard: Shard, schema: FeatureSpec) -> None:
    """Check every id of a shard against its table.

    Raises:
        DataError: names the first row, feature and id outside its table, or a row whose lengths are wrong.
    """
    if not schema.features:
        return
    limits = np.array([schema.num_embeddings[feature.table] for feature in schema.features], np.int64)
    # As unsigned numbers, negative ids are too large, too: one comparison finds both.
    unsigned = np.dtype(f"u{shard.ids.itemsize}")
    last = np.minimum(limits - 1, 2 ** (8 * unsigned.itemsize - 1) - 1).astype(unsigned)
    last[[feature.table in schema.grow for feature in schema.features]] = np.iinfo(unsigned).max  # any raw id
    step = max(1, _IDS * shard.rows // max(1, shard.ids.size))  # rows
    for start in range(0, shard.rows, step):
        stop = min(start + step, shard.rows)
        if shard.lengths is None or shard.row_offsets is None:
            ids, lengths = shard.ids[start:stop], None
            outside = ids.view(unsigned) > last
        else:
            _check_lengths(shard, start, stop)
            ids, lengths = shard.ids[slice(*shard.row_offsets[[start, stop]])], shard.lengths[start:stop].reshape(-1)
            # Most often no id reaches even the size of the smallest table, and its feature does not matter.
            outside = ids.view(unsigned) > last.min()
            if outside.any():
                outside = ids.view(unsigned) > np.repeat(np.tile(last, stop - start), lengths)
        if outside.any():
            at = int(np.argmax(outside))
            bag = at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            row, column = divmod(bag, len(last))
            feature, found = schema.features[column], int(ids.reshape(-1)[at])
            raise DataError(
                f"{shard.path}, row {start + row:,}: feature {feature.name} holds id {found:,}, table {feature.table} "
                f"has {limits[column]:,} rows (ids 0 to {limits[column] - 1:,}). Prepare the dataset again."
            )
        shard.release()


def _check_lengths(shard: Shard, start: int, stop: int) -> None:
    """Check that the bags of rows [start, stop) follow each other within the ids."""
    assert shard.lengths is not None
    assert shard.row_offsets is not None
    offsets = shard.row_offsets[start : stop + 1]
    good = sound_bags(shard.lengths[start:stop], offsets[:-1], offsets[1:], len(shard.ids))
    if not good.all():
        raise DataError(
            f"{shard.path}, row {start + int(np.argmin(good)):,}: lengths and row_offsets disagree. Prepare the "
            "dataset again."
        )
