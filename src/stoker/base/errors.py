"""Errors, in words a user can act on: the number, the cause, the remedy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class StokerError(ValueError):
    """Base of every error that a user can fix. The command line prints it without a traceback.

    >>> try:
    ...     stoker.TrainConfig(epochs=-1)
    ... except stoker.StokerError as error:
    ...     print(type(error).__name__, error)
    ConfigError epochs is -1; it must be at least 1, or left out.

    Args:
        message: the number, the cause, the remedy.
        settings: names of parameters in ``message`` that the command line shows as its options, ``epochs`` as
            ``--epochs``. Names with an underscore need not be given, except in errors about files.
    """

    def __init__(self, message: str = "", *, settings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.settings = settings


class ConfigError(StokerError):
    """A setting that cannot work, or settings that contradict each other.

    >>> stoker.OneCycle(steps=10, share=2.0)
    Traceback (most recent call last):
    stoker.base.errors.ConfigError: OneCycle(share=2.0): the rise must take a share between 0 and 1 of the steps.
    """


class ArgumentError(ConfigError, TypeError):
    """An argument that a function does not take."""


class SchemaError(StokerError):
    """A schema file or recipe that does not describe the data.

    >>> stoker.FeatureSpec.from_sizes(1, [10]).index("price")
    Traceback (most recent call last):
    stoker.base.errors.SchemaError: there is no feature 'price'; there are C1.
    """


class DataError(StokerError):
    """An input file or dataset directory that does not hold what it should.

    >>> stoker.Dataset("gone")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    stoker.base.errors.DataError: there is no dataset at gone: it does not exist. Make one with: ...
    """


class CheckpointError(StokerError):
    """A checkpoint that is damaged, incomplete, or belongs to another model.

    >>> stoker.load("gone")
    Traceback (most recent call last):
    stoker.base.errors.CheckpointError: gone does not exist.
    """


class HomeError(StokerError):
    """A backing store that fails while in use: its file shrank, its disk is full, its device reports an error."""


class DependencyError(StokerError, ImportError):
    """An optional package is missing; the message says which and how to install it."""


@contextmanager
def errors_as(
    kind: type[StokerError], what: str, remedy: str = "", caught: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Raise ``kind`` for an error of the block, with what failed, the reason that the error gives, and the remedy.

    >>> with errors_as(DataError, "a.tsv cannot be read", "Check its path."):
    ...     open("nowhere/a.tsv")
    Traceback (most recent call last):
    stoker.base.errors.DataError: a.tsv cannot be read (No such file or directory). Check its path.
    """
    try:
        yield
    except caught as error:
        kept = type(error).__name__ + ": " if isinstance(error, KeyError | TypeError | AttributeError) else ""
        reason = getattr(error, "strerror", None) or kept + " ".join(str(error).split()).rstrip(".")
        raise kind(f"{what} ({reason}). {remedy}".rstrip()) from error


#: module -> the extra of this package that installs it
EXTRAS = {
    "confluent_kafka": "stream", "fsspec": "remote", "matplotlib": "plot", "networkit": "communities",
    "prometheus_client": "serve", "tensorboard": "tensorboard",
    "usearch": "retrieval", "yaml": "yaml", "zstandard": "zstd",
}  # fmt: skip


def install(module: str) -> str:
    """Return the command that installs a module."""
    return f"pip install 'stoker[{EXTRAS[module]}]'" if module in EXTRAS else f"pip install {module}"


def load(module: str, what: str) -> Any:
    """Import a module of Stoker for ``what``; raise DependencyError if it needs a package that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_package(error, what) from error


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names load when first used; ``homes``: module -> its names."""
    home = {name: f"{package}.{module}" for module, names in homes.items() for name in names.split()}

    def named(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(sys.modules[package]).setdefault(name, getattr(load(home[name], f"{package}.{name}"), name))

    return named


def missing_package(error: Exception, what: str) -> Exception:
    """Return a DependencyError if a package is not installed that ``what`` needs, else the error itself."""
    package = (error.name or "stoker").split(".")[0] if isinstance(error, ModuleNotFoundError) else "stoker"
    message = f"{what} needs {package}, which is not installed. Run: {install(package)}"
    return error if package == "stoker" else DependencyError(message)


def require(package: str, what: str, remedy: str | None = None) -> Any:
    """Import an optional package and return its module; ``what`` begins the message, such as ``"the report needs"``."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DependencyError(f"{what} {package}, which is not installed. Run: {remedy or install(package)}") from error
