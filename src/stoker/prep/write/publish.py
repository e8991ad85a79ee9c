"""The last pass: parts to shards, then the manifest that declares the dataset whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.base.units import format_size
from stoker.base.version import __version__
from stoker.dataset import manifest as stored
from stoker.dataset.row_files import kept_file
from stoker.dataset.rows import note_checked
from stoker.dataset.shards import SHARD_ROWS, write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.prep.features.store import store_features, store_state
from stoker.prep.fit.fitting import Fitting, same_file
from stoker.prep.fit.split_rules import PartRows, SplitFile
from stoker.prep.fit.transforms import DenseFit
from stoker.prep.like import FEATURES
from stoker.prep.parse.frames import parquet_rows
from stoker.prep.parse.layout import Layout, time_value
from stoker.prep.parse.quarantine import collect_quarantine
from stoker.prep.rows.raw_rows import Rows
from stoker.prep.stages.parts import PartFile, made_in
from stoker.prep.stages.task import SPLITS, Progress, Task
from stoker.prep.write.encode import Encoder, Slice
from stoker.prep.write.group_numbers import Groups, write_groups
from stoker.prep.write.kept_files import write_kept

__all__ = ["publish"]

_FREE = 2**20  # bytes of disk left for the manifest and the like
_SHARD_BYTES = 2**26  # of a shard at most, as one lies in memory per thread while it is filled
_LEAST_ROWS = 2**12


def publish(task: Task, rows: Rows, fitting: Fitting) -> dict[str, Any]:
    """Write shards, counts, quarantine and, last, the manifest; returns the manifest."""
    return _Publisher(task, rows, fitting).run()


class _Written:
    """What the manifest says of the splits, summed up while their rows are encoded."""

    def __init__(self, layout: Layout) -> None:
        self._features = [column.name for column in layout.features]
        self.rows = 0
        self.splits: dict[str, dict[str, Any]] = {name: {"rows": 0, "positives": 0, "shards": []} for name in SPLITS}
        self.unknown = {name: {feature: [0, 0] for feature in self._features} for name in SPLITS}  # zero ids, all ids

    def add(self, split: str, rows: int, positives: int, absent: int, unknown: list[list[int]]) -> None:
        """Add rows of a split, of which ``absent`` have no label."""
        entry = self.splits[split]
        if absent or "labelled" in entry:  # datasets whose rows all have labels do not say so
            entry["labelled"] = entry.get("labelled", entry["rows"]) + rows - absent
        self.rows += rows
        self.splits[split]["rows"] += rows
        self.splits[split]["positives"] += positives
        for feature, zeros, ids in zip(self._features, *unknown, strict=True):
            self.unknown[split][feature][0] += zeros
            self.unknown[split][feature][1] += ids


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What every shard is made by."""

    layout: Layout
    splits: SplitFile
    tables: Mapping[str, Path]
    dense: Sequence[DenseFit]
    wide: bool  # ids need int64

    def encoder(self) -> Encoder:
        return Encoder(self.layout, self.splits, self.tables, self.dense, wide=self.wide)


@dataclass(frozen=True, kw_only=True)
class _ShardJob:
    """A shard to make, in any process."""

    plan: _Plan
    out: Path
    file: str  # within ``out``
    slices: list[Slice]
    split: int
    done: dict[str, Any] | None  # the record of an earlier run


def _make_shard(job: _ShardJob) -> tuple[dict[str, Any], bool]:
    """Make a shard; return its record, and whether an earlier run has left it."""
    if job.done is not None and same_file(job.out / job.file, job.done):
        return job.done, True
    made = job.plan.encoder().encode(job.slices, job.split)
    with made_in(job.out / ".work", job.out / job.file) as path:
        info = write_shard(path, **made.arrays)
    sums = {"positives": made.positives, "absent": made.absent, "unknown": made.unknown}
    return {**info.to_dict(), **sums}, False


