"""Compile a kernel with Numba, and keep its machine code on disk where any directory can be written.

Numba keeps compiled kernels in ``NUMBA_CACHE_DIR``, next to the module, or in the user's cache directory. If it can
write none of them, as in a read-only container, it raises. Then a private directory under the temporary one is
used. If that fails, too, every process compiles its own kernels.
"""

from __future__ import annotations

import gc
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, TypeVar

import numba
from numba.core import config, event
from numba.core.caching import IndexDataCacheFile
from numba.core.options import DefaultOptions

from stoker.base.progress import compiling

# Without reference counts of arrays, kernels compile a fifth faster; a function called in a loop saves 10 ns an array.
PLAIN: dict[str, Any] = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
INNER = PLAIN | dict.fromkeys(["no_cpython_wrapper", "no_cfunc_wrapper"], True)  # a call from Python crashes
USED = ("base", "ops", "dataset", "optim")  # packages that kernels of any package may use
TEMPORARY = "stoker-kernels-"  # and the number of the user: the directory of the last resort
T = TypeVar("T")
_lock = Lock()  # for numba's CACHE_DIR, which all threads share


class _Compilations(event.Listener):
    """Report each kernel that Numba compiles; loading one from the cache is not an event.

    Meanwhile Python does not collect garbage: a compiler makes much that lives, and looking through it takes a fifth of
    the time.
    """

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}
        self._running = 0  # in all threads, nested ones included
        self._lock = Lock()
        self._collects = False  # whether Python did when the first began

    def on_start(self, event: Any) -> None:
        with self._lock:
            if self._running == 0:
                self._collects = gc.isenabled()
                gc.disable()
            self._running += 1
        block = compiling(event.data["dispatcher"].py_func.__name__.strip("_"))
        block.__enter__()
        self._open.setdefault(get_ident(), []).append(block)

    def on_end(self, event: Any) -> None:
        self._open[get_ident()].pop().__exit__(None, None, None)
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._collects:
                gc.enable()


event.register("numba:compile", _Compilations())  # type: ignore[no-untyped-call]


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile ``function`` as ``numba.njit`` does, without the interpreter's lock and with a cache on disk."""
    if function is None:
        return partial(jit, **options)
    return cached(lambda keep: stamped(numba.njit(nogil=True, cache=keep, **options)(function)))


@cache
def package_stamp(package: str) -> str:
    """Return a text that changes with any module that a kernel of this package may use, by its size and time.

    Numba checks only the file of a kernel, but kernels call functions of other modules, too.
    """
    root = Path(__file__).parents[2]
    used = sorted(path for name in {*USED, package} for path in (root / name).rglob("*.py"))
    found = [(str(path.relative_to(root)), path.stat()) for path in used]
    return sha256(repr([(name, of.st_size, of.st_mtime_ns) for name, of in found]).encode()).hexdigest()


class _KernelFiles(IndexDataCacheFile):
    """The files of a function's kernels: each is named by a hash of its key, and holds the key.

    Numba numbers them. Two processes that save at once take the same number, and the index then names one's kernel for
    the other's key: wrong results, from then on.
    """

    def save(self, key: Any, data: Any) -> None:
        with suppress(OSError):  # the disk is full: the kernel is in memory, and other processes compile it again
            self._save_data(self._name(key), (self._source_stamp, key, data))  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:
        try:
            stamp, found, data = self._load_data(self._name(key))  # type: ignore[no-untyped-call]
        except OSError:
            return None
        return data if (stamp, found) == (self._source_stamp, key) else None

    def _name(self, key: Any) -> str:
        key = sha256(repr((numba.__version__, key)).encode()).hexdigest()[:20]
        return f"{self._index_name.removesuffix('.nbi')}.{key}.nbc"


def stamped(kernel: T) -> T:
    """Make a kernel's cache on disk safe among processes, and valid only until a module that it uses changes."""
    kept = getattr(getattr(kernel, "_cache", None), "_cache_file", None)  # Numba has no public way
    if kept is not None:
        kept.__class__ = _KernelFiles
        module = (getattr(kernel, "py_func", None) or kernel._pyfunc).__module__  # type: ignore[attr-defined]
        package = module.split(".")[1] if module.startswith("stoker.") else ""  # another's: all modules
        kept._source_stamp = (kept._source_stamp, package_stamp(package))
    return kernel


def cached(compile: Callable[[bool], T]) -> T:
    """Return ``compile(True)``, True asking Numba for a cache; ``compile(False)`` if no directory can be written.

    >>> cached(lambda keep: numba.njit(cache=keep)(_nothing))()
    """
    try:
        return compile(True)
    except RuntimeError as error:
        if not _has_no_cache(error):
            raise
    folder = _temporary()
    if folder is None:
        return compile(False)
    with _lock:
        settings: Any = config
        before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
        try:
            return compile(True)
        except RuntimeError as error:
            if not _has_no_cache(error):
                raise
        finally:
            settings.CACHE_DIR = before
    return compile(False)


def cache_directory() -> Path | None:
    """Return the directory of compiled kernels; None if every process compiles its own."""
    return Path(path) if (path := jit(_nothing).stats.cache_path) else None


def _nothing() -> None:
    pass


def _has_no_cache(error: RuntimeError) -> bool:
    return "no locator available" in str(error)


@cache
def _temporary() -> Path | None:
    """Make a directory under the temporary one that only this user can write; None where that cannot be.

    Numba unpickles what it finds in a cache, so anyone who can write there can run code as this user.
    """
    try:
        user = os.geteuid() if hasattr(os, "geteuid") else os.getenv("USERNAME", "user")
        folder = Path(tempfile.gettempdir()) / f"{TEMPORARY}{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    foreign = hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or bool(found.st_mode & 0o022))
    return folder if stat.S_ISDIR(found.st_mode) and not foreign else None
