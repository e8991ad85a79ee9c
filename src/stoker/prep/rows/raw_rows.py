"""Read the rows to prepare, raw lines or rows that a recipe derives from them, into typed parts.

Files are read in parallel, and resumable; every bad line is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import polars as pl

from stoker.base.checks import near
from stoker.base.engine import full_disk, reason_of
from stoker.base.errors import DataError
from stoker.base.units import listed
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import Derivation
from stoker.prep.features.store import StoredTable
from stoker.prep.like import Like
from stoker.prep.parse.frames import Block, Field, parquet_types
from stoker.prep.parse.ingest import Source
from stoker.prep.parse.layout import Layout
from stoker.prep.parse.quarantine import BadLineLimit, write_bad_lines
from stoker.prep.parse.sources import FRAME, source_kind
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import LogPart, atomic_path, checksum, is_whole, write_part
from stoker.prep.stages.task import StageProgress, Task


@dataclass(kw_only=True)
class ReadRows:
    """Parts with the rows to prepare, and the parts of the user's files, for counts and quarantine."""

    blocks: list[LogPart]
    raw: list[LogPart] = field(default_factory=list)
    fitted_tables: Mapping[str, StoredTable] = field(default_factory=dict)  # by feature


def read_rows(task: Task) -> ReadRows:
    """Read every file into parts, through the recipe's derivation if it has one."""
    fields = task.layout.fields
    if task.recipe.derive is None:
        blocks = ingest(task, sources_of(task, fields), "parts", _PartSink(task.layout), task.limit)
        return ReadRows(blocks=blocks, raw=blocks)
    raw: list[LogPart] = []
    made = Source(
        number=0, path=write_derived(task, derivation(task, raw)), fields=fields, format=SourceFormat(kind="parquet"),
        name=f"rows that recipe {task.recipe.name} derives",
    )  # fmt: skip
    # Derived rows come from the recipe: a row that does not fit is a defect, so stop at once.
    limit = BadLineLimit(strict=True, remedy="Look for such a value in the input files, and fix or remove it.")
    return ReadRows(blocks=ingest(task, [made], "parts", _PartSink(task.layout), limit, stage="encode"), raw=raw)


def sources_of(task: Task, fields: Sequence[Field], features: Sequence[Derivation] = ()) -> list[Source]:
    """Return the files of a task with the fields to read."""
    return [
        Source(
            number=number, path=path, fields=fields, format=task.schema.source, features=features,
            name=task.names.get(path, ""),
        )
        for number, path in enumerate(task.files)
    ]  # fmt: skip


@dataclass(frozen=True)
class _PartSink:
    layout: Layout
    suffix: ClassVar[str] = ".part"
    anywhere: ClassVar[bool] = True

    def __call__(self, block: Block, file: str, path: Path) -> dict[str, int]:
        return write_part(path, self.layout.arrays(block, file))


def derivation(task: Task, raw: list[LogPart]) -> pl.LazyFrame:
    """Check and type the raw lines of every input, add their parts to ``raw``, and return the rows of the recipe."""
    assert task.recipe.derive is not None
    frames: dict[str, pl.LazyFrame] = {}
    inputs = list(_match_inputs(task.recipe, task.files, task.like))
    texts = [path for _, spec, paths in inputs for path in paths if not _is_parquet(path, spec)]
    total = sum(path.stat().st_size for path in texts)
    for name, spec, paths in inputs:
        if paths:
            frames[name] = _raw_frame(task, raw, name, spec, paths, total)
    with explained(task):
        rows = task.recipe.derive(frames, task.schema)
        present = rows.collect_schema().names() if task.schema.keep else []
    made = [output for feature in task.schema.feature for output in feature.outputs]
    for column in task.schema.keep:
        if column not in (*present, *made):
            raise DataError(
                f"the rows that recipe {task.recipe.name} derives have no column {column!r}, which keep names. They "
                f"have: {listed(present)}.{near(column, [*present, *made])}"
            )
    return rows


