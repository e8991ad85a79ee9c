"""Update a run whenever new logs are complete in a directory."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.base.errors import ConfigError, DataError
from stoker.base.units import listed
from stoker.live.journal import opened
from stoker.live.settings import POLL
from stoker.live.update import UpdateArguments, UpdateResult, dataset_before, update
from stoker.prep.parse.sources import count_rows, number_order, source_kind
from stoker.prep.schema import Schema
from stoker.prep.source_format import SourceFormat
from stoker.training.files.rundir import RunInUseError

_UNFINISHED = (".tmp", ".part", ".partial", ".crdownload", ".swp", "~")


def watch(
    run: str | Path, folder: str | Path, *, poll: float = POLL, sleep: Callable[[float], None] = time.sleep,
    **settings: Any,
) -> Iterator[UpdateResult]:  # fmt: skip
    """Update a run with each new file of a directory, and yield each result, without end.

    A file is used when it has not changed between two checks of the directory. Hidden files, and names that end in .tmp
    or .part, are ignored: write a log under such a name, and rename it. So are files without a row, with a warning if
    they have a header. Files that appear together are one update, in the order of their names, with numbers by value.
    While another process changes the run, such as a compaction, they wait.

    Args:
        run: as for :func:`stoker.update`.
        folder: the directory.
        poll: seconds between two checks.
        sleep: waits for a number of seconds.
        settings: as for :func:`stoker.update`.

    Raises:
        ConfigError: ``poll`` is not a number of seconds above 0, a setting is wrong, or ``run`` is not a run, is in use
            or its training has not ended; at once.
        DataError: the directory or the dataset of the run does not exist, at once; or as :func:`stoker.update`, for a
            log that cannot be used.
    """
    folder = Path(folder)
    if not 0 < poll < threading.TIMEOUT_MAX:  # without a pause, a file that is being written would seem complete
        raise ConfigError(f"poll is {poll:g}; it must be a number of seconds above 0.", settings=("poll",))
    if not folder.is_dir():
        raise DataError(f"{folder} is not a directory. Name the one to which new logs are written.")
    asked = UpdateArguments(run, (), **settings)
    with opened(run) as journal:
        source = Schema.from_dict(dataset_before(journal, asked).manifest["schema"]).source
    return _results(run, folder, poll, sleep, source, settings)


def _results(
    run: str | Path, folder: Path, poll: float, sleep: Callable[[float], None], source: SourceFormat,
    settings: Mapping[str, Any],
) -> Iterator[UpdateResult]:  # fmt: skip
    done: dict[Path, tuple[int, int]] = {}
    before: dict[Path, tuple[int, int]] = {}
    while True:
        now = {path: (state.st_size, state.st_mtime_ns) for path, state in _files(folder) if state.st_size}
        ready = [path for path, state in now.items() if before.get(path) == state and done.get(path) != state]
        before = {} if ready else now  # after an update, files must stay the same from one check to the next again
        if ready:
            try:
                result = update(run, sorted(ready, key=number_order), **settings)
            except RunInUseError:  # by a compaction or a roll-back, which end
                sleep(poll)
                continue
            except (DataError, OSError) as error:
                if not all(path.exists() for path in ready):  # renamed or deleted meanwhile
                    continue
                empty = [path for path in ready if not _has_rows(path, source)]
                if not empty:
                    raise
                names = listed([path.name for path in empty])
                warnings.warn(f"left out until they change, since they have no rows: {names} ({error})", stacklevel=2)
                done |= {path: now[path] for path in empty}
                continue
            done |= {path: now[path] for path in ready}
            if result.rows:
                yield result
        else:
            sleep(poll)


def _files(folder: Path) -> Iterator[tuple[Path, Any]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # renamed or deleted meanwhile
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_UNFINISHED):
                yield path, path.stat()


def _has_rows(path: Path, given: SourceFormat) -> bool:
    """Return False if a file has a header at most."""
    if source_kind(path, given.kind) != "parquet":
        return count_rows(path, given, 1) > 0
    try:
        return bool(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError):  # damaged
        return True
