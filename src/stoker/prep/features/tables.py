"""Small tables from files, every line checked: what metadata is read by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.base.errors import DataError

if TYPE_CHECKING:
    import polars as pl

    from stoker.prep.parse.columns import Block, Field
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

    path = Path(path)
    source = open_table(path, columns, format=format)
    # Blocks of a small file are small, so that every thread has some.
    size = min(_BLOCK_BYTES, max(2**16, path.stat().st_size // (4 * threads)))
    whole = _Whole(path.stat().st_size)
    for number, (made, block) in enumerate(ordered_map(_part, enumerate(source.blocks(size)), threads)):
        if block.bad:
            bad = block.bad[0]
            raise DataError(f"{path}:{whole.lines + bad.line + 1}: {bad.reason}. Mend the line, or remove it.")
        whole.add(made, block.lines, block.rows, (number + 1) * size)
    return pl.DataFrame([whole.column(item).alias(item.column) for item in source.fields])


def _part(job: tuple[int, tuple[int, int, Callable[[], Block]]]) -> tuple[dict[Field, tuple[Any, ...]], Block]:
    """A block's columns in memory of their own: the next block of this thread takes that of this one. Of each the
    values, or the views of texts; where they are missing; and the long texts."""
    from stoker.prep.features.text_views import views_of_spans

    number, (_, _, read) = job
    block = read()
    made: dict[Field, tuple[Any, ...]] = {}
    for item, column in block.columns.items():
        if column.textual:
            starts, lengths = column.spans()
            views, held = views_of_spans(column.data, starts, lengths, number)
            made[item] = (views, lengths < 0, held)
        else:
            made[item] = (np.array(column.numbers()), column.absent().copy(), None)
    return made, block


class _Whole:
    """The blocks of a file, put together as they come: what a block took is free for the next.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size, self.lines, self._rows = size, 0, 0
        self._arrays: dict[Field, list[Any]] = {}
        self._texts: dict[Field, list[Any]] = {}

    def add(self, made: dict[Field, tuple[Any, ...]], lines: int, rows: int, read: int) -> None:
        """The columns of the next block; ``read``: bytes of the file that blocks so far had."""
        end = self._rows + rows
        for item, (*arrays, held) in made.items():
            if item not in self._arrays or end > len(self._arrays[item][0]):
                # As many rows as the file seems to have: memory that stays empty costs nothing.
                room = max(end, int(1.1 * end * max(self._size, read) / read))
                before = self._arrays.get(item)
                self._arrays[item] = [np.empty((room, *array.shape[1:]), array.dtype) for array in arrays]
                if before is not None:
                    for old, new in zip(before, self._arrays[item], strict=True):
                        new[: self._rows] = old[: self._rows]
            for array, new in zip(arrays, self._arrays[item], strict=True):
                new[self._rows : end] = array
            self._texts.setdefault(item, []).append(held)
        self._rows, self.lines = end, self.lines + lines

    def column(self, item: Field) -> pl.Series:
        """A column of all blocks, in one piece."""
        import polars as pl

        from stoker.prep.features.text_views import texts_of_views
        from stoker.prep.parse.columns import RawColumn
        from stoker.prep.parse.frames import column_series

        if not self._rows:  # a file may have no block at all, such as an empty one of JSON lines
            return pl.Series(
                item.column, [], {"hex": pl.UInt64, "int": pl.Int64, "float": pl.Float64}.get(item.kind, pl.String)
            )
        values, absent = (array[: self._rows] for array in self._arrays.pop(item))
        if item.kind == "string":
            return texts_of_views(values, self._texts[item], absent)
        return column_series(item, RawColumn(values=values, missing=absent))
