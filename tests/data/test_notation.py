"""One id is one text, whatever type a file, a frame or a request gives it."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import stoker
from stoker.base.files import seal
from stoker.prep.like import Like
from stoker.prep.parse import floats
from stoker.prep.parse.floats import as_double, in_way, way_of
from stoker.prep.parse.json_lines import parsed
from stoker.prep.parse.notation import AS_TYPED, PLAIN, SINGLE, agreed, notation_of, text_of_floats, written
from stoker.prep.requests import FittedSchema, RowEncoder

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
    batch = RowEncoder(FittedSchema.of(Like(data.path))).encode(rows)
    assert batch.offsets is not None
    return [batch.dense.tolist(), batch.ids.tolist(), batch.offsets.tolist()]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_grown_ids_are_found_again_in_another_type(tmp_path: Path) -> None:
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log()))
    columns = log(float)
    columns["user"] = [user + 50 for user in columns["user"]]
    pl.DataFrame(columns).write_parquet(tmp_path / "new.parquet")
    grown = stoker.prepare(None, tmp_path / "new.parquet", out=tmp_path / "grown", like=data, grow=True)
    known = Like(grown.path).vocabulary("user").get_column("value").to_list()
    assert sorted(known) == sorted(str(100 + user) for user in (*range(9), *range(50, 59)))


def test_a_manifest_says_how_each_table_is_written_so_that_no_vocabulary_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an update brings the first whole numbers."""
    schema = {"label": "label", "categorical": [{"name": "user"}, {"name": "item", "table": "user"}, {"name": "new"}]}
    rows = {"label": [0, 1] * 4, "user": ["a", "b"] * 4, "item": ["a", "c"] * 4, "new": ["True", "False"] * 4}
    data = stoker.prepare(stoker.Schema.from_dict(schema), pl.DataFrame(rows), out=tmp_path / "data")
    assert data.manifest["notation"] == {"": PLAIN, "user": "", "new": "True"}
    more = pl.DataFrame({**rows, "user": ["7", "8"] * 4})
    grown = stoker.prepare(None, more, out=tmp_path / "grown", like=data, grow=True)
    assert grown.manifest["notation"] == {"": PLAIN, "user": "1", "new": "True"}
    later = stoker.prepare(None, more.with_columns(user=pl.lit("7.0")), out=tmp_path / "later", like=grown)
    assert later.manifest["notation"] == grown.manifest["notation"]
    assert all((batch.ids > 0).all() for batch in later.test.batches(8))
    read: list[str] = []
    monkeypatch.setattr(Like, "vocabulary", lambda like, name: read.append(name))
    assert (
        Like(later.path).schema.notation
        == Like(grown.path).schema.notation
        == {"user": "1", "item": "1", "new": "True"}
    )
    assert not read


def test_datasets_of_0_1_0_keep_their_texts_of_floats(tmp_path: Path) -> None:
    """Where no vocabulary tells, as with hash buckets, floats are hashed as they were."""
    pl.DataFrame(log(lambda number: f"{number}.0")).write_parquet(tmp_path / "log.parquet")
    data = prepared(tmp_path, tmp_path / "log.parquet")
    without_notation(data)
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
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
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


@pytest.mark.slow
def test_an_export_follows_the_notation_of_its_dataset(tmp_path: Path) -> None:
    data = prepared(tmp_path, csv(tmp_path / "log.csv", log()))
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,))
    stoker.save(tmp_path / "step", model)
    stoker.export(tmp_path / "step", tmp_path / "out", data=data.path)
    texts, floats = pl.DataFrame(log()).drop("label"), pl.DataFrame(log(float, (True, False))).drop("label")
    wanted = stoker.Scorer(model, data).score(texts)
    assert len(set(wanted.tolist())) > 20
    assert stoker.Scorer(tmp_path / "out").score(floats).tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["ms", "datetime"])
def test_times_in_another_unit_are_refused(tmp_path: Path, unit: str) -> None:
    """By prepare and by a scorer: window features would be wrong without a word. A time is in no unit."""
    rows = pl.DataFrame(log()).with_columns(when=1_700_000_000 + 60 * pl.int_range(60))
    more = {"timestamp": {"column": "when"}, "derive": ["past_count by=user order=when window=3600"]}
    rows.with_columns(pl.col("seen").list.join("|")).write_csv(tmp_path / "log.csv")
    data = prepared(tmp_path, tmp_path / "log.csv", **more)
    new = rows.with_columns(when=pl.col("when") + 3600)
    other = new.with_columns(when=pl.col("when") * 1000 if unit == "ms" else pl.from_epoch("when"))
    assert encoded(data, new.drop("label"))
    message = r"these are seconds since 1970, and the new ones milliseconds"
    if unit == "datetime":
        message = r'column when holds Datetime.*set type = "datetime" in \[timestamp\]'
    with pytest.raises(stoker.DataError, match=message):
        encoded(data, other.drop("label"))
    with pytest.raises(stoker.DataError, match=message):
        stoker.prepare(None, other, out=tmp_path / "new", like=data)
    assert not (tmp_path / "new").exists()
    assert len(stoker.prepare(None, new, out=tmp_path / "new", like=data).test) == 60


LIKE = {"label": "label", "categorical": [{"name": "flag"}]}


def ids_like(data: stoker.Dataset, values: Any, out: Path) -> list[list[Any]]:
    """Return the ids of values of the column flag by a request, and by a preparation like the dataset."""
    rows = pl.DataFrame({"flag": values, "label": [0] * len(values)})
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(rows.drop("label")).ids.tolist()
    again = stoker.prepare(None, rows, out=out, like=data, overwrite=True).test
    assert [asked] == [batch.ids.tolist() for batch in again.batches(len(rows))]
    return asked


WORDS = [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("1", "0"), ("1.0", "0.0")]


@pytest.mark.slow
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("third", [None, "maybe"])
def test_truth_values_have_one_id_in_any_type(tmp_path: Path, words: tuple[str, str], third: str | None) -> None:
    """Also where an update brought a third text."""
    texts = [words[row % 2] for row in range(60)]
    schema = stoker.Schema.from_dict(LIKE)
    rows = pl.DataFrame({"label": [0, 1, 1] * 20, "flag": texts})
    data = stoker.prepare(schema, rows, out=tmp_path / "data")
    if third is not None:
        more = rows.with_columns(flag=pl.lit(third))
        data = stoker.prepare(None, more, out=tmp_path / "grown", like=data, grow=True)
    wanted = ids_like(data, [*words], tmp_path / "new")
    assert 0 not in chain.from_iterable(wanted)
    for values in (
        [True, False],
        [1, 0],
        [1.0, 0.0],
        ["true", "false"],
        ["True", "False"],
        ["TRUE", "FALSE"],
        [Decimal("1.00"), Decimal(0)],
    ):
        assert ids_like(data, values, tmp_path / "new") == wanted, values


def test_truth_values_are_found_where_two_columns_make_a_key(tmp_path: Path) -> None:
    """The table of such a feature has each truth value many times."""
    values = {**LIKE, "categorical": [{"name": "flag"}, {"name": "user"}], "derive": ["mean_target by=flag,user"]}
    rows = pl.DataFrame({"label": [0, 1, 1] * 20, "flag": ["True", "False"] * 30, "user": [*"abcdefghij"] * 6})
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    wanted = encoder.encode(rows.drop("label"))
    found = encoder.encode(rows.drop("label").with_columns(flag=pl.col("flag") == "True"))
    assert (found.ids == wanted.ids).all()
    assert (found.dense == wanted.dense).all()
    assert (wanted.ids > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("words", [*WORDS, ("t", "f")])
def test_vocabularies_of_0_1_0_tell_how_truth_values_are_written(tmp_path: Path, words: tuple[str, str]) -> None:
    rows = pl.DataFrame({"label": [0, 1, 1] * 20, "flag": [*words] * 30})
    data = stoker.prepare(stoker.Schema.from_dict(LIKE), rows, out=tmp_path / "data", split="random:1,0")
    wanted = ids_like(data, [*words], tmp_path / "new")
    without_notation(data)
    assert ids_like(stoker.Dataset(data.path), [True, False], tmp_path / "new") == wanted


def test_truth_values_of_postgres_and_of_hash_buckets(tmp_path: Path) -> None:
    """A column of t and f alone has truth values, which numbers are not there."""
    schema = stoker.Schema.from_dict({**LIKE, "categorical": [{"name": "flag"}, {"name": "hash", "hash_buckets": 999}]})
    rows = pl.DataFrame({"label": [0, 1] * 30, "flag": ["t", "f"] * 30, "hash": ["TRUE", "False"] * 30})
    data = stoker.prepare(schema, rows, out=tmp_path / "data")
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    wanted = encoder.encode(rows.drop("label").head(2)).ids.tolist()
    for texts in ([True, False], ["true", "false"], ["True", "FALSE"]):
        assert encoder.encode(pl.DataFrame({"flag": texts, "hash": texts})).ids.tolist() == wanted
    numbers = encoder.encode(pl.DataFrame({"flag": [1, 0], "hash": [1, 0]})).ids
    assert numbers[:, 0].tolist() == [0, 0]
    assert not set(numbers[:, 1].tolist()) & {row[1] for row in wanted}
    assert notation_of(pl.Series(["t", "f", "m"])) == notation_of(pl.Series(["t"])) == ""


FLOATS = [1e-4, 1.2e-4, 1e-5, 2.5e-6, -1e-6, 1e-7, 1.5e-10, 0.5, 3.0, 100000.0, 123456.0, 12000000.0, 12345678.5]
WRITTEN = {
    "Python": "0.0001 0.00012 1e-05 2.5e-06 -1e-06 1e-07 1.5e-10 0.5 3.0 100000.0 123456.0 12000000.0 12345678.5",
    "Java": "1.0E-4 1.2E-4 1.0E-5 2.5E-6 -1.0E-6 1.0E-7 1.5E-10 0.5 3.0 100000.0 123456.0 1.2E7 1.23456785E7",
    "R": "1e-04 0.00012 1e-05 2.5e-06 -1e-06 1e-07 1.5e-10 0.5 3 1e+05 123456 1.2e+07 12345678.5",
    "JavaScript": "0.0001 0.00012 0.00001 0.0000025 -0.000001 1e-7 1.5e-10 0.5 3 100000 123456 12000000 12345678.5",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WRITTEN, "Parquet"])
