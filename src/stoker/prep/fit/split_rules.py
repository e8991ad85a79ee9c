"""Assign each row to a split, part by part, after a few small passes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.checks import near
from stoker.base.errors import DataError
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.fit.dense import select_rank
from stoker.prep.fit.vocabulary import TableBuilder, read_dictionary
from stoker.prep.parse.dictionaries import splitmix
from stoker.prep.parse.layout import SPLIT_CODES, share_of_hash
from stoker.prep.schema import Schema
from stoker.prep.stages.parts import LogPart

Array = npt.NDArray[Any]
DROP = SPLIT_CODES["drop"]


@dataclass(frozen=True)
class SplitFile:
    """A file with the split of every row, one byte each, that any process can read."""

    path: Path

    def assign(self, part: LogPart) -> npt.NDArray[np.uint8]:
        """Return [rows]: the split of every row of a part."""
        return np.fromfile(self.path, np.uint8, part.rows, offset=part.start)

    def rows(self, part: LogPart, split: int) -> npt.NDArray[np.int64]:
        """Return the rows of a part that belong to a split, in order."""
        return np.flatnonzero(self.assign(part) == split)

    def train_rows(self, part: LogPart) -> npt.NDArray[np.bool_] | None:
        """Return bool [rows]: the training rows of a part; None if there are none."""
        splits = self.assign(part)
        return splits == 0 if splits.min(initial=DROP) == 0 else None

    def write(self, part: LogPart, splits: npt.NDArray[np.uint8]) -> None:
        """Write the splits of a part's rows."""
        with self.path.open("r+b") as file:
            file.seek(part.start)
            file.write(splits.data)


def no_training_row(schema: Schema, rows: int) -> UnusableInput:
    """Return the error for a rule that leaves no training row of ``rows``."""
    return UnusableInput(
        f"the split rule {schema.split.rule!r} leaves no training row of {rows:,}. Change the split in the schema."
    )


def targets_of_files(schema: Schema, names: Sequence[str]) -> list[str]:
    """Return the target of each file by the rule "files"; the first matching pattern decides."""
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


