"""Typed columns from dataframes: Parquet row ranges, and typed raw lines back into frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stoker.base.checks import near
from stoker.base.engine import reason_of
from stoker.base.errors import DataError
from stoker.base.units import listed
from stoker.prep.parse.columns import TEXT_CUT, Block, Field, RawColumn, careful_value

__all__ = [
    "KEPT_TYPES",
    "MissingColumnError",
    "block_frame",
    "check_columns",
    "column_series",
    "common_types",
    "frame_block",
    "kept_series",
    "parquet_block",
    "parquet_columns",
    "parquet_cuts",
    "parquet_rows",
    "parquet_types",
]

#: Whole numbers that int64 does not hold; older versions of Polars lack some.
_WIDE = tuple(getattr(pl, name) for name in ("UInt64", "Int128", "UInt128") if hasattr(pl, name))
_TYPES = {"float": pl.Float64, "int": pl.Int64, "hex": pl.UInt64, "string": pl.String}
KEPT_TYPES: dict[str, pl.DataType] = {  # of kept columns of files without types
    "float": pl.Float64(), "int": pl.Int64(), "string": pl.String(), "datetime": pl.Datetime("us"),
}  # fmt: skip
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "hex": "hexadecimal (up to 16 digits)",
    "string": "text",
}


def _no_parquet(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read as Parquet: empty, truncated, or for another reason."""
    with suppress(OSError):
        if not path.stat().st_size:
            return DataError(f"{path} is empty: it is no Parquet file. Get the file anew.")
    with suppress(OSError), path.open("rb") as file:
        begins = file.read(4) == b"PAR1"
        if begins and (path.stat().st_size < 12 or not file.seek(-4, 2) or file.read(4) not in (b"PAR1", b"PARE")):
            return DataError(f"{path} is truncated: a Parquet file ends with PAR1, this one does not. Get it whole.")
    return DataError(f"{path} cannot be read as Parquet: {reason_of(error)}. Get the file anew, or check its name.")


def parquet_rows(path: Path) -> int:
    """Rows of a Parquet file."""
    try:
        return int(pl.scan_parquet(path).select(pl.len()).collect().item())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _no_parquet(path, error) from error


