"""Read the first rows of a log that nobody has described: how its text is written, and its columns as a frame."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl

from stoker.base.errors import DataError
from stoker.prep.parse.sources import line_blocks, source_kind
from stoker.prep.source_format import SourceFormat

__all__ = ["Sample", "look"]

_BLOCK = 2**20  # bytes of text read together
_MOST_BYTES = 2**27  # of text, of all files
_LINES = 200  # that show how a text is written
_SEPARATORS = ("\t", ",", ";", "|", "::", "\x01")
_ALIKE = 0.8  # share of lines with the same number of fields that settles a separator
_CONTROL = re.compile(rb"[\x00\x02-\x08\x0e-\x1a\x7f]")  # not \x01, which Hive writes between fields
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|nan|inf", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d][\w .\-/#%()\[\]:]{0,63}")


@dataclass(kw_only=True)
class Sample:
    """The first rows of a log.

    Args:
        frame: its columns: texts where the file is text, typed where it is typed.
        source: how the files are written; keys that the file names settle are left out.
        header: whether columns have names of their own.
        whole: whether these are all rows.
        bad: lines that do not have the fields of the others.
        unsure: doubts about the format.
    """

    frame: pl.DataFrame
    source: SourceFormat
    header: bool = True
    whole: bool = True
    bad: int = 0
    unsure: list[str] = field(default_factory=list)


def look(files: Sequence[Path], rows: int) -> Sample:
    """Read about ``rows`` rows, the same number from the beginning of each file, at most 128 MiB of text.

    Raises:
        DataError: a file that is empty or no log, or that has other columns than the first one.
    """
    share = max(1, rows // len(files))
    first = _look_at(files[0], share, _MOST_BYTES // len(files), None)
    frames = [first.frame]
    for path in files[1:]:
        found = _look_at(path, share, _MOST_BYTES // len(files), first)
        if found.frame.columns != first.frame.columns and first.source.kind != "jsonl":
            raise DataError(
                f"{path} has the columns {', '.join(found.frame.columns)[:200]}, but {files[0]} has "
                f"{', '.join(first.frame.columns)[:200]}. Draft a schema for each kind of file."
            )
        frames.append(found.frame)
        first.whole, first.bad = first.whole and found.whole, first.bad + found.bad
    try:
        first.frame = pl.concat(frames, how="diagonal_relaxed")
    except pl.exceptions.PolarsError as error:
        raise DataError(f"columns have other types in some files than in {files[0]}: {error}.") from error
    if not first.frame.height:
        raise DataError(f"{files[0]} has a header but no rows. Name a file with rows.")
    return first


def _look_at(path: Path, rows: int, most: int, like: Sample | None) -> Sample:
    with path.open("rb") as file:
        magic = file.read(4)
    if not magic:
        raise DataError(f"{path} is empty. Name a file with rows.")
    if magic == b"PAR1" or source_kind(path) == "parquet":
        return _parquet(path, rows)
    head = _head(path)
    if source_kind(path) == "jsonl" or _object(head.lstrip().split(b"\n", 1)[0]) is not None:
        return _json_lines(path, rows, most)
    return _text(path, head, rows, most, like)


def _head(path: Path) -> bytes:
    """Return the first lines of a text, and refuse what is no text."""
    head = next((block.load() for block in line_blocks(path, block_bytes=2**16)), b"")
    if not head.strip():
        raise DataError(f"{path} is empty. Name a file with rows.")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text. Convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8.")
    if b"\0" in head or len(_CONTROL.findall(head)) > len(head) // 100:
        raise DataError(
            f"{path} is a binary file, not a log. Logs are text or JSON lines (also .gz and .zst), or Parquet."
        )
    return head


def _lines(path: Path, rows: int, most: int) -> tuple[list[bytes], bool]:
    """Return at most ``rows`` lines that are not blank, of about ``most`` bytes, and whether these are all."""
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
    try:
        frame = pl.scan_parquet(path).head(rows + 1).collect(engine="streaming")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}.") from error
    sample = Sample(frame=frame.head(rows), source=source, whole=frame.height <= rows)
    if "" in frame.columns:
        sample.frame = sample.frame.drop("")
        sample.unsure.append("a column without a name: left out")
    return sample


def _object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if there is none."""
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
    """Return JSON values as a series: of their type if they have one, else of texts."""
    kinds = {type(value) for value in values if value is not None}
    try:
        if kinds <= {int, float} and kinds:
            return pl.Series(name, values, dtype=pl.Float64 if float in kinds else pl.Int64)
        if len(kinds) == 1:
            return pl.Series(name, values, strict=True)
    except (pl.exceptions.PolarsError, TypeError, OverflowError):
        pass
    texts = [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
    return pl.Series(name, texts, dtype=pl.Null if not kinds else pl.String)


def _text(path: Path, head: bytes, rows: int, most: int, like: Sample | None) -> Sample:
    sample = _notation(path, head) if like is None else replace(like, bad=0, unsure=[])
    source = sample.source
    separator, names = source.separator or ",", list(source.columns)
    raw, sample.whole = _lines(path, rows + (not names), most)
    lines = [line.decode(source.encoding, errors="replace").rstrip("\r") for line in raw]
    if not names:
        names = [name.strip().strip(source.quote or "") for name in lines.pop(0).split(separator)]
    found = [_fields(line, separator, source.quote) for line in lines]
    fitting = [fields for fields in found if len(fields) == len(names)]
    sample.bad = len(found) - len(fitting)
    # Names may be there twice; columns of a frame may not.
    columns = {str(place): [fields[place] for fields in fitting] for place in range(len(names))}
    frame = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String)).with_columns(pl.all().replace("", None))
    twice = {name for name, count in Counter(names).items() if count > 1}
    kept = [(place, name) for place, name in enumerate(names) if name and name not in twice]
    for name in sorted(twice):
        sample.unsure.append(f"column {name!r} is there more than once: left out, as its name says not which")
    if "" in names and "" not in twice:
        sample.unsure.append(f"column {names.index('') + 1} has no name: left out (a row number, as pandas writes it?)")
    sample.frame = frame.select(pl.col(str(place)).alias(name) for place, name in kept)
    if not kept:
        raise DataError(f"{path} has no column with a name of its own. Give it a header line.")
    return sample


