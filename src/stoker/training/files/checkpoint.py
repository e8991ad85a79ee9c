"""Checkpoints: rows, optimizer state, dense part and data position in a directory with checksums.

::

    step_000001000/
      manifest.json             sizes and sha256 of all files; no time stamp, no path, no placement
      dense.safetensors         dense parameters and buffers, dense optimizer state, generator states, extra state
      tables/000.00000.safetensors   rows and row-optimizer state of table 0, at most 256 MiB a file
                                 (each core of a tensor-train table counts as a table)
      tables/000.raw_ids.00000.safetensors   of a table that grows: its raw ids, and (waiting) those without a row yet

A segment is a checkpoint that holds only the rows that changed since another one, its parent, in the same folder::

      tables/000.00000.safetensors           "row" [n] int64, ascending, and these rows with their state
      tables/000.deleted.00000.safetensors   "row" [n] of the rows that became zeros

Its manifest has the sha256 of its parent's manifest, so a whole chain of segments is checked from its end. The rows
of a segment are those of its parent but for these; :mod:`stoker.training.files.segments` reads and joins them.

A checkpoint is written under a temporary name, flushed to disk and renamed, so a directory with the final name is
whole. Tables are written in chunks, so memory does not grow with them. Any placement and device can load the files.

Format 1 is for a :class:`RecModel` with one optimizer. Format 2 is for any module, several optimizers and extra state:
its manifest names the :class:`EmbeddingTables` of each table. Format 3 is either of them with tables that grow, format
4 a segment (format 3 before its rows were packed).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.base.errors import CheckpointError, ConfigError, StokerError, errors_as
from stoker.base.files import NO_ROOM, exchange, hash_file, move, refuse_url, seal, sync_folder, unseal
from stoker.base.picture import Shown
from stoker.base.progress import Counted
from stoker.base.settings import with_arguments_of
from stoker.base.version import __version__
from stoker.models import RecModel
from stoker.placement.placement import row_bytes
from stoker.tables import EmbeddingTables, Ranks, TableConfig
from stoker.tables.changes import ChangedRows
from stoker.tables.growing.ids import RAW_BYTES
from stoker.tables.ranks.divided import DividedGroup
from stoker.training.files import module_state
from stoker.training.files.module_state import Optimizers
from stoker.training.files.packing import pack
from stoker.training.ranks.first import is_first, on_first

FORMAT_VERSION = 4
GROWING_VERSION = 3
_MANIFEST = "manifest.json"
SHARD_BYTES = 256 * 2**20  # of rows and state in one file
_PACKED_BYTES = 64 * 2**20  # and in one of a segment, which is unpacked as a whole, in three times its memory
_ID_BYTES = 8  # of the number of a row
DENSE = "dense.safetensors"
_TICK = 10**9  # ns: no clock of a file system is coarser
_KNOWN = 2**15  # files: a process that follows a run for months sees any number
remove_folder = partial(shutil.rmtree, ignore_errors=True)
#: files whose checksum was right, and what they were like: a resumed run chooses a checkpoint by it, and then loads it
_whole: dict[Path, tuple[Any, ...]] = {}

M = TypeVar("M", bound=nn.Module)


class NotFiniteError(CheckpointError):
    """The model has infinite or undefined values, so no checkpoint is written."""


class Positioned(Protocol):
    """A stream of batches, staged or not."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint(Generic[M], Shown):
    """What :func:`load` returns."""

    path: Path
    manifest: Mapping[str, Any]
    model: M
    extra_state: Mapping[str, Any] = field(default_factory=dict)  # values as saved; for an object, its state_dict()

    @property
    def step(self) -> int:
        """Batches trained."""
        return int(self.manifest["step"])

    def summary(self) -> str:
        """Return the class of the model, its step and its path."""
        return f"{type(self.model).__name__} at step {self.step:,}, {self.path}"


@dataclass(frozen=True)
class SaveArguments:
    """The arguments of :func:`save`."""

    directory: str | Path
    module: nn.Module
    optimizer: Optimizers = None
    stream: Positioned | None = None
    _: KW_ONLY
    extra_state: Mapping[str, Any] | None = None
    step: int | None = None
    extra: Mapping[str, Any] | None = None
    parent: str | Path | None = None
    overwrite: bool = False
    require_finite: bool = False
    shard_bytes: int = SHARD_BYTES


