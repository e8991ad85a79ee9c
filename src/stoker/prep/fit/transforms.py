"""Dense columns: how their values are stored until they are fitted (:mod:`dense_fit`); then fill, clip, transform.

A stored column has the narrowest type that holds all its values: uint8, where 255 is missing, uint16, where 65535 is,
or float32 or float64, where NaN is. The transforms are those of the public DLRM scripts ("log1p": log(max(x, 0) + 1))
and of NVTabular ("zscore").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.prep.schema import DenseColumn

__all__ = ["DenseFit", "blocks", "compact", "dense_values", "stepped", "values_of"]

Array = npt.NDArray[Any]
TYPES = (np.uint8, np.uint16, np.float32)  # tried in this order before float64
BLOCK = 2**12  # rows that are worked on together, so that temporary arrays and rows of the output stay in cache


@dataclass(frozen=True, kw_only=True)
class DenseFit:
    """What was fitted for one column: the value of missing fields, and (x - shift) * scale as the last step."""

    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, column: DenseColumn) -> DenseFit:
        """Return the fit of a column that needs no training rows."""
        return cls(fill=float(column.fill))


def blocks(count: int, rows: Array | None = None) -> Iterator[tuple[int, Any]]:
    """Yield, block by block, the number of rows before it and what selects its rows: of ``rows`` [count], or of all."""
    for begin in range(0, count, BLOCK):
        stop = min(begin + BLOCK, count)
        yield begin, slice(begin, stop) if rows is None else rows[begin:stop]


def values_of(column: Array) -> Array:
    """Return stored values [n] as float64, NaN where missing."""
    found = column.astype(np.float64)
    if column.dtype.kind == "u":
        found[column == np.iinfo(column.dtype).max] = np.nan
    return found


def compact(pieces: Sequence[Array]) -> Array:
    """Return a column [n] of float64, float32 or int64, in pieces, in the narrowest type that holds all its values as
    float64."""
    rows = sum(map(len, pieces))
    for dtype in TYPES:
        column = np.empty(rows, dtype)
        if _stored(pieces, column):
            return column
    return np.concatenate(pieces, out=np.empty(rows, np.float64))


def _stored(pieces: Sequence[Array], column: Array) -> bool:
    """Write pieces to a column; return False, with a part of them written, if its type does not hold all of them."""
    at = 0
    for piece in pieces:
        for _, chosen in blocks(len(piece)):
            values = piece[chosen].astype(np.float64)
            missing, block = np.isnan(values), column[at : at + len(values)]
            at += len(values)
            with np.errstate(over="ignore", invalid="ignore"):
                block[:] = values
            if column.dtype.kind == "u":
                block[missing] = np.iinfo(column.dtype).max
            # Bits are compared: -0.0 is no whole number.
            if not ((values_of(block).view(np.int64) == values.view(np.int64)) | missing).all():
                return False
    return True


def stepped(column: DenseColumn, values: Array, fill: float) -> Array:
    """Fill, clip and take the logarithms of float64 values [n], NaN where missing, in place; return them."""
    values[np.isnan(values)] = fill
    # Not np.clip, which may change the sign of a zero.
    if column.clip_min is not None:
        values[values < column.clip_min] = column.clip_min
    if column.clip_max is not None:
        values[values > column.clip_max] = column.clip_max
    for _ in range(column.transforms.count("log1p")):
        np.maximum(values, 0.0, out=values)
        values += 1.0
        np.log(values, out=values)
    return values


def dense_values(
    columns: Sequence[DenseColumn],
    raw: Sequence[Array],
    fit: Sequence[DenseFit] | None = None,
    *,
    rows: npt.NDArray[np.int64] | None = None,
    out: npt.NDArray[np.float32] | None = None,
    at: int = 0,
) -> npt.NDArray[np.float32]:
    """Return [m, D'] what the model sees of rows of the ``raw`` columns [n], flags of missing values included.

    Args:
        columns: D of them.
        raw: as many, of a type that :func:`compact` gives.
        fit: of each column; needed where one is fitted.
        rows: numbers of m rows; None: all.
        out, at: write to rows ``at`` and on of this array instead.
    """
    fits = fit if fit is not None else [DenseFit.of(column) for column in columns]
    places = np.cumsum([0, *(len(column.names) for column in columns)]).tolist()
    count = len(rows) if rows is not None else len(raw[0]) if len(raw) else 0
    if out is None:
        out = np.empty((count, places[-1]), np.float32)
    for begin, chosen in blocks(count, rows):
        for column, given, one, place in zip(columns, raw, fits, places, strict=False):
            values = values_of(given[chosen])
            block = out[at + begin : at + begin + len(values)]
            if column.null_flag:
                block[:, place + 1] = np.isnan(values)
            values = stepped(column, values, one.fill)
            with np.errstate(over="ignore"):  # beyond float32: infinite
                block[:, place] = (values - one.shift) * one.scale
    return out
