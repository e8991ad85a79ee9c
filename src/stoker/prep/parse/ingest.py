"""First pass: raw files to typed parts, in parallel, resumable, with every bad line accounted for."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import Derivation, column_taken
from stoker.prep.parse.delimited import TextParser
from stoker.prep.parse.frames import (
    BadLine,
    Block,
    Field,
    absent_column,
    check_columns,
    parquet_block,
    parquet_cuts,
    parquet_types,
)  # fmt: skip
from stoker.prep.parse.json_lines import first_keys, json_block
from stoker.prep.parse.quarantine import BadLineLimit, write_bad_lines
from stoker.prep.parse.sources import BLOCK_BYTES, LineBlock, check_text, first_line, line_blocks, source_kind
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import Journal, is_whole

__all__ = ["IngestedBlock", "Source", "file_columns", "ingest"]

PARQUET_ROWS = 2**18  # rows of a Parquet file that make one part, about; fewer of many columns:
PARQUET_VALUES = 2**23
Sink = Callable[[Block, str, Path], Mapping[str, Any]]  # writes a block to a path; returns the journal's record


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
    absent: Sequence[Field] = ()  # optional fields whose column the file lacks
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
        self.absent = [item for item in self.fields if item.optional and item.column not in names]
        check_columns(self.path, list(dict.fromkeys(item.column for item in self._present)), names)
        if self.kind == "csv":
            self._parser = TextParser(
                names, self._present, separator=separator, quote=self.format.quote, null_values=self.format.null_values
            )

    @property
    def _present(self) -> list[Field]:
        """Fields whose column the file has."""
        return [item for item in self.fields if item not in self.absent]

    @property
    def _header(self) -> bool:
        return self._parser is not None and not self.format.columns

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, int, Callable[[], Block]]]:
        """Yield number, size for the progress and reader of every block."""
        if self.kind == "parquet":
            cuts = parquet_cuts(self.path, min(PARQUET_ROWS, PARQUET_VALUES // max(len(self.fields), 1)))
            per_row = self.path.stat().st_size / max(sum(rows for _, rows in cuts), 1)
            for number, (start, rows) in enumerate(cuts):
                yield number, int(rows * per_row), partial(self._read_parquet, start, rows)
            return
        blocks = line_blocks(
            self.path.absolute(), block_bytes=block_bytes, convert=self._convert, header=self._header,
            cut=self._parser.cut if self._parser is not None and self.format.quote else None,
        )  # fmt: skip
        for number, block in enumerate(blocks):
            yield number, block.size, partial(self._read_text, block, header=self._header and not number)

    def _convert(self, lines: bytes) -> bytes:
        """Return lines of the file as the parsers want them."""
        if self.format.encoding == "latin-1":
            lines = lines.decode("latin-1").encode()
        return lines if self._parser is None else self._parser.join(lines)

    def _read_parquet(self, start: int, rows: int) -> Block:
        return self._completed(parquet_block(self.path, self._present, start, rows))

    def _read_text(self, text: LineBlock, *, header: bool) -> Block:
        if self._parser is None:
            block = json_block(text.load(), self.fields)
        else:
            block = self._completed(self._parser.parse(text.load(), header=header))
        if text.damage is not None:
            block.bad.append(BadLine(line=block.lines, reason=text.damage, text="", broken=True))
            block.lines += 1
        return block

    def _completed(self, block: Block) -> Block:
        """Add the columns that the file lacks."""
        block.columns |= {item: absent_column(item, block.rows) for item in self.absent}
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


@dataclass(frozen=True, kw_only=True)
class IngestedBlock:
    """A finished part and where its lines stand in the file."""

    source: Source
    path: Path
    bad_path: Path
    rows: int
    lines: int
    bad: int
    lines_before: int  # lines of the file in the blocks before
    broken: bool  # the file breaks off at the last of the lines


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A block to parse, in any process."""

    step: str
    source: Source
    path: Path
    bad_path: Path
    size: int
    read: Callable[[], Block]
    sink: Sink
    done: Mapping[str, Any] | None  # the record of an earlier run


