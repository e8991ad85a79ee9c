"""First pass: raw files to typed parts, in parallel, resumable, with every bad line accounted for."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from stoker.base.errors import DataError
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import Derivation, column_taken
from stoker.prep.parse.delimited import TextParser
from stoker.prep.parse.frames import (
    BadLine,
    Block,
    Field,
    check_columns,
    parquet_block,
    parquet_cuts,
    parquet_types,
)  # fmt: skip
from stoker.prep.parse.json_lines import first_keys, json_block
from stoker.prep.parse.quarantine import BadLineLimit, write_bad_lines
from stoker.prep.parse.sources import LineBlock, check_text, first_line, line_blocks, source_kind
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import Part, is_whole
from stoker.prep.stages.task import Progress, Task

__all__ = ["Sink", "Source", "file_columns", "ingest"]

PARQUET_ROWS = 2**18  # rows of a Parquet file that make one part, about; fewer of many columns:
PARQUET_VALUES = 2**23


@dataclass(kw_only=True)
class Source:
    """One raw file and how to read it."""

    number: int
    path: Path
    fields: Sequence[Field]
    format: SourceFormat
    name: str = ""  # for messages and the quarantine; empty: the path as it was given
    features: Sequence[Derivation] = ()  # which may make no column that the file has
    kind: str = ""  # csv | parquet | jsonl
    absent: Sequence[str] = ()  # optional columns that the file lacks
    _parser: TextParser | None = None  # of delimited text

    def __post_init__(self) -> None:
        self.name = self.name or str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "path": self.path.absolute()}  # a worker may run in another directory

    def open(self) -> None:
        """Look at the header, the Parquet schema or the keys of the first object.

        Raises:
            DataError: a column that the schema names is not there, or there twice. SchemaError: one that a feature
                makes is there.
        """
        self.kind = source_kind(self.path, self.format.kind)
        names = file_columns(self.path, self.format)
        separator = _separator(self.path, self.format)
        optional = {item.column for item in self.fields if item.optional}
        if self.kind == "csv" and self.format.columns and optional:
            # A file without header may lack optional columns: its first line shows whether it does.
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
        check_columns(self.path, list(needed), names)
        if self.kind == "csv":
            self._parser = TextParser(
                names, self.fields, separator=separator, quote=self.format.quote, null_values=self.format.null_values
            )

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, int, Callable[[], Block]]]:
        """Yield number, size for the progress and reader of every block."""
        if self.kind == "parquet":
            cuts = parquet_cuts(self.path, min(PARQUET_ROWS, PARQUET_VALUES // max(len(self.fields), 1)))
            per_row = self.path.stat().st_size / max(sum(rows for _, rows in cuts), 1)
            for number, (start, rows) in enumerate(cuts):
                yield number, int(rows * per_row), partial(parquet_block, self.path, self.fields, start, rows)
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
        """Return lines of the file as the parsers want them."""
        if self.format.encoding == "latin-1":
            lines = lines.decode("latin-1").encode()
        return lines if self._parser is None else self._parser.join(lines)

    def _read_text(self, text: LineBlock, *, header: bool) -> Block:
        if self._parser is None:
            block = json_block(text.load(), self.fields)
        else:
            block = self._parser.parse(text.load(), header=header)
        if text.damage is not None:
            block.bad.append(BadLine(line=block.lines, reason=text.damage, text="", broken=True))
            block.lines += 1
        return block


def file_columns(path: Path, given: SourceFormat) -> list[str]:
    """Return the columns of a file: of its Parquet schema, ``given``, of its header, or the keys of its first object.

    Raises:
        DataError: the file cannot be read.
    """
    kind = source_kind(path, given.kind)
    if kind == "parquet":
        return list(parquet_types(path))
    check_text(path)
    if kind == "jsonl":
        return first_keys(path)
    return list(given.columns) or _header_names(first_line(path, given.encoding), _separator(path, given), given.quote)


def _separator(path: Path, given: SourceFormat) -> str:
    plain = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return given.separator or ("\t" if plain.endswith((".tsv", ".txt")) else ",")


def _header_names(line: str, separator: str, quote: str | None) -> list[str]:
    """Return the names in a header; those in quotes may hold the separator."""
    names = line.split(separator)
    if quote and quote in line and len(separator) == 1:
        with suppress(csv.Error):  # a carriage return within the line
            names = next(csv.reader([line], delimiter=separator, quotechar=quote))
            cut = [name.strip() for name in names]
            return [name[1:-1] if name[:1] == name[-1:] == quote else name for name in cut]
    return [name.strip().strip(quote or "") for name in names]


class Sink(Protocol):
    """Writes a block to a path; returns the journal's record."""

    suffix: ClassVar[str]  # of the path
    anywhere: ClassVar[bool]  # any process can run it

    def __call__(self, block: Block, file: str, path: Path) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class _BlockStep:
    """A block to parse, in any process."""

    name: str
    source: Source
    path: Path
    size: int
    read: Callable[[], Block]
    sink: Sink

    def is_whole(self, record: Mapping[str, Any]) -> bool:
        return is_whole(self.path, record) and (not record["bad"] or self.path.with_suffix(".bad").exists())

    def make(self) -> dict[str, Any]:
        block = self.read()
        record = self.sink(block, self.source.name, self.path)
        if block.bad:
            write_bad_lines(self.path.with_suffix(".bad"), block.bad)
        broken = any(bad.broken for bad in block.bad)
        return {**record, "rows": block.rows, "lines": block.lines, "bad": len(block.bad), "broken": broken}


