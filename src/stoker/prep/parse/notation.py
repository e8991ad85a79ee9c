"""How texts write whole numbers, truth values and times, so that one id is one text whatever type a file gives it.

One missing value makes pandas read a column of ids as floats: 136 becomes 136.0, in its frames and in the files it
writes. A whole float is therefore the text ``136``. Rows that are prepared like a dataset follow what it has: if all
whole numbers among the known texts of a column are written in one way, new ones are written in this way, too. Where no
text is known, as with hash buckets, 136.0 is always 136.
"""

from __future__ import annotations

import re
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

AS_TYPED = "as typed"  # of datasets of earlier versions, in which a whole float is the text "136.0"
WHOLE, DOTTED, LOWER, CAPITAL = "1", "1.0", "true", "True"
PLAIN = "plain"  # of texts of which a dataset keeps no list: numbers without zeros after the point, no times
UNLISTED = "unlisted"  # likewise, of a dataset that hashes decimals with their zeros
MIXED = "mixed"  # of a column whose known texts agree on nothing
FLAGS, DOTTED_FLAGS = "1/0", "1.0/0.0"  # of few texts, with both: true is 1
_FEW = 8  # texts of a column of truth values at most: two, and some that updates bring
_WORDS = {LOWER: ("true", "false"), CAPITAL: ("True", "False"), FLAGS: ("1", "0"), DOTTED_FLAGS: ("1.0", "0.0")}
NUMBERS = (WHOLE, DOTTED, *_WORDS)
_TRUE, _FALSE = r"^([Tt]rue|1|1\.0)$", r"^([Ff]alse|0|0\.0)$"
_TO_WHOLE, _TO_DOTTED = (r"^(-?\d+)\.0$", r"\1"), (r"^(-?\d+)$", r"\1.0")
_CHANGES = {  # notation -> what is rare and shows that a text may be written otherwise, and replacements
    **dict.fromkeys((WHOLE, PLAIN, UNLISTED), (r"\.0$", [_TO_WHOLE])),
    DOTTED: (r"^-?\d+$", [_TO_DOTTED]),
    LOWER: ("^-?[TF0-9]", [(_TRUE, "true"), (_FALSE, "false"), _TO_WHOLE]),
    CAPITAL: ("^-?[tf0-9]", [(_TRUE, "True"), (_FALSE, "False"), _TO_WHOLE]),
    FLAGS: (r"^[TtFf]|\.0$", [(_TRUE, "1"), (_FALSE, "0"), _TO_WHOLE]),
    DOTTED_FLAGS: (r"^[TtFf]|^-?\d+$", [(_TRUE, "1.0"), (_FALSE, "0.0"), _TO_DOTTED]),
}
_TINY = r"^-?(\d(\.\d+)?[eE]-\d+|0\.000\d+)$"  # a float that programs write in several ways
_TINY_WAYS = {  # what follows a notation, if all tiny floats are written so -> how a program writes one
    "|1e-07": lambda text: repr(float(text)),
    "|1.0E-7": lambda text: re.sub(r"^(-?\d)e", r"\1.0e", f"{Decimal(repr(float(text))):e}").upper(),
}
#: A date, or a time without a zone or of UTC. The notation of times is one of them with all digits 0.
_MOMENT = (
    r"^(?P<date>\d{4}-\d{2}-\d{2})(?:[T ](?P<clock>\d{2}:\d{2})(?::(?P<second>\d{2})(?:\.(?P<fraction>\d{1,9}))?)?"
    r"(?P<zone>Z|\+00:00)?)?$"
)
_MOST_DIGITS = 9  # of a fraction
#: A number with a decimal comma, perhaps with points between groups of three digits.
DECIMAL_COMMA = r"^\s*[+-]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+)(,[0-9]+)?\s*$"

#: A number with commas between groups of three digits.
THOUSANDS = r"^\s*[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?\s*$"


def notation_of(texts: pl.Series) -> str:
    """Return how these texts write truth values, else whole numbers, else times; "" if in no way, or in two."""
    texts = texts.drop_nulls()
    whole, dotted = (bool(texts.str.contains(pattern).any()) for pattern in (r"^-?\d+$", r"^-?\d+\.0$"))
    few = set(texts) if len(texts) <= _FEW and not (whole and dotted) else set()
    found = [name for name, words in _WORDS.items() if few & {*words}]
    if len(found) == 1 and (few >= {*_WORDS[found[0]]} if found[0] in (FLAGS, DOTTED_FLAGS) else not dotted):
        return found[0]
    tiny = texts.filter(texts.str.contains(_TINY))
    exponents = tiny.str.contains("[eE]").any()
    way = next((way for way in _TINY_WAYS if exponents and (_as_tiny(tiny, way) == tiny).all()), "")
    if whole or dotted or way:
        return ("" if whole == dotted else WHOLE if whole else DOTTED) + way
    shapes = texts.filter(texts.str.contains(_MOMENT)).str.replace_all(r"\d", "0").unique()
    return str(shapes[0]) if len(shapes) == 1 else ""


