"""Numba kernels that count the ids of sampled rows. Import this module only where Numba is installed.

Blocks are runs of rows [starts, stops) of one shard. Each kernel returns -1, or the first row with an id outside its
table or with lengths that do not fit the ids.

Legend: n rows of the shard, F features, L ids, K blocks, G groups of blocks, Z tables, J strata, Q levels.
"""

# mypy: disable-error-code="no-untyped-call, arg-type, no-any-return"
# (Numba types kernels by their arguments)

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit
from stoker.rewrite.fae import sampling_reference

__all__ = ["bag_levels", "bag_rows", "bag_strata", "levels", "pool", "rows", "strata"]

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]

# The bits of a float64 above its sixth from the mantissa: 64 strata for each doubling of id + 64.
_SHIFT, _FIRST = np.int64(46), np.int64((1023 + 6) << 6)


pool = jit(sampling_reference.pool)


@jit(inline="always")
def _stratum(row: int) -> Any:
    return (np.float64(row + 64).view(np.int64) >> _SHIFT) - _FIRST


@jit
def strata(
    ids: Array,  # [n, F]
    starts: Int64,  # [K]
    stops: Int64,  # [K]
    groups: Int64,  # [K]
    tables: Int64,  # [F]
    limits: Int64,  # [F] rows of each feature's table
    out: Int64,  # [G, Z, J], added to
) -> int:
    """Count accesses by group, table and stratum."""
    bases = tables * out.shape[2]
    for k in range(len(starts)):
        part = out[groups[k]].reshape(-1)
        for r in range(starts[k], stops[k]):
            for f in range(len(tables)):
                row = np.int64(ids[r, f])
                if row < 0 or row >= limits[f]:
                    return r
                part[np.uint64(bases[f] + _stratum(row))] += 1  # unsigned: an index that counts from the end costs
    return -1


@jit
def _good(lengths: Array, row_offsets: Int64, size: int, r: int) -> bool:
    total = np.int64(0)
    for f in range(lengths.shape[1]):
        if lengths[r, f] < 0:
            return False
        total += lengths[r, f]
    return row_offsets[r] >= 0 and row_offsets[r + 1] <= size and row_offsets[r + 1] - row_offsets[r] == total


@jit
def bag_strata(
    ids: Array,  # [L]
    lengths: Array,  # [n, F]
    row_offsets: Int64,  # [n + 1]
    starts: Int64,
    stops: Int64,
    groups: Int64,
    tables: Int64,
    limits: Int64,
    out: Int64,
) -> int:
    """:func:`strata` for bags of ids."""
    for k in range(len(starts)):
        part = out[groups[k]]
        for r in range(starts[k], stops[k]):
            if not _good(lengths, row_offsets, len(ids), r):
                return r
            place = row_offsets[r]
            for f in range(len(tables)):
                for _ in range(lengths[r, f]):
                    row = np.int64(ids[place])
                    place += 1
                    if row < 0 or row >= limits[f]:
                        return r
                    part[tables[f], _stratum(row)] += 1
    return -1


@jit
def rows(
    ids: Array,  # [n, F]
    starts: Int64,  # [K]
    stops: Int64,  # [K]
    columns: Int64,  # [P] features to count; no other call counts a table of theirs at the same time
    limits: Int64,  # [F]
    bases: Int64,  # [F] place of each feature's table in ``out``
    out: npt.NDArray[np.int32],  # [rows of all tables], added to
) -> int:
    """Count accesses by row."""
    for k in range(len(starts)):
        for r in range(starts[k], stops[k]):
            for p in range(len(columns)):
                f = columns[p]
                row = np.int64(ids[r, f])
                if row < 0 or row >= limits[f]:
                    return r
                out[bases[f] + row] += 1
    return -1


@jit
def bag_rows(
    ids: Array,  # [L]
    lengths: Array,  # [n, F]
    row_offsets: Int64,  # [n + 1]
    starts: Int64,
    stops: Int64,
    columns: Int64,  # [P], rising
    limits: Int64,
    bases: Int64,
    out: npt.NDArray[np.int32],
) -> int:
    """:func:`rows` for bags of ids."""
    for k in range(len(starts)):
        for r in range(starts[k], stops[k]):
            if not _good(lengths, row_offsets, len(ids), r):
                return r
            place, p = row_offsets[r], 0
            for f in range(lengths.shape[1]):
                if p < len(columns) and columns[p] == f:
                    p += 1
                    for i in range(place, place + lengths[r, f]):
                        row = np.int64(ids[i])
                        if row < 0 or row >= limits[f]:
                            return r
                        out[bases[f] + row] += 1
                place += lengths[r, f]
    return -1


@jit
def levels(
    ids: Array,  # [n, F]
    starts: Int64,  # [K]
    stops: Int64,  # [K]
    groups: Int64,  # [K]
    limits: Int64,  # [F]
    hot: Int64,  # [Q, F] hot rows of each feature's table, rising with the level
    out: Int64,  # [G, Q + 1], added to
) -> int:
    """Count inputs by group and the first level at which all their ids are hot."""
    last = len(hot)
    for k in range(len(starts)):
        for r in range(starts[k], stops[k]):
            level = 0
            for f in range(len(limits)):
                row = np.int64(ids[r, f])
                if row < 0 or row >= limits[f]:
                    return r
                while level < last and row >= hot[level, f]:
                    level += 1
            out[groups[k], level] += 1
    return -1


@jit
def bag_levels(
    ids: Array,  # [L]
    lengths: Array,  # [n, F]
    row_offsets: Int64,  # [n + 1]
    starts: Int64,
    stops: Int64,
    groups: Int64,
    limits: Int64,
    hot: Int64,
    out: Int64,
) -> int:
    """:func:`levels` for bags of ids; an input without any is hot."""
    last = len(hot)
    for k in range(len(starts)):
        for r in range(starts[k], stops[k]):
            if not _good(lengths, row_offsets, len(ids), r):
                return r
            place, level = row_offsets[r], 0
            for f in range(len(limits)):
                for i in range(place, place + lengths[r, f]):
                    row = np.int64(ids[i])
                    if row < 0 or row >= limits[f]:
                        return r
                    while level < last and row >= hot[level, f]:
                        level += 1
                place += lengths[r, f]
            out[groups[k], level] += 1
    return -1
