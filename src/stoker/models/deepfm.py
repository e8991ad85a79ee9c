"""DeepFM (Guo et al. 2017, arXiv 1703.04247).

Legend: B examples, F features, N dense columns, D columns of a table, K = D - 1 latent factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel
from stoker.models.layers import MLP, dense_generator, normal
from stoker.ops.by_shard import each_row


class DeepFM(RecModel):
    """Factorisation machine and MLP over shared embeddings; their logits are summed (Eq. 1 to 4).

    Column 0 of a row is the first-order weight, the other K are the latent factors: one lookup serves both, and a row
    keeps the width of whole cache lines. A dense column x enters as x times its own learned row.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=2, num_embeddings=[100, 50])
    >>> model = stoker.DeepFM(spec, embedding_dim=4, hidden=(8,))
    >>> batch = stoker.Batch(dense=torch.zeros(3, 2), ids=torch.tensor([[1, 2], [3, 4], [1, 0]]))
    >>> model.predict(batch).shape
    torch.Size([3])

    Args:
        spec: columns and table sizes.
        hidden: layer sizes of the MLP without the single output.
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "deepfm"
    shards_at_once: ClassVar[bool] = True

    def __init__(
        self, spec: FeatureSpec, *, hidden: Sequence[int] = (400, 400, 400), **settings: Unpack[ModelSettings]
    ) -> None:
        super().__init__(spec, **settings)
        if self.embedding_dim < 2:
            raise ConfigError(
                f"DeepFM with embedding_dim={self.embedding_dim} has no latent factors: one column is the "
                "first-order weight. Choose at least 2."
            )
        self.hidden_sizes = tuple(hidden)
        generator = dense_generator(self.seed, "deepfm")
        fields = len(spec.features) + len(spec.dense)
        self.dense_rows = normal(len(spec.dense), self.embedding_dim, std=0.01, generator=generator)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = MLP(fields * (self.embedding_dim - 1), (*self.hidden_sizes, 1), generator)
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        fields = torch.cat([embedded, dense.unsqueeze(2) * each_row(self.dense_rows, dense)], dim=1)  # [B, F + N, D]
        first_order = fields[:, :, 0].sum(1)
        factors = fields[:, :, 1:]  # [B, F + N, K]
        # Rendle 2010: the sum over pairs is (|sum of v|^2 - sum of |v|^2) / 2.
        pairs = 0.5 * (factors.sum(1).square().sum(1) - factors.square().sum((1, 2)))
        deep: Tensor = self.deep(factors.flatten(1))
        return each_row(self.bias.view(()), dense) + first_order + pairs + deep.squeeze(1)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "hidden": list(self.hidden_sizes)}
