"""What is left where a run failed or was killed, and how a finished directory takes the place of an older one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from stoker.data.dataset import read_manifest
from stoker.errors import DataError

__all__ = ["UnusableInput", "absent_folders", "check_replaceable", "exchange", "recover", "remove_empty"]


class UnusableInput(DataError):
    """Input that the same schema can never prepare, so that finished parts are of no use."""


def absent_folders(path: Path) -> list[Path]:
    """``path`` and its parents that are not there yet, the deepest first."""
    absent = []
    while not path.exists() and path != path.parent:
        absent.append(path)
        path = path.parent
    return absent


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of the directories that are empty, in this order."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Whether another dataset may take the place of the one in ``target``.

    Raises:
        DataError: nobody asked for that, or it is none that this version knows.
    """
    if not overwrite:
        raise DataError(
            f"{target} already holds a dataset. Choose another directory, or pass overwrite=True to replace it.",
            settings=("overwrite",),
        )
    try:
        read_manifest(target)
    except DataError as error:
        raise DataError(f"{target} is not overwritten: {error} Choose another directory.") from error


def exchange(made: Path, target: Path) -> None:
    """Put a whole new directory in the place of the old one; a kill leaves what :func:`recover` mends."""
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(target, old)
        os.replace(made, target)
    except BaseException:  # Ctrl-C in between
        recover(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(target: Path) -> None:
    """Put back the old directory where :func:`exchange` was killed between its two renames."""
    old = _old(target)
    if old.is_dir() and not target.exists():
        os.replace(old, target)


def _old(target: Path) -> Path:
    return target.with_name(target.name + ".old")
