"""Raw files cut into blocks of whole records, compressed or not, without ever holding a whole file.

Block k of a file holds the records that start in bytes [k * size, (k + 1) * size) of its decompressed text. A record
is a line, or several where line breaks are in quoted fields (:class:`RecordRule`). The cut depends on nothing else, so
the same blocks come back when an interrupted run goes on.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError, DependencyError
from stoker.base.units import format_size, quoted
from stoker.prep.parse.record_kernels import record_start

__all__ = [
    "BLOCK_BYTES",
    "FRAME",
    "LineBlock",
    "RecordRule",
    "check_text",
    "expand",
    "first_line",
    "line_blocks",
    "number_order",
    "source_kind",
    "text_order_warning",
]

BLOCK_BYTES = 2**24
FRAME = ".frame"  # end of the name of a table in memory on its way: Parquet, whatever format a schema has for files
_MAX_LINE = 2**26  # a longer line means that this is no text log
_READ = 2**16  # compressed bytes inflated at a time
_BOM = b"\xef\xbb\xbf"
_SUFFIXES = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """A block of whole records, read when :meth:`load` is called."""

    number: int
    load: Callable[[], Bytes]  # writable, ends with a newline; may be empty
    size: int  # compressed bytes of the file used up with this block, for progress
    damage: str | None = None  # why the file ends with this block, where it ends too early


@dataclass(frozen=True, kw_only=True)
class RecordRule:
    """Where records of delimited text start: at each line that does not begin within a quoted field (RFC 4180).

    Args:
        separator, quote, encoding: as in :class:`stoker.prep.source_format.SourceFormat`.
        header: the first line is a record whatever quotes are in it.
    """

    separator: str
    quote: str
    encoding: str = "utf-8"
    header: bool = False

    def first(self, data: Bytes, at: int, goal: int, *, start: bool, final: bool) -> tuple[int, bool]:
        """Find the first record at ``goal`` or later.

        Args:
            data: text that begins with a record; ``at``: where one starts that is before the goal.
            start: it is the start of the file.
            final: no more text comes, and its last byte is a newline.

        Returns:
            Its position and True; or, where more text has to be read for that, the ``at`` of the next call and False.
        """
        if start and at == 0:
            at = 3 if data[:3].tobytes() == _BOM else 0
            if self.header:
                ends = np.flatnonzero(data[:_READ] == 10)
                if not len(ends):
                    ends = np.flatnonzero(data == 10)
                if not len(ends):
                    return 0, False
                at = int(ends[0]) + 1
        wide = self.encoding == "latin-1"
        try:
            separator = self.separator.encode(self.encoding)
        except UnicodeEncodeError:
            separator = b""  # which no text has
        # As the parser has it: one byte stands for a separator of several.
        joined = 0x1F if len(self.separator.encode()) > 1 else -1
        sep = np.frombuffer(separator, np.uint8)
        found, known = record_start(data, at, goal, sep, joined, ord(self.quote), wide, final)
        return int(found), bool(known)


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes) -> bytes: ...


def expand(patterns: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[Path]]:
    """Return the files for names and glob patterns, each once, and those that were named again.

    Names keep the order given; the files of one pattern are sorted by name, with numbers by value (day_2 before
    day_10).
    """
    files: dict[Path, Path] = {}
    again: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        if os.path.isdir(path):
            raise DataError(f"{path} is a directory. Name its files, for example '{path}/*'.")
        found = [path] if os.path.lexists(path) else _sorted(glob.glob(str(pattern), recursive=True))
        found = [item for item in found if not os.path.isdir(item)]
        if not found:
            raise DataError(f"there is no file {str(pattern)!r}. Check the path or the pattern.")
        for item in found:
            _check_regular(item)
            (again if item.absolute() in files else files).setdefault(item.absolute(), item)
    if not files:
        raise DataError("no input file was given.")
    return list(files.values()), list(again.values())


def _check_regular(path: Path) -> None:
    """Raise :class:`DataError` unless ``path`` is a regular file that this process may read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check its path and its permissions.") from error
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise DataError(
        f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, and Stoker needs a regular file: it reads parts of it "
        "at once and again. Write what comes from there to a file first."
    )


def _sorted(names: Iterable[str]) -> list[Path]:
    """Sort file names, with the numbers in them by value."""
    return sorted(map(Path, names), key=number_order)


