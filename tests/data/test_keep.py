"""Raw columns that travel with the rows to their scores: aligned, whatever splits, blocks, threads and files."""

from __future__ import annotations

import gzip
import json
import pickle
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import digests, quarantine

import stoker
from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.dataset import row_files as kept_module
from stoker.dataset import split as dataset_split
from stoker.prep.prepare import run_prepare
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.rewrite.classified import write_classified
from stoker.training.scores.evaluation import Scores

SCHEMA = Schema(
    label=Label(column="click"),
    timestamp=Timestamp(column="when", type="datetime"),
    dense=(DenseColumn(name="row"), DenseColumn(name="price", fill="mean")),
    categorical=(CategoricalColumn(name="user", type="int"), CategoricalColumn(name="city")),
    sequence=(SequenceColumn(name="seen"),),
    split=SplitRule(rule="hash", train=0.6, valid=0.2, test=0.2),
    keep=("id", "user", "when", "price", "click", "seen"),
)
START = datetime(2024, 1, 1)


def log(rows: int = 900, seed: int = 0) -> pl.DataFrame:
    """Rows whose dense column is their number, which ``id`` tells as text."""
    random = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "row": np.arange(rows),
            "id": [f"é,{n:05d}" if n % 7 else None for n in range(rows)],
            "user": random.integers(2**60, 2**60 + 40, rows),
            "when": [START + timedelta(seconds=int(s)) for s in random.integers(0, 10**6, rows)],
            "price": [None if n % 11 == 0 else n / 3 for n in range(rows)],
            "city": random.choice(["x", "y", "z"], rows),
            "seen": ["|".join(map(str, range(1 + n % 4))) for n in range(rows)],
            "click": random.integers(0, 2, rows),
        }
    )


def table(split: dataset_split.Split) -> pl.DataFrame:
    assert split.kept is not None
    found = pl.from_arrow(split.kept.read())
    assert isinstance(found, pl.DataFrame)
    return found


def check_aligned(data: stoker.Dataset, raw: pl.DataFrame, columns: tuple[str, ...]) -> None:
    """Every kept row is the raw row whose number the dense column of the same row holds."""
    assert sum(map(len, data.splits.values())) > 0
    for split in data.splits.values():
        if len(split):
            places = [int(shard.dense[n, 0]) for shard in split.shards for n in range(shard.rows)]
            assert table(split).select(columns).rows() == raw[places].select(columns).rows()


def test_text_files_keep_columns_as_the_schema_types_them(tmp_path: Path) -> None:
    raw = log()
    raw.write_csv(tmp_path / "log.csv", datetime_format="%Y-%m-%dT%H:%M:%S")
    data = stoker.prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "d")
    expected = raw.with_columns(pl.col("click").cast(float))
    check_aligned(data, expected, SCHEMA.keep)
    types = {"id": pl.String, "user": pl.Int64, "when": pl.Datetime("us"), "price": pl.Float64, "click": pl.Float64}
    assert dict(table(data.test).schema) == {**types, "seen": pl.String}
    entry = data.manifest["splits"]["valid"]["keep"]
    assert entry == {"file": "keep/valid.parquet"}
    assert data.manifest["files"]["keep/valid.parquet"]["bytes"] == (data.path / "keep/valid.parquet").stat().st_size
    assert data.verify() > 0


def test_a_dataset_without_keep_knows_nothing_of_it(tmp_path: Path) -> None:
    log().write_csv(tmp_path / "log.csv")
    plain = replace(SCHEMA, keep=())
    assert "keep" not in plain.to_dict()
    data = stoker.prepare(plain, tmp_path / "log.csv", out=tmp_path / "a")
    assert data.test.kept is None
    assert not (data.path / "keep").exists()
    assert "keep" not in data.manifest["splits"]["test"]
    kept = stoker.prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "b")
    assert kept.schema_hash == data.schema_hash, "a model of one fits the rows of the other"
    same = {name: digest for name, digest in digests(kept.path).items() if not name.startswith(("keep/", "manifest"))}
    assert same == digests(data.path, without=("manifest.json",))


