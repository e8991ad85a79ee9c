"""Codes of features in as few bits as hold them, in a form that one kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.prep.fit.dense_kernels import column_at

__all__ = ["CodeColumns", "code_at", "code_type", "gather_feature"]

_TYPES = (np.uint8, np.uint16, np.uint32)  # their places here tell kernels which one it is


def code_type(most: int) -> np.dtype[Any]:
    """The type of codes up to ``most``."""
    return np.dtype(next(dtype for dtype in _TYPES if most <= np.iinfo(dtype).max))


class CodeColumns:
    """F columns [n] of types that :func:`code_type` gives.

    Args:
        columns: the codes of each.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        self._held = [np.ascontiguousarray(column) for column in columns]  # what the addresses are of
        self.addresses = np.array([column.__array_interface__["data"][0] for column in self._held], np.uintp)
        self.types = np.array([_TYPES.index(column.dtype.type) for column in self._held], np.int64)
        self.rows = len(self._held[0]) if self._held else 0


@jit
def code_at(address, kind, n, row):  # type: ignore[no-untyped-def]
    """The code of a row."""
    if kind == 0:
        return np.uint64(column_at(address, n, np.uint8)[np.uint64(row)])
    if kind == 1:
        return np.uint64(column_at(address, n, np.uint16)[np.uint64(row)])
    return np.uint64(column_at(address, n, np.uint32)[np.uint64(row)])


@jit
def _gather(codes, lut, base, rows, first, last, out, at, place):  # type: ignore[no-untyped-def]
    # Unsigned: no look at whether a place counts from the end.
    unsigned_base, column = np.uint64(base), np.uint64(place)
    unknown = 0
    for i in range(first, last):
        found = lut[unsigned_base + np.uint64(codes[np.uint64(rows[np.uint64(i)])])]
        out[np.uint64(at + i), column] = found
        unknown += found == 0
    return unknown


@jit
def gather_feature(address, kind, n, lut, base, rows, first, last, out, at, place):  # type: ignore[no-untyped-def]
    """out[at + i, place] = lut[base + codes[rows[i]]], for i from ``first`` to ``last``; how many of them are 0."""
    if kind == 0:
        return _gather(column_at(address, n, np.uint8), lut, base, rows, first, last, out, at, place)
    if kind == 1:
        return _gather(column_at(address, n, np.uint16), lut, base, rows, first, last, out, at, place)
    return _gather(column_at(address, n, np.uint32), lut, base, rows, first, last, out, at, place)
