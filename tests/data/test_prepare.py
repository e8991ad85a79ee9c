"""Files in every form, bad input, interrupted runs, splits and policies of stoker.prepare."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from prepared import counts, criteo_lines, digests, quarantine, rows_of, vocabulary
from processes import start_process
from recipe_logs import generated

import stoker
from stoker.base.errors import ConfigError, DataError, SchemaError
from stoker.base.files import hash_file
from stoker.cli.options import message_of
from stoker.prep.parse.layout import Layout
from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.ads import CATEGORICAL, COLUMNS, DENSE, criteo
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

SHARED = Path(os.environ.get("STOKER_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def shop(**changes: Any) -> Schema:
    """A small schema over named columns: label, user, item, price, when, day."""
    return replace(
        Schema(
            label=Label(column="label"),
            dense=(DenseColumn(name="price"),),
            categorical=(CategoricalColumn(name="item"),),
            split=SplitRule(rule="column", column="day", values={"mo": "train", "tu": "valid", "we": "test"}),
        ),
        **changes,
    )


HEAD = "label,user,item,price,when,day"


def prepared(tmp_path: Path, schema: Schema, lines: list[str], **options: Any) -> Path:
    raw = write(tmp_path / "log.csv", [HEAD, *lines])
    stoker.prepare(schema, raw, out=tmp_path / "out", **options)
    return tmp_path / "out"


@pytest.mark.slow
def test_criteo_split_is_exact_and_vocabulary_from_training_rows_only(tmp_path: Path) -> None:
    lines = criteo_lines(1003)
    data = stoker.prepare("criteo", write(tmp_path / "train.txt", lines), out=tmp_path / "out")
    # 1003 = 7 * 143 + 2: the first two runs have 144 lines; six train; the last 143 give 72 test, 71 valid.
    assert (len(data.train), len(data.test), len(data.valid)) == (860, 72, 71)
    cells = [line.split("\t") for line in lines]
    for split, part in (("train", cells[:860]), ("test", cells[860:932]), ("valid", cells[932:])):
        assert rows_of(tmp_path / "out", split)["labels"] == [float(row[0]) for row in part]
    for index, name in enumerate(CATEGORICAL):
        train = Counter(int(row[14 + index] or "0", 16) for row in cells[:860])
        assert vocabulary(tmp_path / "out", name) == sorted(train.items(), key=lambda item: (-item[1], item[0]))
        ids = {value: number for number, (value, _) in enumerate(vocabulary(tmp_path / "out", name), 1)}
        held = [row[index][0] for row in rows_of(tmp_path / "out", "test")["bags"]]
        assert held == [ids.get(int(row[14 + index] or "0", 16), 0) for row in cells[860:932]]
    dense = np.array(rows_of(tmp_path / "out", "valid")["dense"])
    raw = np.array([[float(text or 0) for text in row[1:14]] for row in cells[932:]])
    np.testing.assert_array_equal(dense, np.log(np.maximum(raw, 0) + 1).astype(np.float32))
    assert any(0 in bag for row in rows_of(tmp_path / "out", "test")["bags"] for bag in row)
    data.verify()


@pytest.mark.slow
def test_nvt_preset_scales_by_training_statistics(tmp_path: Path) -> None:
    lines = criteo_lines(700)
    stoker.prepare("criteo", write(tmp_path / "train.txt", lines), out=tmp_path / "out", preset="nvt")
    raw = np.array([[max(float(t or 0), 0.0) for t in line.split("\t")[1:14]] for line in lines])
    train = raw[:600]
    expected = (raw - train.mean(axis=0)) / train.std(axis=0)
    np.testing.assert_allclose(rows_of(tmp_path / "out", "train")["dense"], expected[:600], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows_of(tmp_path / "out", "test")["dense"], expected[600:650], rtol=1e-5, atol=1e-6)


def as_frame(lines: list[str]) -> pl.DataFrame:
    rows = [line.split("\t") for line in lines]
    frame = pl.DataFrame(rows, schema=list(COLUMNS), orient="row")
    frame = frame.with_columns(pl.all().replace("", None))
    return frame.with_columns(pl.col("label", *DENSE).cast(pl.Int64))


@pytest.mark.slow
def test_every_file_format_gives_the_same_dataset(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the test itself writes .zst files with it")
    lines = criteo_lines(500)
    text = ("\n".join(lines) + "\n").encode()
    schema = criteo().schema()
    dense = tuple(replace(c, fill="mean", transforms=("log1p", "zscore")) for c in schema.dense)
    schema = replace(schema, dense=dense)
    named = replace(schema, source=SourceFormat())
    frame = as_frame(lines)
    (tmp_path / "a.tsv").write_bytes(text)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
    (tmp_path / "a.tsv.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    (tmp_path / "crlf.tsv").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    frame.write_parquet(tmp_path / "a.parquet", row_group_size=100)
    frame.write_ndjson(tmp_path / "a.jsonl")
    frame.write_csv(tmp_path / "a.csv", quote_style="always")
    halves = [write(tmp_path / f"part_{i}.tsv", lines[i * 250 : i * 250 + 250]) for i in range(2)]
    expected = None
    for schema_here, files in (
        (schema, ["a.tsv"]), (schema, ["a.tsv.gz"]), (schema, ["a.tsv.zst"]), (schema, ["crlf.tsv"]),
        (schema, [path.name for path in halves]), (schema, ["part_*.tsv"]),
        (named, ["a.parquet"]), (named, ["a.jsonl"]), (named, ["a.csv"]),
    ):  # fmt: skip
        out = tmp_path / ("out_" + files[0].replace("*", "x"))
        run_prepare(schema_here, [tmp_path / name for name in files], out=out, block_bytes=20_000)
        stats = json.loads((out / "manifest.json").read_text())["dense_stats"]
        found = (stats, digests(out, without=("manifest.json",)))  # the manifest names the input files
        expected = expected or found
        assert found == expected, files


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dlrm", "nvt"])
def test_bytes_depend_neither_on_threads_nor_on_blocks(tmp_path: Path, preset: str) -> None:
    raw = write(tmp_path / "a.tsv", criteo_lines(400))
    found = []
    for number, (threads, block) in enumerate(((1, 2**24), (4, 10_000), (2, 700))):
        out = tmp_path / f"out{number}"
        run_prepare("criteo", raw, out=out, preset=preset, threads=threads, block_bytes=block)
        found.append(digests(out))
    assert found[0] == found[1] == found[2]
    assert not (tmp_path / "out0" / ".work").exists()


@pytest.mark.slow
def test_bad_lines_are_set_aside_with_their_numbers(tmp_path: Path) -> None:
    lines = criteo_lines(200)
    cells = lines[7].split("\t")
    bad = {
        3: ("1\t2\t3", "3 fields, expected 40"),
        8: ("\t".join([*cells[:14], "zz", *cells[15:]]), "column C1: 'zz' is not hexadecimal"),
        50: (lines[49] + "\textra", "more than 40 fields"),
        51: ("\t".join([cells[0], "1,5", *cells[2:]]), "column I1: '1,5' is not a number"),
        120: ("\t".join(["", *cells[1:]]), "column label: missing value"),
        199: ("\t".join([*cells[:39], "0" * 17]), "is not hexadecimal (up to 16 digits)"),
    }
    mixed = [bad[number][0] if number in bad else line for number, line in enumerate(lines, 1)]
    raw = tmp_path / "log.tsv"
    text = "\n".join(mixed).encode().split(b"\n")
    text[99] = text[99][:5] + b"\xff\xfe" + text[99][5:]
    raw.write_bytes(b"\n".join(text))
    report = run_prepare("criteo", raw, out=tmp_path / "out", block_bytes=3000)
    found = {entry["line"]: entry["reason"] for entry in quarantine(tmp_path / "out")}
    assert sorted(found) == [3, 8, 50, 51, 100, 120, 199]
    assert found[100] == "broken UTF-8"
    for number, (_, reason) in bad.items():
        assert reason in found[number], number
    assert report.bad == 7
    assert sum(report.rows.values()) == 193
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["quarantined"] == 7
    [source] = manifest["sources"]
    whole = hash_file(raw)[1]
    assert source == {"file": "log.tsv", "bytes": 51_549, "head": whole, "tail": whole, "rows": 193, "bad": 7}
    with pytest.raises(DataError, match=r"log\.tsv:3: 3 fields, expected 40"):
        stoker.prepare("criteo", raw, out=tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict" / "manifest.json").exists()
    with pytest.raises(DataError, match=r"7 of 200 lines are bad \(3\.500%\)"):
        stoker.prepare("criteo", raw, out=tmp_path / "share", max_bad="3.4%")
    stoker.prepare("criteo", raw, out=tmp_path / "share", max_bad="3.5%")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_truncated_file_keeps_the_rows_before(tmp_path: Path, kind: str) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the test itself writes .zst files with it")
    lines = criteo_lines(3000)
    text = ("\n".join(lines) + "\n").encode()
    packed = gzip.compress(text) if kind == "gz" else zstandard.ZstdCompressor().compress(text)
    raw = tmp_path / f"log.tsv.{kind}"
    raw.write_bytes(packed[: len(packed) * 2 // 3])
    report = run_prepare("criteo", raw, out=tmp_path / "out", block_bytes=50_000)
    rows = sum(report.rows.values())
    assert 500 < rows < 3000
    (entry,) = quarantine(tmp_path / "out")
    assert entry["line"] == rows + 1
    assert "truncated" in entry["reason"]
    (warning,) = report.warnings
    assert warning.startswith(
        f"{raw} breaks off at line {rows + 1:,}: truncated {'gzip' if kind == 'gz' else 'zstd'} file"
    )
    (source,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]
    assert (source["rows"], source["bad"], source["breaks_off"]) == (rows, 1, rows + 1)
    labels = [float(line[0]) for line in lines[:rows]]
    found = [rows_of(tmp_path / "out", split)["labels"] for split in ("train", "test", "valid")]
    assert [label for part in found for label in part] == labels


@pytest.mark.slow
def test_a_file_that_breaks_off_exceeds_any_share_of_bad_lines(tmp_path: Path) -> None:
    """How much is lost is not known: one bad line in many would pass for next to nothing."""
    packed = gzip.compress(("\n".join(criteo_lines(3000)) + "\n").encode())
    raw = tmp_path / "log.tsv.gz"
    raw.write_bytes(packed[: len(packed) * 2 // 3])
    for options, name in (({"max_bad": "99%"}, "max_bad"), ({"strict": True}, "strict")):
        for _ in range(2):  # also where the part is taken from an earlier run
            with pytest.raises(
                DataError, match=rf"log\.tsv\.gz breaks off at line [\d,]+: .*leave {name} out"
            ) as caught:
                run_prepare("criteo", raw, out=tmp_path / "out", block_bytes=50_000, **options)
            assert caught.value.settings == (name,)
    with pytest.warns(UserWarning, match=r"log\.tsv\.gz breaks off at line") as caught_warnings:
        stoker.prepare("criteo", raw, out=tmp_path / "out")
    assert caught_warnings[0].filename == __file__


def test_a_file_named_twice_is_read_once_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = write(tmp_path / "log.csv", [HEAD, "1,u,a,1,0,mo", "0,u,a,2,0,mo"])
    report = run_prepare(shop(), ["log.csv", raw, "./log.csv", "*.csv"], out="out")
    assert report.lines == 2
    assert report.warnings == [f"{raw} was named more than once; it is read once."]
    assert run_prepare(shop(), "log.csv", out="once").warnings == []


@pytest.mark.slow
def test_files_of_a_pattern_are_read_in_the_order_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    days = [1, 2, 9, 10, 11, 100]
    for day in days:
        write(tmp_path / f"day_{day}.csv", [HEAD, f"{day % 2},u,a,{day},0,mo"])

    def order(files: Any) -> tuple[list[int], list[str]]:
        report = run_prepare(shop(), files, out="out", overwrite=True)
        sources = json.loads(Path("out/manifest.json").read_text())["sources"]
        return [int(source["file"].removeprefix("day_").removesuffix(".csv")) for source in sources], report.warnings

    assert order("day_*.csv") == (days, [])
    assert order(["day_1?*.csv", "day_?.csv"]) == ([10, 11, 100, 1, 2, 9], []), "patterns keep the order given"
    backwards = [f"day_{day}.csv" for day in reversed(days)]
    assert order(backwards) == (days[::-1], []), "a list keeps the order given"
    as_a_shell = sorted(backwards)
    found, (warning,) = order(as_a_shell)
    assert found == [1, 10, 100, 11, 2, 9]
    assert "day_100.csv before day_11.csv" in warning
    assert "quote the pattern" in warning
    assert order(["day_1.csv", "day_2.csv", "day_10.csv"])[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["movielens", "trivago", "criteo"])
def test_progress_never_falls_within_a_stage(tmp_path: Path, recipe: str) -> None:
    seen: dict[str, list[StageProgress]] = {}
    raw = generated(tmp_path, recipe, 3000)
    stoker.prepare(recipe, raw, out=tmp_path / "out", progress=lambda one: seen.setdefault(one.stage, []).append(one))
    assert {"read", "fit", "write"} <= seen.keys()
    for steps in seen.values():
        assert len({(one.total, one.unit) for one in steps}) == 1
        done = [one.done for one in steps]
        assert done == sorted(done)
        assert done[-1] == pytest.approx(steps[0].total, rel=0.02), "a bar ends full"


def test_the_bar_of_a_parquet_file_ends_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its rate falls until the end of the preparation, with 0 ms left."""
    monkeypatch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", 70)
    seen = list[StageProgress]()
    log = pl.DataFrame({"item": ["a", "b"] * 500, "click": [0, 1] * 500})
    log.write_parquet(tmp_path / "log.parquet", row_group_size=70)
    schema = stoker.Schema.from_dict({"label": "click", "categorical": [{"name": "item"}]})
    stoker.prepare(schema, tmp_path / "log.parquet", out=tmp_path / "out", progress=seen.append)
    read = [one for one in seen if one.stage == "read"]
    assert len(read) == 15
    assert read[-1].done == read[-1].total == (tmp_path / "log.parquet").stat().st_size


