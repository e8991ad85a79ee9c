"""Rows of equal keys in a frame in memory: codes of keys, rows sorted by them, and hashes of texts.

Missing values are a key of their own, NaN is missing, and -0.0 is 0.0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.errors import DataError
from stoker.ops.codegen.jit import jit
from stoker.prep.parse.dictionaries import splitmix, text_hashes

Codes = npt.NDArray[np.uint64]
_SLICE = 2**17  # sorted rows that are processed at a time
_MOST = 2**62  # codes of joined columns are below
_DIGIT = 11  # bits of a sorting pass: 2**11 counters fit the first cache
_JOINT, _ABSENT = "\x1f", "\x00"  # between texts that are hashed, and for a missing one


def key(name: str, dtype: Any) -> pl.Expr:
    """Return a key column as values that are equal where the keys are.

    Raises:
        DataError: the type cannot be a key.
    """
    column = pl.col(name)
    if dtype.is_float():
        return pl.when(column == 0).then(pl.lit(0.0, dtype)).otherwise(column.fill_nan(None)).alias(name)
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return column if dtype == pl.String else column.cast(pl.String)
    if not (dtype.is_integer() or dtype.is_temporal() or dtype == pl.Boolean):
        raise DataError(
            f"column {name!r} holds {dtype}, which cannot be a key. Keys are text, numbers, moments or 0 and 1."
        )
    return column


def key_codes(frame: pl.DataFrame, by: Sequence[str]) -> tuple[Codes, int]:
    """Return uint64 [n], equal where the keys of rows are equal, and a bound that all codes are below.

    Raises:
        DataError: a column that cannot be a key.
    """
    codes, bound = np.zeros(0, np.uint64), 0
    for number, name in enumerate(by):
        found = _codes(frame.select(key(name, frame.schema[name])).to_series())
        codes, bound = join_codes(codes, bound, *found) if number else found
    return codes, bound


def join_codes(codes: Codes, bound: int, more: Codes, more_bound: int) -> tuple[Codes, int]:
    """Return one code for each pair of codes, in the order of the pairs, and its bound."""
    if bound * more_bound > _MOST:
        codes, bound = _ranked(codes)
    if bound * more_bound > _MOST:
        more, more_bound = _ranked(more)
    return codes * np.uint64(more_bound) + more, bound * more_bound


def _ranked(codes: Codes) -> tuple[Codes, int]:
    order = sort_rows(codes, int(codes.max(initial=0)) + 1)
    ordered = codes[order]
    ranks = np.empty(len(codes), np.uint64)
    ranks[order] = np.cumsum(starts_of(ordered)) - 1
    return ranks, int(ranks.max(initial=0)) + 1


def starts_of(values: Any) -> npt.NDArray[np.bool_]:
    """Return bool [n]: where sorted values change."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def sort_rows(codes: Codes, bound: int, rows: Any = None) -> Any:
    """Sort rows by code, all below ``bound``; return int32 [n], from 2**31 rows on int64.

    Rows of equal code keep the order of ``rows`` (None: the order of ``codes``).
    """
    rows = np.arange(len(codes), dtype=np.int32 if len(codes) < 2**31 else np.int64) if rows is None else rows
    for shift in range(0, (bound - 1).bit_length(), _DIGIT):
        sorted_rows = np.empty_like(rows)
        _sort_by_digit(codes, np.uint64(shift), rows, np.zeros((1 << _DIGIT) + 1, np.int64), sorted_rows)
        rows = sorted_rows
    return rows


def order_codes(values: Any) -> tuple[Codes, int]:
    """Return uint64 [n] in the order of int64 or float64 values without NaN, and a bound."""
    bits = values.view(np.int64) if values.dtype == np.int64 else (values + 0.0).view(np.int64)
    codes = bits.view(np.uint64) ^ np.uint64(2**63)
    if values.dtype != np.int64:
        codes = np.where(bits < 0, ~bits.view(np.uint64), codes)
    least = codes.min(initial=2**64 - 1)
    return codes - least, int(codes.max(initial=0)) - int(least) + 1 if len(codes) else 1


@jit
def _sort_by_digit(codes, shift, rows, ends, out):  # type: ignore[no-untyped-def]
    """Sort ``rows`` by one digit of their codes into ``out``, stably; ``ends``: zeros, one more than digits."""
    mask = np.uint64(ends.size - 2)
    for i in range(rows.size):
        ends[((codes[i] >> shift) & mask) + np.uint64(1)] += 1
    for digit in range(1, ends.size):
        ends[digit] += ends[digit - 1]
    for i in range(rows.size):
        digit = (codes[rows[i]] >> shift) & mask
        out[ends[digit]] = rows[i]
        ends[digit] += 1


