"""A DLRM as a practitioner writes it for speed: the dense part compiled, one stacked table, rows updated by hand.

The table is no parameter. Its rows are looked up outside the graph, the gradient of what they gave comes back from
``backward``, duplicates are summed, and the rows are updated in place.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from dlrm_tools import dlrm_case, initial_rows, start_of
from torch import nn
from torch.nn import functional as F
from worker_tools import argument, versions

config = argument()
torch.set_num_threads(config["threads"])
half = config["dense_dtype"] == "bfloat16"


class Dense(nn.Module):
    """Everything but the rows."""

    def __init__(self, case):
        super().__init__()
        start = start_of(case)
        self.linear = nn.ModuleDict()
        for name in case["layers"]:
            weight = start[f"{name}.weight"]
            self.linear[name] = nn.Linear(weight.shape[1], weight.shape[0])
            with torch.no_grad():
                self.linear[name].weight.copy_(torch.from_numpy(weight))
                self.linear[name].bias.copy_(torch.from_numpy(start[f"{name}.bias"]))
        self.bottom, self.top = len(case["bottom"]) - 1, len(case["top"])
        fields = len(case["sizes"]) + 1
        row, column = torch.tril_indices(fields, fields, offset=-1)
        # index_select along one axis: its backward is several times faster than that of [:, row, column].
        self.register_buffer("pairs", row * fields + column)

    def forward(self, dense, embedded, labels):
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            x = dense
            for i in range(self.bottom):
                x = F.relu(self.linear[f"b{i}"](x))
            z = torch.cat([x.unsqueeze(1), embedded.to(x.dtype)], dim=1)
            products = torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
            x = torch.cat([x, products], dim=1)
            for i in range(self.top):
                x = self.linear[f"t{i}"](x)
                x = F.relu(x) if i < self.top - 1 else x
        logits = x.squeeze(1).float()
        return F.binary_cross_entropy_with_logits(logits, labels), logits


class Rows:
    """One stacked table and the optimizer of its rows."""

    def __init__(self, case, kind):
        self.weight = torch.from_numpy(np.array(initial_rows(case)))
        self.sum = torch.zeros(len(self.weight))
        self.kind, self.lr = kind, case["row_lr"][kind]

    @torch.no_grad()
    def lookup(self, ids, offsets):
        if offsets is None:
            return self.weight.index_select(0, ids)
        return F.embedding_bag(ids, self.weight, offsets, mode="sum", include_last_offset=True)

    @torch.no_grad()
    def update(self, ids, bag, grad):
        if config["sums"] == "index_add":
            rows, inverse = torch.unique(ids, return_inverse=True)
            each = grad if bag is None else grad.index_select(0, bag)
            g = torch.zeros(len(rows), grad.shape[1]).index_add_(0, inverse, each)
        else:
            ordered, order = torch.sort(ids)
            rows, counts = torch.unique_consecutive(ordered, return_counts=True)
            g = F.embedding_bag(order if bag is None else bag[order], grad, counts.cumsum(0) - counts, mode="sum")
        if self.kind == "sgd":
            # index_add_(alpha=) is several times slower; adding each occurrence loses what the sums keep.
            self.weight.index_add_(0, rows, g.mul_(-self.lr))
            return
        total = self.sum.index_select(0, rows).add_(g.square().mean(1))
        self.sum.index_copy_(0, rows, total)
        self.weight.index_add_(0, rows, g.mul_((-self.lr / total.sqrt_().add_(config["eps"])).unsqueeze(1)))


def run(kind, case):
    """One optimizer and shape, with a fresh model."""
    model, rows = Dense(case), Rows(case, kind)
    call = torch.compile(model, dynamic=False) if config["compile"] else model
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], fused=True)
    bases = np.concatenate([[0], np.cumsum(case["sizes"])[:-1]])
    size = (case["batch"], len(case["sizes"]), case["dim"])

    def natural(dense, ids, offsets, labels):
        bag = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        flat = torch.from_numpy(ids + bases[bag % len(bases)])
        bags = (None, None) if case["longest"] == 1 else (torch.from_numpy(offsets), torch.from_numpy(bag))
        return torch.from_numpy(dense), flat, *bags, torch.from_numpy(labels)

    def step(given):
        dense, ids, offsets, bag, labels = given
        embedded = rows.lookup(ids, offsets).view(size).requires_grad_()
        loss, logits = call(dense, embedded, labels)
        loss.backward()
        rows.update(ids, bag, embedded.grad.view(-1, case["dim"]))
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach().numpy()

    dlrm_case(
        config,
        kind,
        case,
        natural,
        step,
        layers=lambda: {
            f"{name}.{what}": getattr(model.linear[name], what).detach().numpy()
            for name in case["layers"]
            for what in ("weight", "bias")
        },
        rows=lambda: rows.weight.numpy(),
    )


versions(torch=torch.__version__)
for shape in config["cases"]:
    for name in config["optimizers"]:
        run(name, shape)
