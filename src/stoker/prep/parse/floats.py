"""How programs write floats as texts: Python 1e-07, Java 1.0E-7, R 1e-04 and 1e+05, JavaScript 1e-7.

A way to write floats is named by an example. Only texts with an exponent are changed, and those that have one in
another way: small fractions, and in R and Java large numbers.

A Float32 or Float16 is the number that programs write for it: 0.1, not 0.10000000149.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import polars as pl

PYTHON, POLARS, DECIMAL = "1e-07", "1e-6", "0.0000001"
EXPONENT = r"^-?[1-9](\.\d{1,20})?[eE][+-]\d{1,3}$|^-?[1-9]\.\d{1,20}E\d{1,3}$"  # 1e5 may be hexadecimal digits
CANDIDATE = EXPONENT + r"|^-?0\.000\d{0,9}[1-9]\d{0,16}$"  # also a fraction that another program may write so
_FEW = 1000  # texts of a request, for which Polars takes much longer than Python
#: type -> from this on it holds only some of the whole numbers
LOSSY: dict[pl.DataType, int] = {pl.Float16(): 2**11, pl.Float32(): 2**24, pl.Float64(): 2**53}


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A float has an exponent below 10**low and from 10**high on; without these, if the text is shorter so."""

    low: int | None = None
    high: int | None = None
    large: str = ""  # pattern of numbers without an exponent that have one so; a float holds 15 digits
    mark: str = "e"
    plus: str = "+"
    digits: int = 2  # of an exponent at least
    zero: str = ""  # what follows a single digit

    def write(self, text: str) -> str:
        number = Decimal(text).normalize()
        power, plain, mantissa = number.adjusted(), f"{number:f}", str(number.scaleb(-number.adjusted()))
        exponent = f"{'-' if power < 0 else self.plus}{abs(power):0{self.digits}d}"
        short = f"{mantissa}{'' if '.' in mantissa else self.zero}{self.mark}{exponent}"
        if self.low is None or self.high is None:
            return short if len(short) < len(plain) else plain
        return plain if self.low <= power < self.high else short


WAYS = {
    PYTHON: _Way(low=-4, high=16),
    "1.0E-7": _Way(low=-3, high=7, large=r"|^-?[1-9]\d{7,14}(\.\d+)?$", mark="E", plus="", digits=1, zero=".0"),  # Java
    "1e-04": _Way(large=r"|^-?[1-9]\d{5,14}(\.0)?$"),  # R
    POLARS: _Way(low=-5, high=16, digits=1),
    "1e-7": _Way(low=-6, high=21, digits=1),  # JavaScript
    DECIMAL: _Way(low=-999, high=999),
}


def has_match(texts: pl.Series, pattern: str) -> bool:
    """Return True if the pattern is in a text."""
    if len(texts) < _FEW:
        given = [text for text in texts.to_list() if text is not None]
        lines = "\n".join(given)
        if lines.count("\n") < len(given):  # each text is a line
            return re.search(pattern, lines, re.MULTILINE) is not None
        return any(re.search(pattern, text) for text in given)
    return bool(texts.str.contains(pattern).any())


def in_way(texts: pl.Series, way: str) -> pl.Series:
    """Return texts with floats written in one of :data:`WAYS`."""
    rows = texts.str.contains(CANDIDATE + WAYS[way].large).fill_null(False).arg_true()
    if not len(rows):
        return texts
    given = texts.gather(rows)
    known = given.unique()
    made = given.replace_strict(known, [WAYS[way].write(text) for text in known], return_dtype=pl.String)
    return texts.clone().scatter(rows, made)


def way_of(texts: pl.Series) -> str:
    """Return the way in which texts write all floats, if some have an exponent and there is one; else ""."""
    if not has_match(texts, EXPONENT):
        return ""
    parts = (texts.filter(texts.str.contains(EXPONENT)), texts.head(1_000), texts)  # most ways fail early
    return next((way for way in WAYS if all((in_way(part, way) == part).all() for part in parts)), "")


def as_double(series: pl.Series) -> pl.Series:
    """Return floats as Float64: the number of the shortest text that tells a Float32 or Float16 from its neighbours."""
    if series.dtype == pl.Float16:
        values = (None if value is None else float(str(np.float16(value))) for value in series)
        return pl.Series(series.name, values, pl.Float64)
    found = series.cast(pl.Float64)
    if series.dtype == pl.Float64 or ((found == found.floor()) & (found.abs() < LOSSY[pl.Float32()])).all():
        return found  # as Polars would, in more time
    return series.cast(pl.String).cast(pl.Float64)


def is_single(values: pl.Series) -> bool:
    """Return True if Float64 values are those of a Float32 column, digit by digit: 0.10000000149."""
    narrow = values.cast(pl.Float32)
    odd = (as_double(narrow) != values) & (values != values.floor())
    return bool(odd.any() and (narrow.cast(pl.Float64) == values).all())


def in_single(values: pl.Series) -> pl.Series:
    """Return Float64 values as a Float32 column has them: 0.1 as 0.10000000149. Those of more digits stay."""
    narrow = values.cast(pl.Float32)
    return narrow.cast(pl.Float64).zip_with((as_double(narrow) == values).fill_null(True), values)
