"""The straightforward tensor-train lookup in plain PyTorch: every id multiplies its own slices; autograd; SGD."""

from __future__ import annotations

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

    def forward(self, ids):
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
