"""``stoker.classify``: sort the training rows of a dataset, first those whose ids are all hot, then the others.

FAE (VLDB 2022), section 4.2: a batch of hot training rows needs only hot rows of the tables. Each kind has its own
shards. The manifest says under ``hot_cold`` where the cold shards begin and which profile was used.

The first pass checks the shards and marks hot rows, with one bit per row. The second pass gathers the rows of one kind,
shard by shard. Each thread keeps one shard in memory.

What this gains over shuffled batches is predicted first. Both orders pin the same hot rows (``HotCold``), and look up
the same cold rows. Hot batches move nothing. Cold batches are fewer, with more cold rows in each, so a cold row is less
often in two batches. That is all that the order saves.

Legend: n rows, F features, L ids in all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.device import check_threads, resolve_device
from stoker.base.errors import DataError
from stoker.base.ordered import ordered_map
from stoker.base.progress import Progress, quiet
from stoker.base.settings import checked_arguments
from stoker.base.units import format_size, quoted
from stoker.dataset.dataset import Dataset, rebuilt_from
from stoker.dataset.manifest import describe_file, write_manifest
from stoker.dataset.row_files import GroupWriter, kept_writer, write_group_file
from stoker.dataset.shards import Shard
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split
from stoker.placement.expected import expect, phases, split_hot, uses_of
from stoker.rewrite.derived import derived_at, source_of, write_shards
from stoker.rewrite.hot_profile import HotProfile
from stoker.training.defaults import batch_for
from stoker.training.scheduled import TRAINED_PER_TESTED

_IDS = 2**20  # compared at a time
_NOTHING = 1 / TRAINED_PER_TESTED  # share of the bytes; the test losses of the schedule take up to this share of time

Int64 = npt.NDArray[np.int64]
HotBits = Sequence[npt.NDArray[np.uint8]]  # for each shard of the source, one bit per row


@dataclass(frozen=True, kw_only=True)
class ClassifyReport:
    """The result of :func:`write_classified`."""

    path: Path
    hot: int  # training rows
    cold: int
    seconds: float
    reused: bool  # the dataset existed already, classified by the same profile


@checked_arguments
def classify(
    dataset: Dataset | str | Path,
    profile: HotProfile | str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Write a dataset with hot and cold training rows apart.

    A training row is hot if all its ids are hot rows of their tables. ``out`` becomes a dataset with the hot training
    rows in the first shards and the cold ones in the others, each in the order of the source. ``Dataset.hot`` and
    ``Dataset.cold`` are these parts. Validation and test rows, vocabularies and counts are hard links to the source, or
    copies if the disk has no hard links.

    Source: FAE (VLDB 2022), section 4.2.

    Args:
        dataset: a dataset or its directory.
        profile: a profile of its training rows (:func:`stoker.profile`), or the file of one.
        out: directory to make. If it was classified from the same rows by the same profile, it is reused.
        overwrite: replace an existing dataset.
        progress: called with (what, rows done, rows in all).

    Returns:
        The classified dataset.

    Raises:
        DataError: a profile of other data; ``out`` contains something else or was classified by another profile; a
            damaged shard; or a full disk.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> found = stoker.classify(data, stoker.profile(data, device_memory="2KiB"), "hot")
    >>> len(found.hot), len(found.cold)
    (236, 564)
    """
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    found = profile if isinstance(profile, HotProfile) else HotProfile.load(profile)
    check_profile(data, found, None if isinstance(profile, HotProfile) else profile)
    return Dataset(write_classified(data, out, **said_by(found), overwrite=overwrite, progress=progress).path)


def said_by(profile: HotProfile) -> dict[str, Any]:
    """Return what :func:`write_classified` takes of a profile."""
    return {"hot_rows": profile.hot_rows, "profile_hash": profile.hash, "profile": profile.to_dict()}


