"""Numba kernels that turn a block of delimited text into typed columns in one pass over its bytes.

Why not a dataframe reader: its fast mode fills short lines with nulls and cuts long ones without a word, and
cannot say which line a bad value stood on. These kernels check every field while they read it.

A position begins as np.int64(0), for Numba would compile what it is given to once more for a plain 0.

A block is a uint8 array that ends with a newline. Legend: n lines, P outputs of one kind.
"""

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import jit
from stoker.prep.parse.word_kernels import few_decimals, hex_digits

__all__ = [
    "FLOAT",
    "HEX",
    "INT",
    "MAX_QUOTED_BYTES",
    "MAX_QUOTED_LINES",
    "REASON_FEW",
    "REASON_MANY",
    "REASON_QUOTE",
    "REASON_VALUE",
    "TEXT",
    "count_lines",
    "has_high_bytes",
    "hash_spans",
    "parse_block",
    "parse_spans",
    "record_start",
    "split_spans",
    "spread",
]

FLOAT, INT, HEX, TEXT = 0, 1, 2, 3
REASON_FEW, REASON_MANY, REASON_VALUE, REASON_QUOTE, REASON_UTF8 = 1, 2, 3, 4, 5
MAX_QUOTED_LINES = 1_000  # lines of a quoted field; with more of them its quote is taken for a stray one
MAX_QUOTED_BYTES = 2**20  # of a quoted field (as UTF-8), behind which no further line of it may begin
_NL, _CR = 10, 13
_CLOSED, _STRAY, _OPEN = 0, 1, 2
_OK, _MISSING, _SLOW = 0, 1, 2
_LONGEST = 40  # bytes of a number that the fast scanners look at
_MAX_EXACT = 2**53  # mantissas up to here and powers of ten up to 22 divide to the correctly rounded double

_inline = jit(inline="always")

_POWERS = np.array([10.0**i for i in range(23)])


@jit
def _scan_hex(data, at):  # type: ignore[no-untyped-def]
    """Value bits, position after the digits, status."""
    value, stop = hex_digits(data, at)
    count = stop - at
    status = _OK if 0 < count <= 16 else (_MISSING if count == 0 else _SLOW)
    return np.int64(value), stop, status


@jit
def _scan_int(data, at):  # type: ignore[no-untyped-def]
    value = np.int64(0)
    negative = data[at] == 45
    if negative:
        at += 1
    start = at
    digit = np.int64(data[at]) - 48
    while 0 <= digit <= 9:
        value = value * 10 + digit
        at += 1
        digit = np.int64(data[at]) - 48
    count = at - start
    status = _OK if 0 < count <= 18 else (_MISSING if count == 0 and not negative else _SLOW)
    return -value if negative else value, at, status


@jit
def _scan_float(data, at):  # type: ignore[no-untyped-def]
    value = np.int64(0)
    negative = data[at] == 45
    if negative:
        at += 1
    start = at
    digit = np.int64(data[at]) - 48
    while 0 <= digit <= 9:
        value = value * 10 + digit
        at += 1
        digit = np.int64(data[at]) - 48
    digits = at - start
    decimals = 0
    if data[at] == 46:
        at += 1
        point = at
        digit = np.int64(data[at]) - 48
        while 0 <= digit <= 9:
            value = value * 10 + digit
            at += 1
            digit = np.int64(data[at]) - 48
        decimals = at - point
    digits += decimals
    if digits == 0:
        return np.nan, at, _MISSING if not negative and decimals == 0 and at == start else _SLOW
    if digits > 18 or value > _MAX_EXACT or decimals > 22:
        return np.nan, at, _SLOW
    result = float(value)
    if decimals > 0:
        result /= _POWERS[decimals]
    return -result if negative else result, at, _OK


@jit
def _equal(data, start, stop, nulls, first, last):  # type: ignore[no-untyped-def]
    if stop - start != last - first:
        return False
    same = True
    for i in range(last - first):
        same &= data[start + i] == nulls[first + i]
    return same


@jit
def _is_null(data, start, stop, nulls, ends):  # type: ignore[no-untyped-def]
    first = np.int64(0)
    for i in range(ends.size):
        if _equal(data, start, stop, nulls, first, ends[i]):
            return True
        first = ends[i]
    return False