def agreed(notations: set[str]) -> str:
    """Return the one notation of several lists of texts of a column; "" if there is none."""
    if len(notations) > 1:
        bases = {each.partition("|")[0] for each in notations}
        less = {FLAGS: WHOLE, DOTTED_FLAGS: DOTTED} | (dict.fromkeys((LOWER, CAPITAL), WHOLE) if WHOLE in bases else {})
        notations = {less.get(each, each) for each in bases}
    return next(iter(notations)) if len(notations) == 1 else ""


def is_moment(notation: str) -> bool:
    """Return True for a notation of times."""
    return notation.startswith("0000-")


def fits_moment(texts: pl.Series, notation: str) -> pl.Series:
    """Return where texts are in a notation of times."""
    return texts.str.contains("^" + re.escape(notation).replace("0", r"\d") + "$")


def with_point(texts: pl.Series) -> pl.Series:
    """Return numbers with a decimal comma as texts with a decimal point."""
    return texts.str.strip_chars().str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)


def text_of_floats(series: pl.Series) -> pl.Series:
    """Return floats as texts, whole numbers without a point; null where digits may be lost."""
    exact = 2**53 if series.dtype == pl.Float64 else 2**24  # a float holds all whole numbers below
    whole = (series == series.floor()) & series.is_finite()
    texts = series.cast(pl.Int64, strict=False).cast(pl.String).zip_with(whole.fill_null(False), series.cast(pl.String))
    return texts.set(whole & (series.abs() >= exact), None)


def text_of_decimals(series: pl.Series) -> pl.Series:
    """Return decimals as texts without zeros at the end of a fraction: 5.00 as ``5``."""
    return series.cast(pl.String).str.replace(r"\.0+$|(\.\d*[1-9])0+$", "$1")


def text_of_moments(series: pl.Series) -> pl.Series:
    """Return dates and times as texts, of UTC if they have a zone, with digits that do not depend on their unit."""
    if series.dtype == pl.Date:
        return series.dt.to_string("%Y-%m-%d")
    zone = "+00:00" if getattr(series.dtype, "time_zone", None) else ""
    series = series.dt.convert_time_zone("UTC") if zone else series
    texts = series.dt.to_string(f"%Y-%m-%d %H:%M:%S.%9f{zone}")
    return texts.str.replace(r"(\.\d{6})000", "$1")  # microseconds, unless there are nanoseconds


def _as_moments(texts: pl.Series, notation: str) -> pl.Series:
    """Return times in a notation; other texts, and times that it cannot hold, as they are."""
    wanted = re.fullmatch(_MOMENT, notation)
    assert wanted is not None
    digits = len(wanted["fraction"] or "")
    zone = pl.col("zone").is_null() if wanted["zone"] is None else pl.col("zone").is_not_null()
    clock, second = pl.col("clock").fill_null("00:00"), pl.col("second").fill_null("00")
    fraction = pl.col("fraction").fill_null("").str.pad_end(_MOST_DIGITS, "0")
    fits = pl.col("date").is_not_null() & zone & (fraction.str.slice(digits) == "0" * (_MOST_DIGITS - digits))
    made = [pl.col("date")]
    if wanted["clock"]:
        made += [pl.lit(notation[10]), clock]
    else:
        fits &= clock == "00:00"
    if wanted["second"]:
        made += [pl.lit(":"), second]
    else:
        fits &= second == "00"
    made += [pl.lit("."), fraction.str.head(digits)] if digits else []
    parts = pl.DataFrame({"text": texts}).with_columns(pl.col("text").str.extract_groups(_MOMENT).alias("part"))
    whole = pl.concat_str(*made, pl.lit(wanted["zone"] or ""))
    return parts.unnest("part").select(pl.when(fits).then(whole).otherwise("text").alias(texts.name)).to_series()


def _as_tiny(texts: pl.Series, way: str) -> pl.Series:
    """Return texts with tiny floats in one of several ways."""
    rows = texts.str.contains(_TINY).fill_null(False).arg_true()
    made = [_TINY_WAYS[way](text) for text in texts.gather(rows)]
    return texts.clone().scatter(rows, pl.Series(made, dtype=pl.String)) if made else texts


def written(texts: pl.Series, notation: str) -> pl.Series:
    """Return texts in a notation."""
    if is_moment(notation):
        odd = texts.str.contains(_MOMENT) & ~fits_moment(texts, notation)
        return _as_moments(texts, notation) if odd.any() else texts
    notation, bar, way = notation.partition("|")
    texts = _as_tiny(texts, bar + way) if bar else texts
    if notation not in _CHANGES or not len(texts):
        return texts
    rare, changes = _CHANGES[notation]
    arrow = texts.to_arrow(compat_level=pl.CompatLevel.oldest())  # Polars would take five times as long for a request
    if not pc.any(
        pc.ends_with(arrow, ".0") if rare.startswith(r"\.") else pc.match_substring_regex(arrow, rare)
    ).as_py():
        return texts
    for pattern, replacement in changes:
        arrow = pc.replace_substring_regex(arrow, pattern, replacement)
    return pl.Series(texts.name, pl.from_arrow(pa.chunked_array([arrow])))
