"""TBSM, the time-based sequence model (Ishkhanov et al. 2020, arXiv 2008.11922).

Legend: B examples, T steps, S vectors of a step, C context features, D columns of a table, V outputs of the tower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings
from stoker.models.layers import MLP, dense_generator, normal
from stoker.models.sequence import SequenceModel
from stoker.ops.interaction import dot_interaction
from stoker.ops.mlp import mlp

_LEAST = 1e-4  # shorter outputs of the tower are not scaled to length 1: the gradient would grow as 1 / length


class TBSM(SequenceModel):
    """A DLRM at every step of the history, attention of the target over the steps, and an MLP over both.

    The tower is one DLRM for all steps and the target: its dense input is the step's place k / (T + 1), its vectors are
    those of the step (item, category) and those of the context (the user, all other features), which are the same at
    every step. Its output is scaled to length 1. The attention weighs step t by ``sigmoid(MLP(h A^T A w))_t`` with
    the target's vector w, and the last MLP takes [weighted sum, w]. The defaults are the layers for Taobao of the
    paper's code, also in FAE (Table 2, RMC1): 1-16, 22-15-15, 20-15-15-20, 30-60-1.

    >>> item = stoker.Feature(name="item", table="items")
    >>> past = stoker.Feature(name="past", table="items", sequence=True, max_length=5)
    >>> spec = stoker.FeatureSpec(dense=(), features=(item, past), num_embeddings={"items": 100})
    >>> model = stoker.TBSM(spec, embedding_dim=4)
    >>> offsets = torch.tensor([0, 1, 3, 4, 4])
    >>> batch = stoker.Batch(dense=torch.zeros(2, 0), ids=torch.tensor([7, 3, 5, 9]), offsets=offsets)
    >>> model.predict(batch).shape  # 7 after 3 and 5; 9 without a history
    torch.Size([2])

    Args:
        spec: columns and table sizes.
        history: target feature -> sequence feature (:class:`SequenceModel`).
        bottom: layer sizes from a step's place to a vector, without the last one, ``embedding_dim``.
        tower: layer sizes over the pairwise products.
        attention: layer sizes of the attention's MLP, without the last one, T. Empty: the products are the weights.
        top: layer sizes of the last MLP without its single output.
        inner: the product of step and target: "definite" (A^T A), "indefinite" (A) or "dot".
        position: the dense column with the target's place; without such a column the place is 1. All other dense
            columns belong to the target: they go to its tower, where the steps have zeros, and to the last MLP.
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "tbsm"

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        history: Mapping[str, str] | None = None,
        bottom: Sequence[int] = (),
        tower: Sequence[int] = (15, 15),
        attention: Sequence[int] = (15, 15),
        top: Sequence[int] = (60,),
        inner: Literal["definite", "indefinite", "dot"] = "definite",
        position: str = "position",
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(spec, history=history, **settings)
        if inner not in ("definite", "indefinite", "dot"):
            raise ConfigError(f"TBSM inner {inner!r} is unknown. Choose 'definite', 'indefinite' or 'dot'.")
        dim = self.embedding_dim
        self.bottom_sizes = tuple(bottom) if tuple(bottom[-1:]) == (dim,) else (*bottom, dim)
        self.tower_sizes, self.attention_sizes = tuple(tower), tuple(attention)
        self.top_sizes = tuple(top[:-1]) if tuple(top[-1:]) == (1,) else tuple(top)
        self.inner = inner
        self.position = position
        self._context = [place for place in range(len(self.pooled)) if place not in self.targets]
        self._place = spec.dense.index(position) if position in spec.dense else None
        self._others = [column for column in range(len(spec.dense)) if column != self._place]
        count = 1 + len(self._context) + len(self.targets)
        generator = dense_generator(self.seed, "bottom")
        self.bottom = MLP(1 + len(self._others), self.bottom_sizes, generator, last_relu=True)
        generator = dense_generator(self.seed, "tower")
        self.tower = MLP(dim + count * (count - 1) // 2, self.tower_sizes, generator, last_relu=True)
        width = self.tower_sizes[-1]
        generator = dense_generator(self.seed, "attention")
        self.product: nn.Parameter | None = None
        if inner != "dot":
            self.product = normal(width, width, std=math.sqrt(1.0 / width), generator=generator)
        self.attention: MLP | None = None
        if self.attention_sizes:
            self.attention = MLP(self.num_steps, (*self.attention_sizes, self.num_steps), generator)
            with torch.no_grad():  # weights begin near 1 / T: so their sum is as long as the target, not T / 2
                self.attention.parts()[1][-1].sub_(math.log(max(1, self.num_steps - 1)))
        self.top = MLP(2 * width + len(self._others), (*self.top_sizes, 1), dense_generator(self.seed, "top"))
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        features = embedded.unbind(1)
        target = torch.stack([features[place] for place in self.targets], dim=1)  # [B, S, D]
        context = [features[place] for place in self._context]
        all_steps = torch.cat([steps, target.unsqueeze(1)], dim=1)  # [B, T + 1, S, D], the target last
        seen = self._towers(self._dense_vectors(dense), all_steps, context)  # [B, T + 1, V]
        seen = nn.functional.normalize(seen, dim=2, eps=_LEAST)
        past, last = seen[:, :-1] * mask.unsqueeze(2), seen[:, -1]
        weighed = torch.bmm(self._weights(past, last).unsqueeze(1), past).squeeze(1)  # [B, V]
        logits: Tensor = self.top(torch.cat([weighed, last, dense[:, self._others]], dim=1))
        return logits.squeeze(1)

    def _dense_vectors(self, dense: Tensor) -> Tensor:
        """Apply the bottom MLP to the dense columns of every step, the target last: [B, T + 1, D]."""
        count = self.num_steps
        # The inputs of steps do not depend on the example: they go through the layers once a batch.
        places = torch.arange(1, count + 1, device=dense.device, dtype=dense.dtype).unsqueeze(1) / (count + 1)
        past = nn.functional.pad(places, (0, len(self._others)))
        place = dense.new_ones(dense.shape[0], 1) if self._place is None else dense[:, self._place].unsqueeze(1)
        last = torch.cat([place, dense[:, self._others]], dim=1)
        made: Tensor = self.bottom(torch.cat([past, last]))
        return torch.cat([made[:count].expand(dense.shape[0], -1, -1), made[count:].unsqueeze(1)], dim=1)

    def _towers(self, made: Tensor, steps: Tensor, context: list[Tensor]) -> Tensor:
        """Apply one DLRM to all steps: [B, T + 1, V].

        The products among context features are the same at every step, so they and their slice of the first layer are
        computed once an example. That is the same function within rounding.
        """
        batch, count, _, dim = steps.shape
        flat = steps.flatten(0, 1)
        inputs = dot_interaction(made.reshape(-1, dim), flat)  # the dense vector and the products within a step
        (weight, *weights), (bias, *biases) = self.tower.parts()
        if context:
            vectors = torch.cat([made.unsqueeze(2).to(steps.dtype), steps], dim=2).flatten(1, 2)
            crossed = torch.bmm(vectors, torch.stack(context, dim=2)).unflatten(1, (count, -1)).flatten(2).flatten(0, 1)
            inputs = torch.cat([inputs, crossed.to(inputs.dtype)], dim=1)
        own, shared = weight.split([inputs.shape[1], weight.shape[1] - inputs.shape[1]], dim=1)
        hidden = nn.functional.linear(inputs, own).unflatten(0, (batch, count))
        if shared.shape[1]:
            pairs = dot_interaction(context[0], torch.stack(context[1:], dim=1))[:, dim:]
            hidden = hidden + nn.functional.linear(pairs, shared, bias).unsqueeze(1)
        else:
            hidden = hidden + bias
        hidden = hidden.relu().flatten(0, 1)
        if weights:
            hidden = mlp(hidden, weights, biases, relu_last=True)
        found: Tensor = hidden.unflatten(0, (batch, count))
        return found

    def _weights(self, past: Tensor, last: Tensor) -> Tensor:
        """Return the attention's weight of every step: [B, T]. A missing step has a zero vector in ``past``."""
        if self.product is not None:
            last = nn.functional.linear(last, self.product)  # A w
            if self.inner == "definite":
                last = nn.functional.linear(last, self.product.t())
        products = torch.bmm(past, last.unsqueeze(2)).squeeze(2)
        return products if self.attention is None else torch.sigmoid(self.attention(products))

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "bottom": list(self.bottom_sizes),
            "tower": list(self.tower_sizes),
            "attention": list(self.attention_sizes),
            "top": list(self.top_sizes),
            "inner": self.inner,
            "position": self.position,
        }
