"""A slow link on a machine without a GPU, and training that keeps tables on the host's side of it.

Legend: B examples, F features, D columns.
"""

from __future__ import annotations

import itertools
import threading
import time

import torch
from torch import Tensor

from stoker.dataset.batch import Batch
from stoker.models import DLRM, RecModel
from stoker.ops.loss import binary_cross_entropy
from stoker.tables.links.transfer import QueuedLink, TransferStats, Writeback
from stoker.tables.slots.residency import Ints
from stoker.tables.storage import Rows
from stoker.tables.stores.home import Home

__all__ = ["Hybrid", "PacedLink", "Wire", "dense_flops", "like_a_gpu"]

#: What the simulated machine stands for: a V100 (15.7 TFLOP/s in float32), whose small layers reach about a third of
#: that, behind PCIe 3.0 x16.
GPU_FLOPS = 5e12
PCIE = 12e9


class Wire:
    """One direction of a link: so many bytes a second, one transfer after the other. Waiting takes no processor."""

    def __init__(self, rate: float) -> None:
        self.rate = rate  # bytes/s
        self.bytes = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def carry(self, count: int) -> None:
        """Return when so many bytes have gone through."""
        with self._lock:
            self.bytes += count
            self._free = end = max(self._free, time.perf_counter()) + count / self.rate
        time.sleep(max(0.0, end - time.perf_counter()))


class PacedLink(QueuedLink):
    """Rows travel at the rate of two wires, one each way; ids go with the rows that come."""

    def __init__(self, home: Home, slots: Rows, stats: TransferStats, *, incoming: Wire, outgoing: Wire) -> None:
        super().__init__(home, slots, stats)
        self.incoming, self.outgoing = incoming, outgoing

    def fetch(self, rows: Ints, slots: Ints) -> None:
        super().fetch(rows, slots)
        self.incoming.carry(len(rows) * self.home.row_bytes)

    def send(self, tensor: Tensor) -> Tensor:
        self.incoming.carry(tensor.nbytes)
        return super().send(tensor)

    def _land(self, job: Writeback) -> None:
        self.outgoing.carry(len(job.rows) * self.home.row_bytes)
        super()._land(job)


class Hybrid:
    """Tables on the host, the dense part on the device: pooled rows go down the wire, their gradients come back, and
    the host updates the rows (the CPU-GPU mode of DLRM that FAE, VLDB 2022, compares with).

    Args:
        model: all rows in host memory.
        dense: optimizer of the dense part.
        down, up: the wire to the device, and back.
    """

    def __init__(self, model: RecModel, dense: torch.optim.Optimizer, down: Wire, up: Wire) -> None:
        self.model, self.dense, self.down, self.up = model, dense, down, up
        self.seconds: list[float] = []  # of the device in each step: the dense part with its optimizer

    def step(self, batch: Batch) -> float:
        """Train on a batch; its loss."""
        model = self.model
        pooled = model.embeddings(batch.ids, batch.offsets, batch.weights)  # [B, F, D], gathered by the host
        self.down.carry(pooled.nbytes)
        there = pooled.detach().requires_grad_()
        start = time.perf_counter()
        assert batch.labels is not None
        loss = binary_cross_entropy(model.dense_part(batch.dense, there), batch.labels)
        loss.backward()
        self.dense.step()
        self.dense.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        assert there.grad is not None
        self.up.carry(there.grad.nbytes)
        pooled.backward(there.grad)  # the host updates the rows
        return loss.item()


def dense_flops(model: DLRM, examples: int) -> float:
    """Floating-point operations of a step of the dense part: forward, and twice as many backward."""
    fields, dim = len(model.spec.features) + 1, model.embedding_dim
    bottom = [len(model.spec.dense), *model.bottom_sizes]
    top = [dim + fields * (fields - 1) // 2, *model.top_sizes, 1]
    products = sum(a * b for layers in (bottom, top) for a, b in itertools.pairwise(layers))
    return 6.0 * examples * (products + fields * fields * dim)


def like_a_gpu(seconds: float, flops: float) -> float:
    """Bytes/s of a link that is as slow beside this machine's dense step as PCIe 3.0 x16 is beside a V100's.

    Args:
        seconds: that the dense part of a step takes here.
        flops: that it has.
    """
    return PCIE * (flops / GPU_FLOPS) / seconds
