"""Look at the files before any row is used: columns that patterns match, kept columns, and how times are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from stoker.base.checks import fail
from stoker.base.errors import DataError
from stoker.base.units import listed
from stoker.prep.parse.floats import EXPONENT
from stoker.prep.parse.frames import Field, MissingColumnError, parquet_types
from stoker.prep.parse.ingest import Source, file_columns
from stoker.prep.parse.moments import UNKNOWN, check_format, read_moments, suggestions
from stoker.prep.parse.notation import MIXED, PLAIN, is_moment, notation_of, text_of_floats, written
from stoker.prep.parse.sources import source_kind
from stoker.prep.recipe import Recipe
from stoker.prep.rows.featured import raw_fields
from stoker.prep.rows.raw_rows import sources_of
from stoker.prep.schema import COLUMNS, Schema
from stoker.prep.stages.task import Task

_BLOCK = 2**16  # bytes of text to read at a time
_VALUES = 1_000  # values to check in all
_DAY_AND_TIME = "0000-00-00 00:00:00.000000"  # of a time without a zone in a table


def fitted_to(schema: Schema, recipe: Recipe, files: Sequence[Path]) -> Schema:
    """Replace each pattern of the schema by the columns of the first file that it matches.

    Raises:
        SchemaError: a pattern matches nothing, two patterns match one column, or a recipe derives the rows.
        DataError: the first file lacks a column that ``keep`` names, or cannot be read.
    """
    columns = [column for key in COLUMNS for column in getattr(schema, key)]
    patterns = [column for column in columns if column.pattern]
    if recipe.derive is not None:
        for column in patterns:
            fail(
                f"column {column.name!r}", "name",
                f"is a pattern, and the columns of the rows that recipe {recipe.name} derives are not known before. "
                "Name each column",
            )  # fmt: skip
        return schema
    if not patterns and not schema.keep:
        return schema
    present = file_columns(files[0], schema.source)
    made = [output for feature in schema.feature for output in feature.outputs]
    missing = [name for name in schema.keep if name not in (*present, *made, schema.label.column)]
    if missing and source_kind(files[0], schema.source.kind) != "jsonl":  # whose first object may lack any key
        raise MissingColumnError(files[0], missing, present, ", which keep names")
    patterns = [column for column in patterns if column.name not in present]
    named = {column.raw for column in columns if column not in patterns}
    named |= {schema.label.column, schema.group, schema.split.column, schema.timestamp and schema.timestamp.column}
    free = [name for name in present if name not in named]
    taken: dict[str, str] = {}  # column -> pattern
    for column in patterns:
        names = column.matches(free)
        where = f"column {column.name!r}"
        if not names:
            there = f"It has: {listed(present)}" + (f". Features make: {listed(made)}" if made else "")
            fail(where, "name", f"matches no column of {files[0]} besides those named elsewhere. {there}")
        for name in names:
            if name in taken:
                fail(where, "name", f"matches {name!r}, as {taken[name]!r} does. Narrow one of them")
            taken[name] = column.name

    def expanded(column: Any) -> list[Any]:
        return [replace(column, name=name) for name in column.matches(free)] if column in patterns else [column]

    parts: dict[str, Any] = {key: tuple(chain.from_iterable(map(expanded, getattr(schema, key)))) for key in COLUMNS}
    return replace(schema, **parts) if patterns else schema


def check_notation(task: Task) -> None:
    """Raise an error if a ``datetime`` column without a format is not in ISO 8601.

    The first values of the first file decide. If one of them is ISO 8601, the others are bad lines. Columns that a
    recipe or a feature makes are not checked.

    Raises:
        SchemaError: the format cannot be used.
        DataError: none of the values is ISO 8601.
    """
    timestamp = task.schema.timestamp
    if timestamp is None or timestamp.type != "datetime":
        return
    if timestamp.format is not None:
        check_format(timestamp.format)
        return
    if task.recipe.derive is not None:
        return
    name, found = timestamp.column, None
    with suppress(DataError):  # if a file cannot be read, the first pass explains it better
        found = _first_values(sources_of(task, [Field(column=name, kind="datetime")]))
    if found is None:
        return
    place, values = found
    if (read_moments(values, None) != UNKNOWN).any():
        return
    others = f", nor are the {len(values) - 1:,} values after it" if len(values) > 2 else ""
    say = " or ".join(suggestions(values)) or 'its format, such as format = "%d.%m.%Y %H:%M"'
    raise DataError(
        f"{place}: column {name}: {values[0][:40]!r} is not a date and time in ISO 8601 (2017-03-07, "
        f"2017-03-07T10:15:00+02:00){others}. Say in [timestamp] of the schema how the column is written: {say}."
    )


def with_one_notation(task: Task) -> Task:
    """Return a task whose text columns have one notation, if some files have numbers or times and others texts or days.

    Next to numbers no text of a vocabulary is a version. Texts say how times are written; else a day is its first time.
    """
    found: dict[str, str] = {}
    listed = {one.raw for one in task.schema.features if one.type == "string" and one.hash_buckets is None}
    listed = listed if task.recipe.derive is None else set()
    with suppress(DataError):  # if a file cannot be read, the first pass explains it better
        kinds = {path: source_kind(path, task.schema.source.kind) for path in task.files}
        types = {path: parquet_types(path) if kind == "parquet" else pl.Schema() for path, kind in kinds.items()}
        for name, item in {item.column: item for item in raw_fields(task.schema) if item.kind == "string"}.items():
            own = {path: _inner(types[path].get(name, pl.String())) for path in task.files}
            shapes = {_shape(kind) for kind in own.values() if kind != pl.Null}
            numbers = {path for path, kind in own.items() if kind.is_numeric() and "text" in shapes}
            if numbers and name not in listed and task.recipe.derive is None:
                _check_texts(task.schema, name, [one for one in sources_of(task, [item]) if one.path not in numbers])
            elif numbers and _first_values(one for one in sources_of(task, [item]) if one.path in numbers):
                found[name] = PLAIN
            if task.recipe.derive is not None or not any(kind.is_temporal() for kind in own.values()):
                continue
            if len(shapes) > 1 and "text" in shapes:
                first = _first_values(one for one in sources_of(task, [item]) if _shape(own[one.path]) == "text")
                if first is not None:
                    notation = notation_of(first[1])
                    found[name] = notation if is_moment(notation) else MIXED
                    continue
                shapes.remove("text")  # there is none
            if len(shapes) > 1:
                found[name] = _DAY_AND_TIME if shapes == {"date", "time"} else MIXED
        typed = [(name, kind) for each in types.values() for name, kind in each.items() if kind.is_numeric()]
        floats = listed & {name for name, kind in typed if kind.is_float()} - found.keys()
        _check_values(task.schema, {name for name, _ in typed}, floats)
    tables = {one.table_name for one in task.schema.features if found.get(one.raw) == PLAIN}
    found = {**{one.raw: PLAIN for one in task.schema.features if one.table_name in tables}, **found}
    return replace(task, schema=replace(task.schema, notation=found)) if found else task


def _check_values(schema: Schema, numbers: set[str], floats: set[str]) -> None:
    """Raise :class:`SchemaError` if a condition compares ids that are numbers in a file with a text that none has."""
    ids = {one.raw for one in schema.features if one.type == "string"} & numbers
    for feature, tested in ((one, getattr(one, "tested", "")) for one in schema.feature):
        for value in (values := getattr(feature, "values", ()) if tested in ids else ()):
            plain, number = written(pl.Series([value]), PLAIN)[0], re.fullmatch(r"-?\d+\.\d+", value)
            if tested in floats and (number := number or re.search(EXPONENT, value)):  # no text says how to write it
                plain = text_of_floats(pl.Series([float(value)]))[0]
            if plain not in (None, value, *values) and number:
                fail(feature.where, "values", f"holds {value!r}, and the column numbers: write {plain!r}")


def _check_texts(schema: Schema, column: str, sources: Sequence[Source]) -> None:
    """Raise :class:`SchemaError` if a condition is met by a number of a table, but not by its text in other files."""
    for feature in (one for one in schema.feature if getattr(one, "tested", "") == column):
        values = pl.Series(getattr(feature, "values", ()), dtype=pl.String)
        _, texts = _first_values(sources) or ("", values)
        met = written(texts, PLAIN).is_in(written(values, PLAIN).implode()) & ~texts.is_in(values.implode())
        for text in texts.filter(met).head(1):
            fail(
                feature.where, "values", f"meet the numbers of some files, but not the text {text!r} of others. Add it"
            )


def _inner(kind: pl.DataType) -> pl.DataType:
    """Return the type of the values of a column, perhaps of lists."""
    return _inner(kind.inner) if isinstance(kind, pl.List | pl.Array) else kind  # type: ignore[arg-type]


def _shape(kind: pl.DataType) -> str:
    """Return how texts of a type differ from those of others; times of any unit are alike."""
    if isinstance(kind, pl.Datetime):
        return "time" if kind.time_zone is None else "time with a zone"
    texts = (pl.String, pl.Categorical, pl.Enum, pl.Binary)
    return "date" if kind == pl.Date else "text" if kind in texts else str(kind)


def _first_values(sources: Iterable[Source]) -> tuple[str, pl.Series] | None:
    """Return the place of the first text of a column, and the first texts; None if the column is typed or empty."""
    for source in sources:
        source.open()
        [item] = source.fields
        before = 0
        for _, _, read in source.blocks(_BLOCK):
            block = read()
            texts = block.columns[item]
            texts = texts.list.first() if isinstance(texts.dtype, pl.List) else texts
            if texts.dtype != pl.String and len(texts):
                return None
            if texts.count():
                line = before + int(block.row_line[texts.is_not_null().arg_true()[0]]) + 1
                return f"{source.name}:{line}", texts.drop_nulls().head(_VALUES)
            before += block.lines
    return None
