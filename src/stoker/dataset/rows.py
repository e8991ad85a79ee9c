"""The rows of one split of a dataset, over several shards.

Legend: n rows, F features.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import DataError
from stoker.dataset.groups import map_groups
from stoker.dataset.memory import home_of
from stoker.dataset.reading.kept import KeptColumns
from stoker.dataset.shards import MappedShard, allow_open_files, open_shard
from stoker.dataset.spec import FeatureSpec

__all__ = ["MadeBy", "SplitRows"]

MadeBy = Literal["prepare", "classify", "reorder"]  # the command that made a dataset


class SplitRows:
    """The rows of one split. ``len(split)`` is their number."""

    def __init__(
        self, path: Path, name: str, entry: Mapping[str, Any], schema: FeatureSpec, schema_hash: str,
        made_by: MadeBy = "prepare", files: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.entry = entry  # the manifest's record: rows, positives, shards; labelled, where rows have no label
        self.schema = schema
        self.schema_hash = schema_hash
        self.made_by = made_by  # the command that makes it again
        self._path = path
        self._home = home_of(path)  # of temporary files, kept as long as somebody may read them
        self._files = dict(files or {})  # the manifest's, by name
        # First row of each of the shards, and the number of rows.
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
        """Without the maps, which a worker process opens for itself, and the lock of a temporary directory."""
        maps = ("shards", "groups", "kept")
        return {name: value for name, value in self.__dict__.items() if name not in maps} | {"_home": None}

    @property
    def positives(self) -> int:
        """Rows with label 1."""
        return int(self.entry["positives"])

    @property
    def labelled(self) -> int:
        """Rows that have a label: all of them, but for rows prepared for scoring, whose label may be NaN."""
        return int(self.entry.get("labelled", self.rows))

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(int(shard["bytes"]) for shard in self.entry["shards"])

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in temporary files, which go with the last reference to the dataset."""
        return self._home is not None

    @property
    def data_hash(self) -> str:
        """Identifies the very rows: sha256 over the shards' checksums."""
        return hashlib.sha256("".join(shard["sha256"] for shard in self.entry["shards"]).encode()).hexdigest()

    @cached_property
    def groups(self) -> npt.NDArray[np.int32] | None:
        """[n] the list that each row belongs to: dense numbers from 0 in order of first appearance in the split.

        Mapped read-only; row i of it is row i of :meth:`batches` without a seed. None where the dataset was prepared
        without ``group``, and for the hot and cold parts of a classified dataset.

        Raises:
            DataError: the file is damaged.
        """
        entry = self.entry.get("groups")
        if entry is None:
            return None
        return map_groups(*self._listed(entry), self.rows)

    @cached_property
    def kept(self) -> KeptColumns | None:
        """The raw columns that the schema's ``keep`` names, row by row; None where it names none.

        Row i of ``kept.read()``, a PyArrow table, is row i of :meth:`batches` without a seed.

        Raises:
            DataError: the file is damaged.
        """
        entry = self.entry.get("keep")
        return None if entry is None else KeptColumns(*self._listed(entry), int(entry.get("first", 0)), self.rows)

    def _listed(self, entry: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]]:
        """Path and manifest entry of the file that an entry of this split names."""
        file = str(entry["file"])
        if file not in self._files:
            raise DataError(f"{self._path / 'manifest.json'} does not list {file}. Prepare the dataset again.")
        return self._path / file, self._files[file]

    @cached_property
    def shards(self) -> Sequence[MappedShard]:
        """The shards, mapped.

        Raises:
            DataError: a shard that does not fit the manifest's features.
        """
        allow_open_files(len(self.entry["shards"]))
        shards = [open_shard(self._path / s["file"], rows=int(s["rows"])) for s in self.entry["shards"]]
        columns = (len(self.schema.dense), len(self.schema.features))
        for shard in shards:
            ids = shard.ids if self.schema.one_hot else shard.lengths
            found = (shard.dense.shape[1], ids.shape[1] if ids is not None and ids.ndim == 2 else 0)
            if found != columns or shard.ids.dtype != shards[0].ids.dtype:
                raise DataError(
                    f"{shard.path} has {found[0]} dense columns and {found[1]} features of "
                    f"{shard.ids.dtype.name}, the "
                    f"manifest {columns[0]} and {columns[1]} of {shards[0].ids.dtype.name}. Prepare the "
                    "dataset again."
                )
        return shards

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """One row: ``dense`` [num_dense], ``labels`` [], ``ids`` [F] (sequences: flat, and ``lengths`` [F]).

        For looking at data; training reads :meth:`batches`, which is two orders of magnitude faster.
        """
        if not -self.rows <= row < self.rows:
            raise IndexError(f"row {row:,} of {self.rows:,}")
        row %= self.rows
        number = bisect.bisect_right(self.starts, row) - 1
        shard, local = self.shards[number], row - self.starts[number]
        item = {"dense": torch.tensor(shard.dense[local]), "labels": torch.tensor(shard.labels[local])}
        if shard.lengths is None or shard.row_offsets is None:
            return item | {"ids": torch.tensor(shard.ids[local])}
        begin, end = shard.row_offsets[local : local + 2]
        return item | {
            "ids": torch.tensor(shard.ids[begin:end]),
            "lengths": torch.tensor(shard.lengths[local]),
        }

    def will_need(self, start: int, stop: int) -> None:
        """Ask the kernel to read rows [start, stop) soon."""
        number = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[number + 1])
            self.shards[number].will_need(start - self.starts[number], end - self.starts[number])
            start, number = end, number + 1
