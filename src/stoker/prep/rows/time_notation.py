"""Check the format of the timestamp column before any row is used."""

from __future__ import annotations

from contextlib import suppress

import polars as pl

from stoker.base.errors import DataError
from stoker.prep.parse.frames import Field
from stoker.prep.parse.moments import UNKNOWN, check_format, read_moments, suggestions
from stoker.prep.rows.raw_rows import sources_of
from stoker.prep.stages.task import Task

_BLOCK = 2**16  # bytes of text to read at a time
_VALUES = 1_000  # values to check in all


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
        found = _first_values(task, Field(column=name, kind="datetime"))
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


def _first_values(task: Task, item: Field) -> tuple[str, pl.Series] | None:
    """Return the place of the first text of a column, and the first texts; None if the column is typed or empty."""
    for source in sources_of(task, [item]):
        source.open()
        before = 0
        for _, _, read in source.blocks(_BLOCK):
            block = read()
            texts = block.columns[item]
            if texts.dtype != pl.String and len(texts):
                return None
            if texts.count():
                line = before + int(block.row_line[texts.is_not_null().arg_true()[0]]) + 1
                return f"{source.name}:{line}", texts.drop_nulls().head(_VALUES)
            before += block.lines
    return None
