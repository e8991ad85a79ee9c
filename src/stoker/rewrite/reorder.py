"""``stoker.reorder``: a dataset whose ids are numbered anew, so that ids used together are neighbours.

Two passes over the shards: the training rows tell the order (:mod:`stoker.rewrite.id_order`); then the ids of all
splits are replaced. Vocabularies and counts move with their ids: a value still has the row that its id addresses, and
examples keep their places.

Legend: N ids of a table, F features, L ids of some rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from stoker.base.device import check_threads
from stoker.base.engine import full_disk
from stoker.base.errors import DataError
from stoker.base.files import atomic_file
from stoker.base.ordered import ordered_map
from stoker.base.progress import Progress, quiet
from stoker.base.settings import with_arguments_of
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset, rebuilt_from
from stoker.dataset.manifest import NEW_IDS, canonical_json, describe_file, note_request, write_counts, write_manifest
from stoker.dataset.shards import Shard
from stoker.rewrite.derived import derived_at, table_ids, write_shards
from stoker.rewrite.id_order import (
    IdWindows,
    Reordering,
    TableUse,
    blocks_of_shuffled,
    blocks_of_windows,
    new_ids,
)

BLOCK_IDS = 128  # neighbouring ids whose blocks are counted before and after
_LEAST_ROWS = 1000  # of a table that is reordered unasked
_TOGETHER = 4  # tables whose windows lie in memory at a time

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """What reordering did to a table: blocks of ``BLOCK_IDS`` neighbouring ids that a batch touches on average."""

    rows: int  # N
    moved: int  # ids that have another number now
    log_before: float  # a window of rows in the order of the log; before, ids follow their counts
    log_after: float
    shuffled_before: float  # as many rows drawn independently
    shuffled_after: float


@dataclass(frozen=True, kw_only=True)
class ReorderReport:
    """What was done."""

    path: Path
    tables: dict[str, TableReport]
    window: int  # rows of what counts as a batch
    seconds: float
    reused: bool  # the dataset was there already, reordered in the same way


def reorder(
    dataset: Dataset | str | Path,
    out: str | Path,
    *,
    how: Reordering | None = None,
    tables: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Number the ids of a dataset anew, so that ids that occur together in the log are neighbours.

    ``out`` becomes a dataset like any other: the same examples in the same order, the same values in the same tables,
    each under another id. A batch then touches fewer blocks of neighbouring rows, which saves work in tensor-train
    tables (a block is a prefix) and reads in a file of rows (a block is a page). A model has to be trained on it; rows
    of one that was trained on the source are found by ``Dataset.new_ids``.

    Source: EL-Rec (SC 2022), section IV; where this differs, and why: :mod:`stoker.rewrite.id_order`.

    Args:
        dataset: what ``stoker prepare`` wrote.
        how: the order; None: by bisection within tiers of equal counts, the hottest ids left alone.
        tables: to be reordered; None: those with a vocabulary and at least 1,000 rows. The ids of others are a
            formula of the value (``hash_buckets``, ``modulo``), which then no longer tells the id.
        overwrite: replace a dataset that is there.
        progress: called with (what, done, in all).

    Returns:
        The reordered dataset, opened.

    Raises:
        DataError: ``out`` holds something else or was reordered in another way, a dataset that is classified or
            reordered already, no such table, a damaged shard, or a full disk. DependencyError: a package is missing.
    """
    return Dataset(run_reorder(dataset, out, how=how, tables=tables, overwrite=overwrite, progress=progress).path)


@dataclass(frozen=True)
class ReorderArguments:
    """The arguments of :func:`run_reorder`; :func:`reorder` describes its own."""

    dataset: Dataset | str | Path
    out: str | Path
    _: KW_ONLY
    how: Reordering | None = None
    tables: Sequence[str] | None = None
    overwrite: bool = False
    progress: Progress | None = None
    threads: int | None = None  # does not change a byte of the result
    keep_source: bool = True  # False where the source is to be deleted
    request: str | None = None  # of a preparation that reorders, for stoker.dataset.manifest.note_request


