"""Type the columns of a block of rows from any file, and separate the lines that do not fit.

Every reader makes a Polars frame of a block, with texts if the file has no types. :func:`frame_block` then types its
columns. A missing value is null in every column; a number is finite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from polars import selectors

from stoker.base.checks import near
from stoker.base.engine import reason_of
from stoker.base.errors import DataError
from stoker.base.units import listed
from stoker.prep.features.past import lists_of
from stoker.prep.parse.floats import LOSSY, as_double, in_single
from stoker.prep.parse.notation import (  # fmt: skip
    AS_TYPED,
    DECIMAL_COMMA,
    PLAIN,
    SINGLE,
    TYPED,
    can_meet,
    fits_moment,
    is_moment,
    text_of_decimals,
    text_of_floats,
    text_of_moments,
    with_point,
    written,
)
from stoker.prep.parse.nulls import without_nulls

TEXT_CUT = 200  # characters of a bad line that the quarantine keeps
KEPT_TYPES: dict[str, pl.DataType] = {  # types of kept columns from files without types
    "float": pl.Float64(), "int": pl.Int64(), "string": pl.String(), "datetime": pl.Datetime("us"),
}  # fmt: skip
_TYPES = {"float": pl.Float64, "int": pl.Int64, "hex": pl.UInt64, "string": pl.String, "datetime": pl.String}
_WIDE = (pl.UInt64, pl.Int128, pl.UInt128)  # whole numbers that do not fit int64
_WORDS = {"float": "a number", "int": "a whole number", "hex": "hexadecimal (up to 16 digits)", "string": "text"}
_INT = re.compile(r"[+-]?[0-9]+")
_WHOLE = r"^\s*([+-]?[0-9]+)\.0+\s*$"  # a whole number that a missing value of its column made a float
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{1,16}")
_SPACE = " \t\n\r\v\f"  # around a number


@dataclass(frozen=True, kw_only=True)
class Field:
    """A raw column read as one type. Several features may share it."""

    column: str
    kind: str  # float | int | hex | string | datetime (text, or int64 microseconds from a typed file)
    separator: str | None = None  # of a list; None: a single value
    max_length: int = 0  # of a list
    keep: str = "last"
    required: bool = False  # an empty field makes the line bad
    optional: bool = False  # a file may lack the column; all its fields then count as empty
    kept: bool = False  # goes to the scores; a typed file's column then keeps its type, whatever ``kind`` says
    decimal: str = "."  # of texts that are read as float
    ids: bool = False  # floats are ids, so one that may have lost digits makes the line bad
    notation: str = field(default="", compare=False)  # how values are written (stoker.prep.parse.notation)
    compared: str = field(default="", compare=False)  # the text with which the rule of the label compares values


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that goes to the quarantine."""

    line: int  # counted from 0 within the block
    reason: str
    text: str
    label: bool = False  # the only fault is a label that is a number but neither 0 nor 1
    broken: bool = False  # the file breaks off here; this line stands for all that is lost


@dataclass(kw_only=True)
class Block:
    """The typed rows of a block of a file, and its bad lines.

    A column is Float64, Int64, UInt64 (hex) or String, or a list of one of these. A kept column of a typed file keeps
    its type.
    """

    rows: int
    lines: int  # good, bad and skipped lines; the next block continues their numbers
    columns: dict[Field, pl.Series]
    row_line: npt.NDArray[np.int64]  # [rows] line within the block
    text_at: Callable[[int], str]  # returns the text of the row that begins at a line, for the quarantine
    bad: list[BadLine] = field(default_factory=list)

    def set_aside(self, bad: Iterable[BadLine]) -> None:
        """Add bad lines, in the order of the lines."""
        self.bad = sorted([*self.bad, *bad], key=lambda one: one.line)

    def drop(self, wrong: npt.NDArray[np.bool_], reason: Callable[[int], str], *, label: bool = False) -> None:
        """Move the rows that ``wrong`` marks to the bad lines."""
        lines = [(row, int(self.row_line[row])) for row in np.flatnonzero(wrong).tolist()]
        self.set_aside(
            BadLine(line=line, reason=reason(row), text=self.text_at(line), label=label) for row, line in lines
        )
        keep = ~wrong
        self.columns = {item: column.filter(pl.Series(keep)) for item, column in self.columns.items()}
        self.row_line = self.row_line[keep]
        self.rows = len(self.row_line)

    def drop_labels(self, item: Field) -> None:
        """Move rows whose label is a number but neither 0 nor 1 to the bad lines; an optional label may be missing."""
        column = self.columns[item]
        wrong = ((column != 0) & (column != 1)).fill_null(not item.optional).to_numpy()
        if wrong.any():
            values = column.to_numpy()
            self.drop(wrong, lambda row: f"column {item.column}: {values[row]:g} is neither 0 nor 1", label=True)

    def frame(self, names: Sequence[str]) -> pl.DataFrame:
        """Return the named columns."""
        series = {item.column: column for item, column in self.columns.items()}
        return pl.DataFrame([series[name].alias(name) for name in names])