@with_arguments_of(SaveArguments)
def save(*given: Any, **settings: Any) -> Path:
    """Write a checkpoint of a module, whole or not at all.

    The rows of every :class:`EmbeddingTables` in ``module`` are written in chunks, wherever they are. The rest is
    ``module.state_dict()``, with the cores of every :class:`TTEmbeddingBag`. If several processes train replicas, only
    one of them should save. If rows are divided among ranks, all of them call this, and the first one writes.

    Args:
        directory: the new checkpoint.
        module: any module, such as a :class:`RecModel` or your own. Wrappers (DistributedDataParallel, torch.compile)
            are left out.
        optimizer: optimizer of the dense parameters, or several as a dict or a list.
        stream: the training batches, staged or not, to continue after the last batch.
        extra_state: other state that the script needs to continue, by name: objects with ``state_dict()``, such as
            learning-rate schedulers and GradScaler, or values made of JSON values and tensors.
        step: batches trained; None takes the count of the tables.
        extra: JSON values to add to the manifest.
        parent: write a segment: only the rows that changed since this checkpoint, in the same folder, which it needs
            from then on. ``module`` must have been tracked since then (:func:`stoker.track_changes`).
        overwrite: replace an existing checkpoint.
        require_finite: refuse a model with infinite or undefined values.
        shard_bytes: largest file of rows.

    Returns:
        The directory.

    Raises:
        NotFiniteError: see ``require_finite``.
        CheckpointError: the directory exists or is one that the segment needs, the disk is full, a checkpoint cannot
            contain a value, or another thread trains meanwhile.

    >>> import tempfile, torch, stoker
    >>> net = torch.nn.ModuleDict({
    ...     "tables": stoker.EmbeddingTables(
    ...         [stoker.TableConfig(name="item", num_embeddings=9, embedding_dim=4)], optimizer=stoker.SGD(lr=0.1)),
    ...     "head": torch.nn.Linear(4, 1),
    ... })
    >>> adam = torch.optim.Adam(net["head"].parameters())
    >>> scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=10)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = stoker.save(f"{folder}/a", net, adam, extra_state={"scheduler": scheduler, "epoch": 3})
    ...     found = stoker.load(path, net, adam, extra_state={"scheduler": scheduler})
    >>> found.extra_state["epoch"]
    3
    """
    asked = SaveArguments(*given, **settings)
    directory, module, overwrite = asked.directory, asked.module, asked.overwrite
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"module is a {type(module).__name__}; save takes the nn.Module itself, not its state.")
    refuse_url(directory, "a checkpoint of stoker.save")
    module = module_state.unwrap(module)
    ranks = module_state.ranks_of(module)
    optimizers = module_state.named_optimizers(asked.optimizer)
    target = Path(directory)
    parent = None
    if asked.parent is not None:
        before = Path(asked.parent)
        parent = on_first(ranks, "read a manifest", lambda: _parent_entry(before, target, module))
    for name, tables in module_state.tables_in(module).items():
        if tables.averages is not None and tables.averages.pending:
            with tables.averages.ranks.guard():
                raise CheckpointError(
                    f"the copies of the rows of {name or 'these tables'} on several ranks differ since their last "
                    "average. Call tables.average() on all ranks, then save."
                )
    ticks = {name: tables.tick for name, tables in module_state.tables_in(module).items()}
    with writing(target, overwrite=overwrite, require_finite=asked.require_finite, ranks=ranks) as writer:
        manifest = _write_files(
            writer, module, optimizers, asked.stream, asked.extra_state, asked.shard_bytes, changes=parent is not None
        )
        manifest |= {"stoker_version": __version__, "extra": dict(asked.extra or {})}
        if parent is not None:
            manifest |= {"parent": parent, "format_version": FORMAT_VERSION}
        if asked.step is not None:
            manifest["step"] = asked.step
        if ticks != {name: tables.tick for name, tables in module_state.tables_in(module).items()}:
            raise CheckpointError(
                f"rows were trained while {target} was written, by another thread, so it would have some rows of "
                "before and some of after. Save between two steps."
            )
        writer.finish(manifest)
    restart_changes(module, target)
    return target


