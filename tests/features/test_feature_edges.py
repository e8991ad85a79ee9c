"""Values at the edge: the largest numbers, NaN, moments out of reach, no rows, other types, labels that are missing."""

from __future__ import annotations

import math
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import naive_features as naive
import polars as pl
import pytest

from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.dataset.dataset import Dataset
from stoker.prep.parse.frames import Field, frame_block
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule, Timestamp

LEAST, MOST = -(2**63), 2**63 - 1
NAN = float("nan")


def made(features: list[f.Derivation], rows: pl.DataFrame, new: pl.DataFrame | None = None) -> list[tuple[Any, ...]]:
    """The outputs for new rows, by default the same."""
    rows = rows if "y" in rows.columns else rows.with_columns(y=pl.lit(0))
    got = f.fit(features, rows, label="y").apply(rows if new is None else new).collect()
    return got.select(name for feature in features for name in feature.outputs).rows()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 0.5, 2.5, 10.0, 1e30, math.inf])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([LEAST, LEAST + 1, 5, LEAST + 11, MOST, MOST - 2, 0, 5], pl.Int64),
        ([2**64 - 1, 3, 2**63 + 3, 2**63 + 1, 0, 2**63 - 1, 2**64 - 3], pl.UInt64),
        ([2**60 + 3, 2**60, 2**60 + 1, 2**60 + 1], pl.Int64),
        ([LEAST, MOST], pl.Int64),
        ([-1.5, 1e300, -math.inf, math.inf, 0.0], pl.Float64),
    ],
)
def test_an_order_of_extreme_numbers(values: list[Any], dtype: Any, window: float | None) -> None:
    rows: list[naive.Row] = [{"u": "a", "t": value} for value in values]
    features: list[f.Derivation] = [
        f.PastCount(name="count", by="u", order="t", window=window), f.SinceLast(name="since", by="u", order="t"),
        f.Rank(name="rank", by="u", order="t"), f.Rank(name="down", by="u", order="t", descending=True),
    ]  # fmt: skip
    got = made(features, pl.DataFrame(rows, schema={"u": pl.String, "t": dtype}))
    for at, row in enumerate(rows):
        past = naive.before(rows, at, ("u",), "t", None)
        since = float(row["t"] - values[past[-1]]) if past else None
        within = [i for i in past if window is None or row["t"] - values[i] <= window]
        ranks = [naive.rank(rows, at, ("u",), "t", descending=down, dense=False) for down in (False, True)]
        assert got[at] == (len(within), since, *ranks)


def test_long_groups_out_of_order() -> None:
    """Groups of more rows than are sorted by insertion, with many rows of one moment."""
    rows: list[naive.Row] = [{"u": n % 3, "t": naive.splitmix(n) % 60, "q": n} for n in range(450)]
    features: list[f.Derivation] = [
        f.Previous(name="prev", by="u", order="t", column="q"), f.PastCount(name="count", by="u", order="t", window=7),
    ]  # fmt: skip
    for (prev, count), at in zip(made(features, pl.DataFrame(rows)), range(len(rows)), strict=True):
        past = naive.before(rows, at, ("u",), "t", None)
        assert prev == (rows[past[-1]]["q"] if past else None)
        assert count == sum(rows[i]["t"] >= rows[at]["t"] - 7 for i in past)


def test_groups_of_new_rows_that_training_does_not_know() -> None:
    """Keys that a fitted feature has no code for are different groups all the same."""
    known = pl.DataFrame({"u": ["a", "b"], "t": [0, 1]})
    new = pl.DataFrame({"u": ["x", "y", "x", "a", "y"], "t": [1, 2, 3, 4, 5]})
    features: list[f.Derivation] = [
        f.CountEncoding(name="n", by="u"), f.Previous(name="prev", by="u", order="t", column="t"),
    ]  # fmt: skip
    assert made(features, known, new) == [(0, None), (0, None), (0, 1), (1, None), (0, 2)]


def test_training_rows_that_are_all_in_one_fold() -> None:
    """There are no others to learn from: every row has the mean of all, whatever its key and label."""
    rows = pl.DataFrame({"k": [1, 1, 2, 3], "one": ["x"] * 4, "y": [1, 0, 0, 0]})
    for smoothing in (0.0, 5.0):
        encoding = f.MeanTargetEncoding(name="m", by="k", fold_by="one", smoothing=smoothing)
        assert f.fit_apply([encoding], rows, label="y")[1]["m"].to_list() == [0.25] * 4


