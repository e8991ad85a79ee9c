"""Parquet files: where they are cut into parts, and the typed columns of these.

A reader of some rows of a row group decodes its dictionaries, and fills memory with all columns before the first is
used. So where a file has row groups enough for all threads, each is read by one of them, column by column, for all
parts that it is cut into: of a column of texts only its distinct ones, and numbers go where the part keeps them while
the processor's cache still has them. What PyArrow does not read that way (lists, moments, decimals, huge row groups),
and files of few row groups, Polars reads, some rows at a time; the columns are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.columns import TEXT_CUT, Block, Field, RawColumn
from stoker.data.dictionaries import DictionaryPiece, dictionary_column
from stoker.data.frames import field_column, frame_block, merge_wrong
from stoker.data.part_store import Arena
from stoker.data.transforms import compact
from stoker.errors import DataError

__all__ = ["Room", "RowGroups", "arrow_memory", "parquet_columns", "parquet_groups", "parquet_rows"]

_GROUP_BYTES = 2**28  # of a column that is read at once
_VALUES = 2**27  # of all columns that are read at a time by all threads: a gibibyte, as parts have most narrower


class Room(Protocol):
    """Where columns go that only shards need of a part."""

    @property
    def narrowed(self) -> frozenset[Field]:
        """Columns of numbers that a part keeps in the narrowest type."""
        ...

    def arena(self, rows: int) -> Arena:
        """The memory of a part of so many rows."""
        ...


@contextmanager
def arrow_memory() -> Iterator[None]:
    """Let Arrow take memory that it gets back soon: its other allocators touch pages anew for every column."""
    before = pa.default_memory_pool()
    try:
        chosen = pa.jemalloc_memory_pool()
    except NotImplementedError:  # not on every system
        chosen = before
    pa.set_memory_pool(chosen)
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def parquet_rows(path: Path) -> int:
    """Rows of a Parquet file."""
    try:
        return int(pl.scan_parquet(path).select(pl.len()).collect().item())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, error) from error


def parquet_columns(path: Path) -> list[str]:
    """Column names of a Parquet file."""
    try:
        return pl.scan_parquet(path).collect_schema().names()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as Parquet: {error}.")


@dataclass(frozen=True)
class RowGroups:
    """Rows that are read together: those of some row groups, or of a part of one."""

    path: Path
    cuts: tuple[tuple[int, int], ...]  # first row and number of rows of each part
    footer: Any = None  # of the file; None: Polars reads, as they are not whole row groups
    numbers: range = range(0)  # of the row groups

    def blocks(self, fields: Sequence[Field], wanted: Sequence[int], room: Room | None = None) -> Iterator[Block]:
        """The typed columns of the cuts with the numbers ``wanted``.

        Args:
            fields: what to read.
            wanted: which of the cuts.
            room: where columns go that are kept narrow.

        Raises:
            DataError: a damaged file, or a column that cannot be read as its field.
        """
        if self.footer is None:
            for number in wanted:
                yield _framed(self.path, fields, *self.cuts[number])
        else:
            yield from _Reading(self, fields, [self.cuts[number] for number in wanted], room).blocks()


def parquet_groups(path: Path, most: int, columns: int, threads: int) -> list[RowGroups]:
    """How to read a file on some threads: in parts of about ``most`` rows at most, cut at row groups where possible.

    Which parts there are depends neither on the threads nor on how many columns are read.
    """
    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    found: list[RowGroups] = []
    start = held = first = 0

    def add(until: int) -> None:
        nonlocal start, held, first
        size = -(-held // max(1, round(held / most)))  # all alike, as a reader gives so many at a time
        cuts = tuple((start + begin, min(size, held - begin)) for begin in range(0, held, size))
        found.append(RowGroups(path, cuts, footer, range(first, until)))
        start, held, first = start + held, 0, until

    for number in range(footer.num_row_groups):
        rows = footer.row_group(number).num_rows
        if held and held + rows > most:
            add(number)
        held += rows
        if held > most:
            add(number + 1)
    if held:
        add(footer.num_row_groups)
    few = len(found) < 2 * threads
    return [one for whole in found for one in (_by_cut(whole) if few or _huge(whole, columns * threads) else [whole])]


def _huge(whole: RowGroups, columns: int) -> bool:
    """Whether some row groups may not fit the memory that reading is to take, with the columns of all threads."""
    groups = [whole.footer.row_group(number) for number in whole.numbers]
    if columns * sum(group.num_rows for group in groups) > _VALUES:
        return True
    return any(
        group.column(number).total_uncompressed_size > _GROUP_BYTES
        for group in groups
        for number in range(group.num_columns)
    )


def _by_cut(whole: RowGroups) -> list[RowGroups]:
    return [RowGroups(whole.path, (cut,)) for cut in whole.cuts]


def _frame(path: Path, names: Sequence[str], start: int, rows: int) -> pl.DataFrame:
    try:
        return pl.scan_parquet(path).select(names).slice(start, rows).collect(engine="streaming")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, error) from error


def _framed(path: Path, fields: Sequence[Field], start: int, rows: int) -> Block:
    names = list(dict.fromkeys(item.column for item in fields))
    try:
        return frame_block(_frame(path, names, start, rows), fields)
    except DataError as error:
        raise _of(path, error) from error


def _of(path: Path, error: DataError) -> DataError:
    return error if str(error).startswith(str(path)) else DataError(f"{path}: {error}")


class _Reading:
    """Reads whole row groups, a column at a time, for the parts that they are cut into."""

    def __init__(
        self, whole: RowGroups, fields: Sequence[Field], cuts: Sequence[tuple[int, int]], room: Room | None
    ) -> None:
        self._whole, self.fields, self.cuts = whole, fields, cuts
        self._names = list(dict.fromkeys(item.column for item in fields))
        self._begins = [start - whole.cuts[0][0] for start, _ in cuts]  # among the rows of the groups
        self._narrowed = frozenset() if room is None else room.narrowed
        self._arenas = [None if room is None else room.arena(rows) for _, rows in cuts]
        self._made: list[dict[Field, RawColumn]] = [{} for _ in cuts]
        self._wrong: list[dict[Field, dict[int, str]]] = [{} for _ in cuts]

    def blocks(self) -> Iterator[Block]:
        """A block for every cut."""
        left = []
        try:
            schema = self._whole.footer.schema.to_arrow_schema()
            kinds = {name: schema.field(name).type for name in self._names if schema.get_all_field_indices(name)}
            texts = [name for name, kind in kinds.items() if _textual(kind)]
            file = pq.ParquetFile(self._whole.path, metadata=self._whole.footer, read_dictionary=texts)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self._whole.path, error) from error
        with file:
            for name in self._names:
                try:
                    for number, source in self._texts(file, name) if name in texts else self._numbers(file, name):
                        self._add(name, number, source)
                except (pa.ArrowException, OSError, _OtherColumn):
                    left.append(name)  # Polars reads it, or says why it cannot
        for number, (start, rows) in enumerate(self.cuts):
            if left:
                frame = _frame(self._whole.path, left, start, rows)
                for name in left:
                    self._add(name, number, frame.get_column(name))
            yield self._block(number)

    def _texts(self, file: pq.ParquetFile, name: str) -> Iterator[tuple[int, RawColumn]]:
        """A column of texts, for each cut."""
        table = file.read_row_groups(list(self._whole.numbers), columns=[name], use_threads=False)
        column = _only(table, name)
        pieces = []
        for chunk in column.chunks:
            chunk.dictionary.validate(full=True)  # texts are UTF-8
            pieces.append(DictionaryPiece.of(chunk))
        for number, (begin, (_, rows)) in enumerate(zip(self._begins, self.cuts, strict=True)):
            yield number, dictionary_column(pieces, begin, rows)

    def _numbers(self, file: pq.ParquetFile, name: str) -> Iterator[tuple[int, pl.Series]]:
        """A column of numbers, for each cut: one is done with before the next is read."""
        most = max(rows for _, rows in self._whole.cuts)
        batches = file.iter_batches(
            batch_size=most, row_groups=list(self._whole.numbers), columns=[name], use_threads=False
        )
        held: Any = pa.array([])
        first = 0  # row of the groups at which it begins
        for number, (begin, (_, rows)) in enumerate(zip(self._begins, self.cuts, strict=True)):
            pieces, at, end = [], begin, begin + rows
            while at < end:
                if at >= first + len(held):
                    first += len(held)
                    held = _only(next(batches, None), name)
                    continue
                pieces.append(held.slice(at - first, end - at))
                at += len(pieces[-1])
            yield number, pl.Series(pl.from_arrow(pa.chunked_array(pieces), rechunk=False))

    def _add(self, name: str, number: int, source: pl.Series | RawColumn) -> None:
        for item in self.fields:
            if item.column != name:
                continue
            wrong: dict[int, str] = {}
            try:
                column = field_column(replace(source) if isinstance(source, RawColumn) else source, item, wrong)
            except DataError as error:
                raise _of(self._whole.path, error) from error
            arena = self._arenas[number]
            if arena is not None and item in self._narrowed and not wrong:
                column = RawColumn(narrow=compact(column.pieces or [column.numbers()], arena))
            self._made[number][item] = column
            if wrong:
                self._wrong[number][item] = wrong

    def _block(self, number: int) -> Block:
        start, rows = self.cuts[number]
        places = np.arange(rows, dtype=np.int64)
        made, self._made[number] = self._made[number], {}
        arena, self._arenas[number] = self._arenas[number], None
        block = Block(
            rows=rows, lines=rows, columns={item: made[item] for item in self.fields}, row_line=places, row_at=places,
            text_at=_Texts(self._whole.path, self._names, start, rows), arena=arena,
        )  # fmt: skip
        merge_wrong(block, [self._wrong[number][item] for item in self.fields if item in self._wrong[number]])
        return block


class _Texts:
    """Rows of a file as texts, for the quarantine: read when one is asked for, as few files have bad rows."""

    def __init__(self, path: Path, names: Sequence[str], start: int, rows: int) -> None:
        self._given = (path, names, start, rows)

    @cached_property
    def _rows(self) -> pl.DataFrame:
        return _frame(*self._given)

    def __call__(self, row: int) -> str:
        return str(self._rows.row(row))[:TEXT_CUT]


class _OtherColumn(Exception):
    """Of a type that is for Polars to read, or not what was asked for."""


def _only(found: pa.Table | pa.RecordBatch | None, name: str) -> Any:
    """The one column of what a reader gave."""
    if found is None or found.schema.names != [name]:
        raise _OtherColumn
    kind = found.schema.field(0).type
    texts = pa.types.is_dictionary(kind) and kind.index_type == pa.int32() and _textual(kind.value_type)
    if not (texts or pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
            or pa.types.is_boolean(kind)):  # fmt: skip
        raise _OtherColumn
    return found.column(0)


def _textual(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
