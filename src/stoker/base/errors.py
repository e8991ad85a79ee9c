"""What goes wrong, in words a user can act on: the number, the cause, the remedy."""

from __future__ import annotations

import importlib
from typing import Any


class StokerError(ValueError):
    """Base of every error that a user can mend. The command line prints it without a traceback.

    Args:
        message: the number, the cause, the remedy.
        settings: names of parameters in ``message`` that the command line shows as its options, ``epochs`` as
            ``--epochs``. Names with an underscore need not be given, except in errors about files.
    """

    def __init__(self, message: str = "", *, settings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.settings = settings


class ConfigError(StokerError):
    """A setting that cannot work, or settings that contradict each other."""


class SchemaError(StokerError):
    """A schema file or recipe that does not describe the data."""


class DataError(StokerError):
    """An input file or dataset directory that cannot be read as what it claims to be."""


class CheckpointError(StokerError):
    """A checkpoint that is damaged, incomplete, or belongs to another model."""


class HomeError(StokerError):
    """A home of rows that fails while in use: its file shrank, its disk is full, its device reports an error."""


class DependencyError(StokerError, ImportError):
    """An optional package is missing; the message says which and how to install it."""


#: module -> the extra of this package that installs it
EXTRAS = {
    "fsspec": "remote", "matplotlib": "plot", "networkit": "communities", "tensorboard": "tensorboard",
    "yaml": "yaml", "zstandard": "zstd",
}  # fmt: skip


def install(module: str) -> str:
    """Return the command that installs a module."""
    return f"pip install 'stoker[{EXTRAS[module]}]'" if module in EXTRAS else f"pip install {module}"


def require(package: str, what: str, remedy: str | None = None) -> Any:
    """Import an optional package and return its module.

    Args:
        package: to import.
        what: the beginning of the message, such as ``"the report needs"``.
        remedy: what to run; None: what :func:`install` says.

    Raises:
        DependencyError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DependencyError(f"{what} {package}, which is not installed. Run: {remedy or install(package)}") from error
