"""Small tables from files, every line checked: what metadata is read by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import DataError

if TYPE_CHECKING:
    import polars as pl

    from stoker.data.columns import Block
    from stoker.data.ingest import Source
    from stoker.data.schema import SourceFormat

__all__ = ["open_table", "read_table"]


def open_table(path: str | Path, columns: Mapping[str, str], *, format: SourceFormat | None = None) -> Source:
    """The file, with its columns looked at. Arguments and errors as of :func:`read_table`."""
    from stoker.data.columns import Field
    from stoker.data.ingest import Source
    from stoker.data.schema import SourceFormat

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

    from stoker.data.frames import block_frame
    from stoker.data.ordered import ordered_map
    from stoker.data.sources import BLOCK_BYTES

    path = Path(path)
    source = open_table(path, columns, format=format)

    def work(job: tuple[int, int, Callable[[], Block]]) -> tuple[pl.DataFrame, Block]:
        block = job[2]()
        for column in block.columns.values():  # the next block of this thread takes the memory of this one
            column.values = None if column.values is None else column.values.copy()
        return block_frame(block, list(columns)), block

    # Blocks of a small file are small, so that every thread has some.
    size = min(BLOCK_BYTES, max(2**16, path.stat().st_size // (4 * threads)))
    frames, before = [], 0
    for frame, block in ordered_map(work, source.blocks(size), threads):
        if block.bad:
            bad = block.bad[0]
            raise DataError(f"{path}:{before + bad.line + 1}: {bad.reason}. Mend the line, or remove it.")
        before += block.lines
        frames.append(frame)
    return pl.concat(frames)