def test_floats_with_an_exponent_are_the_texts_of_the_log(tmp_path: Path, way: str) -> None:
    """Of the programs that write logs; new rows may be typed, or written by another program."""
    texts = {name: row.split() for name, row in WRITTEN.items()} | {"Parquet": FLOATS}
    pl.DataFrame({"label": [index % 2 for index in range(13)], "flag": FLOATS}).write_parquet(tmp_path / "log.parquet")
    pl.DataFrame({"label": [index % 2 for index in range(13)], "flag": texts[way]}).write_csv(tmp_path / "log.csv")
    file = tmp_path / f"log.{'parquet' if way == 'Parquet' else 'csv'}"
    data = stoker.prepare(stoker.Schema.from_dict(LIKE), file, out=tmp_path / "data", split="random:1,0")
    wanted = ids_like(data, texts[way], tmp_path / "new")
    assert [batch.ids.tolist() for batch in data.train.batches(13)] == [wanted]
    assert len({*chain.from_iterable(wanted)} - {0}) == 13
    for name, other in texts.items():
        assert ids_like(data, other, tmp_path / "new") == wanted, name


def test_floats_with_an_exponent_share_a_hash_bucket() -> None:
    for number, *others in zip(*(row.split() for row in WRITTEN.values()), strict=True):
        assert set(written(pl.Series([number, *others] * 40), PLAIN)) == {number.removesuffix(".0")}
    odd = ["1e5", "12e4", "1e+99999", "2.5E", "00000012345678", "123456789012345678", "0.0000"]
    for way in (PLAIN, "1|1e-07", "1|1e-04", "1|1.0E-7"):
        assert written(pl.Series(odd), way).to_list() == [*odd[:-1], "0" if way == PLAIN else "0.0000"]


def test_one_odd_text_among_many_ids_costs_no_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spreadsheets damage a few long ids; a way to write floats is then refused without writing all ids in it."""
    looked: list[int] = []
    monkeypatch.setattr(floats, "in_way", lambda texts, way: looked.append(len(texts)) or in_way(texts, way))
    ids = [str(10**12 + number) for number in range(2_000)]
    for odd in ("1.23457E+12", "1e+05"):
        assert notation_of(pl.Series([*ids, odd])) == "1"
    assert max(looked) <= 1_000
    assert notation_of(pl.Series([*ids[1:], "1e+05"])) == "1|1e-04"
    assert max(looked) == 2_000


def test_texts_without_an_exponent_are_written_in_no_way() -> None:
    for texts in ([], [None], ["1", "0.5", "x"], ["0.001"], ["1e-07", "1E-7"]):
        assert way_of(pl.Series(texts, dtype=pl.String)) == "", texts
    assert way_of(pl.Series(["1e-07", None, "0.5"])) == "1e-07"
    assert way_of(pl.Series(["0.5", "1.0E-7", None])) == "1.0E-7"


def test_lists_of_texts_of_one_column_agree_on_what_both_say() -> None:
    """A vocabulary that grew has other texts than the table of a fitted feature."""
    assert agreed({"1", "1/0"}) == agreed({"1", "True"}) == agreed({"1|1e-07", "1"}) == "1"
    assert agreed({"1.0", "1.0/0.0"}) == "1.0"
    assert agreed({"1|1e-07"}) == "1|1e-07"
    assert agreed({"1", "1.0"}) == agreed({"True", "true"}) == agreed({"", "True"}) == agreed(set()) == ""


def test_decimals_of_one_scale_are_the_texts_of_the_log(tmp_path: Path) -> None:
    """A database writes 5.00 and 2.50; rows of it may come as decimals, floats or numbers of JSON."""
    texts = ["5.00", "2.50", "-120.00", "0.25"] * 15
    rows = pl.DataFrame({"label": [0, 1, 1] * 20, "flag": texts})
    rows.write_csv(tmp_path / "log.csv")
    data = stoker.prepare(
        stoker.Schema.from_dict(LIKE), tmp_path / "log.csv", out=tmp_path / "data", split="random:1,0"
    )
    wanted = ids_like(data, texts, tmp_path / "new")
    assert 0 not in chain.from_iterable(wanted)
    decimals = [Decimal(text) for text in texts]
    for values in (decimals, [*map(float, texts)], pl.Series(decimals).cast(pl.Decimal(12, 4)).cast(pl.String)):
        assert ids_like(data, values, tmp_path / "new") == wanted
    assert written(pl.Series(["5", "2.5", "2.505", "x5", "1.2.3"]), "1.00").to_list() == [
        "5.00", "2.50", "2.505", "x5", "1.2.3"
    ]  # fmt: skip
    for others in (["2.50", "5"], ["2.5", "2.50"]):
        assert notation_of(pl.Series(others)) in ("", "1")


@pytest.mark.slow
@pytest.mark.parametrize("log", ["text", "floats", "decimals", "json"])
@pytest.mark.parametrize("texts", [["5.10", "2.50", "2.25"], ["5.00", "2.50", "2.25"], ["5.13", "2.51", "2.25"]])
def test_prices_of_one_log_have_its_ids_in_any_form(tmp_path: Path, texts: list[str], log: str) -> None:
    """Typed values have the digits of the texts, also if no 5.00 is among these; and texts are numbers if a log has
    numbers."""
    texts = texts * 20
    users = {"user": [f"u{row % 7}" for row in range(60)]}
    rows = pl.DataFrame({"label": [0, 1, 1] * 20, "flag": texts, **users})
    forms: dict[str, Any] = {
        "text": rows, "floats": rows.cast({"flag": pl.Float64}), "decimals": rows.cast({"flag": pl.Decimal(8, 2)}),
        "json": tmp_path / "log.jsonl",
    }  # fmt: skip
    (tmp_path / "log.jsonl").write_text(
        "".join(f'{{"label": {each[0]}, "flag": {each[1]}, "user": "{each[2]}"}}\n' for each in rows.iter_rows())
    )
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "flag"}, {"name": "user"}]})
    data = stoker.prepare(schema, forms[log], out=tmp_path / "data", split="random:1,0")
    [known] = data.train.batches(60)
    for name, new in [*forms.items(), ("decimal4", rows.cast({"flag": pl.Decimal(12, 4)}))]:
        [batch] = stoker.prepare(None, new, out=tmp_path / "new", like=data, overwrite=True).test.batches(60)
        assert batch.ids.tolist() == known.ids.tolist(), name
        if name not in ("json", "decimal4"):
            asked = new.drop("label")
            assert RowEncoder(FittedSchema.of(Like(data.path))).encode(asked).ids.tolist() == known.ids.tolist(), name


@pytest.mark.parametrize(("other", "written_so"), [(5.25, "5.25"), (1e-7, "1e-7")])
def test_a_log_of_numbers_has_no_versions_after_an_update_either(
    tmp_path: Path, other: float, written_so: str
) -> None:  # fmt: skip
    rows = pl.DataFrame({"label": [0, 1] * 30, "flag": [2.5, other] * 30})
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "flag"}]})
    data = stoker.prepare(schema, rows, out=tmp_path / "data", split="random:1,0")
    text = pl.DataFrame({"label": [0, 1] * 30, "flag": ["2.50", "7.50"] * 30})
    more = stoker.prepare(None, text, out=tmp_path / "more", like=data, grow=True)
    known = Like(more.path).vocabulary("flag")["value"].to_list()
    assert known == [*sorted(["2.5", written_so]), "7.5"]
    [batch] = stoker.prepare(None, text, out=tmp_path / "new", like=more.path).test.batches(60)
    assert set(batch.ids.flatten().tolist()) == {known.index("2.5") + 1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("items", [[136, 7, 9], [2.5, 7.0, 9.0], [1e-7, 2.5, 7.0]])
def test_a_log_of_numbers_has_no_versions_beside_window_features_either(tmp_path: Path, items: list[Any]) -> None:
    """Their state has whole numbers, and tells nothing that the ids do not."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "item": items * 20, "at": range(60)})
    values = {"label": "label", "timestamp": {"column": "at"}, "categorical": [{"name": "item"}],
              "derive": ["past_count name=seen by=item order=at"]}  # fmt: skip
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    asked = pl.DataFrame({"item": items, "at": [60, 61, 62]})
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    known = encoder.encode(asked)
    assert known.ids.flatten().tolist() == [1, 2, 3]
    texts = pl.Series([f"{each:.8f}" for each in items])
    for new in (asked.with_columns(item=texts), asked.with_columns(item=texts.cast(pl.Decimal(18, 8)))):
        rows = new.with_columns(label=pl.lit(1))
        [batch] = stoker.prepare(None, rows, out=tmp_path / "new", like=data, overwrite=True).test.batches(3)
        for found in (batch, encoder.encode(new)):
            assert found.ids.tolist() == known.ids.tolist()
            assert found.dense.tolist() == known.dense.tolist()


