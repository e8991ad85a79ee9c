"""Read tables of metadata from files, checking every line; join frames from blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.prep.features.base import pl

if TYPE_CHECKING:
    from stoker.prep.parse.frames import Block
    from stoker.prep.parse.ingest import Source
    from stoker.prep.source_format import SourceFormat

_BLOCK_BYTES = 2**22  # that a thread reads at a time
_TYPES = {"hex": "UInt64", "int": "Int64", "float": "Float64", "string": "String"}  # of Polars


def open_table(path: str | Path, columns: Mapping[str, str], *, format: SourceFormat | None = None) -> Source:
    """Open the file and check that it has the columns. Arguments and errors are those of :func:`read_table`."""
    from stoker.prep.parse.frames import Field
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
    path: str | Path, columns: Mapping[str, str], *, format: SourceFormat | None = None, threads: int = 2
) -> pl.DataFrame:
    """Read columns of a file into memory, in any format that :func:`stoker.prepare` reads.

    Args:
        path: delimited text, Parquet or JSON lines; text also as .gz or .zst.
        columns: column -> hex, int, float or string; the results are UInt64, Int64, Float64 and String.
        format: of the file; None: by its name.
        threads: number of threads.

    Raises:
        DataError: the file or a column does not exist, or a line cannot be read.
    """
    path = Path(path)
    source = open_table(path, columns, format=format)

    def work(job: tuple[int, int, Callable[[], Block]]) -> tuple[pl.DataFrame, Block]:
        block = job[2]()
        frame = block.frame(list(columns))
        # The next block of this thread reuses the memory of this block's numbers: keep a copy.
        return frame.select(pl.all().gather(pl.int_range(pl.len()))), block

    # Blocks of a small file are small, so that every thread has some.
    size = min(_BLOCK_BYTES, max(2**16, path.stat().st_size // (4 * threads)))
    lines = 0
    frames = [pl.DataFrame(schema={name: getattr(pl, _TYPES[kind]) for name, kind in columns.items()})]
    for frame, block in ordered_map(work, source.blocks(size), threads):
        if block.bad:
            bad = block.bad[0]
            raise DataError(f"{path}:{lines + bad.line + 1}: {bad.reason}. Fix the line or remove it.")
        frames.append(frame)
        lines += block.lines
    return joined(frames)


def joined(blocks: list[pl.DataFrame]) -> pl.DataFrame:
    """Join the rows of blocks, column by column. ``blocks`` is emptied, so that at most one column exists twice."""
    if len(blocks) == 1:
        return blocks[0].rechunk()
    columns = [block.get_columns() for block in blocks]
    blocks.clear()
    return pl.DataFrame([pl.concat([some.pop(0) for some in columns], rechunk=True) for _ in list(columns[0])])
