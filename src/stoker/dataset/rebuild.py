"""Replace a dataset: write the new one in a directory next to it, and exchange the two.

A process killed at any moment leaves a whole dataset, old or new, and leftovers that the next process removes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.base.errors import DataError, errors_as
from stoker.base.files import clear, exchange, link_or_copy, lock_file, move, refuse_full_disk, refuse_url, sync_folder
from stoker.base.units import format_size
from stoker.dataset.manifest import BESIDE, LOCK, MANIFEST, read_manifest

_FREE = 2**20  # bytes of disk reserved for the manifest and other small files


class UnusableInput(DataError):
    """Input that the same schema can never prepare, so that finished steps are useless."""


def absent_folders(path: Path) -> list[Path]:
    """Return ``path`` and its parents that do not exist yet, the deepest first."""
    absent = []
    while not path.exists() and path != path.parent:
        absent.append(path)
        path = path.parent
    return absent


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove the directories that are empty, in this order."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise an error if the dataset in ``target`` must not be replaced.

    Raises:
        DataError: ``overwrite`` is False, or this version cannot read the dataset.
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


def replace_dataset(made: Path, target: Path) -> None:
    """Replace the old directory by a whole new one; :func:`recover` repairs it after a kill."""
    exchange(made, target, _old(target), remove_dataset)


def recover(target: Path) -> None:
    """Restore the old directory if :func:`replace_dataset` was killed between its two renames."""
    if target.name in ("", ".."):
        raise DataError(f"{target} cannot be put in place as a whole. Name a directory in it.")
    old = _old(target)
    if old.is_dir() and not target.exists():
        if (old / MANIFEST).exists():
            move(old, target)
        else:  # the killed process was deleting it
            shutil.rmtree(old, ignore_errors=True)


def remove_dataset(folder: Path) -> None:
    """Remove a dataset, if there is one.

    If the process is killed here, the next preparation deletes the leftovers, and nothing reads them as a dataset.
    """
    with contextlib.suppress(OSError):
        work = folder / ".work"
        if folder.is_dir():
            work.mkdir(exist_ok=True)
            (work / "journal.jsonl").touch()
            (folder / MANIFEST).unlink(missing_ok=True)
            clear(folder, keep=work.name)
    shutil.rmtree(folder, ignore_errors=True)


def _old(target: Path) -> Path:
    """Return the place of a dataset that is being replaced. Users call their own copies ``target``.old."""
    return target.with_name(f".{target.name}.stoker-old")


@contextmanager
def rebuilt(
    source: Path, out: Path, *, shared: Mapping[str, int], written: Collection[str], size: int, overwrite: bool,
    copy: bool,
) -> Iterator[Path]:  # fmt: skip
    """Yield a working directory next to ``out`` that replaces it when the block ends, or is removed if it fails.

    It has the ``shared`` files, as hard links or, where the disk has none, as copies. The block writes the others and,
    last, the manifest. If the process is killed within, the directory ``out``.tmp remains. It is not a dataset, and the
    next process removes it.

    Args:
        source: directory of the source dataset.
        out: directory of the new dataset.
        shared: files of the source that do not change, with their sizes in bytes.
        written: files and directories that the block writes.
        size: bytes of them.
        overwrite: replace a dataset at ``out``.
        copy: never link, because the files of the source are temporary.

    Raises:
        DataError: ``out`` is taken, another process writes it, or the disk has no room.
    """
    if out.is_symlink():
        out = out.resolve()  # write to its target, as a preparation would
    names = {Path(file).parts[0] for file in (*shared, *written)}
    folder, made = _folder(source, out, names, overwrite=overwrite)
    with (folder / LOCK).open("w") as lock:
        if lock_file(lock) is False:
            raise DataError(f"another process is writing {out}. Wait for it, or choose another directory.")
        try:
            clear(folder, keep=LOCK)
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
            refuse_full_disk(error, out)
            raise


def _folder(source: Path, out: Path, names: set[str], *, overwrite: bool) -> tuple[Path, list[Path]]:
    """Return the directory next to ``out`` for ``names``, and the directories that were created for it."""
    inside, outside = out.resolve(), source.resolve()
    if outside.is_relative_to(inside) or inside.is_relative_to(outside):
        raise DataError(f"{out} overlaps the dataset that is read. Choose another directory.")
    check_out(out, overwrite=overwrite)
    folder = out.with_name(out.name + BESIDE)
    # Only leftovers of a killed process may be removed: they have its lock, or only our names.
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if LOCK not in present and not {name.removesuffix(".tmp") for name in present} <= names:
        raise DataError(
            f"{out} is made in {folder} next to it, which has other files. Move them, or choose another directory."
        )
    made = absent_folders(folder.parent)
    with errors_as(DataError, f"{out} cannot be made", "Choose a directory that you may write to."):
        folder.mkdir(parents=True, exist_ok=True)
    return folder, made


def _put_in_place(folder: Path, out: Path, places: set[Path]) -> None:
    """Rename a whole new directory, with files linked into ``places``, to its final name."""
    for place in places | {folder}:
        sync_folder(place)
    if out.exists() and any(out.iterdir()):
        replace_dataset(folder, out)
    else:
        if out.exists():
            out.rmdir()
        move(folder, out)
    # Last: before the rename, a whole dataset without the lock would count as another process's.
    (out / LOCK).unlink(missing_ok=True)
    sync_folder(out.absolute().parent)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raise an error before the work if its dataset may not be put into this directory.

    Raises:
        DataError: it has other files, or a dataset and ``overwrite`` is False.
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
