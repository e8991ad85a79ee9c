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
from stoker.dataset.row_files import GroupWriter
from stoker.prep.parse.dictionaries import number_ints, number_texts, text_hashes
from stoker.prep.parse.frames import Field, frame_block, parquet_cuts

TEXTS = st.one_of(
    st.none(), st.sampled_from(["", "a", "b", "twelve bytes", "thirteen byte", "a longer text of many bytes"]),
    st.text(max_size=30),
)  # fmt: skip


def numbered(values: list[Any]) -> tuple[list[int], list[Any]]:
    """The definition: numbers from 1 by first occurrence, 0 where missing."""
    known: dict[Any, int] = {}
    return [0 if value is None else known.setdefault(value, len(known) + 1) for value in values], list(known)


def check(series: pl.Series, values: list[str | None]) -> None:
    codes, data, ends = number_texts(series)
    expected, distinct = numbered(values)
    assert codes.dtype == np.uint32
    assert codes.tolist() == expected
    assert [data[begin:end].tobytes().decode() for begin, end in pairwise(ends.tolist())] == distinct


@given(values=st.lists(TEXTS, max_size=40), begin=st.integers(0, 3), chunks=st.integers(1, 3), made=st.booleans())
@example(values=["a longer text of many bytes"] * 5, begin=1, chunks=3, made=True)
def test_texts_of_a_column(values: list[str | None], begin: int, chunks: int, made: bool) -> None:
    """Slices, several chunks, and texts that an expression made."""
    series = pl.concat([pl.Series(values, dtype=pl.String)] * chunks)
    values = values * chunks
    if made:
        series, values = series + "é", [None if value is None else value + "é" for value in values]
    check(series[begin:], values[begin:])


@given(
    values=st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 3)), max_size=40),
)
def test_whole_numbers(values: list[int | None]) -> None:
    codes, found = number_ints(pl.Series(values, dtype=pl.Int64))
    expected, distinct = numbered(values)
    assert codes.dtype == np.uint32
    assert codes.tolist() == expected
    assert found.tolist() == distinct


@given(values=st.lists(TEXTS, max_size=20), seed=st.integers(0, 2**32))
def test_hashes_of_texts(values: list[str | None], seed: int) -> None:
    """FNV-1a of the bytes, finished as splitmix64 is; 0 where missing."""

    def hashed(text: str) -> int:
        h = 14695981039346656037 ^ seed
        for byte in text.encode():
            h = (h ^ byte) * 1099511628211 % 2**64
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
        return h ^ h >> 31

    found = text_hashes(pl.Series(values, dtype=pl.String), seed)
    assert found.tolist() == [0 if value is None else hashed(value) for value in values]


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
    st.none(), st.sampled_from(["", "1|2|3", "3", "1||2", "|", "4|5|6|7|8|9", "10000000000|-5", "1|x", " 7|+2"]),
)  # fmt: skip


@given(
    values=st.lists(LISTS, max_size=30), kind=st.sampled_from(["string", "int", "float"]),
    keep=st.sampled_from(["first", "last"]), most=st.integers(1, 4),
)  # fmt: skip
def test_lists_in_texts(values: list[str | None], kind: str, keep: str, most: int) -> None:
    """Empty items are left out before the first or last are kept; one that is no number makes the row bad."""
    item = Field(column="c", kind=kind, separator="|", max_length=most, keep=keep)
    block = frame_block(pl.DataFrame({"c": pl.Series(values, dtype=pl.String)}), [item])
    lists = [[one for one in (value or "").split("|") if one] for value in values]
    lists = [one[-most:] if keep == "last" else one[:most] for one in lists]
    good = [kind == "string" or "x" not in one for one in lists]
    read: Any = {"string": str, "int": int, "float": float}[kind]
    assert block.columns[item].to_list() == [
        list(map(read, one)) for one, fits in zip(lists, good, strict=True) if fits
    ]
    assert [bad.line for bad in block.bad] == [row for row, fits in enumerate(good) if not fits]