def test_a_file_without_values_leaves_a_log_of_numbers_one(tmp_path: Path) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 30, "flag": [2.5, 5.25] * 30})
    rows.write_parquet(tmp_path / "a.parquet")
    rows.with_columns(flag=None).write_parquet(tmp_path / "b.parquet")
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "flag"}]})
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    data = stoker.prepare(schema, files, out=tmp_path / "data", split="random:1,0")
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(pl.DataFrame({"flag": ["2.50", "5.250"]}))
    assert asked.ids.flatten().tolist() == [1, 2]


def test_a_column_of_a_table_of_numbers_and_of_one_of_truth_values_has_whole_numbers() -> None:
    assert agreed({"plain value", "1/0"}) == agreed({"plain value", "1"}) == "1"
    assert agreed({"plain value", "1.0"}) == agreed({"plain value", ""}) == ""


def test_a_request_with_times_for_ids_is_refused_as_a_log_is(tmp_path: Path) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 30, "flag": [2, 5] * 30})
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "flag"}]})
    data = stoker.prepare(schema, rows, out=tmp_path / "data", split="random:1,0")
    days = pl.DataFrame({"label": [0, 1], "flag": [date(2024, 1, 1), date(2024, 1, 2)]})
    for times in (days, days.cast({"flag": pl.Datetime("us")})):
        with pytest.raises(stoker.DataError, match="which texts write in many ways"):
            stoker.prepare(None, times, out=tmp_path / "new", like=data)
        with pytest.raises(stoker.DataError, match="which texts write in many ways"):
            RowEncoder(FittedSchema.of(Like(data.path))).encode(times.drop("label"))


def test_versions_are_not_decimals(tmp_path: Path) -> None:
    """An older client of version 4.1 is not one of 4.10."""
    texts = [f"4.{minor}" for minor in range(10, 31)]
    rows = pl.DataFrame({"label": [0, 1, 1] * 7, "flag": texts})
    data = stoker.prepare(stoker.Schema.from_dict(LIKE), rows, out=tmp_path / "data", split="random:1,0")
    assert ids_like(data, ["4.1", "4.10", "4.2", "4.20"], tmp_path / "new") == [
        [0], *ids_like(data, ["4.10"], tmp_path / "new"), [0], *ids_like(data, ["4.20"], tmp_path / "new")
    ]  # fmt: skip


def test_decimals_of_any_scale_are_the_texts_of_the_log(tmp_path: Path) -> None:
    """In vocabularies and in hash buckets."""
    values = {**LIKE, "categorical": [{"name": "flag"}, {"name": "bucket", "hash_buckets": 1000}]}
    texts = ["5", "2.5", "120", "0.25"] * 15
    rows = pl.DataFrame({"label": [0, 1, 1] * 20, "flag": texts, "bucket": texts})
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data")
    asked = rows.drop("label")
    wanted = RowEncoder(FittedSchema.of(Like(data.path))).encode(asked).ids.tolist()
    for scale in (2, 4):
        decimals = rows.with_columns(pl.col("flag", "bucket").cast(pl.Decimal(12, scale)))
        assert RowEncoder(FittedSchema.of(Like(data.path))).encode(decimals.drop("label")).ids.tolist() == wanted
        again = stoker.prepare(None, decimals, out=tmp_path / "again", like=data, overwrite=True)
        assert [batch.ids.tolist() for batch in again.test.batches(60)] == [wanted]
        both = stoker.prepare(stoker.Schema.from_dict(values), decimals, out=tmp_path / "both", overwrite=True)
        assert (
            Like(both.path).vocabulary("flag")["value"].to_list()
            == Like(data.path).vocabulary("flag")["value"].to_list()
        )


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ([0.0, 1.0, 2.5], ["0.00", "1.00", "2.50"]),  # few, with 0 and 1, are not only truth values
        ([0.0, 1.0, 1e-7], ["-0.0", "1", "1e-07"]),
        ([1e-5, 2.5, 7.25], ["1e-05", "2.50", "7.250"]),  # Polars writes 0.00001, Python 1e-05
        ([Decimal("0.0000001"), Decimal("2.5000000"), Decimal("3.0000000")], ["1e-07", "2.50", "3.0"]),
    ],
)
def test_numbers_of_a_table_have_one_id_however_they_are_written(numbers: list[Any], texts: list[str]) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 30, "price": numbers * 20})
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "price"}]})
    data = stoker.prepare(schema, rows, split="random:1,0")
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    new = rows.head(3).drop("label")
    for asked in (new, new.cast(pl.Float64), pl.DataFrame({"price": texts})):
        assert encoder.encode(asked).ids.tolist() == [[1], [2], [3]]
        more = pl.concat([asked, pl.DataFrame({"price": ["99"]}).cast(asked.schema)])
        assert encoder.encode(more).ids.tolist() == [[1], [2], [3], [0]]
    again = stoker.prepare(None, rows, like=data)
    assert next(iter(again.test.batches(3))).ids.tolist() == [[1], [2], [3]]


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_a_number_has_one_hash_bucket_whatever_zeros_end_it(tmp_path: Path, known: bool) -> None:
    """Also in crosses, and beside a vocabulary, which has the texts as they are written."""
    texts = ["5.00", "2.50", "120.0", "-0.250", "1.2.30", "v2.50", "-0.0", "7"] * 8
    values: dict[str, Any] = {"label": "label", "categorical": [{"name": "price", "hash_buckets": 9_973}]}
    values["categorical"] += [{"name": "known", "source": "price"}] * known
    values["derive"] = ["cross columns=price,kind buckets=9973"] * (not known)
    rows = pl.DataFrame({"label": [0, 1, 1, 0, 0, 1, 0, 1] * 8, "price": texts, "kind": ["a", "b"] * 32})
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    hashed = 2 - known  # columns
    wanted = [batch.ids[:, :hashed].tolist() for batch in data.train.batches(64)]
    short = ["5", "2.5", "120", "-0.25", "1.2.30", "v2.50", "0", "7"] * 8
    numbers = rows.with_columns(price=pl.Series(short)).filter(~pl.col("price").str.contains(r"v|\.2\."))
    again = stoker.prepare(None, rows.with_columns(price=pl.Series(short)), out=tmp_path / "again", like=data)
    assert [batch.ids[:, :hashed].tolist() for batch in again.test.batches(64)] == wanted
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(rows.with_columns(price=pl.Series(short)), unknown=True)
    assert [asked.ids[:, :hashed].tolist()] == wanted
    found = [
        [batch.ids[:, :hashed].tolist() for batch in stoker.prepare(None, typed, out=tmp_path / "typed", like=data,
                                                                    overwrite=True).test.batches(64)]
        for typed in (numbers, *(numbers.cast({"price": kind}) for kind in (pl.Decimal(12, 4), pl.Float64, pl.Float32)))
    ]  # fmt: skip
    assert found[1:] == found[:1] * 3


def without_notation(data: stoker.Dataset) -> None:
    """Let the manifest say nothing of how texts are written, as in 0.1.0."""
    manifest = json.loads((data.path / "manifest.json").read_text())
    del manifest["notation"]
    (data.path / "manifest.json").write_text(json.dumps(seal(manifest)))


FLOATING = {
    "label": {"column": "score", "rule": ">= 0.7"},
    "dense": [{"name": "price", "transforms": ["log1p", "zscore"]}, {"name": "gain", "transforms": ["minmax"]}],
    "categorical": [{"name": "size", "type": "float"}, {"name": "hashed", "source": "size", "type": "float",
                    "hash_buckets": 9_973}, {"name": "text"}],
    "sequence": [{"name": "sizes", "type": "float", "table": "size", "separator": "|"}],
    "derive": ["mean_target by=size,text", "count by=price", "cross columns=size,price buckets=9973",
               "past_count by=size order=price window=0.3", "subtract left=price right=size"],
    "split": {"rule": "hash", "column": "text", "train": 1.0, "valid": 0.0, "test": 0.0},
}  # fmt: skip


def floating() -> pl.DataFrame:
    draws = np.random.default_rng(5).integers(1, 9, (200, 5)) / 10
    names = ("score", "price", "gain", "size", "text")
    rows = pl.DataFrame({name: draws[:, number] for number, name in enumerate(names)})
    return rows.with_columns(sizes=pl.concat_list("size", "text"), text=pl.col("text").cast(pl.String))


def bits(split: Any) -> list[Any]:
    [batch] = split.batches(len(split))
    return [batch.dense.numpy().tobytes(), batch.ids.tolist(), batch.offsets.tolist(), batch.labels.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pl.Float32, pl.Float16])
def test_a_narrow_float_is_the_number_that_its_text_writes(tmp_path: Path, kind: Any) -> None:
    """In ids, hash buckets, dense columns, labels and features: the same bits as of a log of texts or of Float64."""
    rows = floating()
    schema = stoker.Schema.from_dict(FLOATING)
    rows.with_columns(pl.col("sizes").cast(pl.List(pl.String)).list.join("|")).write_csv(tmp_path / "log.csv")
    data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data")
    narrow = rows.with_columns(pl.col(pl.Float64).cast(kind), pl.col("sizes").cast(pl.List(kind)))
    narrow = narrow.with_columns(text=pl.col("text").cast(pl.Float64).cast(kind))
    same = stoker.prepare(schema, narrow, out=tmp_path / "same")
    assert bits(same.train) == bits(data.train)
    assert same.manifest["dense_stats"] == data.manifest["dense_stats"]
    assert Like(same.path).vocabulary("size").equals(Like(data.path).vocabulary("size"))
    wanted = stoker.prepare(None, tmp_path / "log.csv", out=tmp_path / "like", like=data, history="ignore")
    found = stoker.prepare(None, narrow, out=tmp_path / "like_narrow", like=data, history="ignore")
    assert bits(found.test) == bits(wanted.test)


