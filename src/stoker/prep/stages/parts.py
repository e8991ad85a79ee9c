"""Work files of a preparation: typed parts, rows between feature passes, and the journal of finished steps.

A part has the rows of one block of one file as plain arrays. It is written to a temporary file and renamed; then its
size and checksum go to the journal. A resumed run uses a part only if the journal has it and its bytes agree: after a
loss of power a file may exist without its bytes. A run does not check parts that it has written itself.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import numpy.typing as npt
import polars as pl

from stoker.base.engine import full_disk
from stoker.base.errors import DataError
from stoker.base.files import clear, lock_file, move
from stoker.dataset.shards import chunks_of, tensor_views

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]


def write_part(path: Path, arrays: Arrays) -> dict[str, int]:
    """Write arrays to ``path``, as safetensors; return its size and checksum for the journal."""
    with atomic_path(path) as temporary:
        with temporary.open("wb") as file:
            file.writelines(chunks_of(arrays))
        return checksum(temporary)


def sibling(path: Path) -> Path:
    """Return the path of the keys of a file of rows."""
    return path.with_suffix(".part")


def write_rows(path: Path, rows: pl.DataFrame, keys: Mapping[str, Array]) -> dict[str, Any]:
    """Write rows to ``path`` and their keys to its sibling; return the record for the journal."""
    record = {"made": rows.height, "keys": write_part(sibling(path), keys)}
    with atomic_path(path) as temporary, full_disk():
        rows.write_parquet(temporary, compression="lz4", row_group_size=2**17)
    return {**checksum(path), **record}


@contextmanager
def atomic_path(path: Path, work: Path | None = None) -> Iterator[Path]:
    """Yield a unique temporary path, next to ``path`` or in ``work``; rename it to ``path`` at the end.

    The name is unique because two workers may write the same file.
    """
    name = uuid4().hex
    temporary = (
        path.with_name(f"{path.name}.{name}.tmp") if work is None else work / name / path.parent.name / path.name
    )
    try:
        yield temporary
        path.parent.mkdir(parents=True, exist_ok=True)
        move(temporary, path, sync=work is not None)  # with it the file belongs to the dataset
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    """Return True if a file of an earlier run has the size and the checksum of its journal record."""
    return path.exists() and checksum(path) == {"bytes": record["bytes"], "crc": record["crc"]}


def checksum(path: Path) -> dict[str, int]:
    """Return the size and the checksum of a finished part."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return {"bytes": size, "crc": crc}


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """A finished block: the file of its rows, and the position of its rows and lines in the log."""

    path: Path
    index: int  # number of the part
    file: int  # number of the source file
    name: str = ""  # of the source file, for messages and the quarantine
    start: int  # number of rows in earlier parts
    rows: int
    lines_before: int = 0  # number of lines of the file in earlier parts
    lines: int = 0
    bad: int = 0
    broken: bool = False  # the file breaks off at the last of the lines

    @property
    def rows_path(self) -> Path:
        """The file of the rows whose keys these are (:func:`write_rows`)."""
        return self.path.with_suffix(".parquet")

    @property
    def bad_path(self) -> Path:
        """The file of bad lines, if there are any."""
        return self.path.with_suffix(".bad")

    def open(self) -> AbstractContextManager[Arrays]:
        """Map the arrays with :func:`open_part`."""
        return open_part(self.path)


@contextmanager
def open_part(path: Path) -> Iterator[Arrays]:
    """Map the read-only arrays that :func:`write_part` wrote; release their pages at the end.

    Arrays may be used after the block: their pages are then loaded again.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield tensor_views(mapped)[0]
    finally:
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)


class Journal:
    """Finished steps of a preparation, one JSON line each, in ``directory``/journal.jsonl.

    Args:
        directory: the work directory; made if missing.
        fingerprint: all that the work depends on. Work with another fingerprint is deleted.
        resume: False deletes earlier work.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, Any], *, resume: bool = True) -> None:
        self.directory = directory
        self.done: dict[str, dict[str, Any]] = {}
        path = directory / "journal.jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory)
        kept = self._load(path, fingerprint) if resume and path.exists() else 0
        if not kept:
            clear(directory, keep="lock")
        self._file = path.open("r+b" if kept else "wb")
        self._file.seek(kept)
        self._file.truncate()
        if not kept:
            self._append({"fingerprint": dict(fingerprint)})

    def _load(self, path: Path, fingerprint: Mapping[str, Any]) -> int:
        """Read finished steps; return the length of the whole lines, or 0 if the fingerprint differs."""
        raw = path.read_bytes()
        kept = 0
        for line in raw.splitlines(keepends=True):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if not isinstance(entry, dict):
                break
            if kept == 0 and entry.get("fingerprint") != json.loads(json.dumps(fingerprint)):
                return 0
            if "step" in entry:
                self.done[entry["step"]] = entry
            kept += len(line)
        return kept

    def add(self, step: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Record a finished step."""
        full = {"step": step, **entry}
        self._append(full)
        self.done[step] = full
        return full

    def finished(self, step: str, path: Path | None = None) -> dict[str, Any] | None:
        """Return the record of a step if it is finished and its file, if any, is whole."""
        entry = self.done.get(step)
        return entry if entry is None or path is None or is_whole(path, entry) else None

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Release the directory."""
        self._file.close()
        self._lock.close()


def _lock(directory: Path) -> IO[bytes]:
    file = (directory / "lock").open("wb")
    if lock_file(file) is False:
        file.close()
        raise DataError(
            f"another stoker prepare is writing to {directory.parent}. Wait for it, or choose another directory."
        )
    return file  # on file systems without locks, the user must not run two preparations into one directory