@contextmanager
def writing(
    target: Path, *, overwrite: bool = True, require_finite: bool = False, ranks: Ranks | None = None
) -> Iterator[_Writer]:
    """Yield the writer of a new checkpoint, which gets its name at the end of the block, or not at all.

    Of several ``ranks``, which all call this, the first one writes.

    Raises:
        CheckpointError: it exists and is not to be replaced, or the disk is full.
    """
    temporary = target.with_name(target.name + ".tmp")

    def begin() -> None:
        if overwrite and not target.exists() and (kept := left_by_a_kill(target)) is not None:
            move(kept, target)  # so that a checkpoint can be loaded while the new one is written
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists. Choose another name, or pass overwrite=True.")
        remove_folder(temporary)
        (temporary / "tables").mkdir(parents=True)

    def end() -> None:
        for folder in (temporary / "tables", temporary):
            sync_folder(folder)
        exchange(temporary, target, target.with_name(target.name + ".tmp-old"), remove_folder)

    try:
        on_first(ranks, "begin a checkpoint", begin)
        yield _Writer(temporary, require_finite=require_finite, ranks=ranks)
        on_first(ranks, "end a checkpoint", end)
    except OSError as error:
        if is_first(ranks):
            remove_folder(temporary)
        remedies = {errno.EFBIG: "Raise the limit on the size of files (ulimit -f)"}
        remedies |= dict.fromkeys(NO_ROOM, "Free some space, or lower keep_last")
        remedy = remedies.get(error.errno or 0, "Make its directory writable, or choose another")
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error.strerror or error}. Its files were deleted; earlier "
            f"checkpoints are untouched. {remedy}."
        ) from error
    except BaseException:
        if is_first(ranks):
            remove_folder(temporary)
        raise


def track_changes(module: nn.Module) -> None:
    """Note from now on which rows of ``module`` change, so that :func:`save` can write only these.

    A byte for each row is taken for that. Changes count since the last checkpoint that the module was saved to or
    loaded from; save or load one after this call.

    >>> import tempfile
    >>> net = stoker.EmbeddingTables(
    ...     [stoker.TableConfig(name="item", num_embeddings=1000, embedding_dim=8)], optimizer=stoker.SGD(lr=0.1))
    >>> stoker.track_changes(net)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     base = stoker.save(f"{folder}/monday", net)
    ...     net(torch.tensor([[7], [9]])).sum().backward()
    ...     segment = stoker.save(f"{folder}/tuesday", net, parent=base)
    ...     sum(entry["rows"] for entry in stoker.load(segment, net).manifest["tables"][0]["changed"])
    2
    """
    for name, tables in module_state.tables_in(module_state.unwrap(module)).items():
        if tables.divided:
            raise ConfigError(
                f"the rows of {name or 'these tables'} are divided among ranks, whose changes are not tracked yet. "
                "Write whole checkpoints, or train with replicas (docs/ranks.md)."
            )
        if tables.changes is None:
            tables.changes = ChangedRows(tables.groups, tables._joint)


def restart_changes(module: nn.Module, checkpoint: Path) -> None:
    """Let changes of ``module`` count from a checkpoint on, to which its rows are equal."""
    for tables in module_state.tables_in(module).values():
        if tables.changes is not None:
            tables.changes.restart(hash_manifest(checkpoint))
        if tables.raw is not None:
            tables.raw.base = tables.raw.clock[1]


def hash_manifest(checkpoint: Path) -> str:
    """Return the sha256 of a manifest: of the checkpoint, as it has those of all files."""
    with errors_as(CheckpointError, f"the manifest of {checkpoint} cannot be read", "Take another checkpoint."):
        return hash_file(checkpoint / _MANIFEST)[1]


