"""DCN-v2 (Wang et al. 2021, arXiv 2008.13535).

Legend: B examples, F features, D columns of a table, X = num_dense + F * D inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel
from stoker.models.layers import MLP, dense_generator, linear, normal
from stoker.ops import by_shard


class CrossLayer(nn.Module):
    """One cross layer: ``x0 * (W x + b) + x`` (Eq. 1), with ``W = U V^T`` if ``rank`` is given (Eq. 2)."""

    def __init__(self, width: int, rank: int | None, generator: torch.Generator) -> None:
        super().__init__()
        self.down: nn.Parameter | None = None
        if rank is not None:
            self.down = normal(rank, width, std=math.sqrt(2.0 / (rank + width)), generator=generator)
        self.up = linear(width if rank is None else rank, width, generator)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        inner = x if self.down is None else by_shard.linear(x, self.down)
        return torch.addcmul(x, x0, by_shard.through(self.up, inner).to(x.dtype))


class DCN(RecModel):
    """Cross layers over the concatenated inputs, and an MLP next to them ("parallel") or after them ("stacked").

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=2, num_embeddings=[100, 50])
    >>> model = stoker.DCN(spec, embedding_dim=4, rank=2, hidden=(8,))
    >>> batch = stoker.Batch(dense=torch.zeros(3, 2), ids=torch.tensor([[1, 2], [3, 4], [1, 0]]))
    >>> model.predict(batch).shape
    torch.Size([3])

    Args:
        spec: columns and table sizes.
        cross_layers: number of cross layers.
        rank: rank of the cross matrices; None means full.
        hidden: layer sizes of the MLP without the single output.
        structure: Figure 1 of the paper.
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "dcn"
    shards_at_once: ClassVar[bool] = True

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        cross_layers: int = 3,
        rank: int | None = 64,
        hidden: Sequence[int] = (512, 256),
        structure: Literal["parallel", "stacked"] = "parallel",
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(spec, **settings)
        if cross_layers < 1 or (rank is not None and rank < 1):
            raise ConfigError(f"DCN with cross_layers={cross_layers} and rank={rank}: both must be at least 1.")
        if structure not in ("parallel", "stacked"):
            raise ConfigError(f"DCN structure {structure!r} is unknown. Choose 'parallel' or 'stacked'.")
        width = len(spec.dense) + len(spec.features) * self.embedding_dim
        self.rank = None if rank is None or rank >= width else rank
        self.hidden_sizes = tuple(hidden)
        self.structure = structure
        generator = dense_generator(self.seed, "dcn")
        self.cross = nn.ModuleList(CrossLayer(width, self.rank, generator) for _ in range(cross_layers))
        self.deep = MLP(width, self.hidden_sizes, generator, last_relu=True)
        joined = self.hidden_sizes[-1] + (width if structure == "parallel" else 0)
        self.last = linear(joined, 1, generator)
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        x0 = torch.cat([dense, embedded.flatten(1)], dim=1)  # [B, X]
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        joined = self.deep(x) if self.structure == "stacked" else torch.cat([x, self.deep(x0)], dim=1)
        return by_shard.through(self.last, joined).squeeze(1)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "cross_layers": len(self.cross),
            "rank": self.rank,
            "hidden": list(self.hidden_sizes),
            "structure": self.structure,
        }
