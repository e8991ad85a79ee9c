"""Kernels that find where the records of delimited text end (RFC 4180), and read the plain numbers in them.

A position begins as np.int64(0), for Numba would compile what it is given to once more for a plain 0.
"""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit

__all__ = [
    "FLOAT",
    "HEX",
    "INT",
    "LITERAL",
    "MAX_QUOTED_BYTES",
    "MAX_QUOTED_LINES",
    "STRAY",
    "cut_records",
    "read_numbers",
    "record_start",
]

MAX_QUOTED_LINES = 1_000  # lines of a quoted field; with more of them its quote is taken for a stray one
MAX_QUOTED_BYTES = 2**20  # of a quoted field (as UTF-8), behind which no further line of it may begin
LITERAL, STRAY = 1, 2  # what is special about a record: quotes within fields without quotes; a quote not closed
FLOAT, INT, HEX = 1, 2, 3  # kinds of numbers
_NL, _CR = 10, 13
_CLOSED, _STRAY, _OPEN = 0, 1, 2
_DIGITS = np.full(256, 16, np.uint8)  # the value of each hexadecimal digit, 16 for other bytes
_DIGITS[[*b"0123456789abcdefABCDEF"]] = [*range(16), *range(10, 16)]
_MOST_DIGITS = np.array([0, 15, 18, 16])  # of each kind: its value is exact
_TENS = 10.0 ** np.arange(16)  # exact


@jit
def _separator_bytes(data, at, sep, joined):  # type: ignore[no-untyped-def]
    """Return how many bytes of a separator begin at ``at``; 0 for none."""
    if data[at] == joined:
        return 1
    if sep.size == 0 or data[at] != sep[0] or at + sep.size > data.size:
        return 0
    for i in range(1, sep.size):
        if data[at + i] != sep[i]:
            return 0
    return sep.size


@jit
def _record_end(data, at, sep, joined, quote, wide):  # type: ignore[no-untyped-def]
    """Find the end of the record that goes on at ``at``, where a field begins.

    A quote opens a quoted field only there. It is stray where no closing quote, followed by a separator or a line end,
    comes within the bounds; the record then ends with the line on which that quote is.

    Args:
        sep: bytes of the separator; ``joined``: another separator of one byte, -1 for none.
        quote: -1 for none. ``wide``: every byte outside ASCII counts twice, as it would in UTF-8.

    Returns:
        The position after the record's last newline, and its newlines. _CLOSED, _STRAY, or _OPEN where the data ends
        within a quoted field (with the position as if it were stray) or on a line without a newline (-1). Its fields,
        up to the one with a stray quote. Whether a field without quotes around it has some inside.
    """
    size = data.size
    lines, fields, literal = 0, 0, False
    begins = True
    while at < size:
        fields += begins
        if begins and data[at] == quote:
            start = at + 1
            stop, breaks, counted = start, 0, 0  # counted: bytes as UTF-8, with separators of one byte, less real ones
            status = _OPEN
            while stop < size:
                if joined >= 0:
                    skip = _separator_bytes(data, stop, sep, joined)
                    if skip > 0:
                        counted -= skip - 1
                        stop += skip
                        continue
                byte = data[stop]
                if byte == _NL:
                    breaks += 1
                    if breaks >= MAX_QUOTED_LINES or stop - start + counted >= MAX_QUOTED_BYTES:
                        status = _STRAY
                        break
                elif byte == quote:
                    after = stop + 1
                    if after < size and data[after] == quote:
                        stop += 1
                    else:
                        ended = after < size and data[after] == _NL
                        ended = ended or (after + 1 < size and data[after] == _CR and data[after + 1] == _NL)
                        if ended:
                            status = _CLOSED
                        elif after + max(sep.size, 2) <= size:
                            status = _CLOSED if _separator_bytes(data, after, sep, joined) > 0 else _STRAY
                        break
                elif wide and byte >= 128:
                    counted += 1
                stop += 1
            if status != _CLOSED:
                stop = start
                while stop < size and data[stop] != _NL:
                    stop += 1
                if stop < size:
                    return stop + 1, lines + 1, status, fields, literal
                return np.int64(-1), lines, _OPEN, fields, literal
            lines += breaks
            at = stop + 1
        begins = False
        if joined < 0:
            while at < size and data[at] != sep[0] and data[at] != _NL:
                literal |= data[at] == quote
                at += 1
            if at == size:
                break
        skip = _separator_bytes(data, at, sep, joined)
        if skip > 0:
            at += skip
            begins = True
        elif data[at] == _NL:
            return at + 1, lines + 1, _CLOSED, fields, literal
        else:
            at += 1
    return np.int64(-1), lines, _OPEN, fields, literal


