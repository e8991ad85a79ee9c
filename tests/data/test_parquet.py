"""Parquet files read by row groups: the same blocks as Polars reads, row by row and column by column."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.data.columns import Block, Field, RawColumn
from stoker.data.parquet import RowGroups, arrow_memory, parquet_groups
from stoker.data.part_store import Arena
from stoker.data.schema import CategoricalColumn, DenseColumn, Label, Schema, SourceFormat
from stoker.errors import DataError

INTS = st.integers(-(2**62), 2**62)
TEXTS = st.one_of(st.sampled_from(["a", "b", "", "längerer Text als zwölf Bytes"]), st.text(max_size=20))
LISTS = st.lists(st.sampled_from(["x", "y", "z"]), max_size=3)
FLOATS = st.one_of(st.floats(width=32, allow_infinity=False), st.floats(allow_infinity=False), st.just(-0.0))
#: Of each kind of column its Arrow type, its values, and as what it is read.
KINDS: dict[str, tuple[pa.DataType, Any, tuple[str, ...]]] = {
    "small": (pa.int8(), st.integers(-128, 127), ("float", "int", "string", "hex")),
    "whole": (pa.int64(), INTS, ("float", "int", "string")),
    "half": (pa.float32(), st.floats(width=32, allow_infinity=False), ("float", "int")),
    "double": (pa.float64(), FLOATS, ("float",)),
    "infinite": (pa.float64(), st.sampled_from([1.0, math.inf, math.nan]), ("float",)),
    "flag": (pa.bool_(), st.booleans(), ("float", "int")),
    "text": (pa.string(), TEXTS, ("string",)),
    "wide text": (pa.large_string(), TEXTS, ("string",)),
    "number in text": (pa.string(), st.sampled_from(["1", "-2", "3.5", "x", ""]), ("float", "int", "hex")),
    "category": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["p", "q"]), ("string",)),
    "bytes": (pa.binary(), st.sampled_from([b"p", b"q", b"\xff"]), ("string",)),
    "list": (pa.list_(pa.string()), LISTS, ("list",)),
    "list in text": (pa.string(), st.sampled_from(["x|y", "", "z|x|y|z", "x"]), ("list",)),
    "moment": (pa.timestamp("us"), st.integers(0, 2**50), ("datetime",)),
}
_LONG = "a text of more than twelve bytes"


@st.composite
def tables(draw: Any) -> tuple[pa.Table, list[Field]]:
    """A table, and fields that read its columns, some of them twice."""
    rows = draw(st.integers(1, 30))
    arrays, fields = {}, []
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True)):
        kind, values, reads = KINDS[name]
        missing = st.none() if draw(st.booleans()) else st.nothing()
        arrays[name] = pa.array(draw(st.lists(values | missing, min_size=rows, max_size=rows)), kind)
        for read in draw(st.lists(st.sampled_from(reads), min_size=1, max_size=2, unique=True)):
            more: dict[str, Any] = {"kind": read}
            if read == "list":
                more = {"kind": "string", "separator": "|", "max_length": draw(st.integers(1, 3))}
            fields.append(Field(column=name, required=draw(st.booleans()), **more))
    return pa.table(arrays), fields


class Store:
    """Keeps columns of numbers narrow, as a preparation does."""

    def __init__(self, narrowed: list[Field]) -> None:
        self.narrowed = frozenset(narrowed)

    def arena(self, rows: int) -> Arena:
        return Arena(np.empty((8 * rows + 64) * max(1, len(self.narrowed)), np.uint8))


def widened(column: RawColumn) -> list[float]:
    """What a part reads of a column that is kept narrow: the greatest whole number is a missing value."""
    assert column.narrow is not None
    values = column.narrow.astype(np.float64)
    if column.narrow.dtype.kind == "u":
        values[column.narrow == np.iinfo(column.narrow.dtype).max] = np.nan
    return [float(value) for value in values]


def told(column: RawColumn) -> list[Any]:
    """The values of a column, one by one."""
    if column.narrow is not None:
        return [repr(value) for value in widened(column)]
    if column.textual:
        assert column.data is not None
        starts, lengths = column.spans()
        raw = column.data.tobytes()
        return [None if size < 0 else raw[at : at + size] for at, size in zip(starts, lengths, strict=True)]
    if column.missing is None:
        return [repr(float(value)) for value in column.numbers()]
    return [None if gone else int(value) for value, gone in zip(column.numbers(), column.missing, strict=True)]


def written(block: Block) -> Any:
    columns = {item: told(column) for item, column in block.columns.items()}
    counts = {item: None if c.counts is None else c.counts.tolist() for item, c in block.columns.items()}
    numbers = {
        item: (c.codes.tolist(), c.ends.tolist())
        for item, c in block.columns.items()
        if c.codes is not None and c.ends is not None
    }
    return block.rows, block.lines, columns, counts, numbers, block.row_line.tolist(), block.bad


def read(groups: list[RowGroups], fields: list[Field], room: Store | None = None) -> list[Any]:
    """All blocks, or what was said instead."""
    try:
        with arrow_memory():
            return [
                written(block) for one in groups for block in one.blocks(fields, range(len(one.cuts)), room)
            ]  # fmt: skip
    except DataError as error:
        return [str(error)]


@given(made=tables(), group=st.integers(1, 12), most=st.integers(1, 12), narrow=st.booleans(), plain=st.booleans())
def test_row_groups_are_read_as_polars_reads_them(
    made: tuple[pa.Table, list[Field]], group: int, most: int, narrow: bool, plain: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    table, fields = made
    path = tmp_path_factory.mktemp("groups") / "rows.parquet"
    pq.write_table(table, path, row_group_size=group, use_dictionary=not plain)
    by_group, by_cut = parquet_groups(path, most, 1, 0), parquet_groups(path, most, 1, 1000)
    assert [cut for one in by_group for cut in one.cuts] == [cut for one in by_cut for cut in one.cuts]
    assert all(one.footer is not None for one in by_group)
    assert all(one.footer is None and len(one.cuts) == 1 for one in by_cut)
    numbers = [item for item in fields if item.kind == "float"] if narrow else []
    assert read(by_group, fields, Store(numbers)) == read(by_cut, fields)


def test_row_groups_are_not_read_whole_where_threads_had_nothing_to_do_or_memory_is_short(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": np.arange(80)}), path, row_group_size=20)

    def whole(columns: int, threads: int) -> bool:
        return all(one.footer is not None for one in parquet_groups(path, 10, columns, threads))

    assert whole(10, 2)
    assert not whole(10, 3)  # four row groups
    assert not whole(2**26, 1)
    assert whole(2**22, 1)
    assert not whole(2**22, 2)


def test_only_the_wanted_parts_of_a_group(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": [f"{_LONG} {row // 3}" for row in range(20)]}), path, row_group_size=10)
    fields = [Field(column="a", kind="string")]
    (first, second) = parquet_groups(path, 4, 1, 1)
    assert first.cuts == ((0, 5), (5, 5))
    assert second.cuts == ((10, 5), (15, 5))
    (block,) = second.blocks(fields, [1])
    assert told(block.columns[fields[0]]) == [f"{_LONG} {row // 3}".encode() for row in range(15, 20)]


def test_two_entries_of_a_dictionary_may_be_one_text(tmp_path: Path) -> None:
    """Parts of several row groups have as many dictionaries."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": ["x", "y", "y", "z", "x", None]}), path, row_group_size=2)
    (whole,) = parquet_groups(path, 6, 1, 0)
    (block,) = whole.blocks([Field(column="a", kind="string")], [0])
    (column,) = block.columns.values()
    assert column.codes is not None
    assert column.codes.tolist() == [1, 2, 2, 3, 1, 0]


@pytest.mark.parametrize("groups", [2, 20])
def test_a_damaged_file_and_broken_texts(groups: int, tmp_path: Path) -> None:
    """However it is read, the error names the file."""
    path = tmp_path / "rows.parquet"
    schema = Schema(
        name="rows", label=Label(column="y"), dense=(DenseColumn(name="d"),),
        categorical=(CategoricalColumn(name="c", type="string"),), source=SourceFormat(kind="parquet"),
    )  # fmt: skip
    n = 400
    texts = pa.array([b"good"] * (n - 1) + [b"\xff\xfe"]).view(pa.string())
    table = pa.table({"y": [0.0, 1.0] * (n // 2), "d": np.arange(n) / 7, "c": texts})
    pq.write_table(table, path, row_group_size=n // groups)
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet: .*UTF-8"):
        stoker.prepare(schema, path, threads=1)
    pq.write_table(table.set_column(2, "c", pa.array(["good"] * n)), path, row_group_size=n // groups)
    raw = bytearray(path.read_bytes())
    raw[4 : len(raw) // 2] = bytes(len(raw) // 2 - 4)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet"):
        stoker.prepare(schema, path, threads=1)
