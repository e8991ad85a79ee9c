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

__all__ = ["argument", "embedding_case", "peak_memory", "say", "time_blocks", "versions"]

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


def time_blocks(step: Callable[[int], Any], first: int, *, quick: bool) -> list[float]:
    """Seconds per step of blocks of BLOCK steps, after a warm-up; ``step`` gets a running number."""
    warm_up, measured = (0.3, 1.0) if quick else (0.8, 4.0)
    number, blocks = first, []
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(BLOCK):
            step(number)
            number += 1
        stop = time.perf_counter()
        if start - begin >= warm_up:
            blocks.append((stop - start) / BLOCK)
        if stop - begin >= warm_up + measured and len(blocks) >= 3:
            return blocks


def embedding_case(
    config: dict[str, Any],
    batch: int,
    reset: Callable[[np.ndarray], Any],
    natural: Callable[[np.ndarray, np.ndarray], Any],
    gradient: Callable[[np.ndarray], Any],
    step: Callable[[Any, Any], Any],
    output: Callable[[Any], np.ndarray],
    weights: Callable[[], np.ndarray],
) -> None:
    """Run one batch size: set the initial weights, do the checked steps, leave what changed, then time.

    Args:
        reset: takes the initial weights [N, D] and clears the optimizer's state.
        natural: one batch's ids [B, F] and the tables' first rows, turned into the contestant's own input.
        gradient: a gradient [B, F, D], turned into the contestant's own.
        step: (input, gradient) -> lookup, backward and row update; returns what the lookup gave.
        output: the lookup's result as an array that holds [B, F, D].
        weights: the current weights [N, D].
    """
    source = Path(config["inputs"])
    initial = np.load(source / "weight.npy", mmap_mode="r")
    bases = np.concatenate([[0], np.cumsum(config["sizes"])[:-1]])
    pool = [natural(ids, bases) for ids in np.load(source / f"ids_{batch}.npy", mmap_mode="r")]
    grads = [gradient(np.ascontiguousarray(g)) for g in np.load(source / f"grad_{batch}.npy", mmap_mode="r")]
    reset(initial)
    checked = config["checked_steps"]
    looked = np.empty(0)
    for number in range(checked):
        result = step(pool[number], grads[number % len(grads)])
        if number == checked - 1:
            looked = output(result).copy()
    now = weights()
    changed = np.flatnonzero((now != initial).any(axis=1))
    results = Path(config["results"])
    np.save(results / f"rows_{batch}.npy", changed)
    np.save(results / f"weight_{batch}.npy", now[changed])
    np.save(results / f"output_{batch}.npy", looked)
    say("checked", case=f"batch {batch}")
    del now

    def numbered(number: int) -> None:
        step(pool[number % len(pool)], grads[number % len(grads)])

    blocks = time_blocks(numbered, checked, quick=config["quick"])
    say(
        "timed",
        case=f"batch {batch}",
        seconds=float(np.median(blocks)),
        blocks=len(blocks),
        fastest=min(blocks),
    )