@jit
def _find(data, value, at, end):  # type: ignore[no-untyped-def]
    """Position of the first byte ``value`` in ``data[at:end]``; ``end`` if there is none."""
    near = min(at + 128, end)  # where the byte is in every line, it is found here
    while at < near:
        if data[at] == value:
            return at
        at += 1
    while at < end:
        stop = min(at + 1024, end)
        seen = 0
        for byte in data[at:stop]:
            seen += byte == value
        if seen > 0:
            while data[at] != value:
                at += 1
            return at
        at = stop
    return end


@jit
def record_start(data, at, goal, sep, joined, quote, wide, final):  # type: ignore[no-untyped-def]
    """Find the first record that starts at ``goal`` or later, from the start ``at`` of an earlier one.

    Other arguments are those of ``_record_end``. Returns its position and True; or, where the data ends before that is
    known, the position of a record to go on from with more data, and False. ``final``: no more data comes, and the last
    byte is a newline.
    """
    walk = 0
    while at < goal:
        if goal > data.size:
            return at, False
        # Lines without the quote are records, so only a line with one is looked at, and the last one before the goal.
        line = at
        if walk > 0:
            walk -= 1  # a quote in one record: likely in the next ones, too
        else:
            line = min(_find(data, quote, at, goal), goal - 1)
            while line > at and data[line - 1] != _NL:
                line -= 1
            walk = 64 if line == at else 0
        stop, _, status, _, _ = _record_end(data, line, sep, joined, quote, wide)
        if status == _OPEN and not final:
            return line, False
        at = stop
    return at, True


@jit
def cut_records(data, sep, quote, stops, lines, fields, faults):  # type: ignore[no-untyped-def]
    """Write where each record ends, its lines, its fields, and 0, LITERAL or STRAY; return the number of records.

    ``data`` ends with a newline; ``sep`` [1]: byte of the separator; ``quote``: -1 for none.
    """
    at, n = np.int64(0), 0
    if quote < 0:
        count = 1
        for i in range(data.size):
            count += data[i] == sep[0]
            if data[i] == _NL:
                stops[n], lines[n], fields[n], faults[n] = i + 1, 1, count, 0
                n += 1
                count = 1
        return n
    while at < data.size:
        at, lines[n], status, fields[n], literal = _record_end(data, at, sep, -1, quote, False)
        stops[n] = at
        faults[n] = STRAY if status != _CLOSED else LITERAL if literal else 0
        n += 1
    return n


@jit
def read_numbers(data, stops, sep, quote, slots, kinds, values, reals, missing, odd):  # type: ignore[no-untyped-def]
    """Read the plain numbers of whole records: [-]digits, [-]digits.digits for a float, or hexadecimal digits.

    Only so many digits that the value is exact (Clinger, 1990).

    Args:
        stops: [n] where each record ends, after its newline.
        sep: byte of the separator; ``quote``: -1 for none.
        slots: [fields] row of ``values`` for each field, -1 for one that is skipped; ``kinds``: [fields] of FLOAT, ...
        values: [columns, n] int64, and in the same memory ``reals``, float64; 0 or NaN where ``missing`` [columns, n]
            is set.
        odd: [columns] set where a field is neither empty nor a plain number; the column is worth nothing then.
    """
    at = np.int64(0)
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
                while at < end and data[at] != sep:
                    at += 1
            elif slot < 0:
                while at < end and data[at] != sep:
                    at += 1
            elif at >= end or data[at] == sep:
                missing[slot, row] = True
                if kind == FLOAT:
                    reals[slot, row] = np.nan
                else:
                    values[slot, row] = 0
            else:  # digits end at the separator or the line's end, which are none
                negative = data[at] == 45 and kind != HEX
                at += negative
                start, point, number = at, np.int64(-1), np.uint64(0)
                base = np.uint64(16 if kind == HEX else 10)
                digit = np.uint64(_DIGITS[data[at]])
                while digit < base:
                    number = number * base + digit
                    at += 1
                    digit = np.uint64(_DIGITS[data[at]])
                if data[at] == 46 and kind == FLOAT:
                    point = at
                    at += 1
                    digit = np.uint64(_DIGITS[data[at]])
                    while digit < base:
                        number = number * base + digit
                        at += 1
                        digit = np.uint64(_DIGITS[data[at]])
                size = at - start - (point >= 0)
                odd[slot] |= size < 1 or size > _MOST_DIGITS[kind] or point == start or point == at - 1
                if kind == FLOAT:
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
