"""Delimited text: every value is the one that is written, every bad line is found, whatever Polars makes of it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prep.parse.delimited import TextParser, _eight_hex, cut_records
from stoker.prep.parse.frames import Block, Field

FIELDS = [Field(column=name, kind=kind) for name, kind in zip("abcd", ("float", "int", "hex", "string"), strict=True)]


def parse(data: bytes, fields: list[Field] = FIELDS, **form: Any) -> Block:
    names = list(dict.fromkeys(item.column for item in fields))
    form = {"separator": "\t", "quote": '"', **form}
    parser = TextParser(names, fields, **form)
    return parser.parse(parser.join(data))


def values(block: Block) -> list[list[Any]]:
    return [column.to_list() for column in block.columns.values()]


def faults(block: Block) -> list[tuple[int, str]]:
    return [(bad.line, bad.reason) for bad in block.bad]


def one(kind: str, text: str) -> Any:
    """The value of a text in a column, None for a missing one; the reason if the line is bad."""
    block = parse(f"{text}\tx\n".encode(), [Field(column="a", kind=kind), Field(column="z", kind="string")], quote=None)
    return block.bad[0].reason if block.bad else values(block)[0][0]


digits = st.text("0123456789", max_size=25)
written = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.builds("{:.{}e}".format, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 30)),
    st.builds("{:.{}f}".format, st.floats(-1e6, 1e6), st.integers(0, 25)),
    st.builds("{}{}.{}e{}".format, st.sampled_from(["", "+", "-"]), digits, digits, st.integers(-340, 320)),
    st.text("0123456789+-.eE_xinfa \u00a0\uff11", max_size=6),
)


@pytest.mark.slow
@settings(max_examples=scaled(1500), deadline=None)
@given(written)
def test_floats_are_those_of_python(text: str) -> None:
    bare = text.strip(" ")
    number = math.nan
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", bare):
        number = float(bare)
    found = one("float", text)
    if not text:
        assert found is None
    elif math.isfinite(number):
        assert found.hex() == number.hex()
    else:
        assert found == f"column a: {text[:40]!r} is not a number"


@pytest.mark.slow
@settings(max_examples=scaled(600), deadline=None)
@given(
    st.one_of(st.integers(-(2**64), 2**64).map(str), st.integers(-9, 9).map("{:+d}".format),
              st.text("0123456789+-.e_ ", max_size=5), st.sampled_from([str(2**63 - 1), str(-(2**63)), str(2**63)]),
              st.builds("{}.{}".format, st.sampled_from([-7, 0, 2**53 - 1, 2**53]), st.text("0", max_size=3)))
)  # fmt: skip
def test_whole_numbers_are_those_of_int64(text: str) -> None:
    """And whole floats that have lost no digit, as tools write them next to a missing value."""
    found, bare = one("int", text), text.strip(" ")
    if (whole := re.fullmatch(r"([+-]?[0-9]+)\.0+", bare)) and abs(int(whole[1])) < 2**53:
        bare = whole[1]
    if not text:
        assert found is None
    elif re.fullmatch(r"[+-]?[0-9]+", bare) and -(2**63) <= int(bare) < 2**63:
        assert found == int(bare)
    else:
        what = "within 64 bits" if re.fullmatch(r"[+-]?[0-9]+", bare) else "a whole number"
        assert found == f"column a: {text!r} is not {what}"


def test_a_number_of_thousands_of_digits_costs_its_line_only() -> None:
    """Python refuses to convert more than 4,300."""
    assert one("int", "9" * 5000) == f"column a: {'9' * 40!r} is not within 64 bits"
    assert one("int", "-" + "0" * 5000 + "7") == -7


@pytest.mark.slow
@settings(max_examples=scaled(600), deadline=None)
@given(st.one_of(st.text("0123456789abcdefABCDEF", max_size=18), st.text("09afAF+-xg_ ", max_size=4)))
def test_hexadecimal_numbers_have_up_to_16_digits(text: str) -> None:
    found, bare = one("hex", text), text.strip(" ")
    if not text:
        assert found is None
    elif re.fullmatch(r"[0-9a-fA-F]{1,16}", bare):
        assert found == int(bare, 16)
    else:
        assert found == f"column a: {text!r} is not hexadecimal (up to 16 digits)"


@settings(max_examples=scaled(100), deadline=None)
@given(st.text("0123456789abcdefABCDEF", min_size=8, max_size=8), st.integers(0, 7))
def test_eight_hexadecimal_digits_are_told_from_all_other_bytes(text: str, place: int) -> None:
    good = []
    for byte in range(256):
        data = np.frombuffer(text[:place].encode() + bytes([byte]) + text[place + 1 :].encode() + b"!", np.uint8)
        is_hex, value = _eight_hex(data, 0)
        if is_hex:
            good.append(byte)
            assert value == int(data[:8].tobytes(), 16)
    assert bytes(good) == b"0123456789ABCDEFabcdef"


def test_a_line_with_any_fault_costs_itself_only() -> None:
    lines = [
        b"1\t2\tf\tx", b"1\t2\tf", b"1\t2\tf\tx\ty", b'1\t2\tf\t"x', b"1\t2\tf\t\xff", b"x\t2\tf\tx", b"1\t2.5\tf\tx",
        b"1\t2\tg\tx", b"", b"nan\t2\tf\tx", b"7\t8\t9\ty",
    ]  # fmt: skip
    for ends in (b"\n", b"\r\n"):
        block = parse(b"".join(line + ends for line in lines))
        assert values(block) == [[1.0, 7.0], [2, 8], [15, 9], ["x", "y"]]
        assert faults(block) == [
            (1, "3 fields, expected 4"), (2, "more than 4 fields"),
            (3, "column d: quoted field without a closing quote"), (4, "broken UTF-8"),
            (5, "column a: 'x' is not a number"), (6, "column b: '2.5' is not a whole number"),
            (7, "column c: 'g' is not hexadecimal (up to 16 digits)"), (9, "column a: 'nan' is not a number"),
        ]  # fmt: skip
        assert [bad.text for bad in block.bad] == [lines[bad.line].decode("utf-8", "replace") for bad in block.bad]
        assert (block.rows, block.lines, block.row_line.tolist()) == (2, len(lines), [0, 10])
        assert [block.text_at(line) for line in block.row_line.tolist()] == ["1\t2\tf\tx", "7\t8\t9\ty"]
    # Of several faults the number of fields comes first, then the columns in their order.
    assert faults(parse(b"x\ty\tg\tz\n1\t2\tg\n")) == [
        (0, "column a: 'x' is not a number"),
        (1, "3 fields, expected 4"),
    ]


def test_a_block_of_bad_lines_only() -> None:
    block = parse(b"1\n2\n")
    assert (block.rows, values(block), len(block.bad)) == (0, [[], [], [], []], 2)


TEXTS = [Field(column=name, kind="string") for name in "ab"]


def test_quotes_inside_fields() -> None:
    """A quote is special at the start of a field only; two of them in quotes are one."""
    data = b'5" x 7",1\na"b,"c"\n"say ""hi"", x",d"\ne,"f\n"""\ng"\r\n,"h""\r\n"\n'
    rows = [('5" x 7"', "1"), ('a"b', "c"), ('say "hi", x', 'd"'), ("e", 'f\n"')]
    for cut in (data[: data.index(b"g")], data):
        block = parse(cut, TEXTS, separator=",")
        assert list(zip(*values(block), strict=True))[:4] == rows
    assert faults(block) == [(5, "1 field, expected 2")]
    assert values(block)[1][4] == 'h"\r\n'
    assert list(zip(*values(parse(b'"a",""b\n', TEXTS, separator=",", quote=None)), strict=True)) == [('"a"', '""b')]