@pytest.mark.slow
def test_large_tables_take_most_of_the_progress_of_counting(tmp_path: Path) -> None:
    seen = list[StageProgress]()
    raw = generated(tmp_path, "criteo", 3000)
    data = stoker.prepare("criteo", raw, out=tmp_path / "out", progress=seen.append)
    tables = [feature.table for feature in data.schema.features]
    done = np.array([0, *(one.done for one in seen if one.stage == "fit")])
    share = dict(zip(tables, np.diff(done) / done[-1], strict=True))
    assert share["C3"] > 10 * share["C9"] > 0, "a table of 10 M values takes longer than one of 30"


@pytest.mark.slow
def test_damaged_gzip_is_reported(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(("\n".join(criteo_lines(3000)) + "\n").encode()))
    packed[-8] ^= 0xFF  # the checksum of the contents
    (tmp_path / "log.tsv.gz").write_bytes(packed)
    report = run_prepare("criteo", tmp_path / "log.tsv.gz", out=tmp_path / "out")
    (entry,) = quarantine(tmp_path / "out")
    assert "damaged gzip stream" in entry["reason"]
    assert (sum(report.rows.values()), entry["line"]) == (3000, 3001)


def test_json_lines_with_faults(tmp_path: Path) -> None:
    good = '{"label": 1, "item": "a", "price": 2.5, "day": "mo", "tags": [1, 2], "more": {}}'
    raw = write(tmp_path / "log.jsonl", [
        good, "{", '{"label": 0, "item": "b", "day": "mo", "tags": null}', "[1]",
        '{"label": 0, "item": "b", "day": "tu", "price": "x"}', "",
        '{"label": 0, "item": "a", "day": "tu", "price": "1.5", "tags": ["2", 9]}',
    ])  # fmt: skip
    schema = shop(sequence=(SequenceColumn(name="tags", type="int"),))
    stoker.prepare(schema, raw, out=tmp_path / "out")
    assert [entry["line"] for entry in quarantine(tmp_path / "out")] == [2, 4, 5]
    assert rows_of(tmp_path / "out", "train") == {
        "labels": [1.0, 0.0], "dense": [[2.5], [0.0]], "bags": [[[1], [1, 2]], [[2], []]],
    }  # fmt: skip
    assert rows_of(tmp_path / "out", "valid") == {"labels": [0.0], "dense": [[1.5]], "bags": [[[1], [2, 0]]]}


