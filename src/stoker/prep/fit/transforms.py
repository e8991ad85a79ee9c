"""Dense columns: how their values are kept until they are fitted (:mod:`dense_fit`); then fill, clip, transform.

The rules are those of the public DLRM scripts ("log1p": log(max(x, 0) + 1)) and of NVTabular ("zscore").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.prep.fit.dense_kernels import TYPES, Order, narrowed, tiles, whole_narrowed, write_tile
from stoker.prep.schema import DenseColumn

__all__ = ["DenseFit", "DenseSteps", "clips_and_logarithms", "compact", "dense_values"]

Array = npt.NDArray[Any]
_LOOK = 256  # values of a piece that say which type to try first
Raw = Sequence[Array]  # D columns [n]


def compact(pieces: Sequence[Array]) -> Array:
    """Return a column [n] of float64, float32 or int64, which may be in pieces, as the first type that holds all its
    values as float64: uint8, whose 255 stands for NaN, uint16, whose 65535 does, float32 or float64."""
    rows = sum(map(len, pieces))
    for dtype in TYPES[_first_try(pieces) : -1]:
        column = np.empty(rows, dtype)
        if _narrowed(pieces, column):
            return column
    return np.concatenate(pieces, out=np.empty(rows, np.float64))


def _first_try(pieces: Sequence[Array]) -> int:
    """The first type that holds some of the values, as its place among all."""
    found = 0
    for piece in pieces:
        some = np.ascontiguousarray(piece[:: len(piece) // _LOOK + 1], np.float64)
        while found < len(TYPES) - 1 and not _narrowed([some], np.empty(len(some), TYPES[found])):
            found += 1
    return found


def _narrowed(pieces: Sequence[Array], column: Array) -> bool:
    """Write pieces to a column; whether its type holds all of them, else it is written in part."""
    at = 0
    for piece in pieces:
        part = column[at : at + len(piece)]
        at += len(piece)
        if column.dtype.kind == "u":
            if not whole_narrowed(piece, part, np.int64(np.iinfo(column.dtype).max)):
                return False
        elif not narrowed(piece, part):
            return False
    return True


def dense_values(
    columns: Sequence[DenseColumn],
    raw: Raw,
    fit: Sequence[DenseFit] | None = None,
    *,
    rows: npt.NDArray[np.int64] | None = None,
    out: npt.NDArray[np.float32] | None = None,
    at: int = 0,
) -> npt.NDArray[np.float32]:
    """[m, D'] as the model sees rows of the ``raw`` columns [n], flags of missing values among them.

    Args:
        columns: D of them.
        raw: as many, of a type that :func:`compact` gives.
        fit: what columns learned; needed where one is fitted.
        rows: which rows, m; None: all.
        out, at: write to rows ``at`` and on of this array instead.
    """
    rows = np.arange(len(raw[0]) if len(raw) else 0) if rows is None else rows
    steps = DenseSteps(columns, fit)
    if out is None:
        out = np.empty((len(rows), steps.width), np.float32)
    steps.write(raw, rows, out, at)
    return out


class DenseSteps:
    """What is done to the values of D columns.

    Args:
        columns: D of them.
        fit: what they learned; needed where one is fitted.
    """

    def __init__(self, columns: Sequence[DenseColumn], fit: Sequence[DenseFit] | None = None) -> None:
        widths = [len(column.names) for column in columns]
        found = fit if fit is not None else [DenseFit.of(column) for column in columns]
        flags = np.array([column.null_flag for column in columns], np.bool_)
        self.width = sum(widths)  # D', with the flags of missing values
        self._steps, self._fills = clips_and_logarithms(columns), np.array([one.fill for one in found])
        self._order = Order(self._steps, flags)
        begins = np.cumsum([0, *widths[:-1]]).astype(np.int64)
        #: [D'] where each row of a tile goes, and [D', 2] its shift and scale.
        self.places, self.scales = np.empty(self.width, np.int64), np.tile([0.0, 1.0], (self.width, 1))
        self.places[self._order.values] = begins[: len(columns)]
        self.places[self._order.flags[flags]] = begins[: len(columns)][flags] + 1
        self.scales[self._order.values] = np.array([(one.shift, one.scale) for one in found]).reshape(-1, 2)

    def tiles(self, raw: Raw, rows: Array) -> Iterator[tuple[int, int, Array]]:
        """``rows`` [m] of the raw columns some at a time: the first, that behind the last, and the tile [D', rows],
        which is to be scaled."""
        return tiles(raw, rows, self._steps, self._fills, self._order)

    def write(self, raw: Raw, rows: Array, out: npt.NDArray[np.float32], at: int) -> None:
        """Write ``rows`` [m] of the raw columns to the rows ``at`` and on of ``out`` [., D']."""
        for begin, _, tile in self.tiles(raw, rows):
            write_tile(tile, self.scales, self.places, out, at + begin)


def clips_and_logarithms(columns: Sequence[DenseColumn]) -> Array:
    """[D, 3] least and greatest value, and how often the logarithm is taken."""
    return np.array(
        [
            (
                -np.inf if column.clip_min is None else float(column.clip_min),
                np.inf if column.clip_max is None else float(column.clip_max),
                column.transforms.count("log1p"),
            )
            for column in columns
        ]
    ).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class DenseFit:
    """What one column learned: the value of missing fields, and (x - shift) * scale as the last step."""

    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, column: DenseColumn) -> DenseFit:
        """The fit of a column that learns nothing."""
        return cls(fill=float(column.fill))
