"""Guess what the columns of a log are from their names and first values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from stoker.prep.draft.look import Sample
from stoker.prep.parse.moments import UNKNOWN, read_moments, suggestions

__all__ = ["Guess", "Outcome", "guess_columns", "null_texts"]

Kind = Literal["dense", "categorical", "sequence", "time", "left out"]

NULLS = ("NULL", "null", "\\N", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "None", "none", "-", "--", "?")
_PLAIN_NULLS = ("NULL", "null", "\\N", "NaN", "nan")  # which mean nothing else, in texts neither
_CODES = 20  # whole numbers with at most so many different values are codes, unless their name says otherwise
_NUMERIC = 0.95  # share of numbers from which on other texts count as damage
_TIME_NAME = re.compile(r"time|date|(^|_)(ts|when|day|at|dt|epoch|moment|created|updated)($|_)", re.I)
_CODE_NAME = re.compile(
    r"(^|[_\W])(id|ids|uid|code|key|zip|postcode|user|item|product|sku|brand|category|cat|movie|film|song|artist|ad|"
    r"campaign|creative|shop|store|seller|merchant|publisher|site|app|device|session|visitor|customer|member|hotel|city|"
    r"country|region|genre|type|class|kind|os|browser|channel|segment|hour|weekday|month|gender|occupation|author|"
    r"article|page|query|group|hash|position|slot|bucket)s?($|[_\W])|[a-z]I[dD]$|[a-z]id$"
)
_NUMBER_NAME = re.compile(
    r"price|amount|count|(^|_)(num|n|nr|avg|mean|sum|total|min|max|std|age|qty|rate|ctr|pct|lat|lon|lng)($|_)|number|"
    r"quantity|score|duration|length|size|width|height|weight|seconds|minutes|days|hours|dwell|revenue|cost|bid|"
    r"distance|ratio|share|percent|latitude|longitude|value|balance|income|level|rank", re.I,
)  # fmt: skip
_OUTCOME_NAME = re.compile(
    r"^(label|labels|click|clicks|clicked|is_?click(ed)?|clk|target|y|outcome|conversion|converted|conv|is_?conv\w*|"
    r"purchase|purchased|bought|buy|is_?buy|is_?purchased?|liked|like|is_?like[d]?|is_?label|response|booked|installed|"
    r"subscribed|churn(ed)?|engaged|watched)$", re.I,
)  # fmt: skip
_IS_NAME = re.compile(r"^(is|has|did)_?[A-Za-z]")
_RATING_NAME = re.compile(r"(^|_)(rating|ratings|stars?|score|grade|review_?score)($|_)", re.I)
_EVENTS = ("clickout item", "clickout", "purchase", "order", "transaction", "buy", "conversion", "click", "like")
_YES = ("true", "yes", "y", "t")
_NO = ("false", "no", "n", "f")
_EPOCHS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_FIRST_EPOCH, _LAST_EPOCH = 631_152_000, 2_051_222_400  # 1990 and 2035


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A way to make a label of a column; the candidate of least ``order`` is the best."""

    order: int
    rule: str | None = None
    doubt: str = ""  # what is not certain


@dataclass(kw_only=True)
class Guess:
    """What a column seems to be.

    Args:
        name: of the column in the file.
        kind: dense, categorical, sequence, time (a candidate for ``[timestamp]``) or left out.
        distinct: different values seen, without missing ones.
        missing: share of missing values.
        example: a value, shortened.
        settings: keys of its table in the schema besides its name.
        reason: of a column that is left out.
        doubts: what is not certain.
        notes: what a person may want to know.
        outcome: how it could be the label; None: it could not.
        code: whether its values name something: users, items.
        repeats: rows with a value, by the number of different ones.
    """

    name: str
    kind: Kind
    distinct: int
    missing: float
    example: str
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    code: bool = False
    repeats: float = 0.0