@pytest.mark.slow
@settings(max_examples=12)
@given(
    rows=st.integers(40, 700), files=st.integers(1, 3), block=st.sampled_from([2**10, 2**13, 2**24]),
    kind=st.sampled_from(["csv", "csv.gz", "parquet", "jsonl"]), negative_keep=st.sampled_from([1.0, 0.5]),
    rule=st.sampled_from([
        SplitRule(), SplitRule(rule="time"), SplitRule(rule="leave_last_out", column="user"),
        SplitRule(rule="column", column="city", values={"x": "train", "y": "test", "z": "drop"}),
    ]),
)  # fmt: skip
def test_rows_stay_aligned(
    tmp_path_factory: pytest.TempPathFactory, rows: int, files: int, block: int, kind: str, negative_keep: float,
    rule: SplitRule,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("aligned")
    raw = log(rows)
    columns = ("id", "user", "when")
    schema = replace(SCHEMA, keep=columns, split=rule, negative_keep=negative_keep)
    names = [str(write(raw[rows * n // files : rows * (n + 1) // files], folder, n, kind)) for n in range(files)]
    for threads in (1, 2):
        run_prepare(schema, names, out=folder / str(threads), threads=threads, block_bytes=block)
    assert digests(folder / "1") == digests(folder / "2")
    check_aligned(stoker.Dataset(folder / "2"), raw, columns)


def write(frame: pl.DataFrame, folder: Path, number: int, kind: str) -> Path:
    path = folder / f"{number}.{kind}"
    if kind == "parquet":
        frame.write_parquet(path, row_group_size=50)
        return path
    texts = frame.with_columns(pl.col("when").dt.to_string("iso"))
    lists = texts.with_columns(pl.col("seen").str.split("|"))
    text = lists.write_ndjson() if kind == "jsonl" else texts.write_csv()
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_quarantined_rows_leave_no_gap(tmp_path: Path, kind: str) -> None:
    raw = log(300).with_columns(
        pl.col("when").dt.to_string("iso"), pl.when(pl.col("row") % 60 == 1).then(7).otherwise("click").alias("click")
    )
    raw = raw.with_columns(pl.when(pl.col("row") % 60 == 2).then(pl.lit("?")).otherwise("when").alias("when"))
    path = tmp_path / f"0.{kind}"
    (raw.write_csv if kind == "csv" else raw.write_parquet)(path)
    schema = replace(SCHEMA, keep=("id", "row"))
    run_prepare(schema, path, out=tmp_path / "d", max_bad="10%", block_bytes=2**12)
    data = stoker.Dataset(tmp_path / "d")
    assert len(quarantine(data.path)) == 10
    expected = raw.with_columns(pl.col("row").cast(float)) if kind == "csv" else raw
    check_aligned(data, expected, ("id", "row"))


def test_parquet_keeps_its_types_and_files_share_one(tmp_path: Path) -> None:
    raw = log(200).with_columns(
        pl.col("city").cast(pl.Categorical),
        day=pl.col("when").dt.date(),
        zoned=pl.col("when").dt.replace_time_zone("UTC"),
    )
    first = raw[:100].with_columns(pl.col("row").cast(pl.Int32), code=pl.col("row").cast(pl.Int16), mixed=pl.col("row"))
    second = raw[100:].with_columns(code=pl.col("row") / 2, mixed=pl.col("row").cast(pl.String))
    first.write_parquet(tmp_path / "a.parquet")
    second.write_parquet(tmp_path / "b.parquet")
    keep = ("row", "city", "day", "zoned", "code", "mixed")
    data = stoker.prepare(
        replace(SCHEMA, keep=keep), [tmp_path / "a.parquet", tmp_path / "b.parquet"], out=tmp_path / "d"
    )
    assert table(data.train).schema == {
        "row": pl.Int64, "city": pl.String, "day": pl.Date, "zoned": pl.Datetime("us", "UTC"), "code": pl.Float64,
        "mixed": pl.String,
    }  # fmt: skip
    check_aligned(data, raw.with_columns(pl.col("city").cast(pl.String)), ("row", "city", "day", "zoned"))
    codes = table(data.test)["code"].to_list()
    rows = table(data.test)["row"].to_list()
    assert codes == [row if row < 100 else row / 2 for row in rows]
    schema = replace(SCHEMA, keep=keep).with_feature("count by=city")
    featured = stoker.prepare(schema, [tmp_path / "a.parquet", tmp_path / "b.parquet"], out=tmp_path / "f")
    assert table(featured.test).equals(table(data.test))


FEATURED = Schema(
    label=Label(column="click"),
    timestamp=Timestamp(column="when", type="datetime"),
    dense=(DenseColumn(name="row"), DenseColumn(name="rank"), DenseColumn(name="count_user", source="count_user")),
    categorical=(CategoricalColumn(name="piece"), CategoricalColumn(name="user", type="int")),
    feature=(
        f.Pairs(columns=("seen",), names=("piece",), rank="rank", separator="|"),
        f.CountEncoding(by=("user",), name="count_user"),
    ),
    split=SplitRule(rule="time"),
    keep=("id", "user", "when", "piece", "count_user"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_that_features_multiply_keep_raw_columns_and_outputs(tmp_path: Path, kind: str) -> None:
    raw = log(400)
    path = write(raw, tmp_path, 0, kind)
    for threads in (1, 2):
        run_prepare(FEATURED, path, out=tmp_path / str(threads), threads=threads, block_bytes=2**12)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    data = stoker.Dataset(tmp_path / "1")
    check_aligned(data, raw, ("id", "user", "when"))
    assert sum(map(len, data.splits.values())) > 400
    for split in data.splits.values():
        found = table(split)
        dense = np.concatenate([shard.dense for shard in split.shards])
        assert found["piece"].cast(int).to_list() == (dense[:, 1] - 1).tolist()
        assert found["count_user"].to_list() == dense[:, 2].tolist()


def derived_recipe(schema: Schema) -> Recipe:
    def derive(frames: Any, _: Schema) -> pl.LazyFrame:
        return frames["log"].filter(pl.col("row") % 3 > 0).with_columns(own=pl.col("row") * 2, click=pl.col("click"))

    columns = {"row": "int", "id": "string", "user": "int", "when": "string", "price": "float", "click": "float"}
    return Recipe(
        name="thirds", description="two rows of three", presets={"a": lambda: schema}, derive=derive,
        inputs={"log": RawInput(files=("*",), columns={**columns, "city": "string", "seen": "string"})},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("featured", [False, True])
def test_derived_rows_keep_their_columns(tmp_path: Path, featured: bool) -> None:
    raw = log(300)
    path = write(raw, tmp_path, 0, "csv")
    schema = replace(SCHEMA, keep=("own", "id"))
    recipe = derived_recipe(schema.with_feature("count by=user") if featured else schema)
    data = stoker.prepare(recipe, path, out=tmp_path / "d")
    check_aligned(data, raw.with_columns(own=pl.col("row") * 2), ("own", "id"))
    more = stoker.prepare(recipe, path, out=tmp_path / "e", keep="user")
    check_aligned(more, raw.with_columns(own=pl.col("row") * 2), ("own", "id", "user"))
    with pytest.raises(DataError, match=r"recipe thirds derives have no column 'usr', which keep.*mean 'user'\?"):
        stoker.prepare(recipe, path, out=tmp_path / "x", keep=["usr"])


@pytest.mark.slow
def test_in_memory_saved_reordered_classified_and_prepared_like(tmp_path: Path) -> None:
    raw = log()
    path = write(raw, tmp_path, 0, "parquet")
    columns = ("id", "user", "when")
    schema = replace(SCHEMA, keep=columns)
    data = stoker.prepare(schema, path, out=tmp_path / "d")
    memory = stoker.prepare(schema, path)
    check_aligned(memory, raw, columns)
    assert digests(memory.save(tmp_path / "saved").path) == digests(data.path)
    for name, source in (("files", data), ("memory", memory)):
        check_aligned(stoker.reorder(source, tmp_path / f"{name}-r", tables=["user"]), raw, columns)
        hot = {"hot_rows": {"user": 10, "city": 4, "seen": 4}, "profile_hash": "a", "profile": {}}
        write_classified(source, tmp_path / f"{name}-h", **hot)  # type: ignore[arg-type]
        check_aligned(stoker.Dataset(tmp_path / f"{name}-h"), raw, columns)
    train = pickle.loads(pickle.dumps(memory.train))  # by a worker process
    assert table(train).equals(table(data.train))
    path.unlink()
    new = write(raw.drop("click"), tmp_path, 1, "parquet")
    like = stoker.prepare(files=new, like=data.path, out=tmp_path / "like", keep=["city"])
    check_aligned(like, raw, (*columns, "city"))
    assert len(like.test) == 900
    assert like.schema_hash == data.schema_hash


def test_a_kept_label_may_be_absent_from_rows_to_score(tmp_path: Path) -> None:
    raw = log(200)
    data = stoker.prepare(SCHEMA, write(raw, tmp_path, 0, "csv"), out=tmp_path / "d")
    new = stoker.prepare(files=write(raw.drop("click"), tmp_path, 1, "csv"), like=data.path, out=tmp_path / "like")
    assert table(new.test)["click"].null_count() == 200
    assert table(new.test)["id"].to_list() == raw["id"].to_list()


def test_classified_rows_take_their_columns_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.prep.write.publish.SHARD_ROWS", 50)
    raw = log()
    schema = replace(SCHEMA, keep=("id", "user"), sequence=())
    path = write(raw, tmp_path, 0, "parquet")
    data = stoker.prepare(schema, path, out=tmp_path / "d")
    profile: dict[str, Any] = {"hot_rows": {"user": 10, "city": 4}, "profile_hash": "a", "profile": {}}
    assert len(data.train.shards) > 1
    write_classified(data, tmp_path / "hot", **profile)
    hot = stoker.Dataset(tmp_path / "hot")
    assert 0 < len(hot.hot) < len(data.train)
    check_aligned(hot, raw, ("id", "user"))
    assert hot.verify() > 0
    both = pl.concat([table(hot.hot), table(hot.cold)])
    assert both.equals(table(hot.train))
    assert write_classified(data, tmp_path / "hot", **profile).reused
    other = stoker.prepare(schema, path, out=tmp_path / "d2", keep="city")
    with pytest.raises(DataError, match="already holds a dataset"):
        write_classified(other, tmp_path / "hot", **profile)


def test_row_groups_do_not_depend_on_how_rows_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "KEPT_ROWS", 64)
    source = pa.table({"id": pa.array(range(500))})
    for name, step in (("a", 500), ("b", 7), ("c", 64)):
        with kept_module.kept_writer(tmp_path / name, source.schema) as writer:
            for start in range(0, 500, step):
                writer.write(source.slice(start, step))
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1
    entry = {"sha256": digests(tmp_path)["a"]}
    kept = kept_module.KeptColumns(tmp_path / "a", entry, 100, 400)
    for start, stop in ((0, 400), (0, 1), (27, 29), (28, 28), (3, 300), (399, 500)):
        assert kept.read(start, stop)["id"].to_pylist() == list(range(100 + start, 100 + min(stop, 400)))


def model_of(data: stoker.Dataset) -> Any:
    torch.manual_seed(0)
    return stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), backend="reference")


@pytest.mark.slow
def test_scores_carry_the_columns_of_their_rows(tmp_path: Path) -> None:
    raw = log()
    path = write(raw, tmp_path, 0, "parquet")
    data = stoker.prepare(replace(SCHEMA, keep=("id", "click", "row")), path, out=tmp_path / "d")
    model = model_of(data)
    every = stoker.predict(model, data.train)
    for rows, size in ((None, 8192), (100, 16), (101, 64), (1, 7)):
        count = len(data.train) if rows is None else rows
        found = stoker.predict(model, data.train, tmp_path / "s.parquet", rows=rows, batch_size=size)
        assert found.kept is not None
        assert found.kept["id"].to_pylist() == table(data.train)["id"].to_list()[:count]
        assert np.allclose(found.scores, every.scores[:count], atol=1e-6)
        written = pl.read_parquet(tmp_path / "s.parquet")
        assert written.columns == ["row", "label", "id", "click", "raw_row", "score"]
        assert written["id"].to_list() == found.kept["id"].to_pylist()
        assert written["raw_row"].to_list() == [int(data.train[n]["dense"][0]) for n in range(count)]
        assert written["score"].to_list() == found.scores.tolist()
        (tmp_path / "s.parquet").unlink()
    stoker.predict(model, data.test, tmp_path / "s.csv")
    assert pl.read_csv(tmp_path / "s.csv")["raw_row"].to_list() == table(data.test)["row"].to_list()


def test_no_kept_column_takes_the_name_of_another() -> None:
    kept = pa.table({"raw_row": [5], "row": [6], "group": [7]})
    scores = Scores(scores=np.zeros(1, np.float32), labels=None, groups=np.ones(1, np.int32), kept=kept)
    found = pa.table(scores).to_pydict()
    assert found == {
        "row": [0], "label": [None], "raw_row": [5], "raw_raw_row": [6], "raw_group": [7], "score": [0.0], "group": [1],
    }  # fmt: skip


@pytest.mark.slow
def test_scores_over_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.prep.write.publish._LEAST_ROWS", 64)
    monkeypatch.setattr("stoker.prep.write.publish._SHARD_BYTES", 2**11)
    monkeypatch.setattr(kept_module, "KEPT_ROWS", 50)
    raw = log()
    data = stoker.prepare(replace(SCHEMA, keep=("id", "row")), write(raw, tmp_path, 0, "csv"), out=tmp_path / "d")
    assert len(data.train.shards) > 4
    check_aligned(data, raw.with_columns(pl.col("row").cast(float)), ("id", "row"))
    found = stoker.predict(model_of(data), data.train, rows=333, batch_size=50)
    assert found.kept is not None
    assert found.kept["row"].to_pylist() == [float(data.train[n]["dense"][0]) for n in range(333)]


@pytest.mark.slow
@pytest.mark.parametrize("featured", [False, True])
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_misspelt_column_is_named_with_the_nearest(tmp_path: Path, kind: str, featured: bool) -> None:
    path = write(log(), tmp_path, 0, kind)
    schema = replace(SCHEMA, keep=("id", "usr"))
    with pytest.raises(DataError, match=r"'usr', which keep names.*Did you mean 'user'\?") as caught:
        stoker.prepare(schema.with_feature("count by=city") if featured else schema, path, out=tmp_path / "d")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="keep names 'id' twice"):
        replace(SCHEMA, keep=("id", "user", "id"))
    raw = log(100).with_columns(pl.col("seen").str.split("|"), blob=pl.lit(b"\xff"))
    raw.write_parquet(tmp_path / "log.parquet")
    for column, said in (("seen", r"column seen holds List\(String\), and keep"), ("blob", "bytes that are not text")):
        with pytest.raises(DataError, match=said):
            stoker.prepare(replace(SCHEMA, keep=(column,)), tmp_path / "log.parquet", out=tmp_path / column)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    data = stoker.prepare(SCHEMA, write(log(), tmp_path, 0, "csv"), out=tmp_path / "d")
    path = data.path / "keep/test.parquet"
    raw = bytearray(path.read_bytes())
    raw[40] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"test\.parquet is damaged"):
        stoker.predict(model_of(data), data.test)
    with pytest.raises(DataError, match="was altered"):
        data.verify()
    path.unlink()
    with pytest.raises(DataError, match=r"test\.parquet is missing"):
        stoker.Dataset(data.path)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(log(), tmp_path, 0, "csv")
    run_prepare(SCHEMA, path, out=tmp_path / "a", block_bytes=2**12)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stoker.prep.write.publish._write_kept", stop)
        with pytest.raises(KeyboardInterrupt):
            run_prepare(SCHEMA, path, out=tmp_path / "b", block_bytes=2**12)
    assert run_prepare(SCHEMA, path, out=tmp_path / "b", block_bytes=2**12).reused
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_schema_with_keep_goes_to_files_and_back(tmp_path: Path) -> None:
    assert Schema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA
    (tmp_path / "s.toml").write_text('label = "y"\nkeep = "user"\n[[dense]]\nname = "x"\n')
    with pytest.raises(SchemaError, match=r"keep must be a list of texts such as .*, found 'user'"):
        Schema.from_file(tmp_path / "s.toml")
