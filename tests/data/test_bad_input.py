"""Input that is not as it should be: labels, headers, typed Parquet, places in messages, what failed runs leave."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from prepared import criteo_lines, digests, quarantine, rows_of, vocabulary

import stoker
from stoker import synthetic
from stoker.base.errors import ConfigError, DataError
from stoker.prep.prepare import run_prepare
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import Journal

SHOP = {
    "label": Label(column="label"),
    "dense": (DenseColumn(name="price"),),
    "categorical": (CategoricalColumn(name="item"),),
    "split": SplitRule(train=1.0, valid=0.0, test=0.0),
}


def shop(**changes: Any) -> Schema:
    return Schema(**{**SHOP, **changes})


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def labelled(path: Path, labels: list[object]) -> Path:
    return write(path, ["label,price,item", *(f"{label},{i},a" for i, label in enumerate(labels))])


def test_a_label_outside_0_and_1_stops_unless_a_share_of_bad_lines_is_allowed(tmp_path: Path) -> None:
    raw, out = labelled(tmp_path / "log.csv", [0, 1, "x", 1, 7, 0, 1, -1, 0.5, 1]), tmp_path / "out"
    found = f"{raw}:6: column label: 7 is neither 0 nor 1"
    for options in ({}, {"strict": True}):
        where = found if not options else f"{raw}:4: column label: 'x' is not a number"
        with pytest.raises(DataError) as caught:
            run_prepare(shop(), raw, out=out, block_bytes=16, **options)
        assert str(caught.value).startswith(where)
        assert not (out / "manifest.json").exists()
    with pytest.raises(DataError, match=r"give the label a rule .*max_bad, such as 0\.1%"):
        run_prepare(shop(), raw, out=out, block_bytes=16)
    with pytest.raises(DataError, match=r"4 of 10 lines are bad \(40.000%\).*:4: .*\. 3 of them for their label: give"):
        run_prepare(shop(), raw, out=out, block_bytes=16, max_bad="39%")
    report = run_prepare(shop(), raw, out=out, block_bytes=16, max_bad="40%")
    assert report.reused > 0  # what the refused runs had finished was kept
    assert [(bad["line"], bad["reason"], bad["text"]) for bad in quarantine(out)] == [
        (4, "column label: 'x' is not a number", "x,2,a"),
        (6, "column label: 7 is neither 0 nor 1", "7,4,a"),
        (9, "column label: -1 is neither 0 nor 1", "-1,7,a"),
        (10, "column label: 0.5 is neither 0 nor 1", "0.5,8,a"),
    ]
    assert rows_of(out, "train") == {
        "labels": [0, 1, 1, 0, 1, 1], "dense": [[0], [1], [3], [5], [6], [9]], "bags": [[[1]]] * 6,
    }  # fmt: skip
    run_prepare(shop(label=Label(column="label", rule="> 0")), raw, out=tmp_path / "rule")
    assert len(quarantine(tmp_path / "rule")) == 1


def test_a_column_without_any_0_or_1_is_no_label(tmp_path: Path) -> None:
    stars = labelled(tmp_path / "log.csv", [3, 4, 5])
    with pytest.raises(DataError, match=r"log\.csv:2: column label: 3 is neither 0 nor 1.*rule = '> 0'"):
        stoker.prepare(shop(), stars, out=tmp_path / "out")
    with pytest.raises(DataError, match=r"no usable row.*All 3 lines are bad, the first: .*3 is neither 0 nor 1"):
        stoker.prepare(shop(), stars, out=tmp_path / "out", max_bad="100%")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_labels_of_typed_files(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame({"label": [0, 1, 2], "price": [1.0, 2.0, 3.0], "item": ["a", "b", "c"]})
    raw = tmp_path / f"log.{kind}"
    frame.write_parquet(raw) if kind == "parquet" else frame.write_ndjson(raw)
    with pytest.raises(DataError, match=rf"log\.{kind}:3: column label: 2 is neither 0 nor 1"):
        stoker.prepare(shop(), raw, out=tmp_path / "out")
    stoker.prepare(shop(), raw, out=tmp_path / "out", max_bad=0.5)
    assert quarantine(tmp_path / "out")[0]["text"] == (
        "(2, 3.0, 'c')" if kind == "parquet" else raw.read_text().splitlines()[2]
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["criteo", "avazu", "taobao", "trivago"])
def test_prepare_sets_aside_just_the_lines_that_a_generated_log_spoils(tmp_path: Path, recipe: str) -> None:
    raw = tmp_path / "log.csv"
    truth = synthetic.write(recipe, 6_000, raw, bad="3%", scale=0.01)
    report = run_prepare(recipe, raw, out=tmp_path / "out", max_bad="5%")
    assert report.bad == len(quarantine(tmp_path / "out")) == truth.bad > 100
    whole = synthetic.write(recipe, 6_000, tmp_path / "whole.csv", scale=0.01)
    assert whole.bad == 0
    lines, good = ((tmp_path / name).read_bytes().splitlines() for name in ("log.csv", "whole.csv"))
    different = [number for number, pair in enumerate(zip(lines, good, strict=True), 1) if pair[0] != pair[1]]
    assert [bad["line"] for bad in quarantine(tmp_path / "out")] == different


@pytest.mark.slow
def test_a_derived_recipe_checks_its_labels_in_the_raw_lines(tmp_path: Path) -> None:
    raw = tmp_path / "avazu.csv"
    synthetic.write("avazu", 100, raw, scale=0.01)
    lines = raw.read_text().splitlines()
    cells = lines[6].split(",")
    write(raw, [*lines[:6], ",".join([cells[0], "7", *cells[2:]]), *lines[7:]])
    with pytest.raises(DataError, match=r"avazu\.csv:7: column click: 7 is neither 0 nor 1"):
        stoker.prepare("avazu", raw, out=tmp_path / "out")
    assert run_prepare("avazu", raw, out=tmp_path / "out", max_bad="1%").bad == 1


def test_names_that_are_not_utf8_are_refused_before_any_work(tmp_path: Path) -> None:
    """They ended a preparation when it wrote its manifest."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    inside, good = labelled(folder / "log.csv", [0, 1] * 9), labelled(tmp_path / "log.csv", [0, 1] * 9)
    for raw, out in ((inside, tmp_path / "out"), (good, folder / "out")):
        with pytest.raises(DataError, match=r"caf\\xe9.*: this path is not UTF-8. Rename the file or its directory"):
            run_prepare(shop(), raw, out=out)
        assert not out.exists()


