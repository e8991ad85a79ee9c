"""A plain PyTorch DLRM: a sparse EmbeddingBag per table, or a stacked one, nn.Linear, torch's optimizers."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from dlrm_tools import dlrm_case, initial_rows, start_of
from torch import nn
from torch.nn import functional as F
from worker_tools import argument, versions

config = argument()
torch.set_num_threads(config["threads"])
sizes, stacked = config["sizes"], config["stacked"]
bounds = np.concatenate([[0], np.cumsum(sizes)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        rows = initial_rows(config)
        cuts = [(0, bounds[-1])] if stacked else list(itertools.pairwise(bounds))
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(np.array(rows[a:b])), freeze=False, mode="sum", sparse=True
            )
            for a, b in cuts
        )
        start = start_of(config)
        self.linear = nn.ModuleDict()
        for name in config["layers"]:
            weight = start[f"{name}.weight"]
            self.linear[name] = nn.Linear(weight.shape[1], weight.shape[0])
            with torch.no_grad():
                self.linear[name].weight.copy_(torch.from_numpy(weight))
                self.linear[name].bias.copy_(torch.from_numpy(start[f"{name}.bias"]))
        fields = len(sizes) + 1
        row, column = torch.tril_indices(fields, fields, offset=-1)
        # index_select along one axis: its backward is several times faster than that of [:, row, column].
        self.register_buffer("pairs", row * fields + column)

    def forward(self, dense, ids, offsets):
        if stacked:
            embedded = self.tables[0](ids, offsets).view(len(dense), len(sizes), -1)
            parts = [embedded]
        else:
            parts = [table(i, offsets).unsqueeze(1) for table, i in zip(self.tables, ids, strict=True)]
        x = dense
        for i in range(len(config["bottom"]) - 1):
            x = F.relu(self.linear[f"b{i}"](x))
        z = torch.cat([x.unsqueeze(1), *parts], dim=1)
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        x = torch.cat([x, products], dim=1)
        for i in range(len(config["top"])):
            x = self.linear[f"t{i}"](x)
            x = F.relu(x) if i < len(config["top"]) - 1 else x
        return x.squeeze(1)


class RowWiseAdagrad:
    """Row-wise Adagrad on sparse gradients, by hand: torch has none."""

    def __init__(self, tables, lr):
        self.lr, self.weights = lr, [table.weight for table in tables]
        self.sums = [torch.zeros(len(weight)) for weight in self.weights]

    @torch.no_grad()
    def step(self):
        for weight, total in zip(self.weights, self.sums, strict=True):
            grad = weight.grad
            rows, inverse = torch.unique(grad._indices()[0], return_inverse=True)
            g = torch.zeros(len(rows), weight.shape[1]).index_add_(0, inverse, grad._values())
            s = total.index_select(0, rows).add_(g.square().mean(1))
            total.index_copy_(0, rows, s)
            weight.index_add_(0, rows, g.mul_((-self.lr / s.sqrt_().add_(config["eps"])).unsqueeze(1)))

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None


def run(kind, batch):
    """One optimizer and batch size, with a fresh model."""
    model = Model()
    dense_optimizer = torch.optim.SGD(model.linear.parameters(), lr=config["lr"], fused=True)
    if kind == "sgd":
        row_optimizer = torch.optim.SGD(model.tables.parameters(), lr=config["row_lr"][kind])
    else:
        row_optimizer = RowWiseAdagrad(model.tables, config["row_lr"][kind])

    def natural(dense, ids, labels):
        if stacked:
            flat = torch.from_numpy((ids + bounds[:-1]).reshape(-1))
            given = (flat, torch.arange(len(flat)))
        else:
            given = (
                [torch.from_numpy(column.astype(np.int64)) for column in ids.T.copy()],
                torch.arange(len(ids)),
            )
        return torch.from_numpy(dense), *given, torch.from_numpy(labels)

    def step(given):
        *inputs, labels = given
        logits = model(*inputs)
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        dense_optimizer.step()
        row_optimizer.step()
        dense_optimizer.zero_grad()
        row_optimizer.zero_grad()
        return logits.detach().numpy()

    dlrm_case(
        config,
        kind,
        batch,
        natural,
        step,
        layers=lambda: {
            f"{name}.{what}": getattr(model.linear[name], what).detach().numpy()
            for name in config["layers"]
            for what in ("weight", "bias")
        },
        rows=lambda: np.concatenate([table.weight.detach().numpy() for table in model.tables]),
    )


versions(torch=torch.__version__)
for kind in config["optimizers"]:
    for batch in config["batches"]:
        run(kind, batch)