def _parent_entry(parent: Path, target: Path, module: nn.Module) -> dict[str, Any]:
    """Return the entry about its parent in the manifest of a segment."""
    if parent.absolute().parent != target.absolute().parent:
        raise CheckpointError(f"{parent} is not in the folder of {target}. A segment is written next to its parent.")
    if target.name in {each.path.name for each in chain(parent)}:
        raise CheckpointError(
            f"{target} is one of the checkpoints that a segment after {parent} needs, so it cannot be replaced by it. "
            "Choose another name."
        )
    manifest, digest = read_manifest(parent), hash_manifest(parent)
    step, rules = int(manifest["step"]), manifest.get("trained", {})
    for name, tables in module_state.tables_in(module).items():
        own, before = tables.optimizer.kind, (rules.get(name, {}).get("row_optimizer") or {}).get("kind")
        if before not in (None, own):
            raise CheckpointError(
                f"the row optimizer was {before} in {parent} and is {own} now, which has another state of each row, so "
                "a segment of changed rows is not enough. Save a whole checkpoint, without parent."
            )
        if tables.changes is None or tables.changes.origin != digest:
            since = "are not tracked" if tables.changes is None else "are tracked since another checkpoint"
            raise CheckpointError(
                f"changes of {name or 'the tables'} {since}, so a segment after {parent} would not be complete. Call "
                f"stoker.track_changes(module), then load {parent.name} or save a new one, then train."
            )
    return {"name": parent.name, "step": step, "manifest": digest}


def left_by_a_kill(target: Path) -> Path | None:
    """Return the whole copy of ``target`` that exists if :func:`save` was killed between its two renames, else None."""
    for kept in (target.with_name(target.name + ".tmp"), target.with_name(target.name + ".tmp-old")):
        with suppress(CheckpointError):  # incomplete: killed while it was written
            read_manifest(kept)
            return kept
    return None


def repair(folder: Path) -> None:
    """Put back the checkpoints that a kill between two renames left under another name; delete what others left."""
    for each in folder.glob("*.tmp*"):
        target = each.with_name(each.name.partition(".tmp")[0])
        if not target.exists() and (kept := left_by_a_kill(target)) is not None:
            move(kept, target, sync=True)
    for each in folder.glob("*.tmp*"):
        remove_folder(each)


def discard(path: Path) -> None:
    """Delete a checkpoint; if the process is killed here, no incomplete directory has its name."""
    gone = path.with_name(path.name + ".tmp-old")
    remove_folder(gone)
    move(path, gone)
    remove_folder(gone)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to ``*.damaged``, which runs ignore; return the new path.

    Its owner may still want files of it. An earlier directory of that name is deleted.
    """
    aside = path.with_name(path.name + ".damaged")
    remove_folder(aside)
    move(path, aside)
    return aside


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint."""
    return _read_manifest(Path(directory))[0]


def _read_manifest(directory: Path) -> tuple[dict[str, Any], str]:
    """Return a manifest and its sha256."""
    path = directory / _MANIFEST
    if not path.exists():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {_MANIFEST}.")
    with errors_as(CheckpointError, f"{path} is damaged", "Use an earlier checkpoint.", (OSError, ValueError)):
        content = path.read_bytes()
        manifest = unseal(content)
    if not isinstance(manifest, dict) or manifest.get("kind") != "checkpoint":
        raise CheckpointError(f"{path} is not the manifest of a checkpoint.")
    if int(manifest.get("format_version", 0)) > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has checkpoint format {manifest['format_version']}, this Stoker reads up to "
            f"{FORMAT_VERSION}. Update Stoker."
        )
    return manifest, hashlib.sha256(content).hexdigest()


class Link(NamedTuple):
    """A checkpoint in a chain."""

    path: Path
    manifest: Mapping[str, Any]
    digest: str  # sha256 of the manifest, which has those of all files

    @classmethod
    def of(cls, path: Path) -> Link:
        """Read the manifest of a checkpoint."""
        return cls(path, *_read_manifest(path))

    @property
    def digests(self) -> set[str]:
        """The digests by which a segment may name it: its own, and that of the segment that it was joined from."""
        return {self.digest, *([self.manifest["compacted"]] if "compacted" in self.manifest else [])}


def chain(directory: str | Path) -> list[Link]:
    """Return the checkpoints that a checkpoint consists of: a whole one, then segments, of which it is the last."""
    found = [Link.of(Path(directory))]
    try:
        _add_parents(found)
    except CheckpointError:
        if is_current(found):  # else a compaction replaced it, and deleted what it no longer needs
            raise
        return chain(directory)
    return found[::-1]