def _codes(series: pl.Series) -> tuple[Codes, int]:
    """Return codes of one column, 0 where the value is missing, and their bound."""
    if series.dtype == pl.String:
        series = series.cast(pl.Categorical(pl.Categories.random()))  # numbers of distinct texts, of this column alone
    missing = series.is_null()
    whole = series.to_physical()
    if whole.dtype == pl.Boolean:
        whole = whole.cast(pl.UInt8)
    if whole.dtype.is_float():
        real = whole.cast(pl.Float64).fill_null(0.0).to_numpy()
        whole = pl.Series(real.view(np.uint64)).set(missing, None)
    elif whole.dtype != pl.UInt64:
        whole = whole.cast(pl.Int64)
    extremes: Any = (whole.min(), whole.max())
    if None in extremes:
        return np.zeros(len(series), np.uint64), 1
    bits: Any = whole.fill_null(extremes[0]).to_numpy()
    codes = bits.view(np.uint64) - np.uint64(extremes[0] % 2**64)
    bound = extremes[1] - extremes[0] + 1
    if bound > _MOST:
        codes, bound = _ranked(codes)
    codes += np.uint64(1)
    if missing.any():
        codes[missing.to_numpy()] = 0
    return codes, bound + 1


def _all(wanted: npt.NDArray[np.bool_]) -> bool:
    """Return True if all rows are wanted, at once where one value stands for all."""
    return bool(wanted[:1].all()) if wanted.strides == (0,) else bool(wanted.all())


class Groups:
    """Some rows sorted by a code, rows of equal code in the order of the frame.

    Args:
        rows: of the frame, [m].
        codes: of these rows.
    """

    def __init__(self, rows: Any, codes: Codes) -> None:
        self.rows = rows
        #: int64 [groups]: where each group begins
        self.starts = np.flatnonzero(starts_of(codes))
        #: uint64 [groups]: the code of each group
        self.codes = codes[self.starts]
        #: int64 [groups]: rows of each group
        self.sizes = np.diff(self.starts, append=len(rows))

    def sums(self, values: Any) -> Any:
        """Return the sum of each group, of ``values`` [all rows of the frame]; booleans are counted."""
        kind = np.int64 if values.dtype == np.bool_ else values.dtype
        return np.add.reduceat(values[self.rows], self.starts, dtype=kind)

    def counts(self, wanted: npt.NDArray[np.bool_]) -> Any:
        """Return how many rows of each group are wanted."""
        return self.sizes if _all(wanted) else self.sums(wanted)

    def first(self, wanted: npt.NDArray[np.bool_]) -> Any:
        """Return the first wanted row of each group, or the number of all rows if none is wanted."""
        if _all(wanted):
            return self.rows[self.starts]
        return np.minimum.reduceat(np.where(wanted[self.rows], self.rows, np.int64(len(wanted))), self.starts)


def sorted_groups(codes: Codes, bound: int, together: int = 1) -> Iterator[Groups]:
    """Yield all rows in the order of their codes, a slice at a time, so that temporary arrays are small.

    All codes are below ``bound``. Rows with equal ``code // together`` come in one slice.
    """
    order = sort_rows(codes, bound)
    start = 0
    while start < len(order):
        stop = min(start + _SLICE, len(order))
        last = codes[order[stop - 1]] // np.uint64(together)
        stop = bisect_right(order, last, stop, key=lambda row: codes[row] // np.uint64(together))
        yield Groups(order[start:stop], codes[order[start:stop]])
        start = stop


def text_of(column: str) -> pl.Expr:
    """Return an expression for the texts of a column; NaN is missing."""

    def texts(series: pl.Series) -> pl.Series:
        if series.dtype.is_float():
            series = series.fill_nan(None).set((series == 0).fill_null(False), 0.0)
        return series.cast(pl.String)

    return pl.col(column).map_batches(texts, return_dtype=pl.String, is_elementwise=True)


def stable_hash(columns: Sequence[str], seed: int = 0) -> pl.Expr:
    """Return an expression for a UInt64 hash of the texts of columns: FNV-1a of UTF-8, then splitmix64."""
    joined = pl.concat_str([text_of(name).fill_null(_ABSENT) for name in columns], separator=_JOINT)
    return joined.map_batches(lambda s: pl.Series(text_hashes(s, seed)), return_dtype=pl.UInt64, is_elementwise=True)


def row_folds(column: str, seed: int, folds: int) -> pl.Expr:
    """Return an expression for splitmix64 of whole numbers modulo ``folds``, Int32; the split rules hash rows alike."""
    mixed: Any = splitmix(np.array([seed], np.uint64))[0]

    def fold(series: pl.Series) -> pl.Series:
        hashes = splitmix(series.cast(pl.Int64).to_numpy().view(np.uint64) ^ mixed)
        return pl.Series((hashes % np.uint64(folds)).astype(np.int32))

    return pl.col(column).map_batches(fold, return_dtype=pl.Int32, is_elementwise=True)