def null_texts(frame: pl.DataFrame) -> list[str]:
    """Return texts such as NULL that stand for missing values in a frame of texts."""
    found: set[str] = set()
    for column in frame.iter_columns():
        if column.dtype != pl.String:
            continue
        seen = set(column.filter(column.is_in(NULLS)).unique().to_list())
        if not seen:
            continue
        rest = column.filter(~column.is_in(NULLS)).drop_nulls()
        numeric = len(rest) and rest.cast(pl.Float64, strict=False).count() >= _NUMERIC * len(rest)
        found |= seen if numeric else seen & set(_PLAIN_NULLS)
    return [text for text in NULLS if text in found]


def guess_columns(sample: Sample) -> list[Guess]:
    """Return a guess for each column of the first rows; texts in ``source.null_values`` are taken as missing."""
    nulls = sample.source.null_values
    found = []
    for column in sample.frame.iter_columns():
        if nulls and column.dtype == pl.String:
            column = column.set(column.is_in(nulls), None)
        found.append(_guess(column, named=sample.header))
    return found


def _guess(column: pl.Series, *, named: bool) -> Guess:
    name, rows, values = column.name, len(column), column.drop_nulls()
    nested = isinstance(column.dtype, pl.List | pl.Array)
    if values.dtype.is_float():
        values = values.drop_nans()
    plain = not nested and not isinstance(column.dtype, pl.Struct)
    distinct = values.n_unique() if plain else len(set(map(str, values.to_list())))
    guess = Guess(
        name=name, kind="categorical", distinct=distinct, missing=1 - len(values) / rows, example=_example(values),
        repeats=len(values) / max(distinct, 1),
    )  # fmt: skip
    known = name if named else ""  # c1, c2, ... say nothing
    if not len(values):
        return _leave_out(guess, "no row read has a value")
    if not plain or values.dtype in (pl.Binary, pl.Object):
        return _nested(guess, values)
    if values.dtype in (pl.Boolean, pl.Categorical, pl.Enum):
        values = values.cast(pl.String)
    if values.dtype in (pl.Time, pl.Duration):
        return _leave_out(guess, "a time of day or a duration: write it as a number")
    if values.dtype.is_temporal():
        guess.kind, guess.settings = "time", {"type": "datetime"}
        return guess
    if values.dtype.is_decimal():
        values = values.cast(pl.Float64)
    numbers, whole = _numbers(values)
    if values.dtype != pl.String or numbers.count() >= _NUMERIC * len(values):
        if wrong := len(values) - numbers.count():
            bad = values.filter(numbers.is_null())[0]
            guess.doubts.append(
                f"{wrong:,} of {len(values):,} values are no numbers, such as {str(bad)[:30]!r}: bad lines"
            )
        guess.outcome = _number_outcome(known, numbers.drop_nulls(), named=named)
        _number(guess, known, values, numbers.drop_nulls(), whole=whole, rows=rows)
    else:
        guess.outcome = _text_outcome(known, values)
        _text(guess, known, values, rows)
    if distinct == 1 and guess.missing == 0 and rows > 1:
        guess.kind = "left out"
        guess.reason = f"the same value in every row read: {guess.example}"
    return guess


def _leave_out(guess: Guess, reason: str) -> Guess:
    guess.kind, guess.reason = "left out", reason
    return guess


