"""``stoker.classify``: the training rows of a dataset, first those whose ids are all hot, then the others.

FAE (VLDB 2022), section 4.2: a batch of hot rows needs nothing but hot rows of the tables. Both kinds have shards of
their own; the manifest says under ``hot_cold`` where the cold shards begin and which profile decided.

Two passes: the first checks the shards and notes which rows are hot, a bit a row; the second gathers the rows of one
kind, a shard at a time. Each thread keeps one shard in memory, however many there are.

Legend: n rows, F features, L ids in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.device import check_threads
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.base.units import quoted
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import make_gather
from stoker.dataset.manifest import describe_file, write_manifest
from stoker.dataset.rebuild import rebuilt
from stoker.dataset.row_files import GroupWriter, group_file, kept_writer, write_group_file
from stoker.dataset.shards import Shard, write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split
from stoker.rewrite.fae.hot_profile import HotProfile

__all__ = ["ClassifyReport", "classify", "hot_limits", "hot_mask", "run_classify", "write_classified"]

_IDS = 2**20  # looked at together

Int64 = npt.NDArray[np.int64]
HotBits = Sequence[npt.NDArray[np.uint8]]  # of each shard of the source, a bit a row
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ClassifyReport:
    """What was done."""

    path: Path
    hot: int  # training rows
    cold: int
    seconds: float
    reused: bool  # the dataset was there already, classified by the same profile


def classify(
    dataset: Dataset | str | Path,
    profile: HotProfile | str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Classify the training rows of a dataset: a row is hot if all its ids are hot rows of their tables.

    ``out`` becomes a dataset like any other, with the hot training rows in the first shards and the cold ones in the
    others, each in the order of the source; ``Dataset.hot`` and ``Dataset.cold`` are its parts. Validation and test
    rows, vocabularies and counts are shared with the source as hard links, or copied where the disk has none.

    Source: FAE (VLDB 2022), section 4.2.

    Args:
        dataset: what ``stoker prepare`` wrote.
        profile: of its training rows (:func:`stoker.profile`), or the file where one was saved.
        out: directory to make. One that was classified from the same rows by the same profile is taken as it is.
        overwrite: replace a dataset that is there.
        progress: called with (what, rows done, rows in all).

    Returns:
        The classified dataset, opened.

    Raises:
        DataError: a profile of other data, ``out`` holds something else or was classified by another profile, a damaged
            shard, or a full disk.
    """
    return Dataset(run_classify(dataset, profile, out, overwrite=overwrite, progress=progress).path)