def number_order(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Return a key that sorts paths by name, with the numbers in them by value."""
    pieces = re.split(r"([0-9]+)", str(path))  # text, number, text, ..., text
    return [(text, int(number)) for text, number in zip(pieces[::2], [*pieces[1::2], "0"], strict=True)], str(path)


def text_order_warning(names: Iterable[str]) -> str | None:
    """Return a warning if names of files are sorted as text, where their numbers give another order; else None.

    A shell sorts what it expands so: day_10 comes before day_2.
    """
    files = [Path(name) for name in names]
    if sorted(files, key=str) != files:
        return None
    for first, second in pairwise(files):
        if number_order(second) < number_order(first):
            return (
                f"the files are read in the order given, {first.name} before {second.name}. To read them in the order "
                "of their numbers, quote the pattern, so that the shell leaves it to Stoker."
            )
    return None


def source_kind(path: Path, kind: str = "auto") -> str:
    """csv, parquet or jsonl: what a file is by its name where the schema leaves it open."""
    if path.suffix == FRAME:
        return "parquet"
    if kind != "auto":
        return kind
    suffix = Path(path.stem).suffix if path.suffix.lower() in (".gz", ".zst", ".zstd") else path.suffix
    return _SUFFIXES.get(suffix.lower(), "csv")


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    return "zstd" if magic == b"\x28\xb5\x2f\xfd" else None


def check_text(path: Path) -> None:
    """Look at the first 64 KiB of a text file, decompressed.

    Raises:
        DataError: no line in it is whole, as the file breaks off; it is UTF-16; its lines end with carriage returns.
    """
    compression = _compression(path)
    head, damage = bytearray(), None
    if compression is None:
        with path.open("rb") as file:
            head += file.read(_READ)
    else:
        for piece, _, found in _inflate(path, compression):
            head += piece
            damage = found
            if len(head) >= _READ:
                break

    def convert(command: str) -> str:
        packed = "" if compression is None else f"{compression} -dc {quoted(path)} | "
        return f"Convert it: {packed}{command}{'' if packed else f' < {quoted(path)}'} > NEW.csv"

    if bytes(head[:2]) in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text. {convert('iconv -f UTF-16 -t UTF-8')}")
    if b"\n" in head:
        return
    if b"\r" in head[:-1]:
        how = convert(r"tr '\r' '\n'")
        raise DataError(f"{path} has the line ends of old Macs, carriage returns alone. {how}")
    if damage is not None:
        raise DataError(f"{path} breaks off before its first line ends: {damage}. Get the file whole.")


def first_line(path: Path, encoding: str = "utf-8") -> str:
    """The first line of a text file, without its end. Raises :class:`DataError` for an empty file."""
    for block in line_blocks(path, block_bytes=1):
        raw = block.load().tobytes()
        if not raw:
            break
        try:
            return raw.split(b"\n", 1)[0].rstrip(b"\r").removeprefix(_BOM).decode(encoding)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:1: the header is not UTF-8 (byte {error.start + 1:,}). For text in another encoding set "
                'encoding = "latin-1" in [source] of the schema, or convert the file to UTF-8.'
            ) from error
    raise DataError(f"{path} is empty: it has no header line.")


def line_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES, rule: RecordRule | None = None) -> Iterator[LineBlock]:
    """The blocks of a text file in order. ``rule``: where its records start; None: at every line."""
    compression = _compression(path)
    if compression is not None:
        yield from _inflated_blocks(path, compression, block_bytes, rule)
    elif rule is None:
        yield from _plain_blocks(path, block_bytes)
    else:
        yield from _record_blocks(path, block_bytes, rule)


def _plain_blocks(path: Path, block_bytes: int) -> Iterator[LineBlock]:
    size = path.stat().st_size
    for number in range(-(-size // block_bytes)):
        begin, end = number * block_bytes, min((number + 1) * block_bytes, size)
        yield LineBlock(number=number, load=_PlainLoader(path, begin, end, size), size=end - begin)


@dataclass(frozen=True)
class _PlainLoader:
    path: Path
    begin: int
    end: int
    size: int

    def __call__(self) -> Bytes:
        with self.path.open("rb", buffering=0) as file:
            begin = 0 if self.begin == 0 else self._after_newline(file, self.begin - 1)
            if begin >= self.end:
                return np.empty(0, np.uint8)
            end = self.size if self.end == self.size else self._after_newline(file, self.end - 1)
            data = _read_lines(file, self.path, begin, end)
        return _without_bom(data, begin == 0)

    def _after_newline(self, file: Any, at: int) -> int:
        """Position after the first newline at or after ``at``."""
        file.seek(at)
        start = at
        while piece := file.read(2**16):
            found = piece.find(b"\n")
            if found >= 0:
                return at + int(found) + 1
            at += len(piece)
            if at - start > _MAX_LINE:
                raise _no_lines(self.path)
        return at


def _read_lines(file: Any, path: Path, begin: int, end: int) -> Bytes:
    """Read bytes ``begin`` to ``end``, and add a newline where they do not end with one."""
    data = np.empty(end - begin + 1, np.uint8)
    file.seek(begin)
    view, at = data.data[:-1], 0
    while at < len(view):
        got = file.readinto(view[at:])
        if not got:
            raise DataError(f"{path} became shorter while it was read.")
        at += got
    if data[-2] == 10:
        return data[:-1]
    data[-1] = 10
    return data


def _record_blocks(path: Path, block_bytes: int, rule: RecordRule) -> Iterator[LineBlock]:
    """Read the blocks of a plain file; where one ends is known when its quotes were looked at."""
    size, begin = path.stat().st_size, 0
    with path.open("rb", buffering=0) as file:
        while begin < size:
            number = begin // block_bytes
            goal = min((number + 1) * block_bytes, size)
            at, known, more = 0, False, _READ  # bytes read behind the goal: enough for most lines
            while not known:
                stop = min(goal + more, size)
                if stop - goal > _MAX_LINE:
                    raise _no_lines(path)
                data = _read_lines(file, path, begin, stop)
                whole = data if stop == size else data[: stop - begin]
                at, known = rule.first(whole, at, goal - begin, start=begin == 0, final=stop == size)
                more *= 4
            used = min(begin + at, size) - begin
            yield _loaded(number, whole[:at], begin, used)
            begin += used


def _no_lines(path: Path) -> DataError:
    return DataError(f"{path} has no line end within {format_size(_MAX_LINE)}: it is not a text log.")


def _without_bom(data: Bytes, first: bool) -> Bytes:
    return data[3:] if first and data[:3].tobytes() == _BOM else data


def _inflated_blocks(path: Path, compression: str, block_bytes: int, rule: RecordRule | None) -> Iterator[LineBlock]:
    number, position = 0, 0  # position: decompressed byte at which the buffer starts
    buffer = bytearray()
    used, used_before = 0, 0
    damage: str | None = None
    searched = 0  # bytes of the buffer in which the block does not end; with a rule, a record starts there
    for got in chain(_inflate(path, compression), [None]):
        if got is not None:
            piece, used, damage = got
            buffer += piece
        elif damage is not None:
            # The last line may lack its end, so only what a newline closed is taken for whole.
            del buffer[buffer.rfind(b"\n") + 1 :]
        elif buffer and buffer[-1] != 10:
            buffer += b"\n"
        while True:
            goal = (number + 1) * block_bytes - position
            if len(buffer) < goal:
                break
            cut, known = _cut(buffer, searched, goal, rule, start=position == 0, final=got is None)
            if not known and len(buffer) - goal > _MAX_LINE:
                raise _no_lines(path)
            if not known or (got is None and cut >= len(buffer)):
                searched = cut
                break
            searched = 0
            data = np.frombuffer(bytes(memoryview(buffer)[:cut]), np.uint8).copy()
            del buffer[:cut]
            yield _loaded(number, data, position, used - used_before)
            position += cut
            used_before = used
            number += 1
            while position >= (number + 1) * block_bytes:
                number += 1
    if buffer or damage is not None or number == 0:
        data = np.frombuffer(bytes(buffer), np.uint8).copy()
        yield _loaded(number, data, position, path.stat().st_size - used_before, damage)


def _cut(
    buffer: bytearray, searched: int, goal: int, rule: RecordRule | None, *, start: bool, final: bool
) -> tuple[int, bool]:
    """Find where the block ends at the head of ``buffer``; arguments and results as of :meth:`RecordRule.first`."""
    if rule is not None:
        return rule.first(np.frombuffer(buffer, np.uint8), searched, goal, start=start, final=final)
    found = buffer.find(b"\n", max(goal - 1, searched))
    return (found + 1, True) if found >= 0 else (len(buffer), False)


def _loaded(number: int, data: Bytes, position: int, size: int, damage: str | None = None) -> LineBlock:
    whole = _without_bom(data, position == 0)
    return LineBlock(number=number, load=_Read(whole), size=size, damage=damage)


@dataclass(frozen=True)
class _Read:
    data: Bytes

    def __call__(self) -> Bytes:
        return self.data


def _inflater(compression: str) -> tuple[Callable[[], _Inflater], type[Exception]]:
    if compression == "gzip":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    try:
        import zstandard
    except ImportError as error:
        raise DependencyError("reading .zst files needs zstandard: pip install zstandard.") from error
    return lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(), zstandard.ZstdError


def _inflate(path: Path, compression: str) -> Iterator[tuple[bytes, int, str | None]]:
    """Pieces of text, compressed bytes used so far, and what is wrong with the stream if it ends early."""
    make, failure = _inflater(compression)
    member: _Inflater | None = None
    used = 0
    with path.open("rb") as file:
        while True:
            raw = file.read(_READ)
            if not raw:
                break
            used += len(raw)
            while raw:
                if member is None:
                    if not raw.strip(b"\0"):  # padding after the last member
                        break
                    member = make()
                before = getattr(member, "copy", lambda: None)()
                try:
                    piece = member.decompress(raw)
                except failure as error:
                    whole = b"" if before is None else _until_damage(before, raw, failure)
                    yield whole, used, f"damaged {compression} stream ({error}); the rest of the file is lost"
                    return
                raw = b""
                if member.eof:
                    raw, member = member.unused_data, None
                yield piece, used, None
    if member is not None:
        yield b"", used, f"truncated {compression} file; the rest of the file is lost"


def _until_damage(member: _Inflater, raw: bytes, failure: type[Exception]) -> bytes:
    """What a stream gives before it fails, fed byte by byte: one call would lose all of its output."""
    pieces = []
    try:
        for at in range(len(raw)):
            pieces.append(member.decompress(raw[at : at + 1]))
    except failure:
        pass
    return b"".join(pieces)
