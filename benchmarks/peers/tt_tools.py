"""What the tensor-train contestants share: cores from a seed, the checked step and the clock; needs numpy only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["LR", "cores_of", "left_by", "run_cases", "time_calls"]

LR = 0.05


def cores_of(shape: dict[str, list[int]]) -> list[np.ndarray]:
    """[n_k, r_{k-1}, m_k * r_k] float32 each: the same numbers in every process. Rows have a variance near 1."""
    rows, cols, ranks = shape["rows"], shape["cols"], shape["ranks"]
    std = float(np.prod(ranks)) ** (-0.5 / len(rows))
    made = []
    for place, (n, m, left, right) in enumerate(zip(rows, cols, [1, *ranks], [*ranks, 1], strict=True)):
        rng = np.random.default_rng(100 + place)
        made.append(rng.standard_normal((n, left, m * right), dtype=np.float32) * np.float32(std))
    return made


def left_by(case: str) -> str:
    """Name of the file with what a case left."""
    return case.replace(" ", "_") + ".npz"


def time_calls(call: Callable[[int], float], *, quick: bool) -> tuple[float, float, int]:
    """Median and least seconds of a call, which takes its own time, and how many there were."""
    warm_up, measured, least = (0.1, 0.3, 2) if quick else (0.2, 0.6, 3)
    begin, times, number = time.perf_counter(), [], 0
    while True:
        taken = call(number)
        number += 1
        now = time.perf_counter() - begin
        if now >= warm_up and number > 1:
            times.append(taken)
        if now >= warm_up + measured and len(times) >= least:
            return float(np.median(times)), min(times), len(times)


def run_cases(config: dict[str, Any], make: Callable[[dict[str, Any], list[np.ndarray]], Any]) -> None:
    """Check, then time the lookup alone and the way back, for every case.

    ``make(case, cores)`` gives an object with ``ids(array)`` and ``gradient(array)``, which turn [B] ids and [B, D]
    gradients into its own form, ``lookup(ids)`` without a graph, ``forward(ids)`` with one, ``backward(out, grad)``,
    which updates the cores by SGD, ``array(out)``, and ``cores()``.
    """
    from worker_tools import say  # the harness reads this module too

    for case in config["cases"]:
        shape = case["shapes"][config["shape"]]
        pool = np.load(case["ids"], mmap_mode="r")
        grads = np.random.default_rng(7).standard_normal((4, pool.shape[1], case["dim"]), dtype=np.float32)
        before = cores_of(shape)
        subject = make({**case, **shape}, [core.copy() for core in before])
        ids = [subject.ids(np.ascontiguousarray(batch)) for batch in pool]
        wanted = [subject.gradient(grad) for grad in grads]
        name, results = case["name"], Path(config["results"])
        looked = subject.array(subject.lookup(ids[0]))
        out = subject.forward(ids[0])
        subject.backward(out, wanted[0])
        changes = {
            f"change{place}": after - old
            for place, (after, old) in enumerate(zip(subject.cores(), before, strict=True))
        }
        np.savez(results / left_by(name), looked=looked, out=subject.array(out), **changes)
        del before, changes, out
        for what in ("lookup", "backward"):
            say("checked", case=f"{name}, {what}")

        def lookup(number: int, subject=subject, ids=ids) -> float:
            batch = ids[number % len(ids)]
            start = time.perf_counter()
            subject.lookup(batch)
            return time.perf_counter() - start

        def back(number: int, subject=subject, ids=ids, wanted=wanted) -> float:
            out = subject.forward(ids[number % len(ids)])
            start = time.perf_counter()
            subject.backward(out, wanted[number % len(wanted)])
            return time.perf_counter() - start

        for what, call in (("lookup", lookup), ("backward", back)):
            median, least, count = time_calls(call, quick=config["quick"])
            say("timed", case=f"{name}, {what}", seconds=median, fastest=least, blocks=count)
        if hasattr(subject, "close"):
            subject.close(case)
