"""Raw click logs in, a dataset directory out: bounded memory, resumable, the same bytes for the same input.

Passes: raw blocks to typed parts (:mod:`stoker.data.ingest`); splits, tables and statistics from training
rows; parts to shards. Finished steps are in the journal of ``OUT/.work``, which goes when the manifest is
written.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import stoker
from stoker.data import dataset as stored
from stoker.data.columns import Block, Field
from stoker.data.encode import Encoder, Slice, build_table
from stoker.data.features import FeatureSpec
from stoker.data.frames import block_frame
from stoker.data.ingest import IngestedBlock, Source, ingest, ordered_map
from stoker.data.layout import Layout
from stoker.data.parts import Journal, PartFile, checksum, write_part
from stoker.data.quarantine import BadLineLimit, collect_quarantine
from stoker.data.recipe import RawInput, Recipe
from stoker.data.schema import Schema, SourceFormat
from stoker.data.shards import SHARD_ROWS, hash_file
from stoker.data.sources import BLOCK_BYTES, expand
from stoker.data.split_rules import PartRows, Splitter, targets_of_files
from stoker.data.transforms import DenseFit, fit_dense
from stoker.errors import DataError
from stoker.units import format_size

if TYPE_CHECKING:
    from stoker.data.dataset import Dataset

__all__ = ["PrepareReport", "Progress", "load_recipe", "prepare", "run_prepare"]

WORK_VERSION = 1  # of the parts; raise it when their content changes
SPLITS = ("train", "valid", "test")
_OURS = ("manifest.json", "counts.safetensors", "quarantine.jsonl", "vocab", ".work", *SPLITS)
_FREE = 2**26  # bytes of disk left alone


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Passed to the ``progress`` callback: a stage and how much of it is done."""

    stage: str  # read | derive | fit | write
    done: int
    total: int
    unit: str  # bytes | steps | rows


@dataclass(kw_only=True)
class PrepareReport:
    """What a preparation did."""

    path: Path
    rows: dict[str, int]  # split -> rows
    positives: dict[str, int]
    tables: dict[str, dict[str, float]]  # table -> rows, unknown (share of valid and test ids that are 0)
    lines: int
    bad: int
    seconds: float
    peak_memory: int  # bytes, of this process since it began
    reused: int  # steps that an interrupted run had finished
    dropped: int = 0  # rows that a split rule, sampling or an oov policy left out


