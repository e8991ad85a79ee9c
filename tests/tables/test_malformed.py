"""Malformed lookups end in an error that says what is wrong, on every path, and never in a crash of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from campaigns import numbers, scaled

SEEDS = numbers(800)
PROCESSES = scaled(1)  # each imports and loads kernels, which takes longer than a thousand lookups


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PROCESSES))
def test_malformed_lookups_are_refused_and_crash_nothing(part: int) -> None:
    first, last = (SEEDS.start + len(SEEDS) * each // PROCESSES for each in (part, part + 1))
    program = Path(__file__).parent / "malformed.py"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(program), f"{first}:{last}"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_CHECK_": "3"},
    )  # fmt: skip
    at = done.stdout.split()[-1] if done.stdout else "none"
    assert done.returncode >= 0, f"seed {at}: {signal.Signals(-done.returncode).name}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == last - first