def test_quotes(tmp_path: Path) -> None:
    out = prepared(tmp_path, shop(), [
        '1,u,"a, b",1,0,mo', '0,u,"say ""hi""","2.5",0,mo', '0,u,"open,1,0,mo', '0,u,"x"y,1,0,mo',
        '"0",u,a"b,1,0,tu',
        '0,u,"say ""hi""",1,0,tu',
    ])  # fmt: skip
    assert vocabulary(out, "item") == [("a, b", 1), ('say "hi"', 1)]
    assert [(entry["line"], entry["reason"]) for entry in quarantine(out)] == [
        (4, "column item: quoted field without a closing quote"), (5, "column item: text after a closing quote"),
    ]  # fmt: skip
    assert rows_of(out, "train")["dense"] == [[1.0], [2.5]]
    assert rows_of(out, "valid")["bags"] == [[[0]], [[2]]]


def test_null_values_and_long_separator(tmp_path: Path) -> None:
    source = SourceFormat(
        kind="csv", separator="::", columns=("label", "item", "price", "day"), null_values=("NULL", "\\N")
    )
    raw = write(tmp_path / "log.dat", ["1::a::NULL::mo", "0::NULL::2::mo", "0::\\N::x::mo", "1::NULLS::3::mo"])
    item = CategoricalColumn(name="item", missing="category")
    stoker.prepare(shop(source=source, categorical=(item,)), raw, out=tmp_path / "out")
    assert vocabulary(tmp_path / "out", "item") == [(None, 1), ("NULLS", 1), ("a", 1)]
    assert rows_of(tmp_path / "out", "train")["dense"] == [[0.0], [2.0], [3.0]]
    assert quarantine(tmp_path / "out")[0]["line"] == 3


