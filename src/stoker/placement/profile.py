"""Measure what moving rows costs on this machine: in a few seconds, once per process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from stoker.base.device import available_memory
from stoker.base.progress import Counted
from stoker.ops import Bags
from stoker.ops.space import HAVE_NUMBA, make_space
from stoker.placement.expected import ZIPF, Traffic
from stoker.tables.config import Cached, TableConfig, bytes_of_row
from stoker.tables.slots.residency import LANDED
from stoker.tables.slots.slotted import SlottedRows, make_slotted
from stoker.tables.storage import Rows
from stoker.tables.stores.file_home import FileHome

_HOME = 128 * 2**20  # bytes of rows in the backing store: more than processor caches hold
_PLAIN_HOME = 2 * 2**20  # without Numba
_FILE = 64 * 2**20
_MOST_ROWS = 2**21
_PART = 2**16  # rows stored at a time while a backing store is filled
_BATCHES = 8
_COLD_SECONDS = 0.5  # for reads from the disk
_FILE_ROWS = 1024  # per call: about what a step misses


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of this machine, for rows of one size."""

    row_bytes: int  # weights and optimizer state
    fetch: float  # rows/s from random places in main memory to slots
    store: float  # rows/s back
    plan_row: float  # seconds to plan for a distinct row in its slot
    plan_miss: float  # additional seconds for a row to fetch, and for the row to evict
    plan_lookup: float  # seconds to find the distinct row of a lookup
    file_cold: float | None = None  # rows/s from random places of a file on the disk; None: not measured
    file_warm: float | None = None  # rows/s from a file in the page cache
    file_store: float | None = None  # rows/s to a file

    def plan_seconds(self, traffic: Traffic) -> float:
        """Return the seconds per step to plan."""
        return self.plan_lookup * traffic.lookups + self.plan_row * traffic.distinct + self.plan_miss * traffic.fetched

    def move_seconds(self, traffic: Traffic, row_bytes: int, *, in_memory: bool, cold: float) -> float:
        """Return the seconds per step to move rows both ways, without waiting for a disk.

        Rows larger than the measured ones take longer in proportion. ``cold``: share of a file that is not in the page
        cache.
        """
        size = max(1.0, row_bytes / self.row_bytes)
        if in_memory or self.file_warm is None or self.file_store is None:
            return size * (traffic.fetched / self.fetch + traffic.written / self.store)
        again = (1 - cold) * self._again(traffic)
        return size * (traffic.first / self.fetch + again / self.file_warm + traffic.written / self.file_store)

    def disk_seconds(self, traffic: Traffic, row_bytes: int, cold: float) -> float:
        """Return the seconds per step to read rows from the disk."""
        if self.file_cold is None:
            return 0.0
        return max(1.0, row_bytes / self.row_bytes) * cold * self._again(traffic) / self.file_cold

    def _again(self, traffic: Traffic) -> float:
        """Return the rows to read; a row that was never stored is computed instead."""
        return max(0.0, traffic.fetched - traffic.first)


def measure_profile(
    *,
    dim: int = 16,
    dtype: str = "float32",
    state: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    directory: str | None = None,
    file: bool = False,
    writes: Literal["append", "in-place"] | None = None,
) -> Profile:
    """Measure this machine. A second call with the same arguments returns the same profile.

    A measurement takes under 3 seconds and up to 200 MB of memory. The first one also compiles kernels. ``file``:
    measure a file in ``directory``, too (writes 64 MiB); ``state``: name -> "row" or "scalar".
    """
    return _measure(dim, dtype, tuple((state or {}).items()), str(device), directory, file, writes)


