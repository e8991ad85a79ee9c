"""Checkpoints: canonical rows, optimizer state, dense part and data position in a directory with checksums.

::

    step_000001000/
      manifest.json             what follows, with sizes and sha256; no time stamp, no path, no placement
      dense.safetensors         dense parameters and buffers, dense optimizer state, generator states
      tables/000.00000.safetensors   rows and row-optimizer state of table 0, some 256 MiB a file
                                 (each core of a tensor-train table counts as a table)

A checkpoint is written beside its final name, flushed to disk and renamed, so a directory of that name is
whole. Tables stream through in chunks: memory does not grow with them. Any placement and device may load the
files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import stoker
from stoker.data.dataset import canonical_json, hash_file
from stoker.data.features import FeatureSpec
from stoker.data.files import sync_folder
from stoker.errors import CheckpointError
from stoker.models import MODELS, RecModel
from stoker.ops import BackendName
from stoker.optim import RowOptimizer
from stoker.tables.storage import Rows

if TYPE_CHECKING:
    from stoker.tables import Strategy

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "NotFiniteError",
    "Positioned",
    "Resumable",
    "discard",
    "load",
    "read_manifest",
    "save",
    "verify",
]

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_DENSE = "dense.safetensors"
SHARD_BYTES = 256 * 2**20  # of rows and state in one file


class Positioned(Protocol):
    """A stream of batches, staged or not."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""


class Resumable(Protocol):
    """A stream that can be moved to a position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""


class NotFiniteError(CheckpointError):
    """A model with infinite or undefined values, which is not worth keeping."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What :func:`load` returns."""

    path: Path
    manifest: Mapping[str, Any]
    model: RecModel

    @property
    def step(self) -> int:
        """Batches trained."""
        return int(self.manifest["step"])


def save(
    directory: str | Path,
    model: RecModel,
    dense_optimizer: torch.optim.Optimizer | None = None,
    stream: Positioned | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint, whole or not at all.

    Args:
        directory: its name; must not exist unless ``overwrite``.
        model: the model.
        dense_optimizer: optimizer of ``model.dense_parameters()``.
        stream: the training batches, staged or not, to continue behind the last one handed out.
        step: batches trained; None takes the tables' own count.
        extra: further JSON values to keep.
        overwrite: replace an existing checkpoint.
        require_finite: refuse a model with infinite or undefined values.
        shard_bytes: largest file of rows.

    Raises:
        NotFiniteError: see ``require_finite``.
        CheckpointError: the directory exists, or the disk has no room.
    """
    target = Path(directory)
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists. Choose another name, or pass overwrite=True.")
    beside = target.with_name(target.name + ".tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        (beside / "tables").mkdir(parents=True)
        files: dict[str, Any] = {}
        tables = [
            _save_table(beside, index, model, files, shard_bytes, require_finite)
            for index in range(len(model.embeddings.stored))
        ]
        tensors, optimizer = _dense_tensors(model, dense_optimizer)
        if require_finite:
            _check_finite("the dense part", tensors)
        files[_DENSE] = _save_tensors(beside / _DENSE, tensors)
        manifest = {
            "kind": "checkpoint",
            "format_version": FORMAT_VERSION,
            "stoker_version": stoker.__version__,
            "step": model.embeddings.tick if step is None else step,
            "model": model.config(),
            "features": model.spec.to_dict(),
            "row_optimizer": model.embeddings.optimizer.to_dict(),
            "tick": model.embeddings.tick,
            "dense_optimizer": optimizer,
            "stream": None if stream is None else stream.state_dict(),
            "extra": dict(extra or {}),
            "tables": tables,
            "files": files,
        }
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        with (beside / _MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        for folder in (beside / "tables", beside):
            sync_folder(folder)
        replaced = target.with_name(target.name + ".tmp-old")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            os.replace(target, replaced)
        os.replace(beside, target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error.strerror or error}. Nothing half-written was "
            "kept; earlier checkpoints are untouched. Free some space, or lower keep_last."
        ) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def discard(path: Path) -> None:
    """Delete a checkpoint so that no half of it ever carries its name."""
    gone = path.with_name(path.name + ".tmp-old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Take a damaged checkpoint out of its run, under a name that no run looks for, and return that.

    Nobody but its owner knows what can still be saved of it. One set aside earlier under that name is deleted.
    """
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return aside


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # it wraps what the operating system said
        number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
    size, digest = hash_file(path)
    return {"bytes": size, "sha256": digest}


def _check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)  # both carry nan; needs no memory
            if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                raise NotFiniteError(f"{what} is no longer finite ({name})")


