"""What moving rows costs on this machine: measured in a few seconds, once a process.

Legend: N rows at home, C slots, L lookups of a batch, U distinct rows of a batch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from stoker.device import available_memory
from stoker.ops import Bags
from stoker.ops.space import make_space
from stoker.placement.expected import Traffic
from stoker.tables.config import DTYPES, Cached, TableConfig
from stoker.tables.file_home import FileHome
from stoker.tables.slotted import SlottedRows, make_slotted
from stoker.tables.storage import Rows

__all__ = ["Profile", "measure_profile"]

_HOME = 256 * 2**20  # bytes of rows at home: more than processor caches hold
_FILE = 64 * 2**20
_PART = 2**16  # rows stored at a time while a home is filled
_BATCHES = 8
_COLD_SECONDS = 0.5  # spent on reads from the disk
_COLD_ROWS = 512  # of one cold fetch: enough to keep every thread of the home busy


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of this machine, for rows of one size."""

    row_bytes: int  # weights and optimizer state
    copy: float  # bytes/s of one large copy in memory
    fetch: float  # rows/s from random places of a home in memory to slots
    store: float  # rows/s back
    plan_row: float  # seconds to plan for one distinct row in its slot
    plan_miss: float  # seconds more for one that has to come, and for the one that leaves
    plan_lookup: float  # seconds to find out which distinct row a lookup wants
    file_cold: float | None = None  # rows/s from random places of a file that is not in memory; None: not measured
    file_warm: float | None = None  # of one that is, in the system's page cache
    file_store: float | None = None  # rows/s to it

    def plan_seconds(self, traffic: Traffic) -> float:
        """Seconds a step to plan."""
        return (
            self.plan_lookup * traffic.lookups + self.plan_row * traffic.distinct + self.plan_miss * traffic.fetched
        )

    def move_seconds(self, traffic: Traffic, row_bytes: int, *, home: Literal["memory", "file"], cold: float) -> float:
        """Seconds a step to move rows both ways.

        Args:
            traffic: of a step.
            row_bytes: of the rows; those larger than the measured ones take longer in proportion.
            home: where they come from.
            cold: share of a file's rows that the system's page cache does not hold.
        """
        size = max(1.0, row_bytes / self.row_bytes)
        if home == "memory" or self.file_warm is None or self.file_cold is None or self.file_store is None:
            return size * (traffic.fetched / self.fetch + traffic.written / self.store)
        again = max(0.0, traffic.fetched - traffic.first)  # a row nobody has stored yet is computed, not read
        read = traffic.first / self.fetch + again * (cold / self.file_cold + (1 - cold) / self.file_warm)
        return size * (read + traffic.written / self.file_store)


def measure_profile(
    *,
    dim: int = 16,
    dtype: str = "float32",
    state: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    directory: str | None = None,
    file: bool = False,
) -> Profile:
    """Measure this machine; the same question again is answered from memory.

    Takes under 3 seconds and up to 300 MB of memory. The first run after an installation also compiles kernels.

    Args:
        dim: columns of a row.
        dtype: of its weights.
        state: its optimizer state, name -> "row" or "scalar".
        device: where the slots are.
        directory: of a home in a file; None means the system's temporary one.
        file: whether to measure a file too (64 MiB are written).
    """
    return _measure(dim, dtype, tuple((state or {}).items()), str(device), directory, file)