def test_empty_fields_and_null_values_are_missing_also_in_quotes() -> None:
    data = b'"",x\nNULL,"NULL"\n"NULLs",""\n'
    assert values(parse(data, TEXTS, separator=",", null_values=["NULL"])) == [[None, None, "NULLs"], ["x", None, None]]
    assert values(parse(data, TEXTS, separator=",")) == [[None, "NULL", "NULLs"], ["x", "NULL", None]]


def test_a_column_may_be_wanted_as_several_kinds() -> None:
    fields = [Field(column="a", kind=kind) for kind in ("string", "float", "int", "hex")]
    assert values(parse(b"007\n 7\n\n", fields)) == [["007", " 7", None], [7.0, 7.0, None], [7, 7, None], [7, 7, None]]


def test_lines_of_one_column_may_be_empty() -> None:
    for ends in (b"\n", b"\r\n"):
        block = parse(ends.join([b"", b"x", b"", b"", b" ", b""]), TEXTS[:1])
        assert values(block) == [[None, "x", None, None, " "]]
        assert block.row_line.tolist() == [0, 1, 2, 3, 4]


def test_a_separator_of_several_characters() -> None:
    block = parse("a::b\né:c::d:\nx::y::z\n".encode(), TEXTS, separator="::")
    assert values(block) == [["a", "é:c"], ["b", "d:"]]
    assert block.bad[0].text == "x::y::z"


