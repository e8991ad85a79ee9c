"""ISO 8601 dates and times read from bytes, one text after the other."""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit

__all__ = ["UNKNOWN", "read_iso"]

UNKNOWN = np.int64(-(2**63))  # in place of a moment: the text is missing, or not ISO 8601
_DAYS_BEFORE = np.array([0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365], np.int64)  # month, common year


@jit
def _digits(data, at, end, count):  # type: ignore[no-untyped-def]
    """The number that ``count`` digits from ``at`` on make; -1 where they are not digits or reach beyond ``end``."""
    if at + count > end:
        return -1
    number = 0
    for i in range(at, at + count):
        if data[i] < 48 or data[i] > 57:
            return -1
        number = number * 10 + data[i] - 48
    return number


@jit
def _day(year, month, day):  # type: ignore[no-untyped-def]
    """Days since 1970-01-01; UNKNOWN for a day that the calendar does not have."""
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if year < 1 or month < 1 or month > 12 or day < 1:
        return UNKNOWN
    if day > _DAYS_BEFORE[month + 1] - _DAYS_BEFORE[month] + (leap and month == 2):
        return UNKNOWN
    past = year - 1
    return (
        past * 365 + past // 4 - past // 100 + past // 400 + _DAYS_BEFORE[month] + (leap and month > 2) + day - 719163
    )


@jit
def _offset(data, at, end):  # type: ignore[no-untyped-def]
    """Minutes that a time zone from ``at`` to ``end`` is ahead of UTC; UNKNOWN where it is none."""
    if end - at == 1 and (data[at] == ord("Z") or data[at] == ord("z")):
        return 0
    if data[at] != ord("+") and data[at] != ord("-"):
        return UNKNOWN
    hours, minutes, rest = _digits(data, at + 1, end, 2), 0, at + 3
    if rest < end:
        rest += data[rest] == ord(":")
        minutes = _digits(data, rest, end, 2)
        rest += 2
    if rest != end or hours < 0 or hours > 23 or minutes < 0 or minutes > 59:
        return UNKNOWN
    return hours * 60 + minutes if data[at] == ord("+") else -hours * 60 - minutes


@jit
def _moment(data, at, end):  # type: ignore[no-untyped-def]
    """Microseconds since 1970 of the text from ``at`` to ``end``; UNKNOWN where it is not ISO 8601."""
    while at < end and (data[at] == ord(" ") or data[at] == ord("\t")):
        at += 1
    while at < end and (data[end - 1] == ord(" ") or data[end - 1] == ord("\t")):
        end -= 1
    if end - at < 8:
        return UNKNOWN
    dash = np.int64(data[at + 4] == ord("-"))
    if dash and (end - at < 10 or data[at + 7] != ord("-")):
        return UNKNOWN
    month, day = _digits(data, at + 4 + dash, end, 2), _digits(data, at + 6 + 2 * dash, end, 2)
    days = _day(_digits(data, at, end, 4), month, day)
    if days == UNKNOWN:
        return UNKNOWN
    at += 8 + 2 * dash
    seconds = days * 86_400
    if at == end:
        return seconds * 1_000_000
    if data[at] != ord("T") and data[at] != ord(" ") and data[at] != ord("t"):
        return UNKNOWN
    hour, minute, second, fraction = _digits(data, at + 1, end, 2), 0, 0, 0
    at += 3
    colon = np.int64(at < end and data[at] == ord(":"))
    if colon or _digits(data, at, end, 1) >= 0:
        minute = _digits(data, at + colon, end, 2)
        at += 2 + colon
        if at < end and (data[at] == ord(":") if colon else _digits(data, at, end, 1) >= 0):
            second = _digits(data, at + colon, end, 2)
            at += 2 + colon
            if at < end and (data[at] == ord(".") or data[at] == ord(",")):
                at += 1
                if _digits(data, at, end, 1) < 0:
                    return UNKNOWN
                unit = 100_000
                while at < end and 48 <= data[at] <= 57:
                    fraction += (data[at] - 48) * unit
                    unit //= 10
                    at += 1
    if hour < 0 or minute < 0 or minute > 59 or second < 0 or second > 59:
        return UNKNOWN
    if hour > 24 or (hour == 24 and minute + second + fraction > 0):
        return UNKNOWN
    if at < end:
        ahead = _offset(data, at, end)
        if ahead == UNKNOWN:
            return UNKNOWN
        seconds -= ahead * 60
    return (seconds + hour * 3600 + minute * 60 + second) * 1_000_000 + fraction


@jit
def read_iso(data, ends, out):  # type: ignore[no-untyped-def]
    """Write the moment of each text, microseconds since 1970, or UNKNOWN. Text i is ``data[ends[i] : ends[i + 1]]``."""
    for i in range(out.size):
        out[i] = _moment(data, ends[i], ends[i + 1])