class _Publisher:
    def __init__(self, task: Task, rows: Rows, fitting: Fitting) -> None:
        self.task, self.rows, self.fitting = task, rows, fitting
        self.layout, self.schema, self.out = task.layout, task.schema, task.out
        self._table_sizes = [fitting.tables[column.table_name]["rows"] for column in self.layout.features]
        self._plan = _Plan(
            layout=task.layout, splits=fitting.splits, tables=fitting.table_files, dense=fitting.dense,
            wide=any(record["rows"] > 2**31 - 1 for record in fitting.tables.values()),
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        counts = self._table_counts()
        times = self._times()
        self._check_room()
        with ThreadPoolExecutor(2, thread_name_prefix="stoker-beside") as beside:
            # One thread has to look at all rows for the groups, one for kept columns; others write shards meanwhile.
            groups = beside.submit(write_groups, self.fitting, self.out) if self.layout.group is not None else None
            kept = beside.submit(write_kept, self.fitting, self.out) if self.layout.kept else None
            found = self._write_shards()
            for name, ends in times.items():
                found.splits[name]["time"] = ends
            files = kept.result() if kept is not None else {}
            for name in SPLITS:
                if kept_file(name) in files:
                    found.splits[name]["keep"] = {"file": kept_file(name)}
            return self._finish(counts, found, files, groups.result() if groups is not None else None)

    def _write_shards(self) -> _Written:
        """Encode all rows."""
        jobs = [
            _ShardJob(
                plan=self._plan, out=self.out, file=file, slices=slices, split=number,
                done=self.task.journal.done.get(f"shard {file}"),
            )
            for number in range(3)
            for file, slices in self._shards(number)
        ]  # fmt: skip
        found = _Written(self.layout)
        for job, (record, reused) in zip(jobs, self.task.map(_make_shard, jobs), strict=True):
            if not reused:
                self.task.journal.add(f"shard {job.file}", record)
                note_checked(self.out / job.file, record["sha256"], self._table_sizes)
            self.task.reused += reused
            split = SPLITS[job.split]
            found.add(split, record["rows"], record["positives"], record.get("absent", 0), record["unknown"])
            found.splits[split]["shards"].append({key: record[key] for key in ("file", "rows", "bytes", "sha256")})
            self._report(found.rows)
        return found

    def _report(self, rows: int) -> None:
        self.task.report(Progress(stage="write", done=rows, total=int(self.fitting.sizes[:, :3].sum()), unit="rows"))

    def _table_counts(self) -> dict[str, Any]:
        encoder = self._plan.encoder()
        if any(column.oov != "reserved" for column in self.layout.features):
            for part in self.fitting.parts:
                self.fitting.drop(part, encoder.without_ids(part, self.fitting.place_of))
        if self.fitting.any_dropped and self.task.like is None:
            found = encoder.count(self.fitting.parts)
            return {name: torch.from_numpy(array) for name, array in found.items()}
        counts = {}
        for name, path in self.fitting.table_files.items():
            with PartFile(path) as arrays:
                counts[name] = torch.from_numpy(np.array(arrays["counts"]))
        return counts

    def _times(self) -> dict[str, dict[str, Any]]:
        """Return the first and the last time of the rows of each split that has rows, where rows have a time."""
        timestamp = self.schema.timestamp
        if timestamp is None:
            return {}

        def ends_of(part: PartRows) -> list[tuple[int, int, int]]:
            split = self.fitting.splits.assign(part)
            with part.open() as arrays:
                of = [(number, arrays["time"][split == number]) for number in range(len(SPLITS))]
                return [(number, int(times.min()), int(times.max())) for number, times in of if len(times)]

        found: dict[str, tuple[int, int]] = {}
        for ends in ordered_map(ends_of, self.fitting.parts, self.task.threads):
            for number, first, last in ends:
                least, most = found.get(SPLITS[number], (first, last))
                found[SPLITS[number]] = min(first, least), max(last, most)
        return {
            name: {"first": time_value(first, timestamp.type), "last": time_value(last, timestamp.type)}
            for name, (first, last) in found.items()
        }

    def _row_bytes(self) -> float:
        """Mean size of a row in a shard."""
        ids = len(self.layout.one_hot) * sum(part.rows for part in self.fitting.parts)
        if self.layout.sequences:
            for part in self.fitting.parts:
                with part.open() as arrays:
                    ids += sum(arrays.size(f"codes.{index}") for index in self.layout.sequences)
        rows = sum(part.rows for part in self.fitting.parts)
        lengths = 4 * len(self.layout.features) + 8 if self.layout.sequences else 0
        return 4 * (1 + len(self.schema.dense_names)) + lengths + (8 if self._plan.wide else 4) * ids / rows

    def _bytes_beside(self, rows: int) -> int:
        """Bytes of the files of groups and kept columns, about."""
        size = 4 * rows if self.layout.group is not None else 0
        for part in self.fitting.parts if self.layout.kept else ():
            with part.open() as arrays:
                size += arrays.size("keep")
        return size

    def _shard_rows(self) -> int:
        """The power of two that keeps a shard within its bytes."""
        rows, per_row = SHARD_ROWS, self._row_bytes()
        while rows > _LEAST_ROWS and rows * per_row > _SHARD_BYTES:
            rows //= 2
        return rows

    def _check_room(self) -> None:
        rows = int(self.fitting.sizes[:, :3].sum())
        per_row = self._row_bytes()
        whole = int(rows * per_row) + self._bytes_beside(rows)
        present = sum(f.stat().st_size for name in SPLITS for f in (self.out / name).glob("*.safetensors"))
        needed, free = max(0, whole - present), shutil.disk_usage(self.out).free
        if needed > free - _FREE:
            raise DataError(
                f"the shards need {format_size(needed)}, but the disk of {self.out} has "
                f"{format_size(free)} free. {self.task.remedy_of_full_disk(kept=True)}"
            )

    def _shards(self, split: int) -> Iterator[tuple[str, list[Slice]]]:
        """File and pieces of every shard of a split."""
        name, number = SPLITS[split], 0
        slices: list[Slice] = []
        room = whole = self._shard_rows()
        for part in self.fitting.parts:
            begin, end = 0, int(self.fitting.sizes[part.index, split])
            while begin < end:
                take = min(room, end - begin)
                slices.append(Slice(part=part, begin=begin, end=begin + take))
                begin, room = begin + take, room - take
                if room == 0:
                    yield f"{name}/{number:05d}.safetensors", slices
                    slices, room, number = [], whole, number + 1
        if slices:
            yield f"{name}/{number:05d}.safetensors", slices

    def _finish(
        self,
        counts: dict[str, Any],
        found: _Written,
        kept: dict[str, Any],
        groups: Groups | None,
    ) -> dict[str, Any]:
        bad_blocks = [(block.source.name, block.lines_before, block.bad_path) for block in self.rows.raw if block.bad]
        bad = collect_quarantine(self.out / "quarantine.jsonl", bad_blocks)
        files = {"quarantine.jsonl": stored.describe_file(self.out / "quarantine.jsonl")}
        files["counts.safetensors"] = stored.write_counts(self.out, counts)
        like = self.task.like
        if like is not None:
            files |= like.copy("vocab/", self.out) | like.copy(f"{FEATURES}/", self.out)
        if self.schema.feature and (like is None or self.rows.learned):
            folder, tables = self.out / FEATURES, self.rows.learned
            made = store_features(folder, self.schema.feature, tables) if like is None else store_state(folder, tables)
            files |= {f"{FEATURES}/{name}": entry for name, entry in made.items()}
        files |= {
            f"vocab/{name}.parquet": record["vocab"]
            for name, record in sorted(self.fitting.tables.items())
            if "vocab" in record
        }
        files |= kept
        grouped: dict[str, Any] = {}
        splits = found.splits
        if groups is not None:
            grouped["groups"], of_splits, made = groups
            files |= made
            splits = {name: entry | self._groups_of(of_splits, name) for name, entry in splits.items()}
        features = FeatureSpec(
            dense=self.schema.dense_names,
            features=tuple(column.feature() for column in self.layout.features),
            num_embeddings={name: record["rows"] for name, record in self.fitting.tables.items()},
        )
        schema = self.schema.to_dict()
        manifest = {
            "stoker_version": __version__,
            "created_by": self.task.recipe.command,
            "recipe": {"name": self.task.recipe.name, "preset": self.task.recipe.preset_name},
            "schema": schema,
            "schema_hash": like.data.schema_hash
            if like is not None
            else stored.hash_schema(
                {key: value for key, value in schema.items() if key != "keep"}  # which no id and no value depends on
            ),
            "features": features.to_dict(),
            "dense_stats": {c.name: vars(item) for c, item in zip(self.schema.dense, self.fitting.dense, strict=True)},
            "splits": splits,
            "unknown": found.unknown,
            "files": files,
            "sources": self._sources(),
            "quarantined": bad,
            **grouped,
        }
        if like is not None:
            manifest["like"] = {"source": str(like.data.path), "schema_hash": like.data.schema_hash}
        stored.write_manifest(self.out, manifest)
        return manifest

    @staticmethod
    def _groups_of(of_splits: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
        return {"groups": of_splits[name]} if name in of_splits else {}

    def _sources(self) -> list[dict[str, Any]]:
        # Parquet inputs of a derivation are read by the recipe: their rows are known from their footers.
        read = {block.source.path for block in self.rows.raw}
        rows = {path: [0 if path in read else parquet_rows(path), 0] for path in self.task.files}
        breaks = {block.source.path: block.lines_before + block.lines for block in self.rows.raw if block.broken}
        for block in self.rows.raw:
            rows[block.source.path][0] += block.rows
            rows[block.source.path][1] += block.bad
        return [
            {"file": path.name, "bytes": path.stat().st_size, "rows": good, "bad": bad}
            | ({"breaks_off": breaks[path]} if path in breaks else {})
            for path, (good, bad) in rows.items()
        ]
