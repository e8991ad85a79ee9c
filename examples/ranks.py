"""Two processes train one model, each with half of the rows and of every batch: the bits of one (docs/ranks.md)."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import stoker

BATCH, STEPS, SHARDS = 256, 40, 8


def train(rank: int, size: int, dataset: str, folder: str) -> None:
    torch.manual_seed(0)  # a checkpoint has the state of torch's generator
    ranks = None
    if size > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        ranks = stoker.distributed.Ranks()  # each row is on one of them, behind any placement
    data = stoker.Dataset(dataset)
    model = stoker.DLRM(
        data.schema, embedding_dim=16, bottom=(64, 16), top=(64,), optimizer=stoker.Adagrad(lr=0.05),
        placement=stoker.Cached(fraction=0.1), shards=SHARDS, ranks=ranks,
    )  # fmt: skip
    loss_of = stoker.distributed.ShardedLoss(model)
    dense = torch.optim.Adam(model.dense_parameters(), lr=1e-3)
    batches = data.train.batches(BATCH, seed=0)  # the same on all ranks
    own = batches if ranks is None else stoker.distributed.Shares(batches, ranks, SHARDS)
    for batch in stoker.stage(own, model):
        loss = loss_of(batch)  # of the whole batch, with all gradients
        loss.backward()  # rows take their step, each on the rank that has it
        dense.step()
        dense.zero_grad()
        if rank == 0 and batch.step % 10 == 0:
            print(f"{size} process{'es' * (size > 1)}, step {batch.step:2}: loss {loss.item():.6f}", flush=True)
        if batch.step + 1 == STEPS:
            break
    stoker.save(f"{folder}/on_{size}", model, dense)  # all ranks call it, the first one writes
    model.embeddings.close()
    if ranks is not None:
        dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stoker.synthetic.write("criteo", 15_000, f"{folder}/day_0.tsv")
        data = stoker.prepare("criteo", f"{folder}/day_0.tsv", out=f"{folder}/criteo")
        torch.multiprocessing.spawn(train, (2, str(data.path), folder), 2)
        train(0, 1, str(data.path), folder)
        one, two = (sorted(Path(folder, f"on_{size}").rglob("*.safetensors")) for size in (1, 2))
        if [each.read_bytes() for each in one] != [each.read_bytes() for each in two]:
            raise SystemExit("the checkpoints differ")
        print(f"after {STEPS} steps all {len(one)} files of rows and weights are the same, to the bit")


if __name__ == "__main__":
    main()
