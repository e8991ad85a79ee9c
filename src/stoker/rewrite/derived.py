"""Write a dataset from a dataset: rows in another order, or other ids. The rest is shared with the source.

Legend: n rows, F features, N ids of a table, L ids in all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.base.files import hash_json
from stoker.base.ordered import ordered_map
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import make_gather, new_tensor
from stoker.dataset.shards import write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split

Int64 = npt.NDArray[np.int64]


def derived_at(out: Path, data: Dataset, record: str) -> Dataset | None:
    """Return the dataset at ``out`` if it has this ``record`` in its manifest and was made from ``data``."""
    try:
        there = Dataset(out)
    except DataError:
        return None  # not usable; the writer says what is wrong with it
    known = there.manifest.get(record)
    if known is None or there.path.resolve() == data.path.resolve():
        return None
    mine = source_of(data)
    return there if all(known.get(name) == mine[name] for name in mine if name.endswith("_hash")) else None


def source_of(data: Dataset) -> dict[str, Any]:
    """Return what the manifest of a dataset says of its source, ``data``, and of who made it."""
    return {
        "source": str(data.path.resolve()),
        "source_schema_hash": data.schema_hash,
        "source_data_hash": data.train.data_hash,
        "source_files_hash": hash_json({file: entry["sha256"] for file, entry in data._files()}),
        "stoker_version": __version__,
    }


def write_shards(
    split: Split, jobs: Iterable[tuple[str, Int64]], folder: Path, threads: int, new_ids: Mapping[str, Int64]
) -> Generator[tuple[dict[str, Any], int], None, None]:
    """Check rows of a split and write them to shards; each thread keeps one shard in memory.

    ``jobs``: file and rows [n] of each shard; ``new_ids``: table -> [N] the new id of each id, where ids change. Yields
    the manifest entry of each shard, and the number of its rows with label 1.
    """
    if not split.rows:
        return
    gather = make_gather(split.shards, split.starts)
    features = len(split.schema.features)

    def write(job: tuple[str, Int64]) -> tuple[dict[str, Any], int]:
        file, rows = job
        first, last = np.searchsorted(split.starts, [rows[0], rows[-1]], side="right")
        split.check_rows(split.starts[first - 1], split.starts[last])
        arrays = {name: tensor.numpy() for name, tensor in gather(rows, new_tensor).items()}
        if (offsets := arrays.pop("offsets", None)) is not None:
            arrays["lengths"] = np.diff(offsets).astype(np.int32).reshape(len(rows), features)
            arrays["row_offsets"] = offsets[::features]
        _replace(arrays["ids"], arrays.get("lengths"), split.schema, new_ids)
        info = write_shard(folder / file, **arrays)
        for shard in split.shards[first - 1 : last]:
            shard.release()
        return info.to_dict(), int(np.count_nonzero(arrays["labels"] > 0.5))

    with closing(ordered_map(write, jobs, threads, ahead=threads)) as written:
        yield from written


def _replace(
    ids: npt.NDArray[np.integer], lengths: npt.NDArray[np.int32] | None, schema: FeatureSpec,
    new_ids: Mapping[str, Int64],
) -> None:  # fmt: skip
    """Replace ids [n, F], or flat [L] with lengths [n, F], by new ids in place."""
    feature = feature_of_ids(lengths) if new_ids and lengths is not None else None
    for place, each in enumerate(schema.features):
        if each.table in new_ids:
            mine: Any = (slice(None), place) if feature is None else feature == place
            ids[mine] = new_ids[each.table][ids[mine]]


def feature_of_ids(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int16]:
    """Return the position of the feature of each id, [L], from lengths [n, F]."""
    features = np.arange(lengths.shape[1], dtype=np.int16)
    return np.repeat(np.tile(features, len(lengths)), lengths.reshape(-1))


def table_ids(
    ids: npt.NDArray[np.integer], lengths: npt.NDArray[np.int32] | None, schema: FeatureSpec, table: str
) -> tuple[npt.NDArray[np.integer], Int64]:
    """Return the ids of a table in n rows, and the row of each, which rises, [L] each.

    ``ids`` are [n, F], or flat by row with ``lengths`` [n, F].
    """
    places = [place for place, feature in enumerate(schema.features) if feature.table == table]
    if lengths is None:
        return ids[:, places].reshape(-1), np.repeat(np.arange(len(ids)), len(places))
    mine = np.isin(feature_of_ids(lengths), places)
    return ids[mine], np.repeat(np.arange(len(lengths)), lengths[:, places].sum(axis=1))
