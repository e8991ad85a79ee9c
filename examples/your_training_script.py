"""A training script with nn.EmbeddingBag and Adagrad, and the same script with EmbeddingTables in its place.

python examples/your_training_script.py

It accumulates gradients over micro-batches, under bfloat16 autocast with a GradScaler, evaluates inside the loop, has a
learning-rate schedule, and continues from a checkpoint. Lines marked <- change. Numbers agree wherever the rows are.
"""

import tempfile

import torch
from torch import Tensor, nn

import stoker

ROWS, DIM, BATCH, MICRO, STEPS = 5000, 8, 32, 4, 12
CACHED, FILE = stoker.Cached(slots=500), stoker.Cached(slots=500, home="file")
HOT = stoker.HotCold(hot={"items": 50}, slots=500)


class Net(nn.Module):
    def __init__(self, where: stoker.Strategy | None) -> None:
        super().__init__()
        self.head = nn.Linear(2 * DIM, 1, bias=False)
        self.head.weight.data.copy_(torch.arange(2 * DIM) % 3 - 1.0)
        start = torch.arange(ROWS * DIM).view(ROWS, DIM) % 5 - 2.0
        if where is None:
            self.items: nn.Module = nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum")
        else:
            table = stoker.TableConfig(name="items", num_embeddings=ROWS, embedding_dim=DIM, features=("old", "new"))
            rows = stoker.Adagrad(lr=1.0, eps=1e-10)
            self.items = stoker.EmbeddingTables([table], optimizer=rows, placement=where)  # <-
            self.items.load_state_dict({**self.items.state_dict(), "items.weight": start})

    def forward(self, ids: Tensor) -> Tensor:  # [B, 2]
        rows = self.items(ids.view(-1, 1) if isinstance(self.items, nn.EmbeddingBag) else ids)  # <- [B, 2, DIM]
        return self.head(rows.view(len(ids), 2 * DIM)).squeeze(1)


def batch(number: int) -> tuple[Tensor, Tensor]:
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(number))[: 2 * BATCH]
    return ids.view(BATCH, 2), torch.full((BATCH,), 2.0 ** (number % 3))


def train(where: stoker.Strategy | None, path: str) -> Tensor:
    net, losses = Net(where), []
    dense = torch.optim.SGD(net.head.parameters(), lr=2.0**-9)
    rows = torch.optim.Adagrad(net.items.parameters(), lr=1.0) if where is None else net.items.as_optimizer()  # <-
    schedule = torch.optim.lr_scheduler.StepLR(rows, step_size=4, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        net.train()
        for ids, target in map(batch, range(MICRO * step, MICRO * step + MICRO)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (net(ids) * target).sum() / MICRO
            scaler.scale(loss).backward()
            losses.append(loss.item())
        for optimizer in (dense, rows):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        schedule.step()
        if step % 3 == 2:
            with torch.inference_mode():
                losses.append(net.eval()(batch(1000)[0]).sum().item())
        if step == STEPS // 2 and where is None:
            torch.save([each.state_dict() for each in (net, dense, rows, schedule, scaler)], path)
        elif step == STEPS // 2:
            stoker.save(path, net, [dense, rows], extra_state={"schedule": schedule, "scaler": scaler})  # <-
            stoker.load(path, net, [dense, rows], extra_state={"schedule": schedule, "scaler": scaler})  # <-
    return torch.tensor(losses)


with tempfile.TemporaryDirectory() as folder:
    expected = train(None, f"{folder}/plain")
    for number, where in enumerate((stoker.Device(), CACHED, FILE, HOT, stoker.HostPipelined(slots=500))):
        losses = train(where, f"{folder}/{number}")
        print(f"{type(where).__name__:14} largest difference of a loss {(losses - expected).abs().max().item()}")
        torch.testing.assert_close(losses, expected)