def joined(blocks: Sequence[Block]) -> Block:
    """Return blocks of the same lines as one, with their rows in the order of the lines."""
    lines = np.concatenate([block.row_line for block in blocks])
    order = np.argsort(lines)
    columns = {item: pl.concat([block.columns[item] for block in blocks])[order] for item in blocks[0].columns}
    made = replace(blocks[0], rows=len(lines), columns=columns, row_line=lines[order])
    made.set_aside(bad for block in blocks[1:] for bad in block.bad)
    return made


def careful_value(kind: str, text: str) -> float | int | None:
    """Return the value of a text that Polars rejects or may misread; None if it is not of that type."""
    text = text.strip(_SPACE)
    if kind == "float" and _FLOAT.fullmatch(text):
        return value if np.isfinite(value := float(text)) else None
    if kind == "int" and _INT.fullmatch(text):
        number = Decimal(text)  # int() refuses thousands of digits
        return int(number) if -(2**63) <= number < 2**63 else None
    return int(text, 16) if kind == "hex" and _HEX.fullmatch(text) else None


def cut_text(line: bytes) -> str:
    """Return the beginning of a line that the quarantine keeps."""
    return line[: 4 * TEXT_CUT].decode("utf-8", "replace").rstrip("\r")[:TEXT_CUT]


def frame_block(
    frame: pl.DataFrame,
    fields: Sequence[Field],
    *,
    typed: bool = False,
    read: Mapping[Field, pl.Series] | None = None,
    row_line: npt.NDArray[np.int64] | None = None,
    lines: int | None = None,
    text_at: Callable[[int], str] | None = None,
    nulls: Sequence[str] = (),
) -> Block:
    """Type the columns of a frame; a row that does not fit becomes a bad line.

    Args:
        frame: has the columns of all fields, except optional ones and those in ``read``.
        fields: the fields to make.
        typed: whether the input has types; kept columns then keep theirs.
        read: columns that are typed already.
        row_line: [rows] the line of each row; None: every line is a row.
        lines: as in :class:`Block`.
        text_at: as in :class:`Block`; by default the row's values.
        nulls: texts that mean missing, besides the empty one.

    Raises:
        DataError: the type of a column cannot be converted to the field's.
    """
    if row_line is None:
        row_line = np.arange(frame.height)
    rows = len(row_line)
    block = Block(
        rows=rows, lines=rows if lines is None else lines, columns={}, row_line=row_line,
        text_at=text_at or (lambda row: str(frame.row(row))[:TEXT_CUT]),
    )  # fmt: skip
    wrong: dict[int, str] = {}
    for item in fields:
        if read is not None and item in read:
            column = without_nulls(read[item], nulls, item.kind)
        elif item.optional and item.column not in frame:
            column = pl.repeat(None, rows, dtype=_TYPES[item.kind], eager=True)
        elif typed and item.kept:
            column = without_nulls(_kept(frame.get_column(item.column)), nulls, "string")
        else:
            column = _typed(frame.get_column(item.column), item, wrong, nulls)
        if item.required and column.null_count():
            for row in column.is_null().arg_true().to_list():
                wrong.setdefault(row, f"column {item.column}: missing value")
        block.columns[item] = column
    if wrong:
        marked = np.zeros(rows, np.bool_)
        marked[list(wrong)] = True
        block.drop(marked, wrong.__getitem__)
    return block


