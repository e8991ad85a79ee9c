"""Typed columns of a block of rows, whatever file they came from, and the lines that had to be left out."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.units import plural
from stoker.prep.parse import text_kernels as kernels

__all__ = [
    "TEXT_CUT",
    "BadLine",
    "Block",
    "Field",
    "RawColumn",
    "TextParser",
    "careful_value",
    "cut_text",
    "split_list",
    "type_spans",
]

Array = npt.NDArray[Any]
_local = threading.local()  # memory for columns, used again
KINDS = {
    "float": kernels.FLOAT, "int": kernels.INT, "hex": kernels.HEX, "string": kernels.TEXT, "datetime": kernels.TEXT,
}  # fmt: skip
TEXT_CUT = 200  # characters of a bad line that the quarantine keeps
_INT = re.compile(rb"[+-]?[0-9]+")
_FLOAT = re.compile(rb"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A raw column read as one type. Several features may ask for the same one."""

    column: str
    kind: str  # float | int | hex | string | datetime (text, or microseconds where the file is typed)
    separator: str | None = None  # of a list; None: a single value
    max_length: int = 0  # of a list
    keep: str = "last"
    required: bool = False  # an empty field makes the line bad
    optional: bool = False  # a file may lack the column, which is as if all its fields were empty
    kept: bool = False  # goes to the scores: a typed file's in the type that it has there, not as ``kind``


