"""The last pass: write shards, groups and kept columns, then the manifest, which declares the dataset whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from stoker.base.checks import near
from stoker.base.errors import DataError
from stoker.base.files import EDGE, hash_edge, hash_json
from stoker.base.units import format_size, plural
from stoker.base.version import __version__
from stoker.dataset import manifest as stored
from stoker.dataset.manifest import SPLITS
from stoker.dataset.rebuild import UnusableInput
from stoker.dataset.row_files import GroupWriter, group_file, kept_file, kept_writer, write_group_file
from stoker.dataset.rows import note_checked
from stoker.dataset.shards import SHARD_ROWS, write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.prep.features.store import StoredTable, store_features
from stoker.prep.fit.fitting import Fitting, same_file
from stoker.prep.fit.split_rules import number_groups
from stoker.prep.like import FEATURES, NOTATION, check_unit, times_of
from stoker.prep.parse.floats import DECIMAL, POLARS, PYTHON
from stoker.prep.parse.frames import common_types, parquet_rows, parquet_types
from stoker.prep.parse.ingest import file_columns
from stoker.prep.parse.layout import time_value
from stoker.prep.parse.notation import FLAGS, MIXED, PLAIN, TYPED, VALUE, WHOLE, notation_of, twins_of
from stoker.prep.parse.quarantine import collect_quarantine
from stoker.prep.parse.sources import is_packed, source_kind, text_edges
from stoker.prep.recipe import Recipe
from stoker.prep.rows.raw_rows import ReadRows
from stoker.prep.schema import RULE_KEYS, GrowingRows, Schema
from stoker.prep.stages.parts import atomic_path
from stoker.prep.stages.task import StageProgress, Task
from stoker.prep.write.encode import Encoder, PartSlice

_FREE = 2**20  # bytes of disk for the manifest and other small files
_SHARD_BYTES = 2**26  # most bytes of a shard, because each thread has one in memory
_LEAST_ROWS = 2**12
_NEW, _JUDGED = 0.9, 200  # held-out ids of a column from which a warning says that this share of them is new
_FEW = 100  # rows of a log that may well leave a split empty


def publish(task: Task, rows: ReadRows, fitting: Fitting) -> dict[str, Any]:
    """Write shards, counts, quarantine and, last, the manifest; return the manifest."""
    encoder = Encoder(
        task.layout, fitting.splits, fitting.table_files, fitting.dense,
        wide=any(record["rows"] > 2**31 - 1 for record in fitting.tables.values())
        or any(column.oov == "grow" for column in task.layout.features),
    )  # fmt: skip
    if any(column.oov in ("drop", "error") for column in task.layout.features):
        for part in fitting.parts:
            fitting.drop(part, encoder.without_ids(part, fitting.place_of))
    counts = encoder.counts(fitting.parts if fitting.any_dropped and task.like is None else ())
    times = _times(fitting)
    if task.like is not None and times:
        check_unit(task.like.times, times_of({name: {"time": entry} for name, entry in times.items()}))
    shard_rows = _plan_shards(fitting, wide=encoder.wide)
    with ThreadPoolExecutor(2, thread_name_prefix="stoker-groups") as pool:
        # One thread reads all rows for the groups and one for kept columns, while others write shards.
        groups = pool.submit(_write_groups, fitting) if task.layout.group is not None else None
        kept = pool.submit(_write_kept, fitting) if task.layout.kept else None
        splits, unknown = _write_shards(fitting, encoder, shard_rows)
        files = kept.result() if kept is not None else {}
        summary = groups.result() if groups is not None else None
    manifest: dict[str, Any] = {"splits": splits, "unknown": unknown}
    for name, entry in times.items():
        splits[name]["time"] = entry
    for name in SPLITS:
        if kept_file(name) in files:
            splits[name]["keep"] = {"file": kept_file(name)}
    if summary is not None:
        manifest["groups"] = summary["groups"]
        files |= summary["files"]
        for name, entry in summary["splits"].items():
            splits[name]["groups"] = entry
    return _finish(rows, fitting, {name: torch.from_numpy(array) for name, array in counts.items()}, manifest, files)


@dataclass(frozen=True, kw_only=True)
class _ShardStep:
    """Write one shard, in any process."""

    encoder: Encoder
    out: Path
    file: str  # within ``out``
    slices: list[PartSlice]
    split: int

    @property
    def name(self) -> str:
        return f"shard {self.file}"

    def is_whole(self, record: Mapping[str, Any]) -> bool:
        return same_file(self.out / self.file, record)

    def make(self) -> dict[str, Any]:
        arrays, sums = self.encoder.encode(self.slices, self.split)
        with atomic_path(self.out / self.file, self.out / ".work") as path:
            info = write_shard(path, **arrays)
        return {**info.to_dict(), **sums}


def _write_shards(fitting: Fitting, encoder: Encoder, most: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Encode all rows into shards of ``most`` rows; return ``splits`` and ``unknown`` of the manifest."""
    task = fitting.task
    features = task.layout.features
    sizes = [fitting.tables[column.table_name]["rows"] for column in features]
    splits: dict[str, dict[str, Any]] = {name: {"rows": 0, "positives": 0, "shards": []} for name in SPLITS}
    unknown = np.zeros((len(SPLITS), 2, len(features)), np.int64)
    absent = dict.fromkeys(SPLITS, 0)
    total, rows = int(fitting.sizes[:, :3].sum()), 0
    steps = (
        _ShardStep(encoder=encoder, out=task.out, file=file, slices=slices, split=split)
        for split in range(len(SPLITS))
        for file, slices in _shards(fitting, split, most)
    )
    for step, record in task.run(steps, executor=task.executor):
        note_checked(task.out / step.file, record["sha256"], sizes)
        name = SPLITS[step.split]
        for key in ("rows", "positives"):
            splits[name][key] += record[key]
        splits[name]["shards"].append({key: record[key] for key in ("file", "rows", "bytes", "sha256")})
        absent[name] += record["absent"]
        unknown[step.split] += np.array(record["unknown"], np.int64)
        rows += record["rows"]
        task.report(StageProgress(stage="write", done=rows, total=total, unit="rows"))
    for name, count in absent.items():
        if count:  # no entry if all rows have labels
            splits[name]["labelled"] = splits[name]["rows"] - count
    names = [column.name for column in features]
    return splits, {
        name: dict(zip(names, ids.T.tolist(), strict=True)) for name, ids in zip(SPLITS, unknown, strict=True)
    }


