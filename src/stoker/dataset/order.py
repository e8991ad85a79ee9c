"""The order of an epoch as a formula: which row is at which position, without an array of all rows.

Keyed bijections map positions to rows, so any slice of any epoch can be computed alone: resuming needs no replay, and
no memory grows with the split. Two levels keep disk reads long and memory bounded:

* **blocks** of consecutive rows are permuted over the whole split and distributed to **pools** that fit the memory
  budget; a split that fits is one pool, and then the permutation is over all rows;
* rows are permuted within their pool.

The bijection is an unbalanced Feistel network on the smallest power of two that holds the range; a value out of the
range is encrypted again until it is inside (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002, sections
4-5). Short ranges are sorted by hash instead, which is exactly uniform. All arithmetic is on integers: the order is the
same on every machine and with every NumPy.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from copy import copy

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError
from stoker.base.units import format_size

Int64 = npt.NDArray[np.int64]

BLOCK_ROWS = 1024  # rows read together from disk: 160 KiB of Criteo
_CHUNK = 2**15  # positions of a chunk
_SORTED = 2**14  # ranges up to here are permuted by sorting hashes
_ROUNDS = 8
_COMPILED = 2**18  # longer ranges are worth half a second of compiling; NumPy takes 33 ns a row
Words = npt.NDArray[np.uint32]


def mix32(values: Words, key: np.uint32) -> Words:
    """Return a 32-bit hash of each value: the "lowbias32" multipliers of C. Wellons' hash-prospector."""
    mixed = values ^ key
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x7FEB352D)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def permutation(name: str, size: int, *, fast: bool | None = None) -> Callable[[int, int], Int64]:
    """Return a permutation of ``range(size)`` drawn by ``name``; call it with (start, stop) for a slice of it.

    Args:
        name: draws another permutation for each text, such as ``"seed/epoch"``.
        size: up to 2**62.
        fast: True: in Numba if it is installed; False: in NumPy, which defines the result; None: in Numba if the range
            is long enough to be worth compiling.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=4 * _ROUNDS).digest()
    keys = [np.uint32(key) for key in np.frombuffer(digest, "<u4")]
    if size <= _SORTED:
        index = np.arange(size, dtype=np.uint32)
        high, low = (mix32(mix32(index, first), second) for first, second in (keys[:2], keys[2:4]))
        hashes = (high.astype(np.uint64) << np.uint64(32)) | low
        table = np.argsort(hashes, kind="stable").astype(np.int64)
        return lambda start, stop: table[start:stop]

    bits = (size - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint32((1 << width) - 1) for width in (bits // 2, bits - bits // 2))
    limit = np.uint64(size)

    def encrypt(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        low = values.astype(np.uint32) & low_mask
        high = (values >> low_bits).astype(np.uint32)
        for number, key in enumerate(keys):
            if number % 2:
                high ^= mix32(low, key) & high_mask
            else:
                low ^= mix32(high, key) & low_mask
        return (high.astype(np.uint64) << low_bits) | low

    if fast is None:
        fast = size > _COMPILED
    if fast:
        try:
            from stoker.dataset.kernels import encrypt as kernel
        except ImportError:
            pass
        else:
            words = np.array(keys, np.uint32)

            def compiled(start: int, stop: int) -> Int64:
                out = np.empty(max(0, stop - start), np.int64)
                kernel(np.uint64(start), words, low_bits, low_mask, high_mask, limit, out)
                return out

            return compiled

    def stretch(start: int, stop: int) -> Int64:
        values = encrypt(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(values >= limit)
        while len(outside):
            values[outside] = encrypt(values[outside])
            outside = outside[values[outside] >= limit]
        return values.view(np.int64)

    return stretch


class EpochOrder:
    """Rows of one epoch by position.

    Args:
        rows: rows of the split.
        pool_rows: rows shuffled together, at least 1; ``rows`` or more gives a permutation of all rows.
        seed: None keeps the order of the file (pools are then slices of it).
        epoch: counted from 0.

    Raises:
        ConfigError: ``pool_rows`` under 1.
    """

    def __init__(self, rows: int, *, pool_rows: int, seed: int | None, epoch: int) -> None:
        if pool_rows < 1:
            raise ConfigError("the shuffle memory holds not even one row. Raise shuffle_memory.")
        self.rows = rows
        self.seed, self._name = seed, f"{seed}/{epoch}"
        # A sixteenth of the pool at most, so that even a small pool mixes rows from many places.
        self.block_rows = max(1, min(BLOCK_ROWS, pool_rows // 16))
        blocks = -(-rows // self.block_rows)
        self._whole = whole = pool_rows >= rows
        self._blocks_per_pool = max(1, blocks if whole else pool_rows // self.block_rows)
        if seed is None or whole:
            self._blocks = np.arange(blocks, dtype=np.int64)
        else:
            self._blocks = permutation(f"{self._name}/blocks", blocks)(0, blocks)
        self.pools = -(-blocks // self._blocks_per_pool)
        # The last block of the split may be short. Then its pool is short, and it must be the last block there, so that
        # a division finds the block of a position within the pool.
        sizes = np.full(self.pools, self._blocks_per_pool * self.block_rows, np.int64)
        if blocks:
            sizes[-1] = (blocks - (self.pools - 1) * self._blocks_per_pool) * self.block_rows
            place = int(np.flatnonzero(self._blocks == blocks - 1)[0])
            pool = place // self._blocks_per_pool
            last = min((pool + 1) * self._blocks_per_pool, blocks) - 1
            self._blocks[[place, last]] = self._blocks[[last, place]]
            sizes[pool] -= blocks * self.block_rows - rows
        self.pool_starts = np.concatenate(([0], np.cumsum(sizes)))  # [pools + 1] positions
        self._starts: list[int] = self.pool_starts.tolist()
        self._pool, self._begin = -1, 0  # of the chunk in memory: its pool and first position
        self._table = np.empty(0, np.int64)

    def pool_of(self, position: int) -> int:
        """Return the pool that a position belongs to."""
        return bisect_right(self._starts, position) - 1

    def blocks_of(self, pool: int) -> Int64:
        """Return the blocks of one pool; block b has the rows from ``b * block_rows`` on."""
        return self._blocks[pool * self._blocks_per_pool : (pool + 1) * self._blocks_per_pool]

    def take(self, start: int, stop: int) -> Int64:
        """Return the rows at positions [start, stop)."""
        if self.seed is None:
            return np.arange(start, stop, dtype=np.int64)
        parts = []
        while start < stop:
            if not self._begin <= start < self._begin + len(self._table):
                self._load(start)
            until = min(stop, self._begin + len(self._table))
            parts.append(self._table[start - self._begin : until - self._begin])
            start = until
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int64)])

    def _load(self, position: int) -> None:
        """Compute the rows of the chunk that a position belongs to."""
        pool = self.pool_of(position)
        first, end = int(self.pool_starts[pool]), int(self.pool_starts[pool + 1])
        if pool != self._pool:
            self._within, self._pool = permutation(f"{self._name}/{pool}", end - first), pool
        chunk = (position - first) // _CHUNK * _CHUNK
        self._begin = first + chunk
        self._table = self._within(chunk, min(chunk + _CHUNK, end - first))
        if not self._whole:  # else blocks are in order
            block, row = np.divmod(self._table, self.block_rows)
            self._table = self.blocks_of(pool)[block] * self.block_rows + row


class GroupOrder:
    """Rows of one epoch in batches of whole groups: groups are permuted, and their rows follow one another.

    Batch i has the groups that begin in slice i of the epoch's rows, all slices being equally long. So every epoch has
    the same number of batches, none is empty, and none has more than ``batch_size`` rows. It takes 16 bytes a row.

    Args:
        groups: [rows] numbers of at least 0.
        batch_size: most rows of a batch.

    Raises:
        ConfigError: the largest group is too large for ``batch_size``.
    """

    pools = 1

    def __init__(self, groups: npt.NDArray[np.int32], batch_size: int) -> None:
        self._rows = np.argsort(groups, kind="stable")
        _, self._sizes = np.unique(groups, return_counts=True)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._cuts = np.empty(0, np.int64)  # [batches + 1] first group of each batch, in the order of an epoch
        rows, largest = len(groups), int(self._sizes.max(initial=1))
        self.count = -(-rows // max(1, batch_size - largest + 1))
        if largest > batch_size or (self.count > 1 and largest > rows // self.count):
            raise ConfigError(
                f"the largest group has {largest:,} rows, too many for batches of whole groups of at most "
                f"{batch_size:,} rows. Give a batch_size of {4 * largest:,}.", settings=("batch_size",),
            )  # fmt: skip

    def shuffle(self, seed: int | None, epoch: int) -> GroupOrder:
        """Return the order of an epoch; with seed None that of the groups' numbers."""
        order, groups = copy(self), len(self._sizes)
        chosen = np.arange(groups) if seed is None else permutation(f"{seed}/{epoch}/groups", groups)(0, groups)
        order._starts, order._sizes = self._starts[chosen], self._sizes[chosen]
        begins = np.cumsum(order._sizes) - order._sizes
        cuts = np.arange(self.count + 1) * len(self._rows) // max(1, self.count)
        order._cuts = np.searchsorted(begins, cuts)
        return order

    def pool_of(self, position: int) -> int:
        """Return 0: all rows are one pool."""
        return 0

    def batch(self, index: int) -> tuple[Int64, Int64]:
        """Return the rows of a batch and their groups, numbered from 0."""
        mine = slice(self._cuts[index], self._cuts[index + 1])
        starts, sizes = self._starts[mine], self._sizes[mine]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(len(numbers)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self._rows[np.repeat(starts, sizes) + within], numbers


def rows_that_fit(memory: int, bytes_per_row: float) -> int:
    """Return the number of rows in a pool of ``memory`` bytes.

    Raises:
        ConfigError: not even one row fits.
    """
    rows = int(memory // max(bytes_per_row, 1.0))
    if rows < 1:
        raise ConfigError(
            f"shuffle_memory {format_size(memory)} holds not even one row of {bytes_per_row:,.0f} bytes. "
            "Raise it; 256MiB is plenty."
        )
    return rows
