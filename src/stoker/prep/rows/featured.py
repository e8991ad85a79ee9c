"""Compute derived features of the rows of a log, and write parts like those of any other log.

1. Type a line, or a row that a recipe derives, and compute its leading features (files in ``rows``).
2. Read its label, time and split (``keys``).
3. Compute the other features over all rows; fit those that need it on training rows (``passes``).
4. Join all columns into parts. Vocabularies, statistics and shards do not know about features.

Memory holds a block of rows, the fitted tables and, for window features, a partition of the groups. Every step is in
the journal, so that an interrupted run can continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa

from stoker.base.device import give_back_memory
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.base.units import listed
from stoker.dataset.manifest import describe_file
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import ROW, Derivation, leading
from stoker.prep.features.execute import Executor, check_present, derive, runs_of
from stoker.prep.features.fitted import LABEL, FittedTable
from stoker.prep.features.past import Past
from stoker.prep.features.store import StoredTable, write_table
from stoker.prep.fit.split_rules import SplitAssigner, no_training_row
from stoker.prep.parse.frames import (
    KEPT_TYPES,
    BadLine,
    Block,
    Field,
    MissingColumnError,
    common_types,
    frame_block,
    parquet_types,
)
from stoker.prep.parse.ingest import Source
from stoker.prep.parse.layout import SPLIT_CODES, Layout, kept_frame
from stoker.prep.parse.sources import source_kind
from stoker.prep.rows.negatives import NegativeSampler, item_hash
from stoker.prep.rows.raw_rows import ReadRows, derivation, ingest, sources_of, write_derived
from stoker.prep.rows.raw_rows import explained as recipe_explained
from stoker.prep.schema import Schema
from stoker.prep.stages.parts import LogPart, atomic_path, checksum, sibling, write_part, write_rows
from stoker.prep.stages.task import KEPT, StageProgress, Task

SPLIT = "__split"  # 0 train, 1 valid, 2 test, 255 dropped; UInt8
TIME = "__time"  # Int64, as in the keys of the rows
_SLICE = 2**17  # derived rows of one part
_LINE = "__line"  # row of the block that a row was made from
_PREFERRED = ("string", "int", "hex", "float")  # if a raw column is read as several types, features see the first


def featured_rows(task: Task) -> ReadRows:
    """Read the rows of a schema with features into parts; ``ReadRows.fitted_tables`` has the fitted tables."""
    raw: list[LogPart] = []
    parts = _derived(task, raw) if task.recipe.derive is not None else _lines(task, raw)
    if not any(part.rows for part in parts):
        raise UnusableInput("no row is left: the features of kind keep and pairs drop every one. Change the schema.")
    keys = _keys(task, parts)
    filled = [part for part in parts if part.rows]
    passes = FeaturePasses(task, filled, keys)
    passes.run()
    give_back_memory()
    return ReadRows(blocks=_parts(task, filled, passes), raw=raw, fitted_tables=passes.stored)


def _lines(task: Task, raw: list[LogPart]) -> list[LogPart]:
    """Read the rows of the raw files, block by block; return the parts of their keys."""
    _repeat_broken_steps(task)
    sources = sources_of(task, raw_fields(task.splitting), task.schema.feature)
    # All files of rows are read as one table, so a column has one type.
    kept = common_types(_kept_types(source) for source in sources) if task.schema.keep else {}
    sink = RowsSink(schema=task.splitting, kept=kept)
    try:
        blocks = ingest(task, sources, "rows", sink, task.limit)
    except MissingColumnError as error:
        features = task.schema.feature
        readers = [(one.where, name) for name in error.missing for one in features if name in one.inputs]
        why = f", which {readers[0][0]} reads" if readers else ""
        if readers and len(error.missing) > 1:
            why = f" ({readers[0][0]} reads {readers[0][1]})"
        outputs = [output for feature in features for output in feature.outputs]
        raise MissingColumnError(error.path, error.missing, error.present, why, outputs, error.advice) from None
    raw += blocks
    parts, start = [], 0
    for index, block in enumerate(blocks):
        made = int(task.journal.done[f"rows/{block.path.stem}"]["made"])
        parts.append(replace(block, index=index, start=start, rows=made, path=sibling(block.path)))
        start += made
    return parts


def _kept_types(source: Source) -> dict[str, pl.DataType]:
    """Return the types of the kept columns of a file."""
    fields = [item for item in source.fields if item.kept]
    if source_kind(source.path, source.format.kind) != "parquet":
        return {item.column: KEPT_TYPES[item.kind] for item in fields}
    there = parquet_types(source.path)
    return {item.column: there[item.column] for item in fields if item.column in there}


def _derived(task: Task, raw: list[LogPart]) -> list[LogPart]:
    """Read the rows that the recipe derives, a slice at a time."""
    rows = derivation(task, raw)
    name = f"rows that recipe {task.recipe.name} derives"
    with recipe_explained(task):
        columns = rows.collect_schema().names()
        check_columns_of(task.splitting, columns, name)
    derived = write_derived(task, rows)
    kept = [pl.col(name).alias(f"{KEPT}{name}") for name in task.schema.keep if name in columns]
    (task.work / "rows").mkdir(exist_ok=True)
    _repeat_broken_steps(task)

    def work(start: int) -> tuple[Path, dict[str, Any], bool]:
        file = task.work / "rows" / f"{start // _SLICE:06d}.parquet"
        if (done := task.journal.finished(f"rows/{file.stem}", file)) is not None:
            return file, done, True
        frame = pl.scan_parquet(derived).slice(start, _SLICE).collect().rechunk()
        made, keys, bad = make_rows(task.splitting, frame.with_columns(kept), name)
        if bad:
            raise DataError(
                f"{name}: row {start + bad[0].line + 1:,}: {bad[0].reason}. Look for such a value in the input files, "
                "and fix or remove it."
            )
        return file, write_rows(file, made, keys), False

    parts: list[LogPart] = []
    begin, count = 0, pl.scan_parquet(derived).select(pl.len()).collect().item()
    for file, record, reused in ordered_map(work, range(0, count, _SLICE), task.threads):
        if not reused:
            task.journal.add(f"rows/{file.stem}", record)
        task.reused += reused
        made = int(record["made"])
        parts.append(LogPart(index=len(parts), file=0, name=name, start=begin, rows=made, path=sibling(file)))
        begin += made
    return parts


def _repeat_broken_steps(task: Task) -> None:
    """Drop the journal records of steps whose keys are damaged, so that they are done again."""
    for step, record in list(task.journal.done.items()):
        if step.startswith("rows/"):
            path = sibling(task.work / f"{step}.parquet")
            if not path.exists() or checksum(path) != record["keys"]:
                del task.journal.done[step]


def _keys(task: Task, parts: Sequence[LogPart]) -> Path:
    """Write number, label, split and, if there is one, time of every row to a file; return its path."""
    path = task.work / "keys.arrow"
    if task.journal.finished("keys", path) is not None:
        task.reused += 1
        return path
    names = [file.name for file in task.files]
    splitter = SplitAssigner(task.splitting, parts, names)
    train = 0

    def tables() -> Iterator[pl.DataFrame]:
        nonlocal train
        for part in (part for part in parts if part.rows):
            split = splitter.assign(part)
            train += int((split == 0).sum())
            with part.open() as arrays:
                found = {LABEL: arrays["labels"].astype(np.float64), SPLIT: split}
                if "time" in arrays:
                    found[TIME] = np.array(arrays["time"])
            yield pl.DataFrame({ROW: np.arange(part.start, part.start + part.rows), **found})

    with atomic_path(path) as temporary:
        _write_blocks(temporary, tables())
        if not train and task.like is None:
            raise no_training_row(task.schema, sum(part.rows for part in parts))
    task.journal.add("keys", checksum(path))
    return path


class FeaturePasses:
    """Compute the features after the leading ones, and fit those that need it.

    Each pass writes the outputs of a run of features to one Arrow file, in the order of the rows.

    Args:
        task: the preparation.
        parts: keys of the rows in order, next to files with raw columns and leading features; none is empty.
        keys: Arrow file with ``__row``, ``__label`` and ``__split`` of the same rows.

    With ``like``, fitted features use the tables of that dataset. Window features continue from its stored state; the
    new dataset stores the state after the new rows.
    """

    def __init__(self, task: Task, parts: Sequence[LogPart], keys: Path) -> None:
        self.task, self.sizes = task, [part.rows for part in parts]
        self._rows, self._starts = [part.rows_path for part in parts], [0, *accumulate(self.sizes)]
        self.stored: dict[str, StoredTable] = {}
        self._files = [keys]
        self._folder = task.work / "passes"
        self._folder.mkdir(exist_ok=True)

    def run(self) -> None:
        """Compute all features; ``stored`` then has the fitted tables."""
        runs = runs_of(self.task.schema.feature)
        for number, features in enumerate(runs):
            self.task.report(StageProgress(stage="features", done=number, total=len(runs), unit="steps"))
            path = self._folder / f"{number:03d}.arrow"
            stored = self._finished(number, path)
            if stored is None:
                executor = self._executor()
                with atomic_path(path) as temporary:
                    _write_blocks(temporary, executor.run(features))
                stored = self._store(executor.fitted_tables)
                tables = {name: {"entry": one.entry, "facts": one.facts} for name, one in stored.items()}
                self.task.journal.add(f"pass {number}", {**checksum(path), "tables": tables})
            else:
                self.task.reused += 1
            self.stored |= stored
            self._files.append(path)
            give_back_memory()
        self.task.report(StageProgress(stage="features", done=len(runs), total=len(runs), unit="steps"))

    def _executor(self) -> Executor:
        like, threads, train = self.task.like, self.task.threads, pl.col(SPLIT) == SPLIT_CODES["train"]
        window = [one for one in self.task.schema.feature if isinstance(one, Past) and one.has_table]
        if like is None:
            keep = [one.name for one in window]
            return Executor(rows=self, threads=threads, train=train, folder=self._folder, keep_states=keep)
        return Executor(
            rows=self, threads=threads, given=like.fitted_tables, folder=self._folder, states=like.state,
            keep_states=[one.name for one in window if like.stores_state(one)], source=like.data.path,
        )  # fmt: skip

    def _finished(self, number: int, path: Path) -> dict[str, StoredTable] | None:
        """Return the tables of a pass that an earlier run finished, or None if a file is not whole."""
        done = self.task.journal.finished(f"pass {number}", path)
        if done is None:
            return None
        stored = {name: StoredTable(path=self._table(name), **one) for name, one in done["tables"].items()}
        whole = all(one.path.exists() and describe_file(one.path) == dict(one.entry) for one in stored.values())
        return stored if whole else None

    def _table(self, name: str) -> Path:
        return self.task.work / "features" / f"{name}.parquet"

    def _store(self, fitted_tables: Mapping[str, FittedTable]) -> dict[str, StoredTable]:
        """Write fitted tables to files for the dataset."""

        def work(name: str) -> StoredTable:
            entry = write_table(self._table(name), fitted_tables[name].table)
            return StoredTable(path=self._table(name), entry=entry, facts=fitted_tables[name].facts)

        return dict(zip(fitted_tables, ordered_map(work, fitted_tables, self.task.threads), strict=True))

    def whole(self) -> pl.LazyFrame:
        """Return all rows with the columns computed so far."""
        known = [pl.scan_ipc(file) for file in self._files]
        return pl.concat([pl.scan_parquet(self._rows), *known], how="horizontal")

    def part(self, block: int) -> pl.LazyFrame:
        """Return the rows of one file with the columns computed so far."""
        known = [pl.scan_ipc(file).slice(self._starts[block], self.sizes[block]) for file in self._files]
        return pl.concat([pl.scan_parquet(self._rows[block]), *known], how="horizontal")


def _write_blocks(path: Path, blocks: Iterable[pl.DataFrame]) -> None:
    """Write blocks of rows to an Arrow file, from which any slice can be read directly."""
    writer: Any = None
    try:
        for rows in blocks:
            table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
            writer = writer or pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _parts(task: Task, rows: Sequence[LogPart], passes: FeaturePasses) -> list[LogPart]:
    """Join all columns and write them as parts."""
    folder = task.work / "parts"
    folder.mkdir(exist_ok=True)
    made = {output for feature in task.schema.feature for output in feature.outputs}
    own = {f"{KEPT}{name}": pl.col(name) for name in task.schema.keep if name in made}
    columns = [own.get(name, pl.col(name)).alias(name) for name in task.layout.raw_columns if name != SPLIT]
    names = {code: name for name, code in SPLIT_CODES.items()}
    split = pl.col(SPLIT).replace_strict(names, return_dtype=pl.String)
    sampler, extra = None, []
    if task.negatives is not None:
        items = task.negatives.outputs_of_item(task.schema.feature)
        copied = [name for name in task.layout.raw_columns if name.removeprefix(KEPT) in items]
        extra = [item_hash(task.negatives.columns[0])]
        # Sampled rows are added when all features are computed, so that features count rows of the log only.
        read = (passes.part(number).select(*columns, split, *extra, ROW).collect() for number in range(len(rows)))
        sampler = NegativeSampler(task.negatives, copied, SPLIT, read)
    done_rows = 0

    def work(job: tuple[int, LogPart]) -> tuple[LogPart, Path, dict[str, Any], bool]:
        number, part = job
        path = folder / f"{part.index:06d}.part"
        if (done := task.journal.finished(f"parts/{path.stem}", path)) is not None:
            return part, path, done, True
        frame = passes.part(number).select(*columns, split, *extra).collect()
        if sampler is not None:
            frame = sampler.extended(frame, part.start)
        block = frame_block(frame, task.layout.fields, typed=True)
        if block.bad:
            place = f"{part.name}: row {part.start + block.bad[0].line + 1:,} of those with features"
            raise DataError(f"{place}: {block.bad[0].reason}. Fix the input, or the feature that makes the column.")
        return part, path, write_part(path, task.layout.arrays(block, part.name)), False

    blocks: list[LogPart] = []
    for part, path, record, reused in ordered_map(work, enumerate(rows), task.threads):
        if not reused:
            task.journal.add(f"parts/{path.stem}", record)
        task.reused += reused
        done_rows += part.rows
        task.report(StageProgress(stage="encode", done=done_rows, total=sum(passes.sizes), unit="rows"))
        blocks.append(replace(part, path=path, index=len(blocks)))
        if sampler is not None:
            with blocks[-1].open() as arrays:
                start = blocks[-2].start + blocks[-2].rows if len(blocks) > 1 else 0
                blocks[-1] = replace(blocks[-1], start=start, rows=len(arrays["labels"]))
    return blocks


def raw_fields(schema: Schema) -> list[Field]:
    """Return the fields to read of a line: raw columns of the schema and raw columns that only features read."""
    return _read_by(schema)[0]


def _read_by(schema: Schema) -> tuple[list[Field], dict[str, Derivation]]:
    """Return :func:`raw_fields`; and for each column that is a number only because of a feature, that feature."""
    made = {output for feature in schema.feature for output in feature.outputs}
    read = {column for feature in schema.feature for column in feature.inputs}
    fields = [
        replace(item, optional=item.optional and item.column not in read)
        for item in Layout(schema).fields
        if item.column not in made
    ]
    times = {item.column for item in fields if item.kind == "datetime" and schema.feature}  # texts are made of these
    own = [item for item in fields if not item.kept and (item.kind != "string" or item.column not in times)]
    readers: dict[str, Derivation] = {}
    for feature in schema.feature:
        for column in feature.inputs:
            kinds = {item.kind for item in own if item.column == column and item.separator is None}
            if column in made:
                continue
            if column in feature.numbers and not kinds & {"int", "float", "datetime"}:
                notation = schema.notation_of(column)
                own.append(Field(column=column, kind="float", decimal=schema.source.decimal, notation=notation))
                readers[column] = feature
            elif not kinds:
                own.append(Field(column=column, kind="string", notation=schema.notation_of(column)))
    for column in sorted((read & {*schema.as_text}) - made):
        own.append(Field(column=column, kind="string", notation=schema.notation_of(column)))
    return list(dict.fromkeys([*own, *(item for item in fields if item.kept)])), readers


def check_columns_of(schema: Schema, columns: Sequence[str], name: str) -> None:
    """Check that ``columns`` of ``name`` and the outputs of features include all that features and the schema read.

    Raises:
        SchemaError: a feature reads a missing column or makes an existing one.
        DataError: the schema reads a missing column.
    """
    present = list(columns)
    for feature in schema.feature:
        check_present(feature, present, name)
        present += feature.outputs
    for item in Layout(schema).fields:
        if item.column not in present:
            raise DataError(f"{name} have no column {item.column!r}. They have: {listed(present)}.")


def make_rows(schema: Schema, frame: pl.DataFrame, file: str) -> tuple[pl.DataFrame, dict[str, Any], list[BadLine]]:
    """Compute the leading features of the rows of a frame.

    Returns:
        The rows; their labels, times and splits; and the unusable rows as bad lines, with their place in the frame.
    """
    made = derive(frame.with_row_index(_LINE), schema.feature[: leading(schema.feature)], file=file)
    layout = Layout(schema, keys_only=True)
    block = frame_block(made, list(dict.fromkeys([*layout.fields, *_numbers_from_texts(schema, made)])))
    keys = layout.arrays(block, file)
    places = made.get_column(_LINE).gather([bad.line for bad in block.bad]).to_list()
    bad = [
        BadLine(line=place, reason=one.reason, text=one.text, label=one.label)
        for place, one in zip(places, block.bad, strict=True)
    ]
    return made.drop(_LINE), keys, bad


def _numbers_from_texts(schema: Schema, made: pl.DataFrame) -> list[Field]:
    """Return the fields that read a text from a leading feature as a number.

    If such a text is not a number, its line is bad. Found after all features, it would stop the run.
    """
    texts = {
        output
        for feature in schema.feature[: leading(schema.feature)]
        for output in feature.outputs
        if made.schema[output] == pl.String
    }
    return [item for item in Layout(schema).fields if item.column in texts and item.kind != "string"]


@dataclass(frozen=True, kw_only=True)
class RowsSink:
    """Write a block of lines as typed rows with their leading features, and their keys to a second file."""

    suffix: ClassVar[str] = ".parquet"
    anywhere: ClassVar[bool] = False  # features may depend on state of this process
    schema: Schema
    kept: Mapping[str, Any]  # kept column -> Polars type

    def __call__(self, block: Block, file: str, path: Path) -> dict[str, Any]:
        if block.bad:
            readers = _read_by(self.schema)[1]
            block.bad = [_name_reader(one, readers) for one in block.bad]
        frame = self.typed(block)
        rows, keys, bad = make_rows(self.schema, frame, file)
        if bad:
            # If one row of a line is bad, the line is bad, and its other rows are dropped.
            reasons = {one.line: one for one in reversed(bad)}
            kept = [row for row in range(frame.height) if row not in reasons]
            lines = [(int(block.row_line[row]), one) for row, one in reasons.items()]
            block.set_aside(
                BadLine(line=line, reason=one.reason, text=block.text_at(line), label=one.label) for line, one in lines
            )
            block.rows -= len(reasons)
            rows, keys, _ = make_rows(self.schema, frame[kept], file)
        return write_rows(path, rows, keys)

    def typed(self, block: Block) -> pl.DataFrame:
        """Return each column of the block once, times as such, others in the type that loses nothing.

        Texts that features read as numbers lose the blanks around them, which Polars cannot read.
        """
        layout = Layout(self.schema, keys_only=True)
        moments = None
        if layout.time in block.columns and layout.time is not None and layout.time.kind == "datetime":
            moments = pl.Series(layout.times(block)).cast(pl.Datetime("us"))  # lines without one are dropped here
        found: dict[str, Field] = {}
        for item in (item for item in block.columns if not item.kept):
            other = found.get(item.column)
            if other is None or _order(item) < _order(other):
                found[item.column] = item
        numbers = {column for feature in self.schema.feature for column in feature.numbers}
        made = []
        for name, item in found.items():
            series = block.columns[item]
            if item.kind == "datetime" and moments is not None:
                series = moments
            elif item.kind == "string" and item.separator is None and name in numbers:
                series = series.str.strip_chars()
            made.append(series.alias(name))
        return pl.DataFrame(made).hstack(self._kept(block, moments))

    def _kept(self, block: Block, moments: pl.Series | None) -> list[pl.Series]:
        """Return the kept raw columns, of one type in all files, under names that no feature reads."""
        fields = [item for item in raw_fields(self.schema) if item.kept]
        frame = kept_frame(block, fields, moments)
        types: Any = {name: dtype for name, dtype in self.kept.items() if name in frame.columns}
        return frame.cast(types).rename(lambda name: f"{KEPT}{name}").get_columns()


def _name_reader(bad: BadLine, readers: Mapping[str, Derivation]) -> BadLine:
    """Add to a bad line the feature that needs a number, if no column of the schema does."""
    for column, feature in readers.items():
        if bad.reason.startswith(f"column {column}: ") and bad.reason.endswith("is not a number"):
            return replace(bad, reason=f"{bad.reason}, which {feature.where} needs")
    return bad


def _order(item: Field) -> int:
    if item.kind == "datetime":
        return -1
    return _PREFERRED.index(item.kind) if item.separator is None else len(_PREFERRED)
