"""Read typed columns from JSON lines: fast if all lines of a block are in order, else line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.errors import DataError
from stoker.prep.parse.frames import BadLine, Block, Field, careful_value, cut_text, frame_block, without_nulls
from stoker.prep.parse.sources import first_line

_TYPES = {"float": pl.Float64, "int": pl.Int64, "hex": pl.String, "string": pl.String, "datetime": pl.String}
# Values whose text every reader agrees on: texts, and whole numbers in the usual form.
_PLAIN = rb"null|true|false|(?:-?[1-9][0-9]{0,18}|0)(?![0-9.eE])"
# For columns of text, patterns of any other value, or of a list with such a value.
_ODD = {
    pl.String(): rb'(?!"|' + _PLAIN + rb")",
    pl.List(pl.String()): rb'\[(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\s,]++|' + _PLAIN + rb")*+[^\]]",
}
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def json_block(data: bytes, fields: Sequence[Field], nulls: Sequence[str] = ()) -> Block:
    """Return the rows and bad lines of JSON lines, one object each; absent keys are missing values.

    A number in a column of text keeps its written form. If a key occurs twice, the first one counts. ``nulls`` are
    texts that mean missing, too.
    """
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    starts = np.append(0, ends + 1)

    def line(number: int) -> bytes:
        return data[starts[number] : ends[number]]

    at, bad = np.arange(len(ends)), list[BadLine]()  # at: the lines that are rows
    frame = _read_with_polars(data, fields, len(at))
    if frame is None:
        at = np.array([number for number in at.tolist() if line(number).strip(b" \t\r")], np.int64)
        frame = _read_with_polars(data, fields, len(at)) if len(at) < len(ends) else None
    if frame is None:
        frame, at, bad = _read_line_by_line(line, at, fields, nulls)
    return frame_block(
        without_nulls(frame, nulls), fields, row_line=at, lines=len(ends), bad=bad,
        text_at=lambda number: cut_text(line(number)),
    )  # fmt: skip


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
    if len({(item.column, item.kind) for item in fields}) != len(schema) or _may_change(data, schema):
        return None
    try:
        frame = pl.read_ndjson(data, schema=schema)
    except pl.exceptions.PolarsError:
        return None  # a value has another type
    return frame if frame.height == filled else None


def _schema(fields: Sequence[Field]) -> dict[str, pl.DataType]:
    lists = {item.column for item in fields if item.separator is not None}
    types = {item.column: _TYPES[item.kind]() for item in fields}
    return {name: pl.List(kind) if name in lists else kind for name, kind in types.items()}


def _may_change(data: bytes, schema: dict[str, pl.DataType]) -> bool:
    """Return True if Polars would change the text of a value.

    It turns lists and objects into text, 1.50 into 1.5, and half of a surrogate pair into a zero byte.
    """
    if b"\\" in data and b"\\u" in data and _LONE_SURROGATE.search(data):
        return True
    patterns = []
    for kind, value in _ODD.items():
        names = [name for name, other in schema.items() if other == kind]
        keys = {json.dumps(name, ensure_ascii=ascii).encode()[1:-1] for name in names for ascii in (True, False)}
        if keys:
            patterns.append(b'"(?:' + b"|".join(map(re.escape, sorted(keys))) + rb')"\s*+:\s*+' + value)
    return any(re.search(pattern, data) for pattern in patterns)


def _read_line_by_line(
    line: Callable[[int], bytes], filled: npt.NDArray[np.int64], fields: Sequence[Field], nulls: Sequence[str]
) -> tuple[pl.DataFrame, npt.NDArray[np.int64], list[BadLine]]:
    """Read line by line; return the rows, their lines, and the bad lines."""
    schema, commas, missing = _schema(fields), _commas(fields), _numbers(nulls)
    records: list[dict[str, Any]] = []
    positions: list[int] = []
    bad: list[BadLine] = []
    for number in filled.tolist():
        try:
            records.append(_values(_known(_record(line(number)), missing), schema, commas))
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


def _numbers(nulls: Sequence[str]) -> set[float]:
    """Return the numbers among texts that mean missing."""
    return {value for text in nulls if (value := careful_value("float", text)) is not None}


def _known(found: Mapping[str, Any], missing: set[float]) -> Mapping[str, Any]:
    """Return an object without numbers that mean missing."""
    if not missing:
        return found
    return {
        name: None if isinstance(each, _Number) and float(each) in missing else each for name, each in found.items()
    }


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


def json_frame(rows: Sequence[Mapping[str, Any]], fields: Sequence[Field], nulls: Sequence[str] = ()) -> pl.DataFrame:
    """Return objects of :func:`parsed` as a frame, as :func:`json_block` reads them from lines.

    Raises:
        DataError: a value does not fit its column; the message names the row.
    """
    schema, commas, missing = _schema(fields), _commas(fields), _numbers(nulls)
    rows = [_known(row, missing) for row in rows]
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