def test_a_narrow_float_does_not_depend_on_the_others() -> None:
    large = [123456789.0, 1e11, -3e38]
    for others in ([], [0.5], [7.0], [None]):
        found = as_double(pl.Series([*large, *others], dtype=pl.Float32))
        assert found.to_list() == [123456790.0, 1e11, -3e38, *others]


@pytest.mark.slow
def test_a_dataset_of_float32_keeps_its_ids_and_finds_texts(tmp_path: Path) -> None:
    """0.1.0 read 0.1 of a Float32 column as 0.10000000149: in ids, hash buckets, features and the rule of the label."""
    narrow = floating().with_columns(pl.col(pl.Float64).cast(pl.Float32), pl.col("sizes").cast(pl.List(pl.Float32)))
    wide = narrow.with_columns(pl.col(pl.Float32).cast(pl.Float64), pl.col("sizes").cast(pl.List(pl.Float64)))
    data = stoker.prepare(stoker.Schema.from_dict(FLOATING), wide, out=tmp_path / "data")
    assert data.manifest["notation"]["size"] == SINGLE
    texts = floating().with_columns(pl.col("sizes").cast(pl.List(pl.String)).list.join("|"))
    texts.write_csv(tmp_path / "log.csv")

    def again(rows: Any) -> list[Any]:
        like = stoker.Dataset(data.path)
        found = stoker.prepare(None, rows, out=tmp_path / "new", like=like, history="ignore", overwrite=True)
        return bits(found.test)

    def check(rows: Any) -> list[int]:
        found, *others, labels = again(rows)
        assert others == ids
        np.testing.assert_allclose(np.frombuffer(found, np.float32), dense, rtol=1e-6, atol=1e-6)
        return labels

    dense, ids = np.frombuffer(again(wide)[0], np.float32), bits(data.train)[1:3]
    for rows in (narrow, wide, tmp_path / "log.csv"):
        check(rows)
    without_notation(data)
    assert check(narrow) == check(wide) == bits(data.train)[3]


def test_floats_that_may_have_lost_digits_are_no_ids_of_any_column(tmp_path: Path) -> None:
    """16777217 is 16777216 as Float32: another user."""
    users = [float(2**24 + row % 7) for row in range(60)]
    rows = pl.DataFrame({"label": [0, 1] * 30, "user": users})
    for kind, log in (("float", rows), ("string", rows.cast({"user": pl.String}))):
        values = {"label": "label", "categorical": [{"name": "user", "type": kind}]}
        data = stoker.prepare(stoker.Schema.from_dict(values), log, out=tmp_path / kind, split="random:1,0")
        encoder = RowEncoder(FittedSchema.of(Like(data.path)))
        assert (encoder.encode(rows.select("user")).ids > 0).all()
        with pytest.raises(stoker.DataError, match="row 0: column user: the float 16777216 may have lost digits"):
            encoder.encode(rows.select(pl.col("user").cast(pl.Float32)))
        half = pl.DataFrame({"user": pl.Series([2048.0], dtype=pl.Float16)})
        with pytest.raises(stoker.DataError, match="row 0: column user: the float 2048 may have lost digits"):
            encoder.encode(half)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "quoted"])
def test_whole_numbers_that_a_missing_value_made_floats_fit_an_int_column(tmp_path: Path, suffix: str) -> None:
    """In requests, too; a fraction, or digits that a float cannot hold, are a bad line."""
    values = {"label": "label", "categorical": [{"name": "user", "type": "int"}]}
    rows = pl.DataFrame({"label": [0, 1] * 50, "user": range(100)})
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    new = rows.with_columns(pl.col("user").cast(pl.Float64))
    new[97, "user"], new[98, "user"], new[99, "user"] = None, 1.5, 2.0**53
    file = tmp_path / f"new.{suffix.replace('quoted', 'jsonl')}"
    if suffix == "csv":
        new.to_pandas().to_csv(file, index=False)
    elif suffix == "parquet":
        new.write_parquet(file)
    else:
        shown = str if suffix == "quoted" else float
        lines = [{"label": y, "user": None if user is None else shown(user)} for y, user in new.rows()]
        file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = stoker.prepare(None, file, out=tmp_path / "new", like=data, max_bad=0.5)
    assert found.manifest["quarantined"] == 2
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    wanted = encoder.encode(rows.select("user").head(97)).ids.tolist()
    assert [batch.ids.tolist() for batch in found.test.batches(98)] == [[*wanted, [0]]]
    asked = [
        parsed(json.dumps({"user": str(user) if suffix == "quoted" else user}).encode()) for user in new["user"][:97]
    ]
    assert encoder.from_objects(asked).ids.tolist() == wanted


