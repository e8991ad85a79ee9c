"""Losses of logits, with their gradients made in the forward pass: binary cross entropy, and two over lists.

The softmax over the items of a batch is left to autograd.

A batch of losses is small, so the number of operations decides its cost: six here, about twice as many in
``F.binary_cross_entropy_with_logits``. On a GPU it is one kernel, which agrees within rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.ops.space import HAVE_TRITON

LISTS = ("softmax", "bpr")  # losses over lists


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


class _ListLoss(torch.autograd.Function):
    """Lists are padded to [G, T] (T rows in the longest), so no sum depends on the order of threads."""

    @staticmethod
    def forward(ctx: Any, kind: str, logits: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
        lengths = torch.bincount(groups)
        starts = lengths.cumsum(0) - lengths
        order = groups.argsort(stable=True)  # rows of a list need not follow each other
        within = torch.empty_like(groups)
        within[order] = torch.arange(len(groups), device=groups.device) - starts[groups[order]]
        place = groups, within
        shape = len(lengths), int(lengths.max()) if len(lengths) else 0
        scores, marks = logits.new_full(shape, -torch.inf), logits.new_full(shape, -1.0)  # marks of padding are -1
        scores[place], marks[place] = logits, labels.to(logits.dtype)
        losses, slopes, counts = (_softmax if kind == "softmax" else _pairs)(scores, marks)
        counted = counts.sum().clamp(min=1)
        unknown = labels.isnan().any()  # a missing label is never a negative one
        ctx.save_for_backward(slopes[place] / counted)
        return torch.where(unknown, torch.nan, losses.sum() / counted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return None, slope * grad, None, None


def _softmax(scores: Tensor, marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each list [G], its slopes [G, T], and which lists count [G]."""
    marks = marks.clamp(min=0)
    found = marks.sum(1, keepdim=True)
    target = marks / found.clamp(min=1)
    logs = scores.log_softmax(1)
    losses = -(target * logs.masked_fill(target == 0, 0.0)).sum(1)
    return losses, (logs.exp() - target) * (found > 0), found.squeeze(1) > 0


def _pairs(scores: Tensor, marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for pairs of a positive and a negative row; one positive row of every list at a time."""
    negative = marks == 0
    positives = (marks > 0).sum(1)
    pairs = positives * negative.sum(1)
    share = (1 / pairs.clamp(min=1).to(scores.dtype)).unsqueeze(1)
    first = (marks > 0).to(torch.int8).argsort(stable=True, dim=1, descending=True)
    losses, slopes = scores.new_zeros(len(scores)), torch.zeros_like(scores)
    for number in range(int(positives.max()) if len(positives) else 0):
        place = first[:, number : number + 1]
        used = negative & (number < positives).unsqueeze(1)
        behind = (scores - scores.gather(1, place)).masked_fill(~used, -torch.inf)  # of the positive row
        losses += (torch.nn.functional.softplus(behind) * share).sum(1)
        slope = torch.sigmoid(behind) * share
        slopes += slope
        slopes.scatter_add_(1, place, -slope.sum(1, keepdim=True))
    return losses, slopes, pairs > 0


def list_loss(kind: str, logits: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """Return a loss over lists, a scalar: its mean over the lists that count, 0 if none does.

    Args:
        kind: "softmax": cross entropy of the softmax over a list against its positive rows, which share the weight 1
            (ListNet, Cao et al. 2007); lists without a positive row do not count. "bpr": mean of
            ``-log sigmoid(positive - negative)`` over the pairs of a list (Rendle et al. 2009); lists without a pair do
            not count.
        logits: [B].
        labels: [B] in {0, 1}.
        groups: [B] int64 from 0 on: the list of each row, in any order.
    """
    result: Tensor = _ListLoss.apply(kind, logits, labels, groups)  # type: ignore[no-untyped-call]
    return result


def in_batch_softmax(users: Tensor, items: Tensor, labels: Tensor, log_q: Tensor) -> Tensor:
    """Return the cross entropy of each row's item among the items of all rows, mean over rows weighted by labels.

    Row i has the logits ``users[i] @ items[j] - log_q[j]`` (Yi et al. 2019, Eq. 5 to 7). It takes some times B * B
    numbers of memory. The loss is 0 if all labels are.

    Args:
        users: [B, W].
        items: [B, W].
        labels: [B] in {0, 1}; NaN makes the loss NaN.
        log_q: [B] log of the probability that a row of a batch has the item.
    """
    own = (users @ items.T - log_q).log_softmax(1).diagonal()
    return -(labels * own).sum() / labels.sum().clamp(min=1)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``-y log p - (1 - y) log(1 - p)`` with p = sigmoid(logits), a scalar, for [B] float32 each."""
    result: Tensor = _Loss.apply(logits, labels)  # type: ignore[no-untyped-call]
    return result
