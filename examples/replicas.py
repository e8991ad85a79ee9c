"""Two processes train one model, each on half of every batch, and hold the same rows to the bit.

python examples/replicas.py

With one GPU a process, start a script like this by torchrun and take "nccl" instead of "gloo".
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import stoker

BATCH, STEPS, RANKS = 256, 40, 2


def train(rank: int, dataset: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    replicas = stoker.Replicas()
    data = stoker.Dataset(dataset)
    model = stoker.DLRM(data.schema, embedding_dim=16, bottom=(64, 16), top=(64,), seed=0)
    model.embeddings.replicate(replicas)  # from here on, backward updates the rows of all ranks' batches
    dense = torch.optim.Adam(model.dense_parameters(), lr=1e-3)
    stream = data.train.batches(BATCH // RANKS, seed=0, rank=replicas.rank, world_size=replicas.size)
    for batch in stream:
        loss = model.loss(batch)
        loss.backward()
        replicas.average(model.dense_parameters(), len(batch))
        dense.step()
        dense.zero_grad()
        if rank == 0 and batch.step % 10 == 0:
            print(f"step {batch.step:3}: loss {loss.item():.4f} on rank 0's half", flush=True)
        if batch.step + 1 == STEPS:
            break
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "day_0.tsv"
        stoker.synthetic.write("criteo", 15_000, log)
        data = stoker.prepare("criteo", log, out=Path(folder) / "criteo")
        mp.spawn(train, args=(str(data.path), folder), nprocs=RANKS)
        first, second = (torch.load(f"{folder}/rank{rank}.pt") for rank in range(RANKS))
        if not all(torch.equal(first[name], second[name]) for name in first):
            raise SystemExit("the replicas differ")
        rows = sum(len(value) for name, value in first.items() if name.endswith(".weight") and "embeddings" in name)
        print(f"after {STEPS} steps {rows:,} rows and the dense part are the same on both ranks, to the bit")


if __name__ == "__main__":
    main()
