"""What both contestants of the feature benchmark share: steps, columns, the clock. The harness imports it, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "COLUMNS",
    "COMBINATIONS",
    "FOLDS",
    "KEYS",
    "MOST",
    "PROPERTIES",
    "SMOOTHING",
    "STEPS",
    "UNUSED",
    "Clock",
    "feature_case",
    "fold_of_rows",
]

#: the rows of Table 1 in "Accelerating Recommender System Training 15x with RAPIDS"
STEPS = (
    "read csv", "string comparison and masking", "string column split & expand", "assign string columns",
    "create data pair", "prepare for target encoding", "mean target encoding", "constrain string", "count items",
    "merge", "binary features from text", "difference features",
)  # fmt: skip
COLUMNS = {
    "user_id": "string", "session_id": "string", "timestamp": "int", "step": "int", "action_type": "string",
    "reference": "string", "platform": "string", "city": "string", "device": "string", "current_filters": "string",
    "impressions": "string", "prices": "string",
}  # fmt: skip
KEYS = ("current_filters", "city", "device", "user_id")  # each is encoded with the item
#: items are counted with each of these
COMBINATIONS = (("user_id", "session_id"), ("user_id", "session_id", "city"), ("user_id", "city"), ("city",))
#: columns of clicks that no feature of pairs reads
UNUSED = ("timestamp", "step", "action_type", "platform", "is_click_out")
FOLDS, SMOOTHING, MOST, PROPERTIES = 8, 20.0, 25, 157


class Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        assert step in STEPS
        start = time.perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start


def fold_of_rows(count: int) -> np.ndarray:
    """Fold of each row: splitmix64 of its number, so that both contestants deal the same."""

    def mix(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            h = values + np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return h ^ (h >> np.uint64(31))

    seed = mix(np.zeros(1, np.uint64))[0]
    return (mix(np.arange(count, dtype=np.uint64) ^ seed) % np.uint64(FOLDS)).astype(np.int64)


def feature_case(config: dict[str, Any], job: Callable[[Path, Clock, Path], int]) -> None:
    """Time ``job(folder of the log, clock, folder for results)`` after a small log that loads and compiles all."""
    from worker_tools import peak_memory, say

    out = Path(config["results"])
    (out / "small").mkdir()
    job(Path(config["small"]), Clock(), out / "small")
    (out / "out").mkdir()
    clock = Clock()
    pairs = job(Path(config["log"]), clock, out / "out")
    for step in STEPS:
        say("checked", case=step)
        say("timed", case=step, seconds=clock.seconds[step])
    say("checked", case="total")
    say("timed", case="total", seconds=sum(clock.seconds.values()))
    say("extra", peak=peak_memory(), pairs=pairs)