def test_errors_name_cause_and_remedy(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.csv", [HEAD, "1,u,a,1,0,mo", "0,u,a,1,0,mo"])
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"no file 'nowhere\*'"):
        stoker.prepare(shop(), "nowhere*", out=out)
    with pytest.raises(DataError, match=r"no column 'itm'.*Did you mean 'item'"):
        stoker.prepare(shop(categorical=(CategoricalColumn(name="itm"),)), raw, out=out)
    assert not out.exists()
    (tmp_path / "two").mkdir()
    two = write(tmp_path / "two" / "log.csv", [HEAD, "1,u,a,1,0,mo", "0,u,a,2,0,mo"])
    with pytest.raises(DataError, match=r"two/log\.csv:3: column price: 2 is neither 0 nor 1.*rule.*max_bad"):
        stoker.prepare(shop(label=Label(column="price"), dense=()), two, out=out)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match="is empty"):
        stoker.prepare(shop(), tmp_path / "empty.csv", out=out)
    with pytest.raises(DataError, match="no usable row"):
        stoker.prepare(shop(), write(tmp_path / "head.csv", [HEAD]), out=out)
    with pytest.raises(DataError, match=r"'fr', which the split rule does not list"):
        stoker.prepare(shop(), write(tmp_path / "day.csv", [HEAD, "1,u,a,1,0,fr"]), out=out)
    with pytest.raises(DataError, match="no training row"):
        stoker.prepare(shop(), write(tmp_path / "day.csv", [HEAD, "1,u,a,1,0,tu"]), out=out)
    with pytest.raises(ConfigError, match=r"Did you mean 'criteo'"):
        stoker.prepare("critoe", raw, out=out)
    with pytest.raises(ConfigError, match=r"no preset 'dlmr'.*Did you mean 'dlrm'"):
        stoker.prepare("criteo", raw, out=out, preset="dlmr")
    with pytest.raises(DataError, match=r"All 3 lines are bad, the first: \S+/log\.csv:1: 1 field, expected 40"):
        stoker.prepare("criteo", raw, out=out)
    assert not (out / "manifest.json").exists()
    stoker.prepare(shop(), raw, out=out)
    with pytest.raises(DataError, match=r"already holds a dataset.*pass overwrite=True to replace"):
        stoker.prepare(shop(seed=1), raw, out=out)
    stoker.prepare(shop(), raw, out=out, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match=r"not empty and not a dataset \(thesis"):
        stoker.prepare(shop(), raw, out=tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("reorder", [False, True])
def test_a_finished_dataset_of_the_same_input_is_taken_as_it_is(tmp_path: Path, reorder: bool) -> None:
    raw, out = tmp_path / "log.csv", tmp_path / "out"
    lines = [HEAD, *(f"{n % 2},u,a{n % 1999},{n},0,{('mo', 'mo', 'mo', 'tu', 'we')[n % 5]}" for n in range(6000))]
    write(raw, lines)
    schema = shop()
    given: dict[str, Any] = {"out": out, "reorder": reorder}
    made = run_prepare(schema, raw, **given)
    before = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))}
    found = run_prepare(schema, [raw], threads=1, **given)
    assert (found.already, made.already) == (True, False)
    for name in ("path", "rows", "positives", "tables", "lines", "bad", "groups"):
        assert getattr(found, name) == getattr(made, name), name
    assert {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))} == before
    assert stoker.prepare(schema, raw, **given).schema_hash == stoker.Dataset(out).schema_hash
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other" / "log.csv", lines)
    for changed in (
        {"recipe": shop(seed=1)}, {"files": other}, {"reorder": not reorder}, {"max_bad": "50%"}, {"strict": True},
        {"files": [raw, other]},
    ):  # fmt: skip
        with pytest.raises(DataError, match="already holds a dataset"):
            run_prepare(**{"recipe": schema, "files": raw, **given, **changed})
    assert not run_prepare(schema, raw, overwrite=True, **given).already
    victim = next(out.glob("train/*.safetensors"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="already holds a dataset"):  # a damaged one is not taken for finished
        run_prepare(schema, raw, **given)
    victim.write_bytes(whole)
    assert run_prepare(schema, raw, **given).already
    write(raw, [*lines[:-1], "1,u,a1,7,0,mo"])
    with pytest.raises(DataError, match="already holds a dataset"):
        run_prepare(schema, raw, **given)


@pytest.mark.slow
def test_recipes_of_stoker_are_known_again_and_code_of_others_is_not(tmp_path: Path) -> None:
    raw = generated(tmp_path, "online-retail", 2000)
    assert not run_prepare("online-retail", raw, out=tmp_path / "out").already
    assert run_prepare("online-retail", raw, out=tmp_path / "out").already
    own = Recipe(
        name="own", description="", presets={"a": shop},
        inputs={"log": RawInput(files=("*",), columns={"label": "int"})}, derive=lambda frames, schema: frames["log"],
    )  # fmt: skip
    frame = pl.DataFrame({"label": [0, 1, 1], "item": ["a", "b", "a"], "price": [1, 2, 3], "day": ["mo", "tu", "we"]})
    frame.write_parquet(tmp_path / "own.parquet")
    run_prepare(own, tmp_path / "own.parquet", out=tmp_path / "own")
    with pytest.raises(DataError, match="already holds a dataset"):
        run_prepare(own, tmp_path / "own.parquet", out=tmp_path / "own")


@pytest.mark.slow
@pytest.mark.parametrize("source", [SourceFormat(), SourceFormat(kind="csv", separator="\t")])
def test_tables_in_memory_are_read_by_the_schema_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: SourceFormat
) -> None:
    pd = pytest.importorskip("pandas", reason="one of the tables is pandas'")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    frame = pl.DataFrame({
        "label": [n % 2 for n in range(90)], "item": [f"a{n % 11}" for n in range(90)],
        "price": [None if n % 7 == 0 else n / 4 for n in range(90)],
        "day": [("mo", "tu", "we")[n % 3] for n in range(90)],
    })  # fmt: skip
    frame.write_csv(tmp_path / "log.csv", separator=source.separator or ",")
    schema = shop(source=source, dense=(DenseColumn(name="price", fill="median"),))
    expected = stoker.prepare(schema, tmp_path / "log.csv").save(tmp_path / "expected")
    pandas = frame.to_pandas().astype({"day": "category"})
    pandas.index = pandas.index + 100
    assert isinstance(pandas, pd.DataFrame)
    tables = (frame, frame.lazy(), pandas, frame.to_arrow(), [frame[:40], pandas.iloc[40:]])
    for number, table in enumerate(tables):
        made = stoker.prepare(schema, table, out=tmp_path / str(number))
        assert digests(made.path, without=("manifest.json",)) == digests(expected.path, without=("manifest.json",))
        assert made.schema_hash == expected.schema_hash
    assert not list(tmp_path.glob("stoker-frame-*")), "nothing stays behind"
    for wrong, kind in ((7, "int"), ([frame, {"a": 1}], "dict"), (np.ones(3), "numpy.ndarray")):
        with pytest.raises(
            ConfigError, match=f"files holds an object of type {kind}. Pass paths, patterns, URLs, or tables"
        ):
            stoker.prepare(schema, wrong)
    with pytest.raises(DataError, match="has no column 'item'"):
        stoker.prepare(schema, frame.drop("item"))
    with pytest.raises(DataError, match=r"polars\.DataFrame cannot be read"):
        stoker.prepare(schema, frame.with_columns(pl.Series("item", [object()] * 90)))


