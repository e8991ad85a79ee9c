"""Let one process compile a kernel while the others wait for it: at first all of them need the same ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from zlib import crc32

from stoker.ops.codegen import jit

__all__ = ["compile_once"]

PATIENCE = 10.0  # seconds; a kernel that does not compile is never saved


def compile_once() -> None:
    """Lock a kernel that is not in the cache on disk until it is saved there: a byte of this file for each kernel."""
    try:
        import fcntl
    except ImportError:  # Windows: each process compiles its own
        return
    cache: Any = jit._KernelFiles
    load, save = cache.load, cache.save
    file = os.open(Path(__file__), os.O_RDWR)  # locks go with the process, and forks inherit none

    def lock(files: Any, key: Any, how: int) -> None:
        fcntl.lockf(file, how, 1, crc32(files._name(key).encode()))

    def load_or_lock(files: Any, key: Any) -> Any:
        found, end = load(files, key), time.monotonic() + PATIENCE
        while found is None and time.monotonic() < end:
            try:
                lock(files, key, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # another process compiles it
                time.sleep(0.02)
                found = load(files, key)
        else:
            return found
        if (found := load(files, key)) is not None:  # saved before it was unlocked
            lock(files, key, fcntl.LOCK_UN)
        return found

    def save_and_unlock(files: Any, key: Any, data: Any) -> None:
        save(files, key, data)
        lock(files, key, fcntl.LOCK_UN)

    cache.load, cache.save = load_or_lock, save_and_unlock
