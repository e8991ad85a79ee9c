"""Whether a run has the room it will need: memory for its rows, disk for its checkpoints. Asked before it begins."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stoker.base.device import available_memory, resolve_device, total_memory
from stoker.base.device import device_memory as memory_of
from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.units import format_size, parse_size
from stoker.placement.placement import Placement, row_bytes
from stoker.tables import Device, TableConfig
from stoker.training.config import TrainConfig

_SHARE = 0.8  # of the memory, in the budget that is proposed


def check_memory(
    tables: Sequence[TableConfig],
    state: Mapping[str, str],
    device: torch.device,
    placement: Placement | None = None,
) -> str | None:
    """Refuse tables whose rows on the device need more memory than it has; ``placement`` None: all rows are there.

    Returns:
        A warning if they fit the machine, but not what is free at the moment.

    Raises:
        ConfigError: with the bytes and the budget to give.
    """
    here = [table for table in tables if placement is None or isinstance(placement.get(table.name, Device()), Device)]
    # Of the state, pages of rows that no batch has touched take no memory: only the weights are certain.
    needed = sum(table.num_bytes for table in here)
    whole = sum(table.num_embeddings * row_bytes(table, state) for table in here)
    if device.type == "cpu":
        limits = [limit for limit in (total_memory(), _address_space()) if limit is not None]
        most, free = min(limits, default=None), available_memory()
    else:
        free, most = memory_of(device)
    if most is None or not needed:
        return None
    budget = max(1, int(_SHARE * min(most, free or most)) // 2**20)
    remedy = (
        f"Give a smaller device_memory, such as {budget}MiB: the other rows then lie in main memory or in a file, and "
        "the numbers stay the same. stoker plan shows what that costs"
    )
    if needed > most:
        raise ConfigError(
            f"the rows need {format_size(whole)} on {device}, with optimizer state, but only {format_size(most)} can "
            f"be had there. {remedy}; or choose fewer columns (embedding_dim)."
        )
    if free is not None and needed > free:
        return (
            f"warning: the rows need {format_size(whole)} on {device}, with optimizer state, but only "
            f"{format_size(free)} is free. {remedy}."
        )
    return None


def batch_options(
    config: TrainConfig, tables: Sequence[TableConfig], state: Mapping[str, str], *, placed: bool
) -> dict[str, Any]:
    """Where a run's batches are made and kept: options of :func:`stoker.training.scheduled.run_stream`.

    Where rows of tables come and go (``placed``), batches are made in main memory, where their ids are planned.
    """
    device = resolve_device(config.device)
    gpu = device.type == "cuda"
    if config.data_memory != "auto":
        budget = parse_size(config.data_memory)
    elif gpu and not placed:
        rows = sum(table.num_embeddings * row_bytes(table, state) for table in tables)
        budget = max(0, (memory_of(device)[0] - rows) // 2)
    else:
        budget = 0
    return {
        "reuse": not gpu and not placed,  # staged batches wait in the window
        "pin_memory": gpu,
        "device": device if gpu and not placed else None,
        "data_memory": budget,
    }


def _address_space() -> int | None:
    """Bytes that this process may still map, where it has a limit (``ulimit -v``)."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        mapped = 0
    return max(0, limit - mapped)


def check_disk(
    run: Path,
    tables: Sequence[TableConfig],
    state: Mapping[str, str],
    dense_bytes: int,
    config: TrainConfig,
    *,
    steps: int,
    epoch: int,
    there: int,
) -> str | None:
    """Refuse a run whose first checkpoint does not fit the disk.

    Args:
        run: the run directory, which need not exist yet.
        tables: of the model, with the ``state`` of its row optimizer and ``dense_bytes`` of dense parameters.
        config: the settings.
        steps: batches still to be trained, ``epoch`` of them a pass.
        there: checkpoints that the run has already.

    Returns:
        A warning if one fits, but not as many as the run will keep.

    Raises:
        CheckpointError: with the bytes of a checkpoint and of the free space.
    """
    if steps < 1:
        return None
    size = sum(table.num_embeddings * row_bytes(table, state) for table in tables) + 3 * dense_bytes  # with Adam's
    folder = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    what = f"a checkpoint takes {format_size(size)}, and the disk of {folder} has {format_size(free)} free"
    if size > free:
        raise CheckpointError(
            f"{what}: not one could be written. Free some space, choose a run directory on another disk (out), or "
            "fewer columns (embedding_dim).",
            settings=("out",),
        )
    saves = -(-steps // (config.save_every or config.eval_every or epoch)) + (config.checkpoint_minutes > 0)
    # The last ones, the best one, and the new one beside them while it is written.
    kept = min(saves, max(0, config.keep_last + 2 - there))
    if kept * size <= free:
        return None
    lower = "lower keep_last, or save less often" if config.keep_last > 1 else "save less often"
    return (
        f"warning: {what}: the {kept} that the run will have at a time need {format_size(kept * size)}. Free some "
        f"space, {lower} (save_every, checkpoint_minutes), or training will end when the disk is full."
    )
