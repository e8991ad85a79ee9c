"""The items of a two-tower model with their values and vectors, in memory or in a file of an export.

::

    OUT/items.arrow    item (its value), id, vector; by rising id
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stoker.base.errors import ConfigError
from stoker.models import TwoTower
from stoker.prep.requests import FittedSchema
from stoker.training.scores.catalogue import Catalogue
from stoker.training.scores.evaluation import scoring

ITEMS = "items.arrow"


def check_values(model: TwoTower, fitted: FittedSchema) -> None:
    """Raise a ConfigError if only hashes of the items are known."""
    feature = model.spec.features[model.identity]
    if feature.table not in fitted.ids:
        raise ConfigError(f"ids of column {feature.name!r} are hashes of its values, so the values of items are "
                          "not known. Prepare it without hash_buckets and without oov = 'grow'.")  # fmt: skip


class Items:
    """The items of a catalogue by rising id, with their values."""

    def __init__(self, model: TwoTower, fitted: FittedSchema, catalogue: Catalogue) -> None:
        check_values(model, fitted)
        self._catalogue = catalogue
        ids, self._order = catalogue.ids.sort()
        self.ids: npt.NDArray[np.int64] = ids.numpy()  # [n]
        self.values = fitted.ids[model.spec.features[model.identity].table].values(self.ids)

    def vectors(self, model: TwoTower) -> npt.NDArray[np.float32]:
        """Return the vectors that a model gives them: [n, W]."""
        with scoring(model):
            found: npt.NDArray[np.float32] = self._catalogue.vectors(model).cpu()[self._order].numpy()
        return found

    def table(self, model: TwoTower) -> pa.Table:
        """Return value, id and vector of each."""
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(self.vectors(model).reshape(-1)), model.width)
        return pa.table({"item": self.values, "id": pa.array(self.ids), "vector": vectors})
