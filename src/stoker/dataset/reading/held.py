"""The rows of a split held in memory: in main memory, or on the device that trains on them.

A batch is then one gather from memory that nothing else can push out, and on a GPU no row crosses the link again. The
order of an epoch is a formula (:mod:`stoker.dataset.reading.order`), so shuffling moves no row and needs no second
copy.

Legend: B rows of a batch, n rows held, F features, L ids in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.ordered import ordered_map
from stoker.dataset.reading.gather import Allocate, Gather, make_gather
from stoker.dataset.rows import SplitRows
from stoker.dataset.shards import Shard

__all__ = ["HeldTensors", "bytes_held", "empty_rows", "hold", "row_bytes"]

Int64 = npt.NDArray[np.int64]
_ALIGN = 32  # bytes; copied rows begin at multiples of it


def bytes_held(split: SplitRows, rows: int) -> int:
    """Bytes that a copy of the first ``rows`` rows of a split takes, about."""
    if split.shards and split.shards[0].lengths is None:
        return rows * row_bytes(*_columns(split.shards[0]))[1]
    return -(-split.bytes * rows // max(1, len(split)))


def _columns(shard: Shard) -> tuple[npt.NDArray[Any], ...]:
    """What a row has, the widest type first."""
    return shard.ids, shard.dense, shard.labels


def row_bytes(*arrays: npt.NDArray[Any]) -> tuple[list[int], int]:
    """Return the bytes of a row in each array [n, ...], and of all of it, rounded up to 32."""
    widths = [array.itemsize * prod(array.shape[1:]) for array in arrays]
    return widths, -(-sum(widths) // _ALIGN) * _ALIGN


def empty_rows(rows: int, *like: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Make arrays [rows, ...] of the types and widths of others, in which all values of a row are adjacent.

    Scattered rows then touch half as many cache lines. Give the widest type first.
    """
    widths, size = row_bytes(*like)
    records, at = np.empty((rows, size), np.uint8), 0
    made = []
    for array, width in zip(like, widths, strict=True):
        column = records[:, at : at + width].view(array.dtype)
        made.append(column if array.ndim == 2 else column[:, 0])
        at += width
    return made


def hold(split: SplitRows, rows: int, device: torch.device, *, threads: int = 1) -> Gather:
    """Copy the shards that have the first ``rows`` rows into the memory of a device; what gathers batches there."""
    count = next((place for place, start in enumerate(split.starts) if start >= rows), len(split.shards))
    shards, starts = split.shards[:count], split.starts[: count + 1]
    if device.type != "cpu":
        return HeldTensors(shards, device)
    return make_gather(list(ordered_map(_copied, shards, threads)), starts, threads=threads)


def _copied(shard: Shard) -> Shard:
    """The same shard in memory of its own; where every row has as many ids, all that a row has lies together."""
    found = shard.arrays
    if shard.lengths is None:
        for name, made in zip(("ids", "dense", "labels"), empty_rows(shard.rows, *_columns(shard)), strict=True):
            made[...] = found[name]
            found[name] = made
    else:
        found = {name: np.array(array) for name, array in found.items()}
    shard.release()
    return Shard(path=shard.path, rows=shard.rows, **found)


class HeldTensors:
    """Rows of shards as tensors on a device, and batches gathered there: a
    :class:`stoker.dataset.reading.gather.Gather`.

    Args:
        shards: whose rows follow each other.
        device: where they are copied, shard by shard.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        self._device = device
        self._dense, self._labels, self._ids = (
            self._joined([getattr(shard, name) for shard in shards]) for name in ("dense", "labels", "ids")
        )
        self._lengths: Tensor | None = None
        if shards[0].lengths is not None:
            self._lengths = self._joined([shard.lengths for shard in shards if shard.lengths is not None])
            counts = [np.diff(shard.row_offsets) for shard in shards if shard.row_offsets is not None]
            self._counts = np.concatenate(counts).astype(np.int32)  # [n] ids of each row; here, so that no batch waits
            ends = np.cumsum(self._counts, dtype=np.int64)
            self._starts = torch.from_numpy(ends - self._counts).to(device)  # [n] where each row's ids begin
        for shard in shards:
            shard.release()

    def _joined(self, parts: list[npt.NDArray[Any]]) -> Tensor:
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
