"""What every contestant of the preparation shares: a warm-up on a small log, the clock, the peak memory."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker_tools import peak_memory, say

__all__ = ["CATEGORICAL", "COLUMNS", "DENSE", "prepare_case"]

DENSE = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
COLUMNS = ["label", *DENSE, *CATEGORICAL]


def prepare_case(config: dict[str, Any], job: Callable[[Path, dict[str, int], Path], Any]) -> None:
    """Time ``job(log, rows of each split, out)`` once, after a small log that loads and compiles all."""
    out = Path(config["results"]) / "out"
    job(Path(config["small"]), config["small_rows"], out)
    shutil.rmtree(out)
    start = time.perf_counter()
    job(Path(config["log"]), config["rows"], out)
    seconds = time.perf_counter() - start
    case = f"{sum(config['rows'].values()):,} rows"
    say("checked", case=case)
    say("timed", case=case, seconds=seconds)
    # A worker process counts from its fork on, so at least as much as its parent had then, never more than its peak.
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    say("extra", peak=max(peak_memory(), workers))
