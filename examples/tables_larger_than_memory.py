"""Your own torch model over tables larger than the memory you give them.

python examples/tables_larger_than_memory.py

Ten million users and a million items of 32 columns, 1.3 GiB with optimizer state; 24 MiB of them in fast memory, the
rest in a file that grows as rows are first trained. The small copy at the end shows that the numbers do not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import stoker

DIM, BATCH = 32, 1024


class TwoTowers(nn.Module):
    """Users and items; the tables train themselves in backward, the towers by any torch optimizer."""

    def __init__(self, users: int, items: int, placement: stoker.Strategy | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = stoker.EmbeddingTables(
            [
                stoker.TableConfig(name="user", num_embeddings=users, embedding_dim=DIM),
                stoker.TableConfig(name="item", num_embeddings=items, embedding_dim=DIM),
            ],
            optimizer=stoker.RowWiseAdagrad(lr=0.1),
            placement=placement,
        )
        self.user, self.item = (nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        user, item = self.embeddings(ids).unbind(1)  # [B, 2, D]
        return (self.user(user) * self.item(item)).sum(1)


def batches(users: int, items: int, steps: int) -> Iterator[stoker.Batch]:
    """Few users and items are popular, as everywhere; a user likes the items of the same parity."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        rare = torch.rand(BATCH, 2, generator=generator).pow(8)
        ids = (rare * torch.tensor([users, items])).long()
        labels = (ids.sum(1) % 2 == 0).float()
        yield stoker.Batch(dense=torch.empty(BATCH, 0), ids=ids, labels=labels, step=step)


def train(users: int, items: int, steps: int, placement: stoker.Strategy | None) -> tuple[TwoTowers, list[float]]:
    model, losses = TwoTowers(users, items, placement), []
    optimizer = torch.optim.Adam([*model.user.parameters(), *model.item.parameters()], lr=1e-3)
    for batch in stoker.stage(batches(users, items, steps), model.embeddings, lookahead=16):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


model, losses = train(10_000_000, 1_000_000, 100, stoker.Cached(memory="24MiB", home="file"))
storage = model.embeddings.groups[0].storage
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {storage.num_slots:,} of {storage.num_rows:,} rows in fast memory")
print(
    f"{storage.stats.hit_rate:.0%} of the rows of a batch were there already; the others came from {storage.home.path}"
)
model.embeddings.close()

_, placed = train(5_000, 700, 30, stoker.Cached(fraction=0.5))
_, resident = train(5_000, 700, 30, None)
print("placed and resident losses are equal to the bit:", placed == resident)
assert placed == resident
