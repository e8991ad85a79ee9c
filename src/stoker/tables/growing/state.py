"""The state of tables that grow, and of a step, as arrays: what the kernels work on. It needs no Numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# columns of the pools
BASE, FIRST, SIZE, MAP, MASK, TOP, FREE, HEAP, ASIDE, LIVE, POLICY, TTL, ADMIT = range(13)
# columns of the entries; a free one has count 0
KEY, COUNT, USED, TIME = range(4)
LRU, LFU = 1, 2  # policies; 0: none is evicted
UNKNOWN = -1  # number of free rows or of victims: find them again
SWEEPS = 1024  # steps in which every entry is looked at once, to free those that have expired
BORN, CHANGED, TOUCHED, REFUSED = range(4)  # counters of a table


class Pools(NamedTuple):
    """The state of all tables; entry ``r`` of pool ``m`` is at ``pools[m, BASE] + r``."""

    pools: np.ndarray  # [P, 13] int64
    entries: np.ndarray  # [N, 4] int64
    slots: np.ndarray  # [M] int32: entry + 1, or 0
    free: np.ndarray  # [N] int32: a heap of free entries below TOP, the smallest first
    heap: np.ndarray  # [N] int32: a heap of live entries by rank, then those that are set aside in this step
    place: np.ndarray  # [N] int32: place of an entry in the heap, -1 for none
    rank: np.ndarray  # [N, 2] int64: of the entries in the heap; never above their rank now


class Work(NamedTuple):
    """A step: its lookups, what it finds, and a journal of what it changes, to undo it."""

    ids: np.ndarray  # [L'] int64: raw ids of the batch, and ids of tables that do not grow
    where: np.ndarray  # [L] int32: places of the lookups in ``ids``, by table, in order
    starts: np.ndarray  # [T + 1] int64: where those of each table begin
    out: np.ndarray  # [L'] int64: a copy of ``ids``, in which raw ids become rows; int32 if all tables grow
    clock: np.ndarray  # [3] int64: time, number of the step
    births: np.ndarray  # [L] int64: rows that are reset, from ``starts[table]`` on
    made: np.ndarray  # [L] int64
    unknown: np.ndarray  # [L] int64
    changes: np.ndarray  # [.., 6] int64: pool, entry, and what was there; in order
    touches: np.ndarray  # [.., 5] int64: pool, entry, and its count, use and time
    firsts: np.ndarray  # [T, 2] int64: first change and touch of each table
    keeps: bool  # whether there is a journal
    counts: np.ndarray  # [T, 4] int64: of births, changes, touches, refused lookups
