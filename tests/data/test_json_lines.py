"""JSON lines: the quick way and the careful way agree on every value, every bad line and its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prep.parse import json_lines
from stoker.prep.parse.frames import Block, Field
from stoker.prep.parse.json_lines import json_block

FIELDS = (
    Field(column="t", kind="string"),
    Field(column="n", kind="float"),
    Field(column="i", kind="int"),
    Field(column="h", kind="hex"),
    Field(column="é", kind="string"),
    Field(column="ts", kind="string", separator="|", max_length=3),
    Field(column="is", kind="int", separator="|", max_length=3, keep="first"),
)


SEVERAL = (  # some columns are read as two kinds
    *FIELDS[:6],
    Field(column="t", kind="string", required=True),
    Field(column="i", kind="string"),
    Field(column="n", kind="int"),
)
NULLS = ("NA", "-1", 'q"[,:}', "é")


def read(lines: list[bytes], fields: tuple[Field, ...] = FIELDS, nulls: tuple[str, ...] = ()) -> Block:
    return json_block(b"\n".join(lines) + b"\n", fields, nulls)


def content(block: Block) -> dict[str, Any]:
    """Everything a block says, as plain values."""
    columns = {(item.column, item.kind): column.to_list() for item, column in block.columns.items()}
    bad = [(line.line, line.reason, line.text) for line in block.bad]
    return {"rows": block.rows, "lines": block.lines, "at": block.row_line.tolist(), "bad": bad, "columns": columns}


def both(lines: list[bytes], fields: tuple[Field, ...] = FIELDS, nulls: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a block holds, after checking that both ways find the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_FEW", 1)
        found = content(read(lines, fields, nulls))
        patch.setattr(json_lines, "_read_with_polars", lambda *_: None)
        assert content(read(lines, fields, nulls)) == found
    return found


scalars = st.sampled_from(
    [
        *(
            '"a"',
            '""',
            '"12"',
            '"[1]"',
            '"{x"',
            '"1.5"',
            '"-1"',
            '"1e5"',
            '"NA"',
            '"q\\"[,:}"',
            '"ff"',
            '"a\\"b, 1.5]"',
            '"é"',
            '"\\u00e9"',
            '"\\ud83d\\ude00"',
        ),
        *("null", "true", "false", "0", "-0", "7", "-7", "12345678901234567890", "9223372036854775807"),
        *("1.0", "1.10", "1e3", "1E-7", "-0.0", "0.1", "123456789.123456789", "1e300", "1e400", "5e-324"),
    ]
)
texts = st.sampled_from(['"a"', '"b c"', "null", "3", "-12", "true", '"é"', '"x]"', '"1.0"'])
odd = st.sampled_from(
    ["[]", '["2"]', '{"b": 1}', '"\\ud800"', '"\\udc00 x"', "NaN", "1,", "01", '"a\tb"', "[1.0]", "[[1]]"]
)
lists = st.lists(texts, max_size=5).map(lambda items: "[" + ", ".join(items) + "]")
odd_lists = st.lists(st.one_of(scalars, odd), max_size=4).map(lambda items: "[" + ",".join(items) + "]")
whole = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(json.dumps)


@st.composite
def a_line(draw: st.DrawFn) -> bytes:
    well = draw(st.integers(0, 9)) < 8  # blocks without a fault take the quick way
    values = {
        "t": draw(texts if well else st.one_of(scalars, odd)),
        "n": draw(st.floats(allow_nan=False, allow_infinity=False).map(repr) if well else scalars),
        "i": draw(st.integers(-(2**63), 2**63 - 1).map(str) if well else scalars),
        "h": draw(st.sampled_from(['"ff"', '"00"', "12", "null"]) if well else scalars),
        draw(st.sampled_from(["é", "\\u00e9"])): draw(texts if well else scalars),
        "ts": draw(lists if well else st.one_of(lists, odd_lists, scalars)),
        "is": draw(whole if well else st.one_of(whole, odd_lists)),
        "other": draw(st.one_of(scalars, lists)),
    }
    kept = [
        f'"{key}"{draw(st.sampled_from([":", " : "]))}{value}'
        for key, value in values.items()
        if draw(st.integers(0, 5))
    ]
    if not well and draw(st.booleans()):
        kept.append('"t": "second"')
    text = "{" + ", ".join(kept) + "}"
    return text.encode() + draw(st.sampled_from([b"", b"", b"\r", b"  "]))


@pytest.mark.slow
@settings(max_examples=scaled(400), deadline=None)
@given(
    lines=st.lists(
        st.one_of(a_line(), a_line(), a_line(), st.sampled_from([b"", b"{", b"3", b'{"t": "\xff"}'])), max_size=6
    ),
    fields=st.sampled_from([FIELDS, SEVERAL]),
    nulls=st.sampled_from([(), NULLS]),
)
def test_both_ways_agree(lines: list[bytes], fields: tuple[Field, ...], nulls: tuple[str, ...]) -> None:
    both(lines, fields, nulls)


def test_only_faulty_lines_are_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those with texts that mean missing, numbers in quotes, or numbers in columns of text."""
    read_slowly: list[int] = []

    def slowly(line: Any, lines: Any, fields: Any) -> Any:
        read_slowly.extend(lines.tolist())
        return by_line(line, lines, fields)

    by_line = json_lines._read_line_by_line
    monkeypatch.setattr(json_lines, "_read_line_by_line", slowly)
    odd = [
        b'{"t": 1.50, "n": "NA", "i": "7", "h": 12.5}', b'{"t": "NA", "n": "-1.5e3", "i":"NA"}', b"",
        b'{"t": "a", "n": 0.5, "i": 3}',
    ]  # fmt: skip
    block = both(odd * 200, SEVERAL[:-2], NULLS)
    assert block["rows"] == 200, "h holds no 12.5, and t is required"
    read_slowly.clear()
    found = content(read(odd * 200, FIELDS, NULLS))
    assert not read_slowly
    assert found["rows"] == 400
    assert found["columns"]["t", "string"] == [None, "a"] * 200
    faulty = {1: b'{"t": "a"', 77: b'{"n": "x"}', 500: b'{"t": [1]}', 700: b'{"i": 1.5}'}
    lines = [faulty.get(number, odd[number % 4]) for number in range(800)]
    assert [line for line, *_ in content(read(lines, FIELDS, NULLS))["bad"] if line % 4] == [1, 77]
    assert {*faulty} <= {*read_slowly}
    assert len(read_slowly) < 800 / 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('["2"]', "column t holds several values"),
        ("[]", "column t holds several values"),
        ('{"b": 1}', "column t holds several values"),
        ('"\\ud800"', "column t: half of a surrogate pair"),
        ("NaN", "not a JSON object: NaN is not a JSON value"),
    ],
)
def test_what_is_no_text_is_a_bad_line(value: str, reason: str) -> None:
    lines = [b'{"t": "a"}', b'{"t": %s}' % value.encode(), b'{"t": "b"}']
    found = both(lines, FIELDS[:1])
    assert found["bad"] == [(1, reason, lines[1].decode())]
    assert found["columns"]["t", "string"] == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('"a"', "column ts holds one value, expected a list"),
        ("3", "column ts holds one value, expected a list"),
        ('["a", ["b"]]', "column ts holds lists within its list"),
        ('[{"a": 1}]', "column ts holds lists within its list"),
    ],
)
def test_what_is_no_list_of_values_is_a_bad_line(value: str, reason: str) -> None:
    found = both([b'{"ts": ["a"]}', b'{"ts":\r%s}' % value.encode()], (FIELDS[5],))
    assert [(line, why) for line, why, _ in found["bad"]] == [(1, reason)]
    assert found["columns"]["ts", "string"] == [["a"]]


