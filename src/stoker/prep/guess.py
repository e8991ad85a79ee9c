"""Guess what the columns of a log are from their names and first values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import polars as pl

from stoker.prep.look import Sample
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


class Outcome(NamedTuple):
    """A way to make a label of a column; the candidate of least ``order`` is the best."""

    order: int
    rule: str | None = None
    doubt: str = ""  # what is not certain


@dataclass(kw_only=True)
class Guess:
    """What a column seems to be."""

    name: str  # in the file
    distinct: int  # different values seen, without missing ones
    missing: float  # share of missing values
    example: str  # a value, shortened
    repeats: float  # rows with a value, by the number of different ones
    kind: Kind = "categorical"  # time: a candidate for [timestamp]
    settings: dict[str, Any] = field(default_factory=dict)  # keys of its table in the schema besides its name
    reason: str = ""  # why it is left out
    doubts: list[str] = field(default_factory=list)  # what is not certain
    notes: list[str] = field(default_factory=list)  # what a person may want to know
    outcome: Outcome | None = None  # how it could be the label; None: it could not
    code: bool = False  # whether its values name something: users, items

    def leave_out(self, reason: str) -> None:
        """Settle that the column is not used."""
        self.kind, self.reason = "left out", reason


def null_texts(frame: pl.DataFrame) -> list[str]:
    """Return texts such as NULL that stand for missing values in a frame of texts."""
    found: set[str] = set()
    for column in frame.select(pl.col(pl.String)).iter_columns():
        seen = set(column.filter(column.is_in(NULLS)).unique())
        rest = column.filter(~column.is_in(NULLS))
        numeric = len(rest) and rest.cast(pl.Float64, strict=False).count() >= _NUMERIC * len(rest)
        found |= seen if numeric else seen & set(_PLAIN_NULLS)
    return [text for text in NULLS if text in found]


def guess_columns(sample: Sample) -> list[Guess]:
    """Return a guess for each column of the first rows; texts in ``source.null_values`` are taken as missing."""
    nulls = pl.col(pl.String).is_in(sample.source.null_values)
    frame = sample.frame.with_columns(pl.when(~nulls).then(pl.col(pl.String)))
    return [_guess(column, named=sample.header) for column in frame.iter_columns()]


def _guess(column: pl.Series, *, named: bool) -> Guess:
    rows, values = len(column), column.drop_nulls()
    if values.dtype.is_float():
        values = values.drop_nans()
    plain = not values.dtype.is_nested()
    distinct = values.n_unique() if plain else len(set(map(str, values.to_list())))
    guess = Guess(
        name=column.name, distinct=distinct, missing=1 - len(values) / rows, example=_example(values),
        repeats=len(values) / max(distinct, 1),
    )  # fmt: skip
    if not len(values):
        guess.leave_out("no row read has a value")
    elif not plain or values.dtype in (pl.Binary, pl.Object):
        _nested(guess, values)
    elif values.dtype in (pl.Time, pl.Duration):
        guess.leave_out("a time of day or a duration: write it as a number")
    elif values.dtype.is_temporal():
        guess.kind, guess.settings = "time", {"type": "datetime"}
    else:
        _scalar(guess, values, rows, named=named)
        if distinct == 1 and guess.missing == 0 and rows > 1:
            guess.leave_out(f"the same value in every row read: {guess.example}")
    return guess


def _scalar(guess: Guess, values: pl.Series, rows: int, *, named: bool) -> None:
    """Settle what a column of numbers or texts is."""
    if values.dtype in (pl.Boolean, pl.Categorical, pl.Enum):
        values = values.cast(pl.String)
    elif values.dtype.is_decimal():
        values = values.cast(pl.Float64)
    name = guess.name if named else ""  # c1, c2, ... say nothing
    found, whole = _numbers(values)
    if values.dtype == pl.String and found.count() < _NUMERIC * len(values):
        guess.outcome = _text_outcome(name, values)
        _text(guess, name, values, rows)
        return
    numbers = found.drop_nulls()
    if wrong := len(values) - len(numbers):
        bad = str(values.filter(found.is_null())[0])[:30]
        guess.doubts.append(f"{wrong:,} of {len(values):,} values are no numbers, such as {bad!r}: bad lines")
    guess.outcome = _number_outcome(name, numbers, named=named)
    _number(guess, name, values, numbers, whole=whole, rows=rows)


def _example(values: pl.Series) -> str:
    if not len(values):
        return ""
    text = str(values[0].to_list() if isinstance(values[0], pl.Series) else values[0])
    return text if len(text) <= 40 else text[:37] + "..."


def _nested(guess: Guess, values: pl.Series) -> None:
    if not isinstance(values.dtype, pl.List | pl.Array):
        return guess.leave_out("an object in each row: give its parts columns of their own")
    lists = values.arr.to_list() if isinstance(values.dtype, pl.Array) else values
    items = lists.explode().drop_nulls()
    if items.dtype.is_nested() or items.dtype in (pl.Binary, pl.Object):
        return guess.leave_out("lists of lists or objects")
    if items.dtype.is_float():
        return guess.leave_out("lists of numbers, such as embeddings, are no ids")
    settings = {"type": "int"} if items.dtype.is_integer() else {}
    return _sequence(guess, items, settings, int(lists.list.len().max() or 1))  # type: ignore[arg-type]


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


def _spread(numbers: pl.Series) -> tuple[float, float, float]:
    """Return the least, the median and the greatest number."""
    return float(numbers.min()), float(numbers.median()), float(numbers.max())  # type: ignore[arg-type]


def _number(guess: Guess, name: str, values: pl.Series, numbers: pl.Series, *, whole: bool, rows: int) -> None:
    """Settle whether numbers are moments, codes, row ids or quantities."""
    quantity, code = bool(_NUMBER_NAME.search(name)), bool(_CODE_NAME.search(name))
    low, middle, high = _spread(numbers)
    if _epoch(guess, name, low, high, whole=whole) or _day_number(guess, name, values):
        return
    padded = values.dtype == pl.String and bool(values.str.contains(r"^0[0-9]").any())
    guess.settings = {"type": "int"}
    if whole and padded and guess.repeats > 1 and not quantity:
        guess.settings, guess.code = {}, True  # 007 is not 7
        return
    different = guess.distinct == rows and whole and rows >= 10 and low >= 0 and not (quantity and not code)
    if different and (code or rows >= 1000 or bool((numbers.diff().drop_nulls() == 1).all())):
        return guess.leave_out("a different whole number in every row read: a row id, which teaches nothing")
    counts = guess.missing > 0 and low <= 1 and high > 20 * middle  # small in most rows, large in a few
    if not whole and code and not quantity and bool((numbers == numbers.round()).all()):
        guess.settings, guess.code = {"type": "float"}, True
        guess.doubts.append("whole numbers written as floats; taken for codes because of the name")
    elif not whole or (quantity and not code and guess.distinct > 2):
        _dense(guess, low, middle, high)
    elif code and not quantity:
        guess.code = True
    elif guess.distinct > _CODES and (low < 0 or guess.repeats < 1.5 or (high < 1000 and name) or counts):
        _dense(guess, low, middle, high)
        guess.doubts.append('numbers or codes? Taken for numbers; codes want [[categorical]] with type = "int"')
    else:
        guess.code = guess.distinct > _CODES
        if guess.distinct > 2:
            guess.doubts.append("numbers or codes? Taken for codes; numbers want [[dense]]")
    if guess.kind == "categorical" and whole and max(-low, high) >= 2**63:
        guess.settings = {}  # type int has 64 bits
    if guess.kind == "categorical" and values.dtype == pl.String and len(numbers) < len(values):
        guess.settings = {}
        guess.doubts = ["most values are whole numbers, some are not: taken for texts"]


def _dense(guess: Guess, low: float, middle: float, high: float) -> None:
    skewed = low >= 0 and high > 50 * max(middle, 0.02)
    guess.kind, guess.settings = "dense", {"fill": "median"} if guess.missing else {}
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
        return guess.leave_out("lists or objects written as text: write them as 1|2|3, or as JSON lines")
    if _list_text(guess, values):
        return
    lengths = values.str.len_chars()
    if guess.distinct == rows and rows >= 10:
        what = "a row id" if int(lengths.max()) <= 40 else "free text"  # type: ignore[arg-type]
        return guess.leave_out(f"a different text in every row read: {what}, which teaches nothing as it is")
    if float(lengths.mean()) > 60:  # type: ignore[arg-type]
        guess.doubts.append("long texts: every different one gets an id. Leave it out if it is free text")
    width = int(lengths[0])
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
        if strong:
            return Outcome(0, doubt="" if len(values) == 2 else f"only {values[0]:g} was seen")
        if len(values) == 2 and _IS_NAME.match(name):
            return Outcome(4, doubt="chosen because its values are 0 and 1 and its name begins with is or has")
        return Outcome(6, doubt="chosen because its values are 0 and 1") if len(values) == 2 else None
    if len(values) == 2:
        if strong:
            return Outcome(1, f"== {values[1]:g}")
        return Outcome(7, "> -1", "chosen because it has two values") if values == [-1, 1] else None
    halves = all(value * 2 == round(value * 2) and 0 <= value <= 10 for value in values)
    rating = bool(_RATING_NAME.search(name))
    if len(values) >= 3 and halves and (rating or not named):
        top = max(values)
        rule = f">= {'4' if top == 5 else '7' if top == 10 else f'{top:g}'}"
        sure = rating and top in (5, 10)
        return Outcome(
            2 if rating else 8, rule, "" if sure else "a rating? Say from which value on a row counts as liked"
        )
    if not strong:
        return None
    low, middle, _ = _spread(numbers)
    return Outcome(3, "> 0" if low == 0 else f">= {middle:g}", "many values. Say which of them count as 1")


def _text_outcome(name: str, values: pl.Series) -> Outcome | None:
    """Return how a column of texts could be the label."""
    found: Sequence[str] = values.unique().sort().to_list() if values.n_unique() <= 20 else []
    strong = bool(_OUTCOME_NAME.match(name))
    lower = {text.lower(): text for text in reversed(found)}  # the first of those that differ in capitals
    yes, no = (next((lower[one] for one in words if one in lower), None) for words in (_YES, _NO))
    if len(found) == 2 and yes and no:
        return Outcome(1 if strong else 5, f"== '{yes}'", "" if strong else "chosen because of its values")
    event = next((lower[one] for one in _EVENTS if one in lower), None)
    if len(found) > 1 and event:
        return Outcome(1 if strong else 5, f"== '{event}'", "say which of the events count as 1")
    if strong and len(found) == 2 and "'" not in found[1]:
        return Outcome(2, f"== '{found[1]}'", f"say which of {found} counts as 1")
    return None