MOMENTS = [datetime(2024, 1, 5 + n % 9, n % 24, n % 60, n % 7) for n in range(60)]
SHAPES = ["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.000000", "%Y-%m-%d %H:%M:%S+00:00", "%Y-%m-%dT%H:%M:%SZ",
          "%Y-%m-%dT%H:%M:%S.000000+0000", "%Y-%m-%d"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit", ["ms", "us", "ns", "pandas"])
def test_times_are_the_texts_of_the_log_whatever_their_unit(tmp_path: Path, shape: str, unit: Any) -> None:
    """In frames, requests and Parquet, where a column of text gets times."""
    times = pl.Series("when", MOMENTS)
    times = times if "%H" in shape else times.dt.truncate("1d")
    rows = pl.DataFrame({"label": [0, 1] * 30, "when": times.dt.strftime(shape)})
    values = {"label": "label", "categorical": [{"name": "when"}], "derive": ["mean_target by=when"]}
    rows.write_csv(tmp_path / "log.csv")
    data = stoker.prepare(
        stoker.Schema.from_dict(values), tmp_path / "log.csv", out=tmp_path / "data", split="random:1,0"
    )
    typed = times if unit == "pandas" else times.cast(pl.Datetime(unit))
    if shape.endswith(("+00:00", "+0000", "Z")):
        typed = typed.dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
    frame: Any = rows.with_columns(typed)
    frame = frame.to_pandas() if unit == "pandas" else frame
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    wanted = encoder.encode(rows.drop("label"))
    assert (wanted.ids > 0).all()
    found = encoder.encode(frame[["when"]])
    assert (found.ids == wanted.ids).all()
    assert (found.dense == wanted.dense).all()
    again = stoker.prepare(None, frame, out=tmp_path / "again", like=data)
    assert [batch.ids.tolist() for batch in again.test.batches(60)] == [wanted.ids.tolist()]
    if shape == "%Y-%m-%d":
        assert (encoder.encode(pl.DataFrame(times.cast(pl.Date))).ids == wanted.ids).all()
        with pytest.raises(stoker.DataError, match=r"column when: '2024-01-05 10:00:00.*' cannot be written like the"):
            encoder.encode(pl.DataFrame({"when": [datetime(2024, 1, 5, 10)]}))


def test_times_without_a_notation_are_refused(tmp_path: Path) -> None:
    """Where the log writes them in another way, or no list of its texts tells how."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "when": MOMENTS, "bucket": ["a"] * 60})
    texts = rows.with_columns(pl.col("when").dt.strftime("%d.%m.%Y %H:%M"))
    values = {"label": "label", "categorical": [{"name": "when"}, {"name": "bucket", "hash_buckets": 9}]}
    schema = stoker.Schema.from_dict(values)
    data = stoker.prepare(schema, texts, out=tmp_path / "data")
    with pytest.raises(stoker.DataError, match=r"column when holds Datetime.*Convert it to texts as in the log"):
        RowEncoder(FittedSchema.of(Like(data.path))).encode(rows.drop("label"))
    with pytest.raises(stoker.DataError, match=r"column when holds Datetime"):
        stoker.prepare(None, rows, out=tmp_path / "again", like=data)
    with pytest.raises(stoker.DataError, match=r"column bucket holds Datetime"):
        stoker.prepare(schema, rows.with_columns(bucket="when"), out=tmp_path / "none")
    days = texts.with_columns(bucket=pl.col("when").str.head(10).str.to_date("%d.%m.%Y"))
    data = stoker.prepare(schema, days, out=tmp_path / "days", split="random:1,0")
    plain = days.with_columns(pl.col("bucket").cast(pl.String)).drop("label")
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(plain)
    assert [batch.ids.tolist() for batch in data.train.batches(60)] == [asked.ids.tolist()], "a date has one text"


def test_a_log_of_times_has_the_same_ids_in_any_unit(tmp_path: Path) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 30, "when": MOMENTS})
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "when"}]})
    data = stoker.prepare(schema, rows.cast({"when": pl.Datetime("ms")}), out=tmp_path / "data", split="random:1,0")
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    wanted = [batch.ids.tolist() for batch in data.train.batches(60)]
    for unit in ("ms", "us", "ns"):
        assert [encoder.encode(rows.select(pl.col("when").cast(pl.Datetime(unit)))).ids.tolist()] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_log_of_times_and_of_texts_has_one_id_for_each(tmp_path: Path, shape: str, suffix: str) -> None:
    """In whatever order its files come; times that the texts do not write in one way are refused."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "when": MOMENTS})
    rows.write_parquet(tmp_path / "typed.parquet")
    texts, other = (rows.with_columns(pl.col("when").dt.strftime(each)) for each in (shape, "%d.%m.%Y %H:%M"))
    write = {"csv": "write_csv", "jsonl": "write_ndjson", "parquet": "write_parquet"}[suffix]
    getattr(texts, write)(tmp_path / f"texts.{suffix}")
    getattr(other, write)(tmp_path / f"other.{suffix}")
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "when"}]})
    files = [tmp_path / "typed.parquet", tmp_path / f"texts.{suffix}"]
    for order in (files, files[::-1]):
        data = stoker.prepare(schema, order, out=tmp_path / "data", overwrite=True, split="random:1,0")
        assert sorted(Like(data.path).vocabulary("when")["value"]) == sorted(set(texts["when"]))
    with pytest.raises(stoker.DataError, match=r"typed.parquet: column when holds Datetime.*texts as in the log"):
        stoker.prepare(schema, [tmp_path / f"other.{suffix}", files[0]], out=tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_log_of_days_and_of_times_has_one_id_for_each(tmp_path: Path, nested: bool) -> None:
    """A day is the time at which it begins; times with a zone and times without are refused together."""
    days = pl.Series("when", MOMENTS).dt.truncate("1d")
    files: dict[str, Any] = {
        "days": days.dt.date(), "times": days, "ms": days.cast(pl.Datetime("ms")),
        "zone": days.dt.replace_time_zone("UTC"), "none": pl.Series("when", [None] * 60),
        "empty": pl.Series("when", [None] * 60, dtype=pl.String), "texts": days.dt.strftime("%Y-%m-%dT%H:%M"),
    }  # fmt: skip
    for name, each in files.items():
        column = pl.select(pl.concat_list(each)).to_series() if nested else each
        pl.DataFrame({"label": [0, 1] * 30, "when": column}).write_parquet(tmp_path / f"{name}.parquet")
    columns = {"sequence" if nested else "categorical": [{"name": "when"}]}
    schema = stoker.Schema.from_dict(
        {"label": "label", **columns, "split": {"rule": "hash", "train": 1.0, "valid": 0.0, "test": 0.0}}
    )

    def known(*names: str) -> list[str]:
        out = tmp_path / "".join(names)
        data = stoker.prepare(schema, [tmp_path / f"{name}.parquet" for name in names], out=out)
        return sorted(Like(data.path).vocabulary("when")["value"])

    wanted = sorted(set(days.dt.strftime("%Y-%m-%d %H:%M:%S.000000")))
    assert known("days", "times") == known("ms", "days", "none") == known("times", "ms") == wanted
    assert known("empty", "days", "times") == wanted
    assert known("days", "texts") == known("texts", "times") == sorted(set(files["texts"]))
    assert known("none", "days") == known("days", "empty") == sorted(set(days.dt.strftime("%Y-%m-%d")))
    for pair in (("days", "zone"), ("zone", "times")):
        with pytest.raises(stoker.DataError, match=r"column when holds Date.*Convert it to texts as in the log"):
            known(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_a_timestamp_that_is_an_id_is_found_again(tmp_path: Path, zone: str | None) -> None:
    """Also where a feature reads it: then ids are texts of the moment, which has no zone."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "when": pl.Series(MOMENTS).dt.replace_time_zone(zone)})
    values = {"label": "label", "timestamp": {"column": "when", "type": "datetime"}, "categorical": [{"name": "when"}]}
    for derive in ([], ["mean_target by=when"]):
        schema = stoker.Schema.from_dict({**values, "derive": derive})
        data = stoker.prepare(schema, rows, out=tmp_path / "data", split="random:1,0", overwrite=True)
        [wanted] = data.train.batches(60)
        again = stoker.prepare(None, rows, out=tmp_path / "again", like=data, overwrite=True)
        [found] = again.test.batches(60)
        asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(rows.drop("label"))
        assert (wanted.ids > 0).all()
        assert (found.ids == wanted.ids).all()
        assert (asked.ids == wanted.ids).all()


@pytest.mark.parametrize("dtype", [pl.Time, pl.Duration])
def test_clocks_and_durations_have_one_iso_form(tmp_path: Path, dtype: Any) -> None:
    ticks = pl.Series([15 * 60 * 10**9 * (row % 7) + 5 * 10**8 * (row % 2) for row in range(60)])
    rows = pl.DataFrame({"label": [0, 1] * 30, "at": ticks.cast(dtype if dtype == pl.Time else pl.Duration("ns"))})
    for more in ({}, {"hash_buckets": 50}):
        schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "at", **more}]})
        data = stoker.prepare(schema, rows, out=tmp_path / f"data{len(more)}", split="random:1,0")
        encoder = RowEncoder(FittedSchema.of(Like(data.path)))
        texts = rows.select(pl.col("at").dt.to_string("iso"))
        found = encoder.encode(rows.select("at")).ids
        assert (found == encoder.encode(texts).ids).all()
        assert len(found.unique()) > 7
    assert texts["at"][1] in ("00:15:00.500", "PT15M0.5S")


@pytest.mark.parametrize("kind", [pl.Int64, pl.Int32, pl.Float64])
def test_decimal_numbers_in_a_hexadecimal_column_are_refused(tmp_path: Path, kind: Any) -> None:
    """A reader of CSV takes the texts 10 and 20 for numbers, which they are not."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "code": ["10", "20", "30"] * 20})
    schema = stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "code", "type": "hex"}]})
    data = stoker.prepare(schema, rows, out=tmp_path / "data", split="random:1,0")
    typed = rows.with_columns(pl.col("code").cast(kind))
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    with pytest.raises(stoker.DataError, match=r"column code holds .* hexadecimal texts, where 10 is 16"):
        encoder.encode(typed.select("code"))
    with pytest.raises(stoker.DataError, match=r"column code holds .* hexadecimal texts, where 10 is 16"):
        stoker.prepare(schema, typed, out=tmp_path / "other")
    for unsigned in (pl.UInt64, pl.UInt32, pl.UInt8):  # values
        values = rows.select(pl.col("code").str.to_integer(base=16, dtype=unsigned))
        assert (encoder.encode(values).ids == encoder.encode(rows.select("code")).ids).all()
    assert encoder.encode(pl.DataFrame({"code": [None]}, schema={"code": kind})).ids.tolist() == [[0]]


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


def test_commas_between_thousands_are_no_decimal_commas(tmp_path: Path) -> None:
    """1,234 is not 1.234: a draft leaves such a column out, and bad lines have the remedy."""

    def write(name: str, rating: str) -> Path:
        rows = (f"u{n % 9};{1 + n % 40},{n % 10}00;{1 + n % 4}{rating}5;{n % 3 % 2}" for n in range(200))
        (tmp_path / name).write_text("user;price;rating;click\n" + "\n".join(rows) + "\n")
        return tmp_path / name

    drafted = stoker.draft_schema(write("log.csv", "."))
    assert 'decimal = ","' not in drafted
    assert "commas between thousands" in drafted
    assert "If it means 1.234, set decimal in [source]" in drafted
    values = {"label": "click", "dense": [{"name": "price"}], "source": {"separator": ";"}}
    with pytest.raises(stoker.DataError, match="write 1,234 as 1234"):
        stoker.prepare(stoker.Schema.from_dict(values), tmp_path / "log.csv", out=tmp_path / "none")
    assert 'decimal = ","' in stoker.draft_schema(write("both.csv", ",")), "ratings such as 1,5 tell"


