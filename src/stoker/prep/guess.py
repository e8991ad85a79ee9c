"""Read the first rows of a new log, and guess its format and the kinds of its columns."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl

from stoker.base.errors import DataError, errors_as
from stoker.base.units import epoch_unit, plural
from stoker.prep.parse.delimited import MAX_QUOTED_LINES
from stoker.prep.parse.frames import reading_parquet
from stoker.prep.parse.ingest import file_columns
from stoker.prep.parse.moments import UNKNOWN, read_moments, suggestions
from stoker.prep.parse.notation import DECIMAL_COMMA, THOUSANDS
from stoker.prep.parse.sources import check_text, line_blocks, source_kind
from stoker.prep.source_format import SourceFormat

_BLOCK = 2**20  # bytes of text to read at a time
_MOST_BYTES = 2**27  # bytes of text to read from all files
_LINES = 200  # lines from which the format is guessed
_SEPARATORS = ("\t", ",", ";", "|", "::", "\x01")
_ALIKE = 0.8  # a separator needs this share of lines with the same number of fields
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|nan|inf", re.IGNORECASE)
_WORD = re.compile(r"([#%$€£] ?)?[^\W\d][\w .\-/#%()\[\]:?!&+'*°$€£]{0,63}")  # a name of a column


@dataclass(kw_only=True)
class Sample:
    """The first rows of a log."""

    frame: pl.DataFrame  # texts for a text file, typed columns for a typed one
    source: SourceFormat  # format of the files, without the keys that file names decide
    header: bool = True  # whether the log names its columns
    whole: bool = True  # whether these are all rows
    bad: int = 0  # lines with another number of fields
    unsure: list[str] = field(default_factory=list)  # doubts about the format


def look(files: Sequence[Path], rows: int) -> Sample:
    """Read about ``rows`` rows, the same number from the beginning of each file, at most 128 MiB of text.

    Raises:
        DataError: a file is empty or not a log, or has other columns than the first file.
    """
    samples: list[Sample] = []
    for path in files:
        like = samples[0] if samples else None
        samples.append(_look_at(path, max(1, rows // len(files)), _MOST_BYTES // len(files), like))
        names, first = samples[-1].frame.columns, samples[0].frame.columns
        if names != first and samples[0].source.kind != "jsonl":
            raise DataError(
                f"{path} has the columns {', '.join(names)[:200]}, but {files[0]} has {', '.join(first)[:200]}. "
                "Draft a schema for each kind of file."
            )
    what = f"columns have other types in some files than in {files[0]}"
    with errors_as(DataError, what, caught=(pl.exceptions.PolarsError,)):
        frame = pl.concat([one.frame for one in samples], how="diagonal_relaxed")
    whole, bad = all(one.whole for one in samples), sum(one.bad for one in samples)
    if not frame.height:
        broken = f"only {plural(bad, 'line')} with other fields. Check its separator and its quotes."
        raise DataError(f"{files[0]} has a header but {broken if bad else 'no rows. Name a file with rows.'}")
    return replace(samples[0], frame=frame, whole=whole, bad=bad)


def _look_at(path: Path, rows: int, most: int, like: Sample | None) -> Sample:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1" or (magic and source_kind(path) == "parquet"):
        return _parquet(path, rows)
    if magic:
        check_text(path)
    head = next((block.load() for block in line_blocks(path, block_bytes=2**16)), b"") if magic else b""
    if not head.strip():
        raise DataError(f"{path} is empty. Name a file with rows.")
    if source_kind(path) == "jsonl" or _object(head.lstrip().split(b"\n", 1)[0]) is not None:
        return _json_lines(path, rows, most)
    return _delimited(path, head, rows, most, like)


def _lines(path: Path, rows: int, most: int) -> tuple[list[bytes], bool]:
    """Return up to ``rows`` lines that are not blank, of about ``most`` bytes, and whether these are all lines."""
    lines: list[bytes] = []
    for block in line_blocks(path, block_bytes=min(_BLOCK, most)):
        data = block.load()
        most -= len(data)
        lines += filter(bytes.strip, data.split(b"\n"))
        if len(lines) > rows or most <= 0:
            return lines[:rows], False
    return lines, True


def _parquet(path: Path, rows: int) -> Sample:
    source = SourceFormat() if source_kind(path) == "parquet" else SourceFormat(kind="parquet")
    with reading_parquet(path):
        frame = pl.scan_parquet(path).head(rows + 1).collect(engine="streaming")
    sample = Sample(frame=frame.head(rows), source=source, whole=frame.height <= rows)
    if "" in frame.columns:
        sample.frame = sample.frame.drop("")
        sample.unsure.append("a column without a name: left out")
    return sample


def _object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json_lines(path: Path, rows: int, most: int) -> Sample:
    lines, whole = _lines(path, rows, most)
    objects = [found for line in lines if (found := _object(line)) is not None]
    names = dict.fromkeys(name for found in objects for name in found if name)
    if not names:
        raise DataError(f"{path} has no JSON object in its first lines. JSON lines have one object per line.")
    source = SourceFormat() if source_kind(path) == "jsonl" else SourceFormat(kind="jsonl")
    frame = pl.DataFrame([_json_series(name, [found.get(name) for found in objects]) for name in names])
    return Sample(frame=frame, source=source, whole=whole, bad=len(lines) - len(objects))


def _json_series(name: str, values: list[object]) -> pl.Series:
    """Return JSON values as a series of their common type, or of texts."""
    kinds = {type(value) for value in values if value is not None}
    with suppress(pl.exceptions.PolarsError, TypeError, OverflowError):
        if kinds and kinds <= {int, float}:
            return pl.Series(name, values, dtype=pl.Float64 if float in kinds else pl.Int64)
        if len(kinds) == 1:
            return pl.Series(name, values, strict=True)
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pl.Series(name, texts, dtype=pl.String if kinds else pl.Null)


def _delimited(path: Path, head: bytes, rows: int, most: int, like: Sample | None) -> Sample:
    sample = _notation(path, head) if like is None else replace(like, bad=0, unsure=[])
    source, names = sample.source, file_columns(path, sample.source)
    raw, sample.whole = _lines(path, rows + sample.header, most)
    lines = [line.decode(source.encoding, errors="replace").rstrip("\r") for line in raw[sample.header :]]
    found = _records(lines, source.separator or ",", source.quote, whole=sample.whole)
    fitting = [fields for fields in found if len(fields) == len(names)]
    sample.bad = len(found) - len(fitting)
    twice = {name for name, count in Counter(names).items() if count > 1}
    kept = {name: place for place, name in enumerate(names) if name and name not in twice}
    for name in sorted(twice):
        sample.unsure.append(f"several columns are called {name!r}: left out, as the name does not say which one")
    if "" in names and "" not in twice:
        sample.unsure.append(f"column {names.index('') + 1} has no name: left out (a row number, as pandas writes it?)")
    if not kept:
        raise DataError(f"{path} has no column with a name of its own. Give it a header line.")
    columns = {name: [fields[place] or None for fields in fitting] for name, place in kept.items()}
    sample.frame = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))
    return sample


def _records(lines: Sequence[str], separator: str, quote: str | None, *, whole: bool = True) -> list[list[str]]:
    """Return the fields of each record. A quoted field may contain line breaks, as in RFC 4180.

    A line with a wrong quote has no fields. Unless the lines are ``whole``, a record that the last line cuts is left
    out.
    """
    if quote is None or len(separator) != 1:
        return [line.split(separator) for line in lines]
    found: list[list[str]] = []
    place = 0
    while place < len(lines):
        if quote not in lines[place]:
            found.append(lines[place].split(separator))
            place += 1
            continue
        ahead = range(place, min(place + MAX_QUOTED_LINES, len(lines)))
        reader = csv.reader((lines[at] + "\n" for at in ahead), delimiter=separator, quotechar=quote, strict=True)
        try:
            found.append(next(reader))
            place += reader.line_num
        except csv.Error:
            if not whole and place + reader.line_num >= len(lines):
                break
            found.append([])
            place += 1
    return found


def _notation(path: Path, head: bytes) -> Sample:
    """Guess encoding, separator, quotes and header of a text from its first lines."""
    unsure: list[str] = []
    encoding = "utf-8"
    try:
        text = head[: head.rfind(b"\n") + 1 or None].decode()
    except UnicodeDecodeError:
        encoding, text = "latin-1", head.decode("latin-1")
        unsure.append("the text is not UTF-8; latin-1 is assumed")
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()][:_LINES]
    separator, alike, quote = _separator(lines)
    if separator is None:
        raise DataError(
            f"{path} has no separator between fields: comma, tab, semicolon, |, :: or \\x01. Its first line is "
            f"{lines[0][:60]!r}. Rewrite it with one of these."
        )
    if alike < _ALIKE:
        unsure.append(f"only {alike:.0%} of the first lines have the same number of fields with this separator")
    table = _records(lines, separator, quote)
    width = Counter(map(len, table[1:] or table)).most_common(1)[0][0]
    header, sure = _is_header(table[0], [row for row in table[1:] if len(row) == width])
    if not sure:
        said = "taken for names of columns" if header else "not taken for names of columns"
        unsure.append(f"the first line is {said}")
    columns = () if header else tuple(f"c{place + 1}" for place in range(width))
    source = SourceFormat(separator=separator, columns=columns, quote=quote, encoding=encoding)
    return Sample(frame=pl.DataFrame(), source=source, header=header, unsure=unsure)


def _separator(lines: Sequence[str]) -> tuple[str | None, float, str | None]:
    """Return the separator that cuts most rows into the same number of fields, the share of rows, and the quote."""
    found: dict[tuple[str, str | None], tuple[int, float]] = {}  # fields of a row, and the share of such rows
    for separator, quote in product(_SEPARATORS, ('"', None)):
        records = _records(lines, separator, quote)
        width, count = Counter(map(len, records)).most_common(1)[0]
        if width > 1 and not (quote and len(separator) > 1):
            # "::" wins over "|" and ",", which may be inside its fields.
            found[separator, quote] = width + 1000 * (separator == "::"), count / len(records)
    if not found:
        return None, 0.0, '"'

    def order(one: tuple[str, str | None]) -> tuple[bool, float, float]:
        width, share = found[one]
        return share >= _ALIKE, width if share >= _ALIKE else share, share

    separator, quote = max(found, key=order)
    # Assume quotes unless lines fit better without them.
    if found.get((separator, '"'), (0, 0.0))[1] >= found[separator, quote][1] - 0.02:
        quote = '"'
    return separator, found[separator, quote][1], quote


def _is_header(first: list[str], rows: Sequence[list[str]]) -> tuple[bool, bool]:
    """Return whether the first line names the columns, and whether that is certain."""
    named = [text.strip().strip('"') for text in first]
    if any(_NUMBER.fullmatch(text) for text in named):
        return False, True
    if not all(_WORD.fullmatch(text) for text in named if text) or 2 * named.count("") > len(named):
        return False, len(rows) > 1
    if rows and len(first) != len(rows[0]):
        return True, False
    for place in range(len(first)):
        values = [row[place].strip() for row in rows if row[place].strip()]
        if values and sum(bool(_NUMBER.match(value)) for value in values) > 0.9 * len(values):
            return True, True
    again = sum(any(row[place] == first[place] for row in rows) for place in range(len(first)))
    return 2 * again < len(first), not rows or 4 * again < len(first)


Kind = Literal["dense", "categorical", "sequence", "time", "left out"]

NULLS = ("NULL", "null", "\\N", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "None", "none", "-", "--", "?")
_PLAIN_NULLS = ("NULL", "null", "\\N", "NaN", "nan")  # mean a missing value also among texts
_CODES = 20  # whole numbers with up to 20 different values are codes, unless their name says otherwise
_NUMERIC = 0.95  # from this share of numbers on, other texts count as damage
_MOMENTS = 1_000  # dates that are tried, from all rows read: the first ones may all be of one day
_TIME_NAME = re.compile(
    r"time|date|(^|_)(ts|when|day|at|dt|epoch|moment|created|updated|start|started|begin|end|ended|expires)($|_)|"
    r"(?-i:[a-z](At|Start|End)$)", re.I,
)  # fmt: skip
_DIGITS_NAME = re.compile(rf"(^|_)hour($|_)|{_TIME_NAME.pattern}", re.I)
_DIGITS = {  # times written as digits -> their format; None: ISO 8601
    r"^(19|20)\d{6}$": None, r"^(19|20)\d{10}$": "%Y%m%d%H%M", r"^(19|20)\d{12}$": "%Y%m%d%H%M%S",
    r"^(19|20)\d{8}$": "%Y%m%d%H", r"^\d{8}$": "%y%m%d%H",
}  # fmt: skip
_CODE_NAME = re.compile(
    r"(^|[_\W])(?i:id|ids|uid|code|key|zip|postcode|user|item|product|sku|brand|category|cat|movie|film|song|artist|ad|"
    r"campaign|creative|shop|store|seller|merchant|publisher|site|app|device|session|visitor|customer|member|hotel|city|"
    r"country|region|genre|type|class|kind|os|browser|channel|segment|hour|weekday|month|gender|occupation|author|"
    r"article|page|query|group|hash|position|slot|bucket)[sS]?($|[_\W])|[a-z]I[dD]$|[a-z]id$|[A-Z]ID$"
)
USER_NAME = re.compile(r"user|member|customer|visitor|client|account|cookie|uid|person|reader|player", re.I)
_NUMBER_NAME = re.compile(
    r"price|amount|(?<!ac)count(?!r|y)|(^|_)(num|n|nr|avg|mean|sum|total|min|max|std|age|qty|rate|ctr|pct|lat|lon|"
    r"lng)($|_)|number|quantity|score|duration|length|size|width|height|weight|seconds|minutes|days|hours|dwell|revenue|"
    r"cost|bid|distance|ratio|share|percent|latitude|longitude|value|balance|income|level|rank", re.I,
)  # fmt: skip
_OUTCOME_NAME = re.compile(
    r"^(label|labels|click|clicks|clicked|is_?click(ed)?|clk|target|y|outcome|conversion|converted|conv|is_?conv\w*|"
    r"purchase|purchased|bought|buy|is_?buy|is_?purchased?|liked|like|is_?like[d]?|is_?label|response|booked|installed|"
    r"subscribed|churn(ed)?|engaged|watched|skip(ped)?|applied|completed)\??$", re.I,
)  # fmt: skip
_IS_NAME = re.compile(r"^(is|has|did)_?[A-Za-z]")
_RATING_NAME = re.compile(r"(^|_)(rating|ratings|stars?|score|grade|overall|review_?score)($|_)", re.I)
_EVENTS = ("clickout item", "clickout", "purchase", "order", "transaction", "buy", "conversion", "click", "like")
_YES = ("true", "yes", "y", "t", "ja", "oui", "sí", "si")
_NO = ("false", "no", "n", "f", "nein", "non")


class Outcome(NamedTuple):
    """A way to make a label from a column. The candidate with the lowest ``order`` is the best."""

    order: int
    rule: str | None = None
    doubt: str = ""  # a question to the user


@dataclass(kw_only=True)
class Guess:
    """The guess for one column."""

    name: str  # in the file
    distinct: int  # number of different values, without missing ones
    missing: float  # share of missing values
    example: str  # a value, shortened
    repeats: float  # how often a value occurs, on average
    kind: Kind = "categorical"  # time: a candidate for [timestamp]
    settings: dict[str, Any] = field(default_factory=dict)  # keys of its table in the schema besides the name
    reason: str = ""  # why it is left out
    doubts: list[str] = field(default_factory=list)  # questions to the user
    notes: list[str] = field(default_factory=list)  # facts for the user
    outcome: Outcome | None = None  # how it could be the label; None: it could not
    code: bool = False  # whether its values are names of something, such as users or items
    formats: Sequence[str] = ()  # of dates; several if more than one reads all of them

    def leave_out(self, reason: str) -> None:
        """Mark the column as not used."""
        self.kind, self.reason = "left out", reason


def null_texts(frame: pl.DataFrame) -> list[str]:
    """Return the texts of a frame, such as NULL, that mean a missing value."""
    found: set[str] = set()
    for column in frame.select(pl.col(pl.String)).iter_columns():
        seen = set(column.filter(column.is_in(NULLS)).unique())
        rest = column.filter(~column.is_in(NULLS))
        numeric = len(rest) and rest.cast(pl.Float64, strict=False).count() >= _NUMERIC * len(rest)
        found |= seen if numeric else seen & set(_PLAIN_NULLS)
    return [text for text in NULLS if text in found]


def decimal_commas(frame: pl.DataFrame) -> list[str]:
    """Return the columns of texts that are numbers with a decimal comma, and not ids in lists of two.

    If commas divide thousands in all of them, as in 1,234, return none.
    """
    texts = [column.drop_nulls() for column in frame.iter_columns() if column.dtype == pl.String]
    numbers = (text.filter(~text.is_in(["", *NULLS])) for text in texts if not _CODE_NAME.search(text.name))
    found = [each for each in numbers if _have_commas(each)]
    return [] if all(map(_have_thousands, found)) else [each.name for each in found]


def _have_commas(values: pl.Series) -> bool:
    """Return True if all values are numbers with a decimal comma, or whole."""
    return bool(values.str.contains(DECIMAL_COMMA).all() and values.str.contains(",", literal=True).any())


def _have_thousands(values: pl.Series) -> bool:
    """Return True if all commas of numbers may divide thousands."""
    commas = values.filter(values.str.contains(",", literal=True))
    return bool(commas.str.contains(THOUSANDS).all())


def guess_columns(sample: Sample) -> list[Guess]:
    """Return a guess for each column; texts in ``source.null_values`` count as missing."""
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
    """Guess what a column of numbers or texts is."""
    if values.dtype in (pl.Boolean, pl.Categorical, pl.Enum):
        values = values.cast(pl.String)
    elif values.dtype.is_decimal():
        values = values.cast(pl.Float64)
    name = guess.name if named else ""  # c1, c2, ... say nothing
    found, whole = _numbers(values)
    if values.dtype == pl.String and found.count() < _NUMERIC * len(values):
        guess.outcome = _text_outcome(name, values)
        _text(guess, name, values, rows)
        number = not whole or _NUMBER_NAME.search(name)
        if guess.kind == "categorical" and found.count() > len(values) / 2 and number and not _CODE_NAME.search(name):
            guess.doubts.append(
                f"{_no_numbers(values, found)}: taken for texts. For [[dense]], name them in null_values"
            )
        return
    numbers = found.drop_nulls()
    if not len(numbers):
        return guess.leave_out("no row read has a finite number")
    if len(numbers) < len(values):
        guess.doubts.append(f"{_no_numbers(values, found)}: bad lines")
    guess.outcome = _number_outcome(name, numbers, named=named)
    _number(guess, name, values, numbers, whole=whole, rows=rows)


def _example(values: pl.Series) -> str:
    if not len(values):
        return ""
    text = str(values[0].to_list() if isinstance(values[0], pl.Series) else values[0]).replace("\n", " ")
    return text if len(text) <= 40 else text[:37] + "..."


def _nested(guess: Guess, values: pl.Series) -> None:
    if not isinstance(values.dtype, pl.List | pl.Array):
        return guess.leave_out("an object in each row: give its parts columns of their own")
    lists = values.arr.to_list() if isinstance(values.dtype, pl.Array) else values
    items = lists.explode().drop_nulls()
    if items.dtype.is_nested() or items.dtype in (pl.Binary, pl.Object):
        return guess.leave_out("lists of lists or objects")
    if items.dtype.is_float():
        return guess.leave_out("lists of numbers, such as embeddings, are not ids")
    settings = {"type": "int"} if items.dtype.is_integer() else {}
    return _sequence(guess, items, settings, int(lists.list.len().max() or 1))  # type: ignore[arg-type]


def _sequence(guess: Guess, items: pl.Series, settings: dict[str, Any], longest: int) -> None:
    guess.kind, guess.distinct, guess.code = "sequence", items.n_unique(), True
    guess.settings = {**settings, "max_length": max(1, min(longest, 50))}
    guess.notes.append(f"lists of up to {longest:,} values")


def _numbers(values: pl.Series) -> tuple[pl.Series, bool]:
    """Return the values as numbers, null for other texts, and whether all are written as whole numbers."""
    if values.dtype.is_integer():
        return values, True
    if values.dtype.is_float():
        return values.set(values.is_infinite(), None), False
    stripped = values.str.strip_chars()
    whole = stripped.str.contains(r"^[+-]?[0-9]+$")
    if whole.all():
        ints = stripped.cast(pl.Int64, strict=False)
        if not ints.null_count():
            return ints, True
    found = stripped.cast(pl.Float64, strict=False)
    return found.set(found.is_nan() | found.is_infinite(), None), bool(whole.filter(found.is_not_null()).all())


def _no_numbers(values: pl.Series, found: pl.Series) -> str:
    bad = values.filter(found.is_null())
    return f"{len(bad):,} of {len(values):,} values are not numbers, such as {str(bad[0])[:30]!r}"


def _spread(numbers: pl.Series) -> tuple[float, float, float]:
    """Return the least, the median and the greatest number."""
    return float(numbers.min()), float(numbers.median()), float(numbers.max())  # type: ignore[arg-type]


def _number(guess: Guess, name: str, values: pl.Series, numbers: pl.Series, *, whole: bool, rows: int) -> None:
    """Guess whether numbers are times, codes, row ids or quantities."""
    quantity = bool(_NUMBER_NAME.search(name))
    code = bool(_CODE_NAME.search(name) or (USER_NAME.search(name) and not quantity))
    low, middle, high = _spread(numbers)
    if _time_in_digits(guess, name, values) or _epoch(guess, name, low, high, whole=whole):
        return
    padded = values.dtype == pl.String and bool(values.str.contains(r"^0[0-9]").any())
    guess.settings = {"type": "int"}
    if whole and padded and guess.repeats > 1 and not quantity:
        guess.settings, guess.code = {}, True  # 007 is not 7
        return
    different = guess.distinct == rows and whole and rows >= 10 and low >= 0 and not (quantity and not code)
    if different and (code or rows >= 1000 or bool((numbers.diff().drop_nulls() == 1).all())):
        return guess.leave_out(
            "a different whole number in every row read: a row id, from which nothing can be learned"
        )
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
    """Guess whether numbers are seconds, or fractions of them, since 1970."""
    unit = epoch_unit(low, high)
    if unit is None or guess.distinct < 3:
        return False
    if not _TIME_NAME.search(name):
        if name and _CODE_NAME.search(name):
            return False
        guess.doubts.append(f"the values could be {unit} since 1970")
        if name:
            return False
    guess.kind, guess.settings = "time", {"type": "int" if whole else "float"}
    guess.notes.append(f"{unit} since 1970")
    return True


def _time_in_digits(guess: Guess, name: str, values: pl.Series) -> bool:
    """Guess whether texts such as 20170307 or 20170307101500 are times."""
    if values.dtype.is_float() or not _DIGITS_NAME.search(name) or guess.distinct < 2:
        return False
    values = values.cast(pl.String)
    if values.str.contains(r"^\d{4}(19|20)\d\d$").all():  # 07032017 is no hour
        return False
    for shape, pattern in _DIGITS.items():
        if values.str.contains(shape).all() and not (read_moments(values, pattern) == UNKNOWN).any():
            guess.kind, guess.settings = "time", {"type": "datetime", **({"format": pattern} if pattern else {})}
            return True
    return False


def _text(guess: Guess, name: str, values: pl.Series, rows: int) -> None:
    """Guess whether texts are times, lists, codes or free text."""
    if _moments(guess, values):
        return
    if values.str.contains(r"^\s*[\[{].*[\]}]\s*$").mean() > 0.9:  # type: ignore[operator]
        return guess.leave_out("lists or objects written as text: write them as 1|2|3, or as JSON lines")
    if _have_commas(values) and not _CODE_NAME.search(name):
        if _have_thousands(values):
            return guess.leave_out(
                'numbers with commas between thousands, or lists of two: write "1,234" as 1234. If it means 1.234, set '
                "decimal in [source]"
            )
        return guess.leave_out('numbers with a decimal comma, or lists of two: decimal = "," in [source] reads numbers')
    if _list_text(guess, values):
        return
    lengths = values.str.len_chars()
    if guess.distinct == rows and rows >= 10:
        what = "a row id" if int(lengths.max()) <= 40 else "free text"  # type: ignore[arg-type]
        return guess.leave_out(
            f"a different text in every row read: {what}, from which nothing can be learned as it is"
        )
    if float(lengths.mean()) > 60:  # type: ignore[arg-type]
        guess.doubts.append("long texts: every different one gets an id. Leave it out if it is free text")
    width = int(lengths[0])
    if guess.distinct >= _CODES and width in (8, 16) and values.str.contains(rf"^[0-9a-fA-F]{{{width}}}$").all():
        guess.settings = {"type": "hex"}
    guess.code = guess.distinct > 2
    if guess.distinct > len(values) / 2 and guess.distinct > 100:
        guess.notes.append("most values occur once: min_count = 2 would keep them out of the table")


def _moments(guess: Guess, values: pl.Series) -> bool:
    """Guess whether texts are dates, and their format."""
    texts = values.unique(maintain_order=True)
    texts = texts.gather_every(len(texts) // _MOMENTS + 1)
    if not texts.str.contains(r"\d").all() or guess.distinct < 2:
        return False
    iso = read_moments(texts, None) != UNKNOWN
    if iso.mean() >= _NUMERIC:
        guess.kind, guess.settings = "time", {"type": "datetime"}
        _odd_moments(guess, texts, iso)
        return True
    others = texts.filter(~pl.Series(iso))  # a few ISO dates among others do not decide
    if len(others[0]) < 6 or not others[0][-1:].strip() or not re.search(r"[-/.: ]", others[0].strip()):
        return False
    patterns = [one.split('"')[1] for one in suggestions(others) if one.startswith("format")]
    good = [one for one in patterns if (read_moments(texts, one) != UNKNOWN).mean() >= _NUMERIC]
    if not good:
        return False
    guess.kind, guess.settings, guess.formats = "time", {"type": "datetime", "format": good[0]}, good
    _odd_moments(guess, texts, read_moments(texts, good[0]) != UNKNOWN)
    if len(good) > 1:
        guess.doubts.append(f'the dates could also be written as format = "{good[1]}"')
    return True


def _odd_moments(guess: Guess, texts: pl.Series, read: Any) -> None:
    """Add a doubt if some dates are written in another way."""
    if not read.all():
        odd = texts.filter(~pl.Series(read))
        guess.doubts.append(f"some dates are written in another way, such as {odd[0][:30]!r}: bad lines")


def _list_text(guess: Guess, values: pl.Series) -> bool:
    """Guess whether texts are lists with a separator between their values."""
    for separator in ("|", ";", ",", " "):
        having = values.filter(values.str.contains(separator, literal=True))
        if len(having) < 0.3 * len(values) and not (separator == "|" and len(having) >= 0.05 * len(values)):
            continue
        texts = values.str.split(separator).explode()
        codes = bool(texts.str.contains(r"^[A-Za-z]?[0-9]+$").mean() >= _NUMERIC)  # type: ignore[operator]
        blanks = bool(texts.str.contains(r"^\s|\s$").any())
        if (separator == " " and not codes) or (separator == "," and blanks) or texts.n_unique() > len(texts) / 1.5:
            continue
        whole = bool(texts.drop_nulls().str.contains(r"^(0|[1-9][0-9]{0,17})$").all())
        longest = int(values.str.count_matches(separator, literal=True).max()) + 1  # type: ignore[arg-type]
        _sequence(guess, texts, {"separator": separator, **({"type": "int"} if whole else {})}, longest)
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
        doubt = "does 0 mean that there is no rating" if rating and not values[0] else "a rating"
        sure = rating and top in (5, 10) and values[0]
        return Outcome(
            2 if rating else 8, rule, "" if sure else f"{doubt}? Say from which value on a row counts as liked"
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
    rarer = min(reversed(found), key=lambda text: (values == text).sum(), default="'")  # clicks are rarer than views
    if strong and len(found) == 2 and "'" not in rarer:
        return Outcome(2, f"== '{rarer}'", f"say which of {found} counts as 1")
    return None
