"""Quoted fields that go over line breaks: records are what Python's csv module reads, whatever the blocks."""

from __future__ import annotations

import csv
import gzip
import io
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import zstandard
from campaigns import scaled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared import quarantine, vocabulary

from stoker.base.ordered import ordered_map
from stoker.prep.features.tables import open_table, read_table
from stoker.prep.parse.delimited import MAX_QUOTED_BYTES, MAX_QUOTED_LINES
from stoker.prep.parse.frames import Field
from stoker.prep.parse.ingest import Source
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat

NAMES = ("a", "b", "c")
TEXT = dict.fromkeys(NAMES, "string")
Row = tuple[str | None, ...]
Found = tuple[list[Row], list[int], list[tuple[int, str, str]], int]


def read(path: Path, size: int, threads: int, form: SourceFormat) -> Found:
    """All rows, the lines of them, the bad lines with reason and text, and the lines of a file."""
    source = Source(number=0, path=path, fields=[Field(column=name, kind="string") for name in NAMES], format=form)
    source.open()

    def work(job):  # type: ignore[no-untyped-def]
        block = job[2]()
        texts = [block.columns[item].to_list() for item in source.fields]
        return block, list(zip(*texts, strict=True)), block.row_line.tolist()

    rows: list[Row] = []
    at: list[int] = []
    bad: list[tuple[int, str, str]] = []
    lines = used = 0
    for (number, progress, _), (block, texts, row_line) in zip(
        source.blocks(size), ordered_map(work, source.blocks(size), threads), strict=True
    ):
        assert number >= 0
        rows += texts
        at += [lines + line for line in row_line]
        bad += [(lines + item.line, item.reason, item.text) for item in block.bad]
        lines += block.lines
        used += progress
    assert used == path.stat().st_size
    return rows, at, bad, lines


def pack(path: Path, data: bytes, how: str) -> Path:
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[how](data)
    path = path.with_name(path.name + how)
    path.write_bytes(packed)
    return path


