"""kill -9 at any moment of updates: the same command again ends in the same files. ``make kills`` kills 200."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from campaigns import EFFORT
from days import first_run, write_days
from processes import run_python


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system lacks")
def test_a_killed_update_is_continued_to_the_same_files(tmp_path: Path) -> None:
    first, _, last = os.environ.get("STOKER_KILLS", f"0:{max(3, round(16 * EFFORT))}").partition(":")
    write_days(tmp_path / "logs", 2, rows=150)
    first_run(tmp_path)
    found = run_python(Path(__file__).parent / "dying_updates.py", tmp_path, first, last)
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(found.stdout.split()[-1]) >= (int(last) - int(first)) // 2
