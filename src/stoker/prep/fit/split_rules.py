"""Which split each row belongs to, decided part by part from what a few small passes have learned."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.checks import near
from stoker.base.errors import DataError
from stoker.ops.codegen.jit import jit
from stoker.prep.fit.ranks import select_rank
from stoker.prep.fit.vocabulary import TableBuilder
from stoker.prep.parse.dictionary_kernels import splitmix
from stoker.prep.parse.layout import SPLIT_CODES, share_of_hash
from stoker.prep.schema import Schema
from stoker.prep.stages.parts import PartFile

__all__ = ["PartRows", "SplitFile", "Splitter", "targets_of_files"]

Array = npt.NDArray[Any]
DROP = SPLIT_CODES["drop"]


@dataclass(frozen=True, kw_only=True)
class PartRows:
    """A part, and where its rows stand among all rows."""

    index: int
    file: int  # number of the source file
    start: int  # good rows in the parts before
    rows: int
    path: Path

    def open(self) -> PartFile:
        """Map the arrays."""
        return PartFile(self.path)


@dataclass(frozen=True)
class SplitFile:
    """The split of every row, as :meth:`Splitter.assign` gives it: a file of one byte a row, for any process."""

    path: Path

    def assign(self, part: PartRows) -> npt.NDArray[np.uint8]:
        """[rows] split of every row of a part."""
        return np.fromfile(self.path, np.uint8, part.rows, offset=part.start)

    def rows(self, part: PartRows, split: int) -> npt.NDArray[np.int64]:
        """Return the rows of a part that belong to a split, in order."""
        return np.flatnonzero(self.assign(part) == split)

    def train_rows(self, part: PartRows) -> npt.NDArray[np.bool_] | None:
        """[rows] which rows of a part train; None where none does."""
        chosen: npt.NDArray[np.bool_] = self.assign(part) == 0
        return chosen if chosen.any() else None

    def write(self, part: PartRows, splits: npt.NDArray[np.uint8]) -> None:
        """Write the splits of a part's rows over those that are there."""
        with self.path.open("r+b") as file:
            file.seek(part.start)
            file.write(splits.data)


@jit
def _latest(positions, users, times, first_row, two_times, last_row, before_row, seen):  # type: ignore[no-untyped-def]
    """Per user: time and row of the latest row, the row that was latest before it, and how many rows."""
    latest_time, before_time = two_times[0], two_times[1]
    for i in positions:
        user = users[i]
        time, row = times[i], first_row + i
        if seen[user] == 0 or time >= latest_time[user]:
            before_time[user] = latest_time[user]
            before_row[user] = last_row[user]
            latest_time[user] = time
            last_row[user] = row
        elif seen[user] == 1 or time >= before_time[user]:
            before_time[user] = time
            before_row[user] = row
        seen[user] += 1


def targets_of_files(schema: Schema, names: Sequence[str]) -> list[str]:
    """What the rule "files" makes of each file; the first pattern that matches decides."""
    targets = []
    for name in names:
        target = next((t for pattern, t in schema.split.files.items() if fnmatch.fnmatch(name, pattern)), None)
        if target is None:
            patterns = list(schema.split.files)
            raise DataError(
                f"{name}: no pattern of the split rule matches this file. Patterns: {', '.join(patterns)}."
                f"{near(name, patterns)}"
            )
        targets.append(target)
    return targets


