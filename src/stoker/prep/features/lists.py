"""Lists of the values before each row, built without a loop over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import polars as pl


def previous_values(
    values: NDArray[Any], first: NDArray[np.int64], stop: NDArray[np.int64], most: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return ``values[max(first, stop - most):stop]`` of all rows: flat values [L] and lengths [n]."""
    start = np.maximum(first, stop - most)
    lengths = stop - start
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    index = np.arange(total) - np.repeat(ends - lengths, lengths) + np.repeat(start, lengths)
    return values[index], lengths


def lists_of(flat: pl.Series, lengths: NDArray[np.int64]) -> pl.Series:
    """Build a list column from flat values and the length of every row's list."""
    import polars as pl
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    column = pl.from_arrow(pa.LargeListArray.from_arrays(offsets, flat.to_arrow()))
    assert isinstance(column, pl.Series)
    return column