def test_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import shutil

    raw = write(tmp_path / "log.csv", [HEAD, "1,u,a,1,0,mo"])

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("stoker.base.files.os.replace", no_room)
        with pytest.raises(DataError, match=r"no room .* free without this run\).*again: nothing was kept\."):
            stoker.prepare(shop(), raw, out=tmp_path / "out")
        disk = SimpleNamespace(f_files=9, f_favail=0, f_frsize=1, f_blocks=8, f_bfree=8, f_bavail=8)
        patch.setattr("os.statvfs", lambda _: disk, raising=False)
        with pytest.raises(DataError, match=r"no room .*B and 0 files free without this run\)"):
            stoker.prepare(shop(), raw, out=tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 4))
        with pytest.raises(DataError, match=r"the shards need 1.0 MiB, but the disk of .* has 4 B free"):
            stoker.prepare(shop(), raw, out=tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("stoker.prep.write.publish.collect_quarantine", no_room)
        with pytest.raises(DataError, match=r"no room left on the disk of .*again: finished parts are kept\."):
            stoker.prepare(shop(), raw, out=tmp_path / "out")
    stoker.prepare(shop(), raw, out=tmp_path / "out")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.csv", [HEAD, "1,u,a,1,0,mo"])
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"file/out cannot be written \(Not a directory\)\. Choose a directory that you may"
    ):
        stoker.prepare(shop(), raw, out=tmp_path / "file" / "out")


