"""MovieLens-1M: does this user rate this movie 4 or 5 stars?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import polars as pl

from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

__all__ = ["movielens"]

_TYPES = {
    "user": "int",
    "movie": "int",
    "gender": "string",
    "age": "int",
    "occupation": "int",
    "zip": "string",
    "year": "int",
}
_USERS = {name: _TYPES[name] for name in ("user", "gender", "age", "occupation", "zip")}
_POLARS = {"int": pl.Int64, "string": pl.String}


def _schema(split: SplitRule) -> Schema:
    return Schema(
        name=f"movielens/{split.rule}",
        label=Label(column="rating", rule=">= 4"),
        categorical=tuple(CategoricalColumn(name=name, type=kind) for name, kind in _TYPES.items()),
        sequence=(SequenceColumn(name="genres", type="string", max_length=6),),
        timestamp=Timestamp(column="time"),
        split=split,
    )


def _random() -> Schema:
    # 90 % train; the other tenth is halved, so that choosing and the final figure use different rows.
    return _schema(SplitRule(rule="hash", train=0.9, valid=0.05, test=0.05))


def _time() -> Schema:
    return _schema(SplitRule(rule="time", train=0.8, valid=0.1, test=0.1))


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """Ratings with the columns of user and movie beside them, in the order of the ratings; streaming."""
    ratings = inputs["ratings"]
    found = ratings.collect_schema().names()
    short = {"u": "user", "m": "movie", "r": "rating", "t": "time"}
    ratings = ratings.rename({old: new for old, new in short.items() if old in found and new not in found})
    rows = ratings.select(pl.col("user", "movie", "time").cast(pl.Int64), pl.col("rating").cast(pl.Float64))
    users = inputs.get("users")
    if users is None:
        users = pl.LazyFrame(schema={name: _POLARS[kind] for name, kind in _USERS.items()})
    movies = inputs.get("movies")
    if movies is None:
        movies = pl.LazyFrame(schema={"movie": pl.Int64, "title": pl.String, "genres": pl.String})
    about_user = users.select(pl.col(name).cast(_POLARS[kind]) for name, kind in _USERS.items())
    about_movie = movies.select(
        pl.col("movie").cast(pl.Int64),
        pl.col("genres").str.split("|"),
        year=pl.col("title").str.extract(r"\((\d{4})\)\s*$").cast(pl.Int64),
    )
    return rows.join(about_user.unique("user", keep="first"), on="user", how="left", maintain_order="left").join(
        about_movie.unique("movie", keep="first"), on="movie", how="left", maintain_order="left"
    )


def movielens(preset: str = "random") -> Recipe:
    """MovieLens-1M with a random 90/5/5 split ("random") or one by time ("time").

    Takes ``ratings.dat`` with, if given, ``users.dat`` and ``movies.dat``; ratings may also be Parquet with
    columns user, movie, rating, time, or u, m, r, t.
    """
    text = partial(SourceFormat, kind="auto", separator="::", quote=None)
    ratings = {"user": "int", "movie": "int", "rating": "float", "time": "int"}
    movies = {"movie": "int", "title": "string", "genres": "string"}
    return Recipe(
        name="movielens",
        description="MovieLens-1M: rating of 4 or more, with demographics and genres",
        presets={"random": _random, "time": _time},
        preset=preset,
        inputs={
            "ratings": RawInput(
                files=("*ratings*",),
                format=text(columns=tuple(ratings)),
                columns=ratings,
                required=tuple(ratings),
            ),
            "users": RawInput(
                files=("*users*",),
                format=text(columns=tuple(_USERS)),
                columns=_USERS,
                required=("user",),
                optional=True,
            ),
            "movies": RawInput(
                files=("*movies*",),
                format=text(columns=tuple(movies), encoding="latin-1"),
                columns=movies,
                required=("movie",),
                optional=True,
            ),
        },
        derive=_derive,
        example="stoker prepare movielens 'ml-1m/*.dat' --out data/movielens",
        source="GroupLens, MovieLens 1M; redistribution needs permission",
    )