SIZES = st.sampled_from([1, 2, 7, 30, 100, 2**20])
PACKED = st.sampled_from(["", ".gz", ".zst"])
texts = st.lists(st.sampled_from(['"', ",", "\n", "\r\n", "x", "é", "1", ";"]), max_size=8).map("".join)
tables = st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=12)
checked = settings(max_examples=scaled(200), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@checked
@given(
    table=tables, how=PACKED, size=SIZES, threads=st.sampled_from([1, 3]), quoting=st.sampled_from([0, 1]),
    ends=st.sampled_from(["\n", "\r\n"]), header=st.booleans(), ended=st.booleans(),
    separator=st.sampled_from([",", ";", "x"]), writer=st.sampled_from(["csv", "polars"]),
)  # fmt: skip
def test_records_are_those_of_the_csv_module(
    table: list[tuple[str, str, str]], how: str, size: int, threads: int, quoting: int, ends: str, header: bool,
    ended: bool, separator: str, writer: str,
) -> None:  # fmt: skip
    head = [NAMES] if header else []
    if writer == "csv":
        out = io.StringIO(newline="")
        csv.writer(out, delimiter=separator, lineterminator=ends, quoting=quoting).writerows([*head, *table])  # type: ignore[arg-type]
        text = out.getvalue()
    else:
        frame = pl.DataFrame(table, schema=list(NAMES), orient="row")
        style = "always" if quoting else "necessary"
        text = frame.write_csv(
            separator=separator, line_terminator=ends, quote_style=style, include_header=header  # type: ignore[arg-type]
        )  # fmt: skip
    if not ended:
        text = text.removesuffix(ends)
    wanted = [tuple(field or None for field in row) for row in csv.reader(io.StringIO(text, newline=""),
              delimiter=separator)][header:]  # fmt: skip
    form = SourceFormat(kind="csv", separator=separator, columns=() if header else NAMES)
    with tempfile.TemporaryDirectory() as place:
        path = pack(Path(place) / "log.csv", text.encode(), how)
        rows, at, bad, lines = read(path, size, threads, form)
        assert (rows, bad) == (wanted, [])
        assert lines == text.count("\n") + (not text.endswith("\n"))
        starts = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        begins = [0]
        begins += [starts.line_num for _ in starts]
        # csv counts a lone carriage return within a field as a line end, so compare only where there is none.
        if "\r" not in text.replace("\r\n", ""):
            assert at == begins[header:-1]
        if rows:
            assert list(read_table(path, TEXT, format=form).iter_rows()) == wanted


@pytest.mark.slow
@checked
@given(
    data=st.lists(st.sampled_from([b'"', b'"', b",", b"\n", b"\n", b"\r\n", b"\r", b"x", b"\xc3\xa9", b"\xe9", b"::",
                                   b'","', b"\x1f"]), max_size=60).map(b"".join),
    how=PACKED, size=SIZES, encoding=st.sampled_from(["utf-8", "latin-1"]),
    separator=st.sampled_from([",", "::", '","', "é", "é,", "Ω"]), bounds=st.booleans(),
)  # fmt: skip
def test_blocks_make_no_difference_to_any_bytes(
    data: bytes, how: str, size: int, encoding: str, separator: str, bounds: bool
) -> None:
    if not data.strip(b"\r\n") or b"\n" not in data:
        data += b"x\n"
    form = SourceFormat(kind="csv", separator=separator, columns=NAMES, encoding=encoding)
    with tempfile.TemporaryDirectory() as place:
        whole = read(pack(Path(place) / "whole.csv", data, ""), 2**20, 1, form)
        assert read(pack(Path(place) / "log.csv", data, how), size, 2, form) == whole
        assert whole[3] == data.count(b"\n") + (not data.endswith(b"\n"))


def test_a_quote_closed_at_the_end_of_a_file_with_a_long_separator(tmp_path: Path) -> None:
    form = SourceFormat(kind="csv", separator='","', columns=NAMES)
    path = pack(tmp_path / "log.csv", b'"\n"\r\n', "")
    for size in (1, 2**20):
        assert read(path, size, 1, form)[2] == [(0, "1 field, expected 3", '"')]


def lines_of(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


STRAY = "column b: quoted field without a closing quote"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 9, 40, 2**20])
@pytest.mark.parametrize("how", ["", ".gz"])
def test_a_stray_quote_costs_its_own_line(tmp_path: Path, size: int, how: str) -> None:
    form = SourceFormat(kind="csv", columns=NAMES)
    for rest in (["4,5,6"] * 1200, ["4,5,6", '7,"8",9'], ["4,5,6", '7,"8" ,9']):
        path = pack(tmp_path / "log.csv", lines_of("1,x,y", '2,"x,y', *rest), how)
        _, at, bad, lines = read(path, size, 2, form)
        assert bad[0] == (1, STRAY, '2,"x,y')
        assert len(bad) == 1 + any('" ' in line for line in rest)
        assert at[:2] == [0, 2]
        assert lines == 2 + len(rest)
    # A record whose second quoted field is not closed: its lines up to there are bad, as one.
    path = pack(tmp_path / "two.csv", lines_of('1,"x', 'y","z', "4,5,6"), how)
    assert read(path, size, 1, form) == (
        [("4", "5", "6")], [2], [(0, STRAY.replace("b:", "c:"), '1,"x')], 3,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 2**24])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("separator", [",", "::"])
def test_a_quoted_field_has_bounds(tmp_path: Path, size: int, encoding: str, separator: str) -> None:
    form = SourceFormat(kind="csv", columns=NAMES, encoding=encoding, separator=separator)
    long, wide = MAX_QUOTED_LINES, MAX_QUOTED_BYTES // 2
    for field, fits in (
        ("\n" * (long - 1), True), ("\n" * long, False), ("é" * (wide - 1) + "x\n", True), ("é" * wide + "\n", False),
        ("::" * (wide if separator == "," else 2 * wide) + "\n", False), ("x" * 3 * wide, True),
    ):  # fmt: skip
        text = f'1{separator}"{field}"{separator}2\n3{separator}4{separator}5\n'
        path = pack(tmp_path / "log.csv", text.encode(encoding), "")
        rows, _, bad, lines = read(path, size, 2, form)
        assert rows[-1] == ("3", "4", "5")
        assert lines == text.count("\n")
        if fits:
            assert (rows[0], bad) == (("1", field, "2"), [])
        else:
            assert bad[0][:2] == (0, STRAY)


