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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from stoker.base.errors import CheckpointError, ConfigError, DataError, errors_as
from stoker.base.files import EDGE, hash_edge, seal
from stoker.base.units import quoted
from stoker.prep import recipes
from stoker.prep.parse.sources import count_rows, is_packed, plain_name, source_kind, text_edge, text_of
from stoker.prep.schema import Schema
from stoker.training.files.checkpoint import chain, discard, hash_manifest, read_manifest, repair
from stoker.training.files.rundir import HEAD, UPDATES, RunDirectory, find_checkpoint, local_run, own_dataset
from stoker.training.files.segments import new_and_gone

_ORDER = "update.json"
_BLOCK = 2**20  # bytes of a log that are hashed at a time


class KnownLog(NamedTuple):
    """A log that others may begin with."""

    shown: object  # None: it was used
    name: str
    one_row: bool = False  # so that only a log of its name has grown from it
    packed: bool = False  # what is known is its text, decompressed

    def may_grow(self, name: str, *, packed: bool) -> bool:
        """Return True if a log that begins with it, in its bytes or if ``packed`` as text, has its rows."""
        if packed or self.packed:
            return plain_name(Path(name)) == plain_name(Path(self.name))
        return not self.one_row or self.name == name


_BySize: TypeAlias = dict[int, dict[str, KnownLog]]  # size -> sha256 -> what is known


class Log(NamedTuple):
    """The contents of a log."""

    name: str
    bytes: int
    sha256: str
    text: str = ""  # sha256 of what a compressed log has
    text_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {key: value for key, value in self._asdict().items() if self.text or not key.startswith("text")}

    @property
    def keys(self) -> set[object]:
        """What two files of one log have in common: their bytes, or the name and the text."""
        return {self.sha256, (plain_name(Path(self.name)), self.text or self.sha256)}

    def add_to(self, known: _BySize, one: KnownLog) -> None:
        """Note its bytes, and what they are decompressed, as those with which others may begin."""
        known.setdefault(self.bytes, {}).setdefault(self.sha256, one)
        if self.text:
            known.setdefault(self.text_bytes, {}).setdefault(self.text, one._replace(packed=True))


@dataclass(frozen=True)
class Order:
    """What an update is to do. Equal orders give equal files."""

    number: int
    logs: tuple[Log, ...]
    settings: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "logs": [log.to_dict() for log in self.logs], "settings": dict(self.settings)}


@contextmanager
def opened(run: str | Path) -> Iterator[UpdateJournal]:
    """Yield the journal of a run, which no other process changes meanwhile. A run at a URL is uploaded at the end."""
    with local_run(None, run) as (_, folder, _):
        directory = RunDirectory(str(folder))
        directory.config()  # else the lock would make a file elsewhere
        with directory.locked():
            repair(directory.checkpoints)
            journal = UpdateJournal(directory)
            if (journal.order() or {}).get("number") == journal.number:  # a kill came after the new head
                journal.forget_order()
            yield journal


