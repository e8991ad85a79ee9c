"""Dense layers with seeded initial values, drawn on the CPU so that they do not depend on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.errors import ConfigError
from stoker.ops.mlp import mlp
from stoker.ops.reference import derive_key

__all__ = ["MLP", "dense_generator", "linear", "normal"]


def dense_generator(seed: int, purpose: str) -> torch.Generator:
    """A generator for the dense parameters of one part of a model, unrelated to any other part's."""
    return torch.Generator().manual_seed(derive_key(seed, "dense", purpose) & (2**63 - 1))


def normal(*shape: int, std: float, generator: torch.Generator) -> nn.Parameter:
    """A parameter drawn from N(0, std)."""
    return nn.Parameter(torch.empty(shape).normal_(0.0, std, generator=generator))


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """DLRM's linear layer: W ~ N(0, sqrt(2 / (m + n))), b ~ N(0, sqrt(1 / m)) for m outputs and n inputs."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    layer.weight = normal(outputs, inputs, std=math.sqrt(2.0 / (inputs + outputs)), generator=generator)
    layer.bias = normal(outputs, std=math.sqrt(1.0 / outputs), generator=generator)
    return layer


class MLP(nn.Module):
    """Linear layers with ReLU between them: [B, inputs] to [B, sizes[-1]].

    Args:
        inputs: columns of the input.
        sizes: outputs of each layer, at least one.
        generator: where the initial values come from.
        last_relu: whether the last layer has a ReLU too.
    """

    def __init__(self, inputs: int, sizes: Sequence[int], *, generator: torch.Generator, last_relu: bool) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"an MLP of sizes {tuple(sizes)} cannot be: give at least one layer, each at least 1.")
        self.last_relu = last_relu
        self.layers = nn.ModuleList(
            linear(before, size, generator) for before, size in zip((inputs, *sizes), sizes, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = zip(*((layer.weight, layer.bias) for layer in self.layers), strict=True)
        return mlp(x, weights, biases, relu_last=self.last_relu)
