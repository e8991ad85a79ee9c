"""Stoker's DLRM in logical shards, in one process or with rows divided among several."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from dlrm_tools import initial_rows, start_of
from ranks_tools import ranks_case, run_on_ranks
from worker_tools import argument, versions

from stoker import DLRM, Batch, FeatureSpec, optim
from stoker.tables import Ranks
from stoker.tables.ranks.share import share_of
from stoker.tables.storage import Rows
from stoker.training.ranks.sharded import ShardedLoss, own_threads

config = argument()


def parameter(model, name):
    layer, kind = name.split(".")
    return getattr((model.bottom if layer[0] == "b" else model.top).layers[int(layer[1:])], kind)


def build(kind, case, ranks):
    rule = {"sgd": optim.SGD, "rowwise_adagrad": optim.RowWiseAdagrad}[kind]
    options = {} if kind == "sgd" else {"eps": config["eps"]}
    spread = {} if ranks is None else {"ranks": ranks, "shards": config["shards"]}
    model = DLRM(
        FeatureSpec.from_sizes(case["bottom"][0], case["sizes"]),
        embedding_dim=case["dim"],
        bottom=case["bottom"][1:],
        top=case["top"],
        pooling="sum",
        optimizer=rule(lr=case["row_lr"][kind], **options),
        **spread,
    )
    model.embeddings.shards = config["shards"]
    initial, start = initial_rows(case), 0
    for i, rows in enumerate(case["sizes"]):
        table, group = f"C{i + 1}", model.embeddings.groups[0]
        storage = group.storage if ranks is None else group.own.storage
        state = {name: torch.zeros(rows, *value.shape[1:]) for name, value in storage.state.items()}
        given = Rows(torch.from_numpy(initial[start : start + rows].copy()), state)
        if ranks is None:
            model.embeddings.write(table, 0, given)
        else:
            group.spread(table, 0, given if ranks.rank == 0 else None)
        start += rows
    with torch.no_grad():
        for name, value in start_of(case).items():
            parameter(model, name).copy_(torch.from_numpy(value))
    return model, torch.optim.SGD(model.dense_parameters(), lr=config["lr"], fused=True)


def run(kind, case):
    """One optimizer and shape, with a fresh model."""
    ranks = Ranks() if config["ranks"] > 1 else None
    model, dense = build(kind, case, ranks)
    loss_of = model.loss if config["shards"] == 1 else ShardedLoss(model)

    def natural(dense, ids, labels):
        given = {"dense": torch.from_numpy(dense), "ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        batch = Batch(**given)
        return batch if ranks is None else share_of(batch, ranks, config["shards"])

    def step(batch):
        with nullcontext() if config["shards"] == 1 else own_threads():
            loss_of(batch).backward()
            dense.step()
            dense.zero_grad()

    ranks_case(
        config,
        kind,
        case,
        natural,
        step,
        layers=lambda: {
            f"{name}.{what}": parameter(model, f"{name}.{what}").detach().numpy()
            for name in case["layers"]
            for what in ("weight", "bias")
        },
        rows=lambda: np.concatenate([model.embeddings.rows(f"C{i + 1}").numpy() for i in range(len(case["sizes"]))]),
    )
    model.embeddings.close()


def main():
    versions(torch=torch.__version__)
    for shape in config["cases"]:
        for name in config["optimizers"]:
            run(name, shape)


run_on_ranks(config, main)
