"""What each process of the tests does at first, forks included (tests/processes.py): it imports this."""

from __future__ import annotations

import gc
import os

from compiled_once import compile_once

from stoker.placement import planner
from stoker.placement.profile import Profile

compile_once()
# The planner weighs strategies by given costs: measuring takes a second of each process, and differs.
_COSTS = Profile(row_bytes=68, fetch=1e7, store=2e7, plan_row=1e-7, plan_miss=2e-7, plan_lookup=1e-8)
planner.measure_profile = lambda **_: _COSTS  # type: ignore[attr-defined]
# A disk that must write at once takes a millisecond or more each time, and no test cuts the power.
os.fsync = lambda file: os.fstat(file) and None  # type: ignore[assignment]
# A fork need not look through what it began with for garbage: with torch imported, that takes 0.4 s each time.
os.register_at_fork(after_in_child=gc.freeze)
