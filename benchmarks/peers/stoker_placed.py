"""Stoker's DLRM on a prepared dataset in order of time, with its rows on the device or behind slots."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from placed_tools import case_name, timed_steps
from worker_tools import argument, say, versions

from stoker import DLRM, Cached, Dataset, optim, stage

config = argument()
torch.set_num_threads(config["threads"])
data = Dataset(config["dataset"])
versions(torch=torch.__version__)


def digest(tables):
    """Of all rows and their state."""
    found = hashlib.sha256()
    for table in tables.tables:
        for _, rows in tables.read(table.name):
            for tensor in (rows.weight, *(rows.state[name] for name in sorted(rows.state))):
                found.update(tensor.contiguous().numpy())
    return found.hexdigest()


def run(batch_size, warm_up, timed):
    fraction = config.get("fraction")
    model = DLRM(
        data.schema,
        embedding_dim=config["dim"],
        bottom=config["bottom"],
        top=config["top"],
        optimizer=optim.RowWiseAdagrad(lr=config["row_lr"]),
        placement=None if fraction is None else Cached(fraction=fraction, home="memory"),
    )
    dense = torch.optim.SGD(model.dense_parameters(), lr=config["lr"], fused=True)
    feed = iter(stage(data.train.batches(batch_size, seed=None), model, lookahead=config["lookahead"]))
    stats = [group.storage.stats for group in model.embeddings.groups] if fraction is not None else []
    losses = []

    def step(number):
        if number == warm_up:
            for each in stats:
                each.reset()
        loss = model.loss(next(feed))
        loss.backward()
        dense.step()
        dense.zero_grad()
        losses.append(loss.item())

    blocks = timed_steps(step, warm_up, timed)
    moved = {}
    if stats:
        moved = {
            "hit_rate": sum(each.hits for each in stats) / max(1, sum(each.rows for each in stats)),
            "rows": sum(each.rows for each in stats) / timed,
            "fetched": sum(each.fetched for each in stats) / timed,
            "written": sum(each.written for each in stats) / timed,
            "moving_ms": 1e3 * sum(each.fetch_seconds + each.write_seconds for each in stats) / timed,
        }
    feed.close()
    case = case_name(batch_size)
    np.save(Path(config["results"]) / f"losses_{batch_size}.npy", np.array(losses))
    say("checked", case=case, batch=batch_size, rows=digest(model.embeddings))
    say("timed", case=case, seconds=float(np.median(blocks)), blocks=len(blocks), fastest=min(blocks))
    if moved:
        say("extra", case=case, **moved)
    model.embeddings.close()


for size, (warm_up, timed) in config["steps"].items():
    run(int(size), warm_up, timed)
