"""One batch of examples, as the model sees it.

Legend: B examples, F features (categorical and sequence columns in schema order), L ids in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples in the layout that :class:`stoker.EmbeddingTables` and every model take.

    Ids are rows of each feature's own table (not global addresses). Bags are sample-major: bag ``b * F + f``
    holds the ids of feature ``f`` in example ``b``.
    """

    dense: Tensor  # [B, num_dense] float32
    ids: Tensor  # [B, F] int32/int64 where every bag has exactly one id, else flat [L]
    offsets: Tensor | None = None  # None, or [B * F + 1] int64: bag i is ids[offsets[i]:offsets[i + 1]]
    weights: Tensor | None = None  # None, or [L] float32 per-sample weights (sum pooling only)
    labels: Tensor | None = None  # [B] float32 in {0, 1}; None when predicting
    step: int = 0  # position in the stream, counted from 0 over all epochs

    def __len__(self) -> int:
        return self.dense.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``; itself where it is there already."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name in ("dense", "ids", "offsets", "weights", "labels")
            if (value := getattr(self, name)) is not None
        }
        if all(value is getattr(self, name) for name, value in moved.items()):
            return self
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, so that copies to a GPU can overlap with work."""
        pinned = {
            name: value.pin_memory()
            for name in ("dense", "ids", "offsets", "weights", "labels")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **pinned)
