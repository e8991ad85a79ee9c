"""From a feature table to scored rows as written for speed today: Polars or DuckDB, whole batches, torch.compile.

Codes and statistics by frames_sessions.py, tensors in memory, batches by ``index_select``, the tabular model compiled,
rows looked up and updated by hand (row-wise Adagrad), fused AdamW, one cycle.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from frames_sessions import by_duckdb, by_polars
from torch import nn
from torch.nn import functional as F
from worker_tools import argument, peak_memory, say, versions


class Rows:
    """One table and its row-wise Adagrad."""

    def __init__(self, rows, dim):
        self.weight = torch.randn(rows, dim) * 0.01
        self.sum = torch.zeros(rows)

    @torch.no_grad()
    def update(self, ids, grad, lr):
        ordered, order = torch.sort(ids)
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        g = F.embedding_bag(order, grad, counts.cumsum(0) - counts, mode="sum")
        total = self.sum.index_select(0, rows).add_(g.square().mean(1))
        self.sum.index_copy_(0, rows, total)
        self.weight.index_add_(0, rows, g.mul_((-lr / total.sqrt_().add_(1e-8)).unsqueeze(1)))


def compiled(dims, columns, batch):
    """The layers of our tabular model, and its loss, compiled for batches of ``batch`` before any clock runs."""
    width = sum(dims) + columns
    hidden = [nn.Linear(width, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU(), nn.BatchNorm1d(32)]
    model = nn.Sequential(*hidden, nn.Linear(32, 1))

    @torch.compile(dynamic=False)
    def loss_of(parts, numbers, wanted):
        logits = model(torch.cat([*parts, numbers], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, wanted)

    parts = [torch.zeros(batch, dim, requires_grad=True) for dim in dims]
    loss_of(parts, torch.zeros(batch, columns), torch.zeros(batch)).backward()
    return model, loss_of


def job(config, prepare, source, model, loss_of):
    """Seconds of preparation, and of training and scoring; scores of the validation rows."""
    start = time.perf_counter()
    codes, values, labels, train, sizes = prepare(source, config["dims"], config["numbers"])
    middle = time.perf_counter()
    torch.manual_seed(config["seed"])
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    model.train().zero_grad()
    settings, batch = config["settings"], config["settings"]["batch_size"]
    tables = [Rows(rows, dim) for rows, dim in zip(sizes, config["dims"].values(), strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["dense_lr"], fused=True)
    learned = torch.from_numpy(np.flatnonzero(train))
    steps = settings["epochs"] * (len(learned) // batch)  # a short last batch would compile once more
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings["dense_lr"], total_steps=steps + 1)
    for _ in range(settings["epochs"]):
        for rows in learned[torch.randperm(len(learned))][: len(learned) // batch * batch].split(batch):
            ids, numbers, wanted = (whole.index_select(0, rows) for whole in (codes, values, labels))
            columns = ids.T.contiguous()
            parts = [t.weight.index_select(0, i).requires_grad_() for t, i in zip(tables, columns, strict=True)]
            loss_of(parts, numbers, wanted).backward()
            share = optimizer.param_groups[0]["lr"] / settings["dense_lr"]
            for table, i, part in zip(tables, columns, parts, strict=True):
                table.update(i, part.grad, settings["row_lr"] * share)
            optimizer.step()
            optimizer.zero_grad()
            cycle.step()
    scores = []
    model.eval()
    with torch.no_grad():
        for rows in torch.from_numpy(np.flatnonzero(~train)).split(batch):
            columns = codes.index_select(0, rows).T.contiguous()
            parts = [t.weight.index_select(0, i) for t, i in zip(tables, columns, strict=True)]
            scores.append(model(torch.cat([*parts, values.index_select(0, rows)], dim=1)).squeeze(1))
    return middle - start, time.perf_counter() - middle, torch.cat(scores).numpy()


config = argument()
torch.set_num_threads(config["threads"])
form = config.get("form", "Polars")
prepare = {"Polars": by_polars, "DuckDB": partial(by_duckdb, threads=config["threads"])}[form]
versions(torch=torch.__version__, **{form.lower(): version(form.lower())})
columns = prepare(config["small"], config["dims"], config["numbers"])[1].shape[1]  # starts the pools, too
made = compiled(list(config["dims"].values()), columns, config["settings"]["batch_size"])
preparation, training, scores = job(config, prepare, config["source"], *made)
np.save(Path(config["results"]) / "scores.npy", scores)
for name, seconds in (("preparation", preparation), ("training", training)):
    say("checked", case=name)
    say("timed", case=name, seconds=seconds)
say("extra", peak=peak_memory())
