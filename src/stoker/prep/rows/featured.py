"""Rows with derived features: typed rows, their splits, the features in passes, then parts as of any other log.

One row's way: a line, or a row that a recipe derives, is typed and gets the features of the row itself (``rows``); its
label, time and split are read (``keys``); the other features are worked out over all rows (``passes``), learned ones
fitted on training rows; last, all columns side by side become a part, and vocabularies, statistics and shards know
nothing of features. In memory lie a block of rows, the learned tables and, for features that look back, a share of the
groups. Every step is in the journal, so that an interrupted run goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stoker.base.device import give_back_memory
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import ROW
from stoker.prep.features.learned import LABEL
from stoker.prep.fit.split_rules import PartRows, Splitter
from stoker.prep.parse.frames import KEPT_TYPES, MissingColumnError, common_types, frame_block, parquet_types
from stoker.prep.parse.ingest import IngestedBlock, Source
from stoker.prep.parse.layout import SPLIT_CODES
from stoker.prep.parse.sources import source_kind
from stoker.prep.rows.feature_passes import SPLIT, TIME, FeaturePasses, write_pieces
from stoker.prep.rows.feature_rows import RowsSink, check_columns_of, make_rows, raw_fields
from stoker.prep.rows.raw_rows import Rows, derivation, explained, ingest_sources, sources_of
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import checksum
from stoker.prep.stages.row_store import sibling
from stoker.prep.stages.task import KEPT, Progress, Task

__all__ = ["featured_rows"]

_SLICE = 2**17  # rows of a derivation that make one part


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A file of rows and where they stand among all."""

    path: Path
    source: Source
    part: PartRows


def featured_rows(task: Task) -> Rows:
    """The rows of a schema with features, as parts; ``Rows.learned`` is what features learned."""
    raw: list[IngestedBlock] = []
    pieces = _derived(task, raw) if task.recipe.derive is not None else _lines(task, raw)
    count = sum(piece.part.rows for piece in pieces)
    if not count:
        raise UnusableInput("no row is left: the features of kind keep and pairs drop every one. Change the schema.")
    keys = _keys(task, pieces)
    filled = [piece for piece in pieces if piece.part.rows]
    paths, sizes = [piece.path for piece in filled], [piece.part.rows for piece in filled]
    passes = FeaturePasses(task, paths, sizes, keys, task.like.learned if task.like else None)
    passes.run()
    give_back_memory()
    return Rows(blocks=_parts(task, filled, passes), raw=raw, learned=passes.stored)


def _lines(task: Task, raw: list[IngestedBlock]) -> list[_Piece]:
    """Rows of the raw files, block by block."""
    _forget_broken(task)
    sources = sources_of(task, raw_fields(task.splitting), task.schema.feature)
    # Files of rows are read as one table, whose columns have one type.
    kept = common_types(_kept_types(source) for source in sources) if task.schema.keep else {}
    sink = RowsSink(schema=task.splitting, store=task.rows, kept=kept)
    try:
        blocks = ingest_sources(task, sources, "rows", sink, task.limit, suffix=".parquet", on_threads=True)
    except MissingColumnError as error:
        features = task.schema.feature
        readers = [(one.where, name) for name in error.missing for one in features if name in one.inputs]
        why = f", which {readers[0][0]} reads" if readers else ""
        if readers and len(error.missing) > 1:
            why = f" ({readers[0][0]} reads {readers[0][1]})"
        outputs = [output for feature in features for output in feature.outputs]
        raise MissingColumnError(error.path, error.missing, error.present, why, outputs) from None
    raw += blocks
    pieces, start = [], 0
    for index, block in enumerate(blocks):
        made = int(task.journal.done[f"rows/{block.path.stem}"]["made"])
        part = PartRows(index=index, file=block.source.number, start=start, rows=made, path=sibling(block.path))
        pieces.append(_Piece(path=block.path, source=block.source, part=part))
        start += made
    return pieces


def _kept_types(source: Source) -> dict[str, pl.DataType]:
    """Return the types of the kept columns of a file."""
    fields = [item for item in source.fields if item.kept]
    if source_kind(source.path, source.format.kind) != "parquet":
        return {item.column: KEPT_TYPES[item.kind] for item in fields}
    there = parquet_types(source.path)
    return {item.column: there[item.column] for item in fields if item.column in there}


def _derived(task: Task, raw: list[IngestedBlock]) -> list[_Piece]:
    """Rows that the recipe derives, a slice at a time."""
    rows = derivation(task, raw)
    name = f"rows that recipe {task.recipe.name} derives"
    with explained(task):
        check_columns_of(task.splitting, rows.collect_schema().names(), name)
    source = Source(number=0, path=task.work / "rows", fields=[], format=SourceFormat(), name=name, kind="parquet")
    folder = task.work / "rows"
    folder.mkdir(exist_ok=True)
    _forget_broken(task)

    def file_of(start: int) -> Path:
        return folder / f"{start // _SLICE:06d}.parquet"

    def finished(start: int) -> dict[str, Any] | None:
        file = file_of(start)
        return task.journal.finished(f"rows/{file.stem}", file)

    def work(job: tuple[int, pl.DataFrame | None]) -> tuple[Path, dict[str, Any], bool]:
        start, frame = job
        file, done = file_of(start), finished(start)
        if frame is None:
            assert done is not None
            return file, done, True
        kept = [pl.col(name).alias(f"{KEPT}{name}") for name in task.schema.keep if name in frame.columns]
        rows, keys, bad = make_rows(task.splitting, frame.rechunk().with_columns(kept), name)
        if bad:
            raise DataError(
                f"{name}: row {start + bad[0].line + 1:,}: {bad[0].reason}. Look for such a value in the input files, "
                "and mend or remove it."
            )
        record = task.rows.write(file, rows, keys, borrowed=False)
        # What is there was made by another derivation: of rows in another order, some would be there twice, some not.
        return file, record, done is not None and record == {name: done.get(name) for name in record}

    known = task.journal.finished("derived rows")
    starts = range(0, known["count"], _SLICE) if known is not None else None
    jobs: Iterator[tuple[int, pl.DataFrame | None]]
    if starts is not None and all(finished(start) is not None for start in starts):
        jobs = ((start, None) for start in starts)
    else:
        jobs = _slices(task, rows)
    task.report(Progress(stage="derive", done=0, total=1, unit="steps"))
    pieces: list[_Piece] = []
    begin = 0
    for file, record, reused in ordered_map(work, jobs, task.threads):
        if not reused:
            task.journal.add(f"rows/{file.stem}", record)
        task.reused += reused
        part = PartRows(index=len(pieces), file=0, start=begin, rows=int(record["made"]), path=sibling(file))
        pieces.append(_Piece(path=file, source=source, part=part))
        begin += part.rows
    task.report(Progress(stage="derive", done=1, total=1, unit="steps"))
    return pieces


