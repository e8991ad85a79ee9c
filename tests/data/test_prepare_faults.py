"""Faults that ``prepare`` answers with one message: leaks of the label, bad lines, files that are no logs, links."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import socket
from io import BytesIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from prepared import digests, rows_of

import stoker
from stoker.base.errors import ConfigError, DataError, SchemaError
from stoker.prep import recipes
from stoker.prep.parse.quarantine import BadReasons
from stoker.prep.prepare import run_prepare
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat
from stoker.rewrite.reorder import run_reorder

HEAD = "label,price,item"
ROWS = [f"{n % 2},{n},{'abc'[n % 3]}" for n in range(200)]


def shop(**changes: Any) -> Schema:
    columns = {"dense": (DenseColumn(name="price"),), "categorical": (CategoricalColumn(name="item"),)}
    return Schema(
        **{"label": Label(column="label"), "split": SplitRule(train=1, valid=0, test=0), **columns, **changes}
    )


def write(path: Path, lines: list[str], encoding: str = "utf-8") -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
    return path


def refused(schema: Schema | str, raw: Path | str, out: Path, **options: Any) -> str:
    """The message of a refusal, which is short and leaves no dataset."""
    with pytest.raises((DataError, ConfigError)) as caught:
        stoker.prepare(schema, raw, out=out, **options)
    assert not (out / "manifest.json").exists()
    text = str(caught.value)
    assert len(text) < 1_000
    assert text.count("\n") < 10
    return text


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("dense", DenseColumn(name="clicked")),
        ("dense", DenseColumn(name="y", source="clicked")),
        ("categorical", CategoricalColumn(name="y", source="clicked")),
        ("sequence", SequenceColumn(name="clicked")),
    ],
)
def test_a_label_that_is_a_feature_is_refused(kind: str, column: Any) -> None:
    found = rf"column '{column.name}': source 'clicked' is the column of the label.*AUC 1\.0.*Leave the column out"
    with pytest.raises(SchemaError, match=found):
        shop(label=Label(column="clicked"), **{kind: (column,)})


def test_a_feature_of_the_column_that_the_label_is_made_of_by_a_rule_draws_a_warning(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.csv", [HEAD, *ROWS])
    schema = shop(label=Label(column="price", rule="> 100"))
    for _ in range(2):  # the second time nothing is to be done
        report = run_prepare(schema, raw, out=tmp_path / "out")
        (text,) = report.warnings
        assert text.startswith("column 'price' reads 'price', from which the rule '> 100' makes the label: a model can")
    assert report.already
    with pytest.warns(UserWarning, match="from which the rule"):
        stoker.prepare(schema, raw)
    assert shop(label=Label(column="price", rule="> 100"), dense=()).leak_warnings() == []


def test_recipes_do_not_leak() -> None:
    for name in recipes.names():
        for preset in recipes.get(name).presets:
            assert recipes.get(name).schema(preset).leak_warnings() == [], (name, preset)


def spoiled(bad: int) -> list[str]:
    """200 lines, of which the last ``bad`` are too long."""
    return [HEAD, *ROWS[: len(ROWS) - bad], *(f"{row},x" for row in ROWS[len(ROWS) - bad :])]


def test_more_than_one_percent_of_bad_lines_stops(tmp_path: Path) -> None:
    few = write(tmp_path / "few.csv", spoiled(9))
    assert run_prepare(shop(), few, out=tmp_path / "few").bad == 9, "fewer than ten never stop"
    raw, out = write(tmp_path / "log.csv", spoiled(10)), tmp_path / "out"
    text = refused(shop(), raw, out)
    assert text == (
        f"10 of 200 lines are bad (5.000%), more than the 1.000% that max_bad allows by default. The first: {raw}:192: "
        "more than 3 fields. Commonest: 10 x not 3 fields. Wrong number of fields: set separator in [source] of the "
        "schema, or, without a header, the names in columns. To set them aside, allow more with max_bad, such as 6%."
    )
    report = run_prepare(shop(), raw, out=out, max_bad="5%")
    assert (report.bad, report.reasons) == (10, {"not 3 fields": 10})
    assert report.reused > 0  # what the refused run had read
    long = write(tmp_path / "long.csv", [HEAD, *ROWS * 5, *(f"{row},x" for row in ROWS[:10])])
    assert run_prepare(shop(), long, out=tmp_path / "long").bad == 10, "ten of 1,010 lines"
    with pytest.raises(DataError, match=r"All 20 lines are bad, the first.*Wrong number of fields: set separator"):
        stoker.prepare(shop(), write(tmp_path / "all.csv", [HEAD, *("1;2;a",) * 20]), out=tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_bad_lines_are_summed_up_with_reasons_and_remedies(tmp_path: Path) -> None:
    bad = ["1,2,é"] * 5 + ["1,2", "1", "1,2,a,b"] + ['1,2,"a'] * 2 + ["1,NA,a"]
    raw = write(tmp_path / "log.csv", [HEAD, *ROWS, *bad], encoding="latin-1")
    for _ in range(2):
        report = run_prepare(shop(), raw, out=tmp_path / "out", max_bad=0.1)
        assert list(report.reasons.items()) == [
            ("broken UTF-8", 5), ("not 3 fields", 3), ("quoted field without a closing quote", 2),
        ]  # fmt: skip
        assert [remedy.split(" in [source]")[0] for remedy in report.remedies] == [
            'Text in another encoding: set encoding = "latin-1"', "Wrong number of fields: set separator",
            'Quotes that are ordinary characters: set quote = ""',
        ]  # fmt: skip
    assert report.already
    mended = shop(source=SourceFormat(encoding="latin-1", quote=None, null_values=("NA",)))
    assert run_prepare(mended, raw, out=tmp_path / "mended").reasons == {"not 3 fields": 3}
    assert run_prepare(shop(), write(tmp_path / "good.csv", [HEAD, *ROWS]), out=tmp_path / "good").reasons == {}


@pytest.mark.parametrize(
    ("reason", "called", "remedy"),
    [
        ("column a: b: 'is not' is not a number", "column a: not a number", "null_values"),
        (
            "column when: 'x' is not a date and time in ISO 8601",
            "column when: not a date and time in ISO 8601",
            "set format in [timestamp]",
        ),
        ("column x: 'zz' is not hexadecimal (up to 16 digits)", "column x: not hexadecimal (up to 16 digits)", "null"),
        ("column label: 'True' is not a number", "column label: not a number", "rule = \"== 'true'\""),
        ("column label: 7 is neither 0 nor 1", "column label: neither 0 nor 1", "rule"),
        ("1,000 fields, expected 2000", "not 2000 fields", "separator"),
        ("column x: broken UTF-8", "broken UTF-8", "latin-1"),
        ("not a JSON object: Extra data: line 1", "not a JSON object", "one object a line"),
        ("column label: missing value", "column label: missing value", None),
    ],
)
def test_reasons_leave_out_what_only_their_line_has(reason: str, called: str, remedy: str | None) -> None:
    found = BadReasons.among([reason, reason, "other"])
    assert found.counts == {called: 2, "other": 1}
    assert [remedy in told for told in found.remedies] == ([] if remedy is None else [True])


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, what in ((tmp_path / "pipe", "a pipe"), (tmp_path / "socket", "a socket"), ("/dev/null", "a device")):
            assert refused(shop(), path, tmp_path / "out").startswith(f"{path} is {what}, and Stoker needs a regular")
        assert f"{tmp_path / 'pipe'} is a pipe" in refused(shop(), str(tmp_path / "p*"), tmp_path / "out")
    (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere")
    assert "link.csv cannot be read (No such file or directory)" in refused(
        shop(), tmp_path / "link.csv", tmp_path / "out"
    )


def test_a_file_without_the_right_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "log.csv", [HEAD, *ROWS])
    raw.chmod(0)
    if os.access(raw, os.R_OK):  # the superuser may

        def refuse(path: Path, *_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", refuse)
    text = refused(shop(), raw, tmp_path / "out")
    assert text == f"{raw} cannot be read (Permission denied). Check its path and its permissions."


def test_truncated_files(tmp_path: Path) -> None:
    text = "\n".join([HEAD, *ROWS]).encode()
    for name, packed in (("cut.csv.gz", gzip.compress(text)), ("cut.csv.zst", zstandard.compress(text))):
        (tmp_path / name).write_bytes(packed[:20])
        assert f"{name} breaks off before its first line ends: truncated" in refused(
            shop(), tmp_path / name, tmp_path / "out"
        )
    whole, cut = tmp_path / "log.parquet", tmp_path / "cut.parquet"
    pl.DataFrame({"label": [0, 1], "price": [1, 2], "item": ["a", "b"]}).write_parquet(whole)
    for size in (5, 11, whole.stat().st_size - 1):
        cut.write_bytes(whole.read_bytes()[:size])
        assert "cut.parquet is truncated: a Parquet file ends with PAR1" in refused(shop(), cut, tmp_path / "out")
    recipe = Recipe(
        name="own", description="", presets={"plain": shop}, inputs={"log": RawInput(columns={"item": "string"})},
        derive=lambda inputs, _: inputs["log"],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"cut\.parquet is truncated"):
        stoker.prepare(recipe, cut, out=tmp_path / "out")
    cut.write_bytes(b"")
    assert "cut.parquet is empty" in refused(shop(), cut, tmp_path / "out")
    cut.write_bytes(text)
    assert "cut.parquet cannot be read as Parquet: " in refused(shop(), cut, tmp_path / "out")


def test_a_header_in_another_encoding(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.csv", ["label,price,item,é", "1,2,a,b"], encoding="latin-1")
    assert refused(shop(), raw, tmp_path / "out").startswith(
        f'{raw}:1: the header is not UTF-8 (byte 18). For text in another encoding set encoding = "latin-1" in [source]'
    )
    stoker.prepare(shop(source=SourceFormat(encoding="latin-1")), raw, out=tmp_path / "latin")
    for encoding in ("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32"):  # the second and third without a byte order mark
        wide = write(tmp_path / "wide.csv", [HEAD, *ROWS], encoding=encoding)
        text = refused(shop(), wide, tmp_path / "out")
        assert text == f"{wide} is {encoding} text. Convert it: iconv -f {encoding} -t UTF-8 < {wide} > NEW.csv"


def arrow(form: str) -> bytes:
    file, rows = BytesIO(), pl.DataFrame({"label": [0, 1], "price": [1, 2], "item": ["a", "b"]})
    (rows.write_ipc_stream if form == "stream" else rows.write_ipc)(file)
    return file.getvalue()[: 100 if form == "begin" else None]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("file", "an Arrow file (Feather), not text. Write it as Parquet"),
        ("begin", "an Arrow file (Feather), not text. Write it as Parquet"),
        ("stream", "an Arrow stream, not text. Write it as Parquet"),
        (b"PAR1" + bytes(100), 'Parquet, not text. Name it .parquet, or set kind = "parquet"'),
        (bz2.compress(b"a,b\n" * 99), "compressed with bzip2, not text. Unpack it first"),
        (lzma.compress(b"a,b\n" * 99), "compressed with xz, not text. Unpack it first"),
        (b"PK\x03\x04" + bytes(range(256)), "a zip archive or a spreadsheet, not text. Unpack it, or export it as CSV"),
        (gzip.compress(b"log.csv" + bytes(500) + b"\nlabel,price,item\n" * 9), "a binary file, not a log"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, content: bytes | str, said: str) -> None:
    raw = tmp_path / "log.csv"
    raw.write_bytes(arrow(content) if isinstance(content, str) else content)
    assert f"{raw} is {said}" in refused(shop(), raw, tmp_path / "out")
    with pytest.raises(DataError, match="not"):
        stoker.draft_schema(raw)


def test_zero_bytes_within_texts_are_text(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.csv", [HEAD, *(f"{n % 2},{n}.25,item{n % 7}\0" for n in range(200))])
    assert len(stoker.prepare(shop(), raw).train) == 200
    assert 'name = "item"' in stoker.draft_schema(raw)


def test_an_empty_first_line_is_no_header(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.csv", ["", HEAD, *ROWS])
    text = refused(shop(), raw, tmp_path / "out")
    assert text == f"{raw}:1: the first line is empty, and should name the columns. Delete it."


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.jsonl", "bare.csv"])
def test_line_ends_of_old_macs(tmp_path: Path, name: str) -> None:
    lines = ['{"label": 1}'] * 9 if name.endswith("jsonl") else [HEAD, *ROWS * 100]
    raw, text = tmp_path / name, "\r".join(lines).encode()
    raw.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    schema = shop(source=SourceFormat(columns=("label", "price", "item"))) if name == "bare.csv" else shop()
    how = f"gzip -dc {raw} | tr '\\r' '\\n' > NEW.csv" if name.endswith("gz") else f"tr '\\r' '\\n' < {raw} > NEW.csv"
    assert refused(schema, raw, tmp_path / "out") == (
        f"{raw} has the line ends of old Macs, carriage returns alone. Convert it: {how}"
    )


def test_a_single_line_may_end_with_a_carriage_return(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(b"1,2,a\r")
    schema = shop(source=SourceFormat(columns=("label", "price", "item")))
    assert len(stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "out").train) == 1


@pytest.mark.slow
def test_many_columns_that_are_not_there(tmp_path: Path) -> None:
    names = [f"column_{number:04}" for number in range(3_000)]
    raw = write(tmp_path / "log.csv", [",".join(names), ",".join(["1"] * 3_000)])
    dense = tuple(DenseColumn(name=f"clumn_{number:04}") for number in range(88))
    text = refused(shop(dense=dense), raw, tmp_path / "out")
    assert text.startswith(f"{raw} lacks 90 columns of the schema: label, clumn_0000, clumn_0001, ")
    assert "clumn_0006 and 82 more. It has: column_0000, " in text
    assert text.endswith("column_0007 and 2,992 more. Did you mean 'column_0000' instead of 'clumn_0000'?")
    wrong = write(tmp_path / "wrong.csv", ["label;price;item", "1;2;a"])
    assert "',' is not what separates fields: set separator in [source]" in refused(shop(), wrong, tmp_path / "out")
    headless = write(tmp_path / "headless.csv", ["1,2,a", "0,3,b"])
    assert "a row, not a header: set the names as columns in [source]" in refused(shop(), headless, tmp_path / "out")
    feature = ({"kind": "count", "name": "n", "by": ["nobody"]},)
    with pytest.raises(
        DataError, match=r"lacks 4 columns .* \(feature 'n' \(count\) reads nobody\)\. It has"
    ) as caught:
        stoker.prepare(Schema.from_dict({**shop().to_dict(), "feature": feature}), raw, out=tmp_path / "out")
    assert len(str(caught.value)) < 1_000
    endless = write(tmp_path / "endless.csv", ["x" * 10_000 + ",b", "1,2"])
    assert "It has: " + "x" * 37 + "..., b." in refused(shop(), endless, tmp_path / "out")


def test_an_empty_directory_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, out = write(tmp_path / "log.csv", [HEAD, *ROWS]), tmp_path / "out"
    out.mkdir(mode=0o555)
    if os.access(out, os.W_OK):  # the superuser may

        def refuse(path: Path, *_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
    text = refused(shop(), raw, out)
    assert text == f"{out} cannot be written (Permission denied). Choose a directory that you may write to."


def test_threads_are_those_that_a_machine_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "log.csv", [HEAD, *ROWS])
    monkeypatch.setattr("stoker.base.device.cpu_count", lambda: 6)
    text = refused(shop(), raw, tmp_path / "out", threads=10_000)
    assert text == (
        "threads: 10,000 is outside 1 to 24. This process may use 6 cores; leave threads out to use one per core."
    )
    for threads in (25, 0, -1):
        assert "outside 1 to 24" in refused(shop(), raw, tmp_path / "out", threads=threads)
    data = stoker.prepare(shop(), raw, out=tmp_path / "out", threads=24)
    with pytest.raises(ConfigError, match="threads: 25 is outside 1 to 24"):
        run_reorder(data, tmp_path / "ordered", threads=25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "reorder", "rebuilt", "memory"])
def test_a_symbolic_link_to_a_dataset_remains_a_link(tmp_path: Path, kind: str) -> None:
    """What it points to is replaced: by a preparation, one that reorders, a reordering, and a dataset in memory."""
    lines = [f"{n % 2},{n},{n % 1_200}" for n in range(2_500)]
    first, second = (write(tmp_path / name, [HEAD, *lines[:n]]) for name, n in (("a.csv", 100), ("b.csv", 2_500)))
    real, link = tmp_path / "data" / "real", tmp_path / "link"
    stoker.prepare(shop(), first, out=real)
    link.symlink_to(real)
    if kind == "rebuilt":
        source = stoker.prepare(shop(), second, out=tmp_path / "source")
        stoker.reorder(source, link, overwrite=True)
    elif kind == "memory":
        stoker.prepare(shop(), second).save(link, overwrite=True)
    else:
        stoker.prepare(shop(), second, out=link, overwrite=True, reorder=kind == "reorder")
    assert link.is_symlink()
    assert link.readlink() == real
    assert not real.is_symlink()
    assert len(rows_of(real, "train")["labels"]) == 2_500
    left = {"a.csv", "b.csv", "data", "link"} | ({"source"} if kind == "rebuilt" else set())
    assert {path.name for path in tmp_path.iterdir()} == left
    assert [path.name for path in real.parent.iterdir()] == ["real"]


def test_a_symbolic_link_to_a_place_for_a_dataset(tmp_path: Path) -> None:
    raw, link = write(tmp_path / "a.csv", [HEAD, *ROWS]), tmp_path / "link"
    link.symlink_to(tmp_path / "new")
    stoker.prepare(shop(), raw, out=link)
    stoker.prepare(shop(), raw, out=tmp_path / "plain")
    assert link.is_symlink()
    assert digests(tmp_path / "new") == digests(tmp_path / "plain")
