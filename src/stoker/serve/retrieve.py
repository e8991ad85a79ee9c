"""The best items of a catalogue for a user, by the vectors of a two-tower model.

Legend: n items, m users, W columns of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import torch

from stoker.base.errors import ConfigError, install, require
from stoker.base.picture import Shown
from stoker.base.units import plural
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel, TwoTower
from stoker.prep.requests import as_frame
from stoker.serve.items import ITEMS, item_table, read_items
from stoker.serve.scorer import Scorer
from stoker.training.files.rundir import find_checkpoint, find_dataset
from stoker.training.scores.evaluation import scoring

_EXACT = 2**22  # items whose products are computed at a time
_REMEDY = "Pass the dataset: stoker.Retriever(run, data=...)"
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Retrieved(Shown):
    """The best items of some users, the best first."""

    items: list[list[Any]]  # [m][k] values of the column that identifies an item
    scores: Vectors  # [m, k] as of the model, within rounding

    def summary(self) -> str:
        """Return how many items there are."""
        return f"{plural(self.scores.shape[1], 'item')} for {plural(len(self.items), 'user')}"


class Retriever:
    """Finds the items with the largest scores among all items of the training rows.

    Args:
        source: a run directory, a checkpoint, a directory of :func:`stoker.export`, or a model.
        data: the dataset of the model, if it was moved, or if ``source`` is a model. Not for an export.
        approximate: search a graph of usearch (HNSW), which is built here, instead of computing all products. It may
            miss some of the best items.
        settings: of :class:`stoker.Scorer`.

    Raises:
        ConfigError: the model has no towers, or values of its items are not known.
        DependencyError: ``approximate`` needs a package that is not installed.

    >>> from stoker.testing import make_daily_run
    >>> settings = {"model": "two-tower", "model_options": {"item": ("item",)}}
    >>> log, _ = make_daily_run("run", **settings)
    >>> retriever = stoker.Retriever("run")
    >>> retriever.columns
    ['user']
    >>> found = retriever.topk(log.head(2).select("user"), k=3)
    >>> found
    <Retrieved: 3 items for 2 users>
    """

    def __init__(
        self, source: str | Path | RecModel, data: Dataset | str | Path | None = None, *, approximate: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        index = require("usearch.index", "approximate retrieval needs", install("usearch")) if approximate else None
        self.scorer = Scorer(source, data, **settings)
        model = self.scorer.model
        if not isinstance(model, TwoTower):
            raise ConfigError(f"model {model.name!r} has no vectors of items. Train with --model two-tower.")
        self.model = model
        exported = None if isinstance(source, RecModel) else Path(source) / ITEMS
        if exported is not None and exported.is_file():
            table = read_items(exported)
        else:
            if data is None:
                assert not isinstance(source, RecModel)
                data = find_dataset(find_checkpoint(source), _REMEDY)
            table = item_table(model, self.scorer.encoder.fitted, data if isinstance(data, Dataset) else Dataset(data))
        self.items: pa.Array = table["item"].combine_chunks()  # [n] values
        self.vectors: Vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, model.width)
        encoder = self.scorer.encoder
        own = encoder.columns_of(model.item)
        self._of_item = [name for name in encoder.columns if name in own]
        #: the raw columns that users must have
        self.columns = [name for name in encoder.columns if name not in own]
        self._index: Any = None
        if index is not None:
            self._index = index.Index(ndim=model.width, metric="ip", dtype="f32")
            self._index.add(np.arange(len(self)), np.ascontiguousarray(self.vectors), threads=1)

    def __len__(self) -> int:
        return len(self.items)

    def topk(self, users: Any, k: int = 10) -> Retrieved:
        """Return the ``k`` best items for each row.

        Args:
            users: a table of raw rows with :attr:`columns`: Polars, pandas, Arrow, or anything with
                ``__arrow_c_stream__``.
            k: items for each, at most all.

        Raises:
            ConfigError: k below 1.
            DataError: a column is missing or unknown, or a value does not fit.
        """
        if k < 1:
            raise ConfigError(f"k is {k} items; give at least 1.", settings=("k",))
        frame, k = as_frame(users), min(k, len(self))
        absent = [pl.lit(None).alias(name) for name in self._of_item if name not in frame.columns]
        batch = self.scorer.encoder.encode(frame.with_columns(absent))
        with self.scorer.lock, scoring(self.model):
            inputs = self.model.inputs(batch.to(self.model.device))
            asked: Vectors = self.model._logits(self.model.users, inputs).cpu().numpy()
        places = np.empty((len(asked), k), np.int64)
        for row, user in enumerate(asked):
            places[row] = self._nearest(user, k) if self._index is None else self._near(user, k)
        products = np.einsum("mkw,mw->mk", self.vectors[places], asked)
        bias = float(self.model.bias.detach())
        scores = torch.from_numpy(products / np.float32(self.model.temperature) + np.float32(bias)).sigmoid().numpy()
        return Retrieved(items=[self.items.take(pa.array(each)).to_pylist() for each in places], scores=scores)

    def _nearest(self, user: Vectors, k: int) -> npt.NDArray[np.int64]:
        """Return the places of the k largest products, block by block; among equal ones the first items."""
        best, found = np.empty(0, np.int64), np.empty(0, np.float32)
        for start in range(0, len(self), _EXACT):
            products = self.vectors[start : start + _EXACT] @ user
            most = min(k, len(products))
            least = np.partition(products, len(products) - most)[len(products) - most]
            places = np.flatnonzero(products >= least)
            best, found = np.append(best, places + start), np.append(found, products[places])
            order = np.lexsort((best, -found))[:k]
            best, found = best[order], found[order]
        return best

    def _near(self, user: Vectors, k: int) -> npt.NDArray[np.int64]:
        places = np.sort(self._index.search(user, k).keys.astype(np.int64))
        rest = np.setdiff1d(np.arange(min(2 * k, len(self))), places)[: k - len(places)]  # if it finds fewer
        places = np.append(places, rest)
        return places[np.argsort(-(self.vectors[places] @ user), kind="stable")]
