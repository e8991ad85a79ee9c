"""Numba kernel that numbers the distinct rows of a batch, table by table: one table's hash fits a small cache."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

__all__ = ["number_rows"]

_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def number_rows(ids, offsets, jagged, table_start, table_features, first_row, table_rows, keys, numbers, rows, inverse):
    """Distinct addresses into ``rows``, each id's number into ``inverse``; returns how many, or -1 for a bad id.

    ``keys`` is all -1 on entry and, but for a bad id, on return.
    """
    features = table_features.size
    batch = (offsets.size - 1 if jagged else ids.size) // features
    found = 0
    for table in range(table_rows.size):
        owned = table_start[table + 1] - table_start[table]
        if owned == 0:
            continue
        occurrences = batch * owned
        if jagged:
            occurrences = 0
            for b in range(batch):
                for f in range(table_start[table], table_start[table + 1]):
                    bag = b * features + table_features[f]
                    occurrences += offsets[bag + 1] - offsets[bag]
        bits = np.int64(4)
        while (np.int64(1) << bits) < 2 * occurrences:
            bits += 1
        mask = (np.int64(1) << bits) - 1
        shift = np.uint64(64 - bits)
        limit, first = table_rows[table], first_row[table]
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