@dataclass(kw_only=True)
class RawColumn:
    """Values of a field: numbers with a mask, or texts as spans of a byte buffer. Lists add ``counts``.

    Texts may be numbered instead, by first occurrence: ``codes`` then says which of the distinct ones each is.
    """

    values: Array | None = None  # [n] float64 (NaN where missing) or int64 (hex: the bits of a uint64)
    pieces: list[Array] | None = None  # numbers as their file has them, int64 too, until :meth:`numbers` is called
    missing: npt.NDArray[np.bool_] | None = None  # [n] for int64 values
    data: npt.NDArray[np.uint8] | None = None  # bytes of all texts
    starts: npt.NDArray[np.int64] | None = None  # [n]
    lengths: npt.NDArray[np.int32] | None = None  # [n]; -1 where missing
    codes: npt.NDArray[np.uint32] | None = None  # [n] from 1, 0 where missing
    ends: npt.NDArray[np.int64] | None = None  # [D + 1] where the distinct ones, which ``data`` consists of, end
    counts: npt.NDArray[np.int32] | None = None  # [rows]: how many of the values belong to each row

    @classmethod
    def empty(cls, kind: str, rows: int) -> RawColumn:
        """Return the column of a field whose value is missing in every row."""
        if KINDS[kind] == kernels.TEXT:
            return cls(data=np.zeros(1, np.uint8), starts=np.zeros(rows, np.int64), lengths=np.full(rows, -1, np.int32))
        if kind == "float":
            return cls(values=np.full(rows, np.nan))
        return cls(values=np.zeros(rows, np.int64), missing=np.ones(rows, np.bool_))

    def take(self, keep: npt.NDArray[np.bool_]) -> RawColumn:
        """The rows that ``keep`` marks."""
        each = keep if self.counts is None else np.repeat(keep, self.counts)
        if self.textual:
            self.spans()

        def cut(array: Array | None) -> Array | None:
            return None if array is None else array[each]

        return RawColumn(
            values=None if self.textual else cut(self.numbers()),
            missing=cut(self.missing),
            data=self.data,
            starts=cut(self.starts),
            lengths=cut(self.lengths),
            counts=None if self.counts is None else self.counts[keep],
        )

    def __len__(self) -> int:
        """n: of lists, their items."""
        if self.pieces is not None:
            return sum(map(len, self.pieces))
        return len(next(one for one in (self.codes, self.starts, self.values) if one is not None))

    @property
    def textual(self) -> bool:
        """Whether these are texts."""
        return self.data is not None

    def spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """[n] where each text begins, and its bytes; -1 where it is missing."""
        if self.starts is None or self.lengths is None:
            assert self.codes is not None
            assert self.ends is not None
            self.starts, self.lengths = np.empty(len(self.codes), np.int64), np.empty(len(self.codes), np.int32)
            kernels.spread(self.codes, self.ends, self.starts, self.lengths)
        return self.starts, self.lengths

    def numbers(self) -> Array:
        """[n] the values, in one piece."""
        if self.pieces is not None:
            self.values, self.pieces = np.concatenate(self.pieces, dtype=np.float64), None
        assert self.values is not None
        return self.values

    def absent(self) -> npt.NDArray[np.bool_]:
        """[n] where the value is missing."""
        if self.codes is not None:
            absent: npt.NDArray[np.bool_] = self.codes == 0
            return absent
        if self.lengths is not None:
            return self.lengths < 0
        if self.missing is not None:
            return self.missing
        absent = np.isnan(self.numbers())
        return absent


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that goes to the quarantine."""

    line: int  # counted from 0 within the block
    reason: str
    text: str
    label: bool = False  # its only fault is a label that is a number but neither 0 nor 1
    broken: bool = False  # stands for all that is lost of a file that breaks off here


@dataclass(kw_only=True)
class Block:
    """What one stretch of a file gave."""

    rows: int
    lines: int  # good, bad and skipped ones, for numbering what follows
    columns: dict[Field, RawColumn]
    row_line: npt.NDArray[np.int64]  # [rows] line within the block
    row_at: npt.NDArray[np.int64]  # [rows] what ``text_at`` knows each row by
    text_at: Callable[[int], str]  # the text of a row, for the quarantine
    bad: list[BadLine] = field(default_factory=list)
    frame: Any = None  # of a typed file: the Polars frame whose rows ``row_at`` names

    def drop(self, wrong: npt.NDArray[np.bool_], reason: Callable[[int], str], *, label: bool = False) -> None:
        """Move the rows that ``wrong`` marks to the bad lines."""
        for row in np.flatnonzero(wrong).tolist():
            text = self.text_at(int(self.row_at[row]))
            self.bad.append(BadLine(line=int(self.row_line[row]), reason=reason(row), text=text, label=label))
        self.bad.sort(key=lambda bad: bad.line)
        keep = ~wrong
        self.columns = {key: column.take(keep) for key, column in self.columns.items()}
        self.row_line, self.row_at = self.row_line[keep], self.row_at[keep]
        self.rows = int(keep.sum())

    def drop_labels(self, item: Field) -> None:
        """Move the rows whose label, a number, is neither 0 nor 1 to the bad lines; an optional one may be missing."""
        if self.columns[item].textual:
            return
        values = self.columns[item].numbers()
        wrong = (values != 0) & (values != 1)
        if item.optional:
            wrong &= ~self.columns[item].absent()
        if wrong.any():
            self.drop(wrong, lambda row: f"column {item.column}: {values[row]:g} is neither 0 nor 1", label=True)


def careful_value(kind: str, text: bytes) -> float | int | None:
    """Value of a text that the fast scanner passed on; None where it is not of that type."""
    text = text.strip()
    if kind == "float" and _FLOAT.fullmatch(text):
        value = float(text)
        return value if np.isfinite(value) else None
    if kind == "int" and _INT.fullmatch(text):
        number = int(text)
        return number if -(2**63) <= number < 2**63 else None
    if kind == "hex" and _HEX.fullmatch(text):
        return int(np.uint64(int(text, 16)).astype(np.int64))
    return None


class TextParser:
    """Parses blocks of delimited text into the wanted fields.

    Args:
        names: the columns of a line in order.
        fields: what to read of them.
        separator, quote, null_values: as in :class:`stoker.prep.schema.SourceFormat`.
    """

    def __init__(
        self,
        names: Sequence[str],
        fields: Sequence[Field],
        *,
        separator: str,
        quote: str | None,
        null_values: Sequence[str] = (),
    ) -> None:
        self.names = list(names)
        self.separator = separator.encode()
        self._sep = self.separator[0] if len(self.separator) == 1 else 0x1F
        self._quote = ord(quote) if quote else -1
        # One output per column and scanner kind: a list and a text of one column share theirs.
        self._outputs: dict[tuple[int, int], int] = {}
        slots = [0, 0, 0, 0]
        for item in fields:
            kind = kernels.TEXT if item.separator is not None else KINDS[item.kind]
            key = (self.names.index(item.column), kind)
            if key not in self._outputs:
                bank = kernels.INT if kind == kernels.HEX else kind
                self._outputs[key] = slots[bank]
                slots[bank] += 1
        self._slots = slots
        self._fields = list(fields)
        plan = sorted(self._outputs)
        self._plan = plan
        self._plan_kind = np.array([kind for _, kind in plan], np.int32)
        self._plan_slot = np.array([self._outputs[key] for key in plan], np.int32)
        counts = np.zeros(len(self.names) + 1, np.int32)
        for index, _ in plan:
            counts[index + 1] += 1
        self._plan_start = np.cumsum(counts, dtype=np.int32)
        encoded = [text.encode() for text in null_values]
        self._nulls = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
        self._null_ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def parse(self, raw: npt.NDArray[np.uint8]) -> Block:
        """Rows and bad lines of ``raw``, a writable uint8 array that ends with a newline.

        The columns are views of memory that the next call on the same thread uses again.
        """
        if len(self.separator) > 1:
            joined = raw.tobytes().replace(self.separator, bytes([self._sep]))
            raw = np.frombuffer(bytearray(joined), np.uint8)
        forced = _broken_utf8_lines(raw)
        capacity = kernels.count_lines(raw)
        floats, ints, absent, starts, lengths, row_line, row_at = self._room(capacity)
        room_bad, room_slow = 64, 1024
        while True:
            bad = np.empty((room_bad, 6), np.int64)
            slow = np.empty((room_slow, 4), np.int64)
            # A second run over the same bytes is harmless unless quotes were unescaped in place.
            data = raw.copy() if self._quote >= 0 else raw
            rows, lines, num_bad, num_slow = kernels.parse_block(
                data, self._sep, self._quote, len(self.names), self._plan_start, self._plan_kind,
                self._plan_slot,
                self._nulls, self._null_ends, forced, floats, ints, absent, starts, lengths, row_line, row_at,
                bad, slow,
            )  # fmt: skip
            if num_bad <= room_bad and num_slow <= room_slow:
                break
            room_bad, room_slow = max(room_bad, num_bad), max(room_slow, num_slow)
        bad_lines = [
            BadLine(line=line, reason=self._reason(reason, where, raw[start:stop].tobytes()), text=self._text(raw, at))
            for line, at, reason, where, start, stop in bad[:num_bad].tolist()
        ]
        block = Block(
            rows=rows, lines=lines, columns={}, row_line=row_line[:rows], row_at=row_at[:rows],
            text_at=lambda at: self._text(raw, at), bad=bad_lines,
        )  # fmt: skip
        wrong: dict[int, str] = {}
        for row, output, start, stop in slow[:num_slow].tolist():
            column, kind = self._plan[output]
            name = {kernels.FLOAT: "float", kernels.INT: "int"}[kind]
            text = data[start:stop].tobytes()
            value = careful_value(name, text)
            if value is None:
                wrong.setdefault(row, _not_a(name, self.names[column], text))
            elif kind == kernels.FLOAT:
                floats[self._outputs[column, kind], row] = value
            else:
                ints[self._outputs[column, kind], row] = value
        for item in self._fields:
            index = self.names.index(item.column)
            kind = kernels.TEXT if item.separator is not None else KINDS[item.kind]
            slot = self._outputs[index, kind]
            if kind == kernels.TEXT:
                text_column = RawColumn(data=data, starts=starts[slot, :rows], lengths=lengths[slot, :rows])
                block.columns[item] = text_column if item.separator is None else split_list(text_column, item, wrong)
            elif kind == kernels.FLOAT:
                block.columns[item] = RawColumn(values=floats[slot, :rows])
            else:
                block.columns[item] = RawColumn(values=ints[slot, :rows], missing=absent[slot, :rows])
            if item.required:
                for row in np.flatnonzero(block.columns[item].absent()).tolist():
                    wrong.setdefault(row, f"column {item.column}: missing value")
        if wrong:
            marked = np.zeros(rows, np.bool_)
            marked[list(wrong)] = True
            block.drop(marked, wrong.__getitem__)
        return block

    def _room(self, capacity: int) -> tuple[Array, ...]:
        """Output arrays, kept from block to block: fresh pages would cost a tenth of the time."""
        held: tuple[Array, ...] | None
        slots, held = getattr(_local, "room", (None, None))
        if held is None or slots != self._slots or len(held[-1]) < capacity:
            size = capacity + capacity // 8
            numbers, texts = self._slots[kernels.INT], self._slots[kernels.TEXT]
            held = (
                np.empty((self._slots[kernels.FLOAT], size)),
                np.empty((numbers, size), np.int64),
                np.empty((numbers, size), np.bool_),
                np.empty((texts, size), np.int64),
                np.empty((texts, size), np.int32),
                np.empty(size, np.int64),
                np.empty(size, np.int64),
            )
            _local.room = self._slots, held
        return held

    def _text(self, raw: npt.NDArray[np.uint8], at: int) -> str:
        line = raw[at : at + 4 * TEXT_CUT].tobytes().split(b"\n", 1)[0]
        return cut_text(line.replace(bytes([self._sep]), self.separator))

    def _reason(self, reason: int, where: int, value: bytes) -> str:
        if reason == kernels.REASON_FEW:
            return f"{plural(where, 'field')}, expected {len(self.names)}"
        if reason == kernels.REASON_MANY:
            return f"more than {len(self.names)} fields"
        if reason == kernels.REASON_QUOTE:
            return f"column {self.names[where]}: quoted field without a closing quote"
        if reason == kernels.REASON_UTF8:
            return "broken UTF-8"
        return _not_a("hex", self.names[where], value)


def split_list(column: RawColumn, item: Field, wrong: dict[int, str]) -> RawColumn:
    """Texts cut into list items and typed; rows with a bad item are noted in ``wrong``."""
    assert column.data is not None
    assert item.separator is not None
    starts, lengths, counts = kernels.split_spans(
        column.data, *column.spans(), ord(item.separator), item.max_length, item.keep == "last"
    )
    spans = RawColumn(data=column.data, starts=starts, lengths=lengths, counts=counts)
    if item.kind == "string":
        return spans
    typed, failed = type_spans(spans, item.kind)
    typed.counts = counts
    if failed:
        row_of = np.repeat(np.arange(len(counts)), counts)
        for index, text in failed.items():
            wrong.setdefault(int(row_of[index]), _not_a(item.kind, item.column, text))
    return typed


def type_spans(column: RawColumn, kind: str) -> tuple[RawColumn, dict[int, bytes]]:
    """Numbers from texts, and the texts that are none by position."""
    assert column.data is not None
    starts, lengths = column.spans()
    n = len(starts)
    floats = np.full(n if kind == "float" else 0, np.nan)
    ints = np.zeros(0 if kind == "float" else n, np.int64)
    status = np.empty(n, np.uint8)
    kernels.parse_spans(column.data, starts, lengths, KINDS[kind], floats, ints, status)
    failed: dict[int, bytes] = {}
    target = floats if kind == "float" else ints
    for index in np.flatnonzero(status == 2).tolist():
        text = column.data[starts[index] : starts[index] + lengths[index]].tobytes()
        value = careful_value(kind, text)
        if value is None:
            failed[index] = text
        else:
            target[index] = value
    if kind == "float":
        return RawColumn(values=floats), failed
    return RawColumn(values=ints, missing=status == 1), failed


def _not_a(kind: str, column: str, text: bytes) -> str:
    what = {"float": "a number", "int": "a whole number", "hex": "hexadecimal (up to 16 digits)"}[kind]
    return f"column {column}: {text[:40].decode('utf-8', 'replace')!r} is not {what}"


def cut_text(line: bytes) -> str:
    """What the quarantine keeps of a line."""
    return line[: 4 * TEXT_CUT].decode("utf-8", "replace").rstrip("\r")[:TEXT_CUT]


def _broken_utf8_lines(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Starts of the lines that are not UTF-8."""
    if not kernels.has_high_bytes(data):
        return np.empty(0, np.int64)
    raw = data.tobytes()
    found: list[int] = []
    at = 0
    while at < len(raw):
        try:
            raw[at:].decode("utf-8")
            break
        except UnicodeDecodeError as error:
            start = raw.rfind(b"\n", 0, at + error.start) + 1
            found.append(start)
            stop = raw.find(b"\n", at + error.start)
            at = len(raw) if stop < 0 else stop + 1
    return np.array(found, np.int64)
