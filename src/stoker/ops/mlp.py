"""A chain of linear layers with ReLU between them, on the fastest matrix products of the processor.

torch sends float32 products on the CPU to MKL, which uses half-width vectors on AVX-512 processors that are not
Intel's; oneDNN comes in the same package and uses the full width (2.4 times as fast on a Zen 5). With AVX2 MKL is the
faster of the two, in weight gradients by a third: there the chain uses MKL, and still saves the fresh memory that
autograd takes for every ReLU and its gradient. Under bfloat16 autocast the same chain runs in bfloat16
with float32 weights, each cast once a step. Results agree within rounding. Elsewhere (GPU, other types, inside
``torch.compile``) this is ``F.linear`` and ReLU.

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

#: Inputs should have a multiple of this many columns: 367 columns take a fifth more time than 368.
ALIGN = 16
_SMALL = 2**14  # elements of a weight: MKL computes the gradients of smaller ones, chunk by chunk


class _Products:
    """Matrix products in the library that torch chooses: MKL, where torch has it."""

    hides_nan = False

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        """Return [B, out] from ``x`` [B, in], ``weight`` [out, in] and ``bias`` [out]."""
        result = F.linear(x, weight, bias)
        return result.relu_() if relu else result

    @staticmethod
    def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of weight [out, in] and bias [out] from ``grad`` [B, out] and input ``x`` [B, in]."""
        return grad.t() @ x, grad.sum(0)

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x`` [B, in]."""
        return grad @ weight


class _OneDNN(_Products):
    """The same products in oneDNN's own operators."""

    hides_nan = True  # the fused ReLU turns NaN to 0

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "relu" if relu else "none", [], "")
        return result

    @staticmethod
    def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if grad.dtype == torch.bfloat16:  # torch sends these products to oneDNN anyway
            return grad.t() @ x, grad.sum(0, dtype=torch.float32)
        if weight.numel() <= _SMALL and torch.backends.mkl.is_available():
            return _by_chunks(grad, x), grad.sum(0)
        # Not for a single output: at [8192, 64] x [8192, 1] torch 2.13 writes past the end of the result.
        result: tuple[Tensor, Tensor] = torch.ops.aten.mkldnn_linear_backward_weights(
            grad.to_mkldnn(), x.to_mkldnn(), weight, True
        )
        return result

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        if grad.dtype == torch.bfloat16:
            return grad @ weight
        return _OneDNN.linear(grad, weight.t().contiguous(), None, False)


def _by_chunks(grad: Tensor, x: Tensor) -> Tensor:
    """Return ``grad`` [B, out] transposed times ``x`` [B, in], summed over chunks of rows: [out, in].

    For a small result, copying both into oneDNN's layout takes longer than the product, and one product over all rows
    keeps threads waiting for each other: chunks take half the time (docs/maintainers/log.md).
    """
    rows = 512 if len(x) < 2**14 else 1024
    chunks = len(x) // rows
    if chunks < 2:
        return grad.t() @ x
    whole = chunks * rows
    by_chunk = grad[:whole].view(chunks, rows, -1).transpose(1, 2)
    total = torch.bmm(by_chunk, x[:whole].view(chunks, rows, -1)).sum(0)
    return total.addmm_(grad[whole:].t(), x[whole:]) if whole < len(x) else total


@cache
def _products(dtype: torch.dtype) -> type[_Products]:
    """Choose the library for ``dtype`` by rule, not by timing: it decides bits, and a resumed run must choose alike."""
    if not torch.backends.mkldnn.is_available():
        return _Products
    if (
        dtype == torch.float32
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return _Products
    try:  # do its operators exist in this torch, take the type and give the right result?
        x, weight, bias, grad = (torch.ones(size, dtype=dtype) for size in ((2, 3), (4, 3), (4,), (2, 4)))
        right = torch.equal(_OneDNN.linear(x, weight, bias, True), torch.full((2, 4), 4.0, dtype=dtype))
        product, total = _OneDNN.weight_gradient(grad, x, weight)
    except (AttributeError, RuntimeError):
        return _Products
    return _OneDNN if right and bool((product == 2.0).all()) and bool((total == 2.0).all()) else _Products


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relu_last: bool, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        layers = len(parameters) // 2
        products = _products(dtype)
        parameters = tuple(parameter.to(dtype) for parameter in parameters)
        ctx.extra = x.shape[1] - parameters[0].shape[1]
        if ctx.extra:
            parameters = (F.pad(parameters[0], (0, ctx.extra)), *parameters[1:])
        activations = [x.to(dtype)]
        for layer in range(layers):
            weight, bias = parameters[2 * layer : 2 * layer + 2]
            activations.append(products.linear(activations[-1], weight, bias, relu_last or layer < layers - 1))
        ctx.relu_last = relu_last
        ctx.save_for_backward(*activations, *parameters)
        return activations[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers = (len(ctx.saved_tensors) - 1) // 3
        activations, parameters = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        products = _products(activations[0].dtype)
        grads: list[Tensor | None] = []
        for layer in reversed(range(layers)):
            x, weight = activations[layer], parameters[2 * layer]
            if layer == layers - 1:
                if ctx.relu_last:
                    grad = torch.ops.aten.threshold_backward(grad, activations[layer + 1], 0)
                grad = grad.to(x.dtype).contiguous()
            else:  # made here, so nothing else uses it
                torch.ops.aten.threshold_backward.grad_input(grad, activations[layer + 1], 0, grad_input=grad)
            wanted = layer > 0 or ctx.needs_input_grad[0]
            if weight.shape[0] == 1:  # outer products need no matrix kernel
                grads += [grad.sum(0), grad.t() @ x]
                grad = grad * weight if wanted else grad
            else:
                product, total = products.weight_gradient(grad, x, weight)
                grads += [total, product]
                grad = products.input_gradient(grad, weight) if wanted else grad
        if ctx.extra and (first := grads[-1]) is not None:
            grads[-1] = first[:, : -ctx.extra]
        wide = [None if tensor is None else tensor.to(torch.float32) for tensor in reversed(grads)]
        return (grad.to(torch.float32) if ctx.needs_input_grad[0] else None, None, None, *wide)


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, relu_last: bool) -> Tensor:
    """Pass ``x`` [B, in] through every layer, with ReLU after each (the last only if ``relu_last``): [B, out].

    ``weights[l]`` is [out_l, in_l] and ``biases[l]`` [out_l], as in ``nn.Linear``. ``x`` may have more columns than
    ``weights[0]``: they must be zero, and have no effect (see :data:`ALIGN`).
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    plain = (
        x.device.type != "cpu"
        or weights[0].dtype != torch.float32
        or dtype not in (torch.float32, torch.bfloat16)
        or torch.compiler.is_compiling()
        or not len(x)
        or (_products(dtype).hides_nan and not math.isfinite(float(x.detach().sum())))
    )
    if plain:
        x = x[:, : weights[0].shape[1]]
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = F.linear(x, weight, bias)
            x = F.relu(x) if relu_last or layer < len(weights) - 1 else x
        return x
    parameters = [tensor for pair in zip(weights, biases, strict=True) for tensor in pair]
    result: Tensor = _MLP.apply(x.contiguous(), relu_last, dtype, *parameters)  # type: ignore[no-untyped-call]
    return result