@pytest.mark.slow
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
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    assert encoder.encode(pl.DataFrame({"u": ["a"], "x": ["1,5"]})).dense.tolist() == [[1.5]]
    for number, value in ((b"1.234", 1.234), (b"1e-05", 1e-05), (b'"1.234"', 1234.0), (b"-7", -7.0), (b'"1,5"', 1.5)):
        line = b'{"y": 1, "u": "a", "x": ' + number + b"}\n"
        asked = encoder.from_objects([parsed(line)]).dense
        assert asked.tolist() == [[pytest.approx(value)]], "a number of JSON has a decimal point"
        (tmp_path / "new.jsonl").write_bytes(line + b'{"y": 1, "u": 2.50, "x": "2,5"}\n')
        again = stoker.prepare(None, tmp_path / "new.jsonl", out=tmp_path / "new", like=data, overwrite=True)
        assert again.test[0]["dense"].tolist() == asked[0].tolist()
    with pytest.raises(stoker.DataError, match="column x: 'Infinity' is not a number"):
        encoder.from_objects([parsed(b'{"u": "a", "x": 1e999}')])
    with pytest.raises(stoker.DataError, match="is not a number"):
        encoder.encode(pl.DataFrame({"u": ["a"], "x": ["1" * 400]}))
    plain = stoker.Schema.from_dict({**values, "source": {"separator": ";"}})
    with pytest.raises(stoker.DataError, match=r'decimal comma: set decimal = ","'):
        stoker.prepare(plain, rows.with_columns(x=pl.lit("3,5")), out=tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "group", "kind"),
    [("hash:user:0.6,0.2", None, "int"), ("last_touch:user:0.6,0.2", None, "float"), ("random:0.6,0.2", "user", "int"),
     ("random:0.6,0.2", "user", "float")],
)  # fmt: skip
def test_features_of_a_number_that_splits_the_rows_are_found_again(
    tmp_path: Path, split: str, group: str | None, kind: str
) -> None:
    """They see its text, as the split does: 100 of 100.0, in training, in new rows and in requests."""
    values = {
        "label": "label", "keep": ["ts"], "timestamp": {"column": "ts"}, "group": group,
        "categorical": [{"name": "user", "type": kind}, {"name": "item", "type": "int"}],
        "derive": ["count by=user,item", "cross columns=user,item buckets=97", "rank by=user order=ts"],
    }  # fmt: skip
    users = np.random.default_rng(0).integers(100, 110, 300)
    log = pl.DataFrame({"label": users % 3 // 2, "user": users, "item": users % 7, "ts": range(300)})
    forms: list[Any] = [log, log.cast({"user": pl.Float64}), log.cast({"user": pl.Float32})]
    log.write_csv(tmp_path / "whole.csv")
    forms[1].write_csv(tmp_path / "dotted.csv")
    schema = stoker.Schema.from_dict({key: value for key, value in values.items() if value is not None})

    def rows_of(data: stoker.Dataset) -> dict[int, Any]:
        found = {}
        for part in filter(len, data.splits.values()):
            times = pl.DataFrame(part.kept.read()).get_column("ts").to_list()
            for batch in part.batches(300):
                found |= dict(zip(times, zip(batch.dense.tolist(), batch.ids.tolist(), strict=True), strict=True))
        return dict(sorted(found.items()))

    data = stoker.prepare(schema, tmp_path / "dotted.csv", out=tmp_path / "data", split=split)
    wanted = rows_of(data)
    assert len(wanted) == 300
    other = stoker.prepare(schema, tmp_path / "whole.csv", out=tmp_path / "other", split=split)
    assert rows_of(other) == wanted, "the same rows train"
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    for new in (*forms[1:], tmp_path / "whole.csv", tmp_path / "dotted.csv"):
        again = stoker.prepare(None, new, out=tmp_path / "new", like=data, overwrite=True)
        assert rows_of(again) == wanted
        if not isinstance(new, Path):
            batch = encoder.encode(new.drop("label"), unknown=True)
            assert list(zip(batch.dense.tolist(), batch.ids.tolist(), strict=True)) == list(wanted.values())


@pytest.mark.slow
@pytest.mark.parametrize(("words", "number"), [(("True", "False"), "1.0"), (("1", "0"), "1"), (("TRUE", "FALSE"), "1")])
def test_conditions_find_their_values_in_any_type(tmp_path: Path, words: tuple[str, str], number: str) -> None:
    """Although no list of the texts of these columns says how they are written; the values of the condition do."""
    values = {
        "label": "label", "categorical": [{"name": "item"}, {"name": "bucket", "source": "flag", "hash_buckets": 97}],
        "derive": [f"match column=flag values={words[0]}", f"constrain column=size values={number} name=one",
                   f"mask column=item where_column=flag values={words[0]} name=shown"],
    }  # fmt: skip
    draws = np.random.default_rng(6).integers(0, 4, (80, 3))
    typed = pl.DataFrame({"label": draws[:, 0] % 2, "item": [f"i{n}" for n in draws[:, 1]], "flag": draws[:, 2] < 2,
                          "size": draws[:, 1].astype(float)})  # fmt: skip
    sizes = typed["size"].cast(pl.String if number == "1.0" else pl.Int64)
    log = typed.with_columns(flag=pl.Series([words[0] if flag else words[1] for flag in typed["flag"]]), size=sizes)
    log.write_csv(tmp_path / "log.csv")
    schema = stoker.Schema.from_dict(values)
    data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data", split="random:1,0")
    [wanted] = data.train.batches(80)
    assert len(wanted.dense.unique()) == 2
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    for rows in (typed, typed.cast({"size": pl.Float32}), typed.cast({"size": pl.Int64}), log):
        [found] = stoker.prepare(None, rows, out=tmp_path / "new", like=data, overwrite=True).test.batches(80)
        asked = encoder.encode(rows.drop("label"))
        for one in (found, asked):
            assert (one.ids == wanted.ids).all()
            assert (one.dense == wanted.dense).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "texts", "typed"),
    [("== 'True'", ["True", "False"], [True, False]), ("!= '0'", ["1", "0"], [True, False]),
     ("== '5.00'", ["5.00", "2.50"], [5.0, 2.5]), ("== '4'", ["4", "2"], [4.0, 2.0]),
     ("== '1'", ["1.00", "0.00"], [1.0, 0.0]), ("== '1.0'", ["true", "false"], [True, False]),
     ("!= '0'", ["1.00", "-0.00"], [1.0, -0.0]), ("== '2.5'", ["2.5", "5.0"], [2.5, 5.0]),
     ("== '2.55e+1'", ["25.50", "5.0"], [25.5, 5.0]), ("== '2.5E+1'", ["25.0", "2.5"], [25.0, 2.5]),
     *((rule, ["2.50", "5.00"], [2.5, 5.0]) for rule in ("!= '5'", "!= '5.000'"))],
)  # fmt: skip
def test_a_rule_of_the_label_meets_its_text_in_any_type(
    tmp_path: Path, rule: str, texts: list[str], typed: list[Any]
) -> None:
    """Else all rows of a table would have label 0, without a word."""
    rows = pl.DataFrame({"label": texts * 30, "user": [f"u{row % 7}" for row in range(60)]})
    rows.write_csv(tmp_path / "log.csv")
    values = {"label": {"column": "label", "rule": rule}, "categorical": [{"name": "user"}]}
    schema = stoker.Schema.from_dict(values)
    table = rows.with_columns(label=pl.Series(typed * 30))
    table.write_ndjson(tmp_path / "log.jsonl")
    decimals = [table.cast({"label": pl.Decimal(8, scale)}) for scale in (1, 3) if not isinstance(typed[0], bool)]
    for log in (tmp_path / "log.csv", table, tmp_path / "log.jsonl", *decimals):
        data = stoker.prepare(schema, log, out=tmp_path / "data", split="random:1,0", overwrite=True)
        [batch] = data.train.batches(60)
        assert batch.labels.tolist() == [1.0, 0.0] * 30


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["== '1e-5'", "== '1E-5'", "== '1.0E-5'", "== '1e-05'"])
def test_a_rule_with_an_exponent_meets_its_number(rule: str) -> None:
    """No version has one, so it is compared by its value, in texts too."""
    values = {"label": {"column": "label", "rule": rule}, "categorical": [{"name": "user"}]}
    rows = pl.DataFrame({"label": ["0.00001", "3", "1e-05", "x", "1e-5", "1e-4"] * 10, "user": "u"})
    for given in (rows["label"], pl.Series([1e-5, 3.0] * 30), pl.Series([Decimal("0.0000100"), Decimal(3)] * 30)):
        data = stoker.prepare(stoker.Schema.from_dict(values), rows.with_columns(label=given), split="random:1,0")
        [batch] = data.train.batches(60)
        assert batch.labels.tolist() == [1.0, 0.0] * 30


@pytest.mark.parametrize("text", ["2.5", "7", "1.50", "1e-5", "yes", "T"])
def test_a_rule_that_no_truth_value_meets_is_refused(text: str) -> None:
    values = {"label": {"column": "label", "rule": f"== '{text}'"}, "categorical": [{"name": "user"}]}
    rows = pl.DataFrame({"label": [True, False] * 30, "user": "u"})
    with pytest.raises(stoker.DataError, match=r"column label holds Boolean, .* which is written as no such value"):
        stoker.prepare(stoker.Schema.from_dict(values), rows, split="random:1,0")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["007", "+1", ".5", "00.5", "0.000001", "click"])
def test_a_rule_with_a_text_that_no_number_is_written_as_is_refused(text: str) -> None:
    """Else all rows of a table would have label 0, while those of a file with texts meet it."""
    schema = stoker.Schema.from_dict(
        {"label": {"column": "label", "rule": f"== '{text}'"}, "categorical": [{"name": "user"}]}
    )
    rows = pl.DataFrame({"label": [text, "x"] * 30, "user": [f"u{row % 7}" for row in range(60)]})
    assert stoker.prepare(schema, rows, split="random:1,0").train.positives == 30
    for typed in ([7, 1], [0.5, 1e-6], [True, False]):
        with pytest.raises(stoker.DataError, match=r"which is written as no such value\. To compare numbers"):
            stoker.prepare(schema, rows.with_columns(label=pl.Series(typed * 30)), split="random:1,0")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["== '2.10'", "!= '2.1'"])