class Splitter:
    """Assigns rows to splits: 0 train, 1 valid, 2 test, 255 dropped.

    Args:
        schema: with the split rule, the share of negatives to keep and their seeds.
        parts: all parts in order.
        files: names of the source files.
    """

    def __init__(self, schema: Schema, parts: Sequence[PartRows], files: Sequence[str]) -> None:
        self.schema, self.rule, self.parts = schema, schema.split, list(parts)
        self._targets = targets_of_files(schema, files) if self.rule.rule == "files" else []
        self._kept_before = [part.start for part in self.parts]  # kept rows in the parts before
        kept = [part.rows for part in self.parts]
        if schema.negative_keep < 1:
            kept = [int(self._kept(part).sum()) for part in self.parts]
            self._kept_before = np.concatenate([[0], np.cumsum(kept)[:-1]]).tolist() if kept else []
        self._total = sum(kept)
        self._kept_in_file = {
            file: sum(n for part, n in zip(self.parts, kept, strict=True) if part.file == file)
            for file in range(len(files))
        }
        self._file_start: dict[int, int] = {}
        for part, before in zip(self.parts, self._kept_before, strict=True):
            self._file_start.setdefault(part.file, before)
        self._cuts: list[int] = []
        self._refs: list[npt.NDArray[np.int32]] = []
        fit = {"time": self._fit_time, "leave_last_out": self._fit_users, "last_touch": self._fit_users}
        if self.rule.rule in fit and self._total:
            fit[self.rule.rule]()

    def assign(self, part: PartRows) -> npt.NDArray[np.uint8]:
        """[rows] split of every row of a part."""
        kept = self._kept(part) if self.schema.negative_keep < 1 else None
        result = self._assign(part, kept)
        if kept is not None:
            result[~kept] = DROP
        return result

    def _kept(self, part: PartRows) -> npt.NDArray[np.bool_]:
        seed = splitmix(np.array([self.schema.seed + 1], np.uint64))[0]
        hashes = splitmix(np.arange(part.start, part.start + part.rows, dtype=np.uint64) ^ seed)
        with part.open() as arrays:
            other: npt.NDArray[np.bool_] = ~(arrays["labels"] <= 0.5)  # positive, or without label
        kept: npt.NDArray[np.bool_] = other | (share_of_hash(hashes, (self.schema.negative_keep,)) == 0)
        return kept

    def _position(self, part: PartRows, kept: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
        """Number of each row among the kept ones."""
        before = self._kept_before[part.index]
        if kept is None:
            return np.arange(before, before + part.rows)
        return before + np.cumsum(kept) - kept

    def _assign(self, part: PartRows, kept: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.uint8]:
        rule = self.rule.rule
        if rule == "runs":
            return _halved_runs(self._position(part, kept), self._total, self.rule.runs)
        if rule == "files":
            target = self._targets[part.file]
            if target != "halves":
                return np.full(part.rows, SPLIT_CODES[target], np.uint8)
            size = self._kept_in_file[part.file]
            within = self._position(part, kept) - self._file_start[part.file]
            return np.where(within < -(-size // 2), 2, 1).astype(np.uint8)
        if rule == "hash" and self.rule.column is None:
            seed = splitmix(np.array([self.rule.seed], np.uint64))[0]
            hashes = splitmix(np.arange(part.start, part.start + part.rows, dtype=np.uint64) ^ seed)
            return share_of_hash(hashes, (self.rule.train, self.rule.valid))
        with part.open() as arrays:
            if rule == "time":
                return self._cut(arrays["time"])
            if rule in ("hash", "column"):
                return np.array(arrays["split"])
            users = self._refs[part.index][arrays["codes.user"] - 1]
        if rule == "last_touch":
            return self._cut(self._last_time[users])
        rows = np.arange(part.start, part.start + part.rows)
        held = self._seen[users] >= self.rule.min_rows
        result = np.zeros(part.rows, np.uint8)
        result[held & (rows == self._before_row[users])] = 1
        result[held & (rows == self._last_row[users])] = 2
        return result

    def _cut(self, times: Array) -> npt.NDArray[np.uint8]:
        return np.searchsorted(np.array(self._cuts, np.int64), times, side="right").astype(np.uint8)

    def _find_cuts(self, passes: Callable[[], Iterator[npt.NDArray[np.int64]]], total: int) -> None:
        """Times at which validation and test begin. Equal times stay together, on the later side."""
        shares = np.cumsum([self.rule.train, self.rule.valid])
        highest = np.iinfo(np.int64).max
        ranks = [int(np.ceil(share * total - 1e-9)) for share in shares]
        self._cuts = [select_rank(passes, rank) if rank < total else highest for rank in ranks]

    def _fit_time(self) -> None:
        def times() -> Iterator[npt.NDArray[np.int64]]:
            for part in self.parts:
                with part.open() as arrays:
                    time = np.array(arrays["time"])
                yield time[self._kept(part)] if self.schema.negative_keep < 1 else time

        self._find_cuts(times, self._total)

    def _fit_users(self) -> None:
        """Number the users, then find the last rows of each. Memory: about 60 bytes per user."""
        builder = TableBuilder("string")
        for part in self.parts:
            with part.open() as arrays:
                ends = arrays["ends.user"]
                self._refs.append(builder.add_texts(arrays["bytes.user"], ends, np.ones(len(ends) - 1, np.int64)))
        users = builder.entries
        del builder
        times = np.full((2, users), np.iinfo(np.int64).min)
        self._last_row, self._before_row = np.full(users, -1, np.int64), np.full(users, -1, np.int64)
        self._seen = np.zeros(users, np.int64)
        for part in self.parts:
            with part.open() as arrays:
                # A row that was not kept must not become a user's last one.
                kept = self._kept(part) if self.schema.negative_keep < 1 else np.ones(part.rows, np.bool_)
                _latest(
                    np.flatnonzero(kept), self._refs[part.index][arrays["codes.user"] - 1], arrays["time"],
                    part.start, times, self._last_row, self._before_row, self._seen,
                )  # fmt: skip
        self._last_time = times[0]
        if self.rule.rule == "last_touch":
            present = self._last_time[self._seen > 0]
            self._find_cuts(lambda: iter([present]), len(present))


def _halved_runs(rows: npt.NDArray[np.int64], total: int, runs: int) -> npt.NDArray[np.uint8]:
    """Equal runs of lines, the first ones a line longer; the last is halved: first test, then validation."""
    last = total // runs
    train = total - last
    result = np.zeros(len(rows), np.uint8)
    result[rows >= train] = 2
    result[rows >= train + -(-last // 2)] = 1
    return result
