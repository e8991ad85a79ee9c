"""What features learned and the state of window features, in files: a Parquet table for each and ``features.json``,
all with sha256."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.engine import full_disk
from stoker.base.errors import DataError
from stoker.base.files import atomic_file, link_or_copy
from stoker.dataset.manifest import describe_file
from stoker.prep.features.base import Derivation, feature_from_dict, pl
from stoker.prep.features.learned import Learned, LearnedTable

__all__ = ["StoredTable", "load_features", "save_features", "store_features", "store_state", "write_table"]

_INDEX = "features.json"


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """What a feature learned, or its state, as a file that :func:`write_table` wrote."""

    path: Path
    entry: Mapping[str, Any]  # its size and sha256
    facts: Mapping[str, Any]


def write_table(path: Path, table: pl.DataFrame) -> dict[str, Any]:
    """Write a learned table, the same bytes for the same rows; returns size and sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file, full_disk():
        table.write_parquet(file, compression="zstd", statistics=True, row_group_size=2**18)
    return describe_file(path)


def save_features(
    directory: Path, features: Sequence[Derivation], learned: Mapping[str, LearnedTable]
) -> dict[str, dict[str, Any]]:
    """Write all tables, then the index; returns the entry of every file for a manifest."""

    def write(name: str, path: Path) -> dict[str, Any]:
        return write_table(path, learned[name].table)

    return _saved(directory, features, {name: table.facts for name, table in learned.items()}, write)


def store_features(
    directory: Path, features: Sequence[Derivation], tables: Mapping[str, StoredTable]
) -> dict[str, dict[str, Any]]:
    """As :func:`save_features`, of tables that are in files already, which are not written again."""

    def share(name: str, path: Path) -> dict[str, Any]:
        link_or_copy(tables[name].path, path)
        return dict(tables[name].entry)

    return _saved(directory, features, {name: dict(table.facts) for name, table in tables.items()}, share)


def store_state(directory: Path, state: Mapping[str, StoredTable]) -> dict[str, dict[str, Any]]:
    """Replace the state of window features that :func:`store_features` stored; returns the entries of changed files."""
    files = {f"{name}.parquet": dict(table.entry) for name, table in state.items()}
    for name, table in state.items():
        (directory / f"{name}.parquet").unlink(missing_ok=True)
        link_or_copy(table.path, directory / f"{name}.parquet")
    index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
    index["files"] |= files
    index["facts"] |= {name: dict(table.facts) for name, table in state.items()}
    return {**files, _INDEX: _write_index(directory, index)}


def _saved(
    directory: Path,
    features: Sequence[Derivation],
    facts: Mapping[str, Any],
    put: Callable[[str, Path], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The index beside the tables, which ``put`` makes of a feature's name at a path."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [feature.name for feature in features if feature.has_table and feature.name in facts]
    files = {f"{name}.parquet": put(name, directory / f"{name}.parquet") for name in names}
    index = {"features": [feature.to_dict() for feature in features], "facts": dict(facts), "files": files}
    return {**files, _INDEX: _write_index(directory, index)}


def _write_index(directory: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``features.json``; returns size and sha256."""
    with atomic_file(directory / _INDEX) as file:
        file.write(json.dumps(index, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return describe_file(directory / _INDEX)


def load_features(directory: Path) -> tuple[tuple[Derivation, ...], dict[str, LearnedTable]]:
    """Features and their tables: what learned ones were fitted to, and the state of window features, if it is there.

    Raises:
        DataError: a file that is missing or altered, with what was expected and found.
    """
    path = directory / _INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        features = tuple(feature_from_dict(item, f"{path}: features[{i}]") for i, item in enumerate(index["features"]))
        files, facts = dict(index["files"]), dict(index["facts"])
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: there are no fitted features at {directory}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}). Restore it from a copy, or fit the features again.") from error
    learned = {}
    for feature in features:
        file = f"{feature.name}.parquet"
        if isinstance(feature, Learned) or (feature.has_table and file in files):
            table = _read_table(directory / file, files.get(file, {}))
            learned[feature.name] = LearnedTable(table=table, facts=facts.get(feature.name, {}))
    return features, learned


def _read_table(path: Path, expected: Mapping[str, Any]) -> pl.DataFrame:
    """A learned table whose bytes are those that were written. Raises :class:`DataError`."""
    remedy = "Restore it from a copy, or prepare or fit again: the same input gives the same bytes."
    try:
        found = describe_file(path)
    except OSError as error:
        raise DataError(
            f"{path} is missing; {expected.get('bytes', 0):,} bytes were written to it. {remedy}"
        ) from error
    for key in ("bytes", "sha256"):
        if found[key] != expected.get(key):
            raise DataError(
                f"{path} was altered: {key} {str(found[key])[:16]}, expected {str(expected.get(key))[:16]}. {remedy}"
            )
    return pl.read_parquet(path)
