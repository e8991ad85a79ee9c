"""A chain of linear layers with ReLU between them, on the fastest matrix products the processor has.

torch sends float32 products on the CPU to MKL, which uses half-width vectors on processors that are not
Intel's; oneDNN lies beside it in the same package and uses what the processor has (2.4 times as fast on a Zen
5). Under bfloat16 autocast the same chain runs in bfloat16 with float32 weights, each cast once a step.
Results agree within rounding. Elsewhere (GPU, other types, inside ``torch.compile``) this is ``F.linear`` and
ReLU.

Legend: B examples, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["mlp"]


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Whether the operators this module needs exist in this torch, take ``dtype`` and agree with ``F.linear``."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        x, weight, bias, grad = (torch.ones(size, dtype=dtype) for size in ((2, 3), (4, 3), (4,), (2, 4)))
        right = torch.equal(_linear(x, weight, bias, relu=True), torch.full((2, 4), 4.0, dtype=dtype))
        product, total = _weight_gradient(grad, x, weight)
    except (AttributeError, RuntimeError):
        return False
    return right and bool((product == 2.0).all()) and bool((total == 2.0).all())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "relu" if relu else "none", [], "")
    return result


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight [out, in] and bias [out] from ``grad`` [B, out] and the input ``x`` [B, in]."""
    if grad.dtype == torch.bfloat16:  # these products go to oneDNN by themselves
        return grad.t() @ x, grad.sum(0, dtype=torch.float32)
    result: tuple[Tensor, Tensor] = torch.ops.aten.mkldnn_linear_backward_weights(
        grad.to_mkldnn(), x.to_mkldnn(), weight, True
    )
    return result


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relu_last: bool, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        layers = len(parameters) // 2
        parameters = tuple(parameter.to(dtype) for parameter in parameters)
        activations = [x.to(dtype)]
        for layer in range(layers):
            weight, bias = parameters[2 * layer : 2 * layer + 2]
            activations.append(_linear(activations[-1], weight, bias, relu=relu_last or layer < layers - 1))
        ctx.relu_last = relu_last
        ctx.save_for_backward(*activations, *parameters)
        return activations[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers = (len(ctx.saved_tensors) - 1) // 3
        activations, parameters = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        grads: list[Tensor | None] = []
        for layer in reversed(range(layers)):
            x, weight = activations[layer], parameters[2 * layer]
            if ctx.relu_last or layer < layers - 1:
                grad = torch.ops.aten.threshold_backward(grad, activations[layer + 1], 0)
            grad = grad.to(x.dtype).contiguous()
            wanted = layer > 0 or ctx.needs_input_grad[0]
            if weight.shape[0] == 1:
                # A single output: outer products, which need no matrix kernels.
                grads += [grad.sum(0), grad.t() @ x]
                grad = grad * weight if wanted else grad
            else:
                product, total = _weight_gradient(grad, x, weight)
                grads += [total, product]
                if wanted:
                    half = grad.dtype == torch.bfloat16
                    grad = grad @ weight if half else _linear(grad, weight.t().contiguous(), None, relu=False)
        wide = [None if tensor is None else tensor.to(torch.float32) for tensor in reversed(grads)]
        return (grad.to(torch.float32) if ctx.needs_input_grad[0] else None, None, None, *wide)


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, relu_last: bool) -> Tensor:
    """``x`` [B, in] through every layer, ReLU after each but perhaps the last: [B, out].

    ``weights[l]`` is [out_l, in_l] and ``biases[l]`` [out_l], as in ``nn.Linear``.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    plain = (
        x.device.type != "cpu"
        or weights[0].dtype != torch.float32
        or dtype not in (torch.float32, torch.bfloat16)
        or torch.compiler.is_compiling()
        or not len(x)
        or not _onednn_works(dtype)
        or not math.isfinite(float(x.detach().sum()))  # the fused ReLU turns NaN to 0: it would hide bad data
    )
    if plain:
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = F.linear(x, weight, bias)
            x = F.relu(x) if relu_last or layer < len(weights) - 1 else x
        return x
    parameters = [tensor for pair in zip(weights, biases, strict=True) for tensor in pair]
    result: Tensor = _MLP.apply(x.contiguous(), relu_last, dtype, *parameters)  # type: ignore[no-untyped-call]
    return result
