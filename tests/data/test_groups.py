"""Lists of rows: their numbers in a prepared dataset, through every command that makes one anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from prepared import digests, rows_of
from typer.testing import CliRunner

import stoker
from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.cli import app
from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule, Timestamp

SCHEMA = Schema(
    label=Label(column="label"),
    dense=(DenseColumn(name="row"),),
    categorical=(CategoricalColumn(name="item"),),
    group="session",
    split=SplitRule(rule="column", column="day", values={"mo": "train", "tu": "valid", "we": "test", "su": "drop"}),
)
ROWS = 4000


def frame(sessions: int = 300) -> pl.DataFrame:
    """Rows whose dense column is their number; a session's rows are scattered and lie on one day, or on several."""
    generator = np.random.default_rng(5)
    session = generator.integers(0, sessions, ROWS)
    return pl.DataFrame(
        {
            "label": (generator.random(ROWS) < 0.2).astype(np.int64),
            "row": np.arange(ROWS),
            "item": generator.integers(0, 40, ROWS).astype(str),
            "session": session * 7,
            "day": [("mo", "mo", "mo", "tu", "we", "su")[s % 6] for s in session],
        }
    )


def numbers_by_hand(path: Path, split: str, sessions: pl.Series) -> list[int]:
    """Group numbers from the raw log, found again by the row number that the dense column holds."""
    known: dict[int, int] = {}
    rows = [int(values[0]) for values in rows_of(path, split)["dense"]]
    return [known.setdefault(int(sessions[row]), len(known)) for row in rows]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups") / "log.parquet"
    frame().write_parquet(path)
    return path


@pytest.mark.slow
def test_numbers_are_dense_and_in_order_of_first_appearance(log: Path, tmp_path: Path) -> None:
    raw = pl.read_parquet(log)
    raw.write_csv(tmp_path / "log.csv")
    report = run_prepare(SCHEMA, log, out=tmp_path / "a", block_bytes=2**12, threads=2)
    data = stoker.Dataset(tmp_path / "a")
    for name, split in data.splits.items():
        assert split.groups is not None
        assert split.groups.dtype == np.int32
        assert split.groups.tolist() == numbers_by_hand(data.path, name, raw["session"])
        labels = np.array(rows_of(data.path, name)["labels"])
        entry = split.entry["groups"]
        assert entry["count"] == len(set(split.groups.tolist()))
        assert entry["largest"] == np.bincount(split.groups).max()
        assert entry["with_positive"] == len(set(split.groups[labels == 1].tolist()))
    assert data.groups == report.groups == {"column": "session", "count": data.groups["count"], "cut": 0}  # type: ignore[index]
    assert not report.warnings
    assert data.verify() > 6
    run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "b", threads=1)
    same = digests(data.path, without=("manifest.json",))
    assert digests(tmp_path / "b", without=("manifest.json",)) == same, (
        "text and Parquet, one block and many, must agree"
    )
    assert {"groups/train.safetensors", "groups/valid.safetensors", "groups/test.safetensors"} <= set(same)


def test_a_dataset_without_groups_is_what_it_was(log: Path, tmp_path: Path) -> None:
    plain = replace(SCHEMA, group=None)
    assert "group" not in plain.to_dict()
    # Of the version before there were groups: datasets, and runs on them, are known by it.
    assert plain.hash().startswith("0e69fb3b98311457bf49")
    data = stoker.prepare(plain, log, out=tmp_path / "a")
    assert data.groups is None
    assert all(split.groups is None for split in data.splits.values())
    assert not (data.path / "groups").exists()
    assert not {"groups"} & set(data.manifest)
    grouped = stoker.prepare(SCHEMA, log, out=tmp_path / "b")
    changed = {name for name, digest in digests(grouped.path).items() if digests(data.path).get(name) != digest}
    assert changed == {"manifest.json", *(f"groups/{name}.safetensors" for name in data.splits)}