def parquet_cuts(path: Path, most: int) -> list[tuple[int, int]]:
    """First row and number of rows of stretches of about ``most`` rows at most, by row groups where that is possible.

    A stretch that ends within a row group makes both readers of the group decode its dictionaries, and a frame in two
    pieces.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise _no_parquet(path, error) from error
    cuts: list[tuple[int, int]] = []
    start = held = 0
    for number in range(footer.num_row_groups):
        rows = footer.row_group(number).num_rows
        if held and held + rows > most:
            cuts.append((start, held))
            start, held = start + held, 0
        held += rows
        if held > most:
            pieces = round(held / most)
            bounds = [start + held * piece // pieces for piece in range(pieces + 1)]
            cuts += [(begin, end - begin) for begin, end in pairwise(bounds)]
            start, held = start + held, 0
    return [*cuts, (start, held)] if held else cuts


def parquet_columns(path: Path) -> list[str]:
    """Column names of a Parquet file."""
    return list(parquet_types(path))


def parquet_types(path: Path) -> pl.Schema:
    """Return the names and types of the columns of a Parquet file."""
    try:
        return pl.scan_parquet(path).collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _no_parquet(path, error) from error


def parquet_block(path: Path, fields: Sequence[Field], start: int, rows: int) -> Block:
    """Rows [start, start + rows) of a Parquet file."""
    names = list(dict.fromkeys(item.column for item in fields))
    try:
        frame = pl.scan_parquet(path).select(names).slice(start, rows).collect(engine="streaming")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _no_parquet(path, error) from error
    try:
        return frame_block(frame, fields, typed=True)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def frame_block(
    frame: pl.DataFrame,
    fields: Sequence[Field],
    *,
    typed: bool = False,
    read: Mapping[Field, RawColumn] | None = None,
    text_at: Callable[[int], str] | None = None,
) -> Block:
    """Return typed columns of a frame; a row that does not fit becomes a bad line.

    Args:
        typed: whether the types of the frame are those of the input, so that kept columns stay in the frame.
        read: columns that are read already; the frame may lack them.
        text_at: what the quarantine keeps of a row, by its number; None: its values.

    Raises:
        DataError: a column whose type cannot be read as the field's.
    """
    read = read or {}
    rows = max([frame.height, *map(len, read.values())])
    numbers = np.arange(rows, dtype=np.int64)
    block = Block(
        rows=rows, lines=rows, columns={}, row_line=numbers, row_at=numbers,
        text_at=text_at or (lambda row: str(frame.row(row))[:TEXT_CUT]), frame=frame if typed else None,
    )  # fmt: skip
    wrong: dict[int, str] = {}
    for item in fields:
        if typed and item.kept:
            continue
        column = read[item] if item in read else _field_column(frame.get_column(item.column), item, wrong)
        if item.required:
            for row in np.flatnonzero(column.absent()).tolist():
                wrong.setdefault(row, f"column {item.column}: missing value")
        block.columns[item] = column
    if wrong:
        marked = np.zeros(rows, np.bool_)
        marked[list(wrong)] = True
        block.drop(marked, wrong.__getitem__)
    return block


def _field_column(series: pl.Series, item: Field, wrong: dict[int, str]) -> RawColumn:
    """Return a column as a field wants it; rows that do not fit are noted in ``wrong``."""
    if series.dtype == pl.Binary:
        series = _decoded(series, item, wrong)
    try:
        if item.separator is not None and not isinstance(series.dtype, pl.List | pl.Array):
            series = series.cast(pl.String).str.extract_all(rf"[^\x{ord(item.separator):02x}]+")
        if isinstance(series.dtype, pl.List | pl.Array):
            return _list_column(series, item, wrong)
        return _column(series, item, wrong)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"column {item.column} holds {series.dtype}, of which no {item.kind} can be made "
            f"({str(error).strip().splitlines()[0]}). Convert it, or leave it out of the schema."
        ) from error


def _numbers(series: pl.Series, kind: str) -> RawColumn | None:
    """A column of numbers that are all as they should be, without Polars' dispatch; None: look closer."""
    whole = series.dtype.is_integer() and series.dtype not in _WIDE
    if kind == "float" and (whole or series.dtype.is_float()):
        # Not in one piece before somebody needs it: NaN for null.
        pieces = [_values(piece) for piece in (series.get_chunks() if series.n_chunks() > 1 else [series])]
        return RawColumn(pieces=pieces) if whole or not any(np.isinf(piece).any() for piece in pieces) else None
    if kind == "int" and whole and not series.null_count():
        return RawColumn(values=series.cast(pl.Int64).to_numpy(), missing=np.zeros(len(series), np.bool_))
    return None


def _values(piece: pl.Series) -> Any:
    """Numbers as they lie, int64 or float64, where none is null; else float64, NaN for null."""
    if piece.dtype not in (pl.Int64, pl.Float64) or piece.null_count():
        piece = piece.cast(pl.Float64)
    return piece.to_numpy()


def _column(series: pl.Series, item: Field, wrong: dict[int, str]) -> RawColumn:
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    if series.dtype == pl.String and item.kind in ("float", "int", "hex"):
        series = _from_text(series, item, wrong)
    if (plain := _numbers(series, item.kind)) is not None:
        return plain
    if series.dtype.is_float():
        series = series.fill_nan(None)  # what writers of frames put where a value is missing
    if item.kind == "datetime" and series.dtype in (pl.Date, pl.Datetime):
        moments = series.dt.epoch("us")
        return RawColumn(values=moments.fill_null(0).to_numpy(), missing=moments.is_null().to_numpy())
    if item.kind in ("string", "datetime"):
        return RawColumn(texts=series.dt.to_string("iso") if series.dtype.is_temporal() else series.cast(pl.String))
    if series.dtype in (pl.Date, pl.Datetime):
        series = series.cast(pl.Datetime("us")).to_physical()
    values = series.cast(_TYPES[item.kind], strict=False)
    failed_rows = values.is_null() & series.is_not_null()
    if (series.dtype.is_float() or series.dtype.is_decimal()) and item.kind != "float":
        failed_rows = failed_rows | ((series != series.floor()) & series.is_not_null())
    if item.kind == "float":
        failed_rows = failed_rows | values.is_infinite().fill_null(False)
    for row in failed_rows.arg_true().to_list():
        wrong.setdefault(row, _reason(item, series[row]))
    if item.kind == "float":
        return RawColumn(values=values.fill_null(float("nan")).to_numpy())
    missing = values.is_null().to_numpy()
    return RawColumn(values=values.fill_null(0).to_numpy().view(np.int64), missing=missing)


