"""DLRM (Naumov et al. 2019, arXiv 1906.00091).

Legend: B examples, F features, D columns of a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel
from stoker.models.layers import MLP, dense_generator, normal
from stoker.ops import by_shard
from stoker.ops.interaction import dot_interaction
from stoker.ops.mlp import ALIGN


class DLRM(RecModel):
    """Bottom MLP over the dense columns, pairwise dot products with the pooled rows, top MLP over both.

    Without dense columns a learned vector replaces the output of the bottom MLP.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=2, num_embeddings=[100, 50])
    >>> model = stoker.DLRM(spec, embedding_dim=4, bottom=(8,), top=(8,))
    >>> batch = stoker.Batch(dense=torch.zeros(3, 2), ids=torch.tensor([[1, 2], [3, 4], [1, 0]]))
    >>> model.predict(batch).shape
    torch.Size([3])

    Args:
        spec: columns and table sizes.
        bottom: layer sizes; must end in ``embedding_dim``, which is appended if it is missing.
        top: layer sizes without the last, single output.
        linear: the share of label 1, to add linear terms: column 0 of the rows, and a weight for each dense column. The
            output starts at this share, and the top MLP at zero, so it learns what the linear terms leave.
        settings: those of :class:`RecModel`.

    Raises:
        ConfigError: ``linear`` is not between 0 and 1.
    """

    name: ClassVar[str] = "dlrm"
    shards_at_once: ClassVar[bool] = True

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        linear: float | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(spec, **settings)
        if linear is not None and not 0 < linear < 1:
            raise ConfigError(
                f"linear is {linear}, the share of label 1. Give one above 0 and below 1, or leave it out."
            )
        self.linear = linear
        dim, fields = self.embedding_dim, len(spec.features) + 1
        self.bottom_sizes = tuple(bottom) if tuple(bottom[-1:]) == (dim,) else (*bottom, dim)
        self.top_sizes = tuple(top[:-1]) if tuple(top[-1:]) == (1,) else tuple(top)
        generator = dense_generator(self.seed, "bottom")
        self.bottom: MLP | None = None
        self.constant: nn.Parameter | None = None
        if spec.dense:
            self.bottom = MLP(len(spec.dense), self.bottom_sizes, generator, last_relu=True)
        else:
            self.constant = normal(dim, std=math.sqrt(1.0 / dim), generator=generator)
        self.top = MLP(dim + fields * (fields - 1) // 2, (*self.top_sizes, 1), dense_generator(self.seed, "top"))
        self.dense_weights: nn.Parameter | None = None
        if linear is not None:
            weights, biases = self.top.parts()
            nn.init.zeros_(weights[-1])
            nn.init.constant_(biases[-1], math.log(linear / (1 - linear)))
            if spec.dense:
                generator = dense_generator(self.seed, "linear")
                self.dense_weights = normal(1, len(spec.dense), std=0.01, generator=generator)
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        if self.bottom is not None:
            x = self.bottom(dense)  # [B, D]
        else:
            assert self.constant is not None
            x = by_shard.each_row(self.constant, embedded).expand(embedded.shape[0], -1)
        logits: Tensor = self.top(dot_interaction(x, embedded, align=ALIGN))  # [B, 1]
        if self.linear is not None:
            logits = logits + embedded[:, :, 0].sum(1, keepdim=True)
        if self.dense_weights is not None:
            logits = logits + by_shard.linear(dense, self.dense_weights)
        return logits.squeeze(1)

    def config(self) -> dict[str, Any]:
        own = {"bottom": list(self.bottom_sizes), "top": list(self.top_sizes)}
        return {**super().config(), **own, **({} if self.linear is None else {"linear": self.linear})}
