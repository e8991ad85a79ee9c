"""DIN, the deep interest network (Zhou et al. 2018, arXiv 1706.06978).

Legend: B examples, T steps, S vectors of a step, G pooled features, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings
from stoker.models.layers import Dice, PReLU, dense_generator, linear, parts
from stoker.models.sequence import SequenceModel

_ACTIVATIONS: dict[str, type[PReLU] | type[Dice]] = {"prelu": PReLU, "dice": Dice}


class _Layers(nn.Module):
    """Linear layers with an activation after all but the last, which has one output: [..., inputs] to [...]."""

    def __init__(self, inputs: int, sizes: Sequence[int], activation: str, generator: torch.Generator) -> None:
        super().__init__()
        if sizes and min(sizes) < 1:
            raise ConfigError(f"DIN layers of sizes {tuple(sizes)} cannot be: each must be at least 1.")
        self.layers = nn.ModuleList(
            linear(before, size, generator) for before, size in zip((inputs, *sizes), (*sizes, 1), strict=True)
        )
        self.activations = nn.ModuleList(_ACTIVATIONS[activation](size) for size in sizes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weights, biases = parts(self.layers)
        return self.after_first(nn.functional.linear(x, weights[0], biases[0]), mask)

    def after_first(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the layers after the first to its products."""
        for activation, layer in zip(self.activations, list(self.layers)[1:], strict=True):
            x = layer(activation(x, mask))
        return x.squeeze(-1)


class DIN(SequenceModel):
    """The history is summed with weights that depend on the target; an MLP takes the sum and all other features.

    The activation unit gives step h with target t the weight ``MLP([h, t, h - t, h * t])``. The weights are not
    normalized: their sum is the strength of the interest (section 4.3, Eq. 3). One weight serves all pairs of the
    history: h and t are the concatenated vectors of a step.

    >>> item = stoker.Feature(name="item", table="items")
    >>> past = stoker.Feature(name="past", table="items", sequence=True, max_length=5)
    >>> spec = stoker.FeatureSpec(dense=(), features=(item, past), num_embeddings={"items": 100})
    >>> model = stoker.DIN(spec, embedding_dim=4)
    >>> offsets = torch.tensor([0, 1, 3, 4, 4])
    >>> batch = stoker.Batch(dense=torch.zeros(2, 0), ids=torch.tensor([7, 3, 5, 9]), offsets=offsets)
    >>> model.predict(batch).shape  # 7 after 3 and 5; 9 without a history
    torch.Size([2])

    Args:
        spec: columns and table sizes.
        history: target feature -> sequence feature (:class:`SequenceModel`).
        attention: layer sizes of the activation unit without its single output (Figure 2).
        hidden: layer sizes of the MLP without its single output (Figure 2).
        activation: "prelu", or "dice", whose training step takes moments over the batch (section 5.2).
        settings: those of :class:`RecModel`.
    """

    name: ClassVar[str] = "din"

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        history: Mapping[str, str] | None = None,
        attention: Sequence[int] = (36,),
        hidden: Sequence[int] = (200, 80),
        activation: Literal["prelu", "dice"] = "prelu",
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(spec, history=history, **settings)
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"DIN activation {activation!r} is unknown. Choose 'prelu' or 'dice'.")
        self.attention_sizes, self.hidden_sizes = tuple(attention), tuple(hidden)
        self.activation = activation
        width = len(self.targets) * self.embedding_dim
        generator = dense_generator(self.seed, "din attention")
        self.attention = _Layers(4 * width, self.attention_sizes, activation, generator)
        inputs = len(spec.dense) + len(self.pooled) * self.embedding_dim + width
        self.deep = _Layers(inputs, self.hidden_sizes, activation, dense_generator(self.seed, "din deep"))
        self.to(self.device)

    def dense_part(self, dense: Tensor, embedded: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        past = steps.flatten(2)  # [B, T, S * D]
        features = embedded.unbind(1)
        target = torch.cat([features[place] for place in self.targets], dim=1)  # [B, S * D]
        weights = self._weights(past, target, mask) * mask  # [B, T]
        interest = torch.bmm(weights.unsqueeze(1), past.to(weights.dtype)).squeeze(1)
        logits: Tensor = self.deep(torch.cat([dense, embedded.flatten(1), interest.to(dense.dtype)], dim=1))
        return logits

    def _weights(self, past: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """Apply the activation unit: [B, T].

        Its first layer over [h, t, h - t, h * t] is linear, so h and t are multiplied by sums of slices of its weight,
        and t only once an example.
        """
        (weight, *_), (bias, *_) = parts(self.attention.layers)
        of_past, of_target, of_difference, of_product = weight.chunk(4, dim=1)
        own = nn.functional.linear(
            torch.cat([past, past * target.unsqueeze(1)], dim=2),
            torch.cat([of_past + of_difference, of_product], dim=1),
        )
        shared = nn.functional.linear(target, of_target - of_difference, bias)
        found: Tensor = self.attention.after_first(own + shared.unsqueeze(1), mask)
        return found

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "attention": list(self.attention_sizes),
            "hidden": list(self.hidden_sizes),
            "activation": self.activation,
        }
