"""Typed columns from delimited text: the records are checked here, then Polars reads those that are whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.units import plural
from stoker.prep.parse.columns import TEXT_CUT, BadLine, Block, Field, cut_text
from stoker.prep.parse.frames import frame_block
from stoker.prep.parse.record_kernels import LITERAL, STRAY, cut_records

__all__ = ["TextParser"]

Array = npt.NDArray[Any]

_BOM = b"\xef\xbb\xbf"
_NL, _CR = 10, 13
_JOINED = b"\x1f"  # in place of a separator of several bytes


class TextParser:
    """Parses blocks of delimited text into the wanted fields.

    Every column is read as text first: a value that is not of its type costs its own line, whatever Polars makes of it.

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
        data = raw.tobytes()
        starts, stops, first, faults, reasons = self._records(raw, data)
        blank = np.zeros(len(starts), np.bool_)
        if len(self.names) > 1:
            sizes = stops - starts
            blank = (sizes == 1) | ((sizes == 2) & (raw[starts] == _CR))
            reasons = {record: reason for record, reason in reasons.items() if not blank[record]}
        good = ~blank
        good[list(reasons)] = False
        records = np.flatnonzero(good)

        def text(record: int) -> str:
            line = data[starts[record] : min(starts[record] + 4 * TEXT_CUT, stops[record])].split(b"\n", 1)[0]
            return cut_text(line.replace(_JOINED, self.separator) if self._sep == _JOINED else line)

        if (faults[records] == LITERAL).any():
            whole = b"".join(
                self._quoted(data[starts[at] : stops[at]]) if faults[at] == LITERAL else data[starts[at] : stops[at]]
                for at in records.tolist()
            )
        else:
            whole = data if good.all() else raw[np.repeat(good, stops - starts)].tobytes()
        block = frame_block(self._frame(whole, len(records)), self._fields, text_at=lambda row: text(int(records[row])))
        block.row_line = first[records[block.row_line]]
        moved = [BadLine(line=int(first[records[b.line]]), reason=b.reason, text=b.text) for b in block.bad]
        bad = [BadLine(line=int(first[at]), reason=reason, text=text(at)) for at, reason in reasons.items()]
        block.bad = sorted([*moved, *bad], key=lambda item: item.line)
        block.lines = int(np.count_nonzero(raw == _NL))
        return block

    def _records(self, raw: npt.NDArray[np.uint8], data: bytes) -> tuple[Array, Array, Array, Array, dict[int, str]]:
        """Return where each record starts and stops, its first line, what is special about it, and why some are bad."""
        room = int(np.count_nonzero(raw == _NL))
        stops, lines, fields = np.empty((3, room), np.int64)
        faults = np.empty(room, np.uint8)
        quote = self._quote[0] if self._quote is not None and self._quote in data else -1
        found = cut_records(raw, np.frombuffer(self._sep, np.uint8), quote, stops, lines, fields, faults)
        stops, lines, fields, faults = stops[:found], lines[:found], fields[:found], faults[:found]
        starts = np.append(0, stops)[:found]
        wrong = np.flatnonzero((fields != len(self.names)) | (faults == STRAY))
        reasons = {at: self._reason(int(fields[at]), bool(faults[at] == STRAY)) for at in wrong.tolist()}
        if not _is_utf8(data):
            spans = enumerate(zip(starts.tolist(), stops.tolist(), strict=True))
            reasons |= {at: "broken UTF-8" for at, (start, stop) in spans if not _is_utf8(data[start:stop])}
        return starts, stops, np.cumsum(lines) - lines, faults, reasons

    def _frame(self, data: bytes, rows: int) -> pl.DataFrame:
        """Return the wanted columns of whole records as texts, null where they are missing."""
        names = list(map(str, range(len(self.names))))  # those of columns that nobody wants may be there twice
        wanted = [pl.col(str(place)).alias(column) for column, place in self._places.items()]
        if not rows:
            return pl.DataFrame(schema=dict.fromkeys(self._places, pl.String))
        quote = None if self._quote is None else self._quote.decode()
        if data.startswith(_BOM):
            data = _BOM + data  # Polars leaves the first one out
        frame = pl.scan_csv(
            data, has_header=False, separator=self._sep.decode(), quote_char=quote,
            schema=dict.fromkeys(names, pl.String),
        ).select(wanted).collect()  # fmt: skip
        nulls = [*self._nulls, *([""] if quote and 2 * quote.encode() in data else [])]
        if nulls:
            frame = frame.with_columns(pl.when(~pl.all().is_in(nulls)).then(pl.all()))
        assert frame.height == rows
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


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