def test_numbers_in_a_column_of_text_stay_as_they_are_written() -> None:
    lines = [b'{"t": %s}' % value for value in (b"1", b"1.0", b"1.50", b"1e3", b"true", b"null", b'"1.50"')]
    assert both(lines, FIELDS[:1])["columns"]["t", "string"] == ["1", "1.0", "1.50", "1e3", "true", None, "1.50"]


@pytest.mark.parametrize("key", [rb"\u00E9", rb"\u00e9", "é".encode()])
def test_a_key_may_be_escaped_in_any_way(key: bytes) -> None:
    """Java and C# write capital letters in escapes, and PHP writes \\/ for a slash."""
    lines = [b'{"%s": %s, "a\\/b": 0.10}' % (key, value) for value in (b"1.50", b"1e5", b'"x"')]
    found = both(lines, (FIELDS[4], Field(column="a/b", kind="string")))["columns"]
    assert found == {("é", "string"): ["1.50", "1e5", "x"], ("a/b", "string"): ["0.10"] * 3}


def test_ordinary_blocks_take_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts with braces and digits in them, whole numbers, pairs of surrogates: nothing to be careful about."""
    monkeypatch.setattr(json_lines, "_read_line_by_line", lambda *_: pytest.fail("read line by line"))
    line = b'{"t": "[a] {1.5} \\ud83d\\ude00", "n": 1.5, "i": 3, "h": "ff", "ts": ["x]", "1.5", 3], "is": [1, 2]}'
    assert read([line] * 3).rows == 3
