"""Raw ids get rows while a model trains: new items come, old ones are forgotten, and nobody made a vocabulary.

Run: python examples/dynamic_ids.py
"""

import numpy as np
import torch

import stoker

random = np.random.default_rng(0)
catalogue = random.integers(-(2**63), 2**63, 5_000)  # any 64-bit numbers, such as hashes of text


def clicks(day: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a day: (user, item) [256, 2], and whether the item was clicked [256]."""
    found = []
    for _ in range(40):
        users = random.integers(1, 300, 256)
        items = catalogue[day * 400 + (1_500 * random.random(256) ** 3).astype(int)]  # each day has newer ones
        likes = (users ^ (items & 255)) % 3 == 0
        found.append((torch.from_numpy(np.stack([users, items], 1)), torch.from_numpy(likes.astype(np.float32))))
    return found


tables = stoker.EmbeddingTables(
    [
        stoker.TableConfig(name="user", num_embeddings=400, embedding_dim=8),
        stoker.TableConfig(
            name="item", num_embeddings=1_000, embedding_dim=8,
            grow=stoker.Grow(admit=2, ttl=60, evict="lru"),  # a row at the second click, until 60 steps without one
        ),
    ],
    optimizer=stoker.RowWiseAdagrad(lr=0.1),
    placement=stoker.Cached(fraction=0.5),  # or any other
)  # fmt: skip
head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
adam = torch.optim.Adam(head.parameters(), lr=0.01)

before: set[int] = set()
for day in range(5):
    for ids, labels in stoker.stage(clicks(day), tables, lookups=lambda batch: batch[0]):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(tables(ids)).squeeze(1), labels)
        loss.backward()
        adam.step()
        adam.zero_grad()
    known = {item for item in tables.raw_ids("item").tolist() if item}
    print(f"day {day}: loss {loss.item():.3f}, {len(known):,} items have a row, {len(before - known):,} lost theirs")
    before = known
