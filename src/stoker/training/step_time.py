"""How long a training step takes: measured for the model, added up for its placement.

Legend: B examples, F features, L ids in all.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from stoker.data.batch import Batch
from stoker.data.dataset import Dataset
from stoker.data.features import FeatureSpec
from stoker.ops.reference import bag_lengths
from stoker.optim import Constant
from stoker.placement.placement import Placement, row_bytes
from stoker.tables import TableConfig
from stoker.training.config import TrainConfig

__all__ = ["StepTime", "measure_step"]

_ROWS = 128 * 2**20  # bytes of the rows that are made for it
_BATCHES = 8
_UNTIMED = 2
_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step with all rows on the device."""

    read: float  # to read the batch
    train: float  # forward, backward and both optimizers

    @property
    def resident(self) -> float:
        """The whole step."""
        return self.read + self.train

    def placed(self, placement: Placement) -> float:
        """The whole step under a placement.

        With a GPU, reading, planning and moving run beside training. On a CPU they want the same cores, and only
        waiting for the disk is hidden.
        """
        beside = self.read + placement.seconds
        if placement.workload.device.type == "cuda":
            return max(self.train, beside)
        return max(self.train + beside - placement.disk_seconds, beside)


def measure_step(config: TrainConfig, data: Dataset) -> StepTime:
    """Train a few steps on real batches, with tables cut down to 128 MiB; takes about 2 seconds.

    Ids beyond the end of a table that was cut down are taken modulo its rows.
    """
    optimizer = config.make_row_optimizer(Constant())
    spec = _cut(data.schema, _row_bytes(config))
    model = replace(config, device_memory=None).make_model(spec, optimizer)
    dense = config.make_dense_optimizer(model)
    if config.compile:
        model.compile_dense()
    stream = data.train.batches(config.batch_size, seed=config.seed, shuffle_memory=config.shuffle_memory)
    batches, reads = [], []
    begin = time.perf_counter()
    for batch in itertools.islice(stream, _UNTIMED + _BATCHES):
        batches.append(batch)
        reads.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    # Before the first batch shards are checked and kernels compiled, which happens once.
    read = float(np.median(reads[_UNTIMED:] or reads))
    limits = torch.tensor([spec.num_embeddings[feature.table] for feature in spec.features])
    batches = [_inside(batch, limits).to(model.device) for batch in batches]
    model.train()
    seconds: list[float] = []
    started = time.perf_counter()
    for number, batch in enumerate(itertools.cycle(batches)):
        begin = time.perf_counter()
        loss = model.loss(batch)
        loss.backward()
        dense.step()
        dense.zero_grad()
        loss.item()  # waits for the GPU
        if number >= _UNTIMED:
            seconds.append(time.perf_counter() - begin)
            if time.perf_counter() - started > _SECONDS:
                break
    # The quicker steps: what else the machine did meanwhile is no part of the model.
    return StepTime(read=read, train=float(np.quantile(seconds, 0.25)))


def _row_bytes(config: TrainConfig) -> int:
    """Bytes of a row with its state."""
    table = TableConfig(name="row", num_embeddings=1, embedding_dim=config.embedding_dim, dtype=config.dtype)
    return row_bytes(table, config.make_row_optimizer(Constant()).state)


def _cut(spec: FeatureSpec, size: int) -> FeatureSpec:
    """The same columns with the largest tables cut so that all take :data:`_ROWS` bytes."""
    rows = np.array(sorted(spec.num_embeddings.values()), np.float64)
    low, high = 1.0, float(rows.max(initial=1.0))
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(rows, middle).sum() * size <= _ROWS else (low, middle)
    most = int(high if np.minimum(rows, high).sum() * size <= _ROWS else low)
    return replace(spec, num_embeddings={name: min(count, most) for name, count in spec.num_embeddings.items()})


def _inside(batch: Batch, limits: torch.Tensor) -> Batch:
    if batch.offsets is None:
        return replace(batch, ids=(batch.ids % limits).to(batch.ids.dtype))
    per_id = torch.repeat_interleave(limits.repeat(len(batch)), bag_lengths(batch.offsets))
    return replace(batch, ids=(batch.ids % per_id).to(batch.ids.dtype))
