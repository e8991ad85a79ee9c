"""One table larger than memory, on a sparse file: does it train, how fast, and in how much memory?"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

# Memory is measured here, so memory given back must count as such: the system's own allocator settings.
if os.environ.pop("GLIBC_TUNABLES", None) is not None:
    os.execv(sys.executable, [sys.executable, *sys.argv])

import numpy as np
import torch
from placed_tools import RankIds, filled_ids
from worker_tools import argument, peak_memory, say, versions

from stoker import Batch, Cached, EmbeddingTables, TableConfig, optim, stage

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__)
num_rows, dim, batch_size, features = (config[key] for key in ("num_rows", "dim", "batch", "features"))


def gradients(examples):
    found = np.random.default_rng(8).standard_normal((config["grads"], examples, features, dim), dtype=np.float32)
    return [torch.from_numpy(g) for g in found]


def train(tables, ids_of, count, examples, lookahead):
    """Steps one after the other; returns seconds per step."""
    grads, dense = gradients(examples), torch.zeros(examples, 0)
    stream = (Batch(dense=dense, ids=torch.from_numpy(ids_of(n)), step=n) for n in range(count))
    seconds, start = [], time.perf_counter()
    for batch in stage(stream, tables, lookahead=lookahead):
        tables(batch.ids).backward(grads[batch.step % len(grads)])
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    return seconds


with tempfile.TemporaryDirectory(dir=config["folder"]) as folder:
    before = peak_memory()
    tables = EmbeddingTables(
        [
            TableConfig(
                name="rows",
                num_embeddings=num_rows,
                embedding_dim=dim,
                features=tuple(f"f{i}" for i in range(features)),
            )
        ],
        optimizer=optim.RowWiseAdagrad(lr=config["lr"], eps=config["eps"]),
        placement=Cached(memory=config["memory"], home="file", path=folder, writes=config["writes"]),
    )
    storage = tables.groups[0].storage
    slots, wide = storage.num_slots, config["fill_batch"]
    fills = -(-slots // (wide * features))
    train(tables, lambda n: filled_ids(n, wide, features, slots), fills, wide, 1)
    storage.stats.reset()
    ids = RankIds(num_rows, config["skew"])
    seconds = train(
        tables, lambda n: ids.batch(n, (batch_size, features)), config["steps"], batch_size, config["lookahead"]
    )
    stats = storage.stats
    figures = {
        "slots": slots,
        "fills": fills,
        "median": float(np.median(seconds)),
        "mean": float(np.mean(seconds)),
        "hit_rate": stats.hit_rate,
        "rows": stats.rows / len(seconds),
        "fetched": stats.fetched / len(seconds),
        "written": stats.written / len(seconds),
        "table_bytes": num_rows * storage.home.row_bytes,
        "resident_slots": int((storage.residency.row_in_slot >= 0).sum()),
    }
    start = time.perf_counter()
    storage.flush()
    figures["flush"] = time.perf_counter() - start
    figures["disk_bytes"] = os.stat(storage.home.path).st_blocks * 512
    figures["file_bytes"] = os.stat(storage.home.path).st_size
    figures["peak"] = peak_memory() - before
    figures["baseline"] = before
    # What was measured is over: a sample of the rows leaves for the check.
    sample = np.unique(np.concatenate([ids.batch(n, (batch_size, features))[:40] for n in range(config["steps"])]))
    rows = storage.home.empty(len(sample))
    storage.home.fetch(sample, rows)
    out = Path(config["results"])
    np.save(out / "rows.npy", sample)
    np.save(out / "weight.npy", rows.weight.numpy())
    say("checked", case="100 GiB", **figures)
    say("timed", case="100 GiB", seconds=figures["mean"], fastest=min(seconds))
    tables.close()
