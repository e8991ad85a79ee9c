"""Typed columns from dataframes: Parquet row ranges, JSON lines, and typed raw lines back into frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.data.columns import BadLine, Block, Field, RawColumn, split_list, type_spans
from stoker.data.schema_check import near
from stoker.errors import DataError

__all__ = ["block_frame", "check_columns", "json_block", "parquet_block", "parquet_columns", "parquet_rows"]

_TYPES = {"float": pl.Float64, "int": pl.Int64, "hex": pl.UInt64, "string": pl.String}
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "hex": "hexadecimal (up to 16 digits)",
    "string": "text",
}
_CUT = 200


def parquet_rows(path: Path) -> int:
    """Rows of a Parquet file."""
    try:
        return int(pl.scan_parquet(path).select(pl.len()).collect().item())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from error


def parquet_columns(path: Path) -> list[str]:
    """Column names of a Parquet file."""
    try:
        return pl.scan_parquet(path).collect_schema().names()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from error


def parquet_block(path: Path, fields: Sequence[Field], start: int, rows: int) -> Block:
    """Rows [start, start + rows) of a Parquet file."""
    names = list(dict.fromkeys(item.column for item in fields))
    try:
        frame = pl.scan_parquet(path).select(names).slice(start, rows).collect(engine="streaming")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from error
    return _frame_block(frame, fields)


def _frame_block(frame: pl.DataFrame, fields: Sequence[Field]) -> Block:
    block = Block(rows=frame.height, lines=frame.height, columns={}, row_line=np.arange(frame.height, dtype=np.int64))
    wrong: dict[int, str] = {}
    for item in fields:
        series = frame.get_column(item.column)
        if isinstance(series.dtype, pl.List | pl.Array):
            column = _list_column(series, item, wrong)
        elif item.separator is not None:
            column = split_list(_text_column(series.cast(pl.String)), item, wrong)
        else:
            column = _column(series, item, wrong)
        if item.required:
            for row in np.flatnonzero(column.absent()).tolist():
                wrong.setdefault(row, f"column {item.column}: missing value")
        block.columns[item] = column
    if wrong:
        marked = np.zeros(frame.height, np.bool_)
        marked[list(wrong)] = True
        block.drop(marked, wrong.__getitem__, lambda row: str(frame.row(row))[:_CUT])
    return block


def _column(series: pl.Series, item: Field, wrong: dict[int, str]) -> RawColumn:
    if item.kind == "string":
        if series.dtype.is_temporal():
            series = series.dt.to_string("iso")
        return _text_column(series.cast(pl.String))
    if series.dtype == pl.String:
        typed, failed = type_spans(_text_column(series), item.kind)
        for row, text in failed.items():
            wrong.setdefault(row, _reason(item, text.decode("utf-8", "replace")))
        return typed
    if series.dtype in (pl.Date, pl.Datetime):
        series = series.cast(pl.Datetime("us")).to_physical()
    values = series.cast(_TYPES[item.kind], strict=False)
    failed_rows = values.is_null() & series.is_not_null()
    if series.dtype.is_float() and item.kind != "float":
        failed_rows = failed_rows | ((series != series.floor()) & series.is_not_null())
    if item.kind == "float":
        failed_rows = failed_rows | values.is_infinite().fill_null(False)
    for row in failed_rows.arg_true().to_list():
        wrong.setdefault(row, _reason(item, series[row]))
    if item.kind == "float":
        return RawColumn(values=values.fill_null(float("nan")).to_numpy())
    missing = values.is_null().to_numpy()
    return RawColumn(values=values.fill_null(0).to_numpy().view(np.int64), missing=missing)


def _list_column(series: pl.Series, item: Field, wrong: dict[int, str]) -> RawColumn:
    if item.separator is None:
        raise DataError(f"column {item.column} holds lists. Declare it as a sequence column.")
    lists = series.cast(pl.List(series.dtype.inner)) if isinstance(series.dtype, pl.Array) else series
    lists = lists.list.drop_nulls()
    lists = lists.list.tail(item.max_length) if item.keep == "last" else lists.list.head(item.max_length)
    counts = lists.list.len().fill_null(0).to_numpy().astype(np.int32)
    inner: dict[int, str] = {}
    filled = lists.filter(lists.list.len().fill_null(0) > 0)
    column = _column(filled.explode(), Field(column=item.column, kind=item.kind), inner)
    if inner:
        row_of = np.repeat(np.arange(len(counts)), counts)
        for position, reason in inner.items():
            wrong.setdefault(int(row_of[position]), reason)
    column.counts = counts
    return column


def _text_column(series: pl.Series) -> RawColumn:
    array: Any = series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    _, offsets, data = array.buffers()
    n = len(series)
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + n + 1] if n else np.zeros(1, np.int64)
    size = int(ends[-1])
    held = np.zeros(size + 1, np.uint8)  # the number scanners look one byte past a text
    if size:
        held[:size] = np.frombuffer(data, np.uint8)[:size]
    lengths = np.diff(ends).astype(np.int32)
    lengths[series.is_null().to_numpy()] = -1
    return RawColumn(data=held, starts=np.ascontiguousarray(ends[:-1]), lengths=lengths)


def _reason(item: Field, value: object) -> str:
    return f"column {item.column}: {str(value)[:40]!r} is not {_WORDS[item.kind]}"


def json_block(raw: npt.NDArray[np.uint8], fields: Sequence[Field]) -> Block:
    """Rows and bad lines of a block of JSON lines, one object each; absent keys are missing values."""
    data = raw.tobytes()
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    types = {item.column: _TYPES[item.kind] if item.kind != "hex" else pl.String for item in fields}
    schema = {
        name: pl.List(types[name]) if any(f.separator for f in fields if f.column == name) else types[name]
        for name in types
    }
    filled = [number for number, line in enumerate(lines) if line.strip()]
    mixed = len({(item.column, item.kind) for item in fields}) != len(types)
    block: Block | None = None
    if not mixed:
        try:
            frame = pl.read_ndjson(data, schema=schema)
            if frame.height == len(filled):
                block = _frame_block(frame, fields)
                positions = np.array(filled, np.int64)
        except pl.exceptions.PolarsError:
            block = None  # something in here is not of its type: look line by line
    bad: list[BadLine] = []
    if block is None:
        single = [name for name, kind in schema.items() if not isinstance(kind, pl.List)]
        records, positions, bad = _careful_json(lines, filled, single)
        frame = pl.DataFrame(
            {name: [_json_text(record.get(name)) for record in records] for name in types},
            schema={name: pl.List(pl.String) if isinstance(schema[name], pl.List) else pl.String for name in types},
        )
        block = _frame_block(frame, fields)
    block.row_line = positions[block.row_line]
    moved = [
        BadLine(line=int(positions[b.line]), reason=b.reason, text=_cut(lines[positions[b.line]])) for b in block.bad
    ]
    block.bad = sorted([*moved, *bad], key=lambda item: item.line)
    block.lines = len(lines)
    return block


def _careful_json(
    lines: Sequence[bytes], filled: Sequence[int], single: Sequence[str]
) -> tuple[list[dict[str, Any]], npt.NDArray[np.int64], list[BadLine]]:
    records, positions, bad = [], [], []
    for number in filled:
        try:
            record = json.loads(lines[number].decode("utf-8"), parse_float=str, parse_int=str)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            if nested := [name for name in single if isinstance(record.get(name), list | dict)]:
                bad.append(
                    BadLine(line=number, reason=f"column {nested[0]} holds several values", text=_cut(lines[number]))
                )
                continue
        except UnicodeDecodeError:
            bad.append(BadLine(line=number, reason="broken UTF-8", text=_cut(lines[number])))
        except ValueError as error:
            bad.append(BadLine(line=number, reason=f"not a JSON object: {error}", text=_cut(lines[number])))
        else:
            records.append(record)
            positions.append(number)
    return records, np.array(positions, np.int64), bad


def _json_text(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return [_json_text(item) for item in value]
    return json.dumps(value)


def _cut(line: bytes) -> str:
    return line[: 4 * _CUT].decode("utf-8", "replace").rstrip("\r")[:_CUT]


def block_frame(block: Block, names: Sequence[str]) -> pl.DataFrame:
    """A frame of a block's columns: hex as UInt64, int as Int64, float as Float64, string as String."""
    series = {}
    for item, column in block.columns.items():
        if item.column not in names:
            continue
        if column.lengths is not None:
            series[item.column] = _strings(column)
        elif item.kind == "float":
            series[item.column] = pl.Series(column.values).fill_nan(None)
        else:
            assert column.values is not None
            values = column.values.view(np.uint64) if item.kind == "hex" else column.values
            mask = pl.Series(column.missing)
            series[item.column] = pl.Series(values).set(mask, None) if mask.any() else pl.Series(values)
    return pl.DataFrame([series[name].alias(name) for name in names])


def _strings(column: RawColumn) -> pl.Series:
    import pyarrow as pa

    from stoker.data.dictionary_kernels import gather_bytes

    assert column.starts is not None
    assert column.lengths is not None
    n = len(column.starts)
    absent = column.lengths < 0
    lengths = np.maximum(column.lengths, 0)
    gathered = np.empty(int(lengths.sum(dtype=np.int64)), np.uint8)
    ends = np.empty(n + 1, np.int64)
    gather_bytes(column.data, column.starts, lengths, gathered, ends)
    validity = pa.py_buffer(np.packbits(~absent, bitorder="little")) if absent.any() else None
    array = pa.Array.from_buffers(pa.large_string(), n, [validity, pa.py_buffer(ends), pa.py_buffer(gathered)])
    return pl.Series(pl.from_arrow(array))


def check_columns(path: Path, wanted: Sequence[str], present: Sequence[str]) -> None:
    """Refuse a file that lacks a column."""
    missing = [name for name in wanted if name not in present]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}. It has: {', '.join(present)}." + near(missing[0], list(present))
        )