def test_nan_is_missing() -> None:
    rows = pl.DataFrame({"u": ["a"] * 4, "t": [0, 1, 2, 3], "e": [NAN, 1.0, None, 0.0], "x": [NAN, None, 1.5, NAN]})
    features: list[f.Derivation] = [
        f.PastCount(name="count", by="u", order="t", events="e"), f.Equal(name="eq", left="x", right="e"),
        f.CountEncoding(name="n", by="x"), f.TimeParts(name="at", column="x", parts=("hour",)),
    ]  # fmt: skip
    assert made(features, rows) == [(0, 0, 3, None), (0, 0, 3, None), (1, 0, 1, 0), (1, 0, 3, None)]
    crossed = [row for (row,) in made([f.Cross(columns=("u", "x"), buckets=2**40)], rows)]
    assert crossed == [naive.cross({"u": "a", "x": x}, ("u", "x"), 2**40, 0) for x in (None, None, 1.5, None)]


def test_moments_out_of_reach_are_missing_and_nanoseconds_exact() -> None:
    parts = ("hour", "weekday", "minute_of_day")
    far = pl.DataFrame({"t": [0, MOST, LEAST, 10**13]})
    assert made([f.TimeParts(column="t", parts=parts)], far) == [(0, 4, 0), *[(None,) * 3] * 3]
    new_hour = 1_541_030_400 * 10**9  # 00:00
    near = pl.DataFrame({"t": [new_hour - 1, new_hour, None]})
    got = made([f.TimeParts(column="t", unit="ns", parts=parts)], near)
    assert got == [(23, 3, 1439), (0, 4, 0), (None, None, None)]


def test_a_key_of_another_type_is_found_where_it_is_the_same_value() -> None:
    def counts(known: list[Any], new: list[Any]) -> list[int]:
        found = made([f.CountEncoding(name="n", by="u")], pl.DataFrame({"u": known}), pl.DataFrame({"u": new}))
        return [count for (count,) in found]

    assert counts([1, 1, 2], [1.5, 1.0, NAN, None, 1e300]) == [0, 2, 0, 0, 0]
    assert counts([True, False, True], [2, 1, 0]) == [0, 2, 1]
    assert counts([1.0, 2.0**53], [1, 2**53 + 1, 2**53]) == [1, 0, 1]
    assert counts(["1", "x"], [1, 2]) == [1, 0]


def test_no_rows_to_learn_from_or_to_apply_to() -> None:
    one = pl.DataFrame({"u": ["a"], "p": ["1|2"], "t": [3], "y": [1]})
    features: list[f.Derivation] = [
        f.Pairs(columns="p", names="item"), f.MeanTargetEncoding(name="m", by=("u", "item")),
        f.CountEncoding(name="n", by="u"), f.Properties(name="has", column="item", most=1),
        f.PastCount(name="seen", by="u", order="t"), f.CountEncoding(name="again", by="seen"),
    ]  # fmt: skip
    for none in (one.head(0), one.head(0).lazy()):
        fitted = f.fit(features, none, label="y")
        assert fitted.apply(one).select("m", "n", "has_1", "seen", "again").collect().rows() == [(0.0, 0, 0, 0, 0)] * 2
        assert f.fit(features, one, label="y").apply(none).collect().height == 0
    assert f.fit_apply(features, one.head(0), label="y")[1].height == 0


def test_labels_that_are_missing_teach_nothing() -> None:
    for label in (None, NAN, math.inf):
        rows = pl.DataFrame({"u": ["a", "a", "b"], "y": [0.0, 1.0, label]})
        with pytest.raises(DataError, match=r"feature 'm' .*: the label is missing or no number in 1 of 3 training"):
            f.fit([f.MeanTargetEncoding(name="m", by="u")], rows, label="y")


def test_columns_of_ones_own_stay() -> None:
    rows = pl.DataFrame({"u": ["a"], "__row_id": [7], "__labels": [8], "y": [1]})
    assert f.fit_apply([f.CountEncoding(name="n", by="u")], rows, label="y")[1].columns == [*rows.columns, "n"]