def _slices(task: Task, rows: pl.LazyFrame) -> Iterator[tuple[int, pl.DataFrame | None]]:
    """The rows, some at a time, and the number of the first of them."""
    start, held = 0, pl.DataFrame()
    with explained(task):
        for some in _batches(rows):
            held = held.vstack(some) if held.width else some
            while held.height >= _SLICE:
                yield start, held[:_SLICE]
                start, held = start + _SLICE, held[_SLICE:]
    if held.height:
        yield start, held
    task.journal.add("derived rows", {"count": start + held.height})


def _batches(rows: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    """Yield the rows in order, some at a time."""
    if hasattr(rows, "collect_batches"):
        yield from rows.collect_batches(engine="streaming", maintain_order=True)
    else:  # Polars before 1.34
        yield rows.collect(engine="streaming")


def _forget_broken(task: Task) -> None:
    """Steps whose rows are whole but whose keys are not are done again."""
    for step, record in list(task.journal.done.items()):
        if step.startswith("rows/"):
            path = sibling(task.work / f"{step}.parquet")
            if not path.exists() or checksum(path) != record["keys"]:
                del task.journal.done[step]


def _keys(task: Task, pieces: Sequence[_Piece]) -> Path:
    """Number, label, split and time, if any, of every row, in one file."""
    path = task.work / "keys.arrow"
    if task.journal.finished("keys", path) is not None:
        task.reused += 1
        return path
    parts = [piece.part for piece in pieces]
    names = [file.name for file in task.files]
    splitter = Splitter(task.splitting, parts, names)
    train = 0

    def tables() -> Iterator[pl.DataFrame]:
        nonlocal train
        for part in (part for part in parts if part.rows):
            split = splitter.assign(part)
            if task.like is not None:
                split = np.where(split == SPLIT_CODES["drop"], split, np.uint8(SPLIT_CODES["test"]))
            train += int((split == 0).sum())
            with part.open() as arrays:
                found = {LABEL: arrays["labels"].astype(np.float64), SPLIT: split}
                if "time" in arrays:
                    found[TIME] = np.array(arrays["time"])
            yield pl.DataFrame({ROW: np.arange(part.start, part.start + part.rows), **found})

    beside = path.with_suffix(".tmp")
    write_pieces(beside, tables())
    if not train and task.like is None:
        raise UnusableInput(
            f"the split rule {task.schema.split.rule!r} leaves no training row of "
            f"{sum(part.rows for part in parts):,}. Change the split in the schema."
        )
    os.replace(beside, path)
    task.journal.add("keys", checksum(path))
    return path


def _parts(task: Task, pieces: Sequence[_Piece], passes: FeaturePasses) -> list[IngestedBlock]:
    """All columns side by side, in the form that vocabularies and shards are made of."""
    folder = task.work / "parts"
    folder.mkdir(exist_ok=True)
    made = {output for feature in task.schema.feature for output in feature.outputs}
    own = {f"{KEPT}{name}": pl.col(name) for name in task.schema.keep if name in made}
    columns = [own.get(name, pl.col(name)).alias(name) for name in task.layout.raw_columns if name != SPLIT]
    names = {code: name for name, code in SPLIT_CODES.items()}
    done_rows = 0

    def work(job: tuple[int, _Piece]) -> tuple[_Piece, Path, dict[str, Any], bool]:
        number, piece = job
        path = folder / f"{piece.part.index:06d}.part"
        if (done := task.journal.finished(f"parts/{path.stem}", path)) is not None:
            return piece, path, done, True
        frame = passes.part(number)
        split = pl.col(SPLIT).replace_strict(names, return_dtype=pl.String)
        block = frame_block(frame.select(*columns, split).collect(), task.layout.fields, typed=True)
        if block.bad:
            place = f"{piece.source.name}: row {piece.part.start + block.bad[0].line + 1:,} of those with features"
            raise DataError(f"{place}: {block.bad[0].reason}. Mend the input, or the feature that makes the column.")
        record = task.keep(path, block, piece.source.name)
        task.rows.release(piece.path)
        return piece, path, record, False

    blocks = []
    for piece, path, record, reused in ordered_map(work, enumerate(pieces), task.threads):
        if not reused:
            task.journal.add(f"parts/{path.stem}", record)
        task.reused += reused
        done_rows += piece.part.rows
        task.report(Progress(stage="encode", done=done_rows, total=passes.count, unit="rows"))
        rows = piece.part.rows
        blocks.append(IngestedBlock(
            source=piece.source, path=path, bad_path=path.with_suffix(".bad"), rows=rows, lines=rows, bad=0,
            lines_before=0, broken=False,
        ))  # fmt: skip
    return blocks