def check_profile(data: Dataset, found: HotProfile, path: str | Path | None) -> None:
    """Raise DataError for a profile of other data; ``path`` is its file, if it has one."""
    known = data.hot_cold or {}
    if found.schema_hash != data.schema_hash or found.data_hash not in (
        data.train.data_hash,
        known.get("source_data_hash"),  # the same rows in another order
    ):
        where = "the profile" if path is None else f"the profile {path}"
        raise DataError(
            f"{where} was made from other data than {data.path}, so its hot rows mean nothing there. Make one with: "
            f"stoker profile {quoted(data.path)} --out PROFILE.json"
        )


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
    """Classify the training rows of ``data``: in each table, ids below ``hot_rows`` are hot.

    ``profile``: plain values of the profile of ``hot_rows``, for the manifest. Threads change no byte of the result.
    """
    started, out, split = time.perf_counter(), Path(out), data.train
    if not overwrite and (there := derived_at(out, data, "hot_cold")) is not None:
        if (other := str((there.hot_cold or {})["profile_hash"])) == profile_hash:
            return _report(there, started, reused=True)
        raise DataError(
            f"{out} was classified by another profile (hash {other[:16]}, this one {profile_hash[:16]}). Choose "
            "another directory, or pass overwrite=True to classify again.",
            settings=("overwrite",),
        )
    progress, threads = progress or quiet, check_threads(threads)
    named = {name: str(split.entry[name]["file"]) for name in ("groups", "keep") if name in split.entry}
    size = split.bytes + (int(data.manifest["files"][named["keep"]]["bytes"]) if "keep" in named else 0)
    with rebuilt_from(data, out, splits=("train",), files=named.values(), size=size, overwrite=overwrite) as folder:
        hot_bits = _find_hot(split, hot_limits(data.schema, hot_rows), threads, progress)
        shards, hot, done = [], {"rows": 0, "positives": 0, "shards": 0}, 0
        for entry, positives in write_shards(split, _new_shards(split, hot_bits), folder, threads, {}):
            shards.append(entry)
            done += entry["rows"]
            progress("classify", done, split.rows)
            if entry["file"].startswith("train/hot_"):
                hot = {"rows": done, "positives": hot["positives"] + positives, "shards": len(shards)}
        train, files = {**split.entry, "shards": shards}, dict(data.manifest.get("files", {}))
        if "groups" in named:
            summary, files[named["groups"]] = _write_groups(split, hot_bits, folder / named["groups"])
            train["groups"] = {**summary, "file": named["groups"]}
        if "keep" in named:
            files[named["keep"]] = _write_kept(split, hot_bits, folder / named["keep"])
        manifest = {
            **data.manifest,
            "splits": {**data.manifest["splits"], "train": train},
            **({"files": files} if files else {}),
            "hot_cold": {
                "hot_rows_of_train": hot["rows"],
                "hot_positives": hot["positives"],
                "hot_shards": hot["shards"],
                "hot_rows": {table: int(limit) for table, limit in hot_rows.items()},
                "profile_hash": profile_hash,
                "profile": dict(profile),
                **source_of(data),
            },
        }
        write_manifest(folder, manifest)
    return _report(Dataset(out), started, reused=False)


def _report(data: Dataset, started: float, *, reused: bool) -> ClassifyReport:
    return ClassifyReport(
        path=data.path, hot=len(data.hot), cold=len(data.cold), seconds=time.perf_counter() - started, reused=reused
    )


def hot_limits(schema: FeatureSpec, hot_rows: Mapping[str, int]) -> Int64:
    """Return H of the table of each feature, [F]."""
    if set(hot_rows) != set(schema.num_embeddings):
        differ = sorted(set(hot_rows) ^ set(schema.num_embeddings))
        raise DataError(
            f"hot rows and dataset differ in the tables {', '.join(differ)}. Profile the dataset to classify."
        )
    for table, rows in schema.num_embeddings.items():
        if not 0 <= hot_rows[table] <= rows:
            raise DataError(
                f"table {table} has {rows:,} rows, so {hot_rows[table]:,} of them cannot be hot. Profile the dataset "
                "to classify."
            )
    return np.array([hot_rows[feature.table] for feature in schema.features], np.int64)