def _save_table(
    folder: Path, index: int, model: RecModel, files: dict[str, Any], shard_bytes: int, require_finite: bool
) -> dict[str, Any]:
    table = model.embeddings.stored[index]
    optimizer = model.embeddings.optimizer
    state_bytes = sum(4 * table.embedding_dim if kind == "row" else 4 for kind in optimizer.state.values())
    row_bytes = table.num_bytes // table.num_embeddings + state_bytes
    shards = []
    for number, (start, rows) in enumerate(
        model.embeddings.read(table.name, chunk_rows=max(1, shard_bytes // row_bytes))
    ):
        name = f"tables/{index:03d}.{number:05d}.safetensors"
        tensors = {"weight": rows.weight, **rows.state}
        if require_finite:
            _check_finite(f"table {table.name!r}", tensors)
        files[name] = _save_tensors(
            folder / name, {key: value.detach().contiguous().cpu() for key, value in tensors.items()}
        )
        shards.append({"file": name, "start": start, "rows": len(rows.weight)})
    return {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype,
        "shards": shards,
    }


def _dense_tensors(
    model: RecModel, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors to keep, and what of the optimizer is no tensor."""
    tensors = {f"model.{name}": value for name, value in (*model.named_parameters(), *model.named_buffers())}
    tensors["generator.cpu"] = torch.get_rng_state()
    if model.device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(model.device)
    values: dict[str, Any] | None = None
    if optimizer is not None:
        whole = optimizer.state_dict()
        values = {"kind": type(optimizer).__name__, "param_groups": whole["param_groups"], "state": {}}
        for index, entries in whole["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{name}"] = value
                else:
                    values["state"].setdefault(str(index), {})[name] = value
        values = json.loads(json.dumps(values, default=_plain))
    # A clone where needed: tied parameters would share memory, which the format refuses.
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, values


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise CheckpointError(f"the dense optimizer has a setting of type {type(value).__name__}, which cannot be saved.")


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: no checkpoint there, a garbled one, or one of a newer format.
    """
    path = Path(directory) / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is no checkpoint: it has no {_MANIFEST}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Use an earlier checkpoint.") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != "checkpoint":
        raise CheckpointError(f"{path} is not the manifest of a checkpoint.")
    if int(manifest.get("format_version", 0)) > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has checkpoint format {manifest['format_version']}, this Stoker reads up to "
            f"{FORMAT_VERSION}. Update Stoker."
        )
    return manifest


def verify(directory: str | Path, manifest: Mapping[str, Any] | None = None) -> int:
    """Re-hash every file of a checkpoint and return their number.

    Raises:
        CheckpointError: naming the first file that is missing, cut short or altered.
    """
    directory = Path(directory)
    manifest = read_manifest(directory) if manifest is None else manifest
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the manifest lists it with {expected['bytes']:,} bytes.")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, the manifest says {expected['bytes']:,}: it was "
                "cut short or altered."
            )
        digest = hash_file(path)[1]
        if digest != expected["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is {digest[:16]}..., the manifest says {expected['sha256'][:16]}..."
            )
    return len(manifest["files"])


def load(
    directory: str | Path,
    model: RecModel | None = None,
    dense_optimizer: torch.optim.Optimizer | None = None,
    stream: Resumable | None = None,
    *,
    device: torch.device | str = "cpu",
    backend: BackendName = "auto",
    placement: Strategy | Mapping[str, Strategy] | None = None,
) -> Checkpoint:
    """Read a checkpoint, after checking every file against its sha256.

    Args:
        directory: the checkpoint, or a run directory, whose best checkpoint is taken.
        model: filled in place; None builds the model that was saved.
        dense_optimizer: filled in place.
        stream: moved behind the last batch that was trained.
        device: where to build the model.
        backend: kernels of the model that is built.
        placement: where the rows of the model that is built lie; None means on the device.

    Raises:
        CheckpointError: a missing or damaged file, or a model that differs from the saved one.
    """
    from stoker.training.rundir import find_checkpoint, whole_beside

    directory = find_checkpoint(directory)
    manifest = read_manifest(directory)
    try:
        verify(directory, manifest)
    except CheckpointError as error:
        if model is not None:
            raise
        raise CheckpointError(f"{error} {whole_beside(directory)}") from error
    optimizer = RowOptimizer.from_dict(manifest["row_optimizer"])
    if model is None:
        kind = manifest["model"]["model"]
        if kind not in MODELS:
            raise CheckpointError(
                f"{directory} holds a model {kind!r}, unknown here. Import the module that adds it to "
                "stoker.models.MODELS."
            )
        spec = FeatureSpec.from_dict(manifest["features"])
        model = MODELS[kind].from_config(
            spec, manifest["model"], optimizer=optimizer, device=device, backend=backend, placement=placement
        )
    else:
        _check_same(directory, manifest, model)
    for entry in manifest["tables"]:
        _load_table(directory, entry, model)
    model.embeddings.tick = int(manifest["tick"])
    with safe_open(directory / _DENSE, framework="pt") as file:
        _load_dense(directory, file, model, dense_optimizer, manifest["dense_optimizer"])
        if dense_optimizer is not None:
            torch.set_rng_state(file.get_tensor("generator.cpu"))
            if model.device.type == "cuda" and "generator.cuda" in file.keys():  # noqa: SIM118
                torch.cuda.set_rng_state(file.get_tensor("generator.cuda"), model.device)
    if stream is not None:
        if manifest["stream"] is None:
            raise CheckpointError(f"{directory} was saved without a stream, so it has no data position.")
        stream.load_state_dict(manifest["stream"])
    return Checkpoint(path=directory, manifest=manifest, model=model)


def _check_same(directory: Path, manifest: Mapping[str, Any], model: RecModel) -> None:
    saved: dict[str, Any] = {**manifest["model"], "features": manifest["features"]}
    mine = json.loads(canonical_json({**model.config(), "features": model.spec.to_dict()}))
    differ = [name for name in sorted({*saved, *mine}) if saved.get(name) != mine.get(name)]
    if differ:
        shown = "; ".join(
            f"{name}: saved {saved.get(name)}, given {mine.get(name)}" for name in differ if name != "features"
        )
        raise CheckpointError(
            f"{directory} holds another model: {shown or 'its columns or table sizes differ'}. Leave the "
            "model out to build the saved one, or use its own dataset."
        )
    kinds = manifest["row_optimizer"]["kind"], model.embeddings.optimizer.kind
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"{directory} holds the state of row optimizer {kinds[0]!r}, the model has {kinds[1]!r}.")


