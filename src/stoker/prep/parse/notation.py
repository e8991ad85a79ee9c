"""How texts write whole numbers and truth values, so that one id is one text whatever type a file gives it.

One missing value makes pandas read a column of ids as floats: 136 becomes 136.0, in its frames and in the files it
writes. A whole float is therefore the text ``136``. Rows that are prepared like a dataset follow what it has: if all
whole numbers among the known texts of a column are written in one way, new ones are written in this way, too. Where no
text is known, as with hash buckets, 136.0 is always 136.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

AS_TYPED = "as typed"  # of datasets of earlier versions, in which a whole float is the text "136.0"
WHOLE, DOTTED, LOWER, CAPITAL = "1", "1.0", "true", "True"
_FEW = 3  # texts of a column of truth values: two, and an empty one
_WORDS = {LOWER: ["true", "false"], CAPITAL: ["True", "False"]}
_CHANGES = {  # notation -> what is rare and shows that a text may be written otherwise, and replacements
    WHOLE: (r"\.0$", [(r"^(-?\d+)\.0$", r"\1")]),
    DOTTED: (r"^-?\d+$", [(r"^(-?\d+)$", r"\1.0")]),
    LOWER: ("^[TF]", [("^True$", "true"), ("^False$", "false")]),
    CAPITAL: ("^[tf]", [("^true$", "True"), ("^false$", "False")]),
}
#: A number with a decimal comma, perhaps with points between groups of three digits.
DECIMAL_COMMA = r"^\s*[+-]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+)(,[0-9]+)?\s*$"


def notation_of(texts: pl.Series) -> str:
    """Return how whole numbers, or else truth values, are written in these texts; "" if in no way, or in two."""
    texts = texts.drop_nulls()
    whole, dotted = (bool(texts.str.contains(pattern).any()) for pattern in (r"^-?\d+$", r"^-?\d+\.0$"))
    if whole or dotted:
        return "" if whole and dotted else WHOLE if whole else DOTTED
    values = set(texts.head(_FEW)) - {""}
    found = (name for name, words in _WORDS.items() if values and values <= {*words} and len(texts) <= _FEW)
    return next(found, "")


def agreed(known: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the notation of each column of which all known lists of texts have the same one."""
    found: dict[str, set[str]] = {}
    for column, notation in known:
        found.setdefault(column, set()).add(notation)
    return {column: names.pop() for column, names in found.items() if len(names) == 1 and names != {""}}


def with_point(texts: pl.Series) -> pl.Series:
    """Return numbers with a decimal comma as texts with a decimal point."""
    return texts.str.strip_chars().str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)


def text_of_floats(series: pl.Series) -> pl.Series:
    """Return floats as texts, whole numbers without a point; null where digits may be lost."""
    exact = 2**53 if series.dtype == pl.Float64 else 2**24  # a float holds all whole numbers below
    whole = (series == series.floor()) & series.is_finite()
    texts = series.cast(pl.Int64, strict=False).cast(pl.String).zip_with(whole.fill_null(False), series.cast(pl.String))
    return texts.set(whole & (series.abs() >= exact), None)


def written(texts: pl.Series, notation: str) -> pl.Series:
    """Return texts in a notation."""
    if notation not in _CHANGES or not len(texts):
        return texts
    rare, changes = _CHANGES[notation]
    arrow = texts.to_arrow(compat_level=pl.CompatLevel.oldest())  # Polars would take five times as long for a request
    if not pc.any(pc.ends_with(arrow, ".0") if notation == WHOLE else pc.match_substring_regex(arrow, rare)).as_py():
        return texts
    for pattern, replacement in changes:
        arrow = pc.replace_substring_regex(arrow, pattern, replacement)
    return pl.Series(texts.name, pl.from_arrow(pa.chunked_array([arrow])))
