"""Recipes for logs whose lines are the training rows: Criteo, Avazu, MovieLens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import polars as pl

from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.rows import categorical, dense
from stoker.prep.schema import CategoricalColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *DENSE, *CATEGORICAL)
_RUNS = SplitRule(rule="runs", runs=7)
# Days 0 to 22 train; day 23 is halved into test and validation.
_DAYS = SplitRule(rule="files", files={"day_23*": "halves", "day_*": "train"})


def criteo(preset: str = "dlrm") -> Recipe:
    """Criteo Kaggle ("dlrm", "nvt") or Terabyte ("terabyte": 0.875 of the negatives dropped; "mlperf").

    The rules are those of the public DLRM scripts, except that vocabularies are fitted on training rows only.
    """
    return Recipe(
        name="criteo",
        description="Criteo display advertising: 13 integers, 26 categories, tab separated",
        presets={
            "dlrm": _criteo,
            "nvt": partial(_criteo, transform="zscore", clip_min=0.0),
            "terabyte": partial(_criteo, split=_DAYS, modulo=10_000_000, negative_keep=0.125),
            "mlperf": partial(_criteo, split=_DAYS, modulo=40_000_000),
        },
        preset=preset,
        example="stoker prepare criteo train.txt --out data/criteo",
        source="Criteo AI Lab; the Terabyte logs are CC BY-NC-SA 4.0",
    )


def _criteo(
    *,
    transform: str = "log1p",
    clip_min: float | None = None,
    split: SplitRule = _RUNS,
    modulo: int | None = None,
    negative_keep: float = 1.0,
) -> Schema:
    return Schema(
        name="criteo",
        source=SourceFormat(kind="csv", separator="\t", columns=COLUMNS, quote=None),
        label=Label(column="label"),
        dense=dense(DENSE, transform, clip_min=clip_min),
        categorical=categorical(CATEGORICAL, "hex", fill=0, modulo=modulo),
        split=split,
        negative_keep=negative_keep,
    )


HEX = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_INTEGERS = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
_AVAZU = ("C1", "banner_pos", *HEX, *_INTEGERS[2:])


def avazu(preset: str = "fae") -> Recipe:
    """Avazu with the hour of the day and 21 categories ("fae"), or with day, hour and 20, without C1 ("elrec")."""
    log = RawInput(
        format=SourceFormat(kind="csv", separator=","),
        columns={"click": "int", "hour": "int"} | dict.fromkeys(HEX, "hex") | dict.fromkeys(_INTEGERS, "int"),
        required=("click", "hour"),
        labels=("click",),
    )
    return Recipe(
        name="avazu",
        description="Avazu click-through: hour and 21 categories, CSV with header, split by time",
        presets={
            "fae": partial(_avazu, "fae", ("hour",), _AVAZU),
            "elrec": partial(_avazu, "elrec", ("day", "hour"), _AVAZU[1:]),
        },
        preset=preset,
        inputs={"log": log},
        derive=_avazu_rows,
        example="stoker prepare avazu train.gz --out data/avazu",
        source="Avazu, Kaggle competition avazu-ctr-prediction (the file called train)",
    )


def _avazu(name: str, numbers: Sequence[str], categories: Sequence[str]) -> Schema:
    return Schema(
        name=f"avazu/{name}",
        label=Label(column="click"),
        dense=dense(numbers, "minmax"),
        categorical=tuple(CategoricalColumn(name=name, type="hex" if name in HEX else "int") for name in categories),
        timestamp=Timestamp(column="moment"),
        split=SplitRule(rule="time"),
    )


def _avazu_rows(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """Return the raw lines, with YYMMDDHH split into day of the month and hour of the day; streaming."""
    moment = pl.col("hour").cast(pl.Int64)
    day = moment // 100 % 100
    return inputs["log"].select("click", *_AVAZU, moment=moment, day=day, hour=moment % 100)


_USERS = {"user": "int", "gender": "string", "age": "int", "occupation": "int", "zip": "string"}
_MOVIES = {"movie": "int", "title": "string", "genres": "string"}
_RATINGS = {"user": "int", "movie": "int", "rating": "float", "time": "int"}
_POLARS = {"int": pl.Int64, "string": pl.String, "float": pl.Float64}


def movielens(preset: str = "random") -> Recipe:
    """MovieLens-1M: 4 or 5 stars, or fewer? Split at random 90/5/5 ("random") or by time ("time").

    The files are ``ratings.dat`` and optionally ``users.dat`` and ``movies.dat``. Ratings may also be Parquet with the
    columns user, movie, rating, time, or u, m, r, t.
    """
    text = partial(SourceFormat, separator="::", quote=None)
    return Recipe(
        name="movielens",
        description="MovieLens-1M: rating of 4 or more, with demographics and genres",
        presets={
            # 90 % train; the other tenth is halved, so that model selection and the final figure use different rows.
            "random": partial(_movielens, SplitRule(rule="hash", train=0.9, valid=0.05, test=0.05)),
            "time": partial(_movielens, SplitRule(rule="time")),
        },
        preset=preset,
        inputs={
            "ratings": RawInput(
                files=("*ratings*",), format=text(columns=(*_RATINGS,)), columns=_RATINGS, required=(*_RATINGS,)
            ),
            "users": RawInput(
                files=("*users*",), format=text(columns=(*_USERS,)), columns=_USERS, required=("user",), optional=True,
                lookup=True,
            ),
            "movies": RawInput(
                files=("*movies*",), format=text(columns=(*_MOVIES,), encoding="latin-1"), columns=_MOVIES,
                required=("movie",), optional=True, lookup=True,
            ),
        },
        derive=_movielens_rows,
        example="stoker prepare movielens 'ml-1m/*.dat' --out data/movielens",
        source="GroupLens, MovieLens 1M; redistribution needs permission",
    )  # fmt: skip


def _movielens(split: SplitRule) -> Schema:
    types = {"user": "int", "movie": "int", **_USERS, "year": "int"}
    return Schema(
        name=f"movielens/{split.rule}",
        label=Label(column="rating", rule=">= 4"),
        categorical=tuple(CategoricalColumn(name=name, type=kind) for name, kind in types.items()),
        sequence=(SequenceColumn(name="genres", max_length=6),),
        timestamp=Timestamp(column="time"),
        split=split,
    )


def _movielens_rows(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """Return ratings with the columns of user and movie, in the order of the ratings; streaming."""

    def typed(name: str, columns: Mapping[str, str]) -> pl.LazyFrame:
        """Return the columns of an input; no rows if no file was given."""
        types = {column: _POLARS[kind] for column, kind in columns.items()}
        frame = inputs[name] if name in inputs else pl.LazyFrame(schema=types)
        return frame.select(pl.col(column).cast(kind) for column, kind in types.items())

    found = inputs["ratings"].collect_schema().names()
    short = {name[0]: name for name in _RATINGS}
    names = {old: new for old, new in short.items() if old in found and new not in found}
    inputs = {**inputs, "ratings": inputs["ratings"].rename(names)}
    users = typed("users", _USERS).unique("user", keep="first")
    movies = typed("movies", _MOVIES).unique("movie", keep="first")
    movies = movies.select(
        "movie", pl.col("genres").str.split("|"), year=pl.col("title").str.extract(r"\((\d{4})\)\s*$").cast(pl.Int64)
    )
    rows = typed("ratings", _RATINGS).select("user", "movie", "time", "rating")
    rows = rows.join(users, on="user", how="left", maintain_order="left")
    return rows.join(movies, on="movie", how="left", maintain_order="left")
