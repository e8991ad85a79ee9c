"""One split of a dataset: rows over several shards, by row or by batch.

Legend: n rows, F features.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.data.features import FeatureSpec
from stoker.data.shards import MappedShard, open_shard
from stoker.errors import DataError

__all__ = ["Split"]


class Split:
    """The rows of one split. ``len(split)`` is their number."""

    def __init__(
        self, path: Path, name: str, entry: Mapping[str, Any], schema: FeatureSpec, schema_hash: str
    ) -> None:
        self.name = name
        self.entry = entry  # the manifest's record: rows, positives, shards
        self.schema = schema
        self.schema_hash = schema_hash
        self._path = path
        self.starts = [
            0,
            *accumulate(int(shard["rows"]) for shard in entry["shards"]),
        ]  # first row of each shard
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

    @property
    def positives(self) -> int:
        """Rows with label 1."""
        return int(self.entry["positives"])

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(int(shard["bytes"]) for shard in self.entry["shards"])

    @property
    def data_hash(self) -> str:
        """Identifies the very rows: sha256 over the shards' checksums."""
        return hashlib.sha256("".join(shard["sha256"] for shard in self.entry["shards"]).encode()).hexdigest()

    @cached_property
    def shards(self) -> list[MappedShard]:
        """The mapped shards."""
        return [open_shard(self._path / s["file"], rows=int(s["rows"])) for s in self.entry["shards"]]
