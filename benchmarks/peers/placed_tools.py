"""What the workers of placed tables share. The harness imports it too, so it needs numpy only.

Legend: N rows of a table, B examples, F features.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "DROP_EVERY", "RankIds", "case_name", "drop_file", "drop_steps", "filled_ids", "load_trace", "placement_of",
    "timed_steps",
]  # fmt: skip

BLOCK = 4  # steps whose time is taken together
DROP_EVERY = 4  # steps after which the page cache of the rows' file is dropped again


def case_name(batch: int) -> str:
    return f"batch {batch}"


def placement_of(config: dict[str, Any], tables: dict[str, int]) -> Any:
    """Return the strategy that a worker was asked for, or None: "placement", "fraction" of the rows that are in slots,
    and "pinned" of these. ``tables``: name -> rows.
    """
    import stoker

    kind = config.get("placement")
    if kind is None:
        return None
    hot = {name: int(config["pinned"] * config["fraction"] * rows) for name, rows in tables.items()}
    return {"Cached": stoker.Cached, "HotCold": stoker.HotCold}[kind](
        hot=hot, fraction=config["fraction"], home="memory"
    )


def timed_steps(step: Callable[[int], Any], warm_up: int, timed: int) -> list[float]:
    """Seconds per step of blocks of BLOCK steps; every contestant does exactly ``warm_up + timed`` steps."""
    for number in range(warm_up):
        step(number)
    blocks = []
    for first in range(warm_up, warm_up + timed, BLOCK):
        start = time.perf_counter()
        for number in range(first, first + BLOCK):
            step(number)
        blocks.append((time.perf_counter() - start) / BLOCK)
    return blocks


def drop_steps(
    trace: list[tuple[np.ndarray, np.ndarray]], memory: str, row_bytes: int, budget: int | None = None
) -> set[int]:
    """Return the steps before which the page cache of the rows' file is dropped.

    "dropped": every DROP_EVERY steps. "plenty": never. "equal": as soon as the pages touched since the last time would
    take more than ``budget`` bytes; without a budget, for a contestant that has slots instead, before every step.
    """
    if memory == "plenty":
        return set()
    if memory == "dropped":
        return set(range(0, len(trace), DROP_EVERY))
    if budget is None:
        return set(range(len(trace)))
    due, touched = {0}, np.empty(0, np.int64)
    for number, (ids, _) in enumerate(trace):
        pages = np.unique(ids * row_bytes // mmap.PAGESIZE)
        touched = np.union1d(touched, pages)
        if len(touched) * mmap.PAGESIZE > budget:
            due.add(number)
            touched = pages
    return due


def drop_file(fd: int) -> None:
    """Take the clean pages of a file out of the page cache, and start writing the others to the disk."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def load_trace(path: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches as (flat ids [L], offsets [B * F + 1])."""
    with np.load(path) as kept:
        ids, bounds, offsets = kept["ids"], kept["bounds"], kept["offsets"]
    return [(ids[begin:stop], offsets[number]) for number, (begin, stop) in enumerate(itertools.pairwise(bounds))]


class RankIds:
    """Ids of a table sorted by frequency: rank r has probability about proportional to r ** -skew.

    The continuous law, inverted: tables of 400 M rows have no room for a cumulative sum.
    """

    def __init__(self, num_rows: int, skew: float) -> None:
        self.num_rows, self.power = num_rows, 1 - skew
        self.tail = (num_rows + 1.0) ** self.power

    def batch(self, number: int, shape: tuple[int, ...]) -> np.ndarray:
        """Ids of batch ``number``: the same whenever and wherever they are asked for."""
        u = np.random.default_rng([7, number]).random(shape)
        rank = (1 + (self.tail - 1) * u) ** (1 / self.power)
        return (rank.astype(np.int64) - 1).clip(0, self.num_rows - 1)


def filled_ids(number: int, examples: int, features: int, slots: int) -> np.ndarray:
    """Batch ``number`` of those that go through the ``slots`` most frequent rows once: what long training leaves."""
    first = number * examples * features
    return (np.arange(first, first + examples * features, dtype=np.int64) % slots).reshape(examples, features)