class UpdateJournal:
    """The updates of a run up to its head."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.config = self.run.config()
        head = self.run.head()
        if head is None and not (self.run.path / "report.json").is_file():
            raise ConfigError(
                f"the training of {self.run.path} has not ended, so there is no model to update. End it with: "
                f"stoker train --resume {quoted(self.run.path)}"
            )
        self.number = int((head or {}).get("number", 0))
        self.lines = self.run.updates()

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint that new rows continue; a roll-back does not need it, so it may be damaged."""
        return find_checkpoint(self.run.path)

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

        Files that describe users or items go with new logs, whether they were used before or not. ``names`` are of
        files whose path says nothing; ``base`` is the manifest of the dataset that the run was trained on.
        """
        lookups = recipes.lookups(base, [path.name for path in files])
        used: dict[object, tuple[int, str]] = {}
        known: _BySize = {}
        for line in self.lines:
            for entry in line["logs"]:
                log = Log(**{key: entry[key] for key in Log._fields if key in entry})
                used |= dict.fromkeys(log.keys, (line["number"], log.name))
                if entry.get("rows") != 0:  # others may begin with the same header
                    log.add_to(known, KnownLog(None, log.name, entry.get("rows") == 1))
        source = Schema.from_dict(base["schema"]).source
        hashed = {}
        for path in sorted(files, key=lambda path: path.stat().st_size):
            log, _, _ = hashed[path] = _hash(path, names.get(path, path.name), known)
            rows = 2 if source_kind(path, source.kind) == "parquet" else count_rows(path, source, 2)
            if path.name not in lookups and rows:
                log.add_to(known, KnownLog(names.get(path, path), log.name, rows == 1))
        fresh: list[tuple[Path, Log]] = []
        described: list[tuple[Path, Log]] = []
        left_out: list[str] = []
        for path in files:
            name, shown = names.get(path, path.name), names.get(path, path)
            log, length, begins = hashed[path]
            size = log.bytes
            trained = _trained(path, size, length, base)
            if path.name in lookups:
                described.append((path, log))
            elif size in trained:
                left_out.append(
                    f"{shown} is a log of the dataset that the run was trained on: it is left out. If its rows were "
                    "for validation or test only, take it with held_out=True (--held-out)"
                )
            elif again := log.keys & used.keys():
                number, then = used[again.pop()]
                alias = "" if then == name else f" as {then}"
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
            elif any(log.keys & other.keys for _, other in fresh):
                left_out.append(f"{shown} has the same contents as another of these logs: it is left out")
            else:
                fresh.append((path, log))
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

    def order(self) -> dict[str, Any] | None:
        """Return the order of the update that was under way; None if there is none, or it is damaged."""
        with suppress(ConfigError):
            return self.run.read(_ORDER)
        return None

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
    head = {"checkpoint": checkpoint.name, "manifest": hash_manifest(checkpoint), "number": number}
    run.write(HEAD, {**head, "step": int(manifest["step"])})


def _trained(path: Path, size: int, length: int, base: Mapping[str, Any]) -> list[int]:
    """Return how many bytes of a log, of ``length`` decompressed, the dataset of the run has, if it has any."""
    found = [each for each in base.get("sources", []) if each["rows"] and each["bytes"] > 0]
    bytes_at, text_at = cache(partial(hash_edge, path)), cache(partial(text_edge, path))
    alike = [each for each in found if plain_name(Path(each["file"])) == plain_name(path)]
    texts = [each.get("text", each) for each in alike if "text" in each or is_packed(path)]
    packed = [each["bytes"] for each in texts if each["bytes"] <= length and _begins(each, text_at)]
    return [size if count == length else count for count in packed] + [
        each["bytes"]
        for each in found
        if each["bytes"] <= size
        and (each["rows"] > 1 or each["bytes"] == size or each["file"] == path.name)
        and _begins(each, bytes_at)
    ]


def _begins(known: Mapping[str, Any], hash_at: Callable[[int, int], str]) -> bool:
    """Return True if a file begins with a known log, by the hashes of the first and the last bytes of that."""
    size, part = known["bytes"], min(EDGE, known["bytes"])
    return bool(known.get("head") == hash_at(0, part) and known["tail"] == hash_at(size - part, part))


def _hash(path: Path, name: str, known: _BySize) -> tuple[Log, int, dict[int, object]]:
    """Return a log; its bytes, decompressed; and the sizes of known logs that it begins with, with what they are."""
    with path.open("rb") as file:
        size, digest, found = _hash_chunks(iter(partial(file.read, _BLOCK), b""), known)
    found = {size: one for size, one in found.items() if one.may_grow(name, packed=False)}
    if not is_packed(path):
        return Log(name, size, digest), size, {size: one.shown for size, one in found.items()}
    length, text, more = _hash_chunks(text_of(path), known)
    found |= {size: one for size, one in more.items() if one.may_grow(name, packed=True)}
    return Log(name, size, digest, text, length), length, {size: one.shown for size, one in found.items()}


def _hash_chunks(chunks: Iterator[bytes], known: _BySize) -> tuple[int, str, dict[int, KnownLog]]:
    """Return the size and sha256 of bytes; and the sizes of known logs that they begin with, with what is known."""
    digest, done, found = hashlib.sha256(), 0, dict[int, KnownLog]()
    stops = sorted(known, reverse=True)
    for chunk in chunks:
        rest = memoryview(chunk)
        while stops and stops[-1] <= done + len(rest):
            cut = stops.pop() - done
            digest.update(rest[:cut])
            done, rest = done + cut, rest[cut:]
            if (one := known[done].get(digest.hexdigest())) is not None:
                found[done] = one
        digest.update(rest)
        done += len(rest)
    return done, digest.hexdigest(), {size: one for size, one in found.items() if 0 < size < done}
