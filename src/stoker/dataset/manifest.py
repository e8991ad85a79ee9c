"""The manifest of a dataset, which is written last: a dataset with a manifest is whole. Needs no torch, no Polars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from stoker.base.errors import DataError, errors_as
from stoker.base.files import atomic_file, hash_file, hash_json, seal, unseal
from stoker.base.units import quoted
from stoker.base.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 2  # the newest that is read: with tables that grow, whose ids are raw
SPLITS = ("train", "valid", "test")
REQUEST = ".request"  # in a dataset: a hash of its settings and inputs, by which the same command recognises it
NEW_IDS = "new_ids.safetensors"  # of a reordered dataset
BESIDE, LOCK = ".tmp", ".lock"  # suffix of a dataset that is being remade, and a file in it
LEFT_OVER = (
    "stoker classify or stoker reorder leaves where it is killed or still running. Run the same stoker classify "
    "command again, or stoker reorder command: it starts again and removes this directory."
)
MANIFEST = "manifest.json"
_NEEDED = ("format_version", "features", "schema_hash", "splits")


def is_left_over(directory: Path) -> bool:
    """Return True if a killed process left this directory while it remade a dataset."""
    return directory.name.endswith(BESIDE) and (directory / LOCK).exists() and not (directory / MANIFEST).exists()


def describe_file(path: str | Path) -> dict[str, Any]:
    """Return the manifest's entry of a file that is not a shard: ``{"bytes": ..., "sha256": ...}``."""
    size, digest = hash_file(path)
    return {"bytes": size, "sha256": digest}


def write_counts(directory: str | Path, counts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write ``counts.safetensors`` (table -> [num_embeddings] int64) and return its manifest entry."""
    path = Path(directory) / "counts.safetensors"
    with atomic_file(path) as file:
        file.write(save({name: np.ascontiguousarray(counts[name].numpy(), np.int64) for name in sorted(counts)}))
    return describe_file(path)


def write_manifest(directory: str | Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` atomically. Call it last: its presence means that the dataset is whole.

    Raises:
        DataError: the manifest lacks keys that opening needs, or the disk is full.
    """
    version = FORMAT_VERSION if manifest.get("features", {}).get("grow") else 1
    values = {"kind": "dataset", "format_version": version, **manifest}
    if missing := [key for key in _NEEDED if key not in values]:
        raise DataError(f"the manifest of {directory} lacks {missing}; it would not open again.")
    text = json.dumps(seal(values), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    with atomic_file(Path(directory) / MANIFEST) as file:
        file.write(text.encode() + b"\n")


def write_generated_manifest(
    directory: str | Path, *, by: str, recipe: str, schema: Mapping[str, Any], features: Mapping[str, Any],
    splits: Mapping[str, Any], files: Mapping[str, Any], **more: Any,
) -> None:  # fmt: skip
    """Write the manifest of rows that were generated, not prepared from a log; ``more`` has further keys."""
    made = {"created_by": by, "stoker_version": __version__, "recipe": recipe, "features": features, "splits": splits}
    kept = {"schema": schema, "schema_hash": hash_json(schema), "dense_stats": {}, "files": files}
    write_manifest(directory, {**made, **kept, "sources": [], "quarantined": 0, **more})


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of a dataset directory.

    Raises:
        DataError: there is no dataset, or it is unfinished, garbled or of a newer format.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not directory.is_dir():
        remedy = f"Make one with: stoker prepare RECIPE FILES --out {quoted(directory)}"
        if directory.is_file():
            remedy = f"Make one of a log with: stoker prepare auto {quoted(directory)} --out DATASET"
        elif directory.suffix:  # the name of a log rather than of a dataset
            remedy = "Check the name, and the directory that it starts from."
        what = "is a file, not a dataset" if directory.is_file() else "does not exist"
        raise DataError(f"there is no dataset at {directory}: it {what}. {remedy}")
    if not path.exists():
        if is_left_over(directory):
            raise DataError(f"{directory} is not a dataset, but what {LEFT_OVER}")
        raise DataError(
            f"{directory} has no manifest.json: it is not a dataset, or preparing it was interrupted. "
            "Run the same stoker prepare command again; finished parts are kept."
        )
    with errors_as(DataError, f"{path} cannot be read", "Prepare the dataset again.", (OSError, ValueError)):
        manifest = unseal(path.read_bytes())
    if not isinstance(manifest, dict) or manifest.get("kind", "dataset") != "dataset":
        kind = manifest.get("kind") if isinstance(manifest, dict) else type(manifest).__name__
        raise DataError(f"{path} is of kind {kind}, not a dataset.")
    version = manifest.get("format_version")
    if not isinstance(version, int):
        raise DataError(f"{path} has no format_version: it is not the manifest of a dataset.")
    if version > FORMAT_VERSION:
        raise DataError(
            f"{directory} has dataset format {version}, this Stoker reads up to {FORMAT_VERSION}. "
            "Update Stoker, or prepare the dataset again with this version."
        )
    if missing := [key for key in _NEEDED if key not in manifest]:
        raise DataError(f"{path} lacks {missing}. Prepare the dataset again.")
    return manifest


def note_request(folder: Path, request: str | None) -> None:
    """Write the hash of a preparation's settings and inputs to the dataset, before its manifest."""
    if request is not None:
        with atomic_file(folder / REQUEST) as file:
            file.write(request.encode())
