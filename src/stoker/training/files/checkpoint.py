"""Checkpoints: rows, optimizer state, dense part and data position in a directory with checksums.

::

    step_000001000/
      manifest.json             sizes and sha256 of all files; no time stamp, no path, no placement
      dense.safetensors         dense parameters and buffers, dense optimizer state, generator states, extra state
      tables/000.00000.safetensors   rows and row-optimizer state of table 0, at most 256 MiB a file
                                 (each core of a tensor-train table counts as a table)

A checkpoint is written under a temporary name, flushed to disk and renamed, so a directory with the final name is
whole. Tables are written in chunks, so memory does not grow with them. Any placement and device can load the files.

Format 1 is for a :class:`RecModel` with one optimizer. Format 2 is for any module, several optimizers and extra state:
its manifest names the :class:`EmbeddingTables` of each table.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.base.errors import CheckpointError, errors_as
from stoker.base.files import exchange, hash_file, move, refuse_url, sync_folder
from stoker.base.picture import Shown
from stoker.base.settings import with_arguments_of
from stoker.base.version import __version__
from stoker.models import RecModel
from stoker.placement.placement import row_bytes
from stoker.tables import EmbeddingTables, TableConfig
from stoker.training.files import module_state
from stoker.training.files.module_state import Optimizers

FORMAT_VERSION = 2
_MANIFEST = "manifest.json"
_SHARD_BYTES = 256 * 2**20  # of rows and state in one file
DENSE = "dense.safetensors"

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
    overwrite: bool = False
    require_finite: bool = False
    shard_bytes: int = _SHARD_BYTES


@with_arguments_of(SaveArguments)
def save(*given: Any, **settings: Any) -> Path:
    """Write a checkpoint of a module, whole or not at all.

    The rows of every :class:`EmbeddingTables` in ``module`` are written in chunks, wherever they are. The rest is
    ``module.state_dict()``, with the cores of every :class:`TTEmbeddingBag`. If several processes train replicas, only
    one of them should save.

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
        overwrite: replace an existing checkpoint.
        require_finite: refuse a model with infinite or undefined values.
        shard_bytes: largest file of rows.

    Returns:
        The directory.

    Raises:
        NotFiniteError: see ``require_finite``.
        CheckpointError: the directory exists, the disk is full, or a checkpoint cannot contain a value.

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
    if any(tables.divided for tables in module_state.tables_in(module).values()):
        raise CheckpointError(
            "stoker.save does not write tables whose rows are divided among ranks yet. Take module.state_dict() on "
            "every rank, and torch.save it on one (docs/ranks.md)."
        )
    optimizers = module_state.named_optimizers(asked.optimizer)
    target = Path(directory)
    temporary = target.with_name(target.name + ".tmp")
    try:
        if overwrite and not target.exists() and (kept := left_by_a_kill(target)) is not None:
            move(kept, target)  # so that a checkpoint can be loaded while the new one is written
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists. Choose another name, or pass overwrite=True.")
        _remove(temporary)
        (temporary / "tables").mkdir(parents=True)
        writer = _Writer(temporary, require_finite=asked.require_finite)
        manifest = _write_files(writer, module, optimizers, asked.stream, asked.extra_state, asked.shard_bytes)
        manifest |= {"stoker_version": __version__, "extra": dict(asked.extra or {})}
        if asked.step is not None:
            manifest["step"] = asked.step
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        with (temporary / _MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        for folder in (temporary / "tables", temporary):
            sync_folder(folder)
        exchange(temporary, target, target.with_name(target.name + ".tmp-old"), _remove)
    except OSError as error:
        _remove(temporary)
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error.strerror or error}. Its files were deleted; earlier "
            "checkpoints are untouched. Free some space, or lower keep_last."
        ) from error
    except BaseException:
        _remove(temporary)
        raise
    return target


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def left_by_a_kill(target: Path) -> Path | None:
    """Return the whole copy of ``target`` that exists if :func:`save` was killed between its two renames, else None."""
    for kept in (target.with_name(target.name + ".tmp"), target.with_name(target.name + ".tmp-old")):
        with suppress(CheckpointError):  # incomplete: killed while it was written
            read_manifest(kept)
            return kept
    return None