def _shards(fitting: Fitting, split: int, most: int) -> Iterator[tuple[str, list[PartSlice]]]:
    """Yield the file and the slices of every shard of a split, of ``most`` rows."""
    number, room = 0, most
    slices: list[PartSlice] = []
    for part in fitting.parts:
        begin, end = 0, int(fitting.sizes[part.index, split])
        while begin < end:
            take = min(room, end - begin)
            slices.append((part, begin, begin + take))
            begin, room = begin + take, room - take
            if room == 0:
                yield f"{SPLITS[split]}/{number:05d}.safetensors", slices
                slices, room, number = [], most, number + 1
    if slices:
        yield f"{SPLITS[split]}/{number:05d}.safetensors", slices


def _plan_shards(fitting: Fitting, *, wide: bool) -> int:
    """Return the number of rows of a shard: the largest power of two within ``_SHARD_BYTES``.

    Raises:
        DataError: the disk has no room for the shards.
    """
    task, layout, parts = fitting.task, fitting.task.layout, fitting.parts
    count = sum(part.rows for part in parts)
    ids, kept = len(layout.one_hot) * count, 0
    for part in parts if layout.sequences or layout.kept else ():
        with part.open() as arrays:
            ids += sum(arrays[f"codes.{index}"].size for index in layout.sequences)
            kept += arrays["keep"].size if layout.kept else 0
    lengths = 4 * len(layout.features) + 8 if layout.sequences else 0
    per_row = 4 * (1 + len(task.schema.dense_names)) + lengths + (8 if wide else 4) * ids / count
    rows = int(fitting.sizes[:, :3].sum())
    whole = int(rows * per_row) + (4 * rows if layout.group is not None else 0) + kept
    present = sum(file.stat().st_size for name in SPLITS for file in (task.out / name).glob("*.safetensors"))
    needed, free = max(0, whole - present), shutil.disk_usage(task.out).free
    if needed > free - _FREE:
        raise DataError(
            f"the shards need {format_size(needed + _FREE)}, but the disk of {task.out} has "
            f"{format_size(free)} free. {task.remedy_of_full_disk(kept=True)}"
        )
    most = SHARD_ROWS
    while most > _LEAST_ROWS and most * per_row > _SHARD_BYTES:
        most //= 2
    return most


