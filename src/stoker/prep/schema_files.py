"""Match a schema with its files: replace patterns by the columns that they match, check kept columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from stoker.base.checks import fail
from stoker.base.units import listed
from stoker.prep.parse.frames import MissingColumnError
from stoker.prep.parse.ingest import file_columns
from stoker.prep.parse.sources import source_kind
from stoker.prep.recipe import Recipe
from stoker.prep.schema import COLUMNS, Schema


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
