"""Distinct values of a block, numbered by views, bytes or numbers; and where Parquet files are cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.base.errors import DataError
from stoker.dataset.group_writer import GroupWriter
from stoker.prep.parse import dictionaries
from stoker.prep.parse.columns import Field, RawColumn, split_list
from stoker.prep.parse.dictionaries import list_column, number_ints, number_texts, text_column
from stoker.prep.parse.frames import parquet_cuts

TEXTS = st.one_of(
    st.none(), st.sampled_from(["", "a", "b", "twelve bytes", "thirteen byte", "a longer text of many bytes"]),
    st.text(max_size=30),
)  # fmt: skip


def numbered(values: list[Any]) -> tuple[list[int], list[Any]]:
    """The definition: numbers from 1 by first occurrence, 0 where missing."""
    known: dict[Any, int] = {}
    return [0 if value is None else known.setdefault(value, len(known) + 1) for value in values], list(known)


def taken(column: RawColumn) -> list[str | None]:
    assert column.data is not None
    starts, lengths = column.spans()
    raw = column.data.tobytes()
    return [None if size < 0 else raw[at : at + size].decode()
            for at, size in zip(starts.tolist(), lengths.tolist(), strict=True)]  # fmt: skip


def check(column: RawColumn, values: list[str | None]) -> None:
    assert taken(column) == values
    codes = np.full(len(values), 77, np.uint32)
    codes, data, ends = number_texts(column, codes)
    expected, distinct = numbered(values)
    assert codes.tolist() == expected
    assert [data[begin:end].tobytes().decode() for begin, end in pairwise(ends.tolist())] == distinct


@given(values=st.lists(TEXTS, max_size=40), begin=st.integers(0, 3), chunks=st.integers(1, 3), made=st.booleans())
@example(values=["a longer text of many bytes"] * 5, begin=1, chunks=3, made=True)
def test_texts_of_a_column(values: list[str | None], begin: int, chunks: int, made: bool) -> None:
    """Slices, several chunks, and texts that an expression made, of which equal ones lie in several places."""
    series = pl.concat([pl.Series(values, dtype=pl.String)] * chunks)
    values = values * chunks
    if made:
        series, values = series + "é", [None if value is None else value + "é" for value in values]
    check(text_column(series[begin:]), values[begin:])
    assert text_column(series).codes is not None


@given(values=st.lists(TEXTS, max_size=40))
def test_texts_that_are_no_views(values: list[str | None]) -> None:
    """As older versions of Polars give them, and lines of text."""
    check(dictionaries._plain(pl.Series(values, dtype=pl.String)), values)


@given(
    values=st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 3)), max_size=40),
    dtype=st.sampled_from([pl.Int64, pl.Int8, pl.UInt32]),
)
def test_whole_numbers_as_texts(values: list[int | None], dtype: Any) -> None:
    series = pl.Series(values, dtype=pl.Int64).cast(dtype, strict=False)
    kept = series.to_list()
    check(text_column(series), [None if value is None else str(value) for value in kept])
    missing = series.is_null().to_numpy()
    codes = np.full(len(values), 77, np.uint32)
    found = number_ints(series.fill_null(0).cast(pl.Int64).to_numpy(), missing, codes)
    expected, distinct = numbered(kept)
    assert codes.tolist() == expected
    assert found.tolist() == distinct


@given(values=st.lists(TEXTS, max_size=40), data=st.data())
def test_rows_left_out_leave_their_texts_out(values: list[str | None], data: Any) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), np.bool_)
    column = text_column(pl.Series(values, dtype=pl.String)).take(keep)
    check(column, [value for value, kept in zip(values, keep, strict=True) if kept])


@given(
    sizes=st.lists(st.integers(1, 40), max_size=12), most=st.integers(1, 60),
)  # fmt: skip
def test_parquet_files_are_cut_at_row_groups(
    sizes: list[int], most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cuts") / "rows.parquet"
    with pq.ParquetWriter(path, pa.schema([("a", pa.int64())])) as writer:
        for size in sizes:
            writer.write_table(pa.table({"a": list(range(size))}), row_group_size=size)
    cuts = parquet_cuts(path, most)
    assert [start for start, _ in cuts] == [sum(rows for _, rows in cuts[:n]) for n in range(len(cuts))]
    assert sum(rows for _, rows in cuts) == sum(sizes)
    assert all(0 < rows <= 1.5 * most for _, rows in cuts)
    bounds = set(np.cumsum([0, *sizes]).tolist())
    if all(size <= most for size in sizes):
        assert {start for start, _ in cuts} <= bounds
        # No two neighbours would have fitted into one.
        assert all(one + two > most for (_, one), (_, two) in pairwise(cuts))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        parquet_cuts(tmp_path / "rows.parquet", 10)


@given(rows=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), cut=st.integers(1, 20))
def test_groups_by_first_appearance(rows: list[tuple[int, bool]], cut: int) -> None:
    writer = GroupWriter(10)
    found = [
        number for begin in range(0, len(rows), cut)
        for number in writer.add(
            np.array([name for name, _ in rows[begin : begin + cut]], np.int64),
            np.array([label for _, label in rows[begin : begin + cut]], np.float32),
        ).tolist()
    ]  # fmt: skip
    expected, names = numbered([name for name, _ in rows])
    assert found == [number - 1 for number in expected]
    counts = [sum(name == other for other, _ in rows) for name in names]
    assert writer.summary() == {
        "count": len(names), "largest": max(counts, default=0),
        "with_positive": len({name for name, label in rows if label}),
    }  # fmt: skip


LISTS = st.one_of(
    st.none(), st.sampled_from(["", "1|2|3", "3", "1||2", "4|5|6|7|8|9", "10000000000|-5", "1|x"]),
)  # fmt: skip


@given(
    values=st.lists(LISTS, max_size=30), kind=st.sampled_from(["string", "int", "float", "hex"]),
    keep=st.sampled_from(["first", "last"]), most=st.integers(1, 4),
)  # fmt: skip
def test_lists_of_numbered_texts(values: list[str | None], kind: str, keep: str, most: int) -> None:
    item = Field(column="c", kind=kind, separator="|", max_length=most, keep=keep)
    series = pl.Series(values, dtype=pl.String)
    wrong: dict[int, str] = {}
    expected_wrong: dict[int, str] = {}
    found = list_column(text_column(series), item, wrong)
    expected = split_list(dictionaries._plain(series), item, expected_wrong)
    assert wrong == expected_wrong
    assert found.counts is not None
    assert expected.counts is not None
    assert found.counts.tolist() == expected.counts.tolist()
    if kind == "string":
        check(found, taken(expected))
        assert found.codes is not None
    else:
        assert found.values is not None
        assert expected.values is not None
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.absent(), expected.absent())


@pytest.mark.parametrize("distinct", [8191, 8192, 8193, 20_000])
def test_more_values_than_a_small_table_takes(distinct: int) -> None:
    """Numbers, texts within views and behind them, texts without views."""
    draw = np.random.default_rng(distinct)
    values = np.concatenate([np.arange(distinct), draw.integers(0, distinct, 9_000)]) * 977
    codes = np.empty(len(values), np.uint32)
    found = number_ints(values, values < 3, codes)
    expected, known = numbered([None if value < 3 else value for value in values.tolist()])
    assert (codes.tolist(), found.tolist()) == (expected, known)
    for form in ("{}", "a text of some length {}"):
        texts: list[str | None] = [form.format(value) for value in values.tolist()]
        series = pl.Series(texts)
        check(text_column(series), texts)
        check(dictionaries._plain(series), texts)
