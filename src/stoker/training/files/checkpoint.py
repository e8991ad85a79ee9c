"""Checkpoints: canonical rows, optimizer state, dense part and data position in a directory with checksums.

::

    step_000001000/
      manifest.json             what follows, with sizes and sha256; no time stamp, no path, no placement
      dense.safetensors         dense parameters and buffers, dense optimizer state, generator states, extra state
      tables/000.00000.safetensors   rows and row-optimizer state of table 0, some 256 MiB a file
                                 (each core of a tensor-train table counts as a table)

A checkpoint is written under a temporary name, flushed to disk and renamed, so a directory of the final name is
whole. Tables stream through in chunks: memory does not grow with them. Any placement and device may load the
files.

Format 1 holds a :class:`RecModel` with one optimizer. Format 2 holds any module, several optimizers and extra state:
its manifest says for each table which :class:`EmbeddingTables` it is in.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import nn

from stoker.base.errors import CheckpointError
from stoker.base.files import hash_file, refuse_url, sync_folder
from stoker.base.version import __version__
from stoker.training.files.module_state import Optimizers, named_optimizers, unwrap
from stoker.training.files.storing import FORMAT_VERSION, NotFiniteError, Positioned, write_files

if TYPE_CHECKING:
    pass

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "NotFiniteError",
    "Positioned",
    "Resumable",
    "discard",
    "read_manifest",
    "save",
    "verify",
]

_MANIFEST = "manifest.json"
SHARD_BYTES = 256 * 2**20  # of rows and state in one file


class Resumable(Protocol):
    """A stream that can be moved to a position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Generic[M]):
    """What :func:`load` returns."""

    path: Path
    manifest: Mapping[str, Any]
    model: M
    extra_state: Mapping[str, Any] = field(default_factory=dict)  # as it was given; of an object, its state_dict()

    @property
    def step(self) -> int:
        """Batches trained."""
        return int(self.manifest["step"])


def save(
    directory: str | Path,
    module: nn.Module,
    optimizer: Optimizers = None,
    stream: Positioned | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint of a module, whole or not at all.

    The rows of every :class:`EmbeddingTables` in ``module`` stream to disk in chunks, from wherever they are. The rest
    is ``module.state_dict()``, with the cores of every :class:`TTEmbeddingBag` in it. Where several processes train
    replicas, one of them saves.

    Args:
        directory: its name; must not exist unless ``overwrite``.
        module: any module, such as a :class:`RecModel` or one of your own. Wrappers (DistributedDataParallel,
            torch.compile) are left out.
        optimizer: optimizer of the dense parameters, or several as a dict or a list.
        stream: the training batches, staged or not, to continue behind the last one handed out.
        extra_state: what else the script needs to continue, by name: objects with ``state_dict()``, such as
            learning-rate schedulers and GradScaler, or values made of JSON values and tensors.
        step: batches trained; None takes the tables' own count.
        extra: further JSON values to keep, in the manifest.
        overwrite: replace an existing checkpoint.
        require_finite: refuse a model with infinite or undefined values.
        shard_bytes: largest file of rows.

    Returns:
        The directory.

    Raises:
        NotFiniteError: see ``require_finite``.
        CheckpointError: the directory exists, the disk has no room, or a value that no checkpoint can hold.

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
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"module is a {type(module).__name__}; save takes the nn.Module itself, not its state.")
    refuse_url(directory, "a checkpoint of stoker.save")
    module = unwrap(module)
    optimizers = named_optimizers(optimizer)
    target = Path(directory)
    beside = target.with_name(target.name + ".tmp")
    replaced = target.with_name(target.name + ".tmp-old")
    try:
        if overwrite and not target.exists() and (kept := left_by_a_kill(target)) is not None:
            os.replace(kept, target)  # or nothing would load while this one is being written
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists. Choose another name, or pass overwrite=True.")
        shutil.rmtree(beside, ignore_errors=True)
        (beside / "tables").mkdir(parents=True)
        manifest = write_files(beside, module, optimizers, stream, extra_state, shard_bytes, require_finite)
        manifest |= {"stoker_version": __version__, "extra": dict(extra or {})}
        if step is not None:
            manifest["step"] = step
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        with (beside / _MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        for folder in (beside / "tables", beside):
            sync_folder(folder)
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


def left_by_a_kill(target: Path) -> Path | None:
    """Return what :func:`save` left of ``target`` when it was killed between its two renames."""
    for kept in (target.with_name(target.name + ".tmp"), target.with_name(target.name + ".tmp-old")):
        with suppress(CheckpointError):  # cut short: killed while it was written
            read_manifest(kept)
            return kept
    return None


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
