"""Codes in 8, 16 and 32 bits stand for the same ids, one by one, in bags and in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.prep.parse.code_columns import CodeColumns, code_type
from stoker.prep.schema import CategoricalColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat
from stoker.prep.write.encode_kernels import gather, gather_bags
from stoker.rewrite.vocabulary_files import read_vocabulary

KINDS = (np.uint8, np.uint16, np.uint32)


def test_the_narrowest_type_of_codes() -> None:
    assert [code_type(most).type for most in (0, 255, 256, 65535, 65536, 2**32 - 1)] == [
        np.uint8, np.uint8, np.uint16, np.uint16, np.uint32, np.uint32,
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), n=st.integers(1, 200), seed=st.integers(0, 2**32),
    wide=st.booleans(),
)  # fmt: skip
def test_ids_of_codes_of_any_types(kinds: list[Any], n: int, seed: int, wide: bool) -> None:
    draw = np.random.default_rng(seed)
    tops = [int(draw.choice([1, np.iinfo(kind).max, 300])) for kind in kinds]
    tops = [min(top, np.iinfo(kind).max, 10**5) for top, kind in zip(tops, kinds, strict=True)]
    codes = [draw.integers(0, top + 1, n).astype(kind) for top, kind in zip(tops, kinds, strict=True)]
    bases = np.cumsum([0, *(top + 1 for top in tops)]).astype(np.int64)
    lut = draw.integers(0, 50, bases[-1]).astype(np.int64 if wide else np.int32)
    rows = np.sort(draw.choice(n, draw.integers(0, n + 1), replace=False))
    expected = np.stack([lut[base + column[rows].astype(np.int64)] for base, column in zip(bases, codes, strict=False)])
    columns, zeros = CodeColumns(codes), np.zeros(len(kinds), np.int64)
    ids = np.full((len(rows) + 2, len(kinds)), -1, lut.dtype)
    gather(columns.addresses, columns.types, columns.rows, lut, bases, rows, ids, 1, zeros)
    np.testing.assert_array_equal(ids[1:-1], expected.T)
    assert (ids[[0, -1]] == -1).all()
    np.testing.assert_array_equal(zeros, (expected == 0).sum(axis=1))
    # As bags, of which the last feature has none or several, in uint32.
    counts = draw.integers(0, 4, n)
    flat = draw.integers(0, tops[0] + 1, counts.sum()).astype(np.uint32)
    lengths = np.ones((len(rows), len(kinds) + 1), np.int32)
    lengths[:, -1] = counts[rows]
    starts = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]).astype(np.int64)
    out, zeros = np.empty(starts[-1], lut.dtype), np.zeros(len(kinds) + 1, np.int64)
    begins = np.concatenate([[0], np.cumsum(counts)])
    gather_bags(
        columns.addresses, columns.types, columns.rows, np.array([*range(len(kinds)), -1]), flat, np.zeros(1, np.int64),
        begins, np.zeros(1, np.int64), lut, np.append(bases[:-1], 0), rows, lengths, starts, out, zeros,
    )  # fmt: skip
    wanted = [[*expected[:, i], *lut[flat[begins[row] : begins[row + 1]]]] for i, row in enumerate(rows.tolist())]
    assert out.tolist() == [value for row in wanted for value in row]
    assert zeros.tolist() == [
        *(expected == 0).sum(axis=1),
        sum((np.array(row[len(kinds) :]) == 0).sum() for row in wanted),
    ]


@pytest.mark.parametrize("bags", [False, True])
def test_a_part_with_many_values_and_with_few(bags: bool, tmp_path: Path) -> None:
    """Every id is that of its row's value, of columns whose codes take 8, 16 and 32 bits."""
    n, draw = 70_000, np.random.default_rng(3)
    values = {
        "many": draw.permutation(n), "some": draw.integers(0, 300, n), "few": draw.integers(0, 3, n),
        "text": draw.integers(0, 66_000, n),
    }  # fmt: skip
    table = {name: pl.Series(column) for name, column in values.items()}
    table["text"] = table["text"].cast(pl.String)
    table["list"], table["split"] = pl.Series(np.arange(n) // 9), pl.Series(["t"] * n)
    table["label"] = pl.Series(draw.integers(0, 2, n))
    if bags:
        table["bag"] = pl.Series(
            [f"{a}|{b}" for a, b in zip(values["some"].tolist(), values["few"].tolist(), strict=True)]
        )
    pl.DataFrame(table).write_parquet(tmp_path / "rows.parquet")
    columns = [CategoricalColumn(name=name, type="string" if name == "text" else "int") for name in values]
    schema = Schema(
        name="codes", label=Label(column="label"), group="list", source=SourceFormat(kind="parquet"),
        categorical=tuple(columns), sequence=(SequenceColumn(name="bag", type="int", separator="|"),) if bags else (),
        split=SplitRule(rule="column", column="split", values={"t": "train"}),
    )  # fmt: skip
    held = stoker.prepare(schema, tmp_path / "rows.parquet")
    filed = stoker.prepare(schema, tmp_path / "rows.parquet", out=tmp_path / "data")
    assert held.train.data_hash == filed.train.data_hash
    assert held.train.groups is not None
    np.testing.assert_array_equal(held.train.groups, np.arange(n) // 9)
    (batch,) = held.train.batches(n)
    if bags:
        ids = batch.ids.numpy().reshape(n, 6)[:, :4]
        pairs = batch.ids.numpy().reshape(n, 6)[:, 4:]
        known = read_vocabulary(tmp_path / "data" / "vocab" / "bag.parquet")["value"].to_numpy()
        np.testing.assert_array_equal(known[pairs - 1], np.stack([values["some"], values["few"]], axis=1))
    else:
        ids = batch.ids.numpy()
    for place, name in enumerate(values):
        known = read_vocabulary(tmp_path / "data" / "vocab" / f"{name}.parquet")["value"].cast(pl.Int64).to_numpy()
        np.testing.assert_array_equal(known[ids[:, place] - 1], values[name])
