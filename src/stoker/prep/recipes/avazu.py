"""Avazu click-through log: 40.4 M impressions of ten days in order of time."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

__all__ = ["HEX", "INTEGERS", "avazu"]

HEX = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
INTEGERS = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
_CATEGORICAL = ("C1", "banner_pos", *HEX, *INTEGERS[2:])


def _schema(name: str, dense: tuple[str, ...], categorical: tuple[str, ...]) -> Schema:
    return Schema(
        name=f"avazu/{name}",
        label=Label(column="click"),
        dense=tuple(DenseColumn(name=column, transforms=("minmax",)) for column in dense),
        categorical=tuple(
            CategoricalColumn(name=column, type="hex" if column in HEX else "int") for column in categorical
        ),
        timestamp=Timestamp(column="moment"),
        split=SplitRule(rule="time", train=0.8, valid=0.1, test=0.1),
    )


def _fae() -> Schema:
    return _schema("fae", ("hour",), _CATEGORICAL)


def _elrec() -> Schema:
    return _schema("elrec", ("day", "hour"), tuple(name for name in _CATEGORICAL if name != "C1"))


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """The raw lines, with YYMMDDHH taken apart into day of the month and hour of the day; streaming."""
    moment = pl.col("hour").cast(pl.Int64)
    day = moment // 100 % 100
    return inputs["log"].select("click", *_CATEGORICAL, moment=moment, day=day, hour=moment % 100)


def avazu(preset: str = "fae") -> Recipe:
    """Avazu with the hour of the day and 21 categories ("fae"), or day, hour and 20 without C1 ("elrec")."""
    types = {"click": "int", "hour": "int"} | dict.fromkeys(HEX, "hex") | dict.fromkeys(INTEGERS, "int")
    return Recipe(
        name="avazu",
        description="Avazu click-through: hour and 21 categories, CSV with header, split by time",
        presets={"fae": _fae, "elrec": _elrec},
        preset=preset,
        inputs={
            "log": RawInput(
                format=SourceFormat(kind="csv", separator=","),
                columns=types,
                required=("click", "hour"),
                labels=("click",),
            )
        },
        derive=_derive,
        example="stoker prepare avazu train.gz --out data/avazu",
        source="Avazu, Kaggle competition avazu-ctr-prediction (the file called train)",
    )
