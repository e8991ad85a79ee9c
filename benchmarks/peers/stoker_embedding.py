"""Stoker's embedding step: EmbeddingTables alone, lookup and fused backward."""

from __future__ import annotations

import torch
from worker_tools import argument, embedding_case, versions

from stoker import EmbeddingTables, TableConfig, optim
from stoker.tables.storage import Rows

config = argument()
torch.set_num_threads(config["threads"])
lr, eps = config["lr"], config["eps"]
row_optimizer = {
    "sgd": optim.SGD(lr=lr),
    "adagrad": optim.Adagrad(lr=lr, eps=eps),
    "rowwise_adagrad": optim.RowWiseAdagrad(lr=lr, eps=eps),
    "adam": optim.Adam(lr=lr, eps=eps, betas=tuple(config["betas"])),
}[config["optimizer"]]
sizes = config["sizes"]
tables = EmbeddingTables(
    [TableConfig(name=f"C{i}", num_embeddings=rows, embedding_dim=16) for i, rows in enumerate(sizes)],
    optimizer=row_optimizer,
)
group = tables.groups[0]
versions(torch=torch.__version__, backend=group.backend.name)


def reset(initial):
    start = 0
    for i, rows in enumerate(sizes):
        part = torch.from_numpy(initial[start : start + rows].copy())
        state = {k: torch.zeros(rows, *v.shape[1:]) for k, v in group.storage.state.items()}
        tables.write(f"C{i}", 0, Rows(part, state))
        start += rows
    tables.tick = 0


def step(ids, grad):
    out = tables(ids)
    out.backward(grad)
    return out


for batch in config["batches"]:
    embedding_case(
        config,
        batch,
        reset,
        natural=lambda ids, bases: torch.from_numpy(ids.copy()),
        gradient=torch.from_numpy,
        step=step,
        output=lambda out: out.detach().numpy(),
        weights=lambda: group.storage.weight.numpy(),
    )
