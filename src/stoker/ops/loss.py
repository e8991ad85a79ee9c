"""Mean binary cross entropy of logits, with its gradient made in the forward pass.

A batch of losses is small, so the number of operations decides its cost: six here, about twice as many in
``F.binary_cross_entropy_with_logits``. On a GPU it is one kernel, which agrees within rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.ops.space import HAVE_TRITON


def _fused(logits: Tensor, labels: Tensor) -> bool:
    """Return True if the kernel of a GPU takes them."""
    alike = logits.shape == labels.shape and logits.device == labels.device and logits.dtype == labels.dtype
    taken = logits.device.type == "cuda" and logits.dtype == torch.float32 and logits.dim() == 1 and len(logits) > 0
    return HAVE_TRITON and alike and taken and not torch.compiler.is_compiling()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        if _fused(logits, labels):
            from stoker.ops.gpu.dense import loss as fused

            loss, slopes = fused(logits, labels)
            ctx.save_for_backward(slopes)
            return loss
        # log(1 + exp(x)) - x * y, where softplus switches to x itself above 20 (an error under 3e-9).
        loss = torch.nn.functional.softplus(logits).addcmul_(logits, labels, value=-1.0).mean()
        ctx.save_for_backward(torch.sigmoid(logits).sub_(labels).div_(len(logits)))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad, None


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``-y log p - (1 - y) log(1 - p)`` with p = sigmoid(logits), a scalar, for [B] float32 each."""
    result: Tensor = _Loss.apply(logits, labels)  # type: ignore[no-untyped-call]
    return result
