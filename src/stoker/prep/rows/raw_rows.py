"""Read the rows to prepare: raw lines, or rows that a recipe derives from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import polars as pl

from stoker.base.checks import near
from stoker.base.engine import full_disk, reason_of
from stoker.base.errors import DataError
from stoker.base.units import listed
from stoker.prep.features.base import Derivation
from stoker.prep.features.store import StoredTable
from stoker.prep.like import Like
from stoker.prep.parse.frames import Block, Field, parquet_types
from stoker.prep.parse.ingest import Source
from stoker.prep.parse.layout import Layout
from stoker.prep.parse.quarantine import BadLineLimit
from stoker.prep.parse.sources import source_kind
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.first_pass import ingest
from stoker.prep.stages.parts import Part, atomic_path, checksum, write_part
from stoker.prep.stages.task import Progress, Task


@dataclass(kw_only=True)
class Rows:
    """Parts with the rows to prepare, and the parts of the user's files, for counts and quarantine."""

    blocks: list[Part]
    raw: list[Part] = field(default_factory=list)
    learned: Mapping[str, StoredTable] = field(default_factory=dict)  # by feature


def read_rows(task: Task) -> Rows:
    """Read every file into parts, through the recipe's derivation if it has one."""
    fields = task.layout.fields
    if task.recipe.derive is None:
        blocks = ingest(task, sources_of(task, fields), "parts", _PartSink(task.layout), task.limit)
        return Rows(blocks=blocks, raw=blocks)
    raw: list[Part] = []
    made = Source(
        number=0, path=write_derived(task, derivation(task, raw)), fields=fields, format=SourceFormat(kind="parquet"),
        name=f"rows that recipe {task.recipe.name} derives",
    )  # fmt: skip
    # Derived rows come from the recipe: a row that does not fit is a defect, so stop at once.
    limit = BadLineLimit(strict=True, remedy="Look for such a value in the input files, and fix or remove it.")
    return Rows(blocks=ingest(task, [made], "parts", _PartSink(task.layout), limit, stage="encode"), raw=raw)


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


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def derivation(task: Task, raw: list[Part]) -> pl.LazyFrame:
    """Check and type the raw lines of every input, add their parts to ``raw``, and return the rows of the recipe."""
    assert task.recipe.derive is not None
    frames: dict[str, pl.LazyFrame] = {}
    inputs = list(_match_inputs(task.recipe, task.files, task.like))
    total = _bytes_of(path for _, spec, paths in inputs for path in paths if not _is_parquet(path, spec))
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
    task.report(Progress(stage="derive", done=0, total=1, unit="steps"))
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
    task.report(Progress(stage="derive", done=1, total=1, unit="steps"))
    return path


def _is_parquet(path: Path, raw: RawInput) -> bool:
    return source_kind(path, raw.format.kind) == "parquet"


def _raw_frame(
    task: Task, done: list[Part], name: str, raw: RawInput, paths: Sequence[Path], total: int
) -> pl.LazyFrame:
    """Return one input of a recipe; ``total``: bytes of all text inputs."""
    optional = {*raw.labels, task.schema.label.column} & raw.columns.keys() if task.like is not None else set()
    parquet = [path for path in paths if _is_parquet(path, raw)]
    if parquet:
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