def _times(fitting: Fitting) -> dict[str, dict[str, Any]]:
    """Return the first and the last time of each split that has rows; nothing if rows have no time."""
    timestamp = fitting.task.schema.timestamp
    if timestamp is None:
        return {}
    found: dict[str, list[int]] = {}
    for part in fitting.parts:
        split = fitting.splits.assign(part)
        with part.open() as arrays:
            for number, name in enumerate(SPLITS):
                times = arrays["time"][split == number]
                if len(times):
                    found.setdefault(name, []).extend((int(times.min()), int(times.max())))
    return {
        name: {"first": time_value(min(times), timestamp.type), "last": time_value(max(times), timestamp.type)}
        for name, times in found.items()
    }


def _write_groups(fitting: Fitting) -> dict[str, Any]:
    """Write the group number of every row, split by split. Memory: about 60 bytes per group, and one part.

    Returns:
        Entries for the manifest: ``groups`` (column, number of groups, groups ``cut`` over several splits), ``splits``
        and ``files``.
    """
    entries, known = number_groups(fitting.parts, "group")
    seen = np.zeros(known, np.uint8)  # bit s: the group has rows in split s
    splits: dict[str, dict[str, Any]] = {}
    files: dict[str, Any] = {}

    def numbers(split: int, writer: GroupWriter) -> Iterator[npt.NDArray[np.int32]]:
        for part in fitting.parts:
            if fitting.sizes[part.index, split]:
                chosen = fitting.splits.rows(part, split)
                with part.open() as arrays:
                    names = entries[part.index][arrays["codes.group"][chosen] - 1]
                    labels = arrays["labels"][chosen]
                yield writer.add(names, labels)

    for number, name in enumerate(SPLITS):
        if rows := int(fitting.sizes[:, number].sum()):
            writer, file = GroupWriter(known), group_file(name)
            files[file] = write_group_file(fitting.task.out / file, rows, numbers(number, writer))
            seen |= writer.seen.astype(np.uint8) << number
            splits[name] = {**writer.summary(), "file": file}
    cut = int(np.count_nonzero(seen & (seen - 1)))  # more than one bit
    groups = {"column": fitting.task.schema.group, "count": int((seen > 0).sum()), "cut": cut}
    return {"groups": groups, "splits": splits, "files": files}


def cut_warning(schema: Schema, manifest: dict[str, Any]) -> list[str]:
    """Return a warning if the split rule separates rows of one group."""
    groups = manifest.get("groups")
    if groups is None or not groups["cut"]:
        return []
    return [
        f"{groups['cut']:,} of {plural(groups['count'], 'group')} ({groups['cut'] / groups['count']:.1%}) by "
        f"column {groups['column']!r} have rows in several splits, as the split rule {schema.split.rule!r} does not "
        "keep them together: ranking metrics then see a part of each such list, and training rows tell about the "
        f'others. To keep lists whole, split with rule = "hash" and column = "{groups["column"]}".'
    ]


def warnings_of(task: Task, manifest: dict[str, Any]) -> list[str]:
    """Return what a user should know of a dataset that is prepared."""
    schema, like = task.schema, task.like
    return [
        *cut_warning(schema, manifest),
        *split_warnings(schema, manifest, None if like is None else like.data.manifest),
        *twin_warnings(manifest),
        *copy_warnings(task.recipe, manifest),
        *(
            f"{task.names.get(path, path)} had {size:,} bytes before it was read and has {now:,} now: rows at its end "
            "may be missing. Prepare again when it no longer changes."
            for path, size in task.sizes.items()
            if (now := path.stat().st_size) != size
        ),
    ]


