"""Numba kernels that number the distinct rows of a batch, table by table: one table's hash fits a small cache."""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit


@jit
def place_rows(ids, offsets, jagged, table_of, table_rows, fixed, first_place, seen, mark, inverse, others):
    """What has a place of its own, in the order of the batch: id k below ``fixed`` [T] gets ``inverse`` -1 - place.

    Places count from ``first_place`` [T] on and are marked in ``seen``. ``others`` [T] counts the other ids of each
    table. Returns how many distinct places there were, or -1 for a bad id.
    """
    features = table_of.size
    batch = (offsets.size - 1 if jagged else ids.size) // features
    # By feature: without a lookup between an id and its place this takes a fifth of the time.
    limits, lows, places = np.empty((3, features), np.int64)
    for f in range(features):
        limits[f], lows[f], places[f] = table_rows[table_of[f]], fixed[table_of[f]], first_place[table_of[f]]
    number = np.int32(mark)
    placed = 0
    for b in range(batch):
        for f in range(features):
            bag = b * features + f
            begin, end = bag, bag + 1
            if jagged:
                begin, end = offsets[bag], offsets[bag + 1]
            for k in range(begin, end):
                row = np.int64(ids[k])
                if row < 0 or row >= limits[f]:
                    return -1
                if row < lows[f]:
                    place = np.uint64(places[f] + row)
                    inverse[k] = -1 - np.int64(place)
                    placed += seen[place] != number
                    seen[place] = number
                else:
                    others[table_of[f]] += 1
    return placed


@jit
def number_rows(
    ids, offsets, jagged, table_start, table_features, first_row, table_rows, fixed, others, keys, numbers, rows,
    inverse,
):  # fmt: skip
    """Distinct addresses into ``rows``, each id's number into ``inverse``; returns how many, or -1 for a bad id.

    The ids below ``fixed`` [T] of each table are left out; ``others`` [T] ids of it are not among them. ``keys`` is all
    -1 on entry and, but for a bad id, on return.
    """
    features = table_features.size
    batch = (offsets.size - 1 if jagged else ids.size) // features
    found = 0
    for table in range(table_rows.size):
        if others[table] == 0:
            continue
        bits = np.int64(4)
        while (np.int64(1) << bits) < 2 * others[table]:
            bits += 1
        mask = (np.int64(1) << bits) - 1
        shift = np.uint64(64 - bits)
        limit, first, low = table_rows[table], first_row[table], fixed[table]
        direct = limit <= mask
        begin_found = found
        for b in range(batch):
            for f in range(table_start[table], table_start[table + 1]):
                bag = b * features + table_features[f]
                begin, end = bag, bag + 1
                if jagged:
                    begin, end = offsets[bag], offsets[bag + 1]
                for k in range(begin, end):
                    row = np.int64(ids[k])
                    if row < 0 or row >= limit:
                        return -1
                    if row < low:
                        continue
                    h = row if direct else np.int64((np.uint64(row) * np.uint64(11400714819323198485)) >> shift)
                    while keys[h] != row and keys[h] >= 0:
                        h = (h + 1) & mask
                    if keys[h] < 0:
                        keys[h] = row
                        numbers[h] = found
                        rows[found] = h  # until the table is done: where to empty the hash
                        found += 1
                    inverse[k] = numbers[h]
        for i in range(begin_found, found):
            h = rows[i]
            rows[i] = first + keys[h]
            keys[h] = -1
    return found


@jit
def count_ids(offsets, batch, table_start, table_features, others):
    """Into ``others`` [T] the ids of each table in a batch of several ids a bag."""
    features = table_features.size
    for table in range(others.size):
        for b in range(batch):
            for f in range(table_start[table], table_start[table + 1]):
                bag = b * features + table_features[f]
                others[table] += offsets[bag + 1] - offsets[bag]
