"""What planning costs: a placed and a resident DLRM side by side in one process, step by step on the same batches."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from worker_tools import argument, batches_of, say, versions

from stoker import DLRM, Batch, Cached, FeatureSpec, optim, stage

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__)
(case,) = config["cases"]
batch_size = case["batch"]
warm_up, timed = config["steps"]
dense, labels = (np.load(Path(case["inputs"]) / f"{name}.npy") for name in ("dense", "labels"))
ids = [given.reshape(batch_size, -1) for given, _ in batches_of({"inputs": case["ids"]})]
pool = [tuple(map(torch.from_numpy, each)) for each in zip(dense, ids, labels, strict=True)]


def batches():
    number = 0
    while True:
        d, i, y = pool[number % len(pool)]
        # A view of its own: stage() knows batches by their ids tensor, and the pool is gone through again.
        yield Batch(dense=d, ids=i.view_as(i), labels=y, step=number)
        number += 1


class Trainer:
    """A model and how it takes a step."""

    def __init__(self, placement):
        self.model = DLRM(
            FeatureSpec.from_sizes(case["bottom"][0], case["sizes"]),
            bottom=case["bottom"][1:],
            top=case["top"],
            optimizer=optim.RowWiseAdagrad(lr=case["row_lr"]["rowwise_adagrad"]),
            placement=placement,
        )
        self.dense = torch.optim.SGD(self.model.dense_parameters(), lr=config["lr"], fused=True)
        self.feed = iter(stage(batches(), self.model, lookahead=config["lookahead"], background=False))
        self.losses = []

    def step(self):
        """Seconds without the staging of the batch."""
        batch = next(self.feed)
        start = time.perf_counter()
        loss = self.model.loss(batch)
        loss.backward()
        self.dense.step()
        self.dense.zero_grad()
        self.losses.append(loss.item())
        return time.perf_counter() - start


resident, placed = Trainer(None), Trainer(Cached(fraction=config["fraction"], home="memory"))
storages = [group.storage for group in placed.model.embeddings.groups]
clock = {"announce": 0.0, "stage": 0.0}


def clocked(storage, name):
    original = getattr(storage, name)

    def call(*given):
        start = time.perf_counter()
        found = original(*given)
        clock[name] += time.perf_counter() - start
        return found

    setattr(storage, name, call)


for storage in storages:
    for name in clock:
        clocked(storage, name)

steps, parts = [], {"announce": [], "plan": [], "moving": []}
for number in range(warm_up + timed):
    seconds = resident.step()
    before = dict(clock), sum(s.stats.fetch_seconds + s.stats.write_seconds + s.stats.fence_seconds for s in storages)
    if number == warm_up:
        for storage in storages:
            storage.stats.reset()
        before = dict(clock), 0.0
    placed.step()
    if number < warm_up:
        continue
    moving = sum(s.stats.fetch_seconds + s.stats.write_seconds + s.stats.fence_seconds for s in storages) - before[1]
    steps.append(seconds)
    parts["announce"].append(clock["announce"] - before[0]["announce"])  # distinct rows, and the window
    parts["plan"].append(clock["stage"] - before[0]["stage"] - moving)  # release, plan, ids of slots
    parts["moving"].append(moving)

stats = storages[0].stats
out = Path(config["results"])
np.save(out / "losses.npy", np.array([resident.losses, placed.losses]))
same = all(
    torch.equal(a.weight, b.weight) and all(torch.equal(a.state[name], b.state[name]) for name in a.state)
    for table in resident.model.tables
    for (_, a), (_, b) in zip(
        resident.model.embeddings.read(table.name), placed.model.embeddings.read(table.name), strict=True
    )
)
say("checked", case="planning", rows_equal=same)
# Means: the window takes several batches at one step and none at the next.
cost = {name: float(np.mean(values)) for name, values in parts.items()}
say("timed", case="planning", seconds=cost["announce"] + cost["plan"])
say(
    "extra",
    case="planning",
    step=float(np.median(steps)),
    **cost,
    hit_rate=stats.hit_rate,
    rows=stats.rows / timed,
    fetched=stats.fetched / timed,
)
