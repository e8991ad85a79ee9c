"""Globo.com news clicks: is this the article the user clicks now, or another one that is read these hours?

The log holds clicks only. A negative is the article of a random click of the last hours, so an article is
drawn as often as it is being read. Drawn evenly, or by popularity over the whole log, negatives would be told
apart by their age alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stoker.base.errors import DataError
from stoker.prep.features.lists import lists_of, previous_values
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.draw import key_of, uniform
from stoker.prep.recipes.news_features import news_schema
from stoker.prep.recipes.rows import PastCounts, one_of, streamed
from stoker.prep.recipes.rows import negatives as draw_negatives
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

__all__ = ["globo"]

_HOUR = 3_600_000  # milliseconds, as the log's times
_CONTEXT = {
    "environment": "click_environment",
    "device": "click_deviceGroup",
    "os": "click_os",
    "country": "click_country",
    "region": "click_region",
    "referrer": "click_referrer_type",
}
_WHO = ("user_id", "session_id", "click_article_id", "click_timestamp")
_SPLITS = ("train", "valid", "test")
_OUT = {
    "label": pl.Int8,
    "user": pl.Int64,
    "article": pl.Int64,
    **dict.fromkeys(_CONTEXT, pl.Int64),
    "hour": pl.Int64,
    "weekday": pl.Int64,
    "clicked": pl.List(pl.Int64),
    "last_hour": pl.Int64,
    "age_hours": pl.Float64,
    "click": pl.Int64,
    "session": pl.Int64,
    "time": pl.Int64,
    "split": pl.String,
}


def _schema(name: str) -> Schema:
    columns = ("user", "article", *_CONTEXT, "hour", "weekday")
    return Schema(
        name=f"globo/{name}",
        label=Label(column="label"),
        dense=(
            DenseColumn(name="last_hour", transforms=("log1p", "zscore")),
            DenseColumn(name="age_hours", transforms=("log1p", "zscore")),
        ),
        categorical=tuple(CategoricalColumn(name=column, type="int") for column in columns),
        sequence=(SequenceColumn(name="clicked", type="int", table="article", max_length=20),),
        split=SplitRule(rule="column", column="split", values={split: split for split in _SPLITS}),
    )


def _features_schema() -> Schema:
    return news_schema(
        "globo/features",
        group="click",
        dense=("last_hour", "age_hours"),
        categorical=("user", "article", *_CONTEXT, "hour", "weekday"),
        history="clicked",
        context=("region", "device", "referrer"),
        differ="age_hours",
        popular="last_hour",
        splits=(*_SPLITS, "drop"),
    )


def globo(
    preset: str = "leave-last-out",
    *,
    negatives: int | None = None,
    history: int = 20,
    window_hours: float = 6,
    seed: int = 0,
) -> Recipe:
    """Globo clicks with ``negatives`` per click (2; 4 with features) among articles of the last ``window_hours``.

    "leave-last-out" tests on each user's last click and validates on the one before; "session-hash" splits
    whole sessions 80/10/10 at random; "progressive" splits by time, where most test clicks go to articles of
    which no training row knows. "features" ranks: a click and its negatives are one list; split as the first, with
    engineered features (:mod:`stoker.prep.recipes.news_features`). Lists of an article's first click are in no split:
    negatives have been clicked before, so age, clicks and listings before would tell the click for sure.
    """
    presets = ("leave-last-out", "session-hash", "progressive")
    columns = dict.fromkeys((*_WHO, *_CONTEXT.values()), "int")
    return Recipe(
        name="globo",
        description="Globo.com news clicks with negatives from the same hours and the last 20 clicks",
        presets={**{name: partial(_schema, name) for name in presets}, "features": _features_schema},
        preset=preset,
        inputs={"clicks": RawInput(columns=columns, required=_WHO)},
        derive=partial(_derive, count=negatives, most=history, window=int(window_hours * _HOUR), seed=seed),
        example="stoker prepare globo clicks.parquet --out data/globo",
        source="Globo.com, News Portal User Interactions; academic use",
    )


def _derive(
    inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, count: int | None, most: int, window: int, seed: int
) -> pl.LazyFrame:
    """Clicks in order of time, each followed by its negatives. Clicks stay in memory, some 300 bytes each."""
    ranked = bool(schema.feature)
    count = (4 if ranked else 2) if count is None else count
    log = (
        inputs["clicks"]
        .select(
            pl.col(*_WHO).cast(pl.Int64),
            *(pl.col(old).cast(pl.Int64).alias(new) for new, old in _CONTEXT.items()),
        )
        .sort("click_timestamp", "user_id", "click_article_id", "session_id", maintain_order=True)
        .collect(engine="streaming")
    )
    if log.height == 0:
        raise DataError("there is no click in the input.")
    user, article = log["user_id"].to_numpy(), log["click_article_id"].to_numpy()
    time, session = log["click_timestamp"].to_numpy(), log["session_id"].to_numpy()
    by_user, first, stop, from_end, length = _runs(user, time)
    split = _split(schema.name.partition("/")[2], session, from_end, length, seed)
    others = _negatives(user, article, time, count, window, seed, of_lists=ranked)
    past = PastCounts(article, time)
    names, birth = np.unique(article, return_index=True)  # clicks are in order of time
    born = time[birth]
    if ranked:  # no negative has never been clicked
        split = np.where(born[np.searchsorted(names, article)] < time, split, len(_SPLITS))
    clicked = article[by_user]

    def make(begin: int, end: int) -> pl.DataFrame:
        at = np.arange(begin, end)
        candidates = np.concatenate([article[at][:, None], others[begin:end]], axis=1).ravel()
        kept = candidates >= 0
        row = np.repeat(at, count + 1)[kept]
        item, when = candidates[kept], time[row]
        flat, lengths = previous_values(clicked, first[row], stop[row], most)
        clock = pl.Series(when).cast(pl.Datetime("ms")).dt
        age = when - born[np.searchsorted(names, item)]
        return pl.DataFrame(
            {
                "label": np.tile(np.arange(count + 1) == 0, len(at))[kept],
                "user": user[row],
                "article": item,
                **{name: log[name].gather(row) for name in _CONTEXT},
                "hour": clock.hour(),
                "weekday": clock.weekday(),
                "clicked": lists_of(pl.Series(flat), lengths),
                "last_hour": past.before(item, when, window=_HOUR),
                "age_hours": age / _HOUR,  # 0 at an article's first click, and nowhere else
                "click": row,
                "session": session[row],
                "time": when,
                "split": one_of((*_SPLITS, "drop"), split[row]),
            }
        )

    return streamed(_OUT, log.height, make, step=16_384)


def _runs(user: NDArray[np.int64], time: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Click numbers by user and time, and for each click where it stands among its user's.

    The further arrays, in order of time: where the user's clicks begin in the list by user, where those
    strictly before the click end, how many follow the click, and how many the user has.
    """
    order = np.argsort(user, kind="stable")
    u, t = user[order], time[order]
    places = np.arange(len(u))
    new_user = np.concatenate([[True], u[1:] != u[:-1]])
    new_time = new_user | np.concatenate([[True], t[1:] != t[:-1]])
    stop = np.maximum.accumulate(np.where(new_time, places, 0))
    starts = np.flatnonzero(new_user)
    sizes = np.diff(np.concatenate([starts, [len(u)]]))
    first, length = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    from_end = first + length - 1 - places
    back = np.empty_like(order)
    back[order] = places
    return order, first[back], stop[back], from_end[back], length[back]