def test_files_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [labelled(Path(day) / "log.csv", labels) for day, labels in (("mo", [0, 1]), ("tu", [1, "x"]))]
    stoker.prepare(shop(), files, out="out")
    assert [(bad["file"], bad["line"]) for bad in quarantine(Path("out"))] == [("tu/log.csv", 3)]
    with pytest.raises(DataError, match=r"^tu/log\.csv:3: column label"):
        stoker.prepare(shop(), "*/log.csv", out="strict", strict=True)
    with pytest.raises(DataError, match=r"The first: tu/log\.csv:3"):
        stoker.prepare(shop(), files, out="share", max_bad="1%")
    labelled(files[1], [1, 2])
    with pytest.raises(DataError, match=r"^tu/log\.csv:3: column label: 2"):
        stoker.prepare(shop(), files, out="label")
    labelled(files[0], [])
    labelled(files[1], [])
    with pytest.raises(DataError, match=r"no usable row in mo/log\.csv, tu/log\.csv\."):
        stoker.prepare(shop(), files, out="none")
    rule = SplitRule(rule="column", column="item", values={"b": "train"})
    labelled(files[1], [1])
    with pytest.raises(DataError, match=r"^tu/log\.csv: column item holds 'a', which the split rule"):
        stoker.prepare(shop(split=rule), files, out="split")


@pytest.mark.parametrize(
    ("kind", "values", "shown"),
    [("string", ["a", "b"], "b"), ("int", ["-5", "-7"], "-7"), ("hex", ["ff", "ffffffffffffff00"], "ffffffffffffff00"),
     ("float", ["0.5", "1.5"], "1.5")],
)  # fmt: skip
def test_a_value_without_id_is_named_with_its_file_and_row(
    tmp_path: Path, kind: str, values: list[str], shown: str
) -> None:
    common, rare = values
    first = write(tmp_path / "a.csv", ["label,item,price", f"1,{common},1", f"0,{common},2"])
    second = write(tmp_path / "b.csv", ["label,item,price", "1", f"1,{common},1", f"0,{rare},2"])
    item = CategoricalColumn(name="item", type=kind, min_count=2, oov="error")
    with pytest.raises(DataError, match=rf"b\.csv: row 2, not counting bad lines, has '{shown}' in item"):
        stoker.prepare(shop(categorical=(item,)), [first, second], out=tmp_path / "out")


