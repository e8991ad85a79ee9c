"""Small tables from files, every line checked: what metadata is read by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.errors import DataError

if TYPE_CHECKING:
    import polars as pl

    from stoker.prep.parse.columns import Block
    from stoker.prep.parse.ingest import Source
    from stoker.prep.source_format import SourceFormat

__all__ = ["open_table", "read_table"]

_BLOCK_BYTES = 2**22  # read at a time by each thread: what is made of more takes more fresh memory, and no less time


def open_table(path: str | Path, columns: Mapping[str, str], *, format: SourceFormat | None = None) -> Source:
    """The file, with its columns looked at. Arguments and errors as of :func:`read_table`."""
    from stoker.prep.parse.columns import Field
    from stoker.prep.parse.ingest import Source
    from stoker.prep.source_format import SourceFormat

    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {str(path)!r}. Check the path.")
    fields = [Field(column=column, kind=kind) for column, kind in columns.items()]
    source = Source(number=0, path=path, fields=fields, format=format or SourceFormat())
    source.open()
    return source


def read_table(
    path: str | Path,
    columns: Mapping[str, str],
    *,
    format: SourceFormat | None = None,
    threads: int = 2,
) -> pl.DataFrame:
    """Some columns of a file of any format that :func:`stoker.prepare` reads, in memory.

    Args:
        path: delimited text, Parquet or JSON lines; text also as .gz or .zst.
        columns: column -> hex, int, float or string; they come as UInt64, Int64, Float64 and String.
        format: of the file; None: by its name.
        threads: that read blocks of it.

    Raises:
        DataError: no such file or column, or the first line that cannot be read, with its number and reason.
    """
    import polars as pl

    from stoker.base.ordered import ordered_map
    from stoker.prep.parse.columns import RawColumn
    from stoker.prep.parse.frames import column_series

    path = Path(path)
    source = open_table(path, columns, format=format)
    # Blocks of a small file are small, so that every thread has some.
    size = min(_BLOCK_BYTES, max(2**16, path.stat().st_size // (4 * threads)))
    lines = 0
    pieces: dict[str, list[pl.Series]] = {
        item.column: [column_series(item, RawColumn.empty(item.kind, 0))] for item in source.fields
    }
    for block in ordered_map(_shared, source.blocks(size), threads):
        if block.bad:
            bad = block.bad[0]
            raise DataError(f"{path}:{lines + bad.line + 1}: {bad.reason}. Mend the line, or remove it.")
        for item, column in block.columns.items():
            pieces[item.column].append(column_series(item, column))
        lines += block.lines
    # One column after the other: each is there twice for a moment.
    return pl.DataFrame([pl.concat(pieces.pop(name)).rechunk().alias(name) for name in list(pieces)])


def _shared(job: tuple[int, int, Callable[[], Block]]) -> Block:
    """Read a block. Equal texts of a column are in memory once."""
    import polars as pl

    block = job[2]()
    for column in block.columns.values():
        if column.texts is not None:
            found = column.texts.to_arrow(compat_level=pl.CompatLevel.oldest()).dictionary_encode()
            column.texts = pl.Series(found.dictionary, dtype=pl.String).gather(pl.Series(found.indices))
    return block
