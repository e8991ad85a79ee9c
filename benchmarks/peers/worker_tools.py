"""What every contestant's process shares: reading the inputs, checked steps, timed blocks, JSON lines.

Runs in each peer's own environment, so it needs numpy only.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["argument", "batches_of", "embedding_case", "feature_major", "peak_memory", "say", "time_blocks", "versions"]

BLOCK = 10  # steps whose time is taken together


def argument() -> dict[str, Any]:
    """The process's one argument."""
    return json.loads(sys.argv[1])


def say(event: str, **values: Any) -> None:
    """One JSON line to the harness."""
    print(json.dumps({"event": event, **values}), flush=True)


def versions(**packages: str) -> None:
    """Report what ran."""
    say("versions", versions={"python": platform.python_version(), "numpy": np.__version__, **packages})


def peak_memory() -> int:
    """Return the bytes of the largest resident set of this program.

    ``ru_maxrss`` would be wrong: it survives exec, so a small program started by a large one reports the large one's.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise SystemExit("peak memory needs /proc/self/status, which this system lacks")


def time_blocks(step: Callable[[int], Any], first: int, *, quick: bool, seconds: float | None = None) -> list[float]:
    """Return seconds per step of blocks of up to BLOCK steps, after a warm-up; ``step`` gets a running number.

    ``seconds`` is the time to measure for; None means 4, or 1 for a quick run.
    """
    measured = seconds or (1.0 if quick else 4.0)
    warm_up = min(0.8, 0.3 * measured)
    number, blocks = first, []
    begin = time.perf_counter()
    while True:
        start, begun = time.perf_counter(), number
        for _ in range(BLOCK):
            step(number)
            number += 1
            if time.perf_counter() - start > measured / 4:
                break  # long steps: blocks of fewer
        stop = time.perf_counter()
        if start - begin >= warm_up:
            blocks.append((stop - start) / (number - begun))
        if stop - begin >= warm_up + measured and len(blocks) >= 3:
            return blocks


def batches_of(case: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """All batches of a shape of the matrix: ids [L] and offsets [B * F + 1] each."""
    source = Path(case["inputs"])
    ids, bounds, offsets = (np.load(source / f"{name}.npy") for name in ("ids", "bounds", "offsets"))
    return [(ids[bounds[i] : bounds[i + 1]], offsets[i]) for i in range(len(offsets))]


def feature_major(ids: np.ndarray, offsets: np.ndarray, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn example-major ids [L] and offsets [B * F + 1] into int64 ids and offsets, table after table."""
    lengths = np.diff(offsets)
    bag = np.arange(len(lengths)).reshape(-1, features).T.reshape(-1)
    moved = lengths[bag]
    after = np.concatenate([[0], np.cumsum(moved)])
    place = np.arange(after[-1]) + np.repeat(offsets[bag] - after[:-1], moved)
    return ids[place].astype(np.int64), after


def embedding_case(
    config: dict[str, Any],
    case: dict[str, Any],
    reset: Callable[[list[np.ndarray]], Any],
    natural: Callable[[np.ndarray, np.ndarray], Any],
    gradient: Callable[[np.ndarray], Any],
    step: Callable[[Any, Any], Any],
    output: Callable[[Any], np.ndarray],
    weights: Callable[[], list[np.ndarray]],
) -> None:
    """Run one shape of the matrix: set the initial rows, do the checked steps, leave what changed, then time.

    Args:
        reset: takes the initial rows [N_t, D_t] of each table and builds the contestant.
        natural: one batch's ids [L] and offsets [B * F + 1], turned into the contestant's own input.
        gradient: a gradient [B, W], turned into the contestant's own.
        step: (input, gradient) -> lookup, backward and row update; returns what the lookup gave.
        output: the lookup's result as an array [B, W].
        weights: the current rows [N_t, D_t] of each table.
    """
    source = Path(case["inputs"])
    flat = np.load(source / "weight.npy", mmap_mode="r")
    counts = [rows * dim for rows, dim in zip(case["sizes"], case["dims"], strict=True)]
    cuts = np.split(flat, np.cumsum(counts)[:-1])
    initial = [part.reshape(-1, dim) for part, dim in zip(cuts, case["dims"], strict=True)]
    pool = [natural(*batch) for batch in batches_of(case)]
    grads = [gradient(grad) for grad in np.load(source / "grad.npy")]
    reset(initial)
    checked = config["checked_steps"]
    looked = np.empty(0)
    for number in range(checked):
        result = step(pool[number], grads[number % len(grads)])
        if number == checked - 1:
            looked = output(result).copy()
    left: dict[str, np.ndarray] = {"output": looked}
    for t, (now, before) in enumerate(zip(weights(), initial, strict=True)):
        changed = np.flatnonzero((now != before).any(axis=1))
        left |= {f"rows_{t}": changed, f"weight_{t}": now[changed]}
    np.savez(Path(config["results"]) / f"{source.name}.npz", **left)  # type: ignore[arg-type]
    say("checked", case=case["name"], left=f"{source.name}.npz")

    def numbered(number: int) -> None:
        step(pool[number % len(pool)], grads[number % len(grads)])

    blocks = time_blocks(numbered, checked, quick=config["quick"], seconds=config.get("seconds"))
    say(
        "timed",
        case=case["name"],
        seconds=float(np.median(blocks)),
        blocks=len(blocks),
        fastest=min(blocks),
    )
