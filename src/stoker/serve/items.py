"""The items of a two-tower model with their values and vectors, in memory or in a file of an export.

::

    OUT/items.arrow    item (its value), id, vector; by rising id
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from stoker.base.errors import ConfigError
from stoker.base.files import atomic_file
from stoker.dataset.dataset import Dataset
from stoker.models import TwoTower
from stoker.prep.requests import Fitted
from stoker.training.scores.catalogue import Catalogue
from stoker.training.scores.evaluation import scoring

ITEMS = "items.arrow"


def item_table(model: TwoTower, fitted: Fitted, data: Dataset) -> pa.Table:
    """Return value, id and vector of each item, by rising id.

    Raises:
        ConfigError: the ids of the items are hashes, or there are no training rows.
    """
    feature = model.spec.features[model.identity]
    if feature.table not in fitted.ids:
        raise ConfigError(f"ids of column {feature.name!r} are hashes of its values, so the values of items are not "
                          "known. Prepare it without hash_buckets.")  # fmt: skip
    catalogue = Catalogue(model, data)
    if not len(catalogue):
        raise ConfigError(f"{data.path} has no training rows, so no items. Pass the dataset of the first training.")
    with scoring(model):
        vectors = catalogue.vectors(model).cpu()
    ids, order = catalogue.ids.sort()
    flat = pa.array(vectors[order].numpy().reshape(-1))
    columns = {
        "item": fitted.ids[feature.table].values(ids.numpy()), "id": pa.array(ids.numpy()),
        "vector": pa.FixedSizeListArray.from_arrays(flat, model.width),
    }  # fmt: skip
    return pa.table(columns)


def write_items(path: Path, table: pa.Table) -> None:
    """Write a file that can be mapped."""
    with atomic_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(1, len(table)))


def read_items(path: Path) -> pa.Table:
    """Map what :func:`write_items` wrote."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()
