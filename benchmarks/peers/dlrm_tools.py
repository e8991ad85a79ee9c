"""What every contestant of the full DLRM step shares: inputs, checked steps, timed blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from worker_tools import batches_of, say, time_blocks

__all__ = ["case_name", "dlrm_case", "initial_rows", "start_of"]


def start_of(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Initial layers by name (b0.weight, ...)."""
    with np.load(Path(case["inputs"]) / "start.npz") as kept:
        return dict(kept)


def initial_rows(case: dict[str, Any]) -> np.ndarray:
    """[N, D], table after table."""
    return np.load(Path(case["inputs"]) / "rows.npy", mmap_mode="r")


def case_name(optimizer: str, case: dict[str, Any]) -> str:
    return f"{'SGD' if optimizer == 'sgd' else 'row-wise Adagrad'}: {case['name']}"


def dlrm_case(
    config: dict[str, Any],
    optimizer: str,
    case: dict[str, Any],
    natural: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Any],
    step: Callable[[Any], np.ndarray],
    layers: Callable[[], dict[str, np.ndarray]],
    rows: Callable[[], np.ndarray],
) -> list[Any]:
    """Check, then time one (optimizer, shape) of a freshly built model; returns the pool of inputs.

    Args:
        natural: (dense [B, 13], ids [L], offsets [B * F + 1], labels [B]) as the contestant's own input, made before
            the clock runs.
        step: one whole training step; returns the logits before the update.
        layers, rows: the weights now, rows as [N, D].
    """
    source = Path(case["inputs"])
    dense, labels = np.load(source / "dense.npy"), np.load(source / "labels.npy")
    ids = batches_of({"inputs": case["ids"]})
    pool = [natural(d, *i, y) for d, i, y in zip(dense, ids, labels, strict=True)]
    logits = np.empty(0)
    for number in range(config["checked_steps"]):
        logits = step(pool[number]).copy()
    now = rows()
    changed = np.flatnonzero((now != initial_rows(case)).any(axis=1))
    left = f"{optimizer}_{source.name}.npz"
    np.savez(Path(config["results"]) / left, logits=logits, changed=changed, rows=now[changed], **layers())
    name = case_name(optimizer, case)
    say("checked", case=name, optimizer=optimizer, shape=case["name"], left=left)
    del now
    first = config["checked_steps"]
    blocks = time_blocks(lambda n: step(pool[n % len(pool)]), first, quick=config["quick"], seconds=config["seconds"])
    say("timed", case=name, seconds=float(np.median(blocks)), blocks=len(blocks), fastest=min(blocks))
    return pool