def twin_warnings(manifest: dict[str, Any]) -> list[str]:
    """Return a warning for each table or column in which values are written in two ways, as if they were two."""
    kinds = {"twins": ("table", "text has an id", '; whole numbers may also have type = "int" in the schema'),
             "feature_twins": ("column", "feature takes each text for a value", "")}  # fmt: skip
    return [
        f"{plural(count, 'value')} of {kind} {name!r} {'is' if count == 1 else 'are'} written in two ways, such as "
        f"{first!r} and {second!r}, and each {what} of its own. If they mean the same, write them in one way in all "
        f"files{more}."
        for key, (kind, what, more) in kinds.items()
        for name, (count, first, second) in manifest.get(key, {}).items()
    ]


def _feature_twins(schema: Schema, tables: Mapping[str, StoredTable]) -> dict[str, list[Any]]:
    """Return column -> what :func:`twins_of` says of its texts in fitted tables, if no column of ids reads it."""
    found: dict[str, list[Any]] = {}
    for feature in (one for one in schema.feature if one.name in tables):
        path, listed = tables[feature.name].path, {*found, *(one.raw for one in schema.features)}
        names = [name for name, kind in pl.read_parquet_schema(path).items() if kind == pl.String]
        for name in sorted({*feature.inputs}.intersection(names) - listed):
            texts = pl.read_parquet(path, columns=[name])[name].unique(maintain_order=True)
            found[name] = twins_of(texts, notation_of(texts))
    return {name: twins for name, twins in found.items() if twins}


def copy_warnings(recipe: Recipe, manifest: dict[str, Any]) -> list[str]:
    """Return a warning for each log whose rows seem to be those of a file before."""
    first, found = dict[Any, str](), []
    lookups = set(recipe.lookups([each["file"] for each in manifest["sources"]]))
    for each in manifest["sources"]:
        if each["rows"] < 2 or each["bytes"] <= 0 or "head" not in each or each["file"] in lookups:
            continue
        if (before := first.get(key := (each["bytes"], each["head"], each["tail"]))) is not None:
            found.append(
                f"{each['file']} has the size, the beginning and the end of {before}. If it is a copy, its rows count "
                "twice: leave one of the files out."
            )
        first[key] = each["file"]
    return found


def split_warnings(schema: Schema, manifest: dict[str, Any], like: Mapping[str, Any] | None = None) -> list[str]:
    """Return a warning for each split that the rule names and that has no rows, and for columns without known ids.

    ``like``: the manifest of the dataset whose vocabularies were used.
    """
    rule, found = schema.split, []
    named = {"column": rule.values.values(), "files": rule.files.values()}.get(rule.rule)
    rows = sum(entry["rows"] for entry in manifest["splits"].values())
    for name in SPLITS[1:] if rows >= _FEW and "like" not in manifest else ():
        asked = getattr(rule, name) > 0 if "train" in RULE_KEYS[rule.rule] else named is None or name in named
        if asked and not manifest["splits"][name]["rows"]:
            without = (
                "no best checkpoint is chosen and nothing stops training" if name == "valid" else "nothing is tested"
            )
            found.append(f"the split rule {rule.rule!r} leaves no {name} rows, so {without}. Change the split.")
    own = manifest["recipe"]["preset"] == "schema"  # what public logs do is known
    for name in manifest["unknown"]["train"] if own and rows >= _FEW else ():
        zeros, ids = np.sum([manifest["unknown"][split][name] for split in SPLITS], axis=0)
        before = None if like is None else np.sum([like["unknown"][split][name] for split in SPLITS], axis=0)
        if zeros == ids and (before is None or before[0] < before[1] / 2):  # ids of sessions are always new
            why = "rarer than min_count" if before is None else "written in another way than before, or new"
            found.append(
                f"no row has a known value of column {name!r}: all are missing, or {why}. Compare its name, also upper "
                "and lower case, and a value."
            )
    for name, (zeros, ids) in manifest["unknown"]["train"].items() if own and "like" not in manifest else ():
        unknown = [manifest["unknown"][split][name] for split in SPLITS[1:]]
        new, count = sum(pair[0] for pair in unknown), sum(pair[1] for pair in unknown)
        if count >= _JUDGED and new >= _NEW * count and zeros <= (1 - _NEW) * ids:
            found.append(
                f"{new / count:.1%} of the held-out ids of column {name!r} are not in the training rows. If they are "
                "used for a short time only, such as ids of sessions, a model learns labels of training rows by them, "
                "and nothing for new rows: leave the column out. If they should be known, compare how they are written."
            )
    return found