def test_hash_by_row_becomes_hash_by_group(log: Path, tmp_path: Path) -> None:
    schema = replace(SCHEMA, split=SplitRule())
    assert schema.split.column == "session"
    assert Schema.from_dict(schema.to_dict()) == schema
    assert replace(SCHEMA, split=SplitRule(column="item")).split.column == "item", "what is asked for stays"
    data = stoker.prepare(schema, log, out=tmp_path / "a")
    assert data.groups is not None
    assert data.groups["cut"] == 0
    assert len(data.valid) > 0
    raw = pl.read_parquet(log)["session"]
    sessions = [{int(raw[int(row[0])]) for row in rows_of(data.path, name)["dense"]} for name in data.splits]
    assert sum(map(len, sessions)) == len(set.union(*sessions))


def test_a_rule_that_cuts_groups_says_so(log: Path, tmp_path: Path) -> None:
    raw = pl.read_parquet(log)
    schema = replace(SCHEMA, split=SplitRule(rule="time"), timestamp=Timestamp(column="row"))
    with pytest.warns(
        UserWarning, match=r"groups .* have rows in several splits.*rule = \"hash\" and column = \"session\""
    ):
        data = stoker.prepare(schema, log, out=tmp_path / "a")
    where: dict[int, set[str]] = {}
    for name in data.splits:
        for row in rows_of(data.path, name)["dense"]:
            where.setdefault(int(raw["session"][int(row[0])]), set()).add(name)
    assert data.groups is not None
    assert data.groups["cut"] == sum(len(found) > 1 for found in where.values())
    assert data.groups["count"] == len(where)


def test_an_empty_group_is_a_bad_line(tmp_path: Path) -> None:
    frame().with_columns(session=pl.when(pl.col("row") == 17).then(None).otherwise(pl.col("session"))).write_csv(
        tmp_path / "log.csv"
    )
    data = stoker.prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "a")
    assert data.manifest["quarantined"] == 1
    assert "column session: missing value" in (data.path / "quarantine.jsonl").read_text()
    with pytest.raises(SchemaError, match="group is empty"):
        replace(SCHEMA, group="")
    with pytest.raises(DataError, match="sesion"):
        stoker.prepare(replace(SCHEMA, group="sesion"), tmp_path / "log.csv", out=tmp_path / "b")


def test_interrupted_preparations_end_with_the_same_bytes(log: Path, tmp_path: Path) -> None:
    whole = stoker.prepare(SCHEMA, log, out=tmp_path / "a")

    def stop(at: StageProgress) -> None:
        if at.stage == "write" and at.done > at.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stoker.prepare(SCHEMA, log, out=tmp_path / "b", progress=stop)
    assert not (tmp_path / "b" / "manifest.json").exists()
    again = stoker.prepare(SCHEMA, log, out=tmp_path / "b")
    assert digests(again.path) == digests(whole.path)
    made = stoker.prepare(replace(SCHEMA, group=None), log, out=tmp_path / "b", overwrite=True)
    assert not (made.path / "groups").exists()


def test_damage_is_told(log: Path, tmp_path: Path) -> None:
    data = stoker.prepare(SCHEMA, log, out=tmp_path / "a")
    path = data.path / "groups" / "valid.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"valid\.safetensors is damaged"):
        _ = stoker.Dataset(data.path).valid.groups
    with pytest.raises(DataError, match=r"valid\.safetensors was altered"):
        stoker.Dataset(data.path).verify()


def test_classified_and_reordered_datasets_keep_groups(log: Path, tmp_path: Path) -> None:
    raw = pl.read_parquet(log)["session"]
    data = stoker.prepare(SCHEMA, log, out=tmp_path / "a")
    profile = stoker.profile(data, device_memory=str(20 * 68), embedding_dim=16)
    hot = stoker.classify(data, profile, out=tmp_path / "hot")
    assert 0 < len(hot.hot) < len(hot.train), "the test needs rows of both kinds"
    reordered = stoker.reorder(data, tmp_path / "again", tables=["item"])
    for made in (hot, reordered):
        assert made.groups == data.groups
        for name, split in made.splits.items():
            assert split.groups is not None
            assert split.groups.tolist() == numbers_by_hand(made.path, name, raw)
        assert made.verify()
    assert hot.hot.groups is None