def _load_table(directory: Path, entry: Mapping[str, Any], model: RecModel) -> None:
    done = 0
    for shard in entry["shards"]:
        if shard["start"] != done:
            raise CheckpointError(f"{directory}: table {entry['name']!r} has no rows {done:,} to {shard['start']:,}.")
        try:
            with safe_open(directory / shard["file"], framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{directory / shard['file']} cannot be read ({error}).") from error
        model.embeddings.write(entry["name"], done, Rows(tensors.pop("weight"), tensors))
        done += int(shard["rows"])
    if done != entry["num_embeddings"]:
        raise CheckpointError(
            f"{directory}: table {entry['name']!r} has {done:,} rows in its files, the manifest says "
            f"{entry['num_embeddings']:,}."
        )


def _load_dense(
    directory: Path,
    file: Any,
    model: RecModel,
    optimizer: torch.optim.Optimizer | None,
    values: Mapping[str, Any] | None,
) -> None:
    names = set(file.keys())
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if f"model.{name}" not in names:
                raise CheckpointError(f"{directory / _DENSE} lacks the parameter {name!r}.")
            value.copy_(file.get_tensor(f"model.{name}"))
    if optimizer is None:
        return
    if values is None:
        raise CheckpointError(f"{directory} was saved without a dense optimizer, so it has no state for one.")
    if values["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{directory} holds the state of dense optimizer {values['kind']!r}, not {type(optimizer).__name__!r}."
        )
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in values["state"].items()}
    for name in sorted(names):
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = file.get_tensor(name)
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in values["param_groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