def test_errors_name_parameters_and_the_command_line_its_options(tmp_path: Path) -> None:
    """The library's user has no options: messages name parameters that ``settings`` turns into options."""
    raw, bad = write(tmp_path / "log.csv", [HEAD, "1,u,a,1,0,mo"]), write(tmp_path / "bad.csv", [HEAD, "1,u,a,x,0,mo"])
    stoker.prepare(shop(), raw, out=tmp_path / "there")
    options = {"overwrite": "--overwrite", "strict": "--strict", "max_bad": "--max-bad"}
    for call, name in (
        (lambda: stoker.prepare(shop(seed=1), raw, out=tmp_path / "there"), "overwrite"),
        (lambda: stoker.prepare(shop(), bad, out=tmp_path / "o", strict=True), "strict"),
        (lambda: stoker.prepare(shop(), [raw, bad], out=tmp_path / "o", max_bad="1%"), "max_bad"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert "--" not in str(caught.value)
        assert name in str(caught.value)
        assert options[name] in message_of(caught.value, options)
        assert "=True" not in message_of(caught.value, options)


def test_oov_policies(tmp_path: Path) -> None:
    lines = ["1,u,a,1,0,mo", "0,u,a,2,0,mo", "1,u,b,3,0,mo", "1,u,c,4,0,tu", "1,u,,5,0,tu", "0,u,a,6,0,tu"]

    def policy(oov: str) -> Path:
        item = CategoricalColumn(name="item", min_count=2, oov=oov)
        return prepared(tmp_path, shop(categorical=(item,)), lines, overwrite=True)

    out = policy("reserved")
    assert rows_of(out, "train")["bags"] == [[[1]], [[1]], [[0]]]
    assert counts(out) == {"item": [1, 2]}
    out = policy("drop")
    assert rows_of(out, "train")["dense"] == [[1.0], [2.0]]
    assert rows_of(out, "valid")["dense"] == [[5.0], [6.0]]  # a missing value is no unknown one
    assert counts(out) == {"item": [0, 2]}
    with pytest.raises(DataError, match=r"log\.csv: row 3, not counting bad lines, has 'b' in item, which got no id"):
        policy("error")


@pytest.mark.filterwarnings("ignore:the split rule")
def test_hash_buckets_and_modulo(tmp_path: Path) -> None:
    columns = (
        CategoricalColumn(name="item", hash_buckets=5),
        CategoricalColumn(name="when", type="int", hash_buckets=3),
        CategoricalColumn(name="user", type="int", modulo=10),
    )
    lines = [f"{i % 2},{i - 50},item{i % 40},1,{i % 7},mo" for i in range(100)] + ["1,,,1,,tu"]
    out = prepared(tmp_path, shop(categorical=columns), lines)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["features"]["num_embeddings"] == {"item": 6, "when": 4, "user": 11}
    assert not (out / "vocab" / "item.parquet").exists()
    train = rows_of(out, "train")["bags"]
    by_value: dict[int, set[int]] = {}
    for i, row in enumerate(train):
        by_value.setdefault(i % 40, set()).add(row[0][0])
    assert all(len(ids) == 1 and 1 <= min(ids) <= 5 for ids in by_value.values())
    assert counts(out)["item"] == [0, *(sum(row[0][0] == k for row in train) for k in range(1, 6))]
    assert sorted(value for value, _ in vocabulary(out, "user")) == list(range(10))
    assert rows_of(out, "valid")["bags"] == [[[0], [0], [0]]]


def test_hashed_split_keeps_a_user_together_and_is_seeded(tmp_path: Path) -> None:
    lines = [f"1,u{i % 300},a,{i % 300},0,mo" for i in range(3000)]

    def users(seed: int) -> dict[str, set[float]]:
        split = SplitRule(rule="hash", column="user", train=0.6, valid=0.2, test=0.2, seed=seed)
        out = prepared(tmp_path, shop(split=split), lines, overwrite=True)
        return {name: {row[0] for row in rows_of(out, name)["dense"]} for name in ("train", "valid", "test")}

    first = users(1)
    assert sum(len(part) for part in first.values()) == 300
    assert 150 < len(first["train"]) < 210
    assert users(1) == first
    assert users(2) != first
    by_row = SplitRule(rule="hash", train=0.5, valid=0.5, test=0.0)
    out = prepared(tmp_path, shop(split=by_row), lines, overwrite=True)
    assert 1350 < len(rows_of(out, "train")["labels"]) < 1650
    assert rows_of(out, "test")["labels"] == []


def test_last_touch_split_separates_users(tmp_path: Path) -> None:
    lines = [f"1,u{i % 10},a,{i % 10},{100 + i if i % 10 != 3 else 5},mo" for i in range(50)]
    split = SplitRule(rule="last_touch", column="user", train=0.5, valid=0.3, test=0.2)
    schema = shop(split=split, timestamp=Timestamp(column="when"))
    out = prepared(tmp_path, schema, lines)
    users = {name: {row[0] for row in rows_of(out, name)["dense"]} for name in ("train", "valid", "test")}
    assert users == {"train": {3.0, 0.0, 1.0, 2.0, 4.0}, "valid": {5.0, 6.0, 7.0}, "test": {8.0, 9.0}}


def test_datetime_timestamps(tmp_path: Path) -> None:
    days = [
        "2024-01-03 10:00:00",
        "2024-01-01 09:00:00",
        "yesterday",
        "2024-01-02 00:00:00",
        "2024-01-04 00:00:00",
    ]
    lines = [f"1,u,a,{i},{day},mo" for i, day in enumerate(days)]
    schema = shop(
        split=SplitRule(rule="time", train=0.5, valid=0.25, test=0.25),
        timestamp=Timestamp(column="when", type="datetime", format="%Y-%m-%d %H:%M:%S"),
    )
    out = prepared(tmp_path, schema, lines)
    found = {name: [row[0] for row in rows_of(out, name)["dense"]] for name in ("train", "valid", "test")}
    assert found == {"train": [1.0, 3.0], "valid": [0.0], "test": [4.0]}
    assert "'yesterday' is not a date and time" in quarantine(out)[0]["reason"]


@pytest.mark.slow
def test_file_split_halves_and_subsampling(tmp_path: Path) -> None:
    files = [write(tmp_path / f"day_{day}", criteo_lines(401, seed=day)) for day in (1, 2, 23)]
    schema = criteo("mlperf").schema()
    run_prepare(schema, files, out=tmp_path / "all")
    labels = [[float(line[0]) for line in path.read_text().splitlines()] for path in files]
    assert rows_of(tmp_path / "all", "train")["labels"] == labels[0] + labels[1]
    assert rows_of(tmp_path / "all", "test")["labels"] == labels[2][:201]
    assert rows_of(tmp_path / "all", "valid")["labels"] == labels[2][201:]
    report = run_prepare(replace(schema, negative_keep=0.125), files, out=tmp_path / "some")
    positives = sum(sum(part) for part in labels)
    assert sum(report.positives.values()) == positives
    kept = sum(report.rows.values()) - positives
    assert 0.07 < kept / (3 * 401 - positives) < 0.19
    assert report.dropped == 3 * 401 - sum(report.rows.values())
    assert abs(report.rows["test"] - report.rows["valid"]) <= 1
    odd = replace(schema, split=SplitRule(rule="files", files={"day_1": "train"}))
    with pytest.raises(DataError, match="day_x: no pattern of the split rule matches"):
        run_prepare(odd, write(tmp_path / "day_x", criteo_lines(3)), out=tmp_path / "odd")


def test_derived_recipe_checks_raw_lines_then_streams(tmp_path: Path) -> None:
    def schema() -> Schema:
        return shop(sequence=(SequenceColumn(name="past", table="item"),))

    def derive(frames: Any, _: Schema) -> pl.LazyFrame:
        joined = frames["clicks"].join(frames["prices"], on="item", how="left", maintain_order="left")
        past = pl.concat_list(pl.lit("a"), pl.col("item"))
        return joined.with_columns(past=past, day=pl.lit("mo"), label=pl.col("label").cast(pl.Int8))

    recipe = Recipe(
        name="mine", description="a test", presets={"only": schema}, derive=derive,
        inputs={
            "clicks": RawInput(
                files=("c*.csv",), columns={"label": "int", "item": "string"}, required=("item",)
            ),
            "prices": RawInput(files=("*.parquet",), columns={"item": "string", "price": "float"}),
        },
    )  # fmt: skip
    pl.DataFrame({"item": ["a", "b"], "price": [1.5, 2.5]}).write_parquet(tmp_path / "prices.parquet")
    raw = write(tmp_path / "c.csv", ["label,item", "1,a", "x,a", "0,b", "0,", "0,c"])
    files = [raw, tmp_path / "prices.parquet"]
    out = tmp_path / "out"
    stoker.prepare(recipe, files, out=out)
    assert rows_of(out, "train") == {
        "labels": [1.0, 0.0, 0.0], "dense": [[1.5], [2.5], [0.0]],
        "bags": [[[1], [1, 1]], [[2], [1, 2]], [[3], [1, 3]]],
    }  # fmt: skip
    assert vocabulary(out, "item") == [("a", 5), ("b", 2), ("c", 2)]
    assert [(entry["file"], entry["line"]) for entry in quarantine(out)] == [(str(raw), 3), (str(raw), 5)]
    with pytest.raises(DataError, match="needs its prices file"):
        stoker.prepare(recipe, raw, out=tmp_path / "other")


def prepare_up_to(raw: Path, out: Path, blocks: int) -> None:
    """Be killed when so many blocks are parsed; threads are in the middle of others."""
    plain, parsed = Layout.arrays, count(1)

    def counted(self: Layout, *given: Any) -> Any:
        if next(parsed) == blocks:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *given)

    Layout.arrays = counted  # type: ignore[method-assign]
    run_prepare("criteo", raw, out=out, block_bytes=4000, threads=2)


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.tsv", criteo_lines(1500))
    run_prepare("criteo", raw, out=tmp_path / "whole", block_bytes=4000)
    expected = digests(tmp_path / "whole")
    out = tmp_path / "out"
    journal = out / ".work" / "journal.jsonl"
    kept: list[dict[str, int]] = []  # times of the parts in the journal; threads were in the middle of others
    for blocks in (7, 20, 35):
        process = start_process(prepare_up_to, raw, out, blocks)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (out / "manifest.json").exists()
        with pytest.raises(DataError, match=r"no manifest\.json"):
            stoker.Dataset(out)
        steps = [json.loads(line)["step"] for line in journal.read_text().splitlines()[1:]]
        kept.append({step: (out / ".work" / f"{step}.part").stat().st_mtime_ns for step in steps})
    assert len(steps) > 2
    for before, after in pairwise(kept):
        assert before.items() <= after.items()  # nothing in the journal was done again
    # A part that was cut or changed after it was written must be made again, not read.
    victim, other = [(out / ".work" / f"{step}.part") for step in steps[:2]]
    victim.write_bytes(victim.read_bytes()[:-7])
    data = bytearray(other.read_bytes())
    data[len(data) // 2] ^= 1
    other.write_bytes(data)
    with journal.open("ab") as file:
        file.write(b'{"step": "parts/0000')
    report = run_prepare("criteo", raw, out=out, block_bytes=4000)
    assert report.reused == len(steps) - 2
    assert digests(out) == expected


@pytest.mark.slow
def test_parts_are_kept_when_a_run_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, and nothing is done twice."""
    raw = write(tmp_path / "log.tsv", criteo_lines(400))
    whole = run_prepare("criteo", raw, out=tmp_path / "whole", preset="nvt", block_bytes=10_000)

    def stop(progress: Any) -> None:
        if progress.stage == "fit":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="finished steps kept"):
        run_prepare("criteo", raw, out=tmp_path / "out", preset="nvt", block_bytes=10_000, progress=stop)
    parts = len(list((tmp_path / "out" / ".work" / "parts").glob("*.part")))
    assert parts > 8
    monkeypatch.setattr("stoker.prep.parse.layout.Layout.arrays", None)  # no block is read again
    report = run_prepare("criteo", raw, out=tmp_path / "out", preset="nvt", block_bytes=10_000)
    assert report.reused >= parts
    assert (report.rows, digests(tmp_path / "out")) == (whole.rows, digests(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["table C3", "shard train/00000.safetensors", "dense"])
def test_interrupted_after_the_parts_it_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    raw = write(tmp_path / "log.tsv", criteo_lines(300))
    run_prepare("criteo", raw, out=tmp_path / "whole", preset="nvt")
    from stoker.prep.stages.parts import Journal

    add = Journal.add

    def stop(self: Journal, name: str, entry: Any) -> Any:
        result = add(self, name, entry)
        if name == step:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            run_prepare("criteo", raw, out=tmp_path / "out", preset="nvt", threads=1)
    report = run_prepare("criteo", raw, out=tmp_path / "out", preset="nvt")
    assert report.reused >= 2
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_changed_input_is_not_mixed_with_old_parts(tmp_path: Path) -> None:
    raw = write(tmp_path / "log.tsv", [*criteo_lines(50), "bad"])
    with pytest.raises(DataError, match=r"log\.tsv:51"):
        stoker.prepare("criteo", raw, out=tmp_path / "out", strict=True)
    write(raw, criteo_lines(60, seed=9))
    report = run_prepare("criteo", raw, out=tmp_path / "out")
    assert (report.reused, sum(report.rows.values())) == (0, 60)


def test_two_runs_into_one_directory(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="directories are locked on POSIX systems only")
    from stoker.prep.stages.parts import Journal

    raw = write(tmp_path / "log.csv", [HEAD, "1,u,a,1,0,mo"])
    journal = Journal(tmp_path / "out" / ".work", {})
    with pytest.raises(DataError, match="another stoker prepare is writing"):
        stoker.prepare(shop(), raw, out=tmp_path / "out")
    journal.close()


_MEASURE = """
import resource, sys
from stoker.prep.prepare import run_prepare
run_prepare("criteo", sys.argv[1], out=sys.argv[2], block_bytes=2**20, threads=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    block = "\n".join(criteo_lines(20_000)) + "\n"
    peaks = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for copies in (2, 20):
        raw = tmp_path / f"log{copies}.tsv"
        with raw.open("w") as file:
            for _ in range(copies):
                file.write(block)
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(raw), str(tmp_path / f"out{copies}")],
            env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.3 * peaks[0], peaks


@pytest.mark.slow
def test_real_criteo_lines(tmp_path: Path) -> None:
    raw = SHARED / "criteo_tb" / "day_0_head.tsv.gz"
    if not raw.exists():
        pytest.skip(f"the data set is not on this machine: {raw}")
    data = stoker.prepare("criteo", raw, out=tmp_path / "out", strict=True)
    assert (len(data.train), len(data.test), len(data.valid)) == (8572, 714, 714)
    lines = gzip.decompress(raw.read_bytes()).decode().splitlines()
    cells = [line.split("\t") for line in lines]
    name = CATEGORICAL[2]
    expected = Counter(int(row[16] or "0", 16) for row in cells[:8572])
    assert dict(vocabulary(tmp_path / "out", name)) == expected
    assert max(value for value, _ in vocabulary(tmp_path / "out", name)) > 2**31


def test_schema_error_is_raised_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text('label = "label"\n[[categorical]]\nname = "item"\ntyp = "int"\n')
    with pytest.raises(SchemaError, match=r"shop\.toml.*unknown key 'typ'.*Did you mean 'type'"):
        stoker.prepare(tmp_path / "shop.toml", write(tmp_path / "a.csv", [HEAD]), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_latin_1_text(tmp_path: Path) -> None:
    raw = tmp_path / "log.csv"
    raw.write_bytes("label,itém,price,day\n1,Amélie,1,mo\n0,Léon,2,mo\n".encode("latin-1"))
    item = CategoricalColumn(name="item", source="itém")
    schema = shop(categorical=(item,), source=SourceFormat(encoding="latin-1"))
    stoker.prepare(schema, raw, out=tmp_path / "out", strict=True)
    assert vocabulary(tmp_path / "out", "item") == [("Amélie", 1), ("Léon", 1)]
    with pytest.raises(DataError, match=r"log\.csv:1: the header is not UTF-8"):
        stoker.prepare(shop(), raw, out=tmp_path / "other")


SHOP_LINES = [HEAD, "1,u,a,1,0,mo", "0,v,b,2,0,mo", "1,u,b,3,0,tu", "0,v,a,4,0,we"]


def test_what_lies_in_the_way_is_never_removed(tmp_path: Path) -> None:
    """Directories named like ours, and inputs under the output directory, are the user's."""
    raw = write(tmp_path / "raw.csv", SHOP_LINES)
    mine = tmp_path / "mine"
    (mine / "train").mkdir(parents=True)
    (mine / "train" / "photo.jpg").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        stoker.prepare(shop(), raw, out=mine)
    assert (mine / "train" / "photo.jpg").read_text() == "precious"
    (tmp_path / "train").mkdir()
    inside = tmp_path / "train" / "raw.csv"
    inside.write_text(raw.read_text())
    with pytest.raises(DataError, match="is inside"):
        stoker.prepare(shop(), inside, out=tmp_path)
    assert inside.exists()


def test_overwriting_keeps_the_old_dataset_until_the_new_one_is_whole(tmp_path: Path) -> None:
    raw, bad, out = write(tmp_path / "raw.csv", SHOP_LINES), tmp_path / "bad.csv", tmp_path / "out"
    bad.write_text("")
    stoker.prepare(shop(), raw, out=out)
    before = digests(out)
    with pytest.raises(DataError):
        stoker.prepare(shop(), bad, out=out, overwrite=True)
    assert digests(out) == before
    stoker.prepare(shop(), raw, out=out, overwrite=True)
    assert digests(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "out", "raw.csv"]
    # Killed between the two renames: the old dataset is found again.
    (tmp_path / "out").rename(tmp_path / ".out.stoker-old")
    stoker.prepare(shop(), raw, out=out, overwrite=True)
    assert digests(out) == before
    # A checkpoint has a manifest too, but is no dataset.
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "manifest.json").write_text('{"kind": "checkpoint"}')
    with pytest.raises(DataError, match="not overwritten"):
        stoker.prepare(shop(), raw, out=tmp_path / "ckpt", overwrite=True)


def test_a_copy_that_somebody_put_beside_is_left_alone(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.csv", ["label,item,price,day", "1,a,1,mo", "0,b,2,tu"])
    out, copy = tmp_path / "out", tmp_path / "out.old"
    stoker.prepare(shop(), raw, out=out)
    out.rename(copy)
    (copy / "notes.txt").write_text("mine")
    before = digests(copy)
    stoker.prepare(shop(), raw, out=out)
    assert digests(copy) == before
    stoker.prepare(shop(), raw, out=out, overwrite=True)
    assert digests(copy) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old", "raw.csv"]


def test_several_values_in_a_single_valued_json_column_are_a_bad_line(tmp_path: Path) -> None:
    rows = ['{"label":1,"item":"a","price":1,"day":"mo"}', '{"label":0,"item":"a","price":["2"],"day":"mo"}']
    stoker.prepare(shop(), write(tmp_path / "log.jsonl", rows), out=tmp_path / "out")
    assert quarantine(tmp_path / "out")[0]["reason"] == "column price holds several values"


def test_a_recipe_names_the_column_that_a_parquet_file_lacks(tmp_path: Path) -> None:
    import polars as pl

    pl.DataFrame({"nothing": [1]}).write_parquet(tmp_path / "invoices.parquet")
    with pytest.raises(DataError, match=r"invoices\.parquet"):
        stoker.prepare("online-retail", tmp_path / "invoices.parquet", out=tmp_path / "out")
