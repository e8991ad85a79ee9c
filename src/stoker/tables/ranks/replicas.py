"""Replicas: ranks that have the same rows, for loops in which the loss of a rank is the mean over its examples.

A hot row needs no master copy (FAE, section 4.3, where hot rows are replicated on every GPU).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from stoker.ops.tree import Node
from stoker.tables.ranks.transport import Ranks


class Replicas(Ranks):
    """The ranks of a process group, for tables (:meth:`stoker.EmbeddingTables.replicate`) and the dense part.

    Each rank takes its share of the data, ``data.train.batches(..., rank=replicas.rank, world_size=replicas.size)``,
    and the mean of its own examples as loss. Shares may differ in size, unless the tables have logical ``shards``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> stoker.Replicas()
    Replicas(rank 0 of 1)
    >>> torch.distributed.destroy_process_group()

    Args:
        group: as for :class:`stoker.distributed.Ranks`.
        timeout: as there.

    Raises:
        ConfigError: ``torch.distributed`` was not initialised.
    """

    means = True

    def average(self, parameters: Iterable[nn.Parameter], examples: int) -> None:
        """Replace the gradients of dense ``parameters`` by those of the mean over all ranks' examples.

        Sums run by a tree over ranks, so the dense parts stay equal to the bit.

        Args:
            parameters: with gradients.
            examples: B, of this rank.
        """
        total = sum(each[0] for each in self.numbers("average gradients", [examples]))
        trained = [each for each in parameters if each.grad is not None]
        for dtype in dict.fromkeys(each.dtype for each in trained):
            some = [each for each in trained if each.dtype == dtype]
            grads = [each.grad for each in some if each.grad is not None]
            share = torch.cat([grad.reshape(-1) for grad in grads]) * (examples / max(1, total))
            whole = self.add({Node(self.rank, 1): share}, 1)
            for parameter, grad, found in zip(some, grads, whole.split([each.numel() for each in grads]), strict=True):
                parameter.grad = found.view_as(grad)
