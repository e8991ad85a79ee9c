"""The rows of checkpoints and segments: read without a model, and joined to a whole checkpoint.

Legend: n rows, D columns.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from stoker.base.errors import CheckpointError, errors_as
from stoker.base.progress import Counted
from stoker.tables.growing.ids import RAW_BYTES, merged
from stoker.tables.storage import Rows
from stoker.training.files.checkpoint import (
    DENSE,
    GROWING_VERSION,
    SHARD_BYTES,
    Link,
    chain,
    hash_manifest,
    verify,
    writing,
)  # fmt: skip
from stoker.training.files.packing import Packed

Ints = npt.NDArray[np.int64]


class SavedTable:
    """The rows of one table, or of a core of a tensor train, in a chain of checkpoints."""

    def __init__(self, links: Sequence[Link], entry: Mapping[str, Any]) -> None:
        self.name, self.rows = str(entry["name"]), int(entry["num_embeddings"])
        key = entry.get("module"), self.name
        self._parts = []  # (folder, entry), the whole checkpoint first
        for path, manifest, _ in links:
            found = [one for one in manifest["tables"] if (one.get("module"), one["name"]) == key]
            if not found:
                raise CheckpointError(f"{path} has no table {self.name!r}, but {links[-1].path} has.")
            self._parts.append((path, found[0]))
        folder, base = self._parts[0]
        self._base = min(int(base["num_embeddings"]), self.rows)
        self._check(folder, base)

    def _check(self, folder: Path, base: Mapping[str, Any]) -> None:
        done = 0
        for shard in base["shards"]:
            if shard["start"] != done:
                raise CheckpointError(f"{folder} lacks rows {done:,} to {shard['start']:,} of table {self.name!r}.")
            done += int(shard["rows"])
        if done != base["num_embeddings"]:
            raise CheckpointError(
                f"{folder}: table {self.name!r} has {done:,} rows in its files, the manifest says "
                f"{base['num_embeddings']:,}."
            )

    @property
    def chunk_rows(self) -> int:
        """Rows of a file of the whole checkpoint."""
        shards = self._parts[0][1]["shards"]
        if len(shards) > 1:
            return int(shards[0]["rows"])
        size = sum(tensor.nbytes for tensor in self.read(0, 1).tensors)
        return max(1, SHARD_BYTES // size)

    def chunks(self) -> Iterator[tuple[int, Rows]]:
        """Yield all rows in chunks of (first row, rows)."""
        size = self.chunk_rows
        for start in range(0, self.rows, size):
            yield start, self.read(start, min(start + size, self.rows))

    def read(self, start: int, stop: int) -> Rows:
        """Return the rows ``start..stop``."""
        folder, base = self._parts[0]
        end = min(stop, self._base)
        blocks: list[Rows] = []
        for shard in base["shards"]:
            first, last = max(start, int(shard["start"])), min(end, int(shard["start"]) + int(shard["rows"]))
            if first < last or (start >= end and not blocks):  # no rows, but their widths
                first, last = (first, last) if first < last else (int(shard["start"]),) * 2
                with _opened(folder / shard["file"]) as file:
                    blocks.append(_slice(file, first - int(shard["start"]), last - int(shard["start"])))
        found = blocks[0] if len(blocks) == 1 else _joined(blocks)
        if stop > max(start, end):  # rows that were added since
            more = stop - max(start, end)
            found = _joined([found, found[:1].map(lambda tensor: tensor.new_zeros(more, *tensor.shape[1:]))])
        return self._updated(found, np.arange(start, stop))

    def gather(self, rows: Ints) -> Rows:
        """Return ``rows`` [n], ascending. Each file is opened at most twice, and of its rows only these are read."""
        folder, base = self._parts[0]
        found = self.read(0, 0).map(lambda tensor: tensor.new_zeros(len(rows), *tensor.shape[1:]))
        for shard in base["shards"]:
            start = int(shard["start"])
            begin, end = np.searchsorted(rows, (start, min(start + int(shard["rows"]), self._base))).tolist()
            if begin < end:
                with _opened(folder / shard["file"]) as file:
                    found[begin:end] = _some(file, rows[begin:end] - start)
        return self._updated(found, rows)

    def _updated(self, found: Rows, rows: Ints) -> Rows:
        """Replace the values of ``rows`` [n], ascending, by those of the segments."""
        known = rows < self._base
        for folder, entry in self._parts[1:]:
            for item in entry["changed"]:
                places, at = self._overlap(folder, item, rows)
                if not len(places):
                    continue
                known[places] = True
                with _opened(folder / item["file"]) as file:
                    found[places] = _some(file, at)
        if not known.all():
            raise CheckpointError(
                f"{self._parts[-1][0]} has no row {int(rows[np.argmin(known)]):,} of table {self.name!r}: a segment "
                "that added it is not complete."
            )
        return found

    @staticmethod
    def _overlap(folder: Path, item: Mapping[str, Any], rows: Ints) -> tuple[Ints, Ints]:
        """Return the places in ``rows`` of those that a file of a segment has, and their places in the file."""
        if not len(rows) or int(item["last"]) < rows[0] or int(item["first"]) > rows[-1]:
            return (np.empty(0, np.int64),) * 2
        numbers = _numbers(folder / item["file"])
        begin, end = np.searchsorted(numbers, (rows[0], rows[-1] + 1)).tolist()
        places = np.searchsorted(rows, numbers[begin:end])
        there = np.flatnonzero(rows[places] == numbers[begin:end])
        return places[there], begin + there

    def segments(self, after: int) -> Iterator[tuple[Ints, Rows]]:
        """Yield the rows of each file of the segments after number ``after`` of the chain."""
        for folder, entry in self._parts[after + 1 :]:
            for item in entry["changed"]:
                with _opened(folder / item["file"]) as file:
                    yield file.get_tensor("row").numpy(), _slice(file, 0, int(item["rows"]))

    def raw_ids(self, *, waiting: bool) -> Iterator[torch.Tensor]:
        """Yield entries of the raw ids of a table that grows; later ones replace earlier ones of the same row."""
        first = max(place for place, (_, entry) in enumerate(self._parts) if entry["whole"])
        for folder, entry in self._parts[first:]:
            for file in entry["waiting" if waiting else "raw_ids"]:
                with _opened(folder / file) as opened:
                    yield opened.get_tensor("entries")

    def changed(self, after: int) -> Ints:
        """Return the rows that changed in segments after number ``after`` of the chain, ascending."""
        found = [
            _numbers(folder / item["file"])
            for folder, entry in self._parts[after + 1 :] for item in entry["changed"]
        ]  # fmt: skip
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def new_and_gone(links: Sequence[Link], before: int) -> dict[str, dict[str, int]]:
    """Return what the links from number ``before`` on changed about the ids of each table.

    Ids that have a row after them and had none before; ids that had one and have none; rows that have another id than
    before; and ids with a row after them. A table that does not grow only gets new ids.
    """
    entries, olds = (
        {each["name"]: each for each in link.manifest["tables"]} for link in (links[-1], links[before - 1])
    )
    found = {}
    for name in links[-1].manifest["features"]["num_embeddings"]:
        entry, old = entries.get(name), olds.get(name)
        if entry is None or old is None:  # a tensor train, whose ids do not change
            continue
        size = int(entry["num_embeddings"])
        counts = {"new": size - int(old["num_embeddings"]), "gone": 0, "reused": 0, "known": size}
        if "clock" in entry:
            own, later = _row_ids(links[:before], old), _row_ids(links, entry)
            counts = {
                "new": len(np.setdiff1d(later, own)), "gone": len(np.setdiff1d(own, later)),
                "reused": int(((own != later) & (own != 0) & (later != 0)).sum()), "known": int((later != 0).sum()),
            }  # fmt: skip
        found[name] = counts
    return found


def _row_ids(links: Sequence[Link], entry: Mapping[str, Any]) -> Ints:
    """Return the raw id of each row of a table that grows, 0 for a row without one."""
    found = np.zeros(int(entry["num_embeddings"]), np.int64)
    for part in SavedTable(links, entry).raw_ids(waiting=False):
        rows, ids = part[:, :2].T.numpy()
        found[rows] = ids
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with (
        errors_as(CheckpointError, f"{path} cannot be read", caught=(SafetensorError, OSError, zlib.error)),
        safe_open(path, framework="pt") as file,
    ):
        yield Packed(file) if file.metadata() else file


def _slice(file: Any, first: int, last: int) -> Rows:
    state = {name: file.get_slice(name)[first:last] for name in file.keys() if name not in ("row", "weight")}  # noqa: SIM118
    return Rows(file.get_slice("weight")[first:last], state)


def _some(file: Any, at: Ints) -> Rows:
    """Return copies of the rows at places ``at`` [n] of a file, ascending and not empty."""
    first = int(at[0])
    return _slice(file, first, int(at[-1]) + 1)[torch.from_numpy(at - first)]


def _numbers(path: Path) -> Ints:
    with _opened(path) as file:
        found: Ints = file.get_tensor("row").numpy()
    return found


def _joined(parts: Sequence[Rows]) -> Rows:
    """Return copies of all rows in one."""
    state = {name: torch.cat([each.state[name] for each in parts]) for name in parts[0].state}
    return Rows(torch.cat([each.weight for each in parts]), state)


def join(directory: str | Path) -> int:
    """Replace a segment by the whole checkpoint that it stands for, with the bytes that ``save`` would have written.

    Segments after it remain valid. What it was written after is no longer needed for it. Tables are read and written in
    chunks, and a kill leaves one or the other. Return the number of segments that were joined; 0: it was whole.
    """
    target = Path(directory)
    links = chain(target)
    if len(links) == 1:
        return 0
    verify(target)
    manifest = dict(links[-1].manifest)
    entries = manifest.pop("tables")
    del manifest["parent"]
    total = sum(int(entry["num_embeddings"]) for entry in entries)
    with writing(target) as writer, Counted("joining rows", total, "rows") as counted:
        tables = []
        for number, entry in enumerate(entries):
            saved, shards = SavedTable(links, entry), []
            for place, (start, rows) in enumerate(saved.chunks()):
                file = f"tables/{number:03d}.{place:05d}.safetensors"
                writer.write(file, f"table {saved.name!r}", {"weight": rows.weight, **rows.state})
                shards.append({"file": file, "start": start, "rows": len(rows.weight)})
                counted.add(len(rows.weight))
            kept = {name: value for name, value in entry.items() if name not in ("changed", "deleted")}
            if "clock" in entry:
                size = SHARD_BYTES // RAW_BYTES
                parts = [merged(saved.raw_ids(waiting=waiting), size) for waiting in (False, True)]
                kept |= {"whole": True, **writer.write_raw_ids(f"tables/{number:03d}", saved.name, *parts)}
            tables.append({**kept, "shards": shards})
        shutil.copyfile(target / DENSE, writer.folder / DENSE)
        writer.count(DENSE)
        version = GROWING_VERSION if any("clock" in each for each in tables) else 2 if "trained" in manifest else 1
        manifest |= {"tables": tables, "files": writer.files, "format_version": version}
        writer.finish(manifest | {"compacted": hash_manifest(target)})
    return len(links) - 1