def _write_kept(fitting: Fitting) -> dict[str, Any]:
    """Write the kept columns of every split that has rows, in order; return the entries of the files.

    Memory: the rows of a part, and a row group for each split.

    Raises:
        UnusableInput: no JSON line has a key that ``keep`` names.
        DataError: the disk is full.
    """
    task = fitting.task
    schemas = []
    for part in fitting.parts:
        with part.open() as arrays:
            schemas.append(pl.read_ipc_schema(BytesIO(arrays["keep"].tobytes())))
    types: Any = common_types(schemas)
    empty = pl.DataFrame(schema=types).rename(dict(zip(types, task.schema.keep, strict=True)))
    given = np.zeros(len(types), np.int64)  # values of each column that are not missing
    files = [kept_file(name) for name, rows in zip(SPLITS, fitting.sizes.sum(axis=0), strict=False) if rows]
    with ExitStack() as stack:
        schema = empty.to_arrow(compat_level=pl.CompatLevel.oldest()).schema
        writers = {file: stack.enter_context(kept_writer(task.out / file, schema)) for file in files}
        for part in fitting.parts:
            with part.open() as arrays:
                rows = pl.read_ipc(arrays["keep"].tobytes()).cast(types)
            rows.columns = empty.columns
            given += rows.height - np.array(rows.null_count().row(0))
            for number, name in enumerate(SPLITS):
                chosen = fitting.splits.rows(part, number)
                if len(chosen):
                    table = rows[chosen].to_arrow(compat_level=pl.CompatLevel.oldest())
                    writers[kept_file(name)].write(table)
        for name, count in zip(empty.columns, given.tolist(), strict=True):
            if not count:
                _check_keys(task, name)
    return {file: stored.describe_file(task.out / file) for file in files}


def _check_keys(task: Task, name: str) -> None:
    """Raise an error if a kept column has no value because JSON lines lack the key."""
    path, kind = task.files[0], task.schema.source.kind
    made = {output for feature in task.schema.feature for output in feature.outputs}
    if task.like is None and task.recipe.derive is None and name not in made and source_kind(path, kind) == "jsonl":
        keys = file_columns(path, task.schema.source)
        if name not in keys:
            raise UnusableInput(
                f"no line of {path} has a value for {name!r}, which keep names. The first has: {', '.join(keys)}."
                f"{near(name, keys)}"
            )


