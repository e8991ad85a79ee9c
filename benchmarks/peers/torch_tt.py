"""Tensor-train lookups in plain PyTorch, autograd and SGD.

Forms "bmm" and "einsum" are the straightforward ones: every id multiplies its own slices. "grouped" is what somebody
writes for speed: distinct prefixes of digits only, and one product for all that share a slice.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F
from tt_tools import LR, run_cases
from worker_tools import argument, versions

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__)
if config.get("permuted_ids"):
    for given in config["cases"]:
        given["ids"] = given["permuted"]


class Plain:
    def __init__(self, case, cores):
        self.rows, self.cols, self.dim = case["rows"], case["cols"], case["dim"]
        self.sizes = [core.shape for core in cores]
        self.weights = [torch.from_numpy(core.reshape(len(core), -1)).requires_grad_() for core in cores]
        self.optimizer = torch.optim.SGD(self.weights, lr=LR)

    def ids(self, batch):
        return torch.from_numpy(batch)

    def gradient(self, grad):
        return torch.from_numpy(grad)

    def grouped(self, ids):
        distinct, inverse = torch.unique(ids, return_inverse=True)
        value, place = None, None
        for level in range(len(self.rows)):
            # Prefixes are in ascending order: those of the level before are runs of this one's.
            divisor = int(np.prod(self.rows[level + 1 :], dtype=np.int64))
            prefixes, belongs = torch.unique_consecutive(distinct // divisor, return_inverse=True)
            digit, core = prefixes % self.rows[level], self.weights[level]
            if level == 0:
                value = F.embedding(digit, core).view(len(prefixes), self.cols[0], -1)
            else:
                _, left, width = self.sizes[level]
                before = torch.unique_consecutive(prefixes // self.rows[level], return_inverse=True)[1]
                ordered, order = torch.sort(digit)
                values, counts = torch.unique_consecutive(ordered, return_counts=True)
                given = value.index_select(0, before.index_select(0, order)).split(counts.tolist())
                slices = F.embedding(values, core).view(-1, left, width).unbind()
                made = [torch.mm(part.reshape(-1, left), one) for part, one in zip(given, slices, strict=True)]
                back = torch.empty_like(order)
                back[order] = torch.arange(len(order))
                value = torch.cat(made).view(len(prefixes), -1).index_select(0, back)
                value = value.view(len(prefixes), -1, width // self.cols[level])
            place = belongs
        return value.view(-1, self.dim).index_select(0, place.index_select(0, inverse))

    def forward(self, ids):
        if config["form"] == "grouped":
            return self.grouped(ids)
        digits = []
        for count in reversed(self.rows):
            digits.append(ids % count)
            ids = ids // count
        slices = [F.embedding(digit, weight) for digit, weight in zip(digits[::-1], self.weights, strict=True)]
        value = slices[0].view(len(ids), self.cols[0], -1)
        for given, (_, left, width), cols in zip(slices[1:], self.sizes[1:], self.cols[1:], strict=True):
            given = given.view(len(ids), left, width)
            made = torch.bmm(value, given) if config["form"] == "bmm" else torch.einsum("bmr,brw->bmw", value, given)
            value = made.view(len(ids), value.shape[1] * cols, -1)
        return value.view(len(ids), self.dim)

    @torch.no_grad()
    def lookup(self, ids):
        return self.forward(ids)

    def backward(self, out, grad):
        out.backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def array(self, out):
        return out.detach().numpy().copy()

    def cores(self):
        return [weight.detach().numpy().reshape(size) for weight, size in zip(self.weights, self.sizes, strict=True)]


run_cases(config, Plain)