def prepare(
    recipe: Recipe | Schema | str | os.PathLike[str],
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    preset: str | None = None,
    strict: bool = False,
    max_bad: str | float | None = None,
    overwrite: bool = False,
    resume: bool = True,
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Dataset:
    """Prepare raw logs into a dataset directory.

    Args:
        recipe: a recipe or its name, a schema, or the path of a TOML or YAML schema file.
        files: raw files or glob patterns: delimited text, Parquet or JSON lines; text also as .gz or .zst.
        out: directory to make.
        preset: of the recipe; None: its first.
        strict: stop at the first bad line.
        max_bad: share of lines that may be bad, e.g. ``"0.1%"``; None: any.
        overwrite: replace a dataset that is there.
        resume: go on where an interrupted run stopped; False starts from the beginning.
        threads: that parse and encode; None: one per core. Does not change a byte of the result.
        progress: called from the calling thread as work gets done.

    Returns:
        The dataset, opened.

    Raises:
        SchemaError: a schema that does not fit the files or contradicts itself. DataError: no usable input,
        a missing column, a label outside {0, 1}, too many bad lines, a full disk, or
            an output directory that is in use.
    """
    run_prepare(
        recipe, files, out=out, preset=preset, strict=strict, max_bad=max_bad, overwrite=overwrite, resume=resume,
        threads=threads, progress=progress,
    )  # fmt: skip
    return stored.Dataset(out)


def run_prepare(
    recipe: Recipe | Schema | str | os.PathLike[str],
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    preset: str | None = None,
    strict: bool = False,
    max_bad: str | float | None = None,
    overwrite: bool = False,
    resume: bool = True,
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> PrepareReport:
    """As :func:`prepare`, returning what was done."""
    chosen, schema = load_recipe(recipe, preset)
    if isinstance(files, str | os.PathLike):
        files = [files]
    work = _Preparation(
        recipe=chosen,
        schema=schema,
        files=expand(files),
        out=Path(out),
        limit=BadLineLimit(strict=strict, max_bad=max_bad),
        threads=threads or _cores(),
        report=progress or (lambda _: None),
        block_bytes=block_bytes,
    )
    try:
        return work.run(overwrite=overwrite, resume=resume)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no room left on the disk of {out} ({format_size(shutil.disk_usage(Path(out)).free)} free). Free some "
                "space and run the same command again: finished parts are kept."
            ) from error
        raise


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def load_recipe(
    recipe: Recipe | Schema | str | os.PathLike[str], preset: str | None
) -> tuple[Recipe, Schema]:
    """The recipe with its preset chosen, and its schema; an own schema becomes a recipe of its own."""
    if isinstance(recipe, str) and not recipe.endswith((".toml", ".yaml", ".yml")):
        from stoker.data import recipes

        recipe = recipes.get(recipe)
    if isinstance(recipe, Recipe):
        recipe = recipe.with_preset(preset)
        return recipe, recipe.schema()
    if preset is not None:
        raise DataError("a preset belongs to a recipe; a schema has none. Leave --preset out.")
    schema = recipe if isinstance(recipe, Schema) else Schema.from_file(recipe)
    own = Recipe(name=schema.name, description="own schema", presets={"schema": lambda: schema})
    return own, schema


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:
        return 0
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(kw_only=True)
class _Preparation:
    recipe: Recipe
    schema: Schema
    files: list[Path]
    out: Path
    limit: BadLineLimit
    threads: int
    report: Callable[[Progress], None]
    block_bytes: int = BLOCK_BYTES
    reused: int = 0
    quarantine: list[IngestedBlock] = field(default_factory=list)

    def run(self, *, overwrite: bool, resume: bool) -> PrepareReport:
        started = time.perf_counter()
        self.layout = Layout(self.schema)
        if self.schema.split.rule == "files" and self.recipe.derive is None:
            targets_of_files(self.schema, [path.name for path in self.files])
        self._claim(overwrite)
        self.work = self.out / ".work"
        self.journal = Journal(self.work, self._fingerprint(), resume=resume)
        try:
            if len(self.journal.done) == 0:
                self._remove(keep=(".work",))
            self._ingest()
            self._split()
            tables = self._tables()
            fit = self._fit()
            manifest = self._write(tables, fit)
        finally:
            self.journal.close()
        shutil.rmtree(self.work)
        rows = {name: entry["rows"] for name, entry in manifest["splits"].items()}
        return PrepareReport(
            path=self.out,
            rows=rows,
            positives={name: entry["positives"] for name, entry in manifest["splits"].items()},
            tables=self._table_summary(manifest),
            lines=self.limit.lines,
            bad=manifest["quarantined"],
            seconds=time.perf_counter() - started,
            peak_memory=_peak_memory(),
            reused=self.reused,
            dropped=sum(part.rows for part in self.parts) - sum(rows.values()),
        )

    # Directory ----------------------------------------------------------------------------------------------

    def _claim(self, overwrite: bool) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise DataError(f"{self.out} is a file. Choose another --out.")
        present = {entry.name for entry in self.out.iterdir()} if self.out.exists() else set()
        if "manifest.json" in present:
            if not overwrite:
                raise DataError(
                    f"{self.out} already holds a dataset. Choose another --out, or pass --overwrite."
                )
            (self.out / "manifest.json").unlink()  # from here on nobody takes the old files for a dataset
            shutil.rmtree(self.out / ".work", ignore_errors=True)
        elif present and ".work" not in present and not present <= set(_OURS):
            foreign = sorted(present - set(_OURS))
            raise DataError(
                f"{self.out} is not empty and no dataset ({', '.join(foreign[:3])} ...). Choose another --out."
            )
        self.out.mkdir(parents=True, exist_ok=True)

    def _remove(self, keep: Sequence[str] = ()) -> None:
        for name in _OURS:
            path = self.out / name
            if name not in keep and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "work_version": WORK_VERSION,
            "stoker": stoker.__version__,
            "recipe": [self.recipe.name, self.recipe.preset_name],
            "schema": self.schema.hash(),
            "block_bytes": self.block_bytes,
            "files": [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in self.files],
        }

    # Raw lines to parts -------------------------------------------------------------------------------------

    def _ingest(self) -> None:
        fields = self.layout.fields
        if self.recipe.derive is None:
            sources = [
                Source(number=number, path=path, fields=fields, format=self.schema.source)
                for number, path in enumerate(self.files)
            ]
            self.blocks = self._run_ingest(sources, "parts", self._sink, self.limit)
            self.quarantine += self.blocks
        else:
            derived = Source(
                number=0, path=self._derive(), fields=fields, format=SourceFormat(kind="parquet")
            )
            # What a derivation yields is the recipe's own doing: a row that does not fit is a defect to show at once.
            self.blocks = self._run_ingest([derived], "parts", self._sink, BadLineLimit(strict=True))
        self.parts: list[PartRows] = []
        start = 0
        for index, block in enumerate(self.blocks):
            self.parts.append(PartRows(index=index, file=block.source.number, start=start, rows=block.rows))
            start += block.rows

    def _run_ingest(
        self,
        sources: Sequence[Source],
        name: str,
        sink: Callable[[Block, str, Path], Any],
        limit: BadLineLimit,
    ) -> list[IngestedBlock]:
        total = sum(source.path.stat().st_size for source in sources)
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            self.report(Progress(stage="read", done=done, total=total, unit="bytes"))

        blocks, reused = ingest(
            sources, self.work / name, self.journal, sink, limit=limit, threads=self.threads, progress=advance,
            block_bytes=self.block_bytes, suffix=".parquet" if sink is _raw_sink else ".part",
        )  # fmt: skip
        self.reused += reused
        return blocks

    def _sink(self, block: Block, file: str, path: Path) -> dict[str, int]:
        return write_part(path, self.layout.arrays(block, file))

    def _derive(self) -> Path:
        """Check and type the raw lines of every input, then let the recipe make the training rows."""
        import polars as pl

        assert self.recipe.derive is not None
        frames: dict[str, pl.LazyFrame] = {}
        for name, raw, paths in _match_inputs(self.recipe, self.files):
            if paths:
                frames[name] = self._raw_frame(name, raw, paths)
        path = self.work / "derived.parquet"
        if self.journal.finished("derived", path) is None:
            self.report(Progress(stage="derive", done=0, total=1, unit="steps"))
            beside = path.with_suffix(".tmp")
            self.recipe.derive(frames, self.schema).sink_parquet(
                beside, maintain_order=True, engine="streaming", row_group_size=2**17, compression="lz4"
            )
            os.replace(beside, path)
            self.journal.add("derived", checksum(path))
        else:
            self.reused += 1
        self.report(Progress(stage="derive", done=1, total=1, unit="steps"))
        return path

    def _raw_frame(self, name: str, raw: RawInput, paths: Sequence[Path]) -> Any:
        import polars as pl

        from stoker.data.sources import source_kind

        parquet = [path for path in paths if source_kind(path, raw.format.kind) == "parquet"]
        if parquet:
            if len(parquet) < len(paths):
                raise DataError(f"the {name} files mix Parquet and text. Convert them to one of the two.")
            return pl.scan_parquet(parquet)
        fields = [
            Field(column=column, kind=kind, required=column in raw.required)
            for column, kind in raw.columns.items()
        ]
        sources = [
            Source(number=self.files.index(path), path=path, fields=fields, format=raw.format)
            for path in paths
        ]
        blocks = self._run_ingest(sources, f"raw-{name}", _raw_sink, self.limit)
        self.quarantine += blocks
        return pl.scan_parquet([block.path for block in blocks])

    # Splits, tables, statistics -----------------------------------------------------------------------------

    def _open(self, part: PartRows) -> PartFile:
        return PartFile(self.blocks[part.index].path)

    def _split(self) -> None:
        names = [path.name for path in self.files]
        self.splitter = Splitter(self.schema, self.parts, names, self._open)
        self._lock = threading.Lock()
        self._assigned: dict[int, npt.NDArray[np.uint8]] = {}
        self._dropped: dict[int, npt.NDArray[np.uint8]] = {}
        sizes = np.zeros((len(self.parts), 4), np.int64)
        for part in self.parts:
            sizes[part.index] = np.bincount(np.minimum(self._assign(part), 3), minlength=4)
        self.sizes = sizes
        if not sizes[:, 0].any():
            raise DataError(
                f"the split rule {self.schema.split.rule!r} leaves no training row of "
                f"{int(sizes.sum()):,}. Change the split in the schema."
            )

    def _assign(self, part: PartRows) -> npt.NDArray[np.uint8]:
        """Splits of a part's rows; the latest few parts are remembered, as tables ask for them in turn."""
        with self._lock:
            known = self._assigned.get(part.index)
        if known is None:
            known = self.splitter.assign(part)
            with self._lock:
                if len(self._assigned) > 64:
                    self._assigned.clear()
                self._assigned[part.index] = known
        if part.index in self._dropped:
            bits = np.unpackbits(self._dropped[part.index], count=part.rows).astype(np.bool_)
            return np.where(bits, np.uint8(255), known)
        return known

    def _train_rows(self, part: PartRows) -> npt.NDArray[np.bool_] | None:
        if not self.sizes[part.index, 0]:
            return None
        return self._assign(part) == 0

    def _tables(self) -> dict[str, dict[str, Any]]:
        names = list(dict.fromkeys(column.table_name for column in self.layout.features))
        directory = self.work / "tables"
        directory.mkdir(exist_ok=True)
        self.table_files = {name: directory / f"{number:05d}.part" for number, name in enumerate(names)}

        def work(name: str) -> tuple[str, dict[str, Any], bool]:
            path = self.table_files[name]
            done = self.journal.finished(f"table {name}", path)
            vocabulary = self.out / "vocab" / f"{name}.parquet"
            if done is not None and (not done.get("vocab") or _same(vocabulary, done["vocab"])):
                return name, done, True
            record = build_table(
                name, self.layout, self.parts, self._open, self._train_rows, path, vocabulary
            )
            if vocabulary.exists():
                record["vocab"] = stored.describe_file(vocabulary)
            return name, record, False

        results = {}
        for number, (name, record, reused) in enumerate(ordered_map(work, names, self.threads)):
            results[name] = record if reused else self.journal.add(f"table {name}", record)
            self.reused += reused
            self.report(Progress(stage="fit", done=number + 1, total=len(names), unit="steps"))
        return results

    def _fit(self) -> list[DenseFit]:
        if not self.layout.fitted:
            return [DenseFit.of(column) for column in self.schema.dense]
        if (done := self.journal.finished("dense")) is not None:
            return [DenseFit(**values) for values in done["fit"]]

        def passes() -> Iterator[npt.NDArray[np.float64]]:
            for part in self.parts:
                chosen = self._train_rows(part)
                if chosen is not None:
                    with self._open(part) as arrays:
                        rows = arrays["dense"][chosen]
                    yield rows

        fit = fit_dense(self.schema.dense, passes)
        self.journal.add("dense", {"fit": [vars(item) for item in fit]})
        return fit

    # Shards and manifest ------------------------------------------------------------------------------------

    def _write(self, tables: dict[str, dict[str, Any]], fit: Sequence[DenseFit]) -> dict[str, Any]:
        wide = any(record["rows"] > 2**31 - 1 for record in tables.values())
        encoder = Encoder(self.layout, self._open, self.table_files, fit, wide=wide)
        counts = self._table_counts(encoder)
        self._check_room(wide)
        jobs = [job for number in range(3) for job in self._shards(number)]
        done_rows, total = 0, int(self.sizes[:, :3].sum())

        def work(job: tuple[str, list[Slice], int]) -> tuple[str, dict[str, Any], bool]:
            file, slices, split = job
            done = self.journal.finished(f"shard {file}")
            if done is not None and _same(self.out / file, done):
                return file, done, True
            info, positives, zeros = encoder.write(
                self.out / file, slices, lambda part: np.flatnonzero(self._assign(part) == split)
            )
            return file, {**info.to_dict(), "positives": positives, "unknown": zeros}, False

        splits: dict[str, dict[str, Any]] = {
            name: {"rows": 0, "positives": 0, "shards": []} for name in SPLITS
        }
        features = [column.name for column in self.layout.features]
        unknown = {name: dict.fromkeys(features, 0) for name in SPLITS}
        for file, record, reused in ordered_map(work, jobs, self.threads):
            if not reused:
                self.journal.add(f"shard {file}", record)
            self.reused += reused
            name = file.split("/")[0]
            splits[name]["rows"] += record["rows"]
            splits[name]["positives"] += record["positives"]
            splits[name]["shards"].append({key: record[key] for key in ("file", "rows", "bytes", "sha256")})
            for feature, zeros in zip(features, record["unknown"], strict=True):
                unknown[name][feature] += zeros
            done_rows += record["rows"]
            self.report(Progress(stage="write", done=done_rows, total=total, unit="rows"))
        return self._finish(tables, counts, fit, splits, unknown)

    def _table_counts(self, encoder: Encoder) -> dict[str, Any]:
        import torch

        if any(column.oov != "reserved" for column in self.layout.features):
            for part in self.parts:
                drop = encoder.without_ids(part)
                if drop.any():
                    self._dropped[part.index] = np.packbits(drop)
                self.sizes[part.index] = np.bincount(np.minimum(self._assign(part), 3), minlength=4)
        if self._dropped:
            found = encoder.count(self.parts, self._train_rows)
            return {name: torch.from_numpy(array) for name, array in found.items()}
        counts = {}
        for name, path in self.table_files.items():
            with PartFile(path) as arrays:
                counts[name] = torch.from_numpy(np.array(arrays["counts"]))
        return counts

    def _check_room(self, wide: bool) -> None:
        per_row = 4 * (1 + len(self.schema.dense)) + (8 if wide else 4) * len(self.layout.features)
        needed = int(self.sizes[:, :3].sum()) * per_row
        present = sum(f.stat().st_size for name in SPLITS for f in (self.out / name).glob("*.safetensors"))
        free = shutil.disk_usage(self.out).free
        if needed - present > free - _FREE:
            raise DataError(
                f"the shards need {format_size(needed - present)}, but the disk of {self.out} has "
                f"{format_size(free)} free. Free some space and run the same command again: finished parts are kept."
            )

    def _shards(self, split: int) -> Iterator[tuple[str, list[Slice], int]]:
        """File, pieces and split number of every shard of a split."""
        name, number = SPLITS[split], 0
        slices: list[Slice] = []
        room = SHARD_ROWS
        for part in self.parts:
            begin, end = 0, int(self.sizes[part.index, split])
            while begin < end:
                take = min(room, end - begin)
                slices.append(Slice(part=part, begin=begin, end=begin + take))
                begin, room = begin + take, room - take
                if room == 0:
                    yield f"{name}/{number:05d}.safetensors", slices, split
                    slices, room, number = [], SHARD_ROWS, number + 1
        if slices:
            yield f"{name}/{number:05d}.safetensors", slices, split

    def _finish(
        self,
        tables: dict[str, dict[str, Any]],
        counts: dict[str, Any],
        fit: Sequence[DenseFit],
        splits: dict[str, dict[str, Any]],
        unknown: dict[str, dict[str, int]],
    ) -> dict[str, Any]:
        bad_blocks = [
            (block.source.path.name, block.lines_before, block.bad_path)
            for block in self.quarantine
            if block.bad
        ]
        bad = collect_quarantine(self.out / "quarantine.jsonl", bad_blocks)
        files = {"quarantine.jsonl": stored.describe_file(self.out / "quarantine.jsonl")}
        files["counts.safetensors"] = stored.write_counts(self.out, counts)
        files |= {
            f"vocab/{name}.parquet": record["vocab"]
            for name, record in sorted(tables.items())
            if "vocab" in record
        }
        features = FeatureSpec(
            dense=tuple(column.name for column in self.schema.dense),
            features=tuple(column.feature() for column in self.layout.features),
            num_embeddings={name: record["rows"] for name, record in tables.items()},
        )
        schema = self.schema.to_dict()
        manifest = {
            "stoker_version": stoker.__version__,
            "created_by": f"stoker prepare {self.recipe.name} --preset {self.recipe.preset_name}",
            "recipe": {"name": self.recipe.name, "preset": self.recipe.preset_name},
            "schema": schema,
            "schema_hash": stored.hash_schema(schema),
            "features": features.to_dict(),
            "dense_stats": {c.name: vars(item) for c, item in zip(self.schema.dense, fit, strict=True)},
            "splits": splits,
            "unknown": unknown,
            "files": files,
            "sources": self._sources(),
            "quarantined": bad,
        }
        stored.write_manifest(self.out, manifest)
        return manifest

    def _sources(self) -> list[dict[str, Any]]:
        rows = {path: [0, 0] for path in self.files}
        for block in self.quarantine:
            rows[block.source.path][0] += block.rows
            rows[block.source.path][1] += block.bad
        return [
            {"file": path.name, "bytes": path.stat().st_size, "rows": good, "bad": bad}
            for path, (good, bad) in rows.items()
        ]

    def _table_summary(self, manifest: dict[str, Any]) -> dict[str, dict[str, float]]:
        summary: dict[str, dict[str, float]] = {}
        held_out = sum(manifest["splits"][name]["rows"] for name in ("valid", "test"))
        for column in self.layout.features:
            zeros = sum(manifest["unknown"][name][column.name] for name in ("valid", "test"))
            entry = summary.setdefault(column.table_name, {"rows": 0, "unknown": 0.0})
            entry["rows"] = manifest["features"]["num_embeddings"][column.table_name]
            entry["unknown"] = max(entry["unknown"], zeros / held_out if held_out else 0.0)
        return summary