def _kept(series: pl.Series) -> pl.Series:
    if series.dtype.is_nested() or series.dtype == pl.Object:
        raise DataError(
            f"column {series.name} holds {series.dtype}, and keep is for texts, numbers and times. Leave it out."
        )
    if series.dtype not in (pl.Categorical, pl.Enum, pl.Binary):
        return series
    try:
        return series.cast(pl.String)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"column {series.name} holds bytes that are not text. Leave it out of keep.") from error


def _typed(series: pl.Series, item: Field, wrong: dict[int, str], nulls: Sequence[str]) -> pl.Series:
    """Convert a column to a field, without ``nulls``; note rows that do not fit in ``wrong``."""
    series = _decoded(series, item, wrong)
    nested = isinstance(series.dtype, pl.List | pl.Array)
    if nested and item.separator is None:
        raise DataError(f"column {item.column} holds lists. Declare it as a sequence column.")
    inner: Any = series.dtype
    if (inner.inner if nested else inner).is_nested():
        raise DataError(
            f"column {item.column} holds {series.dtype}, of which no {item.kind} can be made. Make columns of its "
            "fields, or leave it out of the schema."
        )
    try:
        if item.separator is None:
            return _single(series, item, wrong, nulls)
        if not nested:
            texts = without_nulls(series.cast(pl.String), nulls, "string")
            series = texts.str.extract_all(rf"[^\x{ord(item.separator):02x}]+")
        return _lists(series, item, wrong, nulls)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"column {item.column} holds {series.dtype}, of which no {item.kind} can be made "
            f"({str(error).strip().splitlines()[0]}). Convert it, or leave it out of the schema."
        ) from error


def _single(series: pl.Series, item: Field, wrong: dict[int, str], nulls: Sequence[str] = ()) -> pl.Series:
    """Convert single values to a field, without ``nulls``; note rows that do not fit in ``wrong``."""
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    known = _converted(without_nulls(series, nulls, item.kind, item.decimal), item, wrong)
    known = in_single(known) if item.kind == "float" and item.notation == SINGLE else known
    return without_nulls(known, nulls, item.kind, item.decimal)