def test_names_with_a_comma_are_not_two() -> None:
    rows = pl.DataFrame({"a": range(40), "b": [1] * 40, "a,b": [0] * 40, "k": [0, 1] * 20, "y": [0, 1] * 20})
    encodings = [f.MeanTargetEncoding(name=f"m{n}", by="k", fold_by=by) for n, by in enumerate([("a", "b"), ("a,b",)])]
    _, both = f.fit_apply(encodings, rows, label="y")
    for one in encodings:
        assert both[one.name].equals(f.fit_apply([one], rows, label="y")[1][one.name])


def test_merge_with_two_texts_of_one_number(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("k,v\n07,a\n7,b\n8,c\n")
    with pytest.raises(DataError, match=r"m.csv has 2 lines whose k another line has, too, for example 7. Keep one"):
        made([f.Merge(on="i", file=str(tmp_path / "m.csv"), key="k", columns="v")], pl.DataFrame({"i": [7, 8]}))
    (tmp_path / "m.csv").write_text("k,v\n")
    empty = f.Merge(on="i", file=str(tmp_path / "m.csv"), key="k", columns="v")
    assert made([empty], pl.DataFrame({"i": [7, None]})) == [(None,), (None,)]


def test_patterns_know_classes_of_unicode() -> None:
    texts = pl.DataFrame({"u": ["Zoë", "1a", None]})
    assert made([f.Match(name="m", column="u", pattern=r"^\p{L}+$")], texts) == [(1,), (0,), (0,)]
    with pytest.raises(SchemaError, match=r"is not a regular expression"):
        f.Match(name="m", column="u", pattern=r"\p{L")


def prepared(folder: Path, text: str, features: list[f.Derivation], dense: str, *extra: CategoricalColumn) -> Any:
    (folder / "log.csv").write_text(text)
    schema = Schema(
        name="s", label=Label(column="y"), feature=tuple(features), dense=(DenseColumn(name=dense, fill=-9.0),),
        categorical=(CategoricalColumn(name="u"), *extra), split=SplitRule(train=1.0, valid=0.0, test=0.0),
    )  # fmt: skip
    run_prepare(schema, folder / "log.csv", out=folder / "made", threads=1)
    rows = Dataset(folder / "made").train
    return [rows[number]["dense"].tolist()[0] for number in range(len(rows))]


def test_a_far_moment_in_a_log_is_a_missing_one(tmp_path: Path) -> None:
    log = "y,t,u\n1,3600,a\n0,9000000000000000,b\n1,1e300,b\n"
    assert prepared(tmp_path, log, [f.TimeParts(name="at", column="t")], "at_hour") == [1, -9, -9]


def test_numbers_between_blanks_that_are_a_category_too(tmp_path: Path) -> None:
    log = "y,t,u,x\n1, 5,a,1\n0,+6 ,a,.5\n1,70,a,1e1\n"
    features: list[f.Derivation] = [f.Subtract(name="d", left="t", right="x"), f.SinceLast(by="u", order="t")]
    assert prepared(tmp_path, log, features, "d", CategoricalColumn(name="t")) == [4, 5.5, 60]


def test_a_pattern_that_cannot_be_worked_out_is_named(tmp_path: Path) -> None:
    features: list[f.Derivation] = [f.Match(name="ok", column="u", pattern="a"),
                                    f.Match(name="n", column="u", pattern="a(?=b)")]  # fmt: skip
    with pytest.raises(DataError, match=r"log.csv: feature 'n' \(match\) cannot be computed: .* look-around, incl"):
        prepared(tmp_path, "y,u\n1,a\n", features, "n")


ROWS = pl.DataFrame({"u": ["a", "b"], "w": ["1", "x"], "v": [1, 2], "l": [[1], [2]], "y": [1, 0]})
NONE = r"cannot be computed: column .* holds \"x\", which is not a number\. It wants numbers in"


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (f.Subtract(name="d", left="v", right="w"), rf"^feature 'd' \(subtract\) of 'v', 'w' {NONE} 'v', 'w': fix"),
        (
            f.Rank(name="r", by="u", order="w"),
            rf"feature 'r' \(rank\) of 'u', 'w' {NONE} 'w': fix what is not a number",
        ),
        (f.Difference(name="d", by="u", order="v", column="w"), rf"feature 'd' \(difference\) of .* {NONE} 'w', 'v'"),
        (
            f.Match(name="m", column="u", pattern="a(?=b)"),
            r"'m' \(match\) of 'u' cannot .* look-around, .*features.md s",
        ),
        (f.Properties(name="p", column="l", most=1), r"'p' \(properties\) of 'l' cannot be computed: .*List"),
    ],
)
def test_what_cannot_be_worked_out_in_memory(feature: f.Derivation, said: str) -> None:
    """Of rows in memory as of lazy ones, although these are computed by another feature's leave."""
    count = f.CountEncoding(name="n", by="u")
    for rows in (ROWS, ROWS.lazy()):
        with pytest.raises(DataError, match=said):
            f.fit([count, feature, f.CountEncoding(name="of", by=feature.outputs)], rows, label="y")
    with pytest.raises(DataError, match=said):
        f.fit_apply([feature], ROWS, label="y")
    good = ROWS.with_columns(w=pl.lit("1"), l=pl.lit("1"))
    if "pattern" not in feature.to_dict():
        with pytest.raises(DataError, match=said):
            f.fit([count, feature], good, label="y").apply(ROWS)


