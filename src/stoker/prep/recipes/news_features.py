"""Engineered features of news clicks, for Globo and EB-NeRD: what trivago's have, of articles in place of hotels.

Rows are listed articles, one list for each click or impression; the row that was clicked is the event that features
look back at. "Before" is strictly before the row's moment, so that no row knows its own list's click.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.prep import features as f
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

__all__ = ["news_schema"]

SPLITS = ("train", "valid", "test")


def _features(group: str, context: Sequence[str], differ: str, popular: str) -> tuple[f.Derivation, ...]:
    clicks: dict[str, Any] = {"order": "time", "events": "label"}
    encoded: dict[str, Any] = {"folds": 8, "fold_by": (group,)}
    return (
        f.Previous(name="last_article", by=("session",), column="article", **clicks),
        f.Difference(name=f"{differ}_change", by=("session",), column=differ, **clicks),
        f.SinceLast(name="since_click", by=("session",), **clicks),
        f.SinceLast(name="since_user_click", by=("user",), **clicks),
        f.SinceLast(name="since_article", by=("user", "article"), **clicks),
        f.PastCount(name="session_clicks", by=("session",), **clicks),
        f.PastCount(name="session_article", by=("session", "article"), **clicks),
        f.PastCount(name="user_article", by=("user", "article"), **clicks),
        f.PastCount(name="article_clicked", by=("article",), **clicks),
        f.PastCount(name="article_listed", by=("article",), order="time"),
        f.Divide(name="click_rate", left="article_clicked", right="article_listed"),
        f.Rank(name="popularity_rank", by=(group,), order=popular, descending=True),
        f.Equal(name="is_last_article", left="article", right="last_article"),
        f.CountEncoding(name="article_rows", by=("article",)),
        f.MeanTargetEncoding(name="article_mean", by=("article",), **encoded),
        *(
            f.MeanTargetEncoding(name=f"{column}_article_mean", by=(column, "article"), **encoded)
            for column in ("last_article", *context)
        ),
    )


def news_schema(
    name: str, *, group: str, dense: Sequence[str], categorical: Sequence[str], history: str,
    context: Sequence[str], differ: str, popular: str, splits: Sequence[str] = SPLITS,
) -> Schema:  # fmt: skip
    """The schema of a preset "features".

    Args:
        name: of the schema.
        group: column of a list's number.
        dense: columns of the recipe that are numbers.
        categorical: columns of the recipe that have tables; one is "article".
        history: column of the articles read before, which share the table of "article".
        context: columns that are target encoded together with the article, as its predecessor in the session is.
        differ: number whose change since the session's last click is a feature.
        popular: number by which a list's articles are ranked.
        splits: values of the column split; rows of "drop" are only looked back at.

    The recipe's rows must also have user, session, time and label.
    """
    plain = ("popularity_rank", "is_last_article", "click_rate", "article_mean")
    means = tuple(f"{column}_article_mean" for column in ("last_article", *context))
    counts = ("session_clicks", "session_article", "user_article", "article_clicked", "article_listed", "article_rows")
    return Schema(
        name=name,
        label=Label(column="label"),
        group=group,
        feature=_features(group, context, differ, popular),
        dense=(
            *(DenseColumn(name=column, transforms=("log1p", "zscore")) for column in (*dense, *counts)),
            *(DenseColumn(name=column, transforms=("zscore",)) for column in (*plain, *means)),
            DenseColumn(name=f"{differ}_change", transforms=("zscore",), null_flag=True),
            *(
                DenseColumn(name=column, fill="median", null_flag=True, transforms=("log1p", "zscore"))
                for column in ("since_click", "since_user_click", "since_article")
            ),
        ),
        categorical=tuple(CategoricalColumn(name=column, type="int") for column in (*categorical, "last_article")),
        sequence=(SequenceColumn(name=history, type="int", table="article", max_length=20),),
        split=SplitRule(rule="column", column="split", values={split: split for split in splits}),
    )
