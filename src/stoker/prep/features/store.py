"""What features learned, in files: a Parquet table for each and ``features.json``, all with sha256."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.engine import full_disk
from stoker.base.errors import DataError
from stoker.base.files import atomic_file, link_or_copy
from stoker.dataset.manifest import describe_file
from stoker.prep.features.base import Derivation, feature_from_dict
from stoker.prep.features.learned import Learned, LearnedTable

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "StoredTable",
    "load_features",
    "read_learned",
    "save_features",
    "store_features",
    "table_file",
    "write_table",
]

_INDEX = "features.json"


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """What a feature learned, as a file that :func:`write_table` wrote."""

    path: Path
    entry: Mapping[str, Any]  # its size and sha256
    facts: Mapping[str, Any]


def table_file(feature: Derivation) -> str:
    """File of a feature's learned table, within the directory of features."""
    return f"{feature.name}.parquet"


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


def _saved(
    directory: Path,
    features: Sequence[Derivation],
    facts: Mapping[str, Any],
    put: Callable[[str, Path], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The index beside the tables, which ``put`` makes of a feature's name at a path."""
    directory.mkdir(parents=True, exist_ok=True)
    learned = [feature for feature in features if isinstance(feature, Learned)]
    files = {table_file(feature): put(feature.name, directory / table_file(feature)) for feature in learned}
    index = {"features": [feature.to_dict() for feature in features], "facts": dict(facts), "files": files}
    with atomic_file(directory / _INDEX) as file:
        file.write(json.dumps(index, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return {**files, _INDEX: describe_file(directory / _INDEX)}


def load_features(directory: Path) -> tuple[tuple[Derivation, ...], dict[str, LearnedTable]]:
    """Features and their tables.

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
        if isinstance(feature, Learned):
            table = read_learned(directory / table_file(feature), files.get(table_file(feature), {}))
            learned[feature.name] = LearnedTable(table=table, facts=facts.get(feature.name, {}))
    return features, learned


def read_learned(path: Path, expected: Mapping[str, Any]) -> pl.DataFrame:
    """A learned table whose bytes are those that were written. Raises :class:`DataError`."""
    import polars as pl

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
