"""Files of fitted features and states of window features: a Parquet table for each and ``features.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.engine import full_disk
from stoker.base.errors import DataError, errors_as
from stoker.base.files import atomic_file, link_or_copy
from stoker.dataset.manifest import describe_file
from stoker.prep.features.base import Derivation, feature_from_dict, pl
from stoker.prep.features.fitted import Fittable, FittedTable

_INDEX = "features.json"


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """The table of a fitted feature, or a state, as a file that :func:`write_table` wrote."""

    path: Path
    entry: Mapping[str, Any]  # its size and sha256
    facts: Mapping[str, Any]


def write_table(path: Path, table: pl.DataFrame) -> dict[str, Any]:
    """Write a table, the same bytes for the same rows; return its size and sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file, full_disk():
        table.write_parquet(file, compression="zstd", statistics=True, row_group_size=2**18)
    return describe_file(path)


def save_features(directory: Path, features: Sequence[Derivation], fitted_tables: Mapping[str, FittedTable]) -> None:
    """Write all tables, then the index."""
    tables = {}
    for name, one in fitted_tables.items():
        path = directory / f"{name}.parquet"
        tables[name] = StoredTable(path=path, entry=write_table(path, one.table), facts=one.facts)
    store_features(directory, features, tables)


def store_features(
    directory: Path, features: Sequence[Derivation], tables: Mapping[str, StoredTable], *, extend: bool = False
) -> dict[str, dict[str, Any]]:
    """Link or copy the files of tables into the directory, then write the index; return the entries of these files.

    With ``extend``, keep the entries of other tables that an existing index has.
    """
    directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"features": [feature.to_dict() for feature in features], "facts": {}, "files": {}}
    if extend:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
    files = {}
    for name in (feature.name for feature in features if feature.name in tables):
        path = directory / f"{name}.parquet"
        if path != tables[name].path:
            path.unlink(missing_ok=True)
            link_or_copy(tables[name].path, path)
        files[path.name] = dict(tables[name].entry)
        index["facts"][name] = dict(tables[name].facts)
    index["files"] |= files
    with atomic_file(directory / _INDEX) as file:
        file.write(json.dumps(index, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return {**files, _INDEX: describe_file(directory / _INDEX)}


def load_features(directory: Path) -> tuple[tuple[Derivation, ...], dict[str, FittedTable]]:
    """Load features, their fitted tables and the stored states of window features.

    Raises:
        DataError: a file is missing or altered.
    """
    path = directory / _INDEX
    if not path.exists():
        raise DataError(f"{path} is missing: there are no fitted features at {directory}.")
    remedy = "Restore it from a copy, or fit the features again."
    with errors_as(DataError, f"{path} is damaged", remedy, (OSError, ValueError, KeyError, TypeError)):
        index = json.loads(path.read_text(encoding="utf-8"))
        features = tuple(feature_from_dict(item, f"{path}: features[{i}]") for i, item in enumerate(index["features"]))
        files, facts = dict(index["files"]), dict(index["facts"])
    fitted_tables = {}
    for feature in features:
        file = f"{feature.name}.parquet"
        if isinstance(feature, Fittable) or (feature.has_table and file in files):
            table = _read_table(directory / file, files.get(file, {}))
            fitted_tables[feature.name] = FittedTable(table=table, facts=facts.get(feature.name, {}))
    return features, fitted_tables


def _read_table(path: Path, expected: Mapping[str, Any]) -> pl.DataFrame:
    """Read a table. Raise :class:`DataError` if its bytes are not those that were written."""
    remedy = "Restore it from a copy, or prepare or fit again: the same input gives the same bytes."
    with errors_as(DataError, f"{path} is missing; {expected.get('bytes', 0):,} bytes were written to it", remedy):
        found = describe_file(path)
    for key in ("bytes", "sha256"):
        if found[key] != expected.get(key):
            raise DataError(
                f"{path} was altered: {key} {str(found[key])[:16]}, expected {str(expected.get(key))[:16]}. {remedy}"
            )
    return pl.read_parquet(path)
