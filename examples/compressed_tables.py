"""A model whose one large table does not fit, compressed by changing one line.

python examples/compressed_tables.py

Two million items of 32 columns are 244 MiB, twice as much with Adagrad's sums. As a tensor train of rank 16
they are well under a megabyte, trained by an ordinary torch optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import stoker

ITEMS, DIM, BATCH, STEPS = 2_000_000, 32, 1024, 150


class Recommender(nn.Module):
    """Scores a history of items."""

    def __init__(self) -> None:
        super().__init__()
        # was: self.items = nn.EmbeddingBag(ITEMS, DIM, mode="mean")
        self.items = stoker.TTEmbeddingBag(ITEMS, DIM, mode="mean", rank=16, std=0.1)
        self.top = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        scores: Tensor = self.top(self.items(ids, offsets)).squeeze(1)
        return scores


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Histories of 1 to 8 items, few of them popular; a click where most come from the first half of the shelves."""
    lengths = torch.randint(1, 9, (BATCH,), generator=generator)
    ids = (torch.rand(int(lengths.sum()), generator=generator).pow(4) * ITEMS).long()
    bag = torch.repeat_interleave(torch.arange(BATCH), lengths)
    share = torch.zeros(BATCH).index_add(0, bag, (ids % 100 < 50).float()) / lengths
    return ids, lengths.cumsum(0) - lengths, (share > 0.5).float()


torch.manual_seed(0)
model, generator = Recommender(), torch.Generator().manual_seed(1)
print(model.items)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for _ in range(STEPS):
    ids, offsets, labels = batch(generator)
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids, offsets), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
size = sum(core.numel() for core in model.items.cores) / 2**18
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {size:.2f} MiB of cores for {ITEMS * DIM / 2**18:.0f} MiB of rows")
assert losses[-1] < losses[0]

waves = torch.sin(torch.arange(20_000).unsqueeze(1) * torch.tensor([0.3, 0.01, 0.0007]))
whole = waves @ torch.randn(3, DIM)  # rows that change regularly with their number compress well
compressed = stoker.TTEmbeddingBag.from_dense(whole, rank=64)
print(f"a regular table, compressed from dense rows: relative error {compressed.import_error:.3f}")
