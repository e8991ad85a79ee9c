"""Tools for recipes that derive training rows: seeded choices, counts of the past, rows in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars.io.plugins import register_io_source

from stoker.base.errors import DataError
from stoker.prep.recipes.draw import integers, key_of, uniform

__all__ = ["PastCounts", "negatives", "one_of", "pick", "streamed"]

_BATCH = 65_536  # rows derived at a time
_ROUNDS = 64  # draws of a negative before it is given up


def streamed(
    schema: Mapping[str, Any], rows: int, make: Callable[[int, int], pl.DataFrame], *, step: int = _BATCH
) -> pl.LazyFrame:
    """A lazy frame whose rows come from ``make(start, stop)`` over ``range(0, rows, step)``, in order.

    Only a few batches exist at a time, however many rows one of the ``rows`` expands to.
    """

    def generate(
        columns: list[str] | None, predicate: pl.Expr | None, limit: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        left = limit
        for start in range(0, rows, step):
            frame = make(start, min(start + step, rows)).cast(pl.Schema(dict(schema)))
            if left is not None:
                frame = frame.head(left)
                left -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame.select(columns) if columns is not None else frame
            if left is not None and left <= 0:
                return

    return register_io_source(generate, schema=pl.Schema(dict(schema)))


def pick(seed: int, name: str, column: str, below: int) -> pl.Expr:
    """A whole number in [0, below) that hangs on the seed and the value only; the same everywhere."""
    key = key_of(seed, name)
    return pl.col(column).map_batches(
        lambda values: pl.Series(integers(key, values.to_numpy(), below)),
        return_dtype=pl.Int64,
        is_elementwise=True,
    )


class PastCounts:
    """How often a key occurred strictly before a moment, from events held as one sorted array of 64-bit
    numbers.

    Args:
        keys: code of each event's key, 0 or more, [n].
        times: time of each event, any whole numbers, [n].
    """

    def __init__(self, keys: NDArray[np.integer], times: NDArray[np.integer]) -> None:
        self._origin = int(times.min(initial=0))
        self._span = int(times.max(initial=0)) - self._origin + 2
        if self._span * (int(keys.max(initial=0)) + 1) >= 2**63:
            raise DataError("times spread too far to count events by key; is the time column in nanoseconds?")
        self._events = np.sort(keys.astype(np.int64) * self._span + (times - self._origin))

    def before(
        self, keys: NDArray[np.integer], times: NDArray[np.integer], *, window: int | None = None
    ) -> NDArray[np.int64]:
        """Events of each key with time < the given one (and >= time - window), [n]."""
        base = keys.astype(np.int64) * self._span
        at = times.astype(np.int64) - self._origin
        last = self._span - 1
        first = base if window is None else base + np.clip(at - window, 0, last)
        upto = np.searchsorted(self._events, base + np.clip(at, 0, last))
        return np.asarray(upto - np.searchsorted(self._events, first), dtype=np.int64)


def negatives(
    seed: int,
    count: int,
    draw: Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.int64]],
    refused: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]],
) -> NDArray[np.int64]:
    """Items for ``count`` negative rows, drawn again where they are refused; -1 where none was found.

    Args:
        draw: (uniform numbers in [0, 1), row numbers) -> items.
        refused: (items, row numbers) -> whether an item must not be that row's negative.
    """
    items = np.full(count, -1, dtype=np.int64)
    open_rows = np.arange(count)
    for attempt in range(_ROUNDS):
        if len(open_rows) == 0:
            break
        drawn = draw(uniform(key_of(seed, "negative", attempt), open_rows), open_rows)
        bad = refused(drawn, open_rows)
        items[open_rows[~bad]] = drawn[~bad]
        open_rows = open_rows[bad]
    return items


def one_of(names: Sequence[str], codes: NDArray[np.integer]) -> pl.Series:
    """``names[codes]`` as text, for splits."""
    return pl.Series(list(names)).gather(pl.Series(codes.astype(np.uint32)))
