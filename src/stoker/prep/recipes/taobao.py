"""Taobao UserBehavior: after these touches, does the user touch this item next?

As for TBSM, with two repairs: no user is in two splits, and no window holds a touch as late as its target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars.io.plugins import register_io_source

from stoker.base.errors import DataError
from stoker.prep.features.lists import lists_of, previous_values
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.draw import bits, integers, key_of
from stoker.prep.recipes.rows import negatives as draw_negatives
from stoker.prep.recipes.rows import one_of
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat

__all__ = ["HISTORY", "POINTS", "WINDOW", "taobao"]

HISTORY = 200  # last touches of a user that are looked at
WINDOW = 20  # touches before the target
TRAIN_SHARE = 0.7  # of the users, by the time of their last touch
# Touches from which on a user gives that many positive points, and as many negative ones.
POINTS = ((101, 10), (51, 6), (21, 3), (5, 1))
_LEAST = 4  # touches before every target
_GROUP_ROWS = 8_000_000  # log lines whose users are in memory at a time, some 200 bytes each
_BATCH = 8_192
_SPLITS = ("train", "valid", "test")
_COLUMNS = {"user": "int", "item": "int", "category": "int", "behaviour": "string", "time": "int"}
_OUT: dict[str, Any] = {
    "label": pl.Int8,
    "user": pl.Int64,
    "item": pl.Int64,
    "category": pl.Int64,
    "items": pl.List(pl.Int64),
    "categories": pl.List(pl.Int64),
    "position": pl.Float64,
    "time": pl.Int64,
    "split": pl.String,
}


def _schema() -> Schema:
    sequences = (("items", "item"), ("categories", "category"))
    return Schema(
        name="taobao",
        label=Label(column="label"),
        dense=(DenseColumn(name="position"),),
        categorical=tuple(CategoricalColumn(name=name, type="int") for name in ("user", "item", "category")),
        sequence=tuple(
            SequenceColumn(name=name, type="int", table=table, max_length=WINDOW) for name, table in sequences
        ),
        split=SplitRule(rule="column", column="split", values={split: split for split in _SPLITS}),
    )


def taobao(preset: str = "tbsm", *, seed: int = 0) -> Recipe:
    """Taobao UserBehavior in windows of 20 touches and a target; users of the last 30 % validate and test."""
    return Recipe(
        name="taobao",
        description="Taobao UserBehavior: next touched item after a window of 20, negatives never touched",
        presets={"tbsm": _schema},
        preset=preset,
        inputs={
            "log": RawInput(
                format=SourceFormat(kind="csv", separator=",", columns=tuple(_COLUMNS), quote=None),
                columns=_COLUMNS,
                required=("user", "item", "category", "time"),
            )
        },
        derive=partial(_derive, seed=seed),
        example="stoker prepare taobao UserBehavior.csv --out data/taobao",
        source="Alibaba Tianchi, User Behavior Data from Taobao",
    )


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What must be known of the whole log: 16 bytes an item."""

    items: NDArray[np.int64]  # distinct items, rising
    categories: NDArray[np.int64]  # category of each
    threshold: int  # last touch up to which a user trains
    groups: int  # groups of users that are read one after another


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, seed: int) -> pl.LazyFrame:
    """Windows by group of users, then user, then time. One pass over the log for each 8 M lines of it."""
    log = inputs["log"].select(pl.col("user", "item", "category", "time").cast(pl.Int64))
    whole = _survey(log)

    def generate(
        columns: list[str] | None, predicate: pl.Expr | None, limit: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        left = limit
        for group in range(whole.groups):
            for frame in _windows(log, whole, group, seed):
                part = frame if left is None else frame.head(left)
                left = None if left is None else left - part.height
                part = part if predicate is None else part.filter(predicate)
                yield part if columns is None else part.select(columns)
                if left is not None and left <= 0:
                    return

    return register_io_source(generate, schema=pl.Schema(_OUT))


def _survey(log: pl.LazyFrame) -> _Whole:
    per_user = log.group_by("user").agg(pl.col("time").max(), pl.len().alias("lines"))
    last = per_user.collect(engine="streaming")
    if last.height == 0:
        raise DataError("there is no touch in the input.")
    catalogue = log.group_by("item").agg(pl.col("category").min()).collect(engine="streaming").sort("item")
    times = np.sort(last["time"].to_numpy())
    return _Whole(
        items=catalogue["item"].to_numpy(),
        categories=catalogue["category"].to_numpy(),
        threshold=int(times[max(0, int(np.ceil(TRAIN_SHARE * len(times))) - 1)]),
        groups=max(1, -(-int(last["lines"].sum()) // _GROUP_ROWS)),
    )


def _of_group(log: pl.LazyFrame, group: int, groups: int) -> pl.DataFrame:
    if groups > 1:
        key = key_of(0, "taobao group")
        mine = pl.col("user").map_batches(
            lambda users: pl.Series(integers(key, users.to_numpy(), groups) == group),
            return_dtype=pl.Boolean,
            is_elementwise=True,
        )
        log = log.filter(mine)
    return log.collect(engine="streaming").sort("user", "time", "item", "category")


def _windows(log: pl.LazyFrame, whole: _Whole, group: int, seed: int) -> Iterator[pl.DataFrame]:
    part = _of_group(log, group, whole.groups)
    if part.height == 0:
        return
    user, time = part["user"].to_numpy(), part["time"].to_numpy()
    item, category = part["item"].to_numpy(), part["category"].to_numpy()
    places = np.arange(len(user))
    new_user = np.concatenate([[True], user[1:] != user[:-1]])
    # Touches of one second have no order among themselves: a window ends before its target's second.
    new_time = new_user | np.concatenate([[True], time[1:] != time[:-1]])
    before = np.maximum.accumulate(np.where(new_time, places, 0))
    starts = np.flatnonzero(new_user)
    sizes = np.diff(np.concatenate([starts, [len(user)]]))
    stop_of = np.repeat(starts + sizes, sizes)
    first_of = np.maximum(np.repeat(starts, sizes), stop_of - HISTORY)
    target = _targets(user, before, first_of, stop_of, key_of(seed, "taobao target", group))
    owner = np.repeat(np.arange(len(starts)), sizes)
    other = _unseen(owner, item, target, whole, key_of(seed, "taobao negative", group))
    target, other = target[other >= 0], other[other >= 0]
    half = 1 + integers(key_of(0, "taobao half"), user[target], 2)
    split = np.where(time[stop_of[target] - 1] <= whole.threshold, 0, half)
    for begin in range(0, len(target), _BATCH):
        positive, negative = target[begin : begin + _BATCH], other[begin : begin + _BATCH]
        at = np.repeat(positive, 2)
        items, lengths = previous_values(item, first_of[at], before[at], WINDOW)
        categories, _ = previous_values(category, first_of[at], before[at], WINDOW)
        frame = pl.DataFrame(
            {
                "label": np.tile(np.array([1, 0]), len(positive)),
                "user": user[at],
                "item": np.stack([item[positive], whole.items[negative]], axis=1).ravel(),
                "category": np.stack([category[positive], whole.categories[negative]], axis=1).ravel(),
                "items": lists_of(pl.Series(items), lengths),
                "categories": lists_of(pl.Series(categories), lengths),
                "position": (lengths + 1) / (WINDOW + 1),
                "time": time[at],
                "split": one_of(_SPLITS, np.repeat(split[begin : begin + _BATCH], 2)),
            }
        )
        yield frame.cast(pl.Schema(_OUT))


def _targets(
    user: NDArray[np.int64],
    before: NDArray[np.int64],
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
    key: int,
) -> NDArray[np.int64]:
    """Places of the positive targets: as many of each user as the history earns, at random, in order."""
    length = stop - first
    points = np.select([length >= least for least, _ in POINTS], [count for _, count in POINTS], 0)
    fit = np.flatnonzero((before - first >= _LEAST) & (points > 0))
    fit = fit[np.lexsort((bits(key, fit), user[fit]))]
    places = np.arange(len(fit))
    changes = np.concatenate([[True], user[fit][1:] != user[fit][:-1]])[: len(fit)]
    number = places - np.maximum.accumulate(np.where(changes, places, 0))
    return np.sort(fit[number < points[fit]])


def _unseen(
    owner: NDArray[np.int64], item: NDArray[np.int64], target: NDArray[np.int64], whole: _Whole, key: int
) -> NDArray[np.int64]:
    """For each target the catalogue place of an item that its user never touches; -1 where none is found."""
    touched = np.unique(owner * len(whole.items) + np.searchsorted(whole.items, item))

    def draw(chance: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (chance * len(whole.items)).astype(np.int64)

    def refused(items: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        pair = owner[target[rows]] * len(whole.items) + items
        return np.asarray(touched[np.minimum(np.searchsorted(touched, pair), len(touched) - 1)] == pair)

    return draw_negatives(key, len(target), draw, refused)
