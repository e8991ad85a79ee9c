"""One id is one text, whatever type a file, a frame or a request gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import stoker
from stoker.base.files import seal
from stoker.prep.like import Like
from stoker.prep.parse.json_lines import parsed
from stoker.prep.parse.notation import AS_TYPED, notation_of, text_of_floats, written
from stoker.prep.requests import Fitted, RowEncoder

SCHEMA = {
    "label": "label",
    "categorical": [{"name": "user"}, {"name": "item", "hash_buckets": 50}, {"name": "new"}],
    "sequence": [{"name": "seen", "max_length": 3}],
    "derive": ["mean_target by=user"],
}


def log(number: Any = str, truth: tuple[Any, Any] = ("True", "False"), rows: int = 60) -> dict[str, list[Any]]:
    draws = np.random.default_rng(4).integers(0, 9, (rows, 3)).tolist()
    return {
        "label": [int((user + item) % 3 == 0) for user, item, _ in draws],
        "user": [number(100 + user) for user, _, _ in draws],
        "item": [number(item) for _, item, _ in draws],
        "new": [truth[other % 2] for _, _, other in draws],
        "seen": [[number(100 + user), number(item)] for user, item, _ in draws],
    }


def csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    lists = pl.DataFrame(columns).with_columns(pl.col("seen").cast(pl.List(pl.String)).list.join("|"))
    lists.write_csv(path)
    return path


def prepared(tmp_path: Path, file: Path, **more: Any) -> stoker.Dataset:
    return stoker.prepare(stoker.Schema.from_dict({**SCHEMA, **more}), file, out=tmp_path / "data")


def encoded(data: stoker.Dataset, rows: Any) -> list[list[Any]]:
    batch = RowEncoder(Fitted.of(Like(data.path))).encode(rows)
    assert batch.offsets is not None
    return [batch.dense.tolist(), batch.ids.tolist(), batch.offsets.tolist()]


@pytest.mark.parametrize("dotted", [False, True])
def test_ids_of_any_type_are_those_of_the_log(tmp_path: Path, dotted: bool) -> None:
    """A log of whole numbers, or one that pandas wrote after a missing value; new rows in every type."""
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log(lambda number: f"{number}.0" if dotted else f"{number}")))
    texts, floats, whole = log(), log(float, (True, False)), log(int, (True, False))
    del texts["label"], floats["label"], whole["label"]
    wanted = encoded(data, pl.DataFrame(texts))
    assert 0 not in wanted[1]
    assert encoded(data, pl.DataFrame(floats)) == wanted
    assert encoded(data, pl.DataFrame(whole)) == wanted
    assert encoded(data, pd.DataFrame(floats)) == wanted
    floats["user"][0] = whole["user"][0] = texts["user"][0] = None  # the row that made them floats
    assert encoded(data, pd.DataFrame(floats)) == encoded(data, pd.DataFrame(texts)) != wanted


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_files_like_a_dataset_follow_its_notation(tmp_path: Path, suffix: str) -> None:
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log()))
    wanted = stoker.prepare(None, tmp_path / "log.csv", out=tmp_path / "same", like=data).test
    columns = log(float, ("true", "false"))
    file = tmp_path / f"new.{suffix}"
    if suffix == "parquet":
        pl.DataFrame(columns).write_parquet(file)
    elif suffix == "csv":
        csv(file, columns)
    else:
        file.write_text("\n".join(json.dumps(row) for row in pl.DataFrame(columns).to_dicts()) + "\n")
    found = stoker.prepare(None, file, out=tmp_path / "new", like=data).test
    for one, other in zip(wanted.batches(60), found.batches(60), strict=True):
        assert one.offsets is not None
        assert other.offsets is not None
        assert (one.ids == other.ids).all()
        assert (one.dense == other.dense).all()
        assert (one.ids > 0).all()


def test_days_of_one_log_may_have_whole_numbers_or_floats(tmp_path: Path) -> None:
    """pandas writes a column as floats on the day that has a missing value."""
    pl.DataFrame(log(int)).write_parquet(tmp_path / "1.parquet")
    pl.DataFrame(log(float)).write_parquet(tmp_path / "2.parquet")
    schema = stoker.Schema.from_dict(SCHEMA)
    data = stoker.prepare(schema, [tmp_path / "1.parquet", tmp_path / "2.parquet"], out=tmp_path / "data")
    assert len(Like(data.path).vocabulary("user")) == 9


def test_grown_ids_are_found_again_in_another_type(tmp_path: Path) -> None:
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log()))
    columns = log(float)
    columns["user"] = [user + 50 for user in columns["user"]]
    pl.DataFrame(columns).write_parquet(tmp_path / "new.parquet")
    grown = stoker.prepare(None, tmp_path / "new.parquet", out=tmp_path / "grown", like=data, grow=True)
    known = Like(grown.path).vocabulary("user").get_column("value").to_list()
    assert sorted(known) == sorted(str(100 + user) for user in (*range(9), *range(50, 59)))


def test_datasets_of_earlier_versions_keep_their_texts_of_floats(tmp_path: Path) -> None:
    """Where no vocabulary tells, as with hash buckets, floats are hashed as they were."""
    pl.DataFrame(log(lambda number: f"{number}.0")).write_parquet(tmp_path / "log.parquet")
    data = prepared(tmp_path, tmp_path / "log.parquet")
    manifest = json.loads((data.path / "manifest.json").read_text())
    del manifest["notation"]
    (data.path / "manifest.json").write_text(json.dumps(seal(manifest)))
    assert Like(data.path).schema.notation_of("item") == AS_TYPED
    texts, floats = log(lambda number: f"{number}.0"), log(float)
    del texts["label"], floats["label"]
    assert encoded(stoker.Dataset(data.path), pl.DataFrame(floats)) == encoded(data, pl.DataFrame(texts))


def test_requests_of_numbers_are_written_as_the_dataset_is(tmp_path: Path) -> None:
    """A log of floats, some of them whole, whose rows come again as JSON numbers and as a frame."""
    sizes = [7.0, 7.5, 8.0, 136.0] * 20
    rows = pl.DataFrame({"label": [0, 1] * 40, "size": sizes, "hashed": sizes, "user": sizes})
    values = {"label": "label", "derive": ["cross columns=user,size buckets=20"],
              "categorical": [{"name": "size"}, {"name": "hashed", "hash_buckets": 9}]}  # fmt: skip
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    encoder = RowEncoder(Fitted.of(Like(data.path)))
    asked = rows.drop("label")
    wanted = encoder.encode(asked).ids.tolist()
    text = "\n".join(json.dumps(row) for row in asked.to_dicts())
    assert encoder.from_objects([parsed(line.encode()) for line in text.splitlines()]).ids.tolist() == wanted
    assert [batch.ids.tolist() for batch in data.train.batches(80)] == [wanted]
    assert all(min(row) > 0 for row in wanted)
    rows.write_ndjson(tmp_path / "log.jsonl")
    again = stoker.prepare(None, tmp_path / "log.jsonl", out=tmp_path / "again", like=data)
    assert [batch.ids.tolist() for batch in again.test.batches(80)] == [wanted]


def test_floats_that_may_have_lost_digits_are_refused(tmp_path: Path) -> None:
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log()))
    rows = {**log(float), "user": [2.0**53, *log(float)["user"][1:]]}
    del rows["label"]
    with pytest.raises(stoker.DataError, match="row 0: column user: the float 9007199254740992 may have lost digits"):
        encoded(data, pl.DataFrame(rows))


def test_texts_are_left_alone_unless_whole_numbers_are_written_in_one_way() -> None:
    assert notation_of(pl.Series(["1", "2", None, ""])) == "1"
    assert notation_of(pl.Series(["7", "7.5", "guest"])) == "1", "other texts do not matter"
    assert notation_of(pl.Series(["1.0", "2.50", "guest"])) == "1.0"
    assert notation_of(pl.Series(["true", "false"])) == "true"
    for mixed in (["1", "1.0"], ["v1", "1.5"], ["True", "true"], [None, ""], []):
        assert notation_of(pl.Series(mixed, dtype=pl.String)) == ""
    assert notation_of(pl.Series([str(number) for number in range(2_000)] + ["7.0"])) == ""
    assert written(pl.Series(["7.0", "7.50", "v7.0", "-7.0", None]), "1").to_list() == ["7", "7.50", "v7.0", "-7", None]
    assert written(pl.Series(["7", "7.5", "v7", None]), "1.0").to_list() == ["7.0", "7.5", "v7", None]
    floats = pl.Series([7.0, -0.0, 7.5, 1e15, 1e16, float("inf"), None])
    assert text_of_floats(floats).to_list() == ["7", "0", "7.5", "1000000000000000", None, "inf", None]
    assert text_of_floats(pl.Series([0.1, 7.0, 2.0**24], dtype=pl.Float32)).to_list() == ["0.1", "7", None]


def test_an_export_follows_the_notation_of_its_dataset(tmp_path: Path) -> None:
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log()))
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,))
    stoker.save(tmp_path / "step", model)
    stoker.export(tmp_path / "step", tmp_path / "out", data=data.path)
    texts, floats = pl.DataFrame(log()).drop("label"), pl.DataFrame(log(float, (True, False))).drop("label")
    wanted = stoker.Scorer(model, data).score(texts)
    assert len(set(wanted.tolist())) > 20
    assert stoker.Scorer(tmp_path / "out").score(floats).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("unit", ["ms", "datetime"])
def test_times_in_another_unit_are_refused(tmp_path: Path, unit: str) -> None:
    """By prepare and by a scorer: window features would be wrong without a word."""
    rows = pl.DataFrame(log()).with_columns(when=1_700_000_000 + 60 * pl.int_range(60))
    more = {"timestamp": {"column": "when"}, "derive": ["past_count by=user order=when window=3600"]}
    rows.with_columns(pl.col("seen").list.join("|")).write_csv(tmp_path / "log.csv")
    data = prepared(tmp_path, tmp_path / "log.csv", **more)
    new = rows.with_columns(when=pl.col("when") + 3600)
    other = new.with_columns(when=pl.col("when") * 1000 if unit == "ms" else pl.from_epoch("when"))
    assert encoded(data, new.drop("label"))
    with pytest.raises(stoker.DataError, match=r"these are seconds since 1970, and the new ones (milli|micro)seconds"):
        encoded(data, other.drop("label"))
    with pytest.raises(stoker.DataError, match=r"these are seconds since 1970, and the new ones (milli|micro)seconds"):
        stoker.prepare(None, other, out=tmp_path / "new", like=data)
    assert not (tmp_path / "new").exists()
    assert len(stoker.prepare(None, new, out=tmp_path / "new", like=data).test) == 60


GERMAN = "user;price;rating;count\n" + "".join(
    f"u{row % 9};{'1.234,5' if row % 7 == 0 else f'{row},25'};{1 + row % 4},{5 * (row % 2)};{row % 4}\n"
    for row in range(200)
)


def test_numbers_with_a_decimal_comma_are_those_with_a_point(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(GERMAN)
    text = stoker.draft_schema(tmp_path / "log.csv")
    assert 'decimal = ","' in text
    (tmp_path / "schema.toml").write_text(text)
    data = stoker.prepare(tmp_path / "schema.toml", tmp_path / "log.csv", out=tmp_path / "data", split="random:1,0")
    (tmp_path / "points.csv").write_text(GERMAN.replace("1.234,5", "1234.5").replace(",", "."))
    (tmp_path / "points.toml").write_text(text.replace('decimal = ","', ""))
    other = stoker.prepare(
        tmp_path / "points.toml", tmp_path / "points.csv", out=tmp_path / "other", split="random:1,0"
    )
    assert "price" in data.schema.dense
    for ours, theirs in zip(data.train.batches(50), other.train.batches(50), strict=True):
        assert (ours.dense == theirs.dense).all()
        assert (ours.labels == theirs.labels).all()
        assert (ours.ids == theirs.ids).all()
    assert not data.manifest["quarantined"]


def test_a_decimal_point_is_a_bad_line_there_and_a_comma_elsewhere_has_a_remedy(tmp_path: Path) -> None:
    values = {"label": "y", "dense": [{"name": "x"}], "categorical": [{"name": "u"}]}
    prices = ["1,5", "1.500", " -2,25 ", "1.5", "", *["7"] * 95]
    rows = pl.DataFrame({"y": [0, 1] * 50, "u": ["a"] * 100, "x": prices})
    rows.write_csv(tmp_path / "log.csv", separator=";")
    schema = stoker.Schema.from_dict({**values, "source": {"separator": ";", "decimal": ","}})
    data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data", split="random:1,0", max_bad=0.5)
    bad = (data.path / "quarantine.jsonl").read_text()
    assert bad.count("\n") == 1
    assert "column x: '1.5' is not a number" in bad
    assert [float(data.train[row]["dense"][0]) for row in range(3)] == [1.5, 1500.0, -2.25]
    encoder = RowEncoder(Fitted.of(Like(data.path)))
    assert encoder.encode(pl.DataFrame({"u": ["a"], "x": ["1,5"]})).dense.tolist() == [[1.5]]
    plain = stoker.Schema.from_dict({**values, "source": {"separator": ";"}})
    with pytest.raises(stoker.DataError, match=r'decimal comma: set decimal = ","'):
        stoker.prepare(plain, rows.with_columns(x=pl.lit("3,5")), out=tmp_path / "none")