def test_a_rule_with_a_fraction_compares_texts_and_refuses_its_number_in_other_digits(
    tmp_path: Path, rule: str
) -> None:
    """2.1 and 2.10 may be two versions, and may be one price: without quotes they are numbers, to ``match`` texts."""
    texts, met = ["2.1", "2.10", "3.0"] * 20, rule.startswith("==")
    rows = pl.DataFrame({"label": texts, "user": [f"u{row % 7}" for row in range(60)]})
    rows.write_csv(tmp_path / "log.csv")
    (tmp_path / "log.jsonl").write_text(
        "".join(f'{{"label": {text}, "user": "{user}"}}\n' for text, user in rows.iter_rows())
    )
    values = {"label": {"column": "label", "rule": rule}, "categorical": [{"name": "user"}]}
    schema = stoker.Schema.from_dict(values)

    def labels_of(log: Any, **more: Any) -> list[float]:
        values = {**schema.to_dict(), **more}
        made = stoker.prepare(
            stoker.Schema.from_dict(values), log, out=tmp_path / "data", split="random:1,0", overwrite=True
        )
        [batch] = made.train.batches(60)
        found: list[float] = batch.labels.tolist()
        return found

    for log in (tmp_path / "log.csv", tmp_path / "log.jsonl", rows, rows.cast({"label": pl.Categorical})):
        with pytest.raises(stoker.DataError, match=rf"column label holds .* write {rule[:2]} 2\.1 without quotes"):
            labels_of(log)
        number = {"label": {"column": "label", "rule": rule.replace("'", "")}}
        assert labels_of(log, **number) == [met, met, not met] * 20
        version = {"label": "newest", "feature": [{"kind": "match", "name": "newest", "column": "label",
                   "values": ["2.10"]}]}  # fmt: skip
        assert labels_of(log, **version) == [0.0, 1.0, 0.0] * 20
    for kind in (pl.Float64, pl.Float32, pl.Decimal(8, 2), pl.Decimal(8, 4)):
        assert labels_of(rows.cast({"label": pl.Float64}).cast({"label": kind})) == [met, met, not met] * 20
    rows.filter(pl.col("label") == rule[4:-1]).write_csv(tmp_path / "one.csv")
    assert set(labels_of(tmp_path / "one.csv")) == {float(met)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "column", [{"dense": [{"name": "stars"}]}, {"categorical": [{"name": "stars", "type": "float"}]}]
)
def test_a_condition_on_a_column_that_is_read_as_numbers_compares_numbers(
    tmp_path: Path, column: dict[str, Any]
) -> None:
    """The column is 5.0 then, and 5 was met by no row."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "user": [f"u{row % 7}" for row in range(60)], "stars": [5, 3, 4] * 20,
                         "text": ["5", "four", "4.0"] * 20})  # fmt: skip
    rows.write_csv(tmp_path / "log.csv")
    values: dict[str, Any] = {
        "label": "label",
        "categorical": [{"name": "user"}],
        "derive": ["equal left=stars right=text name=same", "constrain column=stars values=5 lower=true name=lower",
                   "match column=stars values=5,3.0 name=met"],
    }  # fmt: skip
    values["categorical"] += column.get("categorical", [])
    schema = stoker.Schema.from_dict({**column, **values})
    for log in (rows, rows.cast({"stars": pl.Float64}), tmp_path / "log.csv"):
        data = stoker.prepare(schema, log, out=tmp_path / "data", split="random:1,0", overwrite=True)
        [batch] = data.train.batches(60)
        asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(rows.drop("label"))
        for one in (batch, asked):
            assert one.dense[:, -2:].tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]] * 20
            assert one.ids[:, -1].tolist() == [1, 0, 0] * 20


@pytest.mark.slow
@pytest.mark.parametrize("column", [{"dense": [{"name": "v"}]}, {"categorical": [{"name": "v", "type": "float"}]}])
def test_a_pattern_finds_whole_numbers_without_a_point(tmp_path: Path, column: dict[str, Any]) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 30, "u": "u", "v": ["5", "-3", "2.5", "1" + "0" * 16, "", "nan"] * 10})
    rows = rows.filter(rows["v"] != "nan")
    rows.write_csv(tmp_path / "log.csv")
    values = {"label": "label", **column, "categorical": [{"name": "u"}, *column.get("categorical", [])]}
    values["derive"] = [r"match column=v pattern='^-?\d+$' name=whole", r"constrain column=v pattern='\d$' name=text",
                        r"mask column=u where_column=v pattern='^\d$' name=one"]  # fmt: skip
    typed = rows.with_columns(pl.col("v").cast(pl.Float64, strict=False))
    nan = typed.with_columns(pl.col("v").fill_null(float("nan")))
    for log in (tmp_path / "log.csv", typed, nan):
        data = stoker.prepare(stoker.Schema.from_dict(values), log, out=tmp_path / "data", split="random:1,0",
                              overwrite=True)  # fmt: skip
        [batch] = data.train.batches(60)
        like = Like(data.path)
        asked = RowEncoder(FittedSchema.of(like)).encode(typed.drop("label"))
        assert set(like.vocabulary("text")["value"]) == {"5", "-3", "2.5", "1e+16"}
        for one in (batch, asked):
            assert one.dense[:5, -1].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
            assert (one.ids[:5, -1] > 0).tolist() == [True, False, False, False, False]


def test_crosses_take_minus_zero_for_zero() -> None:
    values = {"label": "label", "dense": [{"name": "v"}], "categorical": [{"name": "u"}],
              "derive": ["cross columns=v,u buckets=9973"]}  # fmt: skip
    rows = pl.DataFrame({"label": [0, 1] * 30, "u": "u", "v": [0.0, -0.0, 1.5] * 20})
    [batch] = stoker.prepare(stoker.Schema.from_dict(values), rows, split="random:1,0").train.batches(60)
    assert batch.ids[0].tolist() == batch.ids[1].tolist() != batch.ids[2].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pl.Float64, pl.Float32, pl.Decimal(12, 4)])
def test_texts_beside_a_file_of_numbers_are_numbers(tmp_path: Path, kind: Any) -> None:
    """Two files that have 2.5 and 2.50 had two ids, crosses and window features of it, without a word."""
    texts = {"a": ["2.50", "5.00", "-0.0", "v1", "1e-03"], "b": ["2.5", "5", "0", "v1", "0.001"]}
    rows = pl.DataFrame({"label": [0, 1] * 25, "u": "u", "when": range(50)})
    rows.with_columns(v=pl.Series(texts["a"] * 10)).write_csv(tmp_path / "day_1.csv")
    numbers = pl.Series([2.5, 5.0, 0.0, None, 0.001] * 10).cast(kind)
    rows.with_columns(pl.col("when") + 50, v=numbers).write_parquet(tmp_path / "day_2.parquet")
    values = {"label": "label", "categorical": [{"name": "v"}, {"name": "u"}], "timestamp": {"column": "when"},
              "derive": ["cross columns=v,u buckets=9973", "previous by=u order=when column=v name=old"]}  # fmt: skip
    logs = [tmp_path / "day_1.csv", tmp_path / "day_2.parquet"]
    data = stoker.prepare(stoker.Schema.from_dict(values), logs, out=tmp_path / "data", split="random:1,0")
    found = next(iter(data.train.batches(100))).ids
    assert len(found[:, 0].unique()) == 6, "with the missing value"
    for rows_of in (slice(0, 3), slice(4, 5)):
        assert (found[5:10, :3][rows_of] == found[60:65, :3][rows_of]).all()
    assert "twins" not in data.manifest
    like = Like(data.path)
    encoder = RowEncoder(FittedSchema.of(like))
    decimals = [Decimal(text) for text in ("2.50", "5.000", "-0", "7", "0.0010")]
    for new in (texts["a"], texts["b"], [2.5, 5.0, 0.0, 7.0, 1e-3], decimals):
        asked = pl.DataFrame({"v": new, "u": ["u"] * 5, "when": range(100, 105)})
        again = next(iter(stoker.prepare(None, asked.with_columns(label=0), like=data).test.batches(5)))
        for one in (encoder.encode(asked), again):
            assert (one.ids[:3, :3] == found[5:8, :3]).all()
            assert (one.ids[4, :3] == found[9, :3]).all()


@pytest.mark.parametrize("texts", [["true", "false", "2.50"], ["2024-01-05", "2024-01-06", "2.50"]])
def test_words_and_days_beside_numbers_hide_no_text_of_the_log(tmp_path: Path, texts: list[str]) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 15})
    rows.with_columns(v=pl.Series(texts * 10)).write_csv(tmp_path / "day_1.csv")
    rows.with_columns(v=pl.Series([2.5, 1.5, None] * 10)).write_parquet(tmp_path / "day_2.parquet")
    data = stoker.prepare(stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "v"}]}),
                          [tmp_path / "day_1.csv", tmp_path / "day_2.parquet"], out=tmp_path / "data",
                          split="random:1,0")  # fmt: skip
    found = next(iter(data.train.batches(60))).ids
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    for new, ids in ((texts, found[:3]), ([2.5, 1.5], found[30:32]), (["2.5", "1.50"], found[30:32])):
        asked = pl.DataFrame({"v": new})
        assert encoder.encode(asked).ids.tolist() == ids.tolist()
        again = stoker.prepare(None, asked.with_columns(label=0), like=data)
        assert next(iter(again.test.batches(len(new)))).ids.tolist() == ids.tolist()


@pytest.mark.parametrize("buckets", [{}, {"categorical": [{"name": "u"}, {"name": "v", "hash_buckets": 97}]}])
def test_texts_that_only_features_keep_stay_as_they_are_beside_numbers(tmp_path: Path, buckets: dict[str, Any]) -> None:
    """The dataset does not say how they were written, so each text of the log must be found again as it is."""
    rows = pl.DataFrame({"label": [0, 1] * 15, "u": "u"})
    rows.with_columns(v=pl.Series(["2.50", "v1", "2.50"] * 10)).write_csv(tmp_path / "day_1.csv")
    rows.with_columns(v=pl.Series([2.5, 1.5, None] * 10)).write_parquet(tmp_path / "day_2.parquet")
    values = {"label": "label", "categorical": [{"name": "u"}], "derive": ["count by=v name=n"], **buckets}
    data = stoker.prepare(stoker.Schema.from_dict(values), [tmp_path / "day_1.csv", tmp_path / "day_2.parquet"],
                          out=tmp_path / "data", split="random:1,0")  # fmt: skip
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(pl.DataFrame({"v": ["2.50", "v1"], "u": "u"}))
    assert asked.dense.tolist() == next(iter(data.train.batches(60))).dense[:2].tolist()


def test_texts_beside_a_column_of_nulls_may_be_versions(tmp_path: Path) -> None:
    """pandas writes numbers if all values of a day are missing."""
    rows = pl.DataFrame({"label": [0, 1] * 20, "v": ["2.1", "2.10"] * 20})
    rows.write_csv(tmp_path / "day_1.csv")
    values = {"label": "label", "categorical": [{"name": "v"}]}
    for missing in (None, float("nan")):
        rows.with_columns(v=pl.lit(missing, pl.Float64)).write_parquet(tmp_path / "day_2.parquet")
        data = stoker.prepare(stoker.Schema.from_dict(values), [tmp_path / "day_2.parquet", tmp_path / "day_1.csv"],
                              out=tmp_path / "data", split="random:1,0", overwrite=True)  # fmt: skip
        assert set(Like(data.path).vocabulary("v")["value"]) == {"2.1", "2.10"}


def test_columns_of_one_table_have_one_notation(tmp_path: Path) -> None:
    """Those of texts too, if one of them is numbers in a file: else new rows found the id of the other column."""
    rows = pl.DataFrame({"label": [0, 1] * 20, "v": [2.5, 1.0] * 20, "w": ["2.50", "1"] * 20})
    rows.write_parquet(tmp_path / "day_1.parquet")
    rows.with_columns(v=pl.Series(["2.50", "1"] * 20)).write_csv(tmp_path / "day_2.csv")
    values = {"label": "label", "categorical": [{"name": "v", "table": "t"}, {"name": "w", "table": "t"}]}
    data = stoker.prepare(stoker.Schema.from_dict(values), [tmp_path / "day_1.parquet", tmp_path / "day_2.csv"],
                          out=tmp_path / "data", split="random:1,0")  # fmt: skip
    assert set(Like(data.path).vocabulary("t")["value"]) == {"2.5", "1"}
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(pl.DataFrame({"v": ["2.50"], "w": ["2.5"]}))
    assert asked.ids.tolist() == [next(iter(data.train.batches(80))).ids[0].tolist()]


def test_a_decimal_is_a_known_text_of_a_log_without_one_notation(tmp_path: Path) -> None:
    rows = pl.DataFrame({"label": [0, 1] * 30, "v": ["2.5", "7.25", "3.125"] * 20})
    data = stoker.prepare(stoker.Schema.from_dict({"label": "label", "categorical": [{"name": "v"}]}), rows,
                          out=tmp_path / "data", split="random:1,0")  # fmt: skip
    [wanted] = data.train.batches(60)
    decimals = rows.with_columns(pl.col("v").cast(pl.Decimal(12, 4)))
    again = stoker.prepare(None, decimals, like=data)
    asked = RowEncoder(FittedSchema.of(Like(data.path))).encode(decimals.drop("label"))
    assert wanted.ids.tolist() == next(iter(again.test.batches(60))).ids.tolist() == asked.ids.tolist()


def test_a_condition_that_no_number_of_the_log_meets_is_refused(tmp_path: Path) -> None:
    """Without a vocabulary, numbers of a table have the digits of the values."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "user": [f"u{row % 7}" for row in range(60)], "price": [2.5, 3.0] * 30})
    values = {"label": "label", "categorical": [{"name": "user"}], "derive": ["match column=price values=2.50"]}
    [batch] = stoker.prepare(stoker.Schema.from_dict(values), rows, split="random:1,0").train.batches(60)
    assert batch.dense.flatten().tolist() == [1.0, 0.0] * 30
    values["categorical"] = [{"name": "price"}]
    with pytest.raises(stoker.SchemaError, match=r"values holds '2\.50', and the column numbers: write '2\.5'"):
        stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data")
    rows.cast({"price": pl.String}).with_columns(pl.col("price") + "0").write_csv(tmp_path / "log.csv")
    rows.write_parquet(tmp_path / "log.parquet")
    values["derive"] = ["match column=price values=2.50,2.5"]  # a log of both needs both
    files = [tmp_path / "log.csv", tmp_path / "log.parquet"]
    [batch] = stoker.prepare(stoker.Schema.from_dict(values), files, split="random:1,0").train.batches(120)
    assert batch.dense.flatten().tolist() == [1.0, 0.0] * 60