def discard(path: Path) -> None:
    """Delete a checkpoint; if the process is killed here, no incomplete directory has its name."""
    gone = path.with_name(path.name + ".tmp-old")
    _remove(gone)
    move(path, gone)
    _remove(gone)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to ``*.damaged``, which runs ignore; return the new path.

    Its owner may still want files of it. An earlier directory of that name is deleted.
    """
    aside = path.with_name(path.name + ".damaged")
    _remove(aside)
    move(path, aside)
    return aside


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: the directory is not a checkpoint, the manifest is damaged, or its format is newer.
    """
    path = Path(directory) / _MANIFEST
    if not path.exists():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {_MANIFEST}.")
    with errors_as(CheckpointError, f"{path} is damaged", "Use an earlier checkpoint.", (OSError, ValueError)):
        manifest = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("kind") != "checkpoint":
        raise CheckpointError(f"{path} is not the manifest of a checkpoint.")
    if int(manifest.get("format_version", 0)) > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has checkpoint format {manifest['format_version']}, this Stoker reads up to "
            f"{FORMAT_VERSION}. Update Stoker."
        )
    return manifest


def verify(directory: str | Path, manifest: Mapping[str, Any] | None = None) -> int:
    """Check every file of a checkpoint against its sha256; return the number of files.

    Raises:
        CheckpointError: a file is missing, incomplete or altered; the message names the first.
    """
    directory = Path(directory)
    manifest = read_manifest(directory) if manifest is None else manifest
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the manifest lists it with {expected['bytes']:,} bytes.")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, the manifest says {expected['bytes']:,}: it was cut "
                "short or altered."
            )
        digest = hash_file(path)[1]
        if digest != expected["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is {digest[:16]}..., the manifest says {expected['sha256'][:16]}..."
            )
    return len(manifest["files"])


class _Writer:
    """Write files of tensors, and collect their sizes and checksums."""

    def __init__(self, folder: Path, *, require_finite: bool) -> None:
        self.folder, self.require_finite = folder, require_finite
        self.files: dict[str, Any] = {}

    def write(self, name: str, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one file; ``what`` names its contents in messages."""
        path = self.folder / name
        here = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        if self.require_finite:
            _check_finite(what, here)
        try:
            save_file(here, path)
        except SafetensorError as error:  # it wraps the error of the operating system
            number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        with path.open("rb") as file:
            os.fsync(file.fileno())
        size, digest = hash_file(path)
        self.files[name] = {"bytes": size, "sha256": digest}

    def write_table(self, prefix: str, tables: EmbeddingTables, table: TableConfig, shard_bytes: int) -> dict[str, Any]:
        """Write the rows of a table, up to ``shard_bytes`` a file; return its entry in the manifest."""
        shards = []
        chunk_rows = max(1, shard_bytes // row_bytes(table, tables.optimizer.state))
        for number, (start, rows) in enumerate(tables.read(table.name, chunk_rows=chunk_rows)):
            file = f"{prefix}.{number:05d}.safetensors"
            self.write(file, f"table {table.name!r}", {"weight": rows.weight, **rows.state})
            shards.append({"file": file, "start": start, "rows": len(rows.weight)})
        fields = ("name", "num_embeddings", "embedding_dim", "dtype")
        return {**{field: getattr(table, field) for field in fields}, "shards": shards}


def _write_files(
    writer: _Writer,
    module: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    stream: Positioned | None,
    extra_state: Mapping[str, Any] | None,
    shard_bytes: int,
) -> dict[str, Any]:
    """Write all files of a checkpoint but the manifest; return the manifest."""
    trained = module_state.trained_in(module)
    single = set(optimizers) <= {"optimizer"} and extra_state is None
    first = single and isinstance(module, RecModel) and set(trained) == {"embeddings"}
    entries: list[dict[str, Any]] = []
    for name, tables in module_state.tables_in(module).items():
        for table in tables.stored:
            entry = writer.write_table(f"tables/{len(entries):03d}", tables, table, shard_bytes)
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
        "format_version": 1 if first else FORMAT_VERSION,
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
