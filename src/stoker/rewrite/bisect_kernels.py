"""Recursive bisection in Numba. Importing this module needs Numba.

Legend: N ids of a table, W windows, M pairs of an id and a window in which it occurs.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

_LEAF = 8  # ids of a part that is not divided further
_ROUNDS = 20  # most rounds of exchanges between two halves
_FEW = 500  # rounds end when less than one id in 500 is exchanged
_ONE = 65536.0  # unit of costs, which are integers so that their sums are equal on each machine


@jit
def _add(one: int, starts: Int64, windows: Int32, degree: Int32, side: int, by: int) -> None:
    """Add ``by`` to the ids of a half in each window of id ``one``."""
    for pair in range(starts[one], starts[one + 1]):
        degree[windows[pair], side] += by


@jit
def bisect(
    order: Int64,  # [n] ids to be ordered; changed in place
    starts: Int64,  # [N + 1] first pair of each id
    windows: Int32,  # [M] window of each pair, by id
    degree: Int32,  # [W, 2] zeros, and zeros again afterwards
) -> None:
    """Split ids into halves so that few windows need both, and split the halves in the same way.

    A window with d of the n ids of a half costs d * (log2 n - log2(d + 1)) there, about the bits of its gaps. The ids
    that gain most change sides in pairs, as long as a pair gains.

    Source: Dhulipala et al., "Compressing Graphs and Indexes with Recursive Graph Bisection", KDD 2016, algorithm 1.
    """
    logs = np.empty(len(order) + 2, np.int64)
    logs[0] = 0
    for i in range(1, len(logs)):
        logs[i] = round(_ONE * math.log2(i))
    gain = np.empty(len(order), np.int64)
    parts = [(0, len(order))]
    while len(parts) > 0:
        low, high = parts.pop()
        if high - low <= _LEAF:
            continue
        middle = low + (high - low) // 2
        for place in range(low, high):
            _add(order[place], starts, windows, degree, int(place >= middle), 1)
        for _ in range(_ROUNDS):
            for place in range(low, high):
                side = 0 if place < middle else 1
                own, other = logs[middle - low], logs[high - middle]
                if side == 1:
                    own, other = other, own
                total = np.int64(0)
                for pair in range(starts[order[place]], starts[order[place] + 1]):
                    here, there = degree[windows[pair], side], degree[windows[pair], 1 - side]
                    total += here * (own - logs[here + 1]) - (here - 1) * (own - logs[here])
                    total += there * (other - logs[there + 1]) - (there + 1) * (other - logs[there + 2])
                gain[place] = total
            left = np.argsort(-gain[low:middle], kind="mergesort")
            right = np.argsort(-gain[middle:high], kind="mergesort")
            exchanged = 0
            for i in range(middle - low):
                a, b = low + left[i], middle + right[i]
                if gain[a] + gain[b] <= 0:
                    break
                order[a], order[b] = order[b], order[a]
                for side, one in enumerate((order[a], order[b])):
                    _add(one, starts, windows, degree, 1 - side, -1)
                    _add(one, starts, windows, degree, side, 1)
                exchanged += 1
            if exchanged * _FEW < high - low:
                break
        for place in range(low, high):
            _add(order[place], starts, windows, degree, int(place >= middle), -1)
        parts.append((low, middle))
        parts.append((middle, high))
