"""Plain PyTorch on one stacked table, in several forms; the harness takes the fastest."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from worker_tools import argument, embedding_case, versions

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__)
lr, eps, (beta1, beta2) = config["lr"], config["eps"], config["betas"]
optimizer, form = config["optimizer"], config["form"]


class Stacked:
    """nn.EmbeddingBag(sparse=True) with torch's own sparse optimizer."""

    def reset(self, initial):
        self.bag = nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(np.array(initial)),
            freeze=False,
            mode="sum",
            sparse=True,
            include_last_offset=True,
        )
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=lr)
        else:
            self.optimizer = torch.optim.SparseAdam(self.bag.parameters(), lr=lr, eps=eps, betas=(beta1, beta2))

    def step(self, given, grad):
        out = self.bag(*given)
        out.backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out

    @property
    def weight(self):
        return self.bag.weight.detach()


class ByHand:
    """index_select, gradients summed by distinct row, and the update written out."""

    def reset(self, initial):
        self.weight = torch.from_numpy(np.array(initial))
        rows, dim = self.weight.shape
        if optimizer == "rowwise_adagrad":
            self.sum = torch.zeros(rows)
        elif optimizer == "adam":
            self.m, self.v = torch.zeros(rows, dim), torch.zeros(rows, dim)
        self.done = 0

    def distinct(self, ids, grad):
        if form == "unique + index_add":
            rows, inverse = torch.unique(ids, return_inverse=True)
            return rows, torch.zeros(len(rows), grad.shape[1]).index_add_(0, inverse, grad)
        if form == "coalesce":
            both = torch.sparse_coo_tensor(ids[None], grad, self.weight.shape, check_invariants=False).coalesce()
            return both.indices()[0], both.values()
        ordered, order = torch.sort(ids)
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        return rows, F.embedding_bag(order, grad, counts.cumsum(0) - counts, mode="sum")

    def step(self, given, grad):
        ids = given[0]
        out = self.weight.index_select(0, ids)
        if form == "index_add":
            # Scaling first: index_add_(alpha != 1) is several times slower.
            self.weight.index_add_(0, ids, grad * -lr)
            return out
        rows, g = self.distinct(ids, grad)
        if optimizer == "sgd":
            self.weight.index_add_(0, rows, g.mul_(-lr))
        elif optimizer == "rowwise_adagrad":
            total = self.sum.index_select(0, rows).add_(g.square().mean(1))
            self.sum.index_copy_(0, rows, total)
            self.weight.index_add_(0, rows, g.mul_((-lr / total.sqrt_().add_(eps)).unsqueeze(1)))
        else:
            self.done += 1
            bias1, bias2 = 1 - beta1**self.done, 1 - beta2**self.done
            m = self.m.index_select(0, rows).lerp_(g, 1 - beta1)
            v = self.v.index_select(0, rows).mul_(beta2).addcmul_(g, g, value=1 - beta2)
            self.m.index_copy_(0, rows, m)
            self.v.index_copy_(0, rows, v)
            root = v.sqrt_().div_(math.sqrt(bias2)).add_(eps)
            self.weight.index_add_(0, rows, m.div_(root).mul_(-lr / bias1))
        return out


torch.set_grad_enabled(form == "EmbeddingBag")
contestant = Stacked() if form == "EmbeddingBag" else ByHand()


def natural(ids, bases):
    flat = torch.from_numpy((ids + bases).reshape(-1))
    return flat, torch.arange(len(flat) + 1)


for batch in config["batches"]:
    embedding_case(
        config,
        batch,
        contestant.reset,
        natural,
        gradient=lambda grad: torch.from_numpy(grad).view(-1, 16),
        step=contestant.step,
        output=lambda out: out.detach().numpy(),
        weights=lambda: contestant.weight.numpy(),
    )