def _parse(job: _Job) -> tuple[Mapping[str, Any], bool]:
    """Write the part of a block; return its record, and whether an earlier run has left it."""
    done = job.done
    if done is not None and is_whole(job.path, done) and (not done["bad"] or job.bad_path.exists()):
        return done, True
    block = job.read()
    record = job.sink(block, job.source.name, job.path)
    if block.bad:
        write_bad_lines(job.bad_path, block.bad)
    found = {"rows": block.rows, "lines": block.lines, "bad": len(block.bad)}
    labels, broken = sum(bad.label for bad in block.bad), any(bad.broken for bad in block.bad)
    return {**record, **found, "labels": labels, "broken": broken}, False


def ingest(
    sources: Sequence[Source],
    directory: Path,
    journal: Journal,
    sink: Sink,
    *,
    limit: BadLineLimit,
    threads: int,
    executor: Executor | None = None,
    progress: Callable[[int], None],
    suffix: str = ".part",
    block_bytes: int = BLOCK_BYTES,
) -> tuple[list[IngestedBlock], int]:
    """Turn every block of every source into a part. Returns the parts and how many were there already.

    Args:
        executor: where blocks are parsed; the sink then has to be picklable. None: on threads.

    Raises:
        DataError: a bad line where none is allowed, more bad lines than allowed, a file that breaks off where a share
            is allowed, or a label that is neither 0 nor 1 where no share is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for source in sources:
        source.open()
    _check_agreement(sources)
    handed: deque[_Job] = deque()  # whose records are awaited

    def jobs() -> Iterator[_Job]:
        for source in sources:
            for number, size, read in source.blocks(block_bytes):
                name = f"{source.number:05d}.{number:06d}"
                step = f"{directory.name}/{name}"
                handed.append(_Job(
                    step=step, source=source, path=directory / f"{name}{suffix}", bad_path=directory / f"{name}.bad",
                    size=size, read=read, sink=sink, done=journal.done.get(step),
                ))  # fmt: skip
                yield handed[-1]

    finished: list[IngestedBlock] = []
    before, reused = {source.number: 0 for source in sources}, 0
    # No more of them, though those that wait for Polars' threads do nothing: every frame in work is memory to touch.
    for record, known in ordered_map(_parse, jobs(), threads, executor=executor):
        job = handed.popleft()
        number = job.source.number
        reused += known
        if not known:
            record = journal.add(job.step, record)
        kept = job.bad_path if record["bad"] else None
        limit.add(
            job.source.name, before[number], record["lines"], record["bad"], kept,
            labels=record["labels"], broken=record["broken"],
        )  # fmt: skip
        finished.append(IngestedBlock(
            source=job.source, path=job.path, bad_path=job.bad_path, lines_before=before[number],
            **{name: record[name] for name in ("rows", "lines", "bad", "broken")},
        ))  # fmt: skip
        before[number] += record["lines"]
        progress(job.size)
    if not any(block.rows for block in finished):
        which = "The only line is bad" if limit.bad == 1 else f"All {limit.bad:,} lines are bad, the first"
        reason = f" {which}: {limit.first}." if limit.bad else ""
        names = ", ".join(source.name for source in sources[:3])
        advice = " ".join(limit.reasons().remedies) or "Check the files, the separator and the columns."
        raise UnusableInput(f"there is no usable row in {names}.{reason} {advice}")
    limit.check()
    return finished, reused


def _check_agreement(sources: Sequence[Source]) -> None:
    """Refuse files of which only some have an optional column; JSON lines may lack any key."""
    columns = [source for source in sources if source.kind != "jsonl"]
    lacking = [source for source in columns if source.absent]
    having = [source for source in columns if not source.absent]
    if lacking and having:
        raise DataError(
            f"{lacking[0].name} has no column {lacking[0].absent[0].column!r}, but {having[0].name} has. Prepare files "
            "with labels and files without them one after the other."
        )
