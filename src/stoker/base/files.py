"""Files that appear whole or not at all, and are on disk when they do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from stoker.base.errors import ConfigError, DataError

EDGE = 2**20  # bytes at the begin and the end of a log, by which it is recognized
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+(?:::[a-zA-Z][a-zA-Z0-9+.-]+)*):/(?=[^/]|/)")
SEAL = "sha256"  # key of a file of JSON values: the hash of all others
PASSING: set[Path] = set()  # directories that are deleted when this process ends


def passes(path: str | Path) -> bool:
    """Return True if a file is in a directory that ends with this process, so need not survive a power loss."""
    # A copy: another thread or the garbage collector may change the set meanwhile.
    return any(Path(path).is_relative_to(folder) for folder in PASSING.copy())


def url_of(path: object) -> str | None:
    """Return a path that is a URL as text, or None for a local path.

    ``pathlib`` shortens ``s3://bucket/key`` to ``s3:/bucket/key``, which counts as a URL, too.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or (found := _SCHEME.match(text)) is None:
        return None
    if isinstance(path, str):
        return path if "://" in path else None
    slashes = ":///" if found[1] in ("file", "local") else "://"
    return found[1] + slashes + text[found.end() :].lstrip("/")


def refuse_url(path: object, what: str) -> None:
    """Raise :class:`ConfigError` if a path is a URL; ``what`` names what is to be written there."""
    if (url := url_of(path)) is not None:
        raise ConfigError(f"{what} cannot be written to a URL ({url}). Name a local path, and copy it from there.")


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that appears under ``path`` complete and on disk when the block ends, or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            if not passes(path):
                os.fsync(file.fileno())
        move(partial, path, sync=True)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        refuse_full_disk(error, f"{path.parent} while writing {path.name}")
        if isinstance(error, OSError) and (error.filename == str(partial) or error.errno == errno.EFBIG):
            error.filename = str(path)  # the name that the caller gave
        raise


def refuse_full_disk(error: BaseException, place: object) -> None:
    """Raise DataError if an error, of a writer that removes its files, says that the disk of ``place`` is full."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        raise DataError(
            f"no room left on the disk of {place}. Free some space or choose another directory; nothing half-written "
            "was kept."
        ) from error


def move(source: Path, target: Path, *, sync: bool = False) -> None:
    """Rename a file or a directory at once, in place of a file of that name; ``sync`` lets it survive a power loss."""
    os.replace(source, target)
    if sync:
        sync_folder(target.absolute().parent)


def clear(folder: Path, *, keep: str) -> None:
    """Delete everything in a directory but the entry that is called ``keep``."""
    for entry in folder.iterdir():
        if entry.name != keep:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def exchange(made: Path, target: Path, old: Path, remove: Callable[[Path], None]) -> None:
    """Put a whole new directory in the place of another, which is ``old`` meanwhile and then removed.

    A kill between the two renames leaves ``old`` and no ``target``, so the owner must look for ``old``.
    """
    remove(old)
    try:
        if target.exists():
            move(target, old)
        move(made, target, sync=True)
    except BaseException:  # Ctrl-C between the renames
        if old.exists() and not target.exists():
            move(old, target)
        raise
    remove(old)


def check_name(path: Path) -> None:
    """Raise :class:`DataError` unless a path is UTF-8: manifests, messages and other libraries name it."""
    if (shown := os.fsencode(path).decode(errors="backslashreplace")) != str(path):
        raise DataError(f"{shown}: this path is not UTF-8. Rename the file or its directory.")


def check_target(path: str | Path) -> None:
    """Raise an error before the work if :func:`atomic_file` could not write its result."""
    refuse_url(path, Path(path).name)
    path = Path(path)
    place = next(each for each in (*path.absolute().parents, path) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: {place} is not a writable directory. Choose another place.")


def sync_folder(path: str | Path) -> None:
    """Flush the names in a directory to disk, so that files renamed into it survive a power loss."""
    if os.name != "posix" or passes(path):
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock_file(file: IO[Any] | int, *, wait: bool = False) -> bool | None:
    """Lock an open file against other processes until it is closed here, or this process ends in any way.

    Return False if another process has the lock, None if the system or the disk has no such locks.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def canonical_json(value: Any) -> str:
    """Return a value as JSON with sorted keys and no spaces, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_json(value: Any) -> str:
    """Return the sha256 of the canonical JSON of a value, such as the manifest's ``schema_hash`` of a schema."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for a file of JSON, with a checksum by which :func:`unseal` finds that a character was altered."""
    known = json.loads(json.dumps({name: value for name, value in values.items() if name != SEAL}))  # as they are read
    return {SEAL: hash_json(known), **known}


def unseal(text: str | bytes) -> Any:
    """Return the values of a file of JSON without their checksum, which files of earlier versions lack.

    A text that is not JSON, or was altered, is a ValueError.
    """
    values = json.loads(text)
    if isinstance(values, dict) and SEAL in values and values.pop(SEAL) != hash_json(values):
        raise ValueError("it was altered: its sha256 is not that of its values")
    return values


def hash_file(path: str | Path) -> tuple[int, str]:
    """Return the size in bytes and the sha256 of a file, which is read in blocks."""
    with Path(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def hash_edge(path: str | Path, begin: int, size: int) -> str:
    """Return the sha256 of ``size`` bytes of a file, or as many as it has, from ``begin`` on."""
    with Path(path).open("rb") as file:
        file.seek(begin)
        return hashlib.sha256(file.read(size)).hexdigest()


def file_identity(file: BinaryIO) -> tuple[int, ...]:
    """Return numbers that change with the content of a file: device, inode, bytes, time of last change."""
    state = os.fstat(file.fileno())
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> None:
    """Link a file under another name; copy it if ``copy``, or if hard links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if copy:
            raise OSError
        os.link(source, target)
    except OSError:
        with source.open("rb") as old, atomic_file(target) as new:
            shutil.copyfileobj(old, new, 2**22)