def _add_parents(found: list[Link]) -> None:
    """Add the parents of a checkpoint, the newest first."""
    while (wanted := found[-1].manifest.get("parent")) is not None:
        child, name = found[-1].path.name, Path(str(wanted["name"])).name
        parent = found[0].path.with_name(name)
        if not parent.exists():
            parent = left_by_a_kill(parent) or parent
        if not parent.exists():
            raise CheckpointError(
                f"{parent} is missing. {child} has only the rows that changed since then. Put it back from a copy, or "
                "go back to an earlier checkpoint."
            )
        found.append(Link.of(parent))
        if wanted["manifest"] not in found[-1].digests or int(wanted["step"]) != int(found[-1].manifest["step"]):
            raise CheckpointError(
                f"{parent} is another checkpoint than the one that {child} was written after: {child} names a manifest "
                f"with sha256 {wanted['manifest'][:16]}... at step {wanted['step']:,}. Segments were exchanged, or one "
                "was written again. Put the right one back from a copy, or go back to an earlier checkpoint."
            )
        if len({link.path for link in found}) < len(found):
            raise CheckpointError(f"{parent} is its own parent: its manifest was altered. Take another checkpoint.")


@contextmanager
def reading(directory: str | Path, manifest: Mapping[str, Any] | None = None) -> Iterator[list[Link]]:
    """Yield the chain of a checkpoint whose files the block reads.

    Raises:
        CheckpointError: as :func:`chain`; or a checkpoint of it was replaced since ``manifest`` or the chain was read,
            by an update after a roll-back or by a compaction, so what the block read may be of two checkpoints.
    """
    links = chain(directory)
    again = CheckpointError(f"{directory} was replaced while it was read. Read it again.")
    if manifest is not None and manifest != links[-1].manifest:
        raise again
    try:
        yield links
    except (StokerError, OSError) as error:  # rows of an update are deleted with it
        if not is_current(links):
            raise again from error
        raise
    if not is_current(links):
        raise again


def is_current(links: Sequence[Link]) -> bool:
    """Return whether the files of checkpoints are still those of these manifests."""
    try:
        return all(hash_manifest(link.path) == link.digest for link in links)
    except CheckpointError:
        return False


def verify(directory: str | Path) -> int:
    """Check every file of a checkpoint, and of those that it builds on, against its sha256; return their number.

    Raises:
        CheckpointError: a file is missing, incomplete or altered; the message names the first.
    """
    links = chain(directory)
    size = sum(entry["bytes"] for link in links for entry in link.manifest["files"].values())
    with Counted("checking files", size, "bytes") as counted:
        return sum(verify_files(link.path, link.manifest, counted) for link in links)