def test_truth_values_that_are_ids_are_no_numbers(tmp_path: Path) -> None:
    rows = pl.DataFrame({"y": [1, 0] * 5, "a": [True, False] * 5, "b": [1, 2] * 5})
    rows.write_csv(tmp_path / "log.csv")
    rows.write_parquet(tmp_path / "log.parquet")
    schema = Schema(
        label=Label(column="y"), categorical=(CategoricalColumn(name="a"),), dense=(DenseColumn(name="d"),),
        feature=(f.Subtract(name="d", left="a", right="b"),),
    )  # fmt: skip
    said = {
        "csv": r"column a: 'true' is not a number, which feature 'd' \(subtract\) needs",
        "parquet": r"'d' \(subtract\) cannot be computed: column 'a' holds \"true\", which is not a number\. It",
    }
    for kind, words in said.items():
        with pytest.raises(DataError, match=words):
            run_prepare(schema, tmp_path / f"log.{kind}", out=tmp_path / "made")


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["s", "us"])
@pytest.mark.parametrize("form", ["csv", "us", "ns", "utc"])
def test_a_timestamp_tells_its_unit(tmp_path: Path, form: str, unit: str) -> None:
    """Its parts were all missing with the unit of a number."""
    times = [datetime(2024, 1, 1 + day, 7 * day) for day in range(4)]
    rows = pl.DataFrame({"y": [1, 0, 1, 0], "t": times})
    if form == "csv":
        rows.write_csv(tmp_path / "log.csv")
    else:
        kind = pl.Datetime("us", "UTC") if form == "utc" else pl.Datetime(form)
        rows.cast({"t": kind}).write_parquet(tmp_path / "log.parquet")
    schema = Schema(
        label=Label(column="y"), timestamp=Timestamp(column="t", type="datetime"), dense=(DenseColumn(name="at_hour"),),
        feature=(f.TimeParts(name="at", column="t", unit=unit),), split=SplitRule(train=1.0, valid=0.0, test=0.0),
    )  # fmt: skip
    log = tmp_path / ("log.csv" if form == "csv" else "log.parquet")
    [batch] = Dataset(run_prepare(schema, log, out=tmp_path / "made").path).train.batches(4)
    assert batch.dense.flatten().tolist() == [0.0, 7.0, 14.0, 21.0]


def test_times_are_no_numbers(tmp_path: Path) -> None:
    """Their microseconds were taken for numbers of the log, such as seconds."""
    rows = pl.DataFrame({"y": [1, 0] * 5, "t": range(10)})
    rows.cast({"t": pl.Datetime("us")}).write_parquet(tmp_path / "times.parquet")
    rows.write_parquet(tmp_path / "log.parquet")
    readers: list[dict[str, Any]] = [
        {"dense": (DenseColumn(name="t"),)}, {"categorical": (CategoricalColumn(name="t", type="int"),)},
        {"dense": (DenseColumn(name="at_hour"),), "feature": (f.TimeParts(name="at", column="t"),)},
    ]  # fmt: skip
    for number, reader in enumerate(readers):
        schema = Schema(label=Label(column="y"), **reader)
        data = Dataset(run_prepare(schema, tmp_path / "log.parquet", out=tmp_path / f"{number}").path)
        for like in (None, data):
            with pytest.raises(DataError, match=r"column t holds Datetime.* whose unit a time does not say"):
                run_prepare(None if like else schema, tmp_path / "times.parquet", out=tmp_path / "made", like=like)
    rows.with_columns(pl.lit(None, pl.Datetime).alias("t")).write_parquet(tmp_path / "nulls.parquet")
    files = [tmp_path / "log.parquet", tmp_path / "nulls.parquet"]
    assert run_prepare(schema, files, out=tmp_path / "both").rows["train"] == 18


