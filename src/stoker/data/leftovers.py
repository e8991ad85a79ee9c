"""What a run that failed takes away again: parts of no use to a later run, and directories that it made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import DataError

__all__ = ["UnusableInput", "absent_folders", "remove_empty"]


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