MOMENTS = [datetime(2024, 1, 3, 10), datetime(2024, 1, 1, 9), datetime(2024, 1, 2), datetime(2024, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "when",
    [
        lambda: pl.Series(MOMENTS, dtype=pl.Datetime("us")),
        lambda: pl.Series(MOMENTS, dtype=pl.Datetime("ms")),
        lambda: pl.Series(MOMENTS, dtype=pl.Datetime("ns")).dt.replace_time_zone("Asia/Tokyo"),
        lambda: pl.Series([date(moment.year, moment.month, moment.day) for moment in MOMENTS]),
        lambda: pl.Series([f"{moment:%d.%m.%Y %H:%M}" for moment in MOMENTS]),
    ],
    ids=["us", "ms", "zoned", "date", "text"],
)
def test_typed_moments_need_no_format(tmp_path: Path, when: Callable[[], pl.Series]) -> None:
    """The format is for text; a column that is typed already is taken as it is, whatever the schema says."""
    frame = pl.DataFrame({"label": [0, 1, 0, 1], "price": [0.0, 1, 2, 3], "item": list("abcd"), "when": when()})
    frame.write_parquet(tmp_path / "log.parquet")
    schema = shop(
        split=SplitRule(rule="time", train=0.5, valid=0.25, test=0.25),
        timestamp=Timestamp(column="when", type="datetime", format="%d.%m.%Y %H:%M"),
    )
    stoker.prepare(schema, tmp_path / "log.parquet", out=tmp_path / "out", strict=True)
    found = {name: [row[0] for row in rows_of(tmp_path / "out", name)["dense"]] for name in ("train", "valid", "test")}
    assert found == {"train": [1.0, 2.0], "valid": [0.0], "test": [3.0]}


def test_a_missing_typed_moment_is_a_bad_line(tmp_path: Path) -> None:
    frame = pl.DataFrame({"label": [0, 1], "price": [0.0, 1], "item": ["a", "b"], "when": [None, MOMENTS[0]]})
    frame.write_parquet(tmp_path / "log.parquet")
    schema = shop(timestamp=Timestamp(column="when", type="datetime"))
    stoker.prepare(schema, tmp_path / "log.parquet", out=tmp_path / "out")
    assert [bad["reason"] for bad in quarantine(tmp_path / "out")] == ["column when: missing value"]


def test_nan_in_a_typed_float_column_is_missing(tmp_path: Path) -> None:
    """As written by tools that have no other way to say so: in features of any type, in lists, in the label."""
    nan = float("nan")
    columns = {
        "label": [1.0, 0.0, nan, 1.0], "price": [1.5, nan, 2.0, 3.5], "item": [7.0, nan, 7.0, 8.0],
        "text": [0.5, nan, 1.0, 0.5], "past": [[1.0, nan, 2.0], [nan], [], [3.0]],
    }  # fmt: skip
    pl.DataFrame(columns).write_parquet(tmp_path / "nan.parquet")
    empty = {name: pl.Series(values).fill_nan(None) for name, values in columns.items() if name != "past"}
    past = pl.Series("past", [[1.0, None, 2.0], [None], [], [3.0]], dtype=pl.List(pl.Float64))
    pl.DataFrame({**empty, "past": past}).write_parquet(tmp_path / "null.parquet")
    schema = shop(
        dense=(DenseColumn(name="price", fill=-1.0),),
        categorical=(CategoricalColumn(name="item", type="int"), CategoricalColumn(name="text", missing="category")),
        sequence=(SequenceColumn(name="past", type="int"),),
    )
    for name in ("nan", "null"):
        stoker.prepare(schema, tmp_path / f"{name}.parquet", out=tmp_path / name)
        out = tmp_path / name
        assert [(bad["line"], bad["reason"]) for bad in quarantine(out)] == [(3, "column label: missing value")]
        assert rows_of(out, "train")["dense"] == [[1.5], [-1.0], [3.5]]
        assert vocabulary(out, "item") == [(7, 1), (8, 1)]
        assert vocabulary(out, "text") == [("0.5", 2), (None, 1)]
        assert [len(row[2]) for row in rows_of(out, "train")["bags"]] == [2, 0, 1]


def test_a_header_that_gives_a_name_twice(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.tsv", ["label\tprice\titem\tx\tprice\tx", "1\t2\ta\t0\t3\t0"])
    with pytest.raises(DataError, match=r"log\.tsv:1: the header gives the name 'price' to columns 2 and 5\. Rename"):
        stoker.prepare(shop(), raw, out=tmp_path / "out")
    unused = write(tmp_path / "unused.tsv", ["label\tprice\titem\tx\tx\tx", "1\t2\ta\t0\t3\t0"])
    stoker.prepare(shop(), unused, out=tmp_path / "out", strict=True)


def test_the_quarantine_keeps_a_line_as_it_was_written(tmp_path: Path) -> None:
    lines = ["label::when::item::price", '1::2024-01-01::"a"::1', "1::yesterday::b::2", "x::2024-01-01::c::3", "1::2"]
    schema = shop(source=SourceFormat(separator="::"), timestamp=Timestamp(column="when", type="datetime"))
    stoker.prepare(schema, write(tmp_path / "log.csv", lines), out=tmp_path / "out")
    assert [bad["text"] for bad in quarantine(tmp_path / "out")] == lines[2:]
    assert quarantine(tmp_path / "out")[2]["reason"] == "2 fields, expected 4"


@pytest.mark.parametrize(
    ("lines", "schema", "message"),
    [
        (["label,price", "1,2"], shop(), "no column 'item'"),
        (["label,price,item", "1,2"], shop(), "no usable row.*The only line is bad"),
        (["label,price,item", "1,2,a"], shop(split=SplitRule(train=0, valid=1, test=0)), "no training row"),
        (
            ["label,price,item", "1,2,a"],
            shop(split=SplitRule(rule="column", column="item", values={"b": "train"})),
            "which the split rule does not list",
        ),
    ],
    ids=["column", "rows", "training", "split"],
)
@pytest.mark.parametrize("there", [False, True])
def test_a_failed_start_leaves_nothing_behind(
    tmp_path: Path, lines: list[str], schema: Schema, message: str, there: bool
) -> None:
    raw, out = write(tmp_path / "log.csv", lines), tmp_path / "new" / "deep" / "out"
    if there:  # an empty directory is the user's and stays
        out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=message):
        stoker.prepare(schema, raw, out=out)
    assert sorted(tmp_path.rglob("*")) == before


ADD = Journal.add


def stopping(step: str, error: type[BaseException]) -> Any:
    """A journal that fails when a step is finished."""

    def stop(self: Journal, name: str, entry: Any) -> Any:
        if name == step:
            raise error
        return ADD(self, name, entry)

    return stop


@pytest.mark.slow
def test_ctrl_c_says_what_was_kept_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, out = write(tmp_path / "log.tsv", criteo_lines(300)), tmp_path / "made" / "out"
    run_prepare("criteo", raw, out=tmp_path / "whole", block_bytes=10_000)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stopping("parts/00000.000000", KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt, match=r"nothing was kept\. Give the same command again"):
            run_prepare("criteo", raw, out=out, block_bytes=10_000)
        assert not (tmp_path / "made").exists()
        patch.setattr(Journal, "add", stopping("parts/00000.000002", KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as caught:
            run_prepare("criteo", raw, out=out, block_bytes=10_000, resume=False)
        assert str(caught.value) == (
            f"interrupted; 2 finished steps kept in {out / '.work'}. "
            "Give the same command again with resume to continue from there."
        )
    assert run_prepare("criteo", raw, out=out, block_bytes=10_000).reused == 2
    assert digests(out) == digests(tmp_path / "whole")


def test_max_bad_that_is_no_share(tmp_path: Path) -> None:
    raw = labelled(tmp_path / "log.csv", [1])
    with pytest.raises(ConfigError, match="max_bad: share 'lots' is not a number"):
        stoker.prepare(shop(), raw, out=tmp_path / "out", max_bad="lots")


@pytest.mark.slow
def test_manifests_name_the_command(tmp_path: Path) -> None:
    raw = labelled(tmp_path / "log.csv", [1, 0])
    stoker.prepare(shop(name="shop"), raw, out=tmp_path / "own")
    made = json.loads((tmp_path / "own" / "manifest.json").read_text())
    assert made["created_by"] == "stoker prepare with the schema shop"
    stoker.prepare("criteo", write(tmp_path / "log.tsv", criteo_lines(20)), out=tmp_path / "known")
    made = json.loads((tmp_path / "known" / "manifest.json").read_text())
    assert made["created_by"] == "stoker prepare criteo --preset dlrm"


def test_what_a_recipe_cannot_work_with_says_why(tmp_path: Path) -> None:
    """Not only the first line of what Polars says, which may be "regex parse error:"."""
    (tmp_path / "log.csv").write_text("label,item\n1,a\n")
    recipe = Recipe(
        name="own", description="", presets={"plain": shop}, inputs={"log": RawInput(columns={"item": "string"})},
        derive=lambda inputs, _: inputs["log"].filter(pl.col("item").str.contains("a(?=b)")),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"recipe own cannot work with .*log.csv: .*look-around, .*docs/recipes.md"):
        stoker.prepare(recipe, tmp_path / "log.csv", out=tmp_path / "made")
