"""How texts write whole numbers, truth values and times, so that one id is one text whatever type a file gives it.

One missing value makes pandas read a column of ids as floats: 136 becomes 136.0, in its frames and in the files it
writes. A whole float is therefore the text ``136``. Rows that are prepared like a dataset follow what it has: if all
whole numbers among the known texts of a column are written in one way, new ones are written in this way, too. Where no
text is known, as with hash buckets, 136.0 is always 136.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from stoker.prep.parse.floats import CANDIDATE, EXPONENT, LOSSY, PYTHON, as_double, has_match, in_way, is_single, way_of

#: of datasets of 0.1.0, in which a whole float is the text "136.0", and 0.1 of a Float32 column 0.10000000149
AS_TYPED = "as typed"
WHOLE, DOTTED, LOWER, CAPITAL, UPPER, LETTERS = "1", "1.0", "true", "True", "TRUE", "t"
#: of texts of which a dataset keeps no list: 136 for 136.00 and 1.36E2, 2.5 for 2.50, true for True, and no times
PLAIN = "plain value"
_VERSIONS = "versions"  # likewise, but 2.10 may be a version, which is not 2.1
VALUE = "value"  # likewise, but true is 1
BY_VALUE = (PLAIN, VALUE)
MIXED = "mixed"  # of a column whose known texts agree on nothing
TYPED = "typed "  # before a notation that only numbers with a type follow, as texts may be versions
SINGLE = "0.1f"  # of floats: all known values are those of a Float32 column, such as 0.10000000149
FLAGS, DOTTED_FLAGS = "1/0", "1.0/0.0"  # of few texts, with both: true is 1
_FEW = 8  # texts of a column of truth values at most: two, and some that updates bring
_WORDS = {
    LOWER: ("true", "false"), CAPITAL: ("True", "False"), UPPER: ("TRUE", "FALSE"), LETTERS: ("t", "f"),
    FLAGS: ("1", "0"), DOTTED_FLAGS: ("1.0", "0.0"),
}  # fmt: skip
_HARDLY = 100  # texts of which one may be a value in another notation
_BOTH = (LETTERS, FLAGS, DOTTED_FLAGS)  # which are truth values if a column has both
NUMBERS = (WHOLE, DOTTED, *_WORDS)
_TRUE, _FALSE = r"^([Tt]rue|TRUE|1|1\.0)$", r"^([Ff]alse|FALSE|0|0\.0)$"
_WORD_TRUE, _WORD_FALSE = r"^([Tt]rue|TRUE)$", r"^([Ff]alse|FALSE)$"
_TO_WHOLE, _TO_DOTTED = (r"^(-?\d+)\.0$", r"\1"), (r"^(-?\d+)$", r"\1.0")
_TO_LOWER = ((_WORD_TRUE, "true"), (_WORD_FALSE, "false"))
_TO_PLAIN = ((r"^(-?\d+)\.0+$", r"\1"), (r"^(-?\d+\.\d*[1-9])0+$", r"\1"), ("^-0$", "0"))
_ZERO = r"^-(0(?:\.0+)?)$"
_CHANGES = {  # notation -> what is rare and shows that a text may be written otherwise, and replacements
    WHOLE: (r"\.0$", [_TO_WHOLE]),
    _VERSIONS: (rf"\.0$|{_ZERO}|^(T(rue|RUE)|F(alse|ALSE))$", [*_TO_LOWER, (_ZERO, r"\1"), _TO_WHOLE]),
    PLAIN: (r"\.\d*0$|^-0$|^(T(rue|RUE)|F(alse|ALSE))$", [*_TO_LOWER, *_TO_PLAIN]),
    VALUE: (r"\.\d*0$|^-0$|^[TtFf]", [(_WORD_TRUE, "1"), (_WORD_FALSE, "0"), *_TO_PLAIN]),
    DOTTED: (r"^-?\d+$", [_TO_DOTTED]),
    LOWER: ("^-?[TF0-9]", [(_TRUE, "true"), (_FALSE, "false"), _TO_WHOLE]),
    CAPITAL: ("^-?[tf0-9]|^TRUE|^FALSE", [(_TRUE, "True"), (_FALSE, "False"), _TO_WHOLE]),
    UPPER: ("^-?[tf0-9]|^True|^False", [(_TRUE, "TRUE"), (_FALSE, "FALSE"), _TO_WHOLE]),
    LETTERS: ("^[TtFf].", [(_WORD_TRUE, "t"), (_WORD_FALSE, "f")]),
    FLAGS: (r"^[TtFf]|\.0$", [(_TRUE, "1"), (_FALSE, "0"), _TO_WHOLE]),
    DOTTED_FLAGS: (r"^[TtFf]|^-?\d+$", [(_TRUE, "1.0"), (_FALSE, "0.0"), _TO_DOTTED]),
}
#: A date, or a time without a zone or of UTC. The notation of times is one of them with all digits 0.
_MOMENT = (
    r"^(?P<date>\d{4}-\d{2}-\d{2})(?:[T ](?P<clock>\d{2}:\d{2})(?::(?P<second>\d{2})(?:\.(?P<fraction>\d{1,9}))?)?"
    r"(?P<zone>Z|\+00:?00)?)?$"
)
_MOST_DIGITS = 9  # of a fraction
#: A number with a decimal comma, perhaps with points between groups of three digits.
DECIMAL_COMMA = r"^\s*[+-]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+)(,[0-9]+)?\s*$"
#: A number with commas between groups of three digits.
THOUSANDS = r"^\s*[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?\s*$"


def notation_of(texts: pl.Series) -> str:
    """Return how these texts write truth values, else whole numbers, else times; "" if in no way, or in two.

    Of floats: :data:`SINGLE` if they are those of a Float32 column.
    """
    texts = texts.drop_nulls()
    if texts.dtype == pl.Float64:
        return SINGLE if is_single(texts) else ""
    whole, dotted = (bool(texts.str.contains(pattern).any()) for pattern in (r"^-?\d+$", r"^-?\d+\.0$"))
    way = way_of(texts)
    few = set(texts) if len(texts) <= _FEW and not (way or (whole and dotted)) else set()
    found = [name for name, words in _WORDS.items() if few & {*words} and (name != LETTERS or few == {*words})]
    if len(found) == 1 and (few >= {*_WORDS[found[0]]} if found[0] in _BOTH else not dotted):
        return found[0]
    if way or whole or dotted:
        return ("" if whole == dotted else WHOLE if whole else DOTTED) + (way and f"|{way}")
    if digits := _digits_of(texts.filter(texts.str.contains(r"^-?\d+\.\d+$"))):
        return digits
    shapes = texts.filter(texts.str.contains(_MOMENT)).str.replace_all(r"\d", "0").unique()
    return str(shapes[0]) if len(shapes) == 1 else ""


def notation_of_values(values: Collection[str]) -> str:
    """Return how the values of a condition are written; it may name one of two truth values."""
    words = next((name for name, words in _WORDS.items() if {*values} <= {*words}), "")
    return words or notation_of(pl.Series([*values], dtype=pl.String))


def notation_of_operand(text: str) -> tuple[str, str]:
    """Return how values are written that a rule compares with a text, and that text so.

    A whole number, a number with an exponent or a truth value is met by its value. Another text with a fraction may be
    a version: typed values have its digits, and texts are as they are.
    """
    value = str(written(pl.Series([text]), VALUE)[0])
    if re.fullmatch(r"-?(0|[1-9]\d*)", value) or re.search(EXPONENT, text):
        return VALUE, value
    fraction = re.fullmatch(r"-?\d+\.(\d*[1-9]\d*)", text)
    return notation_of_values([text]) if fraction is None else f"{TYPED}1.{len(fraction[1]) * '0'}", text


def can_meet(kind: pl.DataType, text: str, notation: str) -> bool:
    """Return True if a number or truth value may be written as this text; no number is ``007`` or ``+1``."""
    if kind == pl.Boolean:
        return text in written(pl.Series(["true", "false"]), notation)
    number = pl.Series([text]).cast(pl.Float64, strict=False)
    return notation == VALUE or written(text_of_floats(number), notation)[0] == text


def _digits_of(decimals: pl.Series) -> str:
    """Return how decimals are written that all have as many digits after the point, else "".

    If no zeros show that it is always so, texts such as 2.10 may be versions, and only typed values are written so.
    """
    digits = decimals.str.extract(r"\.(\d+)$").str.len_bytes().unique()
    if len(digits) != 1 or digits[0] == 1:
        return ""
    shown = decimals.str.ends_with("0").any() and decimals.str.contains(r"\.0").any()
    return f"{'' if shown else TYPED}1.{digits[0] * '0'}"


def _changes_to(notation: str) -> tuple[str, Sequence[tuple[str, str]]]:
    """Return a pattern of texts that may be written otherwise in a notation of numbers, and replacements."""
    if not re.fullmatch(r"1\.00+", notation):
        return _CHANGES.get(notation, ("", ()))
    digits = len(notation) - 2
    more = [(rf"^(-?\d+\.\d{{{have}}})$", r"\1" + (digits - have) * "0") for have in range(1, digits)]
    less = (rf"^(-?\d+\.\d{{{digits}}})0+$", r"\1")
    return r"^-?\d+(\.\d+)?$", [(r"^(-?\d+)$", rf"\1.{digits * '0'}"), *more, less]


def twins_of(texts: pl.Series, notation: str) -> list[Any]:
    """Return how many values have several texts, such as 136 and 136.0, and two texts of one; [] if hardly any has."""
    texts = texts.drop_nulls()
    zero = has_match(texts, _ZERO)  # -0.0 is 0.0, however few texts they are among
    if len(texts) <= _FEW and set(written(texts, _VERSIONS)) & {*_WORDS[LOWER]}:
        odd, values = texts, written(texts, LOWER)
    elif not zero and notation and ("|" in notation or not has_match(texts, EXPONENT)):
        return []  # texts of one notation have none
    else:
        numbers = texts.filter(texts.str.contains(f"{_CHANGES[_VERSIONS][0]}|{CANDIDATE}"))
        times = texts.filter(texts.str.contains(_MOMENT))
        whole = _as_moments(_as_moments(times, "0000-00-00T00:00:00.000000000"), "0000-00-00T00:00:00Z")
        odd, values = pl.concat([numbers, times]), pl.concat([written(numbers, _VERSIONS), whole])
    others = texts.filter(texts.is_in(values.implode()))
    pairs = pl.DataFrame({"text": pl.concat([odd, others]), "value": pl.concat([values, others])})
    pairs = pairs.unique(maintain_order=True).filter(pl.col("value").is_duplicated())
    if not (count := len(pairs["value"].unique())) or (count * _HARDLY < len(texts) and not zero):
        return []
    return [count, *pairs.filter(pl.col("value") == pl.first("value"))["text"].head(2)]


def agreed(notations: set[str]) -> str:
    """Return the one notation of several lists of texts of a column; "" if there is none."""
    if len(notations) > 1:
        bases = {WHOLE if each.startswith(BY_VALUE) else each.partition("|")[0] for each in notations}
        less = {FLAGS: WHOLE, DOTTED_FLAGS: DOTTED} | (
            dict.fromkeys((LOWER, CAPITAL, UPPER), WHOLE) if WHOLE in bases else {}
        )
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
    most, series = LOSSY[series.dtype], as_double(series)
    whole = (series == series.floor()) & series.is_finite()
    texts = series.cast(pl.Int64, strict=False).cast(pl.String).zip_with(whole.fill_null(False), series.cast(pl.String))
    return texts.set(whole & (series.abs() >= most), None)


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


def written(texts: pl.Series, notation: str) -> pl.Series:
    """Return texts in a notation."""
    if not notation:
        return texts
    if is_moment(notation):
        odd = texts.str.contains(_MOMENT) & ~fits_moment(texts, notation)
        return _as_moments(texts, notation) if odd.any() else texts
    notation, _, way = notation.partition("|")
    way = PYTHON if not way and notation in (PLAIN, VALUE, _VERSIONS) and has_match(texts, CANDIDATE) else way
    texts = in_way(texts, way) if way else texts
    rare, changes = _changes_to(notation)
    if not changes or not has_match(texts, rare):
        return texts
    arrow = texts.to_arrow(compat_level=pl.CompatLevel.oldest())  # Polars would take five times as long for a request
    for pattern, replacement in changes:
        arrow = pc.replace_substring_regex(arrow, pattern, replacement)
    return pl.Series(texts.name, pl.from_arrow(pa.chunked_array([arrow])))
