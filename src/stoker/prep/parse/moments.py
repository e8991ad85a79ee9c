"""Read dates and times from texts, each by itself: as ISO 8601, or by the format of the column.

Nothing is guessed from other texts, so blocks, files and threads cannot change the meaning of a text.
"""

from __future__ import annotations

import re
from datetime import datetime
from itertools import product

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.checks import fail

UNKNOWN = np.int64(-(2**63))  # instead of a time: the text is missing or cannot be read
_DAY = 86_400_000_000  # microseconds
_FRACTION = r"(?:[.,](?<fraction{0}>[0-9]+))?"
_ISO = (
    r"^[ \t]*(?<year>[0-9]{4})(?:-(?<month3>[0-9]{2})|-?W(?<week3>[0-9]{2})|(?:"
    r"-(?<month>[0-9]{2})-(?<day>[0-9]{2})|(?<month2>[0-9]{2})(?<day2>[0-9]{2})"
    r"|-W(?<week>[0-9]{2}-[1-7])|W(?<week2>[0-9]{2})(?<weekday2>[1-7])|-(?<ordinal>[0-9]{3}))"
    r"(?:[Tt ](?<hour>[0-9]{2})(?:"
    rf":(?<minute>[0-9]{{2}})(?::(?<second>[0-9]{{2}}){_FRACTION.format('')})?"
    rf"|(?<minute2>[0-9]{{2}})(?:(?<second2>[0-9]{{2}}){_FRACTION.format('2')})?)?"
    r"(?:[Zz]|(?<sign>[+-])(?<ahead>[0-9]{2})(?::?(?<more>[0-9]{2}))?)?)?)[ \t]*$"
)
_YEAR_1000 = datetime(1000, 1, 1)
_PROBE = datetime(2017, 3, 7, 15, 5, 9)  # every field differs from its default
_DATES = (
    "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%m.%d.%Y", "%m-%d-%Y", "%d-%m-%Y", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y",
    "%m.%d.%y", "%m-%d-%y", "%d-%m-%y", "%Y/%m/%d", "%Y.%m.%d", "%b %d %Y", "%b %d, %Y", "%B %d %Y", "%B %d, %Y",
    "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%m%d%Y", "%d%m%Y", "%Y-%m-%d",
)  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
_WHOLE = (
    "%d/%b/%Y:%H:%M:%S %z", "%a %b %d %H:%M:%S %Y", "%a %b %d %H:%M:%S %z %Y", "%a, %d %b %Y %H:%M:%S %z",
    "%a, %d %b %Y %H:%M:%S GMT", "%Y%m%d%H%M%S", "%Y%m%d%H%M", "%Y%m%d%H", "%y%m%d%H",
)  # fmt: skip


def read_moments(texts: pl.Series, pattern: str | None) -> npt.NDArray[np.int64]:
    """Return the time of each text in microseconds since 1970, [n]; UNKNOWN if it is missing or cannot be read.

    A time without a time zone is UTC; fractions beyond microseconds are cut off.

    Args:
        texts: [n].
        pattern: strftime format that all texts follow; None: ISO 8601.
    """
    if pattern is not None:
        return _read_as(texts, pattern).fill_null(int(UNKNOWN)).to_numpy()
    return _read_iso(texts).fill_null(int(UNKNOWN)).to_numpy()


