"""Rows in objects at a URL that fsspec knows, such as ``s3://bucket/folder``."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError, HomeError, StokerError
from stoker.base.files import url_of
from stoker.base.remote import failure_at, file_system, has_folders
from stoker.tables.config import Slotted
from stoker.tables.stores.block_home import BlockHome
from stoker.tables.stores.home import Initial

_THREADS = 8  # objects moved at once
_PREFIX = "stoker-home"
_NOTE = "owner.txt"
_folders: dict[str, Any] = {}  # of this process -> their file systems
# At exit it needs threads, with which fsspec looks up hosts, and `atexit` comes when there are no more.
getattr(threading, "_register_atexit", atexit.register)(lambda: _remove(*_folders))
#: file systems on which rows cannot be replaced
_REFUSED = {
    "http": "nothing can be written there",
    "https": "nothing can be written there",
    "hf": "it keeps each write",
    "::": "a chain of file systems may give back an older object",
}


class RemoteHome(BlockHome):
    """Blocks of rows as objects in a new folder at ``url``, removed by :meth:`close` or at exit.

    The folder is of no use to any other run: rows leave through ``read``, into a checkpoint. What a kill leaves is
    removed by the next store that is made at ``url`` on the same machine.
    """

    kind = "remote"

    def __init__(self, initial: Initial, state: Mapping[str, str], *, url: str) -> None:
        super().__init__(initial, state)
        self.url = url.rstrip("/")
        if why := _REFUSED.get("::" if "::" in self.url else self.url.partition("://")[0]):
            raise ConfigError(
                f"rows cannot be kept at {url}: {why}. Name a directory, or a store of objects such as s3://bucket/folder."
            )
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="stoker-remote")
        machine = _machine()
        with self._named("kept"):
            self.fs, root = file_system(self.url)
            self.folder = f"{root}/{_PREFIX}_{machine}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
            self._sweep(root, machine)
            if has_folders(self.fs):
                self.fs.makedirs(self.folder, exist_ok=True)
            note = f"Rows of process {os.getpid()} on {machine}. When it has ended, this folder may be removed.\n"
            self.fs.pipe_file(f"{self.folder}/{_NOTE}", note.encode())
            if self.fs.cat_file(f"{self.folder}/{_NOTE}") != note.encode():
                raise OSError("what is read is not what was written")
        _folders[self.folder] = self.fs
        self._remove = weakref.finalize(self, _remove, self.folder)

    @classmethod
    def of(cls, strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> RemoteHome:
        if (url := url_of(strategy.path)) is None:
            raise ConfigError(f"home='remote' needs a URL such as s3://bucket/folder as path, not {strategy.path!r}.")
        return cls(initial, state, url=url)

    def load(self, blocks: Sequence[int]) -> list[bytes]:
        size = self.block_rows * self.row_bytes  # s3fs asks for it first where nobody says
        with self._named("read"):
            return self._each(lambda block: self.fs.cat_file(self._name(block), start=0, end=size), blocks)

    def save(self, blocks: Mapping[int, bytes]) -> None:
        with self._named("written"):
            self._each(lambda item: self.fs.pipe_file(self._name(item[0]), item[1]), blocks.items())

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
        self._remove()

    def _each(self, move: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        moves = [self._pool.submit(move, item) for item in items]
        try:
            return [each.result() for each in moves]
        finally:  # none goes on behind an error: it might overwrite what is stored next
            for each in moves:
                each.cancel()
            wait(moves)

    def _name(self, block: int) -> str:
        return f"{self.folder}/{block:09d}.rows"

    @contextlib.contextmanager
    def _named(self, action: str) -> Iterator[None]:
        """Turn failures of fsspec into errors that name the URL."""
        try:
            yield
        except StokerError:
            raise
        except Exception as error:
            again = "" if action == "kept" else " Then resume from the last checkpoint."
            if not isinstance(error, FileNotFoundError):
                raise HomeError(f"rows cannot be {action}: {failure_at(self.url, error)}{again}") from error
            if action == "read":
                gone = f"an object is gone ({error}). Keep other programs and expiry rules away from there."
            else:
                gone = f"there is no such bucket, container or folder ({error}). Make it, or correct the URL."
            raise HomeError(f"rows at {self.url} cannot be {action}: {gone}{again}") from error

    def _sweep(self, root: str, machine: str) -> None:
        """Remove folders that killed processes of this machine left. An error of ``ls`` would make a cycle."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            for path in self.fs.glob(f"{root}/{_PREFIX}_{machine}_*"):
                if not _lives(str(path).rstrip("/").split("_")[-2]):
                    self.fs.rm(path, recursive=True)

    def _details(self) -> str:
        return f", in objects at {self.url}"


def _machine() -> str:
    """Return a name of the space of process numbers: of a container, since this machine started."""
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
    space = ""
    with contextlib.suppress(OSError):  # only Linux tells
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return f"{host}-{hashlib.sha256(space.encode()).hexdigest()[:8]}"


def _lives(process: str) -> bool:
    """Return whether a process of this machine is running, or may be."""
    if sys.platform == "win32" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _remove(*folders: str) -> None:
    """Remove folders of this process. What fails, as it does in a thread of fsspec, is tried again at exit."""
    for folder in folders:
        if folder.split("_")[-2] == str(os.getpid()):  # not in a forked child
            with contextlib.suppress(Exception):  # the next store there removes it
                _folders[folder].invalidate_cache()
                _folders[folder].rm(folder, recursive=True)
                del _folders[folder]
