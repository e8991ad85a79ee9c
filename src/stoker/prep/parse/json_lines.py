"""Read typed columns from JSON lines: fast where lines are in order, else line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.errors import DataError
from stoker.prep.parse.frames import BadLine, Block, Field, cut_text, frame_block, joined
from stoker.prep.parse.sources import first_line

_TYPES = {"float": pl.Float64, "int": pl.Int64, "hex": pl.String, "string": pl.String, "datetime": pl.String}
# Values whose text every reader agrees on: texts, and whole numbers in the usual form.
_PLAIN = rb"null|true|false|(?:-?[1-9][0-9]{0,18}|0)(?![0-9.eE])"
# For columns of text, patterns of any other value, or of a list with such a value.
_ODD: dict[Any, bytes] = {
    pl.String(): rb'(?!"|' + _PLAIN + rb")",
    pl.List(pl.String()): rb'\[(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\s,]++|' + _PLAIN + rb")*+[^\]]",
}
_NO_LIST = rb"(?!null|\[)"
#: For all columns, patterns of values that Polars cannot read.
_UNREADABLE: dict[Any, bytes] = {
    pl.Float64(): rb"(?!null|-?[0-9])", pl.Int64(): rb"(?!null|-?[0-9]+[\s,}])", pl.String(): _ODD[pl.String()],
    pl.List(pl.String()): rb"(?:" + _NO_LIST + rb"|" + _ODD[pl.List(pl.String())] + rb")",
    **dict.fromkeys((pl.List(pl.Float64()), pl.List(pl.Int64())), rb"(?:" + _NO_LIST + rb'|\[[^\]"\[{]*+["\[{])'),
}  # fmt: skip
_INT = rb"-?(?:[1-9][0-9]{0,17}|0)"
_FLOAT = _INT + rb"(?:\.[0-9]{1,17})?(?:[eE][-+]?[0-9]{1,2})?"
_NUMBER = rb"-?(?:[1-9][0-9]*|0)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_ESCAPED_KEY = re.compile(rb'(?<!\\)"[^"\\\n]*+\\(?:[^"\\\n]|\\[^\n])*+"(?=[ \t\r]*+:)')
_FEW = 64  # lines that are read line by line if one of them cannot be read fast
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def json_block(data: bytes, fields: Sequence[Field], nulls: Sequence[str] = ()) -> Block:
    """Return the rows and bad lines of JSON lines, one object each; absent keys are missing values.

    A number in a column of text keeps its written form. If a key occurs twice, the first one counts. ``nulls`` are
    texts that mean missing, too.
    """
    line, count = _lines(data)
    typed = partial(frame_block, fields=fields, lines=count, text_at=lambda at: cut_text(line(at)), nulls=nulls)
    usual = _ESCAPED_KEY.sub(_usual, data) if b"\\" in data else data
    if (frame := _read_with_polars(usual, fields, count)) is not None:
        return typed(frame)
    filled = np.array([number for number in range(count) if line(number).strip(b" \t\r")], np.int64)
    ready = _eased(usual, fields, nulls)
    if (frame := _read_with_polars(ready, fields, len(filled))) is not None:
        return typed(frame, row_line=filled)
    frame, fast = _read_in_order(ready, filled, fields)
    slow, at, bad = _read_line_by_line(line, np.setdiff1d(filled, fast), fields)
    block = joined([typed(frame, row_line=fast), typed(slow, row_line=at)])
    block.set_aside(bad)
    return block


def _lines(data: bytes) -> tuple[Callable[[int], bytes], int]:
    """Return a function of the number of a line that returns its text, and the number of lines."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    starts = np.append(0, ends + 1)
    return lambda number: data[starts[number] : ends[number]], len(ends)


def _usual(key: re.Match[bytes]) -> bytes:
    """Return a key with the escapes of :func:`_key`: others write u00DF for u00df, and a backslash before a slash."""
    with suppress(ValueError):
        return json.dumps(json.loads(key[0])).encode()
    return key[0]