def test_inspect_shows_groups(log: Path, tmp_path: Path) -> None:
    data = stoker.prepare(SCHEMA, log, out=tmp_path / "a")
    shown = CliRunner().invoke(app, ["inspect", str(data.path)])
    assert shown.exit_code == 0, shown.output
    assert f"Groups by session: {data.groups['count']}" in shown.output  # type: ignore[index]
    told: dict[str, Any] = json.loads(CliRunner().invoke(app, ["inspect", str(data.path), "--json"]).output)
    assert told["groups"]["column"] == "session"
    assert told["splits"]["test"]["groups"]["count"] == data.test.entry["groups"]["count"]


FEATURED = Schema(
    label=Label(column="clicked"),
    dense=(
        DenseColumn(name="row"),
        DenseColumn(name="place"),
        DenseColumn(name="price", fill="median", null_flag=True),
    ),
    categorical=(CategoricalColumn(name="item"),),
    feature=(f.PastCount(name="place", by=("item",), order="row"),),
    group="list",
    split=SplitRule(rule="column", column="day", values={"mo": "train", "tu": "valid", "look": "drop"}),
)


def featured_log(path: Path, *, days: tuple[str, ...]) -> pl.DataFrame:
    """Rows of lists, and between them rows that are only looked back at, which belong to no list."""
    made = pl.DataFrame(
        {
            "clicked": [row % 5 == 0 for row in range(400)],
            "row": range(400),
            "item": [f"i{row % 7}" for row in range(400)],
            "list": [None if row % 4 == 3 else f"l{row // 8}" for row in range(400)],
            "day": ["look" if row % 4 == 3 else days[row // 8 % len(days)] for row in range(400)],
            "price": [None if row % 3 == 0 else float(row) for row in range(400)],
        }
    ).with_columns(pl.col("clicked").cast(int))
    made.write_csv(path)
    return made


def test_groups_beside_features_and_in_rows_prepared_alike(tmp_path: Path) -> None:
    raw = featured_log(tmp_path / "log.csv", days=("mo", "mo", "tu"))
    data = stoker.prepare(FEATURED, tmp_path / "log.csv", out=tmp_path / "a")
    assert data.manifest["quarantined"] == 0, "rows of no split need no group"
    names = {name: place for place, name in enumerate(raw["list"].unique().drop_nulls().to_list())}
    lists = pl.Series([names.get(name, -1) for name in raw["list"]])
    for name, split in data.splits.items():
        if len(split):
            assert split.groups is not None
            assert split.groups.tolist() == numbers_by_hand(data.path, name, lists)
    assert data.schema.dense == ("row", "place", "price", "price_is_null")
    later = featured_log(tmp_path / "later.csv", days=("tu",))
    new = stoker.prepare(like=data.path, files=tmp_path / "later.csv", out=tmp_path / "b", history="ignore")
    assert new.test.groups is not None
    assert new.test.groups.tolist() == numbers_by_hand(new.path, "test", lists)
    flags = [row[3] for row in rows_of(new.path, "test")["dense"]]
    assert flags == later.filter(pl.col("day") != "look")["price"].is_null().cast(float).to_list()
    raw.with_columns(list=pl.when(pl.col("row") == 16).then(None).otherwise(pl.col("list"))).write_csv(
        tmp_path / "x.csv"
    )
    with pytest.raises(DataError, match="has no list, which tells the group of a row"):
        stoker.prepare(FEATURED, tmp_path / "x.csv", out=tmp_path / "c")
