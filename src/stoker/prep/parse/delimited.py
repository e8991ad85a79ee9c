"""Typed columns from delimited text: the records are checked here; a kernel reads plain numbers, Polars the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.units import plural
from stoker.prep.parse.columns import TEXT_CUT, BadLine, Block, Field, RawColumn, careful_value, cut_text
from stoker.prep.parse.frames import frame_block
from stoker.prep.parse.record_kernels import FLOAT, HEX, INT, LITERAL, STRAY, cut_records, read_numbers

__all__ = ["TextParser"]

Array = npt.NDArray[Any]

_BOM = b"\xef\xbb\xbf"
_NL, _CR = 10, 13
_ASCII = 127  # the greatest byte of it
_JOINED = b"\x1f"  # in place of a separator of several bytes
_KINDS = {"float": FLOAT, "int": INT, "hex": HEX}


class TextParser:
    """Parses blocks of delimited text into the wanted fields.

    A column of numbers that is not plain in a block is read as text first, as is every other column: a value that is
    not of its type costs its own line, whatever Polars makes of it.

    Args:
        names: the columns of a line in order.
        fields: what to read of them.
        separator, quote, null_values: as in :class:`stoker.prep.source_format.SourceFormat`.
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
        self._quote = quote.encode() if quote else None
        self._fields = list(fields)
        self._nulls = list(null_values)
        self._places = {item.column: self.names.index(item.column) for item in fields}
        self._plain = {item: _KINDS[item.kind] for item in fields if self._is_plain(item)}
        if self._quote is not None:
            q, sep = re.escape(self._quote), re.escape(self._sep)
            # A separator or the start, and a field in quotes or one without.
            self._field = re.compile(rb"(\A|%b)(?:(%b(?:[^%b]++|%b%b)*+%b)|([^%b\n]*?(?=%b|\r?\n)))"
                                     % (sep, q, q, q, q, q, sep, sep))  # fmt: skip

    def parse(self, raw: npt.NDArray[np.uint8]) -> Block:
        """Return rows and bad lines of ``raw``, which ends with a newline.

        A record goes over several lines where line breaks are in its quoted fields. It counts as bad once, on its first
        line.
        """
        if len(self.separator) > 1:
            raw = np.frombuffer(raw.tobytes().replace(self.separator, self._sep), np.uint8)
        starts, stops, lines, faults, reasons = self._records(raw)
        first = np.cumsum(lines) - lines
        blank = np.zeros(len(starts), np.bool_)
        if len(self.names) > 1:
            sizes = stops - starts
            blank = (sizes == 1) | ((sizes == 2) & (raw[starts] == _CR))
            reasons = {record: reason for record, reason in reasons.items() if not blank[record]}
        good = ~blank
        good[list(reasons)] = False
        records = np.flatnonzero(good)

        def text(record: int) -> str:
            stop = min(starts[record] + 4 * TEXT_CUT, stops[record])
            line = raw[starts[record] : stop].tobytes().split(b"\n", 1)[0]
            return cut_text(line.replace(_JOINED, self.separator) if self._sep == _JOINED else line)

        whole = raw if good.all() else raw[np.repeat(good, stops - starts)]
        ends = np.cumsum((stops - starts)[records])
        numbers = self._numbers(whole, ends)
        block = frame_block(
            self._frame(whole, ends, faults[records] == LITERAL, {item.column for item in numbers}),
            self._fields, read=numbers, text_at=lambda row: text(int(records[row])),
        )  # fmt: skip
        block.row_line = first[records[block.row_line]]
        moved = [BadLine(line=int(first[records[b.line]]), reason=b.reason, text=b.text) for b in block.bad]
        bad = [BadLine(line=int(first[at]), reason=reason, text=text(at)) for at, reason in reasons.items()]
        block.bad = sorted([*moved, *bad], key=lambda item: item.line)
        block.lines = int(lines.sum())
        return block

    def _records(self, raw: npt.NDArray[np.uint8]) -> tuple[Array, Array, Array, Array, dict[int, str]]:
        """Return where each record starts and stops, its lines, what is special about it, and why some are bad."""
        room = int(np.count_nonzero(raw == _NL))
        stops, lines, fields = np.empty((3, room), np.int64)
        faults = np.empty(room, np.uint8)
        quote = self._quote[0] if self._quote is not None and (raw == self._quote[0]).any() else -1
        found = cut_records(raw, np.frombuffer(self._sep, np.uint8), quote, stops, lines, fields, faults)
        stops, lines, fields, faults = stops[:found], lines[:found], fields[:found], faults[:found]
        starts = np.append(0, stops)[:found]
        wrong = np.flatnonzero((fields != len(self.names)) | (faults == STRAY))
        reasons = {at: self._reason(int(fields[at]), bool(faults[at] == STRAY)) for at in wrong.tolist()}
        if raw.max(initial=0) > _ASCII and not _is_utf8(raw):
            spans = enumerate(zip(starts.tolist(), stops.tolist(), strict=True))
            reasons |= {at: "broken UTF-8" for at, (start, stop) in spans if not _is_utf8(raw[start:stop])}
        return starts, stops, lines, faults, reasons

    def _is_plain(self, item: Field) -> bool:
        """Whether a column is wanted as numbers of one kind only, and what stands for null in it is none of them."""
        others = [one for one in self._fields if one.column == item.column and one != item]
        nulls = [text for text in self._nulls if careful_value(item.kind, text) is not None]
        return item.kind in _KINDS and item.separator is None and not others and not nulls

    def _numbers(self, data: npt.NDArray[np.uint8], ends: Array) -> dict[Field, RawColumn]:
        """Return the columns of whole records in which every value is a plain number or missing."""
        slots, kinds = np.full((2, len(self.names)), -1)
        for slot, (item, kind) in enumerate(self._plain.items()):
            slots[self._places[item.column]], kinds[self._places[item.column]] = slot, kind
        values = np.empty((len(self._plain), len(ends)), np.int64)
        missing, odd = np.zeros(values.shape, np.bool_), np.zeros(len(values), np.bool_)
        if values.size:
            quote = -1 if self._quote is None else self._quote[0]
            reals = values.view(np.float64)
            read_numbers(data, ends, self._sep[0], quote, slots, kinds, values, reals, missing, odd)
        return {
            item: RawColumn(values=reals[slot] if kind == FLOAT else values[slot], missing=missing[slot])
            for slot, (item, kind) in enumerate(self._plain.items())
            if values.size and not odd[slot]
        }

    def _frame(self, whole: npt.NDArray[np.uint8], ends: Array, literal: Array, read: Collection[str]) -> pl.DataFrame:
        """Return the wanted columns of whole records as texts, null where they are missing; less those ``read``."""
        names = list(map(str, range(len(self.names))))  # those of columns that nobody wants may be there twice
        places = {column: place for column, place in self._places.items() if column not in read}
        wanted = [pl.col(str(place)).alias(column) for column, place in places.items()]
        if not len(ends) or not places:
            return pl.DataFrame(schema=dict.fromkeys(places, pl.String))
        quote = None if self._quote is None else self._quote.decode()
        data = whole.tobytes()
        if literal.any():
            spans = zip([0, *ends.tolist()], ends.tolist(), literal.tolist(), strict=False)
            data = b"".join(self._quoted(data[at:end]) if odd else data[at:end] for at, end, odd in spans)
        if data.startswith(_BOM):
            data = _BOM + data  # Polars leaves the first one out
        frame = pl.scan_csv(
            data, has_header=False, separator=self._sep.decode(), quote_char=quote,
            schema=dict.fromkeys(names, pl.String),
        ).select(wanted).collect()  # fmt: skip
        nulls = [*self._nulls, *([""] if quote and 2 * quote.encode() in data else [])]
        if nulls:
            frame = frame.with_columns(pl.when(~pl.all().is_in(nulls)).then(pl.all()))
        assert frame.height == len(ends)
        return frame

    def _quoted(self, record: bytes) -> bytes:
        """Return a record with quotes around the fields that have quotes inside only: Polars wants them so."""
        assert self._quote is not None
        quote = self._quote

        def field(match: re.Match[bytes]) -> bytes:
            before, _, plain = match.groups()
            if plain is None or quote not in plain:
                return match[0]
            return before + quote + plain.replace(quote, 2 * quote) + quote

        return self._field.sub(field, record)

    def _reason(self, fields: int, stray: bool) -> str:
        if fields > len(self.names):
            return f"more than {len(self.names)} fields"
        if stray:
            return f"column {self.names[fields - 1]}: quoted field without a closing quote"
        return f"{plural(fields, 'field')}, expected {len(self.names)}"


def _is_utf8(data: npt.NDArray[np.uint8]) -> bool:
    try:
        str(data.data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
