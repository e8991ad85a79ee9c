"""What kernels are given beside rows: the lookups of a batch, and the keys of random bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.ops import reference
from stoker.ops.space import AddressSpace


@dataclass(frozen=True, slots=True)
class Bags:
    """The lookups of one batch in one group."""

    ids: Tensor  # [B, F] (one id a bag) or flat [L], int32 or int64, local to each feature's table
    offsets: Tensor | None = None  # [B * F + 1] int64, or None
    weights: Tensor | None = None  # [L] float32 per-sample weights, or None
    mean: bool = False  # mean pooling instead of sum

    def batch_size(self, num_features: int) -> int:
        """B."""
        return self.ids.shape[0] if self.offsets is None else (len(self.offsets) - 1) // num_features

    def cpu(self) -> Bags:
        """The same where plans are made."""
        if self.ids.device.type == "cpu":
            return self
        offsets, weights = (None if part is None else part.cpu() for part in (self.offsets, self.weights))
        return Bags(self.ids.cpu(), offsets, weights, self.mean)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Keys of the random bits for bfloat16 rows at one update: one per table, so that grouping does not matter."""

    keys: tuple[int, ...]  # [T] signed 64-bit
    tables: Tensor | None = None  # [C] int64, table of the row in each slot; None where addresses are rows
    rows: Tensor | None = None  # [C] int64, that row's number within its table

    def bits(self, distinct: Tensor, dim: int, space: AddressSpace) -> Tensor:
        """The random bits [U, D] int64 of the rows at ``distinct`` [U]."""
        if self.tables is not None and self.rows is not None:
            table, local = self.tables[distinct], self.rows[distinct]
        else:
            first = torch.from_numpy(space.first_row).to(distinct.device)
            table = torch.searchsorted(first, distinct, right=True) - 1
            local = distinct - first[table]
        keys = torch.tensor(self.keys, dtype=torch.int64, device=distinct.device)[table]
        counter = local.unsqueeze(1) * dim + torch.arange(dim, device=distinct.device)
        return reference.counter_bits(keys.unsqueeze(1), counter)
