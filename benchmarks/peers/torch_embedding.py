"""Plain PyTorch, the tables of equal width stacked into one, in several forms; the harness takes the fastest."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from worker_tools import argument, embedding_case, feature_major, versions

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__)
lr, eps, (beta1, beta2) = config["lr"], config["eps"], config["betas"]
optimizer, form = config["optimizer"], config["form"]


class SparseBag:
    """nn.EmbeddingBag(sparse=True) with torch's own sparse optimizer."""

    def __init__(self, weight):
        self.bag = nn.EmbeddingBag.from_pretrained(
            weight, freeze=False, mode="sum", sparse=True, include_last_offset=True
        )
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=lr)
        else:
            self.optimizer = torch.optim.SparseAdam(self.bag.parameters(), lr=lr, eps=eps, betas=(beta1, beta2))

    def step(self, ids, offsets, bag, grad):
        out = self.bag(ids, offsets)
        out.backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out

    @property
    def weight(self):
        return self.bag.weight.detach()


class ByHand:
    """index_select or embedding_bag, gradients summed by distinct row, and the update written out."""

    def __init__(self, weight):
        self.weight = weight
        rows, dim = weight.shape
        if optimizer == "rowwise_adagrad":
            self.sum = torch.zeros(rows)
        elif optimizer == "adagrad":
            self.sum = torch.zeros(rows, dim)
        elif optimizer == "adam":
            self.m, self.v = torch.zeros(rows, dim), torch.zeros(rows, dim)
        self.done = 0

    def distinct(self, ids, bag, grad):
        """Distinct rows and the sum of their gradients."""
        if form == "sort + embedding_bag":
            ordered, order = torch.sort(ids)
            rows, counts = torch.unique_consecutive(ordered, return_counts=True)
            source = order if bag is None else bag[order]
            return rows, F.embedding_bag(source, grad, counts.cumsum(0) - counts, mode="sum")
        rows, inverse = torch.unique(ids, return_inverse=True)
        each = grad if bag is None else grad.index_select(0, bag)
        return rows, torch.zeros(len(rows), grad.shape[1]).index_add_(0, inverse, each)

    def step(self, ids, offsets, bag, grad):
        if bag is None:
            out = self.weight.index_select(0, ids)
        else:
            out = F.embedding_bag(ids, self.weight, offsets, mode="sum", include_last_offset=True)
        if form == "index_add":
            # Scaling first: index_add_(alpha != 1) is several times slower.
            scaled = grad * -lr
            self.weight.index_add_(0, ids, scaled if bag is None else scaled.index_select(0, bag))
            return out
        rows, g = self.distinct(ids, bag, grad)
        if optimizer == "sgd":
            self.weight.index_add_(0, rows, g.mul_(-lr))
        elif optimizer == "rowwise_adagrad":
            total = self.sum.index_select(0, rows).add_(g.square().mean(1))
            self.sum.index_copy_(0, rows, total)
            self.weight.index_add_(0, rows, g.mul_((-lr / total.sqrt_().add_(eps)).unsqueeze(1)))
        elif optimizer == "adagrad":
            total = self.sum.index_select(0, rows).addcmul_(g, g)
            self.sum.index_copy_(0, rows, total)
            self.weight.index_add_(0, rows, g.mul_(-lr).div_(total.sqrt_().add_(eps)))
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


class Stacked:
    """One stacked table for each width; its bags are those of all its features, feature by feature."""

    def __init__(self, case):
        self.case, self.batch, self.dims = case, case["batch"], case["dims"]
        self.members = {dim: [t for t, d in enumerate(self.dims) if d == dim] for dim in dict.fromkeys(self.dims)}
        self.columns = np.cumsum([0, *self.dims])

    def reset(self, initial):
        kind = SparseBag if form == "EmbeddingBag" else ByHand
        self.tables = [
            kind(torch.from_numpy(np.concatenate([initial[t] for t in members]))) for members in self.members.values()
        ]

    def natural(self, ids, offsets):
        flat, after = feature_major(ids, offsets, len(self.dims))
        given = []
        for members in self.members.values():
            base, parts, lengths = 0, [], []
            for t in members:
                cut = after[t * self.batch : (t + 1) * self.batch + 1]
                parts.append(flat[cut[0] : cut[-1]] + base)
                lengths.append(np.diff(cut))
                base += self.case["sizes"][t]
            each = np.concatenate(lengths)
            bag = None if self.case["longest"] == 1 else torch.from_numpy(np.repeat(np.arange(len(each)), each))
            starts = torch.from_numpy(np.concatenate([[0], np.cumsum(each)]))
            given.append((torch.from_numpy(np.concatenate(parts)), starts, bag))
        return given

    def gradient(self, grad):
        cut = [grad[:, a:b] for a, b in zip(self.columns, self.columns[1:], strict=False)]
        return [torch.from_numpy(np.concatenate([cut[t] for t in members])) for members in self.members.values()]

    def step(self, given, grads):
        return [table.step(*each, grad) for table, each, grad in zip(self.tables, given, grads, strict=True)]

    def output(self, outs):
        looked = [None] * len(self.dims)
        for members, out in zip(self.members.values(), outs, strict=True):
            for place, t in enumerate(members):
                looked[t] = out[place * self.batch : (place + 1) * self.batch].detach().numpy()
        return np.concatenate(looked, axis=1)

    def weights(self):
        found = [None] * len(self.dims)
        for members, table in zip(self.members.values(), self.tables, strict=True):
            base = 0
            for t in members:
                found[t] = table.weight[base : base + self.case["sizes"][t]].numpy()
                base += self.case["sizes"][t]
        return found


torch.set_grad_enabled(form == "EmbeddingBag")
for shape in config["cases"]:
    one = Stacked(shape)
    embedding_case(config, shape, one.reset, one.natural, one.gradient, one.step, one.output, one.weights)
