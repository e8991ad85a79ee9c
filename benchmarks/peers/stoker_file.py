"""Stoker's rows in a file: lookup and fused backward; mapped, or behind slots and staged, as the planner chooses."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from placed_tools import case_name, drop_file, drop_steps, load_trace, timed_steps
from worker_tools import argument, say, versions

from stoker import Batch, Cached, EmbeddingTables, Mapped, TableConfig, optim, plan, stage
from stoker.placement import planner
from stoker.tables.storage import Rows

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__)
source, results = Path(config["inputs"]), Path(config["results"])
num_rows, dim, names = config["num_rows"], config["dim"], config["features"]
initial = np.memmap(source / "weight.bin", np.float32, "r", shape=(num_rows, dim))
if config["memory"] != "plenty":  # the page cache holds no more than our slots do, so tell the planner
    planner.available_memory = lambda: config["slots"] * 4 * (dim + 1)
CHUNK = 2**17  # rows written at a time


def run(batch_size, warm_up, timed, folder):
    trace = load_trace(source / f"trace_{batch_size}.npz")
    due = drop_steps(trace, config["memory"], 4 * dim)
    grads = [torch.from_numpy(g) for g in np.load(source / f"grad_{batch_size}.npy")]
    table = TableConfig(name="rows", num_embeddings=num_rows, embedding_dim=dim, features=tuple(names))
    optimizer = optim.RowWiseAdagrad(lr=config["lr"], eps=config["eps"])
    chosen = plan(
        [table], optimizer=optimizer, device_memory="64MiB", host_memory=0, path=folder, batch_size=batch_size,
        device="cpu",
    )["rows"]  # fmt: skip
    mapped = isinstance(chosen, Mapped)
    if not mapped:  # with the slots of the bar
        chosen = Cached(slots=config["slots"], home="file", path=folder)
    tables = EmbeddingTables([table], optimizer=optimizer, placement=chosen)
    storage = tables.groups[0].storage
    # Every row lies in the file, as after long training: none may be computed instead of read.
    for start in range(0, num_rows, CHUNK):
        part = torch.from_numpy(np.array(initial[start : start + CHUNK]))
        state = {name: torch.zeros(len(part), *value.shape[1:]) for name, value in storage.state.items()}
        tables.write("rows", start, Rows(part, state))
    os.sync()  # the pages of both kinds are clean now, as after long training
    dense = torch.zeros(batch_size, 0)
    batches = [
        Batch(dense=dense, ids=torch.from_numpy(ids), offsets=torch.from_numpy(offsets), step=number)
        for number, (ids, offsets) in enumerate(trace)
    ]
    feed = iter(stage(batches, tables, lookahead=config["lookahead"]))
    fd = None if mapped else os.open(storage.home.path, os.O_RDONLY)
    kept = {}

    def step(number):
        if number in due:
            drop_file(fd)
        if number == warm_up and not mapped:
            storage.stats.reset()
        batch = next(feed)
        out = tables(batch.ids, batch.offsets)
        out.backward(grads[number % len(grads)])
        kept["output"] = out.detach()

    blocks = timed_steps(step, warm_up, timed)
    feed.close()
    touched = np.unique(np.concatenate([ids for ids, _ in trace[: warm_up + timed]]))
    np.save(results / f"weight_{batch_size}.npy", storage.gather(touched).weight.numpy())
    np.save(results / f"output_{batch_size}.npy", kept["output"].numpy())
    case = case_name(batch_size)
    say("checked", case=case, batch=batch_size)
    say("timed", case=case, seconds=float(np.mean(blocks)), blocks=len(blocks), fastest=min(blocks))
    if not mapped:
        stats = storage.stats
        say("extra", case=case, hit_rate=stats.hit_rate, rows=stats.rows / timed, fetched=stats.fetched / timed)
        os.close(fd)
    tables.close()


with tempfile.TemporaryDirectory(dir=config["inputs"]) as folder:
    for size, (warm_up, timed) in config["steps"].items():
        run(int(size), warm_up, timed, folder)
