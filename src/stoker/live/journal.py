"""What a run was updated with: the logs that were used, the newest model, and an update that is under way.

::

    RUN/head.json                      the checkpoint that counts: that of the last update
    RUN/updates.jsonl                  a line for each update: its logs, how good the model before was on them, and
                                       how many ids got a row or lost theirs
    RUN/updates/000001/                its rows, prepared; the next ones continue from their window features
    RUN/checkpoints/update_000001/     a segment: what it changed
    RUN/update.json                    the update under way; a killed one is continued or discarded by the next

``head.json`` is written last and replaced at once, so an update has happened or it has not. Files newer than
the head were left by a kill or a roll-back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from stoker.base.errors import CheckpointError, ConfigError, DataError, errors_as
from stoker.base.files import EDGE, hash_edge, seal
from stoker.base.units import quoted
from stoker.prep import recipes
from stoker.training.files.checkpoint import chain, discard, hash_manifest, read_manifest, repair
from stoker.training.files.rundir import UPDATES, RunDirectory, find_checkpoint, local_run, own_dataset
from stoker.training.files.segments import new_and_gone

_ORDER = "update.json"
_BLOCK = 2**20  # bytes of a log that are hashed at a time


class Log(NamedTuple):
    """The contents of a log."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Order:
    """What an update is to do. Equal orders give equal files."""

    number: int
    logs: tuple[Log, ...]
    settings: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "logs": [log._asdict() for log in self.logs], "settings": dict(self.settings)}


@contextmanager
def opened(run: str | Path) -> Iterator[Journal]:
    """Yield the journal of a run, which no other process changes meanwhile. A run at a URL is uploaded at the end.

    Raises:
        ConfigError: there is no run, it is in use, or its training has not ended.
        CheckpointError: the run has no checkpoint.
        DataError: a file is damaged.
    """
    with local_run(None, run) as (_, folder, _):
        directory = RunDirectory(str(folder))
        directory.config()  # else the lock would make a file elsewhere
        with directory.locked():
            repair(directory.checkpoints)
            journal = Journal(directory)
            if (journal.order() or {}).get("number") == journal.number:  # a kill came after the new head
                journal.forget_order()
            yield journal


