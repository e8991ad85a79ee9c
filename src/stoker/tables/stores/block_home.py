"""Rows in blocks of bytes, each with a number: what a new store of objects or pairs is made from.

Legend: n rows of one call, m blocks of a store.
"""

from __future__ import annotations

import threading
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from stoker.base.errors import HomeError
from stoker.ops.cpu.arena import flat
from stoker.tables.storage import Rows
from stoker.tables.stores.home import Home, Initial, tier_bytes

_AT_ONCE = 16 * 2**20  # bytes of blocks that one call loads or saves
_NEVER = -1  # the checksum of a block that was never saved


class BlockHome(Home):
    """Rows in blocks of about :attr:`block_bytes`; a subclass loads and saves their bytes.

    A block is saved as a whole. So a store of few of its rows loads it first, and belongs behind a RAM tier, which
    moves whole blocks; :attr:`cache_bytes` is the default size of such a tier. A checksum of each block
    remains in main memory: bytes that are not those saved last are an error, never rows.

    >>> import stoker, torch
    >>> class InDict(BlockHome):
    ...     kind, known = "dict", {}
    ...     def load(self, blocks):
    ...         return [self.known[block] for block in blocks]
    ...     def save(self, blocks):
    ...         self.known.update(blocks)
    >>> stoker.register_store("dict", InDict)
    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=4)
    >>> tables = stoker.EmbeddingTables(
    ...     [table], optimizer=stoker.Adagrad(lr=0.1), placement=stoker.Cached(slots=10, home="dict")
    ... )
    >>> tables(torch.tensor([[999]])).sum().backward()
    >>> tables.rows("t").shape
    torch.Size([1000, 4])
    """

    is_blocking = True
    block_bytes = 2**20
    cache_bytes = 64 * 2**20

    def __init__(self, initial: Initial, state: Mapping[str, str]) -> None:
        super().__init__(initial, state)
        self.block_rows = self.rows_of_block(self.num_rows, self.row_bytes)
        self._sums = np.full(-(-self.num_rows // self.block_rows), _NEVER)  # [m]
        self._tried: dict[int, int] = {}  # checksums of blocks whose save has not returned: it may have replaced them
        self._changing = threading.RLock()  # blocks are loaded, changed and saved: two stores may not do so to one

    @classmethod
    def rows_of_block(cls, num_rows: int, row_bytes: int) -> int:
        """Return the rows of a block of a store of N rows."""
        return max(1, min(num_rows, cls.block_bytes // row_bytes))

    @classmethod
    def least_cache(cls, num_rows: int, row_bytes: int) -> int:
        return tier_bytes(num_rows, row_bytes, cls.rows_of_block(num_rows, row_bytes))

    @abstractmethod
    def load(self, blocks: Sequence[int]) -> Sequence[bytes]:
        """Return the bytes of ``blocks``, all of which were saved. Several threads may call it."""

    @abstractmethod
    def save(self, blocks: Mapping[int, bytes]) -> None:
        """Keep the bytes of some blocks, by number; those that were there before are replaced whole."""

    def _fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None) -> None:
        places = np.arange(len(rows)) if places is None else places
        there = self._sums[rows // self.block_rows] != _NEVER
        self._compute(rows[~there], target, places[~there])
        rows, places = rows[there], places[there]
        values = self.empty(self.block_rows)
        for some in self._blocks(rows):
            for part, data in zip(some.values(), self._load(list(some)), strict=True):
                _fill(values, data)
                target[torch.from_numpy(places[part])] = values[torch.from_numpy(rows[part] % self.block_rows)]

    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        places = np.arange(len(rows)) if places is None else places
        values = self.empty(self.block_rows)
        with self._changing:
            for some in self._blocks(rows):
                sizes = {block: min(self.block_rows, self.num_rows - block * self.block_rows) for block in some}
                partial = [block for block, part in some.items() if len(part) < sizes[block]]
                loaded = [block for block in partial if self._sums[block] != _NEVER]
                old = dict(zip(loaded, self._load(loaded), strict=True)) if loaded else {}
                new = {}
                for block, part in some.items():
                    values.map(torch.Tensor.zero_)  # the last block may be short
                    if block in old:
                        _fill(values, old.pop(block))
                    elif block in partial:
                        inside = np.arange(sizes[block])
                        self._compute(block * self.block_rows + inside, values, inside)
                    values[torch.from_numpy(rows[part] % self.block_rows)] = source[torch.from_numpy(places[part])]
                    new[block] = b"".join(flat(tensor).view(np.uint8).data for tensor in values.tensors)
                self._save(new)
                self.stored.mark(rows[np.concatenate(list(some.values()))])

    def _blocks(self, rows: np.ndarray) -> Iterator[dict[int, np.ndarray]]:
        """Yield some blocks at a time, each with the indices of its rows in ``rows`` [n]."""
        order = np.argsort(rows, kind="stable")
        blocks, begins = np.unique(rows[order] // self.block_rows, return_index=True)
        ends = [*begins[1:].tolist(), len(rows)]
        step = max(1, _AT_ONCE // (self.block_rows * self.row_bytes))
        for first in range(0, len(blocks), step):
            some = slice(first, first + step)
            given = zip(blocks[some].tolist(), begins[some].tolist(), ends[some], strict=True)
            yield {block: order[begin:end] for block, begin, end in given}

    def _load(self, blocks: Sequence[int]) -> Sequence[bytes]:
        """Return the bytes of ``blocks`` as they were saved."""
        found = self.load(blocks)
        if not any(map(self._problem, blocks, found)):
            return found
        with self._changing:  # another thread may have saved them meanwhile, and now none does
            found = self.load(blocks)
            for block, data in zip(blocks, found, strict=True):
                if problem := self._problem(block, data):
                    raise HomeError(
                        f"{self!r}: block {block:,} has {problem}: something has changed it. Keep other programs away "
                        "from there; then resume from the last checkpoint."
                    )
        return found

    def _problem(self, block: int, data: bytes) -> str:
        """Say how ``data`` differs from what was saved; empty if it does not."""
        size = self.block_rows * self.row_bytes
        if len(data) != size:
            return f"{len(data):,} B and was saved with {size:,} B"
        known = zlib.crc32(data) in (self._sums[block], self._tried.get(block))
        return "" if known else "other bytes than were saved"

    def _save(self, new: Mapping[int, bytes]) -> None:
        """Save blocks, and their checksums."""
        sums = {block: zlib.crc32(data) for block, data in new.items()}
        self._tried.update(sums)
        self.save(new)
        self._sums[list(sums)] = list(sums.values())
        for block in sums:
            del self._tried[block]


def _fill(values: Rows, data: bytes) -> None:
    """Copy the bytes of a block into its rows: all weights, then each state."""
    begin = 0
    for tensor in values.tensors:
        flat(tensor).view(np.uint8)[:] = np.frombuffer(data, np.uint8, tensor.nbytes, begin)
        begin += tensor.nbytes
