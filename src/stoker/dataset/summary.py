"""A dataset in numbers: rows and positives, table skew, dense columns, shards.

Counts come from the manifest and ``counts.safetensors``. Of the shards only the dense columns are read, at most about a
million rows spread over the training split.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from torch import Tensor

from stoker.dataset.dataset import Dataset
from stoker.dataset.split import Split

_SAMPLE_ROWS = 2**20
_TOP = 3  # of the largest training counts of a table
_RUN = 4096  # rows of a chunk
_ORDER = ("tables", "settings", "hash", "source", "stoker_version")  # the fields shown for a reordered dataset


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Describe an opened dataset in plain JSON values."""
    manifest, splits = dataset.manifest, dataset.splits
    files = manifest.get("files", {}).values()
    most = {feature.table: feature.max_length for feature in dataset.schema.features if feature.sequence}
    kept = next((split.kept for split in splits.values() if split.kept is not None), None)
    hot_cold, reordered = dataset.hot_cold, dataset.reordered
    return {
        "kind": "dataset",
        "path": str(dataset.path),
        **{name: manifest.get(name) for name in ("recipe", "created_by", "stoker_version", "format_version")},
        "schema_hash": dataset.schema_hash,
        "bytes": sum(split.bytes for split in splits.values()) + sum(int(entry["bytes"]) for entry in files),
        "quarantined": manifest.get("quarantined", 0),
        "broken_files": {
            source["file"]: source["breaks_off"] for source in manifest.get("sources", []) if "breaks_off" in source
        },
        "splits": {name: _describe_split(split) for name, split in splits.items()},
        "groups": dict(dataset.groups) if dataset.groups is not None else None,
        "keep": kept and {column.name: str(column.type).removeprefix("large_") for column in kept.schema},
        "hot_cold": hot_cold
        and {
            "hot": _describe_split(dataset.hot),
            "cold": _describe_split(dataset.cold),
            # The last two are absent in datasets of earlier versions.
            **{name: hot_cold.get(name) for name in ("hot_rows", "profile_hash", "source", "stoker_version")},
        },
        "reordered": reordered and {name: reordered[name] for name in _ORDER},
        "tables": [
            {"table": table, "rows": rows, "max_length": most.get(table, 1), **_describe_counts(dataset.counts[table])}
            for table, rows in sorted(dataset.schema.num_embeddings.items(), key=lambda item: _natural(item[0]))
        ],
        "dense": _describe_dense(dataset),
    }


def _natural(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts C2 before C10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _describe_split(split: Split) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rows": len(split),
        "positives": split.positives,
        "share": split.positives / split.labelled if split.labelled else None,
        **({"labelled": split.labelled} if split.labelled < len(split) else {}),
        "shards": len(split.entry["shards"]),
        "bytes": split.bytes,
    }
    if groups := split.entry.get("groups"):
        found["groups"] = {name: groups[name] for name in ("count", "largest", "with_positive")}
        found["groups"]["mean"] = len(split) / groups["count"]
    if "time" in split.entry:
        found["time"] = dict(split.entry["time"])
    return found


def _describe_counts(counts: Tensor) -> dict[str, Any]:
    total = int(counts.sum())
    known = counts[1:]
    if bool((known[1:] > known[:-1]).any()):  # tables of hash_buckets, and reordered ones
        known = known.sort(descending=True).values

    def hot(share: float) -> float | None:
        rows = math.ceil(len(known) * share)
        return int(known[:rows].sum()) / total if total else None

    return {
        "accesses": total,
        "oov_share": int(counts[0]) / total if total else None,
        "hot_1_percent": hot(0.01),
        "hot_10_percent": hot(0.1),
        "unused_rows": int((known == 0).sum()),
        "top_counts": [int(count) for count in known[:_TOP]],
    }


def _describe_dense(dataset: Dataset) -> list[dict[str, Any]]:
    names, split = dataset.schema.dense, dataset.splits.get("train")
    if not names or split is None or not len(split):
        return []
    step = max(_RUN, -(-len(split) * _RUN // _SAMPLE_ROWS))
    parts = [shard.dense[at : at + _RUN] for shard in split.shards for at in range(0, shard.rows, step)]
    values = np.concatenate(parts).astype(np.float64)
    return [
        {
            "column": name,
            **{what: float(getattr(column, what)()) for what in ("min", "mean", "max", "std")},
            "zeros": float((column == 0).mean()),
            "rows": len(column),
        }
        for name, column in zip(names, values.T, strict=True)
    ]