class Journal:
    """The updates of a run up to its head.

    Raises:
        ConfigError: there is no run, or its training has not ended.
        CheckpointError: the run has no checkpoint.
        DataError: a file is damaged.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.config = self.run.config()
        head = self.run.head()
        if head is None and not (self.run.path / "report.json").is_file():
            raise ConfigError(
                f"the training of {self.run.path} has not ended, so there is no model to update. End it with: "
                f"stoker train --resume {quoted(self.run.path)}"
            )
        self.checkpoint = find_checkpoint(self.run.path)
        self.number = int((head or {}).get("number", 0))
        self.lines = self.run.updates()

    @property
    def dataset(self) -> Path:
        """The dataset whose rows, vocabularies and window features new rows continue."""
        if self.number:
            return self.run.rows_of(self.number)
        return Path(own_dataset(self.config, "Name it with data=DATASET (--data DATASET)."))

    def segment(self, number: int, step: int | None = None) -> Path:
        """Return the path of the segment of an update, or of one that it wrote at ``step``."""
        return self.run.checkpoints / f"update_{number:06d}{'' if step is None else f'_{step:09d}'}"

    def unused(
        self, files: Sequence[Path], names: Mapping[Path, str], base: Mapping[str, Any]
    ) -> tuple[list[tuple[Path, Log]], list[str]]:
        """Return the logs on which the model was not trained yet, and say why others are left out.

        Files that describe users or items go with new logs, whether they were used before or not.

        Args:
            files: the files.
            names: of those whose path says nothing.
            base: the manifest of the dataset that the run was trained on.

        Raises:
            DataError: a log has grown since it was used, or begins with another of the logs.
        """
        lookups = recipes.lookups(base, [path.name for path in files])
        used = {log["sha256"]: (line["number"], log["name"]) for line in self.lines for log in line["logs"]}
        before: dict[int, dict[str, object]] = {}  # size -> sha256 -> None, or another log of this call
        for line in self.lines:
            for log in line["logs"]:
                if log.get("rows") != 0:  # others may begin with the same header
                    before.setdefault(int(log["bytes"]), {})[log["sha256"]] = None
        hashed = {}
        for path in sorted(files, key=lambda path: path.stat().st_size):
            size, digest, _ = hashed[path] = _hash(path, before)
            if path.name not in lookups and not _header_only(path):
                before.setdefault(size, {}).setdefault(digest, names.get(path, path))
        fresh: list[tuple[Path, Log]] = []
        described: list[tuple[Path, Log]] = []
        left_out: list[str] = []
        for path in files:
            name, shown = names.get(path, path.name), names.get(path, path)
            size, digest, begins = hashed[path]
            trained = _trained(path, size, base)
            if path.name in lookups:
                described.append((path, Log(name, size, digest)))
            elif size in trained:
                left_out.append(
                    f"{shown} is a log of the dataset that the run was trained on: it is left out. If its rows were "
                    "for validation or test only, take it with held_out=True (--held-out)"
                )
            elif digest in used:
                number, known = used[digest]
                alias = "" if known == name else f" as {known}"
                left_out.append(f"{shown} was used by update {number}{alias}: it is left out")
            elif trained or None in begins.values():
                count = max(*trained, *(size for size, other in begins.items() if other is None), 0)
                raise DataError(
                    f"{path} begins with {count:,} bytes on which the run was trained. Give a file of the "
                    "new rows only."
                )
            elif begins:
                size, other = max(begins.items())
                raise DataError(
                    f"{path} begins with all {size:,} bytes of {other}, whose rows would count twice. Leave {other} "
                    "out."
                )
            elif digest in {log.sha256 for _, log in fresh}:
                left_out.append(f"{shown} has the same contents as another of these logs: it is left out")
            else:
                fresh.append((path, Log(name, size, digest)))
        return fresh + described if fresh else [], left_out

    def begin(self, order: Order) -> bool:
        """Note that an update is under way; return True if a killed one with the same order is continued.

        Discard what any other left.
        """
        text = order.to_dict()
        continued = bool(self.order() == json.loads(json.dumps(text)))
        if not continued:
            self.discard()
            self.run.write(_ORDER, text)
        return continued

    def order(self) -> Any:
        """Return the order of the update that was under way; None if there is none, or it was cut."""
        with suppress(OSError, ValueError):
            return json.loads((self.run.path / _ORDER).read_text(encoding="utf-8"))

    def forget_order(self) -> None:
        """Note that no update is under way."""
        (self.run.path / _ORDER).unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete what is newer than the head: of an update that was killed, or taken back."""
        self.forget_order()
        for path in sorted(self.run.checkpoints.glob("update_*"), reverse=True):
            if int(path.name.split("_")[1]) > self.number:
                discard(path)
        for path in self.run.rows_of(0).parent.glob("[0-9]*"):
            if int(path.name.split(".")[0]) > self.number:
                shutil.rmtree(path)

    def partial(self, number: int) -> Path | None:
        """Return the newest whole segment that a killed update wrote within it."""
        found = sorted(self.run.checkpoints.glob(f"update_{number:06d}_*"), reverse=True)
        return next((path for path in found if self._is_whole(path)), None)

    def finished(self, number: int) -> Path | None:
        """Return the segment of an update that was killed before it was published."""
        path = self.segment(number)
        return path if path.exists() and self._is_whole(path) else None

    @staticmethod
    def _is_whole(path: Path) -> bool:
        try:
            chain(path)
        except CheckpointError:
            return False
        return True

    def publish(self, number: int, segment: Path) -> None:
        """Make ``segment`` the model of the run: append the line of its update, then replace the head."""
        line = {
            "number": number, "checkpoint": segment.name, **read_manifest(segment)["extra"]["update"],
            "ids": new_and_gone(chain(segment), len(chain(self.checkpoint))),
        }  # fmt: skip
        path = self.run.path / UPDATES
        kept = path.read_bytes().splitlines(keepends=True)[: len(self.lines)] if self.lines else []
        remedy = "The run is as before, and the same command continues."
        with (
            errors_as(CheckpointError, f"{path} cannot be written", remedy),
            path.open("r+b" if kept else "wb") as file,
        ):
            file.seek(sum(map(len, kept)))
            file.truncate()  # lines of updates that were taken back, or killed
            file.write(json.dumps(seal(line), allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        set_head(self.run, segment)
        self.forget_order()


def set_head(run: RunDirectory, checkpoint: Path) -> None:
    """Make a checkpoint the one that counts: of ``predict``, of followers, of the next update."""
    manifest = read_manifest(checkpoint)
    number = int(manifest["extra"].get("update", {}).get("number", 0))
    run.write_head({"checkpoint": checkpoint.name, "manifest": hash_manifest(checkpoint), "number": number,
                    "step": int(manifest["step"])})  # fmt: skip


def _trained(path: Path, size: int, base: Mapping[str, Any]) -> list[int]:
    """Return how many bytes of a log the dataset of the run has, if it has any."""
    found = [each for each in base.get("sources", []) if each["rows"] and 0 < each["bytes"] <= size]
    heads = cache(partial(hash_edge, path, 0))  # of one length for all large files
    return [
        each["bytes"]
        for each in found
        if each.get("head") == heads(min(EDGE, each["bytes"]))
        and each["tail"] == hash_edge(path, max(0, each["bytes"] - EDGE), min(EDGE, each["bytes"]))
    ]


def _header_only(path: Path) -> bool:
    """Return True if a file has one line, which is no object of JSON: other logs may begin with the same header."""
    with path.open("rb") as file:
        data = file.read(EDGE)
    return len(data) < EDGE and len(data.splitlines()) <= 1 and not data.lstrip().startswith(b"{")


def _hash(path: Path, known: Mapping[int, Mapping[str, object]]) -> tuple[int, str, dict[int, object]]:
    """Return the size and sha256 of a file; and the sizes of known logs that it begins with, with what is known."""
    digest, done, found = hashlib.sha256(), 0, dict[int, object]()
    with path.open("rb") as file:
        for stop in (*sorted(known), None):
            while block := file.read(_BLOCK if stop is None else min(_BLOCK, stop - done)):
                digest.update(block)
                done += len(block)
            if stop is not None and done == stop and digest.hexdigest() in known[stop]:
                found[stop] = known[stop][digest.hexdigest()]
    return done, digest.hexdigest(), {size: what for size, what in found.items() if 0 < size < done}
