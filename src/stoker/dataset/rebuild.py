"""How a finished dataset takes its place: made in a directory next to it, and exchanged with what is there.

A process killed at any moment leaves a whole dataset, the old or the new one, and leftovers that the next one removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.base.errors import DataError
from stoker.base.files import link_or_copy, lock_file, refuse_url, sync_folder
from stoker.base.units import format_size
from stoker.dataset.manifest import BESIDE, LOCK, MANIFEST, read_manifest

_FREE = 2**20  # bytes of disk left for the manifest and the like


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
    """Refuse to put another dataset in the place of the one in ``target``.

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
        if (old / MANIFEST).exists():
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
            (folder / MANIFEST).unlink(missing_ok=True)
            for entry in folder.iterdir():
                if entry != work:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _old(target: Path) -> Path:
    """Return where a dataset waits that is being replaced. People call a copy of theirs ``target``.old."""
    return target.with_name(f".{target.name}.stoker-old")


@contextmanager
def rebuilt(
    source: Path, out: Path, *, shared: Mapping[str, int], written: Collection[str], size: int, overwrite: bool,
    copy: bool,
) -> Iterator[Path]:  # fmt: skip
    """Yield a working directory next to ``out`` that takes its place when the block ends, or is removed if it fails.

    The ``shared`` files are in it, as hard links where the disk allows and as copies where not. The block writes the
    others and, last, the manifest. A process killed within leaves a directory ``out``.tmp, which is no dataset and is
    removed by the next one.

    Args:
        source: directory of the dataset that the new one is made from.
        out: where the dataset is to be.
        shared: files of the source that stay as they are, with their sizes in bytes.
        written: files and directories that the block writes.
        size: bytes of them.
        overwrite: a dataset at ``out`` may be replaced.
        copy: never link: the files of the source were not made to last.

    Raises:
        DataError: ``out`` is taken, another process writes it, or the disk has no room.
    """
    if out.is_symlink():
        out = out.resolve()  # what it points to is made, as a preparation would
    names = {Path(file).parts[0] for file in (*shared, *written)}
    folder, made = _folder(source, out, names, overwrite=overwrite)
    with (folder / LOCK).open("w") as lock:
        if lock_file(lock) is False:
            raise DataError(f"another process is writing {out}. Wait for it, or choose another directory.")
        try:
            for path in folder.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if copy or source.stat().st_dev != folder.stat().st_dev:
                size += sum(shared.values())
            free = shutil.disk_usage(folder).free
            if size > free - _FREE:
                raise DataError(
                    f"the dataset needs {format_size(size)}, but the disk of {folder.parent} has {format_size(free)} "
                    "free. Free some space or choose another directory."
                )
            for file in shared:
                link_or_copy(source / file, folder / file, copy=copy)
            yield folder
            _put_in_place(folder, out, {(folder / file).parent for file in shared})
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(made)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"no room left on the disk of {out}. Free some space or choose another directory; nothing "
                    "half-written was kept."
                ) from error
            raise


def _folder(source: Path, out: Path, names: set[str], *, overwrite: bool) -> tuple[Path, list[Path]]:
    """Return the directory next to ``out`` in which ``names`` are made, and those that were made for it."""
    inside, outside = out.resolve(), source.resolve()
    if outside.is_relative_to(inside) or inside.is_relative_to(outside):
        raise DataError(f"{out} is, holds or lies in the dataset that is read. Choose another directory.")
    if out.name in ("", ".."):
        raise DataError(f"{out} cannot be put in place as a whole. Name a directory in it.")
    check_out(out, overwrite=overwrite)
    folder = out.with_name(out.name + BESIDE)
    # Only what a killed process left may be removed: it has its lock, or else only names of ours.
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if LOCK not in present and not {name.removesuffix(".tmp") for name in present} <= names:
        raise DataError(
            f"{out} is made in {folder} beside it, which holds something else. Move that, or choose another directory."
        )
    made = absent_folders(folder.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{out} cannot be made ({error.strerror}). Choose a directory that you may write to."
        ) from error
    return folder, made


def _put_in_place(folder: Path, out: Path, places: set[Path]) -> None:
    """Give a whole new directory, into whose ``places`` files were linked, its name."""
    for place in places | {folder}:
        sync_folder(place)
    if out.exists() and any(out.iterdir()):
        exchange(folder, out)
    else:
        if out.exists():
            out.rmdir()
        os.replace(folder, out)
    # Last: until it has its place, a whole dataset without the lock would be taken for somebody else's.
    (out / LOCK).unlink(missing_ok=True)
    sync_folder(out.absolute().parent)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse a directory where no dataset may be put, before the work whose result it is to hold.

    Raises:
        DataError: it holds something else, or a dataset and ``overwrite`` is False.
    """
    refuse_url(out, "this dataset")
    recover(out)
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file. Choose another directory.")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST).exists():
        raise DataError(f"{out} is not empty and no dataset. Choose another directory.")
    check_replaceable(out, overwrite=overwrite)