def verify_files(directory: Path, manifest: Mapping[str, Any], counted: Counted | None = None) -> int:
    """Do :meth:`verify` for the files of one checkpoint alone; ``counted`` counts their bytes."""
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the manifest lists it with {expected['bytes']:,} bytes.")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, the manifest says {expected['bytes']:,}: it was cut "
                "short or altered."
            )
        now, clock = path.stat(), time.time_ns()
        state = (expected["sha256"], now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        digest = expected["sha256"] if _whole.get(path) == state else hash_file(path)[1]
        if digest != expected["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is {digest[:16]}..., the manifest says {expected['sha256'][:16]}..."
            )
        if len(_whole) >= _KNOWN:
            _whole.clear()
        if clock - now.st_ctime_ns > _TICK:  # a later change has another time
            _whole[path] = state
        if counted is not None:
            counted.add(expected["bytes"])
    return len(manifest["files"])


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file of tensors, for all who may read its directory. A failure is an OSError."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # it wraps the error of the operating system
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    with suppress(OSError):  # a disk without such rights
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read it


class _Writer:
    """Write files of tensors, and collect their sizes and checksums. Of several ranks, the first one does it."""

    def __init__(self, folder: Path, *, require_finite: bool, ranks: Ranks | None = None) -> None:
        self.folder, self.require_finite, self.ranks = folder, require_finite, ranks
        self.files: dict[str, Any] = {}

    def write(self, name: str, what: str, tensors: Mapping[str, Tensor], *, packed: bool = False) -> None:
        """Write one file; ``what`` names its contents in messages."""
        on_first(self.ranks, f"write {name}", lambda: self._write(name, what, tensors, packed))

    def _write(self, name: str, what: str, tensors: Mapping[str, Tensor], packed: bool) -> None:
        path = self.folder / name
        here = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        if self.require_finite:
            _check_finite(what, here)
        stored, metadata = pack(here) if packed else (here, None)
        write_tensors(stored, path, metadata)
        self.count(name)

    def count(self, name: str) -> None:
        """Bring a file that is there to disk, and count it."""
        with (self.folder / name).open("rb") as file:
            os.fsync(file.fileno())
        size, digest = hash_file(self.folder / name)
        self.files[name] = {"bytes": size, "sha256": digest}

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, last."""
        on_first(self.ranks, "write a manifest", lambda: self._finish(manifest))

    def _finish(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(seal(manifest), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        with (self.folder / _MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_table(
        self, prefix: str, tables: EmbeddingTables, table: TableConfig, shard_bytes: int, counted: Counted
    ) -> dict[str, Any]:
        """Write the rows of a table, up to ``shard_bytes`` a file, and count them; return its entry in the manifest."""
        tables.check_copy()
        shards = []
        chunk_rows = max(1, shard_bytes // row_bytes(table, tables.optimizer.state))
        group = tables.group_of[table.name]
        to = (0,) if isinstance(group, DividedGroup) else ()  # the first rank alone writes
        for number, (start, rows) in enumerate(group.read(table.name, chunk_rows, *to)):
            file = f"{prefix}.{number:05d}.safetensors"
            self.write(file, f"table {table.name!r}", {"weight": rows.weight, **rows.state})
            shards.append({"file": file, "start": start, "rows": len(rows.weight)})
            counted.add(len(rows.weight))
        raw_ids = self._raw_ids(prefix, tables, table, shard_bytes, whole=True)
        return {**_table_entry(table), "shards": shards, **raw_ids}

    def write_changes(
        self, prefix: str, tables: EmbeddingTables, table: TableConfig, shard_bytes: int, counted: Counted
    ) -> dict[str, Any]:
        """Write the rows of a table that changed; return its entry in the manifest.

        All rows of the table count at once, as it is not known before how many changed.
        """
        assert tables.changes is not None
        found, rows = [], tables.changes.rows(table.name)
        size = max(1, min(shard_bytes, _PACKED_BYTES) // (_ID_BYTES + row_bytes(table, tables.optimizer.state)))
        for number, start in enumerate(range(0, len(rows), size)):
            some = rows[start : start + size]
            values, file = tables.group_of[table.name].gather(table.name, some), f"{prefix}.{number:05d}.safetensors"
            tensors = {"row": torch.from_numpy(some), "weight": values.weight, **values.state}
            self.write(file, f"table {table.name!r}", tensors, packed=True)
            found.append({"file": file, "rows": len(some), "first": int(some[0]), "last": int(some[-1])})
        counted.add(table.num_embeddings)
        raw_ids = self._raw_ids(prefix, tables, table, shard_bytes, whole=False)
        return {**_table_entry(table), "changed": found, "deleted": [], **raw_ids}  # which earlier versions read

    def _raw_ids(
        self, prefix: str, tables: EmbeddingTables, table: TableConfig, shard_bytes: int, *, whole: bool
    ) -> dict[str, Any]:
        """Write the raw ids of a table that grows, all or those that changed; return their part of its entry."""
        raw = tables.raw
        if raw is None or table.grow is None:
            return {}
        since, chunk = None if whole else raw.base, max(1, shard_bytes // RAW_BYTES)
        parts = [raw.read(table.name, waiting=each, chunk=chunk, since=since) for each in (False, True)]
        return {"clock": raw.clock, "whole": since is None, **self.write_raw_ids(prefix, table.name, *parts)}

    def write_raw_ids(
        self, prefix: str, table: str, raw_ids: Iterator[Tensor], waiting: Iterator[Tensor]
    ) -> dict[str, list[str]]:
        """Write entries of raw ids with a row, and of those that wait for one; return the files of both."""
        found: dict[str, list[str]] = {"raw_ids": [], "waiting": []}
        for (kind, files), parts in zip(found.items(), (raw_ids, waiting), strict=True):
            for number, part in enumerate(parts):
                files.append(f"{prefix}.{kind}.{number:05d}.safetensors")
                self.write(files[-1], f"the raw ids of table {table!r}", {"entries": part})
        return found


def _table_entry(table: TableConfig) -> dict[str, Any]:
    return {field: getattr(table, field) for field in ("name", "num_embeddings", "embedding_dim", "dtype")}


def _write_files(
    writer: _Writer,
    module: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    stream: Positioned | None,
    extra_state: Mapping[str, Any] | None,
    shard_bytes: int,
    *,
    changes: bool,
) -> dict[str, Any]:
    """Write all files of a checkpoint, or of a segment, but the manifest; return the manifest of the checkpoint."""
    trained = module_state.trained_in(module)
    single = set(optimizers) <= {"optimizer"} and extra_state is None
    first = single and isinstance(module, RecModel) and set(trained) == {"embeddings"}
    entries: list[dict[str, Any]] = []
    write = writer.write_changes if changes else writer.write_table
    found = module_state.tables_in(module)
    rows = sum(table.num_embeddings for tables in found.values() for table in tables.stored)
    with Counted("writing the checkpoint", rows, "rows") as counted:
        for name, tables in found.items():
            for table in tables.stored:
                entry = write(f"tables/{len(entries):03d}", tables, table, shard_bytes, counted)
                entries.append(entry if first else {**entry, "module": name})
    tensors: dict[str, Tensor] = {}
    manifest: dict[str, Any] = {"kind": "checkpoint", "tables": entries, "dense_optimizer": None}
    if first:
        assert isinstance(module, RecModel)
        tensors |= {f"model.{name}": value for name, value in module.dense_tensors()}
        for optimizer in optimizers.values():
            manifest["dense_optimizer"] = module_state.optimizer_values(optimizer, "optimizer", tensors)
    else:
        manifest |= _second_format(module, optimizers, extra_state, tensors)
    if isinstance(module, RecModel):
        manifest |= {"model": module.config(), "features": module.spec.to_dict()}
        manifest |= {"row_optimizer": module.embeddings.optimizer.to_dict(), "tick": module.embeddings.tick}
    tensors["generator.cpu"] = torch.get_rng_state()
    device = module_state.device_of(module)
    if device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(device)
    # Clones, because tied parameters share memory, which safetensors refuses.
    writer.write(DENSE, "the dense part", {name: value.detach().cpu().clone() for name, value in tensors.items()})
    return manifest | {
        "files": writer.files,
        "format_version": GROWING_VERSION if any("clock" in each for each in entries) else 1 if first else 2,
        "step": max((each.tick for each in trained.values()), default=0),
        "stream": None if stream is None else stream.state_dict(),
    }


def _second_format(
    module: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    extra_state: Mapping[str, Any] | None,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """Return the entries of a module in a manifest of format 2; add tensors of the dense part to ``tensors``."""
    values = {}
    for name, value in module_state.dense_state(module).items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            tensors[f"model.{name}"] = value
        else:
            values[name] = module_state.encode(f"the module's {name!r}", value, tensors)
    found = {}
    for place, (name, optimizer) in enumerate(optimizers.items()):
        prefix = f"optimizer{place}"
        found[name] = {"prefix": prefix} | module_state.optimizer_values(optimizer, prefix, tensors, module)
    extras = {}
    for name, each in (extra_state or {}).items():
        if isinstance(each, nn.Module) and module_state.tables_in(each):
            raise CheckpointError(
                f"extra_state[{name!r}] contains EmbeddingTables, whose rows may not fit in memory. Put it into the "
                "module that is saved, for example with nn.ModuleDict."
            )
        given = each.state_dict() if (has := hasattr(each, "state_dict")) else each
        extras[name] = {"object": has, "state": module_state.encode(f"extra_state[{name!r}]", given, tensors)}
    trained = {
        name: {
            "row_optimizer": None if each.optimizer is None else each.optimizer.to_dict(),
            "tick": each.tick,
            **({"seed": each.seed} if isinstance(each, EmbeddingTables) else {}),
        }
        for name, each in module_state.trained_in(module).items()
    }
    return {
        "class": type(module).__qualname__, "model": None, "features": None, "values": values, "optimizers": found,
        "extra_state": extras, "trained": trained,
    }  # fmt: skip


def _check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)  # both are nan if any value is; needs no memory
            if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                raise NotFiniteError(f"{what} is no longer finite ({name})")