class SplitAssigner:
    """Assign rows to splits: 0 train, 1 valid, 2 test, 255 dropped.

    Args:
        schema: has the split rule, the share of negatives to keep, and the seeds.
        parts: all parts in order.
        files: names of the source files.
    """

    def __init__(self, schema: Schema, parts: Sequence[LogPart], files: Sequence[str]) -> None:
        self.schema, self.rule, self.parts = schema, schema.split, list(parts)
        self._targets = targets_of_files(schema, files) if self.rule.rule == "files" else []
        self._files = np.array([part.file for part in self.parts])
        self._counts = np.array([self._kept(part).sum() for part in self.parts], np.int64)  # kept rows of each part,
        self._before = np.cumsum(self._counts) - self._counts  # and in the parts before
        self._total = int(self._counts.sum())
        self._cuts: list[int] = []
        self._refs: list[npt.NDArray[np.int32]] = []
        if self.rule.rule == "time":
            self._find_cuts(self._kept_times, self._total)
        elif self.rule.rule in ("leave_last_out", "last_touch"):
            self._fit_users()

    def assign(self, part: LogPart) -> npt.NDArray[np.uint8]:
        """Return [rows]: the split of every row of a part."""
        kept = self._kept(part)
        result = self._assign(part, kept)
        result[~kept] = DROP
        return result

    def _kept(self, part: LogPart) -> npt.NDArray[np.bool_]:
        """Return bool [rows]: the rows that ``negative_keep`` keeps."""
        if self.schema.negative_keep >= 1:
            return np.ones(part.rows, np.bool_)
        drawn: npt.NDArray[np.bool_] = _shares_of_rows(part, self.schema.seed + 1, (self.schema.negative_keep,)) == 0
        with part.open() as arrays:
            return drawn | ~(arrays["labels"] <= 0.5)  # all positives and rows without label

    def _position(self, part: LogPart, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the number of each row among the kept ones."""
        position: npt.NDArray[np.int64] = self._before[part.index] + np.cumsum(kept) - kept
        return position

    def _assign(self, part: LogPart, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        rule = self.rule.rule
        if rule == "runs":
            return _halved_runs(self._position(part, kept), self._total, self.rule.runs)
        if rule == "files":
            target = self._targets[part.file]
            if target != "halves":
                return np.full(part.rows, SPLIT_CODES[target], np.uint8)
            same = self._files == part.file
            within = self._position(part, kept) - self._before[same.argmax()]
            return np.where(within < -(-self._counts[same].sum() // 2), 2, 1).astype(np.uint8)
        if rule == "hash" and self.rule.column is None:
            return _shares_of_rows(part, self.rule.seed, (self.rule.train, self.rule.valid))
        with part.open() as arrays:
            if rule == "time":
                return self._cut(arrays["time"])
            if rule in ("hash", "column"):
                return np.array(arrays["split"])
            users = self._refs[part.index][arrays["codes.user"] - 1]
        if rule == "last_touch":
            return self._cut(self._last_time[users])
        rows = np.arange(part.start, part.start + part.rows)
        enough = self._seen[users] >= self.rule.min_rows
        result = np.zeros(part.rows, np.uint8)
        result[enough & (rows == self._latest_rows[0, users])] = 1
        result[enough & (rows == self._latest_rows[1, users])] = 2
        return result

    def _cut(self, times: Array) -> npt.NDArray[np.uint8]:
        return np.searchsorted(np.array(self._cuts, np.int64), times, side="right").astype(np.uint8)

    def _find_cuts(self, times: Callable[[], Iterable[npt.NDArray[np.int64]]], total: int) -> None:
        """Find the times at which validation and test begin. Equal times remain together, on the later side."""
        for share in np.cumsum([self.rule.train, self.rule.valid]):
            rank = int(np.ceil(share * total - 1e-9))
            highest = np.iinfo(np.int64).max
            self._cuts.append(
                select_rank(lambda: ((some, None) for some in times()), rank) if rank < total else highest
            )

    def _kept_times(self) -> Iterator[npt.NDArray[np.int64]]:
        for part in self.parts:
            with part.open() as arrays:
                yield arrays["time"][self._kept(part)]

    def _fit_users(self) -> None:
        """Find the last two rows of each user, in about 60 bytes of memory per user."""
        self._refs, users = number_groups(self.parts, "user")
        self._seen = np.zeros(users, np.int64)
        # [2, users]: the second latest and the latest row
        times, self._latest_rows = np.full((2, users), np.iinfo(np.int64).min), np.full((2, users), -1, np.int64)
        for part in self.parts:
            with part.open() as arrays:
                # A row that was not kept must not become a user's last one.
                kept = self._kept(part)
                found = self._refs[part.index][arrays["codes.user"][kept] - 1]
                _update_latest(found, arrays["time"][kept], part.start + np.flatnonzero(kept), times, self._latest_rows)
            np.add.at(self._seen, found, 1)
        self._last_time = times[1]
        if self.rule.rule == "last_touch":
            present = self._last_time[self._seen > 0]
            self._find_cuts(lambda: [present], len(present))


def number_groups(parts: Sequence[LogPart], name: str) -> tuple[list[npt.NDArray[np.int32]], int]:
    """Assign numbers to the distinct values of column ``name`` ("user", "group") over all parts.

    Returns:
        For each part, the numbers of the values of its dictionary; and how many values there are.
    """
    builder = TableBuilder("string")
    for part in parts:
        with part.open() as arrays:
            builder.add(read_dictionary(arrays, name, "string"))
    builder.merge()
    return builder.refs, builder.entries


def _update_latest(users: Array, times: Array, rows: Array, latest_times: Array, latest_rows: Array) -> None:
    """Update the two latest rows of each user in place; of equal times the later row wins.

    Args:
        users: [n] users of the rows of a part.
        times: [n] times of these rows.
        rows: [n] numbers of these rows, above those of earlier parts.
        latest_times: [2, all users] times of the two latest rows, ascending; the least int64 if there is no row.
        latest_rows: [2, all users] numbers of these rows; -1 if there is no row.
    """
    known, counts = np.unique(users, return_counts=True)
    users = np.concatenate([known, known, users])
    times = np.concatenate([*latest_times[:, known], times])
    rows = np.concatenate([*latest_rows[:, known], rows])
    order = np.lexsort((rows, times, users))
    last = np.cumsum(counts + 2) - 1
    latest = order[np.stack([last - 1, last])]
    latest_times[:, known], latest_rows[:, known] = times[latest], rows[latest]


def _shares_of_rows(part: LogPart, seed: int, shares: Sequence[float]) -> npt.NDArray[np.uint8]:
    """Return [rows]: the share into which the hash of each row's number falls; the last share takes the rest."""
    rows = np.arange(part.start, part.start + part.rows, dtype=np.uint64)
    return share_of_hash(splitmix(rows ^ splitmix(np.array([seed], np.uint64))), shares)


def _halved_runs(rows: npt.NDArray[np.int64], total: int, runs: int) -> npt.NDArray[np.uint8]:
    """Return the split of rows in equal runs. The last run is halved into test, then validation; the others train."""
    last = total // runs
    train = total - last
    result = np.zeros(len(rows), np.uint8)
    result[rows >= train] = 2
    result[rows >= train + -(-last // 2)] = 1
    return result