def _split(
    preset: str,
    session: NDArray[np.int64],
    from_end: NDArray[np.int64],
    length: NDArray[np.int64],
    seed: int,
) -> NDArray[np.int64]:
    """0 train, 1 valid, 2 test for each click in order of time."""
    if preset in ("leave-last-out", "features"):
        # Users with fewer than three clicks would have nothing left to train on.
        return np.where((length < 3) | (from_end > 1), 0, 2 - from_end)
    if preset == "session-hash":
        share = uniform(key_of(seed, "globo session"), session)
    else:
        share = np.arange(len(session)) / len(session)
    return np.where(share < 0.8, 0, np.where(share < 0.9, 1, 2))


def _negatives(
    user: NDArray[np.int64],
    article: NDArray[np.int64],
    time: NDArray[np.int64],
    count: int,
    window: int,
    seed: int,
    *,
    of_lists: bool,
) -> NDArray[np.int64]:
    """Articles clicked in the window before, never by the user, [clicks, count]; -1 where none is found.

    With ``of_lists`` only the click's own article is refused, and an article is in a list once. What the user has read
    before may then be listed, as on a page: were it not, a feature that knows it would tell a click for sure.
    """
    _, user_code = np.unique(user, return_inverse=True)
    names, code = np.unique(article, return_inverse=True)
    owned = np.unique(user_code * len(names) + code)
    oldest = np.searchsorted(time, time - window)
    width = np.searchsorted(time, time) - oldest
    row_of = np.repeat(np.arange(len(time)), count)

    def draw(chance: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        at = row_of[rows]
        place = np.minimum(oldest[at] + (chance * width[at]).astype(np.int64), len(code) - 1)
        return np.where(width[at] > 0, code[place], -1)

    def refused(items: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        if of_lists:
            return np.asarray(items == code[row_of[rows]])
        pair = user_code[row_of[rows]] * len(names) + items
        place = np.minimum(np.searchsorted(owned, pair), len(owned) - 1)
        return np.asarray((items >= 0) & (owned[place] == pair))

    drawn = draw_negatives(seed, len(row_of), draw, refused).reshape(-1, count)
    if of_lists:
        for place in range(1, count):
            drawn[(drawn[:, :place] == drawn[:, place, None]).any(axis=1), place] = -1
    return np.where(drawn >= 0, names[np.maximum(drawn, 0)], -1)