@contextmanager
def explained(task: Task) -> Iterator[None]:
    """Turn errors of Polars into :class:`DataError` with the recipe and its files."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        names = ", ".join(str(path) for path in task.files[:3])
        raise DataError(
            f"recipe {task.recipe.name} cannot work with {names}: {reason_of(error)}. "
            "docs/recipes.md describes its input."
        ) from error


def write_derived(task: Task, rows: pl.LazyFrame) -> Path:
    """Write the rows of the recipe to a file."""
    path = task.work / "derived.parquet"
    task.report(StageProgress(stage="derive", done=0, total=1, unit="steps"))
    if task.journal.finished("derived", path) is None:
        for step in [step for step in task.journal.done if step.startswith("rows/")]:
            del task.journal.done[step]  # from an earlier derivation, whose rows may be in another order
        with explained(task), full_disk(), atomic_path(path) as temporary:
            rows.sink_parquet(
                temporary, maintain_order=True, engine="streaming", row_group_size=2**17, compression="lz4"
            )
        task.journal.add("derived", checksum(path))
    else:
        task.reused += 1
    task.report(StageProgress(stage="derive", done=1, total=1, unit="steps"))
    return path


def _is_parquet(path: Path, raw: RawInput) -> bool:
    return source_kind(path, raw.format.kind) == "parquet"


def _raw_frame(
    task: Task, done: list[LogPart], name: str, raw: RawInput, paths: Sequence[Path], total: int
) -> pl.LazyFrame:
    """Return one input of a recipe; ``total``: bytes of all text inputs."""
    optional = {*raw.labels, task.schema.label.column} & raw.columns.keys() if task.like is not None else set()
    if parquet := [path for path in paths if _is_parquet(path, raw)]:
        if len(parquet) < len(paths):
            raise DataError(f"the {name} files mix Parquet and text. Convert them to one of the two.")
        there = [parquet_types(path) for path in parquet]  # raises for a file that is not whole Parquet
        absent = [column for column in optional if all(column not in names for names in there)]
        return pl.scan_parquet(parquet).with_columns(pl.lit(None, pl.Float64).alias(column) for column in absent)
    fields = [
        Field(
            column=column, kind=kind, required=column in raw.required and column not in optional,
            optional=column in optional,
        )
        for column, kind in raw.columns.items()
    ]  # fmt: skip
    sources = [replace(one, format=raw.format) for one in sources_of(task, fields) if one.path in paths]
    labels = [item for item in fields if item.column in raw.labels]
    blocks = ingest(task, sources, f"raw-{name}", _RawSink(labels), task.limit, total=total)
    done += blocks
    return pl.scan_parquet([block.path for block in blocks])


@dataclass(frozen=True)
class _RawSink:
    labels: Sequence[Field]
    suffix: ClassVar[str] = ".parquet"
    anywhere: ClassVar[bool] = True

    def __call__(self, block: Block, file: str, path: Path) -> dict[str, int]:
        for item in self.labels:
            block.drop_labels(item)
        names = list(dict.fromkeys(item.column for item in block.columns))
        with atomic_path(path) as temporary, full_disk():
            block.frame(names).write_parquet(temporary, compression="lz4")
        return checksum(path)


def _match_inputs(
    recipe: Recipe, files: Sequence[Path], like: Like | None
) -> Iterator[tuple[str, RawInput, list[Path]]]:
    found = [(recipe.input_of(path.name), path) for path in files]
    if unused := [path for name, path in found if name is None]:
        patterns = [pattern for raw in recipe.inputs.values() for pattern in raw.files]
        raise DataError(f"recipe {recipe.name} has no use for {unused[0]}. It reads: {', '.join(patterns)}.")
    before = {} if like is None else recipe.lookups(source["file"] for source in like.data.manifest.get("sources", ()))
    for name, raw in recipe.inputs.items():
        matched = [path for own, path in found if own == name]
        if not matched and not raw.optional:
            raise DataError(
                f"recipe {recipe.name} needs its {name} file ({' or '.join(raw.files)}). "
                f"{recipe.example and 'For example: ' + recipe.example}"
            )
        if not matched and name in before.values():
            file = next(file for file, own in before.items() if own == name)
            raise DataError(
                f"{like and like.data.path} was prepared with a {name} file, {file}, and columns of the model are made "
                "from it. Give such a file too; it may be the same."
            )
        yield name, raw, matched


class Sink(Protocol):
    """Write a block to a path; return the record for the journal."""

    suffix: ClassVar[str]  # of the path
    anywhere: ClassVar[bool]  # whether any process can run it

    def __call__(self, block: Block, file: str, path: Path) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class _BlockStep:
    """Parse one block, in any process."""

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
) -> list[LogPart]:
    """Write every block of every source as a part, a file ``name``/... of the work directory.

    Args:
        task: the preparation.
        sources: the files in order.
        name: name of the folder.
        sink: writes the parts.
        limit: counts bad lines and stops if there are too many.
        stage: name of the stage in the progress.
        total: bytes of the stage; None: those of the sources.

    Raises:
        DataError: there are more bad lines than ``limit`` allows.
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

    parts: list[LogPart] = []
    start, lines = 0, Counter[int]()
    # Threads that wait for Polars are idle, but more threads would need more memory for their frames.
    for step, record in task.run(steps(), executor=task.executor if sink.anywhere else None):
        source = step.source
        part = LogPart(
            path=step.path, index=len(parts), file=source.number, name=source.name, start=start,
            lines_before=lines[source.number], **{key: record[key] for key in ("rows", "lines", "bad", "broken")},
        )  # fmt: skip
        limit.add(part)
        parts.append(part)
        start += part.rows
        lines[source.number] += part.lines
        task.read[stage] += step.size
        task.report(StageProgress(stage=stage, done=task.read[stage], total=total, unit="bytes"))
    if not start:
        which = "The only line is bad" if limit.bad == 1 else f"All {limit.bad:,} lines are bad, the first"
        reason = f" {which}: {limit.first}." if limit.bad else ""
        names = ", ".join(source.name for source in sources[:3])
        table = sources[0].path.suffix == FRAME
        usual = "A stream gives its rows only once." if table else "Check the files, the separator and the columns."
        advice = " ".join(limit.reasons().remedies) or usual
        raise UnusableInput(f"there is no usable row in {names}.{reason} {advice}")
    limit.check()
    return parts


def _check_agreement(sources: Sequence[Source]) -> None:
    """Raise :class:`DataError` if only some files have an optional column; JSON lines may lack any key."""
    columns = [source for source in sources if source.kind != "jsonl"]
    lacking = [source for source in columns if source.absent]
    having = [source for source in columns if not source.absent]
    if lacking and having:
        raise DataError(
            f"{lacking[0].name} has no column {lacking[0].absent[0]!r}, but {having[0].name} has. Prepare files "
            "with labels and files without them one after the other."
        )
