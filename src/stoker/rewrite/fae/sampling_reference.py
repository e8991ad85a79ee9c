"""The definition of :mod:`stoker.rewrite.fae.sampling_kernels` in plain Python, used where Numba is not installed.

Legend: n rows of the shard, F features, L ids, K blocks, G groups of blocks, Z tables, J strata, Q levels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["bag_levels", "bag_rows", "bag_strata", "levels", "pool", "rows", "strata"]

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


def strata(ids: Array, starts: Int64, stops: Int64, groups: Int64, tables: Int64, limits: Int64, out: Int64) -> int:
    """Count accesses by group, table and stratum."""
    return bag_strata(ids, None, None, starts, stops, groups, tables, limits, out)


def bag_strata(
    ids: Array, lengths: Array | None, row_offsets: Int64 | None, starts: Int64, stops: Int64, groups: Int64,
    tables: Int64, limits: Int64, out: Int64,
) -> int:  # fmt: skip
    """:func:`strata` for bags of ids."""
    bad, flat, feature, owner = _gather(ids, lengths, row_offsets, starts, stops, limits)
    if bad < 0:
        # Bits of id + 64 as a float64: 64 strata for each doubling.
        stratum = ((flat + 64).astype(np.float64).view(np.int64) >> 46) - ((1023 + 6) << 6)
        np.add.at(out, (np.repeat(groups, stops - starts)[owner], tables[feature], stratum), 1)
    return bad


def rows(ids: Array, starts: Int64, stops: Int64, columns: Int64, limits: Int64, bases: Int64, out: Array) -> int:
    """Count accesses by row."""
    return bag_rows(ids, None, None, starts, stops, columns, limits, bases, out)


def bag_rows(
    ids: Array, lengths: Array | None, row_offsets: Int64 | None, starts: Int64, stops: Int64, columns: Int64,
    limits: Int64, bases: Int64, out: Array,
) -> int:  # fmt: skip
    """:func:`rows` for bags of ids."""
    bad, flat, feature, _ = _gather(ids, lengths, row_offsets, starts, stops, limits)
    if bad < 0:
        mine = np.isin(feature, columns)
        np.add.at(out, flat[mine] + bases[feature[mine]], 1)
    return bad


def levels(ids: Array, starts: Int64, stops: Int64, groups: Int64, limits: Int64, hot: Int64, out: Int64) -> int:
    """Count inputs by group and the first level at which all their ids are hot."""
    return bag_levels(ids, None, None, starts, stops, groups, limits, hot, out)


def bag_levels(
    ids: Array, lengths: Array | None, row_offsets: Int64 | None, starts: Int64, stops: Int64, groups: Int64,
    limits: Int64, hot: Int64, out: Int64,
) -> int:  # fmt: skip
    """:func:`levels` for bags of ids; an input without any is hot."""
    bad, flat, feature, owner = _gather(ids, lengths, row_offsets, starts, stops, limits)
    if bad < 0:
        level = np.zeros(len(flat), np.int64)
        for step in hot:
            level += flat >= step[feature]  # hot rows rise with the level: as many as do not hold the id
        inputs = np.zeros(int((stops - starts).sum()), np.int64)
        np.maximum.at(inputs, owner, level)
        np.add.at(out, (np.repeat(groups, stops - starts), inputs), 1)
    return bad


def pool(means: Array, weights: Array, ends: Int64) -> int:
    """Pool adjacent violators: make ``means`` [J] fall strictly, in place.

    Args:
        means: of each part; afterwards those of the pooled ones come first.
        weights: of each part, above 0; pooled like the means.
        ends: filled with the place after the last part of each pooled one.

    Returns:
        The number of pooled parts.
    """
    count = 0
    for place in range(len(means)):
        mean, weight = means[place], weights[place]
        while count > 0 and means[count - 1] <= mean:
            count -= 1
            mean = (means[count] * weights[count] + mean * weight) / (weights[count] + weight)
            weight += weights[count]
        means[count], weights[count], ends[count] = mean, weight, place + 1
        count += 1
    return count


def _gather(
    ids: Array, lengths: Array | None, row_offsets: Int64 | None, starts: Int64, stops: Int64, limits: Int64
) -> tuple[int, Int64, Int64, Int64]:
    """The first bad row or -1; then the ids of all blocks with their feature and row, [L] each."""
    nothing = np.empty(0, np.int64)
    rows = _ranges(starts, stops - starts)
    features = len(limits)
    if lengths is None or row_offsets is None:
        flat, counts = ids[rows].reshape(-1).astype(np.int64), np.full(len(rows), features)
        feature = np.tile(np.arange(features), len(rows))
    else:
        bags = lengths[rows].astype(np.int64)
        counts = bags.sum(axis=1)
        begin, end = row_offsets[rows], row_offsets[rows + 1]
        good = (bags >= 0).all(axis=1) & (begin >= 0) & (end <= len(ids)) & (end - begin == counts)
        if not good.all():
            return int(rows[np.argmin(good)]), nothing, nothing, nothing
        flat = ids[_ranges(begin, counts)].astype(np.int64)
        feature = np.repeat(np.tile(np.arange(features), len(rows)), bags.reshape(-1))
    owner = np.repeat(np.arange(len(rows)), counts)
    outside = (flat < 0) | (flat >= limits[feature])
    if outside.any():
        return int(rows[owner[np.argmax(outside)]]), nothing, nothing, nothing
    return -1, flat, feature, owner


def _ranges(starts: Int64, counts: Int64) -> Int64:
    """The ranges ``starts[i]`` to ``starts[i] + counts[i]``, one after the other."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts), np.int64)