def _eased(data: bytes, fields: Sequence[Field], nulls: Sequence[str]) -> bytes:
    """Return lines that Polars can read, with the same values where these are null or numbers.

    Texts that mean missing become null, numbers in columns of text get quotes, and those in columns of numbers lose
    them.
    """
    schema, end = _schema(fields) if not _commas(fields) else {}, rb"(?=[ \t]*[,}])"
    for kind, pattern, replacement in (
        (None, b'"(?:' + _texts_of(nulls) + b')"' + end, rb"\1null"),
        (pl.String(), rb"(?!-0[ \t,}])(" + _NUMBER + rb")" + end, rb'\1"\2"'),
        (pl.Int64(), rb'"(' + _INT + rb')"' + end, rb"\1\2"),
        (pl.Float64(), rb'"(' + _FLOAT + rb')"' + end, rb"\1\2"),
    ):  # fmt: skip
        names = [name for name, other in schema.items() if other == (kind or other) and other in _TYPES.values()]
        if names and (kind or nulls):
            data = re.sub(rb"(" + _key(names) + rb")" + pattern, replacement, data)
    return data


def _texts_of(texts: Sequence[str]) -> bytes:
    """Return a pattern of texts within quotes, as JSON writes them."""
    found = {json.dumps(text, ensure_ascii=ascii).encode()[1:-1] for text in texts for ascii in (True, False)}
    return b"|".join(map(re.escape, sorted(found)))


def _key(names: Sequence[str]) -> bytes:
    """Return a pattern of the keys of some columns."""
    return rb'"(?:' + _texts_of(names) + rb')"[ \t\r]*+:[ \t\r]*+'


