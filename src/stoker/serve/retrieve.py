"""The best items of a catalogue for a user, by the vectors of a two-tower model.

Legend: n items, m users, W columns of a vector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from stoker.base.errors import ConfigError, DataError, install, require
from stoker.base.picture import Shown
from stoker.base.units import plural
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel, TwoTower
from stoker.prep.requests import RowEncoder, map_table
from stoker.serve.items import ITEMS, Items, check_values
from stoker.serve.scorer import Scorer, filled
from stoker.training.files.checkpoint import chain, reading
from stoker.training.files.rundir import trained_rows
from stoker.training.scores.catalogue import Catalogue
from stoker.training.scores.evaluation import scoring

_EXACT = 2**22  # items whose products are computed at a time
_REMEDY = "Pass the dataset: stoker.Retriever(run, data=...)"
VectorArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Retrieved(Shown):
    """The best items of some users, the best first."""

    items: list[list[Any]]  # [m][k] values of the column that identifies an item
    scores: VectorArray  # [m, k] as of the model, within rounding
    version: Mapping[str, Any]  # update and step of the model; empty of a model in memory

    def summary(self) -> str:
        """Return how many items there are."""
        return f"{plural(self.scores.shape[1], 'item')} for {plural(len(self.items), 'user')}"


class Retriever:
    """Finds the items with the largest scores among all items of the training rows, and of the rows of updates.

    Args:
        source: a run directory, a checkpoint, a directory of :func:`stoker.export`, or a model.
        data: the dataset of the model, if it was moved, or if ``source`` is a model. Not for an export.
        approximate: search a graph of usearch (HNSW), which is built here, instead of computing all products. It may
            miss some of the best items.
        follow: follow the updates and roll-backs of the run, with :meth:`poll`.
        settings: of :class:`stoker.Scorer`.

    Raises:
        ConfigError: the model has no towers, or values of its items are not known.
        DataError: rows of an update were deleted, which have items.
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
        follow: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        self._graphs = (
            require("usearch.index", "approximate retrieval needs", install("usearch")) if approximate else None
        )
        self.scorer = Scorer(source, data, follow=follow, **settings)
        if not isinstance(self.scorer.model, TwoTower):
            raise ConfigError(f"model {self.model.name!r} has no vectors of items. Train with --model two-tower.")
        self._data = data if data is None or isinstance(data, Dataset) else Dataset(data)
        self._known: list[tuple[str, Catalogue]] = []  # sha256 of manifests, and the items then: of the last two
        self.items: pa.Array = pa.array([])  # [n] values
        self.vectors: VectorArray  # [n, W]
        self._index: Any = None
        encoder = self.scorer.encoder
        if isinstance(source, RecModel):
            assert self._data is not None
            self._use(Items(self.model, encoder.fitted, Catalogue(self.model, self._data)))
        elif (Path(source) / ITEMS).is_file():
            table = map_table(Path(source) / ITEMS)
            self.items = table["item"].combine_chunks()
            self.vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, self.model.width)
        else:
            if self.scorer.checkpoint is None:
                check_values(self.model, encoder.fitted)
            assert self.scorer.checkpoint is not None
            path, manifest = self.scorer.checkpoint
            with reading(path, manifest):  # else these are not the items of the model
                self._prepare(path, encoder)()
            self.scorer.companion = weakref.WeakMethod(self._prepare)  # a cycle would keep rows and vectors
        self._build()
        own = encoder.columns_of(self.model.item)
        self._of_item = [name for name in encoder.columns if name in own]
        #: the raw columns that users must have
        self.columns = [name for name in encoder.columns if name not in own]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def model(self) -> TwoTower:
        """The model, which may be another one after :meth:`poll`."""
        return self.scorer.model  # type: ignore[return-value]

    def poll(self) -> bool:
        """Take the model that the run has now, and its items; return True if they changed.

        An update changes the dense part, so all vectors are computed anew. From then on all users get the items and
        scores of the new model; those of a graph are found exactly until the new graph is built.

        Raises:
            CheckpointError: an update is missing or damaged; model and items are as before.
            DataError: the rows of one are.
        """
        changed = self.scorer.poll()
        if changed:
            self._build()
        return changed

    def _prepare(self, path: Path, encoder: RowEncoder) -> Callable[[], None]:
        """Read the items of a checkpoint; return what computes their vectors once the model is that one."""
        with reading(path) as links:
            catalogue = self._catalogue(path)
        self._known = [*self._known, (links[-1].digest, catalogue)][-2:]
        items = Items(self.model, encoder.fitted, catalogue)
        return lambda: self._use(items)

    def _catalogue(self, path: Path) -> Catalogue:
        data, updates = trained_rows(path, self._data, _REMEDY)
        numbers = {digest: int(link.manifest["extra"].get("update", {}).get("number", 0))
                   for link in chain(path) for digest in link.digests}  # fmt: skip
        for digest, catalogue in reversed(self._known):
            if digest in numbers:  # rows before are the same
                for each in updates[numbers[digest] :]:
                    catalogue = catalogue.extended(self.model, each)
                return catalogue
        return Catalogue(self.model, data, updates)

    def _use(self, items: Items) -> None:
        self.items, self.vectors, self._index = items.values, items.vectors(self.model), None

    def _build(self) -> None:
        """Build the graph of the vectors."""
        if self._graphs is not None:
            vectors = self.vectors
            index = self._graphs.Index(ndim=self.model.width, metric="ip", dtype="f32")
            index.add(np.arange(len(vectors)), np.ascontiguousarray(vectors), threads=1)
            with self.scorer.lock:
                if self.vectors is vectors:
                    self._index = index

    def topk(self, users: Any, k: int = 10) -> Retrieved:
        """Return the ``k`` best items for each row.

        Args:
            users: a table of raw rows with :attr:`columns`: Polars, pandas, Arrow, or anything with
                ``__arrow_c_stream__``.
            k: items for each, at most all.

        Raises:
            ConfigError: k below 1.
            DataError: a column is missing or unknown, or a value does not fit or is too large.
        """
        if k < 1:
            raise ConfigError(f"k is {k} items; give at least 1.", settings=("k",))
        with self.scorer.lock:  # users, items and vectors are of one model
            model, encoder, version = self.model, self.scorer.encoder, dict(self.scorer.version)
            items, vectors, index = self.items, self.vectors, self._index
            absent = {name: value for name, value in filled(encoder).items() if name in self._of_item}
            encode = encoder.from_objects if isinstance(users, list) else encoder.encode
            batch = encode(users, filled=absent)
            with scoring(model):
                inputs = model.inputs(batch.to(model.device))
                asked: VectorArray = model._logits(model.users, inputs).cpu().numpy()
            bias = float(model.bias.detach())
        if (odd := ~np.isfinite(asked).all(1)).any():
            raise DataError(f"row {odd.argmax()}: this user has no vector, as a value is too large for the model.")
        k = min(k, len(items))
        places = np.empty((len(asked), k), np.int64)
        for row, user in enumerate(asked):
            places[row] = _nearest(vectors, user, k) if index is None else _near(index, vectors, user, k)
        products = np.einsum("mkw,mw->mk", vectors[places], asked)
        scores = torch.from_numpy(products / np.float32(model.temperature) + np.float32(bias)).sigmoid().numpy()
        values = [items.take(pa.array(each)).to_pylist() for each in places]
        return Retrieved(items=values, scores=scores, version=version)


def _nearest(vectors: VectorArray, user: VectorArray, k: int) -> npt.NDArray[np.int64]:
    """Return the places of the k largest products, block by block; among equal ones the first items."""
    best, found = np.empty(0, np.int64), np.empty(0, np.float32)
    for start in range(0, len(vectors), _EXACT):
        products = vectors[start : start + _EXACT] @ user
        most = min(k, len(products))
        least = np.partition(products, len(products) - most)[len(products) - most]
        places = np.flatnonzero(products >= least)
        best, found = np.append(best, places + start), np.append(found, products[places])
        order = np.lexsort((best, -found))[:k]
        best, found = best[order], found[order]
    return best


def _near(index: Any, vectors: VectorArray, user: VectorArray, k: int) -> npt.NDArray[np.int64]:
    found = index.search(user, k).keys.astype(np.int64)
    rest = np.setdiff1d(np.arange(min(2 * k, len(vectors))), found)[: k - len(found)]  # if it finds fewer
    places = np.sort(np.append(found, rest))
    return places[np.argsort(-(vectors[places] @ user), kind="stable")]