@pytest.mark.parametrize("size", [1, 10, 2**20])
def test_a_bad_record_is_one_bad_line_whatever_is_wrong(tmp_path: Path, size: int) -> None:
    data = b'1,"a\nb",2\n1,"a\n\xff\nb",2\n1,2,3,"4\n5,6,7\n",8\n"\xff\n",1,"x\n\n"\n1,"x\ny"\n9,9,9\n'
    form = SourceFormat(kind="csv", columns=NAMES)
    rows, at, bad, lines = read(pack(tmp_path / "log.csv", data, ""), size, 2, form)
    assert rows == [("1", "a\nb", "2"), ("9", "9", "9")]
    assert at == [0, 14]
    assert bad == [
        (2, "broken UTF-8", '1,"a'), (5, "more than 3 fields", '1,2,3,"4'), (8, "broken UTF-8", '"\ufffd'),
        (12, "2 fields, expected 3", '1,"x'),
    ]  # fmt: skip
    assert lines == 15
    source = open_table(pack(tmp_path / "hex.csv", b'"a\nb",zz"y,"c\nd"\n"e","z\nz",f\n1,aa,2\n', ""), {"b": "hex"},
                        format=form)  # fmt: skip
    blocks = [made() for *_, made in source.blocks(size)]
    assert [item.reason for block in blocks for item in block.bad] == [
        "column b: 'zz\"y' is not hexadecimal (up to 16 digits)",
        "column b: 'z\\nz' is not hexadecimal (up to 16 digits)",
    ]  # fmt: skip
    assert sum(block.rows for block in blocks) == 1


def test_names_of_a_header_may_hold_the_separator(tmp_path: Path) -> None:
    path = pack(tmp_path / "log.csv", b'"a, ""x""",b, "c"\n1,"2\n",3\n', "")
    assert read_table(path, {'a, "x"': "int", "b": "string", "c": "int"}).rows() == [(1, "2\n", 3)]


def test_a_stray_quote_in_the_header_costs_no_row(tmp_path: Path) -> None:
    path = pack(tmp_path / "log.csv", b'a,b,"c\n1,"2\n",3\n4,5,6\n', "")
    assert read_table(path, {"a": "int", "b": "string"}).rows() == [(1, "2\n"), (4, "5")]


@pytest.mark.slow
def test_a_log_of_reviews_prepares_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reviews = ["good", 'a "fine"\nfilm, twice', "bad\r\n\r\n", "so, so"]
    rows = [[int(rng.integers(2)), reviews[number % 4], "tr" if number % 5 else "va"] for number in range(400)]
    with (tmp_path / "log.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["label", "review", "day"], *rows])
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    schema = Schema(
        name="reviews", label=Label(column="label"), categorical=(CategoricalColumn(name="review", table="review"),),
        split=SplitRule(rule="column", column="day", values={"tr": "train", "va": "valid"}),
    )  # fmt: skip
    made = set()
    for number, (name, size) in enumerate((("log.csv", 2**24), ("log.csv", 50), ("log.csv.gz", 77))):
        out = tmp_path / str(number)
        report = run_prepare(schema, tmp_path / name, out=out, block_bytes=size, threads=2)
        assert (report.bad, quarantine(out)) == (0, [])
        assert sorted(text for text, _ in vocabulary(out, "review")) == sorted(reviews)
        made.add(tuple((path.name, path.read_bytes()) for path in sorted(out.rglob("*.safetensors"))))
    assert len(made) == 1