def test_a_label_that_is_text() -> None:
    for rows in (ROWS, ROWS.lazy()):
        with pytest.raises(DataError, match=r"^label column 'w' cannot be .*\"x\".* It must be numbers"):
            f.fit([f.CountEncoding(name="n", by="u"), f.MeanTargetEncoding(name="m", by="u")], rows, label="w")


def test_bytes_in_parquet(tmp_path: Path) -> None:
    """Bytes are read as text, or the numbers that it says; where they are none, the line is bad."""
    frame = {"y": [1, 0, 1, 0], "u": [b"a", b"\xff", None, b"d"], "q": [b"1", b"2", b"3", b"many"]}
    pl.DataFrame(frame).write_parquet(tmp_path / "log.parquet")
    schema = Schema(
        label=Label(column="y"), categorical=(CategoricalColumn(name="u"),), dense=(DenseColumn(name="q"),),
        split=SplitRule(train=1.0, valid=0.0, test=0.0),
    )  # fmt: skip
    report = run_prepare(schema, tmp_path / "log.parquet", out=tmp_path / "made")
    assert (report.bad, report.rows["train"]) == (2, 2)
    text = (tmp_path / "made" / "quarantine.jsonl").read_text()
    assert "column u: broken UTF-8" in text
    assert "column q: 'many' is not a number" in text
    pl.DataFrame({**frame, "q": [{"a": b"b"}] * 4}).write_parquet(tmp_path / "odd.parquet")
    with pytest.raises(
        DataError, match=r"odd.parquet: column q holds Struct.*, of which no float can be made\. Make columns"
    ):
        run_prepare(schema, tmp_path / "odd.parquet", out=tmp_path / "odd")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_feature_that_wants_numbers_is_named(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame({"y": [1, 0], "u": ["a", "b"], "when": ["Mon", "Tue"]})
    file = tmp_path / f"log.{kind}"
    {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[kind](file)
    schema = Schema(
        name="s", label=Label(column="y"), feature=(f.Rank(name="place", by="u", order="when"),),
        categorical=(CategoricalColumn(name="when"),), dense=(DenseColumn(name="place"),),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"column when: 'Mon' is not a number, which feature 'place' \(rank\) needs\."):
        run_prepare(schema, file, out=tmp_path / "made")


@pytest.mark.parametrize(
    ("series", "kind", "values", "wrong"),
    [
        (pl.Series(["ff", "a1", None], dtype=pl.Categorical), "hex", [255, 161, None], []),
        (pl.Series(["17", "x", "5"], dtype=pl.Enum(["5", "17", "x"])), "int", [17, 5], ["'x' is not a whole number"]),
        (pl.Series(["1.5", None], dtype=pl.Categorical), "float", [1.5, None], []),
        (pl.Series([Decimal("1.5"), Decimal("2.0")]), "int", [2], ["'1.5' is not a whole number"]),
        (pl.Series([2**70, 1], dtype=pl.Int128), "int", [1], [f"'{2**70}' is not within 64 bits"]),
        (pl.Series([[Decimal("1.5")], [Decimal("2")]]), "int", [2], ["'1.5' is not a whole number"]),
    ],
)
def test_types_of_other_writers(series: pl.Series, kind: str, values: list[float | None], wrong: list[str]) -> None:
    field = Field(column="c", kind=kind, separator="|" if series.dtype == pl.List else None, max_length=9)
    block = frame_block(pl.DataFrame({"c": series}), [field])
    column = block.columns[field]
    got = column.explode(empty_as_null=False) if field.separator is not None else column
    assert got.to_list() == values
    assert [bad.reason for bad in block.bad] == [f"column c: {reason}" for reason in wrong]
