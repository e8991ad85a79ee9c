"""Packed rows in memory are the rows that lie in files, to the bit: their batches, their ids alone, their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import digests

import stoker
from stoker.base.errors import DataError
from stoker.dataset.memory import home_of
from stoker.dataset.reading.gather import NumbaGather, NumpyGather
from stoker.dataset.reading.gather_packed import PackedGather, QuickTensor
from stoker.dataset.reading.gathers import make_gather
from stoker.dataset.reading.held import HeldTensors, bytes_held
from stoker.dataset.reading.packed import TENSORS, Field, PackedShard, PackedTensor, Packing
from stoker.dataset.shards import Shard
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat
from stoker.prep.work.part_store import PartStore
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
        name="packed", label=Label(column="label"), source=SourceFormat(kind="parquet"), dense=tuple(dense),
        categorical=tuple(features),
        split=SplitRule(rule="column", column="split", values={"train": "train", "valid": "valid"}),
    )  # fmt: skip
    kinds = {name: pl.Float64 for name in data if name.startswith("d")}
    return schema, pl.DataFrame(data, schema_overrides=kinds)


def fresh(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        assert (mine.dtype, mine.shape) == (theirs[name].dtype, theirs[name].shape)
        np.testing.assert_array_equal(mine.numpy().view(np.uint8), theirs[name].numpy().view(np.uint8))


@settings(max_examples=40, deadline=None)
@given(log=logs(), most=st.integers(1, 60), threads=st.integers(1, 2), seed=st.integers(0, 9))
def test_rows_are_those_in_files(
    log: tuple[Schema, pl.DataFrame], most: int, threads: int, seed: int, tmp_path_factory: Any
) -> None:
    schema, frame = log
    folder = tmp_path_factory.mktemp("packed")
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
        assert all(isinstance(shard, PackedShard) for shard in mine.shards)
        rows = np.random.default_rng(seed).integers(0, len(split), 200)
        for only in (False, True):
            theirs = NumpyGather(split.shards, split.starts, ids_only=only)(rows, fresh)
            numba = make_gather(mine.shards, mine.starts, ids_only=only, threads=threads)
            assert isinstance(numba, PackedGather)
            same_bits(numba(rows, fresh), theirs)
            same_bits(NumpyGather(mine.shards, mine.starts, ids_only=only)(rows, fresh), theirs)
        everything = HeldTensors(mine.shards, torch.device("cpu"))(rows, fresh)
        same_bits({key: everything[key] for key in ("dense", "ids", "labels")}, NumpyGather(
            split.shards, split.starts)(rows, fresh))  # fmt: skip
        first = mine.shards[0]
        np.testing.assert_array_equal(first.ids, np.concatenate([s.ids for s in split.shards])[: first.rows])
        np.testing.assert_array_equal(first.dense, np.concatenate([s.dense for s in split.shards])[: first.rows])
        assert {key: value.tolist() for key, value in mine[0].items()} == {
            key: value.tolist() for key, value in split[0].items()
        }
        assert (mine.bytes, mine.data_hash) == (split.bytes, split.data_hash)
    held.save(folder / "saved")
    assert digests(folder / "saved") == digests(folder / "lying")


TYPES = [np.dtype(kind) for kind in ("u1", "u2", "i4", "i8", "f4")]


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), rows=st.integers(1, 300), batch=st.integers(0, 3000), threads=st.integers(1, 3),
    wide=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_record_is_read_by_its_definition(
    data: Any, rows: int, batch: int, threads: int, wide: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    fields, column = [], 0
    for _ in range(data.draw(st.integers(0, 9))):
        kind = data.draw(st.sampled_from(["u1", "u2", "f4", "flag"]))
        flag = kind in ("u1", "u2") and data.draw(st.booleans())
        table = draw.normal(size=256 if kind == "u1" else 700).astype(np.float32) if kind in ("u1", "u2") else None
        dtype = np.dtype("u1" if kind == "flag" else kind)
        fields.append(Field(
            tensor="dense", column=column, dtype=dtype, table=table, flag=column + 1 if flag else -1,
        ))  # fmt: skip
        column += 1 + flag
    features = data.draw(st.integers(0, 7))
    for feature in range(features):
        dtype = data.draw(st.sampled_from(TYPES[: 4 if wide else 3]))
        fields.append(Field(tensor="ids", column=feature, dtype=dtype))
    fields.append(Field(tensor="labels", column=0, dtype=data.draw(st.sampled_from([TYPES[0], TYPES[4]]))))
    packing = Packing(fields, dense=column, features=features, wide=wide)
    assert packing.size % 32 == 0
    cut = sorted(draw.integers(0, rows + 1, 2).tolist())
    records = np.zeros((rows, packing.size), np.uint8)
    for field in packing.fields:
        values = draw.integers(0, 250 if field.dtype.itemsize == 1 else 600, rows) - (field.dtype.kind != "u") * 99
        values[draw.random(rows) < 0.3] = 0
        place = slice(field.at, field.at + field.dtype.itemsize)
        records[:, place] = values.astype(field.dtype).view(np.uint8).reshape(rows, -1)
    pieces = [records[a:b] for a, b in zip([0, *cut], [*cut, rows], strict=True)]
    shards = [PackedShard(path=Path("x"), packing=packing, records=piece) for piece in pieces]
    starts = np.cumsum([0, *map(len, pieces)]).tolist()
    plain = [Shard(path=s.path, rows=s.rows, dense=s.dense, labels=s.labels, ids=s.ids) for s in shards]
    wanted = draw.integers(0, rows, batch)
    for only in (False, True):
        theirs = NumbaGather(plain, starts, ids_only=only)(wanted, fresh)
        names = ("ids",) if only else TENSORS
        same_bits(PackedGather(packing, pieces, starts, names=names, threads=threads)(wanted, fresh), theirs)
        same_bits(NumpyGather(shards, starts, ids_only=only)(wanted, fresh), theirs)
    for name in TENSORS:
        quick, slow = QuickTensor(packing, records, name), PackedTensor(packing, records, name)
        assert (len(quick), quick.shape, quick.dtype) == (rows, slow[:].shape, slow[:].dtype)
        for some in (slice(*cut), slice(None), slice(rows, None), slice(0, rows, 3), wanted):
            np.testing.assert_array_equal(quick[some], slow[some])


def test_what_a_record_takes(tmp_path: Path) -> None:
    """A value of few bits a byte or two, flags nothing, labels a byte."""
    rows = 600
    frame = pl.DataFrame({
        "label": [0.0, 1.0] * (rows // 2), "split": ["train"] * rows, "a": [None, *range(200), *[3.0] * (rows - 201)],
        "b": np.arange(rows, dtype=np.float64), "c": np.arange(rows) / 7,
        "few": [f"t{n % 100}" for n in range(rows)], "many": [f"t{n}" for n in range(rows)],
    }, strict=False)  # fmt: skip
    frame.write_parquet(tmp_path / "rows.parquet")
    schema = Schema(
        name="sizes", label=Label(column="label"), source=SourceFormat(kind="parquet"),
        dense=tuple(DenseColumn(name=name, fill="median", null_flag=True) for name in "abc"),
        categorical=(CategoricalColumn(name="few"), CategoricalColumn(name="many")),
        split=SplitRule(rule="column", column="split", values={"train": "train"}),
    )  # fmt: skip
    held = stoker.prepare(schema, tmp_path / "rows.parquet")
    shard = held.train.shards[0]
    assert isinstance(shard, PackedShard)
    assert [(f.tensor, f.column, f.dtype.name, f.flag) for f in shard.packing.fields] == [
        ("dense", 4, "float32", -1), ("dense", 2, "uint16", 3), ("ids", 1, "uint16", -1), ("dense", 0, "uint8", 1),
        ("dense", 5, "uint8", -1), ("ids", 0, "uint8", -1), ("labels", 0, "uint8", -1),
    ]  # fmt: skip
    assert shard.packing.size == 32
    tables = {f.column: f.table for f in shard.packing.fields if f.table is not None}
    assert {column: len(table) for column, table in tables.items()} == {0: 256, 2: 601}  # up to the greatest value
    assert shard.records.ctypes.data % 64 == 0
    assert shard.tensor("dense").nbytes == shard.dense.nbytes == rows * 6 * 4
    assert bytes_held(held.train, rows) == 0
    assert bytes_held(held.train, rows, torch.device("meta")) == rows * 64  # 6 float32, 2 int32 and a label, not packed
    home = home_of(held.path)
    assert home is not None
    with pytest.raises(ValueError, match="read-only"):
        shard.records[0] = 0


def test_room_is_asked_for_packed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {f"d{n}": [1, 2] * 50 for n in range(20)}
    pl.DataFrame({"label": [0, 1] * 50, "split": ["train"] * 100, **columns}).write_parquet(tmp_path / "r.parquet")
    schema = Schema(
        name="room", label=Label(column="label"), source=SourceFormat(kind="parquet"),
        dense=tuple(DenseColumn(name=f"d{n}", transforms=("zscore",)) for n in range(20)),
        split=SplitRule(rule="column", column="split", values={"train": "train"}),
    )  # fmt: skip
    monkeypatch.setattr(publish, "available_memory", lambda: 3199)
    with pytest.raises(DataError, match=r"prepared rows take 3.1 KiB"):
        stoker.prepare(schema, tmp_path / "r.parquet")
    monkeypatch.setattr(publish, "available_memory", lambda: 3200)
    assert stoker.prepare(schema, tmp_path / "r.parquet").in_memory


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_only_memory_that_rows_stay_in_may_become_huge() -> None:
    """Fresh huge pages are dear, so parts are made in small ones."""

    def huge(array: np.ndarray) -> bool:
        flags, inside = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= array.ctypes.data < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags"):
                flags = line
        assert flags
        return " hg" in flags

    store = PartStore(2**30)
    arena = store.arena(2**24)
    codes = arena.take((1, 2**20), np.uint32)
    codes[:] = 1
    store.write(Path("part"), {"codes": codes}, arena)
    assert not huge(codes)
    store.release(Path("part"))
    rows = store.memory(2**20)
    assert np.shares_memory(rows, codes)
    assert huge(rows)
