"""Split rules in one line, such as ``time:0.8,0.1``."""

from __future__ import annotations

import math
from contextlib import suppress

from stoker.base.checks import near
from stoker.base.errors import ConfigError, SchemaError
from stoker.prep.schema import SPLIT_NAMES, SplitRule

__all__ = ["split_of"]

# Per word: rule of the schema, whether it needs a column, and what numbers may follow.
_FORMS: dict[str, tuple[str, bool, str]] = {
    "random": ("hash", False, "shares"),
    "hash": ("hash", True, "shares"),
    "time": ("time", False, "shares"),
    "last_touch": ("last_touch", True, "shares"),
    "leave_last_out": ("leave_last_out", True, "min_rows"),
    "runs": ("runs", False, "runs"),
    "column": ("column", True, ""),
}
_HELP = """The forms, with shares of train and valid (the rest is test; behind train alone, valid and test halve it):
  random:0.8,0.1                  by chance, row by row
  hash:COLUMN:0.8,0.1             by chance, rows with equal values of the column together
  time:0.8,0.1                    the earliest rows train
  last_touch:COLUMN:0.8,0.1       whole users, the earliest by their last row train
and
  leave_last_out:COLUMN[:ROWS]    each user's last row is test, the one before valid, of users with ROWS (3) or more
  runs[:RUNS]                     equal runs of lines (7), the last is half test, half valid
  column:COLUMN                   by a column that holds train, valid, test or drop"""


def split_of(text: str | SplitRule) -> SplitRule:
    """Return the split rule that a line such as ``hash:user:0.8,0.1`` describes; a rule is returned as it is.

    >>> split_of("time:0.9").train, split_of("time:0.9").test
    (0.9, 0.05)

    Raises:
        ConfigError: the line has none of the forms, which the message lists.
    """
    if isinstance(text, SplitRule):
        return text
    word, *given = text.split(":")
    if word not in _FORMS:
        raise _refused(text, f"{word!r} is no rule.{near(word, list(_FORMS))}")
    rule, column, numbers = _FORMS[word]
    values = _numbers(given[-1]) if len(given) > bool(column) else []  # a column may have a number for a name
    given = given[:-1] if values else given
    if numbers == "shares" and column and len(given) == 1 and not values and _numbers(given[0]):
        raise _refused(text, f"{word} needs a column before its shares.")
    name = ":".join(given)
    if column and not name:
        raise _refused(text, f"{word} needs a column.")
    if name and not column:
        raise _refused(text, f"{name!r} is not a number." if numbers else f"{name!r} is too much.")
    try:
        if numbers == "shares":
            train, valid, test = _shares(text, values)
            return SplitRule(rule=rule, train=train, valid=valid, test=test, column=name or None)
        if len(values) > 1 or any(value != int(value) for value in values) or (values and not numbers):
            raise _refused(text, f"{word} takes {'one whole' if numbers else 'no'} number.")
        if rule == "runs":
            return SplitRule(rule=rule, runs=int(values[0]) if values else 7)
        if rule == "leave_last_out":
            return SplitRule(rule=rule, column=name, min_rows=int(values[0]) if values else 3)
        return SplitRule(rule=rule, column=name, values={value: value for value in (*SPLIT_NAMES, "drop")})
    except SchemaError as error:
        raise _refused(text, str(error)) from error


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"split {text!r}: {why} {_HELP}")


def _numbers(text: str) -> list[float]:
    """Return the numbers of a list such as ``0.8,0.1``; none where it is no such list."""
    with suppress(ValueError):
        found = [float(one) for one in text.split(",")]
        return found if all(map(math.isfinite, found)) else []
    return []


def _shares(text: str, given: list[float]) -> tuple[float, float, float]:
    """Return the shares of training, validation and test rows."""
    values = given or [0.8, 0.1]
    if len(values) == 1:
        values.append(round((1 - values[0]) / 2, 12))
    if len(values) == 2:
        values.append(round(1 - sum(values), 12))
    if len(values) > 3 or not all(0 <= value <= 1 for value in values) or abs(sum(values) - 1) > 1e-9:
        raise _refused(text, "the shares must be from 0 to 1, and sum to 1 in all.")
    train, valid, test = values
    return train, valid, test
