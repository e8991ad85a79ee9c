"""Files at URLs such as s3://, gs://, https:// and hf://, by fsspec.

Input is first copied to a local cache; output is written locally and then uploaded. All else works on local paths.

A folder with a ``manifest.json`` (a dataset, a checkpoint) is sealed: the manifest names its files with their sizes and
checksums. It is uploaded last and removed first, so a folder with a manifest is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.base.errors import DataError, DependencyError, StokerError, errors_as, require
from stoker.base.files import hash_file, lock_file, move
from stoker.base.files import url_of as url_of
from stoker.base.progress import Bars

_THREADS = 8  # files copied at once
_CHANGES = (
    *("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "created", "generation", "md5Hash"),
    *("content_md5", "Content-MD5", "blob_id"),
)  # keys of file systems that change when the content of a file changes
_HEAD = "head.json"  # of a run that was updated
_MANIFEST = "manifest.json"
_GROWING = ("metrics.jsonl", "tensorboard/")  # files of a run that have not changed if their size has not
_SEALED = ("checkpoints/", "updates/")  # folders of a run, of folders with a manifest
_MARK = "upload.unfinished"  # in a folder that is being uploaded
#: local copy of a run -> its head and the sizes of manifests: while these stay, a follower reads no manifest again
_fetched: dict[Path, object] = {}
_copied: dict[str, str] = {}  # local copy of a dataset, run or checkpoint -> its URL
_OTHER_CACHE = "Let STOKER_CACHE name a folder for copies."
_MAKES_FOLDERS = ("file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "memory")


def cache_folder() -> Path:
    """Return the folder of local copies: ``STOKER_CACHE``, else ``stoker`` in the user's cache directory."""
    if named := os.environ.get("STOKER_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoker"


def expand_url(url: str) -> list[str]:
    """Return the URLs of the files that a URL or a glob pattern names, in any order."""
    scheme = url.split("://", 1)[0]
    pattern = "*[" if scheme in ("http", "https") else "*?["  # ? begins the query of a web address
    if not any(letter in url for letter in pattern):
        return [url]
    with _files(url) as remote:
        found = [name for name, info in remote.fs.glob(remote.root, detail=True).items() if info["type"] == "file"]
        if not found:
            raise DataError(f"there is no file {url!r}. Check the URL or the pattern.")
        return [str(remote.fs.unstrip_protocol(name)) for name in found]


def fetch_file(url: str) -> Path:
    """Return a local copy of a file; download it again only if its size, tag or time has changed."""
    with _files(url) as remote:
        info = remote.fs.info(remote.root)
        if info.get("type") == "directory":
            raise DataError(f"{url} is a directory. Name its files, for example '{url.rstrip('/')}/*'.")
        identity = [info.get("size"), *(str(info[key]) for key in _CHANGES if key in info)]
        folder = cache_folder() / "files" / _short(url) / _short(json.dumps(identity))
        target = folder / (_basename(url) or "file")
        with _locked(folder):
            if not target.is_file():
                remote.download([("", target, info.get("size"), None)])
                os.utime(target, (946_684_800,) * 2)  # the path identifies the file: the same time after a new download
        return target


def fetch_sealed(url: str, folder: Path | None = None) -> Path:
    """Return a local copy of a folder with a manifest, each file checked by the checksum in the manifest.

    ``folder``: the copy; None: one of the cache, which is named by the manifest's hash.
    """
    with _files(url) as remote:
        text = remote.read(_MANIFEST)
        if text is None:
            raise DataError(
                f"{url} has no {_MANIFEST}: it is neither a dataset nor a checkpoint, or its upload is unfinished."
            )
        if folder is None:  # else one of a run, which is known
            folder = _kept(url, text)
            _copied[str(folder)] = remote.url
        with _locked(folder):
            if (folder / _MANIFEST).is_file() and (folder / _MANIFEST).read_bytes() == text:
                return folder
            partial = folder.with_name(folder.name + ".part")
            files = _sealed_files(url, text)
            there = [(name, size) for name, (size, _) in files.items() if (partial / name).is_file()]
            kept = {name for name, size in there if (partial / name).stat().st_size == size}
            remote.download([(name, partial / name, *files[name]) for name in files if name not in kept])
            if (request := remote.read(".request")) is not None:  # by which a preparation recognises its dataset
                (partial / ".request").write_bytes(request)
            (partial / _MANIFEST).write_bytes(text)
            shutil.rmtree(folder, ignore_errors=True)
            move(partial, folder)
    return folder


def fetch_run(url: str, folder: Path | None = None) -> Path:
    """Return a local copy of the current state of a run, or of one of its checkpoints."""
    run, _, step = url.rstrip("/").rpartition("/checkpoints/")
    with _files(run or url) as remote:
        if not run and remote.read(_MANIFEST) is not None:
            return fetch_sealed(url)
        folder = folder or cache_folder() / "runs" / _short(remote.url) / (_basename(remote.url) or "run")
        _copied[str(folder)] = remote.url
        names = remote.names()
        sealed = re.compile(rf"(checkpoints/(?:step|update)_[\d_]+|updates/\d+)/{_MANIFEST}")
        wanted = {found[1] for name in names if (found := sealed.fullmatch(name))}
        if "config.json" not in names and not wanted:
            raise DataError(f"{url} is not a run, checkpoint or dataset: it has no config.json and no {_MANIFEST}.")
        same = {
            name for name, size in names.items() if name.startswith(_GROWING)
            and (path := folder / name).is_file() and path.stat().st_size == size
        }  # fmt: skip
        loose = [name for name in names.keys() - same - {_MARK, ".lock"} if not name.startswith(_SEALED)]
        with _locked(folder):  # logs and settings are small and may have changed
            if _HEAD not in names:  # its updates were taken back
                (folder / _HEAD).unlink(missing_ok=True)
            remote.download([(name, folder / name, names[name], None) for name in loose])
        wanted = {f"checkpoints/{step}"} if run and not step.startswith("update_") else wanted  # a segment needs others
        head = (folder / _HEAD).read_bytes() if _HEAD in names else b""
        state = head, {name: names[f"{name}/{_MANIFEST}"] for name in wanted}
        if not head or _fetched.get(folder) != state or not all((folder / name).is_dir() for name in wanted):
            for name in sorted(wanted):
                fetch_sealed(f"{remote.url}/{name}", folder / name)
            _fetched[folder] = state
        if not run:
            for other in (folder / "checkpoints").glob("*_*"):
                if f"checkpoints/{other.name}" not in wanted:
                    shutil.rmtree(other, ignore_errors=True)
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return folder / "checkpoints" / step if run else folder


def local_run(path: str | os.PathLike[str]) -> Path:
    """Return the path of a run or checkpoint; for a URL, the path of a local copy."""
    url = url_of(path)
    return Path(path) if url is None else fetch_run(url)


def output_folder(url: str) -> Path:
    """Return the local folder where output for a URL is written, the same each time."""
    return cache_folder() / "outputs" / _short(url.rstrip("/")) / (_basename(url) or "data")


@contextmanager
def published(out: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Open a local folder for a dataset; if ``out`` is a URL, upload the dataset when the block ends.

    A dataset that is already there is downloaded first, unless it may be overwritten.

    Raises:
        DataError: the URL holds something else, or cannot be written. DependencyError: a package is missing.
    """
    url = url_of(out)
    if url is None:
        yield Path(out)
        return
    with _files(url) as remote:
        names = remote.names()
        if names and _MANIFEST not in names and _MARK not in names:
            raise DataError(f"{url} is not empty and no dataset ({', '.join(sorted(names)[:3])}). Choose another URL.")
        local = fetch_sealed(url) if _MANIFEST in names and not overwrite else output_folder(url)
        if fresh := not names:
            remote.mark()  # before the work: it proves that the URL can be written
    try:
        yield local
    except BaseException as error:
        with suppress(Exception):
            if fresh:
                remote.remove([_MARK])
        if local != output_folder(url):
            rename_in(error, {str(local): url})
        raise
    _upload_sealed(local, url)
    kept = _kept(url, (local / _MANIFEST).read_bytes())
    if kept != local:  # so that a reader here needs no download
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        move(local, kept)


def _kept(url: str, manifest: bytes) -> Path:
    """Return the folder of the cache for a sealed folder."""
    return cache_folder() / "data" / hashlib.sha256(manifest).hexdigest()[:32] / (_basename(url) or "data")


def rename_in(error: BaseException, names: Mapping[str, str]) -> None:
    """Write names in place of paths in the text of one of our errors, or of Ctrl-C."""
    if isinstance(error, StokerError | KeyboardInterrupt) and error.args:
        text = str(error.args[0])
        for path, name in names.items():
            text = text.replace(path, name)
        error.args = (text, *error.args[1:])


def with_urls(text: str) -> str:
    """Return a message with URLs in place of the paths of their local copies."""
    for folder in sorted(_copied, key=len, reverse=True):
        text = text.replace(folder, _copied[folder])
    return text


def is_empty(url: str) -> bool:
    """Return True if there is no file below a URL."""
    with _files(url) as remote:
        return not remote.names()


def check_writable(url: str) -> None:
    """Raise :class:`DataError` if no file can be written below a URL."""
    with _files(url) as remote:
        remote.mark()
        remote.remove([_MARK])


def upload_run(folder: Path, url: str, *, quiet: bool = False) -> None:
    """Upload a run: new checkpoints, each whole before its manifest, settings and logs; drop pruned checkpoints."""
    with _files(url, quiet=quiet) as remote:
        names = remote.names()
        whole = {path.parent for kind in _SEALED for path in folder.glob(f"{kind}*/{_MANIFEST}")}
        mine = {path.relative_to(folder).as_posix() for path in whole if "." not in path.name}
        loose = [
            path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()
            and not path.relative_to(folder).as_posix().startswith(_SEALED) and not path.name.startswith(".")
            and not path.name.endswith(".tmp")
        ]  # fmt: skip
        if "config.json" not in names:
            remote.upload([("config.json", folder / "config.json")])
        for name in sorted(mine):
            there = None if f"{name}/{_MARK}" in names else remote.read(f"{name}/{_MANIFEST}")
            if there != (folder / name / _MANIFEST).read_bytes():
                _upload_sealed(folder / name, f"{remote.url}/{name}", quiet=quiet)
        for is_head in (False, True):  # last: what it stands for must be there
            remote.upload([(name, folder / name) for name in loose if (name == _HEAD) == is_head])
        remote.remove([name for name in names if name.startswith((_HEAD, "update.json")) and name not in loose])
        gone = [name for name in names if name.startswith(_SEALED) and "/".join(name.split("/")[:2]) not in mine]
        remote.remove(sorted(gone, key=lambda name: not name.endswith(f"/{_MANIFEST}")))


def _upload_sealed(folder: Path, url: str, *, quiet: bool = False) -> None:
    """Upload a folder with a manifest, unless the same manifest is there."""
    text = (folder / _MANIFEST).read_bytes()
    with _files(url, quiet=quiet) as remote:
        names = remote.names()
        if _MANIFEST in names:
            if _MARK not in names and remote.read(_MANIFEST) == text:
                return
            remote.remove([_MANIFEST])  # first: it is no longer true of the other files
        remote.mark()
        files = [*_sealed_files(url, text), *(name for name in (".request",) if (folder / name).is_file())]
        remote.upload([(name, folder / name) for name in files])
        remote.upload([(_MANIFEST, folder / _MANIFEST)])
        remote.remove([name for name in names if name not in files and name not in (_MANIFEST, _MARK)] + [_MARK])


def _sealed_files(url: str, text: bytes) -> dict[str, tuple[int, str]]:
    """Return the size and checksum of each file that a manifest names."""
    kinds = (ValueError, KeyError, TypeError, AttributeError)
    with errors_as(DataError, f"{url}/{_MANIFEST} is garbled", "Upload it again.", kinds):
        manifest = json.loads(text)
        shards = [shard for split in manifest.get("splits", {}).values() for shard in split["shards"]]
        entries = {**manifest.get("files", {}), **{shard["file"]: shard for shard in shards}}
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{url}/{_MANIFEST} names the file {name!r}, which is outside of it. Do not trust it.")
    return files


@contextmanager
def _files(url: str, *, quiet: bool = False) -> Iterator[_Files]:
    """Open the files below a URL; failures of fsspec within become errors that name the URL."""
    url = url.rstrip("/")
    try:
        yield _Files(url, quiet)
    except StokerError:
        raise
    except Exception as error:
        raise failure_at(url, error) from error


class _Files:
    def __init__(self, url: str, quiet: bool) -> None:
        self.url, self._quiet = url, quiet  # quiet: show no progress
        self.fs, self.root = file_system(url)
        self.fs.invalidate_cache()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def names(self) -> dict[str, int | None]:
        """Return every file below, with its size; none if there is no such folder."""
        self.fs.invalidate_cache()
        start = len(self.root) + 1
        with suppress(FileNotFoundError, NotADirectoryError):
            found = self.fs.find(self.root, detail=True)
            return {name[start:]: info.get("size") for name, info in found.items() if len(name) > start}
        return {}

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is no such file."""
        with suppress(FileNotFoundError):
            return bytes(self.fs.cat_file(self._path(name)))
        return None

    def download(self, files: list[tuple[str, Path, int | None, str | None]]) -> None:
        """Copy files (name below the URL, local path, size, sha256 or None); each appears when it is whole."""

        def copy(file: tuple[str, Path, int | None, str | None], counter: Any) -> None:
            name, target, size, digest = file
            url = f"{self.url}{name and '/'}{name}"
            partial = target.with_name(target.name + ".tmp")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.fs.get_file(self._path(name), str(partial), callback=counter)
                found = partial.stat().st_size if digest is None else hash_file(partial)
                if found != (size if digest is None else (size, digest)) and size is not None:
                    raise DataError(
                        f"{url} arrived incomplete or damaged: its size or checksum is wrong. Try again; if that does "
                        "not help, upload it again."
                    )
                move(partial, target)
            except StokerError:
                raise
            except Exception as error:
                if not isinstance(error, OSError) or str(partial) not in str(error.filename or ""):
                    if digest is not None and _is_missing(error):
                        raise DataError(f"{url}, which {_MANIFEST} names, is missing. Upload it again.") from error
                    raise failure_at(url, error) from error
                raise DataError(
                    f"{target} cannot be written ({error.strerror}). STOKER_CACHE names the folder."
                ) from error
            finally:
                partial.unlink(missing_ok=True)

        self._copy(copy, files, f"fetching {_basename(self.url)}", sum(file[2] or 0 for file in files))

    def upload(self, files: list[tuple[str, Path]]) -> None:
        """Copy local files to names below the URL."""
        if self.url.startswith(("http:", "https:")):
            raise NotImplementedError

        def copy(file: tuple[str, Path], counter: Any) -> None:
            name, source = file
            if has_folders(self.fs):
                self.fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(source), self._path(name), callback=counter)

        self._copy(copy, files, f"uploading {_basename(self.url)}", sum(path.stat().st_size for _, path in files))

    def _copy(self, copy: Callable[[Any, Any], None], files: list[Any], what: str, total: int) -> None:
        """Call ``copy`` with each file and a callback of fsspec that counts bytes, on several threads."""
        from fsspec.callbacks import Callback

        done, lock, stopped = 0, threading.Lock(), threading.Event()
        with Bars(quiet=self._quiet or find_spec("rich") is None) as bars, ThreadPoolExecutor(_THREADS) as pool:

            class Counter(Callback):  # type: ignore[misc]
                def relative_update(self, inc: int = 1) -> None:
                    nonlocal done
                    if stopped.is_set():
                        raise ConnectionAbortedError("another file failed")
                    with lock:
                        done += inc
                        bars(what, min(done, total), total, "bytes")

            copies = [pool.submit(copy, file, Counter()) for file in files]
            try:
                for each in copies:
                    each.result()
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the given order; files that are gone already are not an error."""
        for name in names:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._path(name))

    def mark(self) -> None:
        """Write the file that marks an unfinished upload; it also proves that the URL can be written."""
        folder = cache_folder()
        with errors_as(DataError, f"{folder} cannot be written to", _OTHER_CACHE):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _MARK).write_text("A Stoker upload is under way, or was killed. Run the same command again.\n")
        self.upload([(_MARK, folder / _MARK)])


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    fsspec = require("fsspec", f"{url} needs")
    scheme = url.split("://", 1)[0].split("::")[-1]
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DependencyError(
            f"{url} needs a package that is not installed: {_line(error).rstrip('.')}. For s3, gs, http and hf: pip "
            "install 'stoker[remote]'"
        ) from error
    except ValueError as error:
        if "rotocol" not in str(error):
            raise
        known = "s3, gs, abfs, http, https, hf, sftp, memory"
        raise DataError(f"{url}: fsspec knows no {scheme}://. It knows for example {known}.") from error
    return fs, str(root).rstrip("/")


def has_folders(fs: Any) -> bool:
    """Return whether a file system has folders, which are made before a file in them."""
    return fs.protocol[0] in _MAKES_FOLDERS or fs.protocol in _MAKES_FOLDERS


def failure_at(url: str, error: Exception) -> Exception:
    """Return the error for a failure of a file system, with a remedy."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):  # of a web server
        error = error.__cause__
    if _is_missing(error):
        return DataError(f"there is nothing at {url}. Check the URL.")
    text = f"{type(error).__name__} {error}"
    scheme = url.split("://", 1)[0]
    remedy = "Check the URL and the network, then run the same command again."
    if isinstance(error, NotImplementedError):
        return DataError(f"{scheme}:// cannot be written or listed, as {url} would need. Choose another place.")
    refused = isinstance(error, PermissionError) or _status(error) in (401, 403)
    if refused or re.search(r"redential|Forbidden|AccessDenied", text):
        hints = {
            "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws",
            "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
            "hf": "hf auth login, or HF_TOKEN",
        }
        remedy = f"Check that you may use it, and the credentials: {hints.get(scheme, 'see the docs of fsspec')}."
    return DataError(f"{url} cannot be used: {_line(error).rstrip('.')}. {remedy}")


def _status(error: Exception) -> int | None:
    """Return the status of an answer over HTTP."""
    answer = getattr(error, "response", None)
    status: int | None = getattr(error, "status", None) or getattr(answer, "status_code", None)
    return status


def _is_missing(error: Exception) -> bool:
    """Return True if a file system says that there is no such file."""
    return isinstance(error, FileNotFoundError) or _status(error) in (404, 410) or "NoSuchKey" in str(error)


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time fill a folder; the lock of a killed process ends with it."""
    with errors_as(DataError, f"{folder.parent} cannot be written to", _OTHER_CACHE):
        for parent in (locks := cache_folder() / "locks", folder.parent):
            parent.mkdir(parents=True, exist_ok=True)
        file = (locks / _short(str(folder))).open("w")
    with file:
        lock_file(file, wait=True)
        yield


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _basename(url: str) -> str:
    """Return the last name in a URL, which may have a query."""
    path = urlsplit(url).path if url.startswith(("http:", "https:")) else url.split("://", 1)[-1]
    return path.split("::")[0].rstrip("/").rpartition("/")[2]
