"""What planning alone costs: batches are announced, staged and released; a link that moves nothing keeps the plans.

It runs with the sources of this clone and with those of an earlier commit.
"""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from worker_tools import argument, say, versions

from stoker.ops import Bags
from stoker.ops.space import make_space
from stoker.tables.config import Cached, TableConfig
from stoker.tables.links.transfer import DirectLink
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.stores.home import Initial
from stoker.tables.stores.ram_tier import make_home

config = argument()
torch.set_num_threads(config["threads"])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config["threads"]])
versions(torch=torch.__version__, numpy=np.__version__)
sizes = np.array(config["sizes"])
names = [f"C{table}" for table in range(len(sizes))]
slots, ahead = int(config["fraction"] * sizes.sum()), config["lookahead"]


def prefix(share):
    """Rows that the rule of eviction keeps longest, in ``share`` of the slots: the first ids of each table [T]."""
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(sizes, middle).sum() <= share * slots else (low, middle - 1)
    return np.minimum(sizes, low)


class KeepPlans(DirectLink):
    """Moves nothing, and tells the planner that writebacks land later and memory is roomy, as with a GPU."""

    plan, landing, roomy = None, 8, True

    def run(self, plan):
        KeepPlans.plan = plan


def run(batch, warm_up, timed):
    tables = [TableConfig(name=n, num_embeddings=int(s), embedding_dim=1) for n, s in zip(names, sizes, strict=True)]
    storage = SlottedRows(
        make_home(Cached(slots=1), Initial.of(tables, 0), {}, gpu=False),
        make_space(names, sizes.tolist(), [(name,) for name in names], names),
        slots=slots,
        device=torch.device("cpu"),
        hot=tuple(prefix(config["hot"]).tolist()) if config["hot"] else (),
        link=KeepPlans,
    )
    queue = storage.queue()
    # Full, and as the rule of eviction leaves it after a long time: the first rows of every table.
    kept = prefix(1.0)
    for first in range(0, int(kept.max()), 2**16):
        ids = np.arange(first, min(first + 2**16, int(kept.max())))[:, None]
        queue.announce(Bags(torch.from_numpy(np.where(ids < kept, ids, 0).astype(np.int32))))
        queue.stage().release(changed=True)
    rng = np.random.default_rng(7)
    tail = 1 - (sizes + 1.0) ** (1 - config["skew"])

    def bags():
        rank = (1 - tail * rng.random((batch, len(sizes)))) ** (1 / (1 - config["skew"])) - 1
        return Bags(torch.from_numpy(np.minimum(rank, sizes - 1).astype(np.int32)))

    for _ in range(ahead):
        queue.announce(bags())
    # As stage() does: with several threads one finds the distinct rows of the batch after the one that is announced.
    finder = ThreadPoolExecutor(1) if config["threads"] > 1 else None
    if finder is not None:
        given = bags()
        found = finder.submit(storage.distinct, given)
    seconds, misses = [], []
    fetched, plans = hashlib.sha256(), hashlib.sha256()
    for number in range(warm_up + timed):
        coming = bags()
        begin = time.perf_counter()
        if finder is None:
            queue.announce(coming)
        else:
            search = finder.submit(storage.distinct, coming)
            queue.announce(given, wanted=found.result())
            given, found = coming, search
        marks = [time.perf_counter()]
        lease = queue.stage()
        marks.append(time.perf_counter())
        lease.release(changed=True)
        _ = storage.available  # releases are entered
        if finder is not None:
            found.result()  # nothing is left over for the time between two steps
        marks.append(time.perf_counter())
        if number < warm_up:
            continue
        seconds.append(np.diff([begin, *marks]))
        plan = KeepPlans.plan
        misses.append(len(plan.fetch_rows))
        fetched.update(np.sort(plan.fetch_rows))
        for part in (plan.slots, plan.fetch_rows, plan.fetch_slots, plan.evict_rows, plan.evict_slots):
            plans.update(part)
        plans.update(lease.bags.ids.numpy())
    free = int(np.count_nonzero(storage.residency.row_in_slot < 0))
    digests = {"fetched": fetched.hexdigest(), "plans": plans.hexdigest()}
    say("checked", case=f"{batch}", misses=misses, hot=storage.num_hot, slots=slots, free=free, **digests)
    whole = np.sum(seconds, axis=1)
    say("timed", case=f"{batch}", seconds=float(np.median(whole)), blocks=timed, fastest=float(whole.min()))
    say("extra", case=f"{batch}", parts=np.median(seconds, axis=0).tolist(), mean=float(whole.mean()))
    if finder is not None:
        finder.shutdown()
    storage.close()


for size, counts in config["steps"].items():
    run(int(size), *counts)
