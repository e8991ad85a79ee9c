"""SASRec, self-attention over a history (Kang & McAuley 2018, arXiv 1808.09781).

Legend: B examples, T steps, S vectors of a step, D columns of a table, W = S * D columns of a step, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings
from stoker.models.layers import MLP, dense_generator, linear, normal
from stoker.models.sequence import SequenceModel

_PLACES = 0.02  # standard deviation of the initial positions


class AttentionBlock(nn.Module):
    """``x + attention(LN(x))``, then ``x + FFN(LN(x))`` (section 3.2), without dropout: [B, T, W] to [B, Q, W].

    A step attends to itself and to older ones. Only the last Q steps are computed.
    """

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = normal(3 * width, width, std=math.sqrt(1.0 / width), generator=generator)  # Q, K and V
        self.first, self.second = linear(width, width, generator), linear(width, width, generator)

    def forward(self, x: Tensor, mask: Tensor, queries: int) -> Tensor:
        steps, width = x.shape[1:]
        seen = self.before(x)
        of_query, of_others = self.attention.split([width, 2 * width])
        query = self._heads(nn.functional.linear(seen[:, -queries:], of_query))  # [B, H, Q, W / H]
        key, value = (self._heads(half) for half in nn.functional.linear(seen, of_others).chunk(2, dim=2))
        allowed = torch.ones(queries, steps, dtype=torch.bool, device=x.device).tril(steps - queries) & mask[:, None]
        scores = query @ key.transpose(2, 3) / math.sqrt(width / self.heads)
        # A missing step has only refused keys: a finite value keeps it finite until the mask makes it 0.
        scores = scores.masked_fill(~allowed.unsqueeze(1), torch.finfo(scores.dtype).min)
        x = x[:, -queries:] + (scores.softmax(3).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        out: Tensor = x + self.second(self.first(self.after(x)).relu())
        return out * mask[:, -queries:].unsqueeze(2)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (self.heads, -1))
        return heads.transpose(1, 2)


class SASRec(SequenceModel):
    """Causal self-attention over the history; its last state is multiplied by the target.

    Steps have learned positions, counted from the newest one. The logit is the product of state and target, plus an MLP
    over the state and all other inputs, the target among them: the paper has neither other inputs nor a bias of the
    item. Without a history the state is 0.

    The paper draws a negative item for each step. Here each row is an impression with its label, so the shown items
    that were not chosen are the negatives: of the loss "bce", or of "bpr" and "softmax" over the lists of a dataset
    with groups.

    >>> item = stoker.Feature(name="item", table="items")
    >>> past = stoker.Feature(name="past", table="items", sequence=True, max_length=5)
    >>> spec = stoker.FeatureSpec(dense=(), features=(item, past), num_embeddings={"items": 100})
    >>> model = stoker.SASRec(spec, embedding_dim=4)
    >>> offsets = torch.tensor([0, 1, 3, 4, 4])
    >>> batch = stoker.Batch(dense=torch.zeros(2, 0), ids=torch.tensor([7, 3, 5, 9]), offsets=offsets)
    >>> model.predict(batch).shape  # 7 after 3 and 5; 9 without a history
    torch.Size([2])

    Args:
        spec: columns and table sizes.
        history: target feature -> sequence feature (:class:`SequenceModel`).
        blocks: number of blocks; the paper has 2.
        heads: of the attention, a divisor of the columns of a step; the paper has 1.
        hidden: layer sizes of the MLP without its single output.
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "sasrec"

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        history: Mapping[str, str] | None = None,
        blocks: int = 2,
        heads: int = 1,
        hidden: Sequence[int] = (64,),
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(spec, history=history, **settings)
        width = len(self.targets) * self.embedding_dim
        if blocks < 1 or heads < 1 or width % heads:
            raise ConfigError(
                f"SASRec with blocks={blocks} and heads={heads}: give at least one block, and heads that divide the "
                f"{width} columns of a step."
            )
        self.heads, self.hidden_sizes = heads, tuple(hidden)
        generator = dense_generator(self.seed, "sasrec")
        self.places = normal(self.num_steps, width, std=_PLACES, generator=generator)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads, generator) for _ in range(blocks))
        self.normed = nn.LayerNorm(width)
        inputs = len(spec.dense) + len(self.pooled) * self.embedding_dim + width
        self.others = MLP(inputs, (*self.hidden_sizes, 1), dense_generator(self.seed, "sasrec others"))
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        features = embedded.unbind(1)
        target = torch.cat([features[place] for place in self.targets], dim=1)  # [B, W]
        x = (steps.flatten(2) + self.places) * mask.unsqueeze(2)
        for block in self.blocks:
            x = block(x, mask, 1 if block is self.blocks[-1] else self.num_steps)
        state: Tensor = self.normed(x[:, -1]) * mask[:, -1:]
        logits: Tensor = self.others(torch.cat([dense, embedded.flatten(1), state], dim=1)).squeeze(1)
        return logits + (state * target).sum(1)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "blocks": len(self.blocks), "heads": self.heads, "hidden": list(self.hidden_sizes)}