def ingest(
    task: Task,
    sources: Sequence[Source],
    name: str,
    sink: Sink,
    limit: BadLineLimit,
    *,
    stage: str = "read",
    total: int | None = None,
) -> list[Part]:
    """Turn every block of every source into a part, a file ``name``/... of the work directory.

    Args:
        task: the preparation.
        sources: the files in order.
        name: of the folder.
        sink: writes the parts.
        limit: what bad lines are allowed.
        stage: what the progress calls it.
        total: bytes of the stage; None: those of the sources.

    Raises:
        DataError: a bad line where none is allowed, more bad lines than allowed, a file that breaks off where a share
            is allowed, or a label that is neither 0 nor 1 where no share is.
    """
    directory = task.work / name
    directory.mkdir(parents=True, exist_ok=True)
    for source in sources:
        source.open()
    _check_agreement(sources)
    if total is None:
        total = sum(source.path.stat().st_size for source in sources)

    def steps() -> Iterator[_BlockStep]:
        for source in sources:
            for number, size, read in source.blocks(task.block_bytes):
                stem = f"{source.number:05d}.{number:06d}"
                path = directory / f"{stem}{sink.suffix}"
                yield _BlockStep(name=f"{name}/{stem}", source=source, path=path, size=size, read=read, sink=sink)

    parts: list[Part] = []
    start, lines = 0, Counter[int]()
    # No more of them, though those that wait for Polars' threads do nothing: every frame in work is memory to touch.
    for step, record in task.run(steps(), executor=task.executor if sink.anywhere else None):
        source = step.source
        part = Part(
            path=step.path, index=len(parts), file=source.number, name=source.name, start=start,
            lines_before=lines[source.number], **{key: record[key] for key in ("rows", "lines", "bad", "broken")},
        )  # fmt: skip
        limit.add(part)
        parts.append(part)
        start += part.rows
        lines[source.number] += part.lines
        task.read[stage] += step.size
        task.report(Progress(stage=stage, done=task.read[stage], total=total, unit="bytes"))
    if not start:
        which = "The only line is bad" if limit.bad == 1 else f"All {limit.bad:,} lines are bad, the first"
        reason = f" {which}: {limit.first}." if limit.bad else ""
        names = ", ".join(source.name for source in sources[:3])
        advice = " ".join(limit.reasons().remedies) or "Check the files, the separator and the columns."
        raise UnusableInput(f"there is no usable row in {names}.{reason} {advice}")
    limit.check()
    return parts


def _check_agreement(sources: Sequence[Source]) -> None:
    """Refuse files of which only some have an optional column; JSON lines may lack any key."""
    columns = [source for source in sources if source.kind != "jsonl"]
    lacking = [source for source in columns if source.absent]
    having = [source for source in columns if not source.absent]
    if lacking and having:
        raise DataError(
            f"{lacking[0].name} has no column {lacking[0].absent[0]!r}, but {having[0].name} has. Prepare files "
            "with labels and files without them one after the other."
        )
