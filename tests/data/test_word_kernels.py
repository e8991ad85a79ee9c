"""Digits read eight at a time, and whole plain lines, against the careful way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.prep.parse import text_kernels
from stoker.prep.parse.columns import KINDS, Field, TextParser
from stoker.prep.parse.word_kernels import few_decimals, hex_digits

HEX = "0123456789abcdefABCDEF"
NOT_HEX = [byte for byte in range(256) if chr(byte) not in HEX]
NOT_DECIMAL = [byte for byte in range(256) if not 48 <= byte <= 57]


def bytes_of(*parts: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(parts), np.uint8)


@given(st.text(HEX, max_size=24), st.sampled_from(NOT_HEX), st.binary(max_size=10))
def test_hex_digits(digits: str, other: int, tail: bytes) -> None:
    value, at = hex_digits(bytes_of(digits.encode(), bytes([other]), tail, b"\n"), 0)
    assert at == len(digits)
    assert int(value) == int(digits or "0", 16) % 2**64


@given(st.text("0123456789", max_size=12), st.sampled_from(NOT_DECIMAL), st.binary(max_size=10))
def test_few_decimals(digits: str, other: int, tail: bytes) -> None:
    value, count = few_decimals(bytes_of(digits.encode(), bytes([other]), tail, b"\n" * 8), 0)
    assert count == min(len(digits), 8)
    assert value == (int(digits or "0") if len(digits) < 8 else 0)


FIELDS = [
    Field(column="a", kind="float"),
    Field(column="b", kind="int"),
    Field(column="c", kind="hex"),
    Field(column="d", kind="string"),
]
NAMES = ["a", "b", "skipped", "c", "d"]
number = st.one_of(
    st.integers(-(10**9), 10**19).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.sampled_from(["", "-", "-0", "-0.0", ".", "5.", ".5", "1e3", "007", " 1", "+2", "x"]),
)
line = st.tuples(
    number,
    number,
    st.text("ab\xe9", max_size=3),
    st.one_of(st.text(HEX, max_size=18), st.sampled_from(["g", "12345678x", "0x1"])),
    st.text('ab"', max_size=3),
).map("\t".join)
lines = st.lists(st.one_of(line, line, line, st.sampled_from(["", "1\t2", "a\tb\tc\td\te\tf"])), max_size=12)


@given(lines, st.sampled_from(["\n", "\r\n"]), st.sampled_from([None, '"']))
def test_plain_lines_read_as_careful_ones(rows: list[str], newline: str, quote: str | None) -> None:
    raw = (newline.join([*rows, "1\t2\tx\tff\ttext", ""])).encode()

    def parse(nulls: tuple[str, ...]) -> object:
        # A text read as missing keeps every line on the careful way.
        parser = TextParser(NAMES, FIELDS, separator="\t", quote=quote, null_values=nulls)
        block = parser.parse(np.frombuffer(bytearray(raw), np.uint8))
        columns = []
        for item in FIELDS:
            column = block.columns[item]
            if column.values is None:
                assert column.data is not None
                assert column.starts is not None
                assert column.lengths is not None
                spans = zip(column.starts.tolist(), column.lengths.tolist(), strict=True)
                columns.append([None if size < 0 else column.data[at : at + size].tobytes() for at, size in spans])
            else:
                shown = column.values.view(np.int64).copy()  # -0.0 is not 0.0 here, and NaN is itself
                shown[column.absent()] = 0
                columns.append([shown.tolist(), column.absent().tolist()])
        return block.rows, block.lines, block.row_line.tolist(), block.bad, columns

    assert parse(()) == parse(("\x01never",))


@pytest.mark.parametrize("kind", ["int", "float", "hex"])
def test_texts_without_a_byte_between_them_are_read_by_the_fast_scanner(kind: str) -> None:
    """Else each would be scanned to the end of all, and be left to the careful parser: minutes for a million."""
    texts = [b"7", b"", b"120", b"45", b"0", b"-3", b"99", b"1" * 18, b"8" * 41, b"6"]
    texts = texts if kind != "hex" else [text.lstrip(b"-")[:41] for text in texts]
    if kind == "float":
        texts += [b"0.5", b"25", b".5", b"-1.25", b"3"]
    data = np.frombuffer(b"".join(texts), np.uint8)
    lengths = np.array([len(text) for text in texts], np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    floats, ints = np.full(len(texts), np.nan), np.zeros(len(texts), np.int64)
    status = np.empty(len(texts), np.uint8)
    text_kernels.parse_spans(data, starts, lengths, KINDS[kind], floats, ints, status)
    too_long = {41} if kind == "int" else {18, 41}
    assert status.tolist() == [1 if not text else 2 if len(text) in too_long else 0 for text in texts]
    read = {"int": int, "float": float, "hex": lambda text: int(text, 16)}[kind]
    values = floats if kind == "float" else ints
    for text, value, state in zip(texts, values.tolist(), status.tolist(), strict=True):
        assert state or value == read(text)
