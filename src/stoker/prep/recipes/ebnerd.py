"""EB-NeRD: which of the shown articles is clicked? Two weeks of a Danish newspaper; the first trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stoker.base.errors import DataError
from stoker.prep.features.lists import lists_of, previous_values
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.news_features import news_schema
from stoker.prep.recipes.rows import PastCounts, one_of, pick, streamed
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

__all__ = ["ebnerd"]

# next_read_time and next_scroll_percentage are known after the click only. read_time and scroll_percentage
# speak of the page that the list stood on, but are written when the reader leaves it. None is a feature.
_USER = ("is_subscriber", "is_sso_user", "gender", "age", "postcode")
_BEHAVIOURS = {
    "impression_id": "int",
    "impression_time": "string",
    "device_type": "int",
    "article_ids_inview": "string",
    "article_ids_clicked": "string",
    "user_id": "int",
    "session_id": "int",
} | dict.fromkeys(_USER, "int")
_HISTORIES = {"user_id": "int", "article_id_fixed": "string", "impression_time_fixed": "string"}
_SPLITS = ("train", "valid", "test")
_DAY = 86_400
_OUT = {
    "label": pl.Int8,
    "impression": pl.Int64,
    "time": pl.Int64,
    "user": pl.Int64,
    "session": pl.Int64,
    "article": pl.Int64,
    "device": pl.Int64,
    **dict.fromkeys(_USER, pl.Int64),
    "hour": pl.Int64,
    "weekday": pl.Int64,
    "position": pl.Int64,
    "shown": pl.Int64,
    "recent_clicks": pl.Int64,
    "recent_views": pl.Int64,
    "history": pl.List(pl.Int64),
    "split": pl.String,
}


def _schema(name: str, dense: Sequence[str]) -> Schema:
    columns = ("user", "article", "device", *_USER, "hour", "weekday", "position")
    return Schema(
        name=f"ebnerd/{name}",
        label=Label(column="label"),
        dense=tuple(DenseColumn(name=column, transforms=("log1p", "zscore")) for column in dense),
        categorical=tuple(CategoricalColumn(name=column, type="int") for column in columns),
        sequence=(SequenceColumn(name="history", type="int", table="article", max_length=20),),
        split=SplitRule(rule="column", column="split", values={split: split for split in _SPLITS}),
    )


def _features_schema() -> Schema:
    return news_schema(
        "ebnerd/features",
        group="impression",
        dense=("shown", "recent_clicks", "recent_views"),
        categorical=("user", "article", "device", *_USER, "hour", "weekday", "position"),
        history="history",
        context=("device", "is_subscriber", "age"),
        differ="position",
        popular="recent_clicks",
    )


def ebnerd(preset: str = "weeks", *, history: int = 20) -> Recipe:
    """EB-NeRD, week 1 to week 2; "weeks" counts clicks and views of the last day, "ids" does not. "features"
    ranks: an impression is one list; with engineered features (:mod:`stoker.prep.recipes.news_features`).

    Impressions of the second week validate or test by a hash of their number.
    """
    return Recipe(
        name="ebnerd",
        description="EB-NeRD news impressions, one row per shown article; week 1 trains, week 2 tests",
        presets={
            "weeks": partial(_schema, "weeks", ("shown", "recent_clicks", "recent_views")),
            "ids": partial(_schema, "ids", ("shown",)),
            "features": _features_schema,
        },
        preset=preset,
        inputs={
            "train": RawInput(files=("*train*behaviors*",), columns=_BEHAVIOURS),
            "later": RawInput(files=("*validation*behaviors*",), columns=_BEHAVIOURS),
            "train_history": RawInput(files=("*train*history*",), columns=_HISTORIES, optional=True),
            "later_history": RawInput(files=("*validation*history*",), columns=_HISTORIES, optional=True),
        },
        derive=partial(_derive, most=history),
        example="stoker prepare ebnerd 'ebnerd/*.parquet' --out data/ebnerd",
        source="Ekstra Bladet News Recommendation Dataset, RecSys Challenge 2024; research use",
    )


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, most: int) -> pl.LazyFrame:
    """Shown articles in order of time. The impressions stay in memory; their rows are made in batches."""
    log = _impressions(inputs)
    second, week = log["second"].to_numpy(), log["week"].to_numpy()
    splits = np.where(week == 0, 0, 1 + log["half"].to_numpy())
    views = PastCounts(*_events(log, "article_ids_inview"))
    clicks = PastCounts(*_events(log, "article_ids_clicked"))
    past = [
        _History(inputs.get(name), log.filter(pl.col("week") == number)["impression_time"])
        for number, name in enumerate(("train_history", "later_history"))
    ]

    def make(start: int, stop: int) -> pl.DataFrame:
        part = log.slice(start, stop - start)
        shown = part["article_ids_inview"].list.len().to_numpy().astype(np.int64)
        row = np.repeat(np.arange(part.height), shown)
        article = part["article_ids_inview"].explode().cast(pl.Int64)
        when = second[start:stop][row]
        flat, lengths = _histories(past, part["user_id"].cast(pl.Int64).to_numpy()[row], week[start:stop][row], most)
        clicked = pl.DataFrame({"item": article, "clicked": part["article_ids_clicked"].gather(row)})
        clock = part["impression_time"].dt
        return pl.DataFrame(
            {
                "label": clicked.select(pl.col("clicked").list.contains(pl.col("item"))).to_series(),
                "impression": part["impression_id"].gather(row),
                "time": when,
                "user": part["user_id"].gather(row),
                "session": part["session_id"].gather(row),
                "article": article,
                "device": part["device_type"].gather(row),
                **{column: part[column].gather(row) for column in _USER},
                "hour": clock.hour().gather(row),
                "weekday": clock.weekday().gather(row),
                "position": np.arange(len(row)) - np.repeat(np.cumsum(shown) - shown, shown),
                "shown": shown[row],
                "recent_clicks": clicks.before(article.to_numpy(), when, window=_DAY),
                "recent_views": views.before(article.to_numpy(), when, window=_DAY),
                "history": lists_of(pl.Series(flat), lengths),
                "split": one_of(_SPLITS, splits[start:stop][row]),
            }
        )

    return streamed(_OUT, log.height, make, step=4096)


def _impressions(inputs: Mapping[str, pl.LazyFrame]) -> pl.DataFrame:
    """Both weeks in order of time, with ``week`` (0 or 1), ``half`` (0 or 1) and the time in seconds."""
    kept = [name for name in _BEHAVIOURS if name not in _USER]
    parts = [
        inputs[name]
        .select(*kept, *(pl.col(column).cast(pl.Int64) for column in _USER))
        .with_columns(week=pl.lit(week, dtype=pl.Int8))
        for week, name in enumerate(("train", "later"))
    ]
    for part in parts:
        if part.collect_schema()["article_ids_inview"].base_type() is not pl.List:
            raise DataError("article_ids_inview is no list column. EB-NeRD's behaviours come as Parquet files.")
    log = (
        pl.concat(parts)
        .filter(pl.col("article_ids_inview").list.len() > 0)
        .with_columns(
            pl.col("article_ids_inview", "article_ids_clicked").cast(pl.List(pl.Int64)),
            second=pl.col("impression_time").dt.epoch("s"),
            half=pick(0, "ebnerd split", "impression_id", 2),
        )
        .sort("second", "week", "impression_id", maintain_order=True)
        .collect(engine="streaming")
    )
    if log.height == 0:
        raise DataError("there is no impression in the input.")
    return log


def _events(log: pl.DataFrame, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Articles of a list column and the times of their rows, flat."""
    flat = log.select(article=column, time="second").explode("article").drop_nulls()
    return flat["article"].to_numpy(), flat["time"].to_numpy()