def _finish(
    rows: ReadRows, fitting: Fitting, counts: dict[str, torch.Tensor], manifest: dict[str, Any], files: dict[str, Any]
) -> dict[str, Any]:
    """Write quarantine, counts, vocabularies and features, then the completed manifest."""
    task, out, schema, like = fitting.task, fitting.task.out, fitting.task.schema, fitting.task.like
    bad = collect_quarantine(out / "quarantine.jsonl", rows.raw)
    files["quarantine.jsonl"] = stored.describe_file(out / "quarantine.jsonl")
    files["counts.safetensors"] = stored.write_counts(out, counts)
    if like is not None:
        own = [f"vocab/{name}.parquet" for name, record in fitting.tables.items() if "vocab" in record]
        files |= like.copy("vocab/", out, without=own) | like.copy(f"{FEATURES}/", out)
    if schema.feature and (like is None or rows.fitted_tables):
        folder, tables = out / FEATURES, rows.fitted_tables
        made = store_features(folder, schema.feature, tables, extend=like is not None)
        files |= {f"{FEATURES}/{name}": entry for name, entry in made.items()}
    for name, record in fitting.tables.items():
        files |= {f"vocab/{name}.parquet": record["vocab"]} if "vocab" in record else {}
    features = FeatureSpec(
        dense=schema.dense_names,
        features=tuple(column.feature() for column in task.layout.features),
        num_embeddings={name: record["rows"] for name, record in fitting.tables.items()},
        grow={c.table_name: (c.grow or GrowingRows()).settings() for c in schema.features if c.oov == "grow"},
    )
    values = schema.to_dict()
    identity = {key: value for key, value in values.items() if key != "keep"}  # no id and no value depends on keep
    manifest |= {
        "stoker_version": __version__,
        "created_by": task.recipe.command,
        "recipe": {"name": task.recipe.name, "preset": task.recipe.preset_name},
        "schema": values,
        "schema_hash": hash_json(identity) if like is None else like.data.schema_hash,
        "features": features.to_dict(),
        "dense_stats": {c.name: vars(item) for c, item in zip(schema.dense, fitting.dense, strict=True)},
        "files": files,
        "sources": _sources(task, rows),
        "quarantined": bad,
    }
    if like is None or NOTATION in like.data.manifest:
        manifest[NOTATION] = {"": PLAIN} if like is None else dict(like.notations)
        manifest[NOTATION] |= {name: made["notation"] for name, made in fitting.tables.items() if "notation" in made}
        for name, way in _tables_of_numbers(task).items() if like is None else ():
            base = manifest[NOTATION].get(name, MIXED).partition("|")[0]
            if base in ("", WHOLE, FLAGS) or base.startswith(TYPED) or (way == PYTHON and base != MIXED):
                manifest[NOTATION][name] = f"{VALUE if base == FLAGS else PLAIN}|{way}"
    twins = {name: made["twins"] for name, made in fitting.tables.items() if made.get("twins")}
    manifest |= {"twins": twins} if twins else {}  # table -> number of values with several texts, two texts of one
    if like is None and (twins := _feature_twins(schema, rows.fitted_tables)):
        manifest["feature_twins"] = twins  # column -> likewise
    if like is not None:
        manifest["like"] = {"source": str(like.data.path), "schema_hash": like.data.schema_hash}
    stored.write_manifest(out, manifest)
    return manifest


def _tables_of_numbers(task: Task) -> dict[str, str]:
    """Return the tables of texts that are numbers in a file, so that none is a version -> how these are written."""
    kinds = {path: source_kind(path, task.schema.source.kind) for path in task.files}
    types = [parquet_types(path) if kind == "parquet" else pl.Schema() for path, kind in kinds.items()]
    columns = [one for one in task.schema.features if one.type == "string"]
    mixed = [one for one in columns if task.schema.notation.get(one.raw) == PLAIN]  # in other files texts
    given = [(one.table_name, each.get(one.raw, pl.String())) for one in columns if one not in mixed for each in types]
    texts = {name for name, kind in given if not (own := getattr(kind, "inner", kind)).is_numeric() and own != pl.Null}
    ways = {name: DECIMAL if isinstance(getattr(kind, "inner", kind), pl.Decimal) else POLARS for name, kind in given}
    ways |= dict.fromkeys((one.table_name for one in mixed), PYTHON)
    return {name: way for name, way in ways.items() if task.recipe.derive is None and name not in texts}


def _sources(task: Task, rows: ReadRows) -> list[dict[str, Any]]:
    # The recipe reads Parquet inputs by itself: take their numbers of rows from their footers.
    read = {part.file for part in rows.raw}
    found: list[dict[str, Any]] = [
        {"file": path.name, "bytes": size, "head": hash_edge(path, 0, min(size, EDGE)),
         "tail": hash_edge(path, max(0, size - EDGE), min(size, EDGE)),
         "rows": 0 if number in read else parquet_rows(path), "bad": 0}
        for number, path in enumerate(task.files) for size in [task.sizes[path]]
    ]  # fmt: skip
    for entry, path in zip(found, task.files, strict=True):
        if is_packed(path):
            entry["text"] = text_edges(path, task.sizes[path])
    for part in rows.raw:
        entry = found[part.file]
        entry["rows"] += part.rows
        entry["bad"] += part.bad
        if part.broken:
            entry["breaks_off"] = part.lines_before + part.lines
    return found
