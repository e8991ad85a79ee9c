"""Writing the files of a checkpoint: rows in chunks, and everything else of a module in one file."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.base.errors import CheckpointError
from stoker.base.files import hash_file
from stoker.models import RecModel
from stoker.tables import EmbeddingTables
from stoker.training.files.module_state import dense_state, device_of, encode, optimizer_values, tables_in, trained_in

__all__ = ["DENSE", "FORMAT_VERSION", "NotFiniteError", "Positioned", "write_files"]

FORMAT_VERSION = 2
DENSE = "dense.safetensors"


class Positioned(Protocol):
    """A stream of batches, staged or not."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""


class NotFiniteError(CheckpointError):
    """A model with infinite or undefined values, which is not worth keeping."""


def write_files(
    folder: Path,
    module: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    stream: Positioned | None,
    extra_state: Mapping[str, Any] | None,
    shard_bytes: int,
    require_finite: bool,
) -> dict[str, Any]:
    """Write all files of a checkpoint but the manifest, which is returned."""
    trained = trained_in(module)
    files: dict[str, Any] = {}
    stored = [(name, tables, table.name) for name, tables in tables_in(module).items() for table in tables.stored]
    entries = [
        _save_table(folder, index, tables, table, files, shard_bytes, require_finite)
        for index, (_, tables, table) in enumerate(stored)
    ]
    single = set(optimizers) <= {"optimizer"} and extra_state is None
    first = single and isinstance(module, RecModel) and set(trained) == {"embeddings"}
    tensors: dict[str, Tensor] = {}
    manifest: dict[str, Any] = {"kind": "checkpoint", "files": files, "tables": entries, "dense_optimizer": None}
    if first:
        assert isinstance(module, RecModel)
        tensors |= {f"model.{name}": value for name, value in module.dense_tensors()}
        for each in optimizers.values():
            manifest["dense_optimizer"] = optimizer_values(each, "optimizer", tensors)
    else:
        for entry, (name, _, _) in zip(entries, stored, strict=True):
            entry["module"] = name
        manifest |= _second_format(module, optimizers, extra_state, tensors)
        manifest["trained"] = {
            name: {
                "row_optimizer": None if each.optimizer is None else each.optimizer.to_dict(),
                "tick": each.tick,
                **({"seed": each.seed} if isinstance(each, EmbeddingTables) else {}),
            }
            for name, each in trained.items()
        }
    if isinstance(module, RecModel):
        manifest |= {"model": module.config(), "features": module.spec.to_dict()}
        manifest |= {"row_optimizer": module.embeddings.optimizer.to_dict(), "tick": module.embeddings.tick}
    tensors["generator.cpu"] = torch.get_rng_state()
    device = device_of(module)
    if device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(device)
    # A clone where needed: tied parameters would share memory, which the format refuses.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    if require_finite:
        _check_finite("the dense part", tensors)
    files[DENSE] = _save_tensors(folder / DENSE, tensors)
    return manifest | {
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
    """Return what the manifest says of the dense part in format 2; its tensors go into ``tensors``."""
    values = {}
    for name, value in dense_state(module).items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            tensors[f"model.{name}"] = value
        else:
            values[name] = encode(f"the module's {name!r}", value, tensors)
    found = {}
    for place, (name, optimizer) in enumerate(optimizers.items()):
        found[name] = {"prefix": f"optimizer{place}"} | optimizer_values(
            optimizer, f"optimizer{place}", tensors, module
        )
    extras = {}
    for name, each in (extra_state or {}).items():
        if isinstance(each, nn.Module) and tables_in(each):
            raise CheckpointError(
                f"extra_state[{name!r}] contains EmbeddingTables, whose rows may not fit in memory. Put it into the "
                "module that is saved, for example with nn.ModuleDict."
            )
        given = each.state_dict() if (has := hasattr(each, "state_dict")) else each
        extras[name] = {"object": has, "state": encode(f"extra_state[{name!r}]", given, tensors)}
    return {
        "class": type(module).__qualname__, "model": None, "features": None, "values": values, "optimizers": found,
        "extra_state": extras,
    }  # fmt: skip


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
    folder: Path,
    index: int,
    tables: EmbeddingTables,
    name: str,
    files: dict[str, Any],
    shard_bytes: int,
    require_finite: bool,
) -> dict[str, Any]:
    table = next(each for each in tables.stored if each.name == name)
    state_bytes = sum(4 * table.embedding_dim if kind == "row" else 4 for kind in tables.optimizer.state.values())
    row_bytes = table.num_bytes // table.num_embeddings + state_bytes
    shards = []
    for number, (start, rows) in enumerate(tables.read(name, chunk_rows=max(1, shard_bytes // row_bytes))):
        file = f"tables/{index:03d}.{number:05d}.safetensors"
        tensors = {"weight": rows.weight, **rows.state}
        if require_finite:
            _check_finite(f"table {name!r}", tensors)
        files[file] = _save_tensors(
            folder / file, {key: value.detach().contiguous().cpu() for key, value in tensors.items()}
        )
        shards.append({"file": file, "start": start, "rows": len(rows.weight)})
    return {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype,
        "shards": shards,
    }
