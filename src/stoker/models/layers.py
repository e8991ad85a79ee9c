"""Dense layers with seeded initial values, drawn on the CPU so that they do not depend on the device.

Legend: B rows of any shape, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.base.errors import ConfigError
from stoker.ops.by_shard import averages, count_batch, move
from stoker.ops.mlp import mlp
from stoker.ops.reference import derive_key


def dense_generator(seed: int, purpose: str) -> torch.Generator:
    """Return a generator for the dense parameters of one part of a model, unrelated to any other part's."""
    return torch.Generator().manual_seed(derive_key(seed, "dense", purpose) & (2**63 - 1))


def normal(*shape: int, std: float, generator: torch.Generator) -> nn.Parameter:
    """Draw a parameter from N(0, std)."""
    return nn.Parameter(torch.empty(shape).normal_(0.0, std, generator=generator))


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Make DLRM's linear layer: W ~ N(0, sqrt(2 / (m + n))), b ~ N(0, sqrt(1 / m)) for m outputs and n inputs."""
    layer = nn.Linear(inputs, outputs, device="meta")  # draws nothing; both parameters are replaced
    layer.weight = normal(outputs, inputs, std=math.sqrt(2.0 / (inputs + outputs)), generator=generator)
    layer.bias = normal(outputs, std=math.sqrt(1.0 / outputs), generator=generator)
    return layer


def parts(layers: Iterable[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weight [outputs, inputs] and bias [outputs] of linear layers."""
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return [layer.weight for layer in linears], [layer.bias for layer in linears]


class MLP(nn.Module):
    """Linear layers with ReLU between them: [B, inputs] to [B, sizes[-1]]."""

    def __init__(
        self, inputs: int, sizes: Sequence[int], generator: torch.Generator, *, last_relu: bool = False
    ) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"an MLP of sizes {tuple(sizes)} cannot be: give at least one layer, each at least 1.")
        self.last_relu = last_relu
        self.layers = nn.ModuleList(
            linear(before, size, generator) for before, size in zip((inputs, *sizes), sizes, strict=False)
        )

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weight [outputs, inputs] and bias [outputs] of every layer."""
        return parts(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = self.parts()
        return mlp(x, weights, biases, relu_last=self.last_relu)


class PReLU(nn.Module):
    """max(x, 0) + a min(x, 0) with a learned slope a for each of the last C columns (He et al. 2015)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((columns,), 0.25))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the slopes; ``mask`` has no effect, because no row depends on another."""
        return torch.where(x > 0, x, self.slope * x)


class BatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that is safe in a click model: x [B, C] to [B, C], in float32 also under autocast.

    In training the moments are those of the batch. The running moments serve in evaluation, without gradients (so
    ``predict`` changes nothing), and for a batch of one row, which has no variance.
    """

    def count(self, rows: int) -> bool:
        """Return whether a batch of this many rows is normed by its own moments, and count it if it is."""
        batch = self.training and torch.is_grad_enabled() and rows > 1
        assert self.num_batches_tracked is not None
        if batch:
            count_batch(self.num_batches_tracked)
        return batch

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        own = self.count(x.shape[0])
        mean, var, momentum = averages(self.running_mean, self.running_var, self.momentum or 0.1, own)
        return functional.batch_norm(x, mean, var, self.weight, self.bias, own, momentum, self.eps)


class Dice(nn.Module):
    """PReLU that bends at the mean of its input instead of at 0 (Zhou et al. 2018, section 5.2).

    In training the mean and the variance are those of the batch, otherwise, and where no row counts, moving averages.
    As with batch normalization, the training step of an example depends on the others in its batch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, columns: int, *, momentum: float = 0.1, eps: float = 1e-8) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.slope = nn.Parameter(torch.zeros(columns))
        self.register_buffer("running_mean", torch.zeros(columns))
        self.register_buffer("running_var", torch.ones(columns))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply to ``x`` [..., C]; with a ``mask`` [...], only the rows where it is true count for the moments."""
        mean, var = self.running_mean, self.running_var
        if self.training and torch.is_grad_enabled() and x.numel():
            mean, var = self._moments(x, mask)
        share = torch.sigmoid((x - mean) * torch.rsqrt(var + self.eps))
        return x * (share + (1 - share) * self.slope)

    def _moments(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if mask is None:
            mean = rows.mean(0)
            var = (rows - mean).square().mean(0)
        else:
            weight = mask.reshape(-1, 1).to(rows.dtype)
            total = weight.sum()
            count = total.clamp(min=1)
            mean = (rows * weight).sum(0) / count
            var = ((rows - mean).square() * weight).sum(0) / count
            mean = torch.where(total > 0, mean, self.running_mean.to(mean.dtype))
            var = torch.where(total > 0, var, self.running_var.to(var.dtype))
        move(self.running_mean, mean, self.momentum)
        move(self.running_var, var, self.momentum)
        return mean, var