@jit
def _plain_line(  # type: ignore[no-untyped-def]
    data, at, sep, quote, kinds, slots, row, floats, ints, absent, starts, lengths
):
    """Read a line without quotes, careful values or mistakes; returns where its newline is, or -1.

    ``kinds[j]``: what field j is read as, -1 for a field that is skipped; ``slots[j]``: its row of the output.
    """
    last = kinds.size - 1
    for field in range(kinds.size):
        kind, slot = kinds[field], slots[field]
        here = at
        if data[at] == quote:
            return -1
        if kind == HEX:
            bits, here = hex_digits(data, at)
            if here - at > 16:
                return -1
            ints[slot, row] = np.int64(bits)
            absent[slot, row] = here == at
        elif kind in (FLOAT, INT):
            negative = data[at] == 45
            begin = at + negative
            if begin + 8 > data.size:
                return -1
            value, digits = few_decimals(data, begin)
            here = begin + digits
            if digits == 0:
                if negative or data[here] == 46:
                    return -1
                if kind == FLOAT:
                    floats[slot, row] = np.nan
                else:
                    ints[slot, row] = 0
                    absent[slot, row] = True
            elif digits < 8 and data[here] != 46:
                value = -value if negative else value
                if kind == FLOAT:
                    floats[slot, row] = -0.0 if negative and value == 0 else float(value)
                else:
                    ints[slot, row] = value
                    absent[slot, row] = False
            elif kind == FLOAT:
                number, here, status = _scan_float(data, at)
                if status != _OK:
                    return -1
                floats[slot, row] = number
            else:
                value, here, status = _scan_int(data, at)
                if status != _OK:
                    return -1
                ints[slot, row] = value
                absent[slot, row] = False
        else:
            while data[here] != sep and data[here] != _NL:
                here += 1
            if kind == TEXT:
                size = here - at
                if data[here] == _NL and size > 0 and data[here - 1] == _CR:
                    size -= 1
                starts[slot, row] = at
                lengths[slot, row] = size if size > 0 else -1
        if field < last:
            if data[here] != sep:
                return -1
            at = here + 1
        else:
            if data[here] == _CR:
                here += 1
            return here if data[here] == _NL else -1
    return -1


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
        The position after the record's last newline, its newlines, and _CLOSED, _STRAY, or _OPEN where the data ends
        within a quoted field (with the position as if it were stray) or on a line without a newline (-1).
    """
    size = data.size
    lines = 0
    begins = True
    while at < size:
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
                        if after < size and data[after] == _NL:
                            status = _CLOSED
                        elif after + max(sep.size, 2) <= size:
                            ended = data[after] == _CR and data[after + 1] == _NL
                            ended = ended or _separator_bytes(data, after, sep, joined) > 0
                            status = _CLOSED if ended else _STRAY
                        break
                elif wide and byte >= 128:
                    counted += 1
                stop += 1
            if status != _CLOSED:
                stop = start
                while stop < size and data[stop] != _NL:
                    stop += 1
                return (stop + 1, lines + 1, status) if stop < size else (np.int64(-1), lines, _OPEN)
            lines += breaks
            at = stop + 1
        begins = False
        if joined < 0:
            while at < size and data[at] != sep[0] and data[at] != _NL:
                at += 1
            if at == size:
                break
        skip = _separator_bytes(data, at, sep, joined)
        if skip > 0:
            at += skip
            begins = True
        elif data[at] == _NL:
            return at + 1, lines + 1, _CLOSED
        else:
            at += 1
    return np.int64(-1), lines, _OPEN


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
        stop, _, status = _record_end(data, line, sep, joined, quote, wide)
        if status == _OPEN and not final:
            return line, False
        at = stop
    return at, True


@jit
def parse_block(  # type: ignore[no-untyped-def]
    data,  # [bytes] uint8, ends with a newline; quoted text with doubled quotes is unescaped in place
    sep,  # uint8
    quote,  # int, -1: none
    fields,  # fields a line must have
    plan_start,  # [fields + 1] int32: outputs of field j are plan_kind[plan_start[j]:plan_start[j + 1]]
    plan_kind,  # [outputs] FLOAT | INT | HEX | TEXT
    plan_slot,  # [outputs] row of the output array of that kind
    nulls,  # uint8: texts read as missing, one after the other
    null_ends,  # int64: where each ends
    forced,  # int64: starts of lines known to be bad (broken UTF-8), rising
    floats,  # [P, n] float64 out; NaN where missing
    ints,  # [P, n] int64 out: INT and HEX bits
    absent,  # [P, n] bool out: missing ints
    starts,  # [P, n] int64 out: texts
    lengths,  # [P, n] int32 out; -1 where missing
    row_line,  # [n] int64 out: line of each good row within the block
    row_at,  # [n] int64 out: byte where the row starts
    bad,  # [m, 6] int64 out: line, start byte, reason, field, and start and stop of its value for REASON_VALUE
    slow,  # [k, 4] int64 out: row, output, start, stop of a value that needs the careful parser
):
    """Rows, lines, bad lines and careful values found; the latter two may exceed their arrays.

    A record goes over several lines where line breaks are in its quoted fields. It counts as bad once, on its first.
    """
    rows, lines, num_bad, num_slow, next_forced = np.int64(0), 0, 0, 0, 0
    at, size = np.int64(0), data.size
    plain = null_ends.size == 0
    seps = np.array([sep], np.uint8)
    kinds, slots = np.full(fields, -1, np.int64), np.zeros(fields, np.int64)
    for j in range(fields):
        first, last = plan_start[j], plan_start[j + 1]
        plain = plain and last - first <= 1
        if last > first:
            kinds[j], slots[j] = plan_kind[first], plan_slot[first]
    while at < size:
        line_start = at
        reason, where, value_start, value_stop = 0, 0, np.int64(0), np.int64(0)
        more_lines = 0  # line breaks within quoted fields
        slow_before = num_slow
        if data[at] == _NL or (data[at] == _CR and data[at + 1] == _NL):
            at += 1 if data[at] == _NL else 2
            if fields > 1:
                lines += 1
                continue
            at = line_start
        if next_forced < forced.size and forced[next_forced] == line_start:
            reason = REASON_UTF8
            next_forced += 1
        elif plain:
            stop = _plain_line(data, at, sep, quote, kinds, slots, rows, floats, ints, absent, starts, lengths)
            if stop >= 0:
                row_line[rows] = lines
                row_at[rows] = line_start
                rows += 1
                lines += 1
                at = stop + 1
                continue
        field = 0
        ended = False
        while reason == 0 and not ended:
            start = at
            quoted = quote >= 0 and data[at] == quote
            if quoted:
                start += 1
            first, last = plan_start[field], plan_start[field + 1]
            # Find the end of the field.
            stop = start
            doubled, breaks = 0, 0
            if quoted:
                closed = False
                while stop < size:
                    if data[stop] == quote:
                        if data[stop + 1] != quote:
                            closed = True
                            break
                        doubled += 1
                        stop += 1
                    elif data[stop] == _NL:
                        breaks += 1
                        if breaks >= MAX_QUOTED_LINES or stop - start >= MAX_QUOTED_BYTES:
                            break
                    stop += 1
                after = stop + 1
                if closed and data[after] == _CR and data[after + 1] == _NL:
                    after += 1
                if not closed or (data[after] != sep and data[after] != _NL):
                    reason, where = REASON_QUOTE, field
                    break
                at = after
                more_lines += breaks
                if doubled > 0:
                    write = start
                    read = start
                    while read < stop:
                        data[write] = data[read]
                        read += 2 if data[read] == quote else 1
                        write += 1
                    stop = write
            else:
                while data[stop] != sep and data[stop] != _NL:
                    stop += 1
                at = stop
                if data[stop] == _NL and stop > start and data[stop - 1] == _CR:
                    stop -= 1
            null = stop == start or (null_ends.size > 0 and _is_null(data, start, stop, nulls, null_ends))
            for output in range(first, last):
                kind, slot = plan_kind[output], plan_slot[output]
                status, here = _MISSING, stop
                if kind == TEXT:
                    starts[slot, rows] = start
                    lengths[slot, rows] = -1 if null else stop - start
                    continue
                if kind == FLOAT:
                    number = np.nan
                    if not null:
                        number, here, status = _scan_float(data, start)
                    floats[slot, rows] = number
                else:
                    bits = np.int64(0)
                    if not null and kind == HEX:
                        bits, here, status = _scan_hex(data, start)
                    elif not null:
                        bits, here, status = _scan_int(data, start)
                    ints[slot, rows] = bits
                    absent[slot, rows] = null
                if not null and (status != _OK or here != stop):
                    if kind == HEX:
                        reason, where, value_start, value_stop = REASON_VALUE, field, start, stop
                    else:
                        if num_slow < slow.shape[0]:
                            slow[num_slow, 0] = rows
                            slow[num_slow, 1] = output
                            slow[num_slow, 2] = start
                            slow[num_slow, 3] = stop
                        num_slow += 1
            if reason != 0:
                break
            field += 1
            if data[at] == _NL:
                ended = True
                if field < fields:
                    reason, where = REASON_FEW, field
            elif field == fields:
                reason, where = REASON_MANY, field
            else:
                at += 1
        if reason == REASON_QUOTE:
            at += 1
            while data[at] != _NL:
                at += 1
        elif data[at] != _NL or reason == REASON_UTF8:
            # Behind a bad field, or at the start of a line of broken text: no line of the record is one of its own.
            begin = at if reason == REASON_UTF8 else at + 1
            stop, passed, _ = _record_end(data, begin, seps, -1, quote, False)
            at = stop - 1
            more_lines += passed - 1
        while next_forced < forced.size and forced[next_forced] <= at:
            reason = REASON_UTF8
            next_forced += 1
        if reason != 0:
            num_slow = slow_before
            if num_bad < bad.shape[0]:
                bad[num_bad, 0] = lines
                bad[num_bad, 1] = line_start
                bad[num_bad, 2] = reason
                bad[num_bad, 3] = where
                bad[num_bad, 4] = value_start
                bad[num_bad, 5] = value_stop
            num_bad += 1
        else:
            row_line[rows] = lines
            row_at[rows] = line_start
            rows += 1
        at += 1
        lines += 1 + more_lines
    return rows, lines, num_bad, num_slow


@jit
def count_lines(data):  # type: ignore[no-untyped-def]
    """Newlines in the block."""
    total = 0
    for i in range(data.size):
        total += data[i] == _NL
    return total


@jit
def has_high_bytes(data):  # type: ignore[no-untyped-def]
    """Whether any byte is outside ASCII."""
    seen = np.uint8(0)
    for i in range(data.size):
        seen |= data[i]
    return seen >= 128


@jit
def split_spans(data, starts, lengths, sep, most, last):  # type: ignore[no-untyped-def]
    """Cut texts at ``sep``: starts and lengths of the parts, and how many of them each text keeps.

    Empty parts are left out; of more than ``most`` parts the last (or the first) ones stay.
    """
    n = starts.size
    total = 0
    counts = np.zeros(n, np.int32)
    for i in range(n):
        run = 0
        for p in range(lengths[i]):
            if data[starts[i] + p] == sep:
                counts[i] += run > 0
                run = 0
            else:
                run += 1
        counts[i] += run > 0
        total += min(counts[i], most)
    part_starts = np.empty(total, np.int64)
    part_lengths = np.empty(total, np.int32)
    at = 0
    for i in range(n):
        skip = max(0, counts[i] - most) if last else 0
        keep = min(counts[i], most)
        run, seen = 0, 0
        for p in range(lengths[i] + 1):
            if p == lengths[i] or data[starts[i] + p] == sep:
                if run > 0:
                    if skip <= seen < skip + keep:
                        part_starts[at] = starts[i] + p - run
                        part_lengths[at] = run
                        at += 1
                    seen += 1
                run = 0
            else:
                run += 1
        counts[i] = keep
    return part_starts, part_lengths, counts


@jit
def parse_spans(data, starts, lengths, kind, floats, ints, status):  # type: ignore[no-untyped-def]
    """Parse texts into ``floats`` or ``ints``; status 0 good, 1 missing, 2 needs the careful parser."""
    # A scanner stops at what is no digit, and texts of a column may follow each other without a byte between them.
    text = np.empty(_LONGEST + 1, np.uint8)
    for i in range(starts.size):
        size = lengths[i]
        if size <= 0:
            status[i] = _MISSING
            continue
        if size > _LONGEST:
            status[i] = _SLOW
            continue
        for p in range(size):
            text[p] = data[starts[i] + p]
        text[size] = _NL
        here = np.int64(0)
        found = _OK
        if kind == HEX:
            bits, here, found = _scan_hex(text, np.int64(0))
            ints[i] = bits
        elif kind == INT:
            bits, here, found = _scan_int(text, np.int64(0))
            ints[i] = bits
        else:
            number, here, found = _scan_float(text, np.int64(0))
            floats[i] = number
        status[i] = _OK if found == _OK and here == size else _SLOW


@jit
def hash_spans(data, starts, lengths, seed, out):  # type: ignore[no-untyped-def]
    """A 64-bit hash of each text (FNV-1a, then the splitmix64 finisher); missing: 0."""
    for i in range(starts.size):
        if lengths[i] < 0:
            out[i] = 0
            continue
        h = np.uint64(14695981039346656037) ^ np.uint64(seed)
        for p in range(starts[i], starts[i] + lengths[i]):
            h = (h ^ np.uint64(data[p])) * np.uint64(1099511628211)
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        out[i] = h ^ (h >> np.uint64(31))


@jit
def spread(codes, ends, starts, lengths):  # type: ignore[no-untyped-def]
    """Where the text behind each code begins, and its bytes; -1 for code 0."""
    for i in range(codes.size):
        code = np.uint64(codes[i])
        if code == 0:
            starts[i], lengths[i] = 0, -1
        else:
            begin = ends[code - np.uint64(1)]
            starts[i] = begin
            lengths[i] = ends[code] - begin
