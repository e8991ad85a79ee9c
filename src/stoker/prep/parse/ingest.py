"""Open a raw file: find its columns, and read its blocks as typed rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stoker.base.errors import DataError
from stoker.prep.features.base import Derivation, column_taken
from stoker.prep.parse.delimited import TextParser
from stoker.prep.parse.frames import BadLine, Block, Field, check_columns, parquet_block, parquet_cuts, parquet_types
from stoker.prep.parse.json_lines import first_keys, json_block
from stoker.prep.parse.sources import LineBlock, check_text, first_line, line_blocks, plain_name, source_kind
from stoker.prep.source_format import SourceFormat

PARQUET_ROWS = 2**18  # rows of a Parquet file in a part, roughly
PARQUET_VALUES = 2**23  # values of a part: fewer rows if there are many columns


@dataclass(kw_only=True)
class Source:
    """One raw file and how to read it."""

    number: int
    path: Path
    fields: Sequence[Field]
    format: SourceFormat
    name: str = ""  # for messages and the quarantine; empty: the path as given
    features: Sequence[Derivation] = ()  # their outputs must not be columns of the file
    kind: str = ""  # csv | parquet | jsonl
    absent: Sequence[str] = ()  # optional columns that the file lacks
    _parser: TextParser | None = None  # of delimited text

    def __post_init__(self) -> None:
        self.name = self.name or str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "path": self.path.absolute()}  # a worker may run in another directory

    def open(self) -> None:
        """Read the header, the Parquet schema or the keys of the first object.

        Raises:
            DataError: a column of the schema is missing or occurs twice.
            SchemaError: the file has a column that a feature makes.
        """
        self.kind = source_kind(self.path, self.format.kind)
        names = file_columns(self.path, self.format)
        separator = _separator(self.path, self.format)
        optional = {item.column for item in self.fields if item.optional}
        if self.kind == "csv" and self.format.columns and optional:
            # A file without header may lack optional columns: the first line shows it.
            fewer = [name for name in names if name not in optional]
            if len(first_line(self.path, "latin-1").split(separator)) == len(fewer):  # latin-1 reads any byte
                names = fewer
        for feature in self.features:
            for column in feature.outputs:
                if column in names:
                    raise column_taken(feature, column, f"the lines of {self.name}")
        if self.kind == "jsonl":
            return
        self.absent = [item.column for item in self.fields if item.optional and item.column not in names]
        needed = dict.fromkeys(item.column for item in self.fields if not item.optional or item.column in names)
        check_columns(self.path, list(needed), names, separator if self.kind == "csv" else None)
        if self.kind == "csv":
            self._parser = TextParser(
                names, self.fields, separator=separator, quote=self.format.quote, null_values=self.format.null_values
            )

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, int, Callable[[], Block]]]:
        """Yield the number of every block, its size for the progress, and its reader."""
        if self.kind == "parquet":
            cuts = parquet_cuts(self.path, min(PARQUET_ROWS, PARQUET_VALUES // max(len(self.fields), 1)))
            size, total = self.path.stat().st_size, sum(rows for _, rows in cuts)
            for number, (start, rows) in enumerate(cuts):
                yield number, size * (start + rows) // total - size * start // total, partial(
                    parquet_block, self.path, self.fields, start, rows, self.format.null_values
                )  # fmt: skip
            return
        header = self._parser is not None and not self.format.columns
        quotes = self._parser is not None and self.format.quote is not None
        lines = line_blocks(
            self.path.absolute(), block_bytes=block_bytes, convert=self._convert, header=header,
            cut=self._parser.cut if self._parser is not None and quotes else None,
        )  # fmt: skip
        for number, block in enumerate(lines):
            yield number, block.size, partial(self._read_text, block, header=header and not number)

    def _convert(self, lines: bytes) -> bytes:
        """Convert lines of the file to UTF-8 with a separator of one byte."""
        if self.format.encoding == "latin-1":
            lines = lines.decode("latin-1").encode()
        return lines if self._parser is None else self._parser.join(lines)

    def _read_text(self, text: LineBlock, *, header: bool) -> Block:
        if self._parser is None:
            block = json_block(text.load(), self.fields, self.format.null_values)
        else:
            block = self._parser.parse(text.load(), header=header)
        if text.damage is not None:
            block.bad.append(BadLine(line=block.lines, reason=text.damage, text="", broken=True))
            block.lines += 1
        return block


def file_columns(path: Path, given: SourceFormat) -> list[str]:
    """Return the columns of a file, from its Parquet schema, ``given``, its header, or its first object.

    Raises:
        DataError: the file cannot be read.
    """
    kind = source_kind(path, given.kind)
    if kind == "parquet":
        return list(parquet_types(path))
    check_text(path)
    if kind == "jsonl":
        return first_keys(path)
    if given.columns:
        return list(given.columns)
    line = first_line(path, given.encoding)
    if not line.strip():
        raise DataError(f"{path}:1: the first line is empty, and should name the columns. Delete it.")
    return _header_names(line, _separator(path, given), given.quote)


def _separator(path: Path, given: SourceFormat) -> str:
    return given.separator or ("\t" if plain_name(path).lower().endswith((".tsv", ".txt")) else ",")


def _header_names(line: str, separator: str, quote: str | None) -> list[str]:
    """Return the names in a header; a quoted name may contain the separator."""
    names = line.split(separator)
    if quote and quote in line and len(separator) == 1:
        with suppress(csv.Error):  # a carriage return within the line
            names = next(csv.reader([line], delimiter=separator, quotechar=quote))
            cut = [name.strip() for name in names]
            return [name[1:-1] if name[:1] == name[-1:] == quote else name for name in cut]
    return [name.strip().strip(quote or "") for name in names]
