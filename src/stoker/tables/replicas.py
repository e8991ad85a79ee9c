"""Replicas: several processes hold the same rows and train as one process would on their batches together.

Every rank looks up and backpropagates its own share of a batch. Before rows are updated, the ranks exchange ids and
gradients, and each updates the rows of the whole batch: sums run over the same occurrences in the same order as in a
single process. So replicas cannot drift apart, and a hot row needs no master copy (FAE, section 4.3, where hot rows are
replicated on every GPU).

Legend: W ranks, B examples of a rank, F features, D columns, L ids of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.ops import Bags
from stoker.tables.lookups import offsets_of


class Replicas:
    """The ranks of a process group, for tables (:meth:`stoker.EmbeddingTables.replicate`) and the dense part.

    Each rank takes its share of the data, ``data.train.batches(..., rank=replicas.rank, world_size=replicas.size)``,
    and the mean of its own examples as loss; shares may differ in size.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> stoker.Replicas()
    Replicas(rank 0 of 1)
    >>> torch.distributed.destroy_process_group()

    Args:
        group: of ``torch.distributed``; None means all processes.

    Raises:
        ConfigError: ``torch.distributed`` was not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "replicas need torch.distributed. Call torch.distributed.init_process_group('gloo') first ('nccl' on "
                "GPUs), and start the processes with torchrun."
            )
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def __repr__(self) -> str:
        return f"Replicas(rank {self.rank} of {self.size})"

    def joint(self, bags: Bags, grad: Tensor) -> tuple[Bags, Tensor]:
        """Return the lookups of all ranks and their gradient [sum of B, P, D] for the mean over all examples."""
        own = [len(grad), bags.ids.numel(), bags.offsets is not None, bags.weights is not None]
        own.append(bags.ids.dtype == torch.int64)
        counts = torch.stack(self._gather_equal(torch.tensor(own, dtype=torch.int64, device=grad.device)))
        examples: list[int] = counts[:, 0].tolist()
        lookups: list[int] = counts[:, 1].tolist()
        # If some ranks leave offsets or weights out, all send them in full.
        jagged, weighted, wide = counts[:, 2:].any(0).tolist()
        ids = torch.cat(self._gather(bags.ids.reshape(-1).to(torch.int64 if wide else torch.int32), lookups))
        offsets = None
        if not jagged:
            ids = ids.view(sum(examples), -1)
        else:
            ends = self._gather(offsets_of(bags)[1:], [count * grad.shape[1] for count in examples])
            before, moved = 0, [ends[0].new_zeros(1)]
            for end, count in zip(ends, lookups, strict=True):
                moved.append(end + before)
                before += count
            offsets = torch.cat(moved)
        weights = None
        if weighted:
            factors = torch.ones(bags.ids.numel(), device=grad.device) if bags.weights is None else bags.weights
            weights = torch.cat(self._gather(factors.reshape(-1).float(), lookups))
        # The loss of a rank is a mean over its own examples; the joint loss is over all of them.
        share = grad * (len(grad) / sum(examples))
        return Bags(ids, offsets, weights, bags.mean), torch.cat(self._gather(share, examples))

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the maximum of each number over all ranks."""
        found = torch.stack(self._gather_equal(torch.tensor(numbers, device=self._device())))
        largest: list[int] = found.amax(0).tolist()
        return largest

    def average(self, parameters: Iterable[nn.Parameter], examples: int) -> None:
        """Replace the gradients of dense ``parameters`` by those of the mean over all ranks' examples.

        Sums run in the order of ranks on every rank, so the dense parts stay equal to the bit.

        Args:
            parameters: with gradients.
            examples: B, of this rank.
        """
        counts = [int(c) for c in self._gather_equal(torch.tensor(examples, device=self._device()))]
        for parameter in parameters:
            if parameter.grad is None:
                continue
            parts = self._gather_equal(parameter.grad * (examples / sum(counts)))
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parameter.grad = total

    def check_equal(self, name: str, value: Tensor) -> None:
        """Check that all ranks start with the same values.

        Raises:
            ConfigError: ``value`` is not the same on every rank.
        """
        bits = value.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        sums = self._gather_equal(torch.stack([bits.sum(), (bits * places).sum()]))
        different = [rank for rank, found in enumerate(sums) if not torch.equal(found, sums[0])]
        if different:
            raise ConfigError(
                f"{name} of rank {different[0]} is not that of rank 0: replicas must start alike. Give all of them the "
                "same seed, or load the same checkpoint into each."
            )

    def _device(self) -> torch.device:
        return torch.device("cuda") if dist.get_backend(self.group) == "nccl" else torch.device("cpu")

    def _gather_equal(self, value: Tensor) -> list[Tensor]:
        """Return ``value`` of every rank, all of one shape, on the device of ``value``."""
        # The group may not take tensors of this device: nccl takes none of the CPU, where cached rows are.
        carried = {pair.partition(":")[0] for pair in dist.get_backend_config(self.group).split(",")}
        through = value.device if value.device.type in carried else self._device()
        sent = value.contiguous().to(through)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self.group)
        return [each.to(value.device) for each in found]

    def _gather(self, value: Tensor, counts: list[int]) -> list[Tensor]:
        """Return ``value`` [n, ...] of every rank, where n is ``counts[rank]``."""
        padded = value.new_zeros((max(counts), *value.shape[1:]))
        padded[: len(value)] = value
        return [found[:count] for found, count in zip(self._gather_equal(padded), counts, strict=True)]
