"""Typed rows in Parquet, with the features of the row itself; and beside them what labels, times and splits need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from stoker.base.engine import reason_of
from stoker.base.errors import DataError
from stoker.base.units import listed
from stoker.prep.features.base import Derivation, leading
from stoker.prep.features.pipeline import apply_feature, check_present
from stoker.prep.parse.frames import BadLine, Block, Field, frame_block
from stoker.prep.parse.layout import Layout, kept_frame
from stoker.prep.schema import Schema
from stoker.prep.stages.row_store import RowStore
from stoker.prep.stages.task import KEPT

__all__ = ["RowsSink", "check_columns_of", "make_rows", "raw_fields"]

_LINE = "__line"  # row of the block that a row was made of
_PREFERRED = ("string", "int", "hex", "float")  # which of several types of a raw column features see


def raw_fields(schema: Schema) -> list[Field]:
    """What to read of lines: the raw columns of the schema, as it types them, and those of features alone."""
    return _read_by(schema)[0]


def _read_by(schema: Schema) -> tuple[list[Field], dict[str, Derivation]]:
    """:func:`raw_fields`, and of the columns that are numbers for a feature only, which one it is."""
    made = {output for feature in schema.feature for output in feature.outputs}
    read = {column for feature in schema.feature for column in feature.inputs}
    fields = [
        replace(item, optional=item.optional and item.column not in read)
        for item in Layout(schema).fields
        if item.column not in made
    ]
    own = [item for item in fields if not item.kept]
    readers: dict[str, Derivation] = {}
    for feature in schema.feature:
        for column in feature.inputs:
            kinds = {item.kind for item in own if item.column == column and item.separator is None}
            if column in made:
                continue
            if column in feature.numbers and not kinds & {"int", "float", "datetime"}:
                own.append(Field(column=column, kind="float"))
                readers[column] = feature
            elif not kinds:
                own.append(Field(column=column, kind="string"))
    return list(dict.fromkeys([*own, *(item for item in fields if item.kept)])), readers


def check_columns_of(schema: Schema, columns: Sequence[str], name: str) -> None:
    """Whether all that features and the schema read is among the columns of ``name`` or made by features.

    Raises:
        SchemaError: a feature reads a column that is not, or makes one that is. DataError: one of the schema's.
    """
    present = list(columns)
    for feature in schema.feature:
        check_present(feature, present, name)
        present += feature.outputs
    for item in Layout(schema).fields:
        if item.column not in present:
            raise DataError(f"{name} have no column {item.column!r}. They have: {listed(present)}.")


def make_rows(schema: Schema, frame: pl.DataFrame, file: str) -> tuple[pl.DataFrame, dict[str, Any], list[BadLine]]:
    """The rows of a frame with the leading features; labels, times and splits; and the rows that cannot be used, by
    their place in the frame, if any."""
    lazy = frame.with_row_index(_LINE).lazy()
    for feature in schema.feature[: leading(schema.feature)]:
        lazy = apply_feature(lazy, feature)
    try:
        made = lazy.collect()
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"{file}: {_culprit(schema, frame)} cannot be worked out: {reason_of(error)}. docs/features.md describes "
            "the kinds."
        ) from error
    layout = Layout(schema, keys_only=True)
    block = frame_block(made, list(dict.fromkeys([*layout.fields, *_parsed_later(schema, made)])))
    keys = layout.arrays(block, file)
    places = made.get_column(_LINE).gather([bad.line for bad in block.bad]).to_list()
    bad = [
        BadLine(line=place, reason=one.reason, text=one.text, label=one.label)
        for place, one in zip(places, block.bad, strict=True)
    ]
    return made.drop(_LINE), keys, bad


def _parsed_later(schema: Schema, made: pl.DataFrame) -> list[Field]:
    """Texts that leading features made and columns of the schema take as numbers: here one that is none costs its line,
    behind all features it would cost the run."""
    texts = {
        output
        for feature in schema.feature[: leading(schema.feature)]
        for output in feature.outputs
        if made.schema[output] == pl.String
    }
    return [item for item in Layout(schema).fields if item.column in texts and item.kind != "string"]


def _culprit(schema: Schema, frame: pl.DataFrame) -> str:
    """The first of the leading features that fails."""
    for feature in schema.feature[: leading(schema.feature)]:
        try:
            frame = apply_feature(frame.lazy(), feature).collect()
        except pl.exceptions.PolarsError:
            return feature.where
    return "features"


@dataclass(frozen=True, kw_only=True)
class RowsSink:
    """Keeps a block of lines as typed rows with their first features, and their keys beside."""

    schema: Schema
    store: RowStore
    kept: Mapping[str, Any]  # Polars' types of kept columns that typed files have in several

    def __call__(self, block: Block, file: str, path: Path) -> dict[str, Any]:
        if block.bad:
            readers = _read_by(self.schema)[1]
            block.bad = [_explained(one, readers) for one in block.bad]
        frame = self._typed(block)
        rows, keys, bad = make_rows(self.schema, frame, file)
        if bad:
            # A line of which one row is bad is bad; the rows that it made besides go with it.
            reasons = {one.line: one for one in reversed(bad)}
            kept = [row for row in range(frame.height) if row not in reasons]
            for row, one in reasons.items():
                line = int(block.row_line[row])
                block.bad.append(BadLine(line=line, reason=one.reason, text=block.text_at(line), label=one.label))
            block.bad.sort(key=lambda line: line.line)
            block.rows -= len(reasons)
            rows, keys, _ = make_rows(self.schema, frame[kept], file)
        return self.store.write(path, rows, keys, borrowed=True)  # the next block takes the memory of this one

    def _typed(self, block: Block) -> pl.DataFrame:
        """The block's columns once each: a moment as such, else the type that loses nothing. Texts that features want
        as numbers, too, which all are, come without the blanks around them that Polars cannot read."""
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
        """The raw columns that the schema keeps, of one type in all files, under names that no feature reads."""
        fields = [item for item in raw_fields(self.schema) if item.kept]
        frame = kept_frame(block, fields, moments)
        types: Any = {name: dtype for name, dtype in self.kept.items() if name in frame.columns}
        return frame.cast(types).rename(lambda name: f"{KEPT}{name}").get_columns()


def _explained(bad: BadLine, readers: Mapping[str, Derivation]) -> BadLine:
    """The bad line with the feature that wants a number, where no column of the schema does."""
    for column, feature in readers.items():
        if bad.reason.startswith(f"column {column}: ") and bad.reason.endswith("is not a number"):
            return replace(bad, reason=f"{bad.reason}, which {feature.where} wants")
    return bad


def _order(item: Field) -> int:
    if item.kind == "datetime":
        return -1
    return _PREFERRED.index(item.kind) if item.separator is None else len(_PREFERRED)