def _from_text(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Return texts as numbers, null for the empty text; rows in which they are none are noted in ``wrong``."""
    text = series.str
    if item.kind == "hex":
        values: pl.Series = text.to_integer(base=16, dtype=pl.UInt64, strict=False)
        odd = (text.len_bytes() > 16) | text.starts_with("+")
    else:
        values = series.cast(_TYPES[item.kind], strict=False)
        odd = ~values.is_finite() if item.kind == "float" else values.is_null()
    if values.null_count() == series.null_count() and (item.kind == "int" or not odd.any()):
        return values
    rows = ((odd | values.is_null()) & (text.len_bytes() > 0)).arg_true()
    if not len(rows):
        return values
    found: list[Any] = []
    for row, value in zip(rows.to_list(), series.gather(rows).to_list(), strict=True):
        found.append(careful_value(item.kind, value))
        if found[-1] is None:
            wrong.setdefault(row, _reason(item, value))
    return values.scatter(rows, pl.Series(found, dtype=_TYPES[item.kind]))


def _decoded(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Bytes as text; rows in which they are none are noted in ``wrong``."""
    with suppress(pl.exceptions.PolarsError):
        return series.cast(pl.String)
    texts: list[str | None] = []
    for row, raw in enumerate(series.to_list()):
        try:
            texts.append(None if raw is None else raw.decode())
        except UnicodeDecodeError:
            texts.append(None)
            wrong.setdefault(row, f"column {item.column}: broken UTF-8")
    return pl.Series(series.name, texts, pl.String)


def _list_column(series: pl.Series, item: Field, wrong: dict[int, str]) -> RawColumn:
    if item.separator is None:
        raise DataError(f"column {item.column} holds lists. Declare it as a sequence column.")
    assert isinstance(series.dtype, pl.List | pl.Array)
    inner_type = series.dtype.inner
    lists = series.cast(pl.List(inner_type)) if isinstance(series.dtype, pl.Array) else series
    if inner_type.is_float():
        lists = lists.list.eval(pl.element().fill_nan(None))
    lists = lists.list.drop_nulls()
    lists = lists.list.tail(item.max_length) if item.keep == "last" else lists.list.head(item.max_length)
    counts = lists.list.len().fill_null(0).to_numpy().astype(np.int32)
    inner: dict[int, str] = {}
    filled = lists.filter(lists.list.len().fill_null(0) > 0)
    values = filled.explode()
    one = Field(column=item.column, kind=item.kind)
    column = _column(_decoded(values, one, inner) if inner_type == pl.Binary else values, one, inner)
    if inner:
        row_of = np.repeat(np.arange(len(counts)), counts)
        for position, reason in inner.items():
            wrong.setdefault(int(row_of[position]), reason)
    column.counts = counts
    return column


def _reason(item: Field, value: object) -> str:
    return f"column {item.column}: {str(value)[:40]!r} is not {_WORDS[item.kind]}"


def block_frame(block: Block, names: Sequence[str]) -> pl.DataFrame:
    """A frame of a block's columns, each as :func:`column_series` gives it."""
    series = {item.column: column_series(item, column) for item, column in block.columns.items()}
    return pl.DataFrame([series[name].alias(name) for name in names])


def column_series(item: Field, column: RawColumn) -> pl.Series:
    """hex as UInt64, int as Int64, float as Float64, string as String; lists as lists of these."""
    if column.texts is not None:
        series = column.texts
    elif item.kind == "float":
        series = pl.Series(column.numbers()).fill_nan(None)
    else:
        values = column.numbers().view(np.uint64) if item.kind == "hex" else column.numbers()
        mask = pl.Series(column.missing)
        series = pl.Series(values).set(mask, None) if mask.any() else pl.Series(values)
    if column.counts is None:
        return series
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(column.counts, dtype=np.int64)]))
    return pl.Series(pl.from_arrow(pa.LargeListArray.from_arrays(offsets, series.rechunk().to_arrow())))