def _raw_sink(block: Block, file: str, path: Path) -> dict[str, int]:
    names = list(dict.fromkeys(item.column for item in block.columns))
    beside = path.with_suffix(".tmp")
    block_frame(block, names).write_parquet(beside, compression="lz4")
    os.replace(beside, path)
    return checksum(path)


def _same(path: Path, record: dict[str, Any]) -> bool:
    return path.exists() and hash_file(path) == (record["bytes"], record["sha256"])


def _match_inputs(recipe: Recipe, files: Sequence[Path]) -> Iterator[tuple[str, RawInput, list[Path]]]:
    left = list(files)
    matched = {}
    for name, raw in recipe.inputs.items():
        matched[name] = [path for path in left if any(fnmatch(path.name, pattern) for pattern in raw.files)]
        left = [path for path in left if path not in matched[name]]
    if left:
        patterns = [pattern for raw in recipe.inputs.values() for pattern in raw.files]
        raise DataError(
            f"recipe {recipe.name} has no use for {left[0].name}. It reads: {', '.join(patterns)}."
        )
    for name, raw in recipe.inputs.items():
        if not matched[name] and not raw.optional:
            raise DataError(
                f"recipe {recipe.name} needs its {name} file ({' or '.join(raw.files)}), which was not given. "
                f"{recipe.example and 'For example: ' + recipe.example}"
            )
        yield name, raw, matched[name]
