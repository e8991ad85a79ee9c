"""Loops that write records of packed rows (:mod:`stoker.dataset.reading.packed`), from the columns of a part, in
stripes."""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.prep.fit.dense_kernels import STRIPE, column_at, write_missing, write_stripe
from stoker.prep.parse.code_columns import gather_feature

__all__ = ["greatest_code", "write_records"]


@jit
def greatest_code(column, missing):  # type: ignore[no-untyped-def]
    """The greatest code of a column of whole numbers, as :func:`write_records` has them."""
    found = 0
    for i in range(np.uint64(column.size)):
        found = max(found, (np.int32(column[i]) + 1) & missing)
    return found


@jit
def _write_codes(column, missing, rows, first, last, out, at, place):  # type: ignore[no-untyped-def]
    where = np.uint64(place)
    for i in range(first, last):
        out[np.uint64(at + i), where] = (np.int32(column[np.uint64(rows[np.uint64(i)])]) + 1) & missing


@jit
def write_records(  # type: ignore[no-untyped-def]
    tile, scales, places, dense, dense_place, addresses, types, n, coded, flags, codes, code_types, code_rows, lut,
    bases, ids, rows, known, label_size, label_place, records, shorts, floats, words, longs, at, zeros,
):  # fmt: skip
    """Write the records ``at`` and on, [., R], of ``rows`` of a part; returns the sum of their labels.

    Args:
        tile, scales, places: as of :func:`stoker.prep.fit.dense_kernels.write_stripe`, of float columns.
        dense: [n, D'] final values, instead of that; [0, 0] where a part has columns.
        dense_place: where these begin.
        addresses, types, n: raw columns, as :class:`stoker.prep.fit.dense_kernels.Columns` has them.
        coded: [K, 3] a column, the bytes of its field, and its place: it has the column's value plus one, 0 where that
            is missing.
        flags: [M, 2] a column, and the place of a byte that is 1 where its value is missing, else 0.
        codes, code_types, code_rows, lut, bases, zeros: as of :func:`stoker.prep.write.encode_kernels.gather`.
        ids: [F, 2] the bytes of each feature's field, and its place.
        known: labels of the part.
        label_size, label_place: bytes of the label's field, and its place.
        records, shorts, floats, words, longs: the records as uint8, uint16, float32, int32 and int64.
    """
    positives = 0.0
    for first in range(0, rows.size, STRIPE):
        last = min(first + STRIPE, rows.size)
        write_stripe(tile, scales, places, floats, at, first, last)
        for d in range(dense.shape[1]):
            column, place = np.uint64(d), np.uint64(dense_place + d)
            for i in range(first, last):
                floats[np.uint64(at + i), place] = dense[np.uint64(rows[np.uint64(i)]), column]
        for k in range(coded.shape[0]):
            c, size, place = coded[k]
            if types[c] == 1:
                _write_codes(column_at(addresses[c], n, np.uint16), 65535, rows, first, last, shorts, at, place)
            elif size == 2:
                _write_codes(column_at(addresses[c], n, np.uint8), 255, rows, first, last, shorts, at, place)
            else:
                _write_codes(column_at(addresses[c], n, np.uint8), 255, rows, first, last, records, at, place)
        for k in range(flags.shape[0]):
            write_missing(addresses[flags[k, 0]], types[flags[k, 0]], n, rows, first, last, records, at, flags[k, 1])
        for f in range(ids.shape[0]):
            size, place, kind, base = ids[f, 0], ids[f, 1], code_types[f], bases[f]
            if size == 1:
                found = gather_feature(codes[f], kind, code_rows, lut, base, rows, first, last, records, at, place)
            elif size == 2:
                found = gather_feature(codes[f], kind, code_rows, lut, base, rows, first, last, shorts, at, place)
            elif size == 4:
                found = gather_feature(codes[f], kind, code_rows, lut, base, rows, first, last, words, at, place)
            else:
                found = gather_feature(codes[f], kind, code_rows, lut, base, rows, first, last, longs, at, place)
            zeros[f] += found
        for i in range(first, last):
            label = known[np.uint64(rows[np.uint64(i)])]
            positives += label
            if label_size == 1:
                records[np.uint64(at + i), np.uint64(label_place)] = np.uint8(label)
            else:
                floats[np.uint64(at + i), np.uint64(label_place)] = label
    return positives
