"""Datasets whose training rows are classified: all hot ones first, then all cold ones, in shards of their own.

FAE (VLDB 2022), section 4.2: batches of hot rows only need nothing but hot rows of the tables. The result is a dataset
like any other; its manifest says under ``hot_cold`` where the cold shards begin and by which profile they were told.

One pass: threads check, classify and copy a shard of the source each, others hash and write what was filled. About ten
shards lie in memory at a time, however many there are.

Legend: n rows, F features, L ids in all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.device import check_threads
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset
from stoker.dataset.group_writer import GroupWriter
from stoker.dataset.groups import group_file, write_group_file
from stoker.dataset.integrity import ShardChecks
from stoker.dataset.manifest import write_manifest
from stoker.dataset.reading.gather import make_gather
from stoker.dataset.rebuild import rebuilt
from stoker.dataset.shards import write_shard
from stoker.rewrite.hot_mask import make_hot_mask

__all__ = ["ClassifyReport", "Profiled", "run_classify"]

_WRITERS = 2  # threads that hash and write shards; they mostly wait for the disk

Part = dict[str, npt.NDArray[Any]]  # the tensors of a shard, or of some of its rows
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What a profile says, as far as rows are classified by it."""

    hot_rows: Mapping[str, int]  # table -> H; the ids below H are hot
    hash: str  # of the profile
    values: Mapping[str, Any]  # the profile in plain values, kept in the manifest


@dataclass(frozen=True, kw_only=True)
class ClassifyReport:
    """What was done."""

    path: Path
    hot: int  # training rows
    cold: int
    seconds: float
    reused: bool  # the dataset was there already, classified by the same profile


