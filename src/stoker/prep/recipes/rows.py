"""Tools for recipes: columns with equal settings, seeded choices, histories, negatives, rows in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars import selectors
from polars.io.plugins import register_io_source

from stoker.base.errors import DataError
from stoker.dataset.manifest import SPLITS
from stoker.prep.recipes.draw import integers, key_of, uniform
from stoker.prep.schema import CategoricalColumn, DenseColumn, SplitRule

LOGGED = ("log1p", "zscore")
_ROUNDS = 64  # how often a negative is drawn before giving up

Ints = NDArray[np.int64]


def dense(names: Iterable[str], *transforms: str, **settings: Any) -> tuple[DenseColumn, ...]:
    """Return dense columns that share their settings."""
    return tuple(DenseColumn(name=name, transforms=transforms, **settings) for name in names)


def categorical(names: Iterable[str], kind: str = "int", **settings: Any) -> tuple[CategoricalColumn, ...]:
    """Return categorical columns of one type."""
    return tuple(CategoricalColumn(name=name, type=kind, **settings) for name in names)


def split_column(names: Iterable[str] = SPLITS) -> SplitRule:
    """Return the split rule for rows with a column ``split``."""
    return SplitRule(rule="column", column="split", values={name: name for name in names})


def from_batches(schema: Mapping[str, Any], batches: Callable[[], Iterable[pl.DataFrame]]) -> pl.LazyFrame:
    """Return a lazy frame of the rows of several frames, of which only a few exist at a time."""

    def generate(
        columns: list[str] | None, predicate: pl.Expr | None, limit: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        for frame in batches():
            if limit is not None:
                frame = frame.head(limit)
                limit -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame.select(columns) if columns is not None else frame
            if limit == 0:
                return

    return register_io_source(generate, schema=pl.Schema(schema))


def streamed(rows: int, make: Callable[[int, int], pl.DataFrame], *, step: int) -> pl.LazyFrame:
    """Return a lazy frame whose rows come from ``make(start, stop)`` over ``range(0, rows, step)``, in order.

    Booleans become 0 and 1, whole numbers Int64. ``make(0, 0)`` defines the columns.
    """

    def typed(start: int, stop: int) -> pl.DataFrame:
        frame = make(start, stop)
        return frame.with_columns(selectors.boolean().cast(pl.Int8), selectors.integer().cast(pl.Int64))

    starts = range(0, rows, step)
    return from_batches(typed(0, 0).schema, lambda: (typed(start, min(start + step, rows)) for start in starts))


def pick(seed: int, name: str, column: str, below: int) -> pl.Expr:
    """Return an expression for a whole number in [0, below) that depends on the seed and the value only."""
    key = key_of(seed, name)
    return pl.col(column).map_batches(
        lambda values: pl.Series(integers(key, values.to_numpy(), below)), return_dtype=pl.Int64, is_elementwise=True
    )


class Histories(NamedTuple):
    """The rows of each owner, in order of time. Every array has an entry for each row, [n]."""

    order: Ints  # rows sorted by owner, then time; the places below are positions in it
    place: Ints  # of the row itself
    first: Ints  # of the owner's first row
    stop: Ints  # after the owner's last row with an earlier time
    end: Ints  # after the owner's last row

    @classmethod
    def find(cls, owner: Ints, time: Ints) -> Histories:
        """Find the histories of at least one row; the rows of an owner must be in order of time."""
        order = np.argsort(owner, kind="stable")
        place = np.empty_like(order)
        place[order] = places = np.arange(len(order))
        new_owner, new_time = (np.append(True, np.diff(values[order]) != 0) for values in (owner, time))
        starts = np.flatnonzero(new_owner)
        number = (np.cumsum(new_owner) - 1)[place]
        stop = np.maximum.accumulate(np.where(new_owner | new_time, places, 0))
        return cls(order, place, starts[number], stop[place], np.append(starts[1:], len(order))[number])


class PastCounts:
    """Count how often a key occurred strictly before a time, with all events in one sorted array of 64-bit numbers.

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

    def before(self, keys: NDArray[np.integer], times: NDArray[np.integer], *, window: int | None = None) -> Ints:
        """Return the number of events of each key before the given time (and not before time - window), [n]."""
        base = keys.astype(np.int64) * self._span
        at = times.astype(np.int64) - self._origin
        last = self._span - 1
        first = base if window is None else base + np.clip(at - window, 0, last)
        upto = np.searchsorted(self._events, base + np.clip(at, 0, last))
        return np.asarray(upto - np.searchsorted(self._events, first), dtype=np.int64)


def negatives(
    seed: int,
    count: int,
    draw: Callable[[NDArray[np.float64], Ints], Ints],
    refused: Callable[[Ints, Ints], NDArray[np.bool_]],
    numbers: Ints | None = None,
) -> Ints:
    """Draw items for ``count`` negative rows, again if they are refused; -1 where none was found.

    Args:
        seed: of the draws.
        count: number of rows.
        draw: (uniform numbers in [0, 1), row numbers) -> items.
        refused: (items, row numbers) -> whether an item must not be the row's negative.
        numbers: [count], on which the draws depend instead of the row numbers.
    """
    items = np.full(count, -1, dtype=np.int64)
    open_rows = np.arange(count)
    for attempt in range(_ROUNDS):
        if len(open_rows) == 0:
            break
        counters = open_rows if numbers is None else numbers[open_rows]
        drawn = draw(uniform(key_of(seed, "negative", attempt), counters), open_rows)
        bad = refused(drawn, open_rows)
        items[open_rows[~bad]] = drawn[~bad]
        open_rows = open_rows[bad]
    return items


def with_negatives(taken: Ints, others: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return each taken item [n], followed by its negatives [n, K] that are not -1.

    Returns:
        For each row the number of the taken item, the item, and whether it is the taken one.
    """
    items = np.column_stack([taken, others])
    number, slot = np.nonzero(items >= 0)
    return number, items[number, slot], slot == 0


def among(values: Ints, known: Ints) -> NDArray[np.bool_]:
    """Return bool [n]: whether each value is in ``known``, which is sorted and not empty."""
    return np.asarray(known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values)
