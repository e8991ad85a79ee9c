"""One training on a prepared data set: Stoker's DLRM, or a plain PyTorch DLRM from the same initial values.

The plain one has an nn.EmbeddingBag(sparse=True) per table, nn.Linear, torch.optim.Adam and a hand-written
row-wise Adagrad; of Stoker it uses the reader (the same batches) and the initial values.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from worker_tools import argument, say, versions

import stoker

config = argument()
torch.set_num_threads(config["threads"])
data = stoker.Dataset(config["data"])
spec = data.schema


class Plain(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag.from_pretrained(
                    start.embeddings.rows(table.name),
                    freeze=False,
                    mode="mean",
                    sparse=True,
                    include_last_offset=True,
                )
                for table in start.tables
            }
        )
        self.bottom = None if start.bottom is None else self.copy(start.bottom)
        self.top = self.copy(start.top)
        self.constant = None if start.constant is None else nn.Parameter(start.constant.detach().clone())

    @staticmethod
    def copy(mlp):
        made = nn.ModuleList()
        for layer in mlp.layers:
            made.append(nn.Linear(layer.in_features, layer.out_features))
            made[-1].load_state_dict(layer.state_dict())
        return made

    def dense_parameters(self):
        return [p for name, p in self.named_parameters() if not name.startswith("tables.")]

    def forward(self, batch):
        count, size = len(spec.features), len(batch.dense)
        if batch.offsets is None:
            bags = [(column.contiguous(), torch.arange(size + 1)) for column in batch.ids.long().unbind(1)]
        else:
            lengths = batch.offsets.diff().view(size, count)
            bag = torch.repeat_interleave(torch.arange(size * count), lengths.reshape(-1)) % count
            bags = [(batch.ids[bag == f].long(), F.pad(lengths[:, f].cumsum(0), (1, 0))) for f in range(count)]
        pooled = [self.tables[feature.table](*bag) for feature, bag in zip(spec.features, bags, strict=True)]
        if self.bottom is None:
            x = self.constant.expand(size, -1)
        else:
            x = batch.dense
            for layer in self.bottom:
                x = F.relu(layer(x))
        z = torch.stack([x, *pooled], dim=1)
        row, column = torch.tril_indices(count + 1, count + 1, offset=-1)
        x = torch.cat([x, (z @ z.transpose(1, 2))[:, row, column]], dim=1)
        for layer in self.top[:-1]:
            x = F.relu(layer(x))
        return self.top[-1](x).squeeze(1)


class RowWiseAdagrad:
    """s += mean(G * G); w -= lr / (sqrt(s) + eps) * G on the rows that a batch touches."""

    def __init__(self, tables, lr, eps=1e-8):
        self.lr, self.eps = lr, eps
        self.state = [(table.weight, torch.zeros(table.num_embeddings)) for table in tables.values()]

    @torch.no_grad()
    def step(self):
        for weight, total in self.state:
            if weight.grad is None:
                continue
            grad = weight.grad.coalesce()
            rows, g = grad.indices()[0], grad.values()
            total[rows] += g.square().mean(1)
            weight[rows] -= self.lr / (total[rows].sqrt() + self.eps).unsqueeze(1) * g
            weight.grad = None


versions(torch=torch.__version__, stoker=stoker.__version__)
start = stoker.DLRM(
    spec,
    bottom=config["bottom"],
    top=config["top"],
    seed=config["seed"],
    optimizer=stoker.RowWiseAdagrad(lr=config["row_lr"]),
)
if config["role"] == "stoker":
    model, rows = start, None
else:
    model = Plain(start)
    rows = RowWiseAdagrad(model.tables, config["row_lr"])
dense = torch.optim.Adam(model.dense_parameters(), lr=config["lr"])
stream = data.train.batches(config["batch"], seed=config["seed"])
steps = config["limit"] or config["epochs"] * len(stream)
begin = time.perf_counter()
first = None
for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(stream)), steps):
    logits = model(batch)
    if first is None:
        first = logits.detach().clone()
    F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    if rows is not None:
        rows.step()
    dense.step()
    dense.zero_grad()
seconds = time.perf_counter() - begin
with torch.no_grad():
    scored = [(model(batch).numpy().copy(), batch.labels.numpy().copy()) for batch in data.test.batches(8192)]
scores, labels = (np.concatenate(part) for part in zip(*scored, strict=True))
np.savez(config["results"], first=first.numpy(), scores=scores, labels=labels)
say("trained", seconds=seconds, steps=steps)
