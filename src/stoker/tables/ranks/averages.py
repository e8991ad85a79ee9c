"""Copies of all rows, one on each rank, which are averaged every few steps (cDLRM, section 6.1).

Between two averages a rank steps its own copy by the gradients of its own examples, as if they were the whole batch. So
the rows depend on the number of ranks: this is another model than that of one process. The mean of a row is its sum
over ranks, by the tree, divided by their number; state of the row optimizer is averaged like weights.

Legend: R ranks, N rows, n of them touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.ops.tree import Node
from stoker.tables.changes import mark_lookups
from stoker.tables.group import TableGroup
from stoker.tables.lookups import Lookups
from stoker.tables.ranks.transport import Ranks

_CHUNK = 2**18  # rows averaged at a time


class Averages:
    """What the copies of some groups touched since the last average."""

    def __init__(self, ranks: Ranks, groups: Sequence[TableGroup]) -> None:
        self.ranks, self.pending = ranks, False  # whether copies may differ
        self._touched = [(each, torch.zeros(each.space.num_rows, dtype=torch.uint8, device="cpu")) for each in groups]

    def note(self, group: TableGroup, lookups: Lookups) -> None:
        """Note that rows of a group step."""
        self.pending = self.ranks.size > 1
        for known, touched in self._touched:
            if known is group:
                mark_lookups(touched, *lookups)

    def average(self, said: Sequence[int]) -> None:
        """Replace each row that some rank touched by its mean over ranks, which all ``said`` the same of their steps.

        All ranks call this, also those whose copies nothing touched.

        Raises:
            RanksError: the ranks have done different numbers of steps, or differ in settings.
        """
        for group, touched in self._touched:
            found = self.ranks.gather("average rows", touched.nonzero().view(-1), said)
            for rows in torch.unique(torch.cat(found)).split(_CHUNK):
                if len(rows):
                    group.replace(rows, group.storage.gather(rows.numpy()).map(self._mean))
            touched.zero_()
        self.pending = False

    def _mean(self, own: Tensor) -> Tensor:
        total = self.ranks.add({Node(self.ranks.rank, 1): own.float().reshape(-1)}, 1)
        return total.div_(self.ranks.size).view_as(own).to(own.dtype)
