"""Read typed columns from delimited text: check records, read plain numbers in a kernel, the rest with Polars."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from stoker.base.units import plural
from stoker.ops.codegen.jit import jit
from stoker.prep.parse.frames import TEXT_CUT, BadLine, Block, Field, cut_text, frame_block
from stoker.prep.parse.notation import SINGLE

Array = npt.NDArray[Any]

MAX_QUOTED_LINES = 1_000  # of a quoted field; beyond that the quote counts as stray
MAX_QUOTED_BYTES = 2**20  # of a quoted field (as UTF-8); no further line of it may begin after them
_BOM = "\ufeff".encode()
_NL, _CR = 10, 13
_JOINED = b"\x1f"  # in place of a separator of several bytes
# Faults of a record: a quote inside an unquoted field; a quote that is not closed; text after a closing quote.
_LITERAL, _STRAY, _TEXT = 1, 2, 3
_FLOAT, _INT, _HEX = 1, 2, 3
_KINDS = {"float": _FLOAT, "int": _INT, "hex": _HEX}
_ARROW = {"float": pa.float64(), "int": pa.int64(), "hex": pa.uint64()}
_DIGITS = np.full(256, 16, np.uint8)  # the value of each hexadecimal digit, 16 for other bytes
_DIGITS[[*b"0123456789abcdefABCDEF"]] = [*range(16), *range(10, 16)]
_MOST_DIGITS = np.array([0, 15, 18, 16])  # by kind; values with up to this many digits are exact
_TENS = 10.0 ** np.arange(16)  # exact
_ONES = np.uint64(0x0101010101010101)  # a 1 in each of 8 bytes
_NO_ROOM = np.empty((4, 0), np.int64)
_part: Any = numba.njit  # Numba does not inline it, or it would infer the types of every copy; LLVM does


class TextParser:
    """Parse blocks of delimited text into the wanted fields.

    A kernel reads a column of numbers if all its values in a block are plain. Any other column is read as text first,
    so that a value of another type makes only its own line bad.

    Args:
        names: the columns of a line in order.
        fields: the fields to read.
        separator: as in :class:`stoker.prep.source_format.SourceFormat`.
        quote: likewise.
        null_values: likewise.
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
        self._sep = self.separator if len(self.separator) == 1 else _JOINED
        self._quote = quote.encode() if quote else b""
        self._fields = list(fields)
        self._nulls = list(null_values)
        self._places = {item.column: self.names.index(item.column) for item in fields if item.column in names}
        self._plain = {item: _KINDS[item.kind] for item in fields if self._is_plain(item)}
        q, sep = re.escape(self._quote), re.escape(self._sep)
        # A separator or the start, then a quoted or an unquoted field.
        self._field = re.compile(rb"(\A|%b)(?:(%b(?:[^%b]++|%b%b)*+%b)|([^%b\n]*?(?=%b|\r?\n)))"
                                 % (sep, q, q, q, q, q, sep, sep)) if q else None  # fmt: skip

    def _is_plain(self, item: Field) -> bool:
        """Return True if a column is read as numbers of one kind only."""
        others = [one for one in self._fields if one.column == item.column and one != item]
        single = item.kind in _KINDS and item.separator is None and item.column in self._places
        return single and not others and item.decimal == "." and item.notation != SINGLE

    def join(self, lines: bytes) -> bytes:
        """Replace a separator of several bytes by one byte, which all other methods expect."""
        return lines if self._sep == self.separator else lines.replace(self.separator, self._sep)

    def cut(self, buffer: bytearray, at: int, goal: int, final: bool) -> tuple[int, bool]:
        """Find the first record that starts at ``goal`` or later in a buffer of whole lines.

        Args:
            buffer: whole lines.
            at: start of an earlier record.
            goal: the position to search from.
            final: whether the buffer ends with the last line of the file.

        Returns:
            Its position and True; or, if that depends on lines to come, ``at`` for the next call and False.
        """
        first = buffer.find(self._quote, at, goal)
        # A line without a quote is a record.
        at = max(at, buffer.rfind(b"\n", at, first if first >= 0 else goal - 1) + 1)
        data = np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)
        _, at, known = cut_records(data, at, goal, *self._marks(self._quote), final, _NO_ROOM)
        return int(at), bool(known)

    def _marks(self, quote: bytes) -> tuple[int, int]:
        """Return separator and quote for kernels, -1 for none."""
        return self._sep[0], quote[0] if quote else -1

    def parse(self, data: bytes, *, header: bool = False) -> Block:
        """Return the rows and bad lines of ``data``, which ends with a newline; skip the header.

        A record has several lines if its quoted fields contain line breaks. It counts as bad once, on its first line.
        """
        skipped = int(header and bool(data))
        if skipped:
            data = data[data.index(b"\n") + 1 :]
        raw = np.frombuffer(data, np.uint8)
        found = np.empty((4, data.count(b"\n")), np.int64)
        quote = self._quote if self._quote in data else b""
        count, _, _ = cut_records(raw, 0, raw.size, *self._marks(quote), True, found)
        stops, lines, fields, faults = found[:, :count]
        starts = np.append(0, stops)[:count]
        first = skipped + np.cumsum(lines) - lines
        reasons = self._find_faults(data, stops, fields, faults)
        good = np.ones(count, np.bool_)
        if len(self.names) > 1:  # in a single column, an empty line is a missing value
            short = np.flatnonzero(stops - starts <= 2)
            good[short] = ~np.isin(raw[starts[short]], (_NL, _CR))
        bad = [record for record in reasons if good[record]]
        good[bad] = False

        def text_at(line: int) -> str:
            record = int(np.searchsorted(first, line))
            start, stop = starts[record], stops[record]
            text = data[start : min(start + 4 * TEXT_CUT, stop)].split(b"\n", 1)[0]
            return cut_text(text if self._sep == self.separator else text.replace(self._sep, self.separator))

        whole = data if good.all() else raw[np.repeat(good, stops - starts)].tobytes()
        ends = np.cumsum((stops - starts)[good])
        numbers = self._read_plain_numbers(whole, ends)
        read = {item.column for item in numbers}
        block = frame_block(
            self._read_texts(whole, ends, faults[good] == _LITERAL, read), self._fields, read=numbers,
            row_line=first[good], lines=skipped + int(lines.sum()), text_at=text_at, nulls=self._nulls,
        )  # fmt: skip
        places = zip(bad, first[bad].tolist(), strict=True)
        block.set_aside(BadLine(line=at, reason=reasons[record], text=text_at(at)) for record, at in places)
        return block

    def _find_faults(self, data: bytes, stops: Array, fields: Array, faults: Array) -> dict[int, str]:
        """Return faulty records and the reason for each."""
        most, reasons = len(self.names), {}
        quotes = {_STRAY: "quoted field without a closing quote", _TEXT: "text after a closing quote"}
        for at in np.flatnonzero((fields != most) | (faults > _LITERAL)).tolist():
            reasons[at] = f"{plural(int(fields[at]), 'field')}, expected {most}"
            if fields[at] > most:
                reasons[at] = f"more than {most} fields"
            elif faults[at] in quotes:
                reasons[at] = f"column {self.names[fields[at] - 1]}: {quotes[faults[at]]}"
        if not data.isascii():
            ends = np.array([0, len(data)])
            text = pa.Array.from_buffers(pa.large_utf8(), 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])
            try:
                text.validate(full=True)  # much faster than decoding it
            except pa.ArrowInvalid:
                places = np.flatnonzero(np.frombuffer(data, np.uint8) > 127)
                for at in np.unique(np.searchsorted(stops, places, side="right")).tolist():
                    try:
                        data[stops[at - 1] if at else 0 : stops[at]].decode()
                    except UnicodeDecodeError:
                        reasons[at] = "broken UTF-8"
        return reasons

    def _read_plain_numbers(self, data: bytes, ends: Array) -> dict[Field, pl.Series]:
        """Read the columns of whole records in which every value is a plain number or missing."""
        slots, kinds = np.full((2, len(self.names)), -1)
        for slot, (item, kind) in enumerate(self._plain.items()):
            slots[self._places[item.column]], kinds[self._places[item.column]] = slot, kind
        values = np.empty((len(self._plain), len(ends)), np.int64)
        valid = np.full((len(values), -(-len(ends) // 8)), 255, np.uint8)
        odd = np.zeros(len(values), np.bool_)
        if not values.size:
            return {}
        raw, reals = np.frombuffer(data, np.uint8), values.view(np.float64)
        read_numbers(raw, ends, *self._marks(self._quote), slots, kinds, values, reals, valid, odd)
        found = {}
        for slot, item in enumerate(self._plain):
            if not odd[slot]:
                buffers = [pa.py_buffer(valid[slot]), pa.py_buffer(values[slot])]
                column = pa.Array.from_buffers(_ARROW[item.kind], len(ends), buffers)
                found[item] = pl.Series(pl.from_arrow(column))
        return found

    def _read_texts(self, data: bytes, ends: Array, literal: Array, read: Collection[str]) -> pl.DataFrame:
        """Read the wanted columns of whole records as texts, except those in ``read``; null where missing."""
        names = list(map(str, range(len(self.names))))  # two unused columns may have one name
        places = {column: place for column, place in self._places.items() if column not in read}
        wanted = [pl.col(str(place)).alias(column) for column, place in places.items()]
        if not len(ends) or not places:
            return pl.DataFrame(schema=dict.fromkeys(places, pl.String))
        if literal.any():
            spans = zip([0, *ends.tolist()], ends.tolist(), literal.tolist(), strict=False)
            data = b"".join(self._quoted(data[at:end]) if odd else data[at:end] for at, end, odd in spans)
        if data.startswith(_BOM):
            data = _BOM + data  # Polars drops the first byte order mark
        frame = pl.scan_csv(
            data, has_header=False, separator=self._sep.decode(), quote_char=self._quote.decode() or None,
            schema=dict.fromkeys(names, pl.String),
        ).select(wanted).collect()  # fmt: skip
        assert frame.height == len(ends)
        return frame

    def _quoted(self, record: bytes) -> bytes:
        """Put quotes around unquoted fields that contain a quote, which Polars requires."""
        quote = self._quote

        def field(match: re.Match[bytes]) -> bytes:
            before, _, plain = match.groups()
            if plain is None or quote not in plain:
                return match[0]
            return before + quote + plain.replace(quote, 2 * quote) + quote

        assert self._field is not None
        return self._field.sub(field, record)


@jit
def cut_records(data, at, goal, sep, quote, final, out):  # type: ignore[no-untyped-def]
    """Find the records from ``at``, the start of a record, until one ends at ``goal`` or later.

    A quote opens a quoted field only at the field's start. It is stray if no closing quote, followed by a separator or
    a line end, follows within the bounds; the record then ends with the line of the quote. Text between a closing quote
    and the next separator is another fault.

    Args:
        data: bytes that end with a newline.
        at: start of a record.
        goal: end of the search.
        sep: byte of the separator.
        quote: byte of the quote; -1 for none.
        final: whether ``data`` ends with the last line of the file.
        out: [4, room] int64: end of each record; its lines; its fields, up to one with a stray quote; 0 or its fault.
            Without room nothing is written.

    Returns:
        The number of records, the end of the last one, and True. If ``data`` ends inside a quoted field and is not
        final, the start of that record, and False.
    """
    n = 0
    if quote < 0 and out.shape[1] > 0:  # every line is a record: twice as fast
        fields = 1
        for i in range(at, data.size):
            fields += data[i] == sep
            if data[i] == _NL:
                out[0, n], out[1, n], out[2, n], out[3, n] = i + 1, 1, fields, 0
                n, fields = n + 1, 1
        return n, data.size, True
    while at < goal:
        begin, lines, fields, fault = at, 1, 1, 0
        while True:  # a field begins
            if data[at] == quote:
                stop, breaks = at + 1, 0
                while stop < data.size:
                    if data[stop] == _NL:
                        breaks += 1
                        if breaks >= MAX_QUOTED_LINES or stop - at > MAX_QUOTED_BYTES:
                            break
                    elif data[stop] == quote:
                        if data[stop + 1] != quote:
                            break
                        stop += 1
                    stop += 1
                if stop >= data.size and not final:
                    return n, begin, False
                closed = stop < data.size and data[stop] == quote
                if closed:
                    ends = data[stop + 1] == _NL or (data[stop + 1] == _CR and data[stop + 2] == _NL)
                    closed = ends or data[stop + 1] == sep
                if closed:
                    lines += breaks
                    at = stop + 1
                else:
                    fault = _TEXT if breaks == 0 and stop < data.size and data[stop] == quote else _STRAY
                    while data[at] != _NL:
                        at += 1
                    break
            while data[at] != sep and data[at] != _NL:
                if data[at] == quote:
                    fault = _LITERAL
                at += 1
            if data[at] == _NL:
                break
            at += 1
            fields += 1
        at += 1
        if n < out.shape[1]:
            out[0, n], out[1, n], out[2, n], out[3, n] = at, lines, fields, fault
        n += 1
    return n, at, True


@_part
def _eight_hex(data, at):  # type: ignore[no-untyped-def]
    """Return whether 8 bytes are hexadecimal digits, and the number that they write."""
    word, first = np.uint64(0), np.uint64(at)
    for place in range(8):  # the compiler makes one load of these
        word |= np.uint64(data[first + np.uint64(place)]) << np.uint64(8 * place)
    # Digits are 0x30 + 0 to 9; letters, made small by 0x20, are 0x60 + 1 to 6, so their value is 10 to 15.
    letter = (word >> np.uint64(6)) & _ONES
    high = ((word & (np.uint64(0xF0) * _ONES)) | (letter << np.uint64(5))) == np.uint64(0x30) * (_ONES + letter)
    x = (word & (np.uint64(15) * _ONES)) + np.uint64(9) * letter
    six = x + np.uint64(6) * _ONES
    good = high and (six >> np.uint64(4)) & _ONES == letter and x & (np.uint64(0xF0) * _ONES) == 0
    x = ((x & np.uint64(0x00FF00FF00FF00FF)) << np.uint64(4)) | ((x >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    x = ((x & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(8)) | ((x >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    return good, ((x & np.uint64(0xFFFFFFFF)) << np.uint64(16)) | (x >> np.uint64(32))


@jit
def read_numbers(data, stops, sep, quote, slots, kinds, values, reals, valid, odd):  # type: ignore[no-untyped-def]
    """Read the plain numbers of whole records: [-]digits, [-]digits.digits for a float, or hexadecimal digits.

    A plain number has at most as many digits as make its value exact (Clinger, 1990).

    Args:
        data: the records.
        stops: [n] end of each record, after its newline.
        sep: byte of the separator.
        quote: byte of the quote; -1 for none.
        slots: [fields] row of ``values`` for each field; -1 to skip the field.
        kinds: [fields] _FLOAT, _INT or _HEX.
        values: [columns, n] int64, to fill.
        reals: the same memory as float64.
        valid: [columns, n / 8] set bits; those of missing values are cleared.
        odd: [columns] set if a field is neither empty nor a plain number; the column is then useless.
    """
    at = np.int64(0)  # not 0: Numba would compile all of this for another type
    for row in range(stops.size):
        end = stops[row] - 1
        if end > at and data[end - 1] == _CR:
            end -= 1
        for field in range(slots.size):
            slot, kind = slots[field], kinds[field]
            if quote >= 0 and at < end and data[at] == quote:
                at += 1
                while data[at] != quote or data[at + 1] == quote:
                    at += 2 if data[at] == quote else 1
                at += 1
                if slot >= 0:
                    odd[slot] = True
            elif slot >= 0 and (at >= end or data[at] == sep):
                valid[slot, row >> 3] &= ~np.uint8(1 << (row & 7))
                values[slot, row] = 0
            elif kind == _HEX and at + 8 <= end and (data[at + 8] == sep or at + 8 == end) and _eight_hex(data, at)[0]:
                values[slot, row] = np.int64(_eight_hex(data, at)[1])
                at += 8
            elif slot >= 0:  # digits end at the separator or the line end, which are not digits
                negative = data[at] == 45 and kind != _HEX
                at += negative
                start, point, number = at, np.int64(-1), np.uint64(0)
                base = np.uint64(16 if kind == _HEX else 10)
                while True:
                    digit = np.uint64(_DIGITS[data[at]])
                    if digit < base:
                        number = number * base + digit
                    elif data[at] == 46 and kind == _FLOAT and point < 0:
                        point = at
                    else:
                        break
                    at += 1
                size = at - start - (point >= 0)
                odd[slot] |= size < 1 or size > _MOST_DIGITS[kind] or point == start or point == at - 1
                if kind == _FLOAT:
                    real = float(number)
                    if point >= 0:
                        real /= _TENS[min(at - point - 1, 15)]
                    reals[slot, row] = -real if negative else real
                else:
                    values[slot, row] = -np.int64(number) if negative else np.int64(number)
                if at < end and data[at] != sep:
                    odd[slot] = True
            while at < end and data[at] != sep:
                at += 1
            at += 1  # the separator
        at = stops[row]