def kept_series(block: Block, item: Field) -> pl.Series:
    """Return a kept column of a block: of a typed file as it is there, else as :func:`column_series` gives it.

    Raises:
        DataError: it holds lists, or bytes that are no text.
    """
    if item in block.columns:
        return column_series(item, block.columns[item])
    series = block.frame.get_column(item.column)
    if series.dtype.is_nested() or series.dtype == pl.Object:
        raise DataError(
            f"column {item.column} holds {series.dtype}, and keep is for texts, numbers and moments. Leave it out."
        )
    if series.dtype in (pl.Categorical, pl.Enum, pl.Binary):
        try:
            series = series.cast(pl.String)
        except pl.exceptions.PolarsError as error:
            raise DataError(f"column {item.column} holds bytes that are no text. Leave it out of keep.") from error
    kept: pl.Series = series if block.rows == len(series) else series.gather(block.row_at)
    return kept


def common_types(schemas: Iterable[Mapping[str, pl.DataType]]) -> dict[str, pl.DataType]:
    """Return one type for each column: its own if it is the same everywhere, else Int64, Float64 or text."""
    found: dict[str, set[pl.DataType]] = {}
    for schema in schemas:
        for name, dtype in schema.items():
            found.setdefault(name, set()).update([] if dtype == pl.Null else [dtype])
    return {name: _common_type(dtypes) for name, dtypes in found.items()}


def _common_type(dtypes: set[pl.DataType]) -> pl.DataType:
    if len(dtypes) == 1:
        return next(iter(dtypes))
    if dtypes and all(dtype.is_integer() and dtype not in _WIDE for dtype in dtypes):
        return pl.Int64()
    return pl.Float64() if dtypes and all(dtype.is_numeric() for dtype in dtypes) else pl.String()


class MissingColumnError(DataError):
    """A file lacks columns that are to be read.

    Args:
        path: the file.
        missing: the columns; ``why`` tells more of the first one.
        present: columns of the file.
        made: columns that features make.
    """

    def __init__(
        self, path: Path, missing: Sequence[str], present: Sequence[str], why: str = "", made: Sequence[str] = ()
    ) -> None:
        also = f" Features make: {listed(made)}." if made else ""
        lacks = f"lacks {len(missing)} columns of the schema: {listed(missing)}"
        if len(missing) == 1:
            lacks = f"has no column {missing[0]!r}"
        hints = {column: near(column, [*present, *made]) for column in missing[:8]}
        column, hint = next(((column, hint) for column, hint in hints.items() if hint), ("", ""))
        if len(missing) > 1:
            hint = hint.replace("?", f" instead of {column!r}?")
        super().__init__(f"{path} {lacks}{why}. It has: {listed(present)}.{also}{hint}")
        self.path, self.missing, self.present = path, missing, present


def check_columns(path: Path, wanted: Sequence[str], present: Sequence[str]) -> None:
    """Refuse a file that lacks a column, or has it twice."""
    for name in wanted:
        if present.count(name) > 1:
            places = [str(place) for place, other in enumerate(present, 1) if other == name]
            raise DataError(
                f"{path}:1: the header gives the name {name!r} to columns {', '.join(places[:-1])} and {places[-1]}. "
                "Rename all but one."
            )
    missing = [name for name in wanted if name not in present]
    if missing:
        raise MissingColumnError(path, missing, present)