@with_arguments_of(ReorderArguments)
def run_reorder(dataset: Dataset | str | Path, out: str | Path, **given: Any) -> ReorderReport:
    """Do as :func:`reorder`, and return what was done."""
    asked = ReorderArguments(dataset, out, **given)
    started = time.perf_counter()
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    how, out, overwrite = asked.how or Reordering(), Path(out), asked.overwrite
    progress, threads = asked.progress or quiet, check_threads(asked.threads)
    names = _chosen(data, asked.tables)
    settings = {**asdict(how), "spread": str(how.spread), "tables": names}  # an infinite spread is no JSON number
    if not overwrite and (there := derived_at(out, data, "reordered")) is not None and there.hot_cold is None:
        known = there.reordered or {}
        if known["settings"] == settings and known["stoker_version"] == __version__:
            return _report(there, started, reused=True)
        raise DataError(
            f"{out} was reordered with other settings. Choose another directory, or pass overwrite=True to reorder "
            "anew.",
            settings=("overwrite",),
        )
    size = sum(split.bytes for split in data.splits.values())
    # Shards only: what else is written takes a hundredth, and the disk is watched again at every file.
    rewritten = {"counts.safetensors", *(f"vocab/{name}.parquet" for name in names)}
    files = [file for file in data.manifest.get("files", {}) if file in rewritten]
    with rebuilt_from(data, out, splits=tuple(data.splits), files=files, size=size, overwrite=overwrite) as folder:
        orders, told = _orders(data, names, how, progress, threads)
        splits = _write_splits(data, orders, folder, progress, threads)
        written = _write_files(data, orders, folder)
        hashes = {name: _sha256(np.ascontiguousarray(ids, "<i8").tobytes()) for name, ids in orders.items()}
        order_hash = _sha256(canonical_json(hashes).encode())
        manifest = {
            **data.manifest,
            # Rows of a model belong to ids, so another order is another schema to whoever compares them.
            "schema_hash": _sha256(f"{data.schema_hash} {order_hash}".encode()),
            "splits": splits,
            "files": {**data.manifest.get("files", {}), **written},
            "reordered": {
                "tables": {name: asdict(report) for name, report in told.items()},
                "settings": settings,
                "hash": order_hash,
                "source": str(data.path.resolve()) if asked.keep_source else None,
                "source_schema_hash": data.schema_hash,
                "source_data_hash": data.train.data_hash,
                "stoker_version": __version__,
            },
        }
        note_request(folder, asked.request)
        write_manifest(folder, manifest)
    return _report(Dataset(out), started, reused=False)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _report(data: Dataset, started: float, *, reused: bool) -> ReorderReport:
    known = data.reordered or {}
    return ReorderReport(
        path=data.path, tables={name: TableReport(**values) for name, values in known["tables"].items()},
        window=int(known["settings"]["window"]), seconds=time.perf_counter() - started, reused=reused,
    )  # fmt: skip


def _chosen(data: Dataset, tables: Sequence[str] | None) -> list[str]:
    """Return the names of the tables to reorder.

    Raises:
        DataError: there is no such table, or none that can be; or the dataset was derived already.
    """
    sizes = data.schema.num_embeddings
    if data.reordered is not None:
        source = data.reordered["source"] or "as prepared without reordering"
        raise DataError(f"{data.path} is reordered already. Reorder its source, {source}, instead.")
    if data.hot_cold is not None:
        raise DataError(
            f"{data.path} is classified, and its hot ids would no longer be the first. Reorder its source, "
            f"{data.hot_cold.get('source')}, then classify the result."
        )
    data.train  # noqa: B018  (refuses a dataset without the split)
    if tables is not None:
        if unknown := sorted(set(tables) - set(sizes)):
            raise DataError(f"{data.path} has no table {', '.join(unknown)}; it has {', '.join(sizes)}.")
        if not tables:
            raise DataError("no table is named. Name some, or leave tables out.", settings=("tables",))
        return sorted(set(tables))
    named = [name for name in sizes if f"vocab/{name}.parquet" in data.manifest.get("files", {})]
    if found := sorted(name for name in named if sizes[name] >= _LEAST_ROWS):
        return found
    raise DataError(
        f"no table of {data.path} has a vocabulary and at least {_LEAST_ROWS:,} rows: there is nothing to gain. Pass "
        "tables to reorder them all the same.",
        settings=("tables",),
    )