@lru_cache(maxsize=16)
def _measure(
    dim: int, dtype: str, state: tuple[tuple[str, str], ...], device: str, directory: str | None, file: bool
) -> Profile:
    row_bytes = dim * DTYPES[dtype].itemsize + sum(4 * dim if kind == "row" else 4 for _, kind in state)
    room = (available_memory() or 2 * 2**30) // 8
    storage = _storage(min(_HOME, room) // row_bytes, dim, dtype, dict(state), device, "memory", None)
    quick = storage.home.native
    try:
        _fill(storage, storage.num_rows)
        planning, fetch, store = _moving(storage, 2**16 if quick else 2**11)
    finally:
        storage.close()
    cold = warm = written = None
    if file:
        storage = _storage(min(_FILE, room) // row_bytes, dim, dtype, dict(state), device, "file", directory)
        try:
            _fill(storage, storage.num_rows if quick else 2**14)
            cold, warm, written = _reading(storage, storage.num_rows if quick else 2**14)
        finally:
            storage.close()
    return Profile(
        row_bytes=row_bytes, copy=_copying(), fetch=fetch, store=store, **planning,
        file_cold=cold, file_warm=warm, file_store=written,
    )  # fmt: skip


def _storage(
    rows: int,
    dim: int,
    dtype: str,
    state: dict[str, str],
    device: str,
    home: Literal["memory", "file"],
    path: str | None,
) -> SlottedRows:
    table = TableConfig(name="profile", num_embeddings=max(rows, 4096), embedding_dim=dim, dtype=dtype)  # type: ignore[arg-type]
    space = make_space([table.name], [table.num_embeddings], [table.features], table.features)
    strategy = Cached(slots=max(4096, table.num_embeddings // 8), home=home, path=path)
    return make_slotted(strategy, [table], space, 0, state, torch.device(device))


def _fill(storage: SlottedRows, rows: int) -> None:
    """Store the first ``rows`` rows: others would be computed when fetched."""
    part = storage.home.empty(_PART)
    part.weight.zero_()
    for tensor in part.state.values():
        tensor.zero_()
    for start in range(0, rows, _PART):
        count = min(_PART, rows - start)
        storage.home.store(np.arange(start, start + count), part, np.arange(count))


def _moving(storage: SlottedRows, lookups: int) -> tuple[dict[str, float], float, float]:
    """The costs of planning, and rows/s fetched and stored, of random batches."""
    random = np.random.default_rng(0)
    slots = storage.num_slots
    lookups = min(lookups, slots // 2)

    def batches(rows: int, count: int = _BATCHES) -> list[np.ndarray]:
        return [random.integers(0, rows, lookups) for _ in range(count)]

    # Each kind of step first once or more untimed: rows come, and what earlier plans left behind is cleared away.
    _steps(storage, batches(256, 2))
    plan_lookup = _steps(storage, batches(256)) / (_BATCHES * lookups)
    _steps(storage, [np.arange(start, start + lookups) % (slots // 2) for start in range(0, slots // 2, lookups)])
    storage.stats.reset()
    hits = _steps(storage, batches(slots // 2))
    plan_row = max(0.0, hits - _BATCHES * lookups * plan_lookup) / storage.stats.rows
    _steps(storage, batches(storage.num_rows, 2 * slots // lookups + 2))
    stats = storage.stats
    stats.reset()
    seconds = _steps(storage, batches(storage.num_rows))
    planning = seconds - stats.fetch_seconds - stats.write_seconds
    planning -= _BATCHES * lookups * plan_lookup + stats.rows * plan_row
    costs = {"plan_lookup": plan_lookup, "plan_row": plan_row, "plan_miss": max(0.0, planning) / stats.fetched}
    return costs, stats.fetched / max(stats.fetch_seconds, 1e-9), stats.written / max(stats.write_seconds, 1e-9)


def _steps(storage: SlottedRows, batches: list[np.ndarray]) -> float:
    """Seconds to take batches through the storage."""
    _wait(storage)
    begin = time.perf_counter()
    for ids in batches:
        storage.announce(Bags(torch.from_numpy(ids).view(-1, 1)))
        lease = storage.stage()
        assert lease is not None
        storage.hand_out(lease)
        lease.release(changed=True)
    _wait(storage)
    return time.perf_counter() - begin


def _wait(storage: SlottedRows) -> None:
    if storage.weight.is_cuda:
        torch.cuda.synchronize(storage.weight.device)


def _reading(storage: SlottedRows, rows: int) -> tuple[float, float, float]:
    """(file_cold, file_warm, file_store) in rows/s."""
    home = storage.home
    assert isinstance(home, FileHome)
    random = np.random.default_rng(0)
    home.flush()
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(home._fd, 0, 0, os.POSIX_FADV_DONTNEED)
    target = home.empty(_COLD_ROWS)
    parts, seconds = [], 0.0
    while seconds < _COLD_SECONDS and len(parts) < 64:
        parts.append(random.integers(0, rows, _COLD_ROWS))
        seconds += _timed(home.fetch, parts[-1], target)
    cold = len(parts) * _COLD_ROWS / seconds
    again = np.concatenate(parts)
    many = home.empty(len(again))
    warm = len(again) / min(_timed(home.fetch, again, many) for _ in range(2))
    ours = np.unique(again)
    written = len(ours) / min(_timed(home.store, ours, many) for _ in range(2))
    return cold, warm, written


def _timed(move: object, rows: np.ndarray, side: Rows) -> float:
    begin = time.perf_counter()
    move(rows, side)  # type: ignore[operator]
    return time.perf_counter() - begin


def _copying() -> float:
    """Bytes/s of a large copy."""
    source, target = torch.ones(2, 2**23), torch.empty(2, 2**23)
    target.copy_(source)
    begin = time.perf_counter()
    target.copy_(source)
    return source.nbytes / (time.perf_counter() - begin)
