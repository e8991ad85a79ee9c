"""``stoker.reorder``: renumber the ids of a dataset so that ids used together are neighbours.

The first pass over the shards reads the training rows and finds the order (:mod:`stoker.rewrite.id_order`). The second
pass replaces the ids of all splits. Vocabularies and counts move with their ids, and examples keep their order.

Legend: N ids of a table, F features, L ids of some rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from stoker.base.device import check_threads
from stoker.base.engine import full_disk
from stoker.base.errors import DataError, errors_as, require
from stoker.base.files import atomic_file, hash_json
from stoker.base.ordered import ordered_map
from stoker.base.progress import Progress, quiet
from stoker.base.settings import checked_arguments
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset, rebuilt_from
from stoker.dataset.manifest import NEW_IDS, describe_file, write_counts, write_manifest
from stoker.dataset.shards import Shard
from stoker.rewrite.derived import derived_at, source_of, table_ids, write_shards
from stoker.rewrite.id_order import IdWindows, Reordering, TableUse, blocks_of_shuffled, blocks_of_windows, new_ids

BLOCK_IDS = 128  # neighbouring ids of a block
_LEAST_ROWS = 1000  # of a table that is reordered by default
_TOGETHER = 4  # tables whose windows are in memory at a time

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """The effect on a table: the mean number of blocks of ``BLOCK_IDS`` neighbouring ids that a batch touches."""

    rows: int  # N
    moved: int  # ids that changed
    log_before: float  # for rows in the order of the log; before, ids are sorted by count
    log_after: float
    shuffled_before: float  # for as many shuffled rows
    shuffled_after: float


@dataclass(frozen=True, kw_only=True)
class ReorderReport:
    """The result of :func:`run_reorder`."""

    path: Path
    tables: dict[str, TableReport]
    window: int  # rows that count as a batch
    seconds: float
    reused: bool  # the dataset existed already, reordered in the same way


@checked_arguments
def reorder(
    dataset: Dataset | str | Path,
    out: str | Path,
    *,
    how: Reordering | None = None,
    tables: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Write a dataset with other ids, so that ids that occur together in the log are neighbours.

    ``out`` becomes a dataset with the same examples in the same order and the same values in the same tables, but each
    value has another id. A batch then touches fewer blocks of neighbouring rows. That saves work in tensor-train tables
    (a block is a prefix) and reads in a file of rows (a block is a page). Train a new model on it. ``Dataset.new_ids``
    maps the ids of the source to the new ones.

    Source: EL-Rec (SC 2022), section IV. :mod:`stoker.rewrite.id_order` says what differs here, and why.

    Args:
        dataset: a dataset or its directory.
        out: directory to make.
        how: the settings; None means bisection within tiers of similar counts, without the hottest ids.
        tables: tables to reorder. None takes those with a vocabulary and at least 1,000 rows. In other tables the id is
            a formula of the value (``hash_buckets``), so new rows cannot be prepared or scored after reordering.
        overwrite: replace an existing dataset.
        progress: called with (what, done, in all).

    Returns:
        The reordered dataset.

    Raises:
        DataError: ``out`` contains something else or was reordered in another way; the dataset is classified or
            reordered already; no such table; a damaged shard; or a full disk.
        DependencyError: a package is missing.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> how = stoker.Reordering(method="first-use", hot=2, window=64)
    >>> found = stoker.reorder(data, "ordered", how=how, tables=["C1"])
    >>> found.new_ids["C1"][:6].tolist()
    [0, 1, 2, 7, 10, 3]
    """
    return Dataset(run_reorder(dataset, out, how=how, tables=tables, overwrite=overwrite, progress=progress).path)


def run_reorder(
    dataset: Dataset | str | Path, out: str | Path, *, how: Reordering | None = None,
    tables: Sequence[str] | None = None, overwrite: bool = False, progress: Progress | None = None,
    threads: int | None = None, note: Callable[[Path], None] | None = None,
) -> ReorderReport:  # fmt: skip
    """Do as :func:`reorder`, and return a report. The number of threads changes no byte of the result.

    ``note`` is of a preparation, which deletes the source afterwards; it adds to the folder before the manifest.
    """
    started = time.perf_counter()
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    how, out, progress, threads = how or Reordering(), Path(out), progress or quiet, check_threads(threads)
    data.schema.check_ids("ids that occur together cannot be made neighbours")
    names = _chosen(data, tables)
    settings = {**asdict(how), "spread": str(how.spread), "tables": names}  # JSON has no infinite number
    if not overwrite and (there := derived_at(out, data, "reordered")) is not None and there.hot_cold is None:
        known = there.reordered or {}
        if known["settings"] == settings and known["stoker_version"] == __version__:
            return _report(there, started, reused=True)
        raise DataError(
            f"{out} was reordered with other settings. Choose another directory, or pass overwrite=True to reorder "
            "again.",
            settings=("overwrite",),
        )
    size = sum(split.bytes for split in data.splits.values())
    # Shards only: other files take about 1 %, and the disk is checked again for each file.
    rewritten = {"counts.safetensors", *(f"vocab/{name}.parquet" for name in names)}
    files = [file for file in data.manifest.get("files", {}) if file in rewritten]
    with rebuilt_from(data, out, splits=tuple(data.splits), files=files, size=size, overwrite=overwrite) as folder:
        orders, told = _orders(data, names, how, progress, threads)
        splits = _write_splits(data, orders, folder, progress, threads)
        written = _write_files(data, orders, folder)
        hashes = {name: _sha256(np.ascontiguousarray(ids, "<i8").tobytes()) for name, ids in orders.items()}
        order_hash = hash_json(hashes)
        manifest = {
            **data.manifest,
            # The rows of a model belong to ids, so another order counts as another schema.
            "schema_hash": _sha256(f"{data.schema_hash} {order_hash}".encode()),
            "splits": splits,
            "files": {**data.manifest.get("files", {}), **written},
            "reordered": {
                "tables": {name: asdict(report) for name, report in told.items()},
                "settings": settings,
                "hash": order_hash,
                **source_of(data),
                **({} if note is None else {"source": None}),
            },
        }
        if note is not None:
            note(folder)
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
    """Return the names of the tables to reorder."""
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
        "tables to reorder them nevertheless.",
        settings=("tables",),
    )


def _orders(
    data: Dataset, names: Sequence[str], how: Reordering, progress: Progress, threads: int
) -> tuple[dict[str, Int64], dict[str, TableReport]]:
    """Return the new ids of each table, and their effect."""
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
            # networkit has one number of threads for the whole process.
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
    """Write a Polars frame (value, count) as Parquet, atomically. The same vocabulary gives the same bytes."""
    with atomic_file(path) as file, full_disk():
        frame.write_parquet(file, compression="zstd", statistics=True, row_group_size=2**18)


def read_vocabulary(path: str | Path) -> Any:
    """Return the vocabulary of a table of a prepared dataset: a Polars frame (value, count); row i is id i + 1."""
    pl = require("polars", "reading a vocabulary needs")
    with errors_as(DataError, f"{path} cannot be read as a vocabulary", caught=(OSError, pl.exceptions.PolarsError)):
        return pl.read_parquet(path)