def _read_in_order(
    data: bytes, filled: npt.NDArray[np.int64], fields: Sequence[Field]
) -> tuple[pl.DataFrame, npt.NDArray[np.int64]]:
    """Read with Polars the lines that it can read; return them and their numbers."""
    line, _ = _lines(data)
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    odd = {int(ends.searchsorted(found.start())) for found in re.finditer(_entry(_schema(fields), _UNREADABLE), data)}
    frames = [pl.DataFrame(schema=_schema(fields))]
    read, waiting = [np.zeros(0, np.int64)], [np.setdiff1d(filled, [*odd])]
    while waiting:
        lines = waiting.pop()
        frame = _read_with_polars(b"\n".join(map(line, lines.tolist())), fields, len(lines))
        if frame is not None:
            frames.append(frame)
            read.append(lines)
        elif len(lines) > _FEW:
            waiting += [lines[len(lines) // 2 :], lines[: len(lines) // 2]]
    return pl.concat(frames), np.concatenate(read)


def first_keys(path: Path) -> list[str]:
    """Return the keys of the object in the first line; an empty list if there is none."""
    with suppress(DataError, ValueError):
        found = json.loads(first_line(path))
        if isinstance(found, dict):
            return list(found)
    return []


def _read_with_polars(data: bytes, fields: Sequence[Field], filled: int) -> pl.DataFrame | None:
    """Read the lines with Polars; return None if it might change a value."""
    schema = _schema(fields)
    if _may_change(data, schema):
        return None
    try:
        frame = pl.read_ndjson(data, schema=schema)
    except pl.exceptions.PolarsError:
        return None  # a value has another type
    return frame if frame.height == filled else None


def _schema(fields: Sequence[Field]) -> dict[str, pl.DataType]:
    lists = {item.column for item in fields if item.separator is not None}
    kinds: dict[str, set[str]] = {}
    for item in fields:
        kinds.setdefault(item.column, set()).add(item.kind)
    types = {name: _TYPES[some.pop()]() if len(some) == 1 else pl.String() for name, some in kinds.items()}
    return {name: pl.List(kind) if name in lists else kind for name, kind in types.items()}


def _may_change(data: bytes, schema: dict[str, pl.DataType]) -> bool:
    """Return True if Polars would change the text of a value: lists, objects, 1.50, half of a surrogate pair."""
    if b"\\" in data and b"\\u" in data and _LONE_SURROGATE.search(data):
        return True
    return bool(any(kind in _ODD for kind in schema.values()) and re.search(_entry(schema, _ODD), data))


def _entry(schema: Mapping[str, pl.DataType], patterns: Mapping[Any, bytes]) -> bytes:
    """Return a pattern of keys and values, by the type of their column."""
    names = {kind: [name for name, other in schema.items() if other == kind] for kind in patterns}
    return b"|".join(_key(names[kind]) + value for kind, value in patterns.items() if names[kind])


def _read_line_by_line(
    line: Callable[[int], bytes], filled: npt.NDArray[np.int64], fields: Sequence[Field]
) -> tuple[pl.DataFrame, npt.NDArray[np.int64], list[BadLine]]:
    """Read line by line; return the rows, their lines, and the bad lines."""
    schema, commas = _schema(fields), _commas(fields)
    records: list[dict[str, Any]] = []
    positions: list[int] = []
    bad: list[BadLine] = []
    for number in filled.tolist():
        try:
            records.append(_values(_record(line(number)), schema, commas))
            positions.append(number)
        except _BadLineError as error:
            bad.append(BadLine(line=number, reason=str(error), text=cut_text(line(number))))
    return _texts(records, schema), np.array(positions, np.int64), bad


class _BadLineError(Exception):
    """The reason why a line is bad."""


class _Number(str):
    """A number of JSON, as it is written: not a text in quotes."""

    __slots__ = ()


def _commas(fields: Sequence[Field]) -> dict[str, bool]:
    """Return the columns whose texts have decimal commas -> whether they are also read as another kind."""
    found = {item.column for item in fields if item.decimal != "." and item.kind == "float"}
    return {name: any(item.kind != "float" for item in fields if item.column == name) for name in found}


def _record(line: bytes) -> Mapping[str, Any]:
    """Return the object in a line, numbers as they are written."""
    try:
        found = parsed(line)
    except UnicodeDecodeError:
        raise _BadLineError("broken UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise _BadLineError("not a JSON object")
    return found


def _values(found: Mapping[str, Any], schema: Mapping[str, pl.DataType], commas: Mapping[str, bool]) -> dict[str, Any]:
    values = {name: _value(name, found.get(name), isinstance(kind, pl.List)) for name, kind in schema.items()}
    for name, shared in commas.items():
        if isinstance(values[name], _Number):
            if shared:
                raise _BadLineError(f"column {name}: it is read as text, too, with a decimal comma: write it as a text")
            values[name] = f"{Decimal(repr(float(values[name]))):f}".replace(".", ",")
    return values


def parsed(text: bytes) -> Any:
    """Parse JSON; numbers become texts as they are written, and of equal keys the first one counts.

    Raises:
        ValueError: it is not JSON in UTF-8; NaN and Infinity are not.
    """
    return json.loads(
        text.decode("utf-8"), parse_float=_Number, parse_int=lambda text: "0" if text == "-0" else text,
        parse_constant=_refuse, object_pairs_hook=lambda pairs: dict(reversed(pairs)),
    )  # fmt: skip


def json_frame(rows: Sequence[Mapping[str, Any]], fields: Sequence[Field]) -> pl.DataFrame:
    """Return objects of :func:`parsed` as a frame, as :func:`json_block` reads them from lines.

    Raises:
        DataError: a value does not fit its column; the message names the row.
    """
    schema, commas = _schema(fields), _commas(fields)
    with suppress(UnicodeEncodeError):  # half of a surrogate pair
        columns = {name: [row.get(name) for row in rows] for name in schema}
        if (
            not commas
            and not any(isinstance(kind, pl.List) for kind in schema.values())
            and all(map(_is_plain, columns.values()))
        ):
            return pl.DataFrame([pl.Series(name, values, pl.String) for name, values in columns.items()])
    records = []
    for number, row in enumerate(rows):
        try:
            records.append(_values(row, schema, commas))
        except _BadLineError as error:
            raise DataError(f"row {number}: {error}. Rows count from 0; nothing was scored.") from None
    return _texts(records, schema)


def _is_plain(values: list[Any]) -> bool:
    """Return True if all values are texts or missing."""
    return set(map(type, values)) <= {str, _Number, type(None)}


def _texts(records: Sequence[Mapping[str, Any]], schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    texts = {name: pl.List(pl.String) if isinstance(kind, pl.List) else pl.String for name, kind in schema.items()}
    return pl.DataFrame({name: [record[name] for record in records] for name in texts}, schema=texts)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


def _value(name: str, value: Any, several: bool) -> Any:
    """Return a value as text, or as a list of texts."""
    if value is None:
        return None
    if several:
        if not isinstance(value, list):
            raise _BadLineError(f"column {name} holds one value, expected a list")
        if any(isinstance(item, list | dict) for item in value):
            raise _BadLineError(f"column {name} holds lists within its list")
        return [_value(name, item, False) for item in value]
    if isinstance(value, list | dict):
        raise _BadLineError(f"column {name} holds several values")
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadLineError(f"column {name}: half of a surrogate pair") from None
    return value
