"""Say which column may reveal the label, where metrics are too good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import Split
from stoker.training.scores.metrics import StreamingMetrics

_TOO_GOOD = 0.99  # AUC or recall@10
_ALONE = 0.9  # AUC of a single column that explains it
_ROWS = 2**15  # of each of two samples
_BINS = 100  # quantiles of a dense column
_ITEMS = 200  # a smaller catalogue has a large recall@10 by itself


def leak_hint(data: Dataset, metrics: Mapping[str, float | None], split: str) -> str:
    """Return a sentence about metrics of ``split`` that are too good to be true, or an empty text.

    It names the column whose values alone give the highest AUC: the mean label of an id, or of a bin of numbers, in the
    training rows. All come from the first rows of a split.
    """
    if (metrics.get("recall_10") or 0) >= _TOO_GOOD and (metrics.get("catalogue") or 0) > _ITEMS:
        return (
            f"a {split} recall@10 of {metrics['recall_10']:.4f} is too good: does a column of the user belong to the "
            "item, such as its category? Model option item names the columns of the item"
        )
    if (metrics.get("auc") or 0) < _TOO_GOOD:
        return ""
    found = dict(_aucs(data, _sample(data.train), _sample(data.splits[split])))
    best = max(found, key=lambda name: found[name], default="")
    said = f"a {split} AUC of {metrics['auc']:.4f} is too good to be true for most logs: "
    if not best or found[best] < _ALONE:
        return f"{said}is a column made from the label, or known only after it? No column alone reaches {_ALONE:g}"
    return (
        f"{said}column {best!r} alone has {found[best]:.4f}. If it is made from the label, or known only after it, "
        "leave it out of the schema"
    )


def _sample(split: Split) -> Batch:
    return next(iter(split.batches(min(_ROWS, len(split)))))


def _aucs(data: Dataset, train: Batch, held: Batch) -> Iterator[tuple[str, float]]:
    """Yield the AUC of the mean label of each dense column's bins, and of each id of the features with one id."""
    assert train.labels is not None
    assert held.labels is not None
    known, mean = ~held.labels.isnan(), float(train.labels.nanmean())
    for name, *both in _codes(data, train, held):
        ids, places = torch.unique(torch.cat(both), return_inverse=True)
        mine, theirs = places[: len(train)], places[len(train) :]
        seen = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, mine, torch.ones(len(mine)).double())
        sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, mine, train.labels.nan_to_num(mean).double())
        yield name, _auc(((sums + mean) / (seen + 1)).float()[theirs][known], held.labels[known])


def _codes(data: Dataset, train: Batch, held: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
    for at, name in enumerate(data.schema.dense):
        yield name, *_bins(train.dense[:, at].contiguous(), held.dense[:, at].contiguous())
    for at, feature in enumerate(data.schema.features):
        if not feature.sequence and len(held.bags(at)[0]) == len(held):
            yield feature.name, train.bags(at)[0], held.bags(at)[0]


def _bins(train: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bin of each number: a quantile, or -1 for the most frequent one, which stands for missing values."""
    cuts = torch.quantile(train, torch.arange(1, _BINS) / _BINS).unique()
    fill = train.mode().values
    one, other = (torch.bucketize(numbers, cuts).where(numbers != fill, -1) for numbers in (train, held))
    return one, other


def _auc(scores: Tensor, labels: Tensor) -> float:
    metrics = StreamingMetrics()
    metrics.update(scores, labels)
    auc = metrics.compute()["auc"]
    return auc if auc == auc else 0.5
