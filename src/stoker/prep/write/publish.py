"""The last pass: parts to shards, then the manifest that declares the dataset whole."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.device import available_memory
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.base.units import format_size
from stoker.base.version import __version__
from stoker.dataset import manifest as stored
from stoker.dataset.integrity import written
from stoker.dataset.memory import Home
from stoker.dataset.reading.kept import kept_file
from stoker.dataset.shards import SHARD_ROWS, ShardFile, write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.prep.features.store import store_features, store_state
from stoker.prep.fit.fitting import Fitting, same_file
from stoker.prep.fit.split_rules import PartRows
from stoker.prep.like import FEATURES
from stoker.prep.parse.frames import parquet_rows
from stoker.prep.parse.layout import Layout, time_value
from stoker.prep.parse.quarantine import collect_quarantine
from stoker.prep.rows.raw_rows import Rows
from stoker.prep.stages.parts import PartFile
from stoker.prep.stages.task import SPLITS, Progress, Task
from stoker.prep.write.encode import Encoder, Slice, Target
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


class _Publisher:
    def __init__(self, task: Task, rows: Rows, fitting: Fitting) -> None:
        self.task, self.rows, self.fitting = task, rows, fitting
        self.layout, self.schema, self.out = task.layout, task.schema, task.out
        self._table_sizes = [fitting.tables[column.table_name]["rows"] for column in self.layout.features]
        self._wide = any(record["rows"] > 2**31 - 1 for record in fitting.tables.values())

    def run(self) -> dict[str, Any]:
        encoder = Encoder(self.layout, self.fitting.open, self.fitting.table_files, self.fitting.dense, wide=self._wide)
        counts = self._table_counts(encoder)
        times = self._times()
        home = self.task.home
        self._check_room()
        with ThreadPoolExecutor(2, thread_name_prefix="stoker-beside") as beside:
            # One thread has to look at all rows for the groups, one for kept columns; others write shards meanwhile.
            groups = beside.submit(write_groups, self.fitting, self.out) if self.layout.group is not None else None
            kept = beside.submit(write_kept, self.fitting, self.out) if self.layout.kept else None
            found = self._write_shards(encoder) if home is None else self._keep_rows(encoder, home)
            for name, ends in times.items():
                found.splits[name]["time"] = ends
            files = kept.result() if kept is not None else {}
            for name in SPLITS:
                if kept_file(name) in files:
                    found.splits[name]["keep"] = {"file": kept_file(name)}
            return self._finish(counts, found, files, groups.result() if groups is not None else None)

    def _write_shards(self, encoder: Encoder) -> _Written:
        """Encode all rows into files."""
        jobs = [job for number in range(3) for job in self._shards(number)]

        def work(job: tuple[str, list[Slice], int]) -> tuple[str, dict[str, Any], bool]:
            file, slices, split = job
            done = self.task.journal.finished(f"shard {file}")
            if done is not None and same_file(self.out / file, done):
                return file, done, True
            targets = encoder.allocate(slices, self._rows_of(split))
            made = [encoder.fill(target, self._rows_of(split)) for target in targets]
            info = write_shard(self.out / file, **targets[0].arrays)
            written(self.out / file, info.sha256, self._table_sizes)
            unknown = np.sum([ids for _, _, ids in made], axis=0).tolist()  # [2, F] zero ids, all ids
            sums = {"positives": sum(one for one, _, _ in made), "absent": sum(absent for _, absent, _ in made)}
            return file, {**info.to_dict(), **sums, "unknown": unknown}, False

        found = _Written(self.layout)
        for file, record, reused in ordered_map(work, jobs, self.task.threads):
            if not reused:
                self.task.journal.add(f"shard {file}", record)
            self.task.reused += reused
            split = file.split("/")[0]
            found.add(split, record["rows"], record["positives"], record.get("absent", 0), record["unknown"])
            found.splits[split]["shards"].append({key: record[key] for key in ("file", "rows", "bytes", "sha256")})
            self._report(found.rows)
        return found

    def _keep_rows(self, encoder: Encoder, home: Home) -> _Written:
        """Encode all rows into shards in memory, part by part: the memory of a part is free as soon as it is done."""
        found = _Written(self.layout)
        waiting: dict[int, list[tuple[int, Target]]] = defaultdict(list)  # by part, with the split
        shards: list[tuple[str, str, dict[str, Any]]] = []
        for split, name in enumerate(SPLITS):
            for file, slices, _ in self._shards(split):
                targets = encoder.allocate(slices, self._rows_of(split))
                for target in targets:
                    waiting[target.slice.part.index].append((split, target))
                arrays = targets[0].arrays
                shards.append((name, file, arrays))
                record = {"file": file, "rows": len(arrays["labels"]), "bytes": ShardFile(arrays).bytes, "sha256": None}
                found.splits[name]["shards"].append(record)

        def work(part: PartRows) -> list[tuple[str, int, int, int, list[list[int]]]]:
            made = []
            for split, target in waiting.pop(part.index, ()):
                rows = target.slice.end - target.slice.begin
                made.append((SPLITS[split], rows, *encoder.fill(target, self._rows_of(split))))
            self.task.parts.release(self.fitting.blocks[part.index].path)
            return made

        for made in ordered_map(work, self.fitting.parts, self.task.threads):
            for one in made:
                found.add(*one)
            self._report(found.rows)
        for name, file, arrays in shards:
            home.keep(name, file, arrays)
        return found

    def _rows_of(self, split: int) -> Callable[[PartRows], npt.NDArray[np.int64]]:
        return lambda part: np.flatnonzero(self.fitting.assign(part) == split)

    def _report(self, rows: int) -> None:
        self.task.report(Progress(stage="write", done=rows, total=int(self.fitting.sizes[:, :3].sum()), unit="rows"))

    def _table_counts(self, encoder: Encoder) -> dict[str, Any]:
        if any(column.oov != "reserved" for column in self.layout.features):
            for part in self.fitting.parts:
                self.fitting.drop(part, encoder.without_ids(part, self.fitting.place_of))
        if self.fitting.any_dropped and self.task.like is None:
            found = encoder.count(self.fitting.parts, self.fitting.train_rows)
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
            split = self.fitting.assign(part)
            with self.fitting.open(part) as arrays:
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
                with self.fitting.open(part) as arrays:
                    ids += sum(arrays.size(f"codes.{index}") for index in self.layout.sequences)
        rows = sum(part.rows for part in self.fitting.parts)
        lengths = 4 * len(self.layout.features) + 8 if self.layout.sequences else 0
        return 4 * (1 + len(self.schema.dense_names)) + lengths + (8 if self._wide else 4) * ids / rows

    def _bytes_beside(self, rows: int) -> int:
        """Bytes of the files of groups and kept columns, about."""
        size = 4 * rows if self.layout.group is not None else 0
        for part in self.fitting.parts if self.layout.kept else ():
            with self.fitting.open(part) as arrays:
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
        if self.task.home is not None:
            free_memory = available_memory()
            if free_memory is not None and whole > free_memory:
                raise DataError(
                    f"the prepared rows take {format_size(whole)}, but {format_size(free_memory)} of memory are free. "
                    "Pass out=DIRECTORY: rows are then read from there.",
                    settings=("out",),
                )
            return
        present = sum(f.stat().st_size for name in SPLITS for f in (self.out / name).glob("*.safetensors"))
        needed, free = max(0, whole - present), shutil.disk_usage(self.out).free
        if needed > free - _FREE:
            raise DataError(
                f"the shards need {format_size(needed)}, but the disk of {self.out} has "
                f"{format_size(free)} free. Free some space and run the same command "
                "again: finished parts are kept."
            )

    def _shards(self, split: int) -> Iterator[tuple[str, list[Slice], int]]:
        """File, pieces and split number of every shard of a split."""
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
                    yield f"{name}/{number:05d}.safetensors", slices, split
                    slices, room, number = [], whole, number + 1
        if slices:
            yield f"{name}/{number:05d}.safetensors", slices, split

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
