"""Two towers with in-batch negatives and logQ correction (Yi et al. 2019, RecSys, doi 10.1145/3298689.3346996).

Legend: B examples, F features, D columns of a table, W columns of a tower's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.base.units import listed
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel
from stoker.models.layers import MLP, dense_generator
from stoker.ops.by_shard import each_row
from stoker.ops.loss import in_batch_softmax

_LEAST = 1e-4  # shorter outputs of a tower are not scaled to length 1: the gradient would grow as 1 / length


class TwoTower(RecModel):
    """An MLP over the columns of the user and one over those of the item; the logit is the product of their outputs.

    Outputs have length 1, and the logit is their product divided by ``temperature``, plus a bias. So the best items of
    a catalogue are those with the largest products: :class:`stoker.training.Catalogue`.

    With the loss "in-batch", a row with label 1 is to find its item among the items of all rows of the batch. An item
    is in a batch as often as it is frequent, so ``log`` of its frequency is subtracted from its logits (Eq. 5 to 7):
    without that, frequent items would be scored too low. Frequencies are counts of the rows trained so far; checkpoints
    have them. An item that a batch has several times counts as often, as in the paper.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=1, num_embeddings=[100, 50, 20])
    >>> model = stoker.TwoTower(spec, item=("C2", "C3"), embedding_dim=4)
    >>> batch = stoker.Batch(dense=torch.zeros(3, 1), ids=torch.tensor([[1, 2, 3], [3, 4, 5], [1, 0, 0]]))
    >>> model.predict(batch).shape
    torch.Size([3])

    Args:
        spec: columns and table sizes.
        item: columns of the item, categorical or dense; all others are of the user. The first categorical one
            identifies the item. None: the one-id columns that share a table with a sequence, such as a history; the one
            with the largest table identifies it.
        hidden: layer sizes of each tower without its output.
        width: W.
        temperature: divides the products.
        log_q: correct the loss "in-batch".
        slots: counters of frequencies, an even number. Items with ids below half of it have one each, and ids are by
            falling frequency; the others share the second half. It does not follow the rows of the table, which
            :func:`stoker.update` may add.
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "two-tower"
    objectives: ClassVar[tuple[str, ...]] = (*RecModel.objectives, "in-batch")
    seen: Tensor  # [slots] int64: rows of each item
    rows_seen: Tensor  # int64
    shards_at_once: ClassVar[bool] = True

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        item: Sequence[str] | None = None,
        hidden: Sequence[int] = (128,),
        width: int = 64,
        temperature: float = 0.1,
        log_q: bool = True,
        slots: int = 2**18,
        **settings: Unpack[ModelSettings],
    ) -> None:
        columns = _find_item(spec) if item is None else tuple(item)
        features = [feature.name for feature in spec.features]
        _check_item(spec, columns)
        if min(width, slots) < 1 or not temperature > 0 or slots % 2:
            raise ConfigError(
                f"two-tower with width={width}, temperature={temperature} and slots={slots}: all must be above 0, and "
                "slots even."
            )
        super().__init__(spec, **settings)
        self.item, self.hidden_sizes, self.width = columns, tuple(hidden), width
        self.temperature, self.log_q = float(temperature), log_q
        self.identity = next(features.index(name) for name in columns if name in features)
        self.slots = slots
        self._places = [
            ([at for at, name in enumerate(names) if (name in columns) == mine])
            for mine in (False, True)
            for names in (spec.dense, features)
        ]
        towers = []
        for purpose, dense, embedded in (("user", *self._places[:2]), ("item", *self._places[2:])):
            inputs = len(dense) + len(embedded) * self.embedding_dim
            towers.append(MLP(inputs, (*self.hidden_sizes, width), dense_generator(self.seed, f"two-tower {purpose}")))
        self.user_tower, self.item_tower = towers
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(self.slots, dtype=torch.int64))
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.int64))
        self.to(self.device)

    def users(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Return the vectors of the users [B, W], of length 1, from :meth:`inputs`."""
        return self._tower(self.user_tower, dense[:, self._places[0]], embedded[:, self._places[1]])

    def items(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Return the vectors of the items [B, W], of length 1, from :meth:`inputs`."""
        return self._tower(self.item_tower, dense[:, self._places[2]], embedded[:, self._places[3]])

    def _tower(self, tower: nn.Module, dense: Tensor, embedded: Tensor) -> Tensor:
        out = tower(torch.cat([dense, embedded.flatten(1)], dim=1))
        return nn.functional.normalize(out.float() if out.dtype == torch.bfloat16 else out, dim=1, eps=_LEAST)

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        products = (self.users(dense, embedded) * self.items(dense, embedded)).sum(1)
        return products / self.temperature + each_row(self.bias.view(()), products)

    def item_ids(self, batch: Batch) -> Tensor:
        """Return the id of each row's item [B]."""
        return batch.bags(self.identity)[0]

    def own_loss(self, batch: Batch) -> Tensor:
        """Return the loss "in-batch"; in training, count the items of the batch first."""
        batch = batch.to(self.device)
        assert batch.labels is not None
        inputs = self.inputs(batch)
        users, items = self._logits(lambda *given: torch.stack([self.users(*given), self.items(*given)]), inputs)
        return in_batch_softmax(users / self.temperature, items, batch.labels, self._log_frequency(batch))

    def _log_frequency(self, batch: Batch) -> Tensor:
        ids, half = self.item_ids(batch).long(), self.slots // 2
        slots = torch.where((ids >= 0) & (ids < half), ids, half + ids % half)
        if self.training and torch.is_grad_enabled():
            self.seen.index_add_(0, slots, torch.ones_like(slots))
            self.rows_seen += len(slots)
        if not self.log_q:
            return self.bias.new_zeros(len(slots))
        return (self.seen[slots].clamp(min=1).double() / self.rows_seen.clamp(min=1)).log().to(self.bias.dtype)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "item": list(self.item),
            "hidden": list(self.hidden_sizes),
            "width": self.width,
            "temperature": self.temperature,
            "log_q": self.log_q,
            "slots": self.slots,
        }


def _find_item(spec: FeatureSpec) -> tuple[str, ...]:
    """Return the one-id features that share a table with a sequence, that of the largest table first."""
    sequences = {feature.table for feature in spec.features if feature.sequence}
    found = [feature for feature in spec.features if not feature.sequence and feature.table in sequences]
    if not found:
        example = spec.features[-1].name if spec.features else "item"
        raise ConfigError(
            "a two-tower model cannot tell which columns are of the item: no one-id column shares a table with a "
            f'sequence. Name them, the id first: model option item=["{example}"].'
        )
    return tuple(feature.name for feature in sorted(found, key=lambda one: -spec.num_embeddings[one.table]))


def _check_item(spec: FeatureSpec, item: Sequence[str]) -> None:
    features = {feature.name: feature for feature in spec.features}
    if unknown := [name for name in item if name not in features and name not in spec.dense]:
        raise ConfigError(
            f"item names {listed(unknown)}, which the dataset does not have. It has: "
            f"{listed([*spec.dense, *features])}."
        )
    first = next((features[name] for name in item if name in features), None)
    if first is None or first.sequence:
        raise ConfigError(
            f"item is {list(item)}, whose first categorical column must be the id of the item: one id, no sequence."
        )
    if len(set(item)) == len(features) + len(spec.dense):
        raise ConfigError("item names all columns, so none is left for the user. Leave those of the user out.")