def test_a_byte_order_mark_within_a_file_is_text() -> None:
    """Polars leaves one out at the start of what it is given, which is no start of a file."""
    assert values(parse("\ufeffa\tb\n\ufeffc\td\n".encode(), TEXTS)) == [["\ufeffa", "\ufeffc"], ["b", "d"]]


def test_records_of_many_lines_in_a_block_that_polars_reads_in_pieces() -> None:
    rng = np.random.default_rng(0)
    texts = ["x" * int(n) + '\n,"\n' * int(n % 3) + "y,z" for n in rng.integers(0, 90, 40_000)]
    data = "".join(f'{n},"{text.replace(chr(34), chr(34) * 2)}"\n' for n, text in enumerate(texts)).encode()
    block = parse(data, [Field(column="a", kind="int"), TEXTS[1]], separator=",")
    assert values(block) == [list(range(len(texts))), texts]
    assert block.lines == data.count(b"\n")


@given(st.lists(st.sampled_from([b"a", b"\t", b"\n", b"\r\n", b"\xc3"]), max_size=40).map(b"".join))
def test_text_without_quotes_is_cut_as_text_with_quotes(data: bytes) -> None:
    raw = np.frombuffer(data + b"\n", np.uint8)
    found = []
    for quote in (-1, ord('"')):
        out = np.zeros((4, raw.size), np.int64)
        found.append((*cut_records(raw, 0, raw.size, ord("\t"), quote, True, out), out.tolist()))
    assert found[0] == found[1]


plain = st.one_of(
    st.integers(-(10**16), 10**16).map(str), st.decimals(-1000, 1000, places=3).map(str),
    st.sampled_from(["", "0", "-0", "007", "1.", ".5", "-", "--1", "NA", "fFfF", '"12"', '"a\t""b"', 'a"b', "1e3"]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=scaled(400), deadline=None)
@given(st.lists(st.tuples(plain, plain, plain, plain), min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_plain_numbers_are_read_as_polars_reads_them(rows: list[tuple[str, ...]], end: str) -> None:
    data = "".join("\t".join(row) + end for row in rows).encode()
    found, all_texts = (TextParser("abcd", FIELDS, separator="\t", quote='"', null_values=["NA"]) for _ in range(2))
    all_texts._plain = {}
    assert len(found._plain) == 3
    blocks = [parser.parse(data) for parser in (found, all_texts)]
    assert repr(values(blocks[0])) == repr(values(blocks[1]))  # -0.0 is not 0.0
    assert faults(blocks[0]) == faults(blocks[1])


def test_a_null_value_that_is_a_number_is_missing() -> None:
    block = parse(b"-1\t-1\tdead\tx\n2\t2\tbeef\ty\n", null_values=["-1", "dead"])
    assert values(block) == [[None, 2.0], [None, 2], [None, 0xBEEF], ["x", "y"]]
