"""Sizes, counts and shares as people write them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Integral
from typing import Any, TypeVar

from stoker.base.errors import ConfigError

_T = TypeVar("_T")
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9}
_UNITS = {
    "size": {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, **_DECIMAL,
             "KB": 10**3, "MB": 10**6, "GB": 10**9, "T": 10**12, "TB": 10**12},
    "count": {"": 1, **_DECIMAL, "B": 10**9},
    "share": {"": 1, "%": 100},
}  # fmt: skip
#: unit of numbers since 1970 -> how many are a second
EPOCHS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_FIRST_EPOCH, _LAST_EPOCH = 631_152_000, 2_051_222_400  # 1990 and 2035
_EXAMPLE = {"size": "4GiB, 512MiB or 2GB", "count": "2048, 10k or 1.5M", "share": "0.1% or 0.001"}
_NUMBER = re.compile(r"\s*((?:[0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*")


def _split(text: str, what: str) -> tuple[float, int]:
    """Return the number in a text and the factor of its unit."""
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        kind = "a number from 0 to 100 %" if what == "share" else "a number with a unit"
        raise ConfigError(f"{what} {text!r} is not {kind}. Write for example {_EXAMPLE[what]}.")
    unit = match[2].upper()
    if unit not in _UNITS[what]:
        raise ConfigError(f"{what} {text!r} has the unknown unit {unit!r}. Write for example {_EXAMPLE[what]}.")
    return float(match[1].replace("_", "").replace(",", "")), _UNITS[what][unit]


def parse_size(text: Any) -> int:
    """Return the bytes of ``"4GiB"`` (2**30), ``"4GB"`` (10**9) or a plain number of bytes, none negative."""
    if not isinstance(text, bool) and isinstance(text, Integral):
        if text < 0:
            raise ConfigError(f"size {text} is negative. Write for example {_EXAMPLE['size']}.")
        return int(text)
    value, factor = _split(str(text), "size")
    return int(min(value * factor, 1e99))  # 1e400 is infinite


def parse_count(text: str | int) -> int:
    """Return the whole number of ``"10k"``, ``"1.5M"``, ``"1_000"`` or ``"2048"``."""
    if isinstance(text, int):
        return text
    value, factor = _split(text, "count")
    if not (value * factor).is_integer():
        raise ConfigError(f"count {text!r} is not a whole number. Write for example {_EXAMPLE['count']}.")
    return int(value * factor)


def parse_share(text: str | float) -> float:
    """Return the share in [0, 1] of ``"0.1%"`` or ``"0.001"``."""
    if isinstance(text, int | float):
        value = float(text)
    else:
        value, parts = _split(text, "share")
        value = float(Decimal(repr(value)) / parts) if parts > 1 else value  # 99.9 / 100 is not 0.999
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"share {text!r} is outside 0 to 100 %. Write for example {_EXAMPLE['share']}.")
    return value


def parse_setting(name: str, parse: Callable[[Any], _T], value: object) -> _T:
    """Return the parsed value of a setting; an error names the setting."""
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", settings=(name,)) from None


def format_size(num_bytes: float) -> str:
    """Return ``"1.5 GiB"`` from a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(count: float) -> str:
    """Return ``"1.50 M"`` from 1,500,000; numbers under 10,000 in full."""
    if abs(count) < 10_000:
        return f"{count:,.0f}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if abs(count) < 1000:
            return f"{count:.1f} {unit}" if count >= 100 else f"{count:.2f} {unit}"
    return f"{count / 1000:.2f} T"


def epoch_unit(low: float, high: float) -> str | None:
    """Return the unit in which numbers from ``low`` to ``high`` are times since 1970, from 1990 to 2035; else None."""
    fits = (unit for unit, per in EPOCHS.items() if low >= _FIRST_EPOCH * per and high <= _LAST_EPOCH * per)
    return next(fits, None)


def plural(count: int, noun: str) -> str:
    """Return ``"1 step"`` or ``"1,200 steps"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 8, longest: int = 40) -> str:
    """Return at most ``most`` names, each cut to ``longest`` characters, and how many more there are.

    ``"a, b and 90 more"``.
    """
    shown = ", ".join(name if len(name) <= longest else f"{name[: longest - 3]}..." for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def quoted(path: str | os.PathLike[str]) -> str:
    """Return a path quoted for a shell, for the commands in messages: ``'my runs/a'``, ``runs/a``."""
    return shlex.quote(os.fspath(path))


def format_duration(seconds: float) -> str:
    """Return ``"1 h 02 min"``, ``"3 min 20 s"``, ``"4.2 s"`` or ``"85 ms"``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
