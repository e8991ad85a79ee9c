"""Score rows so that a score does not depend on the other rows of its batch.

A library of matrix products may add in another order for another number of rows. So the dense part always sees blocks
of one size, the last one filled up, and each block runs on one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.dataset.batch import Batch
from stoker.models import RecModel
from stoker.ops.running import Known, recorded
from stoker.tables.shards import one_thread
from stoker.training.ranks.sharded import each_on_one_thread, own_threads

TILE = 256  # examples; smaller ones cost up to twice the time, larger ones a single request
GPU_TILE = 8192
_ALIGNED = 64  # bytes: products may differ for other addresses


def tiled_scores(model: RecModel, batch: Batch) -> Tensor:
    """Return probabilities [B] float32, as ``model.predict`` does, within rounding of it.

    Rows that are divided among ranks, and inputs without one entry per example, are scored as one block.
    """
    batch = batch.to(model.device)
    count = len(batch)
    if not count:
        return torch.empty(0)
    if model.embeddings.divided:
        return model.predict(batch)
    on_cpu = model.device.type == "cpu"
    if not on_cpu:
        return _scores(model, batch, on_cpu)
    with own_threads() if count > TILE else one_thread():  # waking another thread takes longer than a lookup
        return _scores(model, batch, on_cpu)


def _scores(model: RecModel, batch: Batch, on_cpu: bool) -> Tensor:
    count = len(batch)
    with torch.no_grad():
        inputs = model.inputs(batch)
        if any(each.shape[0] != count for each in inputs):
            return model.predict(batch)
        size = TILE if on_cpu else GPU_TILE
        out = torch.empty(-(-count // size) * size, device=model.device)

    known: Known = {}

    def work(start: int) -> None:
        with torch.no_grad(), recorded(known):  # weights are brought into their layout once
            logits = model._logits(model.dense_part, tuple(_tile(x, start, size) for x in inputs))
            out[start : start + size] = torch.sigmoid(logits)

    if on_cpu:
        each_on_one_thread(work, range(0, count, size))
    else:
        for start in range(0, count, size):
            work(start)
    return out[:count]


def _tile(values: Tensor, start: int, size: int) -> Tensor:
    """Return ``size`` entries from ``start`` on, zeros after the last one."""
    part = values[start : start + size]
    if len(part) < size:
        filled = values.new_zeros((size, *values.shape[1:]))
        filled[: len(part)] = part
        return filled
    return (
        part
        if part.data_ptr() % _ALIGNED == 0 and part.is_contiguous()
        else part.clone(memory_format=torch.contiguous_format)
    )
