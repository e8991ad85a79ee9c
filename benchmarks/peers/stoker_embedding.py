"""Stoker's embedding step: EmbeddingTables alone, lookup and fused backward; resident, or staged behind slots."""

from __future__ import annotations

import itertools

import torch
from placed_tools import placement_of
from worker_tools import argument, batches_of, embedding_case, versions

from stoker import Batch, EmbeddingTables, TableConfig, optim, stage
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


def run(case):
    """One shape of the matrix."""
    tables = EmbeddingTables(
        [
            TableConfig(name=f"C{t}", num_embeddings=rows, embedding_dim=dim)
            for t, (rows, dim) in enumerate(zip(case["sizes"], case["dims"], strict=True))
        ],
        optimizer=row_optimizer,
        placement=placement_of(config, {f"C{t}": rows for t, rows in enumerate(case["sizes"])}),
    )
    feed = []

    def staged():
        """The pool again and again, with rows brought ahead of their step."""
        given = [(ids.reshape(case["batch"], -1) if case["longest"] == 1 else ids, o) for ids, o in batches_of(case)]
        dense = torch.zeros(case["batch"], 0)
        for number in itertools.count():
            ids, offsets = given[number % len(given)]
            bags = {} if case["longest"] == 1 else {"offsets": torch.from_numpy(offsets)}
            yield Batch(dense=dense, ids=torch.from_numpy(ids.copy()), step=number, **bags)

    def reset(initial):
        for t, rows in enumerate(initial):
            group = next(g for g in tables.groups if g.dim == rows.shape[1])
            state = {k: torch.zeros(len(rows), *v.shape[1:]) for k, v in group.storage.state.items()}
            tables.write(f"C{t}", 0, Rows(torch.from_numpy(rows.copy()), state))
        tables.tick = 0
        if config.get("placement"):
            feed.append(iter(stage(staged(), tables, lookahead=config["lookahead"])))

    def natural(ids, offsets):
        if case["longest"] == 1:
            return (torch.from_numpy(ids.reshape(case["batch"], -1).copy()),)
        return torch.from_numpy(ids.copy()), torch.from_numpy(offsets.copy())

    def gradient(grad):
        same = len(set(case["dims"])) == 1
        given = torch.from_numpy(grad.reshape(case["batch"], -1, case["dims"][0]) if same else grad)
        return given.clone()  # in memory of torch, as autograd's are: gradients in memory of others are copied

    def step(given, grad):
        if feed:
            batch = next(feed[0])
            given = (batch.ids,) if batch.offsets is None else (batch.ids, batch.offsets)
        out = tables(*given)
        out.backward(grad)
        return out

    embedding_case(
        config,
        case,
        reset,
        natural,
        gradient,
        step,
        output=lambda out: out.detach().numpy().reshape(case["batch"], -1),
        weights=lambda: [tables.rows(table.name).numpy() for table in tables.tables],
    )
    for each in feed:
        each.close()
    backends = {group.backend.name for group in tables.groups}
    versions(torch=torch.__version__, backend=", ".join(sorted(backends)))


for shape in config["cases"]:
    run(shape)
