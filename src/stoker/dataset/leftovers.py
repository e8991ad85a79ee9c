"""What is left where a run failed or was killed, and how a finished directory takes the place of an older one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from stoker.base.errors import DataError
from stoker.dataset.manifest import read_manifest

__all__ = [
    "UnusableInput",
    "absent_folders",
    "check_replaceable",
    "exchange",
    "recover",
    "remove_dataset",
    "remove_empty",
]


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
    remove_dataset(old)
    try:
        os.replace(target, old)
        os.replace(made, target)
    except BaseException:  # Ctrl-C in between
        recover(target)
        raise
    remove_dataset(old)


def recover(target: Path) -> None:
    """Put back the old directory where :func:`exchange` was killed between its two renames."""
    old = _old(target)
    if old.is_dir() and not target.exists():
        if (old / "manifest.json").exists():
            os.replace(old, target)
        else:  # the killed process was removing it
            shutil.rmtree(old, ignore_errors=True)


def remove_dataset(folder: Path) -> None:
    """Remove a dataset, if one is there: a kill in between leaves what the next preparation takes for work of its own,
    which it may remove, and nobody for a dataset."""
    with contextlib.suppress(OSError):
        work = folder / ".work"
        if folder.is_dir():
            work.mkdir(exist_ok=True)
            (work / "journal.jsonl").touch()
            (folder / "manifest.json").unlink(missing_ok=True)
            for entry in folder.iterdir():
                if entry != work:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _old(target: Path) -> Path:
    """Where a dataset waits that is being replaced. People call a copy of theirs ``target``.old."""
    return target.with_name(f".{target.name}.stoker-old")
