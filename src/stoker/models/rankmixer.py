"""RankMixer (Zhu et al. 2025, arXiv 2507.15551).

Legend: B examples, F features, X = num_dense + F * D inputs, T tokens, W columns of a token.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel
from stoker.models.layers import dense_generator, linear, normal

_MOST_TOKENS = 16  # by default; the paper's 100 M parameters have 16, its 1 B have 32


class PerToken(nn.Module):
    """A separate linear layer for each token: [T, B, inputs] to [T, B, outputs]."""

    def __init__(self, tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = normal(tokens, inputs, outputs, std=math.sqrt(2.0 / (inputs + outputs)), generator=generator)
        self.bias = nn.Parameter(torch.zeros(tokens, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class MixerBlock(nn.Module):
    """``s = LN(mix(x) + x)``, then ``LN(FFN_t(s_t) + s_t)`` for each token t (Eq. 2): [T, B, W] to the same shape."""

    def __init__(self, tokens: int, width: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.mixed, self.normed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.first = PerToken(tokens, width, hidden, generator)
        self.second = PerToken(tokens, hidden, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        s = self.mixed(mix(x) + x)
        out: Tensor = self.normed(self.second(nn.functional.gelu(self.first(s))) + s)
        return out


def mix(x: Tensor) -> Tensor:
    """Cut each token into T heads; new token h has head h of every token, in their order (Eq. 3 and 4, H = T)."""
    tokens, _, width = x.shape
    heads: Tensor = x.unflatten(2, (tokens, width // tokens))
    return heads.transpose(0, 2).flatten(2)


def _cut(inputs: int, tokens: int) -> int:
    """Return the inputs of each slice; 0 if the last slice would be empty."""
    size = math.ceil(inputs / tokens)
    return size if (tokens - 1) * size < inputs else 0


class RankMixer(RecModel):
    """Tokens of all inputs that are mixed without parameters, each with its own feed-forward network.

    Dense columns and pooled rows are one vector. It is cut into ``tokens`` slices, which have no input in common, and
    each slice is projected to a token. The logit is linear in the mean of the tokens after the last block. The sparse
    mixture of experts of section 3.4 is not here.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=2, num_embeddings=[100, 50])
    >>> model = stoker.RankMixer(spec, embedding_dim=4, width=8)
    >>> batch = stoker.Batch(dense=torch.zeros(3, 2), ids=torch.tensor([[1, 2], [3, 4], [1, 0]]))
    >>> model.tokens, model.predict(batch).shape
    (2, torch.Size([3]))

    Args:
        spec: columns and table sizes.
        tokens: T. None: the largest power of two that is at most the number of features and 16, and leaves no slice
            empty.
        width: W, a multiple of T.
        blocks: number of blocks; the paper has 2.
        expansion: hidden columns of the feed-forward networks, in multiples of W.
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "rankmixer"

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        tokens: int | None = None,
        width: int = 64,
        blocks: int = 2,
        expansion: int = 4,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(spec, **settings)
        inputs = len(spec.dense) + len(spec.features) * self.embedding_dim
        halved = (_MOST_TOKENS >> times for times in range(_MOST_TOKENS.bit_length()))
        fitting = (count for count in halved if count <= len(spec.features) and _cut(inputs, count))
        self.tokens = next(fitting, 1) if tokens is None else tokens
        if min(self.tokens, width, blocks, expansion) < 1:
            raise ConfigError(
                f"RankMixer with tokens={tokens}, width={width}, blocks={blocks} and expansion={expansion}: all must "
                "be at least 1."
            )
        if width % self.tokens:
            raise ConfigError(
                f"RankMixer width {width} is not a multiple of its {self.tokens} tokens. Give a width such as "
                f"{self.tokens * math.ceil(width / self.tokens)}, or other tokens."
            )
        if not (size := _cut(inputs, self.tokens)):
            raise ConfigError(
                f"RankMixer cannot cut {inputs} inputs into {self.tokens} slices of {math.ceil(inputs / self.tokens)}: "
                "the last would be empty. Give fewer tokens."
            )
        self.slice, self.width, self.expansion = size, width, expansion
        self._spare = self.tokens * self.slice - inputs
        generator = dense_generator(self.seed, "rankmixer")
        self.project = PerToken(self.tokens, self.slice, width, generator)
        self.blocks = nn.ModuleList(MixerBlock(self.tokens, width, expansion * width, generator) for _ in range(blocks))
        self.last = linear(width, 1, generator)
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        inputs = nn.functional.pad(torch.cat([dense, embedded.flatten(1)], dim=1), (0, self._spare))
        x = self.project(inputs.unflatten(1, (self.tokens, self.slice)).transpose(0, 1))  # [T, B, W]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x.mean(0))
        return logits.squeeze(1)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "tokens": self.tokens,
            "width": self.width,
            "blocks": len(self.blocks),
            "expansion": self.expansion,
        }
