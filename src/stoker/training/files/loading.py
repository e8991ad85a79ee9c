"""Read a checkpoint into a model or a module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from safetensors import safe_open
from torch import nn

from stoker.base.errors import CheckpointError
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS, RecModel
from stoker.ops import BackendName
from stoker.optim import RowOptimizer
from stoker.training.files.checkpoint import Checkpoint, M, Resumable, read_manifest, verify
from stoker.training.files.module_state import Optimizers, device_of, named_optimizers, unwrap
from stoker.training.files.restoring import Saved, Tensors
from stoker.training.files.rundir import find_checkpoint, unknown_model, whole_beside
from stoker.training.files.storing import DENSE

if TYPE_CHECKING:
    from stoker.tables import Strategy

__all__ = ["load", "saved_model"]


@overload
def load(
    directory: str | Path,
    into: None = None,
    optimizer: Optimizers = None,
    stream: Resumable | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    backend: BackendName = "auto",
    placement: Strategy | Mapping[str, Strategy] | None = None,
) -> Checkpoint[RecModel]: ...


@overload
def load(
    directory: str | Path,
    into: M,
    optimizer: Optimizers = None,
    stream: Resumable | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
) -> Checkpoint[M]: ...


def load(
    directory: str | Path,
    into: nn.Module | None = None,
    optimizer: Optimizers = None,
    stream: Resumable | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    backend: BackendName = "auto",
    placement: Strategy | Mapping[str, Strategy] | None = None,
) -> Checkpoint[Any]:
    """Read a checkpoint, after checking every file against its sha256.

    Nothing is changed unless everything given fits what was saved. With ``optimizer`` or ``extra_state`` training is
    resumed: the state of torch's generators comes back too and, in a module of your own, the row optimizers get the
    learning rates and other settings that they were saved with.

    Args:
        directory: the checkpoint, or a run directory, whose best checkpoint is taken.
        into: filled in place, wherever its rows are; None builds the :class:`RecModel` that was saved.
        optimizer: filled in place; as many, under the same names, as were saved.
        stream: moved behind the last batch that was trained.
        extra_state: objects with ``load_state_dict()``, by the names they were saved under. Values that are no such
            objects are in ``extra_state`` of the result.
        device: where to build the model.
        backend: kernels of the model that is built.
        placement: where the rows of the model that is built lie; None means on the device.

    Raises:
        CheckpointError: a missing or damaged file, or a module, optimizer or extra state that differs from the saved
            one. The message names what differs.
    """
    directory = find_checkpoint(directory)
    manifest = read_manifest(directory)
    try:
        verify(directory, manifest)
    except CheckpointError as error:
        if into is not None:
            raise
        raise CheckpointError(f"{error} {whole_beside(directory)}") from error
    if into is None:
        kind = saved_model(directory, manifest)
        module: nn.Module = MODELS[kind].from_config(
            FeatureSpec.from_dict(manifest["features"]), manifest["model"],
            optimizer=RowOptimizer.from_dict(manifest["row_optimizer"]), device=device, backend=backend,
            placement=placement,
        )  # fmt: skip
    else:
        module = unwrap(into)
    optimizers = named_optimizers(optimizer)
    resuming = optimizer is not None or extra_state is not None
    with safe_open(directory / DENSE, framework="pt") as file:
        tensors = Tensors(file)
        saved = Saved(directory, manifest, tensors)
        saved.check(module, optimizers, extra_state, resuming=resuming)
        if stream is not None and manifest["stream"] is None:
            raise CheckpointError(f"{directory} was saved without a stream, so it has no data position.")
        saved.fill(module, optimizers, extra_state)
        if resuming:
            torch.set_rng_state(tensors["generator.cpu"])
            if (on := device_of(module)).type == "cuda" and "generator.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["generator.cuda"], on)
        kept = saved.extra_state()
    if stream is not None:
        stream.load_state_dict(manifest["stream"])
    return Checkpoint(path=directory, manifest=manifest, model=module if into is None else into, extra_state=kept)


def saved_model(directory: Path, manifest: Mapping[str, Any]) -> str:
    """Return the name of the :class:`RecModel` in a checkpoint.

    Raises:
        CheckpointError: it holds a module of another kind, or a model that was not imported.
    """
    if manifest["model"] is None:
        raise CheckpointError(
            f"{directory} holds a {manifest['class']}, a module that only your own code can build. Build it, and give "
            f"it: stoker.load({str(directory)!r}, into=module)."
        )
    kind = str(manifest["model"]["model"])
    if kind not in MODELS:
        raise CheckpointError(f"{directory} holds a model {kind!r}, unknown here. {unknown_model(directory, kind)}")
    return kind
