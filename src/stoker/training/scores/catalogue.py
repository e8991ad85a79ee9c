"""The items of a dataset, their vectors by a two-tower model, and how often a user's item is among the best of all.

Legend: n items, m users, W columns of a vector, B rows of a batch, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.models.base import RecModel
from stoker.models.two_tower import TwoTower
from stoker.tables.shards import one_thread
from stoker.training.files.rundir import run_of, trained_rows
from stoker.training.scores.metrics import RECALL

if TYPE_CHECKING:
    from stoker.dataset.split import Split

_ROWS = 2**16  # of the log that are read at a time
_SCORES = 2**25  # products that are in memory at a time
_ITEMS = 2**13  # items whose vectors are computed at a time
_REMEDY = "Choose auc or log_loss, or model two-tower."


class Catalogue:
    """The items of the training rows: each id but 0, with its columns as in its last training row.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> settings = {"model": "two-tower", "model_options": {"item": ("C1",)}, "loss": "in-batch"}
    >>> model = stoker.train(data, out="run", batch_size=64, steps=10, display="quiet", **settings).model
    >>> catalogue = stoker.training.Catalogue(model, data)
    >>> len(catalogue), catalogue.vectors(model).shape
    (49, torch.Size([49, 64]))

    Args:
        model: says which columns are of the item.
        data: a dataset; its training rows are read twice.
        updates: those of the rows of updates, in their order. All rows of these count as training rows.

    Raises:
        ConfigError: the model has no towers, or the dataset no training rows.
        DataError: ids are raw, or rows are damaged.
    """

    def __init__(self, model: RecModel, data: Dataset, updates: Sequence[Dataset] = ()) -> None:
        if not isinstance(model, TwoTower):
            raise ConfigError(f"model {model.name!r} has no vectors of items. {_REMEDY}")
        data.schema.check_ids("a catalogue of items cannot be listed")
        if not len(data.train):
            raise ConfigError(f"{data.path} has no training rows, so no items. Pass the dataset of the first training.")
        self.ids, self._items = torch.empty(0, dtype=torch.int64), list[Batch]()
        self._add(model, data, data.train)
        for each in updates:
            self._add(model, each, each.test)

    def extended(self, model: RecModel, update: Dataset) -> Catalogue:
        """Return the catalogue with the rows of one more update."""
        assert isinstance(model, TwoTower)
        made = copy(self)
        made._add(model, update, update.test)
        return made

    def _add(self, model: TwoTower, data: Dataset, split: Split) -> None:
        """Add the items of rows. Those that are known get the columns that they have here."""
        last = torch.full((data.schema.num_embeddings[data.schema.features[model.identity].table],), -1)
        for start, batch in _numbered(split):
            ids = model.item_ids(batch).long()
            last.scatter_reduce_(0, ids, torch.arange(start, start + len(batch)), "amax")
        last[0] = -1  # values outside the vocabulary are no item
        ids = last.ge(0).nonzero().flatten()
        rows = last[ids].sort()
        taken, done = [], 0
        for start, batch in _numbered(split):
            end = int(torch.searchsorted(rows.values, start + len(batch)))
            taken.append(_without_user(batch, rows.values[done:end] - start, model))
            done = end
        others = last[self.ids] < 0
        parts = others.split([len(batch) for batch in self._items])
        kept = [_without_user(batch, part.nonzero().flatten(), model)
                for batch, part in zip(self._items, parts, strict=True)]  # fmt: skip
        self._items = [batch for batch in (*kept, *taken) if len(batch)]
        self.ids = torch.cat([self.ids[others], ids[rows.indices]])  # [n]
        self._place = torch.full_like(last, -1)
        self._place[self.ids] = torch.arange(len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def vectors(self, model: RecModel) -> Tensor:
        """Return the vectors of all items in the order of :attr:`ids`: [n, W], on the model's device."""
        assert isinstance(model, TwoTower)
        with torch.no_grad():
            made = [_vectors(model, model.items, batch) for batch in self._items]
        return torch.cat(made) if made else torch.empty(0, model.width, device=model.device)

    def recall(
        self, model: RecModel, split: Split, *, rows: int | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, float]:
        """Return the shares of the rows with label 1 whose item is among the best 10, 50 and 100 of the catalogue.

        All products are computed; of a model with logical shards on one thread, so their bits do not depend on the
        number of threads and ranks. Among equal ones the row's item counts as the last; an item that is not in the
        catalogue counts as not found.

        Args:
            model: the model, in evaluation mode.
            split: the rows.
            rows: the first ones; None means all.
            stop: called before each batch; if it returns True, the metrics of the rows so far are returned.
        """
        assert isinstance(model, TwoTower)
        found, asked = [0] * len(RECALL), 0
        with one_thread() if model.embeddings.shards > 1 else nullcontext(), torch.no_grad():
            items = self.vectors(model)
            finite = bool(items.isfinite().all())
            for batch in split.batches(_ITEMS, limit=rows) if len(split) else ():
                if stop is not None and stop():
                    break
                assert batch.labels is not None
                chosen = batch.labels == 1
                users = _vectors(model, model.users, batch)[chosen.to(model.device)]
                finite &= bool(users.isfinite().all())
                ids = model.item_ids(batch)[chosen].long()
                places = self._place[ids.clamp(max=len(self._place) - 1)].where(ids < len(self._place), -1)
                ranks = self._ranks(users, items, places.to(users.device))
                found = [so_far + int((ranks < k).sum()) for so_far, k in zip(found, RECALL.values(), strict=True)]
                asked += len(users)
        shares = [hits / asked if asked and finite else math.nan for hits in found]
        return {**dict(zip(RECALL, shares, strict=True)), "catalogue": len(self), "recall_rows": asked}

    def _ranks(self, users: Tensor, items: Tensor, places: Tensor) -> Tensor:
        """Return how many other items have at least the product of the user's own: [m]; n for one that is missing."""
        missing = places < 0
        ranks = torch.full_like(places, len(items))
        size = max(1, _SCORES // max(1, len(items)))
        for start in range(0, len(users) if len(items) else 0, size):
            part = slice(start, start + size)
            scores = users[part] @ items.T
            own = scores.gather(1, places[part].clamp(min=0).unsqueeze(1))
            ranks[part] = (scores >= own).sum(1) - 1
        return ranks.masked_fill(missing, len(items) + max(RECALL.values()))


def catalogue_of(model: RecModel, data: Dataset, checkpoint: Path | None = None) -> Catalogue | None:
    """Return the catalogue of a model with towers, else None; also None for tables that grow.

    ``data`` may be rows that were prepared like its dataset, if ``checkpoint`` is in the run, which may have updates.
    """
    if not isinstance(model, TwoTower) or data.schema.grow:
        return None
    own = data if "train" in data.splits and len(data.train) else None
    if checkpoint is not None and run_of(checkpoint) is not None:
        return Catalogue(model, *trained_rows(checkpoint, own))
    return None if own is None else Catalogue(model, own)


def _numbered(split: Split) -> Iterator[tuple[int, Batch]]:
    done = 0
    for batch in split.batches(_ROWS) if len(split) else ():
        yield done, batch
        done += len(batch)


def _vectors(model: TwoTower, tower: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return the outputs of a tower for a batch of any size: [B, W] float32."""
    return model._logits(tower, model.inputs(batch.to(model.device)))


def _without_user(batch: Batch, rows: Tensor, model: TwoTower) -> Batch:
    """Return rows of a batch without the columns of the user: zeros, id 0 and empty sequences."""
    features = model.spec.features
    ours = torch.tensor([feature.name in model.item for feature in features])
    dense = batch.dense[rows] * torch.tensor([name in model.item for name in model.spec.dense], dtype=torch.bool)
    if batch.offsets is None:
        return Batch(dense=dense, ids=batch.ids[rows] * ours)
    kept = ours | torch.tensor([not feature.sequence for feature in features])
    lengths = (batch.offsets.diff().view(len(batch), -1)[rows] * kept).flatten()
    starts = batch.offsets[:-1].view(len(batch), -1)[rows].flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
    ids = batch.ids[torch.repeat_interleave(starts, lengths) + within]
    return Batch(dense=dense, ids=ids * torch.repeat_interleave(ours.repeat(len(rows)), lengths), offsets=offsets)
