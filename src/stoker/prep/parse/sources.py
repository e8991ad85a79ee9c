"""Find raw files, and cut text files, compressed or not, into blocks of whole records.

A block ends with the first record that ends ``size`` bytes or more after the start of the block. In a plain file whose
records are lines, it ends with the first line that ends at a multiple of ``size`` or later. A record is a line, or
several lines if quoted fields contain line breaks (:meth:`TextParser.cut`). Nothing else decides the cuts, so a resumed
run finds the same blocks.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from stoker.base.errors import DataError, errors_as, require
from stoker.base.files import EDGE, check_name
from stoker.base.units import format_size, quoted
from stoker.prep.source_format import SourceFormat

BLOCK_BYTES = 2**24
FRAME = ".frame"  # suffix of the temporary file of a table: Parquet, whatever format the schema has for files
_MAX_LINE = 2**26  # a longer line means that the file is not a text log
_READ = 2**16  # bytes of a file to read at a time
_BOM = b"\xef\xbb\xbf"
_HEAD = 2**12  # bytes that tell text from other files
_WIDE_NULS = 0.4  # share of zero bytes among all even, or all odd, bytes of UTF-16
_CONTROL = re.compile(rb"[\x00\x04-\x08\x0e-\x1a\x7f]")  # not \x01 to \x03, which Hive writes between values
_MOST_CONTROL = 0.07  # share of such bytes in a text; random bytes have 0.08
_UNPACK = "Unpack it first, or compress it with gzip or zstd instead."
_CONVERT = "Write it as Parquet, for example with Polars or PyArrow, or pass the table in Python."
_OTHER_KINDS = {  # first bytes -> what the file is, and the remedy
    b"PAR1": ("Parquet", 'Name it .parquet, or set kind = "parquet" in [source] of the schema.'),
    b"ARROW1": ("an Arrow file (Feather)", _CONVERT), b"\xff\xff\xff\xff": ("an Arrow stream", _CONVERT),
    b"Obj\x01": ("an Avro file", _CONVERT), b"ORC": ("an ORC file", _CONVERT),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "Unpack it, or export it as CSV."),
    b"BZh": ("compressed with bzip2", _UNPACK), b"\xfd7zXZ": ("compressed with xz", _UNPACK),
}  # fmt: skip
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """A block of whole records."""

    load: Callable[[], bytes]  # returns text that ends with a newline, or no text
    size: int  # bytes read from the (compressed) file for this block, for the progress
    damage: str | None = None  # why the file ends too early with this block, if it does


def expand(patterns: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[Path]]:
    """Return the files for names and glob patterns, each once, and the files that were named again.

    Names keep the given order. The files of one pattern are sorted by name, with numbers by value (day_2 before
    day_10).
    """
    files: dict[Path, Path] = {}
    again: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        if os.path.isdir(path):
            raise DataError(f"{path} is a directory. Name its files, for example '{path}/*'.")
        found = (
            [path]
            if os.path.lexists(path)
            else sorted(map(Path, glob.glob(str(pattern), recursive=True)), key=number_order)
        )
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
    check_name(path.absolute())
    with errors_as(DataError, f"{path} cannot be read", "Check its path and its permissions."):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise DataError(
        f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, and Stoker needs a regular file: it reads parts of it "
        "at once and again. Write the data to a file first."
    )


def number_order(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Return a key that sorts paths by name, with numbers by value."""
    tokens = re.split(r"([0-9]+)", str(path))  # text, number, text, ..., text
    return [(text, int(number)) for text, number in zip(tokens[::2], [*tokens[1::2], "0"], strict=True)], str(path)


def text_order_warning(names: Iterable[str]) -> str | None:
    """Return a warning if names of files are sorted as text although their numbers give another order; else None.

    A shell sorts the files of a pattern as text: day_10 before day_2.
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
    """Return csv, parquet or jsonl: the ``kind`` of the schema, or for "auto" the kind by the file's name."""
    if path.suffix == FRAME:
        return "parquet"
    return kind if kind != "auto" else _SUFFIXES.get(Path(plain_name(path)).suffix.lower(), "csv")


def plain_name(path: Path) -> str:
    """Return the name of a file without the suffix of a compression."""
    return path.stem if path.suffix.lower() in (".gz", ".zst", ".zstd") else path.name


def is_packed(path: Path) -> bool:
    """Return True if a file is compressed."""
    return _compression(path) is not None


