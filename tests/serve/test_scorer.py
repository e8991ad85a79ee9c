"""Rows scored in memory: equal to `stoker predict` to the bit, however rows are divided into requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.prep.like import Like
from stoker.prep.parse.dictionaries import text_hashes
from stoker.prep.parse.json_lines import parsed
from stoker.prep.requests import FittedSchema, Ids, RowEncoder
from stoker.prep.schema import Schema
from stoker.testing import make_daily_run
from stoker.training.scores import tiles
from tests.campaigns import scaled

SCHEMA: dict[str, Any] = {
    "name": "shop",
    "label": "bought",
    "derive": ["mean_target name=rate by=item", "divide name=per_page left=price right=pages"],
    "categorical": [
        {"name": "customer"}, {"name": "item", "type": "int", "missing": "category"},
        {"name": "word", "hash_buckets": 7},
        {"name": "tag", "type": "hex"}, {"name": "size", "type": "float", "min_count": 3},
    ],
    "sequence": [{"name": "past", "type": "int", "max_length": 3, "table": "item"}],
    "dense": [
        {"name": "price", "fill": "median", "transforms": ["log1p", "zscore"], "null_flag": True},
    ],
}  # fmt: skip


def log(rows: int, seed: int) -> pl.DataFrame:
    random = np.random.default_rng(seed)

    def some(values: Any, share: float = 0.1) -> Any:
        return pl.Series(values).set(pl.Series(random.random(rows) < share), None)

    texts = np.array(["", "ann", "bob", "zoë", "日本", "a longer text than twelve bytes"])
    return pl.DataFrame({
        "bought": random.integers(0, 2, rows), "customer": some(texts[random.integers(0, 6, rows)]),
        "item": some(random.integers(-3, 30, rows)), "word": some(texts[random.integers(0, 6, rows)]),
        "tag": some([f"{v:x}" for v in random.integers(0, 40, rows)]),
        "size": some(random.choice([0.0, -0.0, 1.5, 2.25, 1e300], rows)),
        "past": [random.integers(-3, 30, n).tolist() for n in random.integers(0, 5, rows)],
        "price": some(np.round(random.lognormal(2, 1, rows), 3)), "pages": some(random.integers(0, 5, rows)),
    })  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    data = stoker.prepare(Schema.from_dict(SCHEMA), log(600, 0), out=folder / "data", split="random:0.8,0.1")
    stoker.train(data, out=folder / "run", display="quiet", embedding_dim=4, batch_size=64, epochs=1,
                 model_options={"bottom": (24,), "top": (40, 8)})  # fmt: skip
    return folder / "run"


def predicted(run: Path, rows: pl.DataFrame) -> Any:
    """Return the scores of `stoker predict --data`, whose rows go through files."""
    data = stoker.prepare(like=run.with_name("data"), files=rows)
    return stoker.predict(stoker.load(run).model, data.test).scores


def pieces(rows: pl.DataFrame, cuts: list[int]) -> list[pl.DataFrame]:
    places = [0, *sorted(cut % (rows.height + 1) for cut in cuts), rows.height]
    return [rows[a:b] for a, b in pairwise(places)]


@pytest.fixture(scope="module")
def truth(run: Path) -> tuple[stoker.Scorer, pl.DataFrame, Any]:
    rows = log(700, 1)
    return stoker.Scorer(run), rows.drop("bought"), predicted(run, rows)


@pytest.mark.slow
@settings(max_examples=scaled(40), deadline=None)
@given(cuts=st.lists(st.integers(0, 700), max_size=6), kind=st.sampled_from(["polars", "pandas", "arrow", "json"]))
def test_scores_are_those_of_predict(
    truth: tuple[stoker.Scorer, pl.DataFrame, Any], cuts: list[int], kind: str
) -> None:
    scorer, rows, wanted = truth
    found = []
    for each in pieces(rows, cuts):
        table: Any = each
        if kind == "json":
            if each.height:
                objects = parsed(json.dumps(each.to_dicts()).encode())
                found.append(scorer.score_batch(scorer.encoder.from_objects(objects)))
            continue
        if kind == "arrow":
            table = each.to_arrow()
        elif kind == "pandas" and each.height:
            table = each.with_columns(pl.col("past").cast(pl.List(pl.Int64))).to_pandas()
        found.append(scorer.score(table))
    assert np.concatenate(found).tobytes() == wanted.tobytes()


@pytest.mark.slow
def test_texts_that_mean_missing_and_decimal_commas_are_those_of_the_log(tmp_path: Path) -> None:
    source = {"separator": ";", "decimal": ",", "null_values": ["NA", "-1", "1e3"]}
    schema = Schema.from_dict({
        "name": "shop", "label": "bought", "source": source,
        "categorical": [{"name": "item", "hash_buckets": 50}, {"name": "shelf", "type": "int", "missing": "category"}],
        "dense": [{"name": "price", "null_flag": True, "fill": 0.25}],
    })  # fmt: skip
    random = np.random.default_rng(0)
    rows = pl.DataFrame({
        "bought": random.integers(0, 2, 300), "item": random.choice(["NA", "a", "b", "c"], 300),
        "shelf": random.integers(-1, 4, 300),
        "price": random.choice([0.125, 1.5, 1234.5, 0.0, -1.0, 1e-7, 2e20], 300),
    })  # fmt: skip
    written = ["0,125", "1,5", "1.234,5", "0", "-1", "0,0000001", "200000000000000000000"]
    texts = rows.with_columns(
        pl.col("price").replace_strict([0.125, 1.5, 1234.5, 0.0, -1.0, 1e-7, 2e20], written, return_dtype=pl.String)
    )
    for name, each in (("log.csv", texts), ("new.csv", texts)):
        each.write_csv(tmp_path / name, separator=";")
    texts.write_parquet(tmp_path / "texts.parquet")
    rows.write_parquet(tmp_path / "new.parquet")
    rows.with_columns(pl.col("item").cast(pl.Categorical)).write_parquet(tmp_path / "categories.parquet")
    rows.with_columns(pl.col("item").cast(pl.Binary)).write_parquet(tmp_path / "bytes.parquet")
    rows.write_ndjson(tmp_path / "new.jsonl")
    mixed = [rows.row(0, named=True), *texts.rows(named=True)[1:]]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(each) + "\n" for each in mixed))
    data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data", split="random:0.8,0.1")
    model = stoker.train(data, out=tmp_path / "run", display="quiet", embedding_dim=4, batch_size=64, epochs=1).model

    def scores(name: str) -> Any:
        return stoker.predict(model, stoker.prepare(files=tmp_path / name, like=tmp_path / "data").test).scores

    wanted = scores("new.csv")
    for name in ("new.parquet", "texts.parquet", "categories.parquet", "bytes.parquet", "new.jsonl", "mixed.jsonl"):
        assert scores(name).tobytes() == wanted.tobytes(), name
    scorer = stoker.Scorer(tmp_path / "run")
    for table in (rows, texts):
        assert scorer.score(table.drop("bought")).tobytes() == wanted.tobytes()
        objects = parsed(json.dumps(table.drop("bought").to_dicts()).encode())
        assert scorer.score_batch(scorer.encoder.from_objects(objects)).tobytes() == wanted.tobytes()


def test_rows_that_do_not_fit_are_refused_by_name(truth: tuple[stoker.Scorer, pl.DataFrame, Any]) -> None:
    scorer, rows, _ = truth
    some = rows.head(3)
    for table, words in [
        (some.drop("price"), "lack 'price'"),
        (some.with_columns(color=1), "does not know: 'color'"),
        (some.with_columns(price=pl.Series(["1", "two", "3"])), "row 1: column price: 'two' is not a number"),
        (some.with_columns(price=pl.Series([1.0, 2.0, float("inf")])), "row 2: column price: 'inf'"),
        (some.with_columns(item=1.5), "row 0: column item: '1.5' is not a whole number"),
        ({"price": [1]}, "a dict is not a table"),
    ]:
        with pytest.raises(stoker.DataError, match="(?s)" + words.replace("(", r"\(")):
            scorer.score(table)
    assert len(scorer.score(some.with_columns(color=1), unknown=True)) == 3
    assert len(scorer.score(some.head(0))) == 0


@pytest.mark.slow
def test_window_features_go_on_from_the_state_in_each_request(tmp_path: Path) -> None:
    schema = Schema.from_dict({
        "name": "seen", "label": "bought", "timestamp": {"column": "at", "type": "int"},
        "derive": ["past_count name=sold by=item order=at window=50", "since_last name=since by=user order=at"],
        "categorical": [{"name": "item", "type": "int"}, {"name": "user", "type": "int"}],
    })  # fmt: skip
    random = np.random.default_rng(3)
    days = [pl.DataFrame({"bought": random.integers(0, 2, 300), "at": np.arange(day * 300, day * 300 + 300) // 2,
                          "item": random.integers(0, 9, 300), "user": random.integers(0, 9, 300)})
            for day in range(2)]  # fmt: skip
    data = stoker.prepare(schema, days[0], out=tmp_path / "data", split="time:0.8,0.1")
    stoker.train(data, out=tmp_path / "run", display="quiet", embedding_dim=4, batch_size=64, epochs=1)
    scorer = stoker.Scorer(tmp_path / "run")
    assert not scorer.encoder.independent
    for each in pieces(days[1], [1, 17, 150]):
        assert scorer.score(each.drop("bought")).tobytes() == predicted(tmp_path / "run", each).tobytes()
    requests = [each.drop("bought").to_arrow() for each in pieces(days[1], [1, 17, 150])]
    for found, rows in zip(scorer.score_together(requests), requests, strict=True):
        assert found.tobytes() == scorer.score(rows).tobytes(), "requests do not see each other's rows"


def test_requests_that_are_scored_together_are_as_alone(truth: tuple[stoker.Scorer, pl.DataFrame, Any]) -> None:
    scorer, rows, wanted = truth
    frames = pieces(rows.head(90), [10, 20, 30, 40, 60])
    objects = [parsed(json.dumps(each.to_dicts()).encode()) for each in frames]
    narrow = frames[1].with_columns(pl.col("item").cast(pl.Int8)).to_arrow()
    requests = [frames[0].to_arrow(), narrow, frames[2].to_arrow(), objects[3], objects[4], frames[5].to_arrow()]
    found = scorer.score_together(requests)
    assert [len(each) for each in found] == [10, 10, 10, 10, 20, 30]
    assert np.concatenate(found).tobytes() == wanted[:90].tobytes()
    short = [{key: value for key, value in one.items() if key != "item"} for one in objects[4]]
    with pytest.raises(stoker.DataError, match="lack 'item'"):
        scorer.score_together([objects[3], short])


@pytest.mark.parametrize("values", [[3, None], ["a", None]])
def test_a_vocabulary_without_values_knows_none(values: list[Any]) -> None:
    column = pl.Series(values)
    known = pl.DataFrame({"value": column.clear(), "count": pl.Series([], dtype=pl.Int64)})
    assert Ids.of(known).find(column).tolist() == [0, 0]


@pytest.mark.slow
def test_texts_of_one_hash_are_told_apart() -> None:
    key = int(text_hashes(pl.Series(["ann"]), 0)[0])
    columns = {"key": pa.array([key, key, key], pa.uint64()), "id": [5, 6, 7], "text": ["annie", "bob", "ann"]}
    table = pa.table({**columns, "text": pa.array(columns["text"], pa.large_string())})
    known = Ids(table.replace_schema_metadata({"missing": "0"}))
    assert known.find(pl.Series(["eve", "ann", None, "bob", "ann"])[1:]).tolist() == [7, 0, 0, 7]  # bob's hash differs


class Own(stoker.RecModel):
    """A model of a user, with what behaves otherwise in training mode."""

    name = "own"

    def __init__(self, spec: stoker.FeatureSpec) -> None:
        super().__init__(spec, embedding_dim=4)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )

    def dense_part(self, dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(embedded.flatten(1)).squeeze(1)
        return found


def test_warming_up_is_no_training(tmp_path: Path) -> None:
    [day] = make_daily_run(tmp_path / "run", days=1)
    data = stoker.Dataset(tmp_path / "run-data")
    model = Own(data.schema)
    scorer = stoker.Scorer(model, data)
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert scorer.warm_up() == ""
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert {key[0] for key in tiles._blocks_of(model)._same} >= {64, 128, 512}
    offline = stoker.predict(model, stoker.prepare(files=day, like=data.path).test)
    assert scorer.score(day.drop("click")).tobytes() == np.asarray(offline.scores).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("time", [{"type": "int"}, {"type": "datetime", "format": "%d.%m.%Y"}])
def test_warming_up_takes_a_time_that_rows_must_have(tmp_path: Path, time: dict[str, str]) -> None:
    schema = Schema.from_dict({
        "name": "seen", "label": "bought", "timestamp": {"column": "at", **time},
        "derive": ["past_count by=item order=at"], "categorical": [{"name": "item"}, {"name": "user"}],
    })  # fmt: skip
    days = [f"{day:02}.03.2026" if "format" in time else str(day) for day in range(1, 21)]
    rows = pl.DataFrame({"bought": [0, 1] * 10, "item": ["a", None] * 10, "user": "b", "at": days})
    data = stoker.prepare(schema, rows, out=tmp_path / "data", split="time:0.8,0.1")
    scorer = stoker.Scorer(Own(data.schema), data)
    assert scorer.warm_up() == ""
    assert tiles._blocks_of(scorer.model)._same
    stoker.save(tmp_path / "step", stoker.DLRM(data.schema, embedding_dim=4, bottom=(4,), top=(4,)))
    made = stoker.export(tmp_path / "step", tmp_path / "out", data=data.path).path
    assert stoker.Scorer(made).warm_up() == "", "an export knows the time, too"


@pytest.mark.slow
def test_rows_from_the_past_are_refused_without_saying_where_files_are(tmp_path: Path) -> None:
    schema = {
        "label": "y",
        "derive": ["past_count name=seen by=item order=t"],
        "categorical": [{"name": "item"}],
        "dense": [{"name": "t"}],
    }
    rows = pl.DataFrame({"y": [0, 1] * 50, "item": ["a"] * 100, "t": range(100)})
    data = stoker.prepare(Schema.from_dict(schema), rows, out=tmp_path / "data", split="random:0.8,0.1")
    with pytest.raises(
        stoker.DataError, match=r"t = 7.*before the last such row of the model's data \(t = 99"
    ) as caught:
        RowEncoder(FittedSchema.of(Like(data.path))).encode(pl.DataFrame({"item": ["a"], "t": [7]}))
    assert str(tmp_path) not in str(caught.value), "clients of a server see the error"
