"""Rows of equal keys in a frame in memory: codes of keys, and rows sorted by them.

Missing values are a key of their own, NaN is missing, and -0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.errors import DataError

__all__ = ["Codes", "Groups", "check_key", "join_codes", "key", "key_codes"]

Codes = npt.NDArray[np.uint64]
_MOST = 2**62  # codes of joined columns stay below


def check_key(name: str, dtype: Any) -> None:
    """Raise :class:`DataError` if values of this type cannot be keys."""
    whole = dtype.is_integer() or dtype.is_temporal() or dtype == pl.Boolean
    if not (whole or dtype.is_float() or dtype in (pl.String, pl.Categorical, pl.Enum)):
        raise DataError(
            f"column {name!r} holds {dtype}, which cannot be a key. Keys are text, numbers, moments or 0 and 1."
        )


def key(name: str, dtype: Any) -> pl.Expr:
    """Return the values of a key column in the form in which equal keys are equal values.

    Raises:
        DataError: the type cannot be a key.
    """
    check_key(name, dtype)
    column = pl.col(name)
    if dtype.is_float():
        return pl.when(column == 0).then(pl.lit(0.0, dtype)).otherwise(column.fill_nan(None))
    return column.cast(pl.String) if dtype in (pl.Categorical, pl.Enum) else column


def key_codes(frame: pl.DataFrame, by: Sequence[str]) -> tuple[Codes, int]:
    """Return uint64 [n], equal where the keys of rows are equal, and a bound that all codes are below.

    Raises:
        DataError: a column that cannot be a key.
    """
    codes, bound = np.zeros(frame.height, np.uint64), 1
    keys = frame.select(key(name, frame.schema[name]) for name in by)
    for series in keys.get_columns():
        codes, bound = join_codes(codes, bound, *_codes(series))
    return codes, bound


def join_codes(codes: Codes, bound: int, more: Codes, more_bound: int) -> tuple[Codes, int]:
    """Return one code for each pair of codes, in the order of the pairs, and its bound."""
    if bound * more_bound > _MOST:
        codes, bound = _ranked(codes)
    if bound * more_bound > _MOST:
        more, more_bound = _ranked(more)
    return codes * np.uint64(more_bound) + more, bound * more_bound


def _ranked(codes: Codes) -> tuple[Codes, int]:
    values, places = np.unique(codes, return_inverse=True)
    return places.astype(np.uint64), len(values)


def _codes(series: pl.Series) -> tuple[Codes, int]:
    """Return codes of one column, 0 where it is missing."""
    if series.dtype == pl.String:
        array: Any = series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
        found = array.dictionary_encode()
        places = pl.Series(pl.from_arrow(found.indices)).cast(pl.Int64).fill_null(-1).to_numpy()
        return (places + 1).astype(np.uint64), len(found.dictionary) + 1
    missing = series.is_null().to_numpy()
    whole = series.to_physical()
    if whole.dtype == pl.Boolean:
        whole = whole.cast(pl.UInt8)
    if whole.dtype.is_float():
        bits = whole.cast(pl.Float64).fill_null(0.0).to_numpy().view(np.uint64)
        whole = pl.Series(bits).set(pl.Series(missing), None)
    elif whole.dtype != pl.UInt64:
        whole = whole.cast(pl.Int64)
    least, most = whole.min(), whole.max()
    if least is None or most is None:
        return np.zeros(len(series), np.uint64), 1
    bits = whole.fill_null(least).to_numpy().astype(np.int64 if whole.dtype == pl.Int64 else np.uint64).view(np.uint64)
    codes, bound = bits - np.uint64(int(least) % 2**64), int(most) - int(least) + 1
    if bound > _MOST:
        codes, bound = _ranked(codes)
    return np.where(missing, np.uint64(0), codes + np.uint64(1)), bound + 1


class Groups:
    """Rows sorted by a code, rows of equal code in the order of the frame.

    Args:
        codes: uint64 [n].
    """

    def __init__(self, codes: Codes) -> None:
        #: int64 [n]: the rows in sorted order
        self.order = np.argsort(codes, kind="stable")
        sorted_codes = codes[self.order]
        #: int64 [groups]: where each group begins in sorted order
        self.starts = np.flatnonzero(np.append(True, sorted_codes[1:] != sorted_codes[:-1])[: len(codes)])
        #: uint64 [groups]: the code of each group
        self.codes = sorted_codes[self.starts]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64 [groups]: rows of each group."""
        return np.diff(self.starts, append=len(self.order))

    def sums(self, values: Any) -> Any:
        """Return the sum of some values, in the order of the frame, over each group."""
        return np.add.reduceat(values[self.order], self.starts) if len(self.order) else np.zeros(0, values.dtype)

    def least(self, values: Any) -> Any:
        """Return the least of some values, in the order of the frame, of each group."""
        return np.minimum.reduceat(values[self.order], self.starts) if len(self.order) else np.zeros(0, values.dtype)

    def spread(self, values: Any) -> Any:
        """Return a value of each group for each of its rows, in the order of the frame."""
        rows = np.empty(len(self.order), values.dtype)
        rows[self.order] = np.repeat(values, self.sizes)
        return rows