def text_of(path: Path, most: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file, or of its first ``most`` bytes, in chunks, decompressed."""
    return (chunk for chunk, _, _ in _chunks(path, most))


def text_edge(path: Path, begin: int = 0, size: int = EDGE) -> str:
    """Return the sha256 of bytes of a file, decompressed, from ``begin`` on, by which a log is recognized."""
    found, done = bytearray(), 0
    for chunk in text_of(path):
        found += chunk[max(0, begin - done) :]
        done += len(chunk)
        if done >= begin + size:
            break
    return hashlib.sha256(memoryview(found)[:size]).hexdigest()


def text_edges(path: Path, most: int | None = None) -> dict[str, Any]:
    """Return how many bytes a file, or its first ``most`` bytes, has decompressed, and the sha256 of their two ends."""
    head, tail, done = bytearray(), bytearray(), 0
    for chunk in text_of(path, most):
        head += chunk[: EDGE - len(head)]
        tail += chunk
        del tail[:-EDGE]
        done += len(chunk)
    hashes = (hashlib.sha256(edge).hexdigest() for edge in (head, tail))
    return {"bytes": done, **dict(zip(("head", "tail"), hashes, strict=True))}


def refuse_packed_copies(files: Sequence[Path], names: Mapping[Path, str], given: SourceFormat) -> None:
    """Raise :class:`DataError` if a compressed file is another one of the same name, whose rows would count twice."""
    alike: dict[str, list[Path]] = {}
    for path in files:
        alike.setdefault(plain_name(Path(names.get(path, path.name))), []).append(path)
    for paths in alike.values():
        for one, other in combinations(paths, 2):
            if is_packed(one) == is_packed(other) or text_edge(one) != text_edge(other):
                continue
            if count_rows(one, given, 1):
                packed, plain = (names.get(path, path) for path in sorted((one, other), key=is_packed, reverse=True))
                raise DataError(f"{packed} is {plain}, compressed: its rows would count twice. Leave one of them out.")


def count_rows(path: Path, given: SourceFormat, most: int) -> int:
    """Return the number of rows of a text file, up to ``most``: of lines but for a header. One that is damaged has all.

    A row with a line break in a quoted field counts as several.
    """
    block = next(line_blocks(path, block_bytes=EDGE))
    if block.damage is not None:
        return most
    header = source_kind(path, given.kind) == "csv" and not given.columns
    return min(most, max(0, len(block.load().strip().splitlines()) - header))


def check_text(path: Path) -> None:
    """Check the first 64 KiB of a text file, decompressed.

    Raises:
        DataError: the file breaks off before its first line ends, is UTF-16, UTF-32 or binary, or has lines that end
            with carriage returns.
    """
    head, damage, chunks = b"", None, _chunks(path)
    while len(head) < _READ and (found := next(chunks, None)) is not None:
        chunk, _, damage = found
        head += chunk

    def convert(command: str) -> str:
        compression = _compression(path)
        packed = "" if compression is None else f"{compression} -dc {quoted(path)} | "
        return f"Convert it: {packed}{command}{'' if packed else f' < {quoted(path)}'} > NEW.csv"

    if (encoding := _wide_encoding(head)) is not None:
        raise DataError(f"{path} is {encoding} text. {convert(f'iconv -f {encoding} -t UTF-8')}")
    for magic, (what, remedy) in _OTHER_KINDS.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {what}, not text. {remedy}")
    if len(_CONTROL.findall(head[:_HEAD])) > _MOST_CONTROL * len(head[:_HEAD]):
        raise DataError(
            f"{path} is a binary file, not a log. Logs are text or JSON lines (also .gz and .zst), or Parquet."
        )
    if b"\n" in head:
        return
    if b"\r" in head[:-1]:
        how = convert(r"tr '\r' '\n'")
        raise DataError(f"{path} has the line ends of old Macs, carriage returns alone. {how}")
    if damage is not None:
        raise DataError(f"{path} breaks off before its first line ends: {damage}. Get the file whole.")


def _wide_encoding(head: bytes) -> str | None:
    """Return the encoding of a text in UTF-16 or UTF-32, with or without a byte order mark; None for other files."""
    if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "UTF-32"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    even, odd = head[:_HEAD:2], head[1:_HEAD:2]
    for nuls, others, name in ((odd, even, "UTF-16LE"), (even, odd, "UTF-16BE")):
        if nuls and nuls.count(0) > _WIDE_NULS * len(nuls) and not others.count(0):
            return name
    return None


def first_line(path: Path, encoding: str = "utf-8") -> str:
    """Return the first line of a text file, without its end. Raise :class:`DataError` if the file is empty."""
    line = next(line_blocks(path, block_bytes=1)).load()
    if not line:
        raise DataError(f"{path} is empty: it has no header line.")
    try:
        return line.rstrip(b"\r\n").decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:1: the header is not UTF-8 (byte {error.start + 1:,}). For text in another encoding set "
            'encoding = "latin-1" in [source] of the schema, or convert the file to UTF-8.'
        ) from error


def line_blocks(
    path: Path,
    *,
    block_bytes: int = BLOCK_BYTES,
    convert: Callable[[bytes], bytes] = bytes,
    cut: Callable[[bytearray, int, int, bool], tuple[int, bool]] | None = None,
    header: bool = False,
) -> Iterator[LineBlock]:
    """Yield the blocks of a text file in order, at least one.

    Args:
        path: the file.
        block_bytes: size of a block.
        convert: converts whole lines to UTF-8; its result is cut into blocks.
        cut: finds the first record that starts at a position or later, such as :meth:`TextParser.cut`. None: every line
            is a record; then a block of a plain file is read when it is loaded.
        header: the first line is a record, whatever quotes it contains.
    """
    if cut is None and _compression(path) is None:
        size = path.stat().st_size
        for begin in range(0, max(size, 1), block_bytes):
            stop = min(begin + block_bytes, size)
            yield LineBlock(load=partial(_read_lines, path, begin, stop, convert), size=stop - begin)
        return
    buffer = bytearray()
    at = used = used_before = 0  # at: of a record in the buffer
    damage = None
    for lines, used, damage, final in _whole_lines(path):  # noqa: B007
        buffer += convert(lines)
        if header and buffer:
            at, header = buffer.index(b"\n") + 1, False
        while len(buffer) >= block_bytes:
            if cut is None:
                at, known = buffer.index(b"\n", block_bytes - 1) + 1, True
            else:
                at, known = cut(buffer, at, block_bytes, final)
            if not known or (final and at == len(buffer)):
                break
            yield LineBlock(load=partial(bytes, bytes(memoryview(buffer)[:at])), size=used - used_before)
            del buffer[:at]
            at, used_before = 0, used
    if buffer or damage is not None or not used_before:
        yield LineBlock(load=partial(bytes, bytes(buffer)), size=used - used_before, damage=damage)


def _read_lines(path: Path, begin: int, end: int, convert: Callable[[bytes], bytes]) -> bytes:
    """Return the lines that start in bytes [begin, end) of a file."""
    with path.open("rb") as file:
        start, stop = _line_start(path, file, begin), _line_start(path, file, end)
        file.seek(start)
        data = file.read(stop - start)
    if len(data) < stop - start:
        raise DataError(f"{path} became shorter while it was read.")
    data = data.removeprefix(_BOM) if begin == 0 else data
    return convert(data if not data or data.endswith(b"\n") else data + b"\n")


def _line_start(path: Path, file: BinaryIO, at: int) -> int:
    """Return the start of the first line that starts at ``at`` or later."""
    if at == 0:
        return 0
    file.seek(at - 1)
    if len(file.readline(_MAX_LINE)) == _MAX_LINE:
        raise _no_lines(path)
    return file.tell()


def _no_lines(path: Path) -> DataError:
    return DataError(f"{path} has no line end within {format_size(_MAX_LINE)}: it is not a text log.")


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int, str | None, bool]]:
    """Yield whole lines, the bytes of the file read so far, the damage, if any, and whether they are the last lines."""
    rest, used, first = bytearray(), 0, True
    damage = None
    for chunk, used, damage in _chunks(path):  # noqa: B007
        end = chunk.rfind(b"\n") + 1
        if end:
            lines = bytes(rest) + chunk[:end]
            rest.clear()
            yield lines.removeprefix(_BOM) if first else lines, used, None, False
            first = False
        rest += chunk[end:]
        if len(rest) > _MAX_LINE:
            raise _no_lines(path)
    # The last line of a file that breaks off may be incomplete: drop text without a newline.
    lines = bytes(rest) + b"\n" if rest and damage is None else b""
    yield lines.removeprefix(_BOM) if first else lines, used, damage, True


def _chunks(path: Path, most: int | None = None) -> Iterator[tuple[bytes, int, str | None]]:
    """Yield chunks of decompressed text, the bytes of the file read so far (up to ``most``), and the damage, if any."""
    compression, used = _compression(path), 0
    make, failure = _inflater(path, compression)
    member: Any = None
    with path.open("rb") as file:
        while raw := file.read(_READ if most is None else min(_READ, most - used)):
            used += len(raw)
            if compression is None:
                yield raw, used, None
                continue
            while raw:
                if member is None:
                    if not raw.strip(b"\0"):  # padding after the last member
                        break
                    member = make()
                before = getattr(member, "copy", lambda: None)()
                try:
                    chunk = member.decompress(raw)
                except failure as error:
                    whole = b"" if before is None else _until_damage(before, raw, failure)
                    size = path.stat().st_size
                    yield whole, size, f"damaged {compression} stream ({error}); the rest of the file is lost"
                    return
                raw = b""
                if member.eof:
                    raw, member = member.unused_data, None
                yield chunk, used, None
    if member is not None:
        yield b"", used, f"truncated {compression} file; the rest of the file is lost"


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    return "zstd" if magic == b"\x28\xb5\x2f\xfd" else None


def _inflater(path: Path, compression: str | None) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a function that makes a decompressor for one member of a file, and the error of damaged data."""
    if compression != "zstd":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    zstandard = require("zstandard", f"{path} needs")
    return lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(), zstandard.ZstdError


def _until_damage(member: Any, raw: bytes, failure: type[Exception]) -> bytes:
    """Return the output of a stream before it fails. Feed it byte by byte: a failing call loses all of its output."""
    chunks = []
    try:
        for at in range(len(raw)):
            chunks.append(member.decompress(raw[at : at + 1]))
    except failure:
        pass
    return b"".join(chunks)