def _example(values: pl.Series) -> str:
    if not len(values):
        return ""
    value = values[0]
    text = str(value.to_list() if isinstance(value, pl.Series) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def _nested(guess: Guess, values: pl.Series) -> Guess:
    if not isinstance(values.dtype, pl.List | pl.Array):
        return _leave_out(guess, "an object in each row: give its parts columns of their own")
    lists = values.arr.to_list() if isinstance(values.dtype, pl.Array) else values
    items = lists.explode().drop_nulls()
    if items.dtype.is_nested() or items.dtype in (pl.Binary, pl.Object):
        return _leave_out(guess, "lists of lists or objects")
    lengths = lists.list.len()
    if items.dtype.is_float():
        return _leave_out(guess, "lists of numbers, such as embeddings, are no ids")
    _sequence(guess, items, {"type": "int"} if items.dtype.is_integer() else {}, int(lengths.max() or 1))  # type: ignore[arg-type]
    return guess


def _sequence(guess: Guess, items: pl.Series, settings: dict[str, Any], longest: int) -> None:
    guess.kind, guess.distinct, guess.code = "sequence", items.n_unique(), True
    guess.settings = {**settings, "max_length": max(1, min(longest, 50))}
    guess.notes.append(f"lists of up to {longest:,} values")


def _numbers(values: pl.Series) -> tuple[pl.Series, bool]:
    """Return the values as numbers, null where they are none, and whether all are written as whole numbers."""
    if values.dtype.is_integer():
        return values, True
    if values.dtype.is_float():
        return values, False
    stripped = values.str.strip_chars()
    whole = stripped.str.contains(r"^[+-]?[0-9]+$")
    if whole.all():
        ints = stripped.cast(pl.Int64, strict=False)
        if not ints.null_count():
            return ints, True
    found = stripped.cast(pl.Float64, strict=False)
    return found.set(found.is_nan() | found.is_infinite(), None), bool(whole.filter(found.is_not_null()).all())


def _number(guess: Guess, name: str, values: pl.Series, numbers: pl.Series, *, whole: bool, rows: int) -> None:
    """Settle whether numbers are moments, codes, row ids or quantities."""
    code, quantity = bool(_CODE_NAME.search(name)), bool(_NUMBER_NAME.search(name))
    low, high = float(numbers.min()), float(numbers.max())  # type: ignore[arg-type]
    if _epoch(guess, name, low, high, whole=whole):
        return
    if _day_number(guess, name, values):
        return
    padded = values.dtype == pl.String and bool(values.str.contains(r"^0[0-9]").any())
    guess.settings = {"type": "int"}
    if whole and padded and guess.repeats > 1 and not quantity:
        guess.settings, guess.code = {}, True  # 007 is not 7
        return
    different = guess.distinct == rows and whole and rows >= 10 and low >= 0 and not (quantity and not code)
    if different and (code or rows >= 1000 or bool((numbers.diff().drop_nulls() == 1).all())):
        _leave_out(guess, "a different whole number in every row read: a row id, which teaches nothing")
        return
    if not whole and code and not quantity and bool((numbers == numbers.round()).all()):
        guess.settings, guess.code = {"type": "float"}, True
        guess.doubts.append("whole numbers written as floats; taken for codes because of the name")
    elif not whole or (quantity and not code and guess.distinct > 2):
        _dense(guess, numbers)
    elif code and not quantity:
        guess.code = True
    elif guess.distinct > _CODES and (
        low < 0 or guess.repeats < 1.5 or (high < 1000 and name) or _are_counts(guess, low, numbers, high)
    ):
        _dense(guess, numbers)
        guess.doubts.append('numbers or codes? Taken for numbers; codes want [[categorical]] with type = "int"')
    else:
        guess.code = guess.distinct > _CODES
        if guess.distinct > 2:
            guess.doubts.append("numbers or codes? Taken for codes; numbers want [[dense]]")
    if guess.kind == "categorical" and whole and max(-low, high) >= 2**63:
        guess.settings = {}  # type int has 64 bits
    if guess.kind == "categorical" and values.dtype == pl.String and numbers.count() < len(values):
        guess.settings = {}
        guess.doubts = ["most values are whole numbers, some are not: taken for texts"]


def _are_counts(guess: Guess, low: float, numbers: pl.Series, high: float) -> bool:
    """Return whether numbers look like counts: missing in some rows, small in most, large in a few."""
    return guess.missing > 0 and low <= 1 and high > 20 * float(numbers.median())  # type: ignore[arg-type]


def _dense(guess: Guess, numbers: pl.Series) -> None:
    guess.kind, guess.settings = "dense", {}
    low, middle, high = (float(found) for found in (numbers.min(), numbers.median(), numbers.max()))  # type: ignore[arg-type]
    if guess.missing:
        guess.settings["fill"] = "median"
    skewed = low >= 0 and high > 50 * max(middle, 0.02)
    guess.settings["transforms"] = ["log1p", "zscore"] if skewed else ["zscore"]
    guess.notes.append(f"{low:g} to {high:g}, median {middle:g}")


def _epoch(guess: Guess, name: str, low: float, high: float, *, whole: bool) -> bool:
    """Settle whether numbers count seconds or parts of them since 1970."""
    for unit, factor in _EPOCHS.items():
        if low < _FIRST_EPOCH * factor or high > _LAST_EPOCH * factor or guess.distinct < 3:
            continue
        if not _TIME_NAME.search(name):
            if name and _CODE_NAME.search(name):
                return False
            guess.doubts.append(f"the values could be {unit} since 1970")
            if name:
                return False
        guess.kind, guess.settings = "time", {"type": "int" if whole else "float"}
        guess.notes.append(f"{unit} since 1970")
        return True
    return False


def _day_number(guess: Guess, name: str, values: pl.Series) -> bool:
    """Settle whether texts such as 20170307 are days."""
    if values.dtype != pl.String or not _TIME_NAME.search(name) or not values.str.contains(r"^(19|20)\d{6}$").all():
        return False
    if guess.distinct < 2 or (read_moments(values, None) == UNKNOWN).any():
        return False
    guess.kind, guess.settings = "time", {"type": "datetime"}
    return True


def _text(guess: Guess, name: str, values: pl.Series, rows: int) -> None:
    """Settle whether texts are moments, lists, codes or free text."""
    if _moments(guess, values):
        return
    if values.str.contains(r"^\s*[\[{].*[\]}]\s*$").mean() > 0.9:  # type: ignore[operator]
        _leave_out(guess, "lists or objects written as text: write them as 1|2|3, or as JSON lines")
        return
    if _list_text(guess, values):
        return
    lengths = values.str.len_chars()
    width = int(lengths[0])
    if guess.distinct == rows and rows >= 10:
        what = "a row id" if int(lengths.max()) <= 40 else "free text"  # type: ignore[arg-type]
        _leave_out(guess, f"a different text in every row read: {what}, which teaches nothing as it is")
        return
    if float(lengths.mean()) > 60:  # type: ignore[arg-type]
        guess.doubts.append("long texts: every different one gets an id. Leave it out if it is free text")
    if guess.distinct >= _CODES and width in (8, 16) and values.str.contains(rf"^[0-9a-fA-F]{{{width}}}$").all():
        guess.settings = {"type": "hex"}
    guess.code = guess.distinct > 2
    if guess.distinct > len(values) / 2 and guess.distinct > 100:
        guess.notes.append("most values are there once: min_count = 2 would keep them out of the table")


def _moments(guess: Guess, values: pl.Series) -> bool:
    """Settle whether texts are dates, and how they are written."""
    texts = values.unique(maintain_order=True).head(1000)
    if not texts.str.contains(r"\d").all() or guess.distinct < 2:
        return False
    iso = read_moments(texts, None) != UNKNOWN
    if iso.mean() >= _NUMERIC:
        guess.kind, guess.settings = "time", {"type": "datetime"}
        return True
    if len(values[0]) < 6 or not values[0][-1:].strip() or not re.search(r"[-/.: ]", values[0].strip()):
        return False
    patterns = [one.split('"')[1] for one in suggestions(texts) if one.startswith("format")]
    good = [one for one in patterns if (read_moments(texts, one) != UNKNOWN).mean() >= _NUMERIC]
    if not good:
        return False
    guess.kind, guess.settings = "time", {"type": "datetime", "format": good[0]}
    if len(good) > 1:
        guess.doubts.append(f'the dates could also be written as format = "{good[1]}"')
    return True


def _list_text(guess: Guess, values: pl.Series) -> bool:
    """Settle whether texts are lists with a separator between their values."""
    for separator in ("|", ";", ",", " "):
        having = values.filter(values.str.contains(separator, literal=True))
        if len(having) < 0.3 * len(values) and not (separator == "|" and len(having) >= 0.05 * len(values)):
            continue
        pieces = values.str.split(separator).explode()
        codes = bool(pieces.str.contains(r"^[A-Za-z]?[0-9]+$").mean() >= _NUMERIC)  # type: ignore[operator]
        blanks = bool(pieces.str.contains(r"^\s|\s$").any())
        if (separator == " " and not codes) or (separator == "," and blanks) or pieces.n_unique() > len(pieces) / 1.5:
            continue
        whole = bool(pieces.drop_nulls().str.contains(r"^(0|[1-9][0-9]{0,17})$").all())
        longest = int(values.str.count_matches(separator, literal=True).max()) + 1  # type: ignore[arg-type]
        _sequence(guess, pieces, {"separator": separator, **({"type": "int"} if whole else {})}, longest)
        if not codes and separator in ",;":
            guess.doubts.append(f"lists separated by {separator!r}, or texts with such a character in them?")
        return True
    return False


def _number_outcome(name: str, numbers: pl.Series, *, named: bool) -> Outcome | None:
    """Return how a column of numbers could be the label."""
    if not len(numbers):
        return None
    values = numbers.unique().sort().to_list() if numbers.n_unique() <= 11 else []
    strong = bool(_OUTCOME_NAME.match(name))
    if values and set(values) <= {0, 1}:
        doubt = "" if len(values) == 2 else f"only {values[0]:g} was seen"
        if strong:
            return Outcome(order=0, doubt=doubt)
        if len(values) == 2 and _IS_NAME.match(name):
            return Outcome(order=4, doubt="chosen because its values are 0 and 1 and its name begins with is or has")
        return Outcome(order=6, doubt="chosen because its values are 0 and 1") if len(values) == 2 else None
    if len(values) == 2:
        rule = f"== {values[1]:g}" if strong else f"> {values[0]:g}"
        if strong:
            return Outcome(order=1, rule=rule)
        return Outcome(order=7, rule=rule, doubt="chosen because it has two values") if values == [-1, 1] else None
    halves = all(value * 2 == round(value * 2) and 0 <= value <= 10 for value in values)
    rating = bool(_RATING_NAME.search(name))
    if len(values) >= 3 and halves and (rating or not named):
        top = max(values)
        rule = f">= {'4' if top == 5 else '7' if top == 10 else f'{top:g}'}"
        doubt = "" if rating and top in (5, 10) else "a rating? Say from which value on a row counts as liked"
        return Outcome(order=2 if rating else 8, rule=rule, doubt=doubt)
    if strong:
        low, middle = float(numbers.min()), float(numbers.median())  # type: ignore[arg-type]
        rule = "> 0" if low == 0 else f">= {middle:g}"
        return Outcome(order=3, rule=rule, doubt="many values. Say which of them count as 1")
    return None


def _text_outcome(name: str, values: pl.Series) -> Outcome | None:
    """Return how a column of texts could be the label."""
    found: Sequence[str] = values.unique().sort().to_list() if values.n_unique() <= 20 else []
    strong = bool(_OUTCOME_NAME.match(name))
    lower = {text.lower(): text for text in reversed(found)}  # the first of those that differ in capitals
    yes, no = (next((lower[one] for one in words if one in lower), None) for words in (_YES, _NO))
    order = 1 if strong else 5
    if len(found) == 2 and yes and no:
        return Outcome(order=order, rule=f"== '{yes}'", doubt="" if strong else "chosen because of its values")
    event = next((lower[one] for one in _EVENTS if one in lower), None)
    if len(found) > 1 and event:
        return Outcome(order=order, rule=f"== '{event}'", doubt="say which of the events count as 1")
    if strong and len(found) == 2 and "'" not in found[1]:
        return Outcome(order=2, rule=f"== '{found[1]}'", doubt=f"say which of {found} counts as 1")
    return None
