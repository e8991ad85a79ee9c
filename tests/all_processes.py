"""What each process of the tests does at first, forks included (tests/processes.py): it imports this."""

from __future__ import annotations

import os

from compiled_once import compile_once

compile_once()
# A disk that must write at once takes a millisecond or more each time, and no test cuts the power.
os.fsync = lambda file: os.fstat(file) and None  # type: ignore[assignment]
