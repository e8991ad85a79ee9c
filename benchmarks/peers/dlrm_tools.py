"""What every contestant of the full DLRM step shares: inputs, checked steps, timed blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from worker_tools import say, time_blocks

__all__ = ["case_name", "dlrm_case", "start_of"]


def start_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Initial layers by name (b0.weight, ...)."""
    with np.load(Path(config["inputs"]) / "start.npz") as kept:
        return dict(kept)


def initial_rows(config: dict[str, Any]) -> np.ndarray:
    return np.load(Path(config["inputs"]) / "rows.npy", mmap_mode="r")


def case_name(optimizer: str, batch: int) -> str:
    return f"{'SGD' if optimizer == 'sgd' else 'row-wise Adagrad'}, batch {batch}"


def dlrm_case(
    config: dict[str, Any],
    optimizer: str,
    batch: int,
    natural: Callable[[np.ndarray, np.ndarray, np.ndarray], Any],
    step: Callable[[Any], np.ndarray],
    layers: Callable[[], dict[str, np.ndarray]],
    rows: Callable[[], np.ndarray],
) -> list[Any]:
    """Check, then time one (optimizer, batch size) of a freshly built model; returns the pool of inputs.

    Args:
        natural: (dense [B, 13], ids [B, F], labels [B]) as the contestant's own input, made before the
            clock runs.
        step: one whole training step; returns the logits before the update.
        layers, rows: the weights now, rows as [N, D].
    """
    source = Path(config["inputs"])
    ids = np.load(Path(config["ids"]) / f"ids_{batch}.npy", mmap_mode="r")
    dense = np.load(source / f"dense_{batch}.npy", mmap_mode="r")
    labels = np.load(source / f"labels_{batch}.npy", mmap_mode="r")
    pool = [natural(np.array(d), np.array(i), np.array(y)) for d, i, y in zip(dense, ids, labels, strict=True)]
    logits = np.empty(0)
    for number in range(config["checked_steps"]):
        logits = step(pool[number]).copy()
    now = rows()
    changed = np.flatnonzero((now != initial_rows(config)).any(axis=1))
    case = case_name(optimizer, batch)
    results = Path(config["results"]) / f"{case}.npz"
    np.savez(results, logits=logits, changed=changed, rows=now[changed], **layers())
    say("checked", case=case, optimizer=optimizer, batch=batch)
    del now
    blocks = time_blocks(lambda n: step(pool[n % len(pool)]), config["checked_steps"], quick=config["quick"])
    say("timed", case=case, seconds=float(np.median(blocks)), blocks=len(blocks), fastest=min(blocks))
    return pool
