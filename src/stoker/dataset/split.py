"""One split of a dataset, by batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker.dataset.integrity import ShardChecks, check_ids
from stoker.dataset.reading.reader import BatchStream
from stoker.dataset.rows import SplitRows

__all__ = ["Split"]


class Split(SplitRows):
    """The rows of one split, and batches of them. ``len(split)`` is their number."""

    def batches(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        shuffle_memory: str | int = "1GiB",
        rank: int = 0,
        world_size: int = 1,
        limit: int | None = None,
        prefetch: int = 0,
        reuse: bool = False,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        data_memory: str | int | None = None,
    ) -> BatchStream:
        """A stream of batches; iterate it once per epoch.

        Args:
            batch_size: rows per batch and rank. The last batch of an epoch may be smaller.
            seed: shuffles every epoch anew, the same way for the same seed; None keeps the order of the file.
            drop_last: leave out the rows that do not fill a batch on every rank.
            shuffle_memory: bytes of rows shuffled together and kept resident. A split that fits is permuted
                as a whole; a larger one in pools of blocks from all over it. It is part of what defines the
                order.
            rank: this process among ``world_size``; every row goes to exactly one rank, and every rank gets
                the same number of batches. The rows left at the end are dealt evenly, in smaller batches.
            world_size: number of ranks.
            limit: use only the first ``limit`` rows of the split.
            prefetch: batches made ahead by a thread; 0 makes them when asked for.
            reuse: recycle the tensors. A batch is then valid until the next one is asked for, no longer.
            pin_memory: page-locked tensors, for asynchronous copies to a GPU.
            device: hand out batches on this device; on a GPU through page-locked memory, one batch ahead.
            data_memory: bytes of that device (None: of main memory) for a copy of the rows. Where they fit, the copy is
                made before the first batch, and batches, equal to the bit, are gathered from it; rows that do not fit,
                and None, stay in their files.

        Raises:
            ConfigError: settings that leave no batch, or contradict each other.
        """
        return BatchStream(
            self,
            batch_size,
            seed=seed,
            drop_last=drop_last,
            shuffle_memory=shuffle_memory,
            rank=rank,
            world_size=world_size,
            limit=limit,
            prefetch=prefetch,
            reuse=reuse,
            pin_memory=pin_memory,
            device=device,
            data_memory=data_memory,
        )

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every shard against the manifest's checksum and every id against its table, once per process.

        Reading does so too, when a shard is first needed; here the wait can be shown.

        Args:
            progress: called with the bytes checked and the bytes in all, from any thread.

        Raises:
            DataError: a shard is damaged or holds an id outside its table.
        """
        ShardChecks(self).before(0, self.rows, progress)

    def check_ids(self) -> None:
        """Check every id of the split against its table.

        Raises:
            DataError: naming the first shard, row, feature and id outside its table.
        """
        for shard in self.shards:
            check_ids(shard, self.schema)
