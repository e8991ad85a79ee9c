"""Dense columns: fill, clip, transform; and what zscore, minmax, mean and median learn from training rows.

The rules are those of the public DLRM scripts ("log1p": log(max(x, 0) + 1)) and of NVTabular ("zscore").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.data.dense_kernels import TYPES, Order, moments, narrowed, present_sums, tiles, whole_narrowed, write_tile
from stoker.data.exact_sums import COUNT, add_values, mean_and_deviation, no_values, room, times
from stoker.data.medians import Brackets, by_digits
from stoker.data.ordered import ordered_map
from stoker.data.part_store import Arena
from stoker.data.schema import FITTED_TRANSFORMS, DenseColumn

__all__ = ["DenseFit", "DenseSteps", "compact", "dense_values", "fit_dense"]

Array = npt.NDArray[Any]
_LOOK = 256  # values of a piece that say which type to try first
P = TypeVar("P")
R = TypeVar("R")
Raw = Sequence[Array]  # D columns [n]
RowsOf = Callable[[P, Callable[[Raw, Array], R]], R]  # calls with the raw columns of a part and its training rows [m]


def compact(pieces: Sequence[Array], arena: Arena) -> Array:
    """A column [n] of float64 or float32, which may be in pieces, in ``arena``, as the first type that holds all its
    values: uint8, whose 255 stands for NaN, uint16, whose 65535 does, float32 or float64."""
    rows = sum(map(len, pieces))
    for dtype in TYPES[_first_try(pieces) : -1]:
        column = arena.take(rows, dtype)
        if _narrowed(pieces, column):
            return column
        arena.give_back(column)
    whole = arena.take(rows, np.float64)
    return np.concatenate(pieces, out=whole)


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
        self._steps, self._fills = _steps(columns), np.array([one.fill for one in found])
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


def _steps(columns: Sequence[DenseColumn]) -> Array:
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


def fit_dense(
    columns: Sequence[DenseColumn], parts: Sequence[P], rows_of: RowsOf[P, Any], threads: int = 1
) -> list[DenseFit]:
    """Fit every column on training rows, in one pass over the parts but for medians that a sample did not find.

    Args:
        columns: D of them.
        parts: those that have training rows.
        rows_of: calls a function with the raw columns [n] of a part and the numbers of its training rows.
        threads: parts that are looked at at a time.

    The result depends on nothing but the values of the training rows: sums over them are exact (:mod:`exact_sums`), so
    it matters neither how they are cut into parts nor in which order they come. So do fills that are learned not have
    to be known beforehand: what was summed up with another one is corrected, exactly.
    """

    def over(look: Callable[[Raw, Array], R], some: Sequence[P] = parts) -> Iterator[R]:
        return ordered_map(lambda part: rows_of(part, look), some, threads)

    fills = np.array([float(c.fill) if not isinstance(c.fill, str) else 0.0 for c in columns])
    by_mean, by_median = (
        np.array([index for index, column in enumerate(columns) if column.fill == kind], np.int64)
        for kind in ("mean", "median")
    )
    wanted = [c.transforms[-1] if c.transforms and c.transforms[-1] in FITTED_TRANSFORMS else "" for c in columns]
    summed, ranged = (np.array([kind == one for kind in wanted]) for one in ("zscore", "minmax"))
    steps, brackets, learned = _steps(columns), Brackets(by_median), np.concatenate([by_mean, by_median])
    if len(by_median):
        brackets.guess(parts, over)
    given = fills.copy()
    given[by_median] = brackets.guesses
    given[learned[ranged[learned]]] = np.nan  # no least value can be corrected: such values are left out
    means, sums = no_values(len(by_mean)), no_values(len(columns))
    low, high, rows = np.full(len(columns), np.inf), np.full(len(columns), -np.inf), 0

    def look(raw: Raw, chosen: Array) -> tuple[Any, ...]:
        found = moments(raw, chosen, steps, given, summed, ranged) if any(wanted) else (sums[:0], low, high)
        return found, present_sums(raw, chosen, by_mean), brackets.look(raw, chosen), len(chosen)

    if len(learned) or any(wanted):
        for found, present, bracket, count in over(look):
            if any(wanted):
                sums += found[0]
                low, high = np.minimum(low, found[1]), np.maximum(high, found[2])
            means += present
            brackets.add(bracket)
            rows += count
    fills[by_mean] = [mean_and_deviation(one)[0] for one in means]
    fills[by_median] = _medians(brackets, by_median, over)
    missing = rows - np.concatenate([means[:, COUNT], brackets.present])
    for index, absent in zip(learned.tolist(), missing.tolist(), strict=True):
        if absent and wanted[index]:
            true, other = (_after(steps[index], fill) for fill in (fills[index], given[index]))
            if summed[index]:
                sums[index] += times(_sum_of(true), absent) - times(_sum_of(other), absent)
            low[index], high[index] = min(low[index], true), max(high[index], true)
    fitted = []
    for index, kind in enumerate(wanted):
        shift, scale = 0.0, 1.0
        if kind == "zscore":
            shift, deviation = mean_and_deviation(sums[index])
            scale = _inverse(deviation)
        elif kind == "minmax" and not low[index] > high[index]:
            shift = float(low[index]) + 0.0  # which of 0 and -0 is the least depends on their order
            scale = _inverse(float(high[index]) - shift)
        fitted.append(DenseFit(fill=float(fills[index]), shift=shift, scale=scale))
    return fitted


def _medians(brackets: Brackets, columns: Array, over: Any) -> list[float]:
    found = brackets.medians()
    open_ = [k for k, value in enumerate(found) if value is None]
    if open_:
        for k, value in zip(open_, by_digits(columns[open_], over), strict=True):
            found[k] = value
    return [value for value in found if value is not None]


def _after(step: Array, fill: float) -> float:
    """A fill as its column's steps leave it."""
    value, steps = np.array([fill]), step[None]
    ((_, _, tile),) = tiles([value], np.zeros(1, np.int64), steps, value, Order(steps))
    return float(tile[0, 0])


def _sum_of(value: float) -> Array:
    sums = no_values(1)
    add_values(np.array([value]), sums[0], room())
    found: Array = sums[0]
    return found


def _inverse(width: float) -> float:
    """1 / width; 1 where the values do not vary, or by so little (1e-308) that this is infinite."""
    return 1.0 / width if width > 0 and 1.0 / width < np.inf else 1.0