def _converted(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    kind = item.kind
    if series.dtype == pl.String:
        if _TYPES[kind] == pl.String:
            if series.min() == "":  # a request of few texts has no time for Polars' replace
                series = series.set(series == "", None)
            return written(series, item.notation)
        return _from_text(series, item, wrong)
    moments = series.dtype in (pl.Date, pl.Datetime)
    if moments and kind == "datetime":
        return series.dt.epoch("us")
    if _TYPES[kind] == pl.String:
        return _as_texts(series, item, wrong)
    if moments:
        if item.notation != AS_TYPED and series.count():  # 0.1.0 counted microseconds
            raise DataError(
                f"column {item.column} holds {series.dtype}, and the schema reads numbers, whose unit a time does not "
                'say: write numbers as in the log, or, of a timestamp, set type = "datetime" in [timestamp].'
            )
        series = series.cast(pl.Datetime("us")).to_physical()
    if kind == "hex" and not series.dtype.is_unsigned_integer() and series.count():
        raise DataError(
            f"column {item.column} holds {series.dtype}, and the schema reads hexadecimal texts, where 10 is 16. Write "
            'texts, or unsigned integers; if the log has decimal numbers, set type = "int" of the column.'
        )
    if series.dtype.is_float():
        return _from_floats(series, item, wrong)
    values = series.cast(_TYPES[kind], strict=False)
    if series.dtype.is_integer() and values.null_count() == series.null_count():
        return values
    failed = values.is_null() & series.is_not_null()
    if kind != "float" and series.dtype.is_decimal():
        failed |= series != series.floor()
    for row in failed.fill_null(False).arg_true().to_list():
        wrong.setdefault(row, _reason(item, series[row]))
    return values


def _from_floats(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Convert floats to numbers, NaN to null: many tools write it for a missing value."""
    short = item.kind == "float" and item.notation not in (AS_TYPED, SINGLE)
    series = series if series.is_finite().all() else series.fill_nan(None)
    values = as_double(series) if short else series.cast(_TYPES[item.kind], strict=False)
    failed = ~series.is_finite()
    if item.kind == "int":
        failed |= series != series.floor()
    for row in failed.fill_null(False).arg_true().to_list():
        wrong.setdefault(row, _reason(item, series[row]))
    if item.kind == "int" or (item.ids and short and series.dtype != pl.Float64):
        _note_lost_digits(item, series, series.abs() >= LOSSY[series.dtype], wrong)
    return values


def _note_lost_digits(item: Field, series: pl.Series, lost: pl.Series, wrong: dict[int, str]) -> None:
    """Note the floats that may have lost digits of an id in ``wrong``."""
    for row in lost.fill_null(False).arg_true().to_list():
        text = f"{series[row]:.17g} may have lost digits of an id: write texts or whole numbers"
        wrong.setdefault(row, f"column {item.column}: the float {text}")


def _as_texts(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Convert single values of another type to texts; note rows with floats that may have lost digits."""
    if series.dtype.is_temporal():
        return _moments_as_texts(series, item, wrong)
    notation = item.notation.removeprefix(TYPED)
    if item.compared and series.count() and not can_meet(series.dtype, item.compared, notation):
        raise DataError(
            f"column {item.column} holds {series.dtype}, and the rule of the label compares it with {item.compared!r}, "
            "which is written as no such value. To compare numbers, write a number without quotes."
        )
    if series.dtype.is_decimal() and notation != AS_TYPED:
        return written(text_of_decimals(series), notation)
    if not series.dtype.is_float():
        return written(series.cast(pl.String), notation)
    series = series.fill_nan(None)
    if item.notation == AS_TYPED:
        return series.cast(pl.String)
    texts = text_of_floats(series)
    _note_lost_digits(item, series, texts.is_null() & series.is_not_null(), wrong)
    return written(texts, notation)


def _moments_as_texts(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Convert times to texts as a dataset writes them; note rows that it cannot write."""
    clock = series.dtype in (pl.Time, pl.Duration) and not is_moment(item.notation)  # a value has one ISO form
    if item.notation == AS_TYPED or clock:
        return series.dt.to_string("iso")
    fits = not item.notation or is_moment(item.notation) or (series.dtype == pl.Date and item.notation == PLAIN)
    if series.dtype not in (pl.Date, pl.Datetime) or not fits:
        raise DataError(
            f"column {item.column} holds {series.dtype}, which texts write in many ways, and no known text says "
            "in which. Convert it to texts as in the log."
        )
    texts = written(text_of_moments(series), item.notation)
    if is_moment(item.notation):
        why = f"cannot be written like the texts of the dataset ({item.notation}): convert it to text as in the log"
        for row in (~fits_moment(texts, item.notation)).fill_null(False).arg_true().to_list():
            wrong.setdefault(row, f"column {item.column}: {texts[row]!r} {why}")
    return texts


def _from_text(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Convert texts to numbers, the empty text to null; note rows with other texts in ``wrong``."""
    text = series.str
    if item.decimal != "." and item.kind == "float":
        numbers = with_point(series).cast(pl.Float64, strict=False)
        fits = text.contains(DECIMAL_COMMA) & numbers.is_finite()
        for row in (~fits & (text.len_bytes() > 0)).arg_true().to_list():
            wrong.setdefault(row, _reason(item, series[row]))
        return numbers.set(~fits, None)
    if item.kind == "hex":
        values: pl.Series = text.to_integer(base=16, dtype=pl.UInt64, strict=False)
        odd = (text.len_bytes() > 16) | text.starts_with("+")
    else:
        values = series.cast(_TYPES[item.kind], strict=False)
        if item.kind == "int" and values.null_count() > series.null_count():
            whole = text.extract(_WHOLE).cast(pl.Int64, strict=False)
            values = values.fill_null(whole.set(~whole.is_between(-(2**53), 2**53, "none"), None))
        odd = ~values.is_finite() if item.kind == "float" else values.is_null()
    if values.null_count() == series.null_count() and (item.kind == "int" or not odd.any()):
        return values
    rows = ((odd | values.is_null()) & (text.len_bytes() > 0)).arg_true()
    if not len(rows):
        return values
    found = [careful_value(item.kind, value) for value in series.gather(rows).to_list()]
    for row in (row for row, value in zip(rows.to_list(), found, strict=True) if value is None):
        wrong.setdefault(row, _reason(item, series[row]))
    return values.scatter(rows, pl.Series(found, dtype=_TYPES[item.kind]))


def _decoded(series: pl.Series, item: Field, wrong: dict[int, str]) -> pl.Series:
    """Convert bytes, if they are, to text; note rows that are not UTF-8 in ``wrong``."""
    if series.dtype != pl.Binary:
        return series
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


def _lists(series: pl.Series, item: Field, wrong: dict[int, str], nulls: Sequence[str]) -> pl.Series:
    """Convert lists to lists of typed values, null to an empty list; drop missing values before cutting the list."""
    inner: Any = series.dtype.inner  # type: ignore[attr-defined]
    inner = pl.String() if inner in (pl.Categorical, pl.Enum) else inner
    lists = series.cast(pl.List(inner))
    if inner.is_float():
        lists = lists.list.eval(pl.element().fill_nan(None))
    lists = lists.list.drop_nulls()
    texts = inner in (pl.String, pl.Binary) and item.notation != AS_TYPED
    if texts and (lists.explode().cast(pl.Binary).bin.size() == 0).any():
        lists = lists.list.eval(pl.element().filter(pl.element().cast(pl.Binary).bin.size() != 0))
    lists = _without_alone(lists, item, nulls) if nulls else lists
    lists = lists.list.tail(item.max_length) if item.keep == "last" else lists.list.head(item.max_length)
    ends = lists.list.len().fill_null(0).cast(pl.Int64).cum_sum().to_numpy()
    values = lists.explode(empty_as_null=False, keep_nulls=False)
    odd: dict[int, str] = {}
    values = _single(_decoded(values, item, odd), item, odd)
    for place, reason in odd.items():
        wrong.setdefault(int(np.searchsorted(ends, place, side="right")), reason)
    return lists_of(values.rechunk(), np.diff(ends, prepend=0))


def _without_alone(lists: pl.Series, item: Field, nulls: Sequence[str]) -> pl.Series:
    """Return lists without those of a single value that means missing, as the text of such a list does."""
    odd: dict[int, str] = {}
    frame = lists.to_frame("list").with_row_index("row").filter(pl.col("list").list.len() == 1)
    only = _decoded(frame["list"].list.first(), item, odd)
    gone = _single(only, item, odd, nulls).is_null()
    rows = frame["row"].filter(gone & ~pl.int_range(frame.height, eager=True).is_in(list(odd)))
    kept = pl.when(~pl.int_range(pl.len()).is_in(rows.implode())).then(pl.first())
    return pl.DataFrame([lists]).select(kept).to_series()


def _reason(item: Field, value: object) -> str:
    text = str(value)
    wide = item.kind == "int" and _INT.fullmatch(text.strip(_SPACE))
    return f"column {item.column}: {text[:40]!r} is not {'within 64 bits' if wide else _WORDS[item.kind]}"


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Turn errors of Parquet readers into :class:`DataError` with the file and the reason: empty, truncated, other."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, OSError) as error:
        with suppress(OSError):
            if not path.stat().st_size:
                raise DataError(f"{path} is empty: it is not a Parquet file. Get the file again.") from error
            with path.open("rb") as file:
                begins = file.read(4) == b"PAR1"
                size = file.seek(0, 2)
                file.seek(max(0, size - 4))
                if begins and (size < 12 or file.read(4) not in (b"PAR1", b"PARE")):
                    raise DataError(
                        f"{path} is truncated: a Parquet file ends with PAR1, this one does not. Get it whole."
                    ) from error
        raise DataError(
            f"{path} cannot be read as Parquet: {reason_of(error)}. Get the file again, or check its name."
        ) from error


def parquet_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file."""
    with reading_parquet(path):
        return int(pq.read_metadata(path).num_rows)


def parquet_cuts(path: Path, most: int) -> list[tuple[int, int]]:
    """Cut a Parquet file into slices of about ``most`` rows; return the first row and the rows of each.

    Slices are whole row groups where possible: two readers of one row group would both decode its dictionaries.
    """
    with reading_parquet(path):
        footer = pq.read_metadata(path)
    ends = np.cumsum([footer.row_group(number).num_rows for number in range(footer.num_row_groups)])
    cuts: list[tuple[int, int]] = []
    start = 0
    while start < footer.num_rows:
        later = ends[ends > start]
        stop = int(later[later <= start + most].max(initial=later[0]))
        if stop - start > 1.5 * most:
            stop = start + most
        cuts.append((start, stop - start))
        start = stop
    return cuts


def parquet_types(path: Path) -> pl.Schema:
    """Return the names and types of the columns of a Parquet file."""
    with reading_parquet(path):
        return pl.scan_parquet(path).collect_schema()


def parquet_block(path: Path, fields: Sequence[Field], start: int, rows: int, nulls: Sequence[str] = ()) -> Block:
    """Return rows [start, start + rows) of a Parquet file; ``nulls`` are texts that mean missing."""
    names = list(dict.fromkeys(item.column for item in fields))
    with reading_parquet(path):
        there = selectors.by_name(names, require_all=False)
        frame = pl.scan_parquet(path).select(there).slice(start, rows).collect(engine="streaming")
    try:
        return frame_block(frame, fields, typed=True, nulls=nulls)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def common_types(schemas: Iterable[Mapping[str, pl.DataType]]) -> dict[str, pl.DataType]:
    """Return one type for each column: its own if all files agree, else Int64, Float64 or text."""
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
    """A file lacks columns.

    Args:
        path: the file.
        missing: the columns.
        present: columns of the file.
        why: who needs the first missing column.
        made: columns that features make.
        advice: what to do if no column of the schema was found.
    """

    def __init__(
        self, path: Path, missing: Sequence[str], present: Sequence[str], why: str = "", made: Sequence[str] = (),
        advice: str = "",
    ) -> None:  # fmt: skip
        also = f" Features make: {listed(made)}." if made else ""
        lacks = f"lacks {len(missing)} columns of the schema: {listed(missing)}"
        if len(missing) == 1:
            lacks = f"has no column {missing[0]!r}"
        hints = {column: near(column, [*present, *made]) for column in missing[:8]}
        column, hint = next(((column, hint) for column, hint in hints.items() if hint), ("", ""))
        if len(missing) > 1:
            hint = hint.replace("?", f" instead of {column!r}?")
        super().__init__(f"{path} {lacks}{why}. It has: {listed(present)}.{also}{hint}{advice}")
        self.path, self.missing, self.present, self.advice = path, missing, present, advice


def check_columns(path: Path, wanted: Sequence[str], present: Sequence[str], separator: str | None = None) -> None:
    """Raise :class:`DataError` if a file lacks a column or has it twice; ``separator`` is that of a text file."""
    for name in wanted:
        if present.count(name) > 1:
            places = [str(place) for place, other in enumerate(present, 1) if other == name]
            raise DataError(
                f"{path}:1: the header gives the name {name!r} to columns {', '.join(places[:-1])} and {places[-1]}. "
                "Rename all but one."
            )
    if missing := [name for name in wanted if name not in present]:
        advice = ""
        if separator is not None and len(missing) == len(wanted):
            if len(present) == 1:
                advice = f" If {separator!r} is not what separates fields: set separator in [source] of the schema."
            elif any(re.fullmatch(r"-?\d+(\.\d*)?", name) for name in present):
                advice = (
                    " If the first line is a row, not a header: set the names as columns in [source] of the schema."
                )
        raise MissingColumnError(path, missing, present, advice=advice)
