"""Runs at URLs: trained in a local folder of the cache, and uploaded after each checkpoint and at the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from stoker.base import remote
from stoker.base.errors import ConfigError, StokerError
from stoker.training.files.rundir import RunDirectory

__all__ = ["Upload", "local_run"]

Upload: TypeAlias = Callable[[], str | None]  # uploads what is new; returns what went wrong, in words
_DONE = ".uploaded"  # in the local folder of a run that is whole at its URL

Place: TypeAlias = "str | Path | None"


@contextmanager
def local_run(out: Place, resume: Place) -> Iterator[tuple[Place, Place, Upload]]:
    """Yield local paths for the run to make or to continue, and a function that uploads it; errors name its URL.

    Raises:
        ConfigError: there is something at the URL of a new run. DataError: the URL cannot be read or written, or has
            no run to continue.
    """
    url = remote.url_of(resume if out is None else out)
    if url is None or (out is not None and resume is not None):
        yield out, resume, lambda: None
        return
    folder = remote.output_folder(url)
    if out is not None:
        if not remote.is_empty(url):
            raise ConfigError(
                f"{url} is not empty. Continue the run there with --resume {url}, or choose another --out."
            )
        if (folder / _DONE).exists():  # of a run that is no longer at the URL
            shutil.rmtree(folder)
    else:
        _download(url, folder)

    def upload() -> str | None:
        try:
            remote.upload_run(folder, url, quiet=True)
        except StokerError as error:
            return str(error)
        return None

    try:
        yield (folder, None, upload) if out is not None else (None, folder, upload)
    except BaseException as error:
        remote.rename_in(error, {str(folder): url})
        if (folder / "config.json").is_file():
            with suppress(StokerError):
                remote.upload_run(folder, url)
        raise
    remote.upload_run(folder, url)
    (folder / _DONE).touch()


def _download(url: str, folder: Path) -> None:
    """Copy the run at a URL to its local folder, which may hold an earlier state of it."""
    if remote.is_empty(url) and (folder / "config.json").is_file():  # killed before its first upload
        return
    folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(folder).locked():
        (folder / _DONE).unlink(missing_ok=True)
        remote.fetch_run(url, folder)
