"""Inputs of a preparation as local files: write tables and streams to Parquet files, download URLs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from stoker.base import remote
from stoker.base.engine import full_disk, reason_of
from stoker.base.errors import ConfigError, DataError
from stoker.prep.parse.sources import FRAME, number_order
from stoker.prep.recipes.rows import from_batches

_AS_TEXT = (pl.Categorical, pl.Enum, pl.Int128, pl.UInt128)  # types that not every reader of Parquet knows
_GROUP_ROWS = 2**16  # rows of a row group of the temporary files, whatever the batches of a stream
_ADVICE = "Give its columns names of their own and plain types: numbers, texts, times, lists of these."


class Table(Protocol):
    """A table in memory or a stream of record batches (the Arrow PyCapsule interface)."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Input: TypeAlias = str | os.PathLike[str] | Table | pl.LazyFrame


@dataclass
class Inputs:
    """Local files and patterns, and the names of temporary and downloaded files in messages."""

    files: list[Any] = field(default_factory=list)
    names: dict[Path, str] = field(default_factory=dict)


@contextmanager
def files_of(given: Any, *, rows: int | None = None) -> Iterator[Inputs]:
    """Yield local files for paths, patterns, URLs and tables. Files of tables are deleted at the end of the block.

    Errors that leave the block name the URL or the table instead of the local file.

    Args:
        given: a path, a pattern, a URL, a table or a stream, or a list: of tables only, or without tables.
        rows: number of rows to write of each table; None: all.

    Raises:
        ConfigError: ``given`` has something else.
        DataError: the disk is full, Parquet cannot hold a column, or a URL cannot be read.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    items = list(given) if several else [given]
    tables = [item for item in items if not isinstance(item, str | os.PathLike)]
    for item in tables:
        if not _is_table(item):
            remedy = (
                "Pass paths, patterns, URLs, or tables: Polars, pandas, PyArrow, DuckDB, a Hugging Face dataset (one "
                "split of it), or anything with __arrow_c_stream__."
            )
            if isinstance(item, Iterable) and not isinstance(item, Mapping | np.ndarray):
                remedy = (
                    "Its order may be another each time: pass sorted(...) of paths. Of record batches pass "
                    "pyarrow.RecordBatchReader.from_batches(schema, batches)."
                )
            raise ConfigError(f"files holds an object of type {_kind(item)}. {remedy}", settings=("files",))
    if tables and len(tables) < len(items):
        raise ConfigError("files mixes tables and paths. Prepare from one or the other.", settings=("files",))
    inputs = Inputs()
    with tempfile.TemporaryDirectory(prefix="stoker-frame-") if tables else nullcontext("") as folder:
        for number, item in enumerate(items):
            if tables:
                path = Path(folder) / f"table_{number}{FRAME}"
                inputs.names[path] = _kind(item) + (f" {number + 1}" if len(items) > 1 else "")
                _write(item, path, rows, inputs.names[path])
                inputs.files.append(path)
            elif (url := remote.url_of(item)) is not None:
                for one in sorted(remote.expand_url(url), key=lambda text: number_order(Path(text))):
                    path = remote.fetch_file(one)
                    inputs.names[path] = one
                    inputs.files.append(path)
            else:
                inputs.files.append(item)
        try:
            yield inputs
        except BaseException as error:
            remote.rename_in(error, {str(path): name for path, name in inputs.names.items()})
            raise


def _is_table(item: Any) -> bool:
    package, kind = type(item).__module__.partition(".")[0], type(item).__name__
    known = (package, kind) in (("polars", "LazyFrame"), ("pandas", "DataFrame"))
    return (
        known
        or any(hasattr(item, name) for name in ("__arrow_c_stream__", "__arrow_c_array__", "to_reader", "scanner"))
        or (hasattr(item, "with_format") and hasattr(item, "iter"))
    )


def _kind(item: Any) -> str:
    """Return the type of an object with its package, such as ``polars.DataFrame``."""
    package = type(item).__module__.partition(".")[0].strip("_")
    return type(item).__name__ if package in ("builtins", "main") else f"{package}.{type(item).__name__}"


def _write(table: Any, path: Path, rows: int | None, name: str) -> None:
    try:
        frame = _lazy(table)
        if rows is not None:
            frame = frame.head(rows)
        texts = [name for name, kind in frame.collect_schema().items() if kind in _AS_TEXT]
        frame = frame.with_columns(pl.col(texts).cast(pl.String))
        with full_disk():
            frame.sink_parquet(path, maintain_order=True, compression="lz4", row_group_size=_GROUP_ROWS)
    except OSError as error:
        if error.errno is None:  # raised by the producer of the stream
            raise DataError(f"{name} cannot be read: {reason_of(error)}.") from error
        raise DataError(
            f"{name} cannot be written to {path.parent} ({error.strerror or error}). Let TMPDIR name a disk with room."
        ) from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {_reason(table, error)}. {_ADVICE}") from error


def _reason(table: Any, error: Exception) -> str:
    """Return why a table cannot be read; for a pandas column of several types, its name and the types."""
    if type(table).__module__.startswith("pandas"):
        for place, name in enumerate(table.columns):
            column = table.iloc[:, place]
            if column.dtype != object:
                continue
            kinds: Mapping[str, object] = {type(value).__name__: value for value in column.dropna()}
            if len(kinds) > 1 and set(kinds) != {"int", "float"}:
                return f"its column {name!r} holds values of several types ({', '.join(sorted(kinds))})"
    return reason_of(error).rstrip(".")


def arrow_of(table: Any) -> Any:
    """Return a pandas frame or a single batch as a PyArrow table, other objects as they are."""
    if type(table).__module__.startswith("pandas"):
        return pa.Table.from_pandas(table, preserve_index=False)
    if hasattr(table, "__arrow_c_array__") and not hasattr(table, "__arrow_c_stream__"):
        return pa.Table.from_batches([pa.record_batch(table)])
    return table


def _lazy(table: Any) -> pl.LazyFrame:
    """Return a table or stream as a lazy frame that is read once, batch by batch."""
    if isinstance(table, pl.LazyFrame | pl.DataFrame):
        return table.lazy()
    table = arrow_of(table)
    if isinstance(table, pa.RecordBatchReader):
        return _stream(table)
    if hasattr(table, "with_format"):
        table = _hugging_face(table)
    if hasattr(table, "scanner"):  # a PyArrow dataset
        table = table.scanner()
    return _stream(table.to_reader() if hasattr(table, "to_reader") else pa.RecordBatchReader.from_stream(table))


def _hugging_face(dataset: Any) -> pa.RecordBatchReader:
    """Return the rows that a dataset of Hugging Face shows: its Arrow table may have more of them, in another order."""
    if dataset.features is None:  # of a stream: each row would have types of its own
        raise ValueError("it has no features. Make it with features=datasets.Features(...)")
    tables = dataset.with_format("arrow").iter(batch_size=_GROUP_ROWS)
    schema = dataset.features.arrow_schema
    return pa.RecordBatchReader.from_batches(
        schema, (one for table in tables for one in table.cast(schema).to_batches())
    )


def _stream(reader: Any) -> pl.LazyFrame:
    schema = pl.DataFrame(pl.from_arrow(reader.schema.empty_table())).schema
    return from_batches(schema, lambda: (pl.DataFrame(pl.from_arrow(batch)).cast(schema) for batch in reader))
