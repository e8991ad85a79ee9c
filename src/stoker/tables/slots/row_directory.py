"""The hash directory of rows, in Numba: where a row lies, and which announced batches will use it.

[P, 4] int64, open addressing with linear probing: address + 1 (0: free), slot (>= 0; -1: none; -2 - p: evicted by plan
p, whose writeback may be under way), first and last announced entry (-1: none). It holds resident rows, announced rows
and rows on their way home: bounded by the slots and the window, not by the tables.
"""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm_memory import prefetch

__all__ = ["ADDRESS", "AHEAD", "FIRST", "LAST", "RECORDS", "SLOT", "ask", "find", "forget_idle", "insert", "rehash"]


ADDRESS, SLOT, FIRST, LAST = 0, 1, 2, 3  # columns
RECORDS = 2  # place of the number of records among the counters
AHEAD = 12  # lines asked for before they are needed


@jit
def _hash(key):
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(32))


@jit
def ask(directory, row):
    at = np.int64(_hash(row + 1) & np.uint64(directory.shape[0] - 1))
    prefetch(directory, at * 4)


@jit
def find(directory, row):
    """Place of the record of ``row``, or of the free record where it belongs."""
    mask = np.uint64(directory.shape[0] - 1)
    key = row + 1
    at = _hash(key) & mask
    while directory[at, ADDRESS] != key and directory[at, ADDRESS] != 0:
        at = (at + np.uint64(1)) & mask
    return np.int64(at)


@jit
def insert(directory, row, counters):
    """Place of the record of ``row``, made if missing."""
    at = find(directory, row)
    if directory[at, ADDRESS] == 0:
        directory[at, ADDRESS] = row + 1
        directory[at, SLOT] = -1
        directory[at, FIRST] = -1
        directory[at, LAST] = -1
        counters[RECORDS] += 1
    return at


@jit
def _remove(directory, at, counters):
    """Take a record out and move up what would no longer be found."""
    mask = np.uint64(directory.shape[0] - 1)
    hole = np.uint64(at)
    here = (hole + np.uint64(1)) & mask
    while directory[here, ADDRESS] != 0:
        home = _hash(directory[here, ADDRESS]) & mask
        if ((here - home) & mask) >= ((here - hole) & mask):
            for column in range(4):
                directory[hole, column] = directory[here, column]
            hole = here
        here = (here + np.uint64(1)) & mask
    directory[hole, ADDRESS] = 0
    counters[RECORDS] -= 1


@jit
def forget_idle(directory, row, counters):
    """Drop the record of a row that is neither resident nor announced nor on its way home."""
    at = find(directory, row)
    if directory[at, ADDRESS] != 0 and directory[at, SLOT] == -1 and directory[at, FIRST] < 0:
        _remove(directory, at, counters)


@jit
def rehash(old, new):
    """Move all records into the empty, larger ``new``."""
    for i in range(old.shape[0]):
        if old[i, ADDRESS] != 0:
            at = find(new, old[i, ADDRESS] - 1)
            for column in range(4):
                new[at, column] = old[i, column]
