"""Leave out values that mean missing: the ``null_values`` of a schema, whatever type a file or a frame gives them.

A column of texts lacks these texts, and a column of numbers the numbers that they write: with ``-1``, also -1.0. A text
such as ``00`` or ``+1``, which no program makes of a number, is a text only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import polars as pl

from stoker.prep.parse.notation import DECIMAL_COMMA, text_of_decimals, with_point

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
_WIDEST = {"text": pl.String, "string": pl.String, "int": pl.Int128, "hex": pl.UInt64, "float": pl.Float64}
_ZEROS = r"^-?(0|[1-9][0-9]*)\.[0-9]*0$"  # a number with zeros at its end
_HEX = re.compile(r"[0-9a-fA-F]{1,16}")


def without_nulls(series: pl.Series, nulls: Sequence[str], kind: str, decimal: str = ".") -> pl.Series:
    """Return single values of a column, as texts or in another type, without those that mean missing.

    Args:
        series: the values.
        nulls: texts that mean missing.
        kind: as what the schema reads the column (:class:`stoker.prep.parse.frames.Field`).
        decimal: the decimal sign of texts that are read as float.
    """
    if not nulls:
        return series
    values, dtype = series, series.dtype
    if dtype.is_decimal():
        values, name = text_of_decimals(series), "string"
    elif dtype == pl.String:
        name = "string" if kind == "string" else "text"
    elif dtype.is_integer():
        name = "hex" if kind == "hex" else "int"
    else:
        name = "float" if dtype.is_float() else ""
    if kind == "datetime" and name != "text":  # microseconds
        return series
    meant = _meant(tuple(nulls), name, decimal) if name else []
    if not meant:
        return series
    listed = pl.Series(meant, dtype=_WIDEST[name]).cast(values.dtype, strict=False)
    if name == "string" and any(map(_NUMBER.fullmatch, meant)):
        short = values.str.contains(_ZEROS).fill_null(False)
        values = values.zip_with(~short, text_of_decimals(values)) if short.any() else values
    return series.set(values.is_in(listed.implode()).fill_null(False), None)


@cache
def _meant(nulls: tuple[str, ...], kind: str, decimal: str) -> list[Any]:
    """Return the texts or numbers of a kind that mean missing."""
    if kind == "text":
        return list(nulls)
    if kind == "hex":
        return [int(text, 16) for text in nulls if _HEX.fullmatch(text)]
    texts = pl.Series(nulls, dtype=pl.String)
    if decimal != ".":
        texts = texts.zip_with(~texts.str.contains(DECIMAL_COMMA), with_point(texts))
    plain = [_plain(text) for text in texts if _NUMBER.fullmatch(text)]
    if kind == "float":
        return [float(text) for text in plain]
    if kind == "int":
        return [int(text) for text in plain if "." not in text and abs(int(text)) < 2**64]
    return [*nulls, *plain]


def _plain(number: str) -> str:
    """Return a number without an exponent, and without zeros at its end."""
    return str(text_of_decimals(pl.Series([f"{Decimal(number):f}"]))[0])