class _History:
    """Earlier clicks by user, all older than the first impression of the week that they are used in."""

    def __init__(self, frame: pl.LazyFrame | None, impressions: pl.Series) -> None:
        self.users = np.zeros(0, dtype=np.int64)
        self.articles = np.zeros(0, dtype=np.int64)
        self.ends = np.zeros(1, dtype=np.int64)
        if frame is None or len(impressions) == 0:
            return
        flat = (
            frame.select(
                user=pl.col("user_id").cast(pl.Int64),
                article=pl.col("article_id_fixed").cast(pl.List(pl.Int64)),
                time="impression_time_fixed",
            )
            .explode("article", "time")
            .filter(pl.col("time") < pl.lit(impressions.min()))
            .sort("user", "time", maintain_order=True)
            .collect(engine="streaming")
        )
        self.users, counts = np.unique(flat["user"].to_numpy(), return_counts=True)
        self.articles = flat["article"].to_numpy()
        self.ends = np.concatenate([[0], np.cumsum(counts)])


def _histories(
    past: list[_History], user: NDArray[np.int64], week: NDArray[np.int8], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The last articles of each row's user, flat, and how many there are."""
    first, stop = np.zeros(len(user), dtype=np.int64), np.zeros(len(user), dtype=np.int64)
    shift = 0
    for number, history in enumerate(past):
        if len(history.users):
            place = np.minimum(np.searchsorted(history.users, user), len(history.users) - 1)
            known = (week == number) & (history.users[place] == user)
            first[known] = shift + history.ends[place[known]]
            stop[known] = shift + history.ends[place[known] + 1]
        shift += len(history.articles)
    articles = np.concatenate([history.articles for history in past])
    return previous_values(articles, first, stop, most)
