"""Files that last as long as the process that made them: made, found after a kill, and removed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from stoker.base.errors import ConfigError, HomeError

__all__ = ["dispose", "make_file", "no_direct"]

_PREFIX, _SUFFIX = "stoker-home-", ".rows"


def no_direct(directory: Path) -> ConfigError:
    """The error for a directory whose file system does not take direct I/O."""
    return ConfigError(
        f"the file system of {directory} does not take direct I/O (O_DIRECT). Leave direct=False, or name a directory "
        "on a local disk."
    )


def make_file(directory: str | Path | None, direct: bool) -> tuple[Path, int]:
    """A new file of our own in ``directory``: its path and descriptor. Files left there by a kill are removed.

    Args:
        directory: made if missing; None means the system's temporary directory.
        direct: open it for direct I/O (O_DIRECT).

    Raises:
        ConfigError: the file system does not take direct I/O.
        HomeError: no file can be made there.
    """
    folder = Path(tempfile.gettempdir() if directory is None else directory)
    if direct and not hasattr(os, "O_DIRECT"):
        raise no_direct(folder)
    try:
        if directory is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
        while True:
            path, fd = _open(folder, direct)
            _lock(fd)
            if path.exists():
                return path, fd
            os.close(fd)  # another process, which came to the same directory, removed it before it was locked
    except OSError as error:
        raise HomeError(
            f"a home file cannot be made in {folder}: {error.strerror}. Name a directory that you may write to."
        ) from error


def _open(folder: Path, direct: bool) -> tuple[Path, int]:
    fd, name = tempfile.mkstemp(_SUFFIX, _PREFIX, folder)
    path = Path(name)
    if not direct:
        return path, fd
    try:
        return path, os.open(path, os.O_RDWR | os.O_DIRECT)
    except FileNotFoundError:
        return path, os.dup(fd)  # removed as above
    except OSError as error:
        path.unlink(missing_ok=True)
        raise no_direct(folder) from error
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Show other processes that the file is in use, until this one ends; whether that could be done."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove home files whose process was killed: the system has released their locks."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                if _lock(fd):
                    path.unlink()
            finally:
                os.close(fd)


def dispose(fd: int, path: Path, owner: int) -> None:
    """Close the file, and remove it if this process, not a parent, is its ``owner``."""
    with contextlib.suppress(OSError):  # what the file holds is given up anyway
        os.close(fd)
    if os.getpid() == owner:  # a forked child has the descriptor, but the file is its parent's
        with contextlib.suppress(OSError):
            path.unlink()