def run_classify(
    data: Dataset,
    profile: Profiled,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ClassifyReport:
    """Write a dataset with the training rows of ``data`` classified; all else is linked, or copied where it cannot be.

    Both parts keep the order of the source. The directory appears whole or not at all.

    Args:
        data: the source.
        profile: which rows of the tables are hot.
        out: directory to make. One that was classified from the same rows by the same profile is taken as it is.
        overwrite: replace a dataset that is there.
        progress: called with (what, rows done, rows in all).
        threads: that classify; None: one per core. Does not change a byte of the result.

    Raises:
        DataError: ``out`` holds something else, a shard of ``data`` is damaged, a profile that does not fit its tables,
            or a full disk.
    """
    started = time.perf_counter()
    out = Path(out)
    data.train  # noqa: B018  (refuses a dataset without the split)
    if not overwrite and (there := _classified(data, profile, out)) is not None:
        return _report(there, started, reused=True)
    size = data.train.bytes
    grouped = [group_file("train")] if "groups" in data.train.entry else []
    with rebuilt(data, out, splits=("train",), files=grouped, size=size, overwrite=overwrite) as folder:
        writer = _Writer(data, profile.hot_rows, folder, progress or _quiet, check_threads(threads))
        hot, cold = writer.run()
        shards = [*hot.shards, *cold.shards]
        groups, files = writer.write_groups() if grouped else ({}, {})
        manifest = {
            **data.manifest,
            "splits": {
                **data.manifest["splits"],
                "train": {
                    **{name: data.train.entry[name] for name in ("time",) if name in data.train.entry},
                    "rows": hot.rows + cold.rows,
                    "positives": hot.positives + cold.positives,
                    "shards": shards,
                    **groups,
                },
            },
            **({"files": {**data.manifest["files"], **files}} if files else {}),
            "hot_cold": {
                "hot_rows_of_train": hot.rows,
                "hot_positives": hot.positives,
                "hot_shards": len(hot.shards),
                "hot_rows": {table: int(rows) for table, rows in profile.hot_rows.items()},
                "profile_hash": profile.hash,
                "profile": dict(profile.values),
                "source": str(data.path.resolve()),
                "source_data_hash": data.train.data_hash,
                "stoker_version": __version__,
            },
        }
        write_manifest(folder, manifest)
    return _report(Dataset(out), started, reused=False)


def _quiet(what: str, done: int, total: int) -> None: ...


def _report(data: Dataset, started: float, *, reused: bool) -> ClassifyReport:
    return ClassifyReport(
        path=data.path, hot=len(data.hot), cold=len(data.cold), seconds=time.perf_counter() - started, reused=reused
    )


def _classified(data: Dataset, profile: Profiled, out: Path) -> Dataset | None:
    """The dataset at ``out``, where it is what would be written there.

    Raises:
        DataError: it was classified from the same rows by another profile.
    """
    try:
        there = Dataset(out)
    except DataError:
        return None  # nothing of use: what is wrong with it is for the writer to say
    known = there.hot_cold
    if known is None or there.path.resolve() == data.path.resolve():
        return None
    if known["source_data_hash"] != data.train.data_hash or there.schema_hash != data.schema_hash:
        return None
    if known["profile_hash"] == profile.hash:
        return there
    raise DataError(
        f"{out} was classified by another profile (hash {str(known['profile_hash'])[:16]}, this one "
        f"{profile.hash[:16]}). Choose another directory, or pass overwrite=True to classify anew.",
        settings=("overwrite",),
    )


class _Pile:
    """Rows of one kind on their way into shards."""

    def __init__(self, kind: str, shard_rows: int) -> None:
        self.kind = kind
        self.rows = self.positives = 0
        self.shards: list[dict[str, Any]] = []  # manifest entries, in order
        self.writing: deque[tuple[Future[dict[str, Any]], int, int]] = deque()
        self._shard_rows = shard_rows
        self._parts: list[Part] = []
        self._waiting = 0  # rows in them
        self._number = 0

    def add(self, part: Part) -> Iterator[tuple[str, list[Part]]]:
        """Take rows; file and parts of every shard that they fill."""
        while (room := self._shard_rows - self._waiting) <= len(part["labels"]):
            self._parts.append(_rows(part, 0, room))
            part = _rows(part, room, len(part["labels"]))
            yield from self.rest()
        self._parts.append(part)
        self._waiting += len(part["labels"])

    def rest(self) -> Iterator[tuple[str, list[Part]]]:
        """The shard that holds what waits, if anything does."""
        parts, self._parts, self._waiting = self._parts, [], 0
        if any(len(part["labels"]) for part in parts):
            yield f"train/{self.kind}_{self._number:05d}.safetensors", parts
            self._number += 1

    def drain(self, most: int) -> None:
        """Wait until no more than ``most`` shards are being written."""
        while len(self.writing) > most:
            future, rows, positives = self.writing.popleft()
            self.shards.append(future.result())
            self.rows += rows
            self.positives += positives


def _rows(part: Part, start: int, stop: int) -> Part:
    """Rows [start, stop)."""
    taken = {name: part[name][start:stop] for name in ("dense", "labels")}
    if "lengths" not in part:
        return taken | {"ids": part["ids"][start:stop]}
    ends = part["row_offsets"][start : stop + 1]
    return taken | {
        "lengths": part["lengths"][start:stop], "ids": part["ids"][ends[0] : ends[-1]], "row_offsets": ends - ends[0],
    }  # fmt: skip


def _joined(parts: list[Part]) -> Part:
    """The tensors of all rows, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    names = [name for name in parts[0] if name != "row_offsets"]
    made = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if "lengths" in made:
        sums = made["lengths"].sum(axis=1, dtype=np.int64)
        made["row_offsets"] = np.concatenate((np.zeros(1, np.int64), np.cumsum(sums)))
    return made


class _Writer:
    """Classifies the training rows of a dataset into shards below ``folder``."""

    def __init__(
        self, data: Dataset, hot_rows: Mapping[str, int], folder: Path, progress: Progress, threads: int
    ) -> None:
        self.split, self.folder, self.progress, self.threads = data.train, folder, progress, threads
        self.mask = make_hot_mask(data.schema, hot_rows)
        self.features = len(data.schema.features)
        self.hot_bits: dict[int, npt.NDArray[np.uint8]] = {}  # of each shard of the source, a bit a row

    def run(self) -> tuple[_Pile, _Pile]:
        """The shards of both kinds, written.

        Raises:
            DataError: a shard of the source is damaged, or the disk is full.
        """
        split = self.split
        biggest = max((shard.rows for shard in split.shards), default=1)
        hot, cold = piles = (_Pile("hot", biggest), _Pile("cold", biggest))
        if not split.rows:
            return piles
        self.checks = ShardChecks(split)
        self.gather = make_gather(split.shards, split.starts)
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="stoker-write") as pool:
            numbers = range(len(split.shards))
            with closing(ordered_map(self._classify, numbers, self.threads)) as classified:
                for number, parts in zip(numbers, classified, strict=True):
                    for pile, part in zip(piles, parts, strict=True):
                        for file, rows in pile.add(part):
                            self._write(pool, pile, file, rows)
                    self.progress("classify", split.starts[number + 1], split.rows)
            for pile in piles:
                for file, rows in pile.rest():
                    self._write(pool, pile, file, rows)
                pile.drain(0)
        return hot, cold

    def _write(self, pool: ThreadPoolExecutor, pile: _Pile, file: str, parts: list[Part]) -> None:
        rows = sum(len(part["labels"]) for part in parts)
        positives = sum(int(np.count_nonzero(part["labels"] > 0.5)) for part in parts)
        pile.writing.append((pool.submit(self._write_shard, file, parts), rows, positives))
        pile.drain(_WRITERS)  # what waits to be written lies in memory

    def _write_shard(self, file: str, parts: list[Part]) -> dict[str, Any]:
        return write_shard(self.folder / file, **_joined(parts)).to_dict()

    def _classify(self, number: int) -> tuple[Part, ...]:
        """Hot and cold rows of one shard of the source."""
        shard, first = self.split.shards[number], self.split.starts[number]
        self.checks.before(first, first + shard.rows)
        hot = self.mask(shard)
        if "groups" in self.split.entry:
            self.hot_bits[number] = np.packbits(hot)
        parts = tuple(self._take(first + np.flatnonzero(which)) for which in (hot, ~hot))
        shard.release()
        return parts

    def write_groups(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the groups of the rows in their new order; the entries of the split and of the file."""
        groups, split = self.split.groups, self.split
        assert groups is not None
        writer = GroupWriter(int(split.entry["groups"]["count"]))

        def numbers() -> Iterator[npt.NDArray[np.int32]]:
            for wanted in (True, False):
                for number, shard in enumerate(split.shards):
                    hot = np.unpackbits(self.hot_bits[number], count=shard.rows).astype(np.bool_)
                    chosen = np.flatnonzero(hot == wanted)
                    yield writer.add(groups[split.starts[number] + chosen], shard.labels[chosen])

        file = group_file("train")
        written = write_group_file(self.folder / file, split.rows, numbers())
        return {"groups": {**writer.summary(), "file": file}}, {file: written}

    def _take(self, rows: npt.NDArray[np.int64]) -> Part:
        tensors = self.gather(rows, _fresh)
        part = {name: tensors[name].numpy() for name in ("dense", "ids", "labels")}
        if "offsets" in tensors:
            offsets = tensors["offsets"].numpy()
            part["lengths"] = np.diff(offsets).astype(np.int32).reshape(len(rows), self.features)
            part["row_offsets"] = offsets[:: self.features].copy()
        return part


def _fresh(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