def run_classify(
    dataset: Dataset | str | Path,
    profile: HotProfile | str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ClassifyReport:
    """As :func:`classify`, returning what was done."""
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    found = profile if isinstance(profile, HotProfile) else HotProfile.load(profile)
    known = data.hot_cold or {}
    if found.schema_hash != data.schema_hash or found.data_hash not in (
        data.train.data_hash,
        known.get("source_data_hash"),  # the same rows in another order
    ):
        where = "the profile" if isinstance(profile, HotProfile) else f"the profile {profile}"
        raise DataError(
            f"{where} was made from other data than {data.path}: its hot rows would be chance there. Make one with: "
            f"stoker profile {quoted(data.path)} --out PROFILE.json"
        )
    return write_classified(
        data, out, hot_rows=found.hot_rows, profile_hash=found.hash, profile=found.to_dict(), overwrite=overwrite,
        progress=progress,
    )  # fmt: skip


def write_classified(
    data: Dataset,
    out: str | Path,
    *,
    hot_rows: Mapping[str, int],
    profile_hash: str,
    profile: Mapping[str, Any],
    overwrite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ClassifyReport:
    """Classify the training rows of ``data`` by the hot rows of its tables; the directory appears whole or not at all.

    Args:
        data: the source.
        out: as for :func:`classify`.
        hot_rows: table -> H; its ids below H are hot.
        profile_hash: of the profile that they are from.
        profile: its plain values, kept in the manifest.
        overwrite: replace a dataset that is there.
        progress: called with (what, rows done, rows in all).
        threads: None: one per core. Does not change a byte of the result.

    Raises:
        DataError: ``out`` holds something else, a shard of ``data`` is damaged, hot rows that do not fit its tables,
            or a full disk.
    """
    started = time.perf_counter()
    out = Path(out)
    split = data.train
    if not overwrite and (there := _classified(data, profile_hash, out)) is not None:
        return _report(there, started, reused=True)
    size = split.bytes
    grouped = [group_file("train")] if "groups" in split.entry else []
    kept = [split.entry["keep"]["file"]] if "keep" in split.entry else []
    size += sum(int(data.manifest["files"][file]["bytes"]) for file in kept)
    with rebuilt(data, out, splits=("train",), files=[*grouped, *kept], size=size, overwrite=overwrite) as folder:
        progress, threads = progress or _quiet, check_threads(threads)
        hot_bits = _find_hot(split, hot_limits(data.schema, hot_rows), threads, progress)
        hot, cold = _write_shards(split, hot_bits, folder, threads, progress)
        groups, files = _write_groups(split, hot_bits, folder) if grouped else ({}, {})
        files |= _write_kept(split, hot_bits, folder / kept[0], kept[0]) if kept else {}
        manifest = {
            **data.manifest,
            "splits": {
                **data.manifest["splits"],
                "train": {
                    **{name: split.entry[name] for name in ("time", "keep") if name in split.entry},
                    "rows": hot.rows + cold.rows,
                    "positives": hot.positives + cold.positives,
                    "shards": [*hot.shards, *cold.shards],
                    **groups,
                },
            },
            **({"files": {**data.manifest["files"], **files}} if files else {}),
            "hot_cold": {
                "hot_rows_of_train": hot.rows,
                "hot_positives": hot.positives,
                "hot_shards": len(hot.shards),
                "hot_rows": {table: int(limit) for table, limit in hot_rows.items()},
                "profile_hash": profile_hash,
                "profile": dict(profile),
                "source": str(data.path.resolve()),
                "source_data_hash": split.data_hash,
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


def _classified(data: Dataset, profile_hash: str, out: Path) -> Dataset | None:
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
    if there.kept_names != data.kept_names:
        return None
    if known["profile_hash"] == profile_hash:
        return there
    raise DataError(
        f"{out} was classified by another profile (hash {str(known['profile_hash'])[:16]}, this one "
        f"{profile_hash[:16]}). Choose another directory, or pass overwrite=True to classify anew.",
        settings=("overwrite",),
    )


def hot_limits(schema: FeatureSpec, hot_rows: Mapping[str, int]) -> Int64:
    """Return H of each feature's table, [F].

    Raises:
        DataError: other tables than the schema's, or more hot rows than a table has.
    """
    if set(hot_rows) != set(schema.num_embeddings):
        differ = sorted(set(hot_rows) ^ set(schema.num_embeddings))
        raise DataError(
            f"hot rows and dataset differ in the tables {', '.join(differ)}. Profile the dataset that is classified."
        )
    for table, rows in schema.num_embeddings.items():
        if not 0 <= hot_rows[table] <= rows:
            raise DataError(
                f"table {table} has {rows:,} rows, so {hot_rows[table]:,} of them cannot be hot. Profile the dataset "
                "that is classified."
            )
    return np.array([hot_rows[feature.table] for feature in schema.features], np.int64)


def hot_mask(shard: Shard, limits: Int64) -> npt.NDArray[np.bool_]:
    """Find the rows of a shard whose ids are all below the limits [F] of their features, [n].

    The out-of-vocabulary id 0 is a row like the others. All ids of a sequence count; an empty one is hot.
    """
    mask = np.empty(shard.rows, np.bool_)
    ids = shard.ids
    step = max(1, _IDS * shard.rows // max(1, ids.size))  # rows
    for start in range(0, shard.rows, step):
        stop = min(start + step, shard.rows)
        if shard.lengths is None or shard.row_offsets is None:
            mask[start:stop] = (ids[start:stop] < limits).all(axis=1)
            continue
        ends = shard.row_offsets[start : stop + 1]
        limit = np.repeat(np.tile(limits, stop - start), shard.lengths[start:stop].reshape(-1))
        cold = np.concatenate(([0], np.cumsum(ids[ends[0] : ends[-1]] >= limit)))  # up to each id
        mask[start:stop] = np.diff(cold[ends - ends[0]]) == 0
    return mask


def _find_hot(split: Split, limits: Int64, threads: int, progress: Progress) -> HotBits:
    """Check every shard and find its hot rows."""

    def find(number: int) -> npt.NDArray[np.uint8]:
        shard = split.shards[number]
        split.check_rows(split.starts[number], split.starts[number + 1])
        found = np.packbits(hot_mask(shard, limits))
        shard.release()
        return found

    bits = []
    with closing(ordered_map(find, range(len(split.shards)), threads)) as found:
        for number, each in enumerate(found):
            bits.append(each)
            progress("find hot rows", split.starts[number + 1], split.rows)
    return bits


def _rows_of_kind(split: Split, hot_bits: HotBits, kind: str) -> Iterator[tuple[Shard, int, Int64]]:
    """Each shard, its first row and which of its rows are of one kind."""
    for number, shard in enumerate(split.shards):
        hot = np.unpackbits(hot_bits[number], count=shard.rows)
        yield shard, split.starts[number], np.flatnonzero(hot == (kind == "hot"))


@dataclass
class _Kind:
    """What was written of the hot or the cold rows."""

    rows: int = 0
    positives: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)  # manifest entries


def _write_shards(
    split: Split, hot_bits: HotBits, folder: Path, threads: int, progress: Progress
) -> tuple[_Kind, _Kind]:
    """Write all hot rows and then all cold ones."""
    features = len(split.schema.features)
    gather = make_gather(split.shards, split.starts) if split.rows else None
    size = max((shard.rows for shard in split.shards), default=1)
    made = {"hot": _Kind(), "cold": _Kind()}

    def jobs() -> Iterator[tuple[str, int, Int64]]:
        for kind in made:
            number, waiting = 0, np.empty(0, np.int64)
            for _, first, chosen in _rows_of_kind(split, hot_bits, kind):
                waiting = np.concatenate((waiting, first + chosen))
                while len(waiting) >= size:
                    yield kind, number, waiting[:size]
                    number, waiting = number + 1, waiting[size:]
            if len(waiting):
                yield kind, number, waiting

    def write(job: tuple[str, int, Int64]) -> tuple[str, int, dict[str, Any]]:
        kind, number, rows = job
        assert gather is not None
        tensors = gather(rows, lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
        part = {name: tensors[name].numpy() for name in ("dense", "ids", "labels")}
        if "offsets" in tensors:
            offsets = tensors["offsets"].numpy()
            part["lengths"] = np.diff(offsets).astype(np.int32).reshape(len(rows), features)
            part["row_offsets"] = offsets[::features].copy()
        info = write_shard(folder / f"train/{kind}_{number:05d}.safetensors", **part)
        first, last = np.searchsorted(split.starts, [rows[0], rows[-1]], side="right")
        for shard in split.shards[first - 1 : last]:
            shard.release()
        return kind, int(np.count_nonzero(part["labels"] > 0.5)), info.to_dict()

    with closing(ordered_map(write, jobs(), threads, ahead=threads)) as written:
        for kind, positives, entry in written:
            made[kind].rows += entry["rows"]
            made[kind].positives += positives
            made[kind].shards.append(entry)
            progress("classify", made["hot"].rows + made["cold"].rows, split.rows)
    return made["hot"], made["cold"]


def _write_groups(split: Split, hot_bits: HotBits, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the groups of the rows in their new order; the entries of the split and of the file."""
    groups = split.groups
    assert groups is not None
    writer = GroupWriter(int(split.entry["groups"]["count"]))

    def numbers() -> Iterator[npt.NDArray[np.int32]]:
        for kind in ("hot", "cold"):
            for shard, first, chosen in _rows_of_kind(split, hot_bits, kind):
                yield writer.add(groups[first + chosen], shard.labels[chosen])

    file = group_file("train")
    written = write_group_file(folder / file, split.rows, numbers())
    return {"groups": {**writer.summary(), "file": file}}, {file: written}


def _write_kept(split: Split, hot_bits: HotBits, path: Path, name: str) -> dict[str, Any]:
    """Write the kept columns of the rows in their new order; return the entry of the file."""
    kept = split.kept
    assert kept is not None
    with kept_writer(path, kept.schema) as writer:
        for kind in ("hot", "cold"):
            for shard, first, chosen in _rows_of_kind(split, hot_bits, kind):
                writer.write(kept.read(first, first + shard.rows).take(chosen))
    return {name: describe_file(path)}