def _fields(line: str, separator: str, quote: str | None) -> list[str]:
    if quote is None or quote not in line or len(separator) != 1:
        return line.split(separator)
    return next(csv.reader([line], delimiter=separator, quotechar=quote), [])


def _notation(path: Path, head: bytes) -> Sample:
    """Settle encoding, separator, quotes and header of a text from its first lines."""
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
    table = [_fields(line, separator, quote) for line in lines]
    width = Counter(map(len, table[1:] or table)).most_common(1)[0][0]
    header, sure = _is_header(table[0], [row for row in table[1:] if len(row) == width])
    if not sure:
        said = "taken for names of columns" if header else "not taken for names of columns"
        unsure.append(f"the first line is {said}")
    columns = () if header else tuple(f"c{place + 1}" for place in range(width))
    source = SourceFormat(separator=separator, columns=columns, quote=quote, encoding=encoding)
    return Sample(frame=pl.DataFrame(), source=source, header=header, unsure=unsure)


def _separator(lines: Sequence[str]) -> tuple[str | None, float, str | None]:
    """Return the separator that cuts most lines into the same number of fields, that share of lines, and the quote."""
    found: dict[tuple[str, str | None], tuple[int, float]] = {}  # fields of a line, and the share of such lines
    for separator, quote in product(_SEPARATORS, ('"', None)):
        width, count = Counter(len(_fields(line, separator, quote)) for line in lines).most_common(1)[0]
        if width > 1 and not (quote and len(separator) > 1):
            # "::" goes before "|" and "," inside its fields.
            found[separator, quote] = width + 1000 * (separator == "::"), count / len(lines)
    if not found:
        return None, 0.0, '"'

    def order(one: tuple[str, str | None]) -> tuple[bool, float, float]:
        width, share = found[one]
        return share >= _ALIKE, width if share >= _ALIKE else share, share

    separator, quote = max(found, key=order)
    # Quotes stay unless lines fit better without them.
    if found.get((separator, '"'), (0, 0.0))[1] >= found[separator, quote][1] - 0.02:
        quote = '"'
    return separator, found[separator, quote][1], quote


def _is_header(first: list[str], rows: Sequence[list[str]]) -> tuple[bool, bool]:
    """Return whether the first line names the columns, and whether that is certain."""
    named = [text.strip().strip('"') for text in first]
    if any(_NUMBER.fullmatch(text) for text in named):
        return False, True
    if not all(_WORD.fullmatch(text) for text in named if text) or sum(not text for text in named) > 1:
        return False, len(rows) > 1
    if rows and len(first) != len(rows[0]):
        return True, False
    for place in range(len(first)):
        values = [row[place].strip() for row in rows if row[place].strip()]
        if values and sum(bool(_NUMBER.match(value)) for value in values) > 0.9 * len(values):
            return True, True
    again = sum(any(row[place] == first[place] for row in rows) for place in range(len(first)))
    return 2 * again < len(first), not rows or 4 * again < len(first)
