"""The rows of a split held in memory: in main memory, or on the device that trains on them.

A batch is then one gather from memory that nothing else can push out, and on a GPU no row crosses the link again. The
order of an epoch is a formula (:mod:`stoker.data.order`), so shuffling moves no row and needs no second copy.

Legend: B rows of a batch, n rows held, F features, L ids in all.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.data.gather import Allocate, Gather, make_gather
from stoker.data.ordered import ordered_map
from stoker.data.shards import MappedShard

if TYPE_CHECKING:
    from stoker.data.split import Split

__all__ = ["HeldTensors", "bytes_held", "hold"]

Int64 = npt.NDArray[np.int64]
_ALIGN = 32  # bytes; rows held together begin at multiples of it


def bytes_held(split: Split, rows: int) -> int:
    """Bytes that the first ``rows`` rows of a split take, about."""
    if split.shards and split.shards[0].lengths is None:
        return rows * _record(split.shards[0])[1]
    return -(-split.bytes * rows // max(1, len(split)))


def _record(shard: MappedShard) -> tuple[dict[str, int], int]:
    """Bytes of what a row has, the widest type first, and of all of it with its padding."""
    arrays = {name: getattr(shard, name) for name in ("ids", "dense", "labels")}
    widths = {name: array.itemsize * prod(array.shape[1:]) for name, array in arrays.items()}
    return widths, -(-sum(widths.values()) // _ALIGN) * _ALIGN


def hold(split: Split, rows: int, device: torch.device, *, threads: int = 1) -> Gather:
    """Copy the shards that have the first ``rows`` rows into the memory of a device; what gathers batches there."""
    count = next((place for place, start in enumerate(split.starts) if start >= rows), len(split.shards))
    shards, starts = split.shards[:count], split.starts[: count + 1]
    if device.type != "cpu":
        return HeldTensors(shards, device)
    return make_gather(list(ordered_map(_copied, shards, threads)), starts, threads=threads)


def _copied(shard: MappedShard) -> MappedShard:
    """The same shard in memory of its own. Where every row has as many ids, all that it has lies together: scattered
    rows then touch half as many cache lines."""
    if shard.lengths is None:
        widths, size = _record(shard)
        records = np.empty((shard.rows, size), np.uint8)
        made, place = {}, 0
        for name, width in widths.items():
            array = getattr(shard, name)
            column = records[:, place : place + width].view(array.dtype)
            made[name] = column if array.ndim == 2 else column[:, 0]
            made[name][...] = array
            place += width
        held = replace(shard, **made)
    else:
        held = replace(
            shard,
            dense=np.array(shard.dense),
            labels=np.array(shard.labels),
            ids=np.array(shard.ids),
            lengths=np.array(shard.lengths),
            row_offsets=None if shard.row_offsets is None else np.array(shard.row_offsets),
        )
    shard.release()
    return held


class HeldTensors:
    """Rows of shards as tensors on a device, and batches gathered there: a :class:`stoker.data.gather.Gather`.

    Args:
        shards: whose rows follow each other.
        device: where they are copied, shard by shard.
    """

    def __init__(self, shards: list[MappedShard], device: torch.device) -> None:
        self._device = device
        self._dense = self._joined([shard.dense for shard in shards])
        self._labels = self._joined([shard.labels for shard in shards])
        self._ids = self._joined([shard.ids for shard in shards])
        self._lengths: Tensor | None = None
        if shards[0].lengths is not None:
            self._lengths = self._joined([shard.lengths for shard in shards if shard.lengths is not None])
            counts = [np.diff(shard.row_offsets) for shard in shards if shard.row_offsets is not None]
            self._counts = np.concatenate(counts).astype(np.int32)  # [n] ids of each row; here, so that no batch waits
            ends = np.cumsum(self._counts, dtype=np.int64)
            self._starts = torch.from_numpy(ends - self._counts).to(device)  # [n] where each row's ids begin
        for shard in shards:
            shard.release()

    def _joined(self, parts: list[npt.NDArray[np.generic]]) -> Tensor:
        kind = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
        made = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=kind, device=self._device)
        at = 0
        for part in parts:
            made[at : at + len(part)].copy_(torch.from_numpy(np.array(part)))
            at += len(part)
        return made

    def __call__(self, rows: Int64, allocate: Allocate) -> dict[str, Tensor]:
        """The rows [B] as tensors on the device; ``allocate`` is not asked."""
        chosen = torch.from_numpy(rows)
        if self._device.type == "cuda":
            chosen = chosen.pin_memory().to(self._device, non_blocking=True)
        found = {"dense": self._dense.index_select(0, chosen), "labels": self._labels.index_select(0, chosen)}
        if self._lengths is None:
            return found | {"ids": self._ids.index_select(0, chosen)}
        lengths = self._lengths.index_select(0, chosen).to(torch.int64)  # [B, F]
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=self._device)
        torch.cumsum(lengths.reshape(-1), 0, out=offsets[1:])
        total = int(self._counts[rows].sum(dtype=np.int64))
        # What lies between a row's ids here and in the batch, repeated for each of its ids.
        shift = self._starts.index_select(0, chosen) - offsets[: -1 : lengths.shape[1]]
        places = torch.repeat_interleave(shift, lengths.sum(1), output_size=total)
        places += torch.arange(total, device=self._device)
        return found | {"ids": self._ids.index_select(0, places), "offsets": offsets}