@lru_cache(maxsize=16)
def _measure(
    dim: int, dtype: str, state: tuple[tuple[str, str], ...], device: str, directory: str | None, file: bool,
    writes: Literal["append", "in-place"] | None,
) -> Profile:  # fmt: skip
    row_bytes = bytes_of_row(dim, dtype, dict(state))
    room, quick = (available_memory() or 2 * 2**30) // 8, HAVE_NUMBA
    size = min(room, _HOME if quick else _PLAIN_HOME)
    made = _storage(size // row_bytes, dim, dtype, dict(state), device, Cached(slots=1))
    with Counted("measuring moves", 1, ""), closing(made) as storage:
        _fill(storage, storage.num_rows)
        planning, fetch, store = _moving(storage, 2**15 if quick else 2**10)
    cold = warm = written = None
    if file:
        behind = Cached(slots=1, home="file", path=directory, writes=writes)
        made = _storage(min(_FILE, room) // row_bytes, dim, dtype, dict(state), device, behind)
        with Counted("measuring a file", 1, ""), closing(made) as storage:
            rows = storage.num_rows if quick else min(storage.num_rows, 2**14)
            _fill(storage, rows)
            cold, warm, written = _reading(storage, rows)
    return Profile(
        row_bytes=row_bytes, fetch=fetch, store=store, **planning, file_cold=cold, file_warm=warm, file_store=written
    )


def _storage(rows: int, dim: int, dtype: str, state: dict[str, str], device: str, strategy: Cached) -> SlottedRows:
    table = TableConfig(name="profile", num_embeddings=min(max(rows, 512), _MOST_ROWS), embedding_dim=dim, dtype=dtype)  # type: ignore[arg-type]
    space = make_space([table.name], [table.num_embeddings], [table.features], table.features)
    strategy = replace(strategy, slots=table.num_embeddings // 8)
    return make_slotted(strategy, [table], space, 0, state, torch.device(device))


def _fill(storage: SlottedRows, rows: int) -> None:
    """Store the first ``rows`` rows, because a row that was never stored is computed when it is fetched."""
    part = storage.home.empty(_PART)
    part.weight.zero_()
    for tensor in part.state.values():
        tensor.zero_()
    for start in range(0, rows, _PART):
        count = min(_PART, rows - start)
        storage.home.store(np.arange(start, start + count), part, np.arange(count))


def _moving(storage: SlottedRows, lookups: int) -> tuple[dict[str, float], float, float]:
    """Measure the costs of planning, and rows/s fetched and stored.

    The time for a row depends on the caches of the processor, so batches follow Zipf's law, as in click logs. Uniform
    batches separate the cost of a miss from that of a hit.
    """
    random = np.random.default_rng(0)
    slots, rows = storage.num_slots, storage.num_rows
    lookups = min(lookups, slots // 4)

    def uniform(count: int, limit: int = rows) -> list[np.ndarray]:
        return [random.integers(0, limit, lookups) for _ in range(count)]

    def zipf(count: int) -> list[np.ndarray]:
        tail = 1 - (rows + 1.0) ** (1 - ZIPF)
        return [
            np.minimum((1 - tail * random.random(lookups)) ** (1 / (1 - ZIPF)) - 1, rows - 1).astype(np.int64)
            for _ in range(count)
        ]

    _steps(storage, uniform(2, 256))
    hot = _steps(storage, uniform(_BATCHES, 256))
    plan_lookup = hot.planning / lookups
    # all slots are taken, and rows are being written back
    _steps(storage, uniform(5 * slots // (4 * lookups) + LANDED + 2))
    cold = _steps(storage, uniform(_BATCHES))
    _steps(storage, zipf(LANDED))
    real = _steps(storage, zipf(_BATCHES))
    whole, part = cold.planning - hot.planning, real.planning - hot.planning
    # Two kinds of batches give two costs: of a row in its slot, and of a row to fetch.
    apart = max(1.0, cold.fetched * real.rows - real.fetched * cold.rows)
    plan_miss = min(max(0.0, (whole * real.rows - part * cold.rows) / apart), max(0.0, whole) / cold.fetched)
    plan_row = max(0.0, part - plan_miss * real.fetched) / real.rows
    costs = {"plan_lookup": plan_lookup, "plan_row": plan_row, "plan_miss": plan_miss}
    return costs, cold.fetched / max(cold.fetching, 1e-9), cold.written / max(cold.storing, 1e-9)


class _BatchCosts(NamedTuple):
    """Seconds of the quickest batch, and mean rows of several batches."""

    planning: float
    fetching: float
    storing: float
    rows: float
    fetched: float
    written: float


def _steps(storage: SlottedRows, batches: list[np.ndarray]) -> _BatchCosts:
    """Run batches through the storage and time them."""
    stats, queue = storage.stats, storage.queue()
    seen = []
    for ids in batches:
        stats.reset()
        _wait(storage)
        begin = time.perf_counter()
        queue.announce(Bags(torch.from_numpy(ids).view(-1, 1)))
        lease = queue.stage()
        assert lease is not None
        storage.hand_out(lease)
        lease.release(changed=True)
        _wait(storage)
        seconds = time.perf_counter() - begin
        moving = stats.fetch_seconds + stats.write_seconds
        times = seconds - moving, stats.fetch_seconds, stats.write_seconds
        seen.append((*times, stats.rows, stats.fetched, stats.written))
    queue.close()
    figures = np.array(seen, np.float64)
    return _BatchCosts(*figures[:, :3].min(axis=0).tolist(), *figures[:, 3:].mean(axis=0).tolist())


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
        with suppress(OSError):
            os.posix_fadvise(home._fd, 0, 0, os.POSIX_FADV_DONTNEED)
    target, seconds = home.empty(_FILE_ROWS), 0.0
    parts: list[np.ndarray] = []
    while seconds < _COLD_SECONDS and len(parts) < 64:
        parts.append(random.integers(0, rows, _FILE_ROWS))
        seconds += _timed(home.fetch, parts[-1], target)
    warm = _FILE_ROWS / min(_timed(home.fetch, part, target) for part in parts)
    written = _FILE_ROWS / min(_timed(home.store, np.unique(part), target) for part in parts)
    return len(parts) * _FILE_ROWS / seconds, warm, written


def _timed(move: Callable[..., Any], rows: np.ndarray, side: Rows) -> float:
    begin = time.perf_counter()
    move(rows, side)
    return time.perf_counter() - begin
