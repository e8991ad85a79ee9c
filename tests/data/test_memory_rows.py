"""Rows of a dataset in memory have the bits of the rows in files: their batches, their ids alone, their files."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import digests

import stoker
from stoker.dataset.gather import NumbaGather, NumpyGather, ResidentRows, make_gather, new_tensor
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat
from stoker.prep.write import publish

NUMBERS = {  # what parts of a column may have
    "uint8": st.integers(0, 254).map(float),
    "uint16": st.integers(0, 65534).map(float) | st.sampled_from([255.0, 65534.0]),
    "float": st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([65535.0, -1.0, 0.5, -0.0]),
}
STEPS = [(), ("log1p",), ("log1p", "log1p"), ("zscore",), ("log1p", "zscore"), ("minmax",), ("log1p", "minmax")]


@st.composite
def logs(draw: Any) -> tuple[Schema, pl.DataFrame]:
    """A schema, and a log whose columns are of other types in other parts of it."""
    rows = draw(st.integers(3, 120))
    labels = st.sampled_from(draw(st.sampled_from([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0, -0.0]])))
    dense, data = [], {"label": draw(st.lists(labels, min_size=rows, max_size=rows))}
    data["split"] = [
        "train",
        *draw(st.lists(st.sampled_from(["train", "valid"]), min_size=rows - 1, max_size=rows - 1)),
    ]
    for number in range(draw(st.integers(0, 5))):
        dense.append(DenseColumn(
            name=f"d{number}", fill=draw(st.sampled_from(["mean", "median", 0.0, -3.5])), null_flag=draw(st.booleans()),
            clip_min=draw(st.sampled_from([None, 3.0])), clip_max=draw(st.sampled_from([None, 200.5])),
            transforms=draw(st.sampled_from(STEPS)),
        ))  # fmt: skip
        values: list[float | None] = []
        while len(values) < rows:
            kind = NUMBERS[draw(st.sampled_from(list(NUMBERS)))]
            length = draw(st.integers(1, rows))
            values += draw(st.lists(kind | st.none(), min_size=length, max_size=length))
        data[f"d{number}"] = values[:rows]
    features = []
    for number in range(draw(st.integers(1, 3))):
        buckets = draw(st.sampled_from([None, 5, 254, 255, 256, 65534, 65535, 65536]))
        features.append(CategoricalColumn(name=f"c{number}", type="int", hash_buckets=buckets))
        data[f"c{number}"] = draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
    schema = Schema(
        name="log", label=Label(column="label"), source=SourceFormat(kind="parquet"), dense=tuple(dense),
        categorical=tuple(features),
        split=SplitRule(rule="column", column="split", values={"train": "train", "valid": "valid"}),
    )  # fmt: skip
    kinds = {name: pl.Float64 for name in data if name.startswith("d")}
    return schema, pl.DataFrame(data, schema_overrides=kinds)


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    same_arrays(*({name: tensor.numpy() for name, tensor in found.items()} for found in (ours, theirs)))


def same_arrays(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        assert (mine.dtype, mine.shape) == (theirs[name].dtype, theirs[name].shape)
        bits = (np.ascontiguousarray(array).view(np.uint8) for array in (mine, theirs[name]))
        np.testing.assert_array_equal(*bits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the split rule")  # some logs have training rows only
@settings(max_examples=scaled(40), deadline=None)
@given(log=logs(), most=st.integers(1, 60), threads=st.integers(1, 2), seed=st.integers(0, 9))
def test_rows_are_those_in_files(
    log: tuple[Schema, pl.DataFrame], most: int, threads: int, seed: int, tmp_path_factory: Any
) -> None:
    schema, frame = log
    folder = tmp_path_factory.mktemp("log")
    frame.write_parquet(folder / "rows.parquet", row_group_size=most)
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
        patch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", most)
        patch.setattr(publish, "SHARD_ROWS", 64)
        patch.setattr(publish, "_LEAST_ROWS", 8)
        held = stoker.prepare(schema, folder / "rows.parquet", threads=threads)
        lying = stoker.prepare(schema, folder / "rows.parquet", out=folder / "lying", threads=threads)
    for name, split in lying.splits.items():
        if not len(split):
            continue
        mine = held.split(name)
        for ours, theirs in zip(mine.shards, split.shards, strict=True):
            assert ours.path.relative_to(held.path) == theirs.path.relative_to(lying.path)
            same_arrays(ours.arrays, theirs.arrays)
        rows = np.random.default_rng(seed).integers(0, len(split), 200)
        for only in (False, True):
            expected = NumpyGather(split.shards, split.starts, ids_only=only)(rows, new_tensor)
            numba = make_gather(mine.shards, mine.starts, ids_only=only, threads=threads)
            assert isinstance(numba, NumbaGather)
            same_bits(numba(rows, new_tensor), expected)
            same_bits(NumpyGather(mine.shards, mine.starts, ids_only=only)(rows, new_tensor), expected)
        everything = ResidentRows(mine.shards, len(split), torch.device("cpu"))(rows, new_tensor)
        same_bits({key: everything[key] for key in ("dense", "ids", "labels")}, NumpyGather(
            split.shards, split.starts)(rows, new_tensor))  # fmt: skip
        assert {key: value.tolist() for key, value in mine[0].items()} == {
            key: value.tolist() for key, value in split[0].items()
        }
        assert (mine.bytes, mine.data_hash) == (split.bytes, split.data_hash)
    held.save(folder / "saved")
    assert digests(folder / "saved") == digests(folder / "lying")
