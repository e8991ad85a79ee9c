"""Raw files cut into blocks of whole lines, compressed or not, without ever holding a whole file.

Block k of a file holds the lines that start in bytes [k * size, (k + 1) * size) of its decompressed text.
The cut depends on nothing else, so the same blocks come back when an interrupted run goes on.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError, DependencyError
from stoker.base.units import format_size, quoted

__all__ = [
    "BLOCK_BYTES",
    "FRAME",
    "LineBlock",
    "check_text",
    "expand",
    "first_line",
    "line_blocks",
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
    """A stretch of whole lines, read when :meth:`load` is called."""

    number: int
    load: Callable[[], Bytes]  # writable, ends with a newline; may be empty
    size: int  # compressed bytes of the file used up with this block, for progress
    damage: str | None = None  # why the file ends with this block, where it ends too early


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
    return sorted(map(Path, names), key=_number_order)


def _number_order(path: Path) -> tuple[list[tuple[str, int]], str]:
    pieces = re.split(r"([0-9]+)", str(path))  # text, number, text, ..., text
    return [(text, int(number)) for text, number in zip(pieces[::2], [*pieces[1::2], "0"], strict=True)], str(path)


def text_order_warning(files: Sequence[Path]) -> str | None:
    """Return a warning if a list of files is sorted as text, where their numbers give another order; else None.

    A shell sorts what it expands so: day_10 comes before day_2.
    """
    if sorted(files, key=str) != list(files):
        return None
    for first, second in pairwise(files):
        if _number_order(second) < _number_order(first):
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


def line_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[LineBlock]:
    """The blocks of a text file in order."""
    compression = _compression(path)
    if compression is None:
        yield from _plain_blocks(path, block_bytes)
    else:
        yield from _inflated_blocks(path, compression, block_bytes)


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
            data = np.empty(end - begin + 1, np.uint8)
            file.seek(begin)
            view, at = data.data[:-1], 0
            while at < len(view):
                got = file.readinto(view[at:])
                if not got:
                    raise DataError(f"{self.path} became shorter while it was read.")
                at += got
        if data[-2] == 10:
            return _without_bom(data[:-1], begin == 0)
        data[-1] = 10
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


def _no_lines(path: Path) -> DataError:
    return DataError(f"{path} has no line end within {format_size(_MAX_LINE)}: it is not a text log.")


def _without_bom(data: Bytes, first: bool) -> Bytes:
    return data[3:] if first and data[:3].tobytes() == _BOM else data


def _inflated_blocks(path: Path, compression: str, block_bytes: int) -> Iterator[LineBlock]:
    number, position = 0, 0  # position: decompressed byte at which the buffer starts
    buffer = bytearray()
    used_before = 0
    stream = _inflate(path, compression)
    damage: str | None = None
    searched = 0  # bytes of the buffer known to hold no newline past the block's end
    for piece, used, found in stream:
        damage = found
        buffer += piece
        while True:
            wanted = (number + 1) * block_bytes - 1 - position
            if len(buffer) <= wanted:
                break
            cut = buffer.find(b"\n", max(wanted, searched))
            if cut < 0:
                searched = len(buffer)
                if len(buffer) - wanted > _MAX_LINE:
                    raise _no_lines(path)
                break
            searched = 0
            data = np.frombuffer(bytes(memoryview(buffer)[: cut + 1]), np.uint8).copy()
            del buffer[: cut + 1]
            yield _loaded(number, data, position, used - used_before)
            position += cut + 1
            used_before = used
            number += 1
            while position >= (number + 1) * block_bytes:
                number += 1
    if buffer or damage is not None or number == 0:
        if damage is not None:
            # The last line may lack its end, so only what a newline closed is taken for whole.
            del buffer[buffer.rfind(b"\n") + 1 :]
        elif buffer and buffer[-1] != 10:
            buffer += b"\n"
        data = np.frombuffer(bytes(buffer), np.uint8).copy()
        yield _loaded(number, data, position, path.stat().st_size - used_before, damage)


def _loaded(number: int, data: Bytes, position: int, size: int, damage: str | None = None) -> LineBlock:
    whole = _without_bom(data, position == 0)
    return LineBlock(number=number, load=lambda: whole, size=size, damage=damage)


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