@pytest.mark.parametrize(
    ("typed", "texts", "value"),
    [(2.5, "2.50", "2.5"), (2.5, "2.5", "2.50"), (3.0, "3.00", "3")],
)
def test_a_condition_meets_the_same_rows_in_files_of_texts_and_of_numbers(
    tmp_path: Path, typed: Any, texts: str, value: str
) -> None:
    users = {"label": [0, 1] * 30, "user": [f"u{row % 7}" for row in range(60)]}
    pl.DataFrame({**users, "v": [texts, texts, "x"] * 20}).write_csv(tmp_path / "log.csv")
    pl.DataFrame({**users, "v": [typed, typed, None] * 20}).write_parquet(tmp_path / "log.parquet")
    values = {"label": "label", "categorical": [{"name": "user"}], "derive": [f"match column=v values={value}"]}
    files = [tmp_path / "log.csv", tmp_path / "log.parquet"]
    with pytest.raises(stoker.SchemaError, match=f"meet the numbers .* not the text '{texts}' of others"):
        stoker.prepare(stoker.Schema.from_dict(values), files, split="random:1,0")
    values["derive"] = [f"match column=v values={value},{texts}"]
    [batch] = stoker.prepare(stoker.Schema.from_dict(values), files, split="random:1,0").train.batches(120)
    assert batch.dense.flatten().tolist() == [1.0, 1.0, 0.0] * 40


def test_a_condition_on_small_floats_is_met_or_refused(tmp_path: Path) -> None:
    """Polars writes 0.00001 and 1e-7, and the vocabulary has these."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "v": [1e-5, 1e-7, 2.5] * 20})
    values: dict[str, Any] = {"label": "label", "categorical": [{"name": "v"}]}
    for text, said in (("0.00001", ""), ("1e-7", ""), ("1e-05", "0.00001"), ("1E-7", "1e-7"), ("2.50", "2.5")):
        schema = stoker.Schema.from_dict({**values, "derive": [f"match column=v values={text}"]})
        if said:
            with pytest.raises(stoker.SchemaError, match=f"holds '{text}', .* write '{said}'"):
                stoker.prepare(schema, rows, split="random:1,0")
        else:
            [batch] = stoker.prepare(schema, rows, split="random:1,0").train.batches(60)
            assert batch.dense.sum() == 20


@pytest.mark.parametrize(("rule", "texts"), [("== '1'", ["1,0", "0,0"]), ("== '2.5'", ["2,5", "5,0"])])
def test_a_decimal_comma_is_no_text_of_a_rule(tmp_path: Path, rule: str, texts: list[str]) -> None:
    rows = pl.DataFrame({"label": texts * 30, "user": [f"u{row % 7}" for row in range(60)]})
    rows.write_csv(tmp_path / "log.csv", separator=";")
    values = {"label": {"column": "label", "rule": rule}, "categorical": [{"name": "user"}],
              "source": {"separator": ";", "decimal": ","}}  # fmt: skip
    with pytest.raises(stoker.DataError, match=rf"holds '{texts[0]}', the number of the rule .* without quotes"):
        stoker.prepare(stoker.Schema.from_dict(values), tmp_path / "log.csv", out=tmp_path / "data")
    values["label"] = {"column": "label", "rule": rule.replace("'", "")}
    schema = stoker.Schema.from_dict(values)
    [batch] = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data", split="random:1,0").train.batches(60)
    assert batch.labels.tolist() == [1.0, 0.0] * 30


def test_times_are_no_numbers_of_a_label(tmp_path: Path) -> None:
    """Also of rows like a dataset's, where the label is optional: their microseconds would all be more than 0."""
    rows = pl.DataFrame({"label": [0, 5] * 30, "user": [f"u{row % 7}" for row in range(60)]})
    schema = stoker.Schema.from_dict({"label": {"column": "label", "rule": "> 3"}, "categorical": [{"name": "user"}]})
    data = stoker.prepare(schema, rows, out=tmp_path / "data", split="random:1,0")
    times = rows.with_columns(label=pl.from_epoch("label"))
    for like in (None, data):
        with pytest.raises(stoker.DataError, match=r"column label holds Datetime.*write numbers as in the log"):
            stoker.prepare(None if like else schema, times, out=tmp_path / "new", like=like)


def test_a_table_that_says_nothing_leaves_the_notation_of_the_others(tmp_path: Path) -> None:
    """The last price of each user is 2.5, which is written in one way; that of whole numbers is known from the ids."""
    rows = pl.DataFrame({"label": [0, 1] * 30, "price": [3.0, 4.5] * 26 + [2.5] * 8, "user": ["a", "b"] * 30,
                         "when": range(60)})  # fmt: skip
    values = {"label": "label", "timestamp": {"column": "when"}, "categorical": [{"name": "price"}],
              "derive": ["previous by=user order=when column=price"]}  # fmt: skip
    data = stoker.prepare(stoker.Schema.from_dict(values), rows, out=tmp_path / "data", split="random:1,0")
    assert Like(data.path).schema.notation_of("price") == "plain value|1e-6"
    rows.with_columns(pl.col("when") + 60).write_csv(tmp_path / "new.csv")
    [batch] = stoker.prepare(None, tmp_path / "new.csv", out=tmp_path / "new", like=data).test.batches(60)
    assert (batch.ids > 0).all()
