"""The fastest way to gather batches that this machine has."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.dataset.reading.gather import Gather, NumbaGather, NumpyGather
from stoker.dataset.reading.packed import TENSORS, PackedShard
from stoker.dataset.shards import Shard

__all__ = ["make_gather"]


def make_gather(shards: Sequence[Shard], starts: list[int], *, ids_only: bool = False, threads: int = 1) -> Gather:
    """The fastest form that this machine can run; ``ids_only``: without dense columns and labels."""
    try:
        import stoker.dataset.reading.gather_cpu  # noqa: F401
        from stoker.dataset.reading.gather_packed import PackedGather
    except ImportError:
        return NumpyGather(shards, starts, ids_only=ids_only)
    packed = [shard for shard in shards if isinstance(shard, PackedShard)]
    if packed:  # then all are
        records, names = [shard.records for shard in packed], ("ids",) if ids_only else TENSORS
        return PackedGather(packed[0].packing, records, starts, names=names, threads=threads)
    return NumbaGather(shards, starts, ids_only=ids_only, threads=threads)