def hot_mask(shard: Shard, limits: Int64) -> npt.NDArray[np.bool_]:
    """Find the rows of a shard whose ids are all below the limits [F] of their features, [n].

    The out-of-vocabulary id 0 is like other ids. All ids of a sequence count; an empty sequence is hot.
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
    """Check each shard and find its hot rows."""

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


def _in_order(split: Split, hot_bits: HotBits) -> Iterator[tuple[str, Shard, int, Int64]]:
    """Yield first for hot and then for cold rows: the kind, a shard, its first row, and its rows of the kind."""
    for kind in ("hot", "cold"):
        for number, shard in enumerate(split.shards):
            hot = np.unpackbits(hot_bits[number], count=shard.rows)
            yield kind, shard, split.starts[number], np.flatnonzero(hot == (kind == "hot"))


def _new_shards(split: Split, hot_bits: HotBits) -> Iterator[tuple[str, Int64]]:
    """Yield the file and rows of each new shard."""
    size = max((shard.rows for shard in split.shards), default=1)
    for kind, found in groupby(_in_order(split, hot_bits), key=itemgetter(0)):
        number, waiting = 0, np.empty(0, np.int64)
        for _, _, first, chosen in found:
            waiting = np.concatenate((waiting, first + chosen))
            while len(waiting) >= size:
                yield f"train/{kind}_{number:05d}.safetensors", waiting[:size]
                number, waiting = number + 1, waiting[size:]
        if len(waiting):
            yield f"train/{kind}_{number:05d}.safetensors", waiting


def _write_groups(split: Split, hot_bits: HotBits, path: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Write the groups of the rows in their new order; return the manifest entries of the groups and the file."""
    groups = split.groups
    assert groups is not None
    writer = GroupWriter(int(split.entry["groups"]["count"]))
    numbers = (
        writer.add(groups[first + chosen], shard.labels[chosen])
        for _, shard, first, chosen in _in_order(split, hot_bits)
    )
    written = write_group_file(path, split.rows, numbers)
    return writer.summary(), written


def _write_kept(split: Split, hot_bits: HotBits, path: Path) -> dict[str, Any]:
    """Write the kept columns of the rows in their new order; return the manifest entry of the file."""
    kept = split.kept
    assert kept is not None
    with kept_writer(path, kept.schema) as writer:
        for _, shard, first, chosen in _in_order(split, hot_bits):
            writer.write(kept.read(first, first + shard.rows).take(chosen))
    return describe_file(path)


@dataclass(frozen=True, kw_only=True)
class HotGain:
    """The expected bytes of cold rows that move in an epoch, both ways, with both orders of batches."""

    batch_size: int
    steps: int  # of an epoch
    shuffled: int  # bytes of an epoch
    hot_cold: int
    device: str  # type of the device of the slots

    @property
    def saved(self) -> float:
        """The share of the bytes that hot and cold batches save."""
        return 1 - self.hot_cold / self.shuffled if self.shuffled else 0.0

    def lines(self) -> list[str]:
        """Say what to expect, in lines of at most 80 columns."""
        shuffled, apart = format_size(self.shuffled), format_size(self.hot_cold)
        said = [
            f"expected in an epoch of {self.steps:,} batches of {self.batch_size:,}, with these rows pinned:",
            f"shuffled batches move {shuffled}, hot and cold ones {apart} ({self.saved:.1%} less)",
        ]
        if self.saved <= _NOTHING:
            return [*said, "hot and cold batches will gain nothing: shuffled ones do as well"]
        if self.device == "cpu":
            return [*said, "rows move within main memory here, so hot and cold batches hardly gain time"]
        return [*said, "hot and cold batches gain time if training waits for rows"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"saved": self.saved}


def predict_gain(data: Dataset, found: HotProfile, batch_size: int | None = None, device: str | None = None) -> HotGain:
    """Predict the bytes that move in an epoch with both orders of batches, from the counts of the training rows.

    ``batch_size`` None takes the default of a run.
    """
    examples, kind = max(1, len(data.train)), resolve_device(device).type
    size = batch_size or batch_for(examples)
    in_flight = 2 if kind == "cuda" else 1
    moved = [0.0, 0.0]  # shuffled, hot and cold
    for table in found.tables:
        uses = uses_of(table.rows, data.counts[table.name].numpy(), size * table.accesses / examples)
        orders = (
            (uses, examples),
            (phases(uses, table.hot_rows, found.input_share)[1], examples * (1 - found.input_share)),
        )
        for place, (order, rows) in enumerate(orders):
            cold = [split_hot(order, table.hot_rows)[1]]
            traffic = expect(cold, table.rows, lookahead=0, in_flight=in_flight, transient=True)
            moved[place] += (traffic.fetched + traffic.written) * table.row_bytes * rows / size
    return HotGain(
        batch_size=size, steps=-(-examples // size), shuffled=round(moved[0]), hot_cold=round(moved[1]), device=kind
    )