def _orders(
    data: Dataset, names: Sequence[str], how: Reordering, progress: Progress, threads: int
) -> tuple[dict[str, Int64], dict[str, TableReport]]:
    """The new ids of every table, and what they are good for."""
    split, orders, told = data.train, {}, {}
    batches = split.rows / how.window

    def work(job: tuple[str, TableUse]) -> tuple[str, Int64, TableReport]:
        name, use = job
        made = new_ids(use, how)
        return name, made, _compare(use, made, batches)

    total = split.rows * -(-len(names) // _TOGETHER)
    with ThreadPoolExecutor(threads, thread_name_prefix="stoker-reorder") as pool:
        for first in range(0, len(names), _TOGETHER):
            group = names[first : first + _TOGETHER]
            found = {
                name: IdWindows(
                    data.counts[name].numpy(), rows=split.rows, window=how.window, limit=how.edges, seed=how.seed
                )
                for name in group
            }
            for number, shard in enumerate(split.shards if split.rows else []):
                start = split.starts[number]
                split.check_rows(start, start + shard.rows)

                def add(name: str, shard: Shard = shard, start: int = start) -> None:
                    ids, rows = table_ids(shard.ids, shard.lengths, data.schema, name)
                    found[name].add(ids, start + rows)  # noqa: B023

                list(pool.map(add, group))
                shard.release()
                progress("read", first // _TOGETHER * split.rows + start + shard.rows, total)
            # networkit has one setting of threads for the whole process.
            many = 1 if how.method == "communities" else threads
            jobs = ((name, found.pop(name).use()) for name in group)
            with closing(ordered_map(work, jobs, many, ahead=0)) as ordered:
                for name, made, report in ordered:
                    orders[name], told[name] = made, report
                    progress("order", len(orders), len(names))
    return orders, told


def _compare(use: TableUse, made: Int64, batches: float) -> TableReport:
    by_count = np.empty(len(made), np.int64)
    by_count[np.concatenate(([0], 1 + np.argsort(-use.counts[1:], kind="stable")))] = np.arange(len(made))
    return TableReport(
        rows=len(made),
        moved=int(np.count_nonzero(made != np.arange(len(made)))),
        log_before=blocks_of_windows(use, by_count, BLOCK_IDS),
        log_after=blocks_of_windows(use, made, BLOCK_IDS),
        shuffled_before=blocks_of_shuffled(use, by_count, BLOCK_IDS, batches),
        shuffled_after=blocks_of_shuffled(use, made, BLOCK_IDS, batches),
    )


def _write_files(data: Dataset, orders: Mapping[str, Int64], folder: Path) -> dict[str, Any]:
    """Write counts and vocabularies in the new order, and the order itself; return their manifest entries."""
    counts = dict(data.counts)
    files: dict[str, Any] = {}
    for name, ids in orders.items():
        moved = torch.from_numpy(ids)
        counts[name] = torch.empty_like(counts[name]).index_copy_(0, moved, counts[name])
        file = f"vocab/{name}.parquet"
        if file in data.manifest.get("files", {}):
            old = np.argsort(ids)[1:] - 1  # row of the old frame at each place of the new one
            write_vocabulary(read_vocabulary(data.path / file)[old], folder / file)
            files[file] = describe_file(folder / file)
    files["counts.safetensors"] = write_counts(folder, counts)
    with atomic_file(folder / NEW_IDS) as out:
        out.write(save({name: torch.from_numpy(ids) for name, ids in sorted(orders.items())}))
    files[NEW_IDS] = describe_file(folder / NEW_IDS)
    return files


def _write_splits(
    data: Dataset, orders: Mapping[str, Int64], folder: Path, progress: Progress, threads: int
) -> dict[str, Any]:
    """Write all splits with their ids replaced; return their manifest entries."""
    total, done = sum(split.rows for split in data.splits.values()), 0
    splits: dict[str, Any] = {}
    for name, split in data.splits.items():
        files = [entry["file"] for entry in split.entry["shards"]]
        jobs = ((file, np.arange(*ends)) for file, ends in zip(files, pairwise(split.starts), strict=True))
        shards = []
        for entry, _ in write_shards(split, jobs, folder, threads, orders):
            shards.append(entry)
            done += entry["rows"]
            progress("write", done, total)
        splits[name] = {**split.entry, "shards": shards}
    return splits


def write_vocabulary(frame: Any, path: Path) -> None:
    """Write a Polars frame (value, count) as Parquet, atomically, the same bytes for the same vocabulary."""
    with atomic_file(path) as file, full_disk():
        frame.write_parquet(file, compression="zstd", statistics=True, row_group_size=2**18)


def read_vocabulary(path: str | Path) -> Any:
    """Return the vocabulary of a table of a prepared dataset: a Polars frame (value, count); row i is id i + 1."""
    import polars as pl

    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} cannot be read as a vocabulary: {error}.") from error