def _read_iso(texts: pl.Series) -> pl.Series:
    """Return the time of each text, Int64; null if it is not ISO 8601."""
    found = pl.DataFrame({"text": texts}).select(pl.col("text").str.extract_groups(_ISO)).unnest("text")

    def number(*names: str) -> pl.Expr:
        return pl.coalesce(pl.col(names).cast(pl.Int64), 0)

    first = pl.lit("01")  # the day of a month alone
    date = pl.concat_str("year", pl.coalesce("month", "month2", "month3"), pl.coalesce("day", "day2", first))
    week = pl.concat_str("week2", pl.lit("-"), "weekday2")
    monday = pl.concat_str("week3", pl.lit("-1"))  # of a week alone
    week = pl.concat_str("year", pl.lit("-W"), pl.coalesce("week", week, monday))
    days = pl.coalesce(
        date.str.to_date("%Y%m%d", strict=False), week.str.to_date("%G-W%V-%u", strict=False),
        pl.concat_str("year", "ordinal").str.to_date("%Y%j", strict=False),
    ).cast(pl.Int64)  # fmt: skip
    hour, minute, second = number("hour"), number("minute", "minute2"), number("second", "second2")
    micros = pl.coalesce(pl.col("fraction", "fraction2")).str.pad_end(6, "0").str.head(6).cast(pl.Int64).fill_null(0)
    ahead, more = number("ahead"), number("more")
    offset = pl.when(pl.col("sign") == "-").then(-1).otherwise(1) * (60 * ahead + more)
    clock = (60 * hour + minute) * 60 + second
    leap = (second == 60) & (minute == 59)  # the first second of the next minute
    sound = (minute < 60) & ((second < 60) | leap) & (ahead < 24) & (more < 60)
    sound &= clock * 1_000_000 + micros <= _DAY + 1_000_000 * leap.cast(pl.Int64)
    sound &= pl.col("year") != "0000"
    moment = days * _DAY + (clock - 60 * offset) * 1_000_000 + micros
    return found.select(moment=pl.when(sound).then(moment)).to_series()


def _read_as(texts: pl.Series, pattern: str) -> pl.Series:
    """Return the time of each text, Int64; null if it does not match the format."""
    if re.search("%[-_0]?[HIkl]", pattern) and not re.search("%[-_0]?[MRTXcr]", pattern):  # Polars wants minutes
        texts, pattern = texts + ":00", f"{pattern}:%M"
    found = texts.str.to_datetime(_chrono(pattern), strict=False, time_unit="us", time_zone="UTC")
    # Polars reads 17 as the year 17 for %Y.
    return found.set(found.dt.replace_time_zone(None) < _YEAR_1000, None).dt.epoch("us")


def _chrono(pattern: str) -> str:
    """Translate a format of Python's strftime for Polars, where %f counts nanoseconds."""
    return pattern.replace(".%f", "%.f").replace("%z", "%#z")


def check_format(pattern: str) -> None:
    """Check that texts of a format can be read without guessing.

    Raises:
        SchemaError: the format has an unknown code or the name of a time zone, or lacks the year or the month
            of a day.
    """
    if "%Z" in pattern:
        problem = "names the time zone (%Z), which does not say the offset. Write a name such as UTC as it is, or %z"
        fail("timestamp", "format", f"{pattern!r} {problem}")
    if re.search(r"(?<!\.)%f", pattern):
        problem = "has %f without a point before it. Write .%f, or %3f, %6f or %9f for 3, 6 or 9 digits"
        fail("timestamp", "format", f"{pattern!r} {problem}")
    hour = _PROBE.replace(minute=0, second=0)
    date = hour.replace(hour=0)
    try:
        written = pl.Series([_PROBE]).dt.replace_time_zone("UTC").dt.to_string(_chrono(pattern).replace("%#z", "%z"))
        found = pl.from_epoch(_read_as(written, pattern), "us").item()
    except pl.exceptions.PolarsError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        fail("timestamp", "format", f"{pattern!r} cannot be used: {reason}")
    if found not in (_PROBE, _PROBE.replace(second=0), hour, date, date.replace(day=1), date.replace(day=1, month=1)):
        fail("timestamp", "format", f"{pattern!r} does not tell a date with its year")


def suggestions(texts: pl.Series) -> list[str]:
    """Return up to two settings of ``[timestamp]`` that can read the first text and no fewer texts than any other.

    Two settings give different times.
    """
    fits: dict[str, pl.Series] = {}
    for pattern in (*_WHOLE, *map("".join, product(_DATES, _CLOCKS, ("", " %z", " UTC")))):
        if _read_as(texts.head(1), pattern).count():
            fits[f'format = "{pattern}"'] = _read_as(texts, pattern)
    for kind, shape in (("int", r"^[+-]?[0-9]+$"), ("float", r"^[+-]?[0-9]+\.[0-9]+$")):
        alike = texts.str.contains(shape)
        if alike[0]:
            fits[f'type = "{kind}"'] = alike.set(~alike, None)
    most = max((found.count() for found in fits.values()), default=0)
    kept: dict[str, pl.Series] = {}
    for setting, found in fits.items():
        if found.count() == most and not any(found.equals(other) for other in kept.values()):
            kept[setting] = found
    return list(kept)[:2]
