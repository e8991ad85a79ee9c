"""EmbeddingTables in your own model, in place of nn.EmbeddingBag(sparse=True) and its optimizer.

python examples/embedding_tables_in_your_model.py

Both models start from the same numbers and see the same batches: the losses agree, the times do not.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import stoker

SIZES = [200_000, 50_000, 1_000, 300, 20]
DIM, BATCH, STEPS, LR = 16, 4096, 50, 0.05


class Before(nn.Module):
    """One EmbeddingBag per table, and an optimizer for sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, DIM, mode="sum", sparse=True) for n in SIZES)
        self.head = nn.Linear(len(SIZES) * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        pooled = [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)]
        return self.head(torch.cat(pooled, dim=1)).squeeze(1)


class After(nn.Module):
    """All tables in one module that updates its own rows during backward."""

    def __init__(self) -> None:
        super().__init__()
        tables = [stoker.TableConfig(name=f"t{i}", num_embeddings=n, embedding_dim=DIM) for i, n in enumerate(SIZES)]
        self.tables = stoker.EmbeddingTables(tables, optimizer=stoker.SGD(lr=LR))
        self.head = nn.Linear(len(SIZES) * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tables(ids).flatten(1)).squeeze(1)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[list[float], float]:
    generator = torch.Generator().manual_seed(0)
    losses, seconds = [], 0.0
    for step in range(STEPS):
        ids = torch.stack([(n * torch.rand(BATCH, generator=generator) ** 3).long() for n in SIZES], dim=1)
        labels = (ids.sum(1) % 2).float()
        start = time.perf_counter()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds += (time.perf_counter() - start) * (step >= 10)  # the first steps compile kernels
        losses.append(loss.item())
    return losses, seconds / (STEPS - 10)


torch.manual_seed(0)
before, after = Before(), After()
after.load_state_dict(
    {**after.state_dict(), **{f"tables.t{i}.weight": t.weight.data for i, t in enumerate(before.tables)}}
)
after.head.load_state_dict(before.head.state_dict())
ours, fast = train(after, [torch.optim.SGD(after.head.parameters(), lr=LR)])
theirs, slow = train(before, [torch.optim.SGD(before.parameters(), lr=LR)])
print("largest difference of the losses:", max(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
print(f"nn.EmbeddingBag {slow * 1000:.1f} ms a step, EmbeddingTables {fast * 1000:.1f} ms")
