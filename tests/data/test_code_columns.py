"""Codes in 8, 16 and 32 bits stand for the same ids, one by one, in bags and in shards."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.prep.fit.split_rules import SplitFile
from stoker.prep.parse.layout import Layout, code_type
from stoker.prep.schema import CategoricalColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import LogPart, write_part
from stoker.prep.write.encode import Encoder
from stoker.rewrite.reorder import read_vocabulary


def test_the_narrowest_type_of_codes() -> None:
    assert [code_type(most).type for most in (0, 255, 256, 65535, 65536, 2**32 - 1)] == [
        np.uint8, np.uint8, np.uint16, np.uint16, np.uint32, np.uint32,
    ]  # fmt: skip


@settings(max_examples=scaled(60), deadline=None)
@given(
    tops=st.lists(st.sampled_from([1, 255, 300, 65_536]), min_size=1, max_size=4), n=st.integers(1, 200),
    seed=st.integers(0, 2**32), wide=st.booleans(), bags=st.booleans(),
)  # fmt: skip
def test_ids_of_codes_of_any_types(tops: list[int], n: int, seed: int, wide: bool, bags: bool) -> None:
    """A shard of two slices of a part: ids one by one and in bags, and how many are 0."""
    draw = np.random.default_rng(seed)
    names = [f"c{place}" for place in range(len(tops))]
    schema = Schema(
        label=Label(column="label"), categorical=tuple(CategoricalColumn(name=name, type="int") for name in names),
        sequence=(SequenceColumn(name="bag", table="c0", type="int"),) if bags else (),
    )  # fmt: skip
    arrays: dict[str, Any] = {"labels": np.zeros(n, np.float32)}
    for index, top in enumerate(tops):
        arrays[f"codes.{index}"] = draw.integers(0, top + 1, n).astype(code_type(top))
    counts = draw.integers(0, 4, n).astype(np.int32)
    arrays[f"codes.{len(tops)}"] = draw.integers(0, tops[0] + 1, counts.sum()).astype(np.uint32)
    arrays[f"counts.{len(tops)}"] = counts
    found = [draw.integers(0, 50, top + 1).astype(np.int32) for top in (*tops, tops[0])]
    rows = np.sort(draw.choice(n, draw.integers(0, n + 1), replace=False))
    part_before, marks = np.full(7, -1, np.int32), np.full(2 * n, 2, np.uint8)
    marks[n + rows] = 0
    with TemporaryDirectory() as folder, patch("stoker.prep.fit.dense.BLOCK", 16):
        tables = {name: Path(folder) / name for name in names}
        for place, name in enumerate(names):
            content = {"counts": np.zeros(1, np.int64)}
            for index in [place, len(tops)] if bags and not place else [place]:
                both = [part_before, found[index]]
                content |= {f"ids.{index}": np.concatenate(both), f"starts.{index}": np.cumsum([0, *map(len, both)])}
            write_part(tables[name], content)
        part = LogPart(index=1, file=0, start=n, rows=n, path=Path(folder) / "part")
        write_part(part.path, arrays)
        splits = SplitFile(Path(folder) / "splits")
        splits.path.write_bytes(marks.tobytes())
        encoder = Encoder(Layout(schema), splits, tables, (), wide=wide)
        slices = [(part, 0, len(rows) // 2), (part, len(rows) // 2, len(rows))]
        out, sums = encoder.encode(slices, 0)
    begins = np.concatenate([[0], np.cumsum(counts)])
    ids = [lut[arrays[f"codes.{index}"][rows]] for index, lut in enumerate(found[:-1])]
    expected = [[[lut[place]] for lut in ids] for place in range(len(rows))]
    if bags:
        for row, bag in zip(rows.tolist(), expected, strict=True):
            bag.append(found[-1][arrays[f"codes.{len(tops)}"][begins[row] : begins[row + 1]]].tolist())
    assert out["ids"].dtype == (np.int64 if wide else np.int32)
    assert out["ids"].reshape(-1).tolist() == [one for bags in expected for bag in bags for one in bag]
    if bags:
        assert out["lengths"].tolist() == [list(map(len, bags)) for bags in expected]
        sizes = [sum(map(len, bags)) for bags in expected]
        assert out["row_offsets"].tolist() == np.cumsum([0, *sizes]).tolist()
    by_feature = [[one for bags in expected for one in bags[place]] for place in range(len(tops) + bags)]
    assert sums["unknown"] == [
        [column.count(0) for column in by_feature], [len(column) for column in by_feature],
    ]  # fmt: skip


@pytest.mark.slow
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
